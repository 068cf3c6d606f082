"""The families whose configs are understood, by ``model_type``: one small reader each."""

from accounting.families.base import Config, Extra
from accounting.families.deepseek import DeepseekV3
from accounting.families.gemma import Gemma3, Gemma3Multimodal
from accounting.families.gpt2 import Gpt2
from accounting.families.gpt_oss import GptOss
from accounting.families.llama import Llama, Mistral, Mixtral
from accounting.families.olmo import Olmo2, Olmo3
from accounting.families.qwen import Qwen2, Qwen3, Qwen3Moe

FAMILIES: dict[str, type[Config]] = {
    "deepseek_v3": DeepseekV3,
    "gemma3_text": Gemma3,
    "gpt2": Gpt2,
    "gpt_oss": GptOss,
    "kimi_k2": DeepseekV3,
    "llama": Llama,
    "mistral": Mistral,
    "mixtral": Mixtral,
    "olmo2": Olmo2,
    "olmo3": Olmo3,
    "qwen2": Qwen2,
    "qwen3": Qwen3,
    "qwen3_moe": Qwen3Moe,
}

__all__ = ["FAMILIES", "Config", "Extra", "Gemma3Multimodal"]
