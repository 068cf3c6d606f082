"""Bytes of the tensors that torch holds: for a backward pass, in an optimizer, in a cache, at a device's peak."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers import Cache

from accounting.authorities import UncountedError


@dataclass(frozen=True)
class Saved:
    """What one forward pass keeps for its backward pass, each storage once.

    ``storages``: the bytes of each that is no leaf's, in the order in which they were kept, under
    the shape in which it was kept first. ``leaf_bytes``: of those that were there before:
    parameters, buffers and inputs.
    """

    storages: tuple[tuple[tuple[int, ...], int], ...]
    leaf_bytes: int

    @property
    def bytes(self) -> int:
        """Bytes that the pass made and keeps."""
        return sum(size for _, size in self.storages)


def saved(run: Callable[[], Tensor], leaves: Iterable[Tensor]) -> Saved:
    """What autograd keeps of ``run``; ``leaves`` were there before it: parameters, buffers, inputs.

    A tensor is the storage behind it, whatever view of it is kept. The result of ``run`` stays
    alive until the sum is taken.
    """
    before = {leaf.untyped_storage()._cdata for leaf in leaves}
    seen: dict[int, tuple[tuple[int, ...], int]] = {}
    kept: list[Tensor] = []  # alive, so that no storage's address is used twice

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen[storage._cdata] = tuple(tensor.shape), storage.nbytes()
            kept.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    made = tuple(entry for key, entry in seen.items() if key not in before)
    del result
    return Saved(made, sum(size for key, (_, size) in seen.items() if key in before))


@dataclass(frozen=True)
class OptimizerState:
    """Bytes of an optimizer's arrays by name, and of its scalars, such as the count of steps."""

    arrays: dict[str, int] = field(default_factory=dict)
    scalars: int = 0


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: its share of a distributed one, all of any other."""
    share: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return share


def optimizer_state(optimizer: torch.optim.Optimizer) -> OptimizerState:
    """What this rank's optimizer holds after a step: arrays of a parameter's shape, and scalars apart."""
    arrays: dict[str, int] = {}
    scalars = 0
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                arrays[name] = arrays.get(name, 0) + local(value).nbytes
            elif isinstance(value, Tensor):
                scalars += value.nbytes
    return OptimizerState(arrays, scalars)


def cache_bytes(cache: Cache) -> tuple[int, ...]:
    """Bytes of keys and values in each layer of one of Hugging Face's caches.

    UncountedError for a layer that keeps something else.
    """
    sizes = []
    for layer in cache.layers:
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if not isinstance(keys, Tensor) or not isinstance(values, Tensor):
            raise UncountedError(f"a {type(layer).__name__} keeps something else than keys and values")
        sizes.append(keys.nbytes + values.nbytes)
    return tuple(sizes)


def peak(run: Callable[[], Any]) -> int:
    """The most bytes that ``run`` holds on the current CUDA device beyond what was there; RuntimeError without one."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
