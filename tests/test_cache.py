"""Key/value caches: the bytes of real ones, curves by length, and the search turned round."""

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from accounting import cache, memory
from accounting.authorities import huggingface as modules
from accounting.authorities import torch_memory
from accounting.huggingface import load, read
from accounting.spec import LatentAttention
from tests import strategies

FEW = settings(max_examples=settings().max_examples // 5)  # each one runs a module token by token
WINDOW_OF_ONE = {
    "model_type": "mistral",
    "vocab_size": 5,
    "hidden_size": 8,
    "intermediate_size": 4,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "sliding_window": 1,
    "pad_token_id": None,
}
LENGTHS = st.integers(0, 60)
POLICIES = st.sampled_from(sorted(cache.POLICIES)).map(cache.POLICIES.__getitem__)


def windows(spec):
    return {block.attention.window for block in spec.blocks}


@FEW
@given(config=strategies.configs().filter(strategies.runnable), tokens=st.integers(1, 12), prompt=st.integers(1, 12))
@example(config=WINDOW_OF_ONE, tokens=3, prompt=4)
def test_a_cache_of_transformers_has_the_predicted_bytes(config, tokens, prompt):
    """After a prompt and tokens one by one, layer by layer: a window keeps one token fewer than it sees."""
    spec = read(config).spec
    assume(prompt + tokens <= spec.context)
    # The library's default, a grouped product, does not take sizes as small as these.
    sparse = {"experts_implementation": "batched_mm"} if "num_experts_per_tok" in config else {}
    module = modules.build(config, device="cpu", attn_implementation="eager", **sparse).eval()
    kept = None
    with torch.no_grad():
        for length in (prompt, *[1] * tokens):
            kept = module(torch.zeros((2, length), dtype=torch.long), cache=kept, use_cache=True).past_key_values
    held = torch_memory.cache_bytes(kept)
    predicted = cache.by_layer(spec, prompt + tokens, batch=2, dtype="float32", policy=cache.huggingface)
    assert predicted == held
    assert sum(held) == cache.total(spec, prompt + tokens, batch=2, dtype="float32", policy=cache.huggingface)


@given(
    spec=strategies.specs(), tokens=LENGTHS, batch=st.integers(1, 3), dtype=st.sampled_from(sorted(memory.DTYPE_BYTES))
)
def test_what_a_layer_keeps(spec, tokens, batch, dtype):
    """Of each policy's tokens, in proportion to sequences and to a scalar's bytes; a window saves, pages do not."""
    held = {name: cache.total(spec, tokens, dtype=dtype, policy=policy) for name, policy in cache.POLICIES.items()}
    assert held["huggingface"] <= held["uniform"] and held["minimum"] <= held["uniform"]
    assert held["huggingface"] <= held["minimum"] or 1 in windows(spec)
    assert cache.total(spec, tokens, batch=batch, dtype=dtype) == batch * held["minimum"]
    assert held["uniform"] == tokens * cache.total(spec, 1, dtype=dtype, policy=cache.uniform)
    assert (held["minimum"] == held["uniform"]) == all(window is None or window >= tokens for window in windows(spec))


@given(spec=strategies.specs("deepseek_v3", "kimi_k2"), tokens=st.integers(1, 60))
def test_latent_attention_is_kept_compressed_or_expanded(spec, tokens):
    """The bottleneck and the rotated part once, or for each head its key and value; these are of two widths."""
    first = spec.blocks[0].attention
    assert isinstance(first, LatentAttention)
    per_token = first.heads * (first.nope_head_dim + first.rope_head_dim + first.value_head_dim)
    layers = len(spec.blocks)
    assert cache.total(spec, tokens, dtype="float32", expanded=True) == 4 * layers * tokens * per_token
    assert cache.total(spec, tokens, dtype="float32") == 4 * layers * tokens * (first.kv_rank + first.rope_head_dim)


@given(spec=strategies.specs(), policy=POLICIES, budget=st.integers(0, 10**6))
def test_the_most_tokens_are_found_exactly(spec, policy, budget):
    """So many fit and one more does not; where every layer has a window, there may be no most."""

    def size(tokens):
        return cache.total(spec, tokens, policy=policy)

    most = cache.most_tokens(size, budget)
    if most is None:
        assert None not in windows(spec) and policy is not cache.uniform
        assert size(10**9) == size(10**9 + 1) <= budget
    else:
        assert size(most) <= budget < size(most + 1)


def test_a_large_budget_has_its_tokens():
    """More than any machine has is still a number."""
    spec = load("llama-3.1-8b").spec
    assert cache.most_tokens(lambda tokens: cache.total(spec, tokens), 10**18) == 10**18 // 131_072


def test_a_budget_below_what_is_there_already_is_refused():
    """Weights that do not fit leave no room to search."""
    with pytest.raises(ValueError, match=r"11 bytes are needed before the first token, of 10"):
        cache.most_tokens(lambda tokens: 11 + tokens, 10)


@pytest.mark.parametrize(
    ("name", "tokens", "policy", "bytes_"),
    [
        ("gpt2", 1024, cache.minimum, 37_748_736),
        ("qwen2.5-1.5b", 1, cache.minimum, 28_672),
        ("gpt-oss-120b", 1, cache.minimum, 73_728),
        ("gpt-oss-120b", 128, cache.minimum, 128 * 73_728),
        ("gpt-oss-120b", 100_000, cache.minimum, 100_000 * 36_864 + 4_718_592),
        ("deepseek-v3", 1, cache.minimum, 70_272),
        ("gemma-3-1b", 32_768, cache.minimum, 139 * 2**20),
        ("gemma-3-1b", 32_768, cache.uniform, 832 * 2**20),
    ],
)
def test_published_models(name, tokens, policy, bytes_):
    """In two bytes a number."""
    assert cache.total(load(name).spec, tokens, policy=policy) == bytes_


def test_deepseek_expanded():
    """71 times what it keeps."""
    assert cache.total(load("deepseek-v3").spec, 1, expanded=True) == 4_997_120


def test_pages_of_gpt_oss_20b_take_twice_the_minimum():
    """At 8,192 tokens of 32 sequences: 6.09 GiB are needed, and 12.00 taken where all layers have the same pages."""
    spec = load("gpt-oss-20b").spec
    sizes = [cache.total(spec, 8192, batch=32, policy=policy) / 2**30 for policy in (cache.minimum, cache.uniform)]
    assert sizes == [6.09375, 12.0]


def test_llamas_cache_outgrows_its_weights():
    """At 122,533 tokens first: one fewer is 8,192 bytes short."""
    spec = load("llama-3.1-8b").spec
    weights = memory.weight_bytes(spec, "bfloat16")
    most = cache.most_tokens(lambda tokens: cache.total(spec, tokens), weights)
    assert most == 122_532 and weights - cache.total(spec, most) == 8_192


@pytest.mark.parametrize("sizes", [{"tokens": -1}, {"tokens": 1, "batch": 0}])
def test_what_cannot_be_is_refused(sizes):
    """Fewer than no tokens, or no sequence."""
    with pytest.raises(ValueError, match=r"^[^\n]+$"):
        cache.total(load("gpt2").spec, **sizes)
