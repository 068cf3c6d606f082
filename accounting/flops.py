"""Floating-point operations of a forward pass, folded over the census.

A multiply-add is two FLOPs; a lookup, a norm, a softmax and an offset are none.
"""

from dataclasses import dataclass

from accounting.census import Census, Part, take
from accounting.spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardFlops:
    """FLOPs of a forward pass by component; ``linear`` leaves out the head and the routers."""

    linear: int
    head: int
    router: int
    scores: int
    mixture: int

    @property
    def total(self) -> int:
        """FLOPs of all components."""
        return self.linear + self.head + self.router + self.scores + self.mixture


def forward(model: ModelSpec | Census, *, seq: int, batch: int = 1) -> ForwardFlops:
    """FLOPs to run ``batch`` sequences of ``seq`` tokens with full pairs: each token meets each.

    That is what a kernel without causal skipping executes. Experts count by k of E.
    """
    census = model if isinstance(model, Census) else take(model)
    matrices = [weight for weight in census.weights if weight.multiplies]
    per_token = {part: sum(2 * w.active_scalars for w in matrices if w.part is part) for part in Part}
    # A tied table is the head when a token is multiplied by it.
    head = per_token.pop(Part.HEAD) + per_token.pop(Part.EMBEDDING)
    router = per_token.pop(Part.ROUTER)
    per_pair = {
        kind: sum(2 * product.heads * product.width for product in census.products if product.kind == kind)
        for kind in ("scores", "mixture")
    }
    tokens, pairs = batch * seq, batch * seq * seq
    return ForwardFlops(
        linear=tokens * sum(per_token.values()),
        head=tokens * head,
        router=tokens * router,
        scores=pairs * per_pair["scores"],
        mixture=pairs * per_pair["mixture"],
    )
