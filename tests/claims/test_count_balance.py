"""Claims of the counting essay on balance: the auxiliary loss, and the bias that does without it."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from accounting import huggingface
from accounting.authorities import huggingface as modules
from accounting.huggingface import published_config
from accounting.ledger import case
from accounting.routing import balance, balance_loss, loads, route, update_bias

FEWER = settings(max_examples=settings.default.max_examples // 2)
EPS = torch.finfo(torch.float32).eps
DIGITS = 6  # of float32
SKEWED = [Fraction(share, 10) for share in (4, 3, 2, 1)]
ALPHAS = st.floats(1e-4, 1)
# Eighths, all different within a row and none above 0: no two choices tie in float32, and none is a probability.
SPAN = 10
BATCHES = st.integers(2, 8).flatmap(
    lambda experts: st.lists(
        st.lists(st.integers(-8 * SPAN, -1), min_size=experts, max_size=experts, unique=True), min_size=1, max_size=6
    ).map(lambda rows: np.array(rows) / 8)
)
SOFTMAX = huggingface.load("mixtral-8x7b").spec.blocks[0].feed_forward.router
SIGMOID = huggingface.load("deepseek-v3").spec.blocks[-1].feed_forward.router


@st.composite
def distributions(draw, count=1):
    """So many distributions over the same experts, as fractions."""
    experts = draw(st.integers(1, 8))
    weights = st.lists(st.integers(0, 9), min_size=experts - 1, max_size=experts - 1)
    drawn = [[*draw(weights), draw(st.integers(1, 9))] for _ in range(count)]
    return [[Fraction(weight, sum(row)) for weight in row] for row in drawn]


def rounding(rows):
    """Relative error in float32: a softmax's by its argument, and a sum's by its terms."""
    return (SPAN + rows.size + 10) * EPS


def leaf(rows):
    return torch.tensor(rows, dtype=torch.float32, requires_grad=True)


def theirs(rows, active=1):
    """Hugging Face's loss of one layer."""
    return float(load_balancing_loss_func((leaf(rows),), np.shape(rows)[1], active).detach())


def sure(counts):
    """Logits of tokens that are sure of their expert, so many for each."""
    return np.repeat(1000 * np.eye(len(counts)), counts, axis=0)


def even(experts):
    return np.zeros((4, experts))


def collapsed(experts):
    return sure([4] + [0] * (experts - 1))


@pytest.mark.claim("count.balance.formula")
def test_formula(claim):
    """The loss is alpha times E times the sum over experts of f P, as Hugging Face's is for one choice a token."""

    def losses(rows, alpha):
        experts = rows.shape[1]
        probabilities = torch.tensor(rows).softmax(-1)
        f = torch.nn.functional.one_hot(probabilities.argmax(-1), experts).double().mean(0)
        formula = alpha * experts * float((f * probabilities.mean(0)).sum())
        return formula, balance_loss(rows, 1, alpha=alpha), alpha * theirs(rows)

    @FEWER
    @given(BATCHES, ALPHAS)
    def everywhere(rows, alpha):
        formula, ours, hugging_face = losses(rows, alpha)
        assert ours == pytest.approx(formula, rel=rounding(rows))
        assert ours == pytest.approx(hugging_face, rel=rounding(rows))

    everywhere()
    rows = np.random.default_rng(0).normal(0, 2, (100, 8))
    seen = losses(rows, 0.01)
    agree = len({round(loss, DIGITS + 2) for loss in seen}) == 1
    claim.holds(agree, f"formula, ours and Hugging Face's for 100 tokens and 8 experts: {seen}")


@pytest.mark.claim("count.balance.identity")
def test_squared_gaps(claim):
    """The squared gaps from 1/E sum to the squares' sum less 1/E."""

    def sides(shares):
        experts = len(shares)
        gaps = sum((share - Fraction(1, experts)) ** 2 for share in shares)
        return gaps, balance(shares, shares) / experts - Fraction(1, experts)

    @given(distributions())
    def everywhere(drawn):
        left, right = sides(drawn[0])
        assert left == right

    everywhere()
    left, right = sides(SKEWED)
    claim.holds(left == right, f"{left} and {right} for the skewed example")


