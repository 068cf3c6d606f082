"""Claims of the counting essay on the compute-optimal split, and on the split that pays for serving too."""

from dataclasses import replace
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq, minimize_scalar

from accounting import flops, huggingface, pairs, params, pictures
from accounting.authorities import huggingface as modules
from accounting.authorities import torch_counter
from accounting.conventions import six_nd, twenty_tokens, two_nd
from accounting.huggingface import published_config
from accounting.ledger import case
from accounting.scaling import LAWS, LossSurface, Split, fit_power_law
from tests import strategies, tables

PRINTED, UNROUNDED, REFIT = (LAWS[name].surface for name in ("hoffmann", "hoffmann-unrounded", "besiroglu"))
CHINCHILLA = 70 * 10**9, 14 * 10**11
GOPHER = 5.76e23  # FLOPs: Gopher's, which Chinchilla was to spend too
BUDGET = 1e24
SIZES = np.logspace(9, 12, 300_001)
HALF_A_STEP = 0.5 * 3 / 300_000 * 1.001  # in decades, with room for rounding
LLAMA = "llama-3.1-8b"
EPSILON = 2**-52
#: Of a dozen operations, whose errors a power 1 / (alpha + beta) of 5 at most multiplies.
ROUNDING = 200 * EPSILON
SURFACES = strategies.LOSS_SURFACES
BUDGETS = st.floats(1e-3, 1e12)
FEWER = settings(max_examples=settings.default.max_examples // 5)


def searched(surface, budget):
    """The best of 300,001 splits of a budget."""
    tokens = budget / 6 / SIZES
    best = surface.loss(SIZES, tokens).argmin()
    return Split(SIZES[best], tokens[best])


def minimum(surface, budget):
    """Where in ln N SciPy finds the least loss of a budget, and how far off that may be.

    Without E, which moves the curve up and not aside, the loss rises from its minimum by alpha beta / 2 of itself
    for a unit of ln N squared: nearer than that its rounding hides it. SciPy stops within 2 sqrt(epsilon) of ln N.
    """
    bare = replace(surface, E=0.0)
    found = minimize_scalar(
        lambda size: bare.loss(np.exp(size), budget / 6 / np.exp(size)),
        bounds=(-70, 70),
        method="bounded",
        options={"xatol": 1e-10},
    )
    hidden = np.sqrt(32 * EPSILON / (surface.alpha * surface.beta))
    return found.x, hidden + 2 * np.sqrt(EPSILON) * abs(found.x) + 1e-9


def both(claim, numbers, budget, surface=PRINTED):
    """Hand over what ``numbers`` says of the closed form's split, and of the best of 300,001."""
    closed, found = surface.optimum(budget), searched(surface, budget)
    assert abs(np.log10(found.parameters / closed.parameters)) <= HALF_A_STEP
    for split in (closed, found):
        claim.measured(numbers(split))


@pytest.mark.claim("count.why.chinchilla_93")
def test_ratio_of_the_printed_formula(claim):
    """At Chinchilla's budget, Gopher's or 6 N D of what was trained, 93 tokens a parameter are asked for."""
    for budget in (GOPHER, six_nd(*CHINCHILLA)):
        both(claim, lambda split: split.ratio, budget)


@pytest.mark.claim("count.why.trained_20")
def test_ratio_of_chinchilla(claim):
    """Chinchilla was trained on 20 tokens for each parameter."""
    parameters, tokens = CHINCHILLA
    claim.measured(Split(parameters, tokens).ratio, observed=Fraction(tokens, parameters))
    claim.holds(twenty_tokens(parameters) == tokens, "1.4 trillion tokens are 20 times 70 billion")


@pytest.mark.claim("count.why.llama_1875")
def test_ratio_of_llama(claim):
    """Llama 3 8B's 15 trillion tokens are so many times 8 billion; not its own count, nor with 15.6 trillion."""
    headline, tokens = 8 * 10**9, 15 * 10**12
    claim.measured(Split(headline, tokens).ratio, observed=Fraction(tokens, headline))
    exact = params.count(huggingface.load(LLAMA).spec).unique
    assert exact == modules.unique(modules.build(published_config(LLAMA)))
    claim.otherwise(Split(exact, tokens).ratio, f"with all {exact:,} parameters")
    claim.otherwise(Split(headline, 156 * 10**11).ratio, "with 15.6 trillion tokens")


@pytest.mark.claim("count.why.five_numbers")
def test_five_constants(claim):
    """The constants give the optimum of any budget, of which E has no part."""

    @given(SURFACES, BUDGETS, st.floats(0, 3))
    def everywhere(surface, budget, other):
        closed = surface.optimum(budget)
        size, error = minimum(surface, budget)
        assert abs(size - np.log(closed.parameters)) <= error
        assert replace(surface, E=other).optimum(budget) == closed

    everywhere()
    with_e, without = (searched(law, BUDGET) for law in (PRINTED, replace(PRINTED, E=0.0)))
    claim.holds(with_e == without, f"at 1e24 FLOPs the best of 300,001 sizes is {with_e.parameters:.4g}, whatever E is")


def along(surface, budget, parameters):
    """The loss of so many parameters within a budget."""
    return surface.loss(parameters, budget / 6 / parameters)


@pytest.mark.claim("count.opt.substitute")
def test_one_variable(claim):
    """With D = C / 6 N the loss is E + A N^-alpha + B (C/6)^-beta N^beta."""

    def formula(law, budget, n):
        return law.E + law.A * n**-law.alpha + law.B * (budget / 6) ** -law.beta * n**law.beta

    @given(SURFACES, BUDGETS, BUDGETS)
    def everywhere(surface, budget, parameters):
        assert along(surface, budget, parameters) == pytest.approx(formula(surface, budget, parameters), rel=ROUNDING)

    everywhere()
    written, ours = formula(PRINTED, BUDGET, 1e10), along(PRINTED, BUDGET, 1e10)
    claim.holds(abs(written / ours - 1) < ROUNDING, f"1e10 parameters at 1e24 FLOPs: {written:.6f} and {ours:.6f}")


@pytest.mark.claim("count.opt.u_shape")
def test_one_minimum(claim):
    """Over sixty decades of N the loss of a budget falls, and then rises to the end."""
    sizes = np.geomspace(1e-30, 1e30, 2001)  # steps of 7 %, next to which the rounding of the loss is nothing

    @given(SURFACES, BUDGETS)
    def everywhere(surface, budget):
        falls = np.diff(along(replace(surface, E=0.0), budget, sizes)) < 0
        turn = falls.sum()
        assert 0 < turn < len(falls)
        assert falls[:turn].all()
        assert sizes[turn - 1] < surface.optimum(budget).parameters < sizes[turn + 1]

    everywhere()
    losses = along(PRINTED, BUDGET, SIZES[::100])
    turn = losses.argmin()
    down, up = (np.diff(losses[:turn]) < 0).all(), (np.diff(losses[turn:]) > 0).all()
    claim.holds(down and up, f"1e24 FLOPs: {losses[0]:.4f} at 1e9, {losses.min():.4f}, {losses[-1]:.4f} at 1e12")
    caption = "The loss by Hoffmann's printed constants over N and D, and along its IsoFLOP lines; dots: the optima"
    claim.picture(pictures.loss_surface(PRINTED, [1e20, 1e21, 1e22, 1e23, 1e24]), caption)


@pytest.mark.claim("count.opt.derivative")
def test_slope(claim):
    """The slope of the loss in N is -alpha A N^(-alpha-1) + beta B (C/6)^-beta N^(beta-1), nought at the optimum.

    A central difference is off by its step squared, of the two terms' sum, and by a rounding over its step.
    """
    step = 1e-5

    def formula(law, budget, n):
        falling = -law.alpha * law.A * n ** (-law.alpha - 1)
        rising = law.beta * law.B * (budget / 6) ** -law.beta * n ** (law.beta - 1)
        return falling + rising, rising - falling

    def difference(law, budget, n):
        ahead, behind = (along(law, budget, n * (1 + way)) for way in (step, -step))
        return (ahead - behind) / (2 * step * n)

    @given(SURFACES, BUDGETS, BUDGETS)
    def everywhere(surface, budget, parameters):
        slope, scale = formula(surface, budget, parameters)
        error = step**2 + 8 * EPSILON / step / min(surface.alpha, surface.beta)
        assert abs(slope - difference(replace(surface, E=0.0), budget, parameters)) <= error * scale
        slope, scale = formula(surface, budget, surface.optimum(budget).parameters)
        assert abs(slope) <= ROUNDING * scale

    everywhere()
    slope, scale = formula(PRINTED, BUDGET, PRINTED.optimum(BUDGET).parameters)
    claim.holds(abs(slope) < ROUNDING * scale, f"{slope:.1e} at the optimum of 1e24 FLOPs, of terms of {scale / 2:.1e}")


@pytest.mark.claim("count.opt.balance")
def test_balance(claim):
    """Where SciPy finds the minimum alpha A/N^alpha is beta B/D^beta; elsewhere the larger one says where to go."""

    @given(SURFACES, BUDGETS, st.floats(0.02, 10), st.sampled_from([-1, 1]))
    def everywhere(surface, budget, away, side):
        size, error = minimum(surface, budget)
        capacity, estimation = surface.marginals(np.exp(size), budget / 6 / np.exp(size))
        assert abs(np.log(capacity / estimation)) <= (surface.alpha + surface.beta) * error
        size += side * away
        capacity, estimation = surface.marginals(np.exp(size), budget / 6 / np.exp(size))
        assert (capacity > estimation) == (side < 0)
        bare = replace(surface, E=0.0)
        towards = size + (1e-4 if capacity > estimation else -1e-4)
        assert along(bare, budget, np.exp(towards)) < along(bare, budget, np.exp(size))

    everywhere()
    products = PRINTED.marginals(*searched(PRINTED, BUDGET))
    half_a_step = HALF_A_STEP * (PRINTED.alpha + PRINTED.beta)
    apart = abs(np.log10(products[0] / products[1]))
    claim.holds(apart <= half_a_step, "at 1e24 FLOPs {:.6f} and {:.6f}".format(*products))


@pytest.mark.claim("count.opt.n")
def test_closed_form_of_n(claim):
    """N = G (C/6)^(beta/(alpha+beta)) is where SciPy finds the least loss, and the best of 300,001 sizes."""

    @given(SURFACES, BUDGETS)
    def everywhere(surface, budget):
        formula = surface.G * (budget / 6) ** (surface.beta / (surface.alpha + surface.beta))
        size, error = minimum(surface, budget)
        assert abs(size - np.log(formula)) <= error
        assert surface.optimum(budget).parameters == pytest.approx(formula, rel=ROUNDING)

    everywhere()
    for name, law in LAWS.items():
        found, closed = searched(law.surface, BUDGET).parameters, law.surface.optimum(BUDGET).parameters
        claim.holds(abs(np.log10(found / closed)) <= HALF_A_STEP, f"{name}: {found:.4e}, in closed form {closed:.4e}")


@pytest.mark.claim("count.opt.G")
def test_g(claim):
    """G = (alpha A / beta B)^(1/(alpha+beta)) is the best N where C/6 is one."""

    def formula(law):
        return (law.alpha * law.A / (law.beta * law.B)) ** (1 / (law.alpha + law.beta))

    @given(SURFACES)
    def everywhere(surface):
        size, error = minimum(surface, 6)
        assert abs(size - np.log(formula(surface))) <= error
        assert surface.G == pytest.approx(formula(surface), rel=ROUNDING)

    everywhere()
    size, error = minimum(PRINTED, 6)
    claim.holds(abs(size - np.log(PRINTED.G)) <= error, f"{np.exp(size):.6f} found, {PRINTED.G:.6f} in closed form")


@pytest.mark.claim("count.opt.d")
def test_closed_form_of_d(claim):
    """D is C / 6 N and (C/6)^(alpha/(alpha+beta)) / G."""

    @given(SURFACES, BUDGETS)
    def everywhere(surface, budget):
        closed = surface.optimum(budget)
        formula = (budget / 6) ** (surface.alpha / (surface.alpha + surface.beta)) / surface.G
        assert closed.tokens == pytest.approx(formula, rel=ROUNDING)
        assert closed.tokens == pytest.approx(budget / (6 * closed.parameters), rel=ROUNDING)

    everywhere()
    found, closed = searched(PRINTED, BUDGET).tokens, PRINTED.optimum(BUDGET).tokens
    claim.holds(abs(np.log10(found / closed)) <= HALF_A_STEP, f"{found:.4e} found at 1e24 FLOPs, {closed:.4e} closed")


def drift(surface, budget, factor):
    """By how much ln N and ln D grow with a budget that grows by a factor, as SciPy finds them, and the error."""
    (before, error), (after, another) = minimum(surface, budget), minimum(surface, budget * factor)
    return after - before, np.log(factor) - (after - before), error + another


@pytest.mark.claim("count.opt.sum_one")
def test_exponents_add_to_one(claim):
    """The exponents of N and D are those of the minima, and add to one."""

    @given(SURFACES, BUDGETS, st.floats(10, 1e6))
    def everywhere(surface, budget, factor):
        (of_n, of_d), (size, data, error) = surface.exponents, drift(surface, budget, factor)
        assert abs(size - of_n * np.log(factor)) <= error
        assert abs(data - of_d * np.log(factor)) <= error
        assert of_n + of_d == pytest.approx(1, rel=2 * EPSILON)

    everywhere()
    for name, law in LAWS.items():
        of_n, of_d = law.surface.exponents
        claim.holds(abs(of_n + of_d - 1) <= 2 * EPSILON, f"{name}: {of_n:.4f} and {of_d:.4f}")


@pytest.mark.claim("count.opt.ratio")
def test_law_of_the_ratio(claim):
    """D / N is G^-2 (C/6)^((alpha-beta)/(alpha+beta)), which is the ratio at the minimum."""

    @given(SURFACES, BUDGETS)
    def everywhere(surface, budget):
        alpha, beta = surface.alpha, surface.beta
        formula = surface.G**-2 * (budget / 6) ** ((alpha - beta) / (alpha + beta))
        size, error = minimum(surface, budget)
        assert abs(np.log(budget / 6) - 2 * size - np.log(formula)) <= 2 * error
        for ours in (surface.drift.at(budget / 6), surface.optimum(budget).ratio):
            assert ours == pytest.approx(formula, rel=2 * ROUNDING)

    everywhere()
    found, closed = searched(PRINTED, BUDGET).ratio, PRINTED.drift.at(BUDGET / 6)
    claim.holds(abs(np.log10(found / closed)) <= 2 * HALF_A_STEP, f"{found:.3f} found at 1e24 FLOPs, {closed:.3f}")


@pytest.mark.claim("count.opt.ratio_fixed_iff")
def test_ratio_is_fixed_where_the_exponents_are_equal(claim):
    """D / N grows with the budget where alpha is larger, falls where beta is, and stays where they are equal."""

    @given(SURFACES, BUDGETS, st.booleans())
    def everywhere(surface, budget, equal):
        surface = replace(surface, beta=surface.alpha) if equal else surface
        assume(equal or abs(surface.alpha - surface.beta) > 4 * EPSILON)
        size, data, error = drift(surface, budget, 1e6)
        expected = (surface.alpha - surface.beta) / (surface.alpha + surface.beta) * np.log(1e6)
        assert np.sign(surface.drift.exponent) == np.sign(surface.alpha - surface.beta)
        assert abs(data - size - expected) <= 2 * error

    everywhere()
    for law, way in ((PRINTED, 1), (replace(PRINTED, beta=PRINTED.alpha), 0), (REFIT, -1)):
        tenfold = law.drift.growth(10)
        claim.holds(np.sign(tenfold - 1) == way, f"alpha {law.alpha}, beta {law.beta}: times {tenfold:.4f} a decade")


@pytest.mark.claim("count.plug.constants")
def test_printed_constants(claim):
    """The constants are those that the unrounded fit rounds to."""
    for law in (PRINTED, UNROUNDED):
        claim.measured([law.E, law.A, law.B, law.alpha, law.beta])


@pytest.mark.claim("count.plug.exponent")
def test_printed_exponent(claim):
    """The exponent of N is that of the closed form and the slope of sizes found by search."""
    claim.measured(PRINTED.exponents[0])
    budgets = np.geomspace(1e21, 1e25, 9)
    claim.measured(fit_power_law(budgets, [searched(PRINTED, budget).parameters for budget in budgets]).exponent)


@pytest.mark.claim("count.plug.G")
def test_printed_g(claim):
    """G, in closed form and as the size that SciPy finds where C/6 is one."""
    claim.measured(PRINTED.G)
    claim.measured(np.exp(minimum(PRINTED, 6)[0]))


@pytest.mark.claim("count.plug.per_decade")
def test_growth_of_the_ratio(claim):
    """The ratio grows so many times for ten times the compute."""
    claim.measured(PRINTED.drift.growth(10))
    claim.measured(searched(PRINTED, 10 * BUDGET).ratio / searched(PRINTED, BUDGET).ratio)
    trained = {"Chinchilla": Split(70e9, 1.4e12)}
    claim.picture(
        pictures.optima({name: law.surface for name, law in LAWS.items()}, [1e18, 1e27], trained),
        "Tokens for each parameter at the optimum of four published laws, by budget, and as Chinchilla was trained",
    )


def in_order(split):
    return [split.parameters, split.tokens, split.ratio]


@pytest.mark.parametrize(
    "numbers",
    [
        case("count.plug.n_1e24", lambda split: split.parameters),
        case("count.plug.d_1e24", lambda split: split.tokens),
        case("count.plug.ratio_1e24", lambda split: split.ratio),
        case("count.plug.penalty_n", lambda split: PRINTED.capacity(split.parameters)),
        case("count.plug.penalty_d", lambda split: PRINTED.estimation(split.tokens)),
        case("count.plug.products", lambda split: PRINTED.marginals(*split)),
    ],
)
def test_example(claim, numbers):
    """At 1e24 FLOPs the printed constants give the printed split and losses, in closed form and by search."""
    both(claim, numbers, BUDGET)


@pytest.mark.claim("count.plug.brute")
def test_brute_force(claim):
    """The essay's search over 300,001 sizes ends at the printed one."""
    claim.measured(searched(PRINTED, BUDGET).parameters)


@pytest.mark.parametrize(
    "budget",
    [
        case("count.plug.lost_table_1e21", 1e21),
        case("count.plug.lost_table_1e22", 1e22),
        case("count.plug.lost_table_1e23", 1e23),
        case("count.plug.lost_table_5p76e23", GOPHER),
        case("count.plug.lost_table_1e24", 1e24),
        case("count.plug.lost_table_1e25", 1e25),
        case("count.plug.lost_table_3p8e25", 3.8e25),
    ],
)
def test_row_of_budgets(claim, budget):
    """N, D and D / N of a budget by the printed constants and by the refit, in closed form and by search."""
    for split in (LossSurface.optimum, searched):
        claim.measured(in_order(split(PRINTED, budget)) + in_order(split(REFIT, budget)))


@pytest.mark.parametrize(
    "numbers",
    [
        case("count.plug.chinchilla_n", lambda split: split.parameters),
        case("count.plug.chinchilla_d", lambda split: split.tokens),
    ],
)
def test_formula_at_chinchillas_budget(claim, numbers):
    """What the printed constants make of Chinchilla's budget, Gopher's or 6 N D of what was trained."""
    for budget in (GOPHER, six_nd(*CHINCHILLA)):
        both(claim, numbers, budget)


@pytest.mark.claim("count.plug.budget_convention")
def test_chinchillas_budget(claim):
    """The budget is the one that the paper has for Gopher, not 6 N D of what was trained."""
    table = tables.columns("chinchilla_table3")
    claim.measured(table["flops"][table["parameters"] == 67e9].item())
    claim.otherwise(six_nd(*CHINCHILLA), "6 N D of 70 billion parameters and 1.4 trillion tokens")


@pytest.mark.claim("count.infer.two_n")
def test_cost_of_a_generated_token(claim):
    """With its cache Llama 3.1 8B spends 2 N a token on weights, and attention to what is kept on top."""
    kept, config = 8192, published_config(LLAMA)
    module, spec = modules.build(config, attn_implementation="eager"), huggingface.load(LLAMA).spec
    ids = torch.zeros(1, kept + 1, dtype=torch.long, device="meta")
    before = module(ids[:, :-1], attention_mask=torch.ones_like(ids[:, :-1]), use_cache=True).past_key_values
    run = partial(module, ids[:, -1:], attention_mask=torch.ones_like(ids), cache=before)
    found = torch_counter.by_operator(run)
    attention = found.pop("aten.bmm")
    ours = flops.forward(spec, seq=1, pairs=pairs.cached(kept))
    assert (ours.linear + ours.head, ours.scores + ours.mixture) == (sum(found.values()), attention)
    least = two_nd(params.count(spec).matmul, 1)
    claim.holds(sum(found.values()) == least, f"2 N = {least / 1e9:.2f} GFLOPs in products with weights")
    total = least + attention
    claim.otherwise(total == least, f"{total / 1e9:.2f} GFLOPs with attention to {kept:,} tokens kept")
    headline = two_nd(params.count(spec).unique, 1)
    claim.otherwise(headline == least, f"2 N = {headline / 1e9:.2f} GFLOPs of the headline count, with its lookup")


@pytest.mark.claim("count.infer.total")
def test_lifetime_cost(claim):
    """Training on some tokens and serving others cost 6 N D and 2 N D: as torch counts them for matrices."""

    def counted(width, trained, served):
        table = torch.nn.Embedding(5, width, device="meta")
        matrices = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False, device="meta") for _ in range(2)))
        work = []
        for tokens, training in ((trained, True), (served, False)):
            ids = torch.zeros(tokens, dtype=torch.long, device="meta")

            def run(ids=ids, training=training):
                out = matrices(table(ids)).sum()
                if training:
                    out.backward()

            work.append(torch_counter.count(run))
        return modules.unique(matrices), sum(work)

    @FEWER
    @given(*[st.integers(1, 30)] * 3)
    def everywhere(width, trained, served):
        n, work = counted(width, trained, served)
        assert work == six_nd(n, trained) + two_nd(n, served) == 6 * n * trained + 2 * n * served

    everywhere()
    n, work = counted(30, 20, 100)
    claim.holds(work == 6 * n * 20 + 2 * n * 100, f"{n} weights, 20 tokens trained and 100 served: {work:,} FLOPs")


