"""Part 6 of "next" and what its lab prints: 6 N D, and the constructed loss 1.5 + 1/sqrt(n) + 1/sqrt(d)."""

from fractions import Fraction
from math import exp, log, sqrt

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar

from accounting import conventions, flops, pairs, params
from accounting import huggingface as configs
from accounting.authorities import huggingface as modules
from accounting.authorities import torch_counter
from accounting.ledger import case
from accounting.scaling import LossSurface, fit_power_law
from model.recipes import tutor
from model.torch_decoder import Decoder
from tests import tables
from tests.toys import FEW

TEACHING = LossSurface(E=1.5, A=1.0, B=1.0, alpha=0.5, beta=0.5)
SIZES = (1, 2, 4, 8, 16)
UNITS = st.floats(1e-3, 1e6)
#: A sum of three terms, each rounded.
EPSILON = 8 * 2**-52
BUDGETS = ((10**6, 10**8), (2 * 10**6, 5 * 10**7), (2 * 10**6, 2 * 10**8))


def stated(n, d):
    return 1.5 + 1 / sqrt(n) + 1 / sqrt(d)


def close(left, right):
    return abs(left - right) <= EPSILON * abs(right)


def counted(parameters, tokens):
    """FLOPs that torch counts of a matrix with so many entries, forward and both gradients."""
    layer = torch.nn.Linear(1000, parameters // 1000, bias=False, device="meta")
    given = torch.empty(tokens, 1000, device="meta", requires_grad=True)
    return torch_counter.count(lambda: layer(given).sum().backward())


@pytest.mark.claim("next.part6.six_nd")
def test_six_nd(claim):
    """Training costs 6 N D in matrices; what the text says is left out, attention, comes on top."""

    @FEW
    @given(st.integers(1, 50), st.integers(1, 50))
    def everywhere(outputs, tokens):
        assert counted(1000 * outputs, tokens) == conventions.six_nd(1000 * outputs, tokens)

    everywhere()
    spec, context = configs.load("gpt2").spec, 1024
    step, module = flops.training(spec, seq=context), modules.build(configs.published_config("gpt2"))
    matrices = sum(
        weight.numel() for name, weight in module.named_parameters() if weight.ndim == 2 and "wpe" not in name
    )
    rule = conventions.six_nd(params.count(spec).matmul, context)
    claim.holds(
        rule == 6 * matrices * context == step.linear + step.head and step.total > rule,
        f"GPT-2 at {context} tokens: {rule:,}, and {step.total - rule:,} of attention's own",
    )


@pytest.mark.claim("next.part6.mac_two")
def test_a_multiply_add_is_two(claim):
    """Torch counts two operations for each multiply-add of a product."""
    tokens, into, out = 3, 5, 7
    layer, vectors = torch.nn.Linear(into, out, bias=False), torch.zeros(tokens, into)
    multiply_adds = tokens * into * out
    claim.measured(
        Fraction(conventions.two_nd(into * out, tokens), multiply_adds),
        observed=Fraction(torch_counter.count(lambda: layer(vectors)), multiply_adds),
    )


@pytest.mark.claim("next.part6.embedding_tiny")
def test_tables_and_contexts(claim):
    """Larger tables part the two counts that N may be; a longer context is missed by all of them."""

    def six_nd_over_step(vocab, tokens):
        """6 N D over what torch counts, of all parameters, of the blocks alone, and of what multiplies a token."""
        sizes = {"vocab_size": vocab, "n_embd": 8, "n_layer": 3, "n_head": 2, "n_positions": 512}
        module = modules.build({"model_type": "gpt2", **sizes}, attn_implementation="eager")
        ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
        step = torch_counter.count(lambda: module(ids, attention_mask=torch.ones_like(ids)).logits.sum().backward())
        table, blocks = module.transformer.wte.weight.numel(), module.transformer.h
        matrices = sum(weight.numel() for weight in blocks.parameters() if weight.ndim == 2)
        counts = modules.unique(module), modules.unique(blocks), matrices + table
        return [Fraction(conventions.six_nd(count, tokens), step) for count in counts]

    spread = [whole / blocks for whole, blocks, _ in (six_nd_over_step(vocab, 8) for vocab in (9, 1000, 50257))]
    missed = [1 - exact for _, _, exact in (six_nd_over_step(65, tokens) for tokens in (8, 64, 512))]
    claim.holds(
        all(column == sorted(set(column)) and column[0] > 0 for column in (spread, missed)),
        f"all parameters are {', '.join(f'{float(each):.3g}' for each in spread)} times the blocks' at 9, 1,000 and "
        f"50,257 symbols; attention is {', '.join(f'{float(each):.0%}' for each in missed)} of a step at 8, 64 and 512 "
        "tokens",
    )


@pytest.mark.parametrize(
    "budget", [case(f"next.part6.budget{position}", budget) for position, budget in enumerate(BUDGETS, start=1)]
)
def test_budgets(claim, budget):
    """6 N D for each of the lab's pairs, and what torch counts of a matrix of N entries that D tokens pass."""
    claim.measured(conventions.six_nd(*budget), observed=counted(*budget))


@pytest.mark.claim("next.out.p6_flops")
def test_printed_budgets(claim):
    """The lab's three lines of FLOPs."""
    claim.measured(
        [conventions.six_nd(*budget) for budget in BUDGETS], observed=[counted(*budget) for budget in BUDGETS]
    )


@pytest.mark.claim("next.part6.repeat_visits")
def test_tokens_count_at_every_visit(claim):
    """A second pass over the same tokens costs as much as the first: D is what is processed."""
    spec, tokens = tutor(), torch.arange(6)[None]
    module = Decoder(spec, attention="eager")

    def passes(count):
        def run():
            for _ in range(count):
                module(tokens).logsumexp(-1).sum().backward()

        return torch_counter.count(run)

    step = flops.training(spec, seq=6, pairs=pairs.full).total
    claim.holds(
        [passes(count) for count in (1, 2, 3)] == [step, 2 * step, 3 * step],
        f"{step:,} FLOPs a pass over 6 tokens, {passes(3):,} for three",
    )


@pytest.mark.claim("next.part6.objective")
def test_objective(claim):
    """The loss surface with floor 1.5, coefficients 1 and exponents 1/2 is the lab's function."""

    @given(UNITS, UNITS)
    def everywhere(n, d):
        assert close(TEACHING.loss(n, d), stated(n, d))

    everywhere()
    claim.holds(TEACHING.loss(1, 1) == stated(1, 1) == 3.5, "for random n and d, and 3.5 at (1, 1)")


@pytest.mark.parametrize("n", [case(f"next.out.p6_n{n}", n) for n in SIZES])
def test_printed_losses(claim, n):
    """The lab's line for a size, of the loss surface and of the function as it is written."""
    for loss in (TEACHING.loss, stated):
        claim.measured(loss(n, 16 / n))


@pytest.mark.claim("next.part6.value_44")
def test_value_in_the_middle(claim):
    """1.5 and two halves."""
    claim.measured(TEACHING.loss(4, 4), observed=stated(4, 4))


@pytest.mark.claim("next.part6.extremes")
def test_values_at_the_extremes(claim):
    """1.5, one and a quarter, at either end."""
    for split in ((1, 16), (16, 1)):
        claim.measured(TEACHING.loss(*split), observed=stated(*split))


@pytest.mark.claim("next.part6.amgm")
def test_least_where_equal(claim):
    """At a fixed product the two terms add to 2 (n d)^(-1/4) at least, and to that where n = d."""

    @given(UNITS, UNITS)
    def everywhere(n, d):
        least = TEACHING.E + 2 * (n * d) ** -0.25
        assert TEACHING.loss(n, d) >= least * (1 - EPSILON)
        middle = TEACHING.optimum(n * d, each=1)
        assert close(middle.parameters, middle.tokens)
        assert close(TEACHING.loss(*middle), least)

    everywhere()
    claim.holds(TEACHING.loss(4, 4) == 1.5 + 2 * 16**-0.25, f"{TEACHING.loss(4, 4)} at (4, 4), more elsewhere")


@pytest.mark.claim("next.part6.shift")
def test_shift_of_the_optimum(claim):
    """A coefficient c moves the best n to c sqrt(n d); other exponents move it too, save where the slopes agree."""

    @FEW
    @given(st.floats(0.1, 10), st.floats(0.1, 1e4))
    def everywhere(c, product):
        best = LossSurface(E=1.5, A=c, B=1.0, alpha=0.5, beta=0.5).optimum(product, each=1).parameters
        assert close(best, c * sqrt(product))
        searched = minimize_scalar(lambda x: c * exp(-x / 2) + exp(x / 2) / sqrt(product), bracket=(-10, 10))
        # A flat bottom: its place is known to the root of float64's precision, 1.5e-8, and a factor of about one.
        assert searched.x == pytest.approx(log(best), abs=1e-6)

    everywhere()

    def optimum(**constants):
        return LossSurface(**{"E": 1.5, "A": 1.0, "B": 1.0, "alpha": 0.5, "beta": 0.5} | constants).optimum(16, each=1)

    moved = [optimum(A=2.0), optimum(B=2.0), optimum(alpha=0.25)]
    claim.holds(
        all(split.parameters != 4 for split in moved),
        f"n = {', '.join(f'{split.parameters:.2f}' for split in moved)} with a coefficient of 2 here or there, or an "
        "exponent of 1/4",
    )
    still = optimum(beta=1.0)
    claim.otherwise(still != (4, 4), f"{tuple(map(float, still))} with exponents 1/2 and 1")


@pytest.mark.claim("next.part6.hoffmann_direction")
def test_data_grow_with_the_model(claim):
    """In table 3 of Hoffmann et al. the best N and the best D both grow as the budget to the power 0.50."""
    table = tables.columns("chinchilla_table3")
    claim.measured([fit_power_law(table["flops"], table[name]).exponent for name in ("parameters", "tokens")])


@pytest.mark.claim("next.out.p6_best")
def test_printed_best(claim):
    """Of the lab's five splits (4, 4) has the least loss, and no other split has less."""
    tested = min(((n, 16 / n) for n in SIZES), key=lambda split: stated(*split))
    claim.measured(TEACHING.optimum(16, each=1), observed=tested)


@pytest.mark.claim("next.out.p6_symmetry")
def test_symmetry(claim):
    """Size and data may change places."""

    @given(UNITS, UNITS)
    def everywhere(n, d):
        assert close(TEACHING.loss(n, d), TEACHING.loss(d, n))

    everywhere()
    claim.holds(
        all(TEACHING.loss(n, 16 / n) == TEACHING.loss(16 / n, n) for n in SIZES), "for random n and d, and the table's"
    )


@pytest.mark.claim("next.part6.kaplan_laws")
def test_cited(claim):
    """A paper reports it."""
    claim.cited()
