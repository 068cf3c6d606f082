"""The study of the chain: a line where every sequence is new, a bend where few are repeated, and its false alarms."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import t as student

from model import study
from model.diets import Synthetic
from model.source import MarkovSource
from tests.bench.baselines import ROOT
from tests.trainings import CPU, EMPTY

RECORDED = ROOT / "amd-epyc" / "study"
SPREAD = 0.2  # a point is on a line when it is within so much of it in the logarithm: a factor of 1.22


def margins(one):
    """What must be positive: how far a study is, by each part of the verdict, from where that part would fail.

    ``line``: a size of the fresh diet is on its power law. ``bend``: on the fixed diet the validation excess of the
    largest is twice that law's. ``memory``: its training loss is below the entropy rate. ``parting``: it has training
    and validation five times as far apart as the smallest. ``fresh``: the fresh diet, of no size a tenth as far.
    """
    law, (sizes, fresh) = one.line("fresh", "validation_excess"), one.curve("fresh", "validation_excess")
    off = np.abs(np.log(fresh / law.at(sizes)))
    (_, unseen), (_, seen) = (one.curve("fixed", f"{kind}_excess") for kind in ("validation", "train"))
    apart, fresh_apart = unseen - seen, np.abs(fresh - one.curve("fresh", "train_excess")[1])
    return {
        **{f"line {size:g}": SPREAD - distance for size, distance in zip(sizes, off, strict=True)},
        "bend": np.log(unseen[-1] / law.at(sizes[-1])) - np.log(2),
        "memory": -seen[-1],
        "parting": apart[-1] - 5 * apart[0],
        "fresh": apart[-1] / 10 - fresh_apart.max(),
    }


@pytest.fixture(scope="module")
def recorded():
    """The default study, with 16 seeds."""
    return study.load(RECORDED / "chain.json")


def of_seed(one, seed):
    return replace(one, runs=tuple(run for run in one.runs if run.seed == seed))


def test_a_curve_is_the_mean_over_seeds_and_a_picture_shows_all(recorded):
    """By non-embedding parameters, rising; each diet's two curves and the line's slope are named in the picture."""
    sizes, losses = recorded.curve("fixed", "validation")
    assert list(sizes) == sorted({run.parameters for run in recorded.runs})
    alone = [of_seed(recorded, seed).curve("fixed", "validation")[1] for seed in {run.seed for run in recorded.runs}]
    assert np.allclose(losses, np.mean(alone, 0), rtol=1e-12)
    picture = study.draw(recorded)
    for label in ("fresh, train", "fresh, validation", "fixed, train", "fixed, validation"):
        assert label in picture
    assert f"slope {recorded.line('fresh', 'validation_excess').exponent:.2f}" in picture


def test_a_false_alarm_is_rarer_than_one_in_ten_thousand(recorded):
    """Margins of another seed fall below zero with the probability that 16 recorded seeds give, added over all.

    Student's t: of margins taken as normal the next is off the mean of n by t s sqrt(1 + 1/n), t of n - 1 degrees.
    """
    seeds = sorted({run.seed for run in recorded.runs})
    rows = [margins(of_seed(recorded, seed)) for seed in seeds]
    alarms = 0.0
    for name in rows[0]:
        values = np.array([row[name] for row in rows])
        distance = values.mean() / (values.std(ddof=1) * math.sqrt(1 + 1 / len(values)))
        alarms += student.sf(distance, len(values) - 1)
    assert alarms < 1e-4


def test_a_fresh_diet_is_a_line_and_a_fixed_one_bends(tmp_path):
    """The default study of a seed that is not among the recorded ones: the line, the bend, and what is learnt by heart.

    Of the fixed diet the smallest and the largest size suffice. A machine, a torch or a seed that rounds or draws
    otherwise fails here by chance in one case of ten thousand, as the test above derives.
    """
    fresh, fixed = (Synthetic(MarkovSource(), study.CHAIN.tokens, 16, repeated) for repeated in (None, study.REPEATED))
    ends = (study.CHAIN_SIZES[0], study.CHAIN_SIZES[-1])
    runs = [
        run
        for name, diet, sizes in (("fresh", fresh, study.CHAIN_SIZES), ("fixed", fixed, ends))
        for run in study.run([(name, diet)], sizes, study.CHAIN, folder=tmp_path, device=CPU)
    ]
    found = margins(replace(EMPTY, runs=tuple(runs)))
    assert min(found.values()) > 0, found


@pytest.mark.parametrize(("replaced", "by"), [("fixed", "fresh"), ("fresh", "fixed")])
def test_the_verdict_can_fail(replaced, by, recorded):
    """A family on a fresh diet is not seen to bend, nor one on a fixed diet to be a line, for any recorded seed."""
    for seed in {run.seed for run in recorded.runs}:
        kept = [run for run in of_seed(recorded, seed).runs if run.diet == by]
        found = margins(replace(recorded, runs=tuple(kept + [replace(run, diet=replaced) for run in kept])))
        failed = ["bend", "memory"] if by == "fresh" else [name for name in found if name.startswith("line")]
        assert min(found[name] for name in failed) < 0


def test_the_rates_rule_moves_the_large_end(recorded):
    """Recorded: with the inverse of the width, not its root, the largest size ends higher for each of three seeds."""
    inverse = study.load(RECORDED / "chain-inverse.json")
    for seed in (0, 1, 2):
        (_, root), (_, other) = (of_seed(one, seed).curve("fresh", "validation_excess") for one in (recorded, inverse))
        assert other[-1] > root[-1]
