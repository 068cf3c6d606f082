"""torch's FLOP counter, with the formulas that it lacks, and which names what it cannot count.

A multiply-add is two FLOPs. Fused attention counts as the dense product of every query with every key, whatever its
mask, and its backward pass as two products for each forward one: the scores that the kernel computes again are
counted only where they are asked for. A sparse operand counts as a dense one, elementwise work as nothing. What does
not pass PyTorch's dispatcher, such as a Triton kernel launched by hand, is not seen.
"""

import math
import re
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from accounting.authorities import UncountedError

aten = torch.ops.aten

#: Names of operators that multiply and add as a matrix product does. Elementwise ones do not match, nor norms.
HEAVY = re.compile(
    r"mm(_|$)|mv(_|$)|dot(_|$)|gemm|matmul|addr_?$|einsum|^_?(bi|tri)linear$|(^|_)linear(_|$)"
    r"|attention|attn|multi_head|transformer_encoder|lstm|gru|rnn|conv(olution|\d|_|$)"
    r"|linalg_(?!\w*norm|cross|diagonal|check)|cdist|euclidean_dist|fft_[cr]2[cr]"
    r"|cholesky|(^|_)solve|triangular_solve|lstsq|lu_solve|lu_with_info|geqrf|orm?gqr|ormqr|matrix_(exp|power)"
)
#: Namespaces whose operators are aten's own pieces, moves or marks; every other one holds custom operators.
LIGHT_NAMESPACES = frozenset({"aten", "prim", "prims", "profiler", "c10d", "_c10d_functional"})
#: Autograd's nodes that multiply matrices elementwise, where no counter of products sees them.
ELEMENTWISE_BACKWARD = frozenset({"MvBackward0", "AddmvBackward0", "DotBackward0", "VdotBackward0"})


@dataclass(frozen=True)
class _Fused:
    """The size of one fused attention: pairs of a query and a key over the batch, query heads, and two widths."""

    pairs: int
    heads: int
    query_width: int
    value_width: int

    @property
    def scores(self) -> int:
        """FLOPs of q k' (arXiv 1706.03762, equation 1)."""
        return 2 * self.pairs * self.heads * self.query_width

    @property
    def forward(self) -> int:
        """FLOPs of the scores and of their mixture of the values."""
        return self.scores + 2 * self.pairs * self.heads * self.value_width

    def backward(self, recomputed: bool) -> int:
        """FLOPs of the four gradients, and if asked those of the scores that the kernel computes again."""
        return 2 * self.forward + recomputed * self.scores


def _heads_first(query: Tensor, key: Tensor, value: Tensor) -> _Fused:
    """Query (B, H, S, D), key and value (B, K, T, D): the layout of every scaled_dot_product operator."""
    batch, heads, queries, width = query.shape
    return _Fused(batch * queries * key.shape[2], heads, width, value.shape[3])


def _tokens_first(
    query: Tensor, key: Tensor, value: Tensor, query_ends: Tensor | None, key_ends: Tensor | None
) -> _Fused:
    """Query (B, S, H, D), key and value (B, T, K, D): the layout of the kernels under them.

    With ends, documents lie end to end, (..., all tokens, H, D), and each attends to itself.
    """
    if query_ends is None or key_ends is None:
        pairs = query.shape[0] * query.shape[1] * key.shape[1]
    elif query_ends.is_meta or key_ends.is_meta:
        raise UncountedError("packed attention on meta does not say how long its documents are")
    else:
        pairs = int((query_ends.diff() * key_ends.diff()).sum())
    return _Fused(pairs, query.shape[-2], query.shape[-1], value.shape[-1])


def _product(left: Tensor, right: Tensor) -> int:
    """(..., M, K) by (..., K, N), both with the same batch."""
    return 2 * left.numel() * right.shape[-1]


def _grouped(left: Tensor, right: Tensor, offs: Tensor | None = None, *_: object) -> int:
    """A product for each group: rows, columns or the inner span are cut at ``offs``, and end at its last.

    On meta, where the last is not known, it is taken for the whole span.
    """
    if offs is None:
        return _product(left, right)
    rows, inner, columns = left.shape[-2], left.shape[-1], right.shape[-1]
    last = None if offs.is_meta else int(offs[-1])
    if left.dim() == 3:
        columns = columns if last is None else last
    elif right.dim() == 3:
        rows = rows if last is None else last
    else:
        inner = inner if last is None else last
    return 2 * rows * inner * columns


def _convolution_backward(grad_out: Tensor, input_: Tensor, weight: Tensor, *rest: Any) -> int:
    """As many FLOPs as the forward pass for each gradient asked for, whatever the groups."""
    transposed, output_mask = rest[4], rest[7]
    batch, _, *places = (input_ if transposed else grad_out).shape
    forward = 2 * batch * math.prod(places) * weight.numel()
    return forward * sum(map(bool, output_mask[:2]))


