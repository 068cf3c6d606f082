"""Chips and their rates, and what counts become on them."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accounting import hardware
from accounting.authorities import xla
from accounting.hardware import CHIPS, Chip, find

POSITIVE = st.fractions(min_value=Fraction(1, 1000), max_value=10**15)
COUNTS = st.integers(1, 10**5)
SHARES = st.fractions(min_value=Fraction(1, 1000), max_value=1)
SIZES = st.integers(1, 5000)


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)
def test_a_chip_is_found_by_its_names_and_by_no_other(chip):
    """By its own name in any case, by what drivers report, and never by a part or an extension of either."""
    for name in (chip.name, chip.name.upper(), *chip.devices):
        assert find(name) is chip
    for name in (chip.name[:-1], f"{chip.name}-super", f"{chip.name} "):
        assert find(name) is not chip


@pytest.mark.parametrize(
    "name", ["H100", "NVIDIA H100", "A100", "NVIDIA B300", "NVIDIA H20", "AMD Instinct MI350X", ""]
)
def test_an_unknown_chip_is_none(name):
    """A chip without its form factor, or a newer one, is not taken for one that is known."""
    assert find(name) is None


def test_names_are_of_one_chip_each():
    """No two chips share a name."""
    names = [name.lower() for chip in CHIPS for name in {chip.name, *chip.devices}]
    assert len(names) == len(set(names))


# GB, GB/s and TFLOP/s as printed: 2000* with sparsity alone, 1000|2000* without and with it, - where there is none.
SHEETS = """
                 GB  GB/s  float32  tfloat32      bfloat16        float16         float8
b200-sxm        180  8000  -        2250*         4500*           4500*           9000*
h200-sxm        141  4800  67       989*          1979*           1979*           3958*
h200-nvl        141  4800  60       835*          1671*           1671*           3341*
h100-sxm         80  3350  67       989*          1979*           1979*           3958*
h100-pcie        80  2000  51       756*          1513*           1513*           3026*
h100-nvl         94  3900  60       835*          1671*           1671*           3341*
a100-sxm-80gb    80  2039  19.5     156|312*      312|624*        312|624*        -
a100-sxm-40gb    40  1555  19.5     156|312*      312|624*        312|624*        -
a100-pcie-80gb   80  1935  19.5     156|312*      312|624*        312|624*        -
v100-sxm2-32gb   32   900  15.7     -             -               125             -
l4               24   300  30.3     120*          242*            242*            485*
l40s             48   864  91.6     183|366*      362.05|733*     362.05|733*     733|1466*
rtx-4090         24  1008  82.6     82.6|165.2*   165.2|330.4*    165.2|330.4*    -
rtx-4060-laptop   8   256  -        -             -               -               -
mi300x          192  5300  163.4    653.7|1307.4* 1307.4|2614.9*  1307.4|2614.9*  2614.9|5229.8*
mi325x          256  6000  163.4    653.7|1307.4* 1307.4|2614.9*  1307.4|2614.9*  2614.9|5229.8*
tpu-v4           32  1200  -        -             275             -               -
tpu-v5e          16   819  -        -             197             -               -
tpu-v5p          95  2765  -        -             459             -               -
tpu-v6e          32  1640  -        -             918             -               -
"""
(_, _, *DTYPES), *ROWS = map(str.split, SHEETS.strip().splitlines())


def printed(cell):
    """The dense and the sparse rate of a cell, None where it has none: a sparse one alone is twice the dense one."""
    rates = {rate.endswith("*"): Fraction(rate.rstrip("*")) * 10**12 for rate in cell.split("|") if rate != "-"}
    sparse = rates.get(True)
    return rates.get(False, sparse and sparse / 2), sparse


def test_every_chip_has_a_sheet():
    """Each once."""
    assert [row[0] for row in ROWS] == [chip.name for chip in CHIPS]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_chip_is_what_its_sheet_prints(row):
    """Memory, bandwidth, and a dense and a sparse rate for each dtype that the vendor states, and for no other."""
    name, memory, bandwidth, *cells = row
    chip, rates = find(name), dict(zip(DTYPES, map(printed, cells), strict=True))
    assert (chip.memory, chip.bandwidth) == (int(memory) * 10**9, int(bandwidth) * 10**9)
    assert chip.dense == {dtype: dense for dtype, (dense, _) in rates.items() if dense}
    assert chip.sparse == {dtype: sparse for dtype, (_, sparse) in rates.items() if sparse}


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)
def test_sparse_rates_are_twice_the_dense_ones(chip):
    """As printed: twice, but for the last printed digit; never more than asked for by default."""
    for dtype, rate in chip.sparse.items():
        dense = chip.peak(dtype)
        assert dense is not None and chip.peak(dtype, sparse=True) == rate
        assert abs(rate - 2 * dense) * 80 <= rate
    assert chip.peak("int3") is None and chip.source and chip.memory > 0


@pytest.mark.parametrize(
    ("device", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA B200", 2250),
    ],
)
def test_dense_rates_are_those_that_others_use(device, tflops):
    """The BF16 peaks of torchtitan's table (torchtitan/tools/utils.py), in whole TFLOP/s."""
    assert find(device).peak() // 10**12 == tflops


