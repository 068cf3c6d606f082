"""Past the lab of "next": its misconceptions, real systems, links and quiz, and where it meets the other documents."""

from datetime import datetime
from fractions import Fraction
from functools import lru_cache
from math import sqrt

import pytest
import torch
from hypothesis import given
from torch.nn import functional as F
from torch.utils.data import DataLoader

from accounting import activations, cache, conventions, flops, memory, pairs, params
from accounting import huggingface as configs
from accounting.authorities import huggingface as modules
from accounting.authorities import torch_counter, torch_memory
from accounting.census import Part
from accounting.scaling import LAWS, LossSurface
from model import torch_generate
from model.recipes import tutor
from model.torch_decoder import Decoder
from tests.test_ranks import RANKS, SPECS
from tests.test_ranks import observed as ranks_observed
from tests.toys import FEW, FIELDS, GPT2, SHAPES, TOY, built, decoder, everywhere, gpt2, predicted

#: Sums of a few dozen float64 terms in another order: 4,500 roundings of 2.2e-16.
ROUNDING = 1e-12
#: The smallest of Touvron et al. 2023, arXiv 2302.13971, table 2.
LLAMA = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}


def nbytes(tensors):
    return sum(tensor.nbytes for tensor in tensors)


def saved(module, tokens):
    """What autograd keeps of a forward pass, parameters, masks and tokens apart."""
    return torch_memory.saved(lambda: module(tokens), [*module.parameters(), *module.buffers(), tokens])


def moments(optimizer):
    """Bytes of all arrays that AdamW keeps, by a layout's names."""
    names = {"exp_avg": "first_moment", "exp_avg_sq": "second_moment"}
    return {names[name]: size for name, size in torch_memory.optimizer_state(optimizer).arrays.items()}


def trained(spec, tokens):
    """Bytes of a decoder's arrays after a real step of AdamW, by a layout's names."""
    module = Decoder(spec)
    module(tokens).logsumexp(-1).sum().backward()
    optimizer = torch.optim.AdamW(module.parameters())
    optimizer.step()
    return {
        "weights": nbytes(module.parameters()),
        "gradients": nbytes(parameter.grad for parameter in module.parameters()),
        **moments(optimizer),
    }


def trained_mixed(spec, tokens):
    """The same in bfloat16, where the optimizer has float32 copies and their gradients only while it steps."""
    module = Decoder(spec).bfloat16()
    module(tokens).logsumexp(-1).sum().backward()
    masters = [parameter.detach().float() for parameter in module.parameters()]
    for master, parameter in zip(masters, module.parameters(), strict=True):
        master.grad = parameter.grad.float()
    optimizer = torch.optim.AdamW(masters)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return {
        "weights": nbytes(module.parameters()),
        "gradients": nbytes(parameter.grad for parameter in module.parameters()),
        "master_weights": nbytes(masters),
        **moments(optimizer),
    }


def by_name(spec, layout):
    return {each.array.name: each.logical for each in memory.training(spec, layout).arrays}


def watched(module):
    """What the module is given first and what it returns, at each call to come."""
    calls = []
    module.register_forward_hook(
        lambda _, given, named, result: calls.append(((*given, *named.values())[0], result)), with_kwargs=True
    )
    return calls


def small_gpt2():
    """Hugging Face's GPT-2 in the toy's shape, with numbers in it."""
    config = {"model_type": "gpt2"} | {FIELDS[dial]: size for dial, size in TOY.items()}
    return modules.build(config, device="cpu", attn_implementation="eager").eval()


@lru_cache
def requests(tokens):
    """Hugging Face's GPT-2 given a request: one layer's scores, all layers' cached values, and its parameters."""
    module = modules.build({"model_type": "gpt2"}, attn_implementation="eager").half()
    ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    result = module(ids, attention_mask=torch.ones_like(ids), use_cache=True, output_attentions=True)
    return {
        "scores": result.attentions[0].numel(),
        "cache": sum(torch_memory.cache_bytes(result.past_key_values)),
        "parameters": modules.unique(module),
    }


