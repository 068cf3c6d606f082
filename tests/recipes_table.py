"""The recipe table as data, and each of its columns read off a spec and off Hugging Face's module."""

import tomllib
from functools import cache
from pathlib import Path

import torch

from accounting import huggingface
from accounting.authorities import huggingface as modules
from accounting.spec import Experts, LatentAttention

TABLE = tomllib.loads((Path(__file__).parents[1] / "fixtures" / "tables" / "recipes.toml").read_text("utf-8"))
ROWS = {row["id"]: row for row in TABLE["row"]}
#: The document's rows; the table has one of our own besides.
DOCUMENT = {id: row for id, row in ROWS.items() if not row.get("own", False)}
#: Models whose config is not among the published ones.
MODELS = {model["name"]: model for model in TABLE["model"]}
NORMS = {"rms": "RMSNorm", "layer": "LayerNorm"}
GATED = {"silu": "SwiGLU", "gelu": "GeGLU", "gelu_tanh": "GeGLU"}
BUILT_GATED = {"SiLUActivation": "SwiGLU", "GELUTanh": "GeGLU"}


def config(name):
    """The config of a model: a published one, or one of the table, which may change a published one."""
    if name not in MODELS:
        return huggingface.published_config(name)
    model = MODELS[name]
    return (huggingface.published_config(model["of"]) if "of" in model else {}) | model["config"]


@cache
def spec(name):
    return huggingface.read(config(name)).spec


@cache
def module(name):
    return modules.build(config(name))


def one(values):
    """The value that all of them have."""
    first, *others = values
    assert all(other == first for other in others), f"{first} and {others}"
    return first


def views(windows):
    """Windows, and the shortest pattern that the layers repeat: S sees a window, F everything."""
    kinds = "".join("F" if window is None else "S" for window in windows)
    periods = (kinds[:length] for length in range(1, len(kinds) + 1))
    pattern = next(part for part in periods if (part * len(kinds)).startswith(kinds))
    sizes = {window for window in windows if window is not None}
    return {"pattern": pattern} | ({"window": one(sizes)} if sizes else {})


def sharing(heads, kv_heads, sinks):
    return {"kind": {heads: "MHA", 1: "MQA"}.get(kv_heads, "GQA"), "heads": heads, "kv_heads": kv_heads, "sinks": sinks}


def latent(heads, kv_rank, query_rank):
    return {"kind": "MLA", "heads": heads, "kv_rank": kv_rank, "query_rank": query_rank, "sinks": False}


def attention(spec):
    """How a spec's layers share and compress keys and values, what they see, and whether they have sinks."""
    layers = [block.attention for block in spec.blocks]
    if isinstance(layers[0], LatentAttention):
        shared = one(latent(layer.heads, layer.kv_rank, layer.query_rank) for layer in layers)
    else:
        shared = one(sharing(layer.heads, layer.kv_heads, layer.sinks) for layer in layers)
    return shared | views([layer.window for layer in layers])


def built_attention(module):
    """The same of a module, by the sizes of its matrices."""
    layers = [layer.self_attn for layer in module.base_model.layers]
    if hasattr(layers[0], "kv_b_proj"):
        shared = one(
            latent(
                layer.q_b_proj.out_features // layer.qk_head_dim,
                layer.kv_b_proj.in_features,
                layer.q_b_proj.in_features,
            )
            for layer in layers
        )
    else:
        shared = one(
            sharing(
                layer.q_proj.out_features // layer.head_dim,
                layer.k_proj.out_features // layer.head_dim,
                hasattr(layer, "sinks"),
            )
            for layer in layers
        )
    everywhere = getattr(module.config, "sliding_window", None)  # Mistral's layers do not say
    return shared | views([getattr(layer, "sliding_window", everywhere) for layer in layers])


def placed(kind, pre, post, span):
    """``span``: of the norm of queries and keys, None where there is none."""
    placement = " and ".join(["pre"] * pre + ["post"] * post)
    found = {"kind": kind, "placement": placement, "qk_norm": span is not None}
    return found | ({"qk_norm_span": span} if span else {})


