"""Claims of the counting essay that read a weight file's header, or the index of several files."""

import json
import struct
from functools import partial
from math import prod

import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from hypothesis import given, settings
from safetensors.torch import save_file

from accounting import checkpoint, huggingface, memory, params
from accounting.authorities import huggingface as modules
from accounting.huggingface import published_config
from tests import strategies
from tests.checkpoints import mxfp4, published, shards, sparse

FEW = settings(max_examples=settings.default.max_examples // 5)  # each one builds a module and saves it
QWEN, MIXTRAL = "qwen2.5-1.5b", "mixtral-8x7b"


def as_printed(path):
    """What the essay's own lines make of a file: the scalars of its header, and its tensors."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return sum(prod(tensor["shape"]) for tensor in header.values()), len(header)


def saved(path, config):
    """A config's module, with weights, as transformers saves it; its file."""
    module = modules.build(config, device="cpu")
    module.save_pretrained(path)
    return path / "model.safetensors"


@pytest.mark.claim("count.params.header_format")
def test_header_format(claim, tmp_path):
    """Eight bytes, little-endian, give the length of a JSON object; behind it lie the tensors, and nothing else."""
    path = tmp_path / "model.safetensors"

    def sizes(tensors):
        save_file(tensors, path)
        content = path.read_bytes()
        length = int.from_bytes(content[:8], "little")
        assert (length,) == struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        data = sum(tensor.nbytes for tensor in tensors.values())
        return header, checkpoint.header(path).length, length, len(content) - 8 - length, data

    for count in (1, 300):
        tensors = {f"layer.{number}": torch.ones(number % 5, 3) for number in range(count)}
        header, ours, length, rest, data = sizes(tensors)
        held = header.keys() - {"__metadata__"} == tensors.keys() and ours == length and rest == data
        claim.holds(held, f"{count} tensors: a header of {length:,} bytes, then {rest:,} bytes of tensors")


@pytest.mark.claim("count.params.header_count")
def test_header_count(claim, tmp_path_factory):
    """The shapes of a file's header sum to the module's parameters, where it holds these alone and unpacked."""
    folder = tmp_path_factory.mktemp("saved")

    @FEW
    @given(strategies.configs("llama", "qwen2", "mistral", "gpt2"))
    def everywhere(config):
        path = saved(folder, config)
        ours = checkpoint.parameters(checkpoint.load(path))
        module = modules.unique(modules.build(config))
        assert ours == as_printed(path)[0] == module == params.count(huggingface.read(config).spec).unique

    everywhere()
    path = folder / "large.safetensors"

    def counts(name, tensors):
        sparse(path, tensors)
        return as_printed(path)[0], modules.unique(modules.build(published_config(name)))

    header, module = counts(QWEN, published(QWEN))
    ours = checkpoint.parameters(checkpoint.load(path))
    claim.holds(ours == header == module, f"{QWEN}: {header:,} by the header, {module:,} in the module")
    masks = {f"h.{layer}.attn.bias": ("F32", (1, 1, 1024, 1024)) for layer in range(12)}
    for name, tensors in (("gpt2", published("gpt2") | masks), ("gpt-oss-20b", mxfp4(published("gpt-oss-20b")))):
        header, module = counts(name, tensors)
        claim.otherwise(header == module, f"{name}: {header:,} by the header, {module:,} in the module")


@pytest.mark.claim("count.params.qwen_header")
def test_qwen_header(claim, tmp_path):
    """A file with the tensors that Hugging Face's module of Qwen2.5-1.5B saves has the printed sum and number."""
    path = tmp_path / "model.safetensors"
    sparse(path, published(QWEN))
    held = checkpoint.load(path)
    claim.measured([checkpoint.parameters(held), len(held.tensors)], observed=as_printed(path))


@pytest.mark.claim("count.params.no_lm_head")
def test_no_lm_head(claim, tmp_path):
    """A tied model is saved without a head, an untied one with it."""
    found = {}
    for tied in (True, False):
        config = published_config(QWEN) | {
            "vocab_size": 40,
            "hidden_size": 24,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "tie_word_embeddings": tied,
            "torch_dtype": "float32",
        }
        held = checkpoint.load(saved(tmp_path / str(tied), config))
        found[tied] = "lm_head.weight" in held.tensors
    full = "lm_head.weight" in published(QWEN)
    claim.holds(
        found == {True: False, False: True} and not full,
        f"tied: {'a head' if found[True] else 'no head'}, untied: {'a head' if found[False] else 'no head'}",
    )


@pytest.mark.claim("count.params.instruct_same")
def test_instruct_same(claim):
    """Qwen2.5-1.5B's instruct file has the shapes of the base model's."""
    claim.unrun("data:config-qwen2.5-1.5b-instruct")


@pytest.mark.claim("count.moe.mixtral_bytes")
def test_mixtral_bytes(claim, tmp_path):
    """Mixtral's index has the printed total, which is two bytes for each parameter, all experts among them."""
    tensors = published(MIXTRAL)
    shards(tmp_path, tensors, 19)
    held = checkpoint.load(tmp_path)
    assert not list(checkpoint.inconsistencies(held))
    assert held.bytes == held.index.total_size == memory.weight_bytes(huggingface.load(MIXTRAL).spec, "bfloat16")
    empty = partial(torch.empty, dtype=torch.bfloat16, device="meta")
    split = split_torch_state_dict_into_shards({name: empty(shape) for name, (_, shape) in tensors.items()})
    claim.measured(held.bytes, observed=split.metadata["total_size"])