def target():
    """The least loss of the refit at 1e23 FLOPs."""
    return REFIT.loss(*REFIT.optimum(1e23))


@pytest.mark.claim("count.infer.tokens_from_target")
def test_tokens_that_a_loss_takes(claim):
    """A loss and N fix D = (B / (L - E - A/N^alpha))^(1/beta), which makes that loss; a small N never reaches it.

    D is off by a rounding of the loss over the term of D, times 1 / beta.
    """

    def formula(law, loss, n):
        return (law.B / (loss - law.E - law.A / n**law.alpha)) ** (1 / law.beta)

    @given(SURFACES, BUDGETS, BUDGETS)
    def everywhere(surface, parameters, tokens):
        loss, term = surface.loss(parameters, tokens), surface.estimation(tokens)
        error = 32 * EPSILON * loss / term / surface.beta
        assume(error < 1e-3)
        root = brentq(lambda log: surface.loss(parameters, np.exp(log)) - loss, *np.log([tokens / 100, tokens * 100]))
        for found in (formula(surface, loss, parameters), surface.tokens_for(loss, parameters)):
            assert np.exp(root) == pytest.approx(found, rel=error + 1e-11)

    everywhere()
    loss = target()
    floor = brentq(lambda size: REFIT.loss(size, np.inf) - loss, 1e9, 1e10)
    for n in (1e10, 1e11):
        d = REFIT.tokens_for(loss, n)
        claim.holds(abs(REFIT.loss(n, d) / loss - 1) < ROUNDING, f"N {n:.0e}: D {d:.4g} makes {loss:.5f}")
    with pytest.raises(ValueError, match="the floor"):
        REFIT.tokens_for(loss, floor)
    claim.holds(np.isfinite(REFIT.tokens_for(loss, 1.001 * floor)), f"no D does for N up to {floor:.3g}")


