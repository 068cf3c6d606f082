"""Dive into Deep Learning 11.7.3: rows of the table of open models as arguments of one constructor."""

from dataclasses import replace
from fractions import Fraction
from functools import cache, partial
from inspect import signature

import jax
import jax.numpy as jnp
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accounting import census, huggingface, naming, params
from accounting.authorities import huggingface as modules
from accounting.census import Part
from accounting.ledger import case
from accounting.spec import Experts, FeedForward, Norm, Rotary
from model.jax_decoder import forward, init
from model.recipes import RECIPES, d2l_gpt
from model.torch_decoder import Decoder
from tests import strategies

#: Rows of table 11.7.1, and the published model that stands for each.
TABLE = {
    "Mistral 7B": "mistral-7b",
    "Llama 3": "llama-3.1-8b",
    "Qwen3": "qwen3-32b",
    "OLMo 2/3": "olmo-3.1-32b",
    "DeepSeek-V3": "deepseek-v3",
    "Gemma 3": "gemma-3-27b",
    "GPT-OSS": "gpt-oss-120b",
}
MODERN = RECIPES["recipe-llama-3"]
_SHARED = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": round(8 * 256 / 3),
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
#: The four miniatures of the chapter as each family's own config.
CONFIGS = {
    "recipe-gpt2": {
        "model_type": "gpt2",
        "vocab_size": 1024,
        "n_positions": 1024,
        "n_embd": 256,
        "n_layer": 6,
        "n_head": 8,
    },
    "recipe-mistral-7b": {"model_type": "mistral", **_SHARED},
    "recipe-llama-3": {"model_type": "llama", **_SHARED},
    "recipe-qwen3": {"model_type": "qwen3", **_SHARED},
}
QK_NORMS = ("q_norm.weight", "k_norm.weight")


@cache
def published(name):
    """Hugging Face's module of a published config."""
    return modules.build(huggingface.published_config(name))


def shapes(module, *without):
    """Names and shapes of a module's parameters, but for the names that end in ``without``."""
    named = module.named_parameters()
    return {name: tuple(tensor.shape) for name, tensor in named if not name.endswith(without)}


def scalars(module, *without):
    return sum(torch.Size(shape).numel() for shape in shapes(module, *without).values())


def decoder(spec):
    with torch.device("meta"):
        return Decoder(spec)


def changed(spec, **fields):
    """The decoder with fields of every attention replaced."""
    blocks = (replace(block, attention=replace(block.attention, **fields)) for block in spec.blocks)
    return replace(spec, blocks=tuple(blocks))


def outside(names, *parts):
    """The names that do not belong to one of these parts of a layer."""
    return {name for name in names if not any(part in name for part in parts)}


@pytest.mark.claim("d2l.intro.boundary_rows")
def test_rows_are_constructor_arguments(claim):
    """A row is an argument list if its layers hold the tensors that a layer of the constructor holds."""
    ours = set(shapes(modules.build(CONFIGS["recipe-llama-3"]).model.layers[-1]))
    layers = {row: set(shapes(published(name).base_model.layers[-1])) for row, name in TABLE.items()}
    factories = ("self_attn.", "mlp.")
    by_flags = {row for row, names in layers.items() if names == ours}
    by_factories = {row for row, names in layers.items() if outside(names, *factories) == outside(ours, *factories)}
    claim.holds(
        by_flags == {"Mistral 7B", "Llama 3"} and by_factories - by_flags == {"Qwen3", "DeepSeek-V3", "GPT-OSS"},
        "Mistral 7B and Llama 3 by flags; Qwen3, DeepSeek-V3 and GPT-OSS with another attention or feed-forward",
    )
    claim.otherwise(by_factories == set(TABLE), f"{len(TABLE) - len(by_factories)} of {len(TABLE)} rows by no argument")


@pytest.mark.parametrize(
    "name",
    [
        case("d2l.recipes.gpt2", "recipe-gpt2"),
        case("d2l.recipes.mistral", "recipe-mistral-7b"),
        case("d2l.recipes.llama3", "recipe-llama-3"),
        case("d2l.recipes.qwen3", "recipe-qwen3"),
    ],
)
def test_miniature(claim, name):
    """Each miniature has the parameters of its family's own module at that size, QK-norms left out."""
    assert scalars(decoder(RECIPES[name])) == params.count(RECIPES[name]).unique
    claim.measured(params.count(RECIPES[name]).unique, observed=scalars(modules.build(CONFIGS[name]), *QK_NORMS))


