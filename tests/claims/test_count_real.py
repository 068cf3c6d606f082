"""Claims of the counting essay on how its rules fare in the real world."""

from fractions import Fraction
from functools import partial

import pytest
import torch

from accounting import huggingface, memory, params
from accounting.authorities import huggingface as modules
from accounting.authorities import torch_counter
from accounting.conventions import CONVENTIONS, six_nd
from accounting.hardware import find
from accounting.huggingface import published_config
from accounting.ledger import case
from accounting.scaling import Split

# Gopher's and Chinchilla's (Rae et al. 2021, arXiv 2112.11446, section 3.1); the paper on Chinchilla prints neither.
VOCABULARY, SEQUENCE = 32_000, 2048
CHINCHILLA, GOPHER = (70 * 10**9, 14 * 10**11), (280 * 10**9, 3 * 10**11)
META = 402 * 10**9, 1655 * 10**10
DEEPSEEK = "deepseek-v3"
EIGHT = 8
#: Hoffmann et al. 2022, arXiv 2203.15556, table A4: parameters as printed; layers, width, feed-forward, heads.
TABLE_A4 = [
    (73 * 10**6, 10, 640, 2560, 10),
    (305 * 10**6, 20, 1024, 4096, 16),
    (552 * 10**6, 24, 1280, 5120, 10),
    (11 * 10**8, 26, 1792, 7168, 14),
    (16 * 10**8, 28, 2048, 8192, 16),
    (68 * 10**8, 40, 3584, 14336, 28),
]


def shape(layers, width, inner, heads):
    """A decoder with full-width heads and two feed-forward matrices."""
    sizes = {"n_layer": layers, "n_embd": width, "n_inner": inner, "n_head": heads}
    return {"model_type": "gpt2", "vocab_size": VOCABULARY, "n_positions": SEQUENCE, **sizes}


def detailed(config, seq=SEQUENCE):
    """Training FLOPs of a sequence by appendix F's recipe."""
    return CONVENTIONS["chinchilla"].count(huggingface.read(config).spec, seq=seq)


def counted(config):
    """What torch counts, with the lookup as a product and the softmax as the recipe charges them."""
    module = modules.build(config, attn_implementation="eager")
    ids = torch.zeros(1, SEQUENCE, dtype=torch.long, device="meta")
    forward = torch_counter.count(partial(module, ids, attention_mask=torch.ones_like(ids), use_cache=False))
    lookup = 2 * SEQUENCE * config["vocab_size"] * config["n_embd"]
    softmax = 3 * config["n_layer"] * config["n_head"] * SEQUENCE**2
    return 3 * (forward + lookup + softmax)


@pytest.mark.claim("count.real.table_a4_errata")
def test_detailed_count(claim):
    """By the recipe the table's models have 1.03 to 1.60 times 6 N D, the smallest 1.23 even of a single token."""
    configs = [(parameters, shape(*sizes)) for parameters, *sizes in TABLE_A4]
    ours, theirs = (
        [Fraction(count(config), six_nd(parameters, SEQUENCE)) for parameters, config in configs]
        for count in (detailed, counted)
    )
    claim.holds(max(ours) < Fraction(1105, 1000), f"{float(min(ours)):.3f} to {float(max(ours)):.3f}")
    parameters, smallest = configs[0]
    least = Fraction(detailed(smallest, seq=1), six_nd(parameters, 1))
    claim.right(*ours, least, observed=[*theirs, least])


@pytest.mark.claim("count.real.gopher_errata")
def test_chinchillas_compute(claim):
    """Of Chinchilla the recipe makes 5.68e23 and 6 N D 5.88e23; 6 N D of Gopher is 5.04e23."""
    config, (_, tokens) = shape(80, 8192, 4 * 8192, 64), CHINCHILLA
    ours, theirs = (Fraction(count(config) * tokens, SEQUENCE) for count in (detailed, counted))
    claim.measured([ours, six_nd(*CHINCHILLA)])
    claim.right(ours, six_nd(*CHINCHILLA), six_nd(*GOPHER), observed=[theirs, 588 * 10**21, 504 * 10**21])


@pytest.mark.claim("count.real.meta_ratio")
def test_ratio_of_metas_pair(claim):
    """Tokens for each parameter of the pair that Meta extrapolated to."""
    claim.measured(Split(*META).ratio)


@pytest.mark.claim("count.real.meta_errata")
def test_compute_of_metas_pair(claim):
    """6 N D of the pair is a twentieth above the budget that it is quoted for."""
    claim.measured(six_nd(*META))
    claim.right(six_nd(*META))


def scalars(module):
    """DeepSeek-V3's scalars: in the matrices of its layers but for routers, and in all else."""
    sizes = [0, 0]
    for name, tensor in module.named_parameters():
        outside = "layers." not in name or name.endswith("mlp.gate.weight")
        sizes[tensor.ndim < 2 or outside] += tensor.numel()
    return sizes


@pytest.mark.claim("count.real.ds_fp8")
def test_eight_bit_weights(claim):
    """At a byte for each parameter DeepSeek-V3's weights are 671 GB, and 673 GB as its report stores them.

    That has tables, head, routers and norms in 16 bits and, on top, a scale for each block of the others.
    """
    spec = huggingface.load(DEEPSEEK).spec
    quantised, rest = scalars(modules.build(published_config(DEEPSEEK)))
    byte, two = torch.float8_e4m3fn.itemsize, torch.bfloat16.itemsize
    claim.measured(memory.weight_bytes(spec, "float8_e4m3fn"), observed=(quantised + rest) * byte)
    stored = memory.weight_bytes(spec, "fp8_block")
    scales = stored - (quantised * byte + rest * two)
    assert 4 * quantised // 128**2 <= scales < 4 * quantised // 128**2 * 1.01  # of 4 bytes, some for a part of a block
    claim.otherwise(stored, "as stored")


@pytest.mark.claim("count.real.eight_gpus")
def test_eight_gpus(claim):
    """At a byte for each parameter the weights are more than eight times 80 GB, not than eight times 80 GiB."""
    weights = params.count(huggingface.load(DEEPSEEK).spec).unique
    assert weights == modules.unique(modules.build(published_config(DEEPSEEK)))
    decimal, binary = EIGHT * find("h100-sxm").memory, EIGHT * 80 * 2**30
    claim.holds(weights > decimal, f"{weights / 1e9:.1f} GB and {decimal / 1e9:.0f}")
    claim.otherwise(weights > binary, f"{binary / 1e9:.1f} GB in eight times 80 GiB")


@pytest.mark.parametrize(
    (), [case(f"count.real.{what}") for what in ("kaplan_vs_hoffmann", "ratio_range", "pearce", "meta_402")]
)
def test_cited(claim):
    """A paper states it."""
    claim.cited()
