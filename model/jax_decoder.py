"""The minimal decoder in JAX: a tree of arrays and a pure function, the twin of ``torch_decoder``.

``init`` makes a nested dict whose paths, joined by dots, are the canonical parameter names; a tied model has one
leaf for its table and no head. ``forward`` is jit-able with the spec static: ``jax.jit(forward, static_argnums=0)``.

Dimension suffixes: B batch, T and U tokens (query, key), V vocabulary, D width, N query heads, K key/value heads,
G query heads a key/value head, H head_dim, R rotated pairs, S a span that is normalised. A linear weight is stored
(out, in).
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from accounting.spec import Activation, Attention, Block, FeedForward, ModelSpec, Norm, Rotary, RotaryScaling

Params = dict[str, Any]

ACTIVATIONS: dict[Activation, Callable[[Array], Array]] = {
    "gelu": partial(jax.nn.gelu, approximate=False),  # arXiv 1606.08415, section 2
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
}
INITIAL_STD = 0.02  # GPT-2 (Radford et al. 2019), whose residual projections are divided by sqrt(2 L) (section 2.3)


def supported(block: Block) -> tuple[Attention, FeedForward]:
    """The two components of a block; ValueError for one that this decoder does not build."""
    attention, feed_forward = block.attention, block.feed_forward
    if not isinstance(attention, Attention):
        raise ValueError("this decoder does not build LatentAttention, only Attention")
    if attention.sinks or attention.softcap is not None:
        raise ValueError("this decoder does not build attention sinks or an attention softcap")
    if not isinstance(feed_forward, FeedForward):
        raise ValueError("this decoder does not build Experts, only FeedForward")
    if feed_forward.clamp is not None or feed_forward.gain != 1.0:
        raise ValueError("this decoder does not build a feed-forward with a clamp or a gain")
    return attention, feed_forward


def _init_linear(key: Array, width_out: int, width_in: int, bias: bool, std: float = INITIAL_STD) -> Params:
    weight = std * jax.random.normal(key, (width_out, width_in))
    return {"weight": weight, "bias": jnp.zeros(width_out)} if bias else {"weight": weight}


def _init_norms(specs: dict[str, tuple[Norm | None, int]]) -> Params:
    """The identity for each name whose norm is not None; the others have no parameters and no entry."""
    params: Params = {}
    for name, (spec, width) in specs.items():
        if spec is not None:
            params[name] = {"weight": jnp.full(width, 0.0 if spec.unit_offset else 1.0)}
            if spec.bias:
                params[name]["bias"] = jnp.zeros(width)
    return params


def _init_block(spec: Block, width: int, residual_std: float, key: Array) -> Params:
    attention, feed_forward = supported(spec)
    keys = iter(jax.random.split(key, 7))
    query_span, key_span = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    per_head = attention.qk_norm_span == "head"
    inner, bias = feed_forward.width, feed_forward.bias
    params: Params = {
        "attention": {
            "query": _init_linear(next(keys), query_span, width, attention.bias),
            "key": _init_linear(next(keys), key_span, width, attention.bias),
            "value": _init_linear(next(keys), key_span, width, attention.bias),
            "output": _init_linear(next(keys), width, query_span, attention.output_bias, residual_std),
            **_init_norms(
                {
                    "query_norm": (attention.qk_norm, attention.head_dim if per_head else query_span),
                    "key_norm": (attention.qk_norm, attention.head_dim if per_head else key_span),
                }
            ),
        },
        "feed_forward": {
            "up": _init_linear(next(keys), inner, width, bias),
            "down": _init_linear(next(keys), width, inner, bias, residual_std),
        },
    }
    if feed_forward.gated:
        params["feed_forward"]["gate"] = _init_linear(next(keys), inner, width, bias)
    around = ("attention_norm", "attention_post_norm", "feed_forward_norm", "feed_forward_post_norm")
    return params | _init_norms({name: (getattr(spec, name), width) for name in around})


def init(spec: ModelSpec, key: Array) -> Params:
    """Weights drawn as GPT-2 does, in JAX's default float; ValueError for a component that is not built."""
    tables, *blocks = jax.random.split(key, 1 + len(spec.blocks))
    embedding, position, head = jax.random.split(tables, 3)
    residual_std = INITIAL_STD / math.sqrt(2 * len(spec.blocks))
    params: Params = {
        "embedding": _init_linear(embedding, spec.vocab, spec.width, bias=False),
        "blocks": {
            str(index): _init_block(block, spec.width, residual_std, block_key)
            for index, (block, block_key) in enumerate(zip(spec.blocks, blocks, strict=True))
        },
        **_init_norms({"norm": (spec.final_norm, spec.width)}),
    }
    if spec.learned_positions:
        params["position"] = _init_linear(position, spec.context, spec.width, bias=False)
    if not spec.tied:
        params["head"] = _init_linear(head, spec.vocab, spec.width, bias=False)
    return params


