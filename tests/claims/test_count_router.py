"""Claims of the counting essay on routers: in which order they take softmax and top k, and DeepSeek-V3's sigmoids."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GptOssConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

from accounting import huggingface
from accounting.authorities import huggingface as modules
from accounting.huggingface import published_config
from accounting.ledger import case
from accounting.routing import route

FEWER = settings(max_examples=settings.default.max_examples // 2)
MIXTRAL = huggingface.load("mixtral-8x7b").spec.blocks[0].feed_forward
DEEPSEEK = huggingface.load("deepseek-v3").spec.blocks[-1].feed_forward
SCORE_FIRST, TOP_K_FIRST = MIXTRAL.router, replace(MIXTRAL.router, order="top_k_first")
CELL = [[2.0, 1.0, 0.5, -1.0]]
SPAN = 20
# Eighths: float32 still ranks their softmax. Each row is several experts' logits, all different.
ROWS = st.lists(st.integers(-80, 80), min_size=2, max_size=8, unique=True).map(lambda row: np.array([row]) / 8 - 11)
# Each softmax errs by its argument, and each sum by its terms.
ROUNDING = (2 * SPAN + 20) * torch.finfo(torch.float32).eps


def with_identity(module):
    """The router, with its input for logits."""
    with torch.no_grad():
        torch.nn.init.eye_(module.weight)
    return module


def mixtral(experts, active):
    config = {**published_config("mixtral-8x7b"), "hidden_size": experts, "num_local_experts": experts}
    return with_identity(MixtralTopKRouter(modules.settings({**config, "num_experts_per_tok": active})))


def deepseek():
    config = {**published_config("deepseek-v3"), "hidden_size": DEEPSEEK.experts}
    return with_identity(DeepseekV3TopkRouter(modules.settings(config)))


def decide(module, rows):
    """A router's weights and indices."""
    with torch.no_grad():
        _, weights, indices = module(torch.tensor(rows, dtype=torch.float32))
    return weights.double().numpy(), indices.numpy()


def tokens(experts, count=1000):
    """Logits of so many tokens, seeded."""
    return np.random.default_rng(0).normal(0, 2, (count, experts))


def gap(ours, theirs):
    """The largest relative difference."""
    return float(np.abs(ours / theirs - 1).max())


@pytest.mark.claim("count.router.same")
def test_orders_agree(claim):
    """Softmax over the top k weighs as Hugging Face's softmax over all does, renormalised."""

    @FEWER
    @given(ROWS, st.data())
    def everywhere(rows, data):
        active = data.draw(st.integers(1, rows.shape[1]))
        weights, _ = decide(mixtral(rows.shape[1], active), rows)
        assert gap(route(TOP_K_FIRST, rows, active).weights, weights) < ROUNDING

    everywhere()
    rows = tokens(MIXTRAL.experts)
    weights, _ = decide(mixtral(MIXTRAL.experts, MIXTRAL.active), rows)
    most = gap(route(TOP_K_FIRST, rows, MIXTRAL.active).weights, weights)
    claim.holds(most < ROUNDING, f"1,000 tokens differ by {most:.1e} at most, in float32")


@pytest.mark.claim("count.router.cancel")
def test_full_sum_cancels(claim):
    """Each winner weighs its exponential over the winners', whatever the losers add to the sum over all."""

    def weights(rows, active):
        ours = route(SCORE_FIRST, rows, active)
        theirs, indices = decide(mixtral(rows.shape[1], active), rows)
        winners = np.exp(np.take_along_axis(rows, indices, -1))
        assert gap(theirs, winners / winners.sum(-1, keepdims=True)) < ROUNDING
        assert gap(ours.weights, theirs) < ROUNDING
        return ours

    @FEWER
    @given(ROWS, st.data())
    def everywhere(rows, data):
        weights(rows, data.draw(st.integers(1, rows.shape[1])))

    everywhere()
    before, after = weights(np.array(CELL), 2), weights(np.array([[2.0, 1.0, -3.0, -5.0]]), 2)
    shares = [float(routing.scores[0, 0]) for routing in (before, after)]
    same = gap(before.weights, after.weights) < ROUNDING and shares[1] > shares[0] + 0.1
    claim.holds(same, f"the first of all {shares[0]:.3f}, with lower losers {shares[1]:.3f}; of the winners the same")


