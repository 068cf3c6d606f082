"""``sixnd optimum`` and ``sixnd fit``: how a law of loss splits a budget, and what law some runs follow."""

from dataclasses import asdict
from fractions import Fraction
from typing import TYPE_CHECKING

import click

from accounting.cli.options import choice_option, quantity
from accounting.cli.output import document, json_option, table
from accounting.files import InputError

if TYPE_CHECKING:
    from accounting.descent import Objective
    from accounting.scaling import LossSurface, Split

#: The refit first: the constants that Hoffmann et al. print come from a fit that had not converged.
NAMES = "besiroglu hoffmann hoffmann-4digit hoffmann-unrounded"
CONVENTION = "N counts all parameters, tables among them; training costs 6 N D, serving 2 N a token"
MOST_RESAMPLES = 100_000


@click.command(context_settings={"max_content_width": 100})
@click.option("--compute", type=quantity(), metavar="C", help="FLOPs of training to spend, such as 5.76e23.")
@choice_option("--law", NAMES, "The fit of the loss surface.")
@click.option("--inference", type=quantity(least=0), metavar="TOKENS", help="Tokens to serve after training.")
@click.option("--loss", type=quantity(), metavar="L", help="The loss to reach; by default the least that C buys.")
@json_option
def optimum(
    compute: Fraction | None, law: str, inference: Fraction | None, loss: Fraction | None, as_json: bool
) -> None:
    """How many parameters, on how many tokens: the best split of a budget.

    With --compute, the N and D of least loss. With --inference, the N and D of least cost,
    serving included, among those that reach --loss.
    """
    from accounting.scaling import LAWS

    surface, source = LAWS[law]
    if compute is None and loss is None:
        raise click.UsageError("expected --compute C, --loss L or both")
    try:
        split, target = _split(surface, compute, inference, loss)
    except ValueError as error:
        raise click.UsageError(f"--law {law}: {error}") from None
    if split.parameters < 1 or split.tokens < 1:
        less = f"{split.parameters:.3g} parameters on {split.tokens:.3g} tokens, less than one"
        raise click.UsageError(f"--law {law}: the best split is {less}")
    training, serving = 6 * split.parameters * split.tokens, 2 * split.parameters * float(inference or 0)
    numbers = {
        "N": split.parameters,
        "D": split.tokens,
        "tokens_per_parameter": split.ratio,
        "loss": target,
        "alpha_term": surface.capacity(split.parameters),
        "beta_term": surface.estimation(split.tokens),
        "training_flops": training,
        "inference_flops": serving,
    }
    if as_json:
        given = {"compute": compute, "inference": inference, "loss": loss}
        document(
            "optimum",
            None,
            **{name: float(value) for name, value in numbers.items()},
            given={name: None if value is None else float(value) for name, value in given.items()},
            law={"name": law, "source": source, **asdict(surface)},
            conventions=CONVENTION,
        )
        return
    click.echo(f"{law}: L = {formula(surface)}")
    click.echo(f"from: {source}")
    what = "cheapest to train and serve" if inference else "of least loss" if loss is None else "cheapest to train"
    click.echo(f"The split {what}. {CONVENTION}.")
    rows = [
        ("N, parameters", short(split.parameters)),
        ("D, tokens of training", short(split.tokens)),
        ("D / N, tokens for each parameter", f"{split.ratio:,.4g}"),
        ("loss, nats a token", f"{target:.5g}"),
        ("  of it A / N^alpha", f"{numbers['alpha_term']:.3g}"),
        ("  of it B / D^beta", f"{numbers['beta_term']:.3g}"),
        ("FLOPs of training, 6 N D", f"{training:.4g}"),
    ]
    if inference:
        rows.append((f"FLOPs of serving {short(float(inference))} tokens, 2 N each", f"{serving:.4g}"))
    if compute is not None and (inference or loss is not None):
        rows.append(("training over --compute", f"{training / float(compute):.4g}"))
    table(("quantity", "value"), rows)


def _split(
    surface: "LossSurface", compute: Fraction | None, inference: Fraction | None, loss: Fraction | None
) -> tuple["Split", float]:
    """The split that the options ask for, and its loss."""
    best = None if compute is None else surface.optimum(float(compute))
    target = float(surface.loss(*best)) if loss is None and best is not None else float(loss or 0)
    if best is not None and loss is None and not inference:
        return best, target
    return surface.cheapest(target, float(inference or 0)), target


