"""The profiler's FLOPs: products apart from elementwise work, and named where it has none."""

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from accounting import flops, pairs
from accounting.authorities import UncountedError, torch_counter, torch_profiler
from accounting.authorities.torch_profiler import ProfiledFlops
from model.recipes import tutor
from model.torch_decoder import Decoder

ones = torch.ones


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (lambda: ones(3, 5) @ ones(5, 7), ProfiledFlops(210, 0)),
        (lambda: F.linear(ones(2, 5, 3), ones(4, 3), ones(4)), ProfiledFlops(240, 0)),
        (lambda: torch.einsum("bij,bjk->bik", ones(2, 3, 5), ones(2, 5, 7)), ProfiledFlops(420, 0)),
        (lambda: torch.baddbmm(ones(2, 3, 7), ones(2, 3, 5), ones(2, 5, 7)), ProfiledFlops(420, 0)),
        (lambda: (ones(3, 5) @ ones(5, 7) + ones(3, 7)) * ones(3, 7), ProfiledFlops(210, 42)),
        (lambda: ones(0, 5) @ ones(5, 7), ProfiledFlops(0, 0)),
        (lambda: torch.mm(torch.eye(3).to_sparse(), ones(3, 3)), ProfiledFlops(54, 0)),
    ],
    ids="mm addmm bmm baddbmm mixed empty sparse".split(),
)
def test_products_are_kept_apart_from_elementwise_work(run, expected):
    """A multiply-add is two FLOPs, and an element of a sum or a product one."""
    assert torch_profiler.count(run) == expected


def test_sums_count_and_differences_do_not():
    """pytorch#82951: of two 2 x 3 tensors the sum and the product have six FLOPs, the difference and quotient none."""
    left, right = ones(2, 3), ones(2, 3)
    runs = (lambda: left + right, lambda: left * right, lambda: left - right, lambda: left / right)
    assert [torch_profiler.count(run).elementwise for run in runs] == [6, 6, 0, 0]


@pytest.mark.parametrize(
    ("run", "operator"),
    [
        (
            lambda: F.scaled_dot_product_attention(*[ones(1, 2, 8, 16)] * 3),
            "_scaled_dot_product_flash_attention_for_cpu",
        ),
        (lambda: ones(4, 3) @ ones(3), "addmv_"),
        (lambda: ones(3) @ ones(3), "dot"),
        (lambda: ones(4, 5).addmm_(ones(4, 3), ones(3, 5)), "addmm_"),
        (lambda: F.conv2d(ones(1, 2, 8, 8), ones(3, 2, 3, 3)), "conv2d"),
        (lambda: torch.nn.LSTM(3, 4)(ones(5, 1, 3)), "mkldnn_rnn_layer"),
    ],
    ids="attention mv dot addmm_ conv2d lstm".split(),
)
def test_an_operator_without_flops_is_named(run, operator):
    """What the profiler gives nothing for, or what is no matrix product, is an error."""
    with pytest.raises(UncountedError, match=rf"for aten::{operator}$"):
        torch_profiler.count(run)


def test_a_custom_operator_is_named():
    """Nobody knows what is in it."""

    @torch.library.custom_op("sixnd_tests::profiled", mutates_args=())
    def profiled(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    with pytest.raises(UncountedError, match=r"for sixnd_tests::profiled$"):
        torch_profiler.count(lambda: profiled(ones(2, 2)))


def test_what_is_left_out_is_asked_for_and_said():
    """Attention allowed, the rest of a step is counted, and the result names what it is without."""
    q, weight = ones(1, 2, 8, 16, requires_grad=True), ones(16, 4)

    def run():
        (F.scaled_dot_product_attention(q, q, q) @ weight).sum().backward()

    fused = "aten::_scaled_dot_product_flash_attention_for_cpu"
    profiled = torch_profiler.count(run, allow=("attention",))
    assert (profiled.matmul, profiled.left_out) == (2 * 2 * 16 * 16 * 4, (fused, f"{fused}_backward"))
    with pytest.raises(UncountedError, match=r"aten::dot$"):
        torch_profiler.count(lambda: (run(), ones(3) @ ones(3)), allow=("attention",))


def test_the_math_backend_is_counted():
    """Attention in its plain form is two products that the profiler knows."""
    q = ones(1, 2, 8, 16)
    with sdpa_kernel(SDPBackend.MATH):
        assert torch_profiler.count(lambda: F.scaled_dot_product_attention(q, q, q)).matmul == 2 * 2 * 2 * 8 * 8 * 16


def test_a_step_of_the_decoder():
    """The products of a step are those that the counter sees, and that are predicted."""
    spec = tutor(vocab=11, width=8, context=6, layers=2, heads=2)
    decoder, tokens = Decoder(spec, attention="eager"), torch.zeros((3, 5), dtype=torch.long)

    def step():
        decoder(tokens).sum().backward()

    predicted = flops.training(spec, seq=5, batch=3, pairs=pairs.full).total
    assert torch_profiler.count(step).matmul == torch_counter.count(step) == predicted
