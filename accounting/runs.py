"""A table of training runs: sizes, tokens and losses from a CSV file that somebody else wrote."""

import csv
import hashlib
import io
import math
import re
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from accounting.files import InputError, read

LIMIT_BYTES, LIMIT_RUNS = 2**24, 10_000
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
#: What a column may be called, in lower case. D may be left to C, as C / 6 N.
COLUMNS = {
    "N": ("n", "parameters", "params", "model size"),
    "D": ("d", "tokens", "training tokens"),
    "C": ("c", "flops", "flop", "compute", "training flop", "training flops"),
    "loss": ("loss", "l"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """Runs one by one: N, D and the loss of each, and the file that they are from."""

    path: str
    sha256: str
    tokens_from: str
    parameters: tuple[float, ...]
    tokens: tuple[float, ...]
    losses: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.losses)

    def without_highest(self, count: int) -> "Runs":
        """The same without the so many runs of highest loss, such as those that ended early."""
        kept = sorted(sorted(range(len(self)), key=lambda run: self.losses[run])[: max(len(self) - count, 0)])
        parameters, tokens, losses = (
            tuple(column[run] for run in kept) for column in (self.parameters, self.tokens, self.losses)
        )
        return Runs(
            path=self.path,
            sha256=self.sha256,
            tokens_from=self.tokens_from,
            parameters=parameters,
            tokens=tokens,
            losses=losses,
        )


def load(source: str | Path) -> Runs:
    """Read a CSV file with a header; columns that are not in ``COLUMNS`` are left alone.

    Raises InputError, naming the line and the column, for whatever is not a table of positive numbers.
    """
    path = Path(source)
    data = read(path, LIMIT_BYTES)
    try:
        text = data.decode("utf-8-sig")
        rows = list(islice(csv.reader(io.StringIO(text, newline=""), strict=True), LIMIT_RUNS + 2))
    except UnicodeDecodeError:
        raise InputError(path, "expected text in UTF-8") from None
    except csv.Error as error:
        raise InputError(path, f"not a CSV file: {error}") from None
    if not rows:
        raise InputError(path, "expected a header and a run on each line, the file is empty")
    if len(rows) > LIMIT_RUNS + 1:
        raise InputError(path, f"more than {LIMIT_RUNS:,} runs")
    where = _columns(path, rows[0])
    runs = [_run(path, line, rows[0], row, where) for line, row in enumerate(rows[1:], start=2) if row]
    return Runs(
        path=str(path),
        sha256=hashlib.sha256(data).hexdigest(),
        tokens_from="D" if "D" in where else "C / 6 N",
        parameters=tuple(parameters for parameters, _, _ in runs),
        tokens=tuple(tokens for _, tokens, _ in runs),
        losses=tuple(loss for _, _, loss in runs),
    )


def _run(path: Path, line: int, header: list[str], row: list[str], where: dict[str, int]) -> tuple[float, float, float]:
    """N, D and the loss of one line."""
    if len(row) != len(header):
        raise InputError(path, f"row {line}: expected {len(header)} columns as in the header, got {len(row)}")
    numbers = {name: _number(path, line, header, row, column) for name, column in where.items()}
    tokens = numbers["D"] if "D" in numbers else numbers["C"] / 6 / numbers["N"]
    if not (tokens > 0 and math.isfinite(tokens)):
        raise InputError(path, f"row {line}: C / 6 N is {tokens}, no number of tokens")
    return numbers["N"], tokens, numbers["loss"]


def _columns(path: Path, header: list[str]) -> dict[str, int]:
    """Where each quantity stands: N, loss, and D or else C."""
    where: dict[str, int] = {}
    for name, aliases in COLUMNS.items():
        found = [index for index, title in enumerate(header) if title.strip().lower() in aliases]
        if len(found) > 1:
            raise InputError(path, f"two columns for {name}: {header[found[0]]!r} and {header[found[1]]!r}")
        if found:
            where[name] = found[0]
    if "D" in where:
        where.pop("C", None)
    for names in (("N",), ("D", "C"), ("loss",)):
        if not where.keys() & set(names):
            accepted = " or ".join(f"{name} ({', '.join(COLUMNS[name])})" for name in names)
            raise InputError(path, f"expected a column for {accepted}, got {', '.join(header)}")
    return where


def _number(path: Path, line: int, header: list[str], row: list[str], column: int) -> float:
    text = row[column].strip()
    # Python reads digits of other scripts too, and underscores between them.
    number = float(text) if NUMBER.fullmatch(text) else math.nan
    if not (number > 0 and math.isfinite(number)):
        raise InputError(
            path, f"row {line}, column {header[column]!r}: expected a positive number, got {row[column]!r}"
        )
    return number