def linear(params: Params, x: Array) -> Array:
    """An affine map, x W' + b: (..., in) to (..., out)."""
    y: Array = x @ params["weight"].T
    return y + params["bias"] if "bias" in params else y


def normalise(spec: Norm | None, params: Params | None, x: Array) -> Array:
    """LayerNorm (arXiv 1607.06450) or RMSNorm (arXiv 1910.07467, equation 4) over the last axis; None: identity.

    The statistics are computed in float32 at least.
    """
    if spec is None or params is None:
        return x
    wide: Array = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    if spec.kind == "layer":
        wide = wide - wide.mean(-1, keepdims=True)
    wide = wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + spec.eps)
    wide = wide * (1 + params["weight"] if spec.unit_offset else params["weight"])
    wide = wide + params["bias"] if spec.bias else wide
    return wide.astype(x.dtype)


def _kept_share(spec: Rotary, scaling: RotaryScaling, frequency_R: np.ndarray) -> np.ndarray:
    """The share of each frequency that a scaling leaves alone; it divides the rest by ``factor``.

    ``linear``: none (arXiv 2306.15595, equation 4). ``llama3``: a ramp over turns in the original context (Llama
    3.1's code, ``apply_scaling``). ``yarn``: a ramp over the index of the pair (arXiv 2309.00071, section 3.2).
    """
    if scaling.kind == "linear":
        return np.zeros_like(frequency_R)
    original = scaling.original_context
    if scaling.kind == "llama3":
        turns_R = frequency_R * original / (2 * math.pi)
        return np.interp(turns_R, [scaling.low_frequency_factor, scaling.high_frequency_factor], [0.0, 1.0])

    def pair_of(turns: float) -> float:
        """The index of the pair that turns so often in the original context."""
        return spec.dim / 2 * math.log(original / (2 * math.pi * turns), spec.base)

    first, last = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, spec.dim - 1)
    width = last - first or 0.001  # as in the reference code: a ramp of no width is a step
    ramp_R: np.ndarray = np.clip((np.arange(len(frequency_R)) - first) / width, 0, 1)
    return 1 - ramp_R


def _magnitude(scaling: RotaryScaling) -> float:
    """What YaRN multiplies rotated vectors by: 0.1 ln(factor) + 1 (arXiv 2309.00071, equation 15); else 1."""
    if scaling.kind != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def grown(coefficient: float) -> float:
        return 0.1 * coefficient * math.log(max(scaling.factor, 1.0)) + 1

    if scaling.mscale and scaling.mscale_all_dim:  # DeepSeek's pair of coefficients
        return grown(scaling.mscale) / grown(scaling.mscale_all_dim)
    return grown(1.0)