@pytest.mark.claim("count.balance.bound")
def test_least_when_shares_match(claim):
    """With f = P the scaled sum is 1 at uniform and above 1 everywhere else."""

    @given(distributions())
    def everywhere(drawn):
        (shares,) = drawn
        assert balance(shares, shares) >= 1
        assert (balance(shares, shares) == 1) == (len(set(shares)) == 1)

    everywhere()
    near = [Fraction(26, 100), Fraction(24, 100), Fraction(1, 4), Fraction(1, 4)]
    least, next_to_it = balance([Fraction(1, 4)] * 4, [Fraction(1, 4)] * 4), balance(near, near)
    claim.holds(least == 1 < next_to_it, f"{least} at uniform, {float(next_to_it)} beside it")


@pytest.mark.claim("count.balance.max")
def test_most_when_collapsed(claim):
    """No shares and probabilities give more than E, which a collapse onto one expert gives."""

    @given(distributions(2))
    def everywhere(drawn):
        assert balance(*drawn) <= len(drawn[0])

    everywhere()
    most = {experts: (balance_loss(collapsed(experts), 1), theirs(collapsed(experts))) for experts in (2, 4, 8, 64)}
    claim.holds(all(ours == other == experts for experts, (ours, other) in most.items()), f"{most}")


@pytest.mark.claim("count.balance.any_E")
def test_even_for_any_number(claim):
    """Even routing scores 1 whatever the number of experts, here and in Hugging Face's loss."""

    @given(st.integers(1, 1000))
    def everywhere(experts):
        shares = [Fraction(1, experts)] * experts
        assert balance(shares, shares) == 1

    everywhere()
    values = {experts: (balance_loss(even(experts), 1), theirs(even(experts))) for experts in (2, 8, 64, 256)}
    claim.holds(all(value == (1, 1) for value in values.values()), f"{values}")


@pytest.mark.claim("count.balance.min_errata")
def test_not_least_when_even(claim):
    """Whether no routing scores less than an even one: six tokens barely of one opinion, four sure of the other."""
    rows = np.log([[0.51, 0.49]] * 6 + [[0.01, 0.99]] * 4)
    loss = balance_loss(rows, 1)
    claim.holds(loss >= balance_loss(even(2), 1), f"{loss:.4f}, less than 1 for even routing")
    claim.right(round(loss, DIGITS), observed=round(theirs(rows), DIGITS))


@pytest.mark.parametrize(
    "rows",
    [
        case("count.balance.cell_uniform", sure([1, 1, 1, 1])),
        case("count.balance.cell_skewed", sure([4, 3, 2, 1])),
        case("count.balance.cell_collapsed", sure([4, 0, 0, 0])),
    ],
)
def test_cells(claim, rows):
    """The example's values are as printed for tokens that are sure of their expert, in Hugging Face's loss too."""
    claim.measured(round(balance_loss(rows, 1), DIGITS), observed=round(theirs(rows), DIGITS))


@pytest.mark.claim("count.balance.by_hand")
def test_by_hand(claim):
    """Four times the sum of the squared shares, each as printed."""
    one_at_a_time = [balance([share], [share]) for share in SKEWED]
    claim.measured([*one_at_a_time, balance(SKEWED, SKEWED)])


@pytest.mark.claim("count.balance.gaps")
def test_gaps(claim):
    """The squared gaps of the skewed shares and their sum are as printed, and give the same value."""
    gaps = [share - Fraction(1, 4) for share in SKEWED]
    claim.measured([*(balance([gap], [gap]) for gap in gaps), balance(gaps, gaps) / 4])
    value = balance(SKEWED, SKEWED)
    claim.holds(balance(gaps, gaps) + 1 == value, f"4 (0.05 + 1/4) = {float(value)}")


@pytest.fixture
def seen(monkeypatch):
    """What Hugging Face's loss computes on its way: the probabilities, and how often each expert was chosen."""
    made = {}

    def record(module, name):
        function = getattr(module, name)

        def recorded(*args, **options):
            made[name] = function(*args, **options)
            if made[name].requires_grad:
                made[name].retain_grad()
            return made[name]

        monkeypatch.setattr(module, name, recorded)

    record(torch.nn.functional, "softmax")
    record(torch, "histc")
    return made


