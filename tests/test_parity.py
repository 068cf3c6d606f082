"""The decoder against Hugging Face's modules: one config, one set of weights, the same logits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, GlmConfig

from accounting import census, naming
from accounting.authorities import huggingface as modules
from accounting.huggingface import read
from accounting.naming import Layout
from accounting.spec import Attention, Block, FeedForward, ModelSpec, Norm, Rotary
from model.torch_decoder import Decoder
from tests import strategies

FEWER = settings(max_examples=settings().max_examples // 5)  # each one runs two models
TOKENS = 14


@torch.no_grad()
def filled(spec, kind, module, model_type):
    """The decoder with the module's weights, found and unpacked by the naming table."""
    decoder = Decoder(spec, attention=kind).to(torch.float64)
    state = module.state_dict()
    for tensor in naming.published(census.take(spec), model_type):
        value = state[tensor.name]
        value = value.T if tensor.layout.transposed and value.ndim == 2 else value
        rows = [weight.shape[0] for weight in tensor.weights]
        for weight, part in zip(tensor.weights, value.split(rows), strict=True):
            decoder.get_parameter(weight.name).copy_(part)
    return decoder


@torch.no_grad()
def assert_same_logits(spec, kind, module, model_type):
    """Within 1e-4 of the largest logit: the library computes norms, rotations and softmax in float32."""
    __tracebackhide__ = True
    generator = torch.Generator().manual_seed(0)
    module = module.double().eval()
    for parameter in module.parameters():
        parameter.normal_(std=0.3, generator=generator)
    tokens = torch.randint(spec.vocab, (2, min(TOKENS, spec.context)), generator=generator)
    expected = module(tokens, use_cache=False).logits
    actual = filled(spec, kind, module, model_type)(tokens)
    assert (expected - actual).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("kind", ["eager", "fused"])
@pytest.mark.parametrize("family", strategies.DENSE)
@FEWER
@given(data=st.data())
def test_logits_are_those_of_hugging_faces_module(family, kind, data):
    """Any config of a dense family is the same function here and there, whatever its dials."""
    config = data.draw(strategies.configs(family).filter(strategies.runnable))
    module = modules.build(config, device="cpu", attn_implementation="eager")
    assert_same_logits(read(config).spec, kind, module, family)


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
    assert_same_logits(spec, kind, AutoModelForCausalLM.from_config(config), "glm")