@pytest.mark.claim("next.mist.llama_arch")
def test_llama_is_another_architecture(claim):
    """LLaMA has no position table, a gain and no offset in its norms, and three matrices in its feed-forward."""
    spec, large = configs.read(LLAMA).spec, modules.build(LLAMA)
    assert params.count(spec).unique == modules.unique(large)
    block = large.model.layers[0]
    tables = [name for name, module in large.named_modules() if isinstance(module, torch.nn.Embedding)]
    gains = [[name for name, _ in norm.named_parameters()] for norm in (block.input_layernorm, large.model.norm)]
    matrices = [tuple(weight.shape) for weight in block.mlp.parameters()]
    structure = tables == ["model.embed_tokens"] and gains == [["weight"]] * 2
    structure = structure and matrices == [(11008, 4096), (11008, 4096), (4096, 11008)]

    sizes = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2}
    small = modules.build(LLAMA | sizes | {"num_attention_heads": 2}, device="cpu").double()
    torch.manual_seed(0)
    for weight in small.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    positions, tokens = torch.arange(6)[None], torch.arange(6)[None]
    logits, later, stretched = (
        small(tokens, position_ids=each).logits for each in (positions, positions + 3, positions * 3)
    )
    # Its waves are in float32, which rounds angles below 20 to 1e-6: the bound stands far from both.
    moved, changed = ((other - logits).abs().max().item() for other in (later, stretched))
    relative = moved < 1e-4 < changed / 100

    level = torch.full((1, 8), 5.0, dtype=torch.float64)
    uncentred = bool(small.model.norm(level).any()) and not F.layer_norm(level, (8,)).any()

    mlp = small.model.layers[0].mlp
    outputs = [bool(mlp(level).any())]
    for matrix in (mlp.gate_proj, mlp.up_proj):
        kept = matrix.weight.detach().clone()
        torch.nn.init.zeros_(matrix.weight)
        outputs.append(bool(mlp(level).any()))
        matrix.weight.data = kept
    gated = outputs == [True, False, False]
    claim.holds(
        structure and relative and uncentred and gated,
        f"tables {tables}, norms {gains[0]}, matrices {matrices}; positions moved by 3 change logits by {moved:.0e}, "
        f"stretched by 3 by {changed:.1f}; the norm keeps a mean; either factor at 0 ends the feed-forward",
    )


@pytest.mark.claim("next.mist.weights_understate")
def test_weights_are_the_least_of_it(claim):
    """After a step the weights are a quarter of the arrays, and the activations come on top."""

    def stated(dials, tokens):
        spec = tutor(**dials)
        arrays, kept = trained(spec, tokens), saved(Decoder(spec), tokens).bytes
        assert memory.weight_bytes(spec, "float32") == arrays["weights"]
        assert memory.training(spec, "adam_float32").total == sum(arrays.values()) == 4 * arrays["weights"]
        assert activations.total(spec, seq=tokens.shape[1]) == kept
        return arrays["weights"] < sum(arrays.values()) < sum(arrays.values()) + kept

    @FEW
    @given(dials=SHAPES)
    def drawn(dials):
        assert stated(dials, torch.zeros(1, dials["context"], dtype=torch.long))

    drawn()
    large = tutor(**GPT2)
    total = memory.training(large, "adam_float32").total + activations.total(large, seq=1024)
    claim.holds(
        stated(TOY, torch.arange(6)[None]) and memory.weight_bytes(large, "float32") < total,
        f"at GPT-2's shape {memory.weight_bytes(large, 'float32'):,} bytes of {total:,} with 1,024 tokens",
    )


@pytest.mark.claim("next.mist.tokens_not_knowledge")
def test_repeated_tokens_are_processed_again(claim):
    """Each epoch processes, and pays for, all tokens again; the distinct ones are as many as before."""
    spec, module = tutor(), Decoder(tutor())
    corpus = [(number, torch.randint(9, (6,))) for number in range(5)]
    once = flops.training(spec, seq=6, batch=len(corpus), pairs=pairs.full).total
    processed, distinct = [], []
    for epochs in (1, 2, 3):
        batches = [batch for _ in range(epochs) for batch in DataLoader(corpus, batch_size=5, shuffle=True)]
        spent = sum(torch_counter.count(lambda each=each: module(each[1]).sum().backward()) for each in batches)
        processed.append(sum(tokens.numel() for _, tokens in batches))
        distinct.append(6 * len({int(number) for numbers, _ in batches for number in numbers}))
        assert spent == epochs * once
    held = processed == [30, 60, 90] and distinct == [30] * 3
    claim.holds(held, f"{processed} processed in 1 to 3 epochs, {distinct} distinct, {once:,} FLOPs each time")


