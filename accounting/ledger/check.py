"""What a test hands over about its claim, and the verdict that follows from it."""

from collections.abc import Iterable
from enum import Enum
from fractions import Fraction
from pathlib import Path
from typing import Literal, NoReturn

import pytest

from accounting.ledger.printed import Number, Printed, decimal, exact, units
from accounting.ledger.register import Claim
from accounting.ledger.report import block

Numbers = Number | Iterable[Number]


class _Absent(Enum):
    """The argument that was not given."""

    ABSENT = "absent"


_ABSENT: Literal[_Absent.ABSENT] = _Absent.ABSENT


class ClaimCheck:
    """The fixture `claim`: takes what a test measured and compares it with the claim's record.

    A comparison that fails does not raise at once: a refuted claim is refuted by exactly that. The verdict follows
    from everything that was handed over, and the plugin compares it with the recorded one when the test ends.
    """

    def __init__(self, record: Claim, data_folder: Path | None = None) -> None:
        self.record = record
        self.unrun_need = ""
        self.absent = ""
        self.seen: dict[str, list[str]] = {"measured": [], "difference": [], "right": [], "otherwise": []}
        self.pictures: list[tuple[str, str]] = []
        self._data_folder = data_folder
        self._held: list[bool] = []
        self._compared = False
        self._numbers_differ = False
        self._pinned = False
        self._without_condition = False
        self._cited = False

    def measured(self, predicted: Numbers, observed: Numbers | _Absent = _ABSENT) -> None:
        """Compare the claim's printed numbers with `predicted`, one number for each.

        `observed` is what an independent authority says of the same; the two must be equal, exactly.
        """
        __tracebackhide__ = True
        if not self.record.printed:
            self._refuse("its record prints no number: use claim.holds(condition, measured)")
        numbers = self._agreed(predicted, observed, self.record.printed)
        self._compared = True
        self._held.append(_match(numbers, self.record.printed))
        self._numbers_differ |= not self._held[-1]
        self.seen["measured"] += _shown(numbers, self.record.printed)
        self.seen["difference"] += [
            units(printed.difference(number)) for number, printed in zip(numbers, self.record.printed, strict=True)
        ]

    def holds(self, condition: bool, measured: str) -> None:
        """Say whether the identity, bound or behaviour held, and in `measured` what was seen."""
        __tracebackhide__ = True
        if not _is_truth(condition):
            self._refuse(f"whether it holds is a bool, not {condition!r}")
        if not measured.strip():
            self._refuse("claim.holds() needs the words or numbers that were seen")
        self._held.append(bool(condition))
        self.seen["measured"].append(measured)

    def otherwise(self, value: Numbers | bool, measured: str = "") -> None:
        """Show that a qualified claim fails without its condition: the numbers, or False, that one then gets."""
        __tracebackhide__ = True
        if self.record.verdict != "qualified":
            self._refuse(f"claim.otherwise() is for a qualified claim, and this one is {self.record.verdict}")
        if _is_truth(value):
            held, shown = bool(value), []
        else:
            numbers = self._agreed(value, _ABSENT, self.record.printed)
            held, shown = _match(numbers, self.record.printed), _shown(numbers, self.record.printed)
        if measured:
            shown.append(measured)
        if held:
            self._refuse(f"it holds just the same without its condition {self.record.condition!r}: {_list(shown)}")
        self._without_condition = True
        self.seen["otherwise"] += shown

    def right(self, *numbers: Number, observed: Numbers | _Absent = _ABSENT) -> None:
        """Pin the right value: `numbers` must read as the record's `right_printed`, one for each."""
        __tracebackhide__ = True
        if not self.record.right_printed:
            self._refuse("its record has no right_printed")
        agreed = self._agreed(numbers, observed, self.record.right_printed)
        shown = _shown(agreed, self.record.right_printed)
        if not _match(agreed, self.record.right_printed):
            self._refuse(f"the right value is recorded as {_texts(self.record.right_printed)}, not {_list(shown)}")
        self._pinned = True
        self.seen["right"] += shown

    def picture(self, svg: str, caption: str) -> None:
        """Show a picture with the claim on the ledger's page: the text of an SVG file, and what it shows.

        It decides nothing: what it shows is also handed over in numbers or words.
        """
        __tracebackhide__ = True
        if "<svg" not in svg or not caption.strip():
            self._refuse("claim.picture() takes the text of an SVG file and a caption")
        self.pictures.append((svg, caption))

    def cited(self) -> None:
        """Say that the claim reports its source and that nothing here can check it."""
        self._cited = True

    def unrun(self, need: str) -> NoReturn:
        """Skip the test because this run lacks `need`, one of the claim's own needs."""
        __tracebackhide__ = True
        if need not in self.record.missing_needs:
            self._refuse(f"{need!r} is no reason to leave it unrun: it needs {_list(self.record.needs)}")
        self.unrun_need = need
        how = self.absent or f"to run it: {self.record.how(need)}"
        pytest.skip(f"{self.record.id} needs {need}, which this run lacks; {how}")

    def data(self, name: str, need: str = "") -> Path:
        """The path of `name` in the folder of `--ledger-data`; where either is absent the claim is unrun.

        `need` says for which of the claim's "data:..." needs, where it has several.
        """
        __tracebackhide__ = True
        needs = [need] if need else [other for other in self.record.needs if other.startswith("data:")]
        if len(needs) != 1:
            self._refuse(f"say which of its needs {name!r} is: claim.data(name, need); it needs {_list(needs)}")
        if self._data_folder is None:
            self.unrun(needs[0])
        path = (self._data_folder / name).resolve()
        if not path.is_relative_to(self._data_folder.resolve()):
            self._refuse(f"{name!r} is outside the data folder")
        if not path.exists():
            self.absent = f"no {name} in {self._data_folder}"
            self.unrun(needs[0])
        return path

    @property
    def verdict(self) -> str:
        """The verdict that follows from what was handed over; empty when nothing was."""
        if self.unrun_need:
            return "unrun"
        if self._cited:
            return "cited"
        if not self._held:
            return ""
        if not all(self._held):
            return "refuted"
        return "qualified" if self._without_condition else "confirmed"

    def found(self) -> dict[str, tuple[str, ...]]:
        """What was seen; without the differences of numbers that agree, where something else refutes the claim."""
        seen = {name: tuple(texts) for name, texts in self.seen.items()}
        return seen | {"difference": ()} if self.verdict == "refuted" and not self._numbers_differ else seen

    def problem(self) -> str:
        """Why what was handed over does not bear out the recorded verdict; empty when it does."""
        reason = self._reason()
        if not reason:
            return ""
        seen, record = self.found(), self.record
        verdicts = {"recorded": record.verdict, "derived": self.verdict or "no verdict"}
        return "\n".join(block(record, reason, seen["measured"] or ("nothing",), seen["difference"], **verdicts))

    def _reason(self) -> str:
        recorded = self.record.verdict
        if recorded == "open":
            return "it is open: record the verdict that its test reaches"
        if self.unrun_need:
            return ""
        if not self.verdict:
            return "its test handed nothing over"
        if self._cited and self._held:
            return "what can be measured is not merely cited"
        if self.record.printed and not self._compared and not self._cited:
            return "its printed numbers were never compared: use claim.measured()"
        if self.record.right_printed and not self._pinned:
            return "its right value was never pinned: use claim.right()"
        if (recorded, self.verdict) == ("qualified", "confirmed"):
            return "nothing shows that it fails without its condition: use claim.otherwise()"
        return "" if self.verdict == recorded else "the recorded verdict is not the one that its test reached"

    def _agreed(
        self, predicted: Numbers, observed: Numbers | _Absent, printed: tuple[Printed, ...]
    ) -> tuple[Fraction, ...]:
        """`predicted` as exact numbers: one for each printed one, and equal to `observed`."""
        __tracebackhide__ = True
        numbers = _exact(predicted)
        if observed is not _ABSENT and (seen := _exact(observed)) != numbers:
            self._refuse(
                f"prediction and observation differ\n  predicted {_exactly(numbers)}\n  observed  {_exactly(seen)}"
            )
        if len(numbers) != len(printed):
            self._refuse(f"{len(numbers)} numbers were handed over for {len(printed)} printed: {_texts(printed)}")
        return numbers

    def _refuse(self, message: str) -> NoReturn:
        __tracebackhide__ = True
        raise AssertionError(f"claim {self.record.id}: {message}")


def _exact(numbers: Numbers) -> tuple[Fraction, ...]:
    return tuple(exact(number) for number in (numbers if isinstance(numbers, Iterable) else (numbers,)))


def _is_truth(value: object) -> bool:
    """Whether `value` is a bool, numpy's included."""
    return isinstance(value, bool) or type(value).__name__ in ("bool", "bool_")


def _match(numbers: tuple[Fraction, ...], printed: tuple[Printed, ...]) -> bool:
    return all(each.matches(number) for number, each in zip(numbers, printed, strict=True))


def _shown(numbers: tuple[Fraction, ...], printed: tuple[Printed, ...]) -> list[str]:
    return [each.show(number) for number, each in zip(numbers, printed, strict=True)]


def _exactly(numbers: tuple[Fraction, ...]) -> str:
    return _list(f"{number} = {decimal(number)}" if number.denominator > 1 else decimal(number) for number in numbers)


def _texts(printed: tuple[Printed, ...]) -> str:
    return _list(each.text for each in printed)


def _list(texts: Iterable[str]) -> str:
    return "; ".join(texts)
