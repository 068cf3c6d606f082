"""The reader of a config.json: what is taken, what is refused, and in which words."""

import dataclasses
import json
import os

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING

from accounting import huggingface, params, published
from accounting.authorities import huggingface as modules
from accounting.families import FAMILIES
from accounting.files import InputError
from accounting.huggingface import CONFIG_LIMIT, load, read
from accounting.spec import Experts
from tests import strategies

LLAMA = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
QWEN3_MOE = {
    **LLAMA,
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
GPT2 = {"model_type": "gpt2", "vocab_size": 9, "n_positions": 6, "n_embd": 8, "n_layer": 3, "n_head": 2}
DEEPSEEK = {
    **LLAMA,
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}

OLMO3 = {**LLAMA, "model_type": "olmo3"}
GEMMA3 = {"model_type": "gemma3_text"}
GPT_OSS = {**LLAMA, "model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2}
LINEAR = {"rope_type": "linear", "factor": 2.0}


def refused(config, **options):
    """The one line with which a config is refused."""
    __tracebackhide__ = True
    with pytest.raises(InputError) as error:
        read(config, **options)
    line = str(error.value)
    assert "\n" not in line and line.isprintable()
    return line


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"hidden_size": None}, "hidden_size: expected int, got null"),
        ({"hidden_size": True}, "hidden_size: expected int, got bool"),
        ({"hidden_size": 32.0}, "hidden_size: expected int, got float"),
        ({"hidden_size": "32"}, "hidden_size: expected int, got str"),
        ({"hidden_size": [32]}, "hidden_size: expected int, got array"),
        ({"hidden_size": 0}, "hidden_size: expected int >= 1, got 0"),
        ({"vocab_size": -5}, "vocab_size: expected int >= 1, got -5"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: expected int <= 10000, got 1000000000"),
        ({"intermediate_size": 10**30}, f"intermediate_size: expected int <= {2**24}, got {10**30}"),
        ({"num_attention_heads": 5}, "num_attention_heads: expected a divisor of hidden_size 32, got 5"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: expected a divisor of the 4 query heads, got 3"),
        ({"head_dim": 7}, "head_dim: expected an even number of rotated dimensions, got 7"),
        ({"head_dim": 2**23}, "num_attention_heads * head_dim: expected an integer from 1 to"),
        (
            {"hidden_act": "mish"},
            "hidden_act: expected one of gelu, gelu_new, gelu_pytorch_tanh, relu, ",
        ),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings: expected bool, got str"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings: expected bool, got int"),
        ({"rope_theta": -1.0}, "rope_theta: expected float > 0.0, got -1.0"),
        ({"rope_theta": 1}, "rope_theta: expected a number above 1, got 1.0"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope_scaling.type: unknown value 'longrope'"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor: missing"),
        ({"rope_parameters": {"rope_type": "magic"}}, "rope_parameters: "),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}}, "partial_rotary_factor: "),
        ({"x` - at `$.vocab_size": 1}, "x` - at `$.vocab_size: a field that is not known"),
        ({"cross_layer_sharing": 2}, "cross_layer_sharing: a field that is not known in this family"),
        ({"per_layer_config": {"0": {"head_dim": 4}}}, "per_layer_config: a field that is not known"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures: expected LlamaForCausalLM"),
        ({"architectures": "LlamaForCausalLM"}, "architectures: expected array | null, got str"),
        ({"model_type": "mamba"}, "model_type: expected one of deepseek_v3, "),
        ({"model_type": None}, "model_type: expected one of deepseek_v3, "),
        ({"model_type": 3}, "model_type: expected one of "),
    ],
)
def test_bad_fields_are_named(fields, expected):
    """A field that cannot be taken is named, with what was expected of it."""
    assert expected in refused({**LLAMA, **fields})


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({**MIXTRAL, "num_experts_per_tok": 5}, "num_experts_per_tok: expected at most the 4 experts, got 5"),
        ({**MIXTRAL, "sliding_window": 0}, "sliding_window: expected"),
        ({**DEEPSEEK, "n_group": 3}, "n_group: expected a divisor of the 8 experts, got 3"),
        ({**DEEPSEEK, "topk_group": 3}, "topk_group: expected at most 2 groups, got 3"),
        ({**DEEPSEEK, "num_experts_per_tok": 5}, "num_experts_per_tok: expected no more than the experts of 1 groups"),
        ({**DEEPSEEK, "scoring_func": "softmax"}, "scoring_func: expected 'sigmoid'"),
        ({**DEEPSEEK, "topk_method": "greedy"}, "topk_method: expected 'noaux_tc'"),
        ({**DEEPSEEK, "moe_layer_freq": 2}, "moe_layer_freq: expected 1"),
        ({**DEEPSEEK, "head_dim": 8}, "head_dim: expected 4"),
        ({**DEEPSEEK, "qk_head_dim": 4}, "qk_head_dim: expected 8"),
        ({**QWEN3_MOE, "num_local_experts": 5}, "num_experts: expected what num_local_experts says"),
        ({**QWEN3_MOE, "num_experts": None}, "num_experts: missing"),
        ({**DEEPSEEK, "num_key_value_heads": 2}, "num_key_value_heads: expected num_attention_heads 4"),
        ({**GPT2, "n_head": 3}, "n_head: expected a divisor of n_embd 8, got 3"),
        ({**GPT2, "add_cross_attention": True}, "add_cross_attention: expected False"),
        ({**GPT2, "n_ctx": 12}, "n_ctx: expected n_positions 6, got 12"),
        ({**LLAMA, "model_type": "olmo3", "layer_types": ["full_attention"]}, "layer_types: expected 2 entries, got 1"),
        (
            {**LLAMA, "model_type": "olmo3", "layer_types": ["linear", "full_attention"]},
            "layer_types[0]: expected one of full_",
        ),
        ({"model_type": "gemma3", "text_config": {"hidden_size": 0}}, "text_config.hidden_size: expected int >= 1"),
        ({"model_type": "gemma3", "text_config": {"hyper": 1}}, "text_config.hyper: a field that is not known"),
        ({"model_type": "gemma3", "text_config": 3}, "text_config: expected object, got int"),
        ({"model_type": "gemma3"}, "text_config: missing"),
        ({"model_type": "gemma3", "text_config": {"head_dim": 7}}, "text_config.head_dim: expected an even number"),
        ({"model_type": "gemma3", "text_config": {"model_type": "llama"}}, "text_config.model_type: expected"),
        ({"model_type": "gemma3", "text_config": {"tie_word_embeddings": False}}, "text_config.tie_word_embeddings: "),
        ({"model_type": "gemma3", "text_config": {}, "architectures": ["X"]}, "text_config.architectures: expected"),
        (
            {"model_type": "gemma3", "text_config": {"architectures": None}, "architectures": ["X"]},
            "text_config.architectures: expected",
        ),
        ({**QWEN3_MOE, "use_qk_norm": False}, "use_qk_norm: expected True"),
        ({**DEEPSEEK, "num_mtp_layers": 2}, "num_mtp_layers: expected num_nextn_predict_layers 0"),
        (
            {**QWEN3_MOE, "layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True},
            "layer_types: expected sliding_attention on every layer",
        ),
        (
            {**QWEN3_MOE, "layer_types": ["sliding_attention"] * 2},
            "layer_types: expected full_attention on every layer",
        ),
        ({**QWEN3_MOE, "layer_types": ["full_attention"]}, "layer_types: expected full_attention on every layer"),
        ({**GEMMA3, "attn_logit_softcapping": 50.0}, "attn_logit_softcapping: expected None, another value"),
        ({**GEMMA3, "sliding_window": None}, "sliding_window: expected an integer, got null"),
        ({**GEMMA3, "_sliding_window_pattern": 2}, "_sliding_window_pattern: expected 6"),
        (
            {**GEMMA3, "sliding_window_pattern": 2, "_sliding_window_pattern": 6},
            "_sliding_window_pattern: expected 2",
        ),
        ({**GPT_OSS, "sliding_window": None}, "sliding_window: expected an integer, got null"),
        ({**GPT_OSS, "hidden_act": "gelu"}, "hidden_act: expected one of silu, swish, got 'gelu'"),
        ({**OLMO3, "sliding_window": None}, "sliding_window: expected an integer, got null"),
        *(
            ({**one, "rope_parameters": {**LINEAR, "rope_theta": 50.0}}, "rope_parameters: expected a section for each")
            for one in (OLMO3, GEMMA3)
        ),
        *(
            ({**one, "rope_parameters": {"full_attention": LINEAR}}, "rope_parameters: expected one section for all")
            for one in (LLAMA, GPT_OSS, QWEN3_MOE, DEEPSEEK, {**LLAMA, "model_type": "olmo2"})
        ),
        *(
            ({**one, "rope_scaling": LINEAR, "rope_parameters": {"full_attention": LINEAR}}, "rope_scaling: expected")
            for one in (OLMO3, GEMMA3)
        ),
        *(
            ({**one, "rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.type: expected the name rope_")
            for one in (OLMO3, GEMMA3)
        ),
        ({**GEMMA3, "rope_parameters": {"full_attention": 3}}, "rope_parameters: Expected"),
        ({**LLAMA, "rope_scaling": LINEAR, "rope_parameters": {"rope_theta": 50.0}}, "rope_scaling: expected no more"),
    ],
)
def test_values_that_no_decoder_has_are_named_as_the_config_names_them(config, expected):
    """What the spec refuses is reported under the config's own field."""
    assert expected in refused(config)


