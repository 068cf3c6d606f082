"""The gate before tests that need a GPU: shut where there is none, open where there is one."""

from pathlib import Path

import pytest
import torch

TESTS = """
pytestmark = pytest.mark.gpu

@pytest.mark.claim("demo.a.one")
def test_claim(claim):
    claim.holds(True, "seen")

def test_of_no_claim():
    pass
"""


@pytest.fixture
def gated(project):
    """A project with this one's conftest and a claim that needs a GPU."""
    project.write("conftest.py", (Path(__file__).parents[2] / "conftest.py").read_text(encoding="utf-8"))
    project.claims(project.record(needs=["gpu"]))
    return project


@pytest.fixture(params=[False, True], ids=["no-gpu", "gpu"])
def present(request, monkeypatch):
    """Whether torch sees a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: request.param)
    return request.param


@pytest.mark.parametrize("arguments", [[], ["-m", "claim"]], ids=" ".join)
def test_a_run_that_does_not_ask_for_gpu(gated, present, arguments):
    """The claim is tested where it can be and unrun by name where it cannot; what takes no claim is left out."""
    result = gated.run(TESTS, *arguments)
    assert result.ret == pytest.ExitCode.OK
    result.assert_outcomes(passed=int(present), skipped=int(not present), deselected=1)
    assert gated.states() == {"demo.a.one": "confirmed" if present else "unrun"}


@pytest.mark.parametrize("expression", ["gpu", "claim or gpu"])
def test_a_run_that_asks_for_gpu(gated, present, expression):
    """Both tests run, and without a device both fail: neither is skipped."""
    result = gated.run(TESTS, "-m", expression)
    result.assert_outcomes(passed=2 if present else 0, failed=0 if present else 2)
    assert gated.states() == {"demo.a.one": "confirmed" if present else "failed"}
    if not present:
        result.stdout.fnmatch_lines(["it needs a GPU, and torch sees none"])


def test_a_run_without_gpu_tests(gated, present):
    """An expression that excludes them leaves out both."""
    gated.run(TESTS, "-m", "not gpu").assert_outcomes(deselected=2)