@pytest.mark.claim("count.balance.grad_P")
def test_gradient_only_through_probabilities(claim, seen):
    """Of the two factors in Hugging Face's loss the probabilities have a gradient, and the counts have none."""
    rows = np.random.default_rng(0).normal(0, 1, (8, 4))
    load_balancing_loss_func((leaf(rows),), 4, 2).backward()
    counts, probabilities = seen["histc"], seen["softmax"]
    claim.holds(
        bool(probabilities.grad.any()) and not counts.requires_grad,
        f"P.requires_grad {probabilities.requires_grad}, f.requires_grad {counts.requires_grad}",
    )


@pytest.mark.claim("count.balance.slope")
def test_slope(claim, seen):
    """The slope in each expert's mean probability is alpha E f."""

    def slopes(rows, alpha):
        (alpha * load_balancing_loss_func((leaf(rows),), rows.shape[1], 1)).backward()
        # A mean's slope is what each of its tokens has, times the tokens.
        observed = len(rows) * seen["softmax"].grad.double().numpy()
        shares = loads(route(SOFTMAX, rows, 1).indices, rows.shape[1]) / len(rows)
        return alpha * rows.shape[1] * shares, observed

    @FEWER
    @given(BATCHES, ALPHAS)
    def everywhere(rows, alpha):
        ours, observed = slopes(rows, alpha)
        np.testing.assert_allclose(observed, np.broadcast_to(ours, observed.shape), rtol=8 * EPS)

    everywhere()
    ours, observed = slopes(np.log([[0.7, 0.1, 0.1, 0.1]] * 6 + [[0.2, 0.4, 0.2, 0.2]] * 2), 0.5)
    claim.holds((observed == ours).all(), f"{ours.tolist()} for six tokens of one expert and two of another")


@pytest.mark.claim("count.balance.busiest")
def test_busiest_expert(claim, seen):
    """The loss is steepest in the busiest expert's probability; a step on the logits may lower another's more."""

    @given(distributions(2))
    def everywhere(drawn):
        shares, probabilities = drawn
        slopes = [balance(shares, [p + (i == j) for j, p in enumerate(probabilities)]) for i in range(len(shares))]
        assert shares[slopes.index(max(slopes))] == max(shares)

    everywhere()
    logits = leaf([[0.0, 0.0, 20.0]] * 3 + [[2.0, 1.75, -20.0]])
    load_balancing_loss_func((logits,), 3, 1).backward()
    slopes, before = 4 * seen["softmax"].grad[0], seen["softmax"].detach().mean(0)
    claim.holds(int(slopes.argmax()) == 2, f"slopes {slopes.tolist()}; the last expert has three of four tokens")
    change = (logits.detach() - 0.1 * logits.grad).softmax(-1).mean(0) - before
    moved = ", ".join(f"{float(each):+.1e}" for each in change)
    claim.otherwise(int(change.argmin()) == 2, f"after a step on the logits the probabilities moved by {moved}")


@pytest.mark.claim("count.balance.hf_k")
def test_even_value_of_hugging_face(claim):
    """Even routing scores k in Hugging Face's loss, which counts each choice whole."""
    values = {k: (balance_loss(even(8), k, convention="huggingface"), theirs(even(8), k)) for k in (1, 2, 4, 8)}
    claim.holds(all(value == (k, k) for k, value in values.items()), f"{values} by k, of 8 experts")


@pytest.mark.claim("count.balance.hf_max")
def test_largest_value_of_hugging_face(claim):
    """No routing scores above E there, however many experts are active."""

    @FEWER
    @given(BATCHES, st.data())
    def everywhere(rows, data):
        experts = rows.shape[1]
        active = data.draw(st.integers(1, experts))
        assert balance_loss(rows, active, convention="huggingface") <= experts * (1 + rounding(rows))
        assert theirs(rows, active) <= experts * (1 + rounding(rows))

    everywhere()
    rows = collapsed(8)
    values = {k: (balance_loss(rows, k, convention="huggingface"), theirs(rows, k)) for k in (1, 2, 4)}
    claim.holds(all(value == (8, 8) for value in values.values()), f"{values} by k, all on one of 8 experts")