@pytest.mark.parametrize("field", ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"])
def test_a_missing_size_is_not_guessed(field):
    """A size that is not in the file has no value."""
    config = {name: value for name, value in LLAMA.items() if name != field}
    assert f"{field}: missing" in refused(config)


def test_fields_of_other_models_are_inert_at_their_usual_value():
    """Older files write every default; a value that would change the decoder is refused."""
    usual = {"is_llama_config": True, "rope_interleaved": False, "is_encoder_decoder": False, "pruned_heads": {}}
    usual |= {"_num_labels": 1, "is_decoder": True, "bos_token_id": 1, "top_p": 0.9}
    assert read({**LLAMA, **usual}).spec == read(LLAMA).spec
    assert "is_encoder_decoder: a field that is not known" in refused({**LLAMA, "is_encoder_decoder": True})
    assert "pruned_heads: a field that is not known" in refused({**LLAMA, "pruned_heads": {"0": [1]}})


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "got an empty file"),
        (b"not json", "expected a JSON object, line 1 column 1"),
        (json.dumps(LLAMA).encode()[:-9], "expected a JSON object, line 1 column"),
        (b"[1]", "expected a JSON object, got list"),
        (b"null", "expected a JSON object, got NoneType"),
        (b'{"model_type": "llama", "hidden_size": NaN}', "expected finite numbers, got NaN"),
        (b'{"model_type": "llama", "rope_theta": -Infinity}', "expected finite numbers, got -Infinity"),
        (b'{"model_type": "llama", "rope_theta": 1e999}', "expected finite numbers, got 1e999"),
        (b'{"hidden_size": 32, "hidden_size": 64}', "hidden_size: given more than once"),
        (b'{"x": ' + b"[" * 10**6, "nested too deep"),
        (b'{"x": ' + b"9" * 10**5 + b"}", "an integer of thousands of digits"),
        (b'{"x": "\xff"}', "expected JSON in UTF-8, got byte 0xff"),
        (b'{"model_type": "llama", "\\ud800": 1}', "expected text, got half of a surrogate pair"),
        (b'{"model_type": "\\ud800"}', "expected text, got half of a surrogate pair"),
        (b"{" + b", ".join(b'"%d": 0' % i for i in [*range(99_999), 0]) + b"}", "0: given more than once"),
        (b"\xef\xbb\xbf{}", "expected JSON in UTF-8 without a byte order mark"),
        (json.dumps(LLAMA).encode("utf-16"), "expected JSON in UTF-8"),
        (b"version https://git-lfs.github.com/spec/v1\n", "expected a JSON object"),
    ],
)
def test_what_is_not_a_json_object_is_refused(data, expected):
    """A file that is no JSON object in UTF-8, or holds numbers that JSON does not have."""
    assert expected in refused(data)


