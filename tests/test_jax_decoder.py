"""The JAX decoder holds the tensors of its PyTorch twin and computes the same logits."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from jax.scipy.special import logsumexp

from accounting import census, routing
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
    Router,
)
from model import weights
from model.jax_decoder import forward, init, watch
from model.jax_experts import feed_experts, route
from model.jax_layers import Params, feed
from model.recipes import RECIPES, d2l_gpt, tutor
from model.torch_decoder import Decoder
from tests import strategies
from tests.families import QUICK

VOCAB, CONTEXT, TOKENS = 13, 16, 12
LAYER_NORM = Norm(kind="layer", eps=1e-5, bias=True)
GATED = FeedForward(width=20, activation="silu", gated=True)
jitted = jax.jit(forward, static_argnums=0, compiler_options=QUICK)


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
#: Sigmoids of the best of twelve, in groups and not normalised, as no family has them.
BIASED = Router(score="sigmoid", selection_bias=True)
MIXTURE = Experts(
    experts=12,
    active=3,
    expert=replace(GATED, width=6, bias=True, clamp=0.3, gain=1.702, up_offset=1.0),
    router=Router(
        score="sigmoid",
        order="top_k_first",
        normalize=False,
        scale=2.5,
        bias=True,
        selection_bias=True,
        groups=3,
        top_groups=2,
    ),
    shared=FeedForward(width=5, activation="relu", gated=False, bias=True),
)
LATENT = LatentAttention(
    heads=2,
    kv_rank=6,
    nope_head_dim=8,
    rope_head_dim=4,
    value_head_dim=5,
    rotary=Rotary(base=100.0, dim=4, interleaved=True),
    bias=True,
    norm=LAYER_NORM,
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
    "sinks, softcap, latent, experts": spec_of(
        replace(block(sinks=True, softcap=1.5, window=4, rotary=rotated()), feed_forward=MIXTURE),
        replace(block(), attention=LATENT, feed_forward=Experts(experts=3, active=2, expert=GATED)),
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


def drawn(spec: ModelSpec, dtype: torch.dtype = torch.float64) -> tuple[Decoder, Params]:
    """The same weights in both frameworks, every one drawn, norms and biases too."""
    decoder, generator = Decoder(spec).to(dtype), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in decoder.state_dict().values():
            tensor.normal_(0, 0.3, generator=generator)
    return decoder, jax.tree.map(jnp.asarray, weights.to_tree(weights.from_module(decoder)))


def shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Of the leaves of a fresh tree."""
    return {name: leaf.shape for name, leaf in flat(jax.eval_shape(partial(init, spec), jax.random.key(0))).items()}


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
    """Dotted paths and shapes are those of the PyTorch decoder's parameters and buffers, a tied table once."""
    with torch.device("meta"):
        twin = Decoder(spec)
    assert {name: tuple(tensor.shape) for name, tensor in (*twin.named_parameters(), *twin.named_buffers())} == shapes(
        spec
    )


@given(spec=strategies.specs())
def test_the_tree_has_the_names_and_shapes_of_the_census(spec: ModelSpec) -> None:
    """Every weight and every buffer is a leaf, whatever the family."""
    taken = census.take(spec)
    entries = (copy for entry in (*taken.weights, *taken.buffers) for copy in entry.expand())
    assert {entry.name: entry.shape for entry in entries} == shapes(spec)


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


def mean_cross_entropy(spec: ModelSpec, params: Params, tokens: np.ndarray) -> jax.Array:
    """Of each next token, the first one after the last."""
    logits = forward(spec, params, tokens)
    chosen = jnp.take_along_axis(logits, jnp.roll(tokens, -1, 1)[..., None], -1)[..., 0]
    return (logsumexp(logits, -1) - chosen).mean()


