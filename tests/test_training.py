"""How one size is trained: rates, steps, and checkpoints that end at the same bits or are refused."""

import contextlib
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from accounting.authorities import torch_counter
from accounting.files import InputError
from model import study
from model.study import Size
from model.training import SCHEMA, checksum, train
from tests.trainings import CHAIN, RECIPE, SIZE, bits, trained, training

FEW = settings(max_examples=settings().max_examples // 5)  # each one trains


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
