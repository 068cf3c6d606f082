"""Dive into Deep Learning 11.7.1.2: six FLOPs a parameter and token, and what that leaves out."""

from dataclasses import dataclass
from fractions import Fraction
from functools import cache, partial

import jax
import jax.numpy as jnp
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from accounting import conventions, flops, hardware, huggingface, memory, pairs, params
from accounting.authorities import huggingface as modules
from accounting.authorities import torch_counter, xla
from accounting.ledger import case
from model.jax_decoder import forward, init
from model.recipes import RECIPES
from tests import strategies

DEFAULT, GPT2 = RECIPES["d2l-default"], RECIPES["d2l-gpt2"]
CONTEXT, BATCH = 128, 64
STEPS = 2_000  # ten rounds of 200 in the source of section 11.2
GPT2_TOKENS = 10**10  # the text names none
# A counted pass takes as long as a few modules to build.
FEWER = settings(max_examples=settings.default.max_examples // 10)


def gpt2(width=768, layers=12, heads=12):
    sizes = {"vocab_size": 50257, "n_positions": 1024, "n_embd": width, "n_layer": layers, "n_head": heads}
    return {"model_type": "gpt2", **sizes}


#: What Hugging Face needs to build the default, whose architecture is a Llama's.
LLAMA = {
    "model_type": "llama",
    "vocab_size": 28,
    "hidden_size": 256,
    "intermediate_size": round(8 * 256 / 3),
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "tie_word_embeddings": True,
}
#: Small GPT-2s with a feed-forward of 4 d, and room for as many tokens as any test has.
PLAIN = strategies.gpt2().map(lambda config: config | {"n_inner": None, "n_positions": 200})
DENSE = st.one_of(PLAIN, strategies.llama())


@dataclass(frozen=True, slots=True)
class Work:
    """FLOPs of the products with weights and of attention's own."""

    weights: int
    attention: int

    def __sub__(self, other):
        return Work(self.weights - other.weights, self.attention - other.attention)

    def __mul__(self, factor):
        return Work(factor * self.weights, factor * self.attention)


def spec_of(config):
    return huggingface.read(config).spec


def work(run):
    """What torch counts when ``run`` is run, by operator."""
    found = torch_counter.by_operator(run)
    attention = found.pop("aten.bmm")
    assert set(found) <= {"aten.mm", "aten.addmm"}
    return Work(sum(found.values()), attention)


def passed(config, tokens, *, batch=1, train=False):
    """The work of Hugging Face's module in a forward pass, or in a step."""
    module = modules.build(config, attn_implementation="eager")
    ids = torch.zeros(batch, tokens, dtype=torch.long, device="meta")

    def run():
        logits = module(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
        if train:
            logits.sum().backward()

    return work(run)


def one_layer(config, tokens):
    """The forward work of one layer: what a model with one more has more."""
    layers = "n_layer" if config["model_type"] == "gpt2" else "num_hidden_layers"
    return passed(config | {layers: 2}, tokens) - passed(config | {layers: 1}, tokens)


@cache
def decoded(name, tokens):
    """The work of one more token after so many, and the bytes of the keys and values that were kept of these."""
    config = LLAMA if name == "d2l-default" else huggingface.published_config(name)
    module = modules.build(config, attn_implementation="eager", dtype=torch.bfloat16)
    ids = torch.zeros(1, tokens + 1, dtype=torch.long, device="meta")
    kept = module(ids[:, :-1], attention_mask=torch.ones_like(ids[:, :-1]), use_cache=True).past_key_values
    size = sum(layer.keys.nbytes + layer.values.nbytes for layer in kept.layers)
    return work(partial(module, ids[:, -1:], attention_mask=torch.ones_like(ids), cache=kept)), size


def percent(ratio):
    return f"{float(100 * ratio):.2f} %"


@pytest.mark.claim("d2l.flops.matvec")
def test_matrix_by_vector(claim):
    """A matrix of m by n and a vector are m n multiply-adds, each two FLOPs."""

    @given(st.integers(1, 50), st.integers(1, 50))
    def everywhere(m, n):
        linear, row = torch.nn.Linear(n, m, bias=False, device="meta"), torch.empty(1, n, device="meta")
        matrix, vector = jax.ShapeDtypeStruct((m, n), "float32"), jax.ShapeDtypeStruct((n,), "float32")
        counted = torch_counter.count(partial(linear, row))
        assert conventions.two_nd(m * n, tokens=1) == counted == xla.dot_flops(jnp.matmul, matrix, vector)

    everywhere()
    linear = torch.nn.Linear(256, 683, bias=False, device="meta")
    counted = torch_counter.count(lambda: linear(torch.empty(1, 256, device="meta")))
    claim.holds(counted == 2 * linear.weight.numel(), f"{counted:,} FLOPs for 683 by 256, and 2 m n at any size")


@pytest.mark.parametrize(
    ("rule", "train"),
    [case("d2l.flops.forward_2N", conventions.two_nd, False), case("d2l.flops.six_nd", conventions.six_nd, True)],
)
def test_flops_a_parameter(claim, rule, train):
    """The products with weights are 2 N a token forward and 6 N in training, N all that a token multiplies by."""

    @FEWER
    @given(DENSE, st.integers(1, 5))
    def everywhere(config, tokens):
        assert rule(params.count(spec_of(config)).matmul, tokens) == passed(config, tokens, train=train).weights

    everywhere()
    for name, config, spec in (("the default", LLAMA, DEFAULT), ("GPT-2", gpt2(), GPT2)):
        count, found = params.count(spec), passed(config, CONTEXT, train=train)
        least = rule(count.matmul, CONTEXT)
        left_out = percent(Fraction(found.attention, least))
        claim.holds(
            found.weights == least, f"{name}: {least:,} FLOPs for {CONTEXT} tokens, and {left_out} in attention"
        )
    short = rule(count.non_embedding, CONTEXT)
    claim.otherwise(found.weights == short, f"GPT-2's 85M give {short:,}, without its head")


@pytest.mark.claim("d2l.flops.backward_twice")
def test_backward_is_twice_forward(claim):
    """The backward pass costs twice the forward one, in products with weights and in attention's."""

    @FEWER
    @given(DENSE, st.integers(1, 5))
    def everywhere(config, tokens):
        ahead = passed(config, tokens)
        assert passed(config, tokens, train=True) - ahead == ahead * 2
        assert flops.backward(spec_of(config), seq=tokens, pairs=pairs.full).total == 2 * sum(
            (ahead.weights, ahead.attention)
        )

    everywhere()
    ahead = passed(LLAMA, CONTEXT)
    back = passed(LLAMA, CONTEXT, train=True) - ahead
    claim.holds(back == ahead * 2, f"the default: {back.weights:,} and {back.attention:,} FLOPs after half of each")


@pytest.mark.claim("d2l.flops.backward_two_products")
def test_backward_is_two_products(claim):
    """A linear layer's backward pass is two products of the forward one's size, or one if its input needs none."""

    def counts(rows, width_in, width_out):
        linear = torch.nn.Linear(width_in, width_out, bias=False, device="meta")
        found = []
        for needed in (True, False):
            x = torch.empty(rows, width_in, device="meta", requires_grad=needed)
            ahead = torch_counter.count(partial(linear, x))
            found.append(Fraction(torch_counter.count(linear(x).sum().backward), ahead))
        return found

    @given(*[st.integers(1, 20)] * 3)
    def everywhere(rows, width_in, width_out):
        assert counts(rows, width_in, width_out) == [2, 1]

    everywhere()
    both, weight_alone = counts(CONTEXT, 256, 683)
    claim.holds((both, weight_alone) == (2, 1), f"{both} forward products; {weight_alone} without the input's gradient")


@pytest.mark.claim("d2l.flops.decode_2N")
def test_decoding_is_2n(claim):
    """With the cache one more token costs 2 N in products with weights, and attention to what is kept."""
    for tokens in (16, CONTEXT):
        (found, _), ours = decoded("d2l-default", tokens), flops.forward(DEFAULT, seq=1, pairs=pairs.cached(tokens))
        assert (ours.linear + ours.head, ours.scores + ours.mixture) == (found.weights, found.attention)
        share = percent(Fraction(found.attention, found.weights))
        least = conventions.two_nd(params.count(DEFAULT).matmul, tokens=1)
        claim.holds(found.weights == least, f"{least:,} FLOPs, and {share} in attention to {tokens} kept tokens")
    again = passed(LLAMA, CONTEXT + 1).weights
    claim.otherwise(again == least, f"{again:,} without a cache, the {CONTEXT} tokens run again")


@pytest.mark.claim("d2l.flops.kv_memory_bill")
def test_cache_makes_decoding_a_memory_problem(claim):
    """Llama 3.1 8B decodes above every chip's ridge without a cache and below it with one, whose bytes grow."""
    name, tokens = "llama-3.1-8b", 1024
    config = huggingface.published_config(name)
    weights = memory.weight_bytes(spec_of(config), "bfloat16")
    assert weights == sum(weight.nbytes for weight in modules.build(config, dtype=torch.bfloat16).parameters())
    again, (found, kept), (_, twice) = passed(config, tokens + 1), decoded(name, tokens), decoded(name, 2 * tokens)
    without = Fraction(again.weights + again.attention, weights)
    cached = Fraction(found.weights + found.attention, weights + kept)
    ridges = [ridge for chip in hardware.CHIPS if (ridge := chip.ridge()) is not None]
    claim.holds(
        cached < min(ridges) and max(ridges) < without and twice == 2 * kept,
        f"at {tokens} tokens {float(without):.0f} FLOPs a byte become {float(cached):.2f}, where ridges are "
        f"{float(min(ridges)):.0f} to {float(max(ridges)):.0f}; {kept:,} bytes kept, and {twice:,} of twice as many",
    )


@pytest.mark.claim("d2l.flops.attention_4nd")
def test_attention_is_4_n_d(claim):
    """Scores and mixture are 4 n d FLOPs a token and layer, every pair of positions counted."""

    @FEWER
    @given(PLAIN, st.integers(1, 12))
    def everywhere(config, n):
        assert one_layer(config, n).attention == 4 * n * config["n_embd"] * n

    everywhere()
    formula = 4 * CONTEXT * DEFAULT.width
    found = Fraction(one_layer(LLAMA, CONTEXT).attention, CONTEXT)
    full, masked = (flops.by_layer(DEFAULT, seq=CONTEXT, pairs=rule)[0] for rule in (pairs.full, pairs.causal))
    assert full.scores + full.mixture == CONTEXT * found
    claim.holds(found == formula, f"{formula:,} a token and layer of the default at {CONTEXT}, and 4 n d at any size")
    seen = Fraction(masked.scores + masked.mixture, CONTEXT)
    claim.otherwise(seen == formula, f"{seen} through the mask: 2 (n + 1) d")


@pytest.mark.claim("d2l.flops.linear_24d2")
def test_linear_layers_are_24_d_squared(claim):
    """The linear layers of a block are 24 d^2 FLOPs a token: exactly with two matrices of 4 d, nearly with three."""

    @FEWER
    @given(PLAIN)
    def everywhere(config):
        assert one_layer(config, 1).weights == 24 * config["n_embd"] ** 2

    everywhere()
    found = one_layer(LLAMA, 1).weights
    assert flops.by_layer(DEFAULT, seq=1)[0].linear == found
    ratio = Fraction(found, DEFAULT.width**2)
    claim.holds(round(ratio) == 24, f"{found:,} in the default, {float(ratio):.4f} d^2; 24 d^2 in GPT-2s")


@pytest.mark.claim("d2l.flops.ratio_n_6d")
def test_attention_is_n_over_6d(claim):
    """Attention's products are n / (6 d) of a plain block's linear work, every pair counted."""

    def ratio(config, n):
        layer = one_layer(config, n)
        return Fraction(layer.attention, layer.weights)

    @FEWER
    @given(PLAIN, st.integers(1, 12))
    def everywhere(config, n):
        assert conventions.attention_ratio(config["n_embd"], n) == ratio(config, n)

    everywhere()
    ours, found = conventions.attention_ratio(256, CONTEXT), ratio(gpt2(256, 6, 8), CONTEXT)
    claim.holds(ours == found, f"{found} at width 256 and context {CONTEXT}")
    masked = flops.by_layer(spec_of(gpt2(256, 6, 8)), seq=CONTEXT)[0]
    seen = Fraction(masked.scores + masked.mixture, masked.linear)
    claim.otherwise(seen == ours, f"{seen} through the mask, (n + 1) / (12 d)")


@pytest.mark.claim("d2l.flops.ratio_8pct")
def test_correction_at_128(claim):
    """At context 128 and width 256 the correction reads 8 %."""
    layer = one_layer(gpt2(256, 6, 8), CONTEXT)
    claim.measured(conventions.attention_ratio(256, CONTEXT), observed=Fraction(layer.attention, layer.weights))
    masked = flops.by_layer(spec_of(gpt2(256, 6, 8)), seq=CONTEXT)[0]
    claim.otherwise(Fraction(masked.scores + masked.mixture, masked.linear), "through the mask")


@pytest.mark.claim("d2l.flops.parity_6d")
def test_parity_at_6d(claim):
    """A plain block's attention costs what its linear layers do at a context of 6 d, every pair counted."""

    @FEWER
    @given(PLAIN)
    def everywhere(config):
        width = config["n_embd"]
        layer = one_layer(config, 6 * width)
        assert Fraction(layer.attention, layer.weights) == conventions.attention_ratio(width, 6 * width) == 1

    everywhere()
    n = 6 * 256
    layer = one_layer(gpt2(256, 6, 8) | {"n_positions": n}, n)
    claim.holds(layer.attention == layer.weights, f"{layer.attention:,} FLOPs each at width 256 and context {n:,}")
    masked = flops.by_layer(spec_of(gpt2(256, 6, 8)), seq=n)[0]
    claim.otherwise(masked.scores + masked.mixture == masked.linear, f"{masked.scores + masked.mixture:,} masked")


@pytest.mark.claim("d2l.flops.causal_errata")
def test_two_texts_give_the_correction(claim):
    """The chapter's n / (6 d) counts all pairs, the essay's n / (12 d) half; the mask has n (n + 1) / 2."""
    layer = one_layer(gpt2(256, 6, 8), CONTEXT)
    square = torch.ones(CONTEXT, CONTEXT, dtype=torch.bool)
    shares = [Fraction(int(seen.sum()), square.numel()) for seen in (square, square.tril())]
    full, masked = (share * Fraction(layer.attention, layer.weights) for share in shares)
    chapter, essay = (rule(256, CONTEXT) for rule in (conventions.attention_ratio, conventions.causal_attention_ratio))
    ours = flops.by_layer(spec_of(gpt2(256, 6, 8)), seq=CONTEXT)[0]
    assert Fraction(ours.scores + ours.mixture, ours.linear) == masked
    claim.holds(
        chapter == full and essay * Fraction(CONTEXT + 1, CONTEXT) == masked,
        f"at width 256 and context {CONTEXT} {percent(full)} of all pairs, {percent(masked)} of the mask's; "
        f"n / (12 d) is {percent(essay)}",
    )
    claim.otherwise(chapter == essay, f"{percent(chapter)} and {percent(essay)} of one and the same count")


@cache
def vector_work(context, tokens=BATCH * CONTEXT):
    """Forward FLOPs of the default that XLA prices and that are in no product, and those of the products."""
    weights = jax.eval_shape(partial(init, DEFAULT), jax.random.key(0))
    run, ids = partial(forward, DEFAULT), jax.ShapeDtypeStruct((tokens // context, context), "int32")
    products = xla.dot_flops(run, weights, ids)
    return xla.cost(run, weights, ids).flops - products, products


@pytest.mark.claim("d2l.flops.vector_work")
def test_vector_work_is_minor(claim):
    """Norms, softmax and activations cost less than the attention that the rule leaves out, and Adam even less."""

    def adam(weight, gradient, first, second):
        first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
        return weight - 1e-3 * first / (jnp.sqrt(second) + 1e-8), first, second

    vector, products = vector_work(CONTEXT)
    attention = flops.forward(DEFAULT, seq=CONTEXT, batch=BATCH, pairs=pairs.full)
    size = params.count(DEFAULT).unique
    once, twice = (xla.cost(adam, *[jax.ShapeDtypeStruct((n,), "float32")] * 4).flops for n in (size, 2 * size))
    claim.holds(
        vector < attention.scores + attention.mixture and once < vector and twice == 2 * once,
        f"{percent(Fraction(vector, products))} of the forward products; Adam {Fraction(once, size)} a parameter, "
        f"{percent(Fraction(once, 3 * products))} of a step's products, whatever the tokens",
    )


@pytest.mark.claim("d2l.flops.vector_work_errata")
def test_softmax_grows_with_the_context(claim):
    """The vector work a token is no multiple of d alone: softmax has heads times n entries a token and layer."""
    module = modules.build(LLAMA, attn_implementation="eager")
    ids = torch.zeros(2, CONTEXT, dtype=torch.long, device="meta")
    entries = module(ids, attention_mask=torch.ones_like(ids), output_attentions=True).attentions[0]
    works = [vector_work(context)[0] for context in (CONTEXT, 2 * CONTEXT)]
    claim.holds(len(set(works)) == 1, f"{works[0]:,} at context {CONTEXT}, {works[1]:,} for as many tokens at twice it")
    ours = DEFAULT.blocks[0].attention.heads * pairs.full(CONTEXT) // CONTEXT
    width = module.config.hidden_size
    claim.right(ours, DEFAULT.width, observed=(Fraction(entries.numel(), ids.numel()), width))


@pytest.mark.claim("d2l.flops.run_5e14")
def test_the_run_of_section_11_2(claim):
    """2,000 steps of 64 sequences of 128 cost 5e14 FLOPs, with or without the head in N."""
    tokens, count = STEPS * BATCH * CONTEXT, params.count(DEFAULT)
    step = passed(LLAMA, CONTEXT, batch=BATCH, train=True)
    claim.measured(conventions.six_nd(count.matmul, tokens), observed=STEPS * step.weights)
    claim.measured(conventions.six_nd(count.non_embedding, tokens))


@pytest.mark.claim("d2l.flops.gpt2_7e18")
def test_training_of_gpt2(claim):
    """GPT-2's 124M and ten billion tokens are 7e18 FLOPs."""
    module, count = modules.build(gpt2()), params.count(GPT2)
    claim.measured(conventions.six_nd(count.unique, GPT2_TOKENS), observed=6 * modules.unique(module) * GPT2_TOKENS)
    claim.otherwise(conventions.six_nd(count.non_embedding, GPT2_TOKENS), "without the tables")


@pytest.mark.claim("d2l.flops.gpt2_7e18_errata")
def test_training_of_gpt2_by_the_chapters_n(claim):
    """With N non-embedding, as the chapter fixes it, ten billion tokens are no 7e18."""
    count = params.count(GPT2)
    blocks = modules.build(gpt2()).transformer
    theirs = modules.unique(blocks.h) + modules.unique(blocks.ln_f)
    weights = passed(gpt2(), 1, train=True).weights
    non_embedding, matmul = (conventions.six_nd(n, GPT2_TOKENS) for n in (count.non_embedding, count.matmul))
    claim.measured(non_embedding, observed=6 * theirs * GPT2_TOKENS)
    claim.right(non_embedding, matmul, observed=(6 * theirs * GPT2_TOKENS, weights * GPT2_TOKENS))


@pytest.mark.claim("d2l.flops.frontier_1e25")
def test_cited(claim):
    """Frontier runs are reported at 1e25 FLOPs and more."""
    claim.cited()


@pytest.mark.claim("d2l.flops.same_6nd_flash")
def test_flash_backward_counts_the_scores_again(claim):
    """Torch counts a flash backward as five products for the forward pass's two; ours, if asked."""

    def flash():
        queries = torch.empty(2, 8, CONTEXT, 32, device="meta", requires_grad=True)
        return torch.ops.aten._scaled_dot_product_flash_attention(queries, queries, queries, is_causal=True)[0]

    def native(run):
        with FlopCounterMode(display=False) as counter:
            run()
        return counter.get_total_flops()

    ratios = []
    for count in (partial(torch_counter.count, recomputed=True), native, torch_counter.count):
        ahead, both = count(flash), count(lambda: flash().sum().backward())
        ratios.append(Fraction(both - ahead, ahead))
    ours, theirs, model = ratios
    claim.measured(ours, observed=theirs)
    claim.holds(model == 2, f"{model} without the scores that the kernel computes again")
