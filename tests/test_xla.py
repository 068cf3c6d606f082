"""XLA's cost analysis, refused where it is known to be wrong, and the exact count of a trace's dots."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import sparse

from accounting import flops, pairs
from accounting.authorities import UncountedError, xla
from accounting.authorities.xla import XlaCost
from model.jax_decoder import forward, init
from model.recipes import tutor

ROOT = Path(__file__).parents[1]
SQUARE = jnp.ones((128, 128))
PRODUCT = 2 * 128**3
SCOPES = pytest.mark.parametrize("scope", ["program", "device"])


def multiply(times, unroll=1):
    return lambda x: lax.scan(lambda carry, _: (carry @ x, None), x, None, length=times, unroll=unroll)[0]


@SCOPES
def test_a_small_product(scope):
    """jax#16008: (2, 10) by (10, 7) is 280 FLOPs, and reads and writes 4 bytes for each of 104 numbers."""
    cost = xla.cost(jnp.matmul, jnp.ones((2, 10)), jnp.ones((10, 7)), scope=scope)
    assert cost == XlaCost(flops=280, bytes_accessed=4 * (20 + 70 + 14), scope=scope)
    assert xla.dot_flops(jnp.matmul, jnp.ones((2, 10)), jnp.ones((10, 7))) == 280


def test_what_is_jitted_already_is_taken_as_it_is():
    """Static arguments are its own."""
    power = jax.jit(lambda x, times: x @ x if times else x, static_argnums=1)
    assert xla.cost(power, SQUARE, 1).flops == PRODUCT


@pytest.mark.parametrize(
    ("analysis", "problem"),
    [
        (None, "no cost analysis: None"),
        ([], r"no cost analysis: \[\]"),
        ([{"flops": 1.0}, {"flops": 1.0}], "no cost analysis"),
        ({}, "does not say how many FLOPs"),
        ([{"bytes accessed": 8.0}], "does not say how many FLOPs"),
        ({"flops": -1.0}, "says -1 FLOPs"),
        ({"flops": float("nan")}, "says nan FLOPs"),
    ],
    ids=str,
)
def test_an_analysis_that_does_not_know_is_refused(analysis, problem):
    """jax#10542, #14479, #20184: a missing or negative total is no number."""
    with pytest.raises(UncountedError, match=problem):
        xla.read(analysis)


@pytest.mark.parametrize("wrap", [dict, lambda found: [found]], ids=["dict", "list"])
def test_an_analysis_of_any_version_is_read(wrap):
    """A dict now, a list of one before."""
    assert xla.read(wrap({"flops": 280.0}))["flops"] == 280


class Stage:
    """A lowered program whose backend answers as it is told."""

    def __init__(self, answer):
        self.answer = answer

    def lower(self, *_):
        return self

    def as_text(self, *_):
        return "ROOT %dot.1 = f32[2]{0} dot(%x, %y)"

    def cost_analysis(self):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def test_a_backend_without_an_analysis_is_refused():
    """NotImplementedError is not a number either, and bytes may be unknown where FLOPs are known."""
    with pytest.raises(UncountedError, match="this backend has no cost analysis"):
        xla.cost(Stage(NotImplementedError()))
    assert xla.cost(Stage({"flops": 4.0, "bytes accessed": -1.0})) == XlaCost(4, None, "program")
    assert xla.cost(Stage({"flops": 4.0})).bytes_accessed is None


def test_a_program_without_text_is_refused():
    """What cannot be looked through may hold anything."""
    stage = Stage({"flops": 4.0})
    stage.as_text = lambda *_: None
    with pytest.raises(UncountedError, match="no HLO text"):
        xla.cost(stage)


@SCOPES
def test_the_identity_is_refused(scope):
    """XLA gives it no FLOPs, not even none."""
    with pytest.raises(UncountedError, match="does not say how many FLOPs"):
        xla.cost(lambda x: x, SQUARE, scope=scope)


def test_an_unknown_instruction_hides_in_a_positive_total():
    """A product and a top_k: 4,194,303 FLOPs, one less than the product alone, because the unknown one adds -1."""
    analysis = jax.jit(lambda x: lax.top_k(x @ x, 2)).lower(SQUARE).compile().cost_analysis()
    assert analysis["flops"] == PRODUCT - 1
    with pytest.raises(UncountedError, match=r"custom-call \(what XLA does not know adds -1\)"):
        xla.cost(lambda x: lax.top_k(x @ x, 2), SQUARE, scope="device")


