"""Chips and what a count becomes on them: time, utilisation, intensity.

Rates are the vendors' dense peaks; sparse ones, twice as high where half of a matrix's entries are zero, only where
they are asked for. A rate that the vendor does not state is None, never another chip's.
Results are exact Fractions.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil, inf
from types import MappingProxyType
from typing import Literal

Number = int | float | Fraction
Scope = Literal["global", "device"]

DAY = 86_400  # seconds
TERA = 10**12
GIGA = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One accelerator of one form factor.

    ``dense`` and ``sparse``: peak FLOP/s by dtype; float32 is the rate without tensor cores,
    tfloat32 the one with them. ``bandwidth`` in bytes a second and ``memory`` in bytes, of its
    main memory, decimal as the vendors print them. ``devices``: the names under which drivers and frameworks report it.
    """

    name: str
    dense: Mapping[str, int]
    sparse: Mapping[str, int] = field(default_factory=dict)
    bandwidth: int | None
    memory: int
    source: str
    devices: tuple[str, ...] = ()

    def peak(self, dtype: str = "bfloat16", *, sparse: bool = False) -> int | None:
        """Peak FLOP/s in a dtype; None where the vendor states none."""
        return (self.sparse if sparse else self.dense).get(dtype)

    def ridge(self, dtype: str = "bfloat16") -> Fraction | None:
        """FLOPs a byte at which memory and arithmetic take as long; None without a peak or a bandwidth.

        Williams et al. 2009, "Roofline", doi 10.1145/1498765.1498785.
        """
        peak = self.peak(dtype)
        return None if peak is None or self.bandwidth is None else ridge(peak, self.bandwidth)


def _tera(**rates: str) -> dict[str, int]:
    """TFLOP/s as printed to FLOP/s; bfloat16 stands for float16 too, which every one of these runs as fast."""
    exact = {dtype: int(Fraction(rate) * TERA) for dtype, rate in rates.items()}
    return exact | ({"float16": exact["bfloat16"]} if "bfloat16" in exact else {})