@pytest.mark.parametrize("name", ["gemma", "sinks, softcap, latent, experts"])
@pytest.mark.usefixtures("x64")
def test_gradients_are_those_of_the_twin(name: str) -> None:
    """Every leaf gets the gradient of its twin, and not zero; a router's bias in the choice gets none."""
    decoder, params = drawn(SPECS[name])
    tokens = torch.from_numpy(some_tokens())
    torch.nn.functional.cross_entropy(decoder(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten()).backward()
    gradients = jax.jit(jax.grad(mean_cross_entropy, argnums=1), static_argnums=(0,), compiler_options=QUICK)
    actual = flat(gradients(SPECS[name], params, some_tokens()))
    expected = {name: parameter.grad.numpy() for name, parameter in decoder.named_parameters()}
    largest = max(np.abs(gradient).max() for gradient in expected.values())
    for path, gradient in actual.items():
        if path.endswith(".selection_bias"):
            assert not gradient.any()
        else:
            assert np.abs(gradient - expected[path]).max() <= 1e-12 * largest, path
            assert gradient.any() or ".experts." in path, path  # one that no token chose has none


def test_initial_weights_are_gpt2s() -> None:
    """Matrices and tables have deviation 0.02, residual projections 0.02 / sqrt(2 L), norms are identities."""
    wide = replace(
        GPT_BLOCK,
        attention=replace(GPT_BLOCK.attention, heads=8, kv_heads=8, head_dim=32),
        feed_forward=replace(GPT_BLOCK.feed_forward, width=512),
        feed_forward_norm=GEMMA_NORM,
    )
    expert = replace(GATED, width=256)
    latent = replace(LATENT, kv_rank=256, query_rank=256, nope_head_dim=128, value_head_dim=256)
    blocks = (
        replace(wide, attention=replace(wide.attention, sinks=True)),
        replace(wide, feed_forward=Experts(experts=2, active=1, expert=expert, router=BIASED, shared=expert)),
        replace(wide, attention=latent),
    )
    spec = spec_of(*blocks, vocab=512, width=256, context=256, learned_positions=True, tied=False)
    matrices = {}
    for name, leaf in flat(init(spec, jax.random.key(0))).items():
        if leaf.ndim == 2:
            residual = name.endswith((".output.weight", ".down.weight"))
            expected = 0.02 / math.sqrt(6) if residual else 0.02
            # The deviation's own standard error, of a normal variable, is 1 / sqrt(2 n): seven of these.
            assert expected == pytest.approx(float(leaf.std()), rel=7 / math.sqrt(2 * leaf.size)), name
            matrices[name] = leaf[:2, :2].tobytes()
        else:
            identity = name.endswith("weight") and not name.endswith("feed_forward_norm.weight")
            assert jnp.all(leaf == float(identity)), name
    assert len(matrices) == len(set(matrices.values())), "two tensors were drawn with one key"


@pytest.mark.parametrize("name", ["gemma", "scalings", "sinks, softcap, latent, experts"])
def test_bfloat16_stays_bfloat16(name: str) -> None:
    """Tables, statistics and routers computed in float32 do not leak into the dtype of the logits."""
    spec = SPECS[name]
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), drawn(spec, torch.float32)[1])
    logits, routings = jax.eval_shape(partial(watch, spec), params, some_tokens())
    assert jnp.bfloat16 == logits.dtype
    assert all(jnp.float32 == leaf.dtype for routing in routings for leaf in (routing.logits, routing.weights))


@pytest.mark.parametrize("active", [1, 2, 4])
@pytest.mark.usefixtures("x64")
def test_routers_are_the_references(active: int) -> None:
    """The same experts in the same order with the same weights, whatever the dials.

    A weight is a few roundings of 1e-16 from its logit.
    """
    random = np.random.default_rng(0)
    x, matrix, bias = (jnp.asarray(random.normal(size=size)) for size in ((9, 16), (12, 16), 12))
    for score, order, normalize, biased, groups in product(
        ("softmax", "sigmoid"), ("score_first", "top_k_first"), (True, False), (True, False), (1, 3)
    ):
        spec = Router(
            score=score,
            order=order,
            normalize=normalize,
            scale=1.5,
            selection_bias=biased,
            groups=groups,
            top_groups=(groups + 1) // 2,
        )
        actual = route(spec, active, {"weight": matrix, **({"selection_bias": bias} if biased else {})}, x)
        expected = routing.route(spec, actual.logits, active, bias if biased else None)
        assert (expected.indices == actual.indices).all(), spec
        assert np.abs(expected.weights - actual.weights).max() <= 1e-14 * expected.weights.max(), spec


def test_routers_are_watched() -> None:
    """Layer by layer, where there is one, with gradients."""
    sparse = replace(block(), feed_forward=Experts(experts=4, active=1, expert=GATED))
    spec, tokens = spec_of(sparse, block(), sparse), some_tokens()
    params = drawn(spec, torch.float32)[1]

    def watched(params: Params) -> tuple[jax.Array, tuple[jax.Array, list[Any]]]:
        logits, routings = watch(spec, params, tokens)
        return routings[1].logits.sum(), (logits, routings)

    step = jax.jit(jax.grad(watched, has_aux=True), compiler_options=QUICK)
    gradients, (logits, routings) = step(params)
    assert [((24, 4), (24, 1), (24, 1))] * 2 == [tuple(part.shape for part in routing) for routing in routings]
    assert np.array_equal(logits, jitted(spec, params, tokens))
    assert all(gradients["blocks"][layer]["feed_forward"]["router"]["weight"].any() for layer in "02")


@pytest.mark.usefixtures("x64")
def test_no_token_is_dropped() -> None:
    """Where a bias sends all tokens to one expert, each is weighed by its own score, which the bias is no part of."""
    layer = Experts(experts=4, active=1, expert=GATED, router=replace(BIASED, normalize=False))
    params = drawn(spec_of(replace(block(), feed_forward=layer)))[1]["blocks"]["0"]["feed_forward"]
    params["router"]["selection_bias"] = jnp.array([0.0, 0, 2, 0])  # a sigmoid is below 1
    x = np.random.default_rng(0).normal(size=(2, TOKENS, 16))
    score = 1 / (1 + np.exp(-x @ params["router"]["weight"][2]))
    expected = score[..., None] * feed(GATED, params["experts"]["2"], x)
    assert np.abs(expected - feed_experts(layer, params, jnp.asarray(x))[0]).max() <= 1e-12 * np.abs(expected).max()


def test_a_sequence_longer_than_the_context_is_refused() -> None:
    """A sequence as long as the context runs; one token more is an error in one line."""
    spec = tutor(vocab=VOCAB)
    params = init(spec, jax.random.key(0))
    assert (2, 6, VOCAB) == jitted(spec, params, some_tokens(6)).shape
    with pytest.raises(ValueError, match=r"^a sequence of 7 tokens is longer than the context of 6$"):
        forward(spec, params, some_tokens(7))
