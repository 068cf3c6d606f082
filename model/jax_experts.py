"""A mixture of experts in JAX: the router's choice, and the experts in grouped products over sorted tokens.

Dimension suffixes: B batch, T tokens, M tokens of the whole batch, D width, E experts, G groups of experts, C chosen
experts of a token, A = M C choices, S and O any span that goes into a matrix and comes out.
"""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from accounting.spec import Experts, Router
from model.jax_layers import Params, feed, init_feed_forward, init_linear, linear

TINY = 1e-20  # DeepSeek-V3's guard of a sum that underflows: its published code adds it


class Routing(NamedTuple):
    """What a router makes of M tokens: logits (M, E), and indices and weights (M, C) of the experts that it chose."""

    logits: Array
    indices: Array
    weights: Array


def init_experts(spec: Experts, width: int, residual_std: float, keys: Iterator[Array]) -> Params:
    """A router that favours no expert, each expert under its number, and the shared one."""
    router = init_linear(next(keys), spec.experts, width, spec.router.bias)
    if spec.router.selection_bias:
        router["selection_bias"] = jnp.zeros(spec.experts)
    experts = {str(e): init_feed_forward(spec.expert, width, residual_std, keys) for e in range(spec.experts)}
    params: Params = {"router": router, "experts": experts}
    if spec.shared is not None:
        params["shared"] = init_feed_forward(spec.shared, width, residual_std, keys)
    return params


def score(spec: Router, logits: Array) -> Array:
    """Softmax or sigmoid over the last axis."""
    return jax.nn.sigmoid(logits) if spec.score == "sigmoid" else jax.nn.softmax(logits)


def only_top_groups(spec: Router, scores_ME: Array) -> Array:
    """(M, E) with minus infinity outside the best groups (arXiv 2412.19437, section 2.1.2).

    A group is as good as its two best experts together (DeepSeek-V3's published code).
    """
    scores_MGE = scores_ME.reshape(len(scores_ME), spec.groups, -1)
    best_MG = jax.lax.top_k(scores_MGE, min(2, scores_MGE.shape[-1]))[0].sum(-1)
    top = jax.lax.top_k(best_MG, spec.top_groups)[1]
    inside_MG = (top[..., None] == jnp.arange(spec.groups)).any(1)
    return jnp.where(inside_MG[..., None], scores_MGE, -jnp.inf).reshape(scores_ME.shape)


def route(spec: Router, active: int, params: Params, x_MD: Array) -> Routing:
    """Logits of all experts, and the choice of ``active`` of them, in float32 at least, for tokens (M, D).

    Scores of all and then the top k (arXiv 2101.03961, section 2.1), or scores of the top k logits (arXiv 1701.06538,
    equation 3). ``selection_bias`` has a say in the choice alone (arXiv 2408.15664, section 3): its gradient is 0.
    """
    wide = jnp.promote_types(x_MD.dtype, jnp.float32)
    logits_ME = linear({name: leaf.astype(wide) for name, leaf in params.items()}, x_MD.astype(wide))
    scores_ME = score(spec, logits_ME) if spec.order == "score_first" else logits_ME
    choice_ME = scores_ME + params["selection_bias"] if spec.selection_bias else scores_ME
    if spec.top_groups < spec.groups:
        choice_ME = only_top_groups(spec, choice_ME)
    indices_MC = jax.lax.top_k(choice_ME, active)[1]
    weights_MC = jnp.take_along_axis(scores_ME, indices_MC, -1)
    if spec.order == "top_k_first":
        weights_MC = score(spec, weights_MC)
    if spec.normalize:
        weights_MC = weights_MC / (weights_MC.sum(-1, keepdims=True) + TINY)
    return Routing(logits_ME, indices_MC, weights_MC * spec.scale)


def _stack(spec: Experts, params: Params) -> Params:
    """The parameters of the experts along a new first axis, in the order of their numbers."""
    stacked: Params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(params[str(e)] for e in range(spec.experts)))
    return stacked


def _expert_linear(expert_A: Array, counts_E: Array, params: Params, x_AS: Array) -> Array:
    """Each row by the matrix of its expert, rows sorted by expert and so many for each: (A, O)."""
    y_AO = jax.lax.ragged_dot(x_AS, params["weight"].swapaxes(1, 2), counts_E)
    return y_AO + params["bias"][expert_A] if "bias" in params else y_AO


def feed_experts(spec: Experts, params: Params, x_BTD: Array) -> tuple[Array, Routing]:
    """The weighted sum of a token's experts, and of the shared one for every token, (B, T, D); and how it was routed.

    No token is dropped. XLA multiplies each row by its expert alone only where it has such a product; a CPU
    multiplies by all of them and masks.
    """
    x_MD = x_BTD.reshape(-1, x_BTD.shape[-1])
    routing = route(spec.router, spec.active, params["router"], x_MD)
    chosen_A = routing.indices.reshape(-1)
    order_A = jnp.argsort(chosen_A)
    token_A = order_A // spec.active
    affine = partial(_expert_linear, chosen_A[order_A], jnp.bincount(chosen_A, length=spec.experts))
    out_AD = feed(spec.expert, _stack(spec, params["experts"]), x_MD[token_A], affine)
    weighted_AD = out_AD * routing.weights.reshape(-1)[order_A, None]
    y_BTD = jnp.zeros_like(x_MD).at[token_A].add(weighted_AD.astype(x_MD.dtype)).reshape(x_BTD.shape)
    if spec.shared is not None:
        y_BTD = y_BTD + feed(spec.shared, params["shared"], x_BTD)
    return y_BTD, routing
