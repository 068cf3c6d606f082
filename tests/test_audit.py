"""The audit: full-size checkpoints whose names and shapes Hugging Face's modules give, and planted differences."""

import re
from dataclasses import replace
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Gemma3ForConditionalGeneration
from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear
from transformers.integrations.mxfp4 import Mxfp4GptOssExperts
from transformers.utils.quantization_config import FineGrainedFP8Config

from accounting import checkpoint, huggingface, params, quantization
from accounting.audit import audit, compare
from accounting.authorities import huggingface as modules
from accounting.files import InputError
from accounting.huggingface import published_config, read
from tests import strategies
from tests.checkpoints import index_of, mxfp4, shards, sparse, write_index
from tests.checkpoints import published as published_tensors

FEW = settings(max_examples=settings.default.max_examples // 5)  # each one builds a module
LLAMA = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "torch_dtype": "bfloat16",
}


def tensors_of(config, dtype="BF16"):
    """The tensors of a config's module, as it would be saved."""
    return {name: (dtype, shape) for name, shape in modules.published(modules.build(config)).items()}


def audited(folder, config, tensors, count=1):
    """Write the tensors and audit them."""
    shards(folder, tensors, count)
    return audit(config if isinstance(config, huggingface.Reading) else read(config), checkpoint.load(folder))


def lines(found):
    return [str(difference) for difference in found.differences]


def groups(found):
    return {group.name: (group.tensors, group.scalars) for group in found.extras}


# What a published file is


@pytest.mark.parametrize("name", "gemma-3-1b gemma-3-27b llama-3.1-8b mistral-7b olmo-3.1-32b qwen3-0.6b".split())
def test_a_published_model_agrees_with_its_config(name, tmp_path):
    """All tensors of Hugging Face's module in a full-size file, and nothing else."""
    reading = huggingface.load(name)
    tensors = published_tensors(name, "BF16" if reading.dtype else "F32")
    if name == "gemma-3-27b":
        tensors = {f"language_model.{tensor}": value for tensor, value in tensors.items()}
    found = audited(tmp_path, reading, tensors, count=3)
    assert lines(found) == [] and found.extras == ()
    assert (found.decoder.tensors, found.decoder.scalars) == (len(tensors), params.count(reading.spec).stored)


def test_qwen_in_one_file(tmp_path):
    """Qwen2.5-1.5B: 338 tensors, 1,543,714,304 parameters, two bytes each."""
    sparse(tmp_path / "model.safetensors", published_tensors("qwen2.5-1.5b"))
    held = checkpoint.load(tmp_path)
    found = audit(huggingface.load("qwen2.5-1.5b"), held)
    assert not found.differences
    assert (found.decoder.tensors, found.decoder.scalars, found.decoder.bytes) == (338, 1_543_714_304, 3_087_428_608)
    assert checkpoint.parameters(held) == 1_543_714_304


def test_mixtral_in_19_files(tmp_path):
    """Mixtral-8x7B: 93,405,585,408 bytes, as its index has them."""
    found = audited(tmp_path, huggingface.load("mixtral-8x7b"), published_tensors("mixtral-8x7b"), count=19)
    assert not found.differences
    assert found.decoder.bytes == index_of(tmp_path)["metadata"]["total_size"] == 93_405_585_408