@pytest.mark.claim("next.real.gpt2_impl")
def test_gpt2s_structure(claim):
    """GPT-2 adds two tables, norms what enters each sublayer and not the sum, and scores with the token table."""
    module = small_gpt2()
    body, tokens = module.transformer, torch.arange(6)[None]
    states = module(tokens, output_hidden_states=True).hidden_states
    tables = torch.equal(states[0], body.wte(tokens) + body.wpe(torch.arange(6)))
    block, entering, leaving = body.h[0], states[0], states[1]
    attention_calls, mlp_calls = watched(block.attn), watched(block.mlp)
    module(tokens)
    ((attention_given, (attended, *_)),), ((mlp_given, expanded),) = attention_calls, mlp_calls
    between = attended + entering
    before = torch.equal(attention_given, block.ln_1(entering)) and torch.equal(mlp_given, block.ln_2(between))
    residual = torch.equal(leaving, between + expanded)
    tied = module.lm_head.weight is body.wte.weight and module.lm_head.bias is None
    claim.holds(
        tables and before and residual and tied,
        f"both tables added: {tables}; norms before: {before}; sums not normed: {residual}; tied: {tied}",
    )


@pytest.mark.claim("next.real.inference_budget")
def test_serving_favours_a_smaller_model(claim):
    """At one loss, serving ten times the training tokens is cheapest with fewer parameters and more tokens."""
    surface = LAWS["hoffmann"].surface
    size, data = surface.optimum(1e23)
    target = surface.loss(size, data)

    def tokens(parameters):
        return surface.tokens_for(target, parameters)

    def cheapest(demand):
        def lifetime(parameters):
            train = conventions.six_nd(round(parameters), round(tokens(parameters)))
            return train + conventions.two_nd(round(parameters), round(demand))

        return min((size * 2 ** (step / 8) for step in range(-8, 9)), key=lifetime)

    served = 10 * data
    smaller = cheapest(served)
    dominates = conventions.two_nd(round(size), round(served)) > conventions.six_nd(round(size), round(data))
    claim.holds(
        dominates and cheapest(0) == size and smaller < size and tokens(smaller) > data,
        f"{size / 1e9:.1f}B on {data / 1e9:.0f}B tokens unserved, {smaller / 1e9:.1f}B on "
        f"{tokens(smaller) / 1e9:.0f}B where {served / 1e9:.0f}B are served",
    )


@pytest.mark.claim("next.real.gqa_between")
def test_grouped_heads_are_between(claim):
    """Parameters and cache grow with each key/value head, from one for all query heads to one for each."""
    sizes = {}
    for heads in (None, 1, 2, 4, 8):
        config = LLAMA | {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8}
        config |= {} if heads is None else {"num_key_value_heads": heads}
        module, spec = modules.build(config, attn_implementation="eager"), configs.read(config).spec
        ids = torch.zeros(1, 5, dtype=torch.long, device="meta")
        kept = module(ids, attention_mask=torch.ones_like(ids), use_cache=True).past_key_values
        sizes[heads] = modules.unique(module), sum(torch_memory.cache_bytes(kept))
        assert sizes[heads] == (params.count(spec).unique, cache.total(spec, 5, dtype="float32"))
    full, one, *others = sizes.values()
    steps = [
        {Fraction(more - least, heads - 1) for heads, more in zip((2, 4, 8), column, strict=True)}
        for least, column in zip(one, zip(*others, strict=True), strict=True)
    ]
    linear = all(len(step) == 1 and min(step) > 0 for step in steps)
    claim.holds(linear and full == others[-1], f"parameters and bytes of cache by key/value heads: {sizes}")


@pytest.mark.claim("next.real.moe")
def test_sparse_models_have_two_counts(claim):
    """A token's gradient reaches k of E experts: what it reaches and all others' part is the active count."""
    config = {"model_type": "mixtral", "vocab_size": 11, "hidden_size": 8, "intermediate_size": 6}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    config |= {"max_position_embeddings": 16}
    config |= {"num_local_experts": 5, "num_experts_per_tok": 2}
    # The library's default, a grouped product, does not take sizes as small as these.
    module = modules.build(config, device="cpu", experts_implementation="batched_mm")
    module(torch.zeros(1, 1, dtype=torch.long)).logits.logsumexp(-1).sum().backward()
    total = active = 0
    for name, weight in module.named_parameters():
        total += weight.numel()
        experts = [expert for expert in weight.grad if expert.any()] if ".experts." in name else [weight]
        active += sum(expert.numel() for expert in experts)
    counts = params.count(configs.read(config).spec)
    mixtral = params.count(configs.load("mixtral-8x7b").spec)
    assert mixtral.unique == modules.unique(modules.build(configs.published_config("mixtral-8x7b")))
    claim.holds(
        (counts.unique, counts.active) == (total, active) and active < total and mixtral.active < mixtral.unique,
        f"{active:,} of {total:,} in the miniature, {mixtral.active:,} of {mixtral.unique:,} in Mixtral",
    )


