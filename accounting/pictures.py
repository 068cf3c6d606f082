"""Pictures of laws and counts, as SVG texts: the same text for the same numbers.

Every function takes what it draws; nothing here computes a law or a count of its own. A named line
is the group of that name in the SVG.
"""

import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from accounting import flops
from accounting.scaling import LossSurface, Split, fit_power_law
from accounting.spec import ModelSpec

#: Text stays text, and names inside the file follow from its contents alone.
STYLE: dict[Any, Any] = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 9,
    "grid.color": "#e3dfd7",
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "sixnd",
}
WIDE, NARROW = (9.0, 3.6), (5.6, 3.6)  # inches
POINTS = 200


def svg(figure: Figure) -> str:
    """The figure as the text of an SVG file, without a date."""
    file = io.StringIO()
    with mpl.rc_context(STYLE):
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def axes(size: tuple[float, float], columns: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure of so many inches, and its columns of axes."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        return figure, [figure.add_subplot(1, columns, column + 1) for column in range(columns)]


def table3(parameters: Sequence[float], compute: Sequence[float], tokens: Sequence[float]) -> str:
    """Optimal N and D by budget on logarithmic axes, with the power law of least squares through each."""
    figure, (plot,) = axes(NARROW)
    for name, values, marker in (("N, parameters", parameters, "o"), ("D, tokens", tokens, "s")):
        law = fit_power_law(compute, values)
        (points,) = plot.loglog(compute, values, marker, label=f"{name}: slope {law.exponent:.3f}")
        plot.loglog(compute, law.at(compute), color=points.get_color(), linewidth=1)
    plot.set(xlabel="C, FLOPs", ylabel="compute-optimal size")
    plot.legend()
    return svg(figure)


def loss_surface(law: LossSurface, budgets: Sequence[float]) -> str:
    """The loss by N and D with its IsoFLOP lines, and along each of these by N alone; dots are the optima."""
    figure, (plane, curves) = axes(WIDE, columns=2)
    best = law.optimum(np.asarray(budgets))
    reach = 30.0
    sizes = np.geomspace(best.parameters.min() / reach, best.parameters.max() * reach, POINTS)
    diets = np.geomspace(best.tokens.min() / reach, best.tokens.max() * reach, POINTS)
    levels = plane.contour(sizes, diets, law.loss(*np.meshgrid(sizes, diets)), levels=12, cmap="viridis")
    plane.clabel(levels, fontsize=7)
    for budget, parameters in zip(budgets, best.parameters, strict=True):
        here = np.geomspace(parameters / reach, parameters * reach, POINTS)
        plane.plot(sizes, budget / 6 / sizes, color="#777777", linewidth=0.8)
        curves.plot(here, law.loss(here, budget / 6 / here), label=f"C = {budget:.0e}")
    for plot, heights in ((plane, best.tokens), (curves, law.loss(*best))):
        plot.plot(best.parameters, heights, "o", color="#b3261e", markersize=4)
    plane.set(xscale="log", yscale="log", xlabel="N, parameters", ylabel="D, tokens", ylim=(diets[0], diets[-1]))
    curves.set(xscale="log", xlabel="N, parameters, at D = C / 6 N", ylabel="loss, nats a token")
    curves.legend(fontsize=7)
    return svg(figure)


def optima(laws: Mapping[str, LossSurface], budgets: Sequence[float], trained: Mapping[str, Split]) -> str:
    """Tokens for each parameter at the optimum of each law, by budget, and of models that were trained."""
    figure, (plot,) = axes(NARROW)
    spent = np.geomspace(min(budgets), max(budgets), POINTS)
    for name, law in laws.items():
        plot.loglog(spent, law.optimum(spent).ratio, label=name, gid=name)
    for name, split in trained.items():
        plot.loglog(6 * split.parameters * split.tokens, split.ratio, "k.")
        plot.annotate(name, (6 * split.parameters * split.tokens, split.ratio), (4, 4), textcoords="offset points")
    plot.set(xlabel="C = 6 N D, FLOPs", ylabel="D / N, tokens for each parameter")
    plot.yaxis.set_major_formatter("{x:g}")
    plot.yaxis.set_minor_formatter("{x:g}")
    plot.legend()
    return svg(figure)


def attention_share(specs: Mapping[str, ModelSpec], contexts: Sequence[int]) -> str:
    """The share of forward FLOPs that is attention's scores and mixture, by the length of a sequence."""
    figure, (plot,) = axes(NARROW)
    for name, spec in specs.items():
        costs = [flops.forward(spec, seq=context) for context in contexts]
        plot.plot(
            contexts, [(cost.scores + cost.mixture) / cost.total for cost in costs], marker=".", label=name, gid=name
        )
    plot.set(xlabel="tokens in a sequence", ylabel="attention's share of forward FLOPs", ylim=(0, 1))
    plot.set_xscale("log", base=2)
    plot.legend()
    return svg(figure)
