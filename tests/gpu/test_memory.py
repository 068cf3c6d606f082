"""The most that a GPU holds at once, between bounds that the prediction gives."""

import pytest
import torch
import torch.nn.functional as F

from accounting import activations, cache, memory
from accounting.authorities import torch_memory
from model.recipes import d2l_gpt
from model.torch_decoder import Decoder
from model.torch_generate import generate

pytestmark = pytest.mark.gpu

#: LayerNorm, GELU and written-out attention keep the same tensors on every device.
SPEC = d2l_gpt(width=512, heads=8, positions="learned", norm="layer", activation="gelu", bias=True)
BATCH, SEQ = 8, 512
WORKSPACE = 32 * 2**20  # bytes that cuBLAS keeps for itself on Hopper, and less on others


def decoder_of(attention):
    with torch.device("cuda"):
        return Decoder(SPEC, attention=attention), torch.randint(SPEC.vocab, (BATCH, SEQ))


def peak_of_a_step(attention, seq):
    decoder, tokens = decoder_of(attention)

    def step():
        decoder.zero_grad()
        F.cross_entropy(decoder(tokens[:, :seq]).flatten(0, 1), tokens[:, :seq].flatten()).backward()

    step()  # gradients and workspaces are there afterwards
    decoder.zero_grad()
    return torch_memory.peak(step)


def test_a_training_step_peaks_at_what_is_kept():
    """All that is kept is there at once; beside it gradients and, at any time, the tensors of a layer's own backward.

    These are at most as many again as the layer keeps, once as gradients and once as intermediate results.
    """
    kept = activations.kept(SPEC, seq=SEQ, batch=BATCH, attention="eager")
    total = sum(each.bytes for each in kept)
    layer = max(sum(each.bytes for each in kept if each.layer == index) for index in range(len(SPEC.blocks)))
    gradients = memory.weight_bytes(SPEC, "float32")
    assert total <= peak_of_a_step("eager", SEQ) <= total + gradients + 2 * layer + WORKSPACE


def test_fused_attention_is_linear_and_eager_is_not():
    """Twice the tokens are about twice the peak, where the written-out scores are four times as many."""
    fused, eager = ([peak_of_a_step(kind, seq) for seq in (SEQ // 2, SEQ)] for kind in ("fused", "eager"))
    scores = len(SPEC.blocks) * activations.score_bytes(SPEC, seq=SEQ, batch=BATCH)
    assert fused[1] < 2 * fused[0] + WORKSPACE
    assert eager[1] - fused[1] >= scores
    assert eager[1] - eager[0] - (fused[1] - fused[0]) >= scores - scores // 4


def test_decoding_peaks_at_the_cache():
    """The cache is there, and while a layer's grows its old and its new one side by side."""
    decoder, tokens = decoder_of("fused")
    generate(decoder, tokens[:, :8], 2)
    met = SEQ - 1
    held = cache.total(SPEC, met, batch=BATCH, dtype="float32")
    layer = held // len(SPEC.blocks)
    prompt = activations.total(SPEC, seq=SEQ // 2, batch=BATCH)
    peak = torch_memory.peak(lambda: generate(decoder, tokens[:, : SEQ // 2], SEQ // 2))
    assert held <= peak <= held + 2 * layer + prompt + WORKSPACE
