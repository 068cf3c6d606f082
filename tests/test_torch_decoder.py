"""The PyTorch decoder computes what its spec says, and what Hugging Face's own modules compute."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from accounting import routing
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
from model.recipes import RECIPES, tutor
from model.torch_decoder import Decoder
from model.torch_experts import ExpertsLayer, RouterLayer, watch
from model.torch_layers import FeedForwardLayer

VOCAB, CONTEXT = 13, 16
GPT2 = RECIPES["d2l-gpt2"]

norms = st.one_of(
    st.builds(Norm, kind=st.just("rms"), unit_offset=st.booleans()),
    st.builds(Norm, kind=st.just("layer"), bias=st.booleans(), eps=st.just(1e-5)),
)
scalings = st.one_of(
    st.none(),
    st.just(RotaryScaling(kind="linear", factor=4.0, original_context=64)),
    st.just(RotaryScaling(kind="llama3", factor=8.0, original_context=8)),
    st.just(RotaryScaling(kind="yarn", factor=4.0, original_context=64)),
    st.just(RotaryScaling(kind="yarn", factor=4.0, original_context=64, mscale_all_dim=0.7)),
)


def rotaries(*dims: int) -> st.SearchStrategy[Rotary]:
    return st.builds(
        Rotary,
        base=st.sampled_from([100.0, 10_000.0]),
        dim=st.sampled_from(dims),
        interleaved=st.booleans(),
        scaling=scalings,
    )


@st.composite
def attentions(draw: st.DrawFn) -> Attention:
    """Grouped heads with any dial, windowed or not."""
    kv_heads, group, head_dim = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 3])), 8
    return Attention(
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=head_dim,
        bias=draw(st.booleans()),
        output_bias=draw(st.booleans()),
        qk_norm=draw(st.none() | norms),
        qk_norm_span=draw(st.sampled_from(["head", "full"])),
        window=draw(st.none() | st.integers(1, CONTEXT)),
        sinks=draw(st.booleans()),
        rotary=draw(st.none() | rotaries(2, 4, head_dim)),
        scale=draw(st.sampled_from([None, 0.1])),
        softcap=draw(st.sampled_from([None, 1.5])),
    )


latents = st.builds(
    LatentAttention,
    heads=st.integers(1, 3),
    kv_rank=st.sampled_from([3, 8]),
    nope_head_dim=st.sampled_from([1, 8]),
    rope_head_dim=st.just(4),
    value_head_dim=st.sampled_from([5, 12]),
    rotary=rotaries(4),
    query_rank=st.sampled_from([None, 6]),
    bias=st.booleans(),
    norm=norms,
)
plain_feeds = st.builds(
    FeedForward,
    width=st.sampled_from([8, 20]),
    activation=st.sampled_from(["gelu", "gelu_tanh", "relu", "silu"]),
    gated=st.booleans(),
    bias=st.booleans(),
)
clamped_feeds = st.builds(
    FeedForward,
    width=st.sampled_from([5, 8]),
    activation=st.just("silu"),
    gated=st.just(True),
    bias=st.booleans(),
    clamp=st.sampled_from([None, 0.3]),
    gain=st.sampled_from([1.0, 1.702]),
    up_offset=st.sampled_from([0.0, 1.0]),
)
feeds = plain_feeds | clamped_feeds


@st.composite
def mixtures(draw: st.DrawFn) -> Experts:
    """Experts with any router, in groups or not."""
    groups = draw(st.integers(1, 3))
    top_groups, size = draw(st.integers(1, groups)), draw(st.integers(1, 3))
    router = st.builds(
        Router,
        score=st.sampled_from(["softmax", "sigmoid"]),
        order=st.sampled_from(["score_first", "top_k_first"]),
        normalize=st.booleans(),
        scale=st.sampled_from([1.0, 2.5]),
        bias=st.booleans(),
        selection_bias=st.booleans(),
        groups=st.just(groups),
        top_groups=st.just(top_groups),
    )
    return Experts(
        experts=groups * size,
        active=draw(st.integers(1, top_groups * size)),
        expert=draw(feeds),
        router=draw(router),
        shared=draw(st.none() | feeds),
    )


@st.composite
def specs(draw: st.DrawFn, *, sparse: bool = True) -> ModelSpec:
    """A small decoder of any architecture, or of any without experts."""
    around = ("attention_norm", "attention_post_norm", "feed_forward_norm", "feed_forward_post_norm")
    blocks = st.builds(
        Block,
        attention=attentions() | latents,
        feed_forward=feeds | mixtures() if sparse else feeds,
        **{name: st.none() | norms for name in around},
    )
    return ModelSpec(
        vocab=VOCAB,
        width=16,
        context=CONTEXT,
        blocks=tuple(draw(st.lists(blocks, min_size=1, max_size=2))),
        final_norm=draw(norms),
        tied=draw(st.booleans()),
        learned_positions=draw(st.booleans()),
        embedding_scale=draw(st.sampled_from([None, 4.0])),
        logit_softcap=draw(st.sampled_from([None, 3.0])),
    )


seeds = st.integers(0, 2**31)
kinds = pytest.mark.parametrize("kind", ["eager", "fused"])


@torch.no_grad()
def randomise(module: nn.Module, seed: int = 0, std: float = 0.3) -> None:
    """Draw every number that is kept, so that norms and biases have a say in what is compared."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in module.state_dict().values():
        if tensor.is_floating_point():
            tensor.normal_(0, std, generator=generator)


