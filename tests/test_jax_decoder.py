"""The JAX decoder holds the tensors of its PyTorch twin and computes the same logits."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from accounting.spec import (
    Attention,
    Block,
    Experts,
    FeedForward,
    LatentAttention,
    ModelSpec,
    Norm,
    Rotary,
    RotaryScaling,
)
from model.jax_decoder import Params, forward, init
from model.recipes import RECIPES, d2l_gpt, tutor
from model.torch_decoder import Decoder

VOCAB, CONTEXT, TOKENS = 13, 16, 12
LAYER_NORM = Norm(kind="layer", eps=1e-5, bias=True)
GATED = FeedForward(width=20, activation="silu", gated=True)
jitted = jax.jit(forward, static_argnums=0)


def block(**attention: object) -> Block:
    """A pre-norm block of width 16 with the given attention."""
    arguments: dict[str, object] = {"heads": 4, "kv_heads": 2, "head_dim": 8} | attention
    return Block(attention=Attention(**arguments), feed_forward=GATED, attention_norm=Norm(), feed_forward_norm=Norm())


def spec_of(*blocks: Block, **fields: object) -> ModelSpec:
    arguments: dict[str, object] = {"vocab": VOCAB, "width": 16, "context": CONTEXT, "final_norm": Norm(), "tied": True}
    return ModelSpec(**(arguments | {"blocks": blocks} | fields))


def rotated(base: float = 100.0, dim: int = 8, **scaling: object) -> Rotary:
    return Rotary(base=base, dim=dim, scaling=RotaryScaling(**scaling) if scaling else None)


GEMMA_NORM = Norm(unit_offset=True)
GEMMA_BLOCK = Block(
    attention=Attention(heads=4, kv_heads=1, head_dim=8, qk_norm=GEMMA_NORM, window=4, rotary=rotated(), scale=0.2),
    feed_forward=replace(GATED, activation="gelu_tanh"),
    attention_norm=GEMMA_NORM,
    attention_post_norm=GEMMA_NORM,
    feed_forward_norm=GEMMA_NORM,
    feed_forward_post_norm=GEMMA_NORM,
)
OLMO_BLOCK = Block(
    attention=Attention(heads=4, kv_heads=2, head_dim=8, qk_norm=Norm(), qk_norm_span="full", rotary=rotated()),
    feed_forward=GATED,
    attention_post_norm=Norm(),
    feed_forward_post_norm=Norm(),
)
GPT_BLOCK = Block(
    attention=Attention(heads=2, kv_heads=2, head_dim=8, bias=True, output_bias=True, qk_norm=LAYER_NORM),
    feed_forward=FeedForward(width=20, activation="gelu", gated=True, bias=True),
    attention_norm=LAYER_NORM,
    feed_forward_norm=Norm(kind="layer", eps=1e-5),
)
SPECS = {
    "toy": tutor(vocab=VOCAB, context=CONTEXT),
    "d2l": d2l_gpt(vocab=VOCAB, width=16, heads=2, layers=2, context=CONTEXT),
    "gpt": spec_of(GPT_BLOCK, learned_positions=True, final_norm=LAYER_NORM, tied=False),
    "gemma": spec_of(
        GEMMA_BLOCK,
        replace(GEMMA_BLOCK, attention=replace(GEMMA_BLOCK.attention, window=None, rotary=rotated(1e4))),
        final_norm=GEMMA_NORM,
        embedding_scale=4.0,
        logit_softcap=3.0,
    ),
    "olmo": spec_of(OLMO_BLOCK, tied=False),
    "relu, interleaved, partial": spec_of(
        replace(
            block(rotary=Rotary(base=100.0, dim=4, interleaved=True)),
            feed_forward=FeedForward(width=20, activation="relu", gated=False),
        )
    ),
    "scalings": spec_of(
        block(rotary=rotated(kind="linear", factor=4.0, original_context=64)),
        block(rotary=rotated(kind="llama3", factor=8.0, original_context=16)),
        block(rotary=rotated(kind="yarn", factor=4.0, original_context=128)),
        block(
            rotary=rotated(
                kind="yarn", factor=4.0, original_context=128, truncate=False, mscale=2.0, mscale_all_dim=0.5
            )
        ),
        block(rotary=rotated(kind="yarn", factor=4.0, original_context=128, attention_factor=0.7)),
    ),
}
specs = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


@pytest.fixture
def x64() -> Iterator[None]:
    """JAX in float64."""
    with jax.enable_x64(True):
        yield


def flat(params: Params) -> dict[str, Any]:
    """Leaves by the dotted path that leads to them."""
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    return {".".join(key.key for key in path): leaf for path, leaf in leaves}


def nested(leaves: dict[str, Any]) -> Params:
    """The tree whose paths are the dotted names."""
    tree: Params = {}
    for name, leaf in leaves.items():
        *path, last = name.split(".")
        branch = tree
        for key in path:
            branch = branch.setdefault(key, {})
        branch[last] = leaf
    return tree


def drawn(spec: ModelSpec, dtype: torch.dtype = torch.float64) -> tuple[Decoder, Params]:
    """The same weights in both frameworks, every one drawn, norms and biases too."""
    decoder, generator = Decoder(spec).to(dtype), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.normal_(0, 0.3, generator=generator)
    return decoder, nested({name: jnp.asarray(tensor.detach().numpy()) for name, tensor in decoder.named_parameters()})


def some_tokens(length: int = TOKENS) -> np.ndarray:
    return np.random.default_rng(0).integers(VOCAB, size=(2, length))


def reached(spec: ModelSpec, position: int) -> list[int]:
    """Positions whose logits change when the token at ``position`` does."""
    before, (_, params) = some_tokens(), drawn(spec)
    after = before.copy()
    after[:, position] = (after[:, position] + 1) % VOCAB
    change = jnp.abs(jitted(spec, params, after) - jitted(spec, params, before)).max((0, 2))
    return np.flatnonzero(change > 1e-12).tolist()


@pytest.mark.parametrize("spec", (RECIPES | SPECS).values(), ids=RECIPES | SPECS)
def test_the_tree_has_the_names_and_shapes_of_the_twin(spec: ModelSpec) -> None:
    """Dotted paths and shapes are those of the PyTorch decoder's parameters, a tied table once."""
    with torch.device("meta"):
        twin = Decoder(spec)
    tree = jax.eval_shape(partial(init, spec), jax.random.key(0))
    assert {name: tuple(tensor.shape) for name, tensor in twin.named_parameters()} == {
        name: leaf.shape for name, leaf in flat(tree).items()
    }


