"""Dive into Deep Learning 11.7.3.1: what the columns of the recipe table are in weights, keys and caches."""

from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.masking_utils import sliding_window_causal_mask_function
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from accounting import cache, census, flops, huggingface, pairs, params
from accounting.authorities import huggingface as modules
from accounting.spec import Attention
from model.torch_attention import causal_mask, eager_attention
from tests import recipes_table as table
from tests import strategies

FEWER = settings(max_examples=settings.default.max_examples // 5)  # each one builds modules
WINDOWED = ("mistral", "gemma3_text", "olmo3", "gpt_oss")
#: What softmax and a sum of a few float64 numbers below 1 may be off: a dozen roundings of 1.1e-16.
ROUNDING = 1e-14


def parts(spec, part):
    """Scalars of the first layer's tensors whose names begin so."""
    weights = census.take(spec).weights
    return sum(weight.scalars for weight in weights if weight.layer == 0 and f".{part}" in weight.name)


def scalars(module, *ends):
    """Scalars of a module's parameters, or of those whose names end so."""
    return sum(tensor.numel() for name, tensor in module.named_parameters() if name.endswith(ends or ("",)))


def check_sizes(claim, sizes, configs, models):
    """Have the formula, our count and the module's agree, all of which ``sizes`` has of a config."""

    @FEWER
    @given(configs)
    def everywhere(config):
        table.one(sizes(config))

    everywhere()
    found = {model: sizes(table.config(model)) for model in models}
    shown = ", ".join(f"{numbers[0]:,} in {model}" for model, numbers in found.items())
    claim.holds(all(len(set(numbers)) == 1 for numbers in found.values()), shown)


@pytest.mark.claim("d2l.table.sinks_params")
def test_sinks_are_a_number_a_head(claim):
    """Learned sinks are L n_q numbers."""

    def sizes(config):
        spec, module = huggingface.read(config).spec, modules.build(config)
        ours = sum(weight.scalars for weight in census.take(spec).weights if weight.name.endswith("attention.sinks"))
        return len(spec.blocks) * spec.blocks[0].attention.heads, ours, scalars(module, "self_attn.sinks")

    check_sizes(claim, sizes, strategies.configs("gpt_oss"), table.DOCUMENT["gpt_oss"]["models"])


def attention_rows(scores_T, sink=None):
    """A query's attention to each of T keys, as our decoder mixes values that are unit vectors."""
    query, keys = torch.ones(1, 1, 1, 1, dtype=torch.float64), scores_T[None, None, :, None]
    everything = torch.ones(1, len(scores_T), dtype=torch.bool)
    values = torch.eye(len(scores_T), dtype=torch.float64)[None, None]
    return eager_attention(query, keys, values, everything, 1.0, sinks_N=sink)[0, 0, 0]


@pytest.mark.claim("d2l.table.sinks_rows")
def test_a_sink_takes_its_share(claim):
    """With a sink a row of attention sums to 1 less the sink's share of the softmax, without one to 1."""
    logits = st.floats(-8.0, 8.0)

    @given(st.lists(logits, min_size=1, max_size=8), logits)
    def everywhere(scores, sink):
        scores_T, sink_N = (torch.tensor(value, dtype=torch.float64) for value in (scores, [sink]))
        ours = attention_rows(scores_T, sink_N)
        layer = SimpleNamespace(num_key_value_groups=1, sinks=sink_N, training=False)
        query, keys = torch.ones(1, 1, 1, 1, dtype=torch.float64), scores_T[None, None, :, None]
        theirs = eager_attention_forward(layer, query, keys, keys, None, 1.0)[1][0, 0, 0]
        share = sink_N.exp() / (scores_T.exp().sum() + sink_N.exp())
        assert (ours - theirs).abs().max() <= ROUNDING
        assert (ours.sum() - (1 - share)).abs() <= ROUNDING
        assert ours.sum() < 1
        assert (attention_rows(scores_T).sum() - 1).abs() <= ROUNDING

    everywhere()
    row = attention_rows(torch.zeros(3, dtype=torch.float64), torch.zeros(1, dtype=torch.float64))
    claim.holds(abs(row.sum().item() - 0.75) <= ROUNDING, "three scores and a sink of 0: the row sums to 3/4")


@pytest.mark.claim("d2l.table.window_keys")
def test_a_window_caps_what_a_query_sees(claim):
    """A token sees min(t, W) keys, on average (n + 1)/2 where the window is no shorter than the sequence."""

    @given(st.integers(1, 80), st.integers(1, 100))
    def everywhere(tokens, window):
        positions = torch.arange(tokens)
        theirs = sliding_window_causal_mask_function(window)(0, 0, positions[:, None], positions).sum()
        ours = pairs.model(tokens, window)
        assert ours == sum(min(t, window) for t in range(1, tokens + 1)) == theirs
        assert ours == causal_mask(tokens, tokens, window, torch.device("cpu")).sum()
        assert (2 * ours == tokens * (tokens + 1)) == (window >= tokens)

    everywhere()
    mean = Fraction(pairs.model(64, 16), 64)
    claim.holds(mean == Fraction("14.125"), f"{float(mean)} of 64 tokens with a window of 16, {float(65 / 2)} without")


@pytest.mark.claim("d2l.table.window_no_params")
def test_windows_change_no_weight(claim):
    """With another window, or another pattern of windows, every tensor is as it was."""

    @FEWER
    @given(strategies.configs(*WINDOWED), st.integers(1, 5000))
    def everywhere(config, window):
        other = config | {"sliding_window": window}
        if config["model_type"] != "mistral":
            other["layer_types"] = ["sliding_attention"] * config["num_hidden_layers"]
        first, second = (huggingface.read(each).spec for each in (config, other))
        assert census.take(first).weights == census.take(second).weights
        assert modules.published(modules.build(config)) == modules.published(modules.build(other))

    everywhere()
    for model in ("mistral-7b", "gpt-oss-20b"):
        plain, other = table.config(model), table.config(model) | {"sliding_window": 7}
        ours, theirs = huggingface.read(other), modules.published(modules.build(other))
        same = census.take(ours.spec).weights == census.take(table.spec(model)).weights
        claim.holds(
            same and theirs == modules.published(table.module(model)),
            f"{len(theirs)} tensors of {model} with windows of {plain['sliding_window']:,} and 7",
        )


def latent_formula(width, attention):
    """The chapter's low-rank paths: to queries, to keys and values with the shared rotated slice, and the output."""
    heads, query_rank, kv_rank = attention.heads, attention.query_rank, attention.kv_rank
    nope, rope, value = attention.nope_head_dim, attention.rope_head_dim, attention.value_head_dim
    queries = width * query_rank + query_rank + query_rank * heads * (nope + rope)
    keys = width * (kv_rank + rope) + kv_rank + kv_rank * heads * (nope + value)
    return queries + keys + heads * value * width


@pytest.mark.claim("d2l.table.mla_params")
def test_weights_of_latent_attention(claim):
    """A layer's latent attention is two low-rank paths with their norms, a shared rotated slice, and the output."""

    def sizes(config):
        spec, layer = huggingface.read(config).spec, modules.build(config).base_model.layers[0]
        return latent_formula(spec.width, spec.blocks[0].attention), parts(spec, "attention."), scalars(layer.self_attn)

    two_paths = strategies.configs("deepseek_v3").map(
        lambda config: config | {"attention_bias": False, "q_lora_rank": config["q_lora_rank"] or 3}
    )
    check_sizes(claim, sizes, two_paths, ["deepseek-v3", "kimi-k2"])
    _, ours, theirs = sizes(table.config("deepseek-v3"))
    claim.measured(ours, observed=theirs)


@pytest.mark.claim("d2l.table.mla_cache_ratio")
def test_latent_cache_is_smaller(claim):
    """A layer of DeepSeek-V3 keeps 576 numbers a token, for 32,768 of as many full keys and values of 128."""
    latent = table.spec("deepseek-v3").blocks[0].attention
    full = Attention(heads=latent.heads, kv_heads=latent.heads, head_dim=latent.value_head_dim)
    kept = cache.scalars(latent), cache.scalars(full)
    layer = table.module("deepseek-v3").base_model.layers[0].self_attn
    claim.measured(kept, observed=(layer.kv_a_proj_with_mqa.out_features, layer.kv_b_proj.out_features))
    expanded = cache.scalars(latent, expanded=True)
    claim.holds(
        kept[1] > 50 * kept[0],
        f"{kept[1] / kept[0]:.1f} times fewer, {expanded / kept[0]:.1f} with each head's rotated part of a key",
    )


@pytest.mark.claim("d2l.table.geglu_count")
def test_geglu_costs_what_swiglu_does(claim):
    """With a GELU for the SiLU in its gate a feed-forward has the same tensors, 3 d d_ff numbers, and FLOPs."""

    @FEWER
    @given(strategies.configs("gemma3_text"))
    def everywhere(config):
        kinds = [config | {"hidden_activation": name} for name in ("gelu_pytorch_tanh", "silu")]
        geglu, swiglu = (huggingface.read(kind).spec for kind in kinds)
        assert census.take(geglu) == census.take(swiglu)
        assert flops.training(geglu, seq=3) == flops.training(swiglu, seq=3)
        built = [modules.build(kind).base_model.layers[0].mlp for kind in kinds]
        layer = geglu.blocks[0].feed_forward
        assert {scalars(mlp) for mlp in built} == {parts(geglu, "feed_forward.")} == {3 * geglu.width * layer.width}
        assert type(built[0].act_fn) is not type(built[1].act_fn)

    everywhere()
    count = parts(table.spec("gemma-3-27b"), "feed_forward.")
    claim.holds(count == scalars(table.module("gemma-3-27b").base_model.layers[0].mlp), f"{count:,} in Gemma 3 27B")


@pytest.mark.claim("d2l.table.gemma_norms")
def test_gains_of_a_gemma_block(claim):
    """A block of Gemma 3 has 4 d + 2 d_h gains."""

    def sizes(config):
        spec, layer = huggingface.read(config).spec, modules.build(config).base_model.layers[0]
        ours = params.by_part(census.take(spec).where(lambda tensor: tensor.layer == 0))[census.Part.NORM].unique
        return 4 * spec.width + 2 * spec.blocks[0].attention.head_dim, ours, scalars(layer, "norm.weight")

    check_sizes(claim, sizes, strategies.configs("gemma3_text"), table.DOCUMENT["gemma3"]["models"])


@pytest.mark.claim("d2l.table.qk_norm_forms")
def test_forms_of_qk_norm(claim):
    """QK-norm has 2 d_h gains a layer in Qwen3 and Gemma 3, and (n_q + n_kv) d_h in OLMo."""

    def sizes(config):
        spec, layer = huggingface.read(config).spec, modules.build(config).base_model.layers[0]
        attention = spec.blocks[0].attention
        heads = attention.heads + attention.kv_heads if config["model_type"].startswith("olmo") else 2
        ours = parts(spec, "attention.query_norm") + parts(spec, "attention.key_norm")
        return heads * attention.head_dim, ours, scalars(layer, "q_norm.weight", "k_norm.weight")

    configs = strategies.configs("qwen3", "qwen3_moe", "gemma3_text", "olmo2", "olmo3")
    check_sizes(claim, sizes, configs, ("qwen3-32b", "gemma-3-1b", "olmo-2-7b", "olmo-3.1-32b"))


@pytest.mark.claim("d2l.table.config_totals")
def test_totals_of_the_rows(claim):
    """Each model of the rows has the parameters that its config implies, to the last."""
    listed = ["mistral-7b", "llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b", "qwen3-32b", "qwen3-235b-a22b"]
    listed += ["olmo-2-7b", "olmo-3.1-32b", "deepseek-v3", "gemma-3-1b", "gpt-oss-120b", "gpt-oss-20b"]
    claim.measured(
        [params.count(table.spec(model)).unique for model in listed],
        observed=[modules.unique(table.module(model)) for model in listed],
    )