@pytest.mark.claim("next.real.accumulation")
def test_accumulated_gradients_are_the_batchs(claim):
    """Gradients of microbatches, each by its share of the tokens, sum to the batch's; then one step is taken."""
    torch.manual_seed(0)
    batch, start = torch.randint(9, (8, 6)), Decoder(tutor()).double().state_dict()

    def accumulated(sizes, weigh):
        """Gradients of the microbatches together, and the weights after the step that follows them."""
        module = Decoder(tutor()).double()
        module.load_state_dict(start)
        for micro in batch.split(sizes):
            logits = module(micro[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), micro[:, 1:].flatten())
            (weigh(len(micro)) * loss).backward()
        assert all(torch.equal(start[name], parameter) for name, parameter in module.named_parameters())
        gradients = torch.cat([parameter.grad.flatten() for parameter in module.parameters()])
        torch.optim.SGD(module.parameters(), lr=0.1).step()
        return gradients, torch.cat([parameter.detach().flatten() for parameter in module.parameters()])

    whole = accumulated([8], lambda _: 1)

    def apart(sizes, weigh):
        both = zip(accumulated(sizes, weigh), whole, strict=True)
        return max(((ours - right).abs().max() / right.abs().max()).item() for ours, right in both)

    shares = {str(sizes): apart(sizes, lambda rows: rows / 8) for sizes in ([2, 2, 2, 2], [1, 2, 5])}
    wrong = {"unweighed": apart([1, 2, 5], lambda _: 1 / 3), "unscaled": apart([2, 2, 2, 2], lambda _: 1)}
    claim.holds(
        max(shares.values()) < ROUNDING and min(wrong.values()) > 1e3 * ROUNDING,
        "off by "
        + ", ".join(f"{gap:.0e} for {name}" for name, gap in (shares | wrong).items())
        + " of the largest gradient or weight",
    )


@pytest.mark.claim("next.real.ddp")
def test_replicas_keep_all_weights(claim):
    """Of two data-parallel processes each holds every weight; only sharding divides them."""
    seen = {}
    for name, spec in SPECS.items():
        whole = memory.training(spec, "adam_float32", ranks=RANKS).arrays[0].logical
        replicated, sharded = (
            [rank[f"{way} {name}"]["weights"] for rank in ranks_observed()] for way in ("none", "zero3")
        )
        seen[name] = whole, replicated, sharded
    held = all(whole == sum(cut) and each == [whole] * RANKS for whole, each, cut in seen.values())
    claim.holds(held, f"bytes of all weights, of each replica's, of each shard's: {seen}")


@pytest.mark.claim("next.deeper.timestamps")
def test_links_begin_where_the_text_says(claim):
    """The seconds in the links are the times at which the segments are said to begin."""
    midnight = datetime(1900, 1, 1)
    starts = [datetime.strptime(text, "%H:%M:%S") for text in ("1:06:14", "2:34:09", "0:25:43")]
    claim.measured([(start - midnight).total_seconds() for start in starts])


@pytest.mark.claim("next.quiz.q1")
def test_quiz_1(claim):
    """V C + S C + L (12 C^2 + 13 C) + 2 C counts every parameter; the expressions near it do not."""

    def terms(dials):
        v, c, s, layers = (dials[name] for name in ("vocab", "width", "context", "layers"))
        return v * c, s * c, layers * 12 * c**2, layers * 13 * c, 2 * c

    def stated(dials):
        return sum(terms(dials)) == predicted(**dials) == built(**dials)

    table, positions, matrices, vectors, last = terms(TOY)
    near = {
        "the leading terms": table + positions + matrices,
        "the table twice": 2 * table + positions + matrices + vectors + last,
        "no last norm": table + positions + matrices + vectors,
        "12 L C^2": matrices,
    }
    claim.holds(everywhere(stated) and built(**TOY) not in near.values(), f"{built(**TOY):,} for the toy; not {near}")


