"""The decoders against Hugging Face's modules and each other: one config, one set of weights, the same logits."""

import jax
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, GlmConfig

from accounting import naming
from accounting.authorities import huggingface as modules
from accounting.huggingface import read
from accounting.naming import Layout
from accounting.spec import Attention, Block, FeedForward, ModelSpec, Norm, Rotary
from model import jax_decoder, weights
from model.torch_decoder import Decoder
from tests import strategies

FEWER = settings(max_examples=settings().max_examples // 5)  # each one runs two models
TOKENS = 14
#: Of the largest logit. The library computes norms, rotations and softmax in float32.
LIBRARY = 1e-4
#: Of the largest logit. Float64 rounds at 1.1e-16, and a logit here is hundreds of roundings deep, not thousands.
ROUNDING = 1e-12


@torch.no_grad()
def sampled(spec, module, model_type):
    """A module's weights, drawn anew and by their canonical names, tokens, and the module's logits for them."""
    generator = torch.Generator().manual_seed(0)
    module = module.double().eval()
    for parameter in module.parameters():
        parameter.normal_(std=0.3, generator=generator)
    state = {name: value.numpy() for name, value in module.state_dict().items()}
    held = {name: value for name, value in state.items() if name not in module.all_tied_weights_keys}
    tokens = torch.randint(spec.vocab, (2, min(TOKENS, spec.context)), generator=generator)
    logits = module(tokens, use_cache=False).logits
    return weights.from_published(held, spec, model_type), tokens, logits.numpy()


@torch.no_grad()
def torch_logits(spec, kind, tensors, tokens):
    decoder = Decoder(spec, attention=kind).to(torch.float64)
    weights.fill(decoder, tensors)
    return decoder(tokens).numpy()


def assert_close(expected, actual, tolerance):
    __tracebackhide__ = True
    assert expected.dtype == actual.dtype == np.float64
    assert np.abs(expected - actual).max() <= tolerance * np.abs(expected).max()


@pytest.mark.parametrize("kind", ["eager", "fused"])
@pytest.mark.parametrize("family", strategies.DENSE)
@FEWER
@given(data=st.data())
def test_logits_are_those_of_hugging_faces_module(family, kind, data):
    """Any config of a dense family is the same function here and there, whatever its dials."""
    config = data.draw(strategies.configs(family).filter(strategies.runnable))
    spec = read(config).spec
    module = modules.build(config, device="cpu", attn_implementation="eager")
    tensors, tokens, expected = sampled(spec, module, family)
    assert_close(expected, torch_logits(spec, kind, tensors, tokens), LIBRARY)


GROUPED = {
    "vocab_size": 29,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rope_theta": 100.0,
    "pad_token_id": None,
}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
#: One shape a family, with what the family alone has: JAX compiles each anew.
FIXED = {
    "gemma3_text": GROUPED | WINDOWS | {"head_dim": 8, "query_pre_attn_scalar": 5, "final_logit_softcapping": 3.0},
    "gpt2": {"vocab_size": 29, "n_positions": 16, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_inner": 20},
    "llama": GROUPED | {"head_dim": 8, "rope_scaling": YARN, "attention_bias": True, "mlp_bias": True},
    "mistral": GROUPED | {"head_dim": 8, "sliding_window": 5},
    "olmo2": GROUPED | {"attention_bias": True},
    "olmo3": {name: value for name, value in (GROUPED | WINDOWS).items() if name != "rope_theta"},
    "qwen2": GROUPED | WINDOWS | {"use_sliding_window": True, "tie_word_embeddings": True},
    "qwen3": GROUPED | {"head_dim": 8, "tie_word_embeddings": True},
}


@pytest.mark.parametrize("family", strategies.DENSE)
def test_three_frameworks_agree(family):
    """PyTorch, JAX and Hugging Face's module have the same logits, ours to the rounding of float64."""
    config = {"model_type": family, **FIXED[family]}
    spec = read(config).spec
    module = modules.build(config, device="cpu", attn_implementation="eager")
    tensors, tokens, expected = sampled(spec, module, family)
    with jax.enable_x64(True):
        jitted = jax.jit(jax_decoder.forward, static_argnums=0)
        actual = np.asarray(jitted(spec, weights.to_tree(tensors), tokens.numpy()))
    assert_close(expected, actual, LIBRARY)
    assert_close(torch_logits(spec, "fused", tensors, tokens), actual, ROUNDING)


@pytest.mark.parametrize("kind", ["eager", "fused"])
def test_interleaved_pairs_and_a_part_of_the_head(kind, monkeypatch):
    """GLM rotates neighbours, over half of a head, and packs gate and up in one matrix."""
    packed = {
        "model.layers.{layer}.mlp.gate_up_proj.weight": Layout(
            sources=("blocks.{layer}.feed_forward.gate.weight", "blocks.{layer}.feed_forward.up.weight")
        )
    }
    monkeypatch.setitem(naming.TABLES, "glm", naming.LLAMA | packed)
    config = GlmConfig(
        vocab_size=29,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        attention_bias=True,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_theta": 100.0, "partial_rotary_factor": 0.5},
        pad_token_id=0,
        attn_implementation="eager",
    )
    rotary = Rotary(base=100.0, dim=8, interleaved=True)
    block = Block(
        attention=Attention(heads=4, kv_heads=2, head_dim=16, bias=True, rotary=rotary),
        feed_forward=FeedForward(width=40, activation="silu", gated=True),
        attention_norm=Norm(),
        feed_forward_norm=Norm(),
    )
    spec = ModelSpec(vocab=29, width=32, context=64, blocks=(block,) * 2, final_norm=Norm(), tied=False)
    tensors, tokens, expected = sampled(spec, AutoModelForCausalLM.from_config(config), "glm")
    assert_close(expected, torch_logits(spec, kind, tensors, tokens), LIBRARY)
