"""The split of a budget, against search and against the balance that characterises it."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accounting.scaling import LossSurface

SURFACES = st.builds(
    LossSurface,
    E=st.floats(0.1, 3),
    A=st.floats(0.1, 1e3),
    B=st.floats(0.1, 1e3),
    alpha=st.floats(0.1, 1),
    beta=st.floats(0.1, 1),
)
PRODUCTS = st.floats(1e-3, 1e12)


@given(surface=SURFACES, product=PRODUCTS, step=st.floats(1e-3, 10))
def test_no_other_split_has_less_loss(surface, product, step):
    """A size above or below the optimum, at the same product, does no better.

    The loss is convex in log N, so that steps to both sides suffice; the slack is what
    rounding does to two sums of three terms.
    """
    parameters, tokens = surface.optimum(product)
    least = surface.loss(parameters, tokens)
    for factor in (math.exp(step), math.exp(-step)):
        assert surface.loss(parameters * factor, tokens / factor) >= least * (1 - 8 * 2**-52)


@given(surface=SURFACES, product=PRODUCTS)
def test_the_two_terms_shrink_at_equal_rates(surface, product):
    """At the optimum alpha A / N^alpha equals beta B / D^beta, and the product is kept."""
    parameters, tokens = surface.optimum(product)
    assert math.isclose(parameters * tokens, product, rel_tol=1e-12)
    capacity = surface.alpha * surface.A / parameters**surface.alpha
    assert math.isclose(capacity, surface.beta * surface.B / tokens**surface.beta, rel_tol=1e-9)


@pytest.mark.parametrize("name", ["A", "B", "alpha", "beta"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan])
def test_a_surface_without_a_slope_is_refused(name, value):
    """Constants and exponents are positive."""
    constants = {"E": 1.0, "A": 1.0, "B": 1.0, "alpha": 0.5, "beta": 0.5, name: value}
    with pytest.raises(ValueError, match=f"^{name}: expected a positive number"):
        LossSurface(**constants)


def test_a_budget_is_positive():
    """There is nothing to split in a product of zero or less."""
    surface = LossSurface(E=1.0, A=1.0, B=1.0, alpha=0.5, beta=0.5)
    with pytest.raises(ValueError, match=r"^product: expected a positive number"):
        surface.optimum(0.0)
