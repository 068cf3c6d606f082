"""Dive into Deep Learning 11.7.1.3: the six checked against torch's profiler and XLA's cost analysis."""

from dataclasses import replace
from fractions import Fraction
from functools import cache, partial

import jax
import jax.numpy as jnp
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from accounting import conventions, flops, hardware, pairs, params
from accounting.authorities import torch_counter, torch_profiler, xla
from accounting.census import Part
from accounting.ledger import case
from accounting.ledger.printed import parse
from model import jax_decoder
from model.recipes import d2l_gpt
from model.torch_decoder import Decoder

BATCH, CONTEXT = 64, 128
TOKENS = BATCH * CONTEXT
SWIGLU, GELU = d2l_gpt(), d2l_gpt(activation="gelu")
PROFILED_BATCH = 2  # a step of 64 takes a CPU seconds, and its operators are the same
PROFILED_TOKENS = PROFILED_BATCH * CONTEXT


def six(spec, tokens=TOKENS):
    return conventions.six_nd(params.count(spec).matmul, tokens)


def percent(ratio):
    return f"{float(100 * ratio):.2f} %"


def built(spec, device="meta", **options):
    with torch.device(device):
        return Decoder(spec, **options)


def two_d(spec):
    """N of the torch cell: scalars in the 2-D parameters of the decoder."""
    return sum(parameter.numel() for parameter in built(spec).parameters() if parameter.ndim == 2)


def two_d_leaves(spec):
    """N of the JAX cell: scalars in the 2-D leaves of the decoder's tree."""
    return sum(leaf.size for leaf in jax.tree.leaves(weights_of(spec)) if leaf.ndim == 2)


def step(decoder, batch):
    """The torch cell's step."""
    tokens = torch.zeros(batch, CONTEXT, dtype=torch.long, device=decoder.head.weight.device)
    F.cross_entropy(decoder(tokens).flatten(0, 1), tokens.flatten()).backward()


@cache
def counted():
    """FLOPs of the products with weights in the torch cell's step, as torch's counter has them."""
    return torch_counter.by_operator(partial(step, built(SWIGLU, attention="eager"), BATCH))["aten.mm"]


@cache
def profiled(attention):
    """What the profiler gives each operator of a step of the default on the CPU, 0 where it gives nothing."""
    decoder = built(SWIGLU, "cpu", attention=attention)
    with profile(activities=[ProfilerActivity.CPU], with_flops=True) as found:
        step(decoder, PROFILED_BATCH)
    return {event.key: event.flops or 0 for event in found.key_averages()}


@cache
def weights_of(spec):
    return jax.eval_shape(partial(jax_decoder.init, spec), jax.random.key(0))


def shaped(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def erf(spec):
    """The same decoder with the exact form of GELU."""
    plain = spec.blocks[0]
    block = replace(plain, feed_forward=replace(plain.feed_forward, activation="gelu"))
    return replace(spec, blocks=(block,) * len(spec.blocks))


def loss(spec, weights, tokens):
    """The JAX cell's loss."""
    logits = jax_decoder.forward(spec, weights, tokens)
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1).mean()


