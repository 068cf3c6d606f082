"""Scaling laws, against search, against SciPy, and against the balance that characterises an optimum."""

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.optimize import minimize

from accounting.scaling import (
    LAWS,
    REPETITIONS,
    LossSurface,
    effective_tokens,
    fit_power_law,
    isoflop,
)
from tests import strategies

SURFACES = strategies.LOSS_SURFACES
BUDGETS = st.floats(1e-3, 1e12)
HALVES = LossSurface(E=1.0, A=1.0, B=1.0, alpha=0.5, beta=0.5)
EPSILON = 2**-52


@given(surface=SURFACES, budget=BUDGETS, step=st.floats(1e-3, 10))
def test_no_other_split_has_less_loss(surface, budget, step):
    """A size above or below the optimum, at the same budget, does no better.

    The loss is convex in log N, so that steps to both sides suffice; the slack is what
    rounding does to two sums of three terms.
    """
    parameters, tokens = surface.optimum(budget)
    least = surface.loss(parameters, tokens)
    for factor in (math.exp(step), math.exp(-step)):
        assert surface.loss(parameters * factor, tokens / factor) >= least * (1 - 8 * EPSILON)


@given(surface=SURFACES, budget=BUDGETS, each=st.sampled_from([1, 6]))
def test_the_two_terms_shrink_at_equal_rates(surface, budget, each):
    """At the optimum alpha A / N^alpha equals beta B / D^beta, and the budget is spent."""
    split = surface.optimum(budget, each=each)
    assert math.isclose(each * split.parameters * split.tokens, budget, rel_tol=1e-12)
    assert math.isclose(*surface.marginals(*split), rel_tol=1e-9)


@given(surface=SURFACES, budget=BUDGETS, factor=st.floats(1.5, 1e6))
def test_exponents_add_to_one_and_the_ratio_drifts_by_their_difference(surface, budget, factor):
    """N grows by the one exponent and D by the other; D / N is constant only where alpha is beta."""
    size, data = surface.exponents
    assert math.isclose(size + data, 1, rel_tol=4 * EPSILON)
    before, after = surface.optimum(budget), surface.optimum(factor * budget)
    assert math.isclose(after.parameters / before.parameters, factor**size, rel_tol=1e-9)
    assert math.isclose(after.tokens / before.tokens, factor**data, rel_tol=1e-9)
    assert math.isclose(after.ratio / before.ratio, surface.drift.growth(factor), rel_tol=1e-9)
    assert math.isclose(surface.drift.at(budget / 6), before.ratio, rel_tol=1e-9)
    assert np.sign(surface.drift.exponent) == np.sign(surface.alpha - surface.beta)


@pytest.mark.parametrize("law", LAWS)
def test_a_constrained_optimizer_finds_the_closed_form(law):
    """SciPy, told nothing but the loss and 6 N D = C, ends at the same N.

    Its search ends where the loss changes by less than float64 shows: a flat bottom, so that N is known
    to the square root of that, 1e-8, times the few hundred by which the loss is flatter than its own size.
    """
    surface, budget = LAWS[law].surface, 1e24
    found = minimize(
        lambda logs: surface.loss(*np.exp(logs)),
        x0=np.log([1e9, 1e13]),
        constraints={"type": "eq", "fun": lambda logs: logs.sum() - np.log(budget / 6)},
        method="SLSQP",
        options={"ftol": 1e-15},
    )
    assert found.success
    assert found.x[0] == pytest.approx(np.log(surface.optimum(budget).parameters), abs=1e-5)


@pytest.mark.parametrize("law", LAWS)
def test_brute_force_finds_the_closed_form(law):
    """Of 300,001 sizes from 1e9 to 1e12 the best is the one that is nearest to the closed form."""
    surface = LAWS[law].surface
    sizes = np.logspace(9, 12, 300_001)
    best = sizes[surface.loss(sizes, 1e24 / 6 / sizes).argmin()]
    half_a_step = 0.5 * 3 / 300_000
    assert abs(np.log10(best / surface.optimum(1e24).parameters)) <= half_a_step * 1.001


@given(surface=SURFACES, parameters=BUDGETS, tokens=BUDGETS)
def test_tokens_for_a_loss_are_those_that_make_it(surface, parameters, tokens):
    """Solving for D gives the D that one began with, where the term of D is more than rounding.

    The relative error of D is that of the term, a rounding of the loss over the term, times 1 / beta.
    """
    loss, term = surface.loss(parameters, tokens), surface.estimation(tokens)
    error = 8 * EPSILON * loss / term / surface.beta
    assume(error < 1e-3)
    assert surface.tokens_for(loss, parameters) == pytest.approx(tokens, rel=4 * error)


