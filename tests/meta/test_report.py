"""What a run writes: the terminal, the page, its JSON and the Markdown summary."""

import base64
import dataclasses
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from accounting.ledger import page, report
from accounting.ledger.printed import parse
from accounting.ledger.register import Register, load
from accounting.ledger.tally import Entry, Outcome, tally

REGISTER = load(Path(__file__).parents[2] / "fixtures" / "claims")
VERDICTS = ("confirmed", "qualified", "refuted", "cited", "unrun", "failed")


def decided(register: Register) -> tuple[Entry, ...]:
    """All claims of the register, decided in turn in every way."""
    documents = []
    outcomes = {}
    for document in register.documents:
        claims = []
        for position, claim in enumerate(document.claims):
            verdict = VERDICTS[position % len(VERDICTS)]
            claims.append(dataclasses.replace(claim, verdict=verdict, right="Another.", condition="If tied."))
            reason = {"unrun": f"data:{position}", "failed": "it differs"}.get(verdict, "")
            outcomes[claim.id] = Outcome(claim=claim.id, verdict=verdict, reason=reason, measured=("word " * 40,))
        documents.append(dataclasses.replace(document, claims=tuple(claims)))
    return tally(Register(tuple(documents)), outcomes)


class Page(HTMLParser):
    """The ids, links and texts of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attributes:
            if name == "id":
                self.ids.append(value or "")
            if name in ("href", "src", "action", "srcset", "poster", "data"):
                self.links.append(value or "")


def test_terminal_fits_a_screen() -> None:
    """Though every claim is decided, the ledger is one screen of 120 columns, and it stays within a narrow one."""
    entries = decided(REGISTER)
    wide = report.lines(entries, (), 120, {})
    assert len(wide) <= 45
    assert all(len(line) <= 120 for line in wide)
    assert any(line.startswith("refuted  and ") for line in wide)
    assert all(len(line) <= 80 for line in report.lines(entries, (), 80, {}))


def test_terminal_without_a_decision() -> None:
    """Groups in which no test took a claim are one line."""
    entries = tally(REGISTER, {})
    assert len(report.lines(entries, (), 120, {})) == 1


def test_terminal(project: Any) -> None:
    """The terminal has the groups, what is refuted, what was not run and how to run it, and one sentence."""
    project.claims(
        project.record("demo.a.one", printed=["4.72M"], verdict="refuted", right="Five.", right_printed=["5.0M"]),
        project.record("demo.b.one", needs=["data:text"]),
        project.record("demo.c.one", verdict="open"),
    )
    result = project.run(
        "@pytest.mark.claim('demo.a.one')\ndef test_a(claim): claim.measured(5_001_000); claim.right(5_001_000)\n"
        "@pytest.mark.claim('demo.b.one')\ndef test_b(claim): claim.data('a.txt')"
    )
    result.stdout.fnmatch_lines(
        [
            "x refuted  - unrun  . open",
            "demo.a  1x *demo.b  1-",
            "untouched: 1 group, 1 claim: 1 open",
            "refuted  demo.a.one: 4.72M -> 5,001,000",
            "unrun    1 for data:text: pytest --ledger-data=DIR (demo.b.one)",
            "written to *ledger.html",
            "3 claims: 1 refuted, 1 unrun, 1 open",
        ]
    )


def test_terminal_lines_are_cut_at_a_blank() -> None:
    """A line that a terminal has no room for ends before a word, so that no number loses digits."""
    document = dataclasses.replace(REGISTER.documents[0], claims=tuple(REGISTER.claims.values())[:1])
    claim = dataclasses.replace(document.claims[0], id="demo.a.one", verdict="refuted", value="4.72M", printed=())
    register = Register((dataclasses.replace(document, claims=(claim,)),))
    measured = "-1,234,567 1,234,567 1,234,567"
    entries = tally(register, {"test": Outcome(claim=claim.id, verdict="refuted", measured=(measured,))})
    whole = f"refuted  demo.a.one: 4.72M -> {measured}"
    for width in range(40, len(whole)):
        line = report.lines(entries, (), width, {})[-1]
        assert len(line) <= width
        assert whole.startswith(f"{line.removesuffix(' ...')} ")
    assert report.lines(entries, (), 40, {}, cut=False)[-1] == whole


def test_a_pipe_gets_whole_lines(project: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no terminal gets each line in full."""
    monkeypatch.setenv("COLUMNS", "40")
    measured = "1,234,567 " * 20
    result = project.take(project.record(verdict="refuted", right="Five."), f"claim.holds(False, {measured!r})")
    result.stdout.fnmatch_lines([f"refuted  demo.a.one: 4.72M -> {measured.strip()}"])