@cache
def priced(spec, *, train=False, batch=BATCH, scope="device"):
    """XLA's price of the JAX cell's forward pass or step: compiled, as there, but for a CPU; or of the program."""
    run = partial(loss, spec)
    arguments = weights_of(spec), shaped(batch, TOKENS // batch, dtype="int32")
    with jax.default_device(jax.devices("cpu")[0]):
        return xla.cost(jax.value_and_grad(run) if train else run, *arguments, scope=scope).flops


def over_rule(spec, train):
    """What XLA prices over 2 N D or 6 N D."""
    rule = conventions.six_nd if train else conventions.two_nd
    return Fraction(priced(spec, train=train), rule(params.count(spec).matmul, TOKENS))


@pytest.mark.claim("d2l.check.profiler_mm")
def test_profiler_sees_mm(claim):
    """Of what the profiler sees in a step nearly all is in aten::mm, the rest elementwise."""
    found = {name: seen for name, seen in profiled("fused").items() if seen}
    shares = {name: Fraction(seen, sum(found.values())) for name, seen in found.items()}
    shown = ", ".join(f"{name} {percent(share)}" for name, share in shares.items())
    products = set(found) & torch_profiler.MATMUL
    claim.holds(products == {"aten::mm"} and round(shares["aten::mm"], 2) == 1, shown)


@pytest.mark.claim("d2l.check.profiler_mm_exact")
def test_mm_is_6nd(claim):
    """The profiler's aten::mm is 6 N D to the last FLOP, N the 2-D parameters."""
    found, ours = profiled("fused")["aten::mm"], six(SWIGLU, PROFILED_TOKENS)
    assert ours == 6 * two_d(SWIGLU) * PROFILED_TOKENS
    claim.holds(found == ours, f"{found:,} FLOPs for {PROFILED_TOKENS} tokens")


@pytest.mark.claim("d2l.check.fused_reports_none")
def test_fused_attention_reports_nothing(claim):
    """The fused attention runs, forward and backward, and the profiler gives it no FLOPs."""
    fused = {name: seen for name, seen in profiled("fused").items() if "attention" in name}
    assert any("backward" in name for name in fused)
    claim.holds(bool(fused) and not any(fused.values()), f"{fused}")


@pytest.mark.claim("d2l.check.eager_reports_scores")
def test_written_out_attention_is_seen(claim):
    """With attention written out its products appear as bmm, and all products are 1.083 of 6 N D."""
    found, ours = profiled("eager"), flops.training(SWIGLU, seq=CONTEXT, batch=PROFILED_BATCH, pairs=pairs.full)
    claim.holds(found["aten::bmm"] == ours.scores + ours.mixture, f"bmm {found['aten::bmm']:,} FLOPs")
    claim.measured(
        Fraction(ours.total, six(SWIGLU, PROFILED_TOKENS)),
        observed=Fraction(found["aten::mm"] + found["aten::bmm"], 6 * two_d(SWIGLU) * PROFILED_TOKENS),
    )


@pytest.mark.claim("d2l.check.both_omit")
def test_both_leave_attention_out(claim):
    """The profiler agrees with 6 N D because both are without what attention, written out, is seen to add."""
    fused, eager = profiled("fused"), profiled("eager")
    missing = eager["aten::bmm"]
    parts = params.by_part(SWIGLU)
    blocks = parts[Part.ATTENTION].matmul + parts[Part.FEED_FORWARD].matmul
    ratio = Fraction(missing, conventions.six_nd(blocks, PROFILED_TOKENS))
    rule = conventions.attention_ratio(SWIGLU.width, CONTEXT)
    # The rule is for 12 d^2 a block, and three matrices of 683 are a little more.
    alike = ratio * blocks == rule * conventions.kaplan_parameters(SWIGLU)
    claim.holds(
        alike and "aten::bmm" not in fused and fused["aten::mm"] == eager["aten::mm"],
        f"left out {percent(ratio)} of the blocks' work, n / (6 d) {percent(rule)}",
    )


@pytest.mark.claim("d2l.check.two_d_params")
def test_two_d_parameters(claim):
    """With rotary positions the 2-D parameters are the blocks' matrices and the tied head."""

    @given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 40), st.booleans(), st.sampled_from(("swiglu", "gelu")))
    def everywhere(layers, half, vocab, bias, activation):
        spec = d2l_gpt(vocab, 12 * half, 6, layers, kv_heads=2, norm="layer", activation=activation, bias=bias)
        assert blocks_and_head(spec) == params.count(spec).matmul == two_d(spec)

    def blocks_and_head(spec):
        parts = params.by_part(spec)
        return parts[Part.ATTENTION].matmul + parts[Part.FEED_FORWARD].matmul + spec.vocab * spec.width

    everywhere()
    found = two_d(SWIGLU)
    claim.holds(blocks_and_head(SWIGLU) == found, f"{found:,} = {found - 28 * 256:,} in the blocks + {28 * 256:,}")