def test_a_name_that_breaks_the_line_is_escaped():
    """Control characters of a hostile file never reach the terminal."""
    assert r"\x1b[31m\nhidden" in refused({**LLAMA, "\x1b[31m\nhidden": 1})


@pytest.mark.parametrize("name", ["head_dim", "rope_theta", "tie_word_embeddings", "attention_bias", "hidden_act"])
def test_null_is_absent(name):
    """A null in an optional field is the field left out."""
    assert read({**LLAMA, name: None}).spec == read(LLAMA).spec


def test_null_key_value_heads_are_the_heads():
    """Without key/value heads of their own, all heads have keys and values."""
    for model_type in ("llama", "mistral", "qwen2", "olmo2"):
        spec = read({**LLAMA, "model_type": model_type, "num_key_value_heads": None}).spec
        assert {block.attention.kv_heads for block in spec.blocks} == {4}


def test_null_head_dim_of_mixtral():
    """Mixtral 8x22B has head_dim null: 6144 over 48 heads are 128 each (a 32,000-token vocabulary)."""
    config = {
        **MIXTRAL,
        "vocab_size": 32_000,
        "hidden_size": 6144,
        "intermediate_size": 16_384,
        "num_hidden_layers": 56,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "head_dim": None,
    }
    assert params.count(read(config).spec).unique == modules.unique(modules.build(config)) == 140_620_634_112