@pytest.mark.claim("count.infer.target")
def test_target(claim):
    """The refit's least loss at 1e23 FLOPs, in closed form and by search."""
    both(claim, lambda split: REFIT.loss(*split), 1e23, REFIT)


def cheapest_of_many(served):
    """The best of 400,001 sizes that reach the target, by all that they cost in a life."""
    sizes = np.geomspace(4.32e9, 1e11, 400_001)
    tokens = REFIT.tokens_for(target(), sizes)
    best = (six_nd(sizes, tokens) + two_nd(sizes, served)).argmin()
    return Split(sizes[best], tokens[best])


def training(split):
    """How many times the FLOPs of the compute-optimal training its own takes."""
    return six_nd(*split) / 1e23


@pytest.mark.parametrize(
    "served",
    [
        case("count.infer.lost_table_1e11", 1e11),
        case("count.infer.lost_table_1e12", 1e12),
        case("count.infer.lost_table_1e13", 1e13),
    ],
)
def test_row_of_demands(claim, served):
    """N, D, D / N and the cost of training of the cheapest model for a demand, by bisection and by search."""
    for split in (REFIT.cheapest(target(), served), cheapest_of_many(served)):
        claim.measured([*in_order(split), training(split)])


@pytest.mark.claim("count.infer.lost_table_1e14")
def test_last_row_of_demands(claim):
    """For 1e14 tokens all but the cost of training come out; with the target as it is printed D / N does not."""
    for split in (REFIT.cheapest(target(), 1e14), cheapest_of_many(1e14)):
        claim.measured([*in_order(split), training(split)])
        claim.right(*in_order(split), training(split))
    rounded = REFIT.cheapest(2.032, 1e14)
    assert (round(rounded.ratio), round(training(rounded), 2)) == (1268, 4.25)


