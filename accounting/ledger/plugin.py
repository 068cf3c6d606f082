"""The pytest plugin: tests take claims, and a run must reach the verdicts that are recorded."""

import dataclasses
import difflib
import importlib.util
import os
from collections import Counter
from collections.abc import Generator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from accounting.ledger import page, report
from accounting.ledger.check import ClaimCheck
from accounting.ledger.register import Claim, Register, RegisterError, load
from accounting.ledger.tally import Entry, Outcome, tally

_CLAIM = pytest.StashKey[Claim]()
_CHECK = pytest.StashKey[ClaimCheck]()
_DATA = pytest.StashKey[Path | None]()
_PROPERTY = "accounting.ledger"
_RUN = "ledger-run"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ledger", "claims and their ledger")
    group.addoption("--ledger", metavar="PATH", help="write the ledger to PATH, an HTML page, and its JSON beside it")
    group.addoption("--ledger-claims", metavar="DIR", help="folder of the register (default: ledger_claims of the ini)")
    group.addoption("--ledger-data", metavar="DIR", help="folder of data that cannot ship; write --ledger-data=DIR")
    group.addoption(
        "--claim",
        metavar="GLOB",
        action="append",
        default=[],
        help="run only the tests of the claims whose id matches; may be repeated",
    )
    parser.addini("ledger_claims", "folder of the register, relative to rootdir", type="string", default="")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "claim(id): the test takes the claim with this id")
    folder = _register_folder(config)
    if folder is None:
        if config.option.claim or config.option.ledger:
            raise pytest.UsageError("--claim and --ledger need a register: --ledger-claims=DIR or ledger_claims")
        return
    try:
        register = load(folder)
    except RegisterError as error:
        raise pytest.UsageError(str(error)) from error
    option = config.option
    for glob in option.claim:
        _check_selection(glob, register)
    if option.ledger and Path(option.ledger).suffix != ".html":
        raise pytest.UsageError(
            f"--ledger {option.ledger}: the page's name must end in .html; its JSON is written beside it"
        )
    if option.ledger and importlib.util.find_spec("jinja2") is None:
        raise pytest.UsageError("--ledger needs jinja2: pip install 'sixnd[ledger]'")
    data = config.invocation_params.dir / option.ledger_data if option.ledger_data else None
    if data is not None and not data.is_dir():
        raise pytest.UsageError(f"--ledger-data {option.ledger_data}: no such folder")
    config.stash[_DATA] = data
    config.pluginmanager.register(LedgerRun(config, register), _RUN)


@pytest.fixture
def claim(request: pytest.FixtureRequest) -> ClaimCheck:
    """The claim that the test takes; see `accounting.ledger.ClaimCheck`."""
    record = request.node.stash.get(_CLAIM, None)
    if record is None:
        needs = {
            "a register (--ledger-claims=DIR or ini ledger_claims)": request.config.pluginmanager.has_plugin(_RUN),
            "the marker (@pytest.mark.claim('document.some.id'))": request.node.get_closest_marker("claim"),
        }
        lacking = " and ".join(need for need, given in needs.items() if not given)
        raise pytest.UsageError(f"{request.node.nodeid}: the fixture 'claim' needs {lacking}")
    check = request.node.stash[_CHECK] = ClaimCheck(record, request.config.stash[_DATA])
    return check


