"""Routers and balance losses, against those of Hugging Face and the gradients of torch and JAX."""

from dataclasses import replace
from fractions import Fraction
from itertools import product

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DeepseekV3Config, GptOssConfig, MixtralConfig, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter, load_balancing_loss_func
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from accounting.routing import balance, balance_loss, loads, route, update_bias, z_loss
from accounting.spec import Router

EPS, TINY = np.finfo(np.float64).eps, np.finfo(np.float64).tiny
SCORE_FIRST, TOP_K_FIRST, SIGMOID = Router(), Router(order="top_k_first"), Router(score="sigmoid")
RAW, BIASED = replace(SCORE_FIRST, normalize=False), replace(SIGMOID, selection_bias=True)
GRID = [
    Router(score=score, order=order, normalize=normalize, scale=scale)
    for score, order, normalize, scale in product(
        ("softmax", "sigmoid"), ("score_first", "top_k_first"), (True, False), (1.0, 2.5)
    )
]
MIXTRAL = MixtralTopKRouter, MixtralConfig, {}
QWEN = Qwen3MoeTopKRouter, Qwen3MoeConfig, {"norm_topk_prob": True}
QWEN_RAW = Qwen3MoeTopKRouter, Qwen3MoeConfig, {"norm_topk_prob": False}
GPT_OSS = GptOssTopKRouter, GptOssConfig, {}

ROUTERS, WIDTHS, TOKENS = st.sampled_from(GRID), st.integers(2, 8), st.integers(1, 4)
# No row of either kind of logits reads as probabilities: none is above 0 and at most 1.
EXTREME = st.floats(-1e300, 0) | st.floats(1.5, 1e300)
# Float32 still ranks their softmax and sigmoid.
SPAN = 20
APART = st.integers(-80, 0).map(lambda n: n / 8) | st.integers(12, 80).map(lambda n: n / 8)


@st.composite
def logits(draw, elements=APART, *, experts=WIDTHS, tokens=TOKENS):
    """Rows of logits (T, E), none twice in a row."""
    width, count = draw(experts), draw(tokens)
    row = st.lists(elements, min_size=width, max_size=width, unique=True)
    return np.array(draw(st.lists(row, min_size=count, max_size=count)))


@st.composite
def batches(draw, elements=APART):
    """Rows of logits, and how many experts are active."""
    rows = draw(logits(elements))
    return rows, draw(st.integers(1, rows.shape[1]))


@st.composite
def distributions(draw, count):
    """So many distributions over the same experts, as fractions."""
    experts = draw(st.integers(1, 8))
    weights = st.lists(st.integers(0, 9), min_size=experts - 1, max_size=experts - 1)
    drawn = [[*draw(weights), draw(st.integers(1, 9))] for _ in range(count)]
    return [[Fraction(weight, sum(row)) for weight in row] for row in drawn]


def single(rows):
    return torch.tensor(rows, dtype=torch.float32)


def softmax(rows):
    return torch.tensor(rows, dtype=torch.float64).softmax(-1).numpy()


def rounding(rows):
    """Relative error in float32 of sums over softmaxes: by their argument, the terms of each sum, and a few more."""
    return (SPAN + rows.size + 10) * torch.finfo(torch.float32).eps


def build(router, experts, active):
    """A router of Hugging Face's whose logits are what it is given."""
    kind, config, fields = router
    module = kind(config(hidden_size=experts, num_local_experts=experts, num_experts_per_tok=active, **fields))
    with torch.no_grad():
        module.weight.copy_(torch.eye(experts))
    return module


def decide(module, rows):
    """Indices and weights that it decides on."""
    with torch.no_grad():
        _, weights, indices = module(single(rows))
    return indices.numpy(), weights.numpy()


def sorted_by_expert(indices, weights):
    order = np.argsort(indices, -1)
    return np.take_along_axis(indices, order, -1), np.take_along_axis(weights, order, -1)


@given(batches(EXTREME))
def test_softmax_of_the_top_k_is_the_renormalised_top_k_of_the_softmax(batch):
    """In either order the experts are the same and so are their weights, up to the rounding of sums and divisions."""
    rows, active = batch
    one, other = route(SCORE_FIRST, rows, active), route(TOP_K_FIRST, rows, active)
    assert (one.indices == other.indices).all()
    np.testing.assert_allclose(one.weights, other.weights, rtol=(rows.shape[1] + 2) * EPS, atol=TINY)


