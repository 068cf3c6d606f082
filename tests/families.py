"""One small config a family, with what the family alone has: where each shape costs a compilation."""

from typing import Any

from accounting.huggingface import read
from accounting.spec import ModelSpec

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
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3},
}
#: More than ten, whose numbers as strings are not in their order.
TWELVE_EXPERTS = {
    "n_routed_experts": 12,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 10,
    "first_k_dense_replace": 1,
    "n_group": 3,
    "topk_group": 2,
}
FIELDS: dict[str, dict[str, Any]] = {
    "deepseek_v3": GROUPED | LATENT | TWELVE_EXPERTS,
    "gemma3_text": GROUPED | WINDOWS | {"head_dim": 8, "query_pre_attn_scalar": 5, "final_logit_softcapping": 3.0},
    "gpt2": {"vocab_size": 29, "n_positions": 16, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_inner": 20},
    "gpt_oss": GROUPED
    | WINDOWS
    | {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": 0.3},
    "llama": GROUPED | {"head_dim": 8, "rope_scaling": LLAMA3, "attention_bias": True, "mlp_bias": True},
    "mistral": GROUPED | {"head_dim": 8, "sliding_window": 5},
    "mixtral": GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmo2": GROUPED | {"attention_bias": True},
    "olmo3": GROUPED | WINDOWS,
    "qwen2": GROUPED | WINDOWS | {"use_sliding_window": True, "tie_word_embeddings": True},
    "qwen3": GROUPED | {"head_dim": 8, "tie_word_embeddings": True},
    "qwen3_moe": GROUPED
    | {
        "head_dim": 8,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 10,
        "norm_topk_prob": False,
        "mlp_only_layers": [0],
    },
}
CONFIGS = {family: {"model_type": family, **fields} for family, fields in FIELDS.items()}
SPECS: dict[str, ModelSpec] = {family: read(config).spec for family, config in CONFIGS.items()}
#: Compiles in half of the time, for tests that run what they compile once: ``jax.jit(..., compiler_options=QUICK)``.
QUICK = {"xla_backend_optimization_level": 0}
