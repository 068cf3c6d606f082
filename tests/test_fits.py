"""Fits of the loss surface: truth from clean runs, SciPy's opinion of noisy ones, and searches that went wrong."""

import jax
import numpy as np
import pytest
from scipy.optimize import approx_fprime, linprog

from accounting import fits
from accounting.descent import descend
from accounting.scaling import LossSurface

LAW = LossSurface(E=1.8172, A=482.01, B=2085.43, alpha=0.3478, beta=0.3658)
STARTS = fits.grid()[::113]
#: Half of float64's digits: what a search that compares values resolves.
HALF = 2**-26
OBJECTIVES = pytest.mark.parametrize("objective", ["huber", "lad"])


def runs(noise=0.0, count=240):
    """Sizes, tokens and losses over the range of Hoffmann et al.; errors of log L have Laplace's distribution."""
    random = np.random.default_rng(0)
    parameters = np.exp(random.uniform(np.log(4e7), np.log(1.6e10), count))
    tokens = 10 ** random.uniform(18, 22, count) / (6 * parameters)
    return parameters, tokens, LAW.loss(parameters, tokens) * np.exp(random.laplace(0, noise, count))


def relative(law, other=LAW):
    """The largest relative difference of two laws' constants."""
    return max(abs(getattr(law, name) / getattr(other, name) - 1) for name in fits.CONSTANTS)


def test_the_grid_is_hoffmanns():
    """4,500 different starts: six values of a and of b, five of e, alpha and beta."""
    assert fits.grid().shape == (4500, 5)
    assert len(np.unique(fits.grid(), axis=0)) == 4500
    assert [len(np.unique(column)) for column in fits.grid().T] == [6, 6, 5, 5, 5]
    assert (fits.grid().min(0).tolist(), fits.grid().max(0).tolist()) == ([0, 0, -1, 0, 0], [25, 25, 1, 2, 2])


@OBJECTIVES
def test_runs_without_noise_return_the_truth(objective):
    """To 1e-6 of every constant, from each start that counts as at the optimum."""
    found = fits.fit(*runs(), objective=objective, starts=STARTS)
    assert relative(found.law) < 1e-6
    assert max(found.spread.values()) < 1e-6
    assert found.converged and 1 < found.at_optimum < found.starts == len(STARTS)


def test_scipy_finds_the_same_law_in_noise():
    """The same value but for what SciPy leaves, the same losses, and no smaller a share of the starts there."""
    noisy = runs(0.005)
    ours, theirs = fits.fit(*noisy, starts=STARTS), fits.fit_scipy(*noisy, starts=STARTS)
    assert ours.converged and theirs.converged
    assert ours.value <= theirs.value * (1 + HALF**2) and theirs.value <= ours.value * (1 + HALF)
    np.testing.assert_allclose(ours.law.loss(*noisy[:2]), theirs.law.loss(*noisy[:2]), rtol=2**-20)
    assert ours.at_optimum >= theirs.at_optimum > 0


def test_no_direction_lowers_absolute_deviations():
    """By a linear program over all steps up to 1e-3: the derivatives by differences are good to half the digits."""
    parameters, tokens, losses = runs(0.005)
    found = fits.fit(parameters, tokens, losses, objective="lad", starts=STARTS)

    def residuals(logs):
        E, A, B, alpha, beta = np.exp(logs)
        return np.log(LossSurface(E=E, A=A, B=B, alpha=alpha, beta=beta).loss(parameters, tokens) / losses)

    point = np.log([getattr(found.law, name) for name in fits.CONSTANTS])
    here, slopes, ones = residuals(point), approx_fprime(point, residuals), np.eye(len(losses))
    assert np.isclose(np.abs(here).sum(), found.value, rtol=1e-12)
    best = linprog(
        np.repeat([0.0, 1.0], [5, len(losses)]),
        A_ub=np.block([[slopes, -ones], [-slopes, -ones]]),
        b_ub=np.concatenate([-here, here]),
        bounds=[(-1e-3, 1e-3)] * 5 + [(0, None)] * len(losses),
    )
    slack = 1e-3 * 5 * len(losses) * HALF * np.abs(slopes).max()
    assert found.converged and best.fun >= found.value - slack


