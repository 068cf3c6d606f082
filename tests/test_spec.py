"""The spec refuses what no decoder can be, and names the field."""

from dataclasses import FrozenInstanceError, replace

import pytest

from accounting.spec import (
    Attention,
    Block,
    Experts,
    FeedForward,
    LatentAttention,
    Norm,
    Rotary,
    RotaryScaling,
    Router,
    SpecError,
)
from model.recipes import tutor

ATTENTION = {"heads": 4, "kv_heads": 2, "head_dim": 8}
LATENT = {"heads": 2, "kv_rank": 4, "nope_head_dim": 4, "rope_head_dim": 2, "value_head_dim": 4}
EXPERT = FeedForward(width=8, activation="silu", gated=True)
ROTARY = Rotary(base=1e4, dim=2)
YARN = RotaryScaling(kind="yarn", factor=2.0, original_context=8)

INF, NAN = float("inf"), float("nan")
IMPOSSIBLE = [
    (lambda: Norm(kind="rms", bias=True), "norm.bias"),
    (lambda: Norm(kind="batch"), "norm.kind"),
    (lambda: RotaryScaling(kind="dynamic", factor=2.0, original_context=8), "rotary.scaling.kind"),
    (lambda: RotaryScaling(kind="linear", factor=0.0, original_context=8), "rotary.scaling.factor"),
    (lambda: RotaryScaling(kind="yarn", factor=2.0, original_context=0), "rotary.scaling.original_context"),
    (
        lambda: RotaryScaling(kind="llama3", factor=2.0, original_context=8, low_frequency_factor=4.0),
        "rotary.scaling.low_frequency_factor",
    ),
    (lambda: Rotary(base=1e4, dim=3), "rotary.dim"),
    (lambda: Rotary(base=1.0, dim=4), "rotary.base"),
    (lambda: Rotary(base=float("nan"), dim=4), "rotary.base"),
    (lambda: Attention(**{**ATTENTION, "heads": 0}), "heads"),
    (lambda: Attention(**{**ATTENTION, "heads": True}), "heads"),
    (lambda: Attention(**{**ATTENTION, "head_dim": 8.0}), "head_dim"),
    (lambda: Attention(**{**ATTENTION, "kv_heads": 3}), "kv_heads"),
    (lambda: Attention(**ATTENTION, window=0), "window"),
    (lambda: Attention(**ATTENTION, qk_norm_span="layer"), "qk_norm_span"),
    (lambda: Attention(**ATTENTION, softcap=0.0), "softcap"),
    (lambda: Attention(**ATTENTION, rotary=Rotary(base=1e4, dim=10)), "rotary.dim"),
    (lambda: Attention(heads=2**16, kv_heads=1, head_dim=2**9), "heads * head_dim"),
    (lambda: LatentAttention(**LATENT, rotary=Rotary(base=1e4, dim=4)), "rotary.dim"),
    (lambda: LatentAttention(**{**LATENT, "kv_rank": -1}, rotary=Rotary(base=1e4, dim=2)), "kv_rank"),
    (lambda: FeedForward(width=0, activation="silu", gated=True), "feed_forward.width"),
    (lambda: FeedForward(width=8, activation="mish", gated=True), "feed_forward.activation"),
    (lambda: replace(EXPERT, clamp=-1.0), "feed_forward.clamp"),
    (lambda: replace(EXPERT, gated=False, clamp=1.0), "feed_forward.gated"),
    (lambda: replace(EXPERT, gated=False, gain=1.702), "feed_forward.gated"),
    (lambda: replace(EXPERT, gated=False, up_offset=1.0), "feed_forward.gated"),
    (lambda: replace(EXPERT, activation="gelu", gain=1.702), "feed_forward.gain"),
    (lambda: Experts(experts=4, active=5, expert=EXPERT), "active"),
    (lambda: Experts(experts=4, active=0, expert=EXPERT), "active"),
    (lambda: Experts(experts=4, active=1, expert=EXPERT, router=Router(groups=3)), "router.groups"),
    (lambda: Experts(experts=4, active=3, expert=EXPERT, router=Router(groups=2)), "active"),
    (lambda: Router(groups=2, top_groups=3), "router.top_groups"),
    (lambda: Router(groups=0), "router.groups"),
    (lambda: Router(score="tanh"), "router.score"),
    (lambda: Router(order="top_p_first"), "router.order"),
    (lambda: replace(tutor(), logit_softcap=0.0), "logit_softcap"),
    (lambda: replace(tutor(), vocab=0), "vocab"),
    (lambda: replace(tutor(), blocks=()), "layers"),
    (lambda: replace(tutor(), context=2**31), "context"),
    (lambda: Norm(eps=0.0), "norm.eps"),
    (lambda: Norm(eps=NAN), "norm.eps"),
    (lambda: Norm(eps="1e-6"), "norm.eps"),
    (lambda: Norm(eps=True), "norm.eps"),
    (lambda: Norm(unit_offset=1), "norm.unit_offset"),
    (lambda: Norm(kind="layer", bias="no"), "norm.bias"),
    *(
        (lambda field=field, value=value: replace(YARN, **{field: value}), f"rotary.scaling.{field}")
        for field in ("factor", "low_frequency_factor", "high_frequency_factor", "beta_fast", "beta_slow")
        for value in (0.0, -1.0, INF, NAN)
    ),
    (lambda: replace(YARN, attention_factor=0.0), "rotary.scaling.attention_factor"),
    (lambda: replace(YARN, mscale=INF), "rotary.scaling.mscale"),
    (lambda: replace(YARN, mscale_all_dim=NAN), "rotary.scaling.mscale_all_dim"),
    (lambda: replace(YARN, truncate="no"), "rotary.scaling.truncate"),
    (lambda: Rotary(base=INF, dim=4), "rotary.base"),
    (lambda: replace(ROTARY, interleaved="no"), "rotary.interleaved"),
    (lambda: replace(ROTARY, scaling={"factor": 2.0}), "rotary.scaling"),
    *((lambda scale=scale: Attention(**ATTENTION, scale=scale), "scale") for scale in (0.0, -1.0, INF, NAN)),
    (lambda: Attention(**ATTENTION, softcap=INF), "softcap"),
    (lambda: Attention(**ATTENTION, bias="no"), "bias"),
    (lambda: Attention(**ATTENTION, output_bias=1), "output_bias"),
    (lambda: Attention(**ATTENTION, sinks="no"), "sinks"),
    (lambda: Attention(**ATTENTION, qk_norm=True), "qk_norm"),
    (lambda: Attention(**ATTENTION, rotary=1e4), "rotary"),
    (lambda: LatentAttention(**LATENT, rotary=ROTARY, window=3), "window"),
    (lambda: LatentAttention(**LATENT, rotary=None), "rotary"),
    (lambda: LatentAttention(**LATENT, rotary=ROTARY, norm=None), "norm"),
    (lambda: LatentAttention(**LATENT, rotary=ROTARY, bias="no"), "bias"),
    (lambda: replace(EXPERT, gated="no"), "feed_forward.gated"),
    (lambda: replace(EXPERT, bias="no"), "feed_forward.bias"),
    (lambda: replace(EXPERT, gain=0.0), "feed_forward.gain"),
    (lambda: replace(EXPERT, gain=NAN), "feed_forward.gain"),
    (lambda: replace(EXPERT, up_offset=INF), "feed_forward.up_offset"),
    *((lambda scale=scale: Router(scale=scale), "router.scale") for scale in (0.0, -1.0, INF, NAN)),
    (lambda: Router(normalize="no"), "router.normalize"),
    (lambda: Router(bias=1), "router.bias"),
    (lambda: Router(selection_bias="no"), "router.selection_bias"),
    (lambda: Experts(experts=4, active=2, expert=None), "expert"),
    (lambda: Experts(experts=4, active=2, expert=EXPERT, router="softmax"), "router"),
    (lambda: Experts(experts=4, active=2, expert=EXPERT, shared=8), "shared"),
    (lambda: Block(attention=EXPERT, feed_forward=EXPERT), "attention"),
    (lambda: Block(attention=Attention(**ATTENTION), feed_forward=None), "feed_forward"),
    *(
        (lambda field=field: replace(tutor().blocks[0], **{field: True}), field)
        for field in ("attention_norm", "attention_post_norm", "feed_forward_norm", "feed_forward_post_norm")
    ),
    (lambda: replace(tutor(), blocks=list(tutor().blocks)), "blocks"),
    (lambda: replace(tutor(), blocks=(None,)), "blocks"),
    (lambda: replace(tutor(), final_norm=None), "final_norm"),
    (lambda: replace(tutor(), tied="no"), "tied"),
    (lambda: replace(tutor(), learned_positions=1), "learned_positions"),
    (lambda: replace(tutor(), embedding_scale=0.0), "embedding_scale"),
    (lambda: replace(tutor(), embedding_scale=NAN), "embedding_scale"),
]


@pytest.mark.parametrize(("make", "field"), IMPOSSIBLE, ids=range(len(IMPOSSIBLE)))
def test_an_impossible_value_names_its_field(make, field):
    """The error has the field and one line that says what was expected."""
    with pytest.raises(SpecError) as error:
        make()
    assert error.value.field == field
    assert "\n" not in str(error.value)


def test_frequencies_that_a_scaling_does_not_use_are_in_no_order():
    """Only llama3's scaling has the two."""
    assert replace(YARN, low_frequency_factor=5.0) != YARN


def test_a_spec_is_a_value():
    """Specs compare by content, can be hashed, and cannot be changed."""
    assert tutor() == tutor() and hash(tutor()) == hash(tutor())
    assert replace(tutor(), vocab=10) != tutor()
    with pytest.raises(FrozenInstanceError):
        tutor().vocab = 10
