"""The command ``sixnd``: exact counts for a config, as a table or as JSON.

Bad input is one line on standard error and exit code 2.
"""

import json
import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NoReturn

import click

from accounting import __version__, published

if TYPE_CHECKING:
    from accounting.census import Census
    from accounting.huggingface import Reading
    from accounting.params import Parameters

MEANING = {
    "unique": "scalars in distinct parameters, a tied table once",
    "stored": "unique, and the buffers that a checkpoint must hold",
    "active": "unique, of the experts only those that one token passes through",
    "embedding": "token and learned-position tables",
    "non_embedding": "unique less embedding less an untied head",
    "matmul": "weights that some token is multiplied by",
    "matmul_active": "weights that one token is multiplied by",
}
FIRST = ("unique", "stored", "active")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="sixnd")
def cli() -> None:
    """Exact counts for decoder-only language models."""


@cli.command(epilog=f"Published models: {', '.join(published.names())}.")
@click.argument("config")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables.")
@click.option("--all", "everything", is_flag=True, help="Every named count, not the first three.")
@click.option("--by", type=click.Choice(["part", "layer", "tensor"]), help="Split the counts.")
def params(config: str, as_json: bool, everything: bool, by: str | None) -> None:
    """Count the parameters of CONFIG.

    CONFIG is a path to a config.json, a folder that has one, or the name of a published
    model.
    """
    from accounting import census, huggingface
    from accounting import params as counts

    reading = huggingface.load(config)
    bill = census.take(reading.spec)
    total = counts.count(bill)
    split = _split(bill, by)
    if as_json:
        answer = _envelope("params", reading)
        answer["parameters"] = asdict(total)
        answer["parts"] = _split(bill, "part")
        answer["extras"] = _extras(reading, total)
        answer["not_counted"] = list(reading.not_counted)
        if by in ("layer", "tensor"):
            answer[f"{by}s"] = split
        click.echo(json.dumps(answer, indent=2))
        return
    click.echo(f"{reading.name} ({reading.model_type})")
    shown = MEANING if everything else FIRST
    _table(("parameters", "scalars", "meaning"), [(name, getattr(total, name), MEANING[name]) for name in shown])
    if split:
        columns = [name for name in split[0] if everything or name in FIRST or name not in MEANING]
        _table(tuple(columns), [tuple(row[name] for name in columns) for row in split])
    if reading.extras:
        click.echo("A file may hold besides, never part of a count:")
        _table(
            ("extra", "scalars", "stored_with", "what it is"),
            [(row["name"], row["scalars"], row["stored_with"], row["note"]) for row in _extras(reading, total)],
        )
    for left_out in reading.not_counted:
        click.echo(f"Not counted: {left_out}")


def _envelope(command: str, reading: "Reading") -> dict[str, Any]:
    """What every command's JSON begins with."""
    return {
        "schema": f"sixnd.{command}/1",
        "version": __version__,
        "model": {
            "name": reading.name,
            "model_type": reading.model_type,
            "path": reading.path,
            "sha256": reading.sha256,
        },
    }


def _extras(reading: "Reading", total: "Parameters") -> list[dict[str, Any]]:
    """The extras in order; ``stored_with`` is stored with this one and those before it."""
    rows, running = [], total.stored
    for extra in reading.extras:
        running += extra.scalars
        rows.append({"name": extra.name, "scalars": extra.scalars, "stored_with": running, "note": extra.note})
    return rows


def _split(bill: "Census", by: str | None) -> list[dict[str, Any]]:
    """The counts split by part or by layer, or the bill itself, one row an entry."""
    from accounting import params as counts

    match by:
        case "part":
            return [{"part": part.value, **asdict(count)} for part, count in counts.by_part(bill).items()]
        case "layer":
            return [{"layer": layer, **asdict(count)} for layer, count in counts.by_layer(bill).items()]
        case "tensor":
            return [
                {
                    "tensor": tensor.name,
                    "shape": list(tensor.shape),
                    "part": tensor.part.value,
                    "copies": tensor.copies,
                    "uses": str(tensor.uses),
                    "scalars": tensor.scalars,
                }
                for tensor in (*bill.weights, *bill.buffers)
            ]
        case _:
            return []


def _table(header: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
    """Print aligned columns, numbers to the right and with separators."""
    from tabulate import tabulate

    cells = [[" x ".join(map(str, cell)) if isinstance(cell, list) else cell for cell in row] for row in rows]
    click.echo(tabulate(cells, header, tablefmt="plain", intfmt=",", missingval="outside", disable_numparse=[0]))
    click.echo()


def main() -> NoReturn:
    """Run the command; bad input becomes one line on standard error."""
    from accounting.files import InputError

    try:
        sys.exit(cli.main(standalone_mode=False) or 0)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        sys.exit(2)
    except click.ClickException as error:
        click.echo(f"sixnd: {' '.join(error.format_message().split())}", err=True)
        sys.exit(2)
    except InputError as error:
        click.echo(f"sixnd: {error}", err=True)
        sys.exit(2)
    except click.Abort:
        sys.exit(130)
    except OSError as error:
        # What the buffer still holds cannot be written either, and is not tried again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        click.echo(f"sixnd: standard output: {(error.strerror or 'cannot be written').lower()}", err=True)
        sys.exit(1)