def test_absolute_deviations_forget_outliers():
    """Losses of one run in twenty doubled: least absolute deviations still return the truth, least squares do not."""
    parameters, tokens, losses = runs()
    losses[::20] *= 2
    lad = fits.fit(parameters, tokens, losses, objective="lad", starts=STARTS)
    huber = fits.fit(parameters, tokens, losses, starts=STARTS)
    squares = fits.fit(parameters, tokens, losses, delta=10, starts=STARTS)
    assert relative(lad.law) < 1e-6 < relative(huber.law) < 0.1 * relative(squares.law)


@OBJECTIVES
def test_a_multiple_of_the_objective_has_the_same_law(objective):
    """Each run four times multiplies the sum by a power of two, and its root too: not a bit of the law changes."""
    once = runs(0.005)
    single = fits.fit(*once, objective=objective, starts=STARTS)
    fourfold = fits.fit(*np.tile(once, 4), objective=objective, starts=STARTS)
    many = fits.fit(*np.tile(once, 1000), objective=objective, starts=STARTS)
    assert (fourfold.law, fourfold.value) == (single.law, 4 * single.value)
    assert relative(many.law, single.law) < 1e-6
    assert fourfold.at_optimum == single.at_optimum


def test_the_mean_stops_early_and_says_success():
    """Besiroglu et al.: with the mean and SciPy's defaults every start reports success far from the truth."""
    clean, starts = runs(count=227), STARTS[:20]
    bug = fits.fit_scipy(*clean, starts=starts, average=True, tolerance=None)
    assert bug.ended == bug.starts
    assert relative(bug.law) > 0.1 and not bug.converged
    for average in (False, True):
        found = fits.fit_scipy(*clean, starts=starts, average=average)
        assert relative(found.law) < 1e-6 and found.converged


def test_a_single_start_may_succeed_elsewhere():
    """Some starts report success at ten times the best value, which only another start reveals."""
    noisy = runs(0.005)
    alone = [fits.fit_scipy(*noisy, starts=[start], tolerance=1e-12) for start in STARTS[:10]]
    best = min(one.value for one in alone)
    good = next(start for start, one in zip(STARTS, alone, strict=False) if one.value == best)
    bad = [start for start, one in zip(STARTS, alone, strict=False) if one.ended == 1 and one.value > 10 * best]
    both = fits.fit_scipy(*noisy, starts=[bad[0], good], tolerance=1e-12)
    assert both.value == pytest.approx(best, rel=240 * 2**-52)  # the sum of 240 runs, in another order
    assert (both.ended, both.share_at_optimum) == (2, 0.5)


@OBJECTIVES
def test_a_bootstrap_is_a_fit_of_drawn_runs(objective):
    """Of the rows drawn, reproducibly, around the law of all runs; its exponents of N and D add to one."""
    noisy = np.array(runs(0.005))
    found = fits.fit(*noisy, objective=objective, starts=STARTS)
    options = {"resamples": 40, "objective": objective, "law": found.law}
    drawn = fits.bootstrap(*noisy, seed=7, **options)
    again, other = fits.bootstrap(*noisy, seed=7, **options), fits.bootstrap(*noisy, seed=8, **options)
    assert drawn.bounds == again.bounds != other.bounds
    assert drawn.unconverged == 0
    assert all(low < getattr(found.law, name) < high for name, (low, high) in list(drawn.bounds.items())[:5])
    assert drawn.bounds["N_exponent"].lower + drawn.bounds["D_exponent"].upper == pytest.approx(1, rel=1e-12)
    rows = np.random.default_rng(7).integers(240, size=(40, 240))
    law = LossSurface(**dict(zip(fits.CONSTANTS, drawn.laws[-1], strict=True)))
    start = [np.log(law.A), np.log(law.B), np.log(law.E), law.alpha, law.beta]
    theirs = fits.fit_scipy(*noisy[:, rows[-1]], objective=objective, starts=[start])
    assert relative(theirs.law, law) < 1e-6