@given(
    surface=SURFACES,
    excess=st.floats(1e-3, 1),
    served=st.one_of(st.just(0.0), st.floats(1, 1e30)),
    step=st.floats(0.01, 3),
)
def test_no_other_size_serves_a_loss_for_less(surface, excess, served, step):
    """A model above or below the cheapest, trained to the same loss, costs more in all.

    6 N D + 2 N D_served has one lowest point, so that a step to each side suffices; the slack is what
    rounding a loss does to D, as above.
    """
    loss = surface.E + excess
    cheapest = surface.cheapest(loss, served)

    def lifetime(parameters):
        return parameters * (6 * surface.tokens_for(loss, parameters) + 2 * served)

    error = 16 * EPSILON * loss / surface.estimation(cheapest.tokens) / surface.beta
    assume(error < 1e-3)
    assert surface.loss(*cheapest) == pytest.approx(loss, rel=8 * EPSILON)
    least = lifetime(cheapest.parameters)
    assert lifetime(cheapest.parameters * math.exp(step)) >= least * (1 - error)
    smaller = cheapest.parameters * math.exp(-step)
    assume(surface.loss(smaller, math.inf) < loss * (1 - 4 * EPSILON))
    assert lifetime(smaller) >= least * (1 - error)


@given(surface=SURFACES, budget=BUDGETS)
def test_without_demand_the_cheapest_is_the_compute_optimal(surface, budget):
    """Nothing served, the least cost of the optimal loss of a budget is the budget."""
    optimum = surface.optimum(budget)
    loss = surface.loss(*optimum)
    error = 8 * EPSILON * loss / (loss - surface.E) / min(surface.alpha, surface.beta)
    assume(error < 1e-3)
    assert surface.cheapest(loss) == pytest.approx(optimum, rel=4 * error)


def test_arrays_are_their_numbers():
    """Every method takes arrays, integers too, and gives for each number what it gives for it alone."""
    surface = LAWS["besiroglu"].surface
    sizes, demands = np.array([10**9, 10**10]), np.array([0, 10**12])
    together = (
        surface.loss(sizes, 10**11),
        surface.optimum(sizes).parameters,
        surface.tokens_for(2.5, sizes),
        surface.cheapest(2.1, demands).tokens,
        effective_tokens(10, sizes),
    )
    alone = (
        [surface.loss(size, 10**11) for size in sizes],
        [surface.optimum(size).parameters for size in sizes],
        [surface.tokens_for(2.5, size) for size in sizes],
        [surface.cheapest(2.1, demand).tokens for demand in demands],
        [effective_tokens(10, size) for size in sizes],
    )
    for array, numbers in zip(together, alone, strict=True):
        assert array.shape == (2,)
        np.testing.assert_allclose(array, numbers, rtol=4 * EPSILON)
    assert all(isinstance(number, float) for numbers in alone for number in numbers)


@given(coefficient=st.floats(1e-6, 1e6), exponent=st.floats(-3, 3))
def test_a_power_law_is_found_again(coefficient, exponent):
    """Points on a line of logarithms give its slope and its level, and all of the variance.

    Logarithms here are below 40, rounded to 40 ulp at most.
    """
    x = np.logspace(0, 4, 9)
    law = fit_power_law(x, coefficient * x**exponent)
    assert law.exponent == pytest.approx(exponent, abs=400 * EPSILON)
    assert law.coefficient == pytest.approx(coefficient, rel=4000 * EPSILON)
    np.testing.assert_allclose(law.at(x), coefficient * x**exponent, rtol=8000 * EPSILON)


def test_least_squares_leaves_residuals_without_a_trend():
    """The residuals of the logs add to nothing, weighted by log x or not: the normal equations."""
    rng = np.random.default_rng(0)
    x = np.exp(rng.uniform(0, 20, 50))
    y = 3 * x**-0.4 * np.exp(rng.normal(size=50))
    law = fit_power_law(x, y)
    residuals = np.log(y) - np.log(law.at(x))
    assert abs(residuals.sum()) < 50 * 20 * EPSILON * 10
    assert abs((residuals * np.log(x)).sum()) < 50 * 20 * 20 * EPSILON * 10
    assert law.r_squared(x, y) == pytest.approx(np.corrcoef(np.log(x), np.log(y))[0, 1] ** 2)


@pytest.mark.parametrize(("alpha", "beta", "factor"), [(0.34, 0.28, 1.0537), (0.465, 0.155, 1.3007)])
def test_a_parabola_is_off_by_a_factor_that_is_not_in_the_exponent(alpha, beta, factor):
    """On exact losses the lowest point lies at 1.05 or 1.30 times the best size, at every budget the same.

    The factors are those of a published study of this bias (arXiv 2603.22339), at sizes from a sixteenth
    to sixteen times the best one.
    """
    surface = LossSurface(E=1.69, A=406.4, B=410.7, alpha=alpha, beta=beta)
    budgets = np.array([1e19, 1e21, 1e24])
    lowest = []
    for budget in budgets:
        sizes = surface.optimum(budget).parameters * np.geomspace(1 / 16, 16, 15)
        lowest.append(isoflop(sizes, surface.loss(sizes, budget / 6 / sizes)).parameters)
    np.testing.assert_allclose(lowest / surface.optimum(budgets).parameters, factor, atol=5e-5)
    assert fit_power_law(budgets, lowest).exponent == pytest.approx(surface.exponents[0], abs=1e-9)


