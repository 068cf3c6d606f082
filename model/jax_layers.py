"""The parts of a layer in JAX that know nothing of their neighbours: affine maps, norms and feed-forwards.

Parameters are a nested dict of arrays; each ``init_`` makes those of one part, in JAX's default float.

Dimension suffixes: B batch, T tokens, D width, F inner width of a feed-forward, S any span that goes in. A linear
weight is stored (out, in).
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from accounting.spec import Activation, FeedForward, Norm

Params = dict[str, Any]

ACTIVATIONS: dict[Activation, Callable[[Array], Array]] = {
    "gelu": partial(jax.nn.gelu, approximate=False),  # arXiv 1606.08415, section 2
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
}
INITIAL_STD = 0.02  # GPT-2 (Radford et al. 2019), whose residual projections are divided by sqrt(2 L) (section 2.3)


def init_linear(key: Array, width_out: int, width_in: int, bias: bool, std: float = INITIAL_STD) -> Params:
    """Normal weights and no offset."""
    weight = std * jax.random.normal(key, (width_out, width_in))
    return {"weight": weight, "bias": jnp.zeros(width_out)} if bias else {"weight": weight}


def init_norms(specs: dict[str, tuple[Norm | None, int]]) -> Params:
    """The identity for each name whose norm is not None; the others have no parameters and no entry."""
    params: Params = {}
    for name, (spec, width) in specs.items():
        if spec is not None:
            params[name] = {"weight": jnp.full(width, 0.0 if spec.unit_offset else 1.0)}
            if spec.bias:
                params[name]["bias"] = jnp.zeros(width)
    return params


def init_feed_forward(spec: FeedForward, width: int, residual_std: float, keys: Iterator[Array]) -> Params:
    """Two matrices, or three when gated."""
    params = {
        "up": init_linear(next(keys), spec.width, width, spec.bias),
        "down": init_linear(next(keys), width, spec.width, spec.bias, residual_std),
    }
    if spec.gated:
        params["gate"] = init_linear(next(keys), spec.width, width, spec.bias)
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


def feed(spec: FeedForward, params: Params, x_BTD: Array, affine: Callable[[Params, Array], Array] = linear) -> Array:
    """down(act(up x)), or when gated down(act(gate x) * up x) (arXiv 2002.05202, equation 6): (B, T, D).

    ``affine`` multiplies by a matrix of ``params``, and adds its offset.
    """
    act, up_BTF = ACTIVATIONS[spec.activation], affine(params["up"], x_BTD)
    inner_BTF = meet(spec, affine(params["gate"], x_BTD), up_BTF) if spec.gated else act(up_BTF)
    return affine(params["down"], inner_BTF)


def meet(spec: FeedForward, gate_BTF: Array, up_BTF: Array) -> Array:
    """act(gate) * up, with what gpt-oss does to the two (arXiv 2508.10925; its code's ``swiglu``)."""
    if spec.clamp is not None:
        gate_BTF, up_BTF = jnp.minimum(gate_BTF, spec.clamp), jnp.clip(up_BTF, -spec.clamp, spec.clamp)
    if spec.up_offset:
        up_BTF = up_BTF + spec.up_offset
    if spec.gain != 1:
        return gate_BTF * jax.nn.sigmoid(spec.gain * gate_BTF) * up_BTF
    return ACTIVATIONS[spec.activation](gate_BTF) * up_BTF