def norm(spec):
    """Kind and place of a spec's norms, which around attention and feed-forward are the same."""
    found = []
    for block in spec.blocks:
        pre, post = block.attention_norm, block.attention_post_norm
        assert (pre, post) == (block.feed_forward_norm, block.feed_forward_post_norm)
        of_heads = getattr(block.attention, "qk_norm", None)
        kind = one({norm.kind for norm in (pre, post, of_heads, spec.final_norm) if norm is not None})
        span = None if of_heads is None else block.attention.qk_norm_span
        found.append(placed(NORMS[kind], pre is not None, post is not None, span))
    return one(found)


def built_norm(module):
    """The same of a module: places by the names of a layer's norms, spans by their sizes."""
    kinds = {type(part).__name__ for part in module.modules() if type(part).__name__.endswith("Norm")}
    found = []
    for layer in module.base_model.layers:
        names = {name for name, _ in layer.named_children() if name.endswith("norm")}
        places = "input_layernorm" in names, "post_feedforward_layernorm" in names
        assert len(names) == 2 * sum(places)
        of_heads = getattr(layer.self_attn, "q_norm", None)
        span = of_heads and ("head" if of_heads.weight.numel() == layer.self_attn.head_dim else "full")
        found.append(placed(one({kind[-len("RMSNorm") :] for kind in kinds}), *places, span))
    return one(found)


def rotation(base, scaling, factor, prefix=""):
    found = {f"{prefix}base": float(base), f"{prefix}scaling": scaling}
    return found | ({} if factor is None else {f"{prefix}factor": float(factor)})


def rotations(everything, windowed):
    """The rotation of the layers that see everything, and of those with a window where it is another."""
    wide = everything or windowed
    return rotation(*wide) | (rotation(*windowed, prefix="local_") if windowed not in (None, wide) else {})


def slice_of(rotated, whole, keys):
    """A part of each query that is rotated, with ``keys`` rotated parts of keys a token."""
    return {"rotated": rotated, "head_dim": whole, "keys": keys}


def positions(spec):
    """Bases and scalings of a spec's rotary positions."""
    found = {}
    for block in spec.blocks:
        rotary, scaling = block.attention.rotary, block.attention.rotary.scaling
        facts = rotary.base, scaling.kind if scaling else "none", scaling and scaling.factor
        assert found.setdefault(block.attention.window is None, facts) == facts
    attention, known = spec.blocks[0].attention, rotations(found.get(True), found.get(False))
    if isinstance(attention, LatentAttention):
        known |= slice_of(attention.rotary.dim, attention.score_width, 1)
    else:
        assert {block.attention.rotary.dim for block in spec.blocks} == {attention.head_dim}
    return {"kind": "none" if spec.learned_positions else "RoPE"} | known


