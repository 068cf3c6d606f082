"""Weights between frameworks: the same tensors in PyTorch, in JAX and in a safetensors file.

``Tensors`` go from canonical name to NumPy array, each in the dtype that it came in; bfloat16 is ``ml_dtypes``'. A
tied head is the token table, and no tensor of its own. A file has them under these names or, with a ``model_type``,
as that family's checkpoints have them: named, packed and turned, for Hugging Face's modules to load.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file

from accounting import checkpoint, naming
from accounting.files import InputError
from accounting.naming import Published
from accounting.spec import ModelSpec

if TYPE_CHECKING:  # who runs one framework need not have the other
    from torch import Tensor, nn

Tensors = dict[str, NDArray[Any]]
Shape = tuple[int, ...]

DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}


def _layout(spec: ModelSpec, model_type: str | None) -> list[Published]:
    return list(naming.canonical(spec) if model_type is None else naming.published(spec, model_type))


def _shapes(layout: list[Published]) -> dict[str, Shape]:
    return {tensor.name: tensor.shape for tensor in layout}


def _check(source: object, found: Mapping[str, tuple[Shape, str]], expected: Mapping[str, Shape]) -> None:
    """Raise InputError for a tensor that is missing, not expected, of another shape or of no float dtype."""
    for name, expected_shape in expected.items():
        if name not in found:
            raise InputError(source, f"{name}: missing")
        shape, dtype = found[name]
        if shape != expected_shape:
            raise InputError(source, f"{name}: expected shape {expected_shape}, got {shape}")
        if dtype not in DTYPES.values():
            raise InputError(source, f"{name}: expected one of {', '.join(DTYPES.values())}, got {dtype}")
    if surplus := found.keys() - expected.keys():
        raise InputError(source, f"{min(surplus)}: not a tensor of this decoder")


def _check_arrays(tensors: Tensors, expected: Mapping[str, Shape]) -> None:
    _check("tensors", {name: (array.shape, array.dtype.name) for name, array in tensors.items()}, expected)


def _experts(tensor: Published) -> list[list[str]]:
    """The canonical names in a tensor: for each expert that is stacked in it, those that are joined."""
    copies = zip(*(weight.expand() for weight in tensor.weights), strict=True)
    return [[weight.name for weight in joined] for joined in copies]


def _pack(tensor: Published, tensors: Tensors) -> NDArray[Any]:
    matrices = []
    for names in _experts(tensor):
        parts = [tensors[name] for name in names]
        if len({part.dtype for part in parts}) > 1:
            raise InputError("tensors", f"{tensor.name}: made of tensors of more than one dtype")
        if tensor.layout.joined == "interleaved":
            matrix = np.stack(parts, 1).reshape(-1, *parts[0].shape[1:])
        else:
            matrix = np.concatenate(parts)
        matrices.append(matrix.T if tensor.layout.transposed else matrix)
    return np.stack(matrices) if tensor.layout.stacked else matrices[0]


def _unpack(tensor: Published, array: NDArray[Any]) -> Iterator[tuple[str, NDArray[Any]]]:
    for names, matrix in zip(_experts(tensor), array if tensor.layout.stacked else array[None], strict=True):
        rows = matrix.T if tensor.layout.transposed else matrix
        if tensor.layout.joined == "interleaved":
            parts = [rows[start :: len(names)] for start in range(len(names))]
        else:
            parts = np.split(rows, np.cumsum([weight.shape[0] for weight in tensor.weights])[:-1])
        yield from zip(names, parts, strict=True)


def to_published(tensors: Tensors, spec: ModelSpec, model_type: str | None) -> Tensors:
    """Tensors as a family's checkpoints have them; None keeps the canonical names.

    Raises InputError for tensors that are not the decoder's, or whose dtypes differ where a family packs them into
    one, and KeyError for a family or a tensor that ``accounting.naming`` has no name for.
    """
    _check_arrays(tensors, _shapes(_layout(spec, None)))
    return {tensor.name: _pack(tensor, tensors) for tensor in _layout(spec, model_type)}


def from_published(tensors: Tensors, spec: ModelSpec, model_type: str | None) -> Tensors:
    """The way back from ``to_published``, with its errors: views of the arrays."""
    layout = _layout(spec, model_type)
    _check_arrays(tensors, _shapes(layout))
    return dict(part for tensor in layout for part in _unpack(tensor, tensors[tensor.name]))


def save(path: Path, tensors: Tensors, spec: ModelSpec, model_type: str | None = None) -> None:
    """Write a decoder's tensors into one safetensors file.

    Raises the errors of ``to_published``, and SafetensorError where the path cannot be written.
    """
    # safetensors writes the memory behind an array, whatever its strides (safetensors#825).
    arrays = {name: np.ascontiguousarray(array) for name, array in to_published(tensors, spec, model_type).items()}
    save_file(arrays, path, {"format": "pt"})  # as transformers writes it, which before version 5 asked for it


def load(path: Path, spec: ModelSpec, model_type: str | None = None) -> Tensors:
    """Read the tensors of a decoder from one safetensors file, none of them before all are known to be as expected.

    Raises InputError in one line that names the file and the tensor, and KeyError as ``to_published`` does.
    """
    layout = _layout(spec, model_type)
    # The library would wait for a pipe, misname a cut-off file and take the last of two tensors of one name.
    found = checkpoint.header(path).tensors
    held = {name: (tensor.shape, DTYPES.get(tensor.dtype, tensor.dtype)) for name, tensor in found.items()}
    _check(path, held, _shapes(layout))
    with safe_open(path, framework="numpy") as file:
        return from_published({name: file.get_tensor(name) for name in found}, spec, model_type)


def to_tree(tensors: Tensors) -> dict[str, Any]:
    """The nested dict whose paths are the dotted names: what ``jax_decoder.forward`` takes, under ``jax.jit``."""
    tree: dict[str, Any] = {}
    for name, array in tensors.items():
        *path, last = name.split(".")
        branch = tree
        for key in path:
            branch = branch.setdefault(key, {})
        branch[last] = array
    return tree


def from_tree(tree: Mapping[str, Any]) -> Tensors:
    """The leaves of a nested dict, of any array type, by their dotted paths."""
    tensors: Tensors = {}
    for name, branch in tree.items():
        if isinstance(branch, Mapping):
            tensors |= {f"{name}.{path}": array for path, array in from_tree(branch).items()}
        else:
            tensors[name] = np.asarray(branch)
    return tensors


def _held(decoder: "nn.Module") -> dict[str, "Tensor"]:
    """Parameters, and the buffers that are numbers: masks are not."""
    buffers = {name: buffer for name, buffer in decoder.named_buffers() if buffer.is_floating_point()}
    return {**dict(decoder.named_parameters()), **buffers}


def _dtype(tensor: "Tensor") -> str:
    return str(tensor.dtype).removeprefix("torch.")


def from_module(decoder: "nn.Module") -> Tensors:
    """Copies of the parameters and routers' biases of a ``torch_decoder.Decoder``."""
    tensors: Tensors = {}
    for name, tensor in _held(decoder).items():
        host, dtype = tensor.detach().cpu(), _dtype(tensor)
        # NumPy takes no bfloat16 from PyTorch, and float32 holds each of its values.
        tensors[name] = (host.float() if dtype == "bfloat16" else host).numpy().astype(dtype)
    return tensors


def fill(decoder: "nn.Module", tensors: Tensors) -> None:
    """Copy tensors into the parameters and routers' biases of a ``torch_decoder.Decoder``, which must have their dtype.

    Raises InputError, and copies nothing, where a name, a shape or a dtype is not the decoder's.
    """
    held = _held(decoder)
    _check_arrays(tensors, {name: tuple(tensor.shape) for name, tensor in held.items()})
    for name, tensor in held.items():
        if (given := tensors[name].dtype.name) != _dtype(tensor):
            raise InputError("tensors", f"{name}: expected {_dtype(tensor)} as the decoder has it, got {given}")
    # PyTorch takes no bfloat16 from NumPy, no other byte order, and no memory that runs backwards.
    wide = {
        name: np.float32 if array.dtype == bfloat16 else array.dtype.newbyteorder("=")
        for name, array in tensors.items()
    }
    values = {name: np.ascontiguousarray(array, wide[name]) for name, array in tensors.items()}
    for name, tensor in held.items():
        tensor.data.copy_(tensor.new_tensor(values[name]))
