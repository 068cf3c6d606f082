"""The scaling study: diets, runs that may be killed, results that redraw their picture, and the bend itself."""

import contextlib
import json
import math
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from math import ceil

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from scipy.stats import t as student

from accounting.authorities import torch_counter
from accounting.files import InputError
from model import study
from model.diets import Corpus, Synthetic, places, windows
from model.recipes import d2l_gpt
from model.source import MarkovSource
from model.study import Size
from model.tokens import LETTERS
from model.training import SCHEMA, Recipe, Training, checksum, train
from tests.bench.baselines import ROOT

CPU = torch.device("cpu")
CHAIN = MarkovSource(symbols=8)
RECIPE = Recipe(
    steps=7, batch=4, tokens=6, anchor_rate=0.01, anchor_width=8, rule="root", schedule="cosine", evaluate_every=3
)
SIZE = Size(width=4, layers=1, heads=1)
FEW = settings(max_examples=settings().max_examples // 5)  # each one trains
TEXT = "The quick brown fox; jumps over the lazy dog!\n" * 40


EMPTY = study.Study(
    schema="sixnd.study/1", torch="2", device="cpu", threads=1, recipe=study.CHAIN, diets={}, runs=()
)  # of no run yet


def training(recipe=RECIPE, seed=0, repeated=None, size=SIZE):
    diet = Synthetic(CHAIN, recipe.tokens, seed, repeated, held_out=8)
    return Training(d2l_gpt(CHAIN.symbols, size.width, size.heads, size.layers), recipe, diet, CPU)


def trained(folder, one=None, save_every=1):
    """A training at its last step, which leaves a checkpoint in the folder."""
    one, steps = one or training(), []
    train(one, folder / "one.safetensors", save_every=save_every, done=steps.append)
    assert sum(steps) == one.recipe.steps
    return one


def bits(one):
    """What a training has come to: all tensors, and the results but for the time that they took."""
    results = study.finished(one, "fresh", SIZE)
    return {name: tensor.numpy().tobytes() for name, tensor in one.tensors().items()}, replace(results, seconds=0.0)


# What is read


@given(text=st.text("ab .", max_size=60), tokens=st.integers(1, 9))
def test_windows_stride_by_their_length(text, tokens):
    """ceil((len - T) / T) windows; targets are shifted by one, and cover the text after its first character once."""
    text = "x" * (tokens + 1) + text
    found = windows([ord(character) for character in text], tokens).tolist()
    assert len(found) == ceil((len(text) - tokens) / tokens)
    inputs, targets = ([row[:-1] for row in found], [row[1:] for row in found])
    for index, (before, after) in enumerate(zip(inputs, targets, strict=True)):
        assert "".join(map(chr, before)) == text[index * tokens :][:tokens]
        assert "".join(map(chr, after)) == text[index * tokens + 1 :][:tokens]


def corpus(folder, *texts, **fields):
    paths = []
    for index, text in enumerate(texts):
        paths.append(folder / f"{index}.txt")
        paths[-1].write_text(text, "utf-8")
    return Corpus(paths, **({"tokens": 16, "held_out": 5} | fields))


def test_a_corpus_joins_its_files_by_a_space(tmp_path):
    """Files follow in the order given, cleaned as one text; the last windows are held out."""
    one = corpus(tmp_path, "Über 3 men", TEXT)
    assert one.text.startswith(" ber men the quick")
    joined = torch.cat((one.training_WT, one.validation_WT))
    assert torch.equal(joined, windows(LETTERS.encode(one.text), 16))
    assert len(one.validation_WT) == 5
    assert [file["size"] for file in one.described()["files"]] == [len("Über 3 men".encode()), len(TEXT)]


@pytest.mark.parametrize("held_out", [0, 200])
def test_a_corpus_without_a_window_to_train_on_is_refused(held_out, tmp_path):
    """And one with none to hold out, in one line that says how many there are."""
    with pytest.raises(InputError, match=rf"0\.txt: \d+ windows of 16 characters, {held_out} to be held out$"):
        corpus(tmp_path, TEXT, held_out=held_out)


def test_a_file_that_is_no_text_is_refused(tmp_path):
    """Bytes that are not UTF-8, and a file that is not there."""
    (tmp_path / "1.txt").write_bytes(b"\xff")
    for name, problem in (("1.txt", "not UTF-8 text"), ("2.txt", "no such file or directory")):
        with pytest.raises(InputError, match=rf"{name}: {problem}$"):
            Corpus([tmp_path / name])


@given(seed=st.integers(0, 2**40), batch=st.integers(1, 9), count=st.integers(1, 9), first=st.integers(0, 30))
def test_a_pass_reads_every_sequence_once(seed, batch, count, first):
    """The steps' places, one after the other, are permutations one after the other, whichever step is asked first."""
    steps = range(math.lcm(batch, count) // batch * (1 + first // 10))
    alone = places(seed, first, batch, count)
    stream = torch.cat([places(seed, step, batch, count) for step in steps]).reshape(-1, count)
    assert all(row == list(range(count)) for row in stream.sort(1).values.tolist())
    assert torch.equal(alone, places(seed, first, batch, count))


def test_passes_and_seeds_have_orders_of_their_own():
    """Two passes over 50 sequences, or one of two seeds, have the same order by chance in one case of 50!."""
    orders = {tuple(places(seed, step, 50, 50).tolist()) for seed in (0, 1) for step in (0, 1)}
    assert len(orders) == 4


@pytest.mark.parametrize("repeated", [None, 5])
def test_a_step_follows_from_the_seed_and_its_number(repeated):
    """Two diets of a seed agree on every step in any order; another seed, or another step, is another batch."""
    one, two, other = (Synthetic(CHAIN, 6, seed, repeated) for seed in (0, 0, 1))
    assert torch.equal(one.batch(3, 4), [two.batch(step, 4) for step in (5, 3)][1])
    assert not torch.equal(one.batch(3, 4), one.batch(4, 4))
    assert not torch.equal(one.batch(3, 4), other.batch(3, 4))
    seen = {tuple(row) for step in range(10) for row in one.batch(step, 4).tolist()}
    assert (len(seen) == 5) is (repeated == 5)


def test_validation_is_the_mean_of_means_and_the_mean_over_tokens(tmp_path):
    """With a short last batch, of 1 window after 2 of 2, its tokens weigh twice in the mean of the batches' means."""
    one = corpus(tmp_path, TEXT)
    table = torch.randn(28, 28, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    nats = -table.log_softmax(-1)[one.validation_WT[:, :-1], one.validation_WT[:, 1:]]
    found = one.validate(lambda tokens_BT: table[tokens_BT], 2)
    expected = (nats[:2].mean() + nats[2:4].mean() + nats[4:].mean()) / 3
    assert math.isclose(found.batches, expected, rel_tol=1e-12)  # sums of 80 float64 in another order
    assert math.isclose(found.tokens, nats.mean(), rel_tol=1e-12)
    assert abs(found.batches - found.tokens) > 1e-3


# How it is trained


@pytest.mark.parametrize(("rule", "factor"), [("inverse", 1 / 4), ("root", 1 / 2), ("frozen", 1)])
def test_the_rate_goes_with_the_width_by_its_rule(rule, factor):
    """At four times the anchor's width the rate is a quarter, a half or all of the anchor's, step by step."""
    recipe = replace(RECIPE, rule=rule)
    assert recipe.peak_rate(8) == 0.01
    assert [recipe.rate(32, step) for step in range(7)] == [factor * recipe.rate(8, step) for step in range(7)]


def test_schedules_stay_or_fall_along_half_a_cosine():
    """Halfway down a cosine is half the rate, and it is symmetric about that; constant is constant."""
    falling, constant = replace(RECIPE, steps=8), replace(RECIPE, schedule="constant")
    rates = [falling.rate(8, step) for step in range(8)]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] == 0.01 and math.isclose(rates[4], 0.005)
    assert math.isclose(rates[1] + rates[7], 0.01)
    assert {constant.rate(8, step) for step in range(7)} == {0.01}


def test_the_textbooks_rates():
    """1e-3 at width 256 and its inverse elsewhere: 2.667e-3, 2e-3, 1.333e-3, 1e-3, 0.667e-3 (d2l 11.7.2.2)."""
    rates = [study.TEXT.peak_rate(size.width) for size in study.TEXT_SIZES]
    assert [f"{rate * 1e3:.3f}" for rate in rates] == ["2.667", "2.000", "1.333", "1.000", "0.667"]


@pytest.mark.parametrize(
    ("field", "value"), [("steps", 0), ("evaluate_every", 0), ("rule", "square"), ("schedule", "linear")]
)
def test_a_recipe_that_cannot_be_followed_is_refused(field, value):
    """Counts below one and names that are none, by name."""
    with pytest.raises(ValueError, match=rf"^{field}: expected .*, got '?{value}'?$"):
        replace(RECIPE, **{field: value})


def test_a_run_says_what_was_trained(tmp_path):
    """Parameters are the decoder's less its table, tokens and FLOPs of all steps, the floor that of what was read."""
    one = trained(tmp_path)
    run = study.finished(one, "fresh", SIZE)
    table = one.decoder.embedding.weight
    assert run.parameters == sum(parameter.numel() for parameter in one.decoder.parameters()) - table.numel()
    assert run.tokens == 7 * 4 * 6

    def step():
        one.decoder(one.diet.batch(0, 4)[:, :-1]).sum().backward()

    # The counter has all 36 pairs in each of attention's six products, forward and backward; a token sees 21.
    assert run.flops == 7 * (torch_counter.count(step) - 6 * (36 - 21) * 2 * 4 * 4)
    surprise = np.mean([float(CHAIN.surprise(one.diet.batch(step, 4)).mean()) for step in range(7)])
    assert math.isclose(run.train - run.train_excess, surprise, rel_tol=1e-12)
    assert math.isclose(run.validation - run.validation_excess, CHAIN.entropy_rate, rel_tol=1e-12)
    assert [evaluation.step for evaluation in run.evaluations] == [3, 6, 7]
    assert run.evaluations[-1].batches == run.validation


def test_the_first_loss_is_that_of_a_guess(tmp_path):
    """Before its first update a decoder is nearly uniform over the symbols, whatever it reads."""
    losses = trained(tmp_path).losses
    # Logits of deviation at most 0.02 sqrt(4) move a loss by some hundredths.
    assert math.isclose(losses[0], math.log(8), abs_tol=0.1)


def test_the_first_update_is_adams_without_decay():
    """Every weight moves by the step's rate at most, and the steepest by all of it: no decay is added.

    Adam's first update is rate g / (|g| + 1e-8), and float32 keeps a weight of 1 within 2^-24.
    """
    one = training()
    before = [parameter.detach().clone() for parameter in one.decoder.parameters()]
    one.advance()
    moved = [(now - then).abs().max().item() for now, then in zip(one.decoder.parameters(), before, strict=True)]
    assert math.isclose(max(moved), RECIPE.rate(4, 0), abs_tol=2**-23)


def test_weights_are_drawn_from_the_seed_alone():
    """Whatever torch's global generator has given before, which goes on as if nothing had been drawn."""
    torch.manual_seed(1)
    one, next_draw = training().decoder.embedding.weight, torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(1), next_draw)
    assert torch.equal(one, training().decoder.embedding.weight)
    assert not torch.equal(one, training(seed=1).decoder.embedding.weight)


def test_a_decoder_has_no_dropout():
    """Trained or not, the same tokens give the same logits."""
    one = training()
    tokens_BT = one.diet.batch(0, 4)
    assert torch.equal(one.decoder(tokens_BT[:, 1:]), one.decoder.eval()(tokens_BT[:, 1:]))


@pytest.mark.parametrize("repeated", [None, 5])
def test_twice_is_bitwise_the_same(repeated, tmp_path):
    """Weights, moments, losses and results; another seed gives others."""
    runs = [
        trained(tmp_path / str(index), training(seed=seed, repeated=repeated)) for index, seed in enumerate((0, 0, 1))
    ]
    one, two, other = map(bits, runs)
    assert one == two
    assert one[0]["losses"] != other[0]["losses"]


@FEW
@given(kills=st.lists(st.integers(1, RECIPE.steps), max_size=3), save_every=st.integers(1, RECIPE.steps))
def test_killed_and_resumed_it_ends_at_the_same_bits(kills, save_every, tmp_path_factory):
    """However often and wherever a run is killed, with whatever checkpoints, it ends as one that never was."""
    folder = tmp_path_factory.mktemp("run")

    def killed(left):
        def done(steps):
            left[0] -= steps
            if left[0] <= 0:
                raise KeyboardInterrupt

        return done

    for kill in kills:
        with contextlib.suppress(KeyboardInterrupt):
            train(training(), folder / "one.safetensors", save_every=save_every, done=killed([kill]))
    assert bits(trained(tmp_path_factory.mktemp("whole"))) == bits(trained(folder, save_every=save_every))


def test_a_run_goes_on_where_its_checkpoint_is(tmp_path):
    """Killed after five steps, with a checkpoint every two, it has the last three to do, and at the end none."""
    one, path, steps = training(), tmp_path / "one.safetensors", []
    for _ in range(5):
        one.advance()
        if one.step % 2 == 0:
            one.save(path)
    train(training(), path, save_every=2, done=steps.append)
    assert steps == [4, 1, 1, 1]
    train(training(), path, save_every=2, done=steps.append)
    assert steps[4:] == [7]


def test_a_write_that_is_cut_off_leaves_the_checkpoint_before(tmp_path, monkeypatch):
    """A checkpoint takes its place at once, when all of it is written."""
    one, path = training(), tmp_path / "one.safetensors"
    one.advance()
    one.save(path)
    before = path.read_bytes()
    one.advance()

    def cut_off(tensors, beside, metadata):
        beside.write_bytes(before[:-1])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("model.training.save_file", cut_off)
        with pytest.raises(KeyboardInterrupt):
            one.save(path)
    assert path.read_bytes() == before
    assert bits(trained(tmp_path)) == bits(trained(tmp_path / "whole"))


def flipped(path):
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)


