"""FLOPs of a forward pass, equal to what torch's counter sees, to the last one."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accounting import flops
from accounting.authorities import huggingface as modules
from accounting.authorities import torch_counter
from accounting.huggingface import load, published_config
from model.torch_decoder import Decoder
from tests import strategies


def counted(config, batch, seq):
    """FLOPs of Hugging Face's module on meta, with products that the counter knows."""
    module = modules.build(config, attn_implementation="eager")
    tokens, mask = torch.zeros((2, batch, seq), dtype=torch.long, device="meta")
    return torch_counter.count(lambda: module(tokens, attention_mask=mask + 1, use_cache=False))


def test_gpt2_at_its_context():
    """GPT-2, one sequence of 1,024 tokens: linear maps and head, and attention."""
    predicted = flops.forward(load("gpt2").spec, seq=1024)
    assert predicted.linear + predicted.head == 252_993_601_536
    assert predicted.scores + predicted.mixture == 38_654_705_664
    assert predicted.total == counted(published_config("gpt2"), 1, 1024)


@pytest.mark.parametrize("family", strategies.DENSE)
@given(data=st.data(), batch=st.integers(1, 3))
def test_the_decoder_executes_what_is_predicted(family, data, batch):
    """Eager attention multiplies every query by every key, whatever the mask hides."""
    spec = data.draw(strategies.specs(family))
    seq = data.draw(st.integers(1, min(spec.context, 8)))
    with torch.device("meta"):
        decoder = Decoder(spec, attention="eager")
        tokens = torch.zeros((batch, seq), dtype=torch.long)
    executed = torch_counter.count(lambda: decoder(tokens))
    assert flops.forward(spec, seq=seq, batch=batch).total == executed


@given(spec=strategies.specs())
def test_tying_changes_no_flops(spec):
    """A tied head is multiplied by as an untied one is."""
    tied, untied = (flops.forward(dataclasses.replace(spec, tied=tied), seq=5) for tied in (True, False))
    assert tied == untied
