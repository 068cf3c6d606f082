"""Bytes of weights and training arrays, equal to those of real tensors."""

import pytest
import torch
from hypothesis import given

from accounting import memory
from accounting.huggingface import load
from model.torch_decoder import Decoder
from tests import strategies


def bytes_of(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("dtype", memory.DTYPE_BYTES)
@given(spec=strategies.specs(*strategies.DENSE))
def test_weights_in_each_dtype(dtype, spec):
    """The decoder's parameters in a dtype take what is predicted."""
    with torch.device("meta"):
        decoder = Decoder(spec).to(getattr(torch, dtype))
    assert memory.weight_bytes(spec, dtype) == bytes_of(decoder.parameters())


@given(spec=strategies.specs(*strategies.DENSE))
def test_adam_keeps_four_arrays(spec):
    """After a step of AdamW: weights, gradients and two moments, all in float32."""
    with torch.device("meta"):
        decoder = Decoder(spec)
    optimizer = torch.optim.AdamW(decoder.parameters())
    for parameter in decoder.parameters():
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    parameters = list(decoder.parameters())
    observed = bytes_of(parameters) + bytes_of(p.grad for p in parameters) + bytes_of(moments)
    assert memory.training_bytes(spec, "adam_float32") == observed


def test_an_unknown_layout_has_no_bytes():
    """A dtype or a layout that is not in the table is an error, never a guess."""
    spec = load("gpt2").spec
    with pytest.raises(KeyError):
        memory.weight_bytes(spec, "int3")
    with pytest.raises(KeyError):
        memory.training_bytes(spec, "adam")
