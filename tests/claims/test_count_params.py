"""Claims of the counting essay on step 1: a decoder's parameters follow from its config."""

import re
from fractions import Fraction
from functools import cache
from typing import NamedTuple

import pytest
from hypothesis import given

from accounting import huggingface, params, published
from accounting.authorities import huggingface as modules
from accounting.census import Part
from accounting.huggingface import published_config
from accounting.ledger import case
from tests import strategies

QWEN = "qwen2.5-1.5b"


class Symbols(NamedTuple):
    """The essay's symbols."""

    V: int
    d: int
    L: int
    n_q: int
    n_kv: int
    d_h: int
    d_ff: int


# What the essay passes to its helper for each model.
PRINTED_ARGUMENTS = {
    "llama-3.1-8b": (Symbols(128_256, 4096, 32, 32, 8, 128, 14_336), {"tied": False}),
    QWEN: (Symbols(151_936, 1536, 28, 12, 2, 128, 8960), {"tied": True, "qkv_bias": True}),
}


def symbols(config):
    """The essay's symbols, as a config of Llama's shape gives them."""
    heads, width = config["num_attention_heads"], config["hidden_size"]
    return Symbols(
        V=config["vocab_size"],
        d=width,
        L=config["num_hidden_layers"],
        n_q=heads,
        n_kv=config.get("num_key_value_heads") or heads,
        d_h=config.get("head_dim") or width // heads,
        d_ff=config["intermediate_size"],
    )


def attention(s):
    return s.L * (2 * s.d * s.n_q * s.d_h + 2 * s.d * s.n_kv * s.d_h)


def feed_forward(s):
    return s.L * 3 * s.d * s.d_ff


def norms(s):
    return (2 * s.L + 1) * s.d


def biases(s):
    return s.L * (s.n_q + 2 * s.n_kv) * s.d_h


def decoder(s, tied=False, qkv_bias=False):
    """The formula of an untied model, and the two dials that the essay's helper adds to it."""
    block = 2 * s.d * s.n_q * s.d_h + 2 * s.d * s.n_kv * s.d_h + 3 * s.d * s.d_ff + 2 * s.d
    if qkv_bias:
        block += (s.n_q + 2 * s.n_kv) * s.d_h
    return (1 if tied else 2) * s.V * s.d + s.d + s.L * block


def count_of(config):
    return params.count(huggingface.read(config).spec)


@cache
def module_of(name):
    return modules.build(published_config(name))


def scalars(module, names=""):
    """Scalars of the module's parameters whose name has the pattern in it."""
    return sum(tensor.numel() for name, tensor in module.named_parameters() if re.search(names, name))


def plain(config):
    """The same model as the essay's formula has it: two tables and no biases."""
    dials = ("attention_bias", "mlp_bias", "tie_word_embeddings")
    return {field: value for field, value in config.items() if field not in dials}


@pytest.mark.claim("count.tldr.exact_count")
def test_the_count_follows_from_the_config(claim):
    """A config settles how many parameters its decoder has."""

    @given(strategies.configs())
    def everywhere(config):
        assert count_of(config).unique == modules.unique(modules.build(config))

    everywhere()
    names = published.names()
    same = [name for name in names if count_of(published_config(name)).unique == modules.unique(module_of(name))]
    claim.holds(same == names, f"{len(same)} of {len(names)} published configs give their module's count")


@pytest.mark.claim("count.params.formula")
def test_formula(claim):
    """Tables, norms and blocks add up to the formula in every untied Llama-shaped decoder."""

    def counts(config, module):
        return decoder(symbols(config)), count_of(config).unique, modules.unique(module)

    @given(strategies.configs("llama", "mistral").map(plain))
    def everywhere(config):
        assert len(set(counts(config, modules.build(config)))) == 1

    everywhere()
    for name in ("llama-3.1-8b", "llama-3.1-405b", "mistral-7b"):
        formula, census, module = counts(published_config(name), module_of(name))
        claim.holds(formula == census == module, f"{name}: formula {formula:,}, census {census:,}, module {module:,}")