@pytest.mark.claim("count.infer.shrinks")
def test_demand_makes_models_smaller(claim):
    """The more is served the smaller the best model, and the more tokens each of its parameters has seen."""

    @given(SURFACES, BUDGETS, st.floats(0.01, 1e6), st.floats(1.1, 1e3))
    def everywhere(surface, budget, share, more):
        optimum = surface.optimum(budget)
        loss = surface.loss(*optimum)
        assume(loss - surface.E > 1e-3)
        demand = share * optimum.tokens
        none, some, much = (surface.cheapest(loss, served) for served in (0, demand, more * demand))
        assert none.parameters > some.parameters > much.parameters
        assert none.ratio < some.ratio < much.ratio

    everywhere()
    found = [cheapest_of_many(served) for served in (0, *np.geomspace(1e11, 1e15, 5))]
    sizes, ratios = ([getattr(split, name) for split in found] for name in ("parameters", "ratio"))
    claim.holds(
        (np.diff(sizes) < 0).all() and (np.diff(ratios) > 0).all(),
        f"none to 1e15 tokens served: N {sizes[0]:.3g} to {sizes[-1]:.3g}, D/N {ratios[0]:.3g} to {ratios[-1]:.4g}",
    )


@pytest.mark.claim("count.infer.four_times")
def test_training_in_the_last_row(claim):
    """For 1e14 tokens served the cheapest model takes four times the training, which is three times more."""
    for split in (REFIT.cheapest(target(), 1e14), cheapest_of_many(1e14)):
        claim.measured(training(split))
        claim.otherwise(training(split) - 1, "on top of the compute-optimal training")


@pytest.mark.parametrize(
    (),
    [
        case("count.opt.eq4"),
        case("count.plug.chinchilla_real"),
        case("count.infer.sardana_10k"),
        case("count.infer.sardana_quote"),
    ],
)
def test_cited(claim):
    """A paper states it."""
    claim.cited()