def test_unrun_names_some_claims() -> None:
    """A line of what was not run names a few of the claims, and says how many more there are."""
    document = REGISTER.documents[0]
    template = dataclasses.replace(document.claims[0], run="")
    claims = tuple(dataclasses.replace(template, id=f"demo.a.{name}") for name in "abcde")
    register = Register((dataclasses.replace(document, claims=claims),))
    outcomes = {claim.id: Outcome(claim=claim.id, verdict="unrun", reason="gpu") for claim in claims}
    line = report.lines(tally(register, outcomes), (), 200, {})[-1]
    assert line == "unrun    5 for gpu: pytest, on a machine with a GPU (demo.a.a, demo.a.b, demo.a.c and 2 more)"


def test_unrun_for_an_absent_file(project: Any) -> None:
    """Where the folder of data was named, the ledger says which file is not in it."""
    (project.path / "shelf").mkdir()
    record = project.record(needs=["data:text"], run="tox run -e ledger")
    result = project.take(record, "claim.data('text/a.txt')", "--ledger-data=shelf", "-rs")
    result.stdout.fnmatch_lines(
        ["unrun    1 for data:text: no text/a.txt in *shelf (demo.a.one)", "SKIPPED *; no text/a.txt in *shelf"]
    )


def test_json(project: Any) -> None:
    """The JSON has every claim's record with what the run found, and what is left out."""
    left_out = {"id": "demo.excl.one", "where": "2", "says": "Big is better.", "reason": "opinion"}
    record = project.record(printed=["4.72M"], run="make one")
    project.claims(record, excluded=[left_out])
    project.run("@pytest.mark.claim('demo.a.one')\ndef test_one(claim): claim.measured(4_723_000)")
    ledger = project.ledger()
    assert ledger["schema"] == "sixnd.ledger/1"
    assert ledger["summary"]["confirmed"] == 1
    assert sum(ledger["summary"].values()) == 1
    assert ledger["environment"].keys() >= {"python", "platform"}
    assert ledger["excluded"] == [left_out]
    record["run_with"] = record.pop("run")
    assert ledger["claims"] == [
        record
        | {
            "run": "confirmed",
            "reason": "",
            "measured": ["4,723,000"],
            "difference": ["+0.30"],
            "measured_right": [],
            "measured_otherwise": [],
            "tests": ["test_demo.py::test_one"],
        }
    ]


def test_page_has_every_claim() -> None:
    """Each claim, and each statement that is left out, has an anchor of its own."""
    text = page.as_html(REGISTER, tally(REGISTER, {}), page.environment())
    ids = Page(text).ids
    assert len(ids) == len(set(ids))
    assert set(ids) >= {*REGISTER.claims, *(entry.id for entry in REGISTER.excluded)}


def test_page_is_self_contained() -> None:
    """The page loads nothing: its links stay within it, and it asks for no other resource."""
    text = page.as_html(REGISTER, decided(REGISTER), page.environment())
    found = Page(text)
    assert found.links
    assert all(link.startswith("#") for link in found.links)
    assert not found.tags & {"link", "img", "iframe", "object", "embed", "base"}
    assert not re.search(r"url\(|@import|fetch\(|import\(", text)


def test_page_escapes(project: Any) -> None:
    """What a register says is text, whatever it looks like."""
    bad = "<script>alert('x')</script> & \"more\""
    record = project.record(says=bad, value=bad, where=bad, condition=bad, right=bad, source=bad, verdict="qualified")
    project.claims(record)
    project.run(f"@pytest.mark.claim('demo.a.one')\ndef test_one(claim): claim.holds(False, {bad!r})")
    text = (project.path / "ledger.html").read_text(encoding="utf-8")
    assert "<script>alert" not in text
    assert text.count("&lt;script&gt;alert") >= 6


def test_page_details() -> None:
    """A row has the condition, the right value, the source and the command that runs the claim alone."""
    claim = dataclasses.replace(
        next(iter(REGISTER.claims.values())),
        verdict="qualified",
        condition="When tied.",
        right="Five.",
        right_printed=(parse("5.0M"),),
        source="A paper",
    )
    document = dataclasses.replace(REGISTER.documents[0], claims=(claim,), excluded=())
    register = Register((document,))
    outcome = Outcome(claim=claim.id, verdict="qualified", measured=("4,7",), otherwise=("6,1",))
    text = page.as_html(register, tally(register, {"test": outcome}), {})
    for part in ("When tied.", "Five.", "5.0M", "A paper", "4,7", "6,1", f"pytest --claim {claim.id}"):
        assert part in text
    assert "1 claim in 1 document: 1 true under a condition." in text