@given(ROUTERS, batches(EXTREME))
def test_order_is_preserved(router, batch):
    """The chosen have the largest logits, and a larger one never weighs less."""
    rows, active = batch
    routing = route(router, rows, active)
    assert (np.take_along_axis(rows, routing.indices, -1) == -np.sort(-rows, -1)[:, :active]).all()
    assert (np.diff(routing.weights, axis=-1) <= 0).all()


@given(ROUTERS, batches())
def test_weights_sum_to_the_scale_when_normalised(router, batch):
    """Otherwise to the scale times the scores' sum, which is 1 when softmax is over the chosen."""
    rows, active = batch
    routing = route(router, rows, active)
    whole = router.normalize or (router.score, router.order) == ("softmax", "top_k_first")
    total = 1 if whole else np.take_along_axis(routing.scores, routing.indices, -1).sum(-1)
    np.testing.assert_allclose(routing.weights.sum(-1) / router.scale, total, rtol=(rows.shape[1] + 4) * EPS)


@pytest.mark.parametrize(("router", "weights"), [(SCORE_FIRST, (0.731, 0.269)), (RAW, (0.644, 0.237))])
def test_without_renormalising_the_orders_differ(router, weights):
    """Softmax over the two largest of four logits is what softmax over the four gives once it is renormalised."""
    rows = [[2, 1, 0, -1]]
    assert tuple(route(router, rows, 2).weights[0].round(3)) == weights
    assert tuple(route(TOP_K_FIRST, rows, 2).weights[0].round(3)) == (0.731, 0.269)


@given(logits())
def test_one_expert_weighs_one_or_its_probability(rows):
    """Over the chosen or renormalised it is 1 whatever the logits; else the largest probability."""
    assert (route(TOP_K_FIRST, rows, 1).weights == 1).all()
    assert (route(SCORE_FIRST, rows, 1).weights == 1).all()
    largest = softmax(rows).max(-1, keepdims=True)
    np.testing.assert_allclose(route(RAW, rows, 1).weights, largest, rtol=(SPAN + rows.shape[1] + 4) * EPS)


@pytest.mark.parametrize(
    ("router", "learns"), [(GPT_OSS, False), (QWEN, False), (QWEN_RAW, True)], ids=["top-k-first", "norm", "raw"]
)
def test_one_expert_teaches_its_router_only_without_renormalising(router, learns):
    """A weight that is 1 whatever the logits has no gradient."""
    module = build(router, experts=3, active=1)
    _, weights, _ = module(torch.tensor([[2.0, 1.0, -1.0]]))
    weights.sum().backward()
    assert bool(module.weight.grad.any()) is learns


def test_scores_that_are_all_zero_weigh_zero():
    """Sigmoids far below 0 sum to 0, and dividing by that is no NaN."""
    assert (route(SIGMOID, [[-800.0, -900.0, -1000.0]], 2).weights == 0).all()


@pytest.mark.parametrize("router", [SCORE_FIRST, TOP_K_FIRST, SIGMOID], ids=["score-first", "top-k-first", "sigmoid"])
def test_equal_logits(router):
    """Any experts may win, each once, with equal weights."""
    routing = route(router, np.zeros((3, 8)), 2)
    assert all(len(set(row)) == 2 and set(row) <= set(range(8)) for row in routing.indices.tolist())
    assert (routing.weights == 0.5).all()


