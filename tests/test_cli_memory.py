"""The command about bytes: what it prints, in which form, and how it fails."""

import pytest

from accounting import activations, cache, memory, published
from accounting.huggingface import load
from tests.test_cli import run
from tests.test_cli_flops import answer


@pytest.mark.parametrize("name", published.names())
def test_bytes_are_those_of_the_package(name, capsys, monkeypatch):
    """Weights, every array of a layout, activations where they are predicted, and a cache with its next token."""
    spec = load(name).spec
    said = answer(
        capsys, monkeypatch, "memory", name, "--seq", "300", "--batch", "2", "--layout", "adam_mixed", "--ranks", "3",
        "--rank", "2", "--shard", "zero3",
    )  # fmt: skip
    assert said["schema"] == "sixnd.memory/1" and said["weights"] == memory.weight_bytes(spec, "bfloat16")
    training = memory.training(spec, "adam_mixed", ranks=3, rank=2, shard="zero3")
    assert [(each["name"], each["bytes"], each["padded_bytes"]) for each in said["training"]["arrays"]] == [
        (each.array.name, each.logical, each.padded) for each in training.arrays
    ]
    assert (said["training"]["total"], said["training"]["padded_total"]) == (training.total, training.padded_total)
    assert said["training"]["step_counts"] == training.step_counts
    sizes = [cache.total(spec, tokens, batch=2) for tokens in (300, 301)]
    assert said["kv_cache"] == {
        "total": sizes[0],
        "next_token": sizes[1] - sizes[0],
        "policy": "minimum",
        "dtype": "bfloat16",
    }
    try:
        expected = activations.total(spec, seq=300, batch=2)
    except activations.UnpredictedError as error:
        assert said["activations"]["total"] is None and said["activations"]["reason"] == str(error)
    else:
        assert said["activations"]["total"] == expected


def test_options_reach_the_counts(capsys, monkeypatch):
    """The packed format, the policy, the mode of latent attention, the kind of attention and recomputation."""
    said = answer(
        capsys, monkeypatch, "memory", "gpt-oss-20b", "--dtype", "mxfp4_experts", "--seq", "999", "--policy", "uniform"
    )
    spec = load("gpt-oss-20b").spec
    assert said["weights"] == memory.weight_bytes(spec, "mxfp4_experts")
    assert said["kv_cache"]["total"] == cache.total(spec, 999, policy=cache.uniform)
    said = answer(capsys, monkeypatch, "memory", "deepseek-v3", "--seq", "7", "--expanded", "--cache-dtype", "float32")
    assert said["kv_cache"]["total"] == cache.total(load("deepseek-v3").spec, 7, dtype="float32", expanded=True)
    options = ["--seq", "64", "--attention", "eager"]
    for recompute in ("none", "full"):
        said = answer(capsys, monkeypatch, "memory", "gpt2", *options, "--recompute", recompute)
        expected = activations.total(load("gpt2").spec, seq=64, attention="eager", recompute=recompute)
        assert said["activations"]["total"] == expected
    assert said["activations"]["masks"] == activations.mask_bytes(load("gpt2").spec, attention="eager") == 12 * 1024**2
    _, out, _ = run(capsys, monkeypatch, "memory", "gpt2", *options)
    assert "causal masks, booleans" in out and "12,582,912" in out


@pytest.mark.parametrize(("written", "budget"), [("80GB", 80 * 10**9), ("80GiB", 80 * 2**30), ("8e10", 80 * 10**9)])
def test_what_fits_is_found(written, budget, capsys, monkeypatch):
    """Decimal and binary units are what they say; one token or one sequence more would not fit."""
    said = answer(capsys, monkeypatch, "memory", "llama-3.1-8b", "--seq", "8192", "--fit", written)
    spec, fits, free = load("llama-3.1-8b").spec, said["fit"], budget - said["weights"]
    assert fits["budget"] == budget
    assert cache.total(spec, fits["tokens"]) <= free < cache.total(spec, fits["tokens"] + 1)
    many = answer(capsys, monkeypatch, "memory", "llama-3.1-8b", "--seq", "8192", "--batch", "4", "--fit", written)
    assert many["fit"]["sequences"] == fits["sequences"]
    assert fits["sequences"] * said["kv_cache"]["total"] <= free < (fits["sequences"] + 1) * said["kv_cache"]["total"]


def test_learned_positions_end_the_search(capsys, monkeypatch):
    """However much memory there is, and at the last position there is no next token."""
    said = answer(capsys, monkeypatch, "memory", "gpt2", "--seq", "1024", "--fit", "80GB")
    assert said["fit"]["tokens"] == 1024 and said["kv_cache"]["next_token"] is None


def test_units_are_named(capsys, monkeypatch):
    """Bytes in full, in GB and in GiB; what is not asked for is not shown."""
    _, out, _ = run(capsys, monkeypatch, "memory", "llama-3.1-8b", "--seq", "131072")
    assert "17,179,869,184  17.18 GB   16 GiB" in out and "16,060,522,496  16.06 GB   14.96 GiB" in out
    _, out, _ = run(capsys, monkeypatch, "memory", "deepseek-v3", "--seq", "4", "--layout", "adam_mixed")
    assert "Activations are not predicted: only multi-head" in out and "in training, adam_mixed" in out
    _, out, _ = run(capsys, monkeypatch, "memory", "gemma-3-27b")
    assert "cache" not in out and "Not counted: vision_config" in out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--dtype", "int3"], "--dtype: expected one of float64, float32"),
        (["--cache-dtype", "fp8_block"], "--cache-dtype: expected one of float64"),
        (["--layout", "adam"], "--layout: expected one of adam_float32"),
        (["--layout", "adam_mixed", "--ranks", "0"], "'--ranks': expected more than 0, got 0"),
        (["--layout", "adam_mixed", "--ranks", "2", "--rank", "2"], "--rank: expected 0 to 1, got 2"),
        (
            ["--layout", "sgd_float32", "--ranks", "2", "--shard", "zero1"],
            "sgd_float32 keeps no optimizer state to share",
        ),
        (["--layout", "adam_mixed", "--shard", "zero4"], "'zero4' is not one of"),
        (["--policy", "paged"], "'paged' is not one of"),
        (["--ranks", "2"], "--ranks, --rank and --shard are about what --layout keeps"),
        (["--fit", "100MB"], "--fit: the weights alone take 248,879,616 bytes, of 100,000,000"),
        (["--fit", "lots"], "expected bytes such as 80GB or 80GiB, got 'lots'"),
        (["--fit", "8Gb"], "expected bytes such as 80GB or 80GiB, got '8Gb'"),
        (["--seq", "1025"], "gpt2 has 1,024 learned positions"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(arguments, expected, capsys, monkeypatch):
    """No number, one line that names the option and what was expected, exit code 2."""
    code, out, err = run(capsys, monkeypatch, "memory", "gpt2", *arguments)
    assert (code, out) == (2, "")
    assert expected in err and err.startswith("sixnd: ") and err.count("\n") == 1
