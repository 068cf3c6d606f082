"""``sixnd flops``: what a batch costs, exactly, and by the field's shortcuts."""

from dataclasses import asdict
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import click

from accounting.cli.options import WHOLE, check_context, choice_option, positions, positions_options, quantity
from accounting.cli.output import EPILOG, config_argument, envelope, json_option, left_out, table

if TYPE_CHECKING:
    from accounting.conventions import Table
    from accounting.flops import Flops, Recompute

COMPONENTS = ("linear", "scores", "mixture", "head", "router", "total")


@click.command(epilog=EPILOG)
@config_argument
@click.option("--seq", type=WHOLE, metavar="N", help="Tokens of a sequence; with --decode new ones, by default 1.")
@click.option("--batch", type=WHOLE, default=1, show_default=True, metavar="B", help="Sequences.")
@positions_options
@click.option(
    "--decode",
    type=quantity(whole=True, least=0),
    metavar="CACHE",
    help="Forward alone, after CACHE tokens that are kept.",
)
@choice_option("--recompute", "none selective full", "What backward computes again, in hardware FLOPs alone.")
@click.option("--explain", is_flag=True, help="Where each convention comes from, and why it differs.")
@json_option
def flops(
    config: str,
    seq: int | None,
    batch: int,
    pairs: str,
    window: int | None,
    decode: int | None,
    recompute: "Recompute",
    explain: bool,
    as_json: bool,
) -> None:
    """Count the FLOPs of CONFIG: forward, backward, training, and by convention.

    CONFIG is a path to a config.json, a folder that has one, or the name of a published
    model. A multiply-add is two FLOPs; softmax, norms and lookups are none.
    """
    from accounting import conventions, huggingface
    from accounting import flops as counts
    from accounting.pairs import cached
    from accounting.spec import LatentAttention

    if seq is None and decode is None:
        raise click.UsageError("--seq: expected the tokens of a sequence")
    if decode is not None and (recompute != "none" or explain):
        raise click.UsageError("--decode is forward alone: --recompute and --explain are about training")
    reading = huggingface.load(config)
    spec, chosen = reading.spec, positions(reading, pairs, window)
    tokens = 1 if seq is None else seq
    check_context(reading, tokens + (decode or 0))
    latent = decode is not None and any(isinstance(block.attention, LatentAttention) for block in spec.blocks)
    said = {
        "seq": tokens,
        "batch": batch,
        "cache": decode,
        "pairs": chosen.name,
        "window": chosen.window,
        "latent_cache": "expanded" if latent else None,
    }
    forward = counts.forward(
        spec, seq=tokens, batch=batch, pairs=chosen.rule if decode is None else cached(decode, chosen.rule)
    )
    rows = [("forward", forward, batch * tokens)]
    if decode is None:
        backward = counts.backward(spec, seq=tokens, batch=batch, pairs=chosen.rule)
        training = forward + backward
        executed = counts.executed(spec, seq=tokens, batch=batch, pairs=chosen.rule, recompute=recompute)
        shortcuts = conventions.table(spec, seq=tokens, batch=batch)
        rows += [("backward", backward, 0), ("training", training, batch * tokens)]
        if recompute != "none":
            rows.append((f"executed, {recompute} recomputation", executed, 0))
        answer: dict[str, Any] = {
            "backward": _components(backward),
            "training": training.total,
            "executed": executed.total,
            "recompute": recompute,
            "conventions": shortcuts.flops,
            "silent": shortcuts.silent,
        }
    else:
        answer = {"backward": None, "training": None, "executed": None, "conventions": {}}
    if as_json:
        envelope(
            "flops", reading, **said, forward=_components(forward), **answer, not_counted=list(reading.not_counted)
        )
        return
    after = "" if decode is None else f" after {decode:,} that are kept"
    click.echo(f"{reading.name} ({reading.model_type}): {batch:,} x {tokens:,} tokens{after}")
    click.echo(f"pairs: {chosen.name}, {chosen.meaning}")
    if latent:
        click.echo("kept: every head's keys and values, as sixnd memory --expanded counts them")
    table(("FLOPs", *COMPONENTS), [row for name, count, per in rows for row in _rows(name, count, per)])
    if decode is None:
        _conventions(training.total, shortcuts, explain)
    left_out(reading)


def _components(count: "Flops") -> dict[str, int]:
    return {**asdict(count), "total": count.total}


def _rows(name: str, count: "Flops", tokens: int) -> list[tuple[Any, ...]]:
    """A row of a count, and one for each of its tokens where these are given."""
    values = _components(count)
    rows = [(name, *(values[component] for component in COMPONENTS))]
    if tokens > 1:
        rows.append((f"{name} a token", *(_each(values[component], tokens) for component in COMPONENTS)))
    return rows


def _each(value: int, tokens: int) -> int | str:
    """A quotient as an integer, or with its fraction in full: 40 1/3."""
    whole, rest = divmod(value, tokens)
    return f"{whole:,} {Fraction(rest, tokens)}" if rest else whole


def _conventions(exact: int, shortcuts: "Table", explain: bool) -> None:
    """Training by each shortcut, and what share of the exact count that is."""
    from accounting.conventions import CONVENTIONS

    click.echo("Training by convention:")
    rows: list[tuple[Any, ...]] = [("exact", exact, "1", "the sum above")]
    rows += [
        (name, count, f"{float(Fraction(count, exact)):.4f}", CONVENTIONS[name].formula)
        for name, count in shortcuts.flops.items()
    ]
    table(("convention", "FLOPs", "of exact", "formula"), rows)
    if explain:
        for name in shortcuts.flops:
            click.echo(f"{name}: {CONVENTIONS[name].difference}\n  {CONVENTIONS[name].source}")
        click.echo()
    for name, reason in shortcuts.silent.items():
        click.echo(f"{name} says nothing: {reason}")
