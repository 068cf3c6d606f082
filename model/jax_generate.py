"""Tokens one after the other from the JAX decoder: by recomputation, or with what is kept of those before.

A layer keeps what a later token may see: all tokens, or as many as its window has, each new one in the place of the
oldest. ``Kept`` has a pair of arrays a layer with C places for tokens on axis 1: keys and values (B, C, K, H), or of
latent attention, unless ``expanded``, what these are made from.

Dimension suffixes: B batch, T tokens, U tokens that they may see, C places of what is kept, V vocabulary, D width,
N query heads, K key/value heads, H numbers of a head.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from accounting.spec import Attention, LatentAttention, ModelSpec
from model.jax_attention import expand, mix, project, sees
from model.jax_decoder import embed, finish_block, forward, unembed
from model.jax_layers import Params, normalise

Kept = list[tuple[Array, Array]]


def _shapes(attention: Attention | LatentAttention, expanded: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of what a layer keeps of one token, in its two arrays."""
    if isinstance(attention, Attention):
        return ((attention.kv_heads, attention.head_dim),) * 2
    if expanded:
        return (attention.heads, attention.score_width), (attention.heads, attention.value_width)
    return (attention.kv_rank,), (attention.rope_head_dim,)


def allocate(spec: ModelSpec, batch: int, tokens: int, dtype: np.dtype, *, expanded: bool = False) -> Kept:
    """Room for what each layer keeps of ``tokens`` tokens."""

    def room(attention: Attention | LatentAttention) -> tuple[Array, Array]:
        places = tokens if attention.window is None else min(tokens, attention.window)
        left, right = (jnp.zeros((batch, places, *shape), dtype) for shape in _shapes(attention, expanded))
        return left, right

    return [room(block.attention) for block in spec.blocks]


def extend(
    spec: ModelSpec, params: Params, kept: Kept, tokens_BT: Array, start: Array | int, *, expanded: bool = False
) -> tuple[Array, Kept]:
    """Logits (B, V) after more tokens, the first of them at position ``start``, and what is kept then.

    ``expanded``, static under ``jax.jit`` as the spec is: as it was allocated. ValueError for more tokens than the
    context or the room that was allocated, as far as it is known when traced: a ``start`` that is traced is not.
    """
    met = tokens_BT.shape[1] + (start if isinstance(start, int) else 0)
    whole = [
        left.shape[1] for block, (left, _) in zip(spec.blocks, kept, strict=True) if block.attention.window is None
    ]
    if met > (room := min([spec.context, *whole])):
        raise ValueError(f"expected at most {room} tokens, got {met}")
    position_T = start + jnp.arange(tokens_BT.shape[1])
    x_BTD = embed(spec, params, tokens_BT, position_T)
    after: Kept = []
    for index, (block, held) in enumerate(zip(spec.blocks, kept, strict=True)):
        attention, layer = block.attention, params["blocks"][str(index)]
        y_BTD = normalise(block.attention_norm, layer.get("attention_norm"), x_BTD)
        q_BTNH, more = project(attention, layer["attention"], y_BTD, position_T)
        if expanded:
            more = expand(attention, layer["attention"], *more)
        places = held[0].shape[1]
        # The newest position before the start that fell to each place; below 0 where none has yet.
        held_C = start - 1 - (start - 1 - jnp.arange(places)) % places
        position_U = jnp.concatenate((held_C, position_T))
        seen_TU = sees(attention, position_T, position_U) & (position_U >= 0)
        k_BUKH, v_BUKH = (jnp.concatenate(both, 1) for both in zip(held, more, strict=True))
        if not expanded:
            k_BUKH, v_BUKH = expand(attention, layer["attention"], k_BUKH, v_BUKH)
        attended_BTD = mix(attention, layer["attention"], q_BTNH, k_BUKH, v_BUKH, seen_TU)
        x_BTD, _ = finish_block(block, layer, x_BTD, attended_BTD)
        newest_T = position_T[-places:] % places
        left, right = (old.at[:, newest_T].set(new[:, -places:]) for old, new in zip(held, more, strict=True))
        after.append((left, right))
    return unembed(spec, params, x_BTD[:, -1:])[:, 0], after


_extend = jax.jit(extend, static_argnums=0, static_argnames="expanded")


@partial(jax.jit, static_argnums=0)
def _logits_at(spec: ModelSpec, params: Params, tokens_BT: Array, position: Array | int) -> Array:
    """Logits (B, V) after the token at a position: what follows it is not seen."""
    return forward(spec, params, tokens_BT)[:, position]


def generate(
    spec: ModelSpec, params: Params, prompt_BT: Array, new: int, *, cached: bool = True, expanded: bool = False
) -> tuple[Array, Kept]:
    """The prompt and ``new`` tokens after it, each the likeliest: (B, T + new); and what is kept then.

    What is kept is of all tokens but the last, which no layer has met; without a cache nothing is.
    ``expanded``: of latent attention every head's key and value are kept, not what these are made from.
    ValueError for no token before or after, and for more than the context.
    """
    batch, prompt = prompt_BT.shape
    met = prompt + new - 1
    if prompt < 1 or new < 1 or met > spec.context:
        raise ValueError(f"expected a token, and 1 to {spec.context - prompt + 1} after {prompt}, got {new}")
    tokens_BT = jnp.zeros((batch, prompt + new), prompt_BT.dtype).at[:, :prompt].set(prompt_BT)
    dtype = params["embedding"]["weight"].dtype
    kept = allocate(spec, batch, met, dtype, expanded=expanded) if cached else []
    start, more_BT = 0, prompt_BT
    for end in range(prompt, prompt + new):
        if cached:
            logits_BV, kept = _extend(spec, params, kept, more_BT, start, expanded=expanded)
        else:
            logits_BV = _logits_at(spec, params, tokens_BT[:, :met], end - 1)
        start, more_BT = end, jnp.argmax(logits_BV, -1, keepdims=True).astype(tokens_BT.dtype)
        tokens_BT = tokens_BT.at[:, end].set(more_BT[:, 0])
    return tokens_BT, kept
