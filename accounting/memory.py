"""Bytes of weights, and of the arrays that training keeps, on one rank or on many.

Bytes are integers. Activations are in ``accounting.activations``, key/value caches in
``accounting.cache``; workspaces and what an allocator rounds up are in none of them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapreplace
from math import prod
from types import MappingProxyType
from typing import Literal, TypeVar

from accounting.census import Census, Part, Weight, of
from accounting.spec import ModelSpec

Key = TypeVar("Key")

#: Bytes that one scalar takes.
DTYPE_BYTES: Mapping[str, int] = MappingProxyType(
    {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """Matrices of ``bits`` a scalar, with one scale for each block of rows and columns; the rest in ``rest``.

    ``chosen``: the weights that are stored so. A copy's scalars are packed into whole bytes, and
    a block that a matrix does not fill has its scale all the same. ``scale_bits`` are those of a
    block's scale, with its offset where the format has one.
    """

    bits: int
    block: tuple[int, int]
    scale_bits: int
    chosen: Callable[[Weight], bool]
    source: str
    rest: str = "bfloat16"

    def bytes(self, weight: Weight) -> int:
        """Bytes of all copies of a weight."""
        if not self.chosen(weight):
            return weight.scalars * DTYPE_BYTES[self.rest]
        blocks = prod(-(-size // side) for size, side in zip(weight.shape, self.block, strict=True))
        return weight.copies * (_bytes(weight.size * self.bits) + _bytes(blocks * self.scale_bits))


def _bytes(bits: int) -> int:
    return -(-bits // 8)


def _linear(weight: Weight) -> bool:
    """A matrix of a block, but for the router."""
    return weight.multiplies and weight.layer is not None and weight.part is not Part.ROUTER


def _expert(weight: Weight) -> bool:
    return weight.multiplies and "{expert}" in weight.name


FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        "fp8_block": Format(
            bits=8,
            block=(128, 128),
            scale_bits=32,
            chosen=_linear,
            source="DeepSeek-AI 2024, arXiv 2412.19437, section 3.3.2: tiles of 128 x 128 with a float32 scale",
        ),
        "mxfp4_experts": Format(
            bits=4,
            block=(1, 32),
            scale_bits=8,
            chosen=_expert,
            source="OCP Microscaling Formats v1.0, section 5; the experts of gpt-oss",
        ),
        "int4_group128": Format(
            bits=4,
            block=(1, 128),
            scale_bits=16,
            chosen=_linear,
            source="Frantar et al. 2022, arXiv 2210.17323: symmetric groups of 128 with a float16 scale",
        ),
    }
)


def weight_bytes(model: ModelSpec | Census, dtype: str) -> int:
    """Bytes of the distinct parameters in a dtype of ``DTYPE_BYTES``, or in one of ``FORMATS``: no file's size.

    Raises KeyError for any other.
    """
    return sum(_stored(weight, dtype) for weight in of(model).weights)


def weights_by(model: ModelSpec | Census, dtype: str, key: Callable[[Weight], Key]) -> dict[Key, int]:
    """``weight_bytes`` of each group of weights, such as those of a layer or of a part."""
    groups: dict[Key, int] = {}
    for weight in of(model).weights:
        groups[key(weight)] = groups.get(key(weight), 0) + _stored(weight, dtype)
    return groups


def _stored(weight: Weight, dtype: str) -> int:
    return FORMATS[dtype].bytes(weight) if dtype in FORMATS else weight.scalars * DTYPE_BYTES[dtype]


Role = Literal["weights", "gradients", "optimizer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Array:
    """An array of one scalar for each parameter, and what it is for: sharding goes by that."""

    name: str
    dtype: str
    role: Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The arrays that a way of training keeps.

    ``counts_steps``: torch's optimizer keeps a float32 count of steps beside each tensor's state.
    """

    arrays: tuple[Array, ...]
    source: str
    counts_steps: bool = True

    @property
    def bytes_per_parameter(self) -> int:
        """Bytes that all arrays take for one parameter."""
        return sum(DTYPE_BYTES[array.dtype] for array in self.arrays)


def _layout(
    source: str, weights: str, gradients: str, optimizer: Mapping[str, str], *, counts_steps: bool = True
) -> Layout:
    kept = (Array(name=name, dtype=dtype, role="optimizer") for name, dtype in optimizer.items())
    return Layout(
        arrays=(
            Array(name="weights", dtype=weights, role="weights"),
            Array(name="gradients", dtype=gradients, role="gradients"),
            *kept,
        ),
        source=source,
        counts_steps=counts_steps,
    )


_ADAM = "Kingma and Ba 2014, arXiv 1412.6980, algorithm 1"
_AMSGRAD = "Reddi et al. 2018, arXiv 1904.09237, algorithm 2"
_MIXED = (
    "Micikevicius et al. 2017, arXiv 1710.03740, section 3.1; Rajbhandari et al. 2019, arXiv 1910.02054, section 3.1"
)
_MOMENTUM = "Sutskever et al. 2013, On the importance of initialization and momentum in deep learning, section 2"
_MOMENTS = {"first_moment": "float32", "second_moment": "float32"}
_MASTER = {"master_weights": "float32", **_MOMENTS}

