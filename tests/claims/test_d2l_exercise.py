"""Dive into Deep Learning 11.7.6, exercise 1: the six derived for the default; and 11.7.5, the summary."""

from fractions import Fraction
from functools import partial

import pytest
import torch

from accounting import conventions, flops, huggingface, pairs, params
from accounting.authorities import huggingface as modules
from accounting.authorities import torch_counter
from accounting.census import take
from accounting.ledger import case
from model.recipes import RECIPES, STUDY_SIZES, d2l_gpt
from model.torch_decoder import Decoder

DEFAULT = RECIPES["d2l-default"]
BATCH, CONTEXT = 64, 128


def built(spec):
    with torch.device("meta"):
        return Decoder(spec, attention="eager")


def matrices(module):
    return sum(tensor.numel() for tensor in module.parameters() if tensor.ndim == 2)


def forward(spec, tokens):
    """FLOPs of the products with weights and of attention's, as torch counts the decoder's forward pass."""
    found = torch_counter.by_operator(partial(built(spec), torch.zeros(1, tokens, dtype=torch.long, device="meta")))
    return found["aten.mm"], found["aten.bmm"]


@pytest.mark.parametrize(
    "tensors",
    [
        case("d2l.ex1.qkv", ["attention.query", "attention.key", "attention.value"]),
        case("d2l.ex1.out", ["attention.output"]),
        case("d2l.ex1.ffn", ["feed_forward.gate", "feed_forward.up", "feed_forward.down"]),
        case("d2l.ex1.block", ["attention", "feed_forward"]),
    ],
)
def test_matrices_of_a_block(claim, tensors):
    """The matrices of the default's block have so many weights."""
    prefixes = tuple(f"blocks.0.{name}." for name in tensors)
    ours = params.count(take(DEFAULT).where(lambda weight: weight.name.startswith(prefixes))).matmul
    block = built(DEFAULT).blocks[0]
    claim.measured(ours, observed=sum(matrices(block.get_submodule(name)) for name in tensors))


@pytest.mark.claim("d2l.ex1.with_head")
def test_with_the_head(claim):
    """Six blocks and the tied head have so many weights that a token multiplies by."""
    claim.measured(params.count(DEFAULT).matmul, observed=matrices(built(DEFAULT)))


@pytest.mark.claim("d2l.ex1.six_nd")
def test_a_batch(claim):
    """Training on a batch of 64 sequences of 128 is 6 N D, the analytic line of the profiler's cell."""
    decoder, tokens = built(DEFAULT), torch.zeros(BATCH, CONTEXT, dtype=torch.long, device="meta")
    found = torch_counter.by_operator(lambda: decoder(tokens).sum().backward())["aten.mm"]
    claim.measured(conventions.six_nd(params.count(DEFAULT).matmul, BATCH * CONTEXT), observed=found)


@pytest.mark.claim("d2l.ex1.parity")
def test_parity(claim):
    """The context at which attention, every pair counted, costs what the linear layers do."""
    layer = flops.by_layer(DEFAULT, seq=1, pairs=pairs.full)[0]
    (two, two_attend), (one, one_attend) = (forward(d2l_gpt(layers=layers), 1) for layers in (2, 1))
    claim.measured(
        Fraction(layer.linear, layer.scores + layer.mixture), observed=Fraction(two - one, two_attend - one_attend)
    )


@pytest.mark.claim("d2l.summary.subleading")
def test_subleading_until_thousands(claim):
    """At a thousand tokens attention still costs less than the weights, in a decoder that is wide enough."""

    def ratio(width, heads):
        spec = d2l_gpt(width=width, heads=heads, layers=1)
        weights, attention = forward(spec, 1000)
        ours = flops.forward(spec, seq=1000, pairs=pairs.full)
        assert (ours.linear + ours.head, ours.scores + ours.mixture) == (weights, attention)
        return Fraction(attention, weights)

    ratios = {width: ratio(width, heads) for width, _, heads in STUDY_SIZES}
    shown = ", ".join(f"{float(found):.2f} at width {width}" for width, found in ratios.items())
    wide = {width: found for width, found in ratios.items() if conventions.attention_ratio(width, 1000) < 1}
    claim.holds(DEFAULT.width in wide and max(wide.values()) < 1, f"of the weights' work at 1,000 tokens {shown}")
    claim.otherwise(ratios[96] < 1, f"{float(ratios[96]):.2f} at width 96, at parity from 6 d = 576 on")


@pytest.mark.claim("d2l.summary.moe_more_params")
def test_experts_add_parameters_and_no_flops(claim):
    """Twice the experts are twice the weights in them, and a token's FLOPs grow by the router's rows alone."""
    config = huggingface.published_config("mixtral-8x7b")
    sizes, costs, tokens = [], [], 3
    for experts in (8, 16):
        larger = config | {"num_local_experts": experts}
        module = modules.build(larger, attn_implementation="eager", experts_implementation="batched_mm")
        ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
        run = partial(module, ids, attention_mask=torch.ones_like(ids), use_cache=False)
        spec = huggingface.read(larger).spec
        costs.append(torch_counter.count(run))
        sizes.append(modules.unique(module))
        assert params.count(spec).unique == sizes[-1]
        assert flops.forward(spec, seq=tokens, pairs=pairs.full).total == costs[-1]
    routers = config["num_hidden_layers"] * 8 * config["hidden_size"]
    dearer, larger = costs[1] - costs[0], sizes[1] - sizes[0]
    claim.holds(
        dearer == 2 * tokens * routers and routers < larger,
        f"eight experts more in Mixtral 8x7B: {larger:,} parameters on top of {sizes[0]:,}, and {dearer // tokens:,} "
        f"FLOPs a token on top of {costs[0] // tokens:,}",
    )
