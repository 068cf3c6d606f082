"""The lab's GPT, described by five dials: predicted, and built by us and by Hugging Face."""

from functools import lru_cache

import torch
from hypothesis import given, settings

from accounting import params
from accounting.authorities import huggingface as modules
from model.recipes import tutor
from model.torch_decoder import Decoder
from tests import strategies

FIELDS = {"vocab": "vocab_size", "width": "n_embd", "context": "n_positions", "layers": "n_layer", "heads": "n_head"}
TOY = {"vocab": 9, "width": 8, "context": 6, "layers": 3, "heads": 2}
GPT2 = {"vocab": 50257, "width": 768, "context": 1024, "layers": 12, "heads": 12}
SHAPES = strategies.configs("gpt2").map(lambda config: {ours: config[theirs] for ours, theirs in FIELDS.items()})
FEW = settings(max_examples=settings().max_examples // 10)  # each one builds several modules


@lru_cache
def decoder(**dials):
    with torch.device("meta"):
        return Decoder(tutor(**dials), attention="eager")


@lru_cache
def gpt2(*, tied=True, **dials):
    """Hugging Face's GPT-2 of the same shape."""
    config = {FIELDS[name]: value for name, value in dials.items()}
    return modules.build({"model_type": "gpt2", "tie_word_embeddings": tied, **config})


@lru_cache
def predicted(**dials):
    return params.count(tutor(**dials)).unique


def built(**dials):
    """Scalars in the distinct parameters of both modules, which must be as many."""
    ours, theirs = modules.unique(decoder(**dials)), modules.unique(gpt2(**dials))
    assert ours == theirs
    return ours


def everywhere(stated):
    """Whether `stated` is true of the toy, of GPT-2's shape and of shapes drawn at random."""

    @FEW
    @given(dials=SHAPES)
    def drawn(dials):
        assert stated(dials)

    drawn()
    return stated(TOY) and stated(GPT2)
