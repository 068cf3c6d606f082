"""The verdict follows from what a test hands over, and it must be the recorded one."""

from typing import Any

import pytest

Fields = dict[str, Any]

NUMBER: Fields = {"printed": ["4.72M"]}
PAIR: Fields = {"printed": ["2,424", "32%"]}
QUALIFIED: Fields = {"verdict": "qualified", "condition": "The head is tied."}
REFUTED: Fields = {"verdict": "refuted", "right": "It is five million."}
PINNED = REFUTED | NUMBER | {"right_printed": ["5.00M"]}
CITED: Fields = {"verdict": "cited", "source": "A paper, table 3"}
GPU: Fields = {"needs": ["cpu", "gpu"]}
DATA: Fields = {"needs": ["data:text", "data:runs"]}

PASSING: dict[str, tuple[str, Fields, str]] = {
    "number": ("confirmed", NUMBER, "claim.measured(4_723_000)"),
    "number-observed": ("confirmed", NUMBER, "claim.measured(4_723_000, observed=4_723_000.0)"),
    "numbers": ("confirmed", PAIR, "claim.measured([2424, 0.3249], observed=(2424, 0.3249))"),
    "statement": ("confirmed", {}, "claim.holds(1 < 2, '1 < 2')"),
    "numpy-truth": ("confirmed", {}, "import numpy; claim.holds(numpy.float64(1) < 2, '1 < 2')"),
    "qualified-number": ("qualified", QUALIFIED | NUMBER, "claim.measured(4_723_000); claim.otherwise(5_000_000)"),
    "qualified-statement": ("qualified", QUALIFIED, "claim.holds(True, '3 = 3'); claim.otherwise(False, '4')"),
    "refuted-number": ("refuted", PINNED, "claim.measured(5_001_000); claim.right(5_001_000, observed=5_001_000)"),
    "refuted-one-of-two": ("refuted", REFUTED | PAIR, "claim.measured((2424, 0.33))"),
    "refuted-statement": ("refuted", REFUTED, "claim.holds(False, '3 heads')"),
    "right-beside-confirmed": (
        "confirmed",
        NUMBER | {"right_printed": ["7"]},
        "claim.measured(4.72e6); claim.right(7)",
    ),
    "cited": ("cited", CITED | NUMBER, "claim.cited()"),
    "unrun": ("unrun", GPU, "claim.unrun('gpu')"),
    "unrun-recorded": ("unrun", GPU | {"verdict": "unrun", "run": "tox run -e gpu"}, "claim.unrun('gpu')"),
    "unrun-data": ("unrun", DATA, "claim.data('text/a.txt', need='data:text')"),
}