class LedgerRun:
    """The hooks of one run with a register, in a worker as well as in the only process."""

    def __init__(self, config: pytest.Config, register: Register) -> None:
        self._config = config
        self._register = register
        self._claims = register.claims
        self._selected = {id for glob in config.option.claim for id in _matching(glob, register)}
        self._outcomes: dict[str, Outcome] = {}
        self._entries: tuple[Entry, ...] = ()
        self._missing: tuple[str, ...] = ()
        self._skipped: Counter[str] = Counter()

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        try:
            for item in items:
                if (record := self._record(item)) is not None:
                    item.stash[_CLAIM] = record
        except pytest.UsageError as error:
            if not self._in_worker:
                raise
            vars(config)["workeroutput"][_PROPERTY] = str(error)
            items.clear()
        if self._selected:
            selected: list[pytest.Item] = []
            deselected: list[pytest.Item] = []
            for item in items:
                takes = _CLAIM in item.stash and item.stash[_CLAIM].id in self._selected
                (selected if takes else deselected).append(item)
            config.hook.pytest_deselected(items=deselected)
            items[:] = selected

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Raise on the controller what the worker could not collect."""
        if error := getattr(node, "workeroutput", {}).get(_PROPERTY):
            raise pytest.UsageError(error)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        result = yield
        if (check := _check_of(item)) is not None and (problem := check.problem()):
            pytest.fail(problem, pytrace=False)
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if (check := _check_of(item)) is not None:
            if problem := _silence(report, check):
                report.outcome, report.longrepr = "failed", problem
                vars(report).pop("wasxfail", None)
            if (outcome := _outcome(report, check)) is not None:
                report.user_properties.append((_PROPERTY, dataclasses.asdict(outcome)))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == _PROPERTY and isinstance(value, dict):
                self._outcomes[report.nodeid] = Outcome(**value)
        if report.skipped and report.nodeid not in self._outcomes and isinstance(report.longrepr, tuple):
            self._skipped[report.longrepr[2].removeprefix("Skipped: ")] += 1

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        unusable = exitstatus in (pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.USAGE_ERROR)
        if self._in_worker or unusable or self._config.option.collectonly:
            return
        entries = tally(self._register, self._outcomes)
        self._entries = tuple(e for e in entries if not self._selected or e.claim.id in self._selected)
        if _complete(session, exitstatus):
            self._missing = tuple(entry.claim.id for entry in self._entries if entry.state == "untested")
        if self._missing and exitstatus != pytest.ExitCode.TESTS_FAILED:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if self._config.option.ledger and not self._selected:
            page.write(self._page_path, self._register, self._entries)
        if (summary := os.environ.get("GITHUB_STEP_SUMMARY")) and self._has_news:
            with open(summary, "a", encoding="utf-8") as file:
                file.write(report.markdown(self._entries, self._missing))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._has_news:
            return
        terminalreporter.write_sep("=", "ledger")
        if terminalreporter.verbosity >= 0:
            width, cut = terminalreporter._tw.fullwidth, bool(terminalreporter.isatty)
            parts = self._entries, self._missing, width, self._skipped
            for line in report.lines(*parts, cut=cut, selected=bool(self._selected)):
                terminalreporter.write_line(line)
        if self._config.option.ledger:
            written = "not written: --claim selects a part" if self._selected else f"written to {self._page_path}"
            terminalreporter.write_line(written)
        bad = self._missing or any(entry.state == "failed" for entry in self._entries)
        terminalreporter.write_line(report.sentence(self._entries, self._missing), red=bool(bad), green=not bad)

    @property
    def _in_worker(self) -> bool:
        return hasattr(self._config, "workerinput")

    @property
    def _has_news(self) -> bool:
        return bool(self._entries and (self._outcomes or self._missing or self._selected or self._config.option.ledger))

    @property
    def _page_path(self) -> Path:
        return self._config.invocation_params.dir / str(self._config.option.ledger)

    def _record(self, item: pytest.Item) -> Claim | None:
        """The claim that `item` takes."""
        markers = list(item.iter_markers("claim"))
        if not markers:
            return None
        if len(markers) > 1:
            raise pytest.UsageError(f"{item.nodeid}: a test takes one claim, and this one has {len(markers)} markers")
        match markers[0].args, markers[0].kwargs:
            case (str(id),), {**rest} if not rest:
                pass
            case _:
                raise pytest.UsageError(f"{item.nodeid}: the claim marker takes one id: claim('document.some.id')")
        if id not in self._claims:
            raise pytest.UsageError(f"{item.nodeid}: no claim has the id {id!r}")
        return self._claims[id]


def _matching(glob: str, register: Register) -> list[str]:
    return [id for id in register.claims if fnmatchcase(id, glob)]


def _check_selection(glob: str, register: Register) -> None:
    """UsageError for a pattern that matches no claim, or none that has a verdict."""
    ids = _matching(glob, register)
    if not ids:
        close = difflib.get_close_matches(glob, register.claims)
        hint = f"; the closest: {', '.join(close)}" if close else ""
        raise pytest.UsageError(f"--claim {glob}: no claim has such an id{hint}")
    if all(register.claims[id].verdict == "open" for id in ids):
        more, them = (f" and {len(ids) - 1} more are", "them") if len(ids) > 1 else (" is", "it")
        raise pytest.UsageError(f"--claim {glob}: {ids[0]}{more} open: no test takes {them} yet")


def _register_folder(config: pytest.Config) -> Path | None:
    if option := config.option.ledger_claims:
        return config.invocation_params.dir / str(option)
    setting = config.getini("ledger_claims")
    return config.rootpath / str(setting) if setting else None


def _check_of(item: pytest.Item) -> ClaimCheck | None:
    """What the test handed over; None when it takes no claim."""
    record = item.stash.get(_CLAIM, None)
    return None if record is None else item.stash.get(_CHECK, None) or ClaimCheck(record)


def _silence(report: pytest.TestReport, check: ClaimCheck) -> str:
    """Why a claim's test may not end as it did without a verdict; empty when it may."""
    if hasattr(report, "wasxfail"):
        return f"claim {check.record.id}: a test of a claim is never expected to fail; a claim can be refuted"
    if report.skipped and not check.unrun_need:
        return f"claim {check.record.id}: its test was skipped; only claim.unrun() and claim.data() may do that"
    return check.problem() if report.skipped else ""


def _outcome(report: pytest.TestReport, check: ClaimCheck) -> Outcome | None:
    """What this phase of the test says about the claim.

    The set-up already says "failed": where a worker dies in the test itself, nothing takes that back.
    """
    if report.when == "teardown" and report.passed:
        return None
    if report.when == "setup" and report.passed:
        return Outcome(claim=check.record.id, verdict="failed", reason="its test did not finish")
    if report.failed:
        verdict, reason = "failed", _headline(report, check.record)
    else:
        verdict, reason = check.verdict, check.unrun_need
    return Outcome(
        claim=check.record.id,
        verdict=verdict,
        reason=reason,
        absent=check.absent,
        pictures=tuple(check.pictures),
        **check.found(),
    )


def _headline(report: pytest.TestReport, record: Claim) -> str:
    """The first line of a failure, without the claim's name."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash else report.longreprtext
    return text.partition("\n")[0].rpartition(f"claim {record.id}: ")[2]


def _complete(session: pytest.Session, exitstatus: int) -> bool:
    """Whether the run was over everything that was selected: a claim without a test is one that nobody tests."""
    config = session.config
    sources = pytest.Config.ArgsSource
    whole = config.args_source is sources.TESTPATHS or (
        config.args_source is sources.INVOCATION_DIR and config.invocation_params.dir == config.rootpath
    )
    narrowing = ("keyword", "deselect", "ignore", "ignore_glob", "lf", "stepwise", "collectonly")
    return (
        whole
        and not any(config.getoption(name, default=None) for name in narrowing)
        and config.option.markexpr in ("", "claim")
        and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
        and not (session.shouldstop or session.shouldfail)
    )
