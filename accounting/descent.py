"""Descent in JAX on robust objectives of a loss surface, from thousands of starts side by side.

Coordinates are (a, b, e, alpha, beta) of log L(N, D) = logsumexp(a - alpha log N, b - beta log D, e), where log N and
log D are standardised to mean 0 and deviation 1. The logarithm is taken of the loss itself: steps are too short to
overflow. The objective is divided by delta throughout, and no rule depends on its scale.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.linalg import solve
from numpy.typing import NDArray

Objective = Literal["huber", "lad"]
Floats = NDArray[np.float64]

#: The search hands over to Newton's method where a step would lower the objective by less than this part of it, and
#: that has arrived where the gradient is this part of what it could be, were all runs far on one side.
NEAR, ARRIVED = 1e-6, 1e-9
#: What rounding leaves of a residual of zero: a sum of four logarithms of up to about 32.
ROUNDING = 4 * 32 * 2.0**-52
#: A minimiser that compares values in float64 resolves a gradient to about the square root of their rounding, 2**-26;
#: the rest is for a search that crosses a narrow valley.
RESOLVED = 2.0**-20
#: A term with less than this share of the loss that is still shrinking is given up.
VANISHED = 1e-10
#: The longest step: at a deviation from the mean, no term changes by more than a factor of exp(2 REACH).
REACH = 2.0
#: Starts advance together in blocks, so that one program is compiled; those that end make room after each round.
BLOCK, ROUND, ROUNDS = 64, 8, 32
#: Tenfold reductions of delta on the way from the Huber loss to absolute deviations.
REDUCTIONS = 4


class Ends(NamedTuple):
    """Where starts ended, (S, 5), and whether at an optimum of theirs or with a term at zero, (S,)."""

    theta: Floats
    arrived: NDArray[np.bool_]
    vanished: NDArray[np.bool_]


class _Problem(NamedTuple):
    """Standardised log N and log D, and 1 / L, shape (R,); the Huber loss's threshold; 1 near an optimum, 0 before."""

    size: jax.Array
    data: jax.Array
    inverse: jax.Array
    delta: jax.Array
    near: jax.Array


class _State(NamedTuple):
    """A start on its way: where it is, the objective over delta there, and whether and how it ended."""

    theta: Any
    value: Any
    gradient: Any
    curvature: Any
    damping: Any
    arrived: Any
    vanished: Any


def descend(
    starts: Floats, counts: Floats, size: Floats, data: Floats, loss: Floats, *, objective: Objective, delta: float
) -> Ends:
    """Descend from each start, (a, b, e, alpha, beta), on runs taken so many times.

    starts: shape (S, 5). counts: shape (S, R), of each run for each start. size, data, loss: logarithms of N, D and L,
    shape (R,). "huber" is the sum of Huber losses of the residuals of log L with threshold ``delta``; "lad" that of
    their absolute values, reached through smaller and smaller thresholds (Madsen and Nielsen 1993).
    """
    widths = size.std(), data.std()
    standard = np.diag([1.0, 1.0, 1.0, *widths])
    standard[0, 3], standard[1, 4] = -size.mean(), -data.mean()
    ends = Ends(starts @ standard.T, np.zeros(len(starts), np.bool_), np.zeros(len(starts), np.bool_))
    with jax.enable_x64(True):
        far = _Problem(
            size=jnp.asarray((size - size.mean()) / widths[0]),
            data=jnp.asarray((data - data.mean()) / widths[1]),
            inverse=jnp.asarray(np.exp(-loss)),
            delta=jnp.asarray(delta, jnp.float64),
            near=jnp.asarray(0.0),
        )
        near = far._replace(near=jnp.asarray(1.0))
        ends = _rounds(_rounds(ends, counts, far), counts, near)
        if objective == "lad":
            for _ in range(REDUCTIONS):
                near = near._replace(delta=near.delta / 10)
                ends = _rounds(ends, counts, near)
            theta, least = map(np.asarray, _polish(ends.theta, counts, near))
            ends = ends._replace(theta=theta, arrived=least)
    return ends._replace(theta=ends.theta @ np.linalg.inv(standard).T)


def _rounds(ends: Ends, counts: Floats, problem: _Problem) -> Ends:
    """Rounds of steps, each for the starts that have not ended."""
    size = len(ends.theta)
    state = _State(
        theta=np.array(ends.theta),
        value=np.full(size, np.inf),
        gradient=np.zeros((size, 5)),
        curvature=np.tile(np.eye(5), (size, 1, 1)),
        damping=np.full(size, 1e-2),
        arrived=np.zeros(size, np.bool_),
        vanished=np.array(ends.vanished),
    )
    for _ in range(ROUNDS):
        active = np.flatnonzero(~(state.arrived | state.vanished))
        for first in range(0, len(active), BLOCK):
            block = np.resize(active[first : first + BLOCK], BLOCK)
            part = _advance(_State(*(whole[block] for whole in state)), counts[block], problem)
            for whole, rows in zip(state, part, strict=True):
                whole[block] = rows
    return Ends(state.theta, state.arrived, state.vanished)


def _linearised(theta: jax.Array, problem: _Problem) -> tuple[jax.Array, jax.Array]:
    """Residuals (R,) and their derivatives in theta, (5, R)."""
    a, b, e, alpha, beta = theta
    capacity = jnp.exp(a - alpha * problem.size) * problem.inverse
    estimation = jnp.exp(b - beta * problem.data) * problem.inverse
    floor = jnp.exp(e) * problem.inverse
    ratio = capacity + estimation + floor
    shares = jnp.stack([capacity, estimation, floor, -capacity * problem.size, -estimation * problem.data]) / ratio
    return jnp.log(ratio), shares


