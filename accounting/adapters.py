"""Low-rank adapters on a decoder's matrices (LoRA, Hu et al., arXiv 2106.09685)."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from accounting.census import Census, Weight

DOWN, UP = "adapter_down", "adapter_up"


def adapt(census: Census, rank: int, targets: Iterable[str]) -> Census:
    """The census with a pair of matrices of ``rank`` beside each target of every block.

    ``targets`` are modules of a block by canonical name, such as ``attention.query``. W x
    becomes W x + U D x, with D (rank, in) and U (out, rank).

    Raises ValueError for a rank below 1 and for a target that no block has.
    """
    if rank < 1:
        raise ValueError(f"rank: expected at least 1, got {rank}")
    wanted = set(targets)
    met: set[str] = set()

    def weights() -> Iterator[Weight]:
        for weight in census.weights:
            yield weight
            stem = weight.name.removeprefix(f"blocks.{weight.layer}.").removesuffix(".weight")
            if stem in wanted and weight.multiplies:
                met.add(stem)
                module = weight.name.removesuffix(".weight")
                out, into = weight.shape
                yield replace(weight, name=f"{module}.{DOWN}.weight", shape=(rank, into))
                yield replace(weight, name=f"{module}.{UP}.weight", shape=(out, rank))

    adapted = replace(census, weights=tuple(weights()))
    if missing := wanted - met:
        raise ValueError(f"targets: no block has {', '.join(sorted(missing))}")
    return adapted


def is_adapter(weight: Weight) -> bool:
    """Whether a weight is one of an adapter: what LoRA trains."""
    return f".{DOWN}." in weight.name or f".{UP}." in weight.name
