"""Small trainings for the tests of what a study is made of."""

from dataclasses import replace

import torch

from model import study
from model.diets import Synthetic
from model.recipes import d2l_gpt
from model.source import MarkovSource
from model.study import Size
from model.training import Recipe, Training, train

CPU = torch.device("cpu")
CHAIN = MarkovSource(symbols=8)
RECIPE = Recipe(
    steps=7, batch=4, tokens=6, anchor_rate=0.01, anchor_width=8, rule="root", schedule="cosine", evaluate_every=3
)
SIZE = Size(width=4, layers=1, heads=1)
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