@pytest.mark.claim("d2l.check.two_d_params_errata")
def test_n_and_the_head_are_more(claim):
    """N as the chapter fixes it, non-embedding, has the norms' gains in it, and with the head is more than the 2-D."""
    count, decoder = params.count(SWIGLU), built(SWIGLU)
    table = decoder.embedding.weight.numel()
    everything = sum(parameter.numel() for parameter in decoder.parameters())
    gains = sum(parameter.numel() for parameter in decoder.parameters() if parameter.ndim == 1)
    with_head = count.non_embedding + table
    claim.holds(with_head == two_d(SWIGLU), f"{with_head:,} against {two_d(SWIGLU):,}")
    ours = params.by_part(SWIGLU)[Part.NORM].unique
    claim.right(count.unique, count.matmul, ours, observed=(everything, two_d(SWIGLU), gains))


@pytest.mark.claim("d2l.check.gather_free")
def test_a_lookup_is_free(claim):
    """Looking tokens up has no FLOPs, nor has its backward pass; as the head the same table has two a scalar."""
    table, tokens = torch.nn.Embedding(28, 256, device="meta"), torch.zeros(3, 5, dtype=torch.long, device="meta")
    torch_finds = torch_counter.count(lambda: table(tokens).sum().backward())
    jax_finds = xla.dot_flops(lambda weight, ids: weight[ids], shaped(28, 256), shaped(3, 5, dtype="int32"))
    as_head = torch_counter.count(lambda: torch.empty(1, 256, device="meta") @ table.weight.T)
    assert flops.forward(SWIGLU, seq=1).head == as_head
    claim.holds(
        torch_finds == jax_finds == 0, f"{torch_finds} FLOPs in torch and {jax_finds} in JAX; the head {as_head:,}"
    )


@pytest.mark.claim("d2l.check.xla_no_run")
def test_xla_runs_nothing(claim):
    """XLA prices a step of shapes alone, with no number that it could run on."""
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(weights_of(GELU)))
    price = priced(GELU, train=True)
    claim.holds(price > six(GELU), f"{price:.3e} FLOPs of a step whose weights and tokens are shapes")