def quantised(tensors, scale):
    """Tensors in which the linear weights of blocks are float8, each with its scales behind it."""
    stored = {}
    for name, (dtype, shape) in tensors.items():
        linear = (".layers." in name and name.endswith("proj.weight")) or "kv_a_proj_with_mqa.weight" in name
        stored[name] = ("F8_E4M3" if linear and "eh_proj" not in name else dtype, shape)
        if stored[name][0] == "F8_E4M3":
            stored[f"{name}_scale_inv"] = (scale, tuple(-(-size // 128) for size in shape))
    return stored


def ahead(tensors, layer, width, vocab):
    """The tensors of the last layer under the number of a prediction layer, and what stands around its block."""
    last, prefix = f"model.layers.{layer - 1}.", f"model.layers.{layer}."
    block = {name.replace(last, prefix): value for name, value in tensors.items() if name.startswith(last)}
    vectors = {f"{prefix}{name}.weight": ("BF16", (width,)) for name in ("enorm", "hnorm", "shared_head.norm")}
    tables = {f"{prefix}{name}.weight": ("BF16", (vocab, width)) for name in ("embed_tokens", "shared_head.head")}
    return block | vectors | tables | {f"{prefix}eh_proj.weight": ("BF16", (width, 2 * width))}


def test_deepseek_v3_in_163_files(tmp_path):
    """671,026,419,200 scalars; beside them prediction layers, their tables and scales, 684,531,386,000 in all."""
    reading = huggingface.load("deepseek-v3")
    tensors = published_tensors("deepseek-v3")
    tensors |= ahead(tensors, layer=61, width=7168, vocab=129_280)
    biases = [name for name in tensors if name.endswith("e_score_correction_bias")]
    tensors |= {name: ("F32", tensors[name][1]) for name in biases}  # whatever the others' dtype is
    found = audited(tmp_path, reading, quantised(tensors, "F32"), count=163)
    assert lines(found) == []
    assert found.decoder.scalars == 671_026_419_200
    scalars = {name: count for name, (_, count) in groups(found).items()}
    assert scalars == {extra.name: extra.scalars for extra in reading.extras}
    assert found.decoder.scalars + sum(scalars.values()) == 684_531_386_000


def test_gpt_oss_is_counted_unpacked(tmp_path):
    """gpt-oss-20b: 20,914,757,184 weights in a header of 11,956,805,184 elements, 597,196,800 of them scales."""
    tensors = mxfp4(published_tensors("gpt-oss-20b"))
    found = audited(tmp_path, huggingface.load("gpt-oss-20b"), tensors, count=3)
    assert lines(found) == []
    assert found.decoder.scalars == 20_914_757_184
    assert groups(found) == {"mxfp4_scales": (48, 597_196_800)}
    assert sum(prod(shape) for _, shape in tensors.values()) == 11_956_805_184


def test_the_file_of_gpt2(tmp_path):
    """The published file lacks the model's own prefix, and keeps a causal mask in each layer."""
    tensors = {name.removeprefix("transformer."): value for name, value in published_tensors("gpt2", "F32").items()}
    tensors |= {f"h.{layer}.attn.bias": ("F32", (1, 1, 1024, 1024)) for layer in range(12)}
    found = audited(tmp_path, huggingface.load("gpt2"), tensors)
    assert lines(found) == []
    assert found.decoder.scalars == 124_439_808 and groups(found) == {"mask_buffers": (12, 12 * 1024**2)}


def test_a_vision_tower_is_named_and_not_checked(tmp_path):
    """Whatever it holds; without a tower in the config its tensors are unknown."""
    config = published_config("gemma-3-27b")
    with torch.device("meta"):
        module = Gemma3ForConditionalGeneration(modules.settings(config))
    tensors = {name: ("BF16", shape) for name, shape in modules.published(module).items()}
    found = audited(tmp_path, config, tensors, count=2)
    assert lines(found) == [] and found.decoder.scalars == 27_009_346_304
    towers = [name for name in tensors if not name.startswith("language_model.")]
    assert groups(found)["vision_tower"][0] == len(towers) > 400
    without = {name: value for name, value in config.items() if name != "vision_config"}
    assert len(audit(read(without), checkpoint.load(tmp_path)).differences) == len(towers)


@pytest.mark.parametrize("family", strategies.CONFIGS)
@FEW
@given(data=st.data())
def test_any_model_of_a_family_agrees(family, data, tmp_path_factory):
    """Whatever the config's dials, in one file or in several."""
    config = data.draw(strategies.configs(family))
    tensors = tensors_of(config)
    if family == "gemma3":
        tensors = {f"language_model.{name}": value for name, value in tensors.items()}
    found = audited(tmp_path_factory.mktemp("model"), config, tensors, count=data.draw(st.integers(1, 3)))
    assert lines(found) == []
    assert found.decoder.scalars == params.count(read(config).spec).stored


# Planted differences


QUERY = "model.layers.1.self_attn.q_proj.weight"
UP = "model.layers.0.mlp.up_proj.weight"
SMALL = tensors_of(LLAMA)


def without(*names):
    return {name: value for name, value in SMALL.items() if name not in names}


PLANTED = {
    "renamed": (without(QUERY) | {"model.layers.1.self_attn.wq.weight": SMALL[QUERY]}, [
        f"missing: {QUERY}: expected BF16 of 64 x 64",
        "unknown: model.layers.1.self_attn.wq.weight: BF16 of 64 x 64",
    ]),
    "transposed": (SMALL | {UP: ("BF16", (64, 128))}, [f"shape: {UP}: expected 128 x 64, got 64 x 128, transposed"]),
    "truncated": (SMALL | {UP: ("BF16", (127, 64))}, [f"shape: {UP}: expected 128 x 64, got 127 x 64"]),
    "flat": (SMALL | {UP: ("BF16", (128 * 64,))}, [f"shape: {UP}: expected 128 x 64, got 8192"]),
    "scalar": (SMALL | {"model.norm.weight": ("BF16", ())}, ["shape: model.norm.weight: expected 64, got one scalar"]),
    "dtype": (SMALL | {UP: ("F32", (128, 64))}, [f"dtype: {UP}: expected BF16, got F32"]),
    "packed": (SMALL | {UP: ("U8", (64, 64))}, [
        f"shape: {UP}: expected 128 x 64, got 64 x 64",
        f"dtype: {UP}: expected BF16, got U8",
    ]),
    "missing": (without(QUERY), [f"missing: {QUERY}: expected BF16 of 64 x 64"]),
    "head": (without("lm_head.weight"), ["missing: lm_head.weight: expected BF16 of 96 x 64"]),
    "another": (SMALL | {"model.layers.2.mlp.up_proj.weight": SMALL[UP]}, [
        "unknown: model.layers.2.mlp.up_proj.weight: BF16 of 128 x 64",
    ]),
    "bias": (SMALL | {"model.layers.0.mlp.up_proj.bias": ("BF16", (128,))}, [
        "unknown: model.layers.0.mlp.up_proj.bias: BF16 of 128",
    ]),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_difference_is_found_and_named(name, tmp_path):
    """It alone, with what was expected and what was found."""
    tensors, expected = PLANTED[name]
    assert lines(audited(tmp_path, LLAMA, tensors, count=2)) == expected


def test_a_tensor_of_another_shape_is_not_counted(tmp_path):
    """Neither it nor its scalars are among those that were found."""
    found = audited(tmp_path, LLAMA, SMALL | {UP: ("BF16", (127, 64))})
    assert found.decoder.tensors == len(SMALL) - 1
    assert found.decoder.scalars == params.count(read(LLAMA).spec).unique - 128 * 64


def test_a_tied_head_that_is_stored_twice(tmp_path):
    """A copy is a difference of its own, whatever the family calls the head."""
    found = audited(tmp_path, LLAMA | {"tie_word_embeddings": True}, SMALL)
    assert lines(found) == ["tied head: lm_head.weight: stored twice, as the token table and as BF16 of 96 x 64"]


def test_a_config_without_a_dtype_takes_any_float(tmp_path):
    """And one whose word for it is not known is refused."""
    config = {name: value for name, value in LLAMA.items() if name != "torch_dtype"}
    for dtype in ("F16", "BF16", "F32", "F64"):
        assert not audited(tmp_path, config, tensors_of(config, dtype)).differences
    (difference, *_) = lines(audited(tmp_path, config, SMALL | {UP: ("F8_E4M3", (128, 64))}))
    assert difference == f"dtype: {UP}: expected BF16 or F16 or F32 or F64, got F8_E4M3"
    with pytest.raises(InputError, match=r"^config: dtype: expected one of bfloat16, .*, got 'int3'$"):
        audit(read(config | {"dtype": "int3"}), checkpoint.load(tmp_path))


def test_files_that_contradict_their_index(tmp_path):
    """A tensor in the wrong file, in two files, in none, in a file that the index does not know of, a stale total."""
    reading = read(LLAMA)
    shards(tmp_path, SMALL, 2)
    first, second = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    index = index_of(tmp_path)
    places, size = index["weight_map"], index["metadata"]["total_size"]
    assert places[UP] == first and places[QUERY] == second

    def found(**metadata):
        return lines(audit(reading, checkpoint.load(tmp_path, partial=True)))

    write_index(tmp_path, places | {UP: second}, total_size=size)
    assert found() == [f"wrong file: {UP}: the index says {second}, it lies in {first}"]
    write_index(tmp_path, {name: file for name, file in places.items() if name != UP}, total_size=size)
    assert found() == [f"unlisted: {UP}: it lies in {first}, and the index lacks it"]
    write_index(tmp_path, places | {"ghost": first}, total_size=size)
    assert found() == [f"absent: ghost: the index says {first}, {first} lacks it"]
    write_index(tmp_path, places, total_size=size - 2)
    assert found() == [f"total_size: index: the index says {size - 2:,} bytes, the tensors take {size:,}"]
    unique = params.count(reading.spec).unique
    write_index(tmp_path, places, total_size=size, total_parameters=unique + 1)
    assert found() == [f"total_parameters: index: the index says {unique + 1:,}, the config {unique:,}"]
    write_index(tmp_path, places, total_size=size, total_parameters=unique)
    assert found() == []


def test_a_tensor_that_a_file_of_the_index_lacks(tmp_path):
    """It is said once, as the index's."""
    shards(tmp_path, without(QUERY), 2)
    index = index_of(tmp_path)
    file = "model-00002-of-00002.safetensors"
    write_index(tmp_path, index["weight_map"] | {QUERY: file}, **index["metadata"])
    found = audit(read(LLAMA), checkpoint.load(tmp_path))
    assert lines(found) == [f"absent: {QUERY}: the index says {file}, {file} lacks it"]


def test_a_tensor_in_two_files(tmp_path):
    """Both files are named."""
    shards(tmp_path, SMALL, 2)
    first, second = sorted(tmp_path.glob("*.safetensors"))
    held = checkpoint.header(second).tensors
    sparse(second, {name: (tensor.dtype, tensor.shape) for name, tensor in held.items()} | {UP: SMALL[UP]})
    found = lines(audit(read(LLAMA), checkpoint.load(tmp_path)))
    assert f"stored twice: {UP}: in {first.name} and in {second.name}" in found
    assert any(line.startswith("total_size: index: ") for line in found)


def test_an_absent_file_is_one_line(tmp_path):
    """Its tensors are not missed one by one."""
    shards(tmp_path, SMALL, 3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    found = audit(read(LLAMA), checkpoint.load(tmp_path, partial=True))
    held = sum(file.startswith("model-00002") for file in index_of(tmp_path)["weight_map"].values())
    assert lines(found) == [
        f"absent file: model-00002-of-00003.safetensors: the index says that it holds {held} tensors"
    ]
    assert found.decoder.tensors == len(SMALL) - held


def test_an_absent_file_hides_no_name(tmp_path):
    """Where only the head's file is there, the index still says that the others' names have the model's prefix."""
    shards(tmp_path, without("lm_head.weight") | {"lm_head.weight": SMALL["lm_head.weight"]}, len(SMALL))
    for file in set(index_of(tmp_path)["weight_map"].values()) - {index_of(tmp_path)["weight_map"]["lm_head.weight"]}:
        (tmp_path / file).unlink()
    found = audit(read(LLAMA), checkpoint.load(tmp_path, partial=True))
    assert {difference.kind for difference in found.differences} == {"absent file"}
    assert all(line.endswith("the index says that it holds 1 tensor") for line in lines(found))


@FEW
@given(data=st.data())
def test_one_changed_tensor_is_found_wherever_it_is(data, tmp_path_factory):
    """In any family, whichever tensor it is and whatever is changed of it; and two files differ in it alone."""
    config = data.draw(strategies.configs("llama", "gpt2", "deepseek_v3", "gpt_oss", "mixtral"))
    tensors = tensors_of(config)
    name = data.draw(st.sampled_from(sorted(tensors)))
    dtype, shape = tensors[name]
    longer = (shape[0] + 1, *shape[1:])
    other = data.draw(st.sampled_from([None, ("I32", shape), (dtype, (*shape, 1)), (dtype, longer)]))
    changed = {key: value for key, value in (tensors | {name: other}).items() if value is not None}
    folders = [tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("other")]
    shards(folders[0], changed, 1)
    shards(folders[1], tensors, 1)
    one, whole = map(checkpoint.load, folders)
    assert [difference.name for difference in audit(read(config), one).differences] == [name]
    assert [difference.name for difference in compare(one, whole)] == [name]
    assert not compare(whole, whole)


# Quantised weights


def in_fp8(config, rows, columns, spared):
    """A config with a section, and the tensors of Hugging Face's module with float8 layers, on the meta device."""
    section = {"quant_method": "fp8", "weight_block_size": [rows, columns], "modules_to_not_convert": spared}
    module = modules.build(config)
    with torch.device("meta"):
        quantization = FineGrainedFP8Config(weight_block_size=(rows, columns))
        module = replace_with_fp8_linear(module, spared, quantization)
    tensors = {
        name: ("F8_E4M3" if tensor.dtype == torch.float8_e4m3fn else "BF16", tuple(tensor.shape))
        for name, tensor in module.state_dict().items()
    }
    return config | {"quantization_config": section}, tensors


def test_fp8_is_as_the_library_stores_it(tmp_path):
    """Blocks that a matrix does not fill have a scale too; spared modules stay as they are."""
    config, tensors = in_fp8(LLAMA, 48, 40, ["lm_head", "model.layers.1.mlp"])
    found = audited(tmp_path, config, tensors)
    assert lines(found) == []
    assert found.decoder.scalars == params.count(read(LLAMA).spec).unique
    assert groups(found)["fp8_scales"][0] == 7 + 4


@pytest.mark.parametrize(
    "pattern", ["model.layers.0", "mlp", "q_proj", "self_attn.q_proj", "model.layers.*.self_attn", ".*down_proj", "q"]
)
def test_modules_are_spared_as_the_library_spares_them(pattern, tmp_path):
    """By their beginning, their end or a pattern, at a dot."""
    assert lines(audited(tmp_path, *in_fp8(LLAMA, 32, 32, [pattern, "lm_head"]))) == []


def test_mxfp4_is_as_the_library_stores_it():
    """Packed stacks of experts, and their biases."""
    config = published_config("gpt-oss-20b")
    with torch.device("meta"):
        experts = Mxfp4GptOssExperts(modules.settings(config))
    theirs = {name: tuple(tensor.shape) for name, tensor in experts.state_dict().items()}
    prefix = "model.layers.0.mlp.experts."
    ours = {name.removeprefix(prefix): shape for name, (_, shape) in mxfp4(published_tensors("gpt-oss-20b")).items()}
    for name in ("gate_up_proj", "down_proj"):  # the library keeps a row's blocks in one axis
        *rows, blocks, size = ours.pop(f"{name}_blocks")
        assert theirs.pop(name) == (*rows, blocks * size)
    assert theirs.items() <= ours.items() and len(theirs) == 2


def stored(config, section):
    """The tensors that a rule gives for the plain ones, and the sum of their elements."""
    plain = tensors_of(config)
    given = {}
    for name, (dtype, shape) in plain.items():
        packs = PACKED[section.get("quant_method", "mlx")]
        linear = ".layers." in name and name.endswith("proj.weight")
        table = "quant_method" not in section and name in ("model.embed_tokens.weight", "lm_head.weight")
        given |= packs(name.removesuffix(".weight"), *shape, section) if linear or table else {name: (dtype, shape)}
    return given


def gptq(module, out, into, section):
    bits, groups = section["bits"], into // section["group_size"]
    return {
        f"{module}.qweight": ("I32", (into * bits // 32, out)),
        f"{module}.qzeros": ("I32", (groups, out * bits // 32)),
        f"{module}.scales": ("F16", (groups, out)),
        f"{module}.g_idx": ("I32", (into,)),
    }


def awq(module, out, into, section):
    groups = into // section["group_size"]
    return {
        f"{module}.qweight": ("I32", (into, out // 8)),
        f"{module}.qzeros": ("I32", (groups, out // 8)),
        f"{module}.scales": ("F16", (groups, out)),
    }


def bitsandbytes(module, out, into, section):
    if section.get("load_in_8bit"):
        return {f"{module}.weight": ("I8", (out, into)), f"{module}.SCB": ("F32", (out,))}
    blocks = -(-out * into // 64)
    return {
        f"{module}.weight": ("U8", (-(-out * into // 2), 1)),
        f"{module}.weight.absmax": ("U8", (blocks,)),
        f"{module}.weight.quant_map": ("F32", (16,)),
        f"{module}.weight.quant_state.bitsandbytes__nf4": ("U8", (89,)),
        f"{module}.weight.nested_absmax": ("F32", (-(-blocks // 256),)),
        f"{module}.weight.nested_quant_map": ("F32", (256,)),
    }


def mlx(module, out, into, section):
    groups = (out, into // section["group_size"])
    return {
        f"{module}.weight": ("U32", (out, into * section["bits"] // 32)),
        f"{module}.scales": ("BF16", groups),
        f"{module}.biases": ("BF16", groups),
    }


def compressed(module, out, into, section):
    if section["format"] == "float-quantized":
        return {f"{module}.weight": ("F8_E4M3", (out, into)), f"{module}.weight_scale": ("BF16", (out, 1))}
    (group,) = section["config_groups"].values()
    bits, groups = group["weights"]["num_bits"], into // group["weights"]["group_size"]
    zeros = {f"{module}.weight_zero_point": ("I32", (out * bits // 32, groups))}
    return {
        f"{module}.weight_packed": ("I32", (out, into * bits // 32)),
        f"{module}.weight_scale": ("BF16", (out, groups)),
        f"{module}.weight_shape": ("I64", (2,)),
    } | ({} if group["weights"].get("symmetric", True) else zeros)


#: What each method's own writers give for one linear map: AutoGPTQ, AutoAWQ, bitsandbytes, MLX, llm-compressor.
PACKED = {"gptq": gptq, "awq": awq, "bitsandbytes": bitsandbytes, "mlx": mlx, "compressed-tensors": compressed}
NF4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
W4 = {"weights": {"num_bits": 4, "group_size": 32, "strategy": "group"}, "targets": ["Linear"]}
W4_ZEROS = W4 | {"weights": W4["weights"] | {"symmetric": False}}
W8 = {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}, "targets": ["Linear"]}
CT = {"quant_method": "compressed-tensors", "ignore": ["lm_head", "re:.*norm$"]}
SECTIONS = {
    "gptq 2": {"quant_method": "gptq", "bits": 2, "group_size": 32},
    "gptq 3": {"quant_method": "gptq", "bits": 3, "group_size": 64},
    "gptq 4": {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False},
    "gptq 8": {"quant_method": "gptq", "bits": 8, "group_size": 32},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "modules_to_not_convert": None},
    "bitsandbytes 4": {"quant_method": "bitsandbytes", "load_in_4bit": True, **NF4, "llm_int8_skip_modules": None},
    "bitsandbytes 8": {"quant_method": "bitsandbytes", "load_in_8bit": True},
    "mlx 4": {"group_size": 64, "bits": 4},
    "mlx 6": {"group_size": 64, "bits": 6},
    "mlx 8": {"group_size": 32, "bits": 8},
    "compressed-tensors 4": CT | {"format": "pack-quantized", "config_groups": {"group_0": W4}},
    "compressed-tensors 4, zeros": CT | {"format": "pack-quantized", "config_groups": {"group_0": W4_ZEROS}},
    "compressed-tensors 8": CT | {"format": "float-quantized", "config_groups": {"group_0": W8}},
}  # fmt: skip


@pytest.mark.parametrize("name", SECTIONS)
@pytest.mark.parametrize("bias", [False, True])
def test_the_count_is_one_number_whatever_the_bits(name, bias, tmp_path):
    """A model packed in any way has the parameters that it has unpacked, and its scales are named."""
    config = LLAMA | {"attention_bias": bias}
    key = "quantization_config" if "quant_method" in SECTIONS[name] else "quantization"
    tensors = stored(config, SECTIONS[name])
    found = audited(tmp_path, config | {key: SECTIONS[name]}, tensors)
    assert lines(found) == []
    unique = params.count(read(config).spec).unique
    assert found.decoder.scalars == unique != sum(prod(shape) for _, shape in tensors.values())
    assert sum(tensors for tensors, _ in groups(found).values()) + found.decoder.tensors == len(tensors)
    index = index_of(tmp_path)
    write_index(tmp_path, index["weight_map"], **index["metadata"], total_parameters=1)  # nobody knows of what
    assert lines(audit(read(config | {key: SECTIONS[name]}), checkpoint.load(tmp_path))) == []
    # Read by the rule of another number of bits or of none, it differs.
    assert audit(read(config), checkpoint.load(tmp_path)).differences


@pytest.mark.parametrize(
    ("pattern", "spared"),
    [
        (r"re:.*\.layers\.0\.self", ["model.layers.0.self_attn.q_proj"]),
        (r"re:.*\.layers\.0\.self$", []),
        (r"re:.*q_proj$", ["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"]),
        ("re:self_attn", []),
    ],
)
def test_an_expression_begins_a_name_and_ends_it_only_where_it_says_so(pattern, spared):
    """As Python's ``re.match`` has it, which compressed-tensors holds against the names of modules."""
    modules = [f"model.layers.{layer}.{name}" for layer in (0, 1) for name in ("self_attn.q_proj", "mlp.up_proj")]
    rule = quantization.rule(SECTIONS["compressed-tensors 4"] | {"ignore": [pattern]})
    assert [module for module in modules if rule.spared(module)] == spared
    assert [module for module in modules if re.match(pattern.removeprefix("re:"), module)] == spared


def test_llama_in_4_bits(tmp_path):
    """Llama-3.1-8B in w4a16: 6,979,321,856 weights in an eighth as many integers, 8,030,261,248 parameters in all."""
    section = {**SECTIONS["compressed-tensors 4"]}
    section["config_groups"] = {"group_0": W4 | {"weights": W4["weights"] | {"group_size": 128}}}
    config = published_config("llama-3.1-8b") | {"quantization_config": section}
    tensors = stored(config, section)
    found = audited(tmp_path, config, tensors, count=2)
    assert lines(found) == [] and found.decoder.scalars == 8_030_261_248
    packed = sum(prod(shape) for name, (_, shape) in tensors.items() if name.endswith("weight_packed"))
    assert 8 * packed == 6_979_321_856


GPTQ, AWQ = SECTIONS["gptq 4"], SECTIONS["awq"]
FP8 = {"quant_method": "fp8", "weight_block_size": [8, 8]}
BNB = {"quant_method": "bitsandbytes"}
TWO = {"format": "pack-quantized", "config_groups": {"a": W4, "b": W4}}
REFUSED = {
    "unknown": ({"quant_method": "hqq", "nbits": 4}, r"\.quant_method: expected one of awq, .*, got 'hqq'"),
    "list": ({"quant_method": ["fp8"]}, r"\.quant_method: expected one of awq, .*, got \['fp8'\]"),
    "unnamed": ({"bits": 4}, r"\.quant_method: expected one of awq, .*, got None"),
    "no bits": (GPTQ | {"bits": None}, ": Object missing required field bits"),
    "other bits": (GPTQ | {"bits": 5}, r"\.bits: Invalid enum value 5"),
    "no group": (GPTQ | {"group_size": None}, ": Object missing required field group_size"),
    "group of nothing": (GPTQ | {"group_size": 0}, r"\.group_size: expected -1 or a size, got 0"),
    "marlin": (GPTQ | {"checkpoint_format": "marlin"}, r"\.checkpoint_format: "),
    "gemv": (AWQ | {"version": "gemv"}, r"\.version: "),
    "no block": (FP8 | {"weight_block_size": None}, ": Object missing required field weight_block_size"),
    "static": (FP8 | {"activation_scheme": "static"}, r"\.activation_scheme: "),
    "both": (BNB | {"load_in_4bit": True, "load_in_8bit": True}, ": expected one of load_in_4bit and load_in_8bit"),
    "neither": (BNB, ": expected one of load_in_4bit and load_in_8bit"),
    "pattern": (AWQ | {"modules_to_not_convert": ["(a+)+$"]}, ": a pattern that is not known here: '"),
    "patterns": (AWQ | {"modules_to_not_convert": ["*a*"] * 101}, ": more than 100 patterns"),
    "dense": ({"quant_method": "mxfp4"}, r"\.quant_method: mxfp4 of model.layers.0.self_attn.q_proj.weight is not"),
    "two groups": (CT | TWO, r"\.config_groups: expected one group, got 2"),
    "floats": (CT | {"format": "float-quantized", "config_groups": {"a": W4}}, r"\.format: float-quantized of 4 bits"),
    "mode": ({"bits": 4, "group_size": 32, "mode": "mxfp4"}, r"\.mode: "),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_packing_that_no_rule_covers_is_refused(name, tmp_path):
    """It is not guessed, and the section's field is named."""
    section, cause = REFUSED[name]
    sparse(tmp_path / "model.safetensors", SMALL)
    with pytest.raises(InputError, match=f"^config: quantization_config{cause}"):
        audit(read(LLAMA | {"quantization_config": section}), checkpoint.load(tmp_path))


def test_values_that_do_not_fill_integers_are_refused(tmp_path):
    """100 of 3 bits: how a file would pad them is not known."""
    config = LLAMA | {"intermediate_size": 100, "quantization_config": GPTQ | {"bits": 3}}
    sparse(tmp_path / "model.safetensors", SMALL)
    with pytest.raises(
        InputError, match=r"bits: model.layers.0.mlp.gate_proj.weight: 100 values of 3 bits do not fill"
    ):
        audit(read(config), checkpoint.load(tmp_path))


def test_a_config_of_billions_of_tensors_is_refused(tmp_path):
    """A few bytes of a config may describe them; they are never listed."""
    sparse(tmp_path / "model.safetensors", SMALL)
    huge = published_config("mixtral-8x7b") | {"num_local_experts": 65_536, "num_hidden_layers": 10_000}
    with pytest.raises(InputError, match=r"^config: config: describes 1,966,\d+,\d+ tensors, more than 1,000,000$"):
        audit(read(huge), checkpoint.load(tmp_path))


def test_experts_in_a_stack_have_no_other_rule(tmp_path):
    """gpt-oss by anything but MXFP4 is refused."""
    config = published_config("gpt-oss-20b") | {"quantization_config": SECTIONS["gptq 4"]}
    sparse(tmp_path / "model.safetensors", SMALL)
    with pytest.raises(InputError, match=r"gptq of stacked experts is not implemented"):
        audit(read(config), checkpoint.load(tmp_path))


def test_two_names_of_one_section_agree():
    """MLX writes its section under both; one that says something else is refused."""
    section = {"group_size": 64, "bits": 4}
    assert read(LLAMA | {"quantization": section, "quantization_config": section}).quantization == section
    with pytest.raises(InputError, match="quantization: expected what quantization_config says"):
        read(LLAMA | {"quantization": section, "quantization_config": {"bits": 8}})


# Two checkpoints


def test_two_checkpoints_are_compared(tmp_path):
    """Names, shapes and dtypes, however each is split."""
    changed = without(UP) | {"x": ("F32", (2,))}
    for folder, tensors, count in (("base", SMALL, 1), ("same", SMALL, 3), ("tuned", changed, 2)):
        (tmp_path / folder).mkdir()
        shards(tmp_path / folder, tensors, count)
    base, same, tuned = (checkpoint.load(tmp_path / folder) for folder in ("base", "same", "tuned"))
    assert compare(same, base) == ()
    assert [str(difference) for difference in compare(tuned, base)] == [
        f"missing: {UP}: expected BF16 of 128 x 64",
        "unknown: x: F32 of 2",
    ]
    index = replace(tuned.index, total_size=1)
    assert compare(base, replace(tuned, index=index))[0].kind == "total_size"
