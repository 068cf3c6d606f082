"""The commands about laws of loss: what they print, in which form, and how they fail."""

import sys
from dataclasses import asdict

import numpy as np
import pytest

from accounting import fits, runs
from accounting.cli.laws import short
from accounting.scaling import LAWS
from tests.test_cli import run
from tests.test_cli_flops import answer


@pytest.mark.parametrize("law", LAWS)
def test_optimum_is_that_of_the_package(law, capsys, monkeypatch):
    """N, D, their ratio, the loss and its two terms, with the law's constants and source."""
    said = answer(capsys, monkeypatch, "optimum", "--compute", "5.76e23", "--law", law)
    surface, source = LAWS[law]
    split = surface.optimum(5.76e23)
    assert (said["schema"], said["model"]) == ("sixnd.optimum/1", None)
    assert (said["N"], said["D"], said["tokens_per_parameter"]) == (*split, split.ratio)
    assert said["loss"] == surface.loss(*split)
    assert (said["alpha_term"], said["beta_term"]) == (
        surface.capacity(split.parameters),
        surface.estimation(split.tokens),
    )
    assert said["law"] == {"name": law, "source": source, **asdict(surface)}
    assert said["given"] == {"compute": 5.76e23, "inference": None, "loss": None}


def test_serving_moves_the_optimum(capsys, monkeypatch):
    """With tokens to serve the loss stays: that of the budget, or the one that is asked for."""
    surface = LAWS["besiroglu"].surface
    least = surface.loss(*surface.optimum(1e23))
    for options, loss in (([], least), (["--loss", "2.25"], 2.25)):
        said = answer(capsys, monkeypatch, "optimum", "--compute", "1e23", "--inference", "1e13", *options)
        split = surface.cheapest(loss, 1e13)
        assert (said["N"], said["D"], said["loss"]) == (*split, loss)
        assert said["training_flops"] == 6 * split.parameters * split.tokens
        assert said["inference_flops"] == 2 * split.parameters * 1e13
    said = answer(capsys, monkeypatch, "optimum", "--loss", "2.25")
    assert (said["N"], said["D"]) == surface.cheapest(2.25)


def test_the_table_names_its_law(capsys, monkeypatch):
    """The law, its source, what N counts, and numbers to four digits: those of the ledger at 1e24 FLOPs."""
    code, out, _ = run(capsys, monkeypatch, "optimum", "--compute", "1e24", "--law", "hoffmann")
    assert code == 0
    for part in ("hoffmann: L = 1.69 + 406.4 / N^0.34 + 410.7 / D^0.28", "arXiv 2203.15556", "tables among them"):
        assert part in out
    for cell in ("41.30B", "4.036T", "97.73", "0.0999", "0.121"):
        assert cell in out
    _, out, _ = run(capsys, monkeypatch, "optimum", "--compute", "1e23", "--inference", "1e14")
    assert "FLOPs of serving 100.0T tokens" in out and "training over --compute" in out


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "expected --compute C, --loss L or both"),
        (["--compute", "0"], "Invalid value for '--compute': expected more than 0, got 0"),
        (["--compute", "many"], "Invalid value for '--compute': expected a number, got 'many'"),
        (["--inference", "1e12"], "expected --compute C, --loss L or both"),
        (["--loss", "1.8"], "--law besiroglu: loss: expected more than E, 1.8172, by 1e-09 of it, got 1.8"),
        (["--loss", "1.8172000000000002"], "--law besiroglu: loss: expected more than E, 1.8172, by 1e-09 of it, got"),
        (["--compute", "1e-30"], "--law besiroglu: the best split is 2e-17 parameters on 8.34e-15 tokens, less than"),
        (["--loss", "1e39"], "--law besiroglu: the best split is 2.6e-104 parameters on"),
        (["--loss", "1.8", "--law", "kaplan"], "Invalid value for '--law': 'kaplan' is not one of"),
    ],
)
def test_what_has_no_optimum_is_refused(arguments, problem, capsys, monkeypatch):
    """One line, exit code 2, nothing on standard output."""
    code, out, err = run(capsys, monkeypatch, "optimum", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"sixnd: {problem}") and err.count("\n") == 1


