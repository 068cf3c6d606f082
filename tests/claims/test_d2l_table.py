"""Dive into Deep Learning 11.7.3.1: the recipe table of open models, cell by cell, and what the text reads off it."""

import json
from fractions import Fraction
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from torch.nn import functional as F
from transformers import Llama4TextConfig
from transformers.models.llama4.modeling_llama4 import Llama4TextAttention, Llama4TextRotaryEmbedding

from accounting import huggingface, params, published
from accounting.authorities import huggingface as modules
from accounting.ledger import case
from accounting.spec import Experts
from model.torch_decoder import Decoder
from tests import families, strategies
from tests import recipes_table as table

FEW = settings(max_examples=settings.default.max_examples // 20)  # each one runs models


def is_number(fact):
    return isinstance(fact, int | float) and not isinstance(fact, bool)


def shown(models, facts):
    """Facts about models for a reader."""
    return f"{', '.join(models)}: " + ", ".join(f"{name} {fact}" for name, fact in facts.items())


def seen(models, column, names):
    """What is so of these models, for a reader."""
    found = {model: {name: table.facts(model, column).get(name, "none") for name in names} for model in models}
    return "; ".join(shown([model], facts) for model, facts in found.items())


def is_so(models, column, facts):
    return all(table.facts(model, column).get(name) == fact for model in models for name, fact in facts.items())


def numbers(readers, models_of, row, column):
    """The numbers of a cell's statements in their order, as ``readers`` see those models, who must agree on each."""
    return [
        table.one(readers[column](models_of(model))[name] for model in models)
        for models, facts in table.statements(row, column, "says")
        for name, fact in facts.items()
        if is_number(fact)
    ]


def rows_where(column, fact, values):
    """The document's rows of whose models all have one of these values."""
    return {
        id
        for id, row in table.DOCUMENT.items()
        if all(table.facts(model, column)[fact] in values for model in row["models"])
    }


def models():
    """Models of the document's rows."""
    return [model for row in table.DOCUMENT.values() for model in row["models"]]


def named(rows):
    return ", ".join(table.ROWS[row]["name"] for row in rows)


@pytest.mark.parametrize("column", table.FROM_SPEC)
@pytest.mark.parametrize("row", table.ROWS)
def test_columns_are_complete(row, column):
    """A row's column says of each of its models what the spec and Hugging Face's module say, and nothing less."""
    for model in table.ROWS[row]["models"]:
        assert table.complete(row, column, model) == table.facts(model, column)


@pytest.mark.parametrize(
    ("row", "column"),
    [case(f"d2l.table.{row}.{column}", row, column) for row in table.DOCUMENT for column in table.FROM_SPEC],
)
def test_cell(claim, row, column):
    """What a cell of the table says is so of the models that it is about, and of no more where it has a condition."""
    if claim.record.printed:
        predicted = numbers(table.FROM_SPEC, table.spec, row, column)
        claim.measured(predicted, observed=numbers(table.FROM_MODULE, table.module, row, column))
    for models, facts in table.statements(row, column, "says"):
        words = {name: fact for name, fact in facts.items() if not is_number(fact)}
        claim.holds(is_so(models, column, words), shown(models, facts))
    for models, facts in table.statements(row, column, "overstates"):
        claim.otherwise(is_so(models, column, facts), seen(models, column, facts))


def drops(fields):
    """The rates of dropout in a config, by their fields."""
    nested = [drops(value) for value in fields.values() if isinstance(value, dict)]
    rates = {name: rate for name, rate in fields.items() if name.endswith(("dropout", "pdrop"))}
    return {name: rate for part in (rates, *nested) for name, rate in part.items()}


def built_drops(module):
    """The rates above 0 at which the parts of a module drop, attention among them."""
    rates = [
        getattr(part, name) for part in module.modules() for name in ("attention_dropout", "p") if hasattr(part, name)
    ]
    assert rates
    return {rate for rate in rates if rate}


@cache
def dropout_of(path):
    """The rates above 0 that a published file names, and those of the module built from it."""
    fields = json.loads(path.read_bytes())
    assert huggingface.read(fields).spec == huggingface.load(path.stem).spec
    return {rate for rate in drops(fields).values() if rate}, built_drops(modules.build(fields))


def without_dropout(claim, model):
    """Whether neither a model's published file nor the module built from it drops anything."""
    if model in published.names():
        return dropout_of(claim.data(f"configs/{model}.json")) == (set(), set())
    return drops(table.config(model)) == {"attention_dropout": 0.0} and not built_drops(table.module(model))


@pytest.mark.parametrize("row", [case(f"d2l.table.{row}.dropout", row) for row in table.DOCUMENT])
def test_no_dropout_in_a_row(claim, row):
    """The published configs of a row's models name no rate of dropout above 0, and their modules have none."""
    models = table.ROWS[row]["models"]
    claim.holds(all(without_dropout(claim, model) for model in models), f"no rate above 0 in {', '.join(models)}")


@pytest.mark.claim("d2l.table.no_dropout")
def test_no_dropout_in_any_row(claim):
    """No model of the table drops anything, and GPT-2, before them, does."""
    assert dropout_of(claim.data("configs/gpt2.json")) == ({0.1}, {0.1})
    found = [model for model in models() if without_dropout(claim, model)]
    claim.holds(found == models(), f"no rate above 0 in {len(found)} models; 0.1 in GPT-2")


@pytest.mark.claim("d2l.ex3.kimi_k2")
def test_kimi_k2(claim):
    """Kimi K2 has DeepSeek-V3's latent attention and block with half of the heads, and 384 experts."""
    says = ("kv_rank", "rotated", "base", "factor", "experts", "shared", "active")
    columns = ("attention", "positions", "moe")

    def found(readers, model_of):
        known = {name: fact for column in columns for name, fact in readers[column](model_of("kimi-k2")).items()}
        return [known[name] for name in says]

    claim.measured(found(table.FROM_SPEC, table.spec), observed=found(table.FROM_MODULE, table.module))
    for column in table.FROM_SPEC:
        claim.holds(
            table.complete("kimi_k2", column, "kimi-k2") == table.facts("kimi-k2", column),
            table.ROWS["kimi_k2"][column]["text"],
        )
    same = table.facts("kimi-k2", "attention") | {"heads": 128} == table.facts("deepseek-v3", "attention")
    claim.holds(same and without_dropout(claim, "kimi-k2"), "no dropout; 64 heads for DeepSeek-V3's 128")


@pytest.mark.claim("d2l.table.seven_rows")
def test_seven_families(claim):
    """The table has seven rows, each of a family that no other row is of."""
    families = [{type(table.module(model)) for model in row["models"]} for row in table.DOCUMENT.values()]
    assert sum(map(len, families)) == len(set.union(*families))
    claim.measured(len(table.DOCUMENT))


@pytest.mark.claim("d2l.table.rms_everywhere")
def test_rms_norms_everywhere(claim):
    """Every norm of every row divides by the root of the mean square and subtracts no mean."""
    classes = {
        type(part)
        for model in models()
        for part in table.module(model).modules()
        if type(part).__name__.endswith("Norm")
    }
    constant = torch.full((8,), 3.0)
    # LayerNorm makes a constant vector 0, RMSNorm makes it 1, but for an eps of 1e-5 at most beside its square of 9.
    assert F.layer_norm(constant, (8,)).abs().max() == 0
    found = [norm for norm in classes if torch.allclose(norm(8)(constant), torch.ones(8), rtol=0, atol=1e-6)]
    claim.holds(
        rows_where("norm", "kind", {"RMSNorm"}) == set(table.DOCUMENT) and set(found) == classes,
        f"{len(found)} classes of norms in {len(models())} models, all RMSNorm",
    )


@pytest.mark.claim("d2l.table.prenorm_almost")
def test_all_but_olmo_have_a_pre_norm(claim):
    """Six of the seven families normalise what attention and feed-forward read; OLMo what they write."""
    pre = rows_where("norm", "placement", {"pre", "pre and post"})
    claim.holds(
        set(table.DOCUMENT) - pre == {"olmo"},
        f"{len(pre)} of {len(table.DOCUMENT)} rows; not {named(pre ^ set(table.DOCUMENT))}",
    )


@pytest.mark.claim("d2l.table.qk_2025")
def test_qk_norms_come_with_2025(claim):
    """Queries and keys are normalised in three of the four rows of 2025, and in no row before."""
    with_norm = rows_where("norm", "qk_norm", {True})
    assert rows_where("norm", "qk_norm", {False}) == set(table.DOCUMENT) - with_norm
    of_2025 = {row for row in table.DOCUMENT if table.ROWS[row]["name"].endswith("25)")}
    claim.holds(
        with_norm <= of_2025 and len(with_norm) > len(of_2025) / 2,
        f"{named(sorted(with_norm))}; of 2025 without: {named(of_2025 - with_norm)}",
    )


@pytest.mark.claim("d2l.table.olmo_identity_path")
def test_olmo_keeps_the_identity_path(claim):
    """With the gains of its norms at zero a layer of OLMo hands its input on, bit for bit, and else it does not."""

    @torch.no_grad()
    def handed_on(config, gain):
        spec = huggingface.read(config).spec
        module, decoder = modules.build(config, device="cpu"), Decoder(spec)
        for name, tensor in (*module.named_parameters(), *decoder.named_parameters()):
            if name.endswith(("_layernorm.weight", "_post_norm.weight")):
                tensor.fill_(gain)
        tokens = torch.arange(min(spec.vocab, spec.context))[None]
        states = module(tokens, output_hidden_states=True).hidden_states
        ours = torch.equal(decoder(tokens), decoder.head(decoder.norm(decoder.embedding(tokens))))
        return [*(torch.equal(state, states[0]) for state in states[1:-1]), ours]

    @FEW
    @given(strategies.configs("olmo2", "olmo3"))
    def everywhere(config):
        assert all(handed_on(config, 0.0))

    everywhere()
    olmo2, olmo3 = families.CONFIGS["olmo2"], families.CONFIGS["olmo3"]
    zero, one = ([step for config in (olmo2, olmo3) for step in handed_on(config, gain)] for gain in (0.0, 1.0))
    claim.holds(all(zero) and not any(one), "the input as it was in OLMo 2 and 3, their modules and our decoders")


@pytest.mark.claim("d2l.table.gqa_default")
def test_grouped_queries_are_the_default(claim):
    """Five of the seven rows share keys and values among queries in every model, and OLMo in its larger one."""
    grouped = rows_where("attention", "kind", {"GQA", "MQA"})
    rest = {
        model: table.facts(model, "attention")["kind"]
        for row in set(table.DOCUMENT) - grouped
        for model in table.DOCUMENT[row]["models"]
    }
    claim.holds(
        len(grouped) == 5 and rest == {"olmo-2-7b": "MHA", "olmo-3.1-32b": "GQA", "deepseek-v3": "MLA"},
        f"{named(sorted(grouped))}; of the others {', '.join(f'{model} {kind}' for model, kind in rest.items())}",
    )


@pytest.mark.claim("d2l.table.gated_every_row")
def test_every_feed_forward_is_gated(claim):
    """Every feed-forward and every expert of every row is three matrices of d x d_ff."""
    gated = rows_where("ffn", "kind", {"SwiGLU", "GeGLU"})
    for model in models():
        spec, mlp = table.spec(model), table.module(model).base_model.layers[-1].mlp
        layer = spec.blocks[-1].feed_forward
        number, width = (layer.experts, layer.expert.width) if isinstance(layer, Experts) else (1, layer.width)
        matrices = [
            tensor
            for name, tensor in mlp.named_parameters()
            if "bias" not in name and not name.startswith(("gate.", "router.", "shared_experts."))
        ]
        assert sum(tensor.numel() for tensor in matrices) == number * 3 * spec.width * width
    claim.holds(gated == set(table.DOCUMENT), f"{len(gated)} rows, {len(models())} models")


@pytest.mark.claim("d2l.table.rope_every_row")
def test_positions_are_rotary_everywhere(claim):
    """Every row rotates queries and keys, and has no parameter of a position; GPT-2 has."""
    rotary = rows_where("positions", "kind", {"RoPE"})

    def positional(module):
        return [name for name, tensor in module.named_parameters() if "wpe" in name or "position" in name]

    assert positional(modules.build(huggingface.published_config("gpt2")))
    held = [name for model in models() for name in positional(table.module(model))]
    claim.holds(rotary == set(table.DOCUMENT) and not held, f"{len(models())} models without a table of positions")


@pytest.mark.claim("d2l.table.inflated_base")
def test_positions_are_one_dial(claim):
    """Positions differ by base and scaling alone, in six rows; DeepSeek-V3 rotates a part of a head, base 10,000."""
    dials = {"base", "scaling", "factor", "local_base", "local_scaling"}
    others = {
        model: {name: fact for name, fact in table.facts(model, "positions").items() if name not in dials}
        for model in models()
    }
    odd = {model for model, facts in others.items() if facts != {"kind": "RoPE"}}
    claim.holds(
        odd == {"deepseek-v3"}, f"{len(others) - len(odd)} of {len(others)} models rotate every number of a head"
    )
    bases = {model: table.facts(model, "positions")["base"] for model in models()}
    low = {model for model, base in bases.items() if base == 1e4}
    claim.otherwise(not odd, seen(odd, "positions", ("rotated", "head_dim", "keys", "base")))
    claim.otherwise(not low, f"base 10,000, as in the first model with RoPE, in {', '.join(sorted(low))}")


def last_output(layer, x_BTD, past=0):
    """What an attention layer of Llama 4 makes of the last token, which sees all, after so many others."""
    rotary = Llama4TextRotaryEmbedding(layer.config)(x_BTD, past + torch.arange(x_BTD.shape[1])[None])
    earlier = SimpleNamespace(get_seq_length=lambda _: past, update=lambda keys, values, *_, **__: (keys, values))
    return layer(x_BTD, rotary, None, earlier)[0][:, -1]


@pytest.mark.claim("d2l.table.llama4_nope")
@torch.no_grad()
def test_llama_4_has_layers_without_positions(claim):
    """Every fourth attention of Llama 4 takes earlier tokens in any order; far out it is tempered by the position."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    config = Llama4TextConfig(num_hidden_layers=8, num_local_experts=2, vocab_size=8, pad_token_id=None, **sizes)
    config._attn_implementation = "eager"
    layers = [Llama4TextAttention(config, index).eval() for index in range(8)]
    x_BTD = torch.randn(1, 6, 16)
    shuffled_BTD = x_BTD[:, [3, 0, 4, 2, 1, 5]]

    def moves(layer, other_BTD, past=0):
        # In float32, of numbers near 1 and sums of few.
        return not torch.allclose(last_output(layer, x_BTD), last_output(layer, other_BTD, past), rtol=0, atol=1e-6)

    free = [index for index, layer in enumerate(layers) if not moves(layer, shuffled_BTD)]
    far = config.floor_scale - x_BTD.shape[1]
    claim.holds(free == [3, 7], f"layers {free} of {len(layers)} take earlier tokens in any order")
    claim.holds(not moves(layers[3], x_BTD, past=far - 1), f"nothing changes up to position {far - 1 + 5:,}")
    claim.otherwise(
        not moves(layers[3], x_BTD, past=far), f"from position {far + 5:,} a query is scaled by its position"
    )


@pytest.mark.claim("d2l.table.corpus_outweighs")
def test_corpora_outweigh_parameters(claim):
    """Every model whose report gives its tokens met more than it has parameters, 15 times as many at least."""
    ratios = {}
    for row in table.ROWS.values():
        for model, tokens in row.get("tokens", {}).items():
            count = params.count(table.spec(model)).unique
            assert count == modules.unique(table.module(model))
            ratios[model] = Fraction(tokens, count)
    least = min(ratios, key=ratios.get)
    claim.holds(
        ratios[least] > 15,
        ", ".join(f"{model} {float(ratio):,.0f}" for model, ratio in ratios.items()) + " tokens each",
    )
