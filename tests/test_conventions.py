"""The shortcuts: by how much each differs from the exact count, and why."""

from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Trainer

from accounting import census, flops, hardware, pairs, params
from accounting.authorities import huggingface as modules
from accounting.authorities import torch_counter
from accounting.census import Part
from accounting.conventions import (
    CONVENTIONS,
    InapplicableError,
    attention_ratio,
    causal_attention_ratio,
    kaplan_forward,
    kaplan_parameters,
    run,
    six_nd,
    table,
    twenty_tokens,
    two_nd,
)
from accounting.huggingface import read
from accounting.spec import Attention, Block, Experts, FeedForward, LatentAttention, ModelSpec, Norm
from model.recipes import tutor
from tests import strategies

FEWER = settings(max_examples=settings().max_examples // 5)
LENGTHS = st.integers(1, 24)
EVEN = st.integers(1, 12).map(lambda half: 2 * half)
BATCHES = st.integers(1, 3)
SHAPES = st.builds(
    lambda heads, head_dim, **dials: tutor(heads=heads, width=heads * head_dim, **dials),
    heads=st.integers(1, 4),
    head_dim=st.integers(1, 6),
    vocab=st.integers(1, 30),
    context=st.just(24),
    layers=st.integers(1, 3),
    tied=st.booleans(),
)


def counted(spec, **sizes):
    """FLOPs by every convention that says something."""
    return table(spec, **sizes).flops


def plain(spec):
    """Whether every layer has one head width."""
    return not any(isinstance(block.attention, LatentAttention) for block in spec.blocks)


PLAIN = strategies.specs().filter(plain)


def scalars(spec, chosen, active=True):
    """Scalars of the weights that are chosen, of experts those that serve a token unless told otherwise."""
    weights = filter(chosen, census.take(spec).weights)
    return sum(weight.active_scalars if active else weight.scalars for weight in weights)


def idle(spec, chosen=lambda _: True):
    """Scalars of the experts that a token does not pass through."""
    return scalars(spec, chosen, active=False) - scalars(spec, chosen)


def elementwise(weight):
    return not weight.multiplies


def measured(spec, seq, batch):
    """FLOPs of a training step that torch's counter sees in Hugging Face's GPT-2 of the shape: every pair."""
    first = spec.blocks[0]
    module = modules.build(
        {
            "model_type": "gpt2",
            "vocab_size": spec.vocab,
            "n_embd": spec.width,
            "n_positions": spec.context,
            "n_layer": len(spec.blocks),
            "n_head": first.attention.heads,
            "tie_word_embeddings": spec.tied,
        },
        attn_implementation="eager",
    )
    tokens = torch.zeros((batch, seq), dtype=torch.long, device="meta")
    mask = torch.ones_like(tokens)
    return torch_counter.count(lambda: module(tokens, attention_mask=mask, use_cache=False).logits.sum().backward())


@given(spec=strategies.specs(), seq=LENGTHS, batch=BATCHES)
def test_matmul_active_leaves_out_attentions_products_alone(spec, seq, batch):
    """6ND is exact for the weights that a token is multiplied by; experts that idle are all that `matmul` adds."""
    by = counted(spec, seq=seq, batch=batch)
    exact = flops.training(spec, seq=seq, batch=batch)
    assert by["6nd_matmul_active"] == exact.total - exact.scores - exact.mixture
    assert by["6nd_matmul"] - by["6nd_matmul_active"] == 6 * batch * seq * idle(spec, lambda w: w.multiplies)


@given(spec=strategies.specs(), seq=LENGTHS, batch=BATCHES)
def test_the_headline_counts_charge_what_is_no_product(spec, seq, batch):
    """Lookups, gains and offsets are charged six times, idle experts by `unique`; Kaplan's N drops tables and head."""
    by, tokens = counted(spec, seq=seq, batch=batch), batch * seq
    outside = scalars(spec, lambda weight: weight.part in (Part.EMBEDDING, Part.POSITION, Part.HEAD))
    assert by["6nd_active"] - by["6nd_matmul_active"] == 6 * tokens * scalars(spec, elementwise)
    assert by["6nd_unique"] - by["6nd_active"] == 6 * tokens * idle(spec)
    assert by["6nd_unique"] - by["6nd_non_embedding"] == 6 * tokens * outside


@FEWER
@given(spec=SHAPES, seq=LENGTHS, batch=BATCHES)
def test_twelve_l_d_squared_are_the_blocks_of_a_gpt(spec, seq, batch):
    """For full-width heads and two matrices of 4d it leaves out the head and attention, and nothing else."""
    by, tokens = counted(spec, seq=seq, batch=batch), batch * seq
    attention = 12 * len(spec.blocks) * seq * spec.width * tokens
    head = 6 * spec.vocab * spec.width * tokens
    assert by["6nd_12ld2"] + head + attention == measured(spec, seq, batch)
    assert by["6nd_12ld2"] == six_nd(kaplan_parameters(spec), tokens) == 3 * two_nd(kaplan_parameters(spec), tokens)


@given(spec=PLAIN, seq=LENGTHS, batch=BATCHES)
def test_kaplan_counts_half_the_square_and_no_head(spec, seq, batch):
    """It charges gains and offsets of the blocks, has no head, and S^2/2 pairs for S (S + 1)/2, whatever the window."""
    exact = flops.training(spec, seq=seq, batch=batch, pairs=pairs.causal)
    diagonal = 3 * batch * seq * sum(2 * b.attention.heads * b.attention.head_dim for b in spec.blocks)
    lookups = (Part.EMBEDDING, Part.POSITION)
    small = scalars(spec, lambda weight: elementwise(weight) and weight.part not in lookups)
    expected = exact.total - exact.head - diagonal + 6 * batch * seq * small
    assert counted(spec, seq=seq, batch=batch)["kaplan"] == expected
    assert 3 * batch * seq * kaplan_forward(spec, seq) == expected


@FEWER
@given(spec=SHAPES, seq=EVEN, batch=BATCHES)
def test_the_ratios_are_those_of_a_gpts_blocks(spec, seq, batch):
    """n/(6d) corrects the blocks exactly, every pair counted, and takes the head for a block; n/(12d) is its half."""
    by, exact = counted(spec, seq=seq, batch=batch), flops.training(spec, seq=seq, batch=batch, pairs=pairs.full)
    ratio = attention_ratio(spec.width, seq)
    assert exact.linear * (1 + ratio) + exact.head == measured(spec, seq, batch)
    assert by["6nd_n_6d"] == measured(spec, seq, batch) + exact.head * ratio
    assert 2 * by["6nd_n_12d"] == by["6nd_n_6d"] + by["6nd_matmul_active"]
    causal = flops.training(spec, seq=seq, batch=batch)
    assert causal.scores + causal.mixture == causal.linear * causal_attention_ratio(spec.width, seq + 1)


@given(spec=PLAIN, seq=LENGTHS, batch=BATCHES)
def test_ratios_are_whole_for_every_plain_decoder(spec, seq, batch):
    """Every matrix has the width as one side, so that n/(6d) is whole, and n/(12d) whole but for named halves."""
    assert {"6nd_n_6d", "6nd_n_12d"} <= set(counted(spec, seq=2 * seq, batch=batch))
    odd = params.count(spec).matmul_active * batch * seq**2 % (2 * spec.width) != 0
    assert table(spec, seq=seq, batch=batch).silent.get("6nd_n_12d") == (
        "no whole number of FLOPs at this length" if odd else None
    )


@given(spec=strategies.specs(), lengths=st.lists(st.tuples(LENGTHS, BATCHES), min_size=1, max_size=4))
def test_sequences_of_several_lengths_add_up(spec, lengths):
    """Whole, or not at all: halves of two lengths make one, and a part is never taken for the whole."""
    together = run(spec, lengths)
    for name, convention in CONVENTIONS.items():
        if name in together.flops:
            parts = [convention.count(spec, seq=seq, batch=batch) for seq, batch in lengths]
            assert together.flops[name] == sum(parts)
        else:
            assert together.silent[name]


@given(spec=PLAIN, seq=LENGTHS, batch=BATCHES)
def test_palm_charges_lookups_and_every_pair(spec, seq, batch):
    """12 L H Q T is attention with the full square; what a token is not multiplied by is charged besides."""
    by, exact = counted(spec, seq=seq, batch=batch), flops.training(spec, seq=seq, batch=batch, pairs=pairs.full)
    assert by["palm"] - exact.total == 6 * batch * seq * scalars(spec, elementwise)
    positions = scalars(spec, lambda weight: weight.part is Part.POSITION)
    assert by["palm"] - by["nanogpt"] == 6 * batch * seq * positions


@FEWER
@given(spec=SHAPES, seq=LENGTHS, batch=BATCHES)
def test_megatrons_paper_is_exact_for_a_gpt(spec, seq, batch):
    """For full-width heads and two matrices of 4h it is what a dense kernel executes, head included."""
    assert counted(spec, seq=seq, batch=batch)["megatron_paper"] == measured(spec, seq, batch)


@given(spec=strategies.specs(), seq=LENGTHS, batch=BATCHES)
def test_megatron_halves_the_square_and_leaves_out_routers(spec, seq, batch):
    """S^2/2 pairs leave out half of the diagonal; routers are free, and latent norms' gains are not."""
    exact = flops.training(spec, seq=seq, batch=batch, pairs=pairs.causal)
    diagonal = 3 * batch * seq * sum(p.heads * p.width for p in census.take(spec).products)
    gains = sum(
        block.attention.kv_rank + (block.attention.query_rank or 0)
        for block in spec.blocks
        if isinstance(block.attention, LatentAttention)
    )
    expected = exact.total - exact.router - diagonal + 6 * batch * seq * gains
    assert counted(spec, seq=seq, batch=batch)["megatron"] == expected


@FEWER
@given(spec=SHAPES, seq=LENGTHS, batch=BATCHES)
def test_chinchilla_charges_the_lookup_and_the_softmax(spec, seq, batch):
    """Beyond what is executed: the lookup as a product, and three FLOPs for each entry of the softmax."""
    lookup = 6 * batch * seq * spec.vocab * spec.width
    softmax = 9 * batch * seq**2 * sum(block.attention.heads for block in spec.blocks)
    assert counted(spec, seq=seq, batch=batch)["chinchilla"] - lookup - softmax == measured(spec, seq, batch)


@FEWER
@given(config=strategies.configs(), seq=LENGTHS, batch=BATCHES)
def test_hf_trainer_is_what_the_library_says(config, seq, batch):
    """Hugging Face's own method, on its own module: no embedding, all experts, an untied head."""
    module = modules.build(config)
    tokens = {"input_ids": torch.zeros((batch, seq), device="meta")}
    said = Trainer.floating_point_ops(SimpleNamespace(model=module), tokens)
    assert counted(read(config).spec, seq=seq, batch=batch)["hf_trainer"] == said


@given(spec=strategies.specs(), seq=EVEN)
def test_a_formula_that_names_what_is_not_there_says_nothing(spec, seq):
    """Latent attention has no one head width, and experts no one feed-forward width; the rest is always there."""
    latent = {"kaplan", "6nd_n_6d", "6nd_n_12d", "palm", "nanogpt", "chinchilla"}
    sparse = any(isinstance(block.feed_forward, Experts) for block in spec.blocks)
    missing = (set() if plain(spec) else latent) | ({"chinchilla"} if sparse else set())
    said = table(spec, seq=seq)
    assert said.flops.keys() == CONVENTIONS.keys() - missing and said.silent.keys() == missing
    for name in missing:
        with pytest.raises(InapplicableError, match=r"^[^\n]+$"):
            CONVENTIONS[name].count(spec, seq=seq)


@given(spec=strategies.specs(), seq=EVEN, batch=BATCHES)
def test_each_is_an_integer_in_proportion_to_the_batch(spec, seq, batch):
    """Sequences do not see each other; what is called linear does not depend on their length either."""
    one, many = counted(spec, seq=seq), counted(spec, seq=seq, batch=batch)
    single = counted(spec, seq=1)
    assert many == {name: batch * count for name, count in one.items()}
    assert all(type(count) is int for count in many.values())
    for name, convention in CONVENTIONS.items():
        if convention.linear:
            assert one[name] == seq * single[name]


PALM = ModelSpec(
    vocab=256_000,
    width=18_432,
    context=2048,
    blocks=(
        Block(
            attention=Attention(heads=48, kv_heads=1, head_dim=256),
            feed_forward=FeedForward(width=4 * 18_432, activation="silu", gated=True),
            attention_norm=Norm(),
        ),
    )
    * 118,
    final_norm=Norm(),
    tied=True,
)


def test_palm_540b_reaches_what_its_paper_says():
    """540 billion parameters; 238.3 thousand tokens a second on 6,144 TPU v4 are an MFU of 46.2 %.

    Chowdhery et al. 2022, arXiv 2204.02311, table 1 and section 4.1.
    """
    assert round(params.count(PALM).unique, -9) == 540 * 10**9
    a_token = Fraction(CONVENTIONS["palm"].count(PALM, seq=2048), 2048)
    peak = hardware.find("tpu-v4").peak()
    share = hardware.utilisation(a_token, 238_300, peak=peak, count=6144, scope="global")
    assert round(share, 3) == Fraction(462, 1000)


def test_twenty_tokens():
    """Twenty tokens a parameter."""
    assert twenty_tokens(70 * 10**9) == 14 * 10**11
