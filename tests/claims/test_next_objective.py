"""Part 6 of "next": the objective that the lab constructs, 1.5 + c / sqrt(n) + 1 / sqrt(d) on n d = 16."""

from math import sqrt

import pytest

from accounting.scaling import LossSurface

SIZES = (1, 2, 4, 8, 16)


@pytest.mark.claim("next.try.coefficient")
def test_try_coefficient(claim):
    """A coefficient of 2 on the model's term moves the best split from (4, 4) to a larger model, (8, 2)."""

    def best(coefficient):
        return min(
            ((n, 16 / n) for n in SIZES), key=lambda split: 1.5 + coefficient / sqrt(split[0]) + 1 / sqrt(split[1])
        )

    def optimum(coefficient):
        return LossSurface(E=1.5, A=coefficient, B=1.0, alpha=0.5, beta=0.5).optimum(16, each=1)

    assert optimum(1) == best(1) == (4, 4)
    claim.measured(optimum(2), observed=best(2))
