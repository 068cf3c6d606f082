"""What a run found for every claim: the results of single tests, merged."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from accounting.ledger.register import Claim, Register

STATES = ("confirmed", "qualified", "refuted", "cited", "unrun", "failed", "untested", "open")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one test found for its claim, in plain values, to travel.

    `verdict` is a verdict or "failed"; `absent` is the file that the folder of data lacks; a picture is the text of
    an SVG file and its caption.
    """

    claim: str
    verdict: str
    reason: str = ""
    absent: str = ""
    measured: tuple[str, ...] = ()
    difference: tuple[str, ...] = ()
    right: tuple[str, ...] = ()
    otherwise: tuple[str, ...] = ()
    pictures: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One claim after a run.

    `state` is the verdict that the run reached, or "failed"; without a test in this run it is "open" where no verdict
    is recorded and "untested" where one is.
    """

    claim: Claim
    state: str
    reason: str
    absent: str
    measured: tuple[str, ...]
    difference: tuple[str, ...]
    right: tuple[str, ...]
    otherwise: tuple[str, ...]
    pictures: tuple[tuple[str, str], ...]
    tests: tuple[str, ...]

    def as_record(self) -> dict[str, Any]:
        """The claim's record and what the run found, for the JSON; the record's own `run` is `run_with`."""
        record = self.claim.as_record()
        if "run" in record:
            record["run_with"] = record.pop("run")
        return record | {
            "run": self.state if self.tests else None,
            "reason": self.reason,
            "measured": list(self.measured),
            "difference": list(self.difference),
            "measured_right": list(self.right),
            "measured_otherwise": list(self.otherwise),
            "tests": list(self.tests),
        }


def tally(register: Register, outcomes: dict[str, Outcome]) -> tuple[Entry, ...]:
    """One entry a claim, in the register's order, from the outcomes by test."""
    tests: dict[str, list[str]] = {id: [] for id in register.claims}
    for test in sorted(outcomes):
        tests[outcomes[test].claim].append(test)
    return tuple(_entry(claim, {test: outcomes[test] for test in tests[id]}) for id, claim in register.claims.items())


def count(entries: Iterable[Entry]) -> dict[str, int]:
    """How many claims are in each state, every state named."""
    found = Counter(entry.state for entry in entries)
    return {state: found[state] for state in STATES}


def _entry(claim: Claim, outcomes: dict[str, Outcome]) -> Entry:
    found = outcomes.values()
    return Entry(
        claim=claim,
        state=_state(claim, [outcome.verdict for outcome in found]),
        reason=next((outcome.reason for outcome in found if outcome.reason), ""),
        absent=next((outcome.absent for outcome in found if outcome.absent), ""),
        measured=tuple(text for outcome in found for text in outcome.measured),
        difference=tuple(text for outcome in found for text in outcome.difference),
        right=tuple(text for outcome in found for text in outcome.right),
        otherwise=tuple(text for outcome in found for text in outcome.otherwise),
        pictures=tuple(picture for outcome in found for picture in outcome.pictures),
        tests=tuple(outcomes),
    )


def _state(claim: Claim, verdicts: list[str]) -> str:
    """One failure fails the claim; a part that was not run leaves the claim unrun; the others agree with the record."""
    if not verdicts:
        return "open" if claim.verdict == "open" else "untested"
    return next((verdict for verdict in ("failed", "unrun") if verdict in verdicts), claim.verdict)
