"""Claims of the counting essay's list of misconceptions that its other sections do not hold."""

import pytest
import torch
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter, load_balancing_loss_func

from accounting.scaling import LAWS

PRINTED, REFIT = LAWS["hoffmann"].surface, LAWS["besiroglu"].surface
TABLE = (1e21, 3.8e25)  # FLOPs: the ends of the essay's table, where its refit has the printed 21.6 and 16.5
BEYOND = (1e19, 1e27)


@pytest.mark.claim("count.mis.range_50_140")
def test_printed_formula(claim):
    """The printed constants ask for 50 to 140 tokens per parameter, to the ten, within the essay's table."""
    assert [round(ratio, 1) for ratio in REFIT.optimum(TABLE).ratio] == [21.6, 16.5]
    claim.measured(PRINTED.optimum(TABLE).ratio)
    claim.otherwise(PRINTED.optimum(BEYOND).ratio, "at 1e19 and 1e27 FLOPs")


@pytest.mark.claim("count.mis.refit_20")
def test_refit(claim):
    """The refit asks for about 20, to the ten, within the essay's table and far beyond it."""
    for budgets in (TABLE, BEYOND):
        claim.measured(REFIT.optimum(budgets).ratio)


@pytest.mark.claim("count.mis.per_token_topk")
def test_balance_of_a_batch(claim):
    """Trained on the balance loss alone a router evens the experts' shares of the batch, never a token's own."""
    experts, active, width, tokens = 8, 2, 16, 512
    torch.manual_seed(0)
    config = MixtralConfig(hidden_size=width, num_local_experts=experts, num_experts_per_tok=active)
    router, states = MixtralTopKRouter(config), torch.randn(tokens, width) + 1
    torch.nn.init.normal_(router.weight, std=0.3)
    optimizer = torch.optim.SGD(router.parameters(), lr=0.3)
    busiest, losses = [], []
    for _ in range(50):
        logits, _, chosen = router(states)
        assert chosen.shape == (tokens, active)
        assert (chosen.sort().values.diff() > 0).all()  # so many different experts
        assert torch.equal(chosen, logits.softmax(-1).topk(active).indices)
        busiest.append(chosen.flatten().bincount(minlength=experts).max().item() / tokens)
        loss = load_balancing_loss_func((logits,), experts, active)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    even, first_choice = active / experts, logits.softmax(-1).amax(-1).mean().item()
    claim.holds(
        losses[-1] < losses[0] and busiest[-1] - even < (busiest[0] - even) / 10,
        f"the busiest expert's share of tokens from {busiest[0]:.0%} to {busiest[-1]:.0%}, even is {even:.0%}",
    )
    claim.holds(first_choice > 2 / experts, f"each token has {active} experts, its first with {first_choice:.0%}")


@pytest.mark.claim("count.mis.first_two")
def test_cited(claim):
    """Hoffmann et al. print what their first two methods ask for."""
    claim.cited()
