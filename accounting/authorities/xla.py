"""What XLA's cost analysis says of a JAX function, refused where it is known to be wrong; and the dots of its trace.

XLA counts the body of a loop once, the larger branch of a conditional, and adds -1 for an instruction that it does
not know into its total. So a program is priced only where each of its instructions is on the list of those that it
prices as they run.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax

from accounting.authorities import UncountedError

Scope = Literal["program", "device"]

_MOVES = """
    parameter constant tuple get-tuple-element bitcast bitcast-convert copy copy-start copy-done reshape transpose
    broadcast iota slice dynamic-slice dynamic-update-slice concatenate pad gather reverse convert opt-barrier
    optimization-barrier select clamp compare and or not xor shift-left shift-right-logical shift-right-arithmetic
    reduce-precision real imag complex is-finite
"""
_ARITHMETIC = """
    dot add subtract multiply divide remainder maximum minimum negate abs sign floor ceil round-nearest-afz
    round-nearest-even power sqrt rsqrt cbrt exponential exponential-minus-one log log-plus-one logistic tanh sine
    cosine tan atan2 erf reduce scatter map fusion call
"""
#: Instructions that XLA prices as they run. Not among them: while, conditional, custom-call, topk, sort, convolution,
#: reduce-window, fft, cholesky, triangular-solve, ragged-dot, random bits, and what devices say to each other.
PRICED = frozenset((_MOVES + _ARITHMETIC).split())
REASONS = {
    "while": "a loop's body is counted once: unroll it",
    "conditional": "the larger branch is counted",
    "custom-call": "what XLA does not know adds -1",
    "topk": "what XLA does not know adds -1",
}
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?[^\s=]+ = (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class XlaCost:
    """The cost of one run: elementwise work is in ``flops``, a transcendental function is not.

    XLA adds up in float32: a total above 2**24 is rounded to 24 bits at each step.
    ``scope``: the whole program before it is partitioned and optimised, or what one device runs after it.
    """

    flops: int
    bytes_accessed: int | None
    scope: Scope


def opcodes(text: str) -> frozenset[str]:
    """The operation of each instruction in a module's HLO text."""
    return frozenset(_opcode(match[1]) for match in _INSTRUCTION.finditer(text))


def _opcode(instruction: str) -> str:
    """``dot`` of ``f32[2]{0} dot(...)`` and ``while`` of ``(s32[], f32[2]{0}) while(...)``."""
    depth = 0
    for index, character in enumerate(instruction):
        depth += (character == "(") - (character == ")")
        if character == " " and not depth:
            return instruction[index + 1 :].partition("(")[0]
    return instruction


def read(analysis: object) -> Mapping[str, float]:
    """The one dict of what ``cost_analysis()`` returned: a dict, or in older versions a list of one.

    UncountedError where it has no FLOPs, or says -1 of them: neither is a number.
    """
    if isinstance(analysis, list | tuple) and len(analysis) == 1:
        analysis = analysis[0]
    if not isinstance(analysis, Mapping):
        raise UncountedError(f"XLA has no cost analysis: {analysis!r}")
    if "flops" not in analysis:
        raise UncountedError("XLA's cost analysis does not say how many FLOPs")
    if not analysis["flops"] >= 0:
        raise UncountedError(f"XLA's cost analysis says {analysis['flops']:g} FLOPs: what it does not know adds -1")
    return analysis


def _refuse(text: str | None) -> None:
    """Raise UncountedError for a program that XLA prices otherwise than it runs, or whose text is not to be had."""
    if not (found := opcodes(text or "")):
        raise UncountedError("there is no HLO text to look through")
    if unpriced := sorted(found - PRICED):
        names = (f"{name} ({REASONS[name]})" if name in REASONS else name for name in unpriced)
        raise UncountedError(f"XLA does not price as they run: {', '.join(names)}")


