"""Fits of a loss surface to runs: robust regression on the logarithm of the loss, from thousands of starts.

The model is log L(N, D) = logsumexp(a - alpha log N, b - beta log D, e) with A = exp(a), B = exp(b), E = exp(e), and
what is minimised is the sum over runs of the Huber loss of log L(N, D) - log L (Hoffmann et al. 2022, arXiv
2203.15556, section 3.3 and appendix D.2). A sum and not a mean: the mean is so small that an optimizer with absolute
tolerances stops early and reports success (Besiroglu et al. 2024, arXiv 2404.10102). No rule of ``fit`` depends on the
scale of the objective.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import product
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import lsq_linear, minimize

from accounting.descent import BLOCK, RESOLVED, ROUNDING, Floats, Objective, descend
from accounting.scaling import LossSurface

CONSTANTS = tuple(field.name for field in fields(LossSurface))
#: Starts at one optimum differ in value by the square of what they differ by in place: half of float64's digits of
#: the one are all digits of the other.
SAME = 2.0**-26


def grid() -> Floats:
    """The 4,500 starts (a, b, e, alpha, beta) of Hoffmann et al., appendix D.2: shape (4500, 5)."""
    logs, exponents = range(0, 30, 5), (0, 0.5, 1, 1.5, 2)
    return np.array(list(product(logs, logs, (-1, -0.5, 0, 0.5, 1), exponents, exponents)), np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A law, and how far to trust the search that found it.

    delta: the threshold of the Huber loss; 0 for absolute deviations, its limit.
    value: the objective at the law, summed over the runs.
    ended: starts whose optimizer said that it was done, wherever it was.
    at_optimum: starts whose value is the best one, but for SAME of it and for rounding.
    gradient_norm: of the objective in (a, b, e, alpha, beta); of absolute deviations the least subgradient's.
    gradient_bound: what the norm could be at most, were all runs far on one side.
    spread: of each constant, its largest relative difference from the law's over the starts at the optimum.
    """

    law: LossSurface
    objective: Objective
    delta: float
    value: float
    runs: int
    starts: int
    ended: int
    at_optimum: int
    gradient_norm: float
    gradient_bound: float
    spread: Mapping[str, float]

    @property
    def share_at_optimum(self) -> float:
        """The share of starts that ended at the best value found."""
        return self.at_optimum / self.starts

    @property
    def converged(self) -> bool:
        """Whether the gradient is zero, as well as a comparison of values can tell; not that no optimum is better."""
        return self.gradient_norm <= RESOLVED * self.gradient_bound


class Interval(NamedTuple):
    """Two percentiles of a bootstrap."""

    lower: float
    upper: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Intervals:
    """Percentile intervals (Efron 1979) of E, A, B, alpha, beta, and of N_exponent and D_exponent.

    These two are the powers of the budget by which the optimal N and D grow. level: the share of resamples inside.
    unconverged: resamples that reached no optimum with three terms, which are left out.
    laws: the constants of each resample in the order of CONSTANTS, shape (resamples, 5).
    """

    level: float
    resamples: int
    unconverged: int
    bounds: Mapping[str, Interval]
    laws: Floats


def fit(
    parameters: ArrayLike,
    tokens: ArrayLike,
    losses: ArrayLike,
    *,
    objective: Objective = "huber",
    delta: float = 1e-3,
    starts: ArrayLike | None = None,
) -> Fit:
    """The loss surface of some runs, the best of all starts, which advance side by side in JAX.

    parameters, tokens, losses: shape (R,). starts: shape (S, 5), ``grid()`` if absent. "huber" is the sum of Huber
    losses; "lad", least absolute deviations, is its limit of small ``delta``, and starts from there. ValueError for
    runs that cannot be fitted, and where the best fit is no law, an exponent being negative, say.
    """
    runs = _runs(parameters, tokens, losses)
    smallest, first = _delta(objective, delta), _starts(starts)
    counts = np.broadcast_to(runs.counts, (len(first), len(runs.counts)))
    ends = descend(first, counts, runs.size, runs.data, runs.loss, objective=objective, delta=delta)
    return _report(ends.theta, ends.arrived | ends.vanished, runs, objective, smallest)


