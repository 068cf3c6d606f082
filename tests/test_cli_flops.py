"""The commands about FLOPs: what they print, in which form, and how they fail."""

import json
from dataclasses import asdict, replace
from fractions import Fraction

import click
import pytest

from accounting import conventions, flops, hardware, pairs, published
from accounting.cli.options import positions
from accounting.huggingface import load
from tests.test_cli import run

CHIPS = ["--chip", "h100-sxm", "--count", "8"]


def answer(capsys, monkeypatch, *arguments):
    """The JSON of a command."""
    code, out, err = run(capsys, monkeypatch, *arguments, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


@pytest.mark.parametrize("name", published.names())
def test_flops_are_those_of_the_package(name, capsys, monkeypatch):
    """Forward, backward, training and every convention, as integers."""
    spec = load(name).spec
    said = answer(capsys, monkeypatch, "flops", name, "--seq", "96", "--batch", "3")
    forward, backward = flops.forward(spec, seq=96, batch=3), flops.backward(spec, seq=96, batch=3)
    assert said["schema"] == "sixnd.flops/1" and said["model"]["name"] == name
    assert said["forward"] == {**asdict(forward), "total": forward.total}
    assert said["backward"] == {**asdict(backward), "total": backward.total}
    assert said["training"] == said["executed"] == forward.total + backward.total
    assert said["conventions"] == conventions.table(spec, seq=96, batch=3).flops
    assert (said["pairs"], said["window"], said["cache"]) == ("model", None, None)


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        (["--pairs", "causal"], pairs.causal),
        (["--pairs", "full"], pairs.full),
        (["--pairs", "window"], pairs.windowed(128)),
        (["--pairs", "window", "--window", "7"], pairs.windowed(7)),
    ],
)
def test_pairs_are_named_and_exact(options, rule, capsys, monkeypatch):
    """The rule that is asked for, in every layer; a window's size is the config's own unless it is given."""
    spec, of = load("gpt-oss-20b").spec, ["gpt-oss-20b", "--seq", "300", *options]
    training = flops.training(spec, seq=300, pairs=rule).total
    executed = flops.executed(spec, seq=300, pairs=rule, recompute="selective").total
    said = answer(capsys, monkeypatch, "flops", *of, "--recompute", "selective")
    assert (said["pairs"], said["training"], said["executed"]) == (options[1], training, executed)
    said = answer(capsys, monkeypatch, "time", *of, "--tokens", "600", *CHIPS, "--mfu", "1")
    assert (said["pairs"], said["training"]["exact"]) == (options[1], 2 * training)
    said = answer(capsys, monkeypatch, "mfu", *of, "--tokens-per-second", "1", *CHIPS, "--recompute", "selective")
    per_token = [said["utilisation"][name]["flops_per_token"] for name in ("exact", "executed")]
    assert (said["pairs"], per_token) == (options[1], [training / 300, executed / 300])
    said = answer(capsys, monkeypatch, "flops", *of, "--decode", "700")
    assert said["forward"]["total"] == flops.forward(spec, seq=300, pairs=pairs.cached(700, rule)).total


def test_of_several_windows_one_has_to_be_said():
    """A config's own window is taken only where its layers have no other."""
    reading = load("gpt-oss-20b")
    first, *rest = reading.spec.blocks
    blocks = (replace(first, attention=replace(first.attention, window=7)), *rest)
    with pytest.raises(click.UsageError, match=r"expected --window W, as gpt-oss-20b has 7 and 128 of its own"):
        positions(replace(reading, spec=replace(reading.spec, blocks=blocks)), "window", None)


def test_gpt2_as_a_table(capsys, monkeypatch):
    """GPT-2 at 1,024 tokens, every pair: what a dense counter sees, and every convention with its share of it."""
    _, out, _ = run(capsys, monkeypatch, "flops", "gpt2", "--seq", "1024", "--pairs", "full")
    rows = {line.split("  ")[0]: line for line in out.splitlines()}
    assert "pairs: full, each token with each" in out
    assert rows["forward"].split()[1:] == [
        "173,946,175,488", "19,327,352,832", "19,327,352,832", "79,047,426,048", "0", "291,648,307,200"
    ]  # fmt: skip
    assert rows["forward a token"].split()[-1] == "284,812,800"
    assert "874,944,921,600" in rows["megatron_paper"] and "1.0000" in rows["megatron_paper"]
    # linear and head over the total of the first row
    assert rows["6nd_matmul_active"].split()[2] == f"{252_993_601_536 / 291_648_307_200:.4f}"
    assert set(conventions.CONVENTIONS) < set(rows)
    assert all(convention.formula in rows[name] for name, convention in conventions.CONVENTIONS.items())