def cost(function: Callable[..., object], *args: Any, scope: Scope = "program") -> XlaCost:
    """XLA's price of ``function(*args)``; UncountedError where it is not the price of what would run.

    ``function`` may be jitted already, with static arguments or shardings of its own. ``scope`` "program" asks the
    lowered program, of all devices together, and "device" the compiled one, of each device.
    """
    lowered = (function if hasattr(function, "lower") else jax.jit(function)).lower(*args)
    stage, text = (lowered, lowered.as_text("hlo")) if scope == "program" else _compiled(lowered)
    _refuse(text)
    try:
        analysis = read(stage.cost_analysis())
    except NotImplementedError as error:
        raise UncountedError("this backend has no cost analysis") from error
    moved = analysis.get("bytes accessed", -1.0)
    return XlaCost(int(analysis["flops"]), int(moved) if moved >= 0 else None, scope)


def _compiled(lowered: Any) -> tuple[Any, str | None]:
    compiled = lowered.compile()
    return compiled, compiled.as_text()


#: Primitives that run the one program they hold, once.
CALLS = frozenset(
    "jit pjit closed_call core_call composite checkpoint remat remat2 custom_jvp_call custom_vjp_call"
    " custom_vjp_call_jaxpr custom_lin".split()
)
#: Primitives that multiply as matrix products do, or run what no trace shows, on each device or out of JAX.
UNSEEN = re.compile(
    r"^conv_general|cholesky|^lu|^qr$|geqrf|householder|eig|svd|schur|hessenberg|tridiagonal|triangular_solve"
    r"|linear_solve|^fft$|callback|ffi_call|custom_call|custom_partitioning|shard_map|pmap|pallas|mosaic|cudnn"
    r"|dot_product_attention|scaled_matmul|run_state"
)


def dot_flops(function: Callable[..., object], *args: Any) -> int:
    """FLOPs of the dots that ``function(*args)`` traces to, exactly, over all devices: a multiply-add is two.

    A scan counts as often as it runs. Counted as traced: a product whose result is thrown away too, and a
    checkpointed one twice. Raises UncountedError for a dot in a ``while`` or on one side of a ``cond``, and for a
    primitive that multiplies otherwise or hides what it does.
    """
    return _dots(jax.make_jaxpr(function)(*args))


def _programs(value: object) -> Iterator[Any]:
    """The programs in a parameter of a primitive."""
    for item in value if isinstance(value, list | tuple) else (value,):
        if hasattr(item, "eqns"):
            yield item


def _dots(program: Any) -> int:
    return sum(_equation(equation) for equation in program.eqns)


def _equation(equation: Any) -> int:
    name = equation.primitive.name
    if name == "dot_general":
        return _dot(equation, equation.params["dimension_numbers"])
    if name == "ragged_dot_general":
        return _ragged_dot(equation)
    if "dot" in name or UNSEEN.search(name):
        raise UncountedError(f"no formula for {name}")
    inner = [_dots(program) for value in equation.params.values() for program in _programs(value)]
    if name == "scan":
        return int(equation.params["length"]) * sum(inner)
    if name == "cond" and len(set(inner)) == 1:
        return inner[0]
    if name not in CALLS and any(inner):
        raise UncountedError(f"how often the dots in a {name} run is not known")
    return sum(inner)


def _dot(equation: Any, dimension_numbers: Any) -> int:
    """Twice the elements of the result by the elements that each sums over."""
    contracted: tuple[int, ...] = dimension_numbers[0][0]
    left: tuple[int, ...] = equation.invars[0].aval.shape
    result: tuple[int, ...] = equation.outvars[0].aval.shape
    return 2 * math.prod(result) * math.prod(left[axis] for axis in contracted)


def _ragged_dot(equation: Any) -> int:
    """A dot for each group, which together have every row; cut along what is summed over, each result has a share."""
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = numbers.dot_dimension_numbers
    flops = _dot(equation, numbers.dot_dimension_numbers)
    groups: int = equation.invars[2].aval.shape[-1]
    return flops // groups if set(numbers.lhs_ragged_dimensions) <= set(contracted) else flops
