"""``sixnd audit``: whether a checkpoint holds what its config says, or what another checkpoint holds."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from accounting.cli.output import EPILOG, document, json_option, left_out, model, table

if TYPE_CHECKING:
    from accounting.audit import Group
    from accounting.checkpoint import Checkpoint, Difference

SHOWN = 100
WHAT = {
    "decoder": "what the config's decoder is made of",
    "prediction_layers": "blocks that predict further tokens",
    "prediction_layer_tables": "their copies of the token table and of the head",
    "mask_buffers": "causal masks",
    "rotary_frequencies": "frequencies of rotary positions",
    "vision_tower": "a vision tower and its projector, none of them checked",
}


@click.command(epilog=EPILOG)
@click.argument("paths", nargs=-1, required=True, metavar="[CONFIG] CHECKPOINT")
@click.option("--against", metavar="OTHER", help="Compare with another checkpoint instead of a config.")
@json_option
@click.pass_context
def audit(context: click.Context, paths: tuple[str, ...], against: str | None, as_json: bool) -> None:
    """Compare a checkpoint's tensors with those of CONFIG, or of another checkpoint.

    CONFIG is a path to a config.json, a folder that has one, or the name of a published
    model. CHECKPOINT is a .safetensors file, the index of several, or a folder that has
    either. Headers are read, weights are not. The exit code is 0 where all agrees, 1 where
    something differs.
    """
    from accounting import checkpoint as files

    expected = ("CHECKPOINT",) if against is not None else ("CONFIG", "CHECKPOINT")
    if len(paths) != len(expected):
        plural = "s" if len(paths) > 1 else ""
        raise click.UsageError(f"expected {' and '.join(expected)}, got {len(paths)} argument{plural}")
    held = files.load(paths[-1], partial=True)
    differences = _against(held, against, as_json) if against is not None else _config(paths[0], held, as_json)
    context.exit(1 if differences else 0)


def _against(held: "Checkpoint", against: str, as_json: bool) -> Sequence["Difference"]:
    """Compare with another checkpoint."""
    from accounting import audit as audits
    from accounting import checkpoint as files

    other = files.load(against, partial=True)
    differences = audits.compare(held, other)
    if as_json:
        document("audit", None, checkpoint=_checkpoint(held), against=_checkpoint(other), **_as_json(differences))
    else:
        click.echo(f"{_summary(held)}\nagainst {_summary(other)}")
        _print(differences)
    return differences


def _config(config: str, held: "Checkpoint", as_json: bool) -> Sequence["Difference"]:
    """Compare with a config."""
    from accounting import audit as audits
    from accounting import huggingface

    reading = huggingface.load(config)
    found = audits.audit(reading, held)
    if as_json:
        document(
            "audit",
            model(reading),
            checkpoint=_checkpoint(held),
            decoder=_group(found.decoder),
            extras=[_group(extra) for extra in found.extras],
            **_as_json(found.differences),
            not_counted=list(reading.not_counted),
        )
        return found.differences
    click.echo(f"{_summary(held)}\nagainst {reading.name} ({reading.model_type})")
    rows = [
        (group.name, group.tensors, group.scalars, group.bytes, ", ".join(sorted(group.dtypes)), _what(group))
        for group in (found.decoder, *found.extras)
    ]
    table(("what", "tensors", "scalars", "bytes", "dtypes", ""), rows)
    _print(found.differences)
    left_out(reading)
    return found.differences


def _what(group: "Group") -> str:
    return WHAT.get(group.name, "scales, and what else goes with quantised weights")


def _group(group: "Group") -> dict[str, Any]:
    return asdict(group) | {"dtypes": sorted(group.dtypes)}


def _checkpoint(held: "Checkpoint") -> dict[str, Any]:
    return {"path": held.path, "files": len(held.headers), "tensors": len(held.tensors), "bytes": held.bytes}


def _summary(held: "Checkpoint") -> str:
    from accounting.files import counted, printable

    tensors, size, count = len(held.tensors), held.bytes, len(held.headers)
    what = f"{counted(tensors, 'tensor')}, {counted(size, 'byte')} in {counted(count, 'file')}"
    return f"{printable(held.path)}: {what}"


def _as_json(differences: Sequence["Difference"]) -> dict[str, Any]:
    return {"agrees": not differences, "differences": [asdict(difference) for difference in differences]}


def _print(differences: Sequence["Difference"]) -> None:
    from accounting.files import counted

    for difference in differences[:SHOWN]:
        click.echo(str(difference))
    if len(differences) > SHOWN:
        click.echo(f"and {len(differences) - SHOWN:,} more")
    click.echo(counted(len(differences), "difference") if differences else "No difference.")