FAILING: dict[str, tuple[Fields, str, str]] = {
    "one-unit-off": (NUMBER, "claim.measured(4_733_000)", "the recorded verdict is not the one that its test reached"),
    "second-number-off": (PAIR, "claim.measured((2424, 0.33))", "the recorded verdict is not the one"),
    "statement-false": ({}, "claim.holds(False, '3')", "the recorded verdict is not the one"),
    "observed-differs": (NUMBER, "claim.measured(4_723_000, observed=4_723_001)", "prediction and observation differ"),
    "too-few-numbers": (PAIR, "claim.measured(2424)", "1 numbers were handed over for 2 printed: 2,424; 32%"),
    "truth-as-number": (NUMBER, "claim.measured(True)", "True is a truth value, not a number"),
    "not-finite": (NUMBER, "claim.measured(float('nan'))", "nan is not finite"),
    "no-printed": ({}, "claim.measured(3)", "its record prints no number"),
    "number-as-truth": ({}, "claim.holds(3, '3')", "whether it holds is a bool, not 3"),
    "nothing-seen": ({}, "claim.holds(True, ' ')", "needs the words or numbers that were seen"),
    "never-compared": (NUMBER, "claim.holds(True, '4.72M')", "its printed numbers were never compared"),
    "no-picture": ({}, "claim.picture('line', 'A line')", "takes the text of an SVG file and a caption"),
    "picture-alone": ({}, "claim.picture('<svg/>', 'A line')", "its test handed nothing over"),
    "nothing": (NUMBER, "pass", "its test handed nothing over"),
    "never-pinned": (PINNED, "claim.measured(5e6)", "its right value was never pinned"),
    "pinned-wrong": (PINNED, "claim.measured(5e6); claim.right(6e6)", "is recorded as 5.00M, not 6,000,000"),
    "pinned-alone": (PINNED, "claim.right(5e6)", "its test handed nothing over"),
    "nothing-to-pin": (NUMBER, "claim.right(5e6)", "its record has no right_printed"),
    "not-refuted": (PINNED, "claim.measured(4.72e6); claim.right(5e6)", "the recorded verdict is not the one"),
    "no-otherwise": (QUALIFIED | NUMBER, "claim.measured(4.72e6)", "nothing shows that it fails without its condition"),
    "otherwise-same": (QUALIFIED | NUMBER, "claim.otherwise(4.72e6)", "it holds just the same without its condition"),
    "otherwise-true": (QUALIFIED, "claim.otherwise(True, '3')", "it holds just the same without its condition"),
    "otherwise-alone": (QUALIFIED, "claim.otherwise(False)", "its test handed nothing over"),
    "otherwise-unasked": (NUMBER, "claim.otherwise(5e6)", "is for a qualified claim, and this one is confirmed"),
    "qualified-false": (QUALIFIED, "claim.holds(False, '3'); claim.otherwise(False)", "the recorded verdict is not"),
    "cited-unrecorded": (NUMBER, "claim.cited()", "the recorded verdict is not the one"),
    "cited-measured": (CITED, "claim.cited(); claim.holds(True, '3')", "what can be measured is not merely cited"),
    "open": ({"verdict": "open"}, "claim.holds(True, '3')", "it is open: record the verdict that its test reaches"),
    "open-unrun": ({"verdict": "open"} | GPU, "claim.unrun('gpu')", "it is open: record the verdict"),
    "unrun-cpu": ({}, "claim.unrun('cpu')", "'cpu' is no reason to leave it unrun: it needs cpu"),
    "unrun-other-need": (GPU, "claim.unrun('long-training')", "'long-training' is no reason to leave it unrun"),
    "recorded-unrun-but-ran": (
        GPU | {"verdict": "unrun", "run": "tox run -e gpu"},
        "claim.holds(True, '3')",
        "the recorded verdict is not the one",
    ),
    "data-of-which-need": (DATA, "claim.data('a.txt')", "say which of its needs 'a.txt' is"),
    "data-without-need": ({}, "claim.data('a.txt')", "say which of its needs 'a.txt' is"),
    "skip": (GPU, "pytest.skip('no GPU')", "its test was skipped"),
    "importorskip": (GPU, "pytest.importorskip('no_such_module')", "its test was skipped"),
    "xfail": (GPU, "pytest.xfail('known')", "a test of a claim is never expected to fail"),
    "error": (NUMBER, "claim.measured(4.72e6); 1 / 0", "ZeroDivisionError: division by zero"),
}


@pytest.mark.parametrize("name", PASSING)
def test_verdict(project: Any, name: str) -> None:
    """Evidence that bears the record out passes, and the ledger has the verdict."""
    verdict, fields, body = PASSING[name]
    result = project.take(project.record(**fields), body)
    assert result.ret in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    assert project.states() == {"demo.a.one": verdict}


@pytest.mark.parametrize("name", FAILING)
def test_no_verdict(project: Any, name: str) -> None:
    """Evidence that does not bear the record out fails the test itself, with the reason."""
    fields, body, reason = FAILING[name]
    result = project.take(project.record(**fields), body)
    result.assert_outcomes(failed=1)
    assert project.states() == {"demo.a.one": "failed"}
    assert reason in project.ledger()["claims"][0]["reason"]


def test_failure_shows_both_sides(project: Any) -> None:
    """A wrong verdict shows what was printed and measured, and the verdicts recorded and derived."""
    result = project.take(project.record(printed=["4.72M"]), "claim.measured(4_733_000)")
    result.stdout.fnmatch_lines(
        [
            "claim demo.a.one: the recorded verdict is not the one that its test reached",
            "  says       The model has 4.72M parameters.",
            "  printed    4.72M",
            "  measured   4,733,000",
            "  difference +1.30 units of the last printed place",
            "  recorded   confirmed",
            "  derived    refuted",
        ]
    )