#: What is kept, by name; bytes a parameter follow from the arrays.
LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {
        "adam_float32": _layout(_ADAM, "float32", "float32", _MOMENTS),
        "adam_amsgrad_float32": _layout(
            _AMSGRAD, "float32", "float32", {**_MOMENTS, "largest_second_moment": "float32"}
        ),
        "adam_bfloat16": _layout(_ADAM, "bfloat16", "bfloat16", dict.fromkeys(_MOMENTS, "bfloat16")),
        "adam_mixed": _layout(_MIXED, "bfloat16", "bfloat16", _MASTER),
        "adam_mixed_float32_gradients": _layout(_MIXED, "bfloat16", "float32", _MASTER),
        "adam_mixed_gradient_copy": _layout(_MIXED, "bfloat16", "bfloat16", {"gradient_copy": "float32", **_MASTER}),
        "sgd_float32": _layout("descent along the gradient alone", "float32", "float32", {}, counts_steps=False),
        "sgd_momentum_float32": _layout(_MOMENTUM, "float32", "float32", {"momentum": "float32"}, counts_steps=False),
    }
)

Shard = Literal["none", "zero1", "zero2", "zero3"]
#: The roles whose arrays each rank keeps a share of (Rajbhandari et al. 2019, arXiv 1910.02054, section 5).
SHARDED: Mapping[Shard, frozenset[Role]] = MappingProxyType(
    {
        "none": frozenset(),
        "zero1": frozenset({"optimizer"}),
        "zero2": frozenset({"optimizer", "gradients"}),
        "zero3": frozenset({"optimizer", "gradients", "weights"}),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayBytes:
    """Bytes of one array on one rank. ``padded``: with the rows that make all ranks' shares as long."""

    array: Array
    logical: int
    padded: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingBytes:
    """What one rank keeps; ``step_counts``: bytes of one scalar a tensor, apart from all totals."""

    arrays: tuple[ArrayBytes, ...]
    step_counts: int

    @property
    def total(self) -> int:
        """Bytes of all arrays, without padding."""
        return sum(array.logical for array in self.arrays)

    @property
    def padded_total(self) -> int:
        """Bytes of all arrays, with padding."""
        return sum(array.padded for array in self.arrays)


def training(
    model: ModelSpec | Census, layout: str, *, ranks: int = 1, rank: int = 0, shard: Shard = "none"
) -> TrainingBytes:
    """The arrays that one of ``ranks`` data-parallel ranks keeps.

    A sharded array is cut along each tensor's first axis, as torch's ``fully_shard`` does, but
    under ``zero1``, where optimizer state follows whole parameters, as in torch's ``ZeroRedundancyOptimizer``. Raises
    KeyError for an unknown layout or way of sharding, and ValueError for a rank that is not there.
    """
    if not 0 <= rank < ranks:
        raise ValueError(f"rank: expected 0 to {ranks - 1} of {ranks} ranks, got {rank}")
    weights = of(model).weights
    whole, tensors = sum(weight.scalars for weight in weights), sum(weight.copies for weight in weights)
    if shard == "zero1":
        own = whole_parameters([weight.size for weight in weights for _ in range(weight.copies)], ranks)[rank]
        share = padded = sum(own)
        tensors = len(own)
    else:
        share, padded = (sum(weight.copies * rows(weight.shape, ranks, one) for weight in weights) for one in (rank, 0))
    arrays = []
    for array in LAYOUTS[layout].arrays:
        size, cut = DTYPE_BYTES[array.dtype], array.role in SHARDED[shard]
        arrays.append(
            ArrayBytes(array=array, logical=size * (share if cut else whole), padded=size * (padded if cut else whole))
        )
    step_counts = tensors * DTYPE_BYTES["float32"] if LAYOUTS[layout].counts_steps else 0
    return TrainingBytes(arrays=tuple(arrays), step_counts=step_counts)


def rows(shape: Sequence[int], ranks: int, rank: int) -> int:
    """Scalars of a tensor on a rank, cut along its first axis into pieces of equal rows, the last ones shorter.

    The first share is the longest: padding makes all as long.
    """
    first, *others = shape
    piece = -(-first // ranks)
    return max(0, min(piece, first - rank * piece)) * prod(others)


def whole_parameters(sizes: Sequence[int], ranks: int) -> tuple[tuple[int, ...], ...]:
    """The sizes of the parameters that each rank is responsible for: the largest first, each to the least loaded."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for size in sorted(sizes, reverse=True):
        load, rank = loads[0]
        shares[rank].append(size)
        heapreplace(loads, (load + size, rank))
    return tuple(map(tuple, shares))
