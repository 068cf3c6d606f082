"""Pictures: the same text for the same numbers, and what stands in them follows from these."""

import re
from xml.etree import ElementTree

import numpy as np
import pytest

from accounting import flops, pictures
from accounting.scaling import LAWS, LossSurface, Split
from model.recipes import RECIPES

BUDGETS = (1e20, 1e21, 1e22)
REFIT = LAWS["besiroglu"].surface
PICTURES = {
    "table3": lambda: pictures.table3([1e8, 1e9, 1e10], BUDGETS, [2e9, 2e10, 2e11]),
    "loss_surface": lambda: pictures.loss_surface(REFIT, BUDGETS),
    "optima": lambda: pictures.optima({"refit": REFIT}, BUDGETS, {"Chinchilla": Split(70e9, 1.4e12)}),
    "attention_share": lambda: pictures.attention_share({"toy": RECIPES["tutor-toy"]}, (2, 4)),
}
SVG = "{http://www.w3.org/2000/svg}"


def parse(svg):
    """The tree of a picture that was just drawn here."""
    return ElementTree.fromstring(svg)  # noqa: S314


def texts(svg):
    """What is written in a picture."""
    return ["".join(node.itertext()).strip() for node in parse(svg).iter(f"{SVG}text")]


def line(svg, name):
    """The corners of a named line, and where its markers stand, in points to the right and down."""
    (group,) = (group for group in parse(svg).iter(f"{SVG}g") if group.get("id") == name)
    corners = re.findall(r"[ML] ([-\d.]+) ([-\d.]+)", next(group.iter(f"{SVG}path")).get("d"))
    uses = [(use.get("x"), use.get("y")) for use in group.iter(f"{SVG}use")]
    return np.array(corners, float), np.array(uses, float)


@pytest.mark.parametrize("name", PICTURES)
def test_the_same_numbers_draw_the_same_text(name):
    """A picture drawn twice is one text, without a date; it is a whole SVG file."""
    svg = PICTURES[name]()
    assert svg == PICTURES[name]()
    assert "<dc:date>" not in svg
    assert parse(svg).tag == f"{SVG}svg"
    assert len(texts(svg)) > 4


def test_slopes_are_written_into_the_legend():
    """N grows by one decade and D by one for each of C: both slopes read 1."""
    assert [text for text in texts(PICTURES["table3"]()) if "slope" in text] == [
        "N, parameters: slope 1.000",
        "D, tokens: slope 1.000",
    ]


def test_optima_of_a_law_without_drift_lie_on_a_level():
    """Where alpha is beta, tokens for each parameter do not move with the budget."""
    level = LossSurface(E=1, A=100, B=400, alpha=0.5, beta=0.5)
    svg = pictures.optima({"level": level}, BUDGETS, {})
    corners, _ = line(svg, "level")
    assert np.ptp(corners[:, 0]) > 100
    assert np.ptp(corners[:, 1]) < 1e-3
    assert "level" in texts(svg)


def test_attention_share_is_that_of_the_count():
    """A point stands as far up its axis, 0 to 1, as attention's products are of all."""
    spec = RECIPES["tutor-toy"]
    svg = pictures.attention_share({"toy": spec}, (2, 4, 6))
    costs = [flops.forward(spec, seq=seq) for seq in (2, 4, 6)]
    shares = np.array([(cost.scores + cost.mixture) / cost.total for cost in costs])
    _, markers = line(svg, "toy")
    assert len(markers) == len(shares)
    frame, _ = line(svg, "patch_2")  # the axes, whose height is a share of 1
    bottom, top = frame[:, 1].max(), frame[:, 1].min()
    np.testing.assert_allclose((bottom - markers[:, 1]) / (bottom - top), shares, atol=1e-4)