def test_head_dim_is_read_before_it_is_derived():
    """Qwen3-4B and Mistral Nemo have heads whose width is not hidden_size over heads."""
    qwen = {
        **LLAMA,
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    }
    nemo = {
        **LLAMA,
        "model_type": "mistral",
        "vocab_size": 131_072,
        "hidden_size": 5120,
        "intermediate_size": 14_336,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    }
    assert params.count(read(qwen).spec).unique == modules.unique(modules.build(qwen)) == 4_022_468_096
    assert params.count(read(nemo).spec).unique == modules.unique(modules.build(nemo)) == 12_247_782_400


def test_the_dense_width_of_an_all_expert_model_does_not_matter():
    """Qwen3-30B-A3B's intermediate_size is 6144 and no layer has it."""
    config = {**QWEN3_MOE, "intermediate_size": 7}
    assert params.count(read(config).spec) == params.count(read({**config, "intermediate_size": 9}).spec)
    assert params.count(read(config).spec) != params.count(read({**config, "moe_intermediate_size": 17}).spec)


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({"sliding_window": 2048}, [None] * 36),
        ({"use_sliding_window": True, "sliding_window": 2048, "num_hidden_layers": 8}, [None] * 8),
        ({"use_sliding_window": True, "sliding_window": 2048}, [None] * 28 + [2048] * 8),
        ({"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0}, [9] * 36),
        ({"use_sliding_window": True, "sliding_window": 9, "layer_types": ["sliding_attention"] * 36}, [9] * 36),
    ],
)
def test_a_window_of_qwen_is_in_force_only_when_it_is_used(fields, windows):
    """sliding_window alone changes nothing; layer_types overrides the rule of the layers."""
    spec = read({**LLAMA, "model_type": "qwen3", "num_hidden_layers": 36, **fields}).spec
    assert [block.attention.window for block in spec.blocks] == windows


@pytest.mark.parametrize(("name", "window", "full"), [("gemma-3-1b", 512, 4), ("gemma-3-27b", 1024, 10)])
def test_gemma_has_one_full_layer_in_six(name, window, full):
    """Five windowed layers, then one that sees everything: 4 of 26 and 10 of 62."""
    windows = [block.attention.window for block in load(name).spec.blocks]
    assert windows.count(None) == full and windows[5] is None
    assert set(windows) == {None, window}


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"kimi_k2"}))
def test_a_default_is_the_one_of_the_configuration_class(family):
    """A field that may be left out has the value that transformers gives it."""
    theirs = {field.name: field.default for field in dataclasses.fields(CONFIG_MAPPING[family])}
    for field in msgspec.structs.fields(FAMILIES[family]):
        if field.default not in (None, msgspec.NODEFAULT) and field.name in theirs:
            default = theirs[field.name]
            assert field.default == default or not (field.default or default), field.name


@given(data=st.data())
def test_window_and_positions_are_those_of_the_configuration_class(data):
    """Windows by layer are what the configuration class resolves the config to."""
    family = data.draw(st.sampled_from(["qwen2", "qwen3", "olmo3", "gemma3_text", "gpt_oss"]))
    config = data.draw(strategies.configs(family))
    theirs = modules.settings(config)
    expected = [theirs.sliding_window if kind == "sliding_attention" else None for kind in theirs.layer_types]
    assert [block.attention.window for block in read(config).spec.blocks] == expected


