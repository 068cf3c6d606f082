"""Floating-point operations, folded over the census.

A multiply-add is two FLOPs; a lookup, a norm, a softmax and an offset are none. These are
model FLOPs: what the mathematics asks for, whatever a kernel executes. Only ``executed``
adds what is computed twice to save memory.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Literal

from accounting.census import Census, Part, of
from accounting.gradients import Trains, everything, products
from accounting.pairs import Pairs
from accounting.pairs import model as model_pairs
from accounting.spec import ModelSpec

Component = Literal["linear", "scores", "mixture", "head", "router"]
Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Flops:
    """FLOPs by component; ``linear`` leaves out the head and the routers."""

    linear: int = 0
    scores: int = 0
    mixture: int = 0
    head: int = 0
    router: int = 0

    @property
    def total(self) -> int:
        """FLOPs of all components."""
        return sum(getattr(self, field.name) for field in fields(self))

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Operation:
    """A product of the forward pass: what it costs for each token and for each pair of positions."""

    name: str
    component: Component
    layer: int | None
    per_token: int = 0
    per_pair: int = 0
    window: int | None = None


def _operations(census: Census) -> Iterator[_Operation]:
    components: dict[Part, Component] = {Part.EMBEDDING: "head", Part.HEAD: "head", Part.ROUTER: "router"}
    for weight in census.weights:
        if weight.multiplies:
            component = components.get(weight.part, "linear")
            yield _Operation(
                name=weight.name, component=component, layer=weight.layer, per_token=2 * weight.active_scalars
            )
    for product in census.products:
        yield _Operation(
            name=f"blocks.{product.layer}.{product.kind}",
            component=product.kind,
            layer=product.layer,
            per_pair=2 * product.heads * product.width,
            window=product.window,
        )


def _sum(census: Census, seq: int, batch: int, pairs: Pairs, times: Callable[[_Operation], int]) -> Flops:
    for name, value in (("seq", seq), ("batch", batch)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}: expected an integer of at least 1, got {value}")
    totals: dict[Component, int] = {}
    met: dict[int | None, int] = {}
    for operation in _operations(census):
        if operation.per_pair and operation.window not in met:
            met[operation.window] = pairs(seq, operation.window)
        here = seq * operation.per_token + operation.per_pair * met.get(operation.window, 0)
        totals[operation.component] = totals.get(operation.component, 0) + batch * here * times(operation)
    return Flops(**totals)


def forward(model: ModelSpec | Census, *, seq: int, batch: int = 1, pairs: Pairs = model_pairs) -> Flops:
    """FLOPs to run ``batch`` sequences of ``seq`` tokens, logits at every position.

    ``pairs`` says which positions attention multiplies (``accounting.pairs``). Experts count
    by k of E. To decode one token against a cache: ``seq=1, pairs=cached(length)``.
    Raises ValueError for a length or a batch below 1.
    """
    return _sum(of(model), seq, batch, pairs, lambda _: 1)


def backward(
    model: ModelSpec | Census,
    *,
    seq: int,
    batch: int = 1,
    pairs: Pairs = model_pairs,
    trains: Trains = everything,
) -> Flops:
    """FLOPs of the gradients: twice forward when all trains, less what nothing needs.

    ``trains`` says of each weight whether it trains; see ``accounting.gradients``.
    """
    census = of(model)
    needed = products(census, trains)
    return _sum(census, seq, batch, pairs, lambda operation: needed[operation.name])


def training(
    model: ModelSpec | Census,
    *,
    seq: int,
    batch: int = 1,
    pairs: Pairs = model_pairs,
    trains: Trains = everything,
) -> Flops:
    """FLOPs of a step: forward and backward. The optimizer's elementwise update is not among them."""
    step = {"seq": seq, "batch": batch}
    return forward(model, pairs=pairs, **step) + backward(model, pairs=pairs, trains=trains, **step)


def executed(
    model: ModelSpec | Census,
    *,
    seq: int,
    batch: int = 1,
    pairs: Pairs = model_pairs,
    trains: Trains = everything,
    recompute: Recompute = "none",
) -> Flops:
    """Hardware FLOPs of a step: training, and what is computed again for the backward pass.

    ``selective`` repeats attention's two products (Korthikanti et al., arXiv 2205.05198,
    section 5), ``full`` every block; the head is never repeated.
    """
    repeated = {"none": (), "selective": ("scores", "mixture"), "full": ("scores", "mixture", "linear", "router")}
    again = _sum(of(model), seq, batch, pairs, lambda operation: int(operation.component in repeated[recompute]))
    return training(model, seq=seq, batch=batch, pairs=pairs, trains=trains) + again


def by_layer(
    model: ModelSpec | Census, *, seq: int, batch: int = 1, pairs: Pairs = model_pairs
) -> dict[int | None, Flops]:
    """Forward FLOPs of each block, and under None of the head; they add up to ``forward``."""
    census = of(model)

    def those(layer: int | None) -> Flops:
        return _sum(census, seq, batch, pairs, lambda operation: int(operation.layer == layer))

    return {layer: those(layer) for layer in dict.fromkeys(operation.layer for operation in _operations(census))}
