"""Dive into Deep Learning 11.7.2 and 11.7.2.4: power laws, the published form of the law, and its best split."""

from dataclasses import replace
from itertools import pairwise
from math import exp, inf, isclose, log

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import logsumexp

from accounting.conventions import six_nd, twenty_tokens
from accounting.ledger import case
from accounting.scaling import LAWS, PowerLaw, Split, fit_power_law
from tests import tables
from tests.test_scaling import BUDGETS, EPSILON, SURFACES

PRINTED, UNROUNDED = LAWS["hoffmann"].surface, LAWS["hoffmann-unrounded"].surface
CHINCHILLA, GOPHER = Split(70 * 10**9, 14 * 10**11), Split(280 * 10**9, 3 * 10**11)
SPENT = (1e21, 5.76e23, 3.8e25)  # FLOPs: small, Chinchilla's and Llama 3's
SIZES = np.logspace(9, 12, 300_001)
HALF_A_STEP = 0.5 * 3 / 300_000 * log(10) * 1.001  # in ln N, with room for rounding
UNITS = st.floats(1, 1e9)
LINES = st.builds(PowerLaw, coefficient=st.floats(1e-6, 1e6), exponent=st.floats(-3, 3))


def searched(surface, budget):
    """The best of 300,001 splits of a budget."""
    tokens = budget / 6 / SIZES
    best = surface.loss(SIZES, tokens).argmin()
    return Split(SIZES[best], tokens[best])


def falls(losses, sizes):
    """How steeply losses fall with size on logarithmic axes, from each size to the next."""
    return -np.diff(np.log(losses)) / np.diff(np.log(sizes))


@pytest.mark.claim("d2l.law.loglog_line")
def test_a_power_law_is_a_line(claim):
    """Between any two points, and through many, the slope of the logarithms is the exponent.

    A logarithm of y is below 100, so that each has up to 100 roundings of its own.
    """

    @given(LINES, st.floats(1e-6, 1e6), st.floats(2, 1e6))
    def everywhere(law, x, factor):
        xs = x * np.array([1, factor, factor**2])
        slopes = -falls(law.at(xs), xs)
        assert slopes == pytest.approx(law.exponent, abs=400 * EPSILON)
        assert fit_power_law(xs, law.at(xs)).exponent == pytest.approx(law.exponent, abs=400 * EPSILON)

    everywhere()
    xs = np.array([1.0, 2, 8, 1000])
    slopes = -falls(PowerLaw(coefficient=3.0, exponent=-0.34).at(xs), xs)
    claim.holds(np.ptp(slopes) < 400 * EPSILON, f"slopes of 3 x^-0.34: {', '.join(f'{slope:.6f}' for slope in slopes)}")


@pytest.mark.claim("d2l.law.extrapolate")
def test_a_line_is_read_off_further_out(claim):
    """A line through small budgets gives what the law gives at a thousand times the largest of them.

    The exponent of a fit is off by 400 roundings at most, which ln 10^7 multiplies, and its level by 4,000.
    """

    @given(LINES)
    def everywhere(law):
        cheap = np.logspace(0, 4, 9)
        read = fit_power_law(cheap, law.at(cheap)).at(1000 * cheap[-1])
        assert read == pytest.approx(law.at(cheap[-1]) * law.growth(1000), rel=20_000 * EPSILON)
        assert read == pytest.approx(law.at(cheap[-1]) * 1000**law.exponent, rel=20_000 * EPSILON)

    everywhere()
    factor = PowerLaw(coefficient=1.0, exponent=-0.05).growth(1000)
    claim.holds(isclose(factor, 1000**-0.05), f"for random laws; with exponent -0.05 the loss falls to {factor:.3f}")


@pytest.mark.claim("d2l.law.chinchilla_20")
def test_twenty_tokens(claim):
    """Twenty tokens a parameter, to one digit, in every row of table 3, and exactly in Chinchilla itself."""
    table = tables.columns("chinchilla_table3")
    for ratio in Split(table["parameters"], table["tokens"]).ratio:
        claim.measured(ratio)
    claim.measured(CHINCHILLA.ratio)
    assert CHINCHILLA.tokens == twenty_tokens(CHINCHILLA.parameters)


@pytest.mark.claim("d2l.law.same_compute")
def test_the_two_runs_cost_different_compute(claim):
    """By the chapter's own rule Chinchilla took a sixth more than Gopher."""
    small, large = (six_nd(*run) for run in (CHINCHILLA, GOPHER))
    claim.holds(small == large, f"{small:.3g} and {large:.3g} FLOPs, {small / large:.2f} times")
    claim.right(small, large)


