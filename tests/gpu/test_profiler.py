"""What the profiler attributes to the d2l step on a GPU."""

from fractions import Fraction
from functools import cache

import pytest

from accounting import conventions, params
from accounting.ledger import case
from model.recipes import RECIPES
from tests.gpu import steps

pytestmark = pytest.mark.gpu

DEFAULT, BATCH, SEQ = RECIPES["d2l-default"], 64, 128
profiled = cache(lambda: steps.profiled(DEFAULT, batch=BATCH, seq=SEQ, device="cuda"))


def six_nd():
    return conventions.six_nd(params.count(DEFAULT).matmul, BATCH * SEQ)


def test_products_are_6nd_to_the_last_flop():
    """The products apart from attention are 6 N D, and whatever kernel attention takes reports nothing."""
    assert profiled().matmul == six_nd()
    assert profiled().left_out and all("attention" in name for name in profiled().left_out)


@pytest.mark.parametrize("unit", [case("d2l.check.torch_profiler", lambda: 1), case("d2l.check.torch_ratio", six_nd)])
def test_total(claim, unit):
    """With the elementwise work that it knows, the profiler's total is as printed, in FLOPs and in units of 6 N D."""
    claim.measured(Fraction(profiled().matmul + profiled().elementwise, unit()))
