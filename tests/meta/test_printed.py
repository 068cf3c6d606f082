"""Printed numbers: what each form says, and that a comparison can fail."""

from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from accounting.ledger.printed import Printed, decimal, parse, units

FORMS: dict[str, tuple[int | Fraction, int | Fraction]] = {
    "4.72M": (4_720_000, 10_000),
    "2,424": (2_424, 1),
    "12,345.6": (Fraction("12345.6"), Fraction("0.1")),
    "6000": (6_000, 1),
    "32%": (Fraction("0.32"), Fraction("0.01")),
    "32 %": (Fraction("0.32"), Fraction("0.01")),
    "31.02 percent": (Fraction("0.3102"), Fraction("0.0001")),
    "671.0 billion": (671 * 10**9, 10**8),
    "1.5 trillion": (15 * 10**11, 10**11),
    "70 thousand": (70_000, 1_000),
    "3 million": (3 * 10**6, 10**6),
    "8k": (8_000, 1_000),
    "8K": (8_000, 1_000),
    "1.3B": (13 * 10**8, 10**8),
    "989G": (989 * 10**9, 10**9),
    "1.8T": (18 * 10**11, 10**11),
    "2.324e+11": (2_324 * 10**8, 10**8),
    "2.5E-3": (Fraction("0.0025"), Fraction("0.0001")),
    "3.79 x 10^25": (379 * 10**23, 10**23),
    "3.79×10²⁵": (379 * 10**23, 10**23),
    "10^25": (10**25, 10**25),
    "10⁻³": (Fraction("0.001"), Fraction("0.001")),
    "-0.5": (Fraction("-0.5"), Fraction("0.1")),
    "\N{MINUS SIGN}0.5": (Fraction("-0.5"), Fraction("0.1")),
    "+7": (7, 1),
    ".076": (Fraction("0.076"), Fraction("0.001")),
    "  1.69 ": (Fraction("1.69"), Fraction("0.01")),
    "0": (0, 1),
}

measured_numbers = st.one_of(
    st.integers(-(10**30), 10**30),
    st.fractions(),
    st.floats(allow_nan=False, allow_infinity=False, width=32).map(np.float32),
    st.floats(allow_nan=False, allow_infinity=False),
    st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**20), max_value=10**20),
)


@st.composite
def printed_numbers(draw: st.DrawFn) -> Printed:
    """Any printed number, in every notation."""
    sign = draw(st.sampled_from(["", "+", "-", "\N{MINUS SIGN}"]))
    whole = draw(st.integers(0, 10**12))
    digits = f"{whole:,}" if draw(st.booleans()) else str(whole)
    places = draw(st.text("0123456789", max_size=6))
    scales = ["", "k", "M", " billion", "%", " percent", "e+11", "e-7", " x 10^25", "×10⁻³"]
    return parse(f"{sign}{digits}{'.' if places else ''}{places}{draw(st.sampled_from(scales))}")


@pytest.mark.parametrize("text", FORMS)
def test_form(text: str) -> None:
    """Each form that documents use says a value and the place to which it was rounded."""
    value, ulp = FORMS[text]
    assert parse(text) == Printed(text.strip(), Fraction(value), Fraction(ulp))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "many",
        "1,23",
        "1,2345",
        "0,123",
        "1.",
        ".",
        "-",
        "4.72 M parameters",
        "~5",
        "1/3",
        "1e5M",
        "٣",
        "5 x 2^3",
        "nan",
    ],
)
def test_not_a_number(text: str) -> None:
    """Anything that is not one printed number is an error that shows it."""
    with pytest.raises(ValueError, match="is not a printed number"):
        parse(text)


@given(printed_numbers(), st.fractions(Fraction(-1, 2), Fraction(1, 2)))
def test_within_half_a_unit(printed: Printed, offset: Fraction) -> None:
    """A number matches within half a unit of the printed one, and no longer when it is moved by a whole unit."""
    assume(abs(offset) < Fraction(1, 2))
    measured = printed.value + offset * printed.ulp
    assert printed.matches(measured)
    assert printed.difference(measured) == offset
    assert not printed.matches(measured + printed.ulp)
    assert not printed.matches(measured - printed.ulp)


@given(printed_numbers(), measured_numbers)
@example(parse("31.2%"), Decimal("0.3125"))
def test_match_is_rounding(printed: Printed, measured: Any) -> None:
    """A number matches exactly when no other number at the printed place is nearer, and a tie goes to the even one."""
    distance = abs(printed.difference(measured))
    tie_is_even = (printed.value / printed.ulp) % 2 == 0
    assert printed.matches(measured) == (distance < Fraction(1, 2) or (distance == Fraction(1, 2) and tie_is_even))


@given(printed_numbers())
def test_tie(printed: Printed) -> None:
    """A number halfway between two printed places reads as the even one, and as no other."""
    tie = printed.value + printed.ulp / 2
    neighbour = Printed("", printed.value + printed.ulp, printed.ulp)
    even, odd = (printed, neighbour) if (printed.value / printed.ulp) % 2 == 0 else (neighbour, printed)
    assert even.matches(tie)
    assert not odd.matches(tie)


@pytest.mark.parametrize(
    "measured",
    [2424, np.int64(2424), np.uint16(2424), 2424.0, np.float32(2424), Fraction(4848, 2), Decimal("2424.0")],
    ids=lambda measured: type(measured).__name__,
)
def test_kinds_of_number(measured: Any) -> None:
    """Every kind of real number is compared without rounding."""
    assert parse("2,424").difference(measured) == 0


def test_floats_are_exact() -> None:
    """A float is what its bits say: 0.15 lies below a tie and 0.35 too, whatever they print as."""
    assert parse("0.1").matches(Fraction(3, 20) - Fraction(1, 10**20))
    assert parse("0.1").matches(0.15)
    assert parse("0.3").matches(0.35)


@pytest.mark.parametrize("measured", [True, np.True_, "2424", None, 1j, [2424]])
def test_not_measured(measured: Any) -> None:
    """A truth value, a text or a container is no number."""
    with pytest.raises(TypeError):
        parse("2,424").matches(measured)


@pytest.mark.parametrize("measured", [float("nan"), float("inf"), np.float64("-inf"), Decimal("NaN"), Decimal("inf")])
def test_not_finite(measured: Any) -> None:
    """What is not finite matches nothing: it is an error."""
    with pytest.raises(ValueError, match="not finite"):
        parse("2,424").matches(measured)


def test_reading() -> None:
    """Numbers are shown in full while a reader can take them in, and percentages as percentages."""
    assert decimal(Fraction(4_718_592)) == "4,718,592"
    assert decimal(Fraction(1, 3)) == "0.3333333"
    assert decimal(Fraction(379 * 10**23)) == "3.790000E+25"
    assert parse("32%").show(Fraction(5, 16)) == "31.25 %"
    assert [units(Fraction(text)) for text in ("0.137", "-0.5", "0", "123456.5")] == [
        "+0.14",
        "-0.50",
        "+0.00",
        "+123,456",
    ]
