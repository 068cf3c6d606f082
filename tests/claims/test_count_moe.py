"""Claims of the counting essay on mixtures of experts: total and active parameters, and what follows them."""

import re
from fractions import Fraction
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MixtralConfig

from accounting import census, conventions, flops, huggingface, memory, pairs, params
from accounting.authorities import huggingface as modules
from accounting.authorities import torch_counter
from accounting.huggingface import published_config
from accounting.ledger import case
from tests import strategies

# A counted pass takes as long as a few modules to build.
FEWER = settings(max_examples=settings.default.max_examples // 4)
MIXTRAL, DEEPSEEK = "mixtral-8x7b", "deepseek-v3"
SPARSE = ("mixtral", "qwen3_moe", "deepseek_v3")
MINIATURES = {
    MIXTRAL: {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 200,
    },
    DEEPSEEK: {
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 12,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "vocab_size": 200,
    },
}


def spec_of(config):
    return huggingface.read(config).spec


def count_of(name):
    return params.count(spec_of(published_config(name)))


@cache
def module_of(name):
    return modules.build(published_config(name))


def experts_of(config):
    """E: experts of a layer."""
    return config.get("num_local_experts") or config["n_routed_experts"]


def is_expert(name):
    """Whether a parameter of a module holds a layer's routed experts, stacked along its first axis."""
    return re.search(r"\.experts\.", name) is not None


def outside(module):
    """P_shared: scalars of everything that is not a routed expert."""
    return sum(tensor.numel() for name, tensor in module.named_parameters() if not is_expert(name))


def reached(module, tokens):
    """Experts that a batch of tokens reaches, by stacked tensor: those that get a gradient."""
    module.zero_grad()
    module(input_ids=torch.tensor([tokens]), use_cache=False).logits.logsumexp(-1).sum().backward()
    return {
        name: sum(bool(gradient.any()) for gradient in tensor.grad)
        for name, tensor in module.named_parameters()
        if is_expert(name)
    }


def miniature(name):
    """A config of the same family in small, and its module with weights, seeded."""
    config = {**published_config(name), **MINIATURES[name]}
    torch.manual_seed(0)
    return config, modules.build(config, device="cpu", attn_implementation="eager", experts_implementation="eager")


def observed_active(module, config):
    """Active scalars of a module: each stack of E experts counts by k."""
    used = Fraction(config["num_experts_per_tok"], experts_of(config))
    return sum(tensor.numel() * (used if is_expert(name) else 1) for name, tensor in module.named_parameters())


def observed_flops(config, tokens, *, train=False):
    """FLOPs of a forward pass over one sequence, or of a training step, as torch counts Hugging Face's module."""
    options = {"attn_implementation": "eager", "experts_implementation": "batched_mm"}
    module = modules.build(config, **options)
    ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")

    def run():
        logits = module(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
        if train:
            logits.sum().backward()

    return torch_counter.count(run)


def expert_size(config):
    """P_exp: the three matrices of one expert."""
    return 3 * config["hidden_size"] * config.get("moe_intermediate_size", config["intermediate_size"])


def formula(config, module, experts, layers):
    """The essay's sum: everything outside the experts, and so many experts in so many layers."""
    return outside(module) + layers * experts * expert_size(config)


def mixture_layers(config):
    """Layers that have experts."""
    return config["num_hidden_layers"] - min(config.get("first_k_dense_replace", 0), config["num_hidden_layers"])


@pytest.mark.claim("count.moe.total")
def test_total(claim):
    """All experts of the layers that have some, and everything outside them, are the model."""

    def counts(config, module, layers):
        total = formula(config, module, experts_of(config), layers)
        return total, params.count(spec_of(config)).unique, modules.unique(module)

    @given(strategies.configs("mixtral", "deepseek_v3"))
    def everywhere(config):
        assert len(set(counts(config, modules.build(config), mixture_layers(config)))) == 1

    everywhere()
    for name in (MIXTRAL, DEEPSEEK):
        config = published_config(name)
        total, ours, theirs = counts(config, module_of(name), mixture_layers(config))
        claim.holds(total == ours == theirs, f"{name}: formula {total:,}, census {ours:,}, module {theirs:,}")
    all_blocks, ours, _ = counts(config, module_of(DEEPSEEK), config["num_hidden_layers"])
    claim.otherwise(all_blocks == ours, f"{all_blocks:,} for {DEEPSEEK} with experts in all 61 blocks")


@pytest.mark.claim("count.moe.active")
def test_active(claim):
    """The experts that one token reaches, and everything outside them, are the active parameters."""

    def counts(config, module, layers):
        active = formula(config, module, config["num_experts_per_tok"], layers)
        return active, params.count(spec_of(config)).active

    @given(strategies.configs("mixtral", "deepseek_v3"))
    def everywhere(config):
        assert len(set(counts(config, modules.build(config), mixture_layers(config)))) == 1

    everywhere()
    for name in (MIXTRAL, DEEPSEEK):
        config, module = miniature(name)
        tensors = dict(module.named_parameters())
        touched = sum(experts * tensors[stack][0].numel() for stack, experts in reached(module, [7]).items())
        active, ours = counts(config, module, mixture_layers(config))
        claim.holds(active == ours == outside(module) + touched, f"{name} in small: {active:,}, as one token reaches")
    config, module = published_config(DEEPSEEK), module_of(DEEPSEEK)
    active, ours = counts(config, module, mixture_layers(config))
    claim.holds(active == ours, f"{DEEPSEEK}: formula {active:,}, census {ours:,}")
    all_blocks, _ = counts(config, module, config["num_hidden_layers"])
    claim.otherwise(all_blocks == ours, f"{all_blocks:,} for {DEEPSEEK} with experts in all 61 blocks")


@pytest.mark.claim("count.moe.mixtral_config")
def test_mixtral_config(claim):
    """The published config of Mixtral 8x7B has the printed sizes, and two tables."""
    spec, theirs = spec_of(published_config(MIXTRAL)), MixtralConfig()
    layer = spec.blocks[0].feed_forward
    claim.measured(
        [len(spec.blocks), spec.width, spec.vocab, layer.experts, layer.active],
        observed=[
            *(theirs.num_hidden_layers, theirs.hidden_size, theirs.vocab_size),
            *(theirs.num_local_experts, theirs.num_experts_per_tok),
        ],
    )
    claim.holds(not spec.tied and not theirs.tie_word_embeddings, "untied")


@pytest.mark.claim("count.moe.mixtral_expert")
def test_mixtral_expert(claim):
    """One expert of Mixtral 8x7B has the printed number of weights."""
    weights = census.take(spec_of(published_config(MIXTRAL))).weights
    ours = [weight.size for weight in weights if weight.layer == 0 and "{expert}" in weight.name]
    stacks = module_of(MIXTRAL).model.layers[0].mlp.experts.parameters()
    claim.measured(sum(ours), observed=sum(stack[0].numel() for stack in stacks))


@pytest.mark.claim("count.moe.mixtral_router")
def test_mixtral_router(claim):
    """Each layer of Mixtral 8x7B has a router of experts by width."""
    ours = [w.shape for w in census.take(spec_of(published_config(MIXTRAL))).weights if w.part is census.Part.ROUTER]
    theirs = [tuple(layer.mlp.gate.weight.shape) for layer in module_of(MIXTRAL).model.layers]
    claim.measured(ours[0], observed=theirs[0])
    claim.holds(ours == theirs and len(set(ours)) == 1, f"the same in all {len(ours)} layers")


@pytest.mark.parametrize("name", [case("count.moe.mixtral_total", MIXTRAL), case("count.moe.ds_total", DEEPSEEK)])
def test_total_of_a_model(claim, name):
    """The whole model has the printed number of parameters."""
    claim.measured(count_of(name).unique, observed=modules.unique(module_of(name)))


@pytest.mark.parametrize("name", [case("count.moe.mixtral_active", MIXTRAL), case("count.moe.ds_active", DEEPSEEK)])
def test_active_of_a_model(claim, name):
    """With everything outside the experts, tables and norms too, the active parameters are as printed."""
    claim.measured(count_of(name).active, observed=observed_active(module_of(name), published_config(name)))


@pytest.mark.claim("count.moe.ds_report_errata")
def test_report_of_deepseek(claim):
    """The essay's active count and the 37B of the report are the same number."""
    count, module = count_of(DEEPSEEK), module_of(DEEPSEEK)
    active = observed_active(module, published_config(DEEPSEEK))
    lookups_and_gains = sum(t.numel() for name, t in module.named_parameters() if "embed" in name or t.ndim == 1)
    claim.measured(count.active, observed=active)
    claim.right(count.active, count.matmul_active, observed=(active, active - lookups_and_gains))


@pytest.mark.claim("count.moe.compute_active")
def test_compute_follows_active(claim):
    """A token costs two FLOPs for each active weight that multiplies it, whatever the number of experts."""

    @FEWER
    @given(strategies.configs(*SPARSE), st.integers(1, 5))
    def everywhere(config, tokens):
        assert flops.forward(spec_of(config), seq=tokens, pairs=pairs.full).total == observed_flops(config, tokens)

    everywhere()
    tokens = 3
    for name in (MIXTRAL, DEEPSEEK):
        config, count = published_config(name), count_of(name)
        forward = flops.forward(spec_of(config), seq=tokens, pairs=pairs.full)
        weights = observed_flops(config, tokens) - forward.scores - forward.mixture
        claim.holds(
            weights == 2 * count.matmul_active * tokens,
            f"{name}: {weights / tokens:,.0f} a token in products with weights, 2 x {count.matmul_active:,}",
        )
        claim.otherwise(weights == 2 * count.active * tokens, f"{name}: 2 x {count.active:,} with the table and gains")
    config = published_config(MIXTRAL)
    more = observed_flops({**config, "num_local_experts": 16}, tokens) - observed_flops(config, tokens)
    routers = 2 * tokens * config["num_hidden_layers"] * 8 * config["hidden_size"]
    claim.holds(more == routers, f"{more / tokens:,.0f} a token for eight experts more, all in the routers")


@pytest.mark.claim("count.moe.memory_total")
def test_memory_follows_total(claim):
    """The bytes of the weights are those of all parameters, since some token reaches every expert."""
    for name, dtype in ((MIXTRAL, torch.bfloat16), (MIXTRAL, torch.float32), (DEEPSEEK, torch.float32)):
        config, total = published_config(name), count_of(name).unique
        ours = memory.weight_bytes(spec_of(config), str(dtype).removeprefix("torch."))
        theirs = sum(tensor.nbytes for tensor in modules.build(config, dtype=dtype).parameters())
        claim.holds(ours == theirs == total * dtype.itemsize, f"{name} in {dtype}: {theirs:,} bytes")
    for name in (MIXTRAL, DEEPSEEK):
        _, module = miniature(name)
        stacks = {stack: len(tensor) for stack, tensor in module.named_parameters() if is_expert(stack)}
        claim.holds(reached(module, list(range(200))) == stacks, f"{name} in small: 200 tokens reach every expert")


@pytest.mark.claim("count.moe.ds_6nd")
def test_training_of_deepseek(claim):
    """The N that makes 6 N D exact for DeepSeek-V3's weights reads 37 billion."""
    tokens, spec = 2, spec_of(published_config(DEEPSEEK))
    forward = flops.forward(spec, seq=tokens, pairs=pairs.full)
    weights = observed_flops(published_config(DEEPSEEK), tokens, train=True) - 3 * (forward.scores + forward.mixture)
    count = params.count(spec)
    claim.measured(count.matmul_active, observed=Fraction(weights, conventions.six_nd(1, tokens)))
    claim.otherwise(count.active, "with the input table")
