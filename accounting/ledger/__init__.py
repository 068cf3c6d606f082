"""The ledger: claims of documents, the tests that take them, and the verdicts that a run reached.

`accounting.ledger.plugin` is the pytest plugin. A test takes a claim with `@pytest.mark.claim("some.id")` and the
fixture `claim`, a `ClaimCheck`; a case of a parametrised test takes one through `case`.
"""

import pytest

from accounting.ledger.check import ClaimCheck

__all__ = ["ClaimCheck", "case"]


def case(claim_id: str, *values: object) -> "pytest.ParameterSet":
    """One case of a parametrised test: its parameters are `values`, and it takes the claim, whose id is its own."""
    return pytest.param(*values, marks=pytest.mark.claim(claim_id), id=claim_id)