class _Formula:
    """The FLOPs of one operator, from its positional arguments: no size is among the others."""

    _get_raw = True  # asks torch's counter for tensors in place of their shapes

    def __init__(self, flops: Callable[..., int]) -> None:
        self.flops = flops

    def __call__(self, *args: Any, **_: object) -> int:
        return self.flops(*args)


PRODUCTS: dict[str, Callable[..., int]] = {
    **dict.fromkeys(("addmm_", "baddbmm_", "addbmm", "addbmm_"), lambda _, left, right: _product(left, right)),
    **dict.fromkeys(("mv", "dot", "vdot"), lambda left, _: 2 * left.numel()),
    **dict.fromkeys(("addmv", "addmv_"), lambda _, matrix, __: 2 * matrix.numel()),
    "_grouped_mm": _grouped,
    "convolution_backward": _convolution_backward,
}
_KINDS = "flash_attention_for_cpu flash_attention efficient_attention cudnn_attention fused_attention_overrideable"
FUSED_FORWARD: dict[str, Callable[..., _Fused]] = {
    **{f"_scaled_dot_product_{kind}": lambda *args: _heads_first(*args[:3]) for kind in _KINDS.split()},
    "_flash_attention_forward": lambda *args: _tokens_first(*args[:5]),
    "_efficient_attention_forward": lambda *args: _tokens_first(*args[:3], *args[4:6]),
}
FUSED_BACKWARD: dict[str, Callable[..., _Fused]] = {
    **{f"_scaled_dot_product_{kind}_backward": lambda *args: _heads_first(*args[1:4]) for kind in _KINDS.split()},
    "_flash_attention_backward": lambda *args: _tokens_first(*args[1:4], *args[6:8]),
    "_efficient_attention_backward": lambda *args: _tokens_first(*args[1:4], *args[6:8]),
}


def _formulas(recomputed: bool) -> dict[Any, _Formula]:
    """What torch has no formula for, or one that reads another layout or counts the scores twice."""

    def forward(size: Callable[..., _Fused]) -> Callable[..., int]:
        return lambda *args: size(*args).forward

    def backward(size: Callable[..., _Fused]) -> Callable[..., int]:
        return lambda *args: size(*args).backward(recomputed)

    flops = PRODUCTS | {name: forward(size) for name, size in FUSED_FORWARD.items()}
    flops |= {name: backward(size) for name, size in FUSED_BACKWARD.items()}
    return {getattr(aten, name): _Formula(formula) for name, formula in flops.items() if hasattr(aten, name)}


def _uncounted(func: Any, known: Container[Any]) -> str | None:
    """The name of an operator that does heavy work, or may, and has no formula; None for any other."""
    node = torch._C._current_autograd_node()
    if node is not None and node.name() in ELEMENTWISE_BACKWARD and func is aten.mul.Tensor:
        return f"{node.name()}, a product done elementwise"
    packet = getattr(func, "overloadpacket", func)
    if packet in known or packet is torch.ops.higher_order.cond:
        return None
    light = getattr(func, "namespace", None) in LIGHT_NAMESPACES
    return None if light and not HEAVY.search(str(packet).split(".")[-1]) else str(packet)


class _Watch(TorchDispatchMode):
    """Notes each heavy operator without a formula that torch's counter runs."""

    supports_higher_order_operators = True

    def __init__(self, known: Container[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known = known
        self.uncounted: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if (name := _uncounted(func, self.known)) is not None:
            self.uncounted.add(name)
        return func(*args, **(kwargs or {}))


def by_operator(run: Callable[[], object], *, recomputed: bool = False) -> dict[str, int]:
    """FLOPs of the matrix products that ``run`` executes, by the name of the operator, such as ``aten.mm``.

    ``recomputed``: with the scores that a fused attention's backward pass computes again. Raises UncountedError,
    naming the operators, where one that multiplies matrices has no formula, and where a matrix's or a vector's
    gradient was taken elementwise (of a product with a vector: give it a batch of one).
    """
    formulas = _formulas(recomputed)
    counter = FlopCounterMode(display=False, custom_mapping=formulas)
    watch = _Watch({**flop_registry, **formulas})
    with watch, counter:  # the counter takes each call first, and the watch sees the pieces that it runs
        run()
    if watch.uncounted:
        raise UncountedError(f"no formula for {', '.join(sorted(watch.uncounted))}")
    return {str(packet): int(flops) for packet, flops in counter.get_flop_counts().get("Global", {}).items()}


def count(run: Callable[[], object], *, recomputed: bool = False) -> int:
    """The sum of ``by_operator``."""
    return sum(by_operator(run, recomputed=recomputed).values())