def changed(path, **tensors):
    """A checkpoint that vouches for itself, with some tensors replaced, or left out where they are None."""
    held = load_file(path) | {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    held = {name: tensor for name, tensor in held.items() if tensor is not None}
    said = {"schema": SCHEMA, "design": training().design(), "step": "1", "size": "", "seconds": "0"}
    save_file(held, path, said | {"checksum": checksum(said, held)})


def folder_instead(path):
    path.unlink()
    path.mkdir()


SPOILED = {
    "cut off": (lambda path: path.write_bytes(path.read_bytes()[:-1]), "not a whole checkpoint"),
    "empty": (lambda path: path.write_bytes(b""), "not a whole checkpoint"),
    "pickle": (lambda path: torch.save({}, path), "not a whole checkpoint"),
    "one bit": (flipped, "not the checkpoint that was written"),
    "foreign": (lambda path: save_file(load_file(path), path, {"format": "pt"}), "expected a checkpoint of schema"),
    "schema": (lambda path: save_file(load_file(path), path), "expected a checkpoint of schema"),
    "missing": (lambda path: changed(path, exp_avg__norm__weight=None), r"exp_avg\.norm\.weight: not the tensor"),
    "losses": (lambda path: changed(path, losses=None), "losses: not the tensor"),
    "surplus": (lambda path: changed(path, other=torch.zeros(1)), "other: not the tensor"),
    "shape": (lambda path: changed(path, weight__norm__weight=torch.zeros(5)), r"weight\.norm\.weight: not the tensor"),
    "folder": (folder_instead, "expected a regular file"),
    "steps": (lambda path: trained(path.parent, training(replace(RECIPE, steps=8))), "of another design"),
    "seed": (lambda path: trained(path.parent, training(seed=1)), "of another design"),
    "diet": (lambda path: trained(path.parent, training(repeated=5)), "of another design"),
    "size": (lambda path: trained(path.parent, training(size=Size(6, 1, 1))), "of another design"),
}


@pytest.mark.parametrize("name", SPOILED)
def test_a_checkpoint_that_is_corrupt_or_foreign_is_refused(name, tmp_path):
    """In one line that names the file; what is being trained is left as it was."""
    one, path = training(), tmp_path / "one.safetensors"
    one.advance()
    if name not in ("steps", "seed", "diet", "size"):
        one.save(path)
    spoil, problem = SPOILED[name]
    spoil(path)
    before = one.tensors()
    with pytest.raises(InputError, match=rf"one\.safetensors: {problem}"):
        one.restore(path)
    assert all(torch.equal(tensor, one.tensors()[key]) for key, tensor in before.items())


# The command


def command(monkeypatch, *arguments):
    """The exit code of the command in this process."""
    monkeypatch.setattr(sys, "argv", ["study", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        study.main()
    return ended.value.code


def untimed(path):
    runs = json.loads(path.read_bytes())
    return [run | {"seconds": 0} for run in runs.pop("runs")], runs


def test_the_command_is_killed_and_run_again(tmp_path, monkeypatch, capsys):
    """After a SIGKILL in the middle the next process goes on, and ends at the results of one that never was killed."""
    arguments = ["--sizes", "4", "--steps", 100, "--diet", "fresh", "--save-every", 5, "--threads", 1]
    out = tmp_path / "killed"
    process = subprocess.Popen(
        [sys.executable, "-m", "model.study", *map(str, arguments), "--out", str(out)], stderr=subprocess.DEVNULL
    )
    while not list(out.glob("checkpoints/*.safetensors")) and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (out / "study.json").exists()
    for folder in (out, tmp_path / "whole"):
        assert command(monkeypatch, *arguments, "--out", folder) == 0
    assert "fresh" in capsys.readouterr().out
    assert untimed(out / "study.json") == untimed(tmp_path / "whole" / "study.json")


def test_a_corpus_is_studied_and_the_json_redraws_its_picture(tmp_path, monkeypatch):
    """Text in, and out a JSON that names it without holding it, from which the picture follows to the byte."""
    (tmp_path / "fox.txt").write_text(TEXT * 4)
    arguments = ["--corpus", tmp_path / "fox.txt", "--sizes", "4:1:1,6:1:1", "--steps", 2, "--held-out", 3]
    arguments += ["--evaluate-every", 1, "--rate", "frozen", "--seed", 0, "--seed", 1]
    assert command(monkeypatch, *arguments, "--out", tmp_path / "out") == 0
    loaded = study.load(tmp_path / "out" / "study.json")
    assert study.draw(loaded) == (tmp_path / "out" / "study.svg").read_text()
    assert study.dump(loaded) == (tmp_path / "out" / "study.json").read_bytes()
    assert loaded.diets["corpus"]["files"][0]["name"] == "fox.txt"
    assert [(run.seed, run.width) for run in loaded.runs] == [(0, 4), (0, 6), (1, 4), (1, 6)]
    assert {(run.rate, len(run.evaluations), run.validation_excess) for run in loaded.runs} == {(1e-3, 2, None)}
    assert b"quick" not in study.dump(loaded)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--sizes", "5"], r"expected WIDTH:LAYERS:HEADS or one of 4, 6, 10, 16, 28, got '5'"),
        (["--sizes", "6:1:4"], r"heads: expected a divisor of the width 6, got 4"),
        (["--device", "abacus"], r"--device abacus: "),
        (["--corpus", "none.txt"], r"none\.txt: no such file or directory"),
        (["--corpus", "none.txt", "--diet", "fresh"], r"--diet is of the chain"),
        (["--steps", "0"], r"0 is not in the range"),
    ],
)
def test_what_cannot_be_studied_is_one_line(arguments, problem, monkeypatch, capsys, tmp_path):
    """Exit code 2, and on standard error one line."""
    assert command(monkeypatch, *arguments, "--out", tmp_path) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("study: ")]
    assert re.search(problem, line)


