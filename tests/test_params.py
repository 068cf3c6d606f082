"""Parameters: identities that hold for every decoder, and figures that are known."""

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from accounting import params
from accounting.authorities import huggingface as modules
from accounting.census import Part
from accounting.huggingface import load, read
from accounting.spec import Attention, Block, Experts, FeedForward, ModelSpec, Norm, Router
from model.recipes import tutor
from model.torch_decoder import Decoder
from tests import strategies


def built(spec):
    """Scalars in the distinct parameters of the torch decoder, built without memory."""
    with torch.device("meta"):
        return modules.unique(Decoder(spec))


@st.composite
def plain(draw):
    """A decoder whose blocks are equal and which has every dial that the identities turn."""
    heads = draw(st.sampled_from([1, 2, 4, 8]))
    norm = Norm(kind="layer", bias=True)
    bias = draw(st.booleans())
    width = 8 * draw(st.integers(1, 4))
    block = Block(
        attention=Attention(heads=heads, kv_heads=heads, head_dim=width // heads, bias=bias, output_bias=bias),
        feed_forward=FeedForward(width=4 * width, activation="gelu", gated=draw(st.booleans()), bias=bias),
        attention_norm=norm,
        feed_forward_norm=norm,
    )
    return ModelSpec(
        vocab=draw(st.integers(1, 30)),
        width=width,
        context=draw(st.integers(1, 12)),
        blocks=(block,) * draw(st.integers(1, 4)),
        final_norm=norm,
        tied=draw(st.booleans()),
        learned_positions=draw(st.booleans()),
    )


def with_block(spec, **changes):
    return replace(spec, blocks=tuple(replace(block, **changes) for block in spec.blocks))


@given(spec=strategies.specs())
def test_untying_adds_one_table_and_no_multiplication(spec):
    """An untied head is V d more scalars; a token is multiplied by as many as before."""
    tied, untied = params.count(replace(spec, tied=True)), params.count(replace(spec, tied=False))
    assert untied.unique - tied.unique == spec.vocab * spec.width
    assert untied.non_embedding == tied.non_embedding
    assert (untied.matmul, untied.matmul_active) == (tied.matmul, tied.matmul_active)


@given(spec=plain(), heads=st.sampled_from([1, 2, 4, 8]))
def test_heads_at_fixed_width_change_nothing(spec, heads):
    """However a width is divided among heads, the projections have the same size."""
    attention = replace(spec.blocks[0].attention, heads=heads, kv_heads=heads, head_dim=spec.width // heads)
    other = with_block(spec, attention=attention)
    assert params.count(other) == params.count(spec)
    assert built(other) == built(spec)


@given(spec=plain())
def test_depth_adds_blocks_only(spec):
    """Twice the layers are twice the blocks; tables and final norm stay."""
    deeper = params.by_layer(replace(spec, blocks=spec.blocks * 2))
    layers = params.by_layer(spec)
    assert deeper.pop(None) == layers.pop(None)
    assert set(deeper.values()) == set(layers.values())
    assert len(deeper) == 2 * len(layers)


@given(spec=plain())
def test_vocabulary_and_context_add_rows(spec):
    """A token more is d scalars, or 2d untied; a learned position more is d, a rotary one none."""
    unique = params.count(spec).unique
    token, position = replace(spec, vocab=spec.vocab + 1), replace(spec, context=spec.context + 1)
    assert params.count(token).unique - unique == spec.width * (1 if spec.tied else 2)
    assert params.count(position).unique - unique == spec.width * spec.learned_positions
    assert (params.count(token).unique, params.count(position).unique) == (built(token), built(position))


@given(spec=plain())
def test_width_squares_the_matrices_and_doubles_the_rest(spec):
    """Twice the width: four times the blocks' matrices, twice the tables, norms and biases."""

    def widened(block):
        attention = replace(block.attention, head_dim=2 * block.attention.head_dim)
        return replace(block, attention=attention, feed_forward=replace(block.feed_forward, width=8 * spec.width))

    wide = replace(spec, width=2 * spec.width, blocks=tuple(map(widened, spec.blocks)))
    before, after = params.by_part(spec), params.by_part(wide)
    for part, count in before.items():
        factor = 4 if part in (Part.ATTENTION, Part.FEED_FORWARD) else 2
        assert after[part].unique == factor * count.unique
    assert params.count(wide).unique == built(wide)


@given(spec=plain())
def test_one_expert_is_dense_and_its_router(spec):
    """A mixture of one expert with k = 1 is the dense model and a row of d for the router."""
    experts = Experts(experts=1, active=1, expert=spec.blocks[0].feed_forward, router=Router())
    mixture = params.count(with_block(spec, feed_forward=experts))
    dense = params.count(spec)
    routers = len(spec.blocks) * spec.width
    assert mixture.unique - dense.unique == mixture.active - dense.active == routers
    assert mixture.matmul_active - dense.matmul_active == routers


@given(config=strategies.configs(*strategies.SPARSE))
def test_all_experts_active_is_all_parameters(config):
    """With k = E nothing is idle; with less, what is idle is whole experts."""
    spec = read(config).spec
    sparse = [block.feed_forward for block in spec.blocks if isinstance(block.feed_forward, Experts)]
    assume(sparse)
    count = params.count(spec)
    idle = {layer.experts - layer.active for layer in sparse}
    assert (count.active == count.unique) == (idle == {0})
    full = replace(
        spec,
        blocks=tuple(
            replace(
                block,
                feed_forward=replace(
                    block.feed_forward,
                    active=block.feed_forward.experts,
                    router=replace(block.feed_forward.router, groups=1, top_groups=1),
                ),
            )
            if isinstance(block.feed_forward, Experts)
            else block
            for block in spec.blocks
        ),
    )
    everything = params.count(full)
    assert everything.active == everything.unique == count.unique
    assert everything.matmul_active == everything.matmul == count.matmul


@given(spec=plain())
def test_full_groups_are_multi_head_attention(spec):
    """Grouped-query attention with as many key/value heads as heads is multi-head attention."""
    heads = spec.blocks[0].attention.heads
    counts = [
        params.count(with_block(spec, attention=replace(spec.blocks[0].attention, kv_heads=kv_heads))).unique
        for kv_heads in (1, heads)
    ]
    bias = 2 * spec.blocks[0].attention.bias
    saved = len(spec.blocks) * (heads - 1) * spec.blocks[0].attention.head_dim * (2 * spec.width + bias)
    assert counts == [params.count(spec).unique - saved, params.count(spec).unique]


def test_tying_shares_one_object_and_cloning_unties():
    """A tied head is the table itself; a clone under the head's name is V d scalars more."""
    decoder = Decoder(tutor())
    assert decoder.head.weight is decoder.embedding.weight
    tied = modules.unique(decoder)
    decoder.head.weight = torch.nn.Parameter(decoder.embedding.weight.clone())
    assert modules.unique(decoder) - tied == 9 * 8


FIGURES = {
    "gpt2": {"unique": 124_439_808, "embedding": 39_383_808, "non_embedding": 85_056_000},
    "llama-3.1-8b": {"unique": 8_030_261_248, "matmul": 7_504_658_432},
    "qwen2.5-1.5b": {"unique": 1_543_714_304},
    "qwen3-30b-a3b": {"unique": 30_532_122_624},
    "mixtral-8x7b": {"unique": 46_702_792_704, "active": 12_879_925_248, "matmul_active": 12_748_587_008},
    "deepseek-v3": {"unique": 671_026_404_352, "stored": 671_026_419_200, "active": 37_552_282_624},
    "gpt-oss-120b": {"unique": 116_829_156_672},
    "gpt-oss-20b": {"unique": 20_914_757_184},
    "kimi-k2": {"unique": 1_026_408_209_408},
}


@pytest.mark.parametrize(("name", "figures"), FIGURES.items(), ids=FIGURES)
def test_known_figures(name, figures):
    """The published models have the counts that they are known to have."""
    count = params.count(load(name).spec)
    assert figures == {field: getattr(count, field) for field in figures}


EXTRAS = {
    "deepseek-v3": [
        ("prediction_layers", 11_610_068_224, 682_636_487_424),
        ("prediction_layer_tables", 1_853_358_080, 684_489_845_504),
        ("fp8_scales", 41_540_496, 684_531_386_000),
    ],
    "gpt2": [("mask_buffers", 12_582_912, 137_022_720), ("tied_head_copy", 38_597_376, 175_620_096)],
    "gpt-oss-20b": [("mxfp4_scales", 597_196_800, 21_511_953_984)],
    "llama-3.1-8b": [],
}


@pytest.mark.parametrize(("name", "extras"), EXTRAS.items(), ids=EXTRAS)
def test_extras_are_named_and_lead_to_the_files(name, extras):
    """What a file holds besides is under its own name, and adds up to what the file holds."""
    reading = load(name)
    stored, seen = params.count(reading.spec).stored, []
    for extra in reading.extras:
        stored += extra.scalars
        seen.append((extra.name, extra.scalars, stored))
    assert seen == extras