def built(spec: ModelSpec, kind: str = "fused", seed: int = 0, dtype: torch.dtype = torch.float64) -> Decoder:
    """A decoder with every number drawn."""
    decoder = Decoder(spec, attention=kind).to(dtype)
    randomise(decoder, seed)
    return decoder


def some_tokens(seed: int = 0, length: int = 12, batch: int = 2, vocab: int = VOCAB) -> Tensor:
    return torch.randint(vocab, (batch, length), generator=torch.Generator().manual_seed(seed))


def assert_close(expected: Tensor, actual: Tensor, relative: float) -> None:
    """Equal within ``relative`` of the largest expected number."""
    __tracebackhide__ = True
    error = (expected - actual).abs().max().item()
    largest = expected.abs().max().item()
    assert error <= relative * largest, (
        f"off by {error:g} where the largest is {largest:g} (allowed {relative:g} of it)"
    )


def plain_block(**attention: object) -> Block:
    """A pre-norm block of width 16 with the given attention."""
    arguments: dict[str, object] = {"heads": 2, "kv_heads": 2, "head_dim": 8} | attention
    return Block(
        attention=Attention(**arguments),
        feed_forward=FeedForward(width=20, activation="silu", gated=True),
        attention_norm=Norm(),
        feed_forward_norm=Norm(),
    )


def plain(*blocks: Block, **fields: object) -> ModelSpec:
    arguments: dict[str, object] = {"vocab": VOCAB, "width": 16, "context": CONTEXT, "final_norm": Norm(), "tied": True}
    return ModelSpec(**(arguments | {"blocks": blocks or (plain_block(),)} | fields))


