"""Claims of the counting essay on attention's token-to-token products, and on what they add to Llama 3.1 405B."""

from fractions import Fraction
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from accounting import flops, huggingface, pairs, params, pictures
from accounting.authorities import huggingface as modules
from accounting.authorities import torch_counter
from accounting.conventions import (
    attention_ratio,
    causal_attention_ratio,
    kaplan_forward,
    kaplan_non_embedding,
    six_nd,
    two_nd,
)
from accounting.huggingface import published_config
from accounting.ledger import case
from tests import strategies

# Each example counts several passes of a module.
FEWER = settings(max_examples=settings.default.max_examples // 10)
LLAMA, LARGE, GPT2 = "llama-3.1-8b", "llama-3.1-405b", "gpt2"
N, D = 405 * 10**9, 156 * 10**11  # Llama 3.1 405B's parameters and tokens as the essay rounds them
SHORT, LONG = 148 * 10**11, 8 * 10**11  # tokens at 8,192 and at 131,072 of context
TOKENS = st.integers(1, 4)


def full_width(config):
    """With heads that are together as wide as the stream, as the essay assumes."""
    return {**config, "head_dim": config["hidden_size"] // config["num_attention_heads"]}


def classic(config):
    """With a feed-forward four times as wide as the stream: blocks of 12 d^2."""
    return {field: value for field, value in config.items() if field != "n_inner"}


LLAMAS = strategies.configs("llama").map(full_width)
CLASSICS = strategies.configs("gpt2").map(classic)


def spec_of(name):
    return huggingface.load(name).spec


@cache
def module_of(name):
    return modules.build(published_config(name), attn_implementation="eager")


def attention_of(count):
    """FLOPs of the two products of activations."""
    return count.scores + count.mixture


def split(counted):
    """Products with weights, and attention's own: these are batched, one for each head."""
    attention = counted.pop("aten.bmm")
    return sum(counted.values()), attention


def at_position(module, position):
    """What torch counts for the token at a position, from 1 on, after those before it are in the cache."""
    config, cache = module.config, DynamicCache()
    kept = torch.empty(1, config.num_key_value_heads, position - 1, config.head_dim, dtype=module.dtype, device="meta")
    for layer in range(config.num_hidden_layers):
        cache.update(kept, kept, layer)
    token, seen = (torch.ones(1, length, dtype=torch.long, device="meta") for length in (1, position))
    return split(torch_counter.by_operator(lambda: module(input_ids=token, attention_mask=seen, cache=cache)))


@cache
def published_at(name, position):
    return at_position(module_of(name), position)


def at_once(module, tokens, *, train=False):
    """What torch counts for a whole sequence, every query by every key; of GPT-2 without the head."""
    ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")

    def run():
        options = {"attention_mask": torch.ones_like(ids), "use_cache": False}
        states = module.base_model(input_ids=ids, **options).last_hidden_state
        if train:
            states.sum().backward()

    return split(torch_counter.by_operator(run))


def half_square(name, context):
    """FLOPs of a token that sees half the context, counted and predicted: weights, attention of each."""
    weights, last = published_at(name, context)
    predicted = flops.forward(spec_of(name), seq=context, pairs=pairs.full)
    ours = predicted.linear + predicted.head, Fraction(attention_of(predicted), 2)
    return (weights, Fraction(last, 2)), (ours[0] // context, ours[1] / context)


def by_mask(name, context):
    """FLOPs of a token of average position, counted and predicted: weights, attention of each."""
    weights, last = published_at(name, context)
    _, first = published_at(name, 1)
    predicted = flops.forward(spec_of(name), seq=context)
    attention = Fraction(attention_of(predicted), context)
    # From token to token the cost grows by the same, so that the average is that of the first and the last.
    return (weights, Fraction(first + last, 2)), ((predicted.linear + predicted.head) // context, attention)


def shares(weights, attention):
    """Attention's share of the total, and what it adds to the weights."""
    return attention / (weights + attention), attention / weights


@cache
def gpt2_ratio(width):
    """Attention over half the pairs of 1,024 tokens, over the work of the blocks' weights, counted in GPT-2."""
    config = {**published_config(GPT2), "n_embd": width, "n_head": width // 64, "n_layer": 1}
    weights, attention = at_once(modules.build(config, attn_implementation="eager"), 1024)
    return Fraction(attention, 2 * weights)


def percent(*ratios):
    return ", ".join(f"{float(ratio):.1%}" for ratio in ratios)


def counted_crossing(width):
    """The context at which blocks of 12 d^2 pay as much for half the pairs as for weights, from the counts at 1,024."""
    return 1024 / gpt2_ratio(width)


@pytest.mark.claim("count.attn.per_position")
def test_a_token_at_a_position(claim):
    """The token at position t scores t keys and mixes t values, at 2 t d each in every layer."""

    @FEWER
    @given(LLAMAS, TOKENS)
    def everywhere(config, position):
        each = 2 * position * config["hidden_size"] * config["num_hidden_layers"]
        predicted = flops.forward(huggingface.read(config).spec, seq=1, pairs=pairs.cached(position - 1))
        assert predicted.scores == predicted.mixture == each
        assert at_position(modules.build(config, attn_implementation="eager"), position)[1] == 2 * each

    everywhere()
    _, counted = published_at(LLAMA, 8192)
    predicted = attention_of(flops.forward(spec_of(LLAMA), seq=1, pairs=pairs.cached(8191)))
    claim.holds(
        counted == predicted == 32 * 4 * 8192 * 4096, f"{LLAMA} at position 8,192: {counted // 32:,} a layer, 4 t d"
    )


@pytest.mark.claim("count.attn.average_half")
def test_average_position(claim):
    """The average token sees (n + 1) / 2 tokens, half a token more than half the context."""

    @FEWER
    @given(LLAMAS, TOKENS)
    def everywhere(config, tokens):
        module = modules.build(config, device="cpu", dtype=torch.float32, attn_implementation="eager")
        ids = torch.zeros(1, tokens, dtype=torch.long)
        weights = module(input_ids=ids, output_attentions=True, use_cache=False).attentions
        seen = {int((head > 0).sum()) for layer in weights for head in layer[0]}
        assert seen == {pairs.causal(tokens)}

    everywhere()
    average = Fraction(pairs.causal(8192), 8192)
    claim.holds(average - Fraction(8192, 2) == Fraction(1, 2), f"{float(average):,} of 8,192 on average")


@pytest.mark.claim("count.attn.forward_2nd")
def test_causal_forward(claim):
    """With the mask attention costs a token 2 n d a layer, and one part in n more."""

    @FEWER
    @given(LLAMAS, TOKENS)
    def everywhere(config, tokens):
        module = modules.build(config, attn_implementation="eager")
        counted = sum(at_position(module, position)[1] for position in range(1, tokens + 1))
        rule = tokens * config["num_hidden_layers"] * 2 * tokens * config["hidden_size"]
        predicted = attention_of(flops.forward(huggingface.read(config).spec, seq=tokens))
        assert counted == predicted == rule + Fraction(rule, tokens)

    everywhere()
    (_, counted), (_, predicted) = by_mask(LLAMA, 8192)
    rule = 32 * 2 * 8192 * 4096
    claim.holds(
        counted == predicted == rule + Fraction(rule, 8192),
        f"{LLAMA} at 8,192: {int(counted):,} a token, 2 n d in 32 layers is {rule:,}",
    )


@pytest.mark.claim("count.attn.kaplan_total")
def test_forward_of_a_token(claim):
    """A token that sees half the context costs 2 N + 2 L n d forward, N the weights in matrices."""

    def stated(config, weights, last, tokens):
        spec = huggingface.read(config).spec
        matrices = params.count(spec).matmul
        formula = 2 * matrices + 2 * len(spec.blocks) * tokens * spec.width
        ours = two_nd(matrices, 1) + kaplan_forward(spec, tokens) - two_nd(kaplan_non_embedding(spec), 1)
        return formula, ours, weights + Fraction(last, 2)

    @FEWER
    @given(LLAMAS, TOKENS)
    def everywhere(config, tokens):
        counted = at_position(modules.build(config, attn_implementation="eager"), tokens)
        assert len(set(stated(config, *counted, tokens))) == 1

    everywhere()
    formula, ours, counted = stated(published_config(LLAMA), *published_at(LLAMA, 8192), 8192)
    claim.holds(formula == ours == counted, f"{LLAMA} at 8,192: {formula:,} by the formula, {int(counted):,} counted")


@pytest.mark.claim("count.attn.backward_triples")
def test_training_is_three_forwards(claim):
    """With its backward pass a model pays three times for both terms, unless a kernel computes scores again."""

    @FEWER
    @given(LLAMAS, TOKENS)
    def everywhere(config, tokens):
        module, spec = modules.build(config, attn_implementation="eager"), huggingface.read(config).spec
        forward, training = at_once(module, tokens), at_once(module, tokens, train=True)
        predicted = flops.training(spec, seq=tokens, pairs=pairs.full)
        assert training == (3 * forward[0], 3 * forward[1]) == (predicted.linear, attention_of(predicted))

    everywhere()
    forward, training = (at_once(module_of(GPT2), 1024, train=train) for train in (False, True))
    ratios = [Fraction(after, before) for before, after in zip(forward, training, strict=True)]
    claim.holds(ratios == [3, 3], f"GPT-2, eager, with its backward pass: {ratios[0]} and {ratios[1]} times forward")
    query, key, value = (torch.zeros(1, 2, 64, 16, requires_grad=True) for _ in range(3))

    def fused():
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    step = torch_counter.count(lambda: fused().sum().backward(), recomputed=True)
    again = step / torch_counter.count(fused)
    claim.otherwise(again == 3, f"{again} times in a fused kernel, which computes the scores again")


@pytest.mark.claim("count.attn.ratio")
def test_attention_over_weights(claim):
    """In blocks of 12 d^2 attention over half the pairs is n / (12 d) of the weights' work."""

    @FEWER
    @given(CLASSICS)
    def everywhere(config):
        tokens, layers, width = config["n_positions"], config["n_layer"], config["n_embd"]
        weights, attention = at_once(modules.build(config, attn_implementation="eager"), tokens)
        formula = Fraction(2 * layers * tokens * width, 2 * 12 * layers * width**2)
        assert Fraction(attention, 2 * weights) == causal_attention_ratio(width, tokens) == formula

    everywhere()
    claim.holds(gpt2_ratio(768) == causal_attention_ratio(768, 1024), f"GPT-2 at 1,024: {gpt2_ratio(768)} counted")


@pytest.mark.claim("count.attn.kaplan_1024")
def test_short_context(claim):
    """While the context is short against 12 d attention adds little: a ninth and less at 1,024 tokens and GPT-2's d."""
    widths = (768, 1024, 1280, 1600)
    ratios = [causal_attention_ratio(width, 1024) for width in widths]
    claim.holds(ratios == [gpt2_ratio(width) for width in widths], f"d = {widths}: {percent(*ratios)}")
    claim.holds(max(ratios) <= Fraction(1, 9), "at most a ninth")
    narrow = [causal_attention_ratio(width, 1024) for width in (85, 86)]
    claim.holds(narrow[0] > 1 > narrow[1], "as much as the weights where 12 d is 1,024, between widths 85 and 86")


@pytest.mark.claim("count.attn.llama_12d")
def test_llama_twelve_widths(claim):
    """The context at which n / (12 d) is one for Llama 3.1 8B's width."""
    width = module_of(LLAMA).get_input_embeddings().embedding_dim
    claim.measured(1 / causal_attention_ratio(spec_of(LLAMA).width, 1), observed=counted_crossing(width))


@pytest.mark.parametrize("context", [case(f"count.attn.lost_table_{n}", n) for n in (1024, 8192, 32768, 131072)])
def test_row_of_the_table(claim, context):
    """Attention's share of Llama 3.1 8B's forward pass and what it adds to the weights, by either average position."""
    for average in (half_square, by_mask):
        counted, predicted = average(LLAMA, context)
        claim.measured(shares(*predicted), observed=shares(*counted))


@pytest.mark.parametrize("context", [case(f"count.attn.lost_table_{n}", n) for n in (2048, 4096)])
def test_row_that_half_a_token_moves(claim, context):
    """The same two, where half a token more on average changes the last printed digit."""
    counted, predicted = half_square(LLAMA, context)
    claim.measured(shares(*predicted), observed=shares(*counted))
    counted, predicted = by_mask(LLAMA, context)
    assert counted == predicted
    claim.otherwise(shares(*predicted), "with the mask's (n + 1) / 2")


@pytest.mark.claim("count.attn.llama_8192")
def test_share_at_8192(claim):
    """Attention's share of Llama 3.1 8B's total at 8,192 tokens."""
    counted, predicted = by_mask(LLAMA, 8192)
    claim.measured(shares(*predicted)[0], observed=shares(*counted)[0])


@pytest.mark.claim("count.attn.llama_8192_errata")
def test_two_bases_at_8192(claim):
    """The rule n / (12 d) is not that share: it is on top of the weights, and of other blocks than Llama's."""
    counted, predicted = by_mask(LLAMA, 8192)
    rule = causal_attention_ratio(spec_of(LLAMA).width, 8192)
    width = module_of(LLAMA).get_input_embeddings().embedding_dim
    claim.measured(rule)
    claim.right(rule, *reversed(shares(*predicted)), observed=[8 * gpt2_ratio(width), *reversed(shares(*counted))])


@pytest.mark.claim("count.attn.llama_128k")
def test_long_context(claim):
    """At 131,072 tokens attention costs Llama 3.1 8B more than its weights do."""
    counted, predicted = by_mask(LLAMA, 131072)
    ratio = shares(*predicted)[1]
    claim.holds(ratio == shares(*counted)[1] and ratio > 1, f"{float(ratio):.3f} times the weights")


@pytest.mark.claim("count.attn.crossover")
def test_crossover(claim):
    """Attention costs as much as the weights at n = 12 d in blocks of 12 d^2, and later in Llama 3.1 8B."""
    width = spec_of(LLAMA).width
    claim.measured(1 / causal_attention_ratio(width, 1), observed=counted_crossing(width))
    _, predicted = half_square(LLAMA, 8192)
    context = 8192 / shares(*predicted)[1]
    (weights, attention), _ = half_square(LLAMA, int(context))
    assert weights == attention
    claim.otherwise(context, "with Llama's blocks of 13 d^2 and its head")
    drawn = {name: spec_of(name) for name in (LLAMA, "gemma-3-1b", "deepseek-v3")}
    claim.picture(
        pictures.attention_share(drawn, [2**power for power in range(9, 18)]),
        "Attention's share of the FLOPs of a forward pass, by the length of a sequence: pairs as each layer has them",
    )


@pytest.mark.claim("count.attn.takeaway")
def test_surcharge(claim):
    """Attention adds n / (12 d) to blocks of 12 d^2 over half the pairs, and otherwise something else."""
    ratio = causal_attention_ratio(768, 1024)
    claim.holds(gpt2_ratio(768) == ratio, f"GPT-2's blocks at 1,024 tokens: {percent(gpt2_ratio(768))} counted")
    every_pair = 2 * gpt2_ratio(768)
    assert every_pair == attention_ratio(768, 1024)
    claim.otherwise(every_pair == ratio, f"{percent(every_pair)}, n / (6 d), with every pair as a dense kernel has it")
    counted, predicted = by_mask(LLAMA, 8192)
    assert counted == predicted
    llama, rule = shares(*counted)[1], causal_attention_ratio(4096, 8192)
    claim.otherwise(
        llama == rule, f"{percent(llama)} for {LLAMA} at 8,192, with its head and 13 d^2; n / (12 d) is {percent(rule)}"
    )


@pytest.mark.claim("count.l405.sixnd")
def test_budget(claim):
    """6 N D for 405 billion parameters and 15.6 trillion tokens."""
    claim.measured(six_nd(N, D))


@pytest.mark.claim("count.l405.exactN")
def test_parameters(claim):
    """Llama 3.1 405B has 405.85 billion parameters, of which 403.75 billion multiply a token."""
    counts, module = params.count(spec_of(LARGE)), module_of(LARGE)
    weights, _ = published_at(LARGE, 1)
    total = modules.unique(module)
    claim.measured(counts.unique, observed=total)
    claim.right(
        counts.unique,
        *(six_nd(parameters, D) for parameters in (counts.unique, counts.matmul)),
        observed=[total, 6 * total * D, 3 * weights * D],
    )


@pytest.mark.claim("count.l405.shape")
def test_shape(claim):
    """Llama 3.1 405B's blocks and width, with heads that are together as wide."""
    spec, module = spec_of(LARGE), module_of(LARGE)
    claim.measured(
        [len(spec.blocks), spec.width], observed=[len(module.model.layers), module.get_input_embeddings().embedding_dim]
    )
    attention = spec.blocks[0].attention
    output = module.model.layers[0].self_attn.o_proj
    claim.holds(
        attention.heads * attention.head_dim == output.in_features == output.out_features,
        f"{attention.heads} heads of {attention.head_dim}",
    )


PHASES = [("8k", 8192, SHORT), ("128k", 131072, LONG)]


@cache
def attention_in_training(context, tokens):
    """Attention's training FLOPs of so many tokens of Llama 3.1 405B, counted and predicted, by the mask."""
    (_, counted), (_, predicted) = by_mask(LARGE, context)
    return 3 * counted * tokens, 3 * predicted * tokens


def by_formula(context, tokens):
    """The same where a token sees half the context, 6 L n d each."""
    spec = spec_of(LARGE)
    return 3 * (kaplan_forward(spec, context) - kaplan_forward(spec, 0)) * tokens


@pytest.mark.parametrize(("context", "tokens"), [case(f"count.l405.attn_{k}", n, t) for k, n, t in PHASES])
def test_attention_in_training(claim, context, tokens):
    """What attention adds to Llama 3.1 405B's training, by the mask and by the essay's half of the context."""
    counted, predicted = attention_in_training(context, tokens)
    claim.measured(predicted, observed=counted)
    claim.measured(by_formula(context, tokens))


@pytest.mark.parametrize(("context", "tokens"), [case(f"count.l405.attn_{k}_pct", n, t) for k, n, t in PHASES])
def test_share_of_the_budget(claim, context, tokens):
    """The same over 6 N D."""
    counted, predicted = attention_in_training(context, tokens)
    claim.measured(predicted / six_nd(N, D), observed=counted / six_nd(N, D))


@pytest.mark.claim("count.l405.split")
def test_phases(claim):
    """The two phases have all of the tokens."""
    claim.measured(Fraction(six_nd(N, SHORT) + six_nd(N, LONG), six_nd(N, 1)))


def bound():
    """6 N D with attention in both phases."""
    return six_nd(N, D) + sum(attention_in_training(context, tokens)[1] for _, context, tokens in PHASES)


@pytest.mark.claim("count.l405.bound")
def test_bound(claim):
    """6 N D and both phases' attention, above what the model's own weights and attention cost."""
    claim.measured(bound())
    weights, _ = published_at(LARGE, 1)
    counted = 3 * weights * D + sum(attention_in_training(context, tokens)[0] for _, context, tokens in PHASES)
    claim.holds(counted < bound(), f"{float(counted):.4g} with the weights that a token is multiplied by")


@pytest.mark.claim("count.l405.bound_pct")
def test_bound_over_the_budget(claim):
    """The same over 6 N D."""
    claim.measured(bound() / six_nd(N, D) - 1)


@pytest.mark.claim("count.l405.doc_mask")
def test_packed_documents(claim):
    """Documents that don't see each other cost less than one of their length together."""

    @FEWER
    @given(st.lists(st.integers(1, 20), min_size=1, max_size=5))
    def everywhere(lengths):
        mask = torch.block_diag(*(torch.ones(length, length).tril() for length in lengths))
        packed = pairs.packed(lengths)(sum(lengths))
        assert packed == int(mask.sum())
        assert packed < pairs.causal(sum(lengths)) or len(lengths) == 1

    everywhere()
    one, three = (
        attention_of(flops.forward(spec_of(LARGE), seq=8192, pairs=pairs.packed(lengths)))
        for lengths in ([8192], [1000, 3000, 4192])
    )
    claim.holds(three < one, f"8,192 tokens of three documents: {three / one:.0%} of one's attention")


@pytest.mark.claim("count.l405.paper")
def test_cited(claim):
    """Meta's report states its budget and its tokens."""
    claim.cited()