def test_resamples_without_an_optimum_are_left_out(monkeypatch):
    """They are counted, and no interval has them in it."""

    def lost(*arguments, **options):
        ends = descend(*arguments, **options)
        return ends._replace(arrived=np.arange(len(ends.arrived)) > 0)

    monkeypatch.setattr(fits, "descend", lost)
    drawn = fits.bootstrap(*runs(0.005), resamples=9, seed=0, law=LAW, level=0.5)
    assert drawn.unconverged == 1
    for name, column in zip(fits.CONSTANTS, drawn.laws[1:].T, strict=True):
        assert tuple(drawn.bounds[name]) == tuple(np.quantile(column, [0.25, 0.75]))


def test_a_wider_level_has_wider_intervals():
    """Nine tenths of the resamples lie further apart than half of them."""
    noisy = runs(0.005)
    wide, narrow = (fits.bootstrap(*noisy, resamples=40, seed=0, law=LAW, level=level).bounds for level in (0.9, 0.5))
    assert all(wide[name].lower < narrow[name].lower < narrow[name].upper < wide[name].upper for name in wide)


def test_float64_stays_inside():
    """The precision that others compute in is theirs to choose."""
    fits.fit(*runs(), starts=STARTS[:1])
    assert not jax.config.jax_enable_x64


GOOD = [np.arange(1.0, 9), np.arange(2.0, 10), np.arange(9.0, 1, -1)]


@pytest.mark.parametrize(
    ("column", "value", "problem"),
    [
        (0, np.arange(8.0), "parameters: expected a row of positive, finite numbers"),
        (1, np.full(8, np.nan), "tokens: expected a row of positive, finite numbers"),
        (2, np.full(8, np.inf), "losses: expected a row of positive, finite numbers"),
        (1, np.ones(7), "expected rows of one length, got 8, 7, 8"),
        (0, np.ones(8), "parameters: expected numbers that differ, every run has 1"),
        (1, np.full(8, 3.0), "tokens: expected numbers that differ, every run has 3"),
    ],
)
@pytest.mark.parametrize("fit", [fits.fit, fits.fit_scipy])
def test_runs_that_tell_no_law_are_refused(fit, column, value, problem):
    """Each with one line that says what is wrong."""
    columns = list(GOOD)
    columns[column] = value
    with pytest.raises(ValueError, match=f"^{problem}"):
        fit(*columns)


def test_five_constants_take_six_runs():
    """Different ones: a run twice is one."""
    columns = [np.resize(column[:5], 10) for column in GOOD]
    with pytest.raises(ValueError, match=r"^expected at least 6 different runs for 5 constants, got 5$"):
        fits.fit(*columns)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"delta": 0.0}, "delta: expected a positive number, got 0.0"),
        ({"delta": float("nan")}, "delta: expected a positive number, got nan"),
        ({"objective": "squares"}, "objective: expected huber or lad, got squares"),
        ({"starts": np.zeros((2, 4))}, r"starts: expected finite numbers of shape \(S, 5\), got \(2, 4\)"),
        ({"starts": np.zeros((0, 5))}, r"starts: expected finite numbers of shape \(S, 5\), got \(0, 5\)"),
    ],
)
def test_a_search_that_cannot_be_is_refused(options, problem):
    """Thresholds are positive, objectives known, starts five numbers each."""
    with pytest.raises(ValueError, match=f"^{problem}"):
        fits.fit(*GOOD, **options)


@pytest.mark.parametrize("options", [{"resamples": 0}, {"resamples": 1, "level": 1.0}, {"resamples": 1, "level": 0.0}])
def test_a_bootstrap_that_tells_nothing_is_refused(options):
    """It has resamples, and a level between none and all of them."""
    with pytest.raises(ValueError, match=r"^expected resamples > 0 and 0 < level < 1"):
        fits.bootstrap(*GOOD, seed=0, law=LAW, **options)


def test_a_bootstrap_starts_where_all_terms_are_positive():
    """A floor of zero or less has no logarithm to start from."""
    law = LossSurface(E=0.0, A=1.0, B=1.0, alpha=1.0, beta=1.0)
    with pytest.raises(ValueError, match=r"^law: expected E above 0, got 0"):
        fits.bootstrap(*GOOD, resamples=1, seed=0, law=law)
