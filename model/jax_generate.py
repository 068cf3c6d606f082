"""Tokens one after the other from the JAX decoder: by recomputation, or with the keys and values of those before.

A layer keeps what a later token may see: all tokens, or as many as its window has, each new one in the place of the
oldest. ``Kept`` has a pair of arrays a layer, keys and values (B, C, K, H), for C tokens.

Dimension suffixes: as in ``jax_decoder``, C places of what is kept.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from accounting.spec import Attention, ModelSpec
from model.jax_decoder import Params, embed, finish_block, forward, mix, normalise, project, sees, supported, unembed

Kept = list[tuple[Array, Array]]


def allocate(spec: ModelSpec, batch: int, tokens: int, dtype: np.dtype) -> Kept:
    """Room for what each layer keeps of ``tokens`` tokens."""

    def room(attention: Attention) -> Array:
        places = tokens if attention.window is None else min(tokens, attention.window)
        return jnp.zeros((batch, places, attention.kv_heads, attention.head_dim), dtype)

    return [(room(attention), room(attention)) for attention, _ in map(supported, spec.blocks)]


def extend(spec: ModelSpec, params: Params, kept: Kept, tokens_BT: Array, start: Array | int) -> tuple[Array, Kept]:
    """Logits (B, V) after more tokens, the first of them at position ``start``, and what is kept then."""
    position_T = start + jnp.arange(tokens_BT.shape[1])
    x_BTD = embed(spec, params, tokens_BT, position_T)
    after: Kept = []
    for index, (block, (keys_BCKH, values_BCKH)) in enumerate(zip(spec.blocks, kept, strict=True)):
        layer, (attention, _) = params["blocks"][str(index)], supported(block)
        y_BTD = normalise(block.attention_norm, layer.get("attention_norm"), x_BTD)
        q_BTNH, k_BTKH, v_BTKH = project(attention, layer["attention"], y_BTD, position_T)
        places = keys_BCKH.shape[1]
        # The newest position before the start that fell to each place; below 0 where none has yet.
        held_C = start - 1 - (start - 1 - jnp.arange(places)) % places
        position_U = jnp.concatenate((held_C, position_T))
        seen_TU = sees(attention, position_T, position_U) & (position_U >= 0)
        k_BUKH, v_BUKH = (jnp.concatenate(pair, 1) for pair in ((keys_BCKH, k_BTKH), (values_BCKH, v_BTKH)))
        x_BTD = finish_block(block, layer, x_BTD, mix(attention, layer["attention"], q_BTNH, k_BUKH, v_BUKH, seen_TU))
        newest_T = position_T[-places:] % places
        after.append(
            (
                keys_BCKH.at[:, newest_T].set(k_BTKH[:, -places:]),
                values_BCKH.at[:, newest_T].set(v_BTKH[:, -places:]),
            )
        )
    return unembed(spec, params, x_BTD[:, -1:])[:, 0], after


_extend = jax.jit(extend, static_argnums=0)


@partial(jax.jit, static_argnums=0)
def _logits_at(spec: ModelSpec, params: Params, tokens_BT: Array, position: Array | int) -> Array:
    """Logits (B, V) after the token at a position: what follows it is not seen."""
    return forward(spec, params, tokens_BT)[:, position]


def generate(spec: ModelSpec, params: Params, prompt_BT: Array, new: int, *, cached: bool = True) -> tuple[Array, Kept]:
    """The prompt and ``new`` tokens after it, each the likeliest: (B, T + new); and what is kept then.

    What is kept is of all tokens but the last, which no layer has met; without a cache nothing is.
    ValueError for no new token, and for more tokens than the context.
    """
    batch, prompt = prompt_BT.shape
    met = prompt + new - 1
    if new < 1 or met > spec.context:
        raise ValueError(f"expected 1 to {spec.context - prompt + 1} new tokens after {prompt}, got {new}")
    tokens_BT = jnp.zeros((batch, prompt + new), prompt_BT.dtype).at[:, :prompt].set(prompt_BT)
    kept = allocate(spec, batch, met, params["embedding"]["weight"].dtype) if cached else []
    start, more_BT = 0, prompt_BT
    for end in range(prompt, prompt + new):
        if cached:
            logits_BV, kept = _extend(spec, params, kept, more_BT, start)
        else:
            logits_BV = _logits_at(spec, params, tokens_BT[:, :met], end - 1)
        start, more_BT = end, jnp.argmax(logits_BV, -1, keepdims=True).astype(tokens_BT.dtype)
        tokens_BT = tokens_BT.at[:, end].set(more_BT[:, 0])
    return tokens_BT, kept