def fit_scipy(
    parameters: ArrayLike,
    tokens: ArrayLike,
    losses: ArrayLike,
    *,
    objective: Objective = "huber",
    delta: float = 1e-3,
    starts: ArrayLike | None = None,
    average: bool = False,
    tolerance: float | None = 1e-15,
) -> Fit:
    """The second opinion on ``fit``: SciPy's L-BFGS-B from one start after the other, as in the papers.

    average: minimise the mean over runs and not the sum. tolerance: SciPy's ``tol``, its defaults where it is None.
    L-BFGS-B supposes a gradient, which absolute deviations lack where they are least: of "lad" it stops nearby.
    """
    runs = _runs(parameters, tokens, losses)
    smallest, first = _delta(objective, delta), _starts(starts)
    scale = 1 / runs.counts.sum() if average else 1.0

    def scaled(theta: Floats) -> tuple[float, Floats]:
        residuals = _residuals(theta, runs)
        pulls = runs.counts * _slope(residuals, smallest)
        return scale * float(_values(residuals, runs, smallest)), scale * (_jacobian(theta, residuals, runs) @ pulls)

    found = [minimize(scaled, start, jac=True, method="L-BFGS-B", tol=tolerance) for start in first]
    ended = np.array([result.success for result in found])
    return _report(np.array([result.x for result in found]), ended, runs, objective, smallest)


def bootstrap(
    parameters: ArrayLike,
    tokens: ArrayLike,
    losses: ArrayLike,
    *,
    resamples: int,
    seed: int,
    objective: Objective = "huber",
    delta: float = 1e-3,
    level: float = 0.8,
    law: LossSurface | None = None,
) -> Intervals:
    """How far the constants vary over resamples of the runs: row k of the indices drawn is resample k.

    The indices are ``np.random.default_rng(seed).integers(R, size=(resamples, R))``. Every resample starts from
    ``law``, or where that is absent from ``fit`` of all the runs. ValueError as there.
    """
    if not (resamples > 0 and 0 < level < 1):
        raise ValueError(f"expected resamples > 0 and 0 < level < 1, got {resamples} and {level}")
    runs = _runs(parameters, tokens, losses)
    _delta(objective, delta)
    law = law or fit(parameters, tokens, losses, objective=objective, delta=delta).law
    if not law.E > 0:
        raise ValueError(f"law: expected E above 0, got {law.E:g}")
    size = len(runs.folded)
    indices = np.random.default_rng(seed).integers(size, size=(resamples, size))
    counts = np.array([np.bincount(runs.folded[row], minlength=len(runs.counts)) for row in indices], np.float64)
    start = np.array([np.log(law.A), np.log(law.B), np.log(law.E), law.alpha, law.beta])
    starts = np.broadcast_to(start, (resamples, 5))
    ends = descend(starts, counts, runs.size, runs.data, runs.loss, objective=objective, delta=delta)
    laws = _constants(ends.theta)
    kept = laws[ends.arrived & ~ends.vanished]
    if not len(kept):
        raise ValueError("no resample reached an optimum")
    alpha, beta = kept[:, CONSTANTS.index("alpha")], kept[:, CONSTANTS.index("beta")]
    columns = dict(zip(CONSTANTS, kept.T, strict=True))
    columns |= {"N_exponent": beta / (alpha + beta), "D_exponent": alpha / (alpha + beta)}
    tails = [(1 - level) / 2, (1 + level) / 2]
    bounds = {name: Interval(*map(float, np.quantile(column, tails))) for name, column in columns.items()}
    return Intervals(
        level=level,
        resamples=resamples,
        unconverged=resamples - len(kept),
        bounds=MappingProxyType(bounds),
        laws=laws,
    )


class _Runs(NamedTuple):
    """Logarithms of different runs, shape (R,), how often each occurs, and which of them each given run is."""

    size: Floats
    data: Floats
    loss: Floats
    counts: Floats
    folded: NDArray[np.intp]


def _runs(parameters: ArrayLike, tokens: ArrayLike, losses: ArrayLike) -> _Runs:
    """The runs, equal ones folded into one; ValueError where no law can be told from them."""
    columns = [np.asarray(column, np.float64) for column in (parameters, tokens, losses)]
    for name, column in zip(("parameters", "tokens", "losses"), columns, strict=True):
        if column.ndim != 1 or not np.all(np.isfinite(column) & (column > 0)):
            raise ValueError(f"{name}: expected a row of positive, finite numbers")
    if len({len(column) for column in columns}) > 1:
        raise ValueError(f"expected rows of one length, got {', '.join(str(len(column)) for column in columns)}")
    rows, folded, counts = np.unique(np.stack(columns, 1), axis=0, return_inverse=True, return_counts=True)
    if len(rows) < 6:
        raise ValueError(f"expected at least 6 different runs for 5 constants, got {len(rows)}")
    for name, column in zip(("parameters", "tokens"), rows.T, strict=False):
        if np.ptp(column) == 0:
            raise ValueError(f"{name}: expected numbers that differ, every run has {column[0]:g}")
    size, data, loss = np.log(rows.T)
    return _Runs(size, data, loss, counts.astype(np.float64), folded)


