"""Plugins of the whole suite, the Hypothesis profiles, and the gate before tests that need a GPU."""

import os
import re

import pytest
from hypothesis import settings

pytest_plugins = ["accounting.ledger.plugin", "pytester"]

settings.register_profile("dev", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.register_profile("thorough", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a run keep what its device measured."""
    record = "append what the gpu tests measure to fixtures/baselines/DEVICE/steps.json"
    parser.addoption("--record", action="store_true", help=record)


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", "gpu: the test needs a CUDA device")


def _asks_for_gpu(config: pytest.Config) -> bool:
    return re.search(r"\bgpu\b", config.option.markexpr) is not None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what needs a GPU and takes no claim, unless the run asks for it: nobody would miss it."""
    if _asks_for_gpu(config):
        return
    wanted: list[pytest.Item] = []
    others: list[pytest.Item] = []
    for item in items:
        other = item.get_closest_marker("gpu") and not item.get_closest_marker("claim")
        (others if other else wanted).append(item)
    config.hook.pytest_deselected(items=others)
    items[:] = wanted


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Without a device, fail a gpu test in a run that asks for it, and elsewhere leave its claim unrun."""
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    if torch.cuda.is_available():
        return
    if _asks_for_gpu(item.config):
        pytest.fail("it needs a GPU, and torch sees none", pytrace=False)
    item.funcargs["claim"].unrun("gpu")