REFUSED = {
    "topk": (lambda x: lax.top_k(x @ x, 2), "topk"),
    "sort": (lambda x: jnp.sort(x @ x), "sort"),
    "cholesky": (jnp.linalg.cholesky, "custom-call"),
    "cumsum": (jnp.cumsum, "reduce-window"),
    "conditional": (lambda x: lax.cond(x[0, 0] > 0, lambda x: x @ x, lambda x: x, x), "conditional"),
    "while": (lambda x: lax.while_loop(lambda x: x[0, 0] < 3, lambda x: x @ x, x), "while"),
    "callback": (lambda x: jax.pure_callback(lambda x: x, x, x) @ x, "custom-call"),
    "convolution": (lambda x: lax.conv(x[None, None], x[None, None, :3, :3], (1, 1), "SAME"), "convolution"),
    "fft": (lambda x: jnp.fft.fft(x).real, "fft"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_instructions_that_are_not_priced_as_they_run(name):
    """A total with one of them in it is no total: what it is has a name."""
    function, instruction = REFUSED[name]
    with pytest.raises(UncountedError, match=rf"not price as they run: .*{instruction}"):
        xla.cost(function, SQUARE)


def test_a_ragged_product_is_refused_and_its_dots_counted():
    """XLA makes one of (8, 16) by two of (16, 16) a dense product of every group; it is 4,096 FLOPs."""
    arguments = jnp.ones((8, 16)), jnp.ones((2, 16, 16)), jnp.array([3, 5])
    with pytest.raises(UncountedError, match="not price as they run"):
        xla.cost(lax.ragged_dot, *arguments)
    assert xla.dot_flops(lax.ragged_dot, *arguments) == 4096
    step = jax.value_and_grad(lambda *xs: lax.ragged_dot(*xs).sum(), (0, 1))
    assert xla.dot_flops(step, *arguments) == 3 * 4096


@SCOPES
@pytest.mark.parametrize("times", [2, 8, 24])
def test_a_loop_is_refused_and_its_dots_counted(times, scope):
    """XLA counts one turn of them all: unrolled, and in the trace, each counts."""
    with pytest.raises(UncountedError, match=r"while \(a loop's body is counted once: unroll it\)"):
        xla.cost(multiply(times), SQUARE, scope=scope)
    once = jax.jit(multiply(times)).lower(SQUARE).cost_analysis()["flops"]
    assert once < 2 * PRODUCT
    assert xla.dot_flops(multiply(times), SQUARE) == times * PRODUCT
    if scope == "program":
        assert xla.cost(multiply(times, unroll=True), SQUARE).flops == times * PRODUCT


def test_a_loop_of_one_turn():
    """JAX hands it over as a loop, and the compiled program is its body."""
    with pytest.raises(UncountedError, match="while"):
        xla.cost(multiply(1), SQUARE)
    assert xla.cost(multiply(1), SQUARE, scope="device").flops == xla.dot_flops(multiply(1), SQUARE) == PRODUCT


def test_the_opcode_after_a_long_tuple_is_found():
    """A comment in the type of a loop's state does not hide the loop."""
    text = "  ROOT %while.29 = (s32[], u32[4,4]{1,0:T(8,128)}, /*index=5*/u32[]) while(%tuple.20), body=%region\n"
    assert xla.opcodes("HloModule jit_f, is_scheduled=true\n" + text) == {"while"}


SHARDED = """
import jax, jax.numpy as jnp
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
from accounting.authorities import UncountedError, xla
mesh = jax.make_mesh((2,), ("batch",))
rows, whole = (jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(axis)) for axis in ("batch", None))
function = jax.jit(jnp.matmul, in_shardings=(rows, whole))
arguments = jnp.ones((256, 128)), jnp.ones((128, 128))
print(*(xla.cost(function, *arguments, scope=scope).flops for scope in ("program", "device")))
print(xla.dot_flops(function, *arguments))
constrained = jax.jit(jnp.matmul, in_shardings=(rows, whole), out_shardings=rows)
print(xla.cost(constrained, *arguments, scope="device").flops)
try:
    xla.cost(constrained, *arguments)
except UncountedError:
    print("refused")
"""


def test_a_program_is_of_all_devices_and_a_compiled_one_of_each():
    """(256, 128) by (128, 128) on two devices is 8,388,608 FLOPs, half of them on each.

    A sharding asked of the result is an instruction that XLA adds -1 for, until it is compiled.
    """
    run = subprocess.run([sys.executable, "-c", SHARDED], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.stdout.split() == ["8388608", "4194304", "8388608", "4194304", "refused"], run.stderr


@jax.custom_vjp
def doubled(x):
    return x @ x


doubled.defvjp(lambda x: (doubled(x), x), lambda x, g: (g @ x @ x,))


@pytest.mark.parametrize(
    ("function", "products"),
    [
        (jax.jit(lambda x: jnp.sin(x @ x)), 1),
        (jax.value_and_grad(lambda x: (x @ x).sum()), 3),
        (jax.value_and_grad(lambda x: jax.checkpoint(lambda y: jnp.sin(y @ y))(x).sum()), 4),
        (jax.value_and_grad(lambda x: doubled(x).sum()), 3),
        (lambda x: lax.cond(x[0, 0] > 0, lambda x: x @ x, lambda x: -x @ x, x), 1),
        (lambda x: lax.fori_loop(0, 5, lambda _, y: multiply(3)(y) @ x, x), 20),
        (lambda x: jnp.einsum("ij,jk,kl->il", x, x, x), 2),
        (jax.vmap(lambda row: row @ jnp.ones((128, 128))), 1),
        (lambda x: lax.while_loop(lambda x: x[0, 0] < 3, lambda x: x + 1, x @ x), 1),
        (lambda x: x + 1, 0),
    ],
    ids="jit step checkpoint custom_vjp cond nested einsum vmap while none".split(),
)
def test_the_dots_of_a_trace(function, products):
    """Each dot is counted as often as it runs, through whatever it is wrapped in."""
    assert xla.dot_flops(function, SQUARE) == products * PRODUCT


def test_batched_and_contracted_axes():
    """Axes of both kinds, none as long as another: 2 by the result by what is summed over."""
    left, right = jnp.ones((2, 3, 5, 7)), jnp.ones((7, 2, 11, 5))
    contract = partial(jnp.einsum, "bhij,jbki->bhk")
    assert xla.dot_flops(contract, left, right) == 2 * 2 * 3 * 11 * 5 * 7


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (REFUSED["while"][0], "how often the dots in a while run"),
        (REFUSED["conditional"][0], "how often the dots in a cond run"),
        (REFUSED["cholesky"][0], "no formula for cholesky"),
        (REFUSED["callback"][0], "no formula for pure_callback"),
        (REFUSED["convolution"][0], "no formula for conv_general_dilated"),
        (lambda x: jnp.linalg.solve(x, x), "no formula for lu"),
        (
            jax.shard_map(
                lambda x: x @ x,
                mesh=jax.make_mesh((1,), ("x",)),
                in_specs=jax.sharding.PartitionSpec(),
                out_specs=jax.sharding.PartitionSpec(),
            ),
            "no formula for shard_map",
        ),
        (lambda x: sparse.BCOO.fromdense(x, nse=3) @ x, "no formula for bcoo_dot_general"),
    ],
    ids="while cond cholesky callback convolution solve shard_map sparse".split(),
)
def test_dots_that_a_trace_does_not_tell(function, problem):
    """How often, how many on which device, or whether at all: what is not known is refused."""
    with pytest.raises(UncountedError, match=problem):
        xla.dot_flops(function, SQUARE)


def test_the_decoder_traces_to_what_is_predicted():
    """Forward and a step of the JAX decoder, to the last FLOP; XLA's price has elementwise work besides."""
    spec = tutor(vocab=11, width=8, context=6, layers=2, heads=2)
    params, tokens = init(spec, jax.random.key(0)), np.zeros((3, 5), dtype=np.int32)
    predicted = partial(flops.training, spec, seq=5, batch=3, pairs=pairs.full)
    run = partial(forward, spec)
    assert xla.dot_flops(run, params, tokens) == flops.forward(spec, seq=5, batch=3, pairs=pairs.full).total
    step = jax.value_and_grad(lambda params: run(params, tokens).sum())
    assert xla.dot_flops(step, params) == predicted().total
    assert xla.cost(run, params, tokens).flops > xla.dot_flops(run, params, tokens)