@pytest.mark.claim("d2l.check.xla_counts_scores")
def test_xla_counts_scores_and_softmax(claim):
    """The same tokens in sequences twice as long cost XLA the scores and mixtures more, all pairs, and the softmax."""
    spec, programs = GELU, []
    products, softmax = [], []
    for batch in (BATCH, BATCH // 2):
        seq = TOKENS // batch
        programs.append(priced(spec, batch=batch, scope="program"))
        products.append(flops.forward(spec, seq=seq, batch=batch, pairs=pairs.full).total)
        softmax.append(len(spec.blocks) * xla.cost(jax.nn.softmax, shaped(batch, 8, seq, seq)).flops)
    (program, scores, entries) = (long - short for short, long in (programs, products, softmax))
    masked = flops.forward(spec, seq=CONTEXT, batch=BATCH).total
    claim.holds(
        scores + entries <= program and masked < products[0] < programs[0],
        f"of {program:,} FLOPs more {scores:,} are in the products and {entries:,} in the softmax",
    )


@pytest.mark.claim("d2l.check.width_683")
def test_swiglu_width(claim):
    """The gated feed-forward that matches 8 d^2 at width 256 is 683 wide."""
    up = built(SWIGLU).blocks[0].feed_forward.up.weight
    claim.measured(SWIGLU.blocks[0].feed_forward.width, observed=up.shape[0])
    claim.holds(round(Fraction(8 * 256, 3)) == up.shape[0], "8 d / 3, rounded")


@pytest.mark.claim("d2l.check.gelu_same_budget")
def test_gelu_has_the_same_budget(claim):
    """The GELU model's matrices are the SwiGLU model's but for the rounding of 8 d / 3, at most half a unit."""
    counts = [params.count(spec).matmul for spec in (SWIGLU, GELU)]
    assert counts == [two_d(SWIGLU), two_d_leaves(GELU)]
    rounding = Fraction(1, 2) * 3 * SWIGLU.width * len(SWIGLU.blocks)  # three matrices as many rows too wide
    claim.holds(abs(counts[0] - counts[1]) <= rounding, f"{counts[0]:,} and {counts[1]:,}")


@pytest.mark.claim("d2l.check.torch_analytic")
def test_torch_analytic_line(claim):
    """6 N D of the torch cell reads as printed."""
    claim.measured(six(SWIGLU), observed=counted())


@pytest.mark.parametrize(
    ("rule", "factor"),
    [case("d2l.check.jax_2nd", conventions.two_nd, 2), case("d2l.check.jax_6nd", conventions.six_nd, 6)],
)
def test_jax_analytic_lines(claim, rule, factor):
    """2 N D and 6 N D of the JAX cell read as printed."""
    claim.measured(rule(params.count(GELU).matmul, TOKENS), observed=factor * two_d_leaves(GELU) * TOKENS)


@pytest.mark.claim("d2l.check.analytic_differs")
def test_analytic_lines_differ(claim):
    """The two cells' 6 N D differ by the feed-forward alone."""
    claim.measured((six(SWIGLU), six(GELU)), observed=(counted(), 6 * two_d_leaves(GELU) * TOKENS))
    block = replace(GELU.blocks[0], feed_forward=SWIGLU.blocks[0].feed_forward)
    claim.holds(replace(GELU, blocks=(block,) * 6) == SWIGLU, "the same decoder with the other feed-forward")


@pytest.mark.claim("d2l.check.timing_consistent")
def test_time_and_rate_agree(claim):
    """Some time of a step reads 26 ms and makes 6 N D a rate that reads 8.8 TFLOP/s."""
    rate, time = parse("8.8"), parse("26")
    ours, theirs = (hardware.seconds(work, peak=rate.value * hardware.TERA) * 1000 for work in (six(SWIGLU), counted()))
    claim.measured(ours, observed=theirs)
    rates = [rate.value + off for off in (rate.ulp / 2, -rate.ulp / 2)]
    shortest, longest = (hardware.seconds(six(SWIGLU), peak=each * hardware.TERA) * 1000 for each in rates)
    overlap = shortest < time.value + time.ulp / 2 and time.value - time.ulp / 2 < longest
    claim.holds(overlap, f"8.8 TFLOP/s takes from {float(shortest):.2f} to {float(longest):.2f} ms")


@pytest.mark.parametrize("price", [case("d2l.check.jax_fwd", "forward pass"), case("d2l.check.jax_step", "step")])
def test_prices_of_the_chapters_compiler(claim, price):
    """The printed price is that of the chapter's own GPU and XLA: no other compiler's refutes it or bears it out."""
    claim.unrun("gpu")


@pytest.mark.claim("d2l.check.jax_fwd_ratio")
def test_forward_over_2nd(claim):
    """XLA prices the forward pass at 1.10 of 2 N D, to a unit of the last place."""
    printed = parse("1.10")
    # The compilers' elementwise work differs by 2 in 10,000 of the price, which may turn the last place.
    found, exact = over_rule(GELU, train=False), over_rule(erf(GELU), train=False)
    claim.holds(abs(found - printed.value) <= printed.ulp, f"{float(found):.4f}")
    claim.otherwise(abs(exact - printed.value) <= printed.ulp, f"{float(exact):.4f} with the exact GELU")


@pytest.mark.claim("d2l.check.jax_step_ratio")
def test_step_over_6nd(claim):
    """XLA prices the step at 1.10 of 6 N D."""
    claim.measured(over_rule(GELU, train=True))
    claim.otherwise(over_rule(erf(GELU), train=True), "with the exact GELU")


@pytest.mark.claim("d2l.check.bwd_fwd")
def test_backward_over_forward(claim):
    """XLA prices the backward pass at 2.00 of the forward one before it compiles; in products it is 2."""
    spec = GELU

    def ratio(scope):
        ahead, both = (priced(spec, train=train, scope=scope) for train in (False, True))
        return Fraction(both - ahead, ahead)

    arguments = partial(loss, spec), weights_of(spec), shaped(BATCH, CONTEXT, dtype="int32")
    ahead = xla.dot_flops(*arguments)
    both = xla.dot_flops(jax.value_and_grad(arguments[0]), *arguments[1:])
    assert (ahead, both) == tuple(
        count(spec, seq=CONTEXT, batch=BATCH, pairs=pairs.full).total for count in (flops.forward, flops.training)
    )
    claim.measured(ratio("program"))
    claim.holds(both == 3 * ahead, "2 in products")
    claim.otherwise(ratio("device"), "compiled for a CPU")


@pytest.mark.claim("d2l.check.ten_percent")
def test_ten_percent(claim):
    """XLA's step is ten percent above 6 N D, of which scores, softmax and norms are eight or nine."""
    spec = GELU
    block = spec.blocks[0]
    norm = partial(jax_decoder.normalise, block.attention_norm)
    softmax = xla.cost(jax.nn.softmax, shaped(BATCH, block.attention.heads, CONTEXT, CONTEXT)).flops
    norms = xla.cost(norm, {"weight": shaped(spec.width)}, shaped(BATCH, CONTEXT, spec.width)).flops
    products = flops.forward(spec, seq=CONTEXT, batch=BATCH, pairs=pairs.full).total
    named = products + len(spec.blocks) * (softmax + 2 * norms) + norms
    rule = conventions.two_nd(params.count(spec).matmul, TOKENS)
    claim.measured(over_rule(spec, train=True) - 1)
    forward = over_rule(spec, train=False) - 1
    claim.holds(
        named < forward * rule + rule, f"forward {percent(forward)}, {percent(Fraction(products, rule) - 1)} products"
    )
    claim.otherwise(Fraction(named, rule) - 1, "forward, with scores, softmax and norms alone")


@pytest.mark.claim("d2l.check.flopcounter_convention")
def test_flop_counter_by_device(claim):
    """Torch's counter omits attention on a CPU, has all pairs on meta and in the plain form, and 2.5 in flash."""

    def native(run):
        with FlopCounterMode(display=False) as counter:
            run()
        return Fraction(counter.get_total_flops(), six(SWIGLU, CONTEXT))

    cpu, meta = (built(SWIGLU, device) for device in ("cpu", "meta"))
    with sdpa_kernel(SDPBackend.MATH):
        plain = native(partial(step, cpu, 1))
    found = [native(partial(step, cpu, 1)), native(partial(step, meta, 1)), plain]
    full = Fraction(flops.training(SWIGLU, seq=CONTEXT, pairs=pairs.full).total, six(SWIGLU, CONTEXT))
    shape = (1, 8, CONTEXT, 32)
    flash = Fraction(sdpa_backward_flop_count(*[shape] * 4), sdpa_flop_count(*[shape] * 3))
    shown = ", ".join(f"{float(ratio):.4f}" for ratio in found)
    claim.holds(found == [1, full, full] and flash == Fraction(5, 2), f"of 6 N D {shown}; flash backward {flash}")


@pytest.mark.claim("d2l.check.few_percent_errata")
def test_both_within_a_few_percent(claim):
    """Of the summary's two confirmations the profiler's is within a few percent, and XLA's is not."""
    profiler = Fraction(sum(profiled("fused").values()), six(SWIGLU, PROFILED_TOKENS)) - 1
    compiler = over_rule(GELU, train=True) - 1
    few = Fraction(5, 100)
    assert 0 < profiler < Fraction(1, 100)
    claim.holds(compiler <= few, f"profiler {percent(profiler)}, XLA {percent(compiler)}")
    claim.right(compiler)
