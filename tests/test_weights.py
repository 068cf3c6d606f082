"""Weights move between PyTorch, JAX and Hugging Face's modules without a bit changed; hostile files are refused."""

import json
import os
import struct
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ml_dtypes import bfloat16
from safetensors import safe_open
from safetensors.numpy import save as serialised
from transformers import AutoModelForCausalLM

from accounting import naming
from accounting.files import InputError
from accounting.huggingface import read
from accounting.naming import Layout
from accounting.spec import Experts
from model import weights
from model.jax_decoder import init
from model.recipes import d2l_gpt, tutor
from model.torch_decoder import Decoder
from tests import strategies

FEW = settings(max_examples=settings().max_examples // 10)  # each one writes files and builds modules
FEWER = settings(max_examples=settings().max_examples // 5)
SMALL = tutor(vocab=5, width=2, context=3, layers=1, heads=1)
DTYPES = pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, bfloat16])


def drawn(spec, dtype=np.float32):
    """Random values for every tensor of a decoder."""
    random = np.random.default_rng(0)
    return {tensor.name: random.normal(size=tensor.shape).astype(dtype) for tensor in naming.canonical(spec)}


def assert_same(expected, actual):
    """The same names, dtypes, shapes and bits."""
    __tracebackhide__ = True
    assert expected.keys() == actual.keys()
    for name, array in expected.items():
        assert (array.dtype, array.shape) == (actual[name].dtype, actual[name].shape), name
        assert array.tobytes() == actual[name].tobytes(), name


def loaded_by_transformers(folder, config, tensors):
    """Hugging Face's module, from the folder that a person would hand to it."""
    weights.save(folder / "model.safetensors", tensors, read(config).spec, config["model_type"])
    (folder / "config.json").write_text(json.dumps(config))
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto")


@pytest.mark.parametrize("family", strategies.DENSE + strategies.SPARSE)
@FEW
@given(data=st.data())
def test_transformers_loads_what_is_written_and_what_it_saves_is_read(family, data, tmp_path_factory):
    """A module loaded from our file saves a file that holds what we wrote, whatever the config's dials."""
    config = data.draw(strategies.configs(family))
    # DeepSeek's module keeps the router's bias in float32, whatever the file has.
    dtype = data.draw(st.sampled_from([np.float32] if family == "deepseek_v3" else [np.float32, bfloat16]))
    folder, spec = tmp_path_factory.mktemp("model"), read(config).spec
    expected = drawn(spec, dtype)
    loaded_by_transformers(folder, config, expected).save_pretrained(folder / "again")
    assert_same(expected, weights.load(folder / "again" / "model.safetensors", spec, family))


@pytest.mark.parametrize("family", strategies.CONFIGS)
@FEWER
@given(data=st.data())
def test_packing_is_undone(family, data):
    """To a family's layout and back, each tensor is what it was, and in between it has the published shape."""
    spec = data.draw(strategies.specs(family))
    expected = drawn(spec)
    packed = weights.to_published(expected, spec, family)
    assert {tensor.name: tensor.shape for tensor in naming.published(spec, family)} == {
        name: array.shape for name, array in packed.items()
    }
    assert_same(expected, weights.from_published(packed, spec, family))


def test_parts_are_joined_in_the_order_of_the_table(monkeypatch):
    """Whichever of them the census meets first."""
    sources = tuple(f"blocks.{{layer}}.attention.{name}.bias" for name in ("value", "query", "key"))
    monkeypatch.setitem(naming.TABLES, "other", naming.GPT2 | {"h.{layer}.vqk.bias": Layout(sources=sources)})
    tensors = drawn(SMALL)
    joined = np.concatenate([tensors[source.format(layer=0)] for source in sources])
    assert np.array_equal(joined, weights.to_published(tensors, SMALL, "other")["h.0.vqk.bias"])


@pytest.mark.parametrize("family", ["deepseek_v3", "mixtral", "qwen3_moe"])
@FEW
@given(data=st.data())
def test_the_library_finds_the_experts(family, data, tmp_path_factory):
    """It stacks the experts of a file itself, the gate's rows before those of the up projection."""
    config = data.draw(strategies.configs(family))
    spec = read(config).spec
    tensors = drawn(spec)
    module = loaded_by_transformers(tmp_path_factory.mktemp("model"), config, tensors)
    sparse = (layer for layer, block in enumerate(spec.blocks) if isinstance(block.feed_forward, Experts))
    for layer in sparse:
        stacked = module.get_parameter(f"model.layers.{layer}.mlp.experts.gate_up_proj").detach().numpy()
        for expert, matrix in enumerate(stacked):
            prefix = f"blocks.{layer}.feed_forward.experts.{expert}"
            gate, up = tensors[f"{prefix}.gate.weight"], tensors[f"{prefix}.up.weight"]
            assert np.array_equal(np.concatenate([gate, up]), matrix)


