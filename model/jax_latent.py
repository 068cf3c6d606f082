"""Multi-head latent attention in JAX: DeepSeek's keys and values that pass through a bottleneck.

Source: arXiv 2405.04434, section 2.1; arXiv 2412.19437, section 2.1.1.

Dimension suffixes: B batch, T tokens, U tokens that they may see, D width, N heads, H numbers that a query and a key
share, V numbers of a value, R rank of the latent, P rotated numbers.
"""

from collections.abc import Iterator

import jax.numpy as jnp
from jax import Array

from accounting.spec import LatentAttention
from model.jax_layers import Params, init_linear, init_norms, linear, normalise
from model.jax_rotary import rotate


def init_latent(spec: LatentAttention, width: int, residual_std: float, keys: Iterator[Array]) -> Params:
    """Projections down and up, and the norms between them."""
    query_span = spec.heads * spec.score_width
    both_span, value_span = spec.heads * (spec.nope_head_dim + spec.value_head_dim), spec.heads * spec.value_head_dim
    params: Params = {
        "kv_down": init_linear(next(keys), spec.kv_rank + spec.rope_head_dim, width, spec.bias),
        "kv_up": init_linear(next(keys), both_span, spec.kv_rank, bias=False),
        "output": init_linear(next(keys), width, value_span, spec.bias, residual_std),
        **init_norms({"kv_norm": (spec.norm, spec.kv_rank)}),
    }
    if spec.query_rank is None:
        return params | {"query": init_linear(next(keys), query_span, width, bias=False)}
    return params | {
        "query_down": init_linear(next(keys), spec.query_rank, width, spec.bias),
        "query_up": init_linear(next(keys), query_span, spec.query_rank, bias=False),
        **init_norms({"query_norm": (spec.norm, spec.query_rank)}),
    }


def _queries(spec: LatentAttention, params: Params, x_BTD: Array, position_T: Array) -> Array:
    """(B, T, N, H), the last numbers of each head rotated."""
    if spec.query_rank is None:
        q_BTS = linear(params["query"], x_BTD)
    else:
        low_BTS = normalise(spec.norm, params["query_norm"], linear(params["query_down"], x_BTD))
        q_BTS = linear(params["query_up"], low_BTS)
    q_BTNH = q_BTS.reshape(*q_BTS.shape[:2], spec.heads, -1)
    plain, turned = jnp.split(q_BTNH, [spec.nope_head_dim], -1)
    return jnp.concatenate((plain, rotate(spec.rotary, turned, position_T)), -1)


def project_latent(
    spec: LatentAttention, params: Params, x_BTD: Array, position_T: Array
) -> tuple[Array, tuple[Array, Array]]:
    """Queries (B, T, N, H), and each token's latent (B, T, R) and the rotated key (B, T, P) that all heads share."""
    latent_BTR, key_BTP = jnp.split(linear(params["kv_down"], x_BTD), [spec.kv_rank], -1)
    key_BTP = rotate(spec.rotary, key_BTP[:, :, None], position_T)[:, :, 0]
    return _queries(spec, params, x_BTD, position_T), (normalise(spec.norm, params["kv_norm"], latent_BTR), key_BTP)


def expand_latent(spec: LatentAttention, params: Params, latent_BUR: Array, key_BUP: Array) -> tuple[Array, Array]:
    """Keys (B, U, N, H) and values (B, U, N, V)."""
    both_BUS = linear(params["kv_up"], latent_BUR)
    plain, v_BUNV = jnp.split(both_BUS.reshape(*both_BUS.shape[:2], spec.heads, -1), [spec.nope_head_dim], -1)
    shared = jnp.broadcast_to(key_BUP[:, :, None], (*plain.shape[:3], spec.rope_head_dim))
    return jnp.concatenate((plain, shared), -1), v_BUNV
