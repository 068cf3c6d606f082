"""How the quantisation section of a config says that linear weights are stored: packed, with scales beside them.

Each method has one rule, which gives the tensors that a file holds instead of a weight of ``out`` x ``into``. A method,
a number of bits or a pattern that no rule covers is refused: what is packed in an unknown way cannot be counted.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

import msgspec

from accounting.census import Part
from accounting.checkpoint import FLOATS
from accounting.naming import Published
from accounting.spec import SpecError

SECTION = "quantization_config"
INTEGER_BITS = 32
#: Patterns with a wildcard, each of which is held against every module.
MAX_PATTERNS = 100

Bits = Annotated[int, msgspec.Meta(ge=2, le=8)]
#: Weights that share a scale along the input; -1: all of a row.
Group = Annotated[int, msgspec.Meta(ge=-1, le=2**31)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A tensor that a file holds for a quantised weight: the weight itself, or what goes with it.

    ``shape`` None: a vector of any length. ``needed``: a file without it is not whole.
    """

    name: str
    dtypes: frozenset[str]
    shape: tuple[int, ...] | None
    weight: bool = False
    needed: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A method's rule. ``spared``: the names of modules that it leaves as they are."""

    method: str
    store: Callable[[Published], Iterator[Stored]]
    spared: Callable[[str], bool]
    tables: bool = False

    def covers(self, tensor: Published) -> bool:
        """Whether a published tensor is stored so: a linear map of a block that is not spared, and no router.

        ``tables``: the token table and the head are too.
        """
        first = tensor.weights[0]
        table = self.tables and first.part in (Part.EMBEDDING, Part.HEAD)
        linear = first.multiplies and first.layer is not None and first.part is not Part.ROUTER
        return (linear or table) and not self.spared(_module(tensor))


def rule(section: Mapping[str, Any]) -> Rule:
    """The rule of a quantisation section.

    Raises SpecError for a method without a rule, and for a section that leaves open how it packs.
    """
    method = section.get("quant_method") or ("mlx" if {"bits", "group_size"} <= section.keys() else None)
    if not isinstance(method, str) or method not in _RULES:
        raise SpecError(f"{SECTION}.quant_method", f"expected one of {', '.join(_RULES)}, got {method!r}")
    kind, read = _RULES[method]
    try:
        return read(msgspec.convert({name: value for name, value in section.items() if value is not None}, kind))
    except msgspec.ValidationError as error:
        problem, _, place = str(error).replace("`", "").partition(" - at $.")
        raise SpecError(f"{SECTION}.{place}" if place else SECTION, problem) from None


def _module(tensor: Published) -> str:
    return tensor.name.removesuffix(".weight")


def _matrix(tensor: Published, method: str) -> tuple[str, int, int]:
    """The module of a linear weight, its outputs and its inputs."""
    if tensor.layout.stacked or len(tensor.shape) != 2:
        raise SpecError(f"{SECTION}.quant_method", f"{method} of stacked experts is not implemented")
    out, into = tensor.shape[::-1] if tensor.layout.transposed else tensor.shape
    return _module(tensor), out, into


def _packed(size: int, bits: int, tensor: Published) -> int:
    """Integers of 32 bits that ``size`` values of ``bits`` fill."""
    if size * bits % INTEGER_BITS:
        raise SpecError(f"{SECTION}.bits", f"{tensor.name}: {size} values of {bits} bits do not fill whole integers")
    return size * bits // INTEGER_BITS


