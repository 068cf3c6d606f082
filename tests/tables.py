"""Published tables, as they are printed."""

import tomllib
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parents[1] / "fixtures" / "tables"


def columns(name):
    """The columns of a table under ``fixtures/tables``, each an array, by what they hold."""
    table = tomllib.loads((FOLDER / f"{name}.toml").read_text("utf-8"))
    return dict(zip(table["columns"], np.array(table["rows"], np.float64).T, strict=True))