@pytest.mark.claim("next.quiz.q2")
def test_quiz_2(claim):
    """Twice the heads at a fixed width leave the count unchanged."""

    def stated(dials):
        wide = dials | {"width": 2 * dials["width"]}
        more = wide | {"heads": 2 * dials["heads"]}
        return predicted(**wide) == predicted(**more) == built(**wide) == built(**more)

    claim.holds(everywhere(stated), f"{built(**TOY):,} with 2 heads, {built(**TOY | {'heads': 4}):,} with 4")


@pytest.mark.claim("next.quiz.q3")
def test_quiz_3(claim):
    """The meta check gives a count: no loss can be read from it, and models of other quality have the same."""
    large = decoder(**GPT2)
    claim.measured(predicted(**GPT2), observed=modules.unique(large))
    tokens = torch.arange(6)[None]
    with pytest.raises(RuntimeError, match="meta"):
        large(tokens.to("meta")).logsumexp(-1).sum().item()
    torch.manual_seed(0)
    toy = Decoder(tutor())
    optimizer = torch.optim.AdamW(toy.parameters(), lr=0.01)
    losses, counts = [], []
    for _ in range(5):
        loss = F.cross_entropy(toy(tokens)[0], tokens[0] + 1)
        losses.append(loss.item())
        counts.append(modules.unique(toy))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    same = all(parameter.is_meta for parameter in large.parameters()) and set(counts) == {built(**TOY)}
    claim.holds(
        same and losses[-1] < losses[0], f"no value to read; a toy of {counts[0]:,} before and after it trained"
    )


@pytest.mark.claim("next.quiz.q4")
def test_quiz_4(claim):
    """16 P is the four float32 arrays after a step; activations come on top, and other layouts take more or less."""
    spec, tokens = tutor(), torch.arange(6)[None]
    arrays, kept = trained(spec, tokens), saved(Decoder(spec), tokens).bytes
    count = params.count(spec).unique
    assert by_name(spec, "adam_float32") == arrays
    four = set(arrays.values()) == {4 * count} and sum(arrays.values()) == 16 * count and len(arrays) == 4
    assert kept == activations.total(spec, seq=6)
    others = {layout.bytes_per_parameter for layout in memory.LAYOUTS.values()} - {16}
    claim.holds(
        four and kept > 0 and min(others) < 16 < max(others), f"{arrays}, and {kept:,} bytes of activations beside them"
    )


@pytest.mark.claim("next.quiz.q5")
def test_quiz_5(claim):
    """The chosen function is least at (4, 4) of n d = 16; with other constants it is not, so nothing was measured."""

    def teaching(split):
        return 1.5 + 1 / sqrt(split[0]) + 1 / sqrt(split[1])

    def optimum(**constants):
        return LossSurface(**{"E": 1.5, "A": 1.0, "B": 1.0, "alpha": 0.5, "beta": 0.5} | constants).optimum(16, each=1)

    best = min(((2.0 ** (step / 16), 2.0 ** (4 - step / 16)) for step in range(65)), key=teaching)
    chosen = [optimum(A=2.0), optimum(B=2.0), optimum(alpha=0.25)]
    claim.holds(
        best == optimum() == (4, 4) and teaching(best) == 2.5 and best not in chosen,
        f"{best}; with one constant changed {[(round(n, 2), round(d, 2)) for n, d in chosen]}",
    )


@pytest.mark.claim("next.quiz.q6")
def test_quiz_6(claim):
    """A cloned head makes 2,824 parameters of the toy's, 72 more."""
    toy = Decoder(tutor())
    before = modules.unique(toy)
    toy.head.weight = torch.nn.Parameter(toy.head.weight.detach().clone())
    tied, untied = predicted(**TOY), predicted(**TOY, tied=False)
    claim.measured([untied, untied - tied], observed=[modules.unique(toy), modules.unique(toy) - before])


@pytest.mark.claim("next.quiz.q7")
def test_quiz_7(claim):
    """From 512 to 1,024 tokens GPT-2's scores are four times, its cache twice as many, its parameters the same."""
    spec = configs.load("gpt2").spec
    short, long = requests(512), requests(1024)
    for tokens in (512, 1024):
        ours = activations.score_bytes(spec, seq=tokens, dtype="float16") // 2, cache.total(spec, tokens)
        assert ours == (requests(tokens)["scores"], requests(tokens)["cache"])
    claim.measured([Fraction(long[name], short[name]) for name in ("scores", "cache")])
    same = short["parameters"] == long["parameters"] == params.count(spec).unique
    claim.holds(same, f"{short} and {long}")