@given(config=strategies.configs("mistral", "mixtral", "qwen3_moe"))
def test_one_window_for_all_layers(config):
    """These families have the window of the configuration class on every layer, or on none."""
    theirs = modules.settings(config)
    assert {block.attention.window for block in read(config).spec.blocks} == {theirs.sliding_window}


@given(config=strategies.configs(*strategies.SPARSE))
def test_routing_is_that_of_the_configuration_class(config):
    """Scores, their normalisation and scale, groups, clamps and norms are what transformers makes of the config."""
    theirs = modules.settings(config)
    spec = read(config).spec
    assert spec.final_norm.eps == theirs.rms_norm_eps
    for layer in (block.feed_forward for block in spec.blocks if isinstance(block.feed_forward, Experts)):
        router, expert = layer.router, layer.expert
        assert layer.active == theirs.num_experts_per_tok
        match config["model_type"]:
            case "deepseek_v3":
                assert (router.score, router.selection_bias) == ("sigmoid", True)
                assert (router.scale, router.normalize) == (theirs.routed_scaling_factor, theirs.norm_topk_prob)
                assert (router.groups, router.top_groups) == (theirs.n_group, theirs.topk_group)
            case "gpt_oss":
                assert (router.score, router.order) == ("softmax", "top_k_first")
                assert (expert.clamp, expert.gain) == (theirs.swiglu_limit, theirs.swiglu_alpha)
            case "qwen3_moe":
                assert (router.score, router.normalize) == ("softmax", theirs.norm_topk_prob)
            case "mixtral":
                assert (router.score, router.normalize) == ("softmax", True)


@pytest.mark.parametrize("name", published.names())
def test_what_transformers_saves_is_read(name):
    """A config that transformers read and saved again, with and without its defaults, is the same decoder."""
    saved = modules.settings(huggingface.published_config(name))
    for only_differences in (True, False):
        fields = json.loads(saved.to_json_string(use_diff=only_differences))
        assert read(fields).spec == load(name).spec


@pytest.mark.parametrize("name", published.names())
def test_published_configs_have_sources(name):
    """Each published config says where it is published, and holds no null or inert field."""
    assert published.sources()[name]["url"].startswith("https://huggingface.co/")


def test_gemma_counts_the_text_model_and_says_what_it_left_out():
    """The vision tower is named, not counted."""
    reading = load("gemma-3-27b")
    assert reading.not_counted == ("vision_config: the vision tower and its projector",)
    assert params.count(reading.spec).unique == 27_009_346_304


def test_what_a_stranger_writes_reaches_no_terminal_raw(tmp_path):
    """Control characters in a name or in a quantisation's method are escaped."""
    reading = read({**LLAMA, "quantization_config": {"quant_method": "\x1b[31m\nx"}}, name="a\x1bb")
    assert reading.name.isprintable()
    assert all(text.isprintable() for text in reading.not_counted)


def test_scales_are_counted_only_where_their_rule_is_known():
    """FP8 without a block, and modules left out of a quantisation, are named and not counted."""
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    whole = read({**DEEPSEEK, "quantization_config": fp8})
    assert [extra.name for extra in whole.extras] == ["fp8_scales"]
    assert not whole.not_counted
    for section in ({"quant_method": "fp8"}, {**fp8, "modules_to_not_convert": ["self_attn"]}):
        partly = read({**DEEPSEEK, "quantization_config": section})
        assert not partly.extras
        assert partly.not_counted == ("quantization_config: scales and zero points of fp8",)


def test_each_prediction_layer_counts():
    """Two layers are twice the scalars, the tables and the scales of one."""
    fp8 = {"quant_method": "fp8", "weight_block_size": [2, 2]}
    none, one, two = (
        {extra.name: extra.scalars for extra in read({**DEEPSEEK, "num_nextn_predict_layers": n, **more}).extras}
        for n in (0, 1, 2)
        for more in [{"quantization_config": fp8}]
    )
    assert two["prediction_layers"] == 2 * one["prediction_layers"]
    assert two["prediction_layer_tables"] == 2 * one["prediction_layer_tables"] == 4 * 100 * 32
    assert two["fp8_scales"] - one["fp8_scales"] == one["fp8_scales"] - none["fp8_scales"] > 0


