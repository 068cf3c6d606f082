"""Claims of the counting essay on power laws, and on fitting them to the Chinchilla paper's table 3."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import least_squares
from scipy.special import huber
from scipy.stats import linregress

from accounting import fits, pictures
from accounting.conventions import six_nd
from accounting.ledger import case
from accounting.scaling import LAWS, LossSurface, PowerLaw, Split, fit_power_law
from tests import strategies, tables

PRINTED, REFIT = LAWS["hoffmann"].surface, LAWS["besiroglu"].surface
CAPACITY = PowerLaw(coefficient=PRINTED.A, exponent=-PRINTED.alpha)
ESTIMATION = PowerLaw(coefficient=PRINTED.B, exponent=-PRINTED.beta)
TABLE = tables.columns("chinchilla_table3")
SPLITS, BUDGETS = Split(TABLE["parameters"], TABLE["tokens"]), TABLE["flops"]
EPSILON = 2**-52
ROUNDING = 8 * EPSILON  # of a handful of operations
LOGS = 100 * EPSILON  # of a few logarithms below 50
POWERS = st.builds(PowerLaw, coefficient=st.floats(1e-3, 1e3), exponent=st.floats(-3, 3))
NUMBERS = st.floats(1e-6, 1e6)
LARGE = st.floats(1, 1e12)
SURFACES = strategies.LOSS_SURFACES


@pytest.mark.claim("count.powerlaw.log")
def test_logarithms_make_a_line(claim):
    """The log of a power law is log a + b log x, and on log-log axes it has one slope everywhere."""

    @given(POWERS, NUMBERS)
    def everywhere(law, x):
        line = np.log(law.coefficient) + law.exponent * np.log(x)
        assert abs(np.log(law.at(x)) - line) <= LOGS
        xs = x * np.geomspace(1, 1e4, 9)
        slopes = np.diff(np.log(law.at(xs))) / np.diff(np.log(xs))
        assert np.ptp(slopes) <= 4 * LOGS  # of steps of 1.15

    everywhere()
    xs = np.geomspace(1e6, 1e12, 7)
    line = linregress(np.log10(xs), np.log10(CAPACITY.at(xs)))
    slope, level = line.slope - CAPACITY.exponent, line.intercept - np.log10(CAPACITY.coefficient)
    claim.holds(
        max(abs(slope), abs(level) / 9) <= LOGS,  # the level is that of nine decades away
        f"406.4 / N^0.34 in logs: slope {line.slope:.6f}, intercept log {10**line.intercept:.6f}",
    )


@pytest.mark.claim("count.powerlaw.decade")
def test_exponent_is_decades_for_a_decade(claim):
    """Where x grows ten times, y grows by the exponent in powers of ten."""

    @given(POWERS, NUMBERS)
    def everywhere(law, x):
        assert abs(np.log10(law.at(10 * x) / law.at(x)) - law.exponent) <= LOGS
        assert abs(np.log10(law.growth(10)) - law.exponent) <= LOGS

    everywhere()
    decades = np.log10(CAPACITY.at(1e10) / CAPACITY.at(1e9))
    claim.holds(abs(decades - CAPACITY.exponent) <= LOGS, f"406.4 / N^0.34 from 1e9 to 1e10: {decades:.6f}")


def grown(term, factor):
    """What is left of a term of the printed law where N or D grows by a factor, from a small one and a large one."""
    return [term(factor * size) / term(size) for size in (1e6, 1e12)]


@pytest.mark.parametrize(
    ("law", "term", "factor"),
    [
        case("count.powerlaw.tenfold", CAPACITY, PRINTED.capacity, 10),
        case("count.powerlaw.double", CAPACITY, PRINTED.capacity, 2),
        case("count.powerlaw.data_tenfold", ESTIMATION, PRINTED.estimation, 10),
    ],
)
def test_multipliers(claim, law, term, factor):
    """What is left of a term, by its exponent and by its values."""
    for left in (law.growth(factor), *grown(term, factor)):
        claim.measured(left)


@pytest.mark.claim("count.powerlaw.removes")
def test_loss_that_ten_times_the_parameters_remove(claim):
    """The share of the loss owed to being small that goes with ten times the parameters."""
    for left in (CAPACITY.growth(10), *grown(PRINTED.capacity, 10)):
        claim.measured(1 - left)


@pytest.mark.claim("count.powerlaw.E_stays")
def test_floor_stays(claim):
    """However large N and D are the loss is above E, and E is what is left where both are infinite."""

    @given(SURFACES, LARGE, LARGE)
    def everywhere(surface, parameters, tokens):
        assert surface.loss(parameters, tokens) > surface.loss(np.inf, np.inf) == surface.E

    everywhere()
    large = PRINTED.loss(1e15, 1e18)
    claim.holds(large > PRINTED.loss(np.inf, np.inf) == PRINTED.E, f"{large:.4f} for 1e15 and 1e18, above {PRINTED.E}")


@pytest.mark.claim("count.fit.least_squares")
def test_least_squares(claim):
    """Of all lines the fitted one leaves the least sum of squared vertical gaps between logs."""

    def gaps(x, y, slope, level):
        return np.square(np.log(y) - level - slope * np.log(x)).sum()

    shifts = st.floats(1e-3, 10).flatmap(lambda size: st.sampled_from([-size, size]))
    points = st.dictionaries(st.integers(-6, 6), NUMBERS, min_size=3)  # of a decade each

    @given(points, shifts, shifts)
    def everywhere(y_of_decade, slope, level):
        x, y = 10.0 ** np.array(list(y_of_decade)), np.array(list(y_of_decade.values()))
        law = fit_power_law(x, y)
        at = law.exponent, np.log(law.coefficient)
        least = gaps(x, y, *at)
        for other in ((at[0] + slope, at[1]), (at[0], at[1] + level)):
            assert gaps(x, y, *other) > least

    everywhere()
    law, sizes = fit_power_law(BUDGETS, SPLITS.parameters), SPLITS.parameters
    least = gaps(BUDGETS, sizes, law.exponent, np.log(law.coefficient))
    around = [
        gaps(BUDGETS, sizes, law.exponent + slope, np.log(law.coefficient) + level)
        for slope, level in product((-1e-3, 0, 1e-3), (-1e-2, 0, 1e-2))
        if slope or level
    ]
    claim.holds(least < min(around), f"table 3's sizes: {least:.5f}, and {min(around):.5f} on the best of lines nearby")


@pytest.mark.parametrize(
    "column", [case("count.fit.n_slope", SPLITS.parameters), case("count.fit.d_slope", SPLITS.tokens)]
)
def test_slope(claim, column):
    """The slope of a column of table 3 over its budgets on log-log axes, by ours and by SciPy's regression."""
    claim.measured(fit_power_law(BUDGETS, column).exponent)
    claim.measured(linregress(np.log(BUDGETS), np.log(column)).slope)


