"""``sixnd memory``: bytes of weights, of training, of a cache, and how much of it fits."""

import re
from collections.abc import Callable
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import click

from accounting.cli.options import WHOLE, check_context, choice_option, quantity
from accounting.cli.output import EPILOG, config_argument, envelope, json_option, left_out, table
from accounting.memory import DTYPE_BYTES, FORMATS, LAYOUTS

if TYPE_CHECKING:
    from accounting.activations import Kind, Recompute
    from accounting.memory import Shard, TrainingBytes
    from accounting.spec import ModelSpec

UNITS = {
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}


def size(value: str) -> int:
    """The type of an option that takes bytes, such as 80GB, 80GiB or 8e10."""
    written = re.fullmatch(r"\s*([0-9.eE+]+?)\s*([kKMGT]i?B|B)?\s*", value)
    if written is None or (written[2] or "B") not in UNITS:
        raise click.BadParameter(f"expected bytes such as 80GB or 80GiB, got {value!r}")
    number: Fraction = quantity()(written[1])
    return int(number * UNITS[written[2] or "B"])


@click.command(
    epilog=f"Dtypes: {', '.join(DTYPE_BYTES)}. Packed formats: {', '.join(FORMATS)}. "
    f"Layouts: {', '.join(LAYOUTS)}. {EPILOG}"
)
@config_argument
@click.option("--dtype", default="bfloat16", show_default=True, help="Dtype or packed format of the weights.")
@click.option("--layout", help="The arrays that training keeps, by the name of the optimizer and its dtypes.")
@click.option(
    "--ranks",
    type=quantity(whole=True, most=2**20),
    default=1,
    show_default=True,
    metavar="R",
    help="Data-parallel ranks.",
)
@click.option(
    "--rank", type=quantity(whole=True, least=0), default=0, show_default=True, metavar="I", help="The rank to count."
)
@choice_option(
    "--shard", "none zero1 zero2 zero3", "What is split among ranks: optimizer state, gradients too, weights too."
)
@click.option("--seq", type=WHOLE, metavar="N", help="Tokens of a sequence, for activations and the key/value cache.")
@click.option("--batch", type=WHOLE, default=1, show_default=True, metavar="B", help="Sequences at once.")
@choice_option("--attention", "fused eager", "Whether attention's softmax is written out and kept (eager).")
@choice_option("--recompute", "none full", "Whether backward runs each block again (full).")
@click.option("--cache-dtype", default="bfloat16", show_default=True, help="Dtype of the key/value cache.")
@choice_option("--policy", "minimum huggingface uniform", "Tokens that a window of W keeps: W, W - 1, or all.")
@click.option("--expanded", is_flag=True, help="Cache every head's keys and values of latent attention.")
@click.option(
    "--fit", type=size, metavar="SIZE", help="Serving: how much cache fits beside the whole weights in 80GB, say."
)
@json_option
def memory(
    config: str,
    dtype: str,
    layout: str | None,
    ranks: int,
    rank: int,
    shard: "Shard",
    seq: int | None,
    batch: int,
    attention: "Kind",
    recompute: "Recompute",
    cache_dtype: str,
    policy: str,
    expanded: bool,
    fit: int | None,
    as_json: bool,
) -> None:
    """Bytes of CONFIG: weights, what training keeps, activations, a key/value cache.

    CONFIG is a path to a config.json, a folder that has one, or the name of a published
    model. Workspaces and what an allocator rounds up are in none of them.
    """
    from accounting import cache, huggingface
    from accounting import memory as counts

    _known("--dtype", dtype, {**counts.DTYPE_BYTES, **counts.FORMATS})
    _known("--cache-dtype", cache_dtype, counts.DTYPE_BYTES)
    reading = huggingface.load(config)
    spec = reading.spec
    check_context(reading, seq or 1)
    weights = counts.weight_bytes(spec, dtype)
    training = None if layout is None else _training(spec, layout, ranks, rank, shard)
    if layout is None and (ranks, rank, shard) != (1, 0, "none"):
        raise click.UsageError("--ranks, --rank and --shard are about what --layout keeps")

    def kept(tokens: int) -> int:
        return cache.total(
            spec, tokens, batch=batch, dtype=cache_dtype, policy=cache.POLICIES[policy], expanded=expanded
        )

    activations = None if seq is None else _activations(spec, seq, batch, attention, recompute)
    fits = None if fit is None else _fits(spec, weights, kept, fit, seq, batch)
    kv_cache: dict[str, Any] | None = None
    if seq is not None:
        more = None if spec.learned_positions and seq == spec.context else kept(seq + 1) - kept(seq)
        kv_cache = {"total": kept(seq), "next_token": more, "policy": policy, "dtype": cache_dtype}
    if as_json:
        envelope(
            "memory",
            reading,
            dtype=dtype,
            seq=seq,
            batch=batch,
            weights=weights,
            training=None if training is None else _as_json(training, layout, ranks, rank, shard),
            activations=activations,
            kv_cache=kv_cache,
            fit=fits,
            not_counted=list(reading.not_counted),
        )
        return
    click.echo(f"{reading.name} ({reading.model_type})")
    rows: list[tuple[str, int]] = [(f"weights, {dtype}", weights)]
    if training is not None:
        whose = f"{layout}, rank {rank} of {ranks:,}, {shard}" if ranks > 1 else layout
        rows += [(f"in training: {each.array.name}, {each.array.dtype}", each.logical) for each in training.arrays]
        rows.append((f"in training, {whose}", training.total))
    if activations is not None and activations["total"] is not None:
        rows.append((f"activations, float32, {attention} attention, recompute {recompute}", activations["total"]))
        if activations["masks"]:
            rows.append(("causal masks, booleans", activations["masks"]))
    if kv_cache is not None:
        rows.append((f"cache, {cache_dtype}, {policy}", kv_cache["total"]))
        if kv_cache["next_token"] is not None:
            rows.append(("cache, one more token", kv_cache["next_token"]))
    table(("what", "bytes", "decimal", "binary"), [(name, value, *_units(value)) for name, value in rows])
    if activations is not None and activations["total"] is None:
        click.echo(f"Activations are not predicted: {activations['reason']}")
    if fits is not None:
        most = "any number of" if fits["tokens"] is None else f"{fits['tokens']:,}"
        click.echo(
            f"Serving, beside the whole weights in {fits['budget']:,} bytes: {most} tokens in a batch of {batch:,}"
        )
        if seq is not None:
            click.echo(f"  or {fits['sequences']:,} x {seq:,} tokens")
    left_out(reading)