def test_page_of_a_run(project: Any) -> None:
    """A row has its tests and the right value as measured; an open one has no command, for nothing takes it."""
    project.claims(
        project.record("demo.a.one", printed=["4.72M"], verdict="refuted", right="Five.", right_printed=["5.0M"]),
        project.record("demo.c.one", verdict="open"),
        excluded=[{"id": "demo.excl.one", "where": "2", "says": "Big is better.", "reason": "opinion"}],
    )
    project.run(
        "@pytest.mark.claim('demo.a.one')\ndef test_a(claim): claim.measured(5_001_234); claim.right(5_001_234)"
    )
    text = (project.path / "ledger.html").read_text(encoding="utf-8")
    for part in ("<dt>Right, as measured</dt>", "5,001,234", "test_demo.py::test_a", "pytest --claim demo.a.one"):
        assert part in text
    for part in ("within ±0.5", "Left out: opinion", "No claim matches."):
        assert part in text
    assert "pytest --claim demo.c.one" not in text


@pytest.mark.parametrize("workers", [(), ("-n1",)], ids=["alone", "worker"])
def test_page_shows_pictures(project: Any, workers: tuple[str, ...]) -> None:
    """A picture that a test hands over stands in the page with its caption, within the page and as it was drawn."""
    svg = '<svg xmlns="http://www.w3.org/2000/svg"><script>alert(1)</script></svg>'
    project.claims(project.record())
    project.run(
        "@pytest.mark.claim('demo.a.one')\ndef test_one(claim):\n"
        f"    claim.holds(True, 'seen')\n    claim.picture({svg!r}, 'Loss & size')",
        *workers,
    )
    text = (project.path / "ledger.html").read_text(encoding="utf-8")
    (link,) = (link for link in Page(text).links if not link.startswith("#"))
    kind, _, encoded = link.partition(",")
    assert (kind, base64.b64decode(encoded).decode()) == ("data:image/svg+xml;base64", svg)
    assert "<script>alert" not in text
    assert "<figcaption>Loss &amp; size" in text


def test_page_keeps_numbers_whole(project: Any) -> None:
    """A line of the page may end within a long word, and never within a number."""
    body = "claim.holds(True, 'a_very_long_name(1,234,567) < -1.5e-9 & \\'2.5M\\'')"
    project.take(project.record(), body)
    text = (project.path / "ledger.html").read_text(encoding="utf-8")
    whole = '<span class="whole">{}</span>'.format
    shown = f"a_very_long_name({whole('1,234,567')}) &lt; {whole('-1.5e-9')} &amp; &#39;{whole('2.5M')}&#39;"
    assert shown in text


def test_page_order() -> None:
    """Within a document what needs a look comes first, and what nobody tested last."""
    order = ("refuted", "failed", "qualified", "confirmed", "cited", "unrun", "untested", "open")
    recorded = {state: state for state in order} | {"failed": "confirmed", "untested": "confirmed"}
    document = REGISTER.documents[0]
    claims = tuple(
        dataclasses.replace(document.claims[0], id=f"demo.{state}.{name}", verdict=recorded[state])
        for name in "ab"
        for state in reversed(order)
    )
    register = Register((dataclasses.replace(document, claims=claims, excluded=()),))
    outcomes = {
        claim.id: Outcome(claim=claim.id, verdict=state)
        for claim in claims
        if (state := claim.id.split(".")[1]) not in ("untested", "open")
    }
    ids = [id for id in Page(page.as_html(register, tally(register, outcomes), {})).ids if id.startswith("demo.")]
    assert ids == [f"demo.{state}.{name}" for state in order for name in "ab"]


@pytest.mark.parametrize(
    ("body", "difference"),
    [
        ("claim.measured(4_720_000); claim.holds(False, 'five heads')", []),
        ("claim.measured(5_000_000); claim.holds(False, 'five heads')", ["+28.00"]),
    ],
)
def test_difference_of_a_refuted_claim(project: Any, body: str, difference: list[str]) -> None:
    """Where not the numbers refute a claim, no difference of theirs is shown."""
    project.take(project.record(printed=["4.72M"], verdict="refuted", right="Five."), body)
    assert project.ledger()["claims"][0]["difference"] == difference


def test_page_path(project: Any) -> None:
    """The JSON lies beside the page, in a folder that is made; a page named .json would overwrite it."""
    project.claims(project.record(verdict="open"))
    project.run("", "--ledger=out/page.html")
    assert (project.path / "out" / "page.html").exists()
    assert (project.path / "out" / "page.json").exists()
    for name in ("ledger.json", "ledger", "out/ledger.htm"):
        result = project.run("", f"--ledger={name}")
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        result.stderr.fnmatch_lines([f"ERROR: --ledger {name}: the page's name must end in .html; *"])


def test_markdown(project: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On GitHub the job's summary has the counts and what is refuted, after what was there."""
    summary = project.write("summary.md", "before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    project.take(project.record(verdict="refuted", right="Five."), "claim.holds(False, 'five')")
    text = summary.read_text()
    assert text.startswith("before\n## Ledger\n\n1 claim: 1 refuted\n")
    assert "- refuted: `demo.a.one: 4.72M -> five`" in text