@pytest.mark.claim("count.fit.half")
def test_slopes_are_a_half(claim):
    """Both slopes round to the 0.50 that the paper has for its first method."""
    claim.measured([fit_power_law(BUDGETS, column).exponent for column in SPLITS])
    caption = "Table 3 of Hoffmann et al.: the optimal N and D of nine budgets, and the power laws of least squares"
    claim.picture(pictures.table3(SPLITS.parameters, BUDGETS, SPLITS.tokens), caption)


@pytest.mark.claim("count.fit.sixnd_over_c")
def test_compute_of_the_table(claim):
    """6 N D over C, row by row."""
    claim.measured(six_nd(*SPLITS) / BUDGETS)


@pytest.mark.claim("count.fit.d_over_n")
def test_ratios_of_the_table(claim):
    """D over N, row by row."""
    claim.measured(SPLITS.ratio)


@pytest.mark.claim("count.fit.budgets_are_6nd")
def test_budgets_are_6nd(claim):
    """Eight of the nine budgets are 6 N D to a hundredth; Gopher's is less than 6 N D of any numbers that round so."""
    off = six_nd(*SPLITS) / BUDGETS - 1
    gopher = SPLITS.parameters == 67e9
    claim.holds(abs(off[~gopher]).max() < 0.01, f"but for one row off by {abs(off[~gopher]).max():.2%} at most")
    least = six_nd(66_500_000_000, 1_450_000_000_000)
    claim.otherwise(least < 5.765e23, f"67 billion: {off[gopher].item():.2%}, and {least:.3g} for what rounds so")