def test_each_convention_says_where_it_comes_from(capsys, monkeypatch):
    """Its source and why it differs, and which say nothing of this architecture."""
    _, out, _ = run(capsys, monkeypatch, "flops", "deepseek-v3", "--seq", "10", "--explain")
    assert "kaplan says nothing: latent attention has two head widths and the formula one" in out
    assert all(f"{text}" in out for text in (conventions.CONVENTIONS["megatron"].source, "charges idle experts"))


def test_a_quotient_is_exact(capsys, monkeypatch):
    """FLOPs of one of seven tokens, in any of three sequences, are shown with their fraction."""
    three = ["flops", "gpt-oss-20b", "--seq", "7", "--batch", "3", "--pairs", "window", "--window", "2"]
    _, out, _ = run(capsys, monkeypatch, *three)
    spec = load("gpt-oss-20b").spec
    each = Fraction(flops.forward(spec, seq=7, pairs=pairs.windowed(2)).scores, 7)
    assert each.denominator == 7
    rows = {line.split("  ")[0]: line for line in out.splitlines()}
    for name, quotient in (("forward", each), ("training", 3 * each)):
        assert f"{int(quotient):,} {quotient % 1}" in rows[f"{name} a token"]


def test_decoding_is_forward_alone(capsys, monkeypatch):
    """One token after those that are kept: no backward pass, and no convention of training."""
    said = answer(capsys, monkeypatch, "flops", "mistral-7b", "--decode", "9000", "--batch", "4")
    expected = flops.forward(load("mistral-7b").spec, seq=1, batch=4, pairs=pairs.cached(9000))
    assert said["forward"] == {**asdict(expected), "total": expected.total}
    assert (said["backward"], said["training"], said["conventions"], said["cache"]) == (None, None, {}, 9000)
    _, out, _ = run(capsys, monkeypatch, "flops", "mistral-7b", "--decode", "0", "--seq", "12")
    assert "1 x 12 tokens after 0 that are kept" in out and "convention" not in out


def test_latent_attention_decodes_against_expanded_keys(capsys, monkeypatch):
    """Which cache the count goes with is said, where there are two."""
    for name, form in ("deepseek-v3", "expanded"), ("llama-3.1-8b", None):
        assert answer(capsys, monkeypatch, "flops", name, "--decode", "9")["latent_cache"] == form
        _, out, _ = run(capsys, monkeypatch, "flops", name, "--decode", "9")
        assert ("as sixnd memory --expanded counts them" in out) == (form is not None)


def test_recomputation_is_apart_from_training(capsys, monkeypatch):
    """What is executed is another number than what training asks for."""
    said = answer(capsys, monkeypatch, "flops", "gpt2", "--seq", "64", "--recompute", "full")
    spec = load("gpt2").spec
    assert said["training"] == flops.training(spec, seq=64).total
    assert said["executed"] == flops.executed(spec, seq=64, recompute="full").total
    _, out, _ = run(capsys, monkeypatch, "flops", "gpt2", "--seq", "64", "--recompute", "full")
    assert "executed, full recomputation" in out


def test_days_of_a_run(capsys, monkeypatch):
    """Whole sequences and a shorter one for the rest, exact; without a length only what does not depend on one."""
    spec, run_of = load("llama-3.1-8b").spec, ["time", "llama-3.1-8b", "--tokens", "1e6", *CHIPS, "--mfu", "0.4"]
    said = answer(capsys, monkeypatch, *run_of, "--seq", "8192")
    whole, rest = flops.training(spec, seq=8192, batch=122).total, flops.training(spec, seq=576).total
    assert said["training"]["exact"] == whole + rest and 122 * 8192 + 576 == 10**6
    peak = hardware.find("h100-sxm").peak()
    expected = hardware.days(whole + rest, peak=peak, count=8, utilisation=Fraction(2, 5))
    assert said["days"]["exact"] == float(expected)
    assert said["devices"]["peak_flops_per_second"] == peak and "datasheet" in said["devices"]["source"]
    short = answer(capsys, monkeypatch, *run_of)
    assert short["training"] == {name: said["training"][name] for name in short["training"]}
    assert set(short["training"]) == {name for name, each in conventions.CONVENTIONS.items() if each.linear}
    assert (said["pairs"], short["pairs"]) == ("model", None)
    _, out, _ = run(capsys, monkeypatch, *run_of)
    assert "without attention's products (no --seq)" in out
    shown = {line.split()[0]: line.split()[-1] for line in out.splitlines() if line.startswith("6nd")}
    assert shown == {name: f"{value:.4g}" for name, value in short["days"].items() if name.startswith("6nd")}