def rotate(spec: Rotary, x_BTNH: Array, position_T: Array) -> Array:
    """Turn the first ``dim`` numbers of each head, in float32 at least (arXiv 2104.09864, equation 34)."""
    frequency_R = spec.base ** (-2 * np.arange(spec.dim // 2) / spec.dim)
    magnitude = 1.0
    if spec.scaling is not None:
        kept_R = _kept_share(spec, spec.scaling, frequency_R)
        frequency_R = frequency_R * (kept_R + (1 - kept_R) / spec.scaling.factor)
        magnitude = _magnitude(spec.scaling)
    dtype = jnp.promote_types(x_BTNH.dtype, jnp.float32)
    angle_TR = position_T.astype(dtype)[:, None] * jnp.asarray(frequency_R, dtype)
    cos_TNR, sin_TNR = magnitude * jnp.cos(angle_TR)[:, None], magnitude * jnp.sin(angle_TR)[:, None]
    turned, passed = jnp.split(x_BTNH, [spec.dim], -1)
    if spec.interleaved:
        a_BTNR, b_BTNR = turned[..., 0::2], turned[..., 1::2]
    else:
        a_BTNR, b_BTNR = jnp.split(turned, 2, -1)
    pair = a_BTNR * cos_TNR - b_BTNR * sin_TNR, b_BTNR * cos_TNR + a_BTNR * sin_TNR
    joined = jnp.stack(pair, -1).reshape(turned.shape) if spec.interleaved else jnp.concatenate(pair, -1)
    return jnp.concatenate([joined.astype(x_BTNH.dtype), passed], -1)


def project(spec: Attention, params: Params, x_BTD: Array, position_T: Array) -> tuple[Array, Array, Array]:
    """Queries (B, T, N, H), keys and values (B, T, K, H) of tokens at these positions, normalised and turned."""

    def heads(name: str, norm: Norm | None) -> Array:
        y_BTS, norm_params = linear(params[name], x_BTD), params.get(f"{name}_norm")
        if spec.qk_norm_span == "full":
            y_BTS = normalise(norm, norm_params, y_BTS)
        y_BTNH = y_BTS.reshape(*y_BTS.shape[:2], -1, spec.head_dim)
        return normalise(norm, norm_params, y_BTNH) if spec.qk_norm_span == "head" else y_BTNH

    q_BTNH, k_BTKH, v_BTKH = heads("query", spec.qk_norm), heads("key", spec.qk_norm), heads("value", None)
    if spec.rotary is not None:
        q_BTNH, k_BTKH = rotate(spec.rotary, q_BTNH, position_T), rotate(spec.rotary, k_BTKH, position_T)
    return q_BTNH, k_BTKH, v_BTKH


def mix(spec: Attention, params: Params, q_BTNH: Array, k_BUKH: Array, v_BUKH: Array, seen_TU: Array) -> Array:
    """Values mixed by the softmax of the scores that are seen, and projected: (B, T, D)."""
    batch, tokens = q_BTNH.shape[:2]
    q_BTKGH = q_BTNH.reshape(batch, tokens, spec.kv_heads, -1, spec.head_dim)
    scale = spec.head_dim**-0.5 if spec.scale is None else spec.scale
    scores_BKGTU = jnp.einsum("btkgh,bukh->bkgtu", q_BTKGH, k_BUKH) * scale
    weights_BKGTU = jax.nn.softmax(jnp.where(seen_TU, scores_BKGTU, -jnp.inf))
    mixed_BTKGH = jnp.einsum("bkgtu,bukh->btkgh", weights_BKGTU, v_BUKH)
    return linear(params["output"], mixed_BTKGH.reshape(batch, tokens, -1))


def sees(spec: Attention, query_T: Array, key_U: Array) -> Array:
    """(T, U), true where a query's position sees a key's: itself and what precedes it, within the window."""
    age_TU = query_T[:, None] - key_U
    return (age_TU >= 0) if spec.window is None else (age_TU >= 0) & (age_TU < spec.window)


def attend(spec: Attention, params: Params, x_BTD: Array) -> Array:
    """Multi-head (arXiv 1706.03762, section 3.2.2) or grouped-query attention (arXiv 2305.13245, section 2.2)."""
    position_T = jnp.arange(x_BTD.shape[1])
    return mix(spec, params, *project(spec, params, x_BTD, position_T), sees(spec, position_T, position_T))


def feed(spec: FeedForward, params: Params, x_BTD: Array) -> Array:
    """down(act(up x)), or when gated down(act(gate x) * up x) (arXiv 2002.05202, equation 6)."""
    act, up = ACTIVATIONS[spec.activation], linear(params["up"], x_BTD)
    return linear(params["down"], act(linear(params["gate"], x_BTD)) * up if spec.gated else act(up))


def finish_block(spec: Block, params: Params, x_BTD: Array, attended_BTD: Array) -> Array:
    """What follows attention in a layer: x + post(attended), then the same around the feed-forward: (B, T, D)."""
    _, feed_forward = supported(spec)
    x_BTD = x_BTD + normalise(spec.attention_post_norm, params.get("attention_post_norm"), attended_BTD)
    y_BTD = normalise(spec.feed_forward_norm, params.get("feed_forward_norm"), x_BTD)
    y_BTD = feed(feed_forward, params["feed_forward"], y_BTD)
    return x_BTD + normalise(spec.feed_forward_post_norm, params.get("feed_forward_post_norm"), y_BTD)


def run_block(spec: Block, params: Params, x_BTD: Array) -> Array:
    """One layer: (B, T, D); ValueError for a component that is not built."""
    attention, _ = supported(spec)
    y_BTD = normalise(spec.attention_norm, params.get("attention_norm"), x_BTD)
    return finish_block(spec, params, x_BTD, attend(attention, params["attention"], y_BTD))


def embed(spec: ModelSpec, params: Params, tokens_BT: Array, position_T: Array) -> Array:
    """What the first layer takes: (B, T, D)."""
    x_BTD: Array = params["embedding"]["weight"][tokens_BT]
    if spec.embedding_scale is not None:
        x_BTD = x_BTD * spec.embedding_scale
    return x_BTD + params["position"]["weight"][position_T] if spec.learned_positions else x_BTD


def unembed(spec: ModelSpec, params: Params, x_BTD: Array) -> Array:
    """Logits (B, T, V) of what the last layer gives."""
    x_BTD = normalise(spec.final_norm, params["norm"], x_BTD)
    logits_BTV = linear(params["embedding" if spec.tied else "head"], x_BTD)
    if (cap := spec.logit_softcap) is not None:
        logits_BTV = cap * jnp.tanh(logits_BTV / cap)
    return logits_BTV


def forward(spec: ModelSpec, params: Params, tokens_BT: Array) -> Array:
    """Logits (B, T, V) for token ids (B, T); ValueError for more tokens than the context."""
    tokens = tokens_BT.shape[1]
    if tokens > spec.context:
        raise ValueError(f"a sequence of {tokens} tokens is longer than the context of {spec.context}")
    x_BTD = embed(spec, params, tokens_BT, jnp.arange(tokens))
    for index, block in enumerate(spec.blocks):
        x_BTD = run_block(block, params["blocks"][str(index)], x_BTD)
    return unembed(spec, params, x_BTD)
