"""Bytes of weights and of training arrays, equal to those of real tensors."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accounting import census, memory, params
from accounting.authorities import torch_memory
from accounting.huggingface import load
from model.torch_decoder import Decoder
from tests import strategies

FEW = settings(max_examples=settings().max_examples // 5)  # each one takes steps of a real optimizer
RANKS = st.integers(1, 7)
SIDES = st.integers(1, 300)


def bytes_of(tensors):
    return sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize("dtype", memory.DTYPE_BYTES)
@given(spec=strategies.specs(*strategies.DENSE))
def test_weights_in_each_dtype(dtype, spec):
    """The decoder's parameters in a dtype take what is predicted, layer by layer and part by part."""
    with torch.device("meta"):
        decoder = Decoder(spec)
    held = {name: parameter.to(getattr(torch, dtype)) for name, parameter in decoder.named_parameters()}
    total = memory.weight_bytes(spec, dtype)
    assert total == bytes_of(held.values())
    layers = memory.weights_by(spec, dtype, lambda weight: weight.layer)
    assert layers.get(0) == bytes_of(tensor for name, tensor in held.items() if name.startswith("blocks.0."))
    assert sum(memory.weights_by(spec, dtype, lambda weight: weight.part).values()) == total


def quantised(weight, bits, block, scale):
    """The tensors of one copy: scalars packed into bytes, and a scale for each block that the matrix touches."""
    rows, columns = weight.shape
    packed = torch.empty((weight.size * bits + 7) // 8, dtype=torch.uint8)
    scales = torch.empty(len(range(0, rows, block[0])), len(range(0, columns, block[1])), dtype=scale)
    return [packed, scales]


@pytest.mark.parametrize(
    ("name", "bits", "block", "scale", "experts_alone"),
    [
        ("fp8_block", 8, (128, 128), torch.float32, False),
        ("mxfp4_experts", 4, (1, 32), torch.float8_e8m0fnu, True),
        ("int4_group128", 4, (1, 128), torch.float16, False),
    ],
)
@FEW
@given(spec=strategies.specs(*strategies.SPARSE))
def test_quantised_weights_have_their_scales(name, bits, block, scale, experts_alone, spec):
    """Packed matrices and their scales, laid out as tensors; whatever is not packed takes two bytes a number."""
    held = 0
    for weight in census.take(spec).weights:
        plain = not weight.multiplies or weight.layer is None or weight.part is census.Part.ROUTER
        for tensor in weight.expand():
            if plain or (experts_alone and "experts" not in tensor.name):
                held += 2 * tensor.size
            else:
                held += bytes_of(quantised(tensor, bits, block, scale))
    assert memory.weight_bytes(spec, name) == held


@given(rows=SIDES, columns=SIDES, format_=st.sampled_from(sorted(memory.FORMATS)))
def test_a_matrix_that_fills_no_block_has_its_scale(rows, columns, format_):
    """As many scales as blocks that it touches, in whole bytes."""
    made = memory.FORMATS[format_]
    weight = census.Weight(
        name="blocks.0.feed_forward.experts.{expert}.up.weight",
        shape=(rows, columns),
        part=census.Part.FEED_FORWARD,
        layer=0,
        copies=3,
        multiplies=True,
    )
    dtype = {8: torch.float8_e8m0fnu, 16: torch.float16, 32: torch.float32}[made.scale_bits]
    assert made.bytes(weight) == 3 * bytes_of(quantised(weight, made.bits, made.block, dtype))


def test_an_odd_number_of_nibbles_is_a_whole_number_of_bytes():
    """Nine numbers of four bits take five bytes, and half of that number is no count of parameters."""
    nine = census.Weight(name="w", shape=(3, 3), part=census.Part.ATTENTION, layer=0, multiplies=True)
    assert memory.FORMATS["int4_group128"].bytes(nine) == 5 + 3 * 2


def trained(spec, dtype, make, masters=None):
    """The arrays that a real step leaves, by a layout's names, and the bytes of its counts of steps."""
    decoder = Decoder(spec).to(dtype)
    parameters = list(decoder.parameters())
    decoder(torch.zeros((1, 1), dtype=torch.long)).sum().backward()
    held = parameters if masters is None else [p.detach().to(masters) for p in parameters]
    for parameter, copy in zip(parameters, held, strict=True):
        copy.grad = parameter.grad if masters is None else parameter.grad.to(masters)
    optimizer = make(held)
    optimizer.step()
    state = torch_memory.optimizer_state(optimizer)
    named = {OURS[name]: size for name, size in state.arrays.items()}
    named |= {"weights": bytes_of(parameters), "gradients": bytes_of(p.grad for p in parameters)}
    if masters is not None:
        named |= {"master_weights": bytes_of(held), "gradient_copy": bytes_of(copy.grad for copy in held)}
    return named, state.scalars


OURS = {
    "exp_avg": "first_moment",
    "exp_avg_sq": "second_moment",
    "max_exp_avg_sq": "largest_second_moment",
    "momentum_buffer": "momentum",
}
RUNS = {
    "adam_float32": (torch.float32, torch.optim.AdamW, {}, None),
    "adam_bfloat16": (torch.bfloat16, torch.optim.AdamW, {}, None),
    "adam_amsgrad_float32": (torch.float32, torch.optim.AdamW, {"amsgrad": True}, None),
    "adam_mixed_gradient_copy": (torch.bfloat16, torch.optim.AdamW, {}, torch.float32),
    "sgd_float32": (torch.float32, torch.optim.SGD, {"lr": 0.1}, None),
    "sgd_momentum_float32": (torch.float32, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, None),
}


@pytest.mark.parametrize("layout", RUNS)
@FEW
@given(spec=strategies.specs(*strategies.DENSE))
def test_a_layout_is_what_a_step_leaves(layout, spec):
    """Array by array, after a real step of torch's optimizer on the decoder."""
    dtype, optimizer, options, masters = RUNS[layout]
    held, counts = trained(spec, dtype, lambda parameters: optimizer(parameters, **options), masters)
    predicted = memory.training(spec, layout)
    assert {each.array.name: each.logical for each in predicted.arrays} == held
    assert predicted.total == predicted.padded_total == sum(held.values())
    assert predicted.step_counts == counts


@pytest.mark.parametrize(
    ("layout", "bytes_"),
    [
        ("adam_float32", 16),
        ("adam_mixed", 16),
        ("adam_mixed_float32_gradients", 18),
        ("adam_mixed_gradient_copy", 20),
        ("adam_bfloat16", 8),
        ("adam_amsgrad_float32", 20),
        ("sgd_float32", 8),
        ("sgd_momentum_float32", 12),
    ],
)
def test_bytes_of_a_parameter(layout, bytes_):
    """Sixteen in two ways, and six others."""
    spec = load("gpt2").spec
    assert memory.LAYOUTS[layout].bytes_per_parameter == bytes_
    assert memory.training(spec, layout).total == bytes_ * params.count(spec).unique


def test_the_variants_of_mixed_precision_differ_by_their_gradients_alone():
    """A gradient in four bytes instead of two, or both."""
    names = {name: {array.name for array in layout.arrays} for name, layout in memory.LAYOUTS.items()}
    assert names["adam_mixed"] == names["adam_mixed_float32_gradients"]
    assert names["adam_mixed_gradient_copy"] - names["adam_mixed"] == {"gradient_copy"}


@given(shape=st.lists(st.integers(1, 9), min_size=1, max_size=3), ranks=RANKS)
def test_rows_are_cut_as_torch_chunks_them(shape, ranks):
    """Equal pieces of rows, the last ones shorter or empty, and nothing lost."""
    chunks = [chunk.numel() for chunk in torch.empty(shape).chunk(ranks)]
    shares = [memory.rows(shape, ranks, rank) for rank in range(ranks)]
    assert shares == [*chunks, *[0] * (ranks - len(chunks))]


@given(sizes=st.lists(st.integers(1, 1000), max_size=30), ranks=RANKS)
def test_whole_parameters_are_spread_and_none_is_lost(sizes, ranks):
    """Each is on one rank, and no rank has more than the least loaded one and its own smallest parameter."""
    shares = memory.whole_parameters(sizes, ranks)
    assert sorted(size for share in shares for size in share) == sorted(sizes)
    loads = list(map(sum, shares))
    assert all(load - min(share) <= min(loads) for load, share in zip(loads, shares, strict=True) if share)


@given(spec=strategies.specs(), ranks=RANKS, shard=st.sampled_from(sorted(memory.SHARDED)))
def test_shares_add_up_to_what_is_sharded(spec, ranks, shard):
    """Each rank keeps all of what is not sharded, and padding is never less."""
    alone = memory.training(spec, "adam_mixed")
    each = [memory.training(spec, "adam_mixed", ranks=ranks, rank=rank, shard=shard) for rank in range(ranks)]
    for index, array in enumerate(alone.arrays):
        kept = sum(rank.arrays[index].logical for rank in each)
        cut = array.array.role in memory.SHARDED[shard]
        assert kept == (array.logical if cut else ranks * array.logical)
        assert all(rank.arrays[index].padded >= rank.arrays[index].logical for rank in each)


def test_each_stage_shards_one_role_more():
    """Optimizer state, then gradients, then weights (arXiv 1910.02054, section 5)."""
    roles = [memory.SHARDED[stage] for stage in ("none", "zero1", "zero2", "zero3")]
    assert roles == [set(), {"optimizer"}, {"optimizer", "gradients"}, {"optimizer", "gradients", "weights"}]


@pytest.mark.parametrize(
    "make",
    [
        lambda spec: memory.weight_bytes(spec, "int3"),
        lambda spec: memory.training(spec, "adam"),
        lambda spec: memory.training(spec, "adam_mixed", shard="zero4"),
    ],
    ids=range(3),
)
def test_an_unknown_name_has_no_bytes(make):
    """A dtype, a layout or a way of sharding that is not in its table is an error, never a guess."""
    with pytest.raises(KeyError):
        make(load("gpt2").spec)


@pytest.mark.parametrize("where", [{"ranks": 0}, {"ranks": 2, "rank": 2}, {"ranks": 2, "rank": -1}])
def test_a_rank_that_is_not_there_is_refused(where):
    """No ranks, or a rank beyond the last."""
    with pytest.raises(ValueError, match=r"^rank: [^\n]+$"):
        memory.training(load("gpt2").spec, "adam_mixed", shard="zero3", **where)


def test_gpt2s_published_file_to_the_last_byte():
    """Its data section of 548,090,880 bytes are the parameters in float32 and twelve mask buffers of 1,024 x 1,024."""
    reading = load("gpt2")
    extras = {extra.name: extra.scalars for extra in reading.extras}
    held = bytes_of(torch.empty(1024, 1024, device="meta") for _ in reading.spec.blocks)
    assert 4 * extras["mask_buffers"] == held
    assert memory.weight_bytes(reading.spec, "float32") + held == 548_090_880
