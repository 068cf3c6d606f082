"""Options that several commands share: quantities, pairs of positions, the chip."""

from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from difflib import get_close_matches
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import click

from accounting.hardware import CHIPS

if TYPE_CHECKING:
    from accounting.hardware import Chip
    from accounting.huggingface import Reading
    from accounting.pairs import Pairs

#: Quantities have at most so many digits before the point and after it.
DIGITS = 40


def quantity(*, whole: bool = False, least: int | None = None, most: int | None = None) -> Callable[[str], Any]:
    """The type of an option that takes a number as people write it, such as 8192, 15.6e12 or 0.4, read exactly.

    ``whole``: an integer, and the value is one; otherwise the value is a Fraction. Without a
    ``least`` it is more than 0; ``most`` is the largest that makes sense.
    """

    def number(value: str) -> int | Fraction:
        try:
            written = Decimal(value)
        except InvalidOperation:
            written = Decimal("nan")
        # Bounded before it is expanded: 1e999999999 is short to write.
        if not written.is_finite() or not -DIGITS <= written.adjusted() < DIGITS:
            raise click.BadParameter(f"expected a number, got {value!r}")
        exact = Fraction(written)
        if exact < least if least is not None else exact <= 0:
            raise click.BadParameter(f"expected {'more than 0' if least is None else f'at least {least}'}, got {value}")
        if most is not None and exact > most:
            raise click.BadParameter(f"expected at most {most}, got {value}")
        if whole and exact.denominator != 1:
            raise click.BadParameter(f"expected a whole number, got {value}")
        return int(exact) if whole else exact

    return number


WHOLE = quantity(whole=True)
CHIP_NAMES = f"Chips: {', '.join(chip.name for chip in CHIPS)}."


def choice_option(name: str, values: str, text: str) -> Callable[..., Any]:
    """An option that takes one of some words, by default the first."""
    words = values.split()
    return click.option(name, type=click.Choice(words), default=words[0], show_default=True, help=text)


RULES = {
    "model": "what each layer does",
    "causal": "each token with itself and all before it",
    "full": "each token with each",
    "window": "each token with the last {window:,}, itself included",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Positions:
    """Which pairs of positions attention multiplies: a rule, its name, and what it means."""

    rule: "Pairs"
    name: str
    window: int | None

    @property
    def meaning(self) -> str:
        """The rule in words."""
        return RULES[self.name].format(window=self.window)


def positions_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """``--pairs`` and ``--window``."""
    command = click.option(
        "--window", type=WHOLE, metavar="W", help="The size for --pairs window, by default the config's."
    )(command)
    text = "The pairs of positions that attention multiplies; model is what each layer does."
    named: Callable[..., Any] = choice_option("--pairs", " ".join(RULES), text)(command)
    return named


def positions(reading: "Reading", pairs: str, window: int | None) -> Positions:
    """The rule that the options name; without ``--window`` a window is the config's own, if it has one."""
    from accounting.pairs import NAMED, windowed

    if pairs != "window":
        if window is not None:
            raise click.UsageError(f"--window goes with --pairs window, not with {pairs}")
        return Positions(rule=NAMED[pairs], name=pairs, window=None)
    if window is None:
        sizes = {block.attention.window for block in reading.spec.blocks if block.attention.window is not None}
        if len(sizes) != 1:
            known = " and ".join(f"{size:,}" for size in sorted(sizes)) or "none"
            raise click.UsageError(f"--pairs window: expected --window W, as {reading.name} has {known} of its own")
        window = sizes.pop()
    return Positions(rule=windowed(window), name=pairs, window=window)


def check_context(reading: "Reading", tokens: int) -> None:
    """Refuse more tokens than learned positions: rotary ones have no end."""
    if reading.spec.learned_positions and tokens > reading.spec.context:
        raise click.UsageError(
            f"{reading.name} has {reading.spec.context:,} learned positions: a sequence of {tokens:,} does not fit"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """Chips of one kind, and the peak to measure against."""

    name: str
    count: int
    peak: int
    kind: str
    source: str

    @property
    def meaning(self) -> str:
        """How many, their peak, and who says so."""
        rate = f"{float(self.peak) / 1e12:,.6g} TFLOP/s each, {self.kind}"
        return f"{self.count:,} x {self.name}, peak {rate}\npeak from: {self.source}"

    def as_json(self) -> dict[str, Any]:
        """The same for programs."""
        return {
            "chip": self.name,
            "count": self.count,
            "peak_flops_per_second": self.peak,
            "peak_kind": self.kind,
            "source": self.source,
        }


def devices_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """``--chip``, ``--count`` and what may be said about the peak."""
    for option in (
        click.option(
            "--peak",
            type=WHOLE,
            metavar="FLOP/S",
            help="The peak of a chip that is not known here, or another one; then any --chip name will do.",
        ),
        click.option("--sparse", is_flag=True, help="The vendor's peak with half of the entries zero."),
        click.option("--dtype", help="The dtype of the peak; by default bfloat16."),
        click.option("--count", type=WHOLE, required=True, metavar="K", help="How many chips."),
        click.option("--chip", required=True, metavar="NAME", help="The chip, with its form factor."),
    ):
        command = option(command)
    return command


def devices(chip: str, count: int, dtype: str | None, sparse: bool, peak: int | None) -> Devices:
    """The chips that the options name; an unknown one, or an unknown peak, has to be said."""
    from accounting.files import printable
    from accounting.hardware import find

    if peak is not None:
        if sparse or dtype is not None:
            raise click.UsageError("--sparse and --dtype choose among known peaks: with --peak, say that peak")
        return Devices(name=printable(chip), count=count, peak=peak, kind="as given", source="--peak")
    known = find(chip)
    if known is None:
        raise click.UsageError(f"--chip {chip}: not known here: {_similar(chip)}; for any other, say --peak in FLOP/s")
    dtype = dtype or "bfloat16"
    rate = known.peak(dtype, sparse=sparse)
    kind = f"{dtype} {'sparse' if sparse else 'dense'}"
    if rate is None:
        raise click.UsageError(
            f"--chip {chip}: no {kind} peak is known ({_dtypes(known, sparse)}): say --peak in FLOP/s"
        )
    return Devices(name=known.name, count=count, peak=rate, kind=kind, source=known.source)


def _dtypes(chip: "Chip", sparse: bool) -> str:
    return f"known are {', '.join(chip.sparse if sparse else chip.dense) or 'none'}; {chip.source}"


def _similar(name: str) -> str:
    names = [chip.name for chip in CHIPS]
    wanted = name.lower()
    close = [other for other in names if other.startswith(wanted)] or get_close_matches(wanted, names, n=3)
    return f"known are {', '.join(close or names)}"
