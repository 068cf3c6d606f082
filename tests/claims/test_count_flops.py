"""Claims of the counting essay on 6 N D: two FLOPs a weight forward, four back, and which weights are in N."""

from fractions import Fraction
from functools import cache

import jax.numpy as jnp
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accounting import flops, huggingface, params
from accounting.authorities import huggingface as modules
from accounting.authorities import torch_counter, torch_profiler, xla
from accounting.conventions import six_nd, two_nd
from accounting.huggingface import published_config
from tests import strategies

# A counted step takes as long as a few modules to build.
FEWER = settings(max_examples=settings.default.max_examples // 10)
LLAMA, QWEN = "llama-3.1-8b", "qwen2.5-1.5b"
DENSE = strategies.configs("llama", "mistral")
SIZES = st.integers(1, 40)
TOKENS = st.integers(1, 4)
MINIATURE = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 40,
}


def counts_of(name):
    return params.count(huggingface.load(name).spec)


@cache
def module_of(name):
    return modules.build(published_config(name), attn_implementation="eager")


def matrices(module):
    """Scalars of the weights of the module's linear layers."""
    return sum(layer.weight.numel() for layer in module.modules() if isinstance(layer, torch.nn.Linear))


def with_weights(module, tokens, *, batch=1, train=False):
    """FLOPs that torch counts in products with weights; those of two activations are batched, one for each head."""
    ids = torch.zeros(batch, tokens, dtype=torch.long, device="meta")

    def run():
        logits = module(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
        if train:
            logits.sum().backward()

    counted = torch_counter.by_operator(run)
    return sum(flops for operator, flops in counted.items() if operator != "aten.bmm")


@cache
def weights_of(name, *, train=False):
    """FLOPs of products with the weights of a published model, for one token."""
    return with_weights(module_of(name), 1, train=train)


@pytest.mark.claim("count.flops.matmul")
def test_matrix_product(claim):
    """A product of m by k and k by n takes 2 m k n FLOPs."""

    def counted(m, k, n):
        left, right = torch.zeros(m, k), torch.zeros(k, n)
        traced = xla.dot_flops(jnp.matmul, jnp.zeros((m, k)), jnp.zeros((k, n)))
        return torch_counter.count(lambda: left @ right), traced

    @FEWER
    @given(SIZES, SIZES, SIZES)
    def everywhere(m, k, n):
        assert {two_nd(k * n, m), *counted(m, k, n)} == {2 * m * k * n}

    everywhere()
    left, right = torch.zeros(3, 5), torch.zeros(5, 7)
    seen = {two_nd(35, 3), *counted(3, 5, 7), torch_profiler.count(lambda: left @ right).matmul}
    claim.holds(seen == {210}, f"3 x 5 x 7: {seen} by torch's counter and profiler, JAX's trace and 2 N D")


@pytest.mark.claim("count.flops.backward")
def test_backward_is_two_more_products(claim):
    """The gradient of the input and that of the weight each cost as much as the product itself."""

    def counted(m, k, n, input_trains, weight_trains):
        left, right = torch.zeros(m, k, requires_grad=input_trains), torch.zeros(k, n, requires_grad=weight_trains)
        return torch_counter.count(lambda: (left @ right).sum().backward())

    @FEWER
    @given(SIZES, SIZES, SIZES)
    def everywhere(m, k, n):
        one = two_nd(k * n, m)
        assert counted(m, k, n, True, False) == counted(m, k, n, False, True) == 2 * one
        assert counted(m, k, n, True, True) == 3 * one

    everywhere()
    forward, training = weights_of(LLAMA), weights_of(LLAMA, train=True)
    predicted = flops.backward(huggingface.load(LLAMA).spec, seq=1)
    four = Fraction(training - forward, matrices(module_of(LLAMA)))
    claim.holds(
        four == 4 and training - forward == predicted.linear + predicted.head,
        f"{LLAMA}: {four} FLOPs of the backward pass for each weight and token",
    )


@pytest.mark.claim("count.flops.six_nd")
def test_training_compute(claim):
    """N weights in matrices and D tokens cost 6 N D in training, attention's own products apart."""

    @FEWER
    @given(DENSE, TOKENS, st.integers(1, 3))
    def everywhere(config, tokens, batch):
        module = modules.build(config, attn_implementation="eager")
        step = flops.training(huggingface.read(config).spec, seq=tokens, batch=batch)
        counted = with_weights(module, tokens, batch=batch, train=True)
        assert counted == six_nd(matrices(module), batch * tokens) == step.linear + step.head

    everywhere()
    counted, rule = weights_of(LLAMA, train=True), six_nd(counts_of(LLAMA).matmul, 1)
    claim.holds(counted == rule, f"{LLAMA}: {counted:,} a token counted, {rule:,} by 6 N D")


@pytest.mark.claim("count.take.six_per_weight")
def test_six_a_weight(claim):
    """Each weight in a matrix costs a token two FLOPs forward and four back, in a tied model as in an untied one."""
    for name in (LLAMA, QWEN):
        weights = counts_of(name).matmul
        forward, training = weights_of(name), weights_of(name, train=True)
        two, four = Fraction(forward, weights), Fraction(training - forward, weights)
        claim.holds((two, four) == (2, 4), f"{name}: {two} forward and {four} back")


@pytest.mark.claim("count.flops.lookup_free")
def test_lookup_is_free(claim):
    """A lookup copies rows and multiplies nothing."""

    @FEWER
    @given(SIZES, SIZES, st.data())
    def everywhere(vocab, width, data):
        ids = torch.tensor(data.draw(st.lists(st.integers(0, vocab - 1), min_size=1, max_size=5)))
        table = torch.nn.Embedding(vocab, width)
        assert torch.equal(table(ids), table.weight[ids])
        assert torch_counter.count(lambda: table(ids)) == 0
        assert xla.dot_flops(lambda rows, chosen: rows[chosen], jnp.zeros((vocab, width)), jnp.array(ids)) == 0

    everywhere()
    table = module_of(LLAMA).get_input_embeddings()
    counted = torch_counter.count(lambda: table(torch.zeros(1, 8, dtype=torch.long, device="meta")))
    claim.holds(counted == 0, f"{LLAMA}, 8 tokens: {counted} FLOPs, as of any table")
    whole = huggingface.load(LLAMA).spec
    claim.holds(flops.forward(whole, seq=1).head == two_nd(counts_of(LLAMA).embedding, 1), "its head alone is charged")


@pytest.mark.claim("count.flops.emb_grad_row")
def test_gradient_of_a_lookup(claim):
    """A lookup's gradient adds one row for each token to the row that it read, and leaves the others zero."""

    @given(SIZES, SIZES, st.data())
    def everywhere(vocab, width, data):
        ids = torch.tensor(data.draw(st.lists(st.integers(0, vocab - 1), min_size=1, max_size=8)))
        table = torch.nn.Embedding(vocab, width)
        # Integers, so that sums are exact in any order.
        arriving = torch.randint(-9, 10, (len(ids), width)).float()
        table(ids).backward(arriving)
        expected = torch.zeros(vocab, width)
        for token, row in zip(ids, arriving, strict=True):
            expected[token] += row
        assert torch.equal(table.weight.grad, expected)

    everywhere()
    rows = rows_with_gradient(tied=False)
    claim.holds(rows == {1, 3, 7}, f"tokens 1, 3, 3, 7 of a Llama with an untied table of 40: gradients in rows {rows}")


@pytest.mark.claim("count.flops.emb_grad_tied")
def test_gradient_of_a_tied_table(claim):
    """A head that is the token table gives every row a gradient, whatever was looked up."""
    tied, untied = rows_with_gradient(tied=True), rows_with_gradient(tied=False)
    claim.holds(tied == set(range(40)), f"tokens 1, 3, 3, 7: gradients in {len(tied)} rows of 40, untied in {untied}")


def rows_with_gradient(*, tied):
    """Rows of a small Llama's token table that get a gradient from four tokens."""
    torch.manual_seed(0)
    config = {**published_config(LLAMA), **MINIATURE, "tie_word_embeddings": tied}
    module = modules.build(config, device="cpu", dtype=torch.float32)
    module(input_ids=torch.tensor([[1, 3, 3, 7]]), use_cache=False).logits.logsumexp(-1).sum().backward()
    return set(module.get_input_embeddings().weight.grad.any(dim=1).nonzero().flatten().tolist())


@pytest.mark.claim("count.flops.llama_emb")
def test_llama_embedding(claim):
    """Llama 3.1 8B's token table, of which no scalar is in a matrix product."""
    table = module_of(LLAMA).get_input_embeddings().weight.numel()
    claim.measured(counts_of(LLAMA).embedding, observed=table)
    two_dimensional = sum(tensor.numel() for tensor in module_of(LLAMA).parameters() if tensor.ndim == 2)
    claim.holds(weights_of(LLAMA) == two_nd(two_dimensional - table, 1), "a pass multiplies by every other matrix")


@pytest.mark.claim("count.flops.llama_N")
def test_llama_weights_in_products(claim):
    """The weights that Llama 3.1 8B multiplies a token by, half the FLOPs of its products with weights."""
    claim.measured(counts_of(LLAMA).matmul, observed=Fraction(weights_of(LLAMA), two_nd(1, 1)))


@pytest.mark.claim("count.flops.llama_45")
def test_llama_training_token(claim):
    """What a token costs Llama 3.1 8B in training, in products with weights."""
    claim.measured(six_nd(counts_of(LLAMA).matmul, 1), observed=weights_of(LLAMA, train=True))


@pytest.mark.claim("count.flops.llama_482")
def test_llama_headline_token(claim):
    """The same by the rule, with all of its parameters."""
    claim.measured(six_nd(counts_of(LLAMA).unique, 1), observed=6 * modules.unique(module_of(LLAMA)))


@pytest.mark.claim("count.flops.llama_7pct")
def test_llama_overstated(claim):
    """The cost is 7% less than the headline count says, and that count 7% more than the cost."""
    counts, headline = counts_of(LLAMA), 6 * modules.unique(module_of(LLAMA))
    ratio, counted = Fraction(counts.matmul, counts.unique), Fraction(weights_of(LLAMA, train=True), headline)
    claim.measured([1 - ratio, 1 / ratio - 1], observed=[1 - counted, 1 / counted - 1])


@pytest.mark.claim("count.flops.qwen_tied_right")
def test_tied_qwen(claim):
    """All parameters of tied Qwen2.5-1.5B are the N of its products with weights, at the printed precision."""
    counts = counts_of(QWEN)
    claim.measured(counts.unique, observed=modules.unique(module_of(QWEN)))
    claim.measured(counts.matmul, observed=Fraction(weights_of(QWEN, train=True), six_nd(1, 1)))
    over = six_nd(counts.unique - counts.matmul, 1) / six_nd(counts.matmul, 1)
    claim.holds(0 < over < 1e-4, f"6 N is over by {over:.4%}, for norms and biases")


@pytest.mark.claim("count.intuition.rectangle")
def test_rectangle(claim):
    """At one budget, a model so many times as large has as many times fewer tokens."""

    @FEWER
    @given(SIZES, SIZES, TOKENS, TOKENS)
    def everywhere(into, out, tokens, times):
        large, small = (
            with_one_matrix(into, out * times, tokens),
            with_one_matrix(into, out, tokens * times),
        )
        assert large == small == six_nd(into * out * times, tokens) == six_nd(into * out, tokens * times)

    everywhere()
    budget = six_nd(1_000_000, 20_000_000)
    tokens = [Fraction(budget, six_nd(parameters, 1)) for parameters in (10**6, 2 * 10**6, 4 * 10**6)]
    claim.holds(
        tokens == [20 * 10**6, 10 * 10**6, 5 * 10**6],
        f"6 N D = {budget:.1e}: 1, 2 and 4 million parameters have {', '.join(f'{int(each):,}' for each in tokens)}",
    )


def with_one_matrix(into, out, tokens):
    """FLOPs that torch counts in a training step of a model of one matrix."""
    activations = torch.zeros(tokens, into, requires_grad=True)
    layer = torch.nn.Linear(into, out, bias=False)
    return torch_counter.count(lambda: layer(activations).sum().backward())


@pytest.mark.claim("count.intuition.hundreds")
def test_cited(claim):
    """Hoffmann et al. trained hundreds of models."""
    claim.cited()
