"""The only Hypothesis strategies: small configs, tables of tensors and laws of loss, valid by construction."""

import struct
from collections.abc import Callable, Iterable
from typing import Any

from hypothesis import strategies as st

from accounting import huggingface
from accounting.checkpoint import BITS
from accounting.scaling import LossSurface
from accounting.spec import ModelSpec

Config = dict[str, Any]
#: The pair of coefficients of DeepSeek: equal, apart, and one alone.
MAGNITUDES = st.sampled_from(
    [{"mscale": 1.0, "mscale_all_dim": 1.0}, {"mscale": 0.7, "mscale_all_dim": 1.3}, {"mscale_all_dim": 0.5}, {}]
)
SCALINGS = st.sampled_from(
    [
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        {"rope_type": "yarn", "factor": 2.0, "beta_fast": 8, "beta_slow": 2, "original_max_position_embeddings": 64},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8,
        },
    ]
) | st.builds(
    dict.__or__,
    st.fixed_dictionaries(
        {"rope_type": st.just("yarn"), "factor": st.floats(1.5, 8.0)},
        optional={"original_max_position_embeddings": st.integers(4, 64), "truncate": st.booleans()},
    ),
    MAGNITUDES | st.fixed_dictionaries({"attention_factor": st.floats(0.5, 2.0)}),
)
THETAS = st.floats(2.0, 1e6)
LOSS_SURFACES = st.builds(
    LossSurface,
    E=st.floats(0.1, 3),
    A=st.floats(0.1, 1e3),
    B=st.floats(0.1, 1e3),
    alpha=st.floats(0.1, 1),
    beta=st.floats(0.1, 1),
)
KINDS = ("full_attention", "sliding_attention")
ACTIVATIONS = st.sampled_from(["silu", "gelu", "gelu_pytorch_tanh"])


def optional(draw: st.DrawFn, config: Config, **fields: st.SearchStrategy[Any]) -> None:
    """Each field is present, or left to the family's default."""
    for name, values in fields.items():
        if draw(st.booleans()):
            config[name] = draw(values)


def positions(draw: st.DrawFn, config: Config, *, by_kind: bool = False, scalings: st.SearchStrategy[Config]) -> None:
    """The section on rotary positions, as older files have it, as newer ones do, or left out.

    ``by_kind``: the newer one has a section for each kind of layer, and the older one its type under one name alone.
    """
    section = dict(draw(scalings))
    optional(draw, section, rope_theta=THETAS)
    match draw(st.sampled_from(["absent", "old", "oldest", "new"])):
        case "oldest" if not by_kind:
            config["rope_scaling"] = {"type": section.pop("rope_type"), **section}
        case "old":
            config["rope_scaling"] = section
        case "new" if by_kind:
            config["rope_parameters"] = {}
            one = (
                st.none()
                | st.fixed_dictionaries({}, optional={"rope_theta": THETAS})
                | st.builds(dict, st.just(section))
            )
            optional(draw, config["rope_parameters"], **dict.fromkeys(KINDS, one))
        case "new":
            config["rope_parameters"] = section


@st.composite
def gpt2(draw: st.DrawFn) -> Config:
    heads = draw(st.integers(1, 4))
    config = {
        "model_type": "gpt2",
        "vocab_size": draw(st.integers(1, 40)),
        "n_positions": draw(st.integers(1, 12)),
        "n_embd": heads * draw(st.integers(1, 6)),
        "n_layer": draw(st.integers(1, 3)),
        "n_head": heads,
    }
    optional(
        draw,
        config,
        n_inner=st.none() | st.integers(1, 30),
        tie_word_embeddings=st.booleans(),
        activation_function=st.sampled_from(["gelu", "gelu_new", "relu"]),
        scale_attn_by_inverse_layer_idx=st.booleans(),
        scale_attn_weights=st.booleans(),
    )
    return config


