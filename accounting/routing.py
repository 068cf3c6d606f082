"""Routers, and the losses that keep their experts busy, in numpy: the reference for decoders.

T tokens, E experts, k active. Everything is computed in float64 from logits of any float
type: in half precision a z-loss overflows from logits of 256 on.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from accounting.spec import Router

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Convention = Literal["switch", "huggingface"]

#: Added to the sum that normalises, as in DeepSeek-V3's code: sigmoids may all be 0.
EPSILON = 1e-20
#: How far from 1 a row of probabilities may sum: rounded to bfloat16 it is within half of this.
PROBABILITY_TOLERANCE = 2**-8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Routing:
    """What a router decides for T tokens.

    ``indices`` (T, k): the chosen experts, the first choice first. ``weights`` (T, k): what
    their outputs are multiplied by. ``scores`` (T, E): softmax or sigmoid of the logits,
    neither normalised nor scaled; where the order is top_k_first, 0 for those not chosen.
    """

    indices: Integers
    weights: Floats
    scores: Floats


def route(router: Router, logits: ArrayLike, active: int, selection_bias: ArrayLike | None = None) -> Routing:
    """Choose and weigh ``active`` experts for each row of ``logits`` (T, E).

    ``selection_bias`` (E,), for a router that has one, is added to what is ranked (scores, or
    logits where the order is top_k_first) and to nothing else (arXiv 2408.15664, equation 3).
    Of several groups those compete whose two best experts add up to most (DeepSeek-V3,
    arXiv 2412.19437, section 2.1.2). Equal scores, as of saturated logits, are decided by
    the logits; which of two equal logits wins is no part of the contract. Raises ValueError
    for logits that are not finite or are probabilities, for more active experts than may
    compete, and for a bias that is missing, unasked for or of another shape.
    """
    values = _logits(logits)
    if values.ndim != 2:
        raise ValueError(f"logits: expected the shape (tokens, experts), got {values.shape}")
    experts = values.shape[1]
    if experts % router.groups:
        raise ValueError(f"router.groups: expected a divisor of the {experts} experts, got {router.groups}")
    eligible = experts // router.groups * router.top_groups
    if not 1 <= active <= eligible:
        raise ValueError(f"active: expected from 1 to {eligible} experts, got {active}")
    if router.selection_bias != (selection_bias is not None):
        raise ValueError(f"selection_bias: expected {'one' if router.selection_bias else 'none'} for this router")
    bias = np.zeros(experts) if selection_bias is None else np.asarray(selection_bias, np.float64)
    if bias.shape != (experts,) or not np.isfinite(bias).all():
        raise ValueError(f"selection_bias: expected {experts} finite numbers, got the shape {bias.shape}")

    score = _softmax if router.score == "softmax" else _sigmoid
    choice = (score(values) if router.order == "score_first" else values) + bias
    indices = _largest(active, _competing(choice, router), values)
    if router.order == "top_k_first":
        chosen = np.full_like(values, -np.inf)
        np.put_along_axis(chosen, indices, np.take_along_axis(values, indices, -1), -1)
        scores = score(chosen)
    else:
        scores = score(values)
    weights = np.take_along_axis(scores, indices, -1)
    if router.normalize:
        weights = weights / (weights.sum(-1, keepdims=True) + EPSILON)
    return Routing(indices=indices, weights=router.scale * weights, scores=scores)


def loads(indices: ArrayLike, experts: int) -> Integers:
    """How many tokens each of the experts was chosen for (E,), from ``Routing.indices``."""
    counts: Integers = np.bincount(np.asarray(indices, np.int64).ravel(), minlength=experts)
    if len(counts) != experts:
        raise ValueError(f"indices: expected experts below {experts}, got {len(counts) - 1}")
    return counts


def balance(shares: Iterable[Any], probabilities: Iterable[Any]) -> float | Fraction:
    """E times the sum of f P over the experts, exact for Fractions.

    ``shares``: f, the fraction of tokens sent to each expert; ``probabilities``: P, the
    router's probability for it, a mean over tokens. Switch Transformers, arXiv 2101.03961,
    equation 4 without its alpha. It is 1 where either is uniform, and E where one expert
    has all of both; it is below 1 where they are opposed.
    """
    products = [share * probability for share, probability in zip(shares, probabilities, strict=True)]
    total: float | Fraction = sum(products)
    return len(products) * total


def balance_loss(
    logits: ArrayLike,
    active: int,
    *,
    alpha: float = 1.0,
    convention: Convention = "switch",
    concatenated: bool = False,
    mask: ArrayLike | None = None,
) -> float:
    """Alpha times the ``balance`` of a router of softmax scores, from logits (T, E) or (layers, T, E).

    ``convention``: how a token with k choices counts in f. ``switch`` counts each 1/k, so
    that f sums to 1 (arXiv 2101.03961, equation 5, for k = 1): 1 when even, at most E/k when
    k experts have everything. ``huggingface`` counts each 1, as its load_balancing_loss_func
    does: k when even, at most E. Only P has a gradient, alpha E f: f is a count.

    Layers are averaged. ``concatenated`` takes their tokens for those of one layer, as
    Hugging Face does, and then layers that collapse on different experts look balanced.
    ``mask``, T numbers 0 or 1 in any shape: tokens at 0 are left out, in every layer; without
    any token the loss is 0. Raises ValueError as ``route`` does, and for another mask.
    """
    layers = _layers(logits, mask)
    experts = layers.shape[-1]
    if not 1 <= active <= experts:
        raise ValueError(f"active: expected from 1 to {experts} experts, got {active}")
    if not layers.size:
        return 0.0
    if concatenated:
        layers = layers.reshape(1, -1, experts)
    counted = active if convention == "switch" else 1
    losses = [
        float(balance(loads(_largest(active, layer), experts) / (counted * len(layer)), _softmax(layer).mean(0)))
        for layer in layers
    ]
    return alpha * sum(losses) / len(losses)


def z_loss(logits: ArrayLike, *, mask: ArrayLike | None = None) -> float:
    """The mean square of a token's logsumexp, from logits (T, E) or (layers, T, E).

    ST-MoE, arXiv 2202.08906, equation 5. ``mask`` and errors are those of ``balance_loss``.
    """
    layers = _layers(logits, mask)
    if not layers.size:
        return 0.0
    largest = layers.max(-1)
    sums = largest + np.log(np.exp(layers - largest[..., None]).sum(-1))
    return float(np.mean(sums**2))


def update_bias(selection_bias: ArrayLike, counts: ArrayLike, rate: float) -> Floats:
    """The selection bias (E,) after a step in which the experts were chosen ``counts`` (E,) times.

    b + u sign(mean load - load): arXiv 2408.15664, algorithm 1, where ``rate`` is u;
    DeepSeek-V3 calls it gamma.
    """
    bias, chosen = np.asarray(selection_bias, np.float64), np.asarray(counts, np.float64)
    if bias.shape != chosen.shape:
        raise ValueError(f"counts: expected the bias's shape {bias.shape}, got {chosen.shape}")
    updated: Floats = bias + rate * np.sign(chosen.mean() - chosen)
    return updated


def _logits(logits: ArrayLike) -> Floats:
    """Logits (..., T, E) in float64."""
    values = np.asarray(logits, np.float64)
    if values.ndim < 2 or not values.shape[-1]:
        raise ValueError(f"logits: expected the shape (tokens, experts), got {values.shape}")
    if not np.isfinite(values).all():
        raise ValueError("logits: expected finite numbers")
    if values.shape[-1] > 1 and values.size:
        ones = np.isclose(values.sum(-1), 1, rtol=0, atol=PROBABILITY_TOLERANCE)
        if (ones & (values >= 0).all(-1)).all(-1).any():
            raise ValueError("logits: got probabilities, rows of numbers from 0 that sum to 1")
    return values


def _layers(logits: ArrayLike, mask: ArrayLike | None) -> Floats:
    """Logits (layers, T, E) of the tokens that count."""
    layers = np.asarray(logits, np.float64)
    if layers.ndim == 2:
        layers = layers[None]
    if layers.ndim != 3:
        raise ValueError(f"logits: expected the shape (tokens, experts) or (layers, ...), got {layers.shape}")
    if mask is not None:
        flat = np.asarray(mask).ravel()
        if flat.shape != layers.shape[1:2] or not np.isin(flat, (0, 1)).all():
            raise ValueError(f"mask: expected 0 or 1 for each of the {layers.shape[1]} tokens")
        layers = layers[:, flat.astype(bool)]
    return _logits(layers)


def _largest(active: int, *keys: Floats) -> Integers:
    """Places (..., k) of the largest of each row, the largest first: by the first key, equals by the next."""
    places: Integers = np.lexsort([-key for key in reversed(keys)], axis=-1)[..., :active]
    return places


def _competing(choice: Floats, router: Router) -> Floats:
    """``choice`` (T, E), and minus infinity for the experts of groups that lost."""
    tokens, experts = choice.shape
    grouped = choice.reshape(tokens, router.groups, experts // router.groups)
    best_two = np.sort(grouped, -1)[..., -2:].sum(-1)
    competes = np.zeros((tokens, router.groups, 1), bool)
    np.put_along_axis(competes, _largest(router.top_groups, best_two)[..., None], True, 1)
    return np.where(competes, grouped, -np.inf).reshape(tokens, experts)


def _softmax(values: Floats) -> Floats:
    exponentials = np.exp(values - values.max(-1, keepdims=True))
    probabilities: Floats = exponentials / exponentials.sum(-1, keepdims=True)
    return probabilities


def _sigmoid(values: Floats) -> Floats:
    small = np.exp(-np.abs(values))
    scores: Floats = np.where(values >= 0, 1.0, small) / (1 + small)
    return scores