def test_half_precision_does_not_overflow():
    """Logits that float16 holds, and squares that it does not, are computed with in float64."""
    rows = np.array([[300, 0, -300]], np.float16)
    assert torch.tensor(rows).logsumexp(-1).square().isinf().all()
    assert z_loss(rows) == 90_000
    for router in GRID:
        routing = route(router, rows * np.float16(200), 2)
        assert routing.weights.dtype == np.float64
        assert np.isfinite(routing.weights).all()


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [(MIXTRAL, SCORE_FIRST), (QWEN, SCORE_FIRST), (QWEN_RAW, RAW), (GPT_OSS, TOP_K_FIRST)],
    ids=["mixtral", "qwen3_moe", "qwen3_moe-raw", "gpt_oss"],
)
@given(batch=batches())
def test_softmax_routers_are_those_of_transformers(theirs, ours, batch):
    """The same experts with the same weights, in float32."""
    rows, active = batch
    indices, weights = decide(build(theirs, rows.shape[1], active), rows)
    routing = route(ours, rows, active)
    assert (routing.indices == indices).all()
    np.testing.assert_allclose(routing.weights, weights, rtol=rounding(rows))


@given(st.data(), st.integers(1, 4), st.integers(2, 3), st.booleans(), st.sampled_from([1.0, 2.5]))
def test_deepseeks_router_is_that_of_transformers(data, groups, size, normalize, scale):
    """Sigmoids with a bias, groups, normalisation and a scale: the same experts and weights."""
    experts, top_groups = groups * size, data.draw(st.integers(1, groups))
    active = data.draw(st.integers(1, top_groups * size))
    rows = data.draw(logits(experts=st.just(experts), tokens=st.just(1)))
    # Biased scores are powers of two and an offset: no two, and no two sums of two, are near in float32.
    powers = np.array(data.draw(st.permutations([2.0**-n for n in range(experts)])))
    bias = powers + data.draw(st.sampled_from([-2, 0, 2])) - torch.tensor(rows[0]).sigmoid().numpy()
    fields = {
        "n_group": groups,
        "topk_group": top_groups,
        "norm_topk_prob": normalize,
        "routed_scaling_factor": scale,
    }
    module = build((DeepseekV3TopkRouter, DeepseekV3Config, fields), experts, active)
    module.e_score_correction_bias.copy_(single(bias))
    indices, weights = sorted_by_expert(*decide(module, rows))
    router = replace(BIASED, groups=groups, top_groups=top_groups, normalize=normalize, scale=scale)
    routing = route(router, rows, active, bias)
    our_indices, our_weights = sorted_by_expert(routing.indices, routing.weights)
    assert (our_indices == indices).all()
    np.testing.assert_allclose(our_weights, weights, rtol=rounding(rows))


@given(batches(), st.data())
def test_a_bias_changes_the_selection_alone(batch, data):
    """The chosen weigh what they would in a router of their own without a bias, and every score is as it was."""
    rows, active = batch
    bias = data.draw(st.lists(st.floats(-3, 3), min_size=rows.shape[1], max_size=rows.shape[1]))
    routing = route(BIASED, rows, active, bias)
    indices, weights = sorted_by_expert(routing.indices, routing.weights)
    places, alone = sorted_by_expert(*decide_alone(np.take_along_axis(rows, indices, -1), active))
    assert (places == np.arange(active)).all()
    np.testing.assert_allclose(weights, alone, rtol=(active + 2) * EPS)
    assert (routing.scores == route(SIGMOID, rows, active).scores).all()


def decide_alone(rows, active):
    routing = route(SIGMOID, rows, active)
    return routing.indices, routing.weights


@pytest.mark.parametrize(("order", "winner"), [("score_first", 1), ("top_k_first", 0)])
def test_a_bias_is_added_to_what_is_ranked(order, winner):
    """A half turns the order of two sigmoids, and not that of two logits."""
    routing = route(replace(BIASED, order=order), [[3.0, 2.0, -1.0]], 1, [0, 0.5, 0])
    assert routing.indices.tolist() == [[winner]]