def test_an_unknown_quantisation_is_named():
    """Scales of a quantisation that no rule covers are said to be left out."""
    reading = read({**LLAMA, "quantization_config": {"quant_method": "gptq", "bits": 4}})
    assert reading.not_counted == ("quantization_config: scales and zero points of gptq",)
    assert reading.spec == read(LLAMA).spec


def test_experts_of_each_layer():
    """Dense layers stand where the config puts them: by step, by name, at the start."""

    def sparse(config):
        return [isinstance(block.feed_forward, Experts) for block in read(config).spec.blocks]

    four = {**QWEN3_MOE, "num_hidden_layers": 4}
    assert sparse(four) == [True] * 4
    assert sparse({**four, "decoder_sparse_step": 2}) == [False, True, False, True]
    assert sparse({**four, "mlp_only_layers": [0, 3]}) == [False, True, True, False]
    assert sparse({**DEEPSEEK, "num_hidden_layers": 3}) == [False, True, True]
    assert sparse({**DEEPSEEK, "num_hidden_layers": 1, "first_k_dense_replace": 3}) == [False]


def test_every_family_reads_both_ways_of_writing_positions():
    """Older files have rope_theta and rope_scaling, newer ones rope_parameters."""
    llama3 = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    old = read({**LLAMA, "rope_theta": 5e5, "rope_scaling": llama3}).spec
    new = read({**LLAMA, "rope_parameters": {**llama3, "rope_theta": 5e5}}).spec
    assert old == new != read(LLAMA).spec
    assert old.blocks[0].attention.rotary.base == 5e5


@pytest.mark.parametrize("config", [LLAMA, GPT_OSS, OLMO3, GEMMA3], ids=lambda config: config["model_type"])
def test_an_empty_scaling_is_absent(config):
    """gpt-oss then has the scaling of its configuration class, which an empty rope_parameters takes away."""
    assert read({**config, "rope_scaling": {}}).spec == read(config).spec
    plain = read({**config, "rope_parameters": {}}).spec
    assert (plain == read(config).spec) is (config is not GPT_OSS)


def test_both_ways_of_writing_positions_may_say_the_same():
    """Two sections that are equal are one."""
    assert (
        read({**LLAMA, "rope_scaling": LINEAR, "rope_parameters": LINEAR}).spec
        == read({**LLAMA, "rope_scaling": LINEAR}).spec
    )


@pytest.mark.parametrize(("config", "base"), [(GEMMA3, 1e4), (OLMO3, 5e5)], ids=["gemma3_text", "olmo3"])
@pytest.mark.parametrize("fields", [{"rope_theta": 50.0}, {"rope_scaling": {**LINEAR, "rope_theta": 50.0}}])
def test_a_base_concerns_the_layers_without_a_window(config, base, fields):
    """The others rotate by the family's own, wherever the base stands."""
    blocks = read(
        {**config, "num_hidden_layers": 6, "layer_types": ["sliding_attention"] * 5 + ["full_attention"], **fields}
    ).spec.blocks
    assert (blocks[0].attention.rotary.base, blocks[0].attention.rotary.scaling) == (base, None)
    assert blocks[5].attention.rotary.base == 50


def test_a_saved_pattern_says_nothing_beside_the_layers():
    """A config that transformers saves has it along with the list that it made."""
    layers = ["sliding_attention", "full_attention"] * 13
    config = {**GEMMA3, "layer_types": layers}
    assert read({**config, "_sliding_window_pattern": 2}).spec == read(config).spec


def test_a_scaling_is_not_refused_for_what_it_does_not_use():
    """Only llama3's has frequencies to be in order."""
    section = {**LINEAR, "low_freq_factor": 5.0}
    assert read({**LLAMA, "rope_scaling": section}).spec.blocks[0].attention.rotary.scaling.kind == "linear"


def test_a_scaling_concerns_gemmas_full_layers_only():
    """Windowed layers rotate by the local base, unscaled."""
    full = load("gemma-3-27b").spec.blocks[5].attention.rotary
    local = load("gemma-3-27b").spec.blocks[0].attention.rotary
    assert (full.base, full.scaling.factor) == (1e6, 8.0)
    assert local == dataclasses.replace(full, base=1e4, scaling=None)


