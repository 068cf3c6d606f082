"""``sixnd params``: parameters by name, and split by part, layer or tensor."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from accounting.cli.output import EPILOG, config_argument, document, envelope, json_option, left_out, table

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
FLOAT_SCALARS = "scalars of all float tensors, mask buffers and tied copies among them"
FIRST = ("unique", "stored", "active")


@click.command(epilog=EPILOG)
@config_argument
@json_option
@click.option("--all", "everything", is_flag=True, help="Every named count, not the first three.")
@click.option("--by", type=click.Choice(["part", "layer", "tensor"]), help="Split the counts.")
def params(config: str, as_json: bool, everything: bool, by: str | None) -> None:
    """Count the parameters of CONFIG.

    CONFIG is a path to a config.json, a folder that has one, or the name of a published
    model. A checkpoint without a config, a .safetensors file or a folder, is counted by its
    headers.
    """
    from accounting import census, huggingface
    from accounting import params as counts

    if _without_config(config):
        if everything or by is not None:
            raise click.UsageError("--all and --by need a config: headers do not say what a tensor is for")
        _from_headers(config, as_json)
        return
    reading = huggingface.load(config)
    bill = census.take(reading.spec)
    total = counts.count(bill)
    split = _split(bill, by)
    if as_json:
        envelope(
            "params",
            reading,
            parameters=asdict(total),
            parts=_split(bill, "part"),
            extras=_extras(reading, total),
            not_counted=list(reading.not_counted),
            **({f"{by}s": split} if by in ("layer", "tensor") else {}),
        )
        return
    click.echo(f"{reading.name} ({reading.model_type})")
    shown = MEANING if everything else FIRST
    table(("parameters", "scalars", "meaning"), [(name, getattr(total, name), MEANING[name]) for name in shown])
    if split:
        columns = [name for name in split[0] if everything or name in FIRST or name not in MEANING]
        table(tuple(columns), [tuple(row[name] for name in columns) for row in split])
    if reading.extras:
        click.echo("A file may hold besides, never part of a count:")
        table(
            ("extra", "scalars", "stored_with", "what it is"),
            [(row["name"], row["scalars"], row["stored_with"], row["note"]) for row in _extras(reading, total)],
        )
    left_out(reading)


def _without_config(path: str) -> bool:
    """Whether a path is a checkpoint's, and no config lies there."""
    from accounting import files

    if not os.path.isdir(path):
        return path.endswith((".safetensors", ".safetensors.index.json"))
    return not os.path.lexists(os.path.join(path, "config.json")) and any(
        name.endswith((".safetensors", ".safetensors.index.json")) for name in files.listing(Path(path))
    )


def _from_headers(path: str, as_json: bool) -> None:
    """Count what the files hold, for want of a config."""
    from accounting import checkpoint
    from accounting.files import printable

    held = checkpoint.load(path)
    floats = checkpoint.parameters(held)
    dtypes: dict[str, list[int]] = {}
    for tensor in held.tensors.values():
        row = dtypes.setdefault(tensor.dtype, [0, 0, 0])
        for position, value in enumerate((1, tensor.scalars, tensor.bytes)):
            row[position] += value
    rows = [{"dtype": name, "tensors": row[0], "scalars": row[1], "bytes": row[2]} for name, row in dtypes.items()]
    if as_json:
        counted = {"path": path, "files": len(held.headers), "tensors": len(held.tensors), "bytes": held.bytes}
        document(
            "params",
            None,
            counted_from="headers",
            checkpoint=counted,
            float_scalars=floats,
            convention=FLOAT_SCALARS,
            dtypes=rows,
        )
        return
    click.echo(f"{printable(path)}: counted from the headers, as there is no config")
    table(
        ("parameters", "scalars", "meaning"),
        [("float_scalars", floats, FLOAT_SCALARS)],
    )
    table(("dtype", "tensors", "scalars", "bytes"), [tuple(row.values()) for row in rows])


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