@pytest.mark.parametrize(
    ("term", "part", "tensors", "configs", "name"),
    [
        # Qwen3-32B's heads are wider than its stream: 64 x 128 against 5,120.
        case(
            "count.params.attn_terms",
            attention,
            Part.ATTENTION,
            r"\.self_attn\.[qkvo]_proj\.weight",
            strategies.configs("llama", "mistral", "qwen2"),
            "qwen3-32b",
        ),
        case(
            "count.params.mlp_terms",
            feed_forward,
            Part.FEED_FORWARD,
            r"\.mlp\..*weight",
            strategies.configs("llama", "mistral", "qwen2"),
            "llama-3.1-8b",
        ),
        case(
            "count.params.norm_terms",
            norms,
            Part.NORM,
            r"norm\.weight",
            strategies.configs("llama", "mistral", "qwen2"),
            "llama-3.1-8b",
        ),
        case("count.params.qwen_bias", biases, Part.BIAS, r"\.bias", strategies.configs("qwen2"), QWEN),
    ],
)
def test_term(claim, term, part, tensors, configs, name):
    """A term of the formula is the size of the tensors that it stands for."""

    def counts(config, module):
        ours = params.by_part(huggingface.read(config).spec)[part].unique
        return term(symbols(config)), ours, scalars(module, tensors)

    @given(configs)
    def everywhere(config):
        assert len(set(counts(config, modules.build(config)))) == 1

    everywhere()
    formula, census, module = counts(published_config(name), module_of(name))
    claim.holds(formula == census == module, f"{name}: term {formula:,}, census {census:,}, module {module:,}")


@pytest.mark.claim("count.params.qwen_tied")
def test_tying(claim):
    """A tied model has one table where an untied one has two."""

    def tables(config):
        parts = params.by_part(huggingface.read(config).spec)
        ours = sum(parts[part].unique for part in (Part.EMBEDDING, Part.HEAD) if part in parts)
        theirs = scalars(modules.build(config), "embed_tokens|lm_head")
        assert ours == theirs
        return ours

    @given(strategies.configs("qwen2", "llama"))
    def everywhere(config):
        s = symbols(config)
        assert tables({**config, "tie_word_embeddings": True}) == s.V * s.d
        assert tables({**config, "tie_word_embeddings": False}) == 2 * s.V * s.d

    everywhere()
    tied, untied = (tables({**published_config(QWEN), "tie_word_embeddings": tie}) for tie in (True, False))
    s = symbols(published_config(QWEN))
    claim.holds((tied, untied) == (s.V * s.d, 2 * s.V * s.d), f"{QWEN}: {tied:,} tied, {untied:,} untied")


@pytest.mark.parametrize("name", [case("count.params.llama8b", "llama-3.1-8b"), case("count.params.qwen", QWEN)])
def test_count(claim, name):
    """The whole model has the printed number of parameters."""
    claim.measured(count_of(published_config(name)).unique, observed=modules.unique(module_of(name)))


@pytest.mark.claim("count.params.function_signature")
def test_helper(claim):
    """The helper's sum over the printed arguments is the count of both published models."""
    counts = [count_of(published_config(name)).unique for name in PRINTED_ARGUMENTS]
    claim.measured(counts, observed=[modules.unique(module_of(name)) for name in PRINTED_ARGUMENTS])
    helper = [decoder(arguments, **dials) for arguments, dials in PRINTED_ARGUMENTS.values()]
    claim.holds(helper == counts, f"the helper's sums are {helper[0]:,} and {helper[1]:,}")


@pytest.mark.claim("count.params.qwen_config")
def test_qwen_config(claim):
    """The published config of Qwen2.5-1.5B has the printed sizes, the size of a head by division."""
    spec, module = huggingface.load(QWEN).spec, module_of(QWEN)
    heads, config = spec.blocks[0].attention, module.config
    claim.measured(
        [
            *(spec.vocab, spec.width, len(spec.blocks)),
            *(heads.heads, heads.kv_heads, heads.head_dim),
            spec.blocks[0].feed_forward.width,
        ],
        observed=[
            *(config.vocab_size, config.hidden_size, config.num_hidden_layers),
            *(config.num_attention_heads, config.num_key_value_heads, module.model.layers[0].self_attn.head_dim),
            config.intermediate_size,
        ],
    )


@pytest.mark.claim("count.params.table")
def test_table(claim):
    """Qwen2.5-1.5B's one table has the printed size."""
    claim.measured(count_of(published_config(QWEN)).embedding, observed=scalars(module_of(QWEN), "embed_tokens"))


@pytest.mark.claim("count.params.table_share")
def test_table_share(claim):
    """The table is the printed share of the model."""
    count, module = count_of(published_config(QWEN)), module_of(QWEN)
    claim.measured(
        Fraction(count.embedding, count.unique),
        observed=Fraction(scalars(module, "embed_tokens"), modules.unique(module)),
    )