def test_a_part_of_a_run_is_not_taken_for_the_run(capsys, monkeypatch):
    """A shortcut that ends in half a FLOP is missing, whichever part of the run the half comes from."""
    run_of = ["time", "gpt2", "--seq", "1023", *CHIPS, "--mfu", "0.4", "--tokens"]
    for tokens in ("1e9", "1000000001", "1535"):
        said = answer(capsys, monkeypatch, *run_of, tokens)["training"]
        linear, full = said["6nd_matmul_active"], said["6nd_n_6d"]
        assert linear < said.get("6nd_n_12d", full - 1) < full


def test_a_rate_by_convention(capsys, monkeypatch):
    """TFLOP/s of a chip and its share of the peak; what would be above it is marked, and the rest is not."""
    rate_of = ["mfu", "llama-3.1-8b", "--tokens-per-second", "140e3", "--seq", "8192", *CHIPS, "--recompute", "full"]
    said = answer(capsys, monkeypatch, *rate_of)
    spec = load("llama-3.1-8b").spec
    exact = said["utilisation"]["exact"]
    per_token = Fraction(flops.training(spec, seq=8192).total, 8192)
    peak = hardware.find("h100-sxm").peak()
    share = hardware.utilisation(per_token, 140_000, peak=peak, count=8, scope="global")
    assert (exact["share_of_peak"], exact["kind"], exact["impossible"]) == (float(share), "mfu", False)
    assert said["utilisation"]["executed"]["impossible"] and said["utilisation"]["executed"]["kind"] == "hfu"
    each = answer(capsys, monkeypatch, *rate_of, "--per-device")
    assert each["utilisation"]["exact"]["share_of_peak"] == float(8 * share) and each["scope"] == "device"
    _, out, _ = run(capsys, monkeypatch, *rate_of)
    marked = {line.split()[0] for line in out.splitlines() if "impossible" in line}
    impossible = {name for name, row in said["utilisation"].items() if row["impossible"]}
    assert marked == {"executed," if name == "executed" else name for name in impossible}
    assert "of all 8 chips together" in out


def test_all_of_the_peak_is_possible(capsys, monkeypatch):
    """A rate that is the peak is its whole, and not above it; one more FLOP/s is."""
    step = flops.training(load("gpt2").spec, seq=8).total
    rate_of = ["mfu", "gpt2", "--seq", "8", "--tokens-per-second", "8", "--chip", "mine", "--count", "1", "--peak"]
    reached = answer(capsys, monkeypatch, *rate_of, f"{step}")["utilisation"]["exact"]
    assert reached == {
        "kind": "mfu",
        "flops_per_token": step / 8,
        "tflops_per_second_per_device": step / 10**12,
        "share_of_peak": 1,
        "impossible": False,
    }
    _, out, _ = run(capsys, monkeypatch, *rate_of, f"{step}")
    assert ["exact", f"{step / 8:.6g}", f"{step / 10**12:.4g}", "100.00%"] in map(str.split, out.splitlines())
    assert answer(capsys, monkeypatch, *rate_of, f"{step - 1}")["utilisation"]["exact"]["impossible"]


@pytest.mark.parametrize(
    "command",
    [
        ["flops", "gemma-3-27b"],
        ["time", "gemma-3-27b", "--tokens", "80", *CHIPS, "--mfu", "0.4"],
        ["mfu", "gemma-3-27b", "--tokens-per-second", "1", *CHIPS],
    ],
    ids=lambda command: command[0],
)
def test_what_is_left_out_is_named(command, capsys, monkeypatch):
    """A vision tower has no part in any of the numbers, in either form of them."""
    _, out, _ = run(capsys, monkeypatch, *command, "--seq", "8")
    assert "Not counted: vision_config" in out
    assert answer(capsys, monkeypatch, *command, "--seq", "8")["not_counted"] == [*load("gemma-3-27b").not_counted]