def grouped(
    draw: st.DrawFn,
    model_type: str,
    *,
    head_dim: bool = True,
    by_kind: bool = False,
    activation: str = "hidden_act",
    activations: st.SearchStrategy[str] = ACTIVATIONS,
) -> Config:
    """What Llama and its variations share; ``head_dim``: the family may set it."""
    kv_heads = draw(st.integers(1, 3))
    heads = kv_heads * draw(st.integers(1, 3))
    config = {
        "model_type": model_type,
        "vocab_size": draw(st.integers(2, 40)),
        "hidden_size": heads * 2 * draw(st.integers(1, 4)),
        "intermediate_size": draw(st.integers(1, 30)),
        "num_hidden_layers": draw(st.integers(1, 4)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": draw(st.integers(1, 64)),
        "pad_token_id": None,
    }
    optional(
        draw,
        config,
        tie_word_embeddings=st.booleans(),
        rope_theta=THETAS,
        rms_norm_eps=st.floats(1e-8, 1e-3),
        **{activation: activations},
        **({"head_dim": st.integers(1, 8).map(lambda half: 2 * half)} if head_dim else {}),
    )
    positions(draw, config, by_kind=by_kind, scalings=SCALINGS)
    if head_dim and config.keys() & {"rope_scaling", "rope_parameters"}:
        # transformers scales by the field as it stands, which some families leave empty.
        config.setdefault("head_dim", config["hidden_size"] // heads)
    return config


@st.composite
def llama(draw: st.DrawFn) -> Config:
    config = grouped(draw, "llama")
    if draw(st.booleans()):
        del config["num_key_value_heads"]
    optional(draw, config, attention_bias=st.booleans(), mlp_bias=st.booleans())
    return config


@st.composite
def mistral(draw: st.DrawFn) -> Config:
    config = grouped(draw, "mistral")
    optional(draw, config, sliding_window=st.none() | st.integers(1, 32))
    return config


def experts(draw: st.DrawFn, config: Config, name: str) -> None:
    """A number of experts under the family's name for it, and how many are active."""
    config[name] = draw(st.integers(1, 6))
    config["num_experts_per_tok"] = draw(st.integers(1, config[name]))


@st.composite
def mixtral(draw: st.DrawFn) -> Config:
    config = grouped(draw, "mixtral")
    optional(draw, config, sliding_window=st.none() | st.integers(1, 32))
    experts(draw, config, "num_local_experts")
    return config


def windows(draw: st.DrawFn, config: Config) -> None:
    """Windows by rule or by list, of a size or of the family's default."""
    kinds = st.sampled_from(KINDS)
    layers = config["num_hidden_layers"]
    optional(
        draw,
        config,
        sliding_window=st.integers(1, 32),
        layer_types=st.lists(kinds, min_size=layers, max_size=layers),
    )


@st.composite
def qwen2(draw: st.DrawFn) -> Config:
    config = grouped(draw, "qwen2", head_dim=False)
    windows(draw, config)
    optional(draw, config, use_sliding_window=st.booleans(), max_window_layers=st.integers(0, 4))
    return config


@st.composite
def qwen3(draw: st.DrawFn) -> Config:
    config = grouped(draw, "qwen3")
    windows(draw, config)
    optional(
        draw,
        config,
        use_sliding_window=st.booleans(),
        max_window_layers=st.integers(0, 4),
        attention_bias=st.booleans(),
    )
    return config


@st.composite
def qwen3_moe(draw: st.DrawFn) -> Config:
    config = grouped(draw, "qwen3_moe")
    experts(draw, config, "num_experts")
    config["moe_intermediate_size"] = draw(st.integers(1, 20))
    optional(
        draw,
        config,
        attention_bias=st.booleans(),
        sliding_window=st.integers(1, 32),
        use_sliding_window=st.booleans(),
        norm_topk_prob=st.booleans(),
        decoder_sparse_step=st.integers(1, 3),
        mlp_only_layers=st.lists(st.integers(0, 3), max_size=2),
    )
    kind = "sliding_attention" if config.get("use_sliding_window") else "full_attention"
    optional(draw, config, layer_types=st.just([kind] * config["num_hidden_layers"]))
    return config


@st.composite
def olmo(draw: st.DrawFn, model_type: str) -> Config:
    config = grouped(draw, model_type, head_dim=False, by_kind=model_type == "olmo3")
    if draw(st.booleans()):
        del config["num_key_value_heads"]
    optional(draw, config, attention_bias=st.booleans())
    if model_type == "olmo3":
        windows(draw, config)
    return config


@st.composite
def gemma3_text(draw: st.DrawFn) -> Config:
    config = grouped(draw, "gemma3_text", by_kind=True, activation="hidden_activation")
    windows(draw, config)
    optional(
        draw,
        config,
        attention_bias=st.booleans(),
        sliding_window_pattern=st.integers(1, 4),
        query_pre_attn_scalar=st.integers(1, 64),
        rope_local_base_freq=THETAS,
        final_logit_softcapping=st.floats(1.0, 50.0),
    )
    return config


@st.composite
def gemma3(draw: st.DrawFn) -> Config:
    inner = draw(gemma3_text())
    outer = {"model_type": "gemma3", "text_config": inner, "mm_tokens_per_image": 4}
    if "tie_word_embeddings" in inner:
        outer["tie_word_embeddings"] = inner["tie_word_embeddings"]
    return outer


@st.composite
def deepseek_v3(draw: st.DrawFn, model_type: str) -> Config:
    heads = draw(st.integers(1, 4))
    groups = draw(st.integers(1, 3))
    experts = groups * draw(st.integers(2, 4))
    top_groups = draw(st.integers(1, groups))
    config = {
        "model_type": model_type,
        "vocab_size": draw(st.integers(2, 40)),
        "hidden_size": draw(st.integers(1, 24)),
        "intermediate_size": draw(st.integers(1, 30)),
        "moe_intermediate_size": draw(st.integers(1, 20)),
        "num_hidden_layers": draw(st.integers(1, 4)),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": draw(st.integers(1, 64)),
        "kv_lora_rank": draw(st.integers(1, 12)),
        "q_lora_rank": draw(st.integers(0, 12)) or None,
        "qk_nope_head_dim": draw(st.integers(1, 8)),
        "qk_rope_head_dim": 2 * draw(st.integers(1, 4)),
        "v_head_dim": draw(st.integers(1, 8)),
        "n_routed_experts": experts,
        "n_shared_experts": draw(st.integers(1, 2)),
        "num_experts_per_tok": draw(st.integers(1, experts // groups * top_groups)),
        "first_k_dense_replace": draw(st.integers(0, 4)),
        "n_group": groups,
        "topk_group": top_groups,
    }
    optional(
        draw,
        config,
        tie_word_embeddings=st.booleans(),
        attention_bias=st.booleans(),
        rms_norm_eps=st.floats(1e-8, 1e-3),
        rope_theta=THETAS,
        rope_interleave=st.booleans(),
        hidden_act=ACTIVATIONS,
        norm_topk_prob=st.booleans(),
        routed_scaling_factor=st.floats(0.5, 3.0),
    )
    positions(draw, config, scalings=st.builds(dict.__or__, SCALINGS, MAGNITUDES))
    return config


@st.composite
def gpt_oss(draw: st.DrawFn) -> Config:
    config = grouped(draw, "gpt_oss", activations=st.sampled_from(["silu", "swish"]))
    experts(draw, config, "num_local_experts")
    windows(draw, config)
    # A limit that small configs reach.
    optional(
        draw,
        config,
        attention_bias=st.booleans(),
        swiglu_limit=st.floats(0.1, 1.0),
        swiglu_alpha=st.floats(0.5, 3.0),
    )
    return config


CONFIGS: dict[str, Callable[[], st.SearchStrategy[Config]]] = {
    "deepseek_v3": lambda: deepseek_v3("deepseek_v3"),
    "gemma3": gemma3,
    "gemma3_text": gemma3_text,
    "gpt2": gpt2,
    "gpt_oss": gpt_oss,
    "kimi_k2": lambda: deepseek_v3("kimi_k2"),
    "llama": llama,
    "mistral": mistral,
    "mixtral": mixtral,
    "olmo2": lambda: olmo("olmo2"),
    "olmo3": lambda: olmo("olmo3"),
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
}
DENSE = ("gemma3_text", "gpt2", "llama", "mistral", "olmo2", "olmo3", "qwen2", "qwen3")
SPARSE = ("deepseek_v3", "gpt_oss", "mixtral", "qwen3_moe")
FAMILIES = DENSE + SPARSE


def configs(*families: str) -> st.SearchStrategy[Config]:
    """Small configs of these families, or of all."""
    return st.one_of(*(CONFIGS[family]() for family in families or CONFIGS))


def specs(*families: str) -> st.SearchStrategy[ModelSpec]:
    """Small decoders of these families, or of all."""
    return configs(*families).map(lambda config: huggingface.read(config).spec)


def runnable(config: Config) -> bool:
    """Whether transformers runs what it builds: Qwen's windows must be used where layers are said to have them."""
    used = config.get("use_sliding_window", "qwen" not in config["model_type"])
    return used or "sliding_attention" not in config.get("layer_types", ())


#: Numbers that NumPy keeps under the name that safetensors gives them.
NUMPY_DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "F16": "float16", "U32": "uint32",
    "I32": "int32", "F32": "float32", "U64": "uint64", "I64": "int64", "F64": "float64", "C64": "complex64",
    "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip


def tensor_names() -> st.SearchStrategy[str]:
    """Names of tensors: any text that UTF-8 can hold, among it what JSON escapes and looks like a header's own."""
    text = st.text(st.characters(codec="utf-8"), max_size=12)
    odd = st.sampled_from(
        ["", '"', "\\", '\\"', "}", '{"', "\x00\n", "data_offsets", "a:b", "__meta", "模型.weight", "😀"]
    )
    return (text | odd | st.builds("{}{}".format, odd, text)).filter(lambda name: name != "__metadata__")


@st.composite
def shapes(draw: st.DrawFn, dtype: str) -> tuple[int, ...]:
    """A small shape, empty and scalar ones among them, whose bits fill whole bytes."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    unit = {"F4": 2, "F6_E2M3": 4, "F6_E3M2": 4}.get(dtype, 1)
    return (*shape, unit) if unit > 1 else tuple(shape)


def tensor_tables(
    dtypes: Iterable[str] = tuple(BITS), *, least: int = 0
) -> st.SearchStrategy[dict[str, tuple[str, tuple[int, ...]]]]:
    """Dtypes and shapes of a file's tensors by name."""
    entry = st.sampled_from(sorted(dtypes)).flatmap(lambda dtype: st.tuples(st.just(dtype), shapes(dtype)))
    return st.dictionaries(tensor_names(), entry, min_size=least, max_size=6)


def metadata() -> st.SearchStrategy[dict[str, str] | None]:
    """What a file says of itself."""
    return st.none() | st.dictionaries(tensor_names(), tensor_names(), max_size=3)


@st.composite
def mutations(draw: st.DrawFn, whole: bytes) -> bytes:
    """A file with some of its bytes changed, left out, doubled or moved, most of them in its header."""
    data = bytearray(whole)
    (length,) = struct.unpack("<Q", whole[:8])
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, min(8 + length, len(data))) | st.integers(0, len(data)))
        end = min(len(data), start + draw(st.integers(0, 12)))
        piece = draw(
            st.just(b"")
            | st.binary(max_size=6)
            | st.sampled_from(
                [b"0", b"9", b"-1", b"1.5", b"1e9", b'"', b"\\", b"[", b"]", b"{", b"}", b",", b"null", b"\xff"]
            )
            | st.just(bytes(data[start:end]) * 2)
        )
        data[start:end] = piece
    if draw(st.booleans()):  # so that the header is read as one
        data[:8] = struct.pack("<Q", max(0, min(len(data) - 8, length + draw(st.integers(-2, 2)))))
    return bytes(data)