def sigmoid_router(experts, active):
    """DeepSeek-V3's router with fewer experts, all in one group, and its input for logits."""
    config = {**published_config("deepseek-v3"), "hidden_size": experts, "n_routed_experts": experts}
    config |= {"num_experts_per_tok": active, "n_group": 1, "topk_group": 1}
    module = DeepseekV3TopkRouter(modules.settings(config))
    with torch.no_grad():
        torch.nn.init.eye_(module.weight)
    return module


def decide(module, rows):
    """A router's logits, weights and indices."""
    with torch.no_grad():
        return [tensor.numpy() for tensor in module(torch.tensor(rows, dtype=torch.float32))]


@pytest.mark.claim("count.aux_free.selection_only")
def test_bias_selects(claim):
    """A bias changes who is chosen; the chosen weigh by their scores without it."""
    module, rows = sigmoid_router(16, 4), np.random.default_rng(0).normal(0, 1, (500, 16))
    logits, _, before = decide(module, rows)
    module.e_score_correction_bias += torch.linspace(-0.3, 0.3, 16)
    with_bias, weights, after = decide(module, rows)
    scores = np.take_along_axis(torch.tensor(rows).sigmoid().numpy(), after, -1)
    expected = SIGMOID.scale * scores / scores.sum(-1, keepdims=True)
    apart = float(np.abs(weights / expected - 1).max())
    changed = int((np.sort(before) != np.sort(after)).any(-1).sum())
    claim.holds(
        bool((logits == with_bias).all()) and changed > 0 and apart < (SPAN + 10) * EPS,
        f"{changed} of 500 tokens choose others, and every weight is its unbiased score's within {apart:.1e}",
    )


@pytest.mark.claim("count.aux_free.bias_buffer")
def test_bias_is_a_buffer(claim):
    """The bias is no parameter: it has no gradient, and is saved."""
    module = sigmoid_router(16, 4)
    _, weights, _ = module(torch.randn(5, 16, generator=torch.Generator().manual_seed(0)))
    weights.square().sum().backward()
    trained = {name for name, parameter in module.named_parameters() if parameter.grad is not None}
    bias = module.e_score_correction_bias
    untrained = not bias.requires_grad and bias.grad is None and "e_score_correction_bias" in module.state_dict()
    claim.holds(trained == {"weight"} and untrained and SIGMOID.selection_bias, f"only {trained} is trained")


@pytest.mark.claim("count.aux_free.update")
def test_update_evens_loads(claim):
    """Each step takes gamma from the biases of overloaded experts and gives it to the others, until loads are even."""
    experts, active, gamma = 8, 2, 0.01
    module = sigmoid_router(experts, active)
    rows = np.random.default_rng(0).normal(np.linspace(-1.5, 1.5, experts), 1, (2048, experts))
    mean, bias, history = len(rows) * active / experts, np.zeros(experts), []
    for _ in range(60):
        counts = loads(decide(module, rows)[2], experts)
        updated = update_bias(bias, counts, gamma)
        moved = np.where(counts > mean, -gamma, np.where(counts < mean, gamma, 0))
        np.testing.assert_allclose(updated - bias, moved, atol=experts * np.finfo(float).eps)
        bias = updated
        module.e_score_correction_bias.copy_(torch.tensor(bias))
        history.append(counts / mean)
    first, last = history[0], history[-1]
    # At rest a bias and the threshold that it meets are each off by gamma at most, and no score is denser than 4.
    evened = np.abs(last - 1).max() < 2 * gamma * 4 * experts / active
    claim.holds(
        bool(evened and first.max() > 2),
        f"loads of {first.min():.2f} to {first.max():.2f} times the mean become {last.min():.2f} to {last.max():.2f}",
    )


@pytest.mark.parametrize((), [case(f"count.{what}") for what in ("balance.alpha", "aux_free.gamma", "aux_free.alpha")])
def test_cited(claim):
    """Weights and rates that the papers say they used."""
    claim.cited()