def _fits(
    spec: "ModelSpec", weights: int, kept: Callable[[int], int], budget: int, seq: int | None, batch: int
) -> dict[str, int | None]:
    """The most tokens of each sequence beside the weights, and of that many tokens the most sequences."""
    from accounting.cache import most_tokens

    if weights > budget:
        raise click.UsageError(f"--fit: the weights alone take {weights:,} bytes, of {budget:,}")
    tokens = most_tokens(lambda length: weights + kept(length), budget)
    if spec.learned_positions:
        tokens = spec.context if tokens is None else min(tokens, spec.context)
    return {
        "budget": budget,
        "tokens": tokens,
        "sequences": None if seq is None else (budget - weights) // (kept(seq) // batch),
    }


def _known(option: str, name: str, names: Any) -> None:
    if name not in names:
        raise click.UsageError(f"{option}: expected one of {', '.join(names)}, got {name!r}")


def _training(spec: "ModelSpec", layout: str, ranks: int, rank: int, shard: "Shard") -> "TrainingBytes":
    from accounting import memory as counts

    _known("--layout", layout, counts.LAYOUTS)
    if rank >= ranks:
        raise click.UsageError(f"--rank: expected 0 to {ranks - 1:,}, got {rank:,}")
    if shard == "zero1" and all(array.role != "optimizer" for array in counts.LAYOUTS[layout].arrays):
        raise click.UsageError(f"--shard zero1: {layout} keeps no optimizer state to share")
    return counts.training(spec, layout, ranks=ranks, rank=rank, shard=shard)


def _activations(spec: "ModelSpec", seq: int, batch: int, attention: "Kind", recompute: "Recompute") -> dict[str, Any]:
    """The total in float32, or why nobody can say it."""
    from accounting import activations

    said: dict[str, Any] = {"attention": attention, "recompute": recompute, "dtype": "float32"}
    try:
        total = activations.total(spec, seq=seq, batch=batch, attention=attention, recompute=recompute)
        said["masks"] = activations.mask_bytes(spec, attention=attention)
    except activations.UnpredictedError as error:
        return {**said, "total": None, "reason": str(error)}
    return {**said, "total": total, "reason": None}


def _as_json(training: "TrainingBytes", layout: str | None, ranks: int, rank: int, shard: "Shard") -> dict[str, Any]:
    arrays = [
        {"name": each.array.name, "dtype": each.array.dtype, "bytes": each.logical, "padded_bytes": each.padded}
        for each in training.arrays
    ]
    return {
        "layout": layout,
        "ranks": ranks,
        "rank": rank,
        "shard": shard,
        "arrays": arrays,
        "total": training.total,
        "padded_total": training.padded_total,
        "step_counts": training.step_counts,
    }


def _units(value: int) -> tuple[str, str]:
    """Bytes in decimal and in binary units, each named as what it is."""
    return _in(value, ("TB", "GB", "MB", "kB", "B")), _in(value, ("TiB", "GiB", "MiB", "KiB", "B"))


def _in(value: int, units: tuple[str, ...]) -> str:
    unit = next(unit for unit in units if value >= UNITS[unit] or unit == "B")
    return f"{value / UNITS[unit]:.4g} {unit}"