@pytest.mark.claim("d2l.law.beat")
def test_the_smaller_model_wins(claim):
    """By every published fit 70B on 1.4T tokens have less loss than 280B on 300B."""
    losses = {name: (law.surface.loss(*CHINCHILLA), law.surface.loss(*GOPHER)) for name, law in LAWS.items()}
    claim.holds(
        all(small < large for small, large in losses.values()),
        ", ".join(f"{small:.3f} < {large:.3f} ({name})" for name, (small, large) in losses.items()),
    )


@pytest.mark.claim("d2l.law.grow_together")
def test_size_and_data_grow_alike(claim):
    """In table 3 the best N and the best D both grow as the root of the budget, to one digit."""
    table = tables.columns("chinchilla_table3")
    slopes = [fit_power_law(table["flops"], table[name]).exponent for name in ("parameters", "tokens")]
    for found, name in zip(slopes, ("parameters", "tokens"), strict=True):
        # The closed form of least squares, on logarithms below 70 with as many roundings.
        x, y = np.log(table["flops"]), np.log(table[name])
        assert found == pytest.approx(np.cov(x, y)[0, 1] / x.var(ddof=1), abs=1000 * EPSILON)
    claim.measured(slopes)


@pytest.mark.claim("d2l.law.not_bottleneck")
def test_a_power_law_while_nothing_else_limits(claim):
    """With data without end the loss above E falls as N^-alpha; with little data it stops falling.

    Where one step leaves less than 1e-6 of the excess, rounding is a thousandth of what is seen.
    """

    @given(SURFACES, UNITS, UNITS)
    def everywhere(surface, size, tokens):
        bare, sizes = replace(surface, E=0.0), size * np.array([1.0, 10, 100])
        unlimited, first, second = *falls(bare.loss(sizes, inf), sizes)[:1], *falls(bare.loss(sizes, tokens), sizes)
        assert unlimited == pytest.approx(surface.alpha, abs=100 * EPSILON)
        assert first <= unlimited + 100 * EPSILON
        assert second <= first + 100 * EPSILON
        share = bare.capacity(size) / bare.loss(size, tokens)
        assert first <= surface.alpha * share + 100 * EPSILON

    everywhere()
    bare, sizes = replace(PRINTED, E=0.0), np.array([1e6, 1e8, 1e10, 1e12])
    unlimited, limited = (falls(bare.loss(sizes, tokens), sizes) for tokens in (inf, 1e9))
    claim.holds(
        np.allclose(unlimited, PRINTED.alpha) and bool(np.all(np.diff(limited) < 0)) and limited[-1] < 0.05,
        f"slopes from 1e6 to 1e12 parameters: {unlimited.round(2)} without a limit, {limited.round(2)} on 1e9 tokens",
    )


@pytest.mark.claim("d2l.form.loss")
def test_three_terms(claim):
    """The loss is a floor and two terms: as sums, and as the logarithms that fits are made of.

    A logarithm here is below 40 and rounded as often.
    """

    @given(SURFACES, UNITS, UNITS)
    def everywhere(surface, parameters, tokens):
        logs = (
            log(surface.E),
            log(surface.A) - surface.alpha * log(parameters),
            log(surface.B) - surface.beta * log(tokens),
        )
        assert surface.loss(parameters, tokens) == pytest.approx(exp(logsumexp(logs)), rel=200 * EPSILON)

    everywhere()
    terms = PRINTED.E, PRINTED.capacity(70e9), PRINTED.estimation(1.4e12)
    claim.holds(
        PRINTED.loss(70e9, 1.4e12) == sum(terms), f"Chinchilla's: {' + '.join(f'{term:.3f}' for term in terms)}"
    )


@pytest.mark.claim("d2l.form.floor_limit")
def test_the_floor_is_the_limit(claim):
    """The loss is above E, comes as near as one likes, and is E without limits."""

    @given(SURFACES, UNITS, UNITS, st.floats(1e-3, 1))
    def everywhere(surface, parameters, tokens, excess):
        assert surface.loss(parameters, tokens) > surface.E
        near = surface.loss(*surface.cheapest(surface.E + excess))
        assert near == pytest.approx(surface.E + excess, rel=100 * EPSILON)

    everywhere()
    claim.holds(PRINTED.loss(inf, inf) == PRINTED.E, f"{PRINTED.loss(inf, inf)} without limits, more for any N and D")