def _halved(sparse: Mapping[str, int], **dense: str) -> dict[str, int]:
    """Dense rates of a sheet that prints tensor-core rates with sparsity, at twice the dense ones."""
    return {dtype: rate // 2 for dtype, rate in sparse.items()} | _tera(**dense)


_PRINTED_SPARSE = "tensor-core rates are printed with sparsity and halved here"
_H100_SXM = _tera(bfloat16="1979", tfloat32="989", float8="3958")
_H100_PCIE = _tera(bfloat16="1513", tfloat32="756", float8="3026")
_H100_NVL = _tera(bfloat16="1671", tfloat32="835", float8="3341")
_B200 = _tera(bfloat16="4500", tfloat32="2250", float8="9000")
_L4 = _tera(bfloat16="242", tfloat32="120", float8="485")
_A100 = {
    "dense": _tera(bfloat16="312", tfloat32="156", float32="19.5"),
    "sparse": _tera(bfloat16="624", tfloat32="312"),
}
_MI300 = {
    "dense": _tera(bfloat16="1307.4", tfloat32="653.7", float8="2614.9", float32="163.4"),
    "sparse": _tera(bfloat16="2614.9", tfloat32="1307.4", float8="5229.8"),
}

CHIPS: tuple[Chip, ...] = (
    Chip(
        name="b200-sxm",
        dense=_halved(_B200),
        sparse=_B200,
        bandwidth=8000 * GIGA,
        memory=180 * GIGA,
        source="NVIDIA HGX B200 specifications, an eighth of the board (36 PFLOP/s with sparsity in BF16)",
        devices=("NVIDIA B200",),
    ),
    Chip(
        name="h200-sxm",
        dense=_halved(_H100_SXM, float32="67"),
        sparse=_H100_SXM,
        bandwidth=4800 * GIGA,
        memory=141 * GIGA,
        source=f"NVIDIA H200 datasheet; {_PRINTED_SPARSE}",
        devices=("NVIDIA H200",),
    ),
    Chip(
        name="h200-nvl",
        dense=_halved(_H100_NVL, float32="60"),
        sparse=_H100_NVL,
        bandwidth=4800 * GIGA,
        memory=141 * GIGA,
        source=f"NVIDIA H200 datasheet; {_PRINTED_SPARSE}",
        devices=("NVIDIA H200 NVL",),
    ),
    Chip(
        name="h100-sxm",
        dense=_halved(_H100_SXM, float32="67"),
        sparse=_H100_SXM,
        bandwidth=3350 * GIGA,
        memory=80 * GIGA,
        source=f"NVIDIA H100 datasheet; {_PRINTED_SPARSE}",
        devices=("NVIDIA H100 80GB HBM3",),
    ),
    Chip(
        name="h100-pcie",
        dense=_halved(_H100_PCIE, float32="51"),
        sparse=_H100_PCIE,
        bandwidth=2000 * GIGA,
        memory=80 * GIGA,
        source=f"NVIDIA H100 datasheet; {_PRINTED_SPARSE}",
        devices=("NVIDIA H100 PCIe",),
    ),
    Chip(
        name="h100-nvl",
        dense=_halved(_H100_NVL, float32="60"),
        sparse=_H100_NVL,
        bandwidth=3900 * GIGA,
        memory=94 * GIGA,
        source=f"NVIDIA H100 datasheet; {_PRINTED_SPARSE}",
        devices=("NVIDIA H100 NVL",),
    ),
    Chip(
        name="a100-sxm-80gb",
        **_A100,
        bandwidth=2039 * GIGA,
        memory=80 * GIGA,
        source="NVIDIA A100 datasheet",
        devices=("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
    ),
    Chip(
        name="a100-sxm-40gb",
        **_A100,
        bandwidth=1555 * GIGA,
        memory=40 * GIGA,
        source="NVIDIA A100 datasheet",
        devices=("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB"),
    ),
    Chip(
        name="a100-pcie-80gb",
        **_A100,
        bandwidth=1935 * GIGA,
        memory=80 * GIGA,
        source="NVIDIA A100 datasheet",
        devices=("NVIDIA A100 80GB PCIe",),
    ),
    Chip(
        name="v100-sxm2-32gb",
        dense={"float16": 125 * TERA, "float32": int(Fraction("15.7") * TERA)},
        bandwidth=900 * GIGA,
        memory=32 * GIGA,
        source="NVIDIA V100 datasheet; no bfloat16",
        devices=("Tesla V100-SXM2-32GB",),
    ),
    Chip(
        name="l4",
        dense=_halved(_L4, float32="30.3"),
        sparse=_L4,
        bandwidth=300 * GIGA,
        memory=24 * GIGA,
        source=f"NVIDIA L4 datasheet; {_PRINTED_SPARSE}",
        devices=("NVIDIA L4",),
    ),
    Chip(
        name="l40s",
        dense=_tera(bfloat16="362.05", tfloat32="183", float8="733", float32="91.6"),
        sparse=_tera(bfloat16="733", tfloat32="366", float8="1466"),
        bandwidth=864 * GIGA,
        memory=48 * GIGA,
        source="NVIDIA L40S datasheet",
        devices=("NVIDIA L40S",),
    ),
    Chip(
        name="rtx-4090",
        dense=_tera(bfloat16="165.2", tfloat32="82.6", float32="82.6"),
        sparse=_tera(bfloat16="330.4", tfloat32="165.2"),
        bandwidth=1008 * GIGA,
        memory=24 * GIGA,
        source="NVIDIA Ada GPU architecture whitepaper, appendix A; products accumulate in float32",
        devices=("NVIDIA GeForce RTX 4090",),
    ),
    Chip(
        name="rtx-4060-laptop",
        dense={},
        bandwidth=256 * GIGA,
        memory=8 * GIGA,
        source="NVIDIA GeForce RTX 40 series laptops: no dense rate is stated, and the clock depends on the laptop",
        devices=("NVIDIA GeForce RTX 4060 Laptop GPU",),
    ),
    Chip(
        name="mi300x",
        **_MI300,
        bandwidth=5300 * GIGA,
        memory=192 * GIGA,
        source="AMD Instinct MI300X datasheet",
        devices=("AMD Instinct MI300X",),
    ),
    Chip(
        name="mi325x",
        **_MI300,
        bandwidth=6000 * GIGA,
        memory=256 * GIGA,
        source="AMD Instinct MI325X datasheet",
        devices=("AMD Instinct MI325X",),
    ),
    Chip(
        name="tpu-v4",
        dense={"bfloat16": 275 * TERA},
        bandwidth=1200 * GIGA,
        memory=32 * GIGA,
        source="Google Cloud, TPU v4 system architecture",
        devices=("TPU v4",),
    ),
    Chip(
        name="tpu-v5e",
        dense={"bfloat16": 197 * TERA},
        bandwidth=819 * GIGA,
        memory=16 * GIGA,
        source="Google Cloud, TPU v5e system architecture",
        devices=("TPU v5 lite", "TPU v5e"),
    ),
    Chip(
        name="tpu-v5p",
        dense={"bfloat16": 459 * TERA},
        bandwidth=2765 * GIGA,
        memory=95 * GIGA,
        source="Google Cloud, TPU v5p system architecture",
        devices=("TPU v5", "TPU v5p"),
    ),
    Chip(
        name="tpu-v6e",
        dense={"bfloat16": 918 * TERA},
        bandwidth=1640 * GIGA,
        memory=32 * GIGA,
        source="Google Cloud, TPU v6e system architecture",
        devices=("TPU v6 lite", "TPU v6e"),
    ),
)
_BY_NAME: Mapping[str, Chip] = MappingProxyType({name: chip for chip in CHIPS for name in (chip.name, *chip.devices)})


def find(name: str) -> Chip | None:
    """The chip of this name here, or reported under it by a driver; None for any other, however similar."""
    return _BY_NAME.get(name) or _BY_NAME.get(name.lower())


def seconds(flops: Number, *, peak: Number, count: int = 1, utilisation: Number = 1) -> Fraction:
    """C / (n peak MFU): the time that ``count`` chips take at a share of their peak (0 to 1)."""
    _positive(flops=flops, peak=peak, count=count, utilisation=utilisation)
    if utilisation > 1:
        raise ValueError(f"utilisation: expected a share of the peak, at most 1, got {utilisation}")
    return Fraction(flops) / (Fraction(peak) * count * Fraction(utilisation))


def days(flops: Number, *, peak: Number, count: int = 1, utilisation: Number = 1) -> Fraction:
    """``seconds`` in days of 86,400."""
    return seconds(flops, peak=peak, count=count, utilisation=utilisation) / DAY


def achieved(flops_per_token: Number, tokens_per_second: Number, *, count: int, scope: Scope) -> Fraction:
    """FLOP/s of one chip. ``scope``: the tokens are those of all ``count`` chips together, or of each."""
    _positive(flops_per_token=flops_per_token, tokens_per_second=tokens_per_second, count=count)
    if scope not in ("global", "device"):
        raise ValueError(f"scope: expected 'global' or 'device', got {scope!r}")
    return Fraction(flops_per_token) * Fraction(tokens_per_second) / (count if scope == "global" else 1)


def utilisation(
    flops_per_token: Number, tokens_per_second: Number, *, peak: Number, count: int, scope: Scope
) -> Fraction:
    """The share of the peak that a rate makes: MFU of model FLOPs, HFU of executed ones.

    Chowdhery et al. 2022, arXiv 2204.02311, section 4.1. Above 1 it is impossible: the FLOPs,
    the rate, its scope or the peak is another than it is taken for.
    """
    _positive(peak=peak)
    return achieved(flops_per_token, tokens_per_second, count=count, scope=scope) / Fraction(peak)


def ridge(peak: Number, bandwidth: Number) -> Fraction:
    """FLOPs a byte at which arithmetic at ``peak`` FLOP/s and memory at ``bandwidth`` bytes/s take as long."""
    _positive(peak=peak, bandwidth=bandwidth)
    return Fraction(peak) / Fraction(bandwidth)


def intensity(tokens: int, rows: int, columns: int, *, item_bytes: int = 2, activations: bool = True) -> Fraction:
    """FLOPs a byte of ``tokens`` vectors through a matrix of ``rows`` by ``columns``, each scalar moved once.

    Bytes of the matrix, and with ``activations`` of what goes in and comes out.
    """
    _positive(tokens=tokens, rows=rows, columns=columns, item_bytes=item_bytes)
    moved = rows * columns + (tokens * (rows + columns) if activations else 0)
    return Fraction(2 * tokens * rows * columns, item_bytes * moved)


def tokens_at(ridge: Number, rows: int, columns: int, *, item_bytes: int = 2) -> int | None:
    """The fewest tokens whose ``intensity`` in this matrix reaches ``ridge``; None where no number does."""
    _positive(ridge=ridge, rows=rows, columns=columns, item_bytes=item_bytes)
    weights, slope = rows * columns, rows + columns
    # 2 T w / (b (w + T s)) >= ridge  <=>  T (2 w - ridge b s) >= ridge b w
    wanted = Fraction(ridge) * item_bytes
    gain = 2 * weights - wanted * slope
    return None if gain <= 0 else ceil(wanted * weights / gain)


def step_seconds(flops: Number, moved_bytes: Number, *, peak: Number, bandwidth: Number) -> Fraction:
    """The least time of a step that computes and moves this much, whichever takes longer.

    A decode step of one sequence moves each active weight and the cache once, and is bound by that.
    """
    _positive(flops=flops, moved_bytes=moved_bytes, peak=peak, bandwidth=bandwidth)
    return max(Fraction(flops) / Fraction(peak), Fraction(moved_bytes) / Fraction(bandwidth))


def _positive(**values: Number) -> None:
    for name, value in values.items():
        if not 0 < value < inf:
            raise ValueError(f"{name}: expected a positive number, got {value}")