def test_every_parameter_has_its_canonical_name_and_shape() -> None:
    """Names and shapes are the ones that the census, the naming tables and the JAX twin rely on."""
    layer, rms = Norm(kind="layer", bias=True), Norm()
    block = Block(
        attention=Attention(heads=6, kv_heads=2, head_dim=4, bias=True, output_bias=True, qk_norm=layer),
        feed_forward=FeedForward(width=20, activation="gelu", gated=True, bias=True),
        attention_norm=layer,
        attention_post_norm=rms,
        feed_forward_norm=layer,
        feed_forward_post_norm=rms,
    )
    bare = Block(
        attention=Attention(heads=6, kv_heads=2, head_dim=4, qk_norm=rms, qk_norm_span="full"),
        feed_forward=FeedForward(width=20, activation="gelu", gated=False),
    )
    spec = plain(block, bare, final_norm=layer, tied=False, learned_positions=True)
    expected = {
        "embedding.weight": (13, 16),
        "position.weight": (16, 16),
        "blocks.0.attention_norm.weight": (16,),
        "blocks.0.attention_norm.bias": (16,),
        "blocks.0.attention.query.weight": (24, 16),
        "blocks.0.attention.query.bias": (24,),
        "blocks.0.attention.key.weight": (8, 16),
        "blocks.0.attention.key.bias": (8,),
        "blocks.0.attention.value.weight": (8, 16),
        "blocks.0.attention.value.bias": (8,),
        "blocks.0.attention.output.weight": (16, 24),
        "blocks.0.attention.output.bias": (16,),
        "blocks.0.attention.query_norm.weight": (4,),
        "blocks.0.attention.query_norm.bias": (4,),
        "blocks.0.attention.key_norm.weight": (4,),
        "blocks.0.attention.key_norm.bias": (4,),
        "blocks.0.attention_post_norm.weight": (16,),
        "blocks.0.feed_forward_norm.weight": (16,),
        "blocks.0.feed_forward_norm.bias": (16,),
        "blocks.0.feed_forward.gate.weight": (20, 16),
        "blocks.0.feed_forward.gate.bias": (20,),
        "blocks.0.feed_forward.up.weight": (20, 16),
        "blocks.0.feed_forward.up.bias": (20,),
        "blocks.0.feed_forward.down.weight": (16, 20),
        "blocks.0.feed_forward.down.bias": (16,),
        "blocks.0.feed_forward_post_norm.weight": (16,),
        "blocks.1.attention.query.weight": (24, 16),
        "blocks.1.attention.key.weight": (8, 16),
        "blocks.1.attention.value.weight": (8, 16),
        "blocks.1.attention.output.weight": (16, 24),
        "blocks.1.attention.query_norm.weight": (24,),
        "blocks.1.attention.key_norm.weight": (8,),
        "blocks.1.feed_forward.up.weight": (20, 16),
        "blocks.1.feed_forward.down.weight": (16, 20),
        "norm.weight": (16,),
        "norm.bias": (16,),
        "head.weight": (13, 16),
    }
    assert expected == {name: tuple(tensor.shape) for name, tensor in Decoder(spec).state_dict().items()}


@kinds
def test_a_tied_head_is_the_token_table(kind: str) -> None:
    """Tied, the head's weight and the token table are one Parameter object; untied, they are two."""
    tied, untied = Decoder(tutor(), attention=kind), Decoder(tutor(tied=False), attention=kind)
    assert tied.head.weight is tied.embedding.weight
    assert untied.head.weight is not untied.embedding.weight


@pytest.mark.parametrize(("kind", "masks"), [("eager", 3 * 6 * 6), ("fused", 0)])
def test_state_dict_of_the_toy_lists_the_table_twice_and_every_mask(kind: str, masks: int) -> None:
    """The toy's state holds its 2,752 parameters, the tied head again (72), and in eager mode 108 mask entries."""
    state = Decoder(tutor(), attention=kind).state_dict()
    assert 2_752 + 72 + masks == sum(tensor.numel() for tensor in state.values())
    assert masks == sum(tensor.numel() for name, tensor in state.items() if name.endswith(".attention.mask"))


def test_eager_mask_shows_a_token_its_window() -> None:
    """Row i of the mask is true on the last W positions up to i, the token itself included."""
    masks = [
        block.attention.mask for block in Decoder(plain(plain_block(window=3), plain_block()), attention="eager").blocks
    ]
    expected = [[[0 <= i - j < window for j in range(CONTEXT)] for i in range(CONTEXT)] for window in (3, CONTEXT)]
    assert expected == [mask.tolist() for mask in masks]
    assert masks[0].dtype is torch.bool


@kinds
@given(spec=specs(), position=st.integers(0, 11), seed=seeds)
@settings(deadline=None)
def test_a_token_changes_nothing_before_it(kind: str, spec: ModelSpec, position: int, seed: int) -> None:
    """Changing token t leaves every logit before t as it was, and changes the logits at t."""
    decoder, before = built(spec, kind, seed), some_tokens(seed)
    after = before.clone()
    after[:, position] = (after[:, position] + 1) % VOCAB
    with torch.no_grad():
        change = (decoder(after) - decoder(before)).abs().amax((0, 2))
    assert bool((change[:position] <= 1e-12).all())
    assert change[position] > 1e-6