def test_gpt_oss_has_gate_and_up_row_by_row(tmp_path_factory):
    """Behind a gate of zero nothing of the up projection is seen, behind any other all of it."""
    config = {
        "model_type": "gpt_oss",
        "vocab_size": 11,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 16,
        "head_dim": 4,
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "pad_token_id": None,
    }
    tensors = drawn(read(config).spec)

    @torch.no_grad()
    def logits(**factors):
        """With the named matrices of each expert multiplied by a factor."""
        scaled = {name: array * factors.get(name.split(".")[-2], np.float32(1)) for name, array in tensors.items()}
        module = loaded_by_transformers(tmp_path_factory.mktemp("model"), config, scaled)
        return module(torch.arange(11)[None], use_cache=False).logits

    assert torch.equal(logits(gate=np.float32(0)), logits(gate=np.float32(0), up=np.float32(3)))
    assert not torch.equal(logits(), logits(up=np.float32(3)))


@DTYPES
def test_a_file_goes_from_torch_to_jax_and_back(dtype, tmp_path):
    """Through two files and both frameworks every bit of every tensor and its dtype survive."""
    path, spec = tmp_path / "decoder.safetensors", d2l_gpt(vocab=7, width=16, heads=2, layers=2)
    first, second = (Decoder(spec).to(getattr(torch, np.dtype(dtype).name)) for _ in range(2))
    weights.save(path, weights.from_module(first), spec)
    with jax.enable_x64(True):
        tree = jax.tree.map(jnp.asarray, weights.to_tree(weights.load(path, spec)))
        assert jax.tree.structure(tree) == jax.tree.structure(jax.eval_shape(partial(init, spec), jax.random.key(0)))
        weights.save(path, weights.from_tree(tree), spec)
    weights.fill(second, weights.load(path, spec))
    assert all(map(torch.equal, first.parameters(), second.parameters()))
    assert_same(weights.from_module(first), weights.from_tree(tree))


@pytest.mark.parametrize(
    "laid_out",
    [np.asfortranarray, lambda array: array[::-1].copy()[::-1], lambda array: array.astype(array.dtype.newbyteorder())],
    ids=["columns", "backwards", "big-endian"],
)
def test_values_are_written_however_they_lie_in_memory(laid_out, tmp_path):
    """safetensors#825: what is written is the array, not the memory behind it."""
    expected, path = drawn(SMALL), tmp_path / "decoder.safetensors"
    weights.save(path, {name: laid_out(array) for name, array in expected.items()}, SMALL)
    assert_same(expected, weights.load(path, SMALL))


@pytest.mark.parametrize("family", strategies.FAMILIES)
@FEW
@given(data=st.data())
def test_a_decoder_gives_what_it_took(family, data):
    """Every tensor of every family, the bias of a router's choice among them; masks are none."""
    spec = data.draw(strategies.specs(family))
    decoder, expected = Decoder(spec, attention="eager"), drawn(spec)
    weights.fill(decoder, expected)
    assert_same(expected, weights.from_module(decoder))


@pytest.mark.parametrize(
    "laid_out", [lambda x: x[::-1].copy()[::-1], lambda x: x.astype(">f4")], ids=["backwards", "big-endian"]
)
def test_a_decoder_takes_values_however_they_lie_in_memory(laid_out):
    """Backwards, or in another byte order."""
    decoder, expected = Decoder(SMALL), drawn(SMALL)
    weights.fill(decoder, {name: laid_out(array) for name, array in expected.items()})
    assert_same(expected, weights.from_module(decoder))


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_is_stored_once(tied, tmp_path):
    """A file has a head of its own where the model has one, and says whose tensors it holds."""
    path, spec = tmp_path / "model.safetensors", tutor(tied=tied)
    weights.save(path, weights.from_module(Decoder(spec)), spec, "gpt2")
    with safe_open(path, framework="numpy") as file:
        assert ("lm_head.weight" in file.keys()) is not tied  # noqa: SIM118 (not a mapping)
        assert file.metadata() == {"format": "pt"}


