"""Whole runs: which claims need a test, what is selected, and that workers change nothing."""

from typing import Any

import pytest

TESTS = """
@pytest.mark.parametrize("measured", [case("demo.a.one", 4_723_000), case("demo.a.two", 5_000_000)])
def test_numbers(claim, measured):
    claim.measured(measured)

@pytest.mark.claim("demo.a.one")
def test_again(claim):
    claim.measured(4_724_000)

@pytest.mark.claim("demo.b.gpu")
def test_gpu_small(claim):
    claim.holds(True, "small")

@pytest.mark.claim("demo.b.gpu")
def test_gpu_large(claim):
    claim.unrun("gpu")

@pytest.mark.claim("demo.b.bad")
def test_bad(claim):
    claim.holds(False, "three")

def test_of_no_claim():
    pass
"""
STATES = {
    "demo.a.one": "confirmed",
    "demo.a.two": "refuted",
    "demo.b.gpu": "unrun",
    "demo.b.bad": "failed",
    "demo.c.open": None,
}


@pytest.fixture
def demo(project: Any) -> Any:
    """A project whose claims end in every way."""
    project.claims(
        project.record("demo.a.one", printed=["4.72M"]),
        project.record("demo.a.two", printed=["4.72M"], verdict="refuted", right="Five million."),
        project.record("demo.b.gpu", needs=["gpu"]),
        project.record("demo.b.bad"),
        project.record("demo.c.open", verdict="open"),
    )
    return project


def test_several_tests_of_one_claim(demo: Any) -> None:
    """Tests of one claim are merged: one failure fails it, and a part that was not run leaves it unrun."""
    demo.run(TESTS).assert_outcomes(passed=5, skipped=1, failed=1)
    assert demo.states() == STATES
    first = demo.ledger()["claims"][0]
    assert first["tests"] == ["test_demo.py::test_again", "test_demo.py::test_numbers[demo.a.one]"]
    assert first["measured"] == ["4,724,000", "4,723,000"]
    assert first["difference"] == ["+0.40", "+0.30"]


def test_workers(demo: Any) -> None:
    """The ledger of a run with workers is the ledger of a run without."""
    demo.run(TESTS)
    alone = demo.ledger()
    result = demo.run(TESTS, "-n2")
    result.stdout.fnmatch_lines(["*2 workers*"])
    assert demo.ledger() == alone


def test_worker_dies(demo: Any) -> None:
    """A claim whose worker dies has failed."""
    demo.claims(demo.record())
    source = "@pytest.mark.claim('demo.a.one')\ndef test_one(claim):\n    claim.holds(True, 'seen')\n    os._exit(1)"
    assert demo.run(source, "-n1").ret == pytest.ExitCode.TESTS_FAILED
    assert demo.states() == {"demo.a.one": "failed"}
    assert demo.ledger()["claims"][0]["reason"] == "its test did not finish"


@pytest.mark.parametrize(
    ("marker", "message"),
    [
        ("claim('demo.a.none')", "no claim has the id 'demo.a.none'"),
        ("claim()", "the claim marker takes one id: claim('document.some.id')"),
        ("claim('demo.a.one', 'demo.a.two')", "the claim marker takes one id: *"),
        ("claim(id='demo.a.one')", "the claim marker takes one id: *"),
        ("claim('demo.a.two')\n@pytest.mark.claim('demo.a.one')", "a test takes one claim, and this one has 2 markers"),
    ],
)
def test_bad_marker(demo: Any, marker: str, message: str) -> None:
    """A marker that names no claim, or more than one, stops the collection and names the test."""
    result = demo.run(f"@pytest.mark.{marker}\ndef test_one(claim): pass")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: test_demo.py::test_one: {message}"])


def test_bad_marker_in_a_worker(demo: Any) -> None:
    """With workers the controller says so just the same."""
    result = demo.run("@pytest.mark.claim('demo.a.none')\ndef test_one(claim): pass", "-n1")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: test_demo.py::test_one: no claim has the id 'demo.a.none'"])


PASSING = "@pytest.mark.claim('demo.a.one')\ndef test_one(claim): claim.measured(4_723_000)\ndef test_two(): pass"


