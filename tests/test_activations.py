"""What a forward pass keeps for its backward pass: every byte of it, seen by autograd's own hooks."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from accounting import activations, pairs
from accounting.activations import UnpredictedError
from accounting.authorities import torch_memory
from accounting.huggingface import load
from model import torch_decoder
from model.recipes import d2l_gpt, tutor
from model.torch_decoder import Decoder
from tests import strategies

FEW = settings(max_examples=settings().max_examples // 2)  # each one runs a decoder
LENGTHS = st.integers(1, 9)


def observed(spec, seq, batch, **options):
    """The storages that autograd keeps of a forward pass, parameters, masks and tokens apart."""
    decoder, tokens = Decoder(spec, **options), torch.zeros((batch, seq), dtype=torch.long)
    return torch_memory.saved(lambda: decoder(tokens), [*decoder.parameters(), *decoder.buffers(), tokens])


@pytest.mark.parametrize("attention", ["eager", "fused"])
@FEW
@given(spec=strategies.specs(*strategies.DENSE), seq=LENGTHS, batch=st.integers(1, 3))
@example(spec=d2l_gpt(vocab=7, width=24, heads=3, layers=2), seq=7, batch=2)
def test_every_byte_is_predicted(attention, spec, seq, batch):
    """Tensor by tensor in size, over every dense architecture, length and batch."""
    seq = min(seq, spec.context)
    predicted = activations.kept(spec, seq=seq, batch=batch, attention=attention)
    found = observed(spec, seq, batch, attention=attention)
    assert sorted(each.bytes for each in predicted) == sorted(size for _, size in found.storages)
    assert activations.total(spec, seq=seq, batch=batch, attention=attention) == found.bytes


@FEW
@given(spec=strategies.specs(*strategies.DENSE), seq=LENGTHS, batch=st.integers(1, 3))
def test_recomputation_keeps_what_blocks_are_given(spec, seq, batch):
    """The sum that enters each block, the tables of rotations, held as arguments, and what stands outside."""
    seq, tables = min(seq, spec.context), []
    with pytest.MonkeyPatch.context() as patch:
        made = torch_decoder.rotary_table
        patch.setattr(torch_decoder, "rotary_table", lambda *args: tables.append(made(*args)) or tables[-1])
        found = observed(spec, seq, batch, recompute=True)
    arguments = sum(wave.nbytes for table in tables for wave in table)
    assert activations.total(spec, seq=seq, batch=batch, recompute="full") == found.bytes + arguments


def test_recomputation_changes_no_gradient():
    """A block that is run again gives the gradients that it would have given."""
    gradients = []
    for recompute in (False, True):
        torch.manual_seed(0)
        decoder = Decoder(tutor(), recompute=recompute)
        decoder(torch.arange(6)[None]).square().sum().backward()
        gradients.append([parameter.grad for parameter in decoder.parameters()])
    assert all(map(torch.equal, *gradients))
    with pytest.raises(ValueError, match=r"^a block that runs again [^\n]+$"):
        decoder(torch.arange(3)[None], decoder.keep())


@given(spec=strategies.specs(*strategies.DENSE), seq=LENGTHS, batch=st.integers(1, 3))
def test_sequences_add_up(spec, seq, batch):
    """But for the tables, gains and masks that all share; eager attention keeps a softmax of every pair."""
    one, two, many = (activations.total(spec, seq=seq, batch=count) for count in (1, 2, batch))
    assert many == one + (batch - 1) * (two - one)
    eager = activations.kept(spec, seq=seq, batch=batch, attention="eager")
    softmax = [each.bytes for each in eager if each.name == "attention.softmax"]
    assert softmax == [4 * batch * block.attention.heads * pairs.full(seq) for block in spec.blocks]


def test_scores_are_the_full_square():
    """One layer of GPT-2 at 512 tokens, masked or not, and four times as much at twice the length."""
    spec = load("gpt2").spec
    assert activations.score_bytes(spec, seq=512) == 4 * 12 * 512**2
    assert activations.score_bytes(spec, seq=1024) == 4 * activations.score_bytes(spec, seq=512)
    assert activations.score_bytes(spec, seq=512, batch=3, dtype="bfloat16") == 3 * 2 * 12 * 512**2


@given(spec=strategies.specs(*strategies.DENSE), attention=st.sampled_from(["eager", "fused"]))
def test_masks_are_the_decoders_buffers(spec, attention):
    """A boolean for every pair of positions in each layer, or none: whatever the length of what is run."""
    with torch.device("meta"):
        held = sum(buffer.nbytes for buffer in Decoder(spec, attention=attention).buffers())
    assert activations.mask_bytes(spec, attention=attention) == held


def test_the_published_closed_form():
    """GPT-3's layers at 2,048 tokens: 34 and 80 bytes a number of the width (Korthikanti et al., section 4.1)."""
    gpt3 = tutor(vocab=50257, width=12288, context=2048, layers=96, heads=96)
    per_layer = activations.korthikanti(gpt3, seq=2048) / (96 * 2048 * 12288)
    assert per_layer == 34 + 5 * 96 * 2048 / 12288 == 34 + 80


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("name", ["deepseek-v3", "gpt-oss-20b", "mixtral-8x7b"])
def test_a_component_without_a_rule_is_not_predicted(name, recompute):
    """Latent attention, sinks and experts are refused in one line."""
    with pytest.raises(UnpredictedError, match=r"^[^\n]+$"):
        activations.total(load(name).spec, seq=4, recompute=recompute)


@pytest.mark.parametrize("sizes", [{"seq": 0}, {"seq": 1, "batch": 0}])
def test_what_cannot_be_is_refused(sizes):
    """No token, or no sequence."""
    with pytest.raises(ValueError, match=r"^expected at least 1"):
        activations.total(tutor(), **sizes)