@given(st.data(), st.integers(1, 4), st.integers(1, 3))
def test_the_chosen_are_in_the_groups_that_compete(data, groups, size):
    """In no more groups than may, though scores be negative and groups have one expert."""
    top_groups = data.draw(st.integers(1, groups))
    active = data.draw(st.integers(1, top_groups * size))
    rows = data.draw(logits(experts=st.just(groups * size)))
    router = replace(BIASED, groups=groups, top_groups=top_groups)
    routing = route(router, rows, active, np.full(groups * size, -5.0))
    assert all(len(set(row // size)) <= top_groups for row in routing.indices)


def test_two_good_experts_beat_the_best_one():
    """A group counts by its two best, so that it may win without the best expert of all."""
    rows = [[4.0, -4.0, 2.0, 2.5]]
    assert route(SIGMOID, rows, 1).indices.tolist() == [[0]]
    assert route(replace(SIGMOID, groups=2), rows, 1).indices.tolist() == [[3]]


@given(st.lists(st.integers(0, 100), min_size=1, max_size=8), st.floats(0, 1))
def test_an_update_moves_each_bias_by_the_rate_towards_balance(counts, rate):
    """Down above the mean load, up below it, and not at all at it."""
    before = np.linspace(-1, 1, len(counts))
    for count, old, new in zip(counts, before, update_bias(before, counts, rate), strict=True):
        excess = count * len(counts) - sum(counts)
        assert new == (old if not excess else old - rate if excess > 0 else old + rate)


def test_a_skewed_router_comes_to_balance_by_its_bias():
    """Step by step the loads even out, and the weights stay those of scores without a bias."""
    tokens, experts, active, rate = 4096, 8, 2, 0.005
    rows = np.random.default_rng(0).normal(np.linspace(-1.5, 1.5, experts), 1, (tokens, experts))
    bias, mean = np.zeros(experts), tokens * active / experts
    worst = []
    for _ in range(100):
        routing = route(BIASED, rows, active, bias)
        counts = loads(routing.indices, experts)
        worst.append(counts.max() / mean)
        bias = update_bias(bias, counts, rate)
    assert worst[0] > 2
    # At rest a bias and the threshold that it meets are each off by a rate at most, and no score is denser than 4.
    assert worst[-1] < 1 + 2 * rate * 4 * experts / active
    chosen = np.take_along_axis(route(SIGMOID, rows, active).scores, routing.indices, -1)
    assert (routing.weights == chosen / chosen.sum(-1, keepdims=True)).all()


@pytest.mark.parametrize(
    ("router", "rows", "active", "bias", "message"),
    [
        (SCORE_FIRST, [1.0, 2.0], 1, None, r"logits: .*\(2,\)"),
        (SCORE_FIRST, np.zeros((2, 1, 2)), 1, None, r"logits: .*\(2, 1, 2\)"),
        (SCORE_FIRST, np.zeros((2, 0)), 1, None, "logits: "),
        (SCORE_FIRST, [[np.inf, 0.0]], 1, None, "logits: expected finite"),
        (SCORE_FIRST, [[np.nan, 0.0]], 1, None, "logits: expected finite"),
        (SCORE_FIRST, np.zeros((1, 4)), 5, None, "active: expected from 1 to 4 experts, got 5"),
        (SCORE_FIRST, np.zeros((1, 4)), 0, None, "active: "),
        (replace(SIGMOID, groups=3), np.zeros((1, 4)), 1, None, "router.groups: expected a divisor of the 4"),
        (replace(SIGMOID, groups=2), np.zeros((1, 4)), 3, None, "active: expected from 1 to 2 experts, got 3"),
        (BIASED, np.zeros((1, 4)), 1, None, "selection_bias: expected one"),
        (SIGMOID, np.zeros((1, 4)), 1, np.zeros(4), "selection_bias: expected none"),
        (BIASED, np.zeros((1, 4)), 1, np.zeros(3), "selection_bias: expected 4 finite numbers"),
        (BIASED, np.zeros((1, 4)), 1, np.full(4, np.nan), "selection_bias: expected 4 finite numbers"),
    ],
)
def test_what_cannot_be_routed(router, rows, active, bias, message):
    """It is an error that says what was expected."""
    with pytest.raises(ValueError, match=message):
        route(router, rows, active, bias)


def test_what_cannot_be_counted():
    """As many loads as biases, as many shares as probabilities, and no expert beyond the last."""
    with pytest.raises(ValueError, match="counts: "):
        update_bias(np.zeros(3), np.zeros(4), 0.1)
    with pytest.raises(ValueError, match="argument 2 is"):
        balance([1.0], [0.5, 0.5])
    with pytest.raises(ValueError, match="indices: expected experts below 3, got 3"):
        loads([[0, 3]], 3)


@given(distributions(1))
def test_imbalance_is_the_squared_distance_from_uniform(drawn):
    """With f = P it is 1 and E times the sum of squared gaps, and so least at uniform, and there alone."""
    (shares,) = drawn
    experts = len(shares)
    excess = balance(shares, shares) - 1
    assert excess == experts * sum((share - Fraction(1, experts)) ** 2 for share in shares)
    assert (excess == 0) == (len(set(shares)) == 1)


@given(distributions(2))
def test_bounds_of_the_balance(drawn):
    """Two distributions give from 0 to E: 1 where either is uniform, E where both are on one expert."""
    shares, probabilities = drawn
    experts = len(shares)
    even, collapsed = [Fraction(1, experts)] * experts, [1] + [0] * (experts - 1)
    assert 0 <= balance(shares, probabilities) <= experts == balance(collapsed, collapsed)
    assert balance(even, probabilities) == balance(shares, even) == 1


@given(st.data(), st.integers(1, 3), st.booleans())
def test_the_loss_is_that_of_transformers(data, layers, masked):
    """Of all layers' tokens together, with and without a mask."""
    batch = logits(experts=st.just(data.draw(WIDTHS)), tokens=st.just(data.draw(TOKENS)))
    rows = np.stack([data.draw(batch) for _ in range(layers)])
    _, tokens, experts = rows.shape
    active = data.draw(st.integers(1, experts))
    mask = [1, *data.draw(st.lists(st.integers(0, 1), min_size=tokens - 1, max_size=tokens - 1))] if masked else None
    theirs = load_balancing_loss_func(
        tuple(map(single, rows)), experts, active, None if mask is None else torch.tensor([mask])
    )
    ours = balance_loss(rows, active, convention="huggingface", concatenated=True, mask=mask)
    assert ours == pytest.approx(float(theirs), rel=rounding(rows))


@given(batches(), st.floats(0.001, 1))
def test_conventions_differ_by_the_active_experts(batch, alpha):
    """Counting each of k choices 1/k, as Switch does its one, is k times less; alpha multiplies."""
    rows, active = batch
    theirs = balance_loss(rows, active, convention="huggingface")
    assert balance_loss(rows, active, alpha=alpha) == pytest.approx(alpha * theirs / active, rel=rows.shape[1] * EPS)


@pytest.mark.parametrize("active", [1, 2, 4])
@pytest.mark.parametrize("experts", [4, 8])
def test_even_and_collapsed_routing(active, experts):
    """Even, it is 1 or k; with everything on one expert E, or E/k where the choices beside it count as much."""
    even = np.zeros((5, experts))
    collapsed = even + 1000 * (np.arange(experts) == 0)
    assert balance_loss(even, active) == 1
    assert balance_loss(even, active, convention="huggingface") == active
    assert balance_loss(collapsed, active) == experts / active
    assert balance_loss(collapsed, active, convention="huggingface") == experts


def test_a_loss_below_the_even_one():
    """Six tokens that barely prefer one expert and four that are sure of the other score less than 1."""
    rows = np.log([[0.51, 0.49]] * 6 + [[0.01, 0.99]] * 4)
    assert round(balance_loss(rows, 1), 12) == 0.924
    assert float(load_balancing_loss_func((single(rows),), 2, 1)) == pytest.approx(0.924, rel=rounding(rows))


def test_concatenated_layers_hide_a_collapse():
    """Two layers that collapse on opposite experts look balanced together."""
    rows = np.array([[[1000.0, 0]] * 3, [[0, 1000.0]] * 3])
    assert balance_loss(rows, 1) == 2
    assert balance_loss(rows, 1, concatenated=True) == 1


@given(batches(), st.data())
def test_a_mask_drops_rows(batch, data):
    """What is left out counts nowhere, whatever it holds and whatever the mask's shape."""
    rows, active = batch
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows))))
    spoiled = np.where(mask[:, None], rows, np.nan)
    assert balance_loss(spoiled, active, mask=mask[:, None]) == balance_loss(rows[mask], active)
    assert z_loss(spoiled, mask=mask.astype(int)) == z_loss(rows[mask])