def test_a_foreign_checkpoint_stops_the_command(tmp_path, monkeypatch, capsys):
    """A checkpoint of other steps is not written over: one line names it, exit code 2."""
    arguments = ["--sizes", "4", "--diet", "fresh", "--out", tmp_path]
    assert command(monkeypatch, "--steps", 2, *arguments) == 0
    before = {path: path.read_bytes() for path in tmp_path.glob("checkpoints/*")}
    assert command(monkeypatch, "--steps", 3, *arguments) == 2
    assert re.search(r"^study: .*fresh-0-4-1-1\.safetensors: .*another design", capsys.readouterr().err, re.MULTILINE)
    assert before == {path: path.read_bytes() for path in tmp_path.glob("checkpoints/*")}


@pytest.mark.parametrize("data", [b"", b"{}", study.dump(EMPTY).replace(b"study/1", b"study/2")])
def test_a_file_that_is_no_study_is_refused(data, tmp_path):
    """By name, in one line: no JSON, none of a study, and none of this schema."""
    (tmp_path / "study.json").write_bytes(data)
    with pytest.raises(InputError, match=r"study\.json: no study: "):
        study.load(tmp_path / "study.json")


# The bend


RECORDED = ROOT / "amd-epyc" / "study"
SPREAD = 0.2  # a point is on a line when it is within so much of it in the logarithm: a factor of 1.22