@given(config=strategies.configs(), data=st.data())
def test_a_field_of_any_value_is_taken_or_refused(config, data):
    """Whatever stands in a field, the reader counts or names it in one line."""
    anything = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=4,
    )
    name = data.draw(st.sampled_from(sorted(config)) | st.text(max_size=6))
    changed = {**config, name: data.draw(anything)}
    try:
        spec = read(changed).spec
    except InputError as error:
        assert str(error).isprintable()
    else:
        assert params.count(spec).unique > 0


@given(config=strategies.configs(), data=st.data())
def test_a_damaged_file_is_refused_or_still_the_same_kind(config, data):
    """Bytes cut, doubled or replaced never end in another error."""
    text = json.dumps(config).encode()
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, len(text)))
    damaged = text[:start] + data.draw(st.binary(max_size=8)) + text[end:]
    try:
        read(damaged)
    except InputError as error:
        assert str(error).isprintable()


def test_a_folder_without_a_config(tmp_path):
    """A folder is a model only with a config.json in it."""
    with pytest.raises(InputError, match=r"a folder without a config\.json"):
        load(tmp_path)


def test_a_folder_a_file_and_a_name(tmp_path):
    """A config is found in a folder, by its path, or among the published ones."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    by_folder, by_file = load(folder), load(folder / "config.json")
    assert by_folder == by_file
    assert (by_folder.name, by_folder.path) == ("tiny", str(folder / "config.json"))
    assert load("gpt2").path is None
    assert read(huggingface.published_config("gpt2")).spec == load("gpt2").spec
    for find in (load, huggingface.published_config):
        with pytest.raises(InputError, match="not a published model"):
            find("absent")
    with pytest.raises(InputError, match=r"did you mean llama-3\.1-8b\?"):
        load("meta-llama/Llama-3.1-8B")
    with pytest.raises(InputError, match="expected a path or a name, got nothing"):
        load("")


def test_hostile_files_are_not_opened(tmp_path):
    """A pipe, a device, a file too large, and a link out of the folder."""
    folder = tmp_path / "folder"
    folder.mkdir()
    outside = tmp_path / "outside.json"
    outside.write_text(json.dumps(LLAMA))
    (folder / "config.json").symlink_to(outside)
    with pytest.raises(InputError, match="a link that leaves the folder"):
        load(folder)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="expected a regular file"):
        load(tmp_path / "pipe")
    with pytest.raises(InputError, match="expected a regular file"):
        load("/dev/zero")
    (tmp_path / "nested" / "config.json").mkdir(parents=True)
    with pytest.raises(InputError, match="expected a regular file"):
        load(tmp_path / "nested")
    (tmp_path / "round").mkdir()
    (tmp_path / "round" / "config.json").symlink_to("config.json")
    with pytest.raises(InputError, match=r"a link that leads nowhere|too many levels"):
        load(tmp_path / "round")
    with pytest.raises(InputError, match=r"cannot be read|input/output error"):
        load("/proc/self/mem")
    (tmp_path / "large.json").write_bytes(b" " * (CONFIG_LIMIT + 1))
    with pytest.raises(InputError, match="larger than 4,194,304 bytes"):
        load(tmp_path / "large.json")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(InputError, match="not a published model"):
        load(tmp_path / "loop")
    with pytest.raises(InputError, match="not a published model"):
        load("x" * 5000)


def test_a_snapshot_of_the_cache_is_made_of_links(tmp_path):
    """Links that stay inside one models--org--name folder are followed."""
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "blobs" / "abc").write_text(json.dumps(LLAMA))
    (snapshot / "config.json").symlink_to(repository / "blobs" / "abc")
    assert load(snapshot).spec == read(LLAMA).spec


@pytest.mark.parametrize("name", published.names())
def test_published_configs_say_what_the_published_files_say(name, request):
    """The kept fields describe the decoder, the extras and the rest that the whole file does."""
    file = os.path.join(request.config.getoption("--ledger-data") or "", "configs", f"{name}.json")
    if not os.path.exists(file):
        pytest.skip("needs the published files under configs/ of --ledger-data; see fixtures/data.toml")
    ours, theirs = load(name), load(file)
    assert ours == dataclasses.replace(theirs, sha256=ours.sha256, path=None)