def test_no_token():
    """Nothing is routed and nothing is out of balance: 0, where the function of transformers is NaN."""
    rows, mask = np.zeros((2, 4)), [0, 0]
    assert balance_loss(rows, 2, mask=mask) == z_loss(rows, mask=mask) == balance_loss(rows[:0], 2) == 0
    assert load_balancing_loss_func((single(rows),), 4, 2, torch.tensor([mask])).isnan()
    for router in GRID:
        assert route(router, rows[:0], 2).weights.shape == (0, 2)


@pytest.mark.parametrize("use", ["route", "balance_loss", "z_loss"])
@given(rows=logits(), dtype=st.sampled_from([np.float64, np.float32, np.float16, ml_dtypes.bfloat16]))
def test_probabilities_are_no_logits(use, rows, dtype):
    """Rows that are distributions, at any precision, are refused; their logarithms are not."""
    run = {"route": lambda rows: route(SIGMOID, rows, 1), "balance_loss": lambda rows: balance_loss(rows, 1)}
    probabilities = softmax(rows)
    with pytest.raises(ValueError, match="got probabilities"):
        run.get(use, z_loss)(probabilities.astype(dtype))
    run.get(use, z_loss)(np.log(probabilities))


def test_a_single_expert():
    """A logit of 1 for the only expert is no distribution to refuse: whatever it is, the expert has weight 1."""
    assert route(SCORE_FIRST, [[1.0]], 1).weights == 1
    assert balance_loss([[1.0]], 1) == 1