def margins(one):
    """What must be positive: how far a study is, by each part of the verdict, from where that part would fail.

    ``line``: a size of the fresh diet is on its power law. ``bend``: on the fixed diet the validation excess of the
    largest is twice that law's. ``memory``: its training loss is below the entropy rate. ``parting``: it has training
    and validation five times as far apart as the smallest. ``fresh``: the fresh diet, of no size a tenth as far.
    """
    law, (sizes, fresh) = one.line("fresh", "validation_excess"), one.curve("fresh", "validation_excess")
    off = np.abs(np.log(fresh / law.at(sizes)))
    (_, unseen), (_, seen) = (one.curve("fixed", f"{kind}_excess") for kind in ("validation", "train"))
    apart, fresh_apart = unseen - seen, np.abs(fresh - one.curve("fresh", "train_excess")[1])
    return {
        **{f"line {size:g}": SPREAD - distance for size, distance in zip(sizes, off, strict=True)},
        "bend": np.log(unseen[-1] / law.at(sizes[-1])) - np.log(2),
        "memory": -seen[-1],
        "parting": apart[-1] - 5 * apart[0],
        "fresh": apart[-1] / 10 - fresh_apart.max(),
    }


@pytest.fixture(scope="module")
def recorded():
    """The default study, with 16 seeds."""
    return study.load(RECORDED / "chain.json")


