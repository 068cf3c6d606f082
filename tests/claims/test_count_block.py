"""Claims of the counting essay on a block's matrices in units of d^2."""

import re
from fractions import Fraction
from functools import cache

import pytest
from hypothesis import given

from accounting import conventions, huggingface, params
from accounting.authorities import huggingface as modules
from accounting.census import Part, take
from accounting.huggingface import published_config
from accounting.ledger import case
from tests import strategies

LLAMA, QWEN = "llama-3.1-8b", "qwen2.5-1.5b"


def spec_of(name):
    return huggingface.load(name).spec


@cache
def first_block(name):
    return modules.build(published_config(name)).model.layers[0]


def matrices(module, names=""):
    """Scalars of the module's matrices whose name has the pattern in it."""
    return sum(
        tensor.numel() for name, tensor in module.named_parameters() if tensor.ndim == 2 and re.search(names, name)
    )


def classic(config):
    """The GPT of the essay: a feed-forward four times as wide as the stream."""
    return {field: value for field, value in config.items() if field != "n_inner"}


@pytest.mark.claim("count.block.gpt12")
def test_classic_block(claim):
    """A GPT block has 4 d^2 of attention matrices and 8 d^2 of feed-forward ones."""

    def counts(config):
        square, module = config["n_embd"] ** 2, modules.build(config).transformer.h[0]
        block = take(huggingface.read(config).spec).where(lambda weight: weight.layer == 0)
        parts = params.by_part(block)
        ours = tuple(parts[part].matmul for part in (Part.ATTENTION, Part.FEED_FORWARD))
        theirs = matrices(module, r"^attn\."), matrices(module, r"^mlp\.")
        return (4 * square, 8 * square), ours, theirs

    @given(strategies.configs("gpt2").map(classic))
    def everywhere(config):
        assert len(set(counts(config))) == 1

    everywhere()
    formula, census, module = counts(published_config("gpt2"))
    claim.holds(formula == census == module, f"GPT-2: formula {formula}, census {census}, module {module}")


@pytest.mark.claim("count.block.kaplan_N")
def test_kaplan_model_size(claim):
    """Kaplan's N is 12 L d^2, the matrices of all classic blocks: tables, norms and biases are left out."""

    def counts(config):
        spec, blocks = huggingface.read(config).spec, modules.build(config).transformer.h
        formula = 12 * config["n_layer"] * config["n_embd"] ** 2
        return formula, conventions.kaplan_parameters(spec), matrices(blocks)

    @given(strategies.configs("gpt2").map(classic))
    def everywhere(config):
        assert len(set(counts(config))) == 1

    everywhere()
    formula, ours, module = counts(published_config("gpt2"))
    claim.holds(formula == ours == module, f"GPT-2: formula {formula:,}, convention {ours:,}, module {module:,}")


@pytest.mark.parametrize(
    ("parts", "tensors"),
    [
        case("count.block.llama_attn", [Part.ATTENTION], "self_attn"),
        case("count.block.llama_mlp", [Part.FEED_FORWARD], "mlp"),
        case("count.block.llama13", [Part.ATTENTION, Part.FEED_FORWARD], ""),
    ],
)
def test_llama_matrices(claim, parts, tensors):
    """Llama 3.1 8B's matrices of this kind are exactly the printed multiple of d^2."""
    spec = spec_of(LLAMA)
    chosen = take(spec).where(lambda weight: weight.layer == 0 and weight.part in parts)
    ratio = Fraction(params.count(chosen).matmul, spec.width**2)
    claim.measured(ratio, observed=Fraction(matrices(first_block(LLAMA), tensors), spec.width**2))
    claim.holds(ratio == claim.record.printed[0].value, f"{ratio} with nothing over")


@pytest.mark.claim("count.block.llama_block")
def test_llama_block(claim):
    """With its two norms a block of Llama 3.1 8B is 13 d^2 + 2 d, the printed number."""
    spec = spec_of(LLAMA)
    block = params.by_layer(spec)[0].unique
    claim.measured(block, observed=modules.unique(first_block(LLAMA)))
    claim.holds(block == 13 * spec.width**2 + 2 * spec.width, "13 d^2 + 2 d")


@pytest.mark.claim("count.block.qwen_ff")
def test_qwen_feed_forward_width(claim):
    """Qwen2.5-1.5B's feed-forward is the printed multiple of d wide."""
    spec, (inner, width) = spec_of(QWEN), first_block(QWEN).mlp.up_proj.weight.shape
    claim.measured(Fraction(spec.blocks[0].feed_forward.width, spec.width), observed=Fraction(inner, width))


@pytest.mark.claim("count.block.qwen198")
def test_qwen_block(claim):
    """Qwen2.5-1.5B's block is the printed multiple of d^2, with or without its norms and biases."""
    spec, block = spec_of(QWEN), first_block(QWEN)
    count, square = params.by_layer(spec)[0], spec.width**2
    claim.measured(Fraction(count.matmul, square), observed=Fraction(matrices(block), square))
    claim.measured(Fraction(count.unique, square), observed=Fraction(modules.unique(block), square))


@pytest.mark.claim("count.block.cleaner")
def test_cited(claim):
    """Kaplan et al. found cleaner laws without the tables in N."""
    claim.cited()
