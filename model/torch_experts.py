"""A mixture of experts in PyTorch: the router's choice, the experts in a loop over sorted tokens, and a watch on both.

Dimension suffixes: B batch, T tokens, M tokens of the whole batch, D width, E experts, G groups of experts, C chosen
experts of a token, A = M C choices.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accounting.spec import Experts, Router
from model.torch_layers import FeedForwardLayer

TINY = 1e-20  # DeepSeek-V3's guard of a sum that underflows: its published code adds it


class Routing(NamedTuple):
    """What a router makes of M tokens: logits (M, E), and indices and weights (M, C) of the experts that it chose."""

    logits: Tensor
    indices: Tensor
    weights: Tensor


def score(spec: Router, logits: Tensor) -> Tensor:
    """Softmax or sigmoid over the last axis."""
    return logits.sigmoid() if spec.score == "sigmoid" else logits.softmax(-1)


def group_scores(spec: Router, scores_ME: Tensor) -> Tensor:
    """(M, G): a group is as good as its two best experts together (DeepSeek-V3's published code)."""
    scores_MGE = scores_ME.unflatten(-1, (spec.groups, -1))
    best_MG: Tensor = scores_MGE.topk(min(2, scores_MGE.shape[-1]), -1).values.sum(-1)
    return best_MG


def only_top_groups(spec: Router, scores_ME: Tensor) -> Tensor:
    """(M, E) with minus infinity outside the best groups (arXiv 2412.19437, section 2.1.2)."""
    best_MG = group_scores(spec, scores_ME)
    outside_MG = torch.ones_like(best_MG, dtype=torch.bool)
    outside_MG.scatter_(-1, best_MG.topk(spec.top_groups, -1).indices, False)
    return scores_ME.masked_fill(outside_MG.repeat_interleave(scores_ME.shape[-1] // spec.groups, -1), -torch.inf)


class RouterLayer(nn.Linear):
    """Logits of all experts, and the choice of ``active`` of them, in float32 at least: tokens (M, D) to ``Routing``.

    Scores of all and then the top k (arXiv 2101.03961, section 2.1), or scores of the top k logits (arXiv 1701.06538,
    equation 3). ``selection_bias``, a persistent buffer, has a say in the choice alone (arXiv 2408.15664, section 3).
    """

    selection_bias: Tensor | None

    def __init__(self, spec: Router, width: int, experts: int, active: int) -> None:
        super().__init__(width, experts, bias=spec.bias)
        self.spec, self.active = spec, active
        self.register_buffer("selection_bias", torch.empty(experts) if spec.selection_bias else None)

    def initialise(self) -> None:
        """No expert is favoured."""
        if self.selection_bias is not None:
            nn.init.zeros_(self.selection_bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """A cast to less than float32 leaves the selection bias as it is: it moves by less than that resolves."""
        before = self.selection_bias
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if before is not None and self.selection_bias is not None and self.selection_bias.dtype.itemsize < 4:
            self.selection_bias = before.to(self.selection_bias.device)
        return self

    def forward(self, x_MD: Tensor) -> Routing:  # type: ignore[override]
        spec, wide = self.spec, torch.promote_types(x_MD.dtype, torch.float32)
        bias_E = None if self.bias is None else self.bias.to(wide)
        with torch.autocast(x_MD.device.type, enabled=False):
            logits_ME = F.linear(x_MD.to(wide), self.weight.to(wide), bias_E)
        scores_ME = score(spec, logits_ME) if spec.order == "score_first" else logits_ME
        choice_ME = scores_ME if self.selection_bias is None else scores_ME + self.selection_bias
        if spec.top_groups < spec.groups:
            choice_ME = only_top_groups(spec, choice_ME)
        indices_MC = choice_ME.topk(self.active, -1).indices
        weights_MC = scores_ME.gather(-1, indices_MC)
        if spec.order == "top_k_first":
            weights_MC = score(spec, weights_MC)
        if spec.normalize:
            weights_MC = weights_MC / (weights_MC.sum(-1, keepdim=True) + TINY)
        return Routing(logits_ME, indices_MC, weights_MC * spec.scale)


class ExpertsLayer(nn.Module):
    """The weighted sum of a token's experts, and of the shared one for every token: (B, T, D). No token is dropped."""

    def __init__(self, spec: Experts, width: int) -> None:
        super().__init__()
        self.router = RouterLayer(spec.router, width, spec.experts, spec.active)
        self.experts = nn.ModuleList(FeedForwardLayer(spec.expert, width) for _ in range(spec.experts))
        self.shared = None if spec.shared is None else FeedForwardLayer(spec.shared, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_MD = x_BTD.flatten(0, 1)
        routing: Routing = self.router(x_MD)
        # Choices sorted by expert: each expert meets its tokens, or none, in one batch.
        chosen_A = routing.indices.flatten()
        order_A = chosen_A.argsort()
        counts = chosen_A.bincount(minlength=len(self.experts)).tolist()
        token_A = order_A // routing.indices.shape[1]
        batches = x_MD.index_select(0, token_A)[None].split(counts, 1)
        out_AD = torch.cat([expert(x_1AD) for expert, x_1AD in zip(self.experts, batches, strict=True)], 1)[0]
        weighted_AD = out_AD * routing.weights.flatten()[order_A, None]
        y_BTD = torch.zeros_like(x_MD).index_add(0, token_A, weighted_AD.type_as(x_MD)).view_as(x_BTD)
        return y_BTD if self.shared is None else y_BTD + self.shared(x_BTD)


@contextmanager
def watch(decoder: nn.Module) -> Iterator[list[Routing]]:
    """Collect what each router makes of its tokens, in the order in which they run, with gradients.

    Balance losses are functions of these: ``with watch(decoder) as routings: decoder(tokens)``. What a backward pass
    runs again is no second call, and not collected.
    """
    routings: list[Routing] = []
    running: list[nn.Module] = []
    routers = [module for module in decoder.modules() if isinstance(module, RouterLayer)]

    def collect(*call: Any) -> None:
        if running:
            routings.append(call[-1])

    hooks = [router.register_forward_hook(collect) for router in routers]
    hooks.append(decoder.register_forward_pre_hook(lambda module, _: running.append(module)))
    hooks.append(decoder.register_forward_hook(lambda *_: running.clear(), always_call=True))
    try:
        yield routings
    finally:
        for hook in hooks:
            hook.remove()
