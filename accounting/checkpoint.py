"""What a checkpoint holds, read from its headers: names, dtypes, shapes and byte ranges, and never a weight.

A ``.safetensors`` file begins with 8 bytes, little-endian, that give the length of a JSON object; this says of each
tensor which bytes of the rest are its own. A checkpoint in several files has an index beside them, a JSON object that
says which file holds which tensor. Format: huggingface.co/docs/safetensors, its dtypes those of version 0.8.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from accounting import files
from accounting.files import InputError

#: Bytes that a header or an index may take, as the safetensors library has it.
HEADER_LIMIT = 100_000_000
MAX_INTEGER = 2**63 - 1
MAX_DIMENSIONS = 64
INDEX = ".safetensors.index.json"
METADATA = "__metadata__"

Dtype = Literal[
    "BOOL", "F4", "F6_E2M3", "F6_E3M2", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ",
    "I16", "U16", "F16", "BF16", "I32", "U32", "F32", "C64", "F64", "I64", "U64",
]  # fmt: skip
#: Bits that one scalar takes.
BITS: Mapping[str, int] = (
    {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
    | dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8)
    | dict.fromkeys(("I16", "U16", "F16", "BF16"), 16)
    | dict.fromkeys(("I32", "U32", "F32"), 32)
    | dict.fromkeys(("C64", "F64", "I64", "U64"), 64)
)
#: Dtypes of weights that are neither packed nor quantised.
FLOATS = frozenset({"F16", "BF16", "F32", "F64"})
#: Dtypes of what is no weight, whatever a file is for: positions, counters, masks.
NO_WEIGHTS = frozenset({"BOOL", "I64", "U64"})

Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_INTEGER)]
Shape = Annotated[tuple[Size, ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]


class Tensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A tensor of a file. ``data_offsets``: its first byte and the one after its last, counted after the header."""

    dtype: Dtype
    shape: Shape
    data_offsets: tuple[Size, Size]

    @property
    def scalars(self) -> int:
        """The product of the sizes: 1 without any."""
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes in the file."""
        begin, end = self.data_offsets
        return end - begin


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The header of a file. ``length``: bytes of its JSON; ``size``: bytes of the file."""

    length: int
    size: int
    metadata: Mapping[str, str]
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """Which file holds each tensor, and what the index claims of them all."""

    weight_map: Mapping[str, str]
    total_size: int | None = None
    total_parameters: int | None = None


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The headers of all files of a checkpoint, by name. ``absent``: files that only the index knows."""

    path: str
    headers: Mapping[str, Header]
    index: Index | None = None
    absent: tuple[str, ...] = ()

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name."""
        return {name: tensor for header in self.headers.values() for name, tensor in header.tensors.items()}

    @cached_property
    def places(self) -> dict[str, str]:
        """The file that each tensor lies in."""
        return {name: file for file, header in self.headers.items() for name in header.tensors}

    @property
    def bytes(self) -> int:
        """Bytes of all tensors in all files."""
        return sum(header.size - 8 - header.length for header in self.headers.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Something that is not as it should be: its kind, the tensor or the file, and what was found."""

    kind: str
    name: str
    problem: str

    def __str__(self) -> str:
        return files.printable(f"{self.kind}: {self.name}: {self.problem}")


class _Claims(msgspec.Struct):
    total_size: Size | None = None
    total_parameters: Size | None = None


class _Index(msgspec.Struct, forbid_unknown_fields=True):
    weight_map: dict[str, str]
    metadata: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_TENSORS = msgspec.json.Decoder(dict[str, Tensor])
_LISTED = msgspec.json.Decoder(list[Tensor])
_TEXTS = msgspec.json.Decoder(dict[str, str] | None)
_RAW = msgspec.json.Decoder(dict[str, msgspec.Raw])
_INDEX = msgspec.json.Decoder(_Index)
_CLAIMS = msgspec.json.Decoder(_Claims | None)


def load(path: str | Path, *, limit: int = HEADER_LIMIT, partial: bool = False) -> Checkpoint:
    """The headers of a ``.safetensors`` file, of the files that an index names, or of the checkpoint in a folder.

    ``partial``: some of the files that an index names may be absent. ``limit`` bounds the bytes of a header and of an
    index. Raises InputError in one line that names the file and the cause.
    """
    file = _chosen(Path(path)) if os.path.isdir(path) else Path(path)
    files.inside(file.parent, file.name)
    if not file.name.endswith(".json"):
        return Checkpoint(path=str(path), headers={file.name: header(file, limit=limit)})
    listed = index(files.read(file, limit), source=file)
    there = files.listing(file.parent)
    headers: dict[str, Header] = {}
    absent: list[str] = []
    for name in sorted(set(listed.weight_map.values())):
        if name in ("", ".", "..") or not {"/", "\\", "\0"}.isdisjoint(name):
            raise InputError(file, f"weight_map: expected names of files beside the index, got {name!r}")
        if name not in there:
            absent.append(name)
            continue
        if there[name]:
            files.inside(file.parent, name)
        headers[name] = header(file.parent / name, limit=limit)
    if absent and not (headers and partial):
        others = f", and {files.counted(len(absent) - 1, 'other')} too" if len(absent) > 1 else ""
        raise InputError(file.parent / absent[0], f"the index names it, and it is absent{others}")
    return Checkpoint(path=str(path), headers=headers, index=listed, absent=tuple(absent))


def _chosen(folder: Path) -> Path:
    """The file or the index that a folder's checkpoint begins with: the usual name, or the only one that there is."""
    names = files.listing(folder)
    usual = [name for name in (f"model{INDEX}", "model.safetensors") if name in names]
    indexes = sorted(name for name in names if name.endswith(INDEX))
    found = usual or indexes or sorted(name for name in names if name.endswith(".safetensors"))
    if not found:
        raise InputError(folder, "a folder without a .safetensors file")
    if len(found) > 1:
        raise InputError(folder, f"expected one checkpoint, got {', '.join(found)}: name one of them")
    return folder / found[0]


def header(path: Path, *, limit: int = HEADER_LIMIT) -> Header:
    """The header of a ``.safetensors`` file, whose tensors must cover the rest of it exactly.

    Raises InputError in one line that names the file and the cause.
    """
    with files.regular(path) as file:
        size, start = os.fstat(file.fileno()).st_size, file.read(8)
        if start == b"version ":
            raise InputError(path, "a pointer of Git LFS, not the file that it stands for")
        if size < 8:
            raise InputError(
                path, f"a file of {files.counted(size, 'byte')} is no safetensors file: 8 give the length of the header"
            )
        length = int.from_bytes(start, "little")
        if length > limit:
            raise InputError(path, f"a header of {length:,} bytes, more than {limit:,}")
        if length > size - 8:
            raise InputError(path, f"a header of {length:,} bytes in a file of {size:,}: cut off")
        data = file.read(length)
    metadata, tensors = _decode(path, data)
    end = _covered(path, tensors)
    if end > (held := size - 8 - length):
        raise InputError(path, f"cut off: the tensors take {end:,} bytes, the file holds {held:,} of them")
    if end < held:
        raise InputError(path, f"{files.counted(held - end, 'trailing byte')} behind the last tensor")
    return Header(length=length, size=size, metadata=metadata or {}, tensors=tensors)


def _decode(path: Path, data: bytes) -> tuple[dict[str, str] | None, dict[str, Tensor]]:
    """The metadata and the tensors of a header's JSON."""
    if not data.startswith(b"{"):
        raise InputError(path, f"header: expected a JSON object, got {data[:8]!r}")
    try:
        given, metadata, tensors = _as_written(data) or _as_allowed(data)
        unique = _strings(data) == 5 * len(tensors) + given + 2 * len(metadata or ())
        repeated = None if unique else _repeated(data)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise InputError(path, f"header: {_reason(error)}") from None
    if not unique:
        raise InputError(path, f"header: {repeated}: given more than once")
    return metadata, tensors


_Parsed = tuple[bool, dict[str, str] | None, dict[str, Tensor]]


def _as_written(data: bytes) -> _Parsed | None:
    """A header as the library writes it, the metadata first: read at once. None for any other, and for a bad one."""
    start, end = f'{{"{METADATA}":{{'.encode(), data.find(b"}") + 1
    if not data.startswith(start) or data[end : end + 1] != b",":
        return None
    # A name, or a negative zero, which reads as a zero. One letter is found much faster than two.
    if data.find(b"-", end) >= 0 and data.find(b"-0", end) >= 0:
        return None
    try:
        metadata, tensors = (
            _TEXTS.decode(data[len(start) - 1 : end]),
            _TENSORS.decode(b"".join((b"{", memoryview(data)[end + 1 :]))),
        )
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return None
    return (True, metadata, tensors) if tensors and METADATA not in tensors else None


def _as_allowed(data: bytes) -> _Parsed:
    """Any header. Raises errors of msgspec's, which name the tensor where there is one."""
    values = _RAW.decode(data)
    raw = values.pop(METADATA, None)
    try:
        metadata = None if raw is None else _TEXTS.decode(raw)
    except msgspec.ValidationError as error:
        raise msgspec.ValidationError(f"{METADATA}: {error}") from None
    names = list(values)
    try:
        listed = _LISTED.decode(b"[" + b",".join(values.values()) + b"]")
    except msgspec.ValidationError as error:
        problem, _, place = str(error).partition(" - at `$[")
        number, _, field = place.partition("]")
        field = field.strip("`.")
        where = f"{names[int(number)]}: {field}" if field else names[int(number)]
        raise msgspec.ValidationError(f"{where}: {problem}") from None
    for name, value in values.items():
        if b"-" in bytes(value):
            raise msgspec.ValidationError(f"{name}: expected int >= 0, got -0")
    return raw is not None, metadata, dict(zip(names, listed, strict=True))


def _reason(error: Exception) -> str:
    """An error of msgspec's in our words."""
    if isinstance(error, RecursionError):
        return "nested too deep"
    if isinstance(error, UnicodeError):
        return "expected UTF-8"
    return re.sub("Expected", "expected", str(error).replace("`", "")).replace("Invalid enum value", "unknown dtype")


def _strings(data: bytes) -> int:
    """Strings in a JSON text. A key that is given twice is decoded once, and its strings are counted twice."""
    if b"\\" in data:
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    return data.count(b'"') // 2


def _repeated(data: bytes) -> str | None:
    """The first key that an object of a JSON text has twice."""
    repeated: list[str] = []

    def once(pairs: list[tuple[str, Any]]) -> None:
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                repeated.append(name)
            seen.add(name)

    json.loads(data, object_pairs_hook=once, parse_int=str)  # Python converts no integer of thousands of digits
    return repeated[0] if repeated else None


def _covered(path: Path, tensors: Mapping[str, Tensor]) -> int:
    """The bytes that tensors cover without a gap; each must have as many as its shape and dtype take."""
    at = 0
    for tensor in tensors.values():  # in the order in which the library writes them
        begin, end = tensor.data_offsets
        bits = BITS[tensor.dtype] * prod(tensor.shape)
        if begin != at or bits != 8 * (end - begin) or not bits:
            return _covered_by_any(path, tensors)
        at = end
    return at


def _covered_by_any(path: Path, tensors: Mapping[str, Tensor]) -> int:
    """The same in any order, empty tensors among them, with the error's cause."""
    at = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        begin, end = tensor.data_offsets
        bits = BITS[tensor.dtype] * tensor.scalars
        what = f"header: {name}: {tensor.dtype} of shape {list(tensor.shape)}"
        if prod(filter(None, tensor.shape)) > MAX_INTEGER:
            raise InputError(path, f"{what} is larger than any file")
        if bits % 8:
            raise InputError(path, f"{what} does not end with a byte")
        if begin > end:
            raise InputError(path, f"header: {name}: data_offsets run backwards, from {begin:,} to {end:,}")
        if bits != 8 * (end - begin):
            raise InputError(
                path, f"{what} takes {files.counted(bits // 8, 'byte')}, its data_offsets hold {end - begin:,}"
            )
        if begin != at:
            fault = (
                f"a gap of {files.counted(begin - at, 'byte')} before it"
                if begin > at
                else "overlaps what is before it"
            )
            raise InputError(path, f"header: {name}: {fault}")
        at = end
    return at


def index(data: bytes, *, source: object = "index") -> Index:
    """The index of a checkpoint in several files, from the bytes of its JSON.

    Raises InputError in one line that names ``source`` and the cause.
    """
    if data.startswith(b"version "):
        raise InputError(source, "a pointer of Git LFS, not the file that it stands for")
    try:
        content = _INDEX.decode(data)
        given = isinstance(content.metadata, msgspec.Raw)
        inner = bytes(content.metadata) if isinstance(content.metadata, msgspec.Raw) else b"null"
        claims = _CLAIMS.decode(inner) or _Claims()
        repeated = _repeated(inner)
        if _strings(data) - _strings(inner) != 1 + given + 2 * len(content.weight_map):
            repeated = _repeated(data)
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise InputError(source, _reason(error)) from None
    if repeated is not None:
        raise InputError(source, f"{repeated}: given more than once")
    if not content.weight_map:
        raise InputError(source, "weight_map: expected tensors, got none")
    return Index(weight_map=content.weight_map, total_size=claims.total_size, total_parameters=claims.total_parameters)


def inconsistencies(checkpoint: Checkpoint) -> Iterator[Difference]:
    """Where the files of a checkpoint and its index contradict each other; a file alone contradicts nobody."""
    listed, places = checkpoint.index, checkpoint.places
    if listed is None:
        return
    held = Counter(listed.weight_map.values())
    for file in checkpoint.absent:
        problem = f"the index says that it holds {files.counted(held[file], 'tensor')}"
        yield Difference(kind="absent file", name=file, problem=problem)
    if sum(len(header.tensors) for header in checkpoint.headers.values()) != len(places):
        yield from _twice(checkpoint)
    if listed.weight_map != places:
        for name, file in listed.weight_map.items():
            if file not in checkpoint.headers or name in checkpoint.headers[file].tensors:
                continue
            where = f"it lies in {places[name]}" if name in places else f"{file} lacks it"
            kind = "wrong file" if name in places else "absent"
            yield Difference(kind=kind, name=name, problem=f"the index says {file}, {where}")
        for name in places.keys() - listed.weight_map.keys():
            yield Difference(kind="unlisted", name=name, problem=f"it lies in {places[name]}, and the index lacks it")
    if listed.total_size not in (None, checkpoint.bytes) and not checkpoint.absent:
        problem = f"the index says {listed.total_size:,} bytes, the tensors take {checkpoint.bytes:,}"
        yield Difference(kind="total_size", name="index", problem=problem)


def _twice(checkpoint: Checkpoint) -> Iterator[Difference]:
    seen: dict[str, str] = {}
    for file, header in checkpoint.headers.items():
        for name in header.tensors:
            if name in seen:
                yield Difference(kind="stored twice", name=name, problem=f"in {seen[name]} and in {file}")
            seen[name] = file


def parameters(checkpoint: Checkpoint) -> int:
    """Scalars of all tensors of float dtypes, which is all that headers alone can say.

    Raises InputError where the files contradict their index, or hold a dtype that packed and quantised weights have:
    how many weights those are only a config can say.
    """
    for difference in inconsistencies(checkpoint):
        raise InputError(checkpoint.path, str(difference))
    for name, tensor in checkpoint.tensors.items():
        if tensor.dtype not in FLOATS | NO_WEIGHTS:
            raise InputError(
                checkpoint.path, f"{name}: {tensor.dtype} may be packed or quantised: count it by a config"
            )
    return sum(tensor.scalars for tensor in checkpoint.tensors.values() if tensor.dtype in FLOATS)