@kinds
@given(window=st.integers(1, 12), position=st.integers(0, 11), seed=seeds, rotary=st.booleans())
@settings(deadline=None)
def test_a_window_counts_the_token_itself(kind: str, window: int, position: int, seed: int, rotary: bool) -> None:
    """Through one layer with window W, token s reaches the logits of positions s to s + W - 1 and no others."""
    block = plain_block(window=window, rotary=Rotary(base=100.0, dim=8) if rotary else None)
    decoder, before = built(plain(block), kind, seed), some_tokens(seed)
    after = before.clone()
    after[:, position] = (after[:, position] + 1) % VOCAB
    with torch.no_grad():
        change = (decoder(after) - decoder(before)).abs().amax((0, 2))
    expected = list(range(position, min(position + window, 12)))
    assert expected == (change > 1e-12).nonzero().flatten().tolist()


# float32 within 1e-5 and float64 within 1e-12 of the largest logit: roughly a hundred units of rounding,
# for sums of some dozens of terms through two layers. In float32 a router's choice would hang on it.
@pytest.mark.parametrize(("dtype", "relative"), [(torch.float32, 1e-5), (torch.float64, 1e-12)], ids=str)
@given(data=st.data(), seed=seeds)
@settings(deadline=None)
def test_eager_and_fused_attention_agree(dtype: torch.dtype, relative: float, data: st.DataObject, seed: int) -> None:
    """The attention that is written out and PyTorch's fused kernel give the same logits."""
    spec = data.draw(specs(sparse=dtype is torch.float64))
    eager = built(spec, "eager", seed, dtype)
    fused = Decoder(spec, attention="fused").to(dtype)
    fused.load_state_dict({name: tensor for name, tensor in eager.state_dict().items() if not name.endswith("mask")})
    with torch.no_grad():
        assert_close(eager(some_tokens(seed)), fused(some_tokens(seed)), relative)


