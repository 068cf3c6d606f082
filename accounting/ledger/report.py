"""The ledger in the terminal and in Markdown: what a run found, on one screen."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import zip_longest
from textwrap import wrap

from accounting.ledger.register import remedy
from accounting.ledger.tally import Entry, count

SIGNS = {
    "confirmed": "=",
    "qualified": "~",
    "refuted": "x",
    "cited": "c",
    "unrun": "-",
    "failed": "!",
    "untested": "?",
    "open": ".",
}
_REFUTED, _REASONS, _FAILED, _MISSING = 12, 4, 4, 24
_GAP = 3


def sentence(entries: tuple[Entry, ...], missing: tuple[str, ...] = ()) -> str:
    """The whole run in one sentence."""
    found = ", ".join(f"{number} {state}" for state, number in count(entries).items() if number)
    lack = f"; {len(missing)} with a verdict but no test" if missing else ""
    return f"{plural(len(entries), 'claim')}: {found or 'none'}{lack}"


def plural(number: int, noun: str) -> str:
    """`number` and its noun, such as 1 claim, 2 claims."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def lines(entries: tuple[Entry, ...], missing: tuple[str, ...], width: int, skipped: Mapping[str, int]) -> list[str]:
    """The ledger for a terminal of so many columns; ``skipped`` are tests of no claim, by reason."""
    besides = [f"{plural(number, 'test')} of no claim: {reason}" for reason, number in skipped.items()]
    return [
        *_groups(entries, width),
        *_capped("refuted", [line for entry in entries if (line := _refutation(entry))], _REFUTED, width),
        *_capped("unrun", _unrun(entries), _REASONS, width),
        *_capped("failed", [f"{e.claim.id}: {e.reason}" for e in entries if e.state == "failed"], _FAILED, width),
        *_capped("skipped", besides, _REASONS, width),
        *_without_test(missing, width),
    ]


def markdown(entries: tuple[Entry, ...], missing: tuple[str, ...]) -> str:
    """The ledger for a Markdown page, such as the summary of a GitHub job."""
    rows = [f"| {state} | {number} |" for state, number in count(entries).items() if number]
    notable = [
        *(f"- refuted: {_code(line)}" for entry in entries if (line := _refutation(entry))),
        *(f"- failed: {_code(f'{entry.claim.id}: {entry.reason}')}" for entry in entries if entry.state == "failed"),
        *(f"- no test: {_code(id)}" for id in missing),
    ]
    head = ["## Ledger", "", sentence(entries, missing), "", "| verdict | claims |", "|---|---:|"]
    return "\n".join([*head, *rows, "", *notable, ""])


def _groups(entries: tuple[Entry, ...], width: int) -> list[str]:
    """Each group with its counts, in as many columns as fit; the untouched groups in one line."""
    groups: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        groups[entry.claim.group].append(entry)
    touched = {name: group for name, group in groups.items() if any(entry.tests for entry in group)}
    untouched = [entry for name, group in groups.items() if name not in touched for entry in group]
    name_width = max(map(len, touched), default=0)
    cells = [f"{name:<{name_width}}  {_counts(group)}" for name, group in touched.items()]
    rows = _columns(cells, width)
    if untouched:
        rows.append(f"untouched: {plural(len(groups) - len(touched), 'group')}, {sentence(tuple(untouched))}")
    legend = "  ".join(f"{SIGNS[state]} {state}" for state, number in count(entries).items() if number)
    return [legend, *rows] if touched else rows


def _counts(group: Iterable[Entry]) -> str:
    return " ".join(f"{number}{SIGNS[state]}" for state, number in count(group).items() if number)


def _columns(cells: list[str], width: int) -> list[str]:
    """`cells` down the columns of a table, as many columns as `width` has room for."""
    for wanted in range(len(cells), 0, -1):
        height = -(-len(cells) // wanted)
        columns = [cells[start : start + height] for start in range(0, len(cells), height)]
        widths = [max(map(len, column)) + _GAP for column in columns]
        if sum(widths) - _GAP <= width or wanted == 1:
            rows = zip_longest(*columns, fillvalue="")
            return ["".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return []


def _refutation(entry: Entry) -> str:
    """`id: printed -> measured` for a refuted claim."""
    if entry.state != "refuted":
        return ""
    printed = "; ".join(number.text for number in entry.claim.printed) or entry.claim.value
    return f"{entry.claim.id}: {printed} -> {'; '.join(entry.right or entry.measured)}"


def _unrun(entries: tuple[Entry, ...]) -> list[str]:
    """What this run lacked, by the command that runs it elsewhere, the most claims first."""
    needs: dict[str, list[str]] = defaultdict(list)
    for entry in entries:
        if entry.state == "unrun":
            needs[entry.claim.run or remedy(entry.reason)].append(entry.reason)
    ordered = sorted(needs.items(), key=lambda item: (-len(item[1]), item[0]))
    return [f"{len(reasons)} for {', '.join(sorted(set(reasons)))}: {command}" for command, reasons in ordered]


def _without_test(missing: tuple[str, ...], width: int) -> list[str]:
    if not missing:
        return []
    more = [f"and {len(missing) - _MISSING} more"] if len(missing) > _MISSING else []
    text = ", ".join([*missing[:_MISSING], *more])
    return wrap(f"no test: {text}", width, subsequent_indent=" " * 9, break_on_hyphens=False)


def _capped(title: str, texts: list[str], most: int, width: int) -> list[str]:
    """`texts` one a line under their title, at most so many of them."""
    more = [f"and {len(texts) - most} more"] if len(texts) > most else []
    return [_cut(f"{title:<8} {' '.join(text.split())}", width) for text in texts[:most] + more]


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else f"{line[: width - 4]} ..."


def _code(text: str) -> str:
    plain = text.replace("`", "'")
    return f"`{plain}`"