@specs
@pytest.mark.usefixtures("x64")
def test_logits_are_those_of_the_twin(spec: ModelSpec) -> None:
    """On the same float64 weights both frameworks give the same logits, within 1e-12 of the largest."""
    decoder, params = drawn(spec)
    with torch.no_grad():
        expected = decoder(torch.from_numpy(some_tokens())).numpy()
    actual = np.asarray(jitted(spec, params, some_tokens()))
    assert expected.dtype == actual.dtype
    assert np.abs(expected - actual).max() <= 1e-12 * np.abs(expected).max()


@pytest.mark.usefixtures("x64")
def test_a_token_changes_nothing_before_it() -> None:
    """Changing token t changes the logits from t on, and none before."""
    assert list(range(5, TOKENS)) == reached(SPECS["d2l"], 5)


@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.usefixtures("x64")
def test_a_window_counts_the_token_itself(window: int) -> None:
    """Through one layer with window W, token s reaches positions s to s + W - 1."""
    assert list(range(5, 5 + window)) == reached(spec_of(block(window=window, rotary=rotated())), 5)


def test_every_leaf_gets_a_finite_gradient() -> None:
    """The gradient of a loss is finite and not zero on every leaf."""
    spec, tokens = SPECS["gemma"], some_tokens()

    def loss(params: Params) -> jax.Array:
        scores = jax.nn.log_softmax(forward(spec, params, tokens))
        return -jnp.take_along_axis(scores, np.roll(tokens, -1, 1)[..., None], -1).mean()

    for name, gradient in flat(jax.jit(jax.grad(loss))(drawn(spec, torch.float32)[1])).items():
        assert jnp.isfinite(gradient).all(), name
        assert jnp.any(gradient != 0), name