@pytest.mark.claim("next.quiz.q8")
def test_quiz_8(claim):
    """Twice the parameters leave half of 100,000,000 tokens at the budget of a million parameters."""

    def counted(parameters, tokens):
        """FLOPs of a matrix, forward and both gradients."""
        layer = torch.nn.Linear(1000, parameters // 1000, bias=False, device="meta")
        given = torch.empty(tokens, 1000, device="meta", requires_grad=True)
        return torch_counter.count(lambda: layer(given).sum().backward())

    budget = conventions.six_nd(10**6, 10**8)
    tokens = budget // conventions.six_nd(2 * 10**6, 1)
    claim.measured(tokens, observed=counted(10**6, 10**8) // counted(2 * 10**6, 1))
    claim.holds(counted(2 * 10**6, tokens) == budget, f"{budget:,} FLOPs either way")


@pytest.mark.claim("next.quiz.q9")
def test_quiz_9(claim):
    """A longer request to the same weights needs more for scores, cache and activations."""
    spec = tutor(context=48)
    module = Decoder(spec, attention="eager")
    before = {name: value.clone() for name, value in module.state_dict().items()}
    sizes = []
    for tokens in (6, 12, 24, 48):
        ids = torch.zeros(1, tokens, dtype=torch.long)
        kept = saved(module, ids)
        scores = sum(size for shape, size in kept.storages if shape == (1, 2, tokens, tokens))
        _, cached = torch_generate.generate(module, ids, 1)
        sizes.append((scores, nbytes(tensor for layer in cached for tensor in layer.parts), kept.bytes))
        assert sizes[-1] == (
            3 * activations.score_bytes(spec, seq=tokens),
            cache.total(spec, tokens, dtype="float32"),
            activations.total(spec, seq=tokens, attention="eager"),
        )
    same = all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    grow = all(list(column) == sorted(set(column)) for column in zip(*sizes, strict=True))
    claim.holds(same and grow, f"bytes of scores, cache and activations at 6 to 48 tokens: {sizes}; weights unchanged")


@pytest.mark.claim("next.cross.gpt2_share")
def test_two_shares_of_one_model(claim):
    """Of GPT-2's parameters the token table is 31.02 percent, and both tables together are 32."""
    spec, module = configs.load("gpt2").spec, gpt2(**GPT2)
    whole, parts = params.count(spec), params.by_part(spec)
    table = Fraction(parts[Part.EMBEDDING].unique, whole.unique)
    both = Fraction(whole.embedding, whole.unique)
    body, held = module.transformer, modules.unique(module)
    tables = [body.wte.weight.numel(), body.wte.weight.numel() + body.wpe.weight.numel()]
    claim.measured([table, both], observed=[Fraction(each, held) for each in tables])
    claim.otherwise([table, table], "the token table alone in both places")


@pytest.mark.claim("next.cross.adam16")
def test_sixteen_bytes_twice(claim):
    """All in float32, or with bfloat16 weights and gradients beside float32 copies: other arrays, as many bytes."""
    spec, tokens = tutor(), torch.arange(6)[None]
    plain, mixed = trained(spec, tokens), trained_mixed(spec, tokens)
    assert (by_name(spec, "adam_float32"), by_name(spec, "adam_mixed")) == (plain, mixed)
    claim.measured(
        [memory.LAYOUTS[name].bytes_per_parameter for name in ("adam_float32", "adam_mixed")],
        observed=[Fraction(sum(arrays.values()), built(**TOY)) for arrays in (plain, mixed)],
    )
    claim.holds(plain != mixed, f"{plain} and {mixed}")


@pytest.mark.claim("next.cross.mask_full")
def test_square_stored_and_half_seen(claim):
    """The weights of attention are stored as a square for each head, and half of it, with the diagonal, is not 0."""
    spec, tokens = tutor(), torch.arange(6)[None]
    layers = small_gpt2()(tokens, output_attentions=True).attentions
    stored, seen = {layer.numel() for layer in layers}, {int(layer.count_nonzero()) for layer in layers}
    assert stored == {activations.score_bytes(spec, seq=6) // 4} and seen == {2 * pairs.causal(6)}
    average = Fraction(*seen, 2 * 6)
    claim.holds(
        stored == {2 * 6**2} and average == Fraction(6, 2) + Fraction(1, 2),
        f"{stored} stored a layer, {seen} not 0: {float(average)} for a token, its own among them",
    )
