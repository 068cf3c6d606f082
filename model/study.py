"""The scaling study: one family of sizes on one diet, its losses as one JSON, and their picture.

``python -m model.study`` trains on a language whose entropy rate is known, ``--corpus FILE`` on text. A study that was
stopped goes on where its checkpoints are.
"""

import platform
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, get_args

import click
import msgspec
import numpy as np
import torch
from tabulate import tabulate

from accounting import flops, params
from accounting.files import InputError, read
from accounting.scaling import Floats, PowerLaw, fit_power_law
from accounting.spec import SpecError
from model.diets import Corpus, Diet, Synthetic
from model.recipes import STUDY_SIZES, d2l_gpt
from model.source import MarkovSource
from model.training import Evaluation, RateRule, Recipe, Training, train

Schema = Literal["sixnd.study/1"]
Column = Literal["train", "validation", "train_excess", "validation_excess"]

LAST = 50  # steps whose mean is the training loss (d2l 11.7.2.2)
LIMIT_BYTES = 2**24


class Size(NamedTuple):
    """The dials of one member of the family."""

    width: int
    layers: int
    heads: int


#: The textbook's recipe (d2l 11.7.2.2), and one for the chain, whose rate falls as the root of the width.
TEXT = Recipe(steps=2000, batch=64, tokens=128, anchor_rate=1e-3, anchor_width=256, rule="inverse", schedule="constant")
CHAIN = Recipe(steps=250, batch=32, tokens=16, anchor_rate=0.03, anchor_width=8, rule="root", schedule="cosine")
TEXT_SIZES = tuple(Size(*size) for size in STUDY_SIZES)
CHAIN_SIZES = tuple(Size(width, 1, 1) for width in (4, 6, 10, 16, 28))
REPEATED = 512  # sequences of the fixed diet


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One size, trained: losses in nats a token, and what of them is above the floor where that is known.

    ``parameters`` are non-embedding, ``tokens`` those of all steps, ``flops`` exact model FLOPs of training. ``train``
    is the mean of the last 50 steps, ``validation`` the plain mean of the batches' means, ``validation_weighted`` the
    mean over tokens.
    """

    diet: str
    seed: int
    width: int
    layers: int
    heads: int
    parameters: int
    tokens: int
    flops: int
    rate: float
    seconds: float
    train: float
    validation: float
    validation_weighted: float
    train_excess: float | None
    validation_excess: float | None
    evaluations: tuple[Evaluation, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """All runs of a study, and what they have in common."""

    schema: Schema
    torch: str
    device: str
    threads: int
    recipe: Recipe
    diets: dict[str, dict[str, Any]]
    runs: tuple[Run, ...]

    def curve(self, diet: str, column: Column) -> tuple[Floats, Floats]:
        """Non-embedding parameters, rising, and the mean over seeds of a column."""
        columns = defaultdict(list)
        for run in self.runs:
            if run.diet == diet:
                columns[run.parameters].append(getattr(run, column))
        sizes = sorted(columns)
        return np.array(sizes, np.float64), np.array([np.mean(columns[size]) for size in sizes])

    def line(self, diet: str, column: Column, sizes: int | None = None) -> PowerLaw:
        """The power law of least squares through a curve, or through its smallest sizes."""
        parameters, losses = self.curve(diet, column)
        return fit_power_law(parameters[:sizes], losses[:sizes])


def load(path: Path) -> Study:
    """The study of a JSON file; InputError for a file that is none."""
    try:
        return msgspec.json.decode(read(path, LIMIT_BYTES), type=Study)
    except msgspec.DecodeError as error:
        raise InputError(path, f"no study: {error}") from None


def dump(study: Study) -> bytes:
    """The JSON of a study."""
    return msgspec.json.format(msgspec.json.encode(study), indent=1) + b"\n"


def finished(training: Training, name: str, size: Size) -> Run:
    """What a training has come to, at its last step."""
    spec, recipe, diet = training.spec, training.recipe, training.diet
    last = range(max(0, recipe.steps - LAST), recipe.steps)
    floors = [diet.floor(diet.batch(step, recipe.batch)) for step in last]
    known = [floor for floor in floors if floor is not None]
    loss = float(training.losses[last.start :].double().mean())
    final = training.evaluations[-1]
    rate = diet.entropy_rate
    return Run(
        diet=name,
        seed=diet.seed,
        **size._asdict(),
        parameters=params.count(spec).non_embedding,
        tokens=recipe.steps * recipe.batch * recipe.tokens,
        flops=recipe.steps * flops.training(spec, seq=recipe.tokens, batch=recipe.batch).total,
        rate=recipe.peak_rate(size.width),
        seconds=round(training.seconds, 1),
        train=loss,
        validation=final.batches,
        validation_weighted=final.tokens,
        train_excess=loss - float(np.mean(known)) if known else None,
        validation_excess=None if rate is None else final.batches - rate,
        evaluations=tuple(training.evaluations),
    )


def run(
    diets: Sequence[tuple[str, Diet]],
    sizes: Sequence[Size],
    recipe: Recipe,
    *,
    folder: Path,
    device: torch.device,
    save_every: int = 100,
) -> Iterator[Run]:
    """Train every size on every diet, which have names, with a progress bar for each; checkpoints go to a folder.

    Raises InputError for a checkpoint there that is corrupt or of another design.
    """
    for name, diet in diets:
        for size in sizes:
            spec = d2l_gpt(diet.vocab, size.width, size.heads, size.layers)
            training = Training(spec, recipe, diet, device)
            checkpoint = folder / f"{name}-{diet.seed}-{'-'.join(map(str, size))}.safetensors"
            label = f"{name}, seed {diet.seed}, width {size.width}"
            with click.progressbar(length=recipe.steps, label=label, file=sys.stderr) as bar:
                train(training, checkpoint, save_every=save_every, done=bar.update)
            yield finished(training, name, size)


def _shown(study: Study) -> tuple[Column, Column]:
    """The columns of a picture: what of the losses is above the entropy rate where that is known, else all."""
    if study.runs[0].validation_excess is None:
        return "train", "validation"
    return "train_excess", "validation_excess"


def draw(study: Study) -> str:
    """Loss, or what of it is above the floor, against non-embedding parameters on logarithmic axes: an SVG.

    The line is the power law through the fresh diet's validation, or through the three smallest sizes. Where losses
    were evaluated on the way, a second picture has them by step.
    """
    from accounting.pictures import NARROW, WIDE, axes, svg  # who only trains need not have matplotlib

    columns = _shown(study)
    followed = any(len(run.evaluations) > 1 for run in study.runs)
    figure, (plot, *others) = axes(WIDE if followed else NARROW, columns=2 if followed else 1)
    for index, diet in enumerate(study.diets):
        for column, marker in zip(columns, ("o-", "s--"), strict=True):
            parameters, losses = study.curve(diet, column)
            # A loss below the floor has no place on a logarithmic axis: the line ends before it.
            heights, label = np.where(losses > 0, losses, np.nan), f"{diet}, {column.removesuffix('_excess')}"
            plot.loglog(parameters, heights, marker, color=f"C{index}", label=label, markersize=4)
    diet = "fresh" if "fresh" in study.diets else next(iter(study.diets))
    parameters, _ = study.curve(diet, columns[1])
    if len(parameters) > 1:
        law = study.line(diet, columns[1], None if diet == "fresh" else 3)
        plot.loglog(parameters, law.at(parameters), color="#777777", linewidth=1, label=f"slope {law.exponent:.2f}")
    height = "loss" if columns[1] == "validation" else "loss above the entropy rate"
    plot.set(xlabel="N, non-embedding parameters", ylabel=f"{height}, nats a token")
    plot.legend(fontsize=7)
    for other in others:
        for run in study.runs:
            taken = np.array(run.evaluations)
            other.plot(taken[:, 0], taken[:, 1], marker=".", label=f"{run.diet}, N = {run.parameters:,}")
        other.set(xlabel="steps", ylabel="validation loss, nats a token")
        other.legend(fontsize=7)
    return svg(figure)


def sizes_of(text: str | None, known: Sequence[Size]) -> tuple[Size, ...]:
    """Sizes as they are asked for: known ones by their widths, others as WIDTH:LAYERS:HEADS, with commas between."""
    by_width = {str(size.width): size for size in known}
    sizes = []
    for part in text.split(",") if text else by_width:
        dials = part.split(":")
        if part in by_width:
            sizes.append(by_width[part])
        elif len(dials) == 3 and all(dial.isdecimal() and int(dial) for dial in dials):
            sizes.append(Size(*map(int, dials)))
        else:
            known_widths = ", ".join(by_width)
            raise click.BadParameter(f"--sizes: expected WIDTH:LAYERS:HEADS or one of {known_widths}, got {part!r}")
    if len(set(sizes)) < len(sizes):
        raise click.UsageError("--sizes: the same one twice")
    return tuple(sizes)


COUNT = click.IntRange(1, 10**7)


@click.command(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.option("--corpus", multiple=True, type=click.Path(path_type=Path), metavar="FILE", help="Text; may be repeated.")
@click.option("--diet", multiple=True, type=click.Choice(["fresh", "fixed"]), help="Of the chain: both unless said.")
@click.option("--sizes", metavar="SIZES", help="Some of the default widths, or WIDTH:LAYERS:HEADS.")
@click.option("--steps", type=COUNT, help="Steps of every size.")
@click.option("--rate", type=click.Choice(get_args(RateRule)), help="How the learning rate goes with the width.")
@click.option(
    "--seed", "seeds", multiple=True, type=click.IntRange(0, 2**63 - 1), default=(0,), help="May be repeated."
)
@click.option("--held-out", type=COUNT, help="Sequences for validation: 2000 of text, 1024 of the chain unless said.")
@click.option("--evaluate-every", type=COUNT, metavar="STEPS", help="Take the validation loss on the way.")
@click.option("--save-every", type=COUNT, default=100, metavar="STEPS", help="Leave a checkpoint.")
@click.option("--threads", type=COUNT, help="Of torch on the CPU.")
@click.option("--device", default="cpu", help="What torch calls it.")
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("build/study"), metavar="FOLDER", help="Of the results."
)
def command(
    corpus: tuple[Path, ...],
    diet: tuple[str, ...],
    sizes: str | None,
    steps: int | None,
    rate: RateRule | None,
    seeds: tuple[int, ...],
    held_out: int | None,
    evaluate_every: int | None,
    save_every: int,
    threads: int | None,
    device: str,
    out: Path,
) -> None:
    """Train a family of sizes on one diet, and write FOLDER/study.json and FOLDER/study.svg.

    Without --corpus the text is a seeded Markov chain: fresh sequences at every step, and a fixed few that the large
    sizes learn by heart. Run again, a study goes on from the checkpoints in the folder.
    """
    if corpus and diet:
        raise click.UsageError("--diet is of the chain: text is read over and over")
    for name, values in (("--seed", seeds), ("--diet", diet), ("--corpus", corpus)):
        if len(set(values)) < len(values):
            raise click.UsageError(f"{name}: the same one twice")
    if threads is not None:
        torch.set_num_threads(threads)
    recipe = TEXT if corpus else CHAIN
    recipe = replace(recipe, steps=steps or recipe.steps, rule=rate or recipe.rule, evaluate_every=evaluate_every)
    diets: list[tuple[str, Diet]] = []
    for seed in seeds:
        if corpus:
            diets.append(("corpus", Corpus(corpus, tokens=recipe.tokens, held_out=held_out or 2000, seed=seed)))
        for name in () if corpus else diet or ("fresh", "fixed"):
            repeated = REPEATED if name == "fixed" else None
            diets.append((name, Synthetic(MarkovSource(), recipe.tokens, seed, repeated, held_out or 1024)))
    try:
        target = torch.device(device)
        float(torch.zeros(1, device=target))
    except (RuntimeError, AssertionError) as error:
        raise click.BadParameter(f"--device {device}: {str(error).splitlines()[0]}") from None
    runs = run(
        diets,
        sizes_of(sizes, TEXT_SIZES if corpus else CHAIN_SIZES),
        recipe,
        folder=out / "checkpoints",
        device=target,
        save_every=save_every,
    )
    study = Study(
        schema="sixnd.study/1",
        torch=str(torch.__version__),
        device=torch.cuda.get_device_name(target) if target.type == "cuda" else f"{target.type}, {platform.machine()}",
        threads=torch.get_num_threads(),
        recipe=recipe,
        diets={name: one.described() for name, one in diets},
        runs=tuple(runs),
    )
    (out / "study.json").write_bytes(dump(study))
    (out / "study.svg").write_text(draw(study), "utf-8")
    rows = [(r.diet, r.seed, r.width, r.parameters, r.train, r.validation, r.validation_excess) for r in study.runs]
    headers = ("diet", "seed", "width", "N", "train", "validation", "excess")
    click.echo(tabulate(rows, headers, floatfmt=".3f", intfmt=","))


def main() -> NoReturn:
    """Run the command; bad input is one line on standard error, and exit code 2."""
    try:
        command.main(standalone_mode=False)
        sys.exit(0)
    except click.ClickException as error:
        click.echo(f"study: {' '.join(error.format_message().split())}", err=True)
        sys.exit(2)
    except (InputError, SpecError) as error:
        click.echo(f"study: {error}", err=True)
        sys.exit(2)
    except OSError as error:
        click.echo(f"study: {error.filename}: {(error.strerror or 'cannot be written').lower()}", err=True)
        sys.exit(2)
    except click.Abort:
        sys.exit(130)


if __name__ == "__main__":
    main()