def test_initial_weights_are_gpt2s() -> None:
    """Matrices and tables have deviation 0.02, residual projections 0.02 / sqrt(2 L), norms are identities."""
    wide = replace(
        GPT_BLOCK,
        attention=replace(GPT_BLOCK.attention, heads=8, kv_heads=8, head_dim=32),
        feed_forward=replace(GPT_BLOCK.feed_forward, width=512),
        feed_forward_norm=GEMMA_NORM,
    )
    spec = spec_of(wide, wide, vocab=512, width=256, context=256, learned_positions=True, tied=False)
    matrices = {}
    for name, leaf in flat(init(spec, jax.random.key(0))).items():
        if leaf.ndim == 2:
            residual = name.endswith(("attention.output.weight", "feed_forward.down.weight"))
            # 65,536 draws or more: the deviation's own standard error is 0.28 %, and 2 % is seven of these.
            assert (0.02 / math.sqrt(4) if residual else 0.02) == pytest.approx(float(leaf.std()), rel=0.02), name
            matrices[name] = leaf[:2, :2].tobytes()
        else:
            identity = name.endswith("weight") and not name.endswith("feed_forward_norm.weight")
            assert jnp.all(leaf == float(identity)), name
    assert len(matrices) == len(set(matrices.values())), "two tensors were drawn with one key"


@pytest.mark.parametrize("name", ["gemma", "scalings"])
def test_bfloat16_stays_bfloat16(name: str) -> None:
    """Tables and statistics computed in float32 do not leak into the dtype of the logits."""
    spec = SPECS[name]
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), drawn(spec, torch.float32)[1])
    assert jnp.bfloat16 == jax.eval_shape(partial(forward, spec), params, some_tokens()).dtype


def test_a_sequence_longer_than_the_context_is_refused() -> None:
    """A sequence as long as the context runs; one token more is an error in one line."""
    spec = tutor(vocab=VOCAB)
    params = init(spec, jax.random.key(0))
    assert (2, 6, VOCAB) == jitted(spec, params, some_tokens(6)).shape
    with pytest.raises(ValueError, match=r"^a sequence of 7 tokens is longer than the context of 6$"):
        forward(spec, params, some_tokens(7))


LATENT = LatentAttention(heads=2, kv_rank=8, nope_head_dim=8, rope_head_dim=4, value_head_dim=8, rotary=rotated(dim=4))


@pytest.mark.parametrize(
    ("unbuilt", "named"),
    [
        (replace(block(), attention=LATENT), "LatentAttention"),
        (block(sinks=True), "attention sinks"),
        (block(softcap=50.0), "attention softcap"),
        (replace(block(), feed_forward=Experts(experts=4, active=2, expert=GATED)), "Experts"),
        (replace(block(), feed_forward=replace(GATED, clamp=7.0)), "clamp"),
        (replace(block(), feed_forward=replace(GATED, gain=1.702)), "gain"),
    ],
    ids=["latent", "sinks", "softcap", "experts", "clamp", "gain"],
)
def test_a_component_that_is_not_built_is_refused_by_name(unbuilt: Block, named: str) -> None:
    """Neither weights nor logits are made for what the decoder cannot compute, and the error says what it is."""
    spec, whole = spec_of(block(), unbuilt), spec_of(block(), block())
    with pytest.raises(ValueError, match=rf"^this decoder does not build .*{named}"):
        init(spec, jax.random.key(0))
    with pytest.raises(ValueError, match=rf"^this decoder does not build .*{named}"):
        forward(spec, init(whole, jax.random.key(0)), some_tokens())