def test_probabilities_of_one_layer_are_refused():
    """Among logits of others too, unless the mask leaves them out."""
    rows = np.stack([np.full((2, 4), -1.0), np.full((2, 4), 0.25)])
    with pytest.raises(ValueError, match="got probabilities"):
        balance_loss(rows, 2)
    assert balance_loss([[0.5, 0.5], [-1.0, 1.0]], 1, mask=[0, 1]) == balance_loss([[-1.0, 1.0]], 1)


@given(logits(st.floats(-700, 0) | st.floats(1.5, 700)))
def test_z_loss_is_the_mean_square_of_logsumexp(rows):
    """As torch computes it, in float64: each logsumexp is off by the rounding of the largest logit."""
    largest = np.abs(rows).max() + np.log(rows.shape[1])
    theirs = torch.tensor(rows).logsumexp(-1).square().mean()
    assert z_loss(rows) == pytest.approx(float(theirs), rel=0, abs=8 * sum(rows.shape) * largest**2 * EPS + TINY)


@given(batches())
def test_gradient_in_torch_flows_through_probabilities_alone(batch):
    """The loss of transformers has no gradient but that of the softmax, for a slope of E f in P."""
    rows, active = batch
    leaf, experts = single(rows).requires_grad_(), rows.shape[1]
    (theirs,) = torch.autograd.grad(load_balancing_loss_func((leaf,), experts, active), leaf)
    (ours,) = torch.autograd.grad(leaf.softmax(-1), leaf, single(slopes(rows, active)))
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=slopes(rows, active).max() * rounding(rows))


def slopes(rows, active):
    """E f / T for each token: the slope of Hugging Face's loss in the token's probabilities."""
    tokens, experts = rows.shape
    counts = loads(route(SCORE_FIRST, rows, active).indices, experts)
    return np.broadcast_to(experts * counts / tokens**2, rows.shape)


@pytest.mark.parametrize(
    ("rows", "active", "mask", "message"),
    [
        ([1.0, 2.0], 1, None, r"logits: .*\(2,\)"),
        (np.zeros((2, 0)), 1, None, "logits: "),
        ([[np.inf, 0.0]], 1, None, "logits: expected finite"),
        (np.zeros((2, 4)), 5, None, "active: expected from 1 to 4 experts, got 5"),
        (np.zeros((2, 4)), 0, None, "active: "),
        (np.zeros((2, 4)), 1, [1], "mask: expected 0 or 1 for each of the 2 tokens"),
        (np.zeros((2, 4)), 1, [1, 2], "mask: "),
    ],
)
def test_what_has_no_loss(rows, active, mask, message):
    """It is an error that says what was expected."""
    with pytest.raises(ValueError, match=message):
        balance_loss(rows, active, mask=mask)
