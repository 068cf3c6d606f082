"""Rotary positions in PyTorch: frequencies, their scalings, and the rotation of queries and keys.

Dimension suffixes: B batch, T tokens, N heads, H head_dim, R rotated pairs.
"""

import math

import torch
from torch import Tensor

from accounting.spec import Rotary, RotaryScaling

RotaryTables = dict[Rotary, tuple[Tensor, Tensor]]


def rotary_frequencies(spec: Rotary, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Radians a token for each pair, (R,): base^(-2r/dim) (arXiv 2104.09864, section 3.2.2), then the scaling.

    Every scaling divides by ``factor`` all but a ``kept`` share of each frequency. The share is 0 for ``linear``
    (arXiv 2306.15595, equation 4), a ramp over turns in the original context for ``llama3`` (Llama 3.1's code,
    ``apply_scaling``), and a ramp over the index of the pair for ``yarn`` (arXiv 2309.00071, section 3.2).
    """
    pair_R = torch.arange(spec.dim // 2, device=device, dtype=dtype)
    frequency_R = spec.base ** (-2 * pair_R / spec.dim)
    scaling = spec.scaling
    if scaling is None:
        return frequency_R
    if scaling.kind == "linear":
        return frequency_R / scaling.factor
    if scaling.kind == "llama3":
        turns_R = frequency_R * scaling.original_context / (2 * math.pi)
        low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
        kept_R = ((turns_R - low) / (high - low)).clamp(0, 1)
    else:
        first, last = (
            spec.dim * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(spec.base))
            for turns in (scaling.beta_fast, scaling.beta_slow)
        )
        if scaling.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, spec.dim - 1)
        width = last - first or 0.001  # as in the reference code: a ramp of no width is a step
        kept_R = 1 - ((pair_R - first) / width).clamp(0, 1)
    return frequency_R * (kept_R + (1 - kept_R) / scaling.factor)


def _grown(scaling: RotaryScaling, coefficient: float) -> float:
    """0.1 c ln(factor) + 1 (arXiv 2309.00071, equation 15, where c is 1)."""
    return 0.1 * coefficient * math.log(max(scaling.factor, 1.0)) + 1


def rotary_magnitude(spec: Rotary) -> float:
    """What YaRN multiplies rotated vectors by; else 1."""
    scaling = spec.scaling
    if scaling is None or scaling.kind != "yarn":
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


def _pair_axis(spec: Rotary) -> int:
    """Where the two members of a pair lie, once the numbers of a head are unflattened into pairs."""
    return -1 if spec.interleaved else -2


def rotary_table(spec: Rotary, position_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines of position times frequency for each number of a pair: (T, dim), in float32 at least."""
    dtype = torch.promote_types(dtype, torch.float32)
    angle_TR = position_T.to(dtype)[:, None] * rotary_frequencies(spec, position_T.device, dtype)
    cos_TR, sin_TR = (rotary_magnitude(spec) * wave_TR for wave_TR in (angle_TR.cos(), angle_TR.sin()))
    axis = _pair_axis(spec)
    return torch.stack((cos_TR, cos_TR), axis).flatten(-2), torch.stack((-sin_TR, sin_TR), axis).flatten(-2)


def rotate(x_BNTH: Tensor, spec: Rotary, table: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the first ``dim`` numbers of each head, pair by pair (arXiv 2104.09864, equation 34)."""
    cos, signed_sin = table
    first = x_BNTH[..., : spec.dim]
    pairs = torch.unflatten(first, -1, (-1, 2) if spec.interleaved else (2, -1))
    partners = pairs.roll(1, _pair_axis(spec)).flatten(-2)
    turned = torch.addcmul(first * cos, partners, signed_sin).type_as(x_BNTH)
    return turned if spec.dim == x_BNTH.shape[-1] else torch.cat((turned, x_BNTH[..., spec.dim :]), -1)
