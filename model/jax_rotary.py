"""Rotary positions in JAX: frequencies, their scalings, and the rotation of queries and keys.

Dimension suffixes: B batch, T tokens, N heads, H head_dim, R rotated pairs.
"""

import math

import jax.numpy as jnp
import numpy as np
from jax import Array

from accounting.spec import Rotary, RotaryScaling


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


def _grown(scaling: RotaryScaling, coefficient: float) -> float:
    """0.1 c ln(factor) + 1 (arXiv 2309.00071, equation 15, where c is 1)."""
    return 0.1 * coefficient * math.log(max(scaling.factor, 1.0)) + 1


def _magnitude(scaling: RotaryScaling) -> float:
    """What YaRN multiplies rotated vectors by; else 1."""
    if scaling.kind != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:  # DeepSeek's pair of coefficients
        return _grown(scaling, scaling.mscale) / _grown(scaling, scaling.mscale_all_dim)
    return _grown(scaling, 1.0)


def score_magnitude(spec: Rotary) -> float:
    """What DeepSeek multiplies scores by where ``mscale_all_dim`` is given: once for queries, once for keys."""
    scaling = spec.scaling
    return _grown(scaling, scaling.mscale_all_dim) ** 2 if scaling and scaling.mscale_all_dim else 1.0


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
