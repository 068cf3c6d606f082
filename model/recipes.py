"""The documents' own models by name: ``RECIPES["d2l-default"]`` is a ``ModelSpec``.

``tutor`` makes the toy GPT of the counting document, ``d2l_gpt`` the model of Dive into Deep Learning,
chapter 11, with its defaults.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from accounting.spec import Attention, Block, FeedForward, ModelSpec, Norm, Rotary, SpecError

GPT2_EPS = 1e-5
STUDY_SIZES = ((96, 3, 4), (128, 3, 4), (192, 4, 6), (256, 6, 8), (384, 8, 8))  # width, layers, heads (d2l 11.7.2.2)


def _head_dim(width: int, heads: int) -> int:
    if width % heads:
        raise SpecError("heads", f"expected a divisor of the width {width}, got {heads}")
    return width // heads


def tutor(
    vocab: int = 9, width: int = 8, context: int = 6, layers: int = 3, heads: int = 2, tied: bool = True
) -> ModelSpec:
    """A GPT with biases everywhere: V C + S C + L (12 C^2 + 13 C) + 2 C parameters when tied, 2,752 by default.

    Learned positions, pre-norm LayerNorm, a plain exact-GELU feed-forward of width 4 C.
    """
    norm = Norm(kind="layer", eps=GPT2_EPS, bias=True)
    block = Block(
        attention=Attention(heads=heads, kv_heads=heads, head_dim=_head_dim(width, heads), bias=True, output_bias=True),
        feed_forward=FeedForward(width=4 * width, activation="gelu", gated=False, bias=True),
        attention_norm=norm,
        feed_forward_norm=norm,
    )
    return ModelSpec(
        vocab=vocab,
        width=width,
        context=context,
        blocks=(block,) * layers,
        final_norm=norm,
        tied=tied,
        learned_positions=True,
    )


def swiglu_width(width: int) -> int:
    """8 d / 3 rounded to the nearest integer, as Python's ``round`` (a third is never a tie): 683 at 256.

    The width at which three matrices cost what the two of a feed-forward of 4 d do (arXiv 2002.05202, section 3).
    """
    return (16 * width + 3) // 6


def d2l_gpt(
    vocab: int = 28,
    width: int = 256,
    heads: int = 8,
    layers: int = 6,
    kv_heads: int | None = None,
    positions: Literal["rope", "learned"] = "rope",
    norm: Literal["rms", "layer"] = "rms",
    activation: Literal["swiglu", "gelu"] = "swiglu",
    bias: bool = False,
    context: int = 1024,
) -> ModelSpec:
    """A pre-norm decoder with a tied head; the defaults have 4,730,624 unique parameters.

    ``bias`` gives every linear layer one; a LayerNorm always has its offset. RoPE has base 10,000. The feed-forward
    is plain of width 4 d for gelu, in its tanh form as in GPT-2, and gated of ``swiglu_width`` for swiglu.
    """
    head_dim = _head_dim(width, heads)
    one_norm = Norm(kind="rms", eps=1e-6) if norm == "rms" else Norm(kind="layer", eps=GPT2_EPS, bias=True)
    attention = Attention(
        heads=heads,
        kv_heads=heads if kv_heads is None else kv_heads,
        head_dim=head_dim,
        bias=bias,
        output_bias=bias,
        rotary=Rotary(base=10_000.0, dim=head_dim) if positions == "rope" else None,
    )
    if activation == "swiglu":
        feed_forward = FeedForward(width=swiglu_width(width), activation="silu", gated=True, bias=bias)
    else:
        feed_forward = FeedForward(width=4 * width, activation="gelu_tanh", gated=False, bias=bias)
    block = Block(attention=attention, feed_forward=feed_forward, attention_norm=one_norm, feed_forward_norm=one_norm)
    return ModelSpec(
        vocab=vocab,
        width=width,
        context=context,
        blocks=(block,) * layers,
        final_norm=one_norm,
        tied=True,
        learned_positions=positions == "learned",
    )


def _gpt2(vocab: int, width: int, heads: int, layers: int) -> ModelSpec:
    return d2l_gpt(vocab, width, heads, layers, positions="learned", norm="layer", activation="gelu", bias=True)


# At the resolution of ``d2l_gpt``'s arguments the three modern families are one recipe (d2l 11.7.3).
_MODERN = d2l_gpt(vocab=1024, kv_heads=2)

RECIPES: Mapping[str, ModelSpec] = MappingProxyType(
    {
        "tutor-toy": tutor(),
        "d2l-default": d2l_gpt(),
        "d2l-gpt2": _gpt2(50257, 768, 12, 12),
        **{f"study-{width}": d2l_gpt(28, width, heads, layers) for width, layers, heads in STUDY_SIZES},
        "recipe-gpt2": _gpt2(1024, 256, 8, 6),
        "recipe-mistral-7b": _MODERN,
        "recipe-llama-3": _MODERN,
        "recipe-qwen3": _MODERN,
    }
)
