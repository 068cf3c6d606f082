"""torch's FLOP counter, which refuses to answer when it met a product it does not know."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

aten = torch.ops.aten

#: Operators that multiply and add, as many times as a matrix product does or more. Those
#: that torch has no formula for count as nothing in its total.
HEAVY = frozenset(
    packet
    for namespace, names in (
        (aten, ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "vdot", "addbmm", "addr")),
        (aten, ("_scaled_mm", "_grouped_mm", "_scaled_grouped_mm", "convolution", "_int_mm")),
        (aten, ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention")),
        (aten, ("_scaled_dot_product_flash_attention_for_cpu_backward", "_scaled_dot_product_cudnn_attention")),
        (aten, ("_scaled_dot_product_efficient_attention", "_scaled_dot_product_fused_attention_overrideable")),
    )
    for name in names
    if (packet := getattr(namespace, name, None)) is not None
)


class UncountedError(RuntimeError):
    """The counter met operators without a formula, so that its total is not the total."""


class _Watch(TorchDispatchMode):
    """Notes each heavy operator that runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.met: Counter[Any] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.overloadpacket in HEAVY:
            self.met[func.overloadpacket] += 1
        return func(*args, **(kwargs or {}))


def count(run: Callable[[], object]) -> int:
    """FLOPs of the matrix products that ``run`` executes, a multiply-add as two.

    Raises UncountedError, naming the operators, where one of them has no formula.
    """
    counter, watch = FlopCounterMode(display=False), _Watch()
    with counter, watch:
        run()
    if unknown := sorted(str(packet) for packet in watch.met if packet not in flop_registry):
        raise UncountedError(f"no formula for {', '.join(unknown)}")
    return int(counter.get_total_flops())