@pytest.mark.claim("d2l.form.flatten")
def test_raw_loss_bends(claim):
    """On logarithmic axes the loss falls ever less steeply; less E it is a line where one term is left."""

    @given(SURFACES, UNITS, st.sampled_from([inf, 1.0, 1e6]))
    def everywhere(surface, size, tokens):
        sizes = size * np.array([1.0, 10, 100])
        first, second = falls(surface.loss(sizes, tokens), sizes)
        assert -100 * EPSILON <= second <= first + 100 * EPSILON
        assert first <= surface.alpha + 100 * EPSILON
        # The excess is a sum of positive terms, which rounding leaves alone; the loss less E is not.
        alone = falls(surface.capacity(sizes), sizes)
        assert alone == pytest.approx(surface.alpha, abs=100 * EPSILON)

    everywhere()
    sizes = np.logspace(6, 30, 7)
    raw, excess, both = (
        falls(losses, sizes)
        for losses in (PRINTED.loss(sizes, inf), PRINTED.capacity(sizes), replace(PRINTED, E=0).loss(sizes, 1e12))
    )
    bends = all(steep > flat for slopes in (raw, both) for steep, flat in pairwise(slopes))
    claim.holds(
        bends and raw[-1] < 1e-3 and np.ptp(excess) < 100 * EPSILON,
        f"slopes from 1e6 to 1e30 parameters: {raw[0]:.2f} to {raw[-1]:.4f} raw, {excess[0]:.2f} throughout without E, "
        f"{both[0]:.2f} to {both[-1]:.4f} without E on 1e12 tokens",
    )


@pytest.mark.claim("d2l.form.capacity_monotone")
def test_capacity_term_falls(claim):
    """More parameters at the same data have a smaller term, and a smaller loss."""

    @given(SURFACES, UNITS, UNITS, st.floats(1.01, 1e6))
    def everywhere(surface, size, tokens, factor):
        assert surface.capacity(size * factor) < surface.capacity(size)
        assert surface.loss(size * factor, tokens) <= surface.loss(size, tokens)

    everywhere()
    terms = [float(PRINTED.capacity(size)) for size in (1e8, 1e9, 1e10)]
    claim.holds(terms == sorted(terms, reverse=True), f"{', '.join(f'{term:.3f}' for term in terms)} at 1e8, 1e9, 1e10")


@pytest.mark.claim("d2l.form.data_floor")
def test_data_make_a_floor(claim):
    """At so much data no size gets below E + B / D^beta, and an infinite one is there."""

    @given(SURFACES, UNITS, UNITS)
    def everywhere(surface, size, tokens):
        floor = surface.E + surface.B / tokens**surface.beta
        assert surface.loss(size, tokens) > floor
        assert surface.loss(inf, tokens) == pytest.approx(floor, rel=4 * EPSILON)

    everywhere()
    floor = PRINTED.loss(inf, CHINCHILLA.tokens)
    claim.holds(PRINTED.loss(1e15, CHINCHILLA.tokens) > floor > PRINTED.E, f"{floor:.3f} on Chinchilla's tokens")


@pytest.mark.claim("d2l.form.balance")
def test_balance_at_the_optimum(claim):
    """At the best of 300,001 splits, and exactly at the closed form, the two weighted terms are equal.

    Their ratio goes with N to the power -(alpha + beta), so that half a step of the search moves it by as much.
    """
    for law in LAWS.values():
        surface = law.surface
        capacity, estimation = surface.marginals(*searched(surface, 1e24))
        assert abs(log(capacity / estimation)) <= (surface.alpha + surface.beta) * HALF_A_STEP
        assert isclose(*surface.marginals(*surface.optimum(1e24)), rel_tol=200 * EPSILON)
    split = searched(PRINTED, 1e24)
    sides = PRINTED.alpha * PRINTED.A / split.parameters**PRINTED.alpha, PRINTED.marginals(*split)[1]
    claim.holds(
        isclose(*sides, rel_tol=(PRINTED.alpha + PRINTED.beta) * HALF_A_STEP), f"{sides[0]:.6f} and {sides[1]:.6f}"
    )


@pytest.mark.parametrize(
    ("quantity", "stated"),
    [
        case("d2l.form.n_exponent", "parameters", lambda law: law.beta / (law.alpha + law.beta)),
        case("d2l.form.d_exponent", "tokens", lambda law: law.alpha / (law.alpha + law.beta)),
    ],
)
def test_exponents_of_the_optimum(claim, quantity, stated):
    """The best N and D that a search finds at several budgets grow with the stated exponents.

    Half a step in each moves the slope by no more than its weights in least squares.
    """
    budgets, seen = np.logspace(21, 25, 9), []
    away = np.log(budgets) - np.log(budgets).mean()
    bound = HALF_A_STEP * np.abs(away).sum() / np.square(away).sum()
    for law in LAWS.values():
        found = [getattr(searched(law.surface, budget), quantity) for budget in budgets]
        slope = fit_power_law(budgets, found).exponent
        closed = law.surface.exponents[("parameters", "tokens").index(quantity)]
        assert closed == pytest.approx(stated(law.surface), rel=4 * EPSILON)
        seen.append((slope, closed))
    claim.holds(
        all(abs(slope - closed) <= bound for slope, closed in seen),
        ", ".join(f"{slope:.4f} ({name})" for (slope, _), name in zip(seen, LAWS, strict=True)),
    )


