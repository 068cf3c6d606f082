"""Parameters, counted: folds over the census, each count under its own name.

"Parameters" is at least seven numbers, so nothing here returns "the" count.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from accounting.census import Census, Part, Weight, of
from accounting.spec import ModelSpec

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Scalars, as exact integers.

    ``unique``: scalars in distinct parameters, a tied table once, buffers not counted.
    ``stored``: unique, and the persistent buffers that a checkpoint must hold.
    ``embedding``: the token table and the learned-position table; an untied head is not one.
    ``non_embedding``: unique less embedding less an untied head (the N of Kaplan et al.,
    arXiv 2001.08361, section 2.1, with norms and biases).
    ``matmul``: weights that some token is multiplied by, all experts among them.
    ``active``, ``matmul_active``: unique and matmul with k of E experts.
    """

    unique: int
    stored: int
    embedding: int
    non_embedding: int
    matmul: int
    active: int
    matmul_active: int


def count(model: ModelSpec | Census) -> Parameters:
    """All counts of a decoder, or of the tensors in a census."""
    census = of(model)
    weights = census.weights
    unique = sum(weight.scalars for weight in weights)
    embedding = sum(weight.scalars for weight in weights if weight.part in (Part.EMBEDDING, Part.POSITION))
    head = sum(weight.scalars for weight in weights if weight.part is Part.HEAD)
    return Parameters(
        unique=unique,
        stored=unique + sum(buffer.scalars for buffer in census.buffers),
        embedding=embedding,
        non_embedding=unique - embedding - head,
        matmul=sum(weight.scalars for weight in weights if weight.multiplies),
        active=sum(weight.active_scalars for weight in weights),
        matmul_active=sum(weight.active_scalars for weight in weights if weight.multiplies),
    )


def by_part(model: ModelSpec | Census) -> dict[Part, Parameters]:
    """The counts of each part that the decoder has; they add up to ``count``."""
    return _split(model, lambda tensor: tensor.part)


def by_layer(model: ModelSpec | Census) -> dict[int | None, Parameters]:
    """The counts of each block, and under None of what stands outside the blocks."""
    return _split(model, lambda tensor: tensor.layer)


def _split(model: ModelSpec | Census, key: Callable[[Weight], Key]) -> dict[Key, Parameters]:
    census = of(model)
    groups: dict[Key, tuple[list[Weight], list[Weight]]] = {}
    for tensors, kind in ((census.weights, 0), (census.buffers, 1)):
        for tensor in tensors:
            groups.setdefault(key(tensor), ([], []))[kind].append(tensor)
    return {
        value: count(Census(weights=tuple(weights), buffers=tuple(buffers), products=()))
        for value, (weights, buffers) in groups.items()
    }
