"""Files of the safetensors format, whole ones and broken ones: written as the format says, without a weight."""

import json
import struct
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

from accounting import huggingface
from accounting.authorities import huggingface as modules
from accounting.checkpoint import BITS

#: Dtype and shape of each tensor, in the order of the file.
Tensors = dict[str, tuple[str, tuple[int, ...]]]


def headed(header: Any, data: bytes = b"") -> bytes:
    """The length of the header, the header as the library writes it, and the data."""
    text = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    return struct.pack("<Q", len(text)) + text + data


def entries(tensors: Mapping[str, tuple[str, Iterable[int]]]) -> tuple[dict[str, Any], int]:
    """The header of tensors that lie one behind the other, and the bytes that they take."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape) in tensors.items():
        end = at + BITS[dtype] * prod(shape) // 8
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    return header, at


def sparse(path: Path, tensors: Tensors) -> int:
    """Write a file of full size that takes no room on a disk; its tensors' bytes."""
    header, size = entries(tensors)
    with path.open("wb") as file:
        file.write(headed(header))
        file.truncate(file.tell() + size)
    return size


def shards(folder: Path, tensors: Tensors, count: int) -> None:
    """Write the tensors into so many files, and their index."""
    names = list(tensors)
    files, size = {}, 0
    for number in range(count):
        file = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
        part = names[number * len(names) // count : (number + 1) * len(names) // count]
        size += sparse(folder / file, {name: tensors[name] for name in part})
        files |= dict.fromkeys(part, file)
    write_index(folder, files, total_size=size)


def write_index(folder: Path, weight_map: Mapping[str, str], **metadata: Any) -> None:
    text = json.dumps({"metadata": metadata, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)


def index_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "model.safetensors.index.json").read_text())
    return content


def published(name: str, dtype: str = "BF16") -> Tensors:
    """The tensors of a published model, as Hugging Face's module on the meta device would be saved."""
    module = modules.build(huggingface.published_config(name))
    return {tensor: (dtype, shape) for tensor, shape in modules.published(module).items()}


def mxfp4(tensors: Tensors) -> Tensors:
    """Tensors in which the stacks of gpt-oss are packed: 32 weights along the input in 16 bytes, with a scale."""
    stored: Tensors = {}
    for name, (dtype, shape) in tensors.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, into, out = shape
            stored[f"{name}_blocks"] = ("U8", (experts, out, into // 32, 16))
            stored[f"{name}_scales"] = ("U8", (experts, out, into // 32))
        else:
            stored[name] = (dtype, shape)
    return stored
