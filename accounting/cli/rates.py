"""``sixnd time`` and ``sixnd mfu``: what a count becomes on chips, and what a measured rate makes of their peak."""

from fractions import Fraction
from typing import TYPE_CHECKING

import click

from accounting.cli.options import (
    CHIP_NAMES,
    WHOLE,
    check_context,
    choice_option,
    devices,
    devices_options,
    positions,
    positions_options,
    quantity,
)
from accounting.cli.output import EPILOG, config_argument, envelope, json_option, left_out, table

if TYPE_CHECKING:
    from accounting.flops import Recompute
    from accounting.hardware import Scope
    from accounting.pairs import Pairs
    from accounting.spec import ModelSpec


@click.command(epilog=f"{CHIP_NAMES} {EPILOG}")
@config_argument
@click.option("--tokens", type=WHOLE, required=True, metavar="D", help="Tokens to train on, such as 15.6e12.")
@click.option(
    "--seq", type=WHOLE, metavar="N", help="Tokens of a sequence; without it attention's products are left out."
)
@positions_options
@devices_options
@click.option(
    "--mfu", type=quantity(most=1), required=True, metavar="M", help="The share of the peak that is reached, 0 to 1."
)
@json_option
def time(
    config: str,
    tokens: int,
    seq: int | None,
    pairs: str,
    window: int | None,
    chip: str,
    count: int,
    dtype: str | None,
    sparse: bool,
    peak: int | None,
    mfu: Fraction,
    as_json: bool,
) -> None:
    """Days to train CONFIG on some chips, by each convention.

    CONFIG is a path to a config.json, a folder that has one, or the name of a published
    model.
    """
    from accounting import hardware, huggingface

    reading = huggingface.load(config)
    if seq is None and (pairs, window) != ("model", None):
        raise click.UsageError("--pairs and --window are about the sequences of --seq")
    chosen, chips = positions(reading, pairs, window), devices(chip, count, dtype, sparse, peak)
    check_context(reading, seq or 1)
    costs = _run(reading.spec, tokens, seq, chosen.rule)
    days = {name: hardware.days(cost, peak=chips.peak, count=count, utilisation=mfu) for name, cost in costs.items()}
    if as_json:
        envelope(
            "time",
            reading,
            tokens=tokens,
            seq=seq,
            pairs=chosen.name if seq else None,
            window=chosen.window,
            devices=chips.as_json(),
            mfu=float(mfu),
            training=costs,
            days={name: float(value) for name, value in days.items()},
            not_counted=list(reading.not_counted),
        )
        return
    length = f"in sequences of {seq:,}, pairs: {chosen.name}" if seq else "without attention's products (no --seq)"
    click.echo(f"{reading.name} ({reading.model_type}): {tokens:,} tokens {length}")
    click.echo(f"at {float(mfu):.4g} of the peak of {chips.meaning}")
    rows = [(name, cost, f"{float(days[name]):,.4g}") for name, cost in costs.items()]
    table(("training by", "FLOPs", "days"), rows)
    left_out(reading)


@click.command(epilog=f"{CHIP_NAMES} {EPILOG}")
@config_argument
@click.option("--tokens-per-second", type=quantity(), required=True, metavar="R", help="The measured rate of training.")
@click.option("--per-device", is_flag=True, help="R is that of each chip, not of all together.")
@click.option("--seq", type=WHOLE, required=True, metavar="N", help="Tokens of a sequence.")
@positions_options
@devices_options
@choice_option("--recompute", "none selective full", "What backward computes again: a row for HFU.")
@json_option
def mfu(
    config: str,
    tokens_per_second: Fraction,
    per_device: bool,
    seq: int,
    pairs: str,
    window: int | None,
    chip: str,
    count: int,
    dtype: str | None,
    sparse: bool,
    peak: int | None,
    recompute: "Recompute",
    as_json: bool,
) -> None:
    """The share of the chips' peak that a rate of training CONFIG makes, by each convention.

    CONFIG is a path to a config.json, a folder that has one, or the name of a published
    model. MFU counts what the mathematics asks for, HFU (with --recompute) what is executed.
    """
    from accounting import conventions, flops, hardware, huggingface

    reading = huggingface.load(config)
    spec, chosen = reading.spec, positions(reading, pairs, window)
    chips = devices(chip, count, dtype, sparse, peak)
    check_context(reading, seq)
    costs = {"exact": flops.training(spec, seq=seq, pairs=chosen.rule).total}
    if recompute != "none":
        costs["executed"] = flops.executed(spec, seq=seq, pairs=chosen.rule, recompute=recompute).total
    costs |= conventions.table(spec, seq=seq).flops
    scope: Scope = "device" if per_device else "global"
    rows = []
    for name, cost in costs.items():
        per_token = Fraction(cost, seq)
        rate = hardware.achieved(per_token, tokens_per_second, count=count, scope=scope)
        rows.append((name, per_token, rate, rate / chips.peak))
    if as_json:
        envelope(
            "mfu",
            reading,
            tokens_per_second=float(tokens_per_second),
            scope=scope,
            seq=seq,
            pairs=chosen.name,
            window=chosen.window,
            devices=chips.as_json(),
            recompute=recompute,
            utilisation={
                name: {
                    "kind": "hfu" if name == "executed" else "mfu",
                    "flops_per_token": float(per_token),
                    "tflops_per_second_per_device": float(rate / 10**12),
                    "share_of_peak": float(share),
                    "impossible": share > 1,
                }
                for name, per_token, rate, share in rows
            },
            not_counted=list(reading.not_counted),
        )
        return
    whose = "of each chip" if per_device else f"of all {count:,} chips together"
    click.echo(
        f"{reading.name} ({reading.model_type}): {float(tokens_per_second):,.10g} tokens a second {whose}, "
        f"in sequences of {seq:,}, pairs: {chosen.name}"
    )
    click.echo(f"on {chips.meaning}")
    shown = [
        (
            f"{name}, {recompute} recomputation (HFU)" if name == "executed" else name,
            f"{float(per_token):,.6g}",
            f"{float(rate / 10**12):,.4g}",
            f"{float(share):.2%}",
            "impossible: above the peak" if share > 1 else "",
        )
        for name, per_token, rate, share in rows
    ]
    table(("training by", "FLOPs a token", "TFLOP/s a chip", "of the peak", ""), shown)
    left_out(reading)


def _run(spec: "ModelSpec", tokens: int, seq: int | None, rule: "Pairs") -> dict[str, int]:
    """Training FLOPs of a run by each convention: whole sequences, and a shorter one for the rest.

    Without a length only the conventions that do not depend on one.
    """
    from accounting import conventions, flops

    if seq is None:
        one = conventions.table(spec, seq=1).flops
        return {name: tokens * one[name] for name in one if conventions.CONVENTIONS[name].linear}
    sequences = [(length, batch) for length, batch in ((seq, tokens // seq), (tokens % seq, 1)) if length and batch]
    exact = sum(flops.training(spec, seq=length, batch=batch, pairs=rule).total for length, batch in sequences)
    return {"exact": exact, **conventions.run(spec, sequences).flops}
