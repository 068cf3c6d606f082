"""What torch.profiler attributes: matrix products apart from elementwise work, and a refusal where it says nothing.

The profiler has formulas for ``mm``, ``addmm``, ``bmm``, ``baddbmm`` and ``conv2d``, and for ``add`` and ``mul``, but
not for ``sub``, ``div`` or anything done in place (``torch/csrc/profiler/util.cpp``, ``computeFlops``). A multiply-add
is two FLOPs, an elementwise operator one for each element.
"""

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from accounting.authorities import UncountedError
from accounting.authorities.torch_counter import HEAVY, LIGHT_NAMESPACES

MATMUL = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"})
ELEMENTWISE = frozenset({"aten::add", "aten::mul"})


@dataclass(frozen=True)
class ProfiledFlops:
    """FLOPs of the matrix products, of ``add`` and ``mul``, and the names of what both leave out."""

    matmul: int
    elementwise: int
    left_out: tuple[str, ...] = ()


def _heavy(event: FunctionEvent) -> bool:
    """Whether an event is an operator that multiplies matrices, or a custom one, which may."""
    operator = re.fullmatch(r"(\w+)::(\w+)", event.name)
    return operator is not None and (operator[1] not in LIGHT_NAMESPACES or HEAVY.search(operator[2]) is not None)


def _inside_product(event: FunctionEvent) -> bool:
    """Whether an event is a piece of a product that has its FLOPs, as the dense product in a sparse one is."""
    parent = event.cpu_parent
    return parent is not None and ((parent.name in MATMUL and bool(parent.flops)) or _inside_product(parent))


def _has_products(event: FunctionEvent) -> bool:
    return any(child.name in MATMUL or _has_products(child) for child in event.cpu_children)


def _unexplained(event: FunctionEvent) -> Iterator[str]:
    """The innermost operators under an event, or itself, that multiply matrices and have no FLOPs."""
    if event.flops or event.name in MATMUL:
        return
    inner = [name for child in event.cpu_children for name in _unexplained(child)]
    yield from inner
    if _heavy(event) and not inner and not _has_products(event):
        yield event.name


def count(run: Callable[[], object], *, allow: Collection[str] = ()) -> ProfiledFlops:
    """The FLOPs that torch.profiler attributes to what ``run`` executes.

    Raises UncountedError, naming the operators, where one that multiplies matrices got none, such as CPU's fused
    attention, or is a convolution. ``allow`` leaves out those whose name has one of its words in it, such as
    ``("attention",)``, and the result says which they were.
    """
    with profile(activities=[ProfilerActivity.CPU], with_flops=True) as profiled:
        run()
    events = list(profiled.events() or ())
    missing = {name for event in events if event.cpu_parent is None for name in _unexplained(event)}
    missing |= {event.name for event in events if event.flops and event.name not in MATMUL | ELEMENTWISE}
    left_out = {name for name in missing if any(word in name for word in allow)}
    if missing - left_out:
        raise UncountedError(
            f"the profiler has no FLOPs of a matrix product for {', '.join(sorted(missing - left_out))}"
        )

    def total(names: frozenset[str]) -> int:
        return sum(event.flops or 0 for event in events if event.name in names and not _inside_product(event))

    return ProfiledFlops(total(MATMUL), total(ELEMENTWISE), tuple(sorted(left_out)))
