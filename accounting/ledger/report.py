"""The ledger in the terminal and in Markdown: what a run found, on one screen."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import zip_longest
from textwrap import shorten, wrap

from accounting.ledger.register import Claim, remedy
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
_REFUTED, _REASONS, _FAILED, _MISSING, _BLOCKS, _IDS = 12, 4, 4, 24, 10, 3
_GAP = 3


def sentence(entries: tuple[Entry, ...], missing: tuple[str, ...] = ()) -> str:
    """The whole run in one sentence."""
    found = ", ".join(f"{number} {state}" for state, number in count(entries).items() if number)
    lack = f"; {len(missing)} with a verdict but no test" if missing else ""
    return f"{plural(len(entries), 'claim')}: {found or 'none'}{lack}"


def plural(number: int, noun: str) -> str:
    """`number` and its noun, such as 1 claim, 2 claims."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def printed(claim: Claim) -> str:
    """The numbers that the document prints, or else the value in its words."""
    return "; ".join(number.text for number in claim.printed) or claim.value


def block(
    claim: Claim, head: str, measured: Iterable[str], difference: Iterable[str], **more: str | Iterable[str]
) -> list[str]:
    """One claim in full: what it says, what was found, and whatever `more` there is; what is empty is left out."""
    units = "; ".join(difference)
    parts = {
        "says": claim.says,
        "printed": printed(claim),
        "measured": measured,
        "difference": units and f"{units} units of the last printed place",
        **more,
    }
    texts = {name: part if isinstance(part, str) else "; ".join(part) for name, part in parts.items()}
    return [f"claim {claim.id}: {head}", *(f"  {name:<10} {text}" for name, text in texts.items() if text)]


def lines(
    entries: tuple[Entry, ...],
    missing: tuple[str, ...],
    width: int,
    skipped: Mapping[str, int],
    *,
    cut: bool = True,
    selected: bool = False,
) -> list[str]:
    """The ledger for a terminal of so many columns; ``skipped`` are tests of no claim, by reason.

    Lines that are too long are cut unless ``cut`` is false. Of ``selected`` claims the first are shown in full.
    """
    besides = [f"{plural(number, 'test')} of no claim: {reason}" for reason, number in skipped.items()]
    room = width if cut else None
    ordered = sorted(entries, key=lambda entry: not entry.tests) if selected else []
    rest = tuple(entry for entry in ordered[_BLOCKS:] if entry.tests) if selected else entries
    return [
        *(line for entry in ordered[:_BLOCKS] for line in _block(entry)),
        *_groups(rest, width),
        *_capped("refuted", [line for entry in rest if (line := _refutation(entry))], _REFUTED, room),
        *_capped("unrun", _unrun(entries), _REASONS, room),
        *_capped("failed", [f"{e.claim.id}: {e.reason}" for e in rest if e.state == "failed"], _FAILED, room),
        *_capped("skipped", besides, _REASONS, room),
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


def _block(entry: Entry) -> list[str]:
    claim = entry.claim
    return block(
        claim,
        f"{entry.state}: {entry.reason}" if entry.reason else entry.state,
        entry.measured,
        entry.difference,
        recorded=claim.verdict if entry.state not in (claim.verdict, "untested") else "",
        condition=claim.condition,
        otherwise=entry.otherwise,
        right=claim.right,
        pinned=entry.right,
        source=claim.source,
    )


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
    return f"{entry.claim.id}: {printed(entry.claim)} -> {'; '.join(entry.right or entry.measured)}"


def _unrun(entries: tuple[Entry, ...]) -> list[str]:
    """What this run lacked, by the absent file or the command that runs it elsewhere, the most claims first."""
    lacking: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        if entry.state == "unrun":
            lacking[entry.absent or entry.claim.run or remedy(entry.reason)].append(entry)
    ordered = sorted(lacking.items(), key=lambda item: (-len(item[1]), item[0]))
    return [
        f"{len(found)} for {', '.join(sorted({e.reason for e in found}))}: {how} ({_few([e.claim.id for e in found])})"
        for how, found in ordered
    ]


def _few(ids: list[str]) -> str:
    """The first of `ids`, and how many more there are."""
    more = f" and {len(ids) - _IDS} more" if len(ids) > _IDS else ""
    return ", ".join(ids[:_IDS]) + more


def _without_test(missing: tuple[str, ...], width: int) -> list[str]:
    if not missing:
        return []
    more = [f"and {len(missing) - _MISSING} more"] if len(missing) > _MISSING else []
    text = ", ".join([*missing[:_MISSING], *more])
    return wrap(f"no test: {text}", width, subsequent_indent=" " * 9, break_on_hyphens=False)


def _capped(title: str, texts: list[str], most: int, width: int | None) -> list[str]:
    """`texts` one a line under their title, at most so many of them."""
    more = [f"and {len(texts) - most} more"] if len(texts) > most else []
    head = f"{title:<8} "
    room = None if width is None else max(width - len(head), _GAP)
    return [head + _cut(text, room) for text in texts[:most] + more]


def _cut(text: str, width: int | None) -> str:
    """`text` as one line; cut at a blank, never within a word or number."""
    if width is None:
        return " ".join(text.split())
    return shorten(text, width, placeholder=" ...", break_long_words=False, break_on_hyphens=False)


def _code(text: str) -> str:
    plain = text.replace("`", "'")
    return f"`{plain}`"
