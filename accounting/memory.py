"""Bytes of weights and of the arrays that training keeps, folded over the counts."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from accounting.params import count
from accounting.spec import ModelSpec

#: Bytes that one scalar takes.
DTYPE_BYTES: Mapping[str, int] = MappingProxyType({"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingLayout:
    """Arrays of one scalar for each parameter that training keeps, by name, with their dtypes."""

    arrays: Mapping[str, str]

    def bytes_per_parameter(self) -> int:
        """Bytes that all arrays take for one parameter."""
        return sum(DTYPE_BYTES[dtype] for dtype in self.arrays.values())


LAYOUTS: Mapping[str, TrainingLayout] = MappingProxyType(
    {
        "adam_float32": TrainingLayout(
            arrays=dict.fromkeys(("weights", "gradients", "first_moment", "second_moment"), "float32")
        )
    }
)


def weight_bytes(spec: ModelSpec, dtype: str) -> int:
    """Bytes of the unique parameters, all in one dtype: logical storage, not a file's size.

    Raises KeyError for a dtype that ``DTYPE_BYTES`` does not have.
    """
    return count(spec).unique * DTYPE_BYTES[dtype]


def training_bytes(spec: ModelSpec, layout: str) -> int:
    """Bytes of the arrays of a layout of ``LAYOUTS``; activations and workspaces come on top.

    Raises KeyError for an unknown layout.
    """
    return count(spec).unique * LAYOUTS[layout].bytes_per_parameter()