@pytest.mark.parametrize("arguments", [[], ["-m", "claim"], ["--ff"], ["-n1"]], ids=" ".join)
def test_verdict_without_a_test(demo: Any, arguments: list[str]) -> None:
    """A run over everything fails, though each test passes, when a verdict has no test; an open claim needs none."""
    result = demo.run(PASSING, *arguments)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        ["no test: demo.a.two, demo.b.gpu, demo.b.bad", "5 claims: *; 3 with a verdict but no test"]
    )


@pytest.mark.parametrize("arguments", [[], ["-n1"]], ids=" ".join)
def test_a_skip_besides_the_claims_is_shown(demo: Any, arguments: list[str]) -> None:
    """A test of no claim may be skipped, and the ledger says how many were and why."""
    skips = "@pytest.mark.parametrize('i', [1, 2])\ndef test_three(i): pytest.skip('needs a moon')"
    result = demo.run(f"{PASSING}\n{skips}", *arguments)
    result.stdout.fnmatch_lines(["skipped  2 tests of no claim: needs a moon"])


def test_no_test_at_all(demo: Any) -> None:
    """A run that collects nothing has tested no verdict."""
    assert demo.run("").ret == pytest.ExitCode.TESTS_FAILED


@pytest.mark.parametrize(
    "arguments",
    [
        ["-k", "one"],
        ["-m", "not slow"],
        ["--claim=demo.a.one"],
        ["--deselect=test_demo.py::test_two"],
        ["--ignore=other"],
        ["--ignore-glob=other*"],
        ["--lf"],
        ["--sw"],
        ["--collect-only"],
        ["test_demo.py"],
    ],
    ids=" ".join,
)
def test_partial_run(demo: Any, arguments: list[str]) -> None:
    """A run over a part asks only for the verdicts that it tests."""
    demo.write("pytest.toml", (demo.path / "pytest.toml").read_text() + 'markers = ["slow"]\n')
    assert demo.run(PASSING, *arguments).ret == pytest.ExitCode.OK


def test_stopped_run(demo: Any) -> None:
    """A run that stops at the first failure is a part."""
    result = demo.run("def test_none(): assert 0\n" + PASSING, "-x")
    result.stdout.no_fnmatch_line("no test: *")


def test_one_claim(demo: Any) -> None:
    """--claim runs the tests of the claims that match, and may be repeated."""
    demo.run(TESTS, "--claim=demo.a.*").assert_outcomes(passed=3, deselected=4)
    demo.run(TESTS, "--claim", "demo.a.one", "--claim", "demo.b.gpu").assert_outcomes(passed=3, skipped=1, deselected=3)
    demo.run(TESTS, "-n1", "--claim=demo.a.two").assert_outcomes(passed=1)


def test_one_claim_is_shown_in_full(demo: Any) -> None:
    """With --claim the ledger shows the claim itself, and nothing of the groups that were not asked for."""
    result = demo.run(TESTS, "--claim=demo.a.two")
    result.stdout.fnmatch_lines(
        [
            "claim demo.a.two: refuted",
            "  says       The model has 4.72M parameters.",
            "  printed    4.72M",
            "  measured   5,000,000",
            "  difference +28.00 units of the last printed place",
            "  right      Five million.",
            "1 claim: 1 refuted",
        ]
    )
    result.stdout.no_fnmatch_line("untouched*")
    result.stdout.no_fnmatch_line("refuted *")
    result = demo.run(TESTS, "--claim=demo.b.*")
    result.stdout.fnmatch_lines(
        ["claim demo.b.gpu: unrun: gpu", "claim demo.b.bad: failed: *", "  recorded   confirmed"]
    )


def test_many_claims(project: Any) -> None:
    """A selection of many shows ten in full, and the others by group."""
    ids = [f"demo.a.c{number}" for number in range(12)]
    project.claims(*(project.record(id) for id in ids), project.record("demo.z.open", verdict="open"))
    cases = ", ".join(f"case({id!r})" for id in ids)
    source = f"@pytest.mark.parametrize((), [{cases}])\ndef test_all(claim): claim.holds(True, 'seen')"
    result = project.run(source, "--claim=demo.*")
    assert sum(line.startswith("claim demo.") for line in result.outlines) == 10
    result.stdout.fnmatch_lines(["claim demo.a.c9: confirmed", "demo.a  2=", "13 claims: 12 confirmed, 1 open"])


