"""Claims of the counting essay on compute as time, and on FLOPs for each byte moved."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accounting import hardware, huggingface, params
from accounting.authorities import huggingface as modules
from accounting.authorities import torch_counter, torch_profiler
from accounting.conventions import six_nd, twenty_tokens, two_nd
from accounting.huggingface import published_config
from accounting.ledger import case

# A counted pass takes as long as many sums.
FEWER = settings(max_examples=settings.default.max_examples // 5)
QWEN = "qwen2.5-1.5b"
BUDGET = six_nd(405 * 10**9, 156 * 10**11)  # Llama 3.1 405B
H100 = hardware.find("h100-sxm")
LAPTOP = 253 * 10**11  # FLOP/s that the essay measured
LAPTOP_RIDGE = 102  # FLOPs a byte, the same
YEARS = (365, Fraction(1461, 4))  # days
INTO, OUT = 4096, 14336  # Llama 3.1 8B's feed-forward
SIZES = st.integers(1, 40)


def parameters():
    """Qwen2.5-1.5B's, counted and built."""
    module = modules.build(published_config(QWEN))
    return params.count(huggingface.load(QWEN).spec).unique, modules.unique(module)


def laptop_days(flops):
    """Days on the essay's laptop, at 40% of the rate that it measured."""
    return hardware.days(flops, peak=LAPTOP, utilisation=Fraction(2, 5))


@pytest.mark.claim("count.days.formula")
def test_time(claim):
    """Time is compute over the rate that so many GPUs make at that utilisation, and gives it back."""
    rates, shares = st.integers(1, 10**16), st.fractions(Fraction(1, 100), 1)

    @given(st.integers(1, 10**26), rates, st.integers(1, 10**5), shares)
    def everywhere(flops, peak, count, share):
        seconds = hardware.seconds(flops, peak=peak, count=count, utilisation=share)
        assert seconds == Fraction(flops) / (count * peak * share)
        assert hardware.utilisation(1, flops / seconds, peak=peak, count=count, scope="global") == share

    everywhere()
    hour = hardware.seconds(3600 * 10**15, peak=4 * 10**14, count=5, utilisation=Fraction(1, 2))
    claim.holds(hour == 3600, f"3.6e18 FLOPs on 5 GPUs at half of 400 TFLOP/s: {hour} s")