def test_failure_points_at_the_test(project: Any) -> None:
    """The traceback of a refused comparison ends in the test."""
    result = project.take(project.record(printed=["4.72M"]), "claim.measured(1, observed=2)")
    result.stdout.fnmatch_lines(
        [">*claim.measured(1, observed=2)", "E  *predicted 1", "E  *observed  2", "test_demo.py:7: *"]
    )
    result.stdout.no_fnmatch_line("*check.py*")


def test_unrun_says_how_to_run(project: Any) -> None:
    """A claim that was not run names itself, what it lacks and the command that runs it."""
    record = project.record(needs=["gpu"], verdict="unrun", run="tox run -e gpu")
    result = project.take(record, "claim.unrun('gpu')", "-rs")
    result.stdout.fnmatch_lines(["SKIPPED*demo.a.one needs gpu, which this run lacks; to run it: tox run -e gpu"])


@pytest.mark.parametrize(
    "mark", ["skip(reason='later')", "skipif(True, reason='later')", "xfail(reason='later')", "xfail(run=False)"]
)
def test_marked_away(project: Any, mark: str) -> None:
    """A claim cannot be skipped or expected to fail by a mark."""
    project.claims(project.record())
    result = project.run(f"@pytest.mark.{mark}\n@pytest.mark.claim('demo.a.one')\ndef test_one(claim): assert 0")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert project.states() == {"demo.a.one": "failed"}


def test_fixture_unused(project: Any) -> None:
    """A marked test that never asks for the fixture hands nothing over."""
    project.claims(project.record())
    project.run("@pytest.mark.claim('demo.a.one')\ndef test_one(): pass").assert_outcomes(failed=1)


def test_fixture_unmarked(project: Any) -> None:
    """The fixture is for tests that take a claim."""
    project.claims(project.record(verdict="open"))
    project.run("def test_one(claim): pass").assert_outcomes(errors=1)


def test_unrun_in_a_fixture(project: Any) -> None:
    """A fixture may find that the run lacks what the claim needs."""
    project.claims(project.record(needs=["gpu"]))
    project.run(
        "@pytest.fixture\ndef device(claim): claim.unrun('gpu')\n"
        "@pytest.mark.claim('demo.a.one')\ndef test_one(claim, device): claim.holds(True, 'seen')"
    ).assert_outcomes(skipped=1)
    assert project.states() == {"demo.a.one": "unrun"}


def test_error_after_the_test(project: Any) -> None:
    """A claim whose test cannot be torn down has failed."""
    project.claims(project.record())
    project.run(
        "@pytest.fixture\ndef device():\n    yield\n    raise OSError('lost')\n"
        "@pytest.mark.claim('demo.a.one')\ndef test_one(claim, device): claim.holds(True, 'seen')"
    ).assert_outcomes(passed=1, errors=1)
    assert project.states() == {"demo.a.one": "failed"}


def test_data(project: Any) -> None:
    """Data is found under the folder of --ledger-data and nowhere else; what is absent leaves the claim unrun."""
    record = project.record(needs=["data:text"])
    project.write("data/text/a.txt", "words")
    project.write("secret.txt", "words")
    body = "claim.holds(claim.data('text/a.txt').read_text() == 'words', 'words')"
    project.take(record, body, "--ledger-data=data")
    assert project.states() == {"demo.a.one": "confirmed"}
    project.take(record, body.replace("a.txt", "b.txt"), "--ledger-data=data").assert_outcomes(skipped=1)
    assert project.states() == {"demo.a.one": "unrun"}
    for outside in ("../secret.txt", str(project.path / "secret.txt")):
        result = project.take(record, body.replace("text/a.txt", outside), "--ledger-data=data")
        result.stdout.fnmatch_lines(["*is outside the data folder"])
    assert project.take(record, body, "--ledger-data=nowhere").ret == pytest.ExitCode.USAGE_ERROR
