"""Hugging Face's own modules, built on the meta device from a config's fields."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import logging

logging.set_verbosity_error()

#: Published under a name of its own, built by the module of the family that it belongs to.
SAME_MODULE = {"kimi_k2": "deepseek_v3"}


class _Promotion(TorchFunctionMode):
    """A request for float32 is one for float64."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args, kwargs = tree_map_only(torch.dtype, _promoted, (args, kwargs or {}))
        return func(*args, **kwargs)


def _promoted(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float32 else dtype


@contextmanager
def float64() -> Iterator[None]:
    """Where a module of the library is in float64 throughout, if it is built and run there.

    Its norms, rotations, softmaxes and routers ask for float32 whatever the weights are in, and it makes its
    frequencies in float32.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Promotion():
            yield
    finally:
        torch.set_default_dtype(before)


def build(config: Mapping[str, Any], device: str = "meta", **options: Any) -> PreTrainedModel:
    """The causal language model of a config: a nested text model without its tower.

    ``device`` meta allocates nothing; ``options`` go to the configuration, such as
    ``attn_implementation``. A quantisation section is left out: it is about files.
    """
    with torch.device(device):
        module: PreTrainedModel = AutoModelForCausalLM.from_config(settings(config).get_text_config(), **options)
    return module


def settings(config: Mapping[str, Any]) -> PreTrainedConfig:
    """The library's own reading of a config, without its quantisation section."""
    # It writes what it makes of the rotary section into the section that it was given.
    fields = deepcopy({name: value for name, value in config.items() if name != "quantization_config"})
    del fields["model_type"]
    model_type = config["model_type"]
    read: PreTrainedConfig = CONFIG_MAPPING[SAME_MODULE.get(model_type, model_type)].from_dict(fields)
    return read


def unique(module: torch.nn.Module) -> int:
    """Scalars in the module's distinct Parameter objects."""
    return sum(parameter.numel() for parameter in module.parameters())


def saved(module: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The module's tensors as the library saves them: persistent buffers are among them.

    A tied head is one Parameter under two names, and is listed once, as it is saved.
    """
    state = module.state_dict()
    for name in module.all_tied_weights_keys:
        del state[name]
    tensors: dict[str, torch.Tensor] = revert_weight_conversion(module, state)
    return tensors


def published(module: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """Names and shapes of what is ``saved``."""
    return {name: tuple(tensor.shape) for name, tensor in saved(module).items()}