@pytest.fixture
def table(tmp_path):
    """Twenty runs of a known law, and two that went wrong, with C for D."""
    law, rng = LAWS["besiroglu"].surface, np.random.default_rng(0)
    sizes, budgets = np.exp(rng.uniform(18, 23, 20)), np.exp(rng.uniform(42, 48, 20))
    losses = law.loss(sizes, budgets / 6 / sizes)
    rows = [
        f"{n!r},{c!r},{loss!r}" for n, c, loss in zip(*map(np.ndarray.tolist, (sizes, budgets, losses)), strict=True)
    ]
    path = tmp_path / "runs.csv"
    path.write_text("\n".join(["model size,FLOPs,loss", *rows[:10], "1e9,6e19,9.5", *rows[10:], "2e9,6e19,9.0"]))
    return path


def test_fit_is_that_of_the_package(table, capsys, monkeypatch):
    """The law, how the search went, and intervals: for the runs of a file less those of highest loss."""
    said = answer(capsys, monkeypatch, "fit", str(table), "--drop-highest", "2", "--bootstrap", "20", "--seed", "3")
    kept = runs.load(table).without_highest(2)
    columns = kept.parameters, kept.tokens, kept.losses
    found = fits.fit(*columns)
    intervals = fits.bootstrap(*columns, resamples=20, seed=3, law=found.law)
    assert (said["schema"], said["law"]) == ("sixnd.fit/1", asdict(found.law))
    assert said["law"] == pytest.approx(asdict(LAWS["besiroglu"].surface), rel=1e-6)
    assert (said["starts"], said["share_at_optimum"]) == (4500, found.share_at_optimum)
    assert (said["converged"], said["gradient_norm"]) == (True, found.gradient_norm)
    assert {name: tuple(bounds) for name, bounds in said["intervals"].items()} == dict(intervals.bounds)
    assert (said["runs"]["count"], said["runs"]["fitted"], said["runs"]["tokens_from"]) == (22, 20, "C / 6 N")
    assert said["objective"] == {"name": "huber", "delta": 1e-3, "value": found.value}
    assert said["bootstrap"]["seed"] == 3


def test_fit_by_absolute_deviations_says_so(table, capsys, monkeypatch):
    """The table names the objective, the runs that are left out and how the search ended."""
    code, out, _ = run(capsys, monkeypatch, "fit", str(table), "--objective", "lad")
    assert code == 0
    for part in ("22 runs, D from C / 6 N\n", "absolute deviations of log L", "from 4,500 starts", "N_exponent"):
        assert part in out
    expected = fits.fit(
        *(getattr(runs.load(table), name) for name in ("parameters", "tokens", "losses")), objective="lad"
    )
    assert f"{expected.law.A:.6g}" in out
    assert "converged" in out if expected.converged else "NOT CONVERGED" in out


def test_runs_that_fix_no_law_are_refused(tmp_path, capsys, monkeypatch):
    """Too few runs, runs of one size and files that are no table: one line, exit code 2."""
    path = tmp_path / "runs.csv"
    for text, problem in {
        "N,D,loss\n1e9,1e10,3\n": "expected at least 6 different runs for 5 constants, got 1",
        "N,D,loss\n"
        + "".join(f"1e9,{d}e10,{4 - d / 9}\n" for d in range(1, 9)): "parameters: expected numbers that differ",
        "N,loss\n1,2\n": "expected a column for D",
    }.items():
        path.write_text(text)
        code, out, err = run(capsys, monkeypatch, "fit", str(path))
        assert (code, out) == (2, "")
        assert err.startswith(f"sixnd: {path}: {problem}") and err.count("\n") == 1


def test_resamples_are_bounded(table, capsys, monkeypatch):
    """A number of resamples that no memory holds is refused before any is drawn."""
    code, out, err = run(capsys, monkeypatch, "fit", str(table), "--bootstrap", "1e12")
    assert (code, out, err) == (2, "", "sixnd: Invalid value for '--bootstrap': expected at most 100000, got 1e12\n")


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (999_940_000, "999.9M"),
        (999_960_000, "1.000B"),
        (41.2967e9, "41.30B"),
        (4.0358e12, "4.036T"),
        (999.97e12, "1e+15"),
        (12, "12"),
    ],
)
def test_sizes_are_written_with_four_digits(number, text):
    """The suffix goes up where four digits round up to a thousand."""
    assert short(number) == text


def test_fit_says_what_to_install(table, capsys, monkeypatch):
    """Without JAX one line says which package is missing and how it is installed."""
    monkeypatch.delattr("accounting.fits", raising=False)
    monkeypatch.setitem(sys.modules, "accounting.fits", None)
    code, out, err = run(capsys, monkeypatch, "fit", str(table))
    assert (code, out) == (2, "")
    assert err == "sixnd: fit needs accounting.fits: pip install 'sixnd[fits]'\n"
