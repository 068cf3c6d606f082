"""The decoders against Hugging Face's modules and each other: one config, one set of weights, the same logits."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, Gemma2Config, GlmConfig

from accounting import naming
from accounting.authorities import huggingface as modules
from accounting.huggingface import read
from accounting.naming import Layout
from accounting.spec import Attention, Block, FeedForward, ModelSpec, Norm, Rotary
from model import jax_decoder, torch_experts, weights
from model.torch_decoder import Decoder
from model.torch_experts import ExpertsLayer
from tests import families, strategies

FEWER = settings(max_examples=settings().max_examples // 5)  # each one runs several models
FEW = settings(max_examples=settings().max_examples // 20)  # each one compiles a model
TOKENS = 14
#: Of the largest logit. Float64 rounds at 1.1e-16, and a logit here is hundreds of roundings deep, not thousands.
ROUNDING = 1e-12
#: Of the largest logit. Float32 rounds at 6.0e-8, and a norm of nearly nothing magnifies what was rounded before it.
SINGLE = 1e-4


@torch.no_grad()
def sampled(module, spec, model_type):
    """A module's weights, drawn anew and by their canonical names, tokens, and the module's logits for them."""
    generator = torch.Generator().manual_seed(0)
    for tensor in module.eval().state_dict().values():
        tensor.normal_(std=0.3, generator=generator)
    tokens = torch.randint(spec.vocab, (2, min(TOKENS, spec.context)), generator=generator)
    logits = module(tokens, use_cache=False).logits
    held = {name: tensor.numpy() for name, tensor in modules.saved(module).items()}
    return weights.from_published(held, spec, model_type), tokens, logits.numpy()


def stock(config):
    """Hugging Face's module of a config, which writes its attention and its experts out."""
    return modules.build(config, device="cpu", attn_implementation="eager", experts_implementation="eager")


def filled(spec, kind, tensors):
    decoder = Decoder(spec, attention=kind).to(torch.from_numpy(tensors["embedding.weight"]).dtype)
    weights.fill(decoder, tensors)
    return decoder


@torch.no_grad()
def torch_logits(spec, kind, tensors, tokens):
    return filled(spec, kind, tensors)(tokens).numpy()


forward = jax.jit(jax_decoder.forward, static_argnums=0, compiler_options=families.QUICK)


def jax_logits(spec, tensors, tokens):
    """In the dtype of the tensors."""
    with jax.enable_x64(True):
        return np.asarray(forward(spec, weights.to_tree(tensors), tokens.numpy()))


def logits(spec, kind, tensors, tokens):
    """Of our decoder: in JAX, or in PyTorch with one of its kinds of attention."""
    return jax_logits(spec, tensors, tokens) if kind == "jax" else torch_logits(spec, kind, tensors, tokens)


def assert_close(expected, actual, tolerance):
    __tracebackhide__ = True
    assert expected.dtype == actual.dtype
    assert np.abs(expected - actual).max() <= tolerance * np.abs(expected).max()


@pytest.mark.parametrize("family", strategies.FAMILIES)
@FEWER
@given(data=st.data())
def test_logits_are_those_of_hugging_faces_module(family, data):
    """Any config of any family is the same function here and there, whatever its dials and our kind of attention."""
    config = data.draw(strategies.configs(family).filter(strategies.runnable))
    spec = read(config).spec
    with modules.float64():
        tensors, tokens, expected = sampled(stock(config), spec, family)
    for kind in ("eager", "fused"):
        assert_close(expected, torch_logits(spec, kind, tensors, tokens), ROUNDING)


def gap(scores, chosen):
    """The least distance between what is chosen of a row and what is not."""
    best = scores.sort(descending=True).values
    return (best[:, chosen - 1] - best[:, chosen]).min() if chosen < best.shape[1] else np.inf


def is_safe(layer, routing):
    """Whether no error of ``SINGLE`` of the largest logit in any logit changes what a router chooses.

    Of two logits both may be wrong, which twice that makes up for. A softmax keeps the order of its logits, and a
    sigmoid is nowhere steeper than they are. A group's score is the sum of two.
    """
    router, active = layer.router.spec, layer.router.active
    error = SINGLE * routing.logits.abs().max()
    scores = routing.logits if router.score == "softmax" else routing.logits.sigmoid()
    if layer.router.selection_bias is not None:
        scores = scores + layer.router.selection_bias
    groups = gap(torch_experts.group_scores(router, scores), router.top_groups)
    return groups > 4 * error and gap(torch_experts.only_top_groups(router, scores), active) > 2 * error


@torch.no_grad()
def are_safe(spec, tensors, tokens):
    """Whether that is so of every router."""
    decoder = filled(spec, "fused", tensors)
    with torch_experts.watch(decoder) as routings:
        decoder(tokens)
    sparse = [module for module in decoder.modules() if isinstance(module, ExpertsLayer)]
    return all(map(is_safe, sparse, routings))


