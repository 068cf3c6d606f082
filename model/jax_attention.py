"""Attention in JAX: what a query sees, the softmax of scores, and grouped heads; latent heads are ``jax_latent``'s.

Dimension suffixes: B batch, T tokens, U tokens that they may see, D width, N query heads, K key/value heads, G query
heads a key/value head, H numbers that a query and a key share, V numbers of a value, S any span.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import Array

from accounting.spec import Attention, LatentAttention, Norm
from model.jax_latent import expand_latent, init_latent, project_latent
from model.jax_layers import Params, init_linear, init_norms, linear, normalise
from model.jax_rotary import rotate, score_magnitude


def init_attention(spec: Attention | LatentAttention, width: int, residual_std: float, keys: Iterator[Array]) -> Params:
    """Projections, the norms between them, and a score of 0 for each sink."""
    if isinstance(spec, LatentAttention):
        return init_latent(spec, width, residual_std, keys)
    query_span, key_span = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    per_head = spec.qk_norm_span == "head"
    norms = {
        "query_norm": (spec.qk_norm, spec.head_dim if per_head else query_span),
        "key_norm": (spec.qk_norm, spec.head_dim if per_head else key_span),
    }
    sinks = {"sinks": jnp.zeros(spec.heads)} if spec.sinks else {}
    return {
        "query": init_linear(next(keys), query_span, width, spec.bias),
        "key": init_linear(next(keys), key_span, width, spec.bias),
        "value": init_linear(next(keys), key_span, width, spec.bias),
        "output": init_linear(next(keys), width, query_span, spec.output_bias, residual_std),
        **init_norms(norms),
        **sinks,
    }


def project(
    spec: Attention | LatentAttention, params: Params, x_BTD: Array, position_T: Array
) -> tuple[Array, tuple[Array, Array]]:
    """Queries (B, T, N, H) of tokens at these positions, and the two arrays that ``expand`` takes, tokens on axis 1."""
    if isinstance(spec, LatentAttention):
        return project_latent(spec, params, x_BTD, position_T)
    return _project_grouped(spec, params, x_BTD, position_T)


def _project_grouped(
    spec: Attention, params: Params, x_BTD: Array, position_T: Array
) -> tuple[Array, tuple[Array, Array]]:
    """Queries (B, T, N, H), keys and values (B, T, K, H), normalised and turned.

    Multi-head (arXiv 1706.03762, section 3.2.2) or grouped-query attention (arXiv 2305.13245, section 2.2).
    """

    def heads(name: str, norm: Norm | None) -> Array:
        y_BTS, norm_params = linear(params[name], x_BTD), params.get(f"{name}_norm")
        if spec.qk_norm_span == "full":
            y_BTS = normalise(norm, norm_params, y_BTS)
        y_BTNH = y_BTS.reshape(*y_BTS.shape[:2], -1, spec.head_dim)
        return normalise(norm, norm_params, y_BTNH) if spec.qk_norm_span == "head" else y_BTNH

    q_BTNH, k_BTKH, v_BTKH = heads("query", spec.qk_norm), heads("key", spec.qk_norm), heads("value", None)
    if spec.rotary is not None:
        q_BTNH, k_BTKH = rotate(spec.rotary, q_BTNH, position_T), rotate(spec.rotary, k_BTKH, position_T)
    return q_BTNH, (k_BTKH, v_BTKH)


def expand(spec: Attention | LatentAttention, params: Params, left: Array, right: Array) -> tuple[Array, Array]:
    """Keys (B, U, K, H) and values (B, U, K, V)."""
    return expand_latent(spec, params, left, right) if isinstance(spec, LatentAttention) else (left, right)


def sees(spec: Attention | LatentAttention, query_T: Array, key_U: Array) -> Array:
    """(T, U), true where a query's position sees a key's: itself and what precedes it, within the window."""
    age_TU = query_T[:, None] - key_U
    return (age_TU >= 0) if spec.window is None else (age_TU >= 0) & (age_TU < spec.window)


def _scale(spec: Attention | LatentAttention) -> float:
    """What multiplies the scores."""
    if isinstance(spec, LatentAttention):
        return float(spec.score_width**-0.5 * score_magnitude(spec.rotary))
    return float(spec.head_dim**-0.5) if spec.scale is None else spec.scale


def mix(
    spec: Attention | LatentAttention, params: Params, q_BTNH: Array, k_BUKH: Array, v_BUKV: Array, seen_TU: Array
) -> Array:
    """softmax(scale q k') v over what is seen (arXiv 1706.03762, equation 1), projected: (B, T, D).

    ``softcap`` bounds the scores, c tanh(s / c) (arXiv 2408.00118, section 2). A head's sink takes its share of the
    softmax and has no value (arXiv 2508.10925, section 2).
    """
    batch, tokens = q_BTNH.shape[:2]
    q_BTKGH = q_BTNH.reshape(batch, tokens, k_BUKH.shape[2], -1, k_BUKH.shape[3])
    scores_BKGTU = jnp.einsum("btkgh,bukh->bkgtu", q_BTKGH, k_BUKH) * _scale(spec)
    if isinstance(spec, Attention) and spec.softcap is not None:
        scores_BKGTU = spec.softcap * jnp.tanh(scores_BKGTU / spec.softcap)
    scores_BKGTU = jnp.where(seen_TU, scores_BKGTU, -jnp.inf)
    if "sinks" in params:
        sinks_KG11 = params["sinks"].reshape(*scores_BKGTU.shape[1:3], 1, 1)
        sinks_BKGT1 = jnp.broadcast_to(sinks_KG11, (*scores_BKGTU.shape[:-1], 1))
        weights_BKGTU = jax.nn.softmax(jnp.concatenate((scores_BKGTU, sinks_BKGT1), -1))[..., :-1]
    else:
        weights_BKGTU = jax.nn.softmax(scores_BKGTU)
    mixed_BTKGV = jnp.einsum("bkgtu,bukv->btkgv", weights_BKGTU, v_BUKV)
    return linear(params["output"], mixed_BTKGV.reshape(batch, tokens, -1))


def attend(spec: Attention | LatentAttention, params: Params, x_BTD: Array) -> Array:
    """The attention of a layer over whole sequences: (B, T, D)."""
    position_T = jnp.arange(x_BTD.shape[1])
    q_BTNH, pair = project(spec, params, x_BTD, position_T)
    return mix(spec, params, q_BTNH, *expand(spec, params, *pair), sees(spec, position_T, position_T))
