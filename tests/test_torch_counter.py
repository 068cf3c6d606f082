"""The counter that refuses: products are counted, or their operators named."""

import pytest
import torch
from torch.nn import functional as F

from accounting.authorities import torch_counter
from accounting.authorities.torch_counter import UncountedError


def test_a_matrix_product_is_two_flops_for_each_multiply_add():
    """(3, 5) by (5, 7) multiplies and adds 3 x 5 x 7 times."""
    left, right = torch.ones(3, 5), torch.ones(5, 7)
    assert torch_counter.count(lambda: left @ right) == 2 * 3 * 5 * 7


def test_nothing_is_nothing():
    """A lookup and an elementwise sum multiply no matrices."""
    table, tokens = torch.ones(9, 8), torch.tensor([1, 2])
    assert torch_counter.count(lambda: F.embedding(tokens, table) + 1) == 0


@pytest.mark.parametrize(
    ("run", "operator"),
    [
        (lambda: torch.ones(4, 3) @ torch.ones(3), "aten.mv"),
        (lambda: torch.ones(3) @ torch.ones(3), "aten.dot"),
        (lambda: F.scaled_dot_product_attention(*[torch.ones(1, 2, 8, 16)] * 3), "flash_attention_for_cpu"),
    ],
)
def test_an_operator_without_a_formula_is_named(run, operator):
    """What torch's counter takes for nothing is an error here."""
    with pytest.raises(UncountedError, match=operator):
        torch_counter.count(run)
