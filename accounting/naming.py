"""Canonical tensor names to published ones: one table a family.

A published file names, packs and turns tensors as its family does. ``published(model,
model_type)`` says which tensors the family's checkpoints hold for a decoder, of what shape,
and which canonical tensors each is made of; ``canonical(model)`` the same of a file that
keeps the canonical names.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from accounting.census import Census, Weight, of
from accounting.spec import Block, ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a published tensor is made of canonical ones.

    ``sources`` are joined along their output axis, one after the other or row by row.
    ``stacked``: the experts lie along a new first axis. ``transposed``: a matrix is
    (input, output) instead of (output, input).
    """

    sources: tuple[str, ...]
    joined: Literal["concatenated", "interleaved"] = "concatenated"
    stacked: bool = False
    transposed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A tensor of a published file, and the canonical tensors that it holds."""

    name: str
    shape: tuple[int, ...]
    layout: Layout
    weights: tuple[Weight, ...]


def _linear(pairs: Mapping[str, str], *suffixes: str, transposed: bool = False) -> dict[str, Layout]:
    """Modules that keep their weight and bias: canonical name to published name."""
    return {
        f"{published}{suffix}": Layout(sources=(f"{canonical}{suffix}",), transposed=transposed)
        for canonical, published in pairs.items()
        for suffix in suffixes or (".weight", ".bias")
    }


def _gated(
    canonical: str, published: str, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> dict[str, Layout]:
    """The three matrices of a gated feed-forward."""
    inner = zip(("gate", "up", "down"), names, strict=True)
    return _linear({f"{canonical}.{ours}": f"{published}.{theirs}" for ours, theirs in inner})


BLOCK = "blocks.{layer}"
LAYER = "model.layers.{layer}"

AROUND = _linear({"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"})
GROUPED_ATTENTION = _linear(
    {
        f"{BLOCK}.attention.query": f"{LAYER}.self_attn.q_proj",
        f"{BLOCK}.attention.key": f"{LAYER}.self_attn.k_proj",
        f"{BLOCK}.attention.value": f"{LAYER}.self_attn.v_proj",
        f"{BLOCK}.attention.output": f"{LAYER}.self_attn.o_proj",
        f"{BLOCK}.attention.query_norm": f"{LAYER}.self_attn.q_norm",
        f"{BLOCK}.attention.key_norm": f"{LAYER}.self_attn.k_norm",
    }
)
LATENT_ATTENTION = _linear(
    {
        f"{BLOCK}.attention.query": f"{LAYER}.self_attn.q_proj",
        f"{BLOCK}.attention.query_down": f"{LAYER}.self_attn.q_a_proj",
        f"{BLOCK}.attention.query_norm": f"{LAYER}.self_attn.q_a_layernorm",
        f"{BLOCK}.attention.query_up": f"{LAYER}.self_attn.q_b_proj",
        f"{BLOCK}.attention.kv_down": f"{LAYER}.self_attn.kv_a_proj_with_mqa",
        f"{BLOCK}.attention.kv_norm": f"{LAYER}.self_attn.kv_a_layernorm",
        f"{BLOCK}.attention.kv_up": f"{LAYER}.self_attn.kv_b_proj",
        f"{BLOCK}.attention.output": f"{LAYER}.self_attn.o_proj",
    }
)
PRE_NORMS = _linear(
    {
        f"{BLOCK}.attention_norm": f"{LAYER}.input_layernorm",
        f"{BLOCK}.feed_forward_norm": f"{LAYER}.post_attention_layernorm",
    }
)
POST_NORMS = _linear(
    {
        f"{BLOCK}.attention_post_norm": f"{LAYER}.post_attention_layernorm",
        f"{BLOCK}.feed_forward_post_norm": f"{LAYER}.post_feedforward_layernorm",
    }
)
FOUR_NORMS = POST_NORMS | _linear(
    {
        f"{BLOCK}.attention_norm": f"{LAYER}.input_layernorm",
        f"{BLOCK}.feed_forward_norm": f"{LAYER}.pre_feedforward_layernorm",
    }
)
DENSE = _gated(f"{BLOCK}.feed_forward", f"{LAYER}.mlp")
EXPERTS = _linear({f"{BLOCK}.feed_forward.router": f"{LAYER}.mlp.gate"}) | _gated(
    f"{BLOCK}.feed_forward.experts.{{expert}}", f"{LAYER}.mlp.experts.{{expert}}"
)

LLAMA = AROUND | GROUPED_ATTENTION | PRE_NORMS | DENSE
OLMO = AROUND | GROUPED_ATTENTION | POST_NORMS | DENSE
GEMMA = AROUND | GROUPED_ATTENTION | FOUR_NORMS | DENSE
MIXTRAL = (
    AROUND
    | GROUPED_ATTENTION
    | PRE_NORMS
    | _linear({f"{BLOCK}.feed_forward.router": f"{LAYER}.block_sparse_moe.gate"})
    | _gated(
        f"{BLOCK}.feed_forward.experts.{{expert}}",
        f"{LAYER}.block_sparse_moe.experts.{{expert}}",
        ("w1", "w3", "w2"),
    )
)
DEEPSEEK = (
    AROUND
    | LATENT_ATTENTION
    | PRE_NORMS
    | DENSE
    | EXPERTS
    | _gated(f"{BLOCK}.feed_forward.shared", f"{LAYER}.mlp.shared_experts")
    | {f"{LAYER}.mlp.gate.e_score_correction_bias": Layout(sources=(f"{BLOCK}.feed_forward.router.selection_bias",))}
)
GPT_OSS = (
    AROUND
    | GROUPED_ATTENTION
    | PRE_NORMS
    | _linear({f"{BLOCK}.feed_forward.router": f"{LAYER}.mlp.router"})
    | {f"{LAYER}.self_attn.sinks": Layout(sources=(f"{BLOCK}.attention.sinks",))}
    | {
        f"{LAYER}.mlp.experts.{published}{theirs}": Layout(
            sources=tuple(f"{BLOCK}.feed_forward.experts.{{expert}}.{name}.{ours}" for name in names),
            joined="interleaved",
            stacked=True,
            transposed=True,
        )
        for published, names in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",)))
        for ours, theirs in (("weight", ""), ("bias", "_bias"))
    }
)
GPT2 = (
    _linear({"embedding": "transformer.wte", "position": "transformer.wpe", "head": "lm_head"}, ".weight")
    | _linear(
        {
            "norm": "transformer.ln_f",
            f"{BLOCK}.attention_norm": "transformer.h.{layer}.ln_1",
            f"{BLOCK}.feed_forward_norm": "transformer.h.{layer}.ln_2",
        }
    )
    | _linear(
        {
            f"{BLOCK}.attention.output": "transformer.h.{layer}.attn.c_proj",
            f"{BLOCK}.feed_forward.up": "transformer.h.{layer}.mlp.c_fc",
            f"{BLOCK}.feed_forward.down": "transformer.h.{layer}.mlp.c_proj",
        },
        transposed=True,
    )
    | {
        f"transformer.h.{{layer}}.attn.c_attn.{suffix}": Layout(
            sources=tuple(f"{BLOCK}.attention.{name}.{suffix}" for name in ("query", "key", "value")),
            transposed=True,
        )
        for suffix in ("weight", "bias")
    }
)

TABLES: dict[str, dict[str, Layout]] = {
    "deepseek_v3": DEEPSEEK,
    "gemma3": {f"language_model.{name}": layout for name, layout in GEMMA.items()},
    "gemma3_text": GEMMA,
    "gpt2": GPT2,
    "gpt_oss": GPT_OSS,
    "kimi_k2": DEEPSEEK,
    "llama": LLAMA,
    "mistral": LLAMA,
    "mixtral": MIXTRAL,
    "olmo2": OLMO,
    "olmo3": OLMO,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "qwen3_moe": LLAMA | EXPERTS,
}


def holder(source: str, model_type: str) -> str:
    """The published name of the tensor that a family keeps a canonical one in; KeyError where its table has none."""
    names = (name for name, layout in TABLES[model_type].items() if source in layout.sources)
    if (name := next(names, None)) is None:
        raise KeyError(source)
    return name


def canonical(model: ModelSpec | Census) -> Iterator[Published]:
    """The tensors of a decoder under their own names, each by itself, buffers included."""
    census = of(model)
    for weight in (*census.weights, *census.buffers):
        for tensor in weight.expand():
            layout = Layout(sources=(tensor.name,))
            yield Published(name=tensor.name, shape=tensor.shape, layout=layout, weights=(tensor,))


def published(model: ModelSpec | Census, model_type: str) -> Iterator[Published]:
    """The tensors that a checkpoint of this family holds for a decoder, buffers included.

    Raises KeyError for a family without a table and for a tensor that its table lacks.
    """
    census, table = of(model), TABLES[model_type]
    holder = {source: name for name, layout in table.items() for source in layout.sources}
    groups: dict[tuple[str, int | None], dict[str, Weight]] = {}
    for weight in (*census.weights, *census.buffers):
        template = weight.name.replace(f"blocks.{weight.layer}.", f"{BLOCK}.", 1)
        groups.setdefault((holder[template], weight.layer), {})[template] = weight
    for (name, layer), held in groups.items():
        layout = table[name]
        weights = [held[source] for source in layout.sources if source in held]
        members = [weights] if layout.stacked else zip(*(weight.expand() for weight in weights), strict=True)
        for expert, group in enumerate(members):
            yield Published(
                name=name.format(layer=layer, expert=expert),
                shape=_shape(layout, tuple(group)),
                layout=layout,
                weights=tuple(group),
            )


def prediction(model: ModelSpec, blocks: Sequence[Block]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes around each block that predicts a further token, behind the decoder's own layers.

    The block itself has the names of ``published``. Source: DeepSeek-AI 2024, arXiv 2412.19437, section 2.2.
    """
    width, table = model.width, (model.vocab, model.width)
    around = {
        "enorm.weight": (width,),
        "hnorm.weight": (width,),
        "eh_proj.weight": (width, 2 * width),
        "shared_head.norm.weight": (width,),
        "shared_head.head.weight": table,
        "embed_tokens.weight": table,
    }
    for layer in range(len(model.blocks), len(model.blocks) + len(blocks)):
        yield from ((f"{LAYER.format(layer=layer)}.{name}", shape) for name, shape in around.items())


def _shape(layout: Layout, weights: tuple[Weight, ...]) -> tuple[int, ...]:
    joined = (sum(weight.shape[0] for weight in weights), *weights[0].shape[1:])
    matrix = joined[::-1] if layout.transposed else joined
    return (weights[0].copies, *matrix) if layout.stacked else matrix