def test_one_claim_leaves_the_page_alone(demo: Any) -> None:
    """A page of a part does not replace the page of everything."""
    demo.run(TESTS)
    before = demo.ledger(), (demo.path / "ledger.html").read_bytes()
    demo.run(TESTS, "--claim=demo.a.two").stdout.fnmatch_lines(["not written: --claim selects a part"])
    assert (demo.ledger(), (demo.path / "ledger.html").read_bytes()) == before


@pytest.mark.parametrize(
    ("glob", "message"),
    [
        ("demo.c.open", "demo.c.open is open: no test takes it yet"),
        ("demo.c*", "demo.c.open is open: no test takes it yet"),
        ("demo.d.*", "demo.d.one and 1 more are open: no test takes them yet"),
    ],
)
def test_open_claim_alone(demo: Any, glob: str, message: str) -> None:
    """A selection of nothing but open claims is an error that says so."""
    demo.claims(*(demo.record(id, verdict="open") for id in ("demo.c.open", "demo.d.one", "demo.d.two")))
    result = demo.run("raise SystemError('collected')", f"--claim={glob}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: --claim {glob.replace('*', '[*]')}: {message}"])


@pytest.mark.parametrize("arguments", [["--claim=demo.a.*"], ["--claim=demo.[ac].*", "-n1"], ["--claim=demo.a.two"]])
def test_selected_verdict_without_a_test(demo: Any, arguments: list[str]) -> None:
    """A selection fails when one of its verdicts has no test, and only for those."""
    result = demo.run(PASSING, *arguments)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["no test: demo.a.two", "* claim*: *; 1 with a verdict but no test"])


def test_claim_that_is_misspelt(demo: Any) -> None:
    """An unknown id brings the closest ones."""
    result = demo.run(TESTS, "--claim=demo.a.tow")
    result.stderr.fnmatch_lines(["ERROR: --claim demo.a.tow: no claim has such an id; the closest: demo.a.two, *"])


def test_claim_that_matches_nothing(demo: Any) -> None:
    """A pattern that matches no claim is an error."""
    result = demo.run(TESTS, "--claim=demo.z*")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --claim demo.z[*]: no claim has such an id"])


def test_another_register(project: Any) -> None:
    """--ledger-claims names the register of another project, in place of the configured one."""
    project.claims(project.record("mine.x.y"), document="mine", folder="elsewhere")
    source = "@pytest.mark.claim('mine.x.y')\ndef test_one(claim): claim.holds(True, 'seen')"
    assert project.run(source, "--ledger-claims=elsewhere").ret == pytest.ExitCode.OK
    assert project.states() == {"mine.x.y": "confirmed"}


def test_inert(pytester: pytest.Pytester) -> None:
    """Without a register the plugin does nothing, whether a conftest or an option names it."""
    pytester.makepyfile("def test_one(): pass")
    result = pytester.runpytest_inprocess("-p", "accounting.ledger.plugin", "--strict-markers")
    assert result.ret == pytest.ExitCode.OK
    result.stdout.no_fnmatch_line("*ledger*===*")
    result = pytester.runpytest_inprocess("-p", "accounting.ledger.plugin", "--ledger=ledger.html")
    result.stderr.fnmatch_lines(["ERROR: --claim and --ledger need a register: *"])


@pytest.mark.parametrize(
    ("marker", "arguments", "needs"),
    [
        ("", [], "a register (--ledger-claims=DIR or ini ledger_claims) and the marker (@pytest.mark.claim(*))"),
        ("@pytest.mark.claim('demo.a.one')", [], "a register (--ledger-claims=DIR or ini ledger_claims)"),
        ("", ["--ledger-claims=claims"], "the marker (@pytest.mark.claim(*))"),
    ],
)
def test_fixture_without_its_needs(project: Any, marker: str, arguments: list[str], needs: str) -> None:
    """A test that asks for a claim where none can be had learns what is missing and how to give it."""
    project.write("pytest.toml", "[pytest]")
    project.claims(project.record())
    project.write("test_one.py", f"import pytest\n{marker}\ndef test_one(claim): pass")
    result = project.plain("test_one.py", *arguments)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines([f"*UsageError: test_one.py::test_one: the fixture 'claim' needs {needs}"])
