"""The synthetic language: what its chain says of itself, against its own samples and against power iteration."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.source import MarkovSource

SOURCE = MarkovSource()
FEW = settings(max_examples=settings().max_examples // 10)  # each one solves for a chain


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@FEW
@given(symbols=st.integers(2, 64), seed=st.integers(0, 2**31))
def test_the_entropy_rate_is_what_power_iteration_gives(symbols, seed):
    """The distribution that P^(2^20) has in every row is the stationary one, and its mean entropy the rate.

    The chain has no zeros, so that it forgets by a constant factor a step; each of 20 squarings rounds to some
    V units in the last place, of numbers at most one.
    """
    source = MarkovSource(symbols=symbols, seed=seed)
    power_VV = source.transition_VV
    for _ in range(20):
        power_VV = power_VV @ power_VV
        power_VV = power_VV / power_VV.sum(-1, keepdim=True)
    slack = 20 * symbols * 2**-52
    assert (power_VV - source.stationary).abs().max() <= slack
    entropies = torch.special.entr(source.transition_VV).sum(-1)
    assert math.isclose(
        source.entropy_rate, float(power_VV[0] @ entropies), abs_tol=slack * math.log(symbols) * symbols
    )


def test_a_long_sample_has_the_entropy_rate():
    """Nats a symbol of 4,096 independent sequences of 64: within six standard errors, a false alarm in 5e8."""
    sequences = SOURCE.surprise(SOURCE.sample(4096, 65, generator())).mean(1)
    error = sequences.std() / math.sqrt(len(sequences))
    assert abs(sequences.mean() - SOURCE.entropy_rate) < 6 * error
    assert error < 0.01 * SOURCE.entropy_rate


def test_a_sample_is_stationary_and_moves_as_the_chain_does():
    """Symbols of the first two positions, and pairs of them, are as frequent as the chain says.

    Pearson's statistic over k cells that expect 8 draws or more each, rarer ones taken as one cell, has the chi-squared
    distribution of k - 1 degrees, of mean k - 1 and variance 2 (k - 1). Six deviations are a false alarm in 7e5 at 63
    degrees, and in more above.
    """
    count = 2**17
    first, second = SOURCE.sample(count, 2, generator()).T
    pairs = SOURCE.stationary[:, None] * SOURCE.transition_VV * count
    seen = torch.zeros(64, 64, dtype=torch.float64).index_put_((first, second), torch.ones(count).double(), True)
    for expected, found in (
        (pairs.sum(1), seen.sum(1)),
        (pairs.sum(0), seen.sum(0)),
        (pairs.flatten(), seen.flatten()),
    ):
        rare = expected < 8
        expected = torch.cat([expected[~rare], expected[rare].sum()[None] + 1e-12])
        found = torch.cat([found[~rare], found[rare].sum()[None]])
        statistic, freedom = float(((found - expected).square() / expected).sum()), len(expected) - 1
        assert abs(statistic - freedom) < 6 * math.sqrt(2 * freedom)


def test_the_divergence_is_zero_for_the_chain_and_the_excess_for_others():
    """Logits that are the chain's cost nothing; uniform ones cost log V less each symbol's entropy."""
    symbols_BT = torch.arange(64)[None]
    own = SOURCE.divergence(SOURCE.transition_VV.log()[symbols_BT] + 3, symbols_BT)
    assert own.abs().max() < 64 * 2**-52  # sums of 64 terms, each rounded once
    uniform = SOURCE.divergence(torch.zeros(1, 64, 64), symbols_BT)
    assert torch.allclose(uniform[0], math.log(64) - SOURCE.entropy, rtol=0, atol=64 * 2**-50)


def test_the_divergence_is_what_drawn_targets_average_to():
    """Over 64 x 4,096 drawn targets the excess of random logits is their divergence, within six standard errors."""
    symbols_BT = torch.arange(64).repeat(4096, 1)
    logits = torch.randn(64, 64, generator=generator())
    targets = torch.multinomial(SOURCE.transition_VV, 4096, replacement=True, generator=generator(1)).T
    log_model, log_chain = logits.double().log_softmax(-1), SOURCE.transition_VV.log()
    excess = log_chain[symbols_BT, targets] - log_model[symbols_BT, targets]
    expected = SOURCE.divergence(logits[symbols_BT[:1]], symbols_BT[:1])[0]
    error = excess.std(0) / math.sqrt(len(excess))
    # Of 64 means the largest passes six errors by chance in one case of 8e6.
    assert ((excess.mean(0) - expected).abs() < 6 * error).all()


@pytest.mark.parametrize("seed", [0, 1])
def test_a_chain_and_its_samples_follow_from_seeds(seed):
    """The same seeds give the same bits, another seed another chain."""
    one, two, other = (MarkovSource(seed=number) for number in (seed, seed, seed + 1))
    assert torch.equal(one.transition_VV, two.transition_VV)
    assert not torch.equal(one.transition_VV, other.transition_VV)
    assert torch.equal(one.sample(3, 5, generator(7)), two.sample(3, 5, generator(7)))
    assert not torch.equal(one.sample(3, 5, generator(7)), one.sample(3, 5, generator(8)))