@given(curvature=st.floats(1e-3, 1e3), best=st.floats(1, 1e12), loss=st.floats(0.1, 10))
def test_a_parabola_is_found_again(curvature, best, loss):
    """Three sizes or more on a parabola in log N give its curvature, its lowest point and its height."""
    sizes = best * np.geomspace(0.1, 20, 5)
    found = isoflop(sizes, loss + curvature * np.log(sizes / best) ** 2)
    assert found.curvature == pytest.approx(curvature, rel=1e-9, abs=1e-12)
    assert math.log(found.parameters / best) == pytest.approx(0, abs=1e-8 * max(1, loss / curvature))
    assert found.loss == pytest.approx(loss, rel=1e-9, abs=1e-9 * curvature)


@given(corpus=st.floats(1, 1e12), passes=st.floats(0.01, 1e3), more=st.floats(1, 10))
def test_repeated_tokens_are_worth_less_and_never_nothing(corpus, passes, more):
    """A pass or less is worth itself; later ones less and less, and all of them 1 + R* corpora at most."""
    worth, longer = effective_tokens(corpus, corpus * passes), effective_tokens(corpus, corpus * passes * more)
    if passes <= 1:
        assert worth == pytest.approx(corpus * passes, rel=4 * EPSILON)
    assert worth <= corpus * min(passes, 1 + REPETITIONS) * (1 + 4 * EPSILON)
    assert worth <= longer <= worth * more * (1 + 4 * EPSILON)


def test_r_star_repetitions_lose_a_share_of_one_over_e():
    """After R* repetitions these are worth (1 - 1/e) R* corpora: the constant's meaning."""
    worth = effective_tokens(1.0, 1 + REPETITIONS) - 1
    assert worth == pytest.approx(REPETITIONS * (1 - 1 / math.e), rel=8 * EPSILON)


@pytest.mark.parametrize("name", ["E", "A", "B", "alpha", "beta"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_surface_without_a_slope_is_refused(name, value):
    """Constants and exponents are finite, and all but E positive: with other units of loss it may be anything."""
    constants = {"E": 1.0, "A": 1.0, "B": 1.0, "alpha": 0.5, "beta": 0.5, name: value}
    if name == "E" and math.isfinite(value):
        assert LossSurface(**constants).loss(1, 1) == value + 2
        return
    with pytest.raises(ValueError, match=f"^{name}: expected a (positive|finite) number, got"):
        LossSurface(**constants)


OUTSIDE = {
    "compute: expected a positive number, got 0.0": lambda: HALVES.optimum(0),
    "compute: expected a positive number, got -1.0": lambda: HALVES.optimum([1, -1]),
    "compute: expected a positive number, got nan": lambda: HALVES.optimum(math.nan),
    "parameters: expected a positive number, got 0.0": lambda: HALVES.loss(0, 1),
    "tokens: expected a positive number, got -2.0": lambda: HALVES.loss(1, -2),
    "loss: 1.1 is not above 1.1, the floor": lambda: HALVES.tokens_for(1.1, 100),
    "loss: expected more than E, 1, by 1e-09 of it, got 1": lambda: HALVES.cheapest(1),
    "loss: expected more than E, 1, by 1e-09 of it, got 1.0000000005": lambda: HALVES.cheapest(1 + 5e-10),
    "loss: expected more than E, 1, by 1e-09 of it, got nan": lambda: HALVES.cheapest(math.nan),
    "served: expected zero or a positive number, got -1.0": lambda: HALVES.cheapest(2, -1),
    "served: expected zero or a positive number, got inf": lambda: HALVES.cheapest(2, math.inf),
    "x: expected a positive number, got 0.0": lambda: fit_power_law([0, 1], [1, 1]),
    "x: expected numbers that differ": lambda: fit_power_law([2, 2], [1, 2]),
    "y: expected numbers that differ": lambda: fit_power_law([1, 2], [2, 2]).r_squared([1, 2], [2, 2]),
    "y: expected finite numbers in one row": lambda: fit_power_law([1, 2], [1, math.inf]),
    "expected x and y of one length, at least 2": lambda: fit_power_law([1, 2, 3], [1, 2]),
    "expected parameters and losses of one length, at least 3": lambda: isoflop([1, 2], [1, 2]),
    "parameters: expected at least three sizes that differ": lambda: isoflop([1, 2, 2], [1, 2, 2]),
    "losses: expected a curve that is lowest inside, this one is not": lambda: isoflop([1, 2, 3], [1, 2, 1]),
    "unique: expected a positive number, got 0.0": lambda: effective_tokens(0, 1),
}


@pytest.mark.parametrize("problem", OUTSIDE)
def test_outside_its_domain_a_law_says_what_it_expects(problem):
    """Non-positive budgets, losses below the floor and curves that are none raise one line."""
    with pytest.raises(ValueError, match=f"^{problem}$"):
        OUTSIDE[problem]()