@pytest.mark.parametrize("exponent", [case(f"d2l.form.{name}", name) for name in ("alpha", "beta")])
def test_fitted_exponents(claim, exponent):
    """The paper's unrounded digits read as it prints them."""
    for surface in (PRINTED, UNROUNDED):
        claim.measured(getattr(surface, exponent))


@pytest.mark.claim("d2l.form.near_half")
def test_exponents_are_near_a_half(claim):
    """Of the optimal N and D, with the constants as printed and with all digits, to one digit."""
    for surface in (PRINTED, UNROUNDED):
        claim.measured(surface.exponents)


@pytest.mark.claim("d2l.form.ratio_constant_errata")
def test_the_ratio_drifts(claim):
    """With the chapter's exponents tokens a parameter grow by a quarter for each tenfold budget."""
    ratios = [PRINTED.optimum(budget).ratio for budget in SPENT]
    for budget, ratio in zip(SPENT, ratios, strict=True):
        # N moves by half a step and D by as much the other way.
        assert abs(log(searched(PRINTED, budget).ratio / ratio)) <= 2 * HALF_A_STEP
    claim.holds(max(ratios) < 1.5 * min(ratios), f"{max(ratios) / min(ratios):.2f} times from 1e21 to 3.8e25 FLOPs")
    claim.right(PRINTED.drift.growth(10), *ratios)


@pytest.mark.claim("d2l.form.twenty_at_fit_errata")
def test_the_fit_does_not_give_twenty(claim):
    """The fit gives 93 tokens a parameter at Chinchilla's budget, and 20 only far below all of its runs."""
    ratio, drift = PRINTED.optimum(SPENT[1]).ratio, PRINTED.drift
    budget = 6 * (20 / drift.coefficient) ** (1 / drift.exponent)
    assert PRINTED.optimum(budget).ratio == pytest.approx(20, rel=1000 * EPSILON)
    assert abs(log(searched(PRINTED, SPENT[1]).ratio / ratio)) <= 2 * HALF_A_STEP
    claim.measured(ratio)
    claim.right(ratio, budget)


@pytest.mark.claim("d2l.form.bend_crossover")
def test_the_bend_is_where_the_terms_cross(claim):
    """Where both terms are equal the loss above E falls half as steeply as far to the left; the raw loss less so."""

    def crossing(surface, tokens):
        """The size there, and how steeply the loss above E and the raw loss fall, over alpha."""
        size = (surface.A / surface.estimation(tokens)) ** (1 / surface.alpha)
        sizes, bare = size * np.array([1 - 1e-4, 1 + 1e-4]), replace(surface, E=0.0)
        return size, *(falls(law.loss(sizes, tokens), sizes)[0] / surface.alpha for law in (bare, surface))

    @given(SURFACES, st.floats(1, 1e3))
    def everywhere(surface, tokens):
        # A secant over 2e-4 of N is off by its square and by 1e4 roundings, which 1 / alpha multiplies.
        assert crossing(surface, tokens)[1] == pytest.approx(0.5, abs=1e-7)

    everywhere()
    size, excess, raw = crossing(PRINTED, CHINCHILLA.tokens)
    claim.holds(abs(excess - 0.5) < 1e-7, f"at {size:.3g} parameters on Chinchilla's tokens, {excess:.3f} of alpha")
    claim.otherwise(abs(raw - 0.5) < 0.1, f"the raw loss there falls with {raw:.3f} of alpha")


@pytest.mark.claim("d2l.form.equal_marginal")
def test_equal_marginal_returns(claim):
    """At the optimum a little more N and as much more D, in logarithms, buy the same.

    A central difference over h is off by h^2 / 6 of the loss and by 4 roundings of it over h.
    """
    h = 1e-5

    def slopes(surface, split):
        """-dL/d ln N and -dL/d ln D, by differences."""
        steps = [(exp(h), 1), (exp(-h), 1), (1, exp(h)), (1, exp(-h))]
        more, less, longer, shorter = (surface.loss(split.parameters * n, split.tokens * d) for n, d in steps)
        return (less - more) / (2 * h), (shorter - longer) / (2 * h)

    @given(SURFACES, BUDGETS)
    def everywhere(surface, budget):
        bare = replace(surface, E=0.0)
        split = bare.optimum(budget)
        found, error = slopes(bare, split), 1e-9 * bare.loss(*split)
        assert found[0] == pytest.approx(found[1], abs=2 * error)
        assert found == pytest.approx(bare.marginals(*split), abs=error)

    everywhere()
    best = PRINTED.optimum(1e24)
    size, data = slopes(PRINTED, best)
    claim.holds(abs(size - data) < 2e-9 * PRINTED.loss(*best), f"{size:.6f} and {data:.6f} nats at 1e24 FLOPs")


@pytest.mark.claim("d2l.form.runs_400")
def test_cited(claim):
    """A paper reports it."""
    claim.cited()
