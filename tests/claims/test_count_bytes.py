"""Claims of the counting essay on step 3: bytes of training, of weights and of key/value caches."""

from fractions import Fraction
from functools import cache as memoised
from math import floor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accounting import activations, cache, hardware, huggingface, memory, params
from accounting.authorities import huggingface as modules
from accounting.authorities import torch_memory
from accounting.huggingface import published_config
from model.torch_decoder import Decoder
from tests import strategies

# Each example builds a module and runs it.
FEWER = settings(max_examples=settings.default.max_examples // 10)
QWEN, LLAMA, GEMMA, GPT_OSS, DEEPSEEK = "qwen2.5-1.5b", "llama-3.1-8b", "gemma-3-1b", "gpt-oss-20b", "deepseek-v3"
KIB, MIB, GIB = 2**10, 2**20, 2**30
TOKENS = st.integers(1, 40)
FLOATS = st.sampled_from(["bfloat16", "float16", "float32", "float64"])


def spec_of(name):
    return huggingface.load(name).spec


def on_meta(config, dtype="bfloat16"):
    return modules.build(config, dtype=getattr(torch, dtype), attn_implementation="eager")


@memoised
def module_of(name):
    return on_meta(published_config(name))


def weight_bytes(module):
    return sum(parameter.nbytes for parameter in module.parameters())


def kept(module, *lengths, batch=1):
    """Bytes that transformers keeps in each layer after a prompt and what follows it."""
    past, met = None, 0
    with torch.no_grad():
        for length in lengths:
            met += length
            tokens, seen = (torch.ones(batch, size, dtype=torch.long, device="meta") for size in (length, met))
            past = module(input_ids=tokens, attention_mask=seen, cache=past, use_cache=True).past_key_values
    return torch_memory.cache_bytes(past)


@memoised
def published_cache(name, tokens):
    return sum(kept(module_of(name), tokens))


def numbers_per_token(spec):
    """The essay's 2 L n_kv d_h."""
    attention = spec.blocks[0].attention
    return 2 * len(spec.blocks) * attention.kv_heads * attention.head_dim


def windows_of(config):
    return [block.attention.window for block in huggingface.read(config).spec.blocks]


FULL = strategies.configs("llama", "qwen2", "qwen3").filter(
    lambda config: strategies.runnable(config) and not any(windows_of(config))
)
# A window of one keeps none, which transformers' slice from the end takes for all.
WINDOWED = strategies.configs("gemma3_text", "mistral", "olmo3", "qwen2").filter(
    lambda config: strategies.runnable(config) and any(windows_of(config)) and 1 not in windows_of(config)
)


@memoised
def mixed_adam():
    """Bytes by array: a backward pass of Qwen2.5-1.5B in bfloat16, and a step of AdamW on float32 masters."""
    module, token = on_meta(published_config(QWEN)), torch.zeros(1, 1, dtype=torch.long, device="meta")
    module(input_ids=token, attention_mask=torch.ones_like(token), use_cache=False).logits.sum().backward()
    weights = list(module.parameters())
    masters = [weight.detach().float() for weight in weights]
    for weight, master in zip(weights, masters, strict=True):
        master.grad = weight.grad.float()
    optimizer = torch.optim.AdamW(masters)
    optimizer.step()
    arrays = {
        "weights": weights,
        "gradients": [weight.grad for weight in weights],
        "master_weights": masters,
        "gradient_copy": [master.grad for master in masters],
    }
    sizes = {array: sum(tensor.nbytes for tensor in tensors) for array, tensors in arrays.items()}
    return sizes | torch_memory.optimizer_state(optimizer).arrays


#: A layout of ours, and the array of those above that it does without.
LACKING = {"adam_mixed": "gradient_copy", "adam_mixed_float32_gradients": "gradients", "adam_mixed_gradient_copy": ""}


def held_by(layout):
    """Bytes of a layout's arrays, of Qwen2.5-1.5B."""
    return sum(size for array, size in mixed_adam().items() if array != LACKING[layout])


@pytest.mark.claim("count.bytes.adam16")
def test_adam_in_mixed_precision(claim):
    """Sixteen bytes a parameter, where each has one gradient, of two bytes."""
    predicted = {layout: memory.LAYOUTS[layout].bytes_per_parameter for layout in LACKING}
    observed = {layout: Fraction(held_by(layout), modules.unique(module_of(QWEN))) for layout in LACKING}
    assert predicted == observed
    claim.measured(predicted["adam_mixed"], observed=observed["adam_mixed"])
    claim.otherwise(predicted["adam_mixed_float32_gradients"], "with gradients in float32")
    claim.otherwise(predicted["adam_mixed_gradient_copy"], "with a float32 copy of them for the step")


@pytest.mark.claim("count.bytes.qwen_train")
def test_training_qwen(claim):
    """Weights, gradients, masters and moments of Qwen2.5-1.5B."""
    claim.measured(memory.training(spec_of(QWEN), "adam_mixed").total, observed=held_by("adam_mixed"))


@pytest.mark.claim("count.bytes.three_times_8")
def test_training_qwen_on_a_laptop(claim):
    """Three times the memory of the essay's laptop, whether its eight are GB or GiB."""
    predicted, laptop = memory.training(spec_of(QWEN), "adam_mixed").total, hardware.find("rtx-4060-laptop").memory
    for room in (laptop, 8 * GIB):
        claim.measured(Fraction(predicted, room), observed=Fraction(held_by("adam_mixed"), room))


def saved(module, seq, batch):
    """Bytes that autograd keeps of a forward pass."""
    ids = torch.zeros(batch, seq, dtype=torch.long)
    return torch_memory.saved(lambda: module(ids)[0], [*module.parameters(), *module.buffers(), ids]).bytes


@pytest.mark.claim("count.bytes.activations")
def test_activations_grow_with_tokens(claim):
    """Linearly with sequences and with their tokens, but for the 4 H T^2 bytes of a softmax that a layer keeps."""
    roomy = strategies.configs("llama").map(
        lambda config: {**config, "max_position_embeddings": 64, "use_cache": False}
    )

    @FEWER
    @given(roomy, st.integers(2, 6), st.integers(1, 3), st.sampled_from(["eager", "fused"]))
    def everywhere(config, seq, batch, kind):
        spec, softmaxes = huggingface.read(config).spec, config["num_hidden_layers"] * config["num_attention_heads"]
        implementation = {"eager": "eager", "fused": "sdpa"}[kind]
        theirs = modules.build(config, device="cpu", dtype=torch.float32, attn_implementation=implementation)
        ours = Decoder(spec, attention=kind)
        for module in (ours, theirs):
            few, more, most = (saved(module, seq + longer, batch) for longer in range(3))
            assert few < more < most
            assert few - 2 * more + most == (2 * 4 * batch * softmaxes if kind == "eager" else 0)
            # From two on: one key/value head of one sequence is repeated without a copy.
            two, three, four = (saved(module, seq, sequences) for sequences in (2, 3, 4))
            assert four - three == three - two > 0
        assert saved(ours, seq, batch) == activations.total(spec, seq=seq, batch=batch, attention=kind)

    everywhere()
    for kind in ("eager", "fused"):
        sizes = [activations.total(spec_of("gpt2"), seq=seq, attention=kind) for seq in (256, 512, 1024)]
        shown = ", ".join(f"{size / MIB:,.0f}" for size in sizes)
        claim.holds(sizes[0] < sizes[1] < sizes[2], f"GPT-2 at 256, 512 and 1,024 tokens, {kind}: {shown} MiB")


@pytest.mark.claim("count.kv.formula")
def test_bytes_of_a_token(claim):
    """A key and a value for every layer and key/value head; a window or latent attention keeps less."""

    @FEWER
    @given(FULL, TOKENS, st.integers(1, 3), FLOATS)
    def everywhere(config, tokens, batch, dtype):
        spec = huggingface.read(config).spec
        stated = batch * tokens * numbers_per_token(spec) * memory.DTYPE_BYTES[dtype]
        assert cache.total(spec, tokens, batch=batch, dtype=dtype) == stated
        assert sum(kept(on_meta(config, dtype), tokens, batch=batch)) == stated

    everywhere()
    for name in (QWEN, LLAMA):
        stated = 2 * numbers_per_token(spec_of(name))
        seen = published_cache(name, 1)
        claim.holds(seen == stated == cache.total(spec_of(name), 1), f"{name}: {seen:,} bytes a token in two each")
    stated, seen = 2 * 32768 * numbers_per_token(spec_of(GEMMA)), published_cache(GEMMA, 32768)
    assert seen == cache.total(spec_of(GEMMA), 32768, policy=cache.huggingface)
    claim.otherwise(seen == stated, f"{GEMMA} at 32,768 tokens: {seen:,} bytes and not {stated:,}")
    attention = spec_of(DEEPSEEK).blocks[0].attention
    stated = 2 * 2 * attention.heads * attention.nope_head_dim
    seen = latent(1)
    assert seen == 2 * cache.scalars(attention)
    claim.otherwise(seen == stated, f"{DEEPSEEK}: {seen:,} bytes a token and layer, not {stated:,}")


@pytest.mark.claim("count.kv.sliding_len")
def test_windows_in_transformers(claim):
    """A layer with a window keeps the tokens seen, and at most one fewer than the window."""

    def lengths(config, prompt, steps):
        """Tokens that each layer keeps after a prompt and as many steps, by ours and by the module."""
        spec = huggingface.read(config).spec
        sizes = [2 * cache.scalars(block.attention) for block in spec.blocks]
        predicted = cache.by_layer(spec, prompt + steps, policy=cache.huggingface)
        found = kept(on_meta(config), prompt, *[1] * steps)
        assert predicted == found
        return [Fraction(held, size) for held, size in zip(found, sizes, strict=True)]

    @FEWER
    @given(WINDOWED, TOKENS, st.integers(0, 3))
    def everywhere(config, prompt, steps):
        windows, tokens = windows_of(config), prompt + steps
        stated = [tokens if window is None else min(tokens, window - 1) for window in windows]
        assert lengths(config, prompt, steps) == stated

    everywhere()
    config = published_config(GPT_OSS)
    short = {**config, "sliding_window": 8, "num_hidden_layers": 6, "layer_types": config["layer_types"][:6]}
    found = lengths(short, 17, 3)
    shown = ", ".join(map(str, found))
    claim.holds(found == [7, 20] * 3, f"six layers of {GPT_OSS} with a window of 8, after 20 tokens: {shown}")


def dense(config):
    """Without experts, which do not matter to a cache."""
    return {**config, "first_k_dense_replace": config["num_hidden_layers"]}


@memoised
def latent(tokens):
    """Bytes that a layer of DeepSeek-V3 keeps, in two a number; all 61 are alike."""
    (size,) = kept(on_meta(dense({**published_config(DEEPSEEK), "num_hidden_layers": 1})), tokens)
    return size


@pytest.mark.claim("count.kv.mla_len")
def test_latent_attention_in_transformers(claim):
    """The latent and the rotated part of the key for each token and layer."""

    @FEWER
    @given(strategies.configs("deepseek_v3"), TOKENS, st.integers(1, 3))
    def everywhere(config, prompt, steps):
        stated = 4 * (prompt + steps) * (config["kv_lora_rank"] + config["qk_rope_head_dim"])
        predicted = cache.by_layer(huggingface.read(config).spec, prompt + steps, dtype="float32")
        found = kept(on_meta(dense(config), "float32"), prompt, *[1] * steps)
        assert predicted == found == (stated,) * config["num_hidden_layers"]

    everywhere()
    config, predicted = published_config(DEEPSEEK), cache.by_layer(spec_of(DEEPSEEK), 100)
    numbers = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    claim.holds(
        set(predicted) == {latent(100)} == {100 * 2 * numbers},
        f"{DEEPSEEK}: {Fraction(latent(100), 200)} numbers a token and layer",
    )


@pytest.mark.claim("count.kv.qwen_bytes")
def test_a_token_of_qwen(claim):
    """Bytes that Qwen2.5-1.5B keeps of a token."""
    claim.measured(cache.total(spec_of(QWEN), 1), observed=published_cache(QWEN, 1))


@pytest.mark.claim("count.kv.qwen_kib")
def test_a_token_of_qwen_in_kib(claim):
    """The same in KiB."""
    predicted = Fraction(cache.total(spec_of(QWEN), 1), KIB)
    claim.measured(predicted, observed=Fraction(published_cache(QWEN, 1), KIB))
    claim.holds(predicted.denominator == 1, "a whole number of them")


@pytest.mark.claim("count.kv.qwen_full")
def test_qwen_at_32768(claim):
    """MiB of Qwen2.5-1.5B's cache at 32,768 tokens."""
    predicted = Fraction(cache.total(spec_of(QWEN), 32768), MIB)
    claim.measured(predicted, observed=Fraction(published_cache(QWEN, 32768), MIB))
    claim.holds(predicted.denominator == 1, "a whole number of them")


def published_context(name):
    return modules.settings(published_config(name)).max_position_embeddings


@pytest.mark.claim("count.kv.qwen_ctx")
def test_context_of_qwen(claim):
    """The base model's config has four times the context, and four times the MiB."""
    context, observed = spec_of(QWEN).context, published_context(QWEN)
    claim.measured(context, observed=observed)
    full, held = cache.total(spec_of(QWEN), context), published_cache(QWEN, observed)
    claim.right(context, Fraction(full, MIB), observed=[observed, Fraction(held, MIB)])


def crossing(spec):
    """The tokens at which the cache is as large as the weights, by the essay's formula."""
    return Fraction(params.count(spec).unique, numbers_per_token(spec))


@pytest.mark.claim("count.kv.match_formula")
def test_cache_as_large_as_the_weights(claim):
    """At N / (2 L n_kv d_h) tokens, whatever the bytes of a number that both are in."""

    @FEWER
    @given(FULL, FLOATS)
    def everywhere(config, dtype):
        spec, module = huggingface.read(config).spec, on_meta(config, dtype)
        most = floor(crossing(spec))
        weights = memory.weight_bytes(spec, dtype)
        assert cache.most_tokens(lambda tokens: cache.total(spec, tokens, dtype=dtype), weights) == most
        assert sum(kept(module, most)) <= weight_bytes(module) < sum(kept(module, most + 1))

    everywhere()
    found = [Fraction(weight_bytes(module_of(name)), published_cache(name, 1)) for name in (QWEN, LLAMA)]
    claim.holds(
        found == [crossing(spec_of(name)) for name in (QWEN, LLAMA)],
        " and ".join(f"{float(tokens):,.2f}" for tokens in found) + f" tokens for {QWEN} and {LLAMA}",
    )
    spec = spec_of(GEMMA)
    fits = cache.most_tokens(lambda tokens: cache.total(spec, tokens), memory.weight_bytes(spec, "bfloat16"))
    claim.otherwise(fits == floor(crossing(spec)), f"{GEMMA}: {fits:,} tokens and not {floor(crossing(spec)):,}")


def llama_tokens():
    """The tokens that fit into the bytes of Llama 3.1 8B's weights, and those that its module's bytes have room for."""
    spec = spec_of(LLAMA)
    predicted = cache.most_tokens(lambda tokens: cache.total(spec, tokens), memory.weight_bytes(spec, "bfloat16"))
    return predicted, weight_bytes(module_of(LLAMA)) // published_cache(LLAMA, 1)


@pytest.mark.claim("count.kv.llama_match")
def test_cache_of_llama_as_large_as_its_weights(claim):
    """The tokens at which Llama 3.1 8B's cache is as large as its weights."""
    predicted, observed = llama_tokens()
    claim.measured(predicted, observed=observed)


@pytest.mark.claim("count.kv.llama_match_rounded")
def test_the_same_in_hundreds(claim):
    """The same, to the hundred."""
    predicted, observed = llama_tokens()
    claim.measured(predicted, observed=observed)


@pytest.mark.claim("count.kv.inside_window")
def test_inside_the_window(claim):
    """That many tokens are within Llama 3.1 8B's context."""
    (tokens, observed), context = llama_tokens(), spec_of(LLAMA).context
    claim.holds(tokens == observed < context == published_context(LLAMA), f"{tokens:,} of {context:,} tokens")


@memoised
def llama_full():
    """Bytes of Llama 3.1 8B's cache at its full context, predicted and kept."""
    return cache.total(spec_of(LLAMA), spec_of(LLAMA).context), published_cache(LLAMA, published_context(LLAMA))


def llama_weights():
    return memory.weight_bytes(spec_of(LLAMA), "bfloat16"), weight_bytes(module_of(LLAMA))


@pytest.mark.claim("count.kv.llama_16gib")
def test_llama_at_full_context(claim):
    """What Llama 3.1 8B keeps of one user, in GiB, of which it is a whole number, and in bytes."""
    predicted, observed = llama_full()
    claim.measured([Fraction(predicted, GIB), predicted], observed=[Fraction(observed, GIB), observed])
    claim.holds(predicted % GIB == 0, "a whole number of GiB")


@pytest.mark.claim("count.kv.llama_weights")
def test_llama_weights(claim):
    """Llama 3.1 8B's weights in two bytes each."""
    predicted, observed = llama_weights()
    claim.measured(predicted, observed=observed)


@pytest.mark.claim("count.kv.units")
def test_cache_outgrows_the_weights(claim):
    """At full context the cache is the larger, bytes against bytes."""
    (held, seen), (weights, built) = llama_full(), llama_weights()
    claim.measured([held, weights], observed=[seen, built])
    claim.holds(held > weights, f"{held / GIB:.2f} against {weights / GIB:.2f} GiB")