@click.command(context_settings={"max_content_width": 100})
@click.argument("runs", type=click.Path())
@choice_option("--objective", "huber lad", "Huber losses of log L with delta 1e-3, summed, or absolute deviations.")
@click.option("--drop-highest", type=quantity(whole=True, least=0), default=0, metavar="K", help="Leave out K runs.")
@click.option(
    "--bootstrap",
    type=quantity(whole=True, most=MOST_RESAMPLES),
    metavar="K",
    help="Intervals of 80 % from K resamples of the runs.",
)
@click.option("--seed", type=quantity(whole=True, least=0), default=0, metavar="S", help="Of the resamples.")
@json_option
def fit(runs: str, objective: "Objective", drop_highest: int, bootstrap: int | None, seed: int, as_json: bool) -> None:
    """Fit E + A / N^alpha + B / D^beta to the runs of a CSV file.

    RUNS has a header with N, D and loss, or with N, C and loss, D being C / 6 N. The fit starts
    from the 4,500 points of Hoffmann et al.; what it says of them shows whether to believe it.
    """
    from accounting import runs as tables

    whole = tables.load(runs)
    kept = whole.without_highest(drop_highest)
    try:
        from accounting import fits
    except ModuleNotFoundError as error:
        raise click.ClickException(f"fit needs {error.name}: pip install 'sixnd[fits]'") from None
    columns = kept.parameters, kept.tokens, kept.losses
    try:
        found = fits.fit(*columns, objective=objective)
        intervals = bootstrap and fits.bootstrap(
            *columns, resamples=bootstrap, seed=seed, objective=objective, law=found.law
        )
    except ValueError as error:
        raise InputError(whole.path, str(error)) from None
    exponents = dict(zip(("N_exponent", "D_exponent"), found.law.exponents, strict=True))
    constants = {**asdict(found.law), **exponents}
    bounds = intervals.bounds if intervals else {}
    if as_json:
        document(
            "fit",
            None,
            runs={
                "path": whole.path,
                "sha256": whole.sha256,
                "count": len(whole),
                "fitted": len(kept),
                "tokens_from": whole.tokens_from,
            },
            law=asdict(found.law),
            **exponents,
            objective={"name": found.objective, "delta": found.delta, "value": found.value},
            starts=found.starts,
            share_at_optimum=found.share_at_optimum,
            converged=found.converged,
            gradient_norm=found.gradient_norm,
            gradient_bound=found.gradient_bound,
            spread=dict(found.spread),
            intervals={name: [interval.lower, interval.upper] for name, interval in bounds.items()} or None,
            bootstrap=intervals
            and {
                "resamples": intervals.resamples,
                "seed": seed,
                "level": intervals.level,
                "unconverged": intervals.unconverged,
            },
            conventions=CONVENTION,
        )
        return
    left_out = f", the {len(whole) - len(kept):,} of highest loss left out" if len(kept) < len(whole) else ""
    click.echo(f"{whole.path}: {len(kept):,} runs, D from {whole.tokens_from}{left_out}")
    meaning = "absolute deviations" if objective == "lad" else f"Huber losses, delta {found.delta:g},"
    click.echo(f"L = {formula(found.law)}")
    click.echo(f"Least sum of {meaning} of log L: {found.value:.6g}, from {found.starts:,} starts.")
    click.echo(
        f"At this value ended {found.at_optimum:,} of them ({found.share_at_optimum:.1%}), their constants within "
        f"{max(found.spread.values()):.2g} of each other; gradient {found.gradient_norm:.2g} of at most "
        f"{found.gradient_bound:.2g}: {'converged' if found.converged else 'NOT CONVERGED'}."
    )
    rows = [
        (name, f"{value:.6g}", *(f"{bound:.6g}" for bound in bounds.get(name, ()))) for name, value in constants.items()
    ]
    heads = (f"{intervals.level:.0%} from", "to") if intervals else ()
    table(("constant", "value", *heads), rows)
    if intervals and intervals.unconverged:
        click.echo(f"Of {intervals.resamples:,} resamples {intervals.unconverged:,} reached no optimum.")


def formula(surface: "LossSurface") -> str:
    """A loss surface as one writes it, with six digits."""
    return f"{surface.E:.6g} + {surface.A:.6g} / N^{surface.alpha:.6g} + {surface.B:.6g} / D^{surface.beta:.6g}"


def short(number: float) -> str:
    """Four digits and a suffix: 41.30B, 4.036T."""
    for size, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if 999.95 * size > number >= 0.99995 * size:
            return f"{number / size:#.4g}{suffix}"
    return f"{number:.4g}"