def test_a_peak_of_ones_own(capsys, monkeypatch):
    """A chip that is not known, or has no rate, is measured against a peak that is given."""
    own = ["mfu", "gpt2", "--tokens-per-second", "1000", "--seq", "128", "--chip", "mine", "--count", "1"]
    said = answer(capsys, monkeypatch, *own, "--peak", "25.3e12")
    assert said["devices"] == {
        "chip": "mine",
        "count": 1,
        "peak_flops_per_second": 25_300_000_000_000,
        "peak_kind": "as given",
        "source": "--peak",
    }


TIME = ["time", "gpt2", "--tokens", "1e9", "--mfu", "0.4"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["flops", "gpt2"], "--seq: expected the tokens of a sequence"),
        (["flops", "gpt2", "--seq", "0"], "'--seq': expected more than 0, got 0"),
        (["flops", "gpt2", "--seq", "1.5"], "'--seq': expected a whole number, got 1.5"),
        (["flops", "gpt2", "--seq", "nan"], "'--seq': expected a number, got 'nan'"),
        (["flops", "gpt2", "--seq", "1e999999999"], "'--seq': expected a number"),
        (["flops", "gpt2", "--decode", "-1"], "'--decode': expected at least 0, got -1"),
        (["flops", "gpt2", "--seq", "1025"], "gpt2 has 1,024 learned positions: a sequence of 1,025 does not fit"),
        (["flops", "gpt2", "--decode", "1024"], "a sequence of 1,025 does not fit"),
        (["flops", "gpt2", "--seq", "8", "--pairs", "window"], "expected --window W, as gpt2 has none of its own"),
        (["flops", "gpt2", "--seq", "8", "--window", "4"], "--window goes with --pairs window, not with model"),
        (["flops", "nowhere", "--seq", "8"], "nowhere: no such file or folder"),
        (
            [*TIME, "--count", "8", "--chip", "h100"],
            "known are h100-sxm, h100-pcie, h100-nvl; for any other, say --peak",
        ),
        ([*TIME, "--count", "8", "--chip", "h100-sxm", "--dtype", "bf16"], "no bf16 dense peak is known (known are"),
        ([*TIME, "--count", "8", "--chip", "rtx-4060-laptop"], "no bfloat16 dense peak is known (known are none"),
        ([*TIME, "--count", "8", "--chip", "x", "--peak", "1e15", "--sparse"], "with --peak, say that peak"),
        ([*TIME, "--count", "8", "--chip", "x", "--peak", "1e15", "--dtype", "float8"], "with --peak, say that peak"),
        ([*TIME, *CHIPS, "--pairs", "full"], "--pairs and --window are about the sequences of --seq"),
        (["flops", "gpt2", "--decode", "5", "--recompute", "full"], "--decode is forward alone"),
        (["flops", "gpt2", "--decode", "5", "--explain"], "--decode is forward alone"),
        ([*TIME, *CHIPS, "--mfu", "40"], "'--mfu': expected at most 1, got 40"),
        ([*TIME, *CHIPS, "--seq", "4096"], "gpt2 has 1,024 learned positions"),
        (["mfu", "gpt2", "--tokens-per-second", "fast", "--seq", "8", *CHIPS], "expected a number, got 'fast'"),
        (["mfu", "gpt2", "--tokens-per-second", "1", "--seq", "1025", *CHIPS], "a sequence of 1,025 does not fit"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(arguments, expected, capsys, monkeypatch):
    """No number, one line that names the option and what was expected, exit code 2."""
    code, out, err = run(capsys, monkeypatch, *arguments)
    assert (code, out) == (2, "")
    assert expected in err and err.startswith("sixnd: ") and err.count("\n") == 1


def test_a_sparse_peak_is_asked_for(capsys, monkeypatch):
    """The vendor's larger figure is used only by its name, which the answer repeats."""
    said = answer(capsys, monkeypatch, *TIME, *CHIPS, "--sparse")
    assert said["devices"]["peak_kind"] == "bfloat16 sparse"
    assert said["devices"]["peak_flops_per_second"] == 1979 * 10**12