def of_seed(one, seed):
    return replace(one, runs=tuple(run for run in one.runs if run.seed == seed))


def test_a_curve_is_the_mean_over_seeds_and_a_picture_shows_all(recorded):
    """By non-embedding parameters, rising; each diet's two curves and the line's slope are named in the picture."""
    sizes, losses = recorded.curve("fixed", "validation")
    assert list(sizes) == sorted({run.parameters for run in recorded.runs})
    alone = [of_seed(recorded, seed).curve("fixed", "validation")[1] for seed in {run.seed for run in recorded.runs}]
    assert np.allclose(losses, np.mean(alone, 0), rtol=1e-12)
    picture = study.draw(recorded)
    for label in ("fresh, train", "fresh, validation", "fixed, train", "fixed, validation"):
        assert label in picture
    assert f"slope {recorded.line('fresh', 'validation_excess').exponent:.2f}" in picture


def test_a_false_alarm_is_rarer_than_one_in_ten_thousand(recorded):
    """Margins of another seed fall below zero with the probability that 16 recorded seeds give, added over all.

    Student's t: of margins taken as normal the next is off the mean of n by t s sqrt(1 + 1/n), t of n - 1 degrees.
    """
    seeds = sorted({run.seed for run in recorded.runs})
    rows = [margins(of_seed(recorded, seed)) for seed in seeds]
    alarms = 0.0
    for name in rows[0]:
        values = np.array([row[name] for row in rows])
        distance = values.mean() / (values.std(ddof=1) * math.sqrt(1 + 1 / len(values)))
        alarms += student.sf(distance, len(values) - 1)
    assert alarms < 1e-4