def _groups(into: int, size: int, field: str) -> int:
    """Groups along an input."""
    if size == 0:
        raise SpecError(f"{SECTION}.{field}", "expected -1 or a size, got 0")
    return 1 if size == -1 else -(-into // size)


def _spared(names: list[str], *, expressions: str = "") -> Callable[[str], bool]:
    """Whether a module's name is one of these, begins or ends with one, at a dot; ``*`` and ``.*`` stand for anything.

    ``expressions``: the mark of those that begin a name up to any letter, as Python's ``re.match`` has them. Others
    are never run as what they are: a stranger's may take for ever.
    """
    exact: set[str] = set()
    globs: list[str] = []
    for name in names:
        marked = bool(expressions) and name.startswith(expressions)
        text = name.removeprefix(expressions) if marked else name
        plain = text.removeprefix("^").removesuffix("$").replace("\\.", ".").replace(".*", "*")
        if not re.fullmatch(r"[\w.*-]+", plain):
            raise SpecError(SECTION, f"a pattern that is not known here: {name!r}")
        if marked:
            globs.append(plain if text.endswith("$") else f"{plain}*")
        elif "*" in plain:
            globs += [plain, f"{plain}.*"]
        else:
            exact.add(plain)
    if len(globs) > 2 * MAX_PATTERNS:
        raise SpecError(SECTION, f"more than {MAX_PATTERNS} patterns")

    def spared(module: str) -> bool:
        if not names:
            return False
        parts = module.split(".")
        pieces = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
        ends = (".".join(parts[start:]) for start in range(1, len(parts)))
        return (
            not exact.isdisjoint(pieces)
            or not exact.isdisjoint(ends)
            or any(fnmatchcase(module, pattern) for pattern in globs)
        )

    return spared


class _Sparing(msgspec.Struct, kw_only=True):
    modules_to_not_convert: list[str] = []


class _Fp8(_Sparing, kw_only=True):
    weight_block_size: tuple[Annotated[int, msgspec.Meta(ge=1)], Annotated[int, msgspec.Meta(ge=1)]]
    fmt: Literal["e4m3"] = "e4m3"
    activation_scheme: Literal["dynamic"] = "dynamic"


def _fp8(section: _Fp8) -> Rule:
    """Blocks of float8 with a scale each (DeepSeek-AI 2024, arXiv 2412.19437, section 3.3)."""
    rows, columns = section.weight_block_size

    def store(tensor: Published) -> Iterator[Stored]:
        module, out, into = _matrix(tensor, "fp8")
        yield Stored(name=f"{module}.weight", dtypes=frozenset({"F8_E4M3"}), shape=(out, into), weight=True)
        scales = (-(-out // rows), -(-into // columns))
        yield Stored(name=f"{module}.weight_scale_inv", dtypes=FLOATS | {"F8_E8M0"}, shape=scales)

    return Rule(method="fp8", store=store, spared=_spared(section.modules_to_not_convert))


def _mxfp4(section: _Sparing) -> Rule:
    """Blocks of 32 in 4 bits with a scale of 8 (OCP Microscaling Formats v1.0, section 5), along a stack's input."""
    block = 32
    spared = _spared(section.modules_to_not_convert)

    def store(tensor: Published) -> Iterator[Stored]:
        if not (tensor.layout.stacked and tensor.layout.transposed):
            raise SpecError(f"{SECTION}.quant_method", f"mxfp4 of {tensor.name} is not implemented")
        experts, into, out = tensor.shape
        if into % block:
            raise SpecError(SECTION, f"{tensor.name}: expected inputs in blocks of {block}, got {into}")
        shape, dtypes = (experts, out, into // block), frozenset({"U8"})
        yield Stored(name=f"{tensor.name}_blocks", dtypes=dtypes, shape=(*shape, block // 2), weight=True)
        yield Stored(name=f"{tensor.name}_scales", dtypes=dtypes, shape=shape)

    return Rule(method="mxfp4", store=store, spared=spared)


class _Gptq(_Sparing, kw_only=True):
    bits: Literal[2, 3, 4, 8]
    group_size: Group
    checkpoint_format: Literal["gptq", "gptq_v2"] = "gptq"


def _gptq(section: _Gptq) -> Rule:
    """Integers packed along the input (Frantar et al. 2022, arXiv 2210.17323), as AutoGPTQ writes them."""
    bits = section.bits

    def store(tensor: Published) -> Iterator[Stored]:
        module, out, into = _matrix(tensor, "gptq")
        groups, integers = _groups(into, section.group_size, "group_size"), frozenset({"I32"})
        packed = (_packed(into, bits, tensor), out)
        yield Stored(name=f"{module}.qweight", dtypes=integers, shape=packed, weight=True)
        yield Stored(name=f"{module}.qzeros", dtypes=integers, shape=(groups, _packed(out, bits, tensor)))
        yield Stored(name=f"{module}.scales", dtypes=FLOATS, shape=(groups, out))
        yield Stored(name=f"{module}.g_idx", dtypes=integers, shape=(into,), needed=False)
        # Older files have an offset of zeros for every linear map.
        yield Stored(name=f"{module}.bias", dtypes=FLOATS, shape=(out,), needed=False)

    return Rule(method="gptq", store=store, spared=_spared(section.modules_to_not_convert))


class _Awq(_Sparing, kw_only=True):
    bits: Literal[4]
    group_size: Group
    version: Literal["gemm", "GEMM"] = "gemm"


def _awq(section: _Awq) -> Rule:
    """Integers packed along the output (Lin et al. 2023, arXiv 2306.00978), as AutoAWQ's gemm version writes them."""

    def store(tensor: Published) -> Iterator[Stored]:
        module, out, into = _matrix(tensor, "awq")
        groups, packed, integers = (
            _groups(into, section.group_size, "group_size"),
            _packed(out, section.bits, tensor),
            frozenset({"I32"}),
        )
        yield Stored(name=f"{module}.qweight", dtypes=integers, shape=(into, packed), weight=True)
        yield Stored(name=f"{module}.qzeros", dtypes=integers, shape=(groups, packed))
        yield Stored(name=f"{module}.scales", dtypes=FLOATS, shape=(groups, out))

    return Rule(method="awq", store=store, spared=_spared(section.modules_to_not_convert))


class _BitsAndBytes(msgspec.Struct, kw_only=True):
    load_in_4bit: bool = False
    load_in_8bit: bool = False
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = "fp4"
    bnb_4bit_use_double_quant: bool = False
    bnb_4bit_quant_storage: Literal["uint8"] = "uint8"
    llm_int8_skip_modules: list[str] = []


def _bitsandbytes(section: _BitsAndBytes) -> Rule:
    """Two 4-bit values a byte (Dettmers et al. 2023, arXiv 2305.14314), or bytes (2022, arXiv 2208.07339)."""
    if section.load_in_4bit == section.load_in_8bit:
        raise SpecError(SECTION, "expected one of load_in_4bit and load_in_8bit")
    block, outer_block, levels, outer_levels = 64, 256, 16, 256
    double, kind = section.bnb_4bit_use_double_quant, section.bnb_4bit_quant_type
    byte, single = frozenset({"U8"}), frozenset({"F32"})

    def halves(tensor: Published) -> Iterator[Stored]:
        module, out, into = _matrix(tensor, "bitsandbytes")
        scalars = out * into
        blocks, name = -(-scalars // block), f"{module}.weight"
        yield Stored(name=name, dtypes=byte, shape=(-(-scalars // 2), 1), weight=True)
        yield Stored(name=f"{name}.absmax", dtypes=byte if double else single, shape=(blocks,))
        yield Stored(name=f"{name}.quant_map", dtypes=single, shape=(levels,))
        yield Stored(name=f"{name}.quant_state.bitsandbytes__{kind}", dtypes=byte, shape=None)
        if double:
            yield Stored(name=f"{name}.nested_absmax", dtypes=single, shape=(-(-blocks // outer_block),))
            yield Stored(name=f"{name}.nested_quant_map", dtypes=single, shape=(outer_levels,))

    def whole(tensor: Published) -> Iterator[Stored]:
        module, out, into = _matrix(tensor, "bitsandbytes")
        yield Stored(name=f"{module}.weight", dtypes=frozenset({"I8"}), shape=(out, into), weight=True)
        yield Stored(name=f"{module}.SCB", dtypes=single, shape=(out,))
        yield Stored(name=f"{module}.weight_format", dtypes=byte, shape=(), needed=False)

    store = halves if section.load_in_4bit else whole
    return Rule(method="bitsandbytes", store=store, spared=_spared(section.llm_int8_skip_modules))


class _Mlx(msgspec.Struct, kw_only=True):
    bits: Literal[2, 3, 4, 5, 6, 8]
    group_size: Annotated[int, msgspec.Meta(ge=1)]
    mode: Literal["affine"] = "affine"


def _mlx(section: _Mlx) -> Rule:
    """Groups with a scale and an offset, packed along the input, tables too, as MLX's ``quantize`` writes them."""

    def store(tensor: Published) -> Iterator[Stored]:
        module, out, into = _matrix(tensor, "mlx")
        groups = (out, _groups(into, section.group_size, "group_size"))
        packed = (out, _packed(into, section.bits, tensor))
        yield Stored(name=f"{module}.weight", dtypes=frozenset({"U32"}), shape=packed, weight=True)
        yield Stored(name=f"{module}.scales", dtypes=FLOATS, shape=groups)
        yield Stored(name=f"{module}.biases", dtypes=FLOATS, shape=groups)

    return Rule(method="mlx", store=store, spared=_spared([]), tables=True)


class _Weights(msgspec.Struct, kw_only=True):
    num_bits: Literal[4, 8]
    type: Literal["int", "float"] = "int"
    strategy: Literal["tensor", "channel", "group"] | None = None
    group_size: Group | None = None
    symmetric: bool = True


class _Scheme(msgspec.Struct, kw_only=True):
    weights: _Weights
    targets: tuple[Literal["Linear"]]


class _CompressedTensors(msgspec.Struct, kw_only=True):
    format: Literal["pack-quantized", "int-quantized", "float-quantized"]
    config_groups: dict[str, _Scheme]
    ignore: list[str] = []


def _compressed_tensors(section: _CompressedTensors) -> Rule:
    """The formats of the compressed-tensors library: integers packed along the input, or one byte a weight."""
    if len(section.config_groups) != 1:
        raise SpecError(f"{SECTION}.config_groups", f"expected one group, got {len(section.config_groups)}")
    weights = next(iter(section.config_groups.values())).weights
    packed = section.format == "pack-quantized"
    if (weights.type == "float") != (section.format == "float-quantized") or not (packed or weights.num_bits == 8):
        raise SpecError(f"{SECTION}.format", f"{section.format} of {weights.num_bits} bits {weights.type} is unknown")
    strategy = weights.strategy or ("channel" if weights.group_size in (None, -1) else "group")
    if strategy == "group" and not weights.group_size:
        raise SpecError(f"{SECTION}.config_groups", "missing, a group needs a group_size")
    byte = frozenset({"F8_E4M3"} if weights.type == "float" else {"I8"})

    def store(tensor: Published) -> Iterator[Stored]:
        module, out, into = _matrix(tensor, "compressed-tensors")
        if packed:
            shape = (out, _packed(into, weights.num_bits, tensor))
            yield Stored(name=f"{module}.weight_packed", dtypes=frozenset({"I32"}), shape=shape, weight=True)
            yield Stored(name=f"{module}.weight_shape", dtypes=frozenset({"I64", "I32"}), shape=(2,))
            yield Stored(name=f"{module}.weight_g_idx", dtypes=frozenset({"I32"}), shape=(into,), needed=False)
        else:
            yield Stored(name=f"{module}.weight", dtypes=byte, shape=(out, into), weight=True)
            yield Stored(name=f"{module}.input_scale", dtypes=FLOATS, shape=(1,), needed=False)
        groups = _groups(into, weights.group_size or -1, "group_size") if strategy == "group" else 1
        scales = (1,) if strategy == "tensor" else (out, groups)
        yield Stored(name=f"{module}.weight_scale", dtypes=FLOATS, shape=scales)
        if not weights.symmetric:
            zeros = (_packed(out, weights.num_bits, tensor), groups) if packed else scales
            dtypes = frozenset({"I32"}) if packed else byte
            yield Stored(name=f"{module}.weight_zero_point", dtypes=dtypes, shape=zeros)

    return Rule(method="compressed-tensors", store=store, spared=_spared(section.ignore, expressions="re:"))


_RULES: dict[str, tuple[type[msgspec.Struct], Callable[[Any], Rule]]] = {
    "awq": (_Awq, _awq),
    "bitsandbytes": (_BitsAndBytes, _bitsandbytes),
    "compressed-tensors": (_CompressedTensors, _compressed_tensors),
    "fp8": (_Fp8, _fp8),
    "gptq": (_Gptq, _gptq),
    "mlx": (_Mlx, _mlx),
    "mxfp4": (_Sparing, _mxfp4),
}
