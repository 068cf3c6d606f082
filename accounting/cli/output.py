"""What the commands share: the arguments that name a config, the envelope of their JSON, and tables."""

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from accounting import __version__, published

if TYPE_CHECKING:
    from accounting.huggingface import Reading

EPILOG = f"Published models: {', '.join(published.names())}."

config_argument: Callable[..., Any] = click.argument("config")
json_option: Callable[..., Any] = click.option(
    "--json", "as_json", is_flag=True, help="One JSON object instead of tables."
)


def envelope(command: str, reading: "Reading", **answer: Any) -> None:
    """Print the JSON of a command that counts a config: what was counted, then its answer."""
    document(command, model(reading), **answer)


def document(command: str, counted: dict[str, Any] | None, **answer: Any) -> None:
    """Print the JSON of a command: by which program, the model where there is one, then the answer."""
    head = {"schema": f"sixnd.{command}/1", "version": __version__, "model": counted}
    click.echo(json.dumps({**head, **answer}, indent=2))


def model(reading: "Reading") -> dict[str, Any]:
    """The model that was counted, for programs."""
    return {
        "name": reading.name,
        "model_type": reading.model_type,
        "path": reading.path,
        "sha256": reading.sha256,
    }


def table(header: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
    """Print aligned columns: integers in full with separators, and those columns to the right."""
    from tabulate import tabulate

    right = [any(isinstance(cell, int) for cell in column) for column in zip(*rows, strict=True)]
    cells = [[_cell(cell) for cell in row] for row in rows]
    align = ["right" if number else "left" for number in right]
    click.echo(tabulate(cells, header, tablefmt="plain", disable_numparse=True, colalign=align))
    click.echo()


def _cell(value: Any) -> str:
    match value:
        case None:
            return "outside"
        case int():
            return f"{value:,}"
        case list():
            return " x ".join(map(str, value))
        case _:
            return str(value)


def left_out(reading: "Reading") -> None:
    """Print what the config describes and the numbers leave out."""
    for name in reading.not_counted:
        click.echo(f"Not counted: {name}")
