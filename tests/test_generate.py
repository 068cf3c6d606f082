"""Generation with and without a key/value cache: the same tokens and logits, and the bytes that are predicted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accounting import cache
from model import jax_decoder, jax_generate, torch_generate
from model.recipes import tutor
from model.torch_decoder import Decoder
from tests import families, strategies

FEW = settings(max_examples=settings().max_examples // 3)  # each one runs a decoder token by token
BATCH = 2
#: Of the largest logit, in float64: as many roundings deep with a cache as without.
ROUNDING = 1e-12
#: Full attention, grouped and windowed, and latent with experts.
SPECS = {
    "tutor": tutor(vocab=11, context=30),
    **{family: families.SPECS[family] for family in ("gemma3_text", "deepseek_v3")},
}


def decoder_of(spec, kind):
    torch.manual_seed(0)
    decoder = Decoder(spec, attention=kind).to(torch.float64)
    for tensor in decoder.state_dict().values():
        if tensor.is_floating_point():
            torch.nn.init.normal_(tensor, std=0.5)
    return decoder


def bytes_of(kept):
    return sum(part.untyped_storage().nbytes() for layer in kept for part in layer.parts)


@pytest.mark.parametrize("kind", ["eager", "fused"])
@FEW
@given(spec=strategies.specs(*strategies.FAMILIES), expanded=st.booleans(), data=st.data())
def test_torch_generates_the_same_with_a_cache(kind, spec, expanded, data):
    """Whatever the architecture, the prompt and the point where a window starts to roll, and to the byte."""
    prompt = data.draw(st.integers(1, spec.context))
    new = data.draw(st.integers(1, min(12, spec.context - prompt + 1)))
    decoder = decoder_of(spec, kind)
    start = torch.randint(spec.vocab, (BATCH, prompt))
    tokens, kept = torch_generate.generate(decoder, start, new, expanded=expanded)
    again, nothing = torch_generate.generate(decoder, start, new, cached=False)
    assert torch.equal(tokens, again) and tokens.shape == (BATCH, prompt + new) and nothing == []
    assert torch.equal(tokens[:, :prompt], start)
    predicted = cache.total(spec, prompt + new - 1, batch=BATCH, dtype="float64", expanded=expanded)
    assert bytes_of(kept) == predicted


@pytest.mark.parametrize("family", strategies.FAMILIES)
@FEW
@given(kind=st.sampled_from(["eager", "fused"]), expanded=st.booleans(), data=st.data())
def test_what_is_kept_gives_the_logits_of_the_whole(family, kind, expanded, data):
    """In pieces of any lengths, each after what is kept of those before; and each piece leaves the predicted bytes."""
    spec = data.draw(strategies.specs(family))
    lengths = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    while sum(lengths) > spec.context:
        lengths.pop()
    if not lengths:
        lengths = [1]
    decoder, kept, met = decoder_of(spec, kind), None, 0
    tokens = torch.randint(spec.vocab, (BATCH, sum(lengths)))
    with torch.no_grad():
        expected, kept, parts = decoder(tokens), decoder.keep(expanded=expanded), []
        for piece in tokens.split(lengths, 1):
            parts.append(decoder(piece, kept))
            met += piece.shape[1]
            assert bytes_of(kept) == cache.total(spec, met, batch=BATCH, dtype="float64", expanded=expanded)
    assert (torch.cat(parts, 1) - expected).abs().max() <= ROUNDING * expected.abs().max()


def tree_of(spec):
    """Weights for JAX, in float64, every one drawn."""
    random = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: jax_decoder.init(spec, jax.random.key(0)))
    return jax.tree.map(lambda leaf: jnp.asarray(random.normal(0, 0.5, leaf.shape)), shapes)


@pytest.mark.parametrize(("name", "expanded"), [*((name, False) for name in SPECS), ("deepseek_v3", True)])
def test_jax_generates_the_same_with_a_cache(name, expanded):
    """The same tokens across the point where a window starts to roll, and to the byte."""
    spec, prompt, new = SPECS[name], 4, 9
    with jax.enable_x64(True):
        params = tree_of(spec)
        start = jnp.asarray(np.random.default_rng(0).integers(spec.vocab, size=(BATCH, prompt)))
        tokens, kept = jax_generate.generate(spec, params, start, new, expanded=expanded)
        again, nothing = jax_generate.generate(spec, params, start, new, cached=False)
    assert (tokens == again).all() and tokens.shape == (BATCH, prompt + new) and nothing == []
    held = sum(array.nbytes for layer in kept for array in layer)
    assert held == cache.total(spec, prompt + new - 1, batch=BATCH, dtype="float64", expanded=expanded)


@pytest.mark.parametrize(
    ("family", "expanded"), [*((family, False) for family in strategies.FAMILIES), ("deepseek_v3", True)]
)
def test_what_jax_keeps_gives_the_logits_of_the_whole(family, expanded):
    """After a prompt that is longer than any window, then a piece, then token by token."""
    spec, ends = families.SPECS[family], (7, 9, 10, 11)
    assert all(block.attention.window is None or block.attention.window < ends[0] for block in spec.blocks)
    step = jax.jit(jax_generate.extend, static_argnums=0, static_argnames="expanded", compiler_options=families.QUICK)
    whole = jax.jit(jax_decoder.forward, static_argnums=0, compiler_options=families.QUICK)
    with jax.enable_x64(True):
        params = tree_of(spec)
        tokens = np.random.default_rng(0).integers(spec.vocab, size=(BATCH, ends[-1]))
        expected = whole(spec, params, tokens)
        kept = jax_generate.allocate(spec, BATCH, ends[-1], np.float64, expanded=expanded)
        start = 0
        for end in ends:
            logits, kept = step(spec, params, kept, tokens[:, start:end], start, expanded=expanded)
            assert abs(logits - expected[:, end - 1]).max() <= ROUNDING * abs(expected).max()
            start = end


@pytest.mark.parametrize(("start", "more", "room"), [(0, 6, 5), (4, 2, 5), (5, 2, 6)])
def test_jax_refuses_more_than_there_is_room_for(start, more, room):
    """More tokens than were allocated, or than the context of six, where it is known how many there are."""
    spec = tutor()
    with pytest.raises(ValueError, match=f"^expected at most {room} tokens, got {start + more}$"):
        jax_generate.extend(
            spec, {}, jax_generate.allocate(spec, 1, room, np.float32), np.zeros((1, more), np.int64), start
        )


@pytest.mark.parametrize(("prompt", "new"), [(2, 0), (2, 8), (0, 3)])
def test_no_token_and_more_than_the_context_are_refused(prompt, new):
    """Six positions hold a prompt of two and five more: the last token is looked up by no layer."""
    spec = tutor()
    start = np.zeros((1, prompt), np.int64)
    for generate in (
        lambda: torch_generate.generate(Decoder(spec), torch.from_numpy(start), new),
        lambda: jax_generate.generate(spec, {}, jnp.asarray(start), new),
    ):
        with pytest.raises(ValueError, match=f"^expected a token, and 1 to {7 - prompt} after {prompt}, got {new}$"):
            generate()
