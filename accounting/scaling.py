"""Scaling laws: power laws, the loss surface, and the splits of a budget that minimise it.

N parameters, D tokens, C = 6 N D the FLOPs of training. Every function takes numbers or arrays
of them, which broadcast, and computes in float64; ValueError says what is outside its domain.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import exp
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
#: Halvings of an interval of logarithms: from any width that float64 can have to its last bit.
HALVINGS = 100
#: How far above E, in parts of it, a loss must be for the difference to have six digits in float64.
RESOLVED = 1e-9


def _positive(name: str, value: ArrayLike) -> Any:
    """``value`` in float64, where every number of it is above 0; infinity is."""
    numbers = np.asarray(value, np.float64)[()]
    if not np.all(numbers > 0):
        raise ValueError(f"{name}: expected a positive number, got {np.min(numbers)}")
    return numbers


def _pairs(least: int, **columns: ArrayLike) -> list[Floats]:
    """Columns of one length, at least so long, whose numbers are positive and finite."""
    arrays = [np.atleast_1d(_positive(name, column)) for name, column in columns.items()]
    for name, array in zip(columns, arrays, strict=True):
        if array.ndim != 1 or not np.isfinite(array).all():
            raise ValueError(f"{name}: expected finite numbers in one row")
    if len({len(array) for array in arrays}) > 1 or len(arrays[0]) < least:
        raise ValueError(f"expected {' and '.join(columns)} of one length, at least {least}")
    return arrays


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerLaw:
    """y = coefficient x^exponent: a straight line on logarithmic axes, whose slope is the exponent."""

    coefficient: float
    exponent: float

    def at(self, x: ArrayLike) -> Any:
        """The y of a positive x."""
        return self.coefficient * _positive("x", x) ** self.exponent

    def growth(self, factor: ArrayLike) -> Any:
        """What y is multiplied by when x is multiplied by ``factor``."""
        return _positive("factor", factor) ** self.exponent

    def r_squared(self, x: ArrayLike, y: ArrayLike) -> float:
        """The share of the variance of log y that the line explains; y must not be constant."""
        xs, ys = (np.log(array) for array in _pairs(2, x=x, y=y))
        spread = np.square(ys - ys.mean()).sum()
        if not spread > 0:
            raise ValueError("y: expected numbers that differ")
        left = np.square(ys - np.log(self.coefficient) - self.exponent * xs).sum()
        return float(1 - left / spread)


def fit_power_law(x: ArrayLike, y: ArrayLike) -> PowerLaw:
    """The power law of least squares in log y. The numbers must be positive and x not constant."""
    xs, ys = (np.log(array) for array in _pairs(2, x=x, y=y))
    if np.ptp(xs) == 0:
        raise ValueError("x: expected numbers that differ")
    slope, intercept = np.polyfit(xs, ys, 1)
    return PowerLaw(coefficient=float(np.exp(intercept)), exponent=float(slope))


class Split(NamedTuple):
    """How a budget is spent: N parameters on D tokens."""

    parameters: Any
    tokens: Any

    @property
    def ratio(self) -> Any:
        """Tokens for each parameter, D / N."""
        return self.tokens / self.parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSurface:
    """L(N, D) = E + A / N^alpha + B / D^beta (Hoffmann et al. 2022, arXiv 2203.15556, equation 2).

    In nats a token, as long as the constants are; N and D in whatever units the constants are stated.
    """

    E: float
    A: float
    B: float
    alpha: float
    beta: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (np.isfinite(value) and (value > 0 or field.name == "E")):
                wanted = "a finite number" if field.name == "E" else "a positive number"
                raise ValueError(f"{field.name}: expected {wanted}, got {value}")

    def capacity(self, parameters: ArrayLike) -> Any:
        """A / N^alpha: what is lost for want of parameters."""
        return self.A / _positive("parameters", parameters) ** self.alpha

    def estimation(self, tokens: ArrayLike) -> Any:
        """B / D^beta: what is lost for want of tokens."""
        return self.B / _positive("tokens", tokens) ** self.beta

    def loss(self, parameters: ArrayLike, tokens: ArrayLike) -> Any:
        """The loss of N parameters after D tokens. An infinite N or D leaves the floor of the other."""
        return self.E + self.capacity(parameters) + self.estimation(tokens)

    def marginals(self, parameters: ArrayLike, tokens: ArrayLike) -> tuple[Any, Any]:
        """-dL/d(ln N) and -dL/d(ln D): what a little more of each buys.

        alpha A / N^alpha and beta B / D^beta, equal at the compute-optimal split.
        """
        return self.alpha * self.capacity(parameters), self.beta * self.estimation(tokens)

    @property
    def exponents(self) -> tuple[float, float]:
        """Of the optimal N and of the optimal D in the budget: they add to one (equation 4)."""
        return self.beta / (self.alpha + self.beta), self.alpha / (self.alpha + self.beta)

    @property
    def G(self) -> float:  # noqa: N802 (the letter of the paper)
        """The optimal N for a unit of N D (equation 4)."""
        g: float = (self.alpha * self.A / (self.beta * self.B)) ** (1 / (self.alpha + self.beta))
        return g

    @property
    def drift(self) -> PowerLaw:
        """Tokens for each parameter at the optimum, by N D: constant only where alpha is beta."""
        size, data = self.exponents
        return PowerLaw(coefficient=self.G**-2, exponent=data - size)

    def optimum(self, compute: ArrayLike, *, each: float = 6) -> Split:
        """The split of least loss among those with ``each`` N D = C, by equation 4: N = G (C/6)^(beta/(alpha+beta))."""
        product = _positive("compute", compute) / each
        size, data = self.exponents
        return Split(self.G * product**size, product**data / self.G)

    def tokens_for(self, loss: ArrayLike, parameters: ArrayLike) -> Any:
        """The D at which N parameters reach a loss: (B / (L - E - A / N^alpha))^(1/beta).

        Raises ValueError for a loss that they never reach.
        """
        left = np.asarray(loss, np.float64)[()] - self.loss(parameters, np.inf)
        if not np.all(left > 0):
            raise ValueError(
                f"loss: {np.min(loss)} is not above {np.max(self.loss(parameters, np.inf)):.6g}, the floor"
            )
        return (self.B / left) ** (1 / self.beta)

    def cheapest(self, loss: ArrayLike, served: ArrayLike = 0) -> Split:
        """The split of least 6 N D + 2 N D_served that reaches a loss (Sardana et al. 2023, arXiv 2401.00448).

        ``served`` tokens are processed after training, 2 N FLOPs each. With x and y the losses for want
        of parameters and of tokens, whose sum is fixed, the cost is stationary where
        alpha x / (beta y) = 1 + D_served / (3 D); the left side grows with x / y and the right side
        falls, so that bisection in log(x / y) finds the one solution. Raises ValueError for a loss that
        is not above E by ``RESOLVED``, and for a demand below zero.
        """
        excess = np.asarray(loss, np.float64) - self.E
        demand = np.asarray(served, np.float64)
        if not np.all(excess > RESOLVED * abs(self.E)):
            raise ValueError(f"loss: expected more than E, {self.E:g}, by {RESOLVED:g} of it, got {np.min(loss):.17g}")
        if not np.all((demand >= 0) & np.isfinite(demand)):
            raise ValueError(f"served: expected zero or a positive number, got {np.min(demand)}")

        def split(x_over_y: Floats) -> Split:
            y = excess / (1 + x_over_y)
            return Split((self.A / (x_over_y * y)) ** (1 / self.alpha), (self.B / y) ** (1 / self.beta))

        least = np.broadcast_to(np.log(self.beta / self.alpha), np.broadcast_shapes(excess.shape, demand.shape))
        low, high = least, least + np.log1p(demand / (3 * split(np.exp(least)).tokens))
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            beyond = self.alpha / self.beta * np.exp(middle) > 1 + demand / (3 * split(np.exp(middle)).tokens)
            low, high = np.where(beyond, low, middle), np.where(beyond, middle, high)
        found = split(np.exp(high))
        return Split(found.parameters[()], found.tokens[()])


class Parabola(NamedTuple):
    """loss + curvature (ln N - ln N_opt)^2: what IsoFLOP curves are taken for."""

    curvature: float
    parameters: float
    loss: float


def isoflop(parameters: ArrayLike, losses: ArrayLike) -> Parabola:
    """The parabola in ln N of least squares through runs of one budget (Hoffmann et al., section 3.2).

    Its lowest point estimates the optimal N. On the losses of a ``LossSurface`` it is off by a factor
    that depends on the range of sizes alone, not on the budget: the exponent over budgets is right.
    Raises ValueError for fewer than three sizes and for a curve without a lowest point.
    """
    sizes, values = _pairs(3, parameters=parameters, losses=losses)
    logs = np.log(sizes)
    if len(np.unique(logs)) < 3:
        raise ValueError("parameters: expected at least three sizes that differ")
    centre = logs.mean()
    curvature, slope, constant = np.polyfit(logs - centre, values, 2)
    if not curvature > 0:
        raise ValueError("losses: expected a curve that is lowest inside, this one is not")
    lowest = -slope / (2 * curvature)
    return Parabola(float(curvature), float(np.exp(centre + lowest)), float(constant + slope * lowest / 2))


#: Repetitions of a corpus after which another pass is worth 1/e of a first one (arXiv 2305.16264, appendix A).
REPETITIONS = 15.387756


def effective_tokens(unique: ArrayLike, tokens: ArrayLike, *, repetitions: float = REPETITIONS) -> Any:
    """What D tokens of a corpus of U are worth in tokens that are new: U + U R* (1 - exp(-R / R*)), R = D / U - 1.

    Muennighoff et al. 2023, arXiv 2305.16264, equation 5; at most one pass is worth itself. Fitted to
    language models of up to 9 billion parameters.
    """
    corpus, seen = _positive("unique", unique), _positive("tokens", tokens)
    worth = _positive("repetitions", repetitions)
    again = np.maximum(seen / corpus - 1, 0)
    return np.where(seen < corpus, seen, corpus * (1 - worth * np.expm1(-again / worth)))[()]


class Law(NamedTuple):
    """A published fit of the loss surface, and where it is from."""

    surface: LossSurface
    source: str


_PRINTED = LossSurface(E=1.69, A=406.4, B=410.7, alpha=0.34, beta=0.28)

LAWS: Mapping[str, Law] = MappingProxyType(
    {
        "hoffmann": Law(
            _PRINTED,
            "Hoffmann et al. 2022, arXiv 2203.15556, equation 10: constants as printed, fitted to over 400 runs",
        ),
        "hoffmann-4digit": Law(
            LossSurface(E=_PRINTED.E, A=_PRINTED.A, B=_PRINTED.B, alpha=0.3392, beta=0.2849),
            "the same with the exponents at four digits (Besiroglu et al. 2024, arXiv 2404.10102)",
        ),
        "hoffmann-unrounded": Law(
            LossSurface(E=exp(0.5267228), A=exp(6.0073404), B=exp(6.0179186), alpha=0.33917084, beta=0.2849083),
            "the same with all digits, from the TeX source of arXiv 2203.15556 (Besiroglu et al. 2024)",
        ),
        "besiroglu": Law(
            LossSurface(E=1.8172, A=482.01, B=2085.43, alpha=0.3478, beta=0.3658),
            "Besiroglu et al. 2024, arXiv 2404.10102: a refit to 240 of Hoffmann's runs, of up to 1.3e22 FLOPs",
        ),
    }
)