@pytest.mark.claim("d2l.recipes.same_args")
def test_three_modern_rows_are_one_argument_list(claim):
    """At this size Mistral, Llama 3 and Qwen3 without its QK-norm are one and the same list of tensors."""
    modern = ("recipe-mistral-7b", "recipe-llama-3", "recipe-qwen3")
    expected = {
        tensor.name: tensor.shape for tensor in naming.published(census.take(d2l_gpt(1024, kv_heads=2)), "llama")
    }
    found = [shapes(modules.build(CONFIGS[name]), *QK_NORMS) for name in modern]
    claim.holds(
        all(RECIPES[name] == d2l_gpt(1024, kv_heads=2) for name in modern) and all(each == expected for each in found),
        f"one specification, and {len(expected)} tensors of the same names and shapes in the three families' modules",
    )


@pytest.mark.claim("d2l.recipes.shape")
def test_miniatures_map_tokens_to_logits(claim):
    """Each miniature maps token ids (2, 16) to logits (2, 16, 1024), in PyTorch and in JAX."""
    found = set()
    for spec in {RECIPES[name] for name in CONFIGS}:
        found.add(tuple(Decoder(spec)(torch.zeros(2, 16, dtype=torch.long)).shape))
        tree = jax.eval_shape(partial(init, spec), jax.random.key(0))
        found.add(jax.eval_shape(partial(forward, spec), tree, jnp.zeros((2, 16), dtype=jnp.int32)).shape)
    claim.holds(found == {(2, 16, 1024)}, f"{found} in both")


@pytest.mark.claim("d2l.recipes.gqa_saving")
def test_grouping_saves_keys_and_values(claim):
    """Fewer key/value heads save L 2 d (d - n_kv d_h) weights, and nothing else."""

    @given(config=strategies.llama())
    def holds(config):
        config |= {"attention_bias": False, "head_dim": None}
        full = config | {"num_key_value_heads": config["num_attention_heads"]}
        spec = huggingface.read(config).spec
        attention = spec.blocks[0].attention
        saved = len(spec.blocks) * 2 * spec.width * (spec.width - attention.kv_heads * attention.head_dim)
        assert saved == params.count(huggingface.read(full).spec).unique - params.count(spec).unique
        assert saved == modules.unique(modules.build(full)) - modules.unique(modules.build(config))

    holds()
    config = CONFIGS["recipe-llama-3"]
    full = modules.build(config | {"num_key_value_heads": 8})
    claim.measured(
        params.count(d2l_gpt(1024)).unique - params.count(MODERN).unique,
        observed=scalars(full) - scalars(modules.build(config)),
    )