def built_positions(module):
    """The same of a module, by the library's own reading of its config."""
    sections = module.config.rope_parameters
    if "rope_type" in sections:
        sections = {"full_attention": sections}
    found = {
        kind: (section["rope_theta"], section["rope_type"].replace("default", "none"), section.get("factor"))
        for kind, section in sections.items()
    }
    attention = module.base_model.layers[0].self_attn
    known = rotations(found["full_attention"], found.get("sliding_attention"))
    if hasattr(attention, "kv_b_proj"):
        rotated, keys = attention.qk_rope_head_dim, attention.kv_a_proj_with_mqa.out_features
        known |= slice_of(rotated, attention.qk_head_dim, (keys - attention.kv_b_proj.in_features) // rotated)
    return {"kind": "RoPE" if hasattr(module.base_model, "rotary_emb") else "none"} | known


def bounded(clamp, gain, up_offset, bias):
    return {"clamped": True, "clamp": clamp, "gain": gain, "up_offset": up_offset, "bias": bias}


def ffn(spec):
    """The kind of a spec's feed-forwards, of its experts too, and the dials of a bounded one."""
    layers = [block.feed_forward for block in spec.blocks]
    parts = [(layer.expert, layer.shared) if isinstance(layer, Experts) else (layer,) for layer in layers]
    found = []
    for part in (part for layer in parts for part in layer if part is not None):
        dials = bounded(part.clamp, part.gain, part.up_offset, part.bias) if part.clamp else {"clamped": False}
        found.append({"kind": GATED[part.activation] if part.gated else part.activation} | dials)
    return one(found)


def built_ffn(module):
    """The same of a module: by its activations, and of gpt-oss by what its gate makes of numbers."""
    found = []
    for layer in (layer.mlp for layer in module.base_model.layers):
        if hasattr(layer, "router"):
            found.append({"kind": "SwiGLU"} | bounded(*built_bounds(layer.experts), layer.experts.has_bias))
        else:
            parts = [part for part in layer.modules() if hasattr(part, "act_fn")]
            assert all(getattr(part, "has_gate", False) or hasattr(part, "gate_proj") for part in parts)
            found += [{"kind": BUILT_GATED[type(part.act_fn).__name__], "clamped": False} for part in parts]
    return one(found)


def built_bounds(experts):
    """Clamp, gain and offset of gpt-oss's gate, which meets pairs of a gate and an up."""

    def meet(gate, up):
        return experts._apply_gate(torch.tensor([gate, up], dtype=torch.float64)).item()

    assert meet(10 * experts.limit, 0.0) == meet(experts.limit, 0.0) > meet(experts.limit / 2, 0.0)
    assert meet(1.0, -10 * experts.limit) == meet(1.0, -experts.limit)
    return experts.limit, experts.alpha, meet(1.0, 0.0) / (meet(1.0, 1.0) - meet(1.0, 0.0))


def mixture(dense, sparse):
    """``dense``: layers without experts; ``sparse``: experts, active and shared of each layer with some."""
    if not sparse:
        return {"kind": "dense"}
    experts, active, shared = one(sparse)
    known = {"kind": "MoE", "experts": experts, "active": active}
    return known | {"shared": shared or "none", "dense_layers": dense or "none"}


def moe(spec):
    """Experts of a spec, active, shared, and the layers that have none."""
    sparse = [block.feed_forward for block in spec.blocks if isinstance(block.feed_forward, Experts)]
    shared = [layer.shared.width // layer.expert.width if layer.shared else 0 for layer in sparse]
    counts = [(layer.experts, layer.active, number) for layer, number in zip(sparse, shared, strict=True)]
    return mixture(len(spec.blocks) - len(sparse), counts)


def built_moe(module):
    """The same of a module."""
    layers = [layer.mlp for layer in module.base_model.layers]
    sparse = [layer for layer in layers if hasattr(layer, "experts")]
    counts = []
    for layer in sparse:
        shared = getattr(layer, "shared_experts", None)
        number = shared.gate_proj.out_features // layer.experts.intermediate_dim if shared else 0
        router = layer.router if hasattr(layer, "router") else layer.gate
        counts.append((layer.experts.num_experts, router.top_k, number))
    return mixture(len(layers) - len(sparse), counts)


FROM_SPEC = {"attention": attention, "norm": norm, "positions": positions, "ffn": ffn, "moe": moe}
FROM_MODULE = {
    "attention": built_attention,
    "norm": built_norm,
    "positions": built_positions,
    "ffn": built_ffn,
    "moe": built_moe,
}


def facts(name, column):
    """What a spec and its module say of a column, who must agree."""
    predicted, observed = FROM_SPEC[column](spec(name)), FROM_MODULE[column](module(name))
    assert predicted == observed, f"{name}, {column}: the spec says {predicted}, the module {observed}"
    return predicted


def statements(row, column, key):
    """What a cell says under a key: pairs of the models that it is about and the facts."""
    for facts in ROWS[row][column].get(key, ()):
        yield facts.get("of", ROWS[row]["models"]), {name: fact for name, fact in facts.items() if name != "of"}


def complete(row, column, name):
    """A model's column, of what its row says and has besides."""
    known = {}
    for key in ("says", "besides"):
        for models, facts in statements(row, column, key):
            if name in models:
                assert not known.keys() & facts, f"{row}, {column}: {name} is told twice"
                known |= facts
    return known