@pytest.mark.claim("count.router.same_winners")
def test_same_winners(claim):
    """The largest probabilities belong to the largest logits."""

    def winners(rows, active):
        largest = torch.tensor(rows).topk(active).indices.numpy()
        _, theirs = decide(mixtral(rows.shape[1], active), rows)
        ours = [route(router, rows, active).indices for router in (SCORE_FIRST, TOP_K_FIRST)]
        return all((largest == other).all() for other in (theirs, *ours))

    @FEWER
    @given(ROWS, st.data())
    def everywhere(rows, data):
        assert winners(rows, data.draw(st.integers(1, rows.shape[1])))

    everywhere()
    claim.holds(winners(tokens(MIXTRAL.experts), MIXTRAL.active), "the same two of eight for 1,000 tokens, in order")


class Operators(TorchDispatchMode):
    """The operators that run, each with its first operand's shape."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append((func.overloadpacket.__name__, tuple(args[0].shape)))
        return func(*args, **(kwargs or {}))


@pytest.mark.claim("count.router.hf_order")
def test_order_of_hugging_face(claim):
    """Mixtral's router takes softmax over all experts, keeps two and divides by their sum."""
    module, rows = mixtral(MIXTRAL.experts, MIXTRAL.active), torch.zeros(3, MIXTRAL.experts)
    with torch.no_grad(), Operators() as operators:
        module(rows)
    steps = operators.seen[-4:]
    expected = [("_softmax", (3, 8)), ("topk", (3, 8)), ("sum", (3, 2)), ("div_", (3, 2))]
    claim.holds(steps == expected and SCORE_FIRST.normalize, f"{steps} for three tokens")


@pytest.mark.claim("count.router.ds_sigmoid")
def test_sigmoids_of_deepseek(claim):
    """DeepSeek-V3's weights are sigmoids over the sum of the chosen eight, times its scaling factor."""
    rows = tokens(DEEPSEEK.experts, 200)
    weights, indices = decide(deepseek(), rows)
    ours = route(DEEPSEEK.router, rows, DEEPSEEK.active, np.zeros(DEEPSEEK.experts))
    assert gap(np.sort(ours.weights), np.sort(weights)) < ROUNDING
    scores = np.take_along_axis(torch.tensor(rows).sigmoid().numpy(), indices, -1)
    shares = scores / scores.sum(-1, keepdims=True)
    apart = gap(weights / DEEPSEEK.router.scale, shares)
    claim.holds(indices.shape == (200, 8) and apart < ROUNDING, f"weights over 2.5 are within {apart:.1e}")
    claim.otherwise(gap(weights, shares) < ROUNDING, f"the weights sum to {weights.sum(-1).mean():.4f}")


@pytest.mark.claim("count.router.ds_errata")
def test_choice_of_deepseek(claim):
    """Whether DeepSeek-V3's eight are the best of all experts, with weights that sum to 1."""
    module, rows = deepseek(), tokens(DEEPSEEK.experts, 200)
    weights, indices = decide(module, rows)
    ours = route(DEEPSEEK.router, rows, DEEPSEEK.active, np.zeros(DEEPSEEK.experts))
    assert (np.sort(ours.indices) == np.sort(indices)).all()
    best = np.sort(torch.tensor(rows).topk(DEEPSEEK.active).indices.numpy())
    others = int((best != np.sort(indices)).any(-1).sum())
    claim.holds(others == 0, f"{others} of 200 tokens have others than the best eight of {DEEPSEEK.experts}")
    total = float(weights.sum(-1).mean())
    claim.holds(abs(total - 1) < ROUNDING, f"the weights sum to {total:.4f}")
    router = DEEPSEEK.router
    claim.right(
        *(router.top_groups, router.groups, router.scale),
        observed=(module.topk_group, module.num_group, module.routed_scaling_factor),
    )


def gpt_oss_weights():
    module = GptOssTopKRouter(GptOssConfig(hidden_size=4, num_local_experts=4, num_experts_per_tok=2))
    return decide(with_identity(module), CELL)[0]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        case(
            "count.router.cell_all",
            lambda: route(SCORE_FIRST, CELL, 2).scores,
            lambda: torch.tensor(CELL).softmax(-1).numpy(),
        ),
        case(
            "count.router.cell_renorm",
            lambda: route(SCORE_FIRST, CELL, 2).weights,
            lambda: decide(mixtral(4, 2), CELL)[0],
        ),
        case("count.router.cell_top2", lambda: route(TOP_K_FIRST, CELL, 2).weights, gpt_oss_weights),
    ],
)
def test_cells(claim, ours, theirs):
    """The example's probabilities are as printed, in torch and in transformers' modules of either order too."""
    digits = 6  # of float32
    predicted, observed = (np.round(weights()[0].astype(np.float64), digits) for weights in (ours, theirs))
    claim.measured(predicted.tolist(), observed=observed.tolist())