def _delta(objective: str, delta: float) -> float:
    """The threshold at which the objective is measured."""
    if objective not in ("huber", "lad"):
        raise ValueError(f"objective: expected huber or lad, got {objective}")
    if not 0 < delta < np.inf:
        raise ValueError(f"delta: expected a positive number, got {delta}")
    return delta if objective == "huber" else 0.0


def _starts(starts: ArrayLike | None) -> Floats:
    array = grid() if starts is None else np.asarray(starts, np.float64)
    if array.ndim != 2 or array.shape[1] != 5 or not len(array) or not np.isfinite(array).all():
        raise ValueError(f"starts: expected finite numbers of shape (S, 5), got {array.shape}")
    return array


# The objective in NumPy, in (a, b, e, alpha, beta): what SciPy minimises, and what both searches are judged by.


def _terms(theta: Floats, runs: _Runs) -> tuple[Floats, Floats, Floats]:
    """Logarithms of A / N^alpha, B / D^beta and E: theta (..., 5) to shapes (..., R), (..., R) and (..., 1)."""
    a, b, e, alpha, beta = np.moveaxis(theta[..., None], -2, 0)
    return a - alpha * runs.size, b - beta * runs.data, e


def _residuals(theta: Floats, runs: _Runs) -> Floats:
    """Of log L(N, D) from log L: theta (..., 5) to shape (..., R)."""
    capacity, estimation, floor = _terms(theta, runs)
    return np.logaddexp(np.logaddexp(capacity, estimation), floor) - runs.loss


def _jacobian(theta: Floats, residuals: Floats, runs: _Runs) -> Floats:
    """Derivatives of the residuals (R,) in theta (5,): the terms' shares of the loss, and these times logs. (5, R)."""
    capacity, estimation, floor = (np.exp(term - residuals - runs.loss) for term in _terms(theta, runs))
    return np.stack([capacity, estimation, floor, -capacity * runs.size, -estimation * runs.data])


def _slope(residuals: Floats, delta: float) -> Floats:
    return np.clip(residuals, -delta, delta) if delta else np.sign(residuals)


def _values(residuals: Floats, runs: _Runs, delta: float) -> Floats:
    """Sums over runs of the Huber loss, or of absolute values where delta is 0: (..., R) to (...)."""
    slope = _slope(residuals, delta)
    values: Floats = (slope * (residuals - slope / 2 if delta else residuals)) @ runs.counts
    return values


def _constants(theta: Floats) -> Floats:
    """(a, b, e, alpha, beta) to (E, A, B, alpha, beta), on the last axis."""
    return np.concatenate([np.exp(theta[..., [2, 0, 1]]), theta[..., 3:]], -1)


def _gradient_norm(residuals: Floats, jacobian: Floats, runs: _Runs, delta: float) -> float:
    """Of the objective; of absolute values the least over the slopes in [-1, 1] that a residual of zero may have."""
    weighted = jacobian * runs.counts
    zero = (np.abs(residuals) <= ROUNDING) & (delta == 0)
    gradient = weighted[:, ~zero] @ _slope(residuals[~zero], delta)
    if zero.any():
        gradient += weighted[:, zero] @ lsq_linear(weighted[:, zero], -gradient, bounds=(-1, 1)).x
    return float(np.linalg.norm(gradient))


def _report(theta: Floats, ended: NDArray[np.bool_], runs: _Runs, objective: Objective, delta: float) -> Fit:
    """The best of what some starts ended at, shape (S, 5)."""
    blocks = np.array_split(theta, -(-len(theta) // BLOCK))
    values = np.concatenate([_values(_residuals(block, runs), runs, delta) for block in blocks])
    if not np.isfinite(values).any():
        raise ValueError("starts: the objective is not finite where they end")
    best = np.nanargmin(values)
    rounding = _values(np.full_like(runs.loss, ROUNDING), runs, delta)
    there = values <= values[best] * (1 + SAME) + rounding
    residuals = _residuals(theta[best], runs)
    jacobian = _jacobian(theta[best], residuals, runs)
    constants = _constants(theta[best])
    law = LossSurface(**dict(zip(CONSTANTS, constants.tolist(), strict=True)))
    spread = np.abs(_constants(theta[there]) / constants - 1).max(0)
    return Fit(
        law=law,
        objective=objective,
        delta=delta,
        value=float(values[best]),
        runs=int(runs.counts.sum()),
        starts=len(theta),
        ended=int(ended.sum()),
        at_optimum=int(there.sum()),
        gradient_norm=_gradient_norm(residuals, jacobian, runs, delta),
        gradient_bound=float(np.linalg.norm(jacobian, axis=0) @ runs.counts) * (delta or 1),
        spread=MappingProxyType(dict(zip(CONSTANTS, spread.tolist(), strict=True))),
    )