@pytest.mark.claim("count.days.sparse_half")
def test_dense_peak(claim):
    """Half of the sparse rate is the dense rate, within half a unit of its last printed place."""
    dense, sparse = H100.peak(), H100.peak(sparse=True)
    claim.holds(2 * dense == sparse and abs(dense - 989 * 10**12) <= 10**12 // 2, f"{dense / 1e12} TFLOP/s")


@pytest.mark.claim("count.days.llama")
def test_days_of_llama(claim):
    """Llama 3.1 405B's 6 N D on 16,384 H100s, at the best and the worst utilisation that Meta reports."""
    for peak in (989 * 10**12, H100.peak()):
        claim.measured(
            [hardware.days(BUDGET, peak=peak, count=16_384, utilisation=Fraction(mfu, 100)) for mfu in (43, 38)]
        )


@pytest.mark.claim("count.days.laptop_tokens")
def test_tokens_of_the_laptop(claim):
    """Twenty tokens for each of Qwen2.5-1.5B's parameters."""
    counted, built = parameters()
    claim.measured(twenty_tokens(counted), observed=20 * built)


@pytest.mark.claim("count.days.laptop_flops")
def test_compute_of_the_laptop(claim):
    """6 N D for these, and for the factors as the essay rounds them."""
    counted, built = parameters()
    claim.measured(six_nd(counted, twenty_tokens(counted)), observed=6 * 20 * built**2)
    claim.measured(six_nd(1544 * 10**6, 309 * 10**8))


@pytest.mark.claim("count.days.laptop_days")
def test_days_of_the_laptop(claim):
    """Its days at 40% of the laptop's rate, exactly and with the rounded factors."""
    counted, _ = parameters()
    for flops in (six_nd(counted, twenty_tokens(counted)), six_nd(1544 * 10**6, 309 * 10**8)):
        claim.measured(laptop_days(flops))


@pytest.mark.claim("count.days.laptop_years")
def test_years_of_the_laptop(claim):
    """The years that Qwen2.5's own 18 trillion tokens would take, of 365 days or of 365.25."""
    counted, _ = parameters()
    for year in YEARS:
        claim.measured(laptop_days(six_nd(counted, 18 * 10**12)) / year)


def pass_through(tokens, into, out, *, weights_only=False):
    """FLOPs that torch counts of 16-bit vectors through a matrix, and the bytes of the tensors."""
    layer = torch.nn.Linear(into, out, bias=False, device="meta", dtype=torch.bfloat16)
    vectors = torch.zeros(tokens, into, device="meta", dtype=torch.bfloat16)
    flops, moved = torch_counter.count(lambda: layer(vectors)), layer.weight.nbytes
    return Fraction(flops, moved if weights_only else moved + vectors.nbytes + layer(vectors).nbytes)


@pytest.mark.claim("count.intensity.flops")
def test_flops_of_a_pass(claim):
    """T tokens through a matrix of k by n take 2 T k n FLOPs."""

    def counted(tokens, into, out):
        layer, vectors = torch.nn.Linear(into, out, bias=False), torch.zeros(tokens, into)
        return torch_counter.count(lambda: layer(vectors))

    @FEWER
    @given(SIZES, SIZES, SIZES)
    def everywhere(tokens, into, out):
        assert counted(tokens, into, out) == two_nd(into * out, tokens) == 2 * tokens * into * out

    everywhere()
    layer, vectors = torch.nn.Linear(5, 7, bias=False), torch.zeros(3, 5)
    profiled = torch_profiler.count(lambda: layer(vectors)).matmul
    claim.holds(profiled == counted(3, 5, 7) == 210, f"3 tokens through 5 x 7: {profiled}")


@pytest.mark.claim("count.intensity.one")
def test_intensity_of_one_token(claim):
    """One token has one FLOP for each byte of 16-bit weights, and little less with what goes in and comes out."""
    weights = hardware.intensity(1, INTO, OUT, activations=False)
    claim.measured(weights, observed=pass_through(1, INTO, OUT, weights_only=True))
    claim.measured(hardware.intensity(1, INTO, OUT), observed=pass_through(1, INTO, OUT))


@pytest.mark.claim("count.intensity.train")
def test_intensity_in_training(claim):
    """FLOPs a byte of 8,192 tokens through Llama 3.1 8B's feed-forward matrix, inputs and outputs counted."""
    matrix = modules.build(published_config("llama-3.1-8b")).model.layers[0].mlp.up_proj.weight
    claim.measured(hardware.intensity(8192, INTO, OUT), observed=pass_through(8192, *reversed(matrix.shape)))


@pytest.mark.claim("count.intensity.ridge_h100")
def test_ridge(claim):
    """An H100's dense peak over its bandwidth, of the form factor on SXM alone."""
    claim.measured(H100.ridge())
    for name in ("h100-pcie", "h100-nvl"):
        claim.otherwise(hardware.find(name).ridge(), name)


@pytest.mark.claim("count.intensity.decode_below")
def test_decode_and_training(claim):
    """One token is far below the ridge, of the essay's laptop and of every chip here, and 8,192 are far above."""
    ridges = [LAPTOP_RIDGE, *(ridge for chip in hardware.CHIPS if (ridge := chip.ridge()) is not None)]
    decode, training = pass_through(1, INTO, OUT), pass_through(8192, INTO, OUT)
    assert (decode, training) == tuple(hardware.intensity(tokens, INTO, OUT) for tokens in (1, 8192))
    below, above = min(ridges) / decode, training / max(ridges)
    claim.holds(below > 1 and above > 1, f"{float(below):.0f} times below the lowest, {float(above):.1f} times above")


@pytest.mark.claim("count.intensity.batch_ridge")
def test_batching(claim):
    """More tokens in a batch are more FLOPs a byte, up to the ridge and over it."""

    @FEWER
    @given(st.integers(1, 4096), SIZES, SIZES)
    def everywhere(tokens, into, out):
        assert pass_through(tokens, into, out) < pass_through(tokens + 1, into, out)

    everywhere()
    for name, ridge in (("laptop", LAPTOP_RIDGE), ("H100", H100.ridge())):
        least = hardware.tokens_at(ridge, INTO, OUT)
        before, after = (pass_through(tokens, INTO, OUT) for tokens in (least - 1, least))
        claim.holds(before < ridge <= after, f"{name}: {least} tokens for {float(ridge):.0f} FLOPs a byte")


@pytest.mark.claim("count.intensity.figure")
def test_figure(claim):
    """The essay's diagram of both cases is not in its text."""
    claim.unrun("data:original-page")


@pytest.mark.parametrize((), [case(f"count.days.{what}") for what in ("h100", "mfu", "qwen_tokens")])
def test_cited(claim):
    """A vendor's sheet or a report states it."""
    claim.cited()
