"""The arrows between the packages never run back, and counting loads no framework."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: The third parties of accounting: of every room, and of some; observers import what they observe.
THIRD_PARTIES = {"click", "msgspec", "tabulate"}
OBSERVERS = "authorities"
MORE = {
    "descent.py": {"jax", "numpy"},
    "fits.py": {"numpy", "scipy"},
    "ledger": {"jinja2", "pytest"},
    "pictures.py": {"matplotlib", "numpy"},
    "routing.py": {"numpy"},
    "scaling.py": {"numpy"},
}
#: What rooms of the model know of accounting besides the spec: how a stranger's file is refused, and what tells of a
#: file's tensors. The study counts, fits and draws too: it is a program over both packages, and nothing observes it.
KNOWN = {
    "diets.py": ("accounting.files",),
    "study.py": tuple(f"accounting.{room}" for room in ("files", "flops", "params", "pictures", "scaling")),
    "tokens.py": ("accounting.files",),
    "training.py": ("accounting.files",),
    "weights.py": ("accounting.checkpoint", "accounting.files", "accounting.naming"),
}


def imports(path):
    """Names of the modules that a file imports, wherever it does."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def files(package):
    return [pytest.param(path, id=str(path.relative_to(ROOT))) for path in sorted((ROOT / package).rglob("*.py"))]


@pytest.mark.parametrize("path", files("accounting"))
def test_accounting_knows_neither_model_nor_tests(path):
    """What predicts never imports what is built; only observers import frameworks."""
    tops = {name.split(".")[0] for name in imports(path)}
    assert not tops & {"model", "tests"}
    room = path.relative_to(ROOT / "accounting").parts[0]
    if room != OBSERVERS:
        assert tops <= {"accounting", *sys.stdlib_module_names, *THIRD_PARTIES, *MORE.get(room, ())}


@pytest.mark.parametrize("path", files("model"))
def test_model_knows_the_spec_and_its_framework(path):
    """What is built never imports what predicts: of accounting it knows the spec, and some rooms a little more."""
    known = ("accounting.spec", *KNOWN.get(path.name, ()))
    ours = {name for name in imports(path) if name.split(".")[0] in ("accounting", "tests")}
    assert all(name == "accounting" or name.startswith(known) for name in ours)