@pytest.mark.claim("count.fit.ratio_range")
def test_range_of_ratios(claim):
    """The ratios lie between these two."""
    claim.measured([SPLITS.ratio.min(), SPLITS.ratio.max()])


@pytest.mark.claim("count.fit.nine_orders")
def test_orders_of_magnitude(claim):
    """The budgets span so many powers of ten."""
    claim.measured(np.log10(BUDGETS.max() / BUDGETS.min()))


@pytest.mark.claim("count.fit.not_straight")
def test_loss_is_not_straight(claim):
    """On log-log axes the loss falls less and less steeply, never so steeply as its term: it flattens to a floor."""
    sizes = np.geomspace(1, 1e12, 13)

    def slopes(surface, tokens):
        return np.diff(np.log(surface.loss(sizes, tokens))) / np.diff(np.log(sizes))

    @given(SURFACES, LARGE)
    def everywhere(surface, tokens):
        found = slopes(surface, tokens)
        assert (-surface.alpha < found).all()
        assert (found < 0).all()
        assert (np.diff(found) > 0).all()

    everywhere()
    first, *_, last = slopes(PRINTED, np.inf)
    claim.holds(-PRINTED.alpha < first < last < 0, f"slope {first:.3f} of the first decade and {last:.5f} of the 12th")


@pytest.mark.claim("count.fit.huber_outliers")
def test_huber_counts_outliers_less(claim):
    """Huber's loss is the square's up to delta and a line beyond; one wrong run moves its fit little.

    The runs are made by the refit, one of them with its loss doubled. Least squares are SciPy's, from the truth.
    """
    delta = 1e-3

    @given(st.floats(1e-6, 1))
    def everywhere(residual):
        square, line = residual**2 / 2, delta * (residual - delta / 2)
        assert huber(delta, residual) == pytest.approx(square if residual <= delta else line, rel=ROUNDING)
        assert huber(delta, residual) <= square * (1 + ROUNDING)

    everywhere()
    sizes, data = (column.ravel() for column in np.meshgrid(np.geomspace(1e8, 1e10, 6), np.geomspace(1e9, 1e11, 6)))
    truth = np.array([np.log(REFIT.A), np.log(REFIT.B), np.log(REFIT.E), REFIT.alpha, REFIT.beta])
    losses = REFIT.loss(sizes, data)
    wrong = losses * np.where(np.arange(36) == 17, 2, 1)

    def residuals(theta):
        law = LossSurface(**dict(zip("A B E alpha beta".split(), [*np.exp(theta[:3]), *theta[3:]], strict=True)))
        return np.log(law.loss(sizes, data) / wrong)

    found = fits.fit(sizes, data, wrong, starts=truth[None])
    objective = huber(delta, np.log(found.law.loss(sizes, data) / wrong)).sum()
    assert found.value == pytest.approx(objective, rel=1e-9)  # residuals of 1e-4, rounded to 1e-15
    squares = least_squares(residuals, truth)
    robust = abs(np.log(found.law.loss(sizes, data) / losses)).max()
    pulled = abs(residuals(squares.x) + np.log(wrong / losses)).max()
    claim.holds(
        robust < delta < pulled / 10,
        f"one of 36 losses doubled moves the others of the Huber fit by {robust:.1e}, of least squares by {pulled:.1e}",
    )


@pytest.mark.claim("count.fit.table3")
def test_cited(claim):
    """The paper prints the table."""
    claim.cited()
