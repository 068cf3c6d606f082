"""The documents' own models: their parameter counts, taken from the modules that are built from the specs."""

import pytest
import torch

from accounting.spec import ModelSpec, SpecError
from model.recipes import RECIPES, d2l_gpt, swiglu_width, tutor
from model.torch_decoder import Decoder

UNIQUE = {
    "tutor-toy": 2_752,
    "d2l-default": 4_730_624,
    "d2l-gpt2": 124_439_808,
    "study-96": 335_136,
    "study-128": 593_920,
    "study-192": 1_776_576,
    "study-256": 4_730_624,
    "study-384": 14_173_056,
    "recipe-gpt2": 5_263_360,
    "recipe-mistral-7b": 4_395_776,
    "recipe-llama-3": 4_395_776,
    "recipe-qwen3": 4_395_776,
}


def on_meta(spec: ModelSpec) -> Decoder:
    with torch.device("meta"):
        return Decoder(spec)


def unique(module: torch.nn.Module) -> int:
    """Scalars in distinct Parameter objects."""
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_has_the_unique_parameters_of_its_document(name: str) -> None:
    """The built module of each named recipe holds exactly the scalars that its document counts."""
    assert UNIQUE[name] == unique(on_meta(RECIPES[name]))


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("study-96", "0.33M"),
        ("study-128", "0.59M"),
        ("study-192", "1.77M"),
        ("study-256", "4.72M"),
        ("study-384", "14.16M"),
    ],
)
def test_study_sizes_print_as_the_document_prints_them(name: str, printed: str) -> None:
    """Without the token table, each study model rounds to the non-embedding count in d2l 11.7.2.2."""
    model = on_meta(RECIPES[name])
    assert printed == f"{(unique(model) - model.embedding.weight.numel()) / 1e6:.2f}M"


def test_the_three_modern_recipes_are_one() -> None:
    """Mistral-7B, Llama-3 and Qwen3 scaled down are the same argument list (d2l 11.7.3.1)."""
    assert RECIPES["recipe-mistral-7b"] == RECIPES["recipe-llama-3"] == RECIPES["recipe-qwen3"]
    assert RECIPES["recipe-qwen3"] != RECIPES["recipe-gpt2"]


@pytest.mark.parametrize("width", [8, 96, 128, 192, 256, 384, 512, 768, 4096, 12288])
def test_swiglu_width_is_what_pythons_round_gives(width: int) -> None:
    """The integer rule for 8 d / 3 is Python's own rounding of it."""
    assert round(8 * width / 3) == swiglu_width(width)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"tied": False}, 2_752 + 9 * 8),
        ({"vocab": 10}, 2_752 + 8),
        ({"context": 7}, 2_752 + 8),
        ({"layers": 4}, 2_752 + 12 * 8 * 8 + 13 * 8),
        ({"heads": 4}, 2_752),
        ({"width": 12}, 9 * 12 + 6 * 12 + 3 * (12 * 12 * 12 + 13 * 12) + 2 * 12),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_tutor_dials_change_what_they_name(arguments: dict[str, int | bool], expected: int) -> None:
    """Each argument of the toy moves the count by the terms of V C + S C + L (12 C^2 + 13 C) + 2 C that have it."""
    assert expected == unique(on_meta(tutor(**arguments)))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"kv_heads": 2}, 4_730_624 - 6 * 2 * 6 * 32 * 256),
        ({"positions": "learned"}, 4_730_624 + 1024 * 256),
        ({"norm": "layer"}, 4_730_624 + 13 * 256),
        ({"activation": "gelu"}, 4_730_624 + 6 * 256 * (2 * 1024 - 3 * 683)),
        ({"bias": True}, 4_730_624 + 6 * (5 * 256 + 2 * 683)),
        ({"context": 2048}, 4_730_624),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_d2l_dials_change_what_they_name(arguments: dict[str, object], expected: int) -> None:
    """Each argument of the d2l model moves the default's count by the tensors that it adds or widens."""
    assert expected == unique(on_meta(d2l_gpt(**arguments)))


@pytest.mark.parametrize("make", [tutor, d2l_gpt])
def test_heads_that_do_not_divide_the_width_are_refused(make) -> None:
    """A width that the heads do not divide has no head_dim."""
    with pytest.raises(SpecError, match=r"^heads: expected a divisor of the width 10, got 4$"):
        make(width=10, heads=4)