def test_a_copy_is_taken():
    """What a decoder learns later does not change the tensors that were taken from it."""
    decoder = Decoder(SMALL)
    before = weights.from_module(decoder)
    torch.nn.init.ones_(decoder.embedding.weight)
    assert not (before["embedding.weight"] == 1).any()


def changed(**tensors):
    """A file of the small decoder with some tensors replaced, or left out where they are None."""
    held = drawn(SMALL) | {name.replace("_", "."): array for name, array in tensors.items()}
    return serialised({name: array for name, array in held.items() if array is not None})


def headed(header, data=b""):
    """A file of the format: the header's length, the header and the data."""
    return struct.pack("<Q", len(header)) + header + data


WHOLE = changed()
(SIZE,) = struct.unpack("<Q", WHOLE[:8])
HEADER, DATA = WHOLE[8 : 8 + SIZE], WHOLE[8 + SIZE :]
AGAIN = json.dumps({"norm.bias": json.loads(HEADER)["norm.bias"]}).encode()
HOSTILE = {
    "missing": (changed(norm_bias=None), r"norm\.bias: missing"),
    "unexpected": (changed(head_weight=np.zeros(2)), r"head\.weight: not a tensor of this decoder"),
    "shape": (changed(norm_bias=np.zeros(3)), r"norm\.bias: expected shape \(2,\), got \(3,\)"),
    "integers": (changed(norm_bias=np.zeros(2, np.int8)), r"norm\.bias: expected one of bfloat16, .*, got I8"),
    "twice": (headed(AGAIN[:-1] + b"," + HEADER[1:], DATA), r"header: norm\.bias: given more than once"),
    "cut off": (WHOLE[:-1], "cut off: the tensors take"),
    "longer": (WHOLE + b"0", "1 trailing byte behind the last tensor"),
    "empty": (b"", "a file of 0 bytes is no safetensors file"),
    "no JSON": (headed(b"{"), "header: Input data was truncated"),
    "nested": (headed(b"[" * 100_000), "header: expected a JSON object"),
    "huge header": (struct.pack("<Q", 100_000_001), "a header of 100,000,001 bytes, more than 100,000,000"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\n", "a pointer of Git LFS"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_that_is_not_the_decoders_is_refused(name, tmp_path):
    """In one line that names the file and the tensor."""
    path = tmp_path / "decoder.safetensors"
    content, problem = HOSTILE[name]
    path.write_bytes(content)
    with pytest.raises(InputError, match=rf"decoder\.safetensors: {problem}"):
        weights.load(path, SMALL)


def test_what_is_no_file_is_refused(tmp_path):
    """Nothing, a folder, and a pipe that nobody writes to."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, problem in ((tmp_path / "none", "no such file"), (tmp_path, "regular"), (pipe, "regular")):
        with pytest.raises(InputError, match=problem):
            weights.load(path, SMALL)


def test_tensors_that_are_not_the_decoders_are_refused(tmp_path):
    """A decoder takes its own shapes in its own dtype, or stays as it was; a file takes no more, no less."""
    decoder, tensors = Decoder(SMALL), drawn(SMALL)
    before = weights.from_module(decoder)
    for name, array in (("norm.bias", np.zeros(3)), ("norm.bias", np.zeros(2)), ("head.weight", np.zeros(2))):
        with pytest.raises(InputError, match=rf"^tensors: {name}: "):
            weights.fill(decoder, tensors | {name: array})
    assert_same(before, weights.from_module(decoder))
    with pytest.raises(InputError, match=r"^tensors: head\.weight: not a tensor of this decoder$"):
        weights.save(tmp_path / "decoder.safetensors", tensors | {"head.weight": np.zeros(2)}, SMALL)


def test_one_tensor_has_one_dtype(tmp_path):
    """GPT-2 packs queries, keys and values into one: no dtype is chosen for them in silence."""
    tensors = drawn(SMALL)
    tensors["blocks.0.attention.key.weight"] = tensors["blocks.0.attention.key.weight"].astype(np.float64)
    with pytest.raises(InputError, match=r"transformer\.h\.0\.attn\.c_attn\.weight: .* more than one dtype"):
        weights.save(tmp_path / "model.safetensors", tensors, SMALL, "gpt2")