@pytest.mark.claim("d2l.recipes.gqa_no_bias")
def test_grouped_attention_has_no_biases(claim):
    """A block's grouped attention holds 2 d^2 + 2 d n_kv d_h numbers and no bias, here and as deployed."""
    layers = [modules.build(CONFIGS[name]).model.layers[0] for name in CONFIGS if name != "recipe-gpt2"]
    (observed,) = {scalars(layer.self_attn, *QK_NORMS) for layer in layers}
    assert scalars(decoder(MODERN).blocks[0].attention) == observed
    claim.measured(params.by_part(MODERN)[Part.ATTENTION].unique // len(MODERN.blocks), observed=observed)
    deployed = [name for row in ("Mistral 7B", "Llama 3", "Qwen3") for name in shapes(published(TABLE[row]))]
    biased = params.count(changed(MODERN, bias=True, output_bias=True)).unique
    claim.holds(
        not any(name.endswith(".bias") for name in deployed) and Part.BIAS not in params.by_part(MODERN),
        f"no bias in the deployed models or in the miniature (with them it would have {biased:,} parameters)",
    )


def families():
    """The families of the miniatures, and of the rows of the table."""
    miniatures = {config["model_type"] for config in CONFIGS.values()}
    rows = {huggingface.load(name).model_type for name in TABLE.values()}
    assert len(rows) == len(TABLE)
    return miniatures, rows


@pytest.mark.claim("d2l.recipes.four_rows_errata")
def test_three_rows_of_the_table_are_instantiated(claim):
    """Of the four miniatures three are of the table: GPT-2 is none of its rows."""
    miniatures, rows = families()
    instantiated = len(miniatures & rows)
    claim.measured(instantiated)
    claim.right(instantiated)


@pytest.mark.claim("d2l.recipes.two_left_errata")
def test_four_rows_of_the_table_are_left_out(claim):
    """OLMo 2/3, DeepSeek-V3, Gemma 3 and GPT-OSS have no miniature."""
    miniatures, rows = families()
    left = len(rows - miniatures)
    claim.measured(left)
    claim.right(left)


@pytest.mark.claim("d2l.recipes.qwen_ratio_errata")
def test_qwen3_groups_more_queries_than_its_miniature(claim):
    """Qwen3 has 8 or 16 query heads a key/value head, its miniature 4."""

    def ratio(spec, module):
        attention, built = spec.blocks[0].attention, module.model.layers[0].self_attn
        predicted = Fraction(attention.heads, attention.kv_heads)
        assert predicted == Fraction(built.q_proj.out_features, built.k_proj.out_features)
        return predicted

    config = CONFIGS["recipe-qwen3"]
    miniature = ratio(RECIPES["recipe-qwen3"], modules.build(config))
    dense, sparse = (ratio(huggingface.load(name).spec, published(name)) for name in ("qwen3-32b", "qwen3-235b-a22b"))
    one_head = params.count(d2l_gpt(1024, kv_heads=1)).unique
    one_head_built = scalars(modules.build(config | {"num_key_value_heads": 1}), *QK_NORMS)
    claim.measured(miniature)
    claim.holds(miniature in (dense, sparse), f"{dense} in the dense row and {sparse} in the sparse one")
    claim.right(dense, sparse, one_head, observed=(dense, sparse, one_head_built))


@pytest.mark.claim("d2l.recipes.flags_not_reached")
def test_windows_and_bases_are_no_arguments_and_no_weights(claim):
    """The constructor knows no window, RoPE base or number of experts; the first two change no tensor."""

    @given(window=st.integers(1, 4096), base=st.floats(2.0, 1e7))
    def holds(window, base):
        spec = changed(MODERN, window=window, rotary=Rotary(base=base, dim=32))
        assert census.take(spec).weights == census.take(MODERN).weights
        config = CONFIGS["recipe-mistral-7b"] | {"sliding_window": window, "rope_theta": base}
        assert shapes(modules.build(config)) == expected

    expected = shapes(modules.build(CONFIGS["recipe-mistral-7b"]))
    holds()
    names = " ".join(signature(d2l_gpt).parameters)
    reached = [word for word in ("window", "base", "theta", "expert") if word in names]
    configs = [
        {"model_type": "mixtral", **_SHARED, "num_experts_per_tok": 2, "num_local_experts": experts}
        for experts in (4, 8)
    ]
    four, eight = (modules.unique(modules.build(config)) for config in configs)
    assert [four, eight] == [params.count(huggingface.read(config).spec).unique for config in configs]
    claim.holds(
        not reached and four < eight,
        f"{params.count(MODERN).unique:,} with any window and base; {four:,} with 4 experts and {eight:,} with 8",
    )


@pytest.mark.claim("d2l.recipes.qk_norm_seam")
def test_qk_norm_is_two_gains_of_a_head_in_attention(claim):
    """Another attention with a norm of queries and keys adds 2 d_h numbers a layer, and nothing elsewhere."""

    @given(config=strategies.qwen3())
    def holds(config):
        spec, module = huggingface.read(config).spec, modules.build(config)
        added = params.count(spec).unique - params.count(changed(spec, qk_norm=None)).unique
        assert added == modules.unique(module) - scalars(module, *QK_NORMS)
        assert added == len(spec.blocks) * 2 * spec.blocks[0].attention.head_dim

    holds()
    spec = changed(MODERN, qk_norm=Norm())
    with_norm, without = shapes(decoder(spec)), shapes(decoder(MODERN))
    added = params.count(spec).unique - params.count(MODERN).unique
    assert added == scalars(decoder(spec)) - scalars(decoder(MODERN))
    assert added == modules.unique(modules.build(CONFIGS["recipe-qwen3"])) - modules.unique(
        modules.build(CONFIGS["recipe-llama-3"])
    )
    claim.holds(
        added == 6 * 2 * 32
        and without.items() <= with_norm.items()
        and not outside(with_norm.keys() - without, ".attention."),
        f"{added} more, all in attention",
    )


@pytest.mark.claim("d2l.recipes.ffn_seam")
def test_experts_replace_the_feed_forward_and_nothing_else(claim):
    """Swapping the feed-forward for experts leaves every other tensor as it was."""

    def kept(spec):
        return {
            weight.name: weight.shape for weight in census.take(spec).weights if ".feed_forward." not in weight.name
        }

    def kept_in(module):
        return {name: shape for name, shape in shapes(module).items() if ".mlp." not in name}

    @given(config=strategies.mistral(), experts=st.integers(1, 6))
    def holds(config, experts):
        other = config | {"model_type": "mixtral", "num_local_experts": experts, "num_experts_per_tok": 1}
        assert kept(huggingface.read(config).spec) == kept(huggingface.read(other).spec)
        assert kept_in(modules.build(config)) == kept_in(modules.build(other))

    holds()
    layer = Experts(experts=8, active=2, expert=FeedForward(width=683, activation="silu", gated=True))
    sparse = replace(MODERN, blocks=tuple(replace(block, feed_forward=layer) for block in MODERN.blocks))
    dense_8x7b, sparse_8x7b = (kept_in(published(name)) for name in ("mistral-7b", "mixtral-8x7b"))
    claim.holds(
        kept(MODERN) == kept(sparse) and dense_8x7b == sparse_8x7b,
        f"{len(dense_8x7b)} tensors outside the feed-forwards are the same in Mistral 7B and Mixtral 8x7B",
    )