def test_a_fresh_diet_is_a_line_and_a_fixed_one_bends(tmp_path):
    """The default study of a seed that is not among the recorded ones: the line, the bend, and what is learnt by heart.

    Of the fixed diet the smallest and the largest size suffice. A machine, a torch or a seed that rounds or draws
    otherwise fails here by chance in one case of ten thousand, as the test above derives.
    """
    fresh, fixed = (Synthetic(MarkovSource(), study.CHAIN.tokens, 16, repeated) for repeated in (None, study.REPEATED))
    ends = (study.CHAIN_SIZES[0], study.CHAIN_SIZES[-1])
    runs = [
        run
        for name, diet, sizes in (("fresh", fresh, study.CHAIN_SIZES), ("fixed", fixed, ends))
        for run in study.run([(name, diet)], sizes, study.CHAIN, folder=tmp_path, device=CPU)
    ]
    found = margins(replace(EMPTY, runs=tuple(runs)))
    assert min(found.values()) > 0, found


@pytest.mark.parametrize(("replaced", "by"), [("fixed", "fresh"), ("fresh", "fixed")])
def test_the_verdict_can_fail(replaced, by, recorded):
    """A family on a fresh diet is not seen to bend, nor one on a fixed diet to be a line, for any recorded seed."""
    for seed in {run.seed for run in recorded.runs}:
        kept = [run for run in of_seed(recorded, seed).runs if run.diet == by]
        found = margins(replace(recorded, runs=tuple(kept + [replace(run, diet=replaced) for run in kept])))
        failed = ["bend", "memory"] if by == "fresh" else [name for name in found if name.startswith("line")]
        assert min(found[name] for name in failed) < 0


def test_the_rates_rule_moves_the_large_end(recorded):
    """Recorded: with the inverse of the width, not its root, the largest size ends higher for each of three seeds."""
    inverse = study.load(RECORDED / "chain-inverse.json")
    for seed in (0, 1, 2):
        (_, root), (_, other) = (of_seed(one, seed).curve("fresh", "validation_excess") for one in (recorded, inverse))
        assert other[-1] > root[-1]