@kinds
@given(spec=specs(), seed=seeds)
@settings(deadline=None)
def test_every_parameter_gets_a_finite_gradient(kind: str, spec: ModelSpec, seed: int) -> None:
    """After a backward pass each parameter has a gradient, and it is finite."""
    decoder = built(spec, kind, seed)
    tokens = some_tokens(seed)
    nn.functional.cross_entropy(decoder(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten()).backward()
    for name, parameter in decoder.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


class DevicesOfResults(TorchDispatchMode):
    """Records the device type of every tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        leaves = torch.utils._pytree.tree_leaves(result)
        self.seen.update(leaf.device.type for leaf in leaves if isinstance(leaf, Tensor))
        return result


GEMMA_LIKE = plain(
    plain_block(
        heads=32, kv_heads=16, head_dim=128, qk_norm=Norm(), window=1024, rotary=Rotary(base=10_000.0, dim=128)
    ),
    plain_block(
        heads=32,
        kv_heads=16,
        head_dim=128,
        rotary=Rotary(base=1e6, dim=128, scaling=RotaryScaling(kind="yarn", factor=4.0, original_context=32_768)),
    ),
    vocab=262_208,
    width=5_376,
    context=131_072,
)


@kinds
@pytest.mark.parametrize("spec", [GPT2, GEMMA_LIKE], ids=["gpt2", "gemma-like"])
def test_meta_construction_and_forward_allocate_nothing(kind: str, spec: ModelSpec) -> None:
    """Under the meta device every tensor that building and running the decoder makes is on meta."""
    devices = DevicesOfResults()
    with devices, torch.device("meta"):
        decoder = Decoder(spec, attention=kind)
        logits = decoder(torch.zeros(1, 1024, dtype=torch.int64))
    assert (1, 1024, spec.vocab) == tuple(logits.shape)
    assert {"meta"} == devices.seen


@kinds
def test_a_decoder_made_on_meta_runs_after_to_empty(kind: str) -> None:
    """to_empty, initialise and a loaded state give the logits, the buffers and the tied head of the original."""
    rotary = Rotary(base=100.0, dim=8)
    spec = plain(plain_block(window=3, rotary=rotary), replace(SPARSE, attention=plain_block(rotary=rotary).attention))
    original = built(spec, kind, dtype=torch.float32)
    with torch.device("meta"):
        decoder = Decoder(spec, attention=kind)
    decoder.to_empty(device="cpu")
    decoder.initialise()
    assert decoder.head.weight is decoder.embedding.weight
    buffers = {name: buffer.tolist() for name, buffer in decoder.named_buffers()}
    assert [0.0] * 4 == buffers.pop("blocks.1.feed_forward.router.selection_bias")
    assert buffers == {name: mask.tolist() for name, mask in original.named_buffers() if name.endswith("mask")}
    decoder.load_state_dict(original.state_dict())
    assert torch.equal(original(some_tokens()), decoder(some_tokens()))


def test_initial_weights_are_gpt2s() -> None:
    """Matrices and tables have deviation 0.02, residual projections 0.02 / sqrt(2 L), norms are identities."""
    offset = replace(
        plain_block(), attention_norm=Norm(unit_offset=True), feed_forward_norm=Norm(kind="layer", bias=True)
    )
    wide = replace(
        offset,
        attention=replace(offset.attention, heads=8, kv_heads=8, head_dim=32, bias=True, output_bias=True),
        feed_forward=replace(offset.feed_forward, width=512, bias=True),
    )
    torch.manual_seed(0)
    expert = FeedForward(width=256, activation="silu", gated=True)
    sparse = replace(wide, feed_forward=Experts(experts=2, active=1, expert=expert, shared=expert))
    blocks = wide, wide, sparse, replace(wide, attention=replace(wide.attention, sinks=True))
    decoder = Decoder(plain(*blocks, vocab=512, width=256, context=256, learned_positions=True))
    for name, parameter in decoder.named_parameters():
        if parameter.ndim == 2:
            residual = name.endswith((".output.weight", ".down.weight"))
            expected = 0.02 / math.sqrt(8) if residual else 0.02
            # The deviation's own standard error, of a normal variable, is 1 / sqrt(2 n): seven of these.
            assert expected == pytest.approx(parameter.std().item(), rel=7 / math.sqrt(2 * parameter.numel())), name
        else:
            identity = name.endswith("weight") and not name.endswith("attention_norm.weight")
            assert bool((parameter == float(identity)).all()), name


@kinds
def test_a_sequence_longer_than_the_context_is_refused(kind: str) -> None:
    """A sequence as long as the context runs; one token more is an error in one line."""
    decoder = Decoder(tutor(), attention=kind)
    assert (2, 6, 9) == tuple(decoder(some_tokens(length=6, vocab=9)).shape)
    with pytest.raises(ValueError, match=r"^a sequence of 7 tokens is longer than the context of 6$"):
        decoder(some_tokens(length=7, vocab=9))


GATED = FeedForward(width=20, activation="silu", gated=True)
MIXTURE = Experts(experts=4, active=1, expert=GATED, router=Router(score="sigmoid", selection_bias=True))
SPARSE = replace(plain_block(sinks=True), feed_forward=MIXTURE)


@torch.no_grad()
def test_no_token_is_dropped() -> None:
    """Where a bias sends all tokens to one expert, each is weighed by its own score, which the bias is no part of."""
    layer = ExpertsLayer(replace(MIXTURE, router=replace(MIXTURE.router, normalize=False)), 16).double()
    randomise(layer)
    layer.router.selection_bias.copy_(torch.tensor([0, 0, 2, 0]))  # a sigmoid is below 1
    x = torch.randn(2, 12, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    score = torch.sigmoid(x @ layer.router.weight[2])
    assert_close(score[..., None] * layer.experts[2](x), layer(x), 1e-12)


@torch.no_grad()
def test_as_many_experts_as_there_are_are_one_wide_feed_forward() -> None:
    """Weighed alike, the mean of all experts is what one feed-forward of their widths together gives."""
    layer = ExpertsLayer(Experts(experts=4, active=4, expert=GATED), 16).double()
    wide = FeedForwardLayer(replace(GATED, width=80), 16).double()
    randomise(layer)
    layer.router.weight.zero_()
    wide.gate.weight.copy_(torch.cat([expert.gate.weight for expert in layer.experts]))
    wide.up.weight.copy_(torch.cat([expert.up.weight for expert in layer.experts]))
    wide.down.weight.copy_(torch.cat([expert.down.weight for expert in layer.experts], 1) / 4)
    x = torch.randn(2, 12, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert_close(wide(x), layer(x), 1e-12)


@given(spec=mixtures(), seed=seeds)
@settings(deadline=None)
@torch.no_grad()
def test_routers_are_the_references(spec: Experts, seed: int) -> None:
    """Each token has the reference router's weight for each expert, in which order they were chosen aside."""
    router = RouterLayer(spec.router, 16, spec.experts, spec.active).double()
    randomise(router, seed)
    generator = torch.Generator().manual_seed(seed)
    logits, indices, weights = router(torch.randn(24, 16, dtype=torch.float64, generator=generator))
    bias = None if router.selection_bias is None else router.selection_bias.numpy()
    expected = routing.route(spec.router, logits.numpy(), spec.active, bias)
    theirs = torch.zeros_like(logits).scatter(1, torch.from_numpy(expected.indices), torch.from_numpy(expected.weights))
    assert_close(theirs, torch.zeros_like(logits).scatter(1, indices, weights), 1e-12)


@pytest.mark.parametrize("recompute", [False, True])
def test_routers_are_watched(recompute: bool) -> None:
    """Layer by layer, with gradients, while the watch lasts and no longer; what runs again is not seen again."""
    decoder = built(plain(SPARSE, plain_block(), SPARSE))
    decoder.recompute = recompute
    with watch(decoder) as routings:
        decoder(some_tokens()).sum().backward(retain_graph=True)
    decoder.zero_grad()
    decoder(some_tokens())
    assert [(24, 4), (24, 4)] == [tuple(watched.logits.shape) for watched in routings]
    assert [(24, 1), (24, 1)] == [tuple(watched.indices.shape) for watched in routings]
    first, second = decoder.blocks[0].feed_forward.router, decoder.blocks[2].feed_forward.router
    routings[0].logits.sum().backward()
    assert first.weight.grad is not None and second.weight.grad is None


def test_an_unknown_attention_is_refused() -> None:
    """An attention that does not exist is an error that lists those that do."""
    with pytest.raises(ValueError, match=r"^attention: expected one of \('eager', 'fused'\), got 'flash'$"):
        Decoder(tutor(), attention="flash")


@kinds
def test_bfloat16_stays_bfloat16(kind: str) -> None:
    """Tables and routers computed in float32 do not leak into the dtype of the logits."""
    latent = LatentAttention(
        heads=2, kv_rank=8, nope_head_dim=8, rope_head_dim=4, value_head_dim=8, rotary=Rotary(base=100.0, dim=4)
    )
    spec = plain(
        plain_block(rotary=Rotary(base=100.0, dim=8), window=4, qk_norm=Norm()), replace(SPARSE, attention=latent)
    )
    decoder = built(spec, kind, dtype=torch.bfloat16)
    with watch(decoder) as routings:
        assert decoder(some_tokens()).dtype is torch.bfloat16
    assert {torch.float32} == {tensor.dtype for tensor in (routings[0].logits, routings[0].weights)}


def test_a_router_is_float32_under_autocast() -> None:
    """What autocast would lower stays: the logits decide which experts run."""
    router = built(plain(SPARSE), dtype=torch.float32).blocks[0].feed_forward.router
    x = torch.randn(5, router.in_features)
    with torch.autocast("cpu", torch.bfloat16):
        inside, lowered = router(x).logits, torch.nn.functional.linear(x, router.weight)
    assert (inside.dtype, lowered.dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(inside, router(x).logits)


def test_a_selection_bias_stays_float32() -> None:
    """In a decoder that is cast to bfloat16 it still moves by a thousandth; wider it may be."""
    decoder = built(plain(replace(SPARSE, feed_forward=MIXTURE)), dtype=torch.float32)
    router = decoder.blocks[0].feed_forward.router
    router.selection_bias.fill_(0.5)
    decoder.to(torch.bfloat16)
    assert (router.weight.dtype, router.selection_bias.dtype) == (torch.bfloat16, torch.float32)
    router.selection_bias += 0.001
    assert (router.selection_bias > 0.5).all()
    assert decoder.double().blocks[0].feed_forward.router.selection_bias.dtype is torch.float64