def test_a_rate_that_nobody_states_is_none():
    """No BF16 rate of a chip without one, no sparse rate where none is printed, and no ridge without both."""
    assert find("v100-sxm2-32gb").peak("bfloat16") is None
    assert find("tpu-v5p").peak(sparse=True) is None
    assert find("rtx-4060-laptop").peak() is None and find("rtx-4060-laptop").ridge() is None


def test_a_sparse_peak_halves_the_share():
    """420 TFLOP/s on an H200 are 42.4 % of its dense peak; with the sparse one they would read 21.2 %."""
    chip, rate = find("h200-sxm"), 420 * 10**12
    shares = [
        hardware.utilisation(1, rate, peak=chip.peak(sparse=sparse), count=1, scope="device") for sparse in (0, 1)
    ]
    assert [round(share, 3) for share in shares] == [Fraction(424, 1000), Fraction(212, 1000)]


@given(flops=POSITIVE, peak=POSITIVE, count=COUNTS, share=SHARES)
def test_time_is_what_the_chips_need_for_it(flops, peak, count, share):
    """In that time chips at that share of their peak do that many FLOPs, and their utilisation is that share."""
    seconds = hardware.seconds(flops, peak=peak, count=count, utilisation=share)
    assert seconds * count * peak * share == flops
    assert hardware.days(flops, peak=peak, count=count, utilisation=share) * 24 * 60 * 60 == seconds
    assert hardware.utilisation(flops, 1 / seconds, peak=peak, count=count, scope="global") == share


@given(per_token=POSITIVE, tokens=POSITIVE, count=COUNTS)
def test_a_rate_is_of_all_chips_or_of_each(per_token, tokens, count):
    """The same tokens a second are so many times more for a chip when they are each one's own."""
    everyone, each = (hardware.achieved(per_token, tokens, count=count, scope=scope) for scope in ("global", "device"))
    assert each == everyone * count == per_token * tokens


@given(
    tokens=st.integers(1, 64),
    rows=st.integers(1, 64),
    columns=st.integers(1, 64),
    dtype=st.sampled_from([jnp.dtype("bfloat16"), jnp.dtype("float32")]),
)
def test_intensity_is_xlas(tokens, rows, columns, dtype):
    """FLOPs and bytes of a product of matrices of a dtype, as XLA's cost analysis has them; bfloat16 by default."""
    left, right = jax.ShapeDtypeStruct((tokens, rows), dtype), jax.ShapeDtypeStruct((rows, columns), dtype)
    seen = xla.cost(jnp.dot, left, right)
    size = {} if dtype == jnp.bfloat16 else {"item_bytes": dtype.itemsize}
    assert hardware.intensity(tokens, rows, columns, **size) == Fraction(seen.flops, seen.bytes_accessed)


@given(
    rows=SIZES,
    columns=SIZES,
    ridge=st.fractions(min_value=Fraction(1, 100), max_value=3000),
    size=st.sampled_from([{}, {"item_bytes": 1}, {"item_bytes": 4}]),
)
def test_the_fewest_tokens_at_the_ridge(rows, columns, ridge, size):
    """So many reach the ridge and one fewer does not; a matrix whose limit is below it has no such number."""
    fewest = hardware.tokens_at(ridge, rows, columns, **size)
    if fewest is None:
        assert hardware.intensity(10**9, rows, columns, **size) < ridge
    else:
        assert hardware.intensity(fewest, rows, columns, **size) >= ridge
        assert fewest == 1 or hardware.intensity(fewest - 1, rows, columns, **size) < ridge


@given(tokens=SIZES, rows=SIZES, columns=SIZES)
def test_weights_alone_have_an_intensity_of_the_tokens(tokens, rows, columns):
    """One token does one FLOP for each byte of a 2-byte matrix; inputs and outputs only lower that."""
    assert hardware.intensity(tokens, rows, columns, activations=False) == tokens
    assert hardware.intensity(tokens, rows, columns) < tokens


@given(flops=POSITIVE, moved=POSITIVE, peak=POSITIVE, bandwidth=POSITIVE)
def test_a_step_is_bound_by_the_side_of_the_ridge_that_it_is_on(flops, moved, peak, bandwidth):
    """Below the ridge memory takes longer, above it arithmetic, and at it they take as long."""
    seconds = hardware.step_seconds(flops, moved, peak=peak, bandwidth=bandwidth)
    bound_by_memory = flops / moved < hardware.ridge(peak, bandwidth)
    assert seconds == (moved / bandwidth if bound_by_memory else flops / peak)


CHIP = Chip(name="c", dense={"bfloat16": 6}, bandwidth=4, memory=1, source="s")


@pytest.mark.parametrize(
    "make",
    [
        lambda: hardware.seconds(1, peak=0),
        lambda: hardware.seconds(1, peak=1, count=0),
        lambda: hardware.seconds(1, peak=1, utilisation=40),
        lambda: hardware.achieved(1, 1, count=1, scope="everyone"),
        lambda: hardware.intensity(0, 1, 1),
        lambda: hardware.ridge(1, -1),
        lambda: hardware.tokens_at(0, 1, 1),
    ],
    ids=range(7),
)
def test_what_cannot_be_is_refused(make):
    """A rate, a share, a count or a scope that cannot be is an error in one line."""
    with pytest.raises(ValueError, match=r"^[^\n]+$"):
        make()


def test_a_chips_ridge():
    """Its peak over its bandwidth."""
    assert CHIP.ridge() == Fraction(3, 2) and CHIP.ridge("float8") is None