def _step(state: _State, counts: jax.Array, problem: _Problem) -> _State:
    """One step of Levenberg and Marquardt.

    Runs beyond delta have a slope and no curvature. While steps fail they are given, little by little, that of
    iteratively reweighted least squares, whose quadratic is nowhere below the objective. Near an optimum the residuals'
    own curvature comes in, which makes it Newton's method; before, that would keep small terms small.
    """
    diagonal = jnp.abs(jnp.diagonal(state.curvature))
    scale = lax.rsqrt(jnp.maximum(diagonal, np.finfo(np.float64).tiny))
    scaled = state.curvature * jnp.outer(scale, scale) + state.damping * jnp.eye(5)
    step = -scale * solve(scaled, scale * state.gradient, assume_a="pos")
    gain = -state.gradient @ step / 2
    theta = state.theta + step * jnp.minimum(1, REACH / jnp.abs(step).max())

    damping = jnp.maximum(state.damping / 10, 1e-12)
    caution = jnp.minimum(1, 1e6 * damping)
    residuals, jacobian = _linearised(theta, problem)
    sizes, slopes = jnp.abs(residuals), jnp.clip(residuals / problem.delta, -1, 1)
    value = counts @ (slopes * (residuals - slopes * problem.delta / 2))
    weights = jnp.where(sizes < problem.delta, 1 / problem.delta, caution / sizes)
    pulls, bend = counts * slopes, problem.near * (1 - caution)
    sums = jnp.vstack([(counts * weights - bend * pulls) * jacobian, pulls, counts]) @ jacobian.T
    curvature, gradient, shares = sums[:5], sums[5], sums[6, :3]
    # The second derivatives of a log-sum-exp: the covariances of its terms' derivatives, weighted by their shares.
    squares = jnp.array([-(pulls * jacobian[3]) @ problem.size, -(pulls * jacobian[4]) @ problem.data])
    moments = jnp.diag(jnp.concatenate([gradient[:3], squares]))
    moments = moments.at[(0, 3, 1, 4), (3, 0, 4, 1)].set(gradient[jnp.array([3, 3, 4, 4])])

    rounding = counts.sum() * ROUNDING**2 / problem.delta
    better = value <= state.value * (1 + ROUNDING)
    arrived = jnp.where(
        problem.near,
        jnp.abs(gradient).max() <= ARRIVED * counts.sum(),
        jnp.isfinite(state.value) & (gain * (1 + state.damping) <= NEAR * state.value + rounding),
    )
    vanished = ((shares < VANISHED * counts.sum()) & (gradient[:3] > 0)).any()
    moved = _State(theta, value, gradient, curvature + bend * moments, damping, arrived, vanished)
    stayed = state._replace(damping=state.damping * 10)
    ended = state.arrived | state.vanished
    choices = zip(state, moved, stayed, strict=True)
    return _State(*(jnp.where(ended, old, jnp.where(better, new, kept)) for old, new, kept in choices))


@jax.jit
def _advance(block: _State, counts: jax.Array, problem: _Problem) -> _State:
    """A round of steps for each start of a block."""

    def one(state: _State, own: jax.Array) -> _State:
        return _step(state, own, problem)

    after: _State = lax.fori_loop(0, ROUND, lambda _, states: jax.vmap(one)(states, counts), block)
    return after


@jax.jit
def _polish(theta: jax.Array, counts: jax.Array, problem: _Problem) -> tuple[jax.Array, jax.Array]:
    """From where the Huber loss of a small delta is least to where absolute deviations are, and whether they are.

    Residuals within delta, generically five at most, become zero. Their slopes, which must be in [-1, 1], are the
    multipliers of that constraint; Newton's method solves for both.
    """

    def one(theta: jax.Array, own: jax.Array) -> tuple[jax.Array, jax.Array]:
        before, _ = _linearised(theta, problem)
        near = lax.top_k(-jnp.where(own > 0, jnp.abs(before), jnp.inf), 5)[1]
        pulls = own * jnp.clip(before / problem.delta, -1, 1)
        others, zero = pulls.at[near].set(0), jnp.abs(before[near]) < problem.delta

        def lagrangian(point: jax.Array) -> jax.Array:
            residuals, _ = _linearised(point[:5], problem)
            outside = pulls[near] * residuals[near] + (point[5:] - pulls[near]) ** 2 / 2
            return others @ residuals + jnp.where(zero, point[5:] * residuals[near], outside).sum()

        def newton(_: int, point: jax.Array) -> jax.Array:
            step: jax.Array = jnp.linalg.solve(jax.hessian(lagrangian)(point), jax.grad(lagrangian)(point))
            return point - step

        point = lax.fori_loop(0, 5, newton, jnp.concatenate([theta, pulls[near]]))
        after, _ = _linearised(point[:5], problem)
        kept = ((jnp.sign(after) == jnp.sign(before)) | (jnp.abs(before) < problem.delta) | (own == 0)).all()
        least = kept & (jnp.abs(point[5:]) <= own[near] * (1 + RESOLVED)).all()
        return jnp.where(least, point[:5], theta), least

    return jax.vmap(one)(theta, counts)
