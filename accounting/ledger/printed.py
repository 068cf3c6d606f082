"""Numbers as a document prints them, and whether a measured number would have been printed so.

A printed number says two things: a value and the place to which it was rounded. `4.72M` is 4 720 000 known to
10 000; `31.02 percent` is 0.3102 known to 0.0001. A measured number agrees when, rounded to that place, it is
that value. Everything here is exact: integers and fractions, no float arithmetic.
"""

import operator
import re
from dataclasses import dataclass
from decimal import Decimal, localcontext
from fractions import Fraction
from typing import Protocol, SupportsIndex, runtime_checkable


@runtime_checkable
class SupportsRatio(Protocol):
    """A number that is an exact ratio of integers: float, Decimal, Fraction, a numpy float."""

    def as_integer_ratio(self) -> tuple[int, int]: ...


Number = SupportsIndex | SupportsRatio

_SCALES: dict[str, int | Fraction] = {
    "k": 10**3,
    "K": 10**3,
    "M": 10**6,
    "B": 10**9,
    "G": 10**9,
    "T": 10**12,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
    "%": Fraction(1, 100),
    "percent": Fraction(1, 100),
}
_NUMBER = re.compile(
    r"(?P<sign>[+-]?)"
    r"(?P<whole>[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]*)"
    r"(?:\.(?P<decimals>[0-9]+))?"
    r"(?:e(?P<exponent>[+-]?[0-9]{1,3})|\s*(?P<scale>" + "|".join(map(re.escape, _SCALES)) + r"))?"
)
_SUPERSCRIPTS = str.maketrans("⁺⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "+-0123456789")
_FULL_INTEGER = 10**15


@dataclass(frozen=True, slots=True)
class Printed:
    """A printed number: its text, its value, and one unit of its last printed place."""

    text: str
    value: Fraction
    ulp: Fraction

    def matches(self, measured: Number) -> bool:
        """Whether `measured`, rounded half to even to the printed place, is the printed value.

        Of two numbers one unit apart at most one matches, unless both are exact halves around an even last digit
        (31.15 and 31.25 both read 31.2).
        """
        return round(exact(measured) / self.ulp) * self.ulp == self.value

    def difference(self, measured: Number) -> Fraction:
        """`measured` less the printed value, in units of the last printed place."""
        return (exact(measured) - self.value) / self.ulp

    def show(self, measured: Number) -> str:
        """`measured` for a reader, as a percentage where the document prints one."""
        if self.text.endswith(("%", "percent")):
            return f"{decimal(exact(measured) * 100)} %"
        return decimal(exact(measured))


def parse(text: str) -> Printed:
    """The number printed as `text`; ValueError for anything that is not one number."""
    match = _NUMBER.fullmatch(_plain(text))
    if match is None or not (match["whole"] or match["decimals"]):
        raise ValueError(f"{text!r} is not a printed number")
    decimals = match["decimals"] or ""
    digits = int(match["whole"].replace(",", "") + decimals)
    scale = Fraction(_SCALES.get(match["scale"], 1)) * Fraction(10) ** int(match["exponent"] or 0)
    ulp = scale / 10 ** len(decimals)
    return Printed(text.strip(), (-digits if match["sign"] == "-" else digits) * ulp, ulp)


def exact(number: Number) -> Fraction:
    """`number` as a fraction, without rounding. TypeError for a bool or no number, ValueError if not finite."""
    if isinstance(number, bool):
        raise TypeError(f"{number} is a truth value, not a number")
    if isinstance(number, SupportsIndex):
        return Fraction(operator.index(number))
    if not isinstance(number, SupportsRatio):
        raise TypeError(f"{number!r} of type {type(number).__name__} is not an int, Fraction, float or Decimal")
    try:
        numerator, denominator = number.as_integer_ratio()
        return Fraction(numerator, denominator)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{number!r} is not finite") from error


def decimal(number: Fraction, digits: int = 7) -> str:
    """`number` in decimal notation: an integer in full up to 10^15, anything else to so many significant digits."""
    if number.denominator == 1 and abs(number) < _FULL_INTEGER:
        return f"{number.numerator:,}"
    with localcontext(prec=digits):
        return f"{Decimal(number.numerator) / Decimal(number.denominator):,}"


def units(difference: Fraction) -> str:
    """A difference in units of the last place, with its sign and two decimals; large ones without."""
    if abs(difference) < 100:
        hundredths = round(difference * 100)
        return f"{Decimal(hundredths) / 100:+.2f}"
    return f"{'+' if difference > 0 else ''}{decimal(Fraction(round(difference)))}"


def _plain(text: str) -> str:
    """`text` with powers of ten in the form 1e25 and a typographic minus as a hyphen."""
    plain = text.strip().replace("\N{MINUS SIGN}", "-")
    plain = re.sub("(?<=10)([⁺⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+)", lambda power: "^" + power[1].translate(_SUPERSCRIPTS), plain)
    plain = re.sub(r"^([+-]?)10\^", r"\g<1>1e", plain)
    return re.sub(r"(?<=[0-9])(?:\s*[x×]\s*10\^|E)", "e", plain)