@pytest.mark.parametrize("family", strategies.FAMILIES)
@FEWER
@given(data=st.data())
def test_float32_logits_are_those_of_hugging_faces_module(family, data):
    """Its module as it is, where no router's choice hangs on rounding."""
    config = data.draw(strategies.configs(family).filter(strategies.runnable))
    spec = read(config).spec
    tensors, tokens, expected = sampled(stock(config), spec, family)
    assume(are_safe(spec, tensors, tokens))
    assert_close(expected, torch_logits(spec, "fused", tensors, tokens), SINGLE)


@pytest.mark.parametrize("kind", ["eager", "fused", "jax"])
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
    with modules.float64():
        tensors, tokens, expected = sampled(AutoModelForCausalLM.from_config(config), spec, "glm")
    assert_close(expected, logits(spec, kind, tensors, tokens), ROUNDING)


@pytest.mark.parametrize("kind", ["eager", "fused", "jax"])
def test_bounded_scores(kind, monkeypatch):
    """Gemma 2 bounds the scores of its attention, in layers with a window and without."""
    monkeypatch.setitem(naming.TABLES, "gemma2", naming.GEMMA)
    config = Gemma2Config(
        vocab_size=29,
        hidden_size=16,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        query_pre_attn_scalar=1,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=None,
        sliding_window=5,
        attn_implementation="eager",
    )
    norm = Norm(unit_offset=True)
    blocks = tuple(
        Block(
            attention=Attention(
                heads=4, kv_heads=2, head_dim=8, scale=1.0, softcap=2.0, window=window, rotary=Rotary(base=1e4, dim=8)
            ),
            feed_forward=FeedForward(width=20, activation="gelu_tanh", gated=True),
            attention_norm=norm,
            attention_post_norm=norm,
            feed_forward_norm=norm,
            feed_forward_post_norm=norm,
        )
        for window in (5, None)
    )
    spec = ModelSpec(vocab=29, width=16, context=64, blocks=blocks, final_norm=norm, tied=True, embedding_scale=16**0.5)
    with modules.float64():
        tensors, tokens, expected = sampled(AutoModelForCausalLM.from_config(config), spec, "gemma2")
    assert_close(expected, logits(spec, kind, tensors, tokens), ROUNDING)


@pytest.mark.parametrize("family", strategies.FAMILIES)
@FEW
@given(data=st.data())
def test_jax_logits_are_those_of_hugging_faces_module(family, data):
    """Any config of any family is the same function there too."""
    config = data.draw(strategies.configs(family).filter(strategies.runnable))
    spec = read(config).spec
    with modules.float64():
        tensors, tokens, expected = sampled(stock(config), spec, family)
    assert_close(expected, jax_logits(spec, tensors, tokens), ROUNDING)


@pytest.mark.parametrize("family", strategies.FAMILIES)
@FEW
@given(data=st.data())
def test_jax_float32_logits_are_those_of_hugging_faces_module(family, data):
    """Its module as it is, where no router's choice hangs on rounding."""
    config = data.draw(strategies.configs(family).filter(strategies.runnable))
    spec = read(config).spec
    tensors, tokens, expected = sampled(stock(config), spec, family)
    assume(are_safe(spec, tensors, tokens))
    assert_close(expected, jax_logits(spec, tensors, tokens), SINGLE)


def targets(tokens):
    return tokens.roll(-1, 1)


def torch_gradients(spec, tensors, tokens):
    decoder = filled(spec, "fused", tensors)
    F.cross_entropy(decoder(tokens).flatten(0, 1), targets(tokens).flatten()).backward()
    return {name: parameter.grad.numpy() for name, parameter in decoder.named_parameters()}


@partial(jax.jit, static_argnums=0, compiler_options=families.QUICK)
@partial(jax.grad, argnums=1)
def jax_gradients(spec, tree, tokens, targets):
    scores = jax.nn.log_softmax(jax_decoder.forward(spec, tree, tokens))
    return -jnp.take_along_axis(scores, targets[..., None], -1).mean()


@pytest.mark.parametrize("family", strategies.FAMILIES)
def test_gradients_agree(family):
    """Of the mean cross-entropy, for every parameter, in PyTorch and JAX; a router's bias in the choice has none."""
    spec = families.SPECS[family]
    with modules.float64():
        tensors, tokens, _ = sampled(stock(families.CONFIGS[family]), spec, family)
    expected = torch_gradients(spec, tensors, tokens)
    with jax.enable_x64(True):
        tree = jax_gradients(spec, weights.to_tree(tensors), tokens.numpy(), targets(tokens).numpy())
    actual = weights.from_tree(tree)
    for name in actual.keys() - expected.keys():
        assert name.endswith(".selection_bias") and not actual[name].any()
    largest = max(np.abs(gradient).max() for gradient in expected.values())
    for name, gradient in expected.items():
        assert np.abs(gradient - actual[name]).max() <= ROUNDING * largest, name
