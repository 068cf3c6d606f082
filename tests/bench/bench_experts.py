"""A layer of experts against a dense feed-forward of the same active FLOPs, in turns in one run.

Each runs forward and backward, gradients of what it is given included, at Mixtral's ratios: of eight experts two are
active, and each is three and a half times as wide as the model. The router's own products are a six-hundredth.
"""

import pytest
import torch

from accounting.authorities.timing import measure, wait
from accounting.spec import Experts, FeedForward
from model.torch_experts import ExpertsLayer
from model.torch_layers import FeedForwardLayer
from tests.bench.baselines import DEVICE, DTYPE, THREADS, fell

ROUNDS = 7
WIDTH, BATCH, SEQ = 512, 4, 512
EXPERT = FeedForward(width=WIDTH * 7 // 2, activation="silu", gated=True)
MIXTURE = Experts(experts=8, active=2, expert=EXPERT)
DENSE = FeedForward(width=MIXTURE.active * EXPERT.width, activation="silu", gated=True)


def passes(layer):
    """A callable that runs a layer forward and back on tokens drawn once."""
    for parameter in layer.to(DEVICE, DTYPE).parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    tokens = torch.randn(BATCH, SEQ, WIDTH, device=DEVICE, dtype=DTYPE, requires_grad=True)

    def run():
        layer.zero_grad()
        tokens.grad = None
        layer(tokens).sum().backward()

    return run


@pytest.mark.usefixtures("two_threads")
def test_experts_take_at_most_1_3_times_as_long_as_a_dense_layer(benchmark, baseline):
    """Sorting, gathering and eight products for each one cost that much at most; and no more than when last stored."""
    torch.manual_seed(0)
    ours, dense = passes(ExpertsLayer(MIXTURE, WIDTH)), passes(FeedForwardLayer(DENSE, WIDTH))
    seconds = []

    def other():
        """Before each round of ours: one of the dense layer, and a call of ours to warm up."""
        seconds.append(measure(dense, rounds=1).minimum_seconds)
        wait(ours())

    benchmark.pedantic(lambda: wait(ours()), setup=other, rounds=ROUNDS)
    ratios = [theirs / own for theirs, own in zip(seconds, benchmark.stats.stats.data, strict=True)]
    ratio = benchmark.stats.stats.min / min(seconds)
    benchmark.extra_info.update(ratio=ratio, ratios=ratios, threads=THREADS if DEVICE == "cpu" else None)
    assert baseline is None or not fell(baseline["ratios"], ratios)
    assert ratio <= 1.3
