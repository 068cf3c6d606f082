"""A Hugging Face ``config.json``, from a path, bytes or a dict, to a ``ModelSpec``.

A config is a stranger's file. What it says of the decoder is taken or refused, never
guessed: an unknown family, an unknown field and a value that no decoder can have are
errors that name the field.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin

import msgspec

from accounting import files, published
from accounting.families import FAMILIES, Config, Extra, Gemma3Multimodal
from accounting.files import InputError
from accounting.spec import Block, ModelSpec, SpecError

CONFIG_LIMIT = 4 * 2**20

#: Fields that say nothing of the decoder's tensors or products: training, generation,
#: tokens, labels and the software that wrote the file.
INERT = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _commit_hash _experts_implementation _name_or_path
    _num_labels attention_dropout attn_implementation attn_pdrop auto_map aux_loss_alpha bad_words_ids
    begin_suppress_tokens cache_implementation chunk_size_feed_forward decoder_start_token_id diversity_penalty
    do_sample dtype early_stopping embd_pdrop encoder_no_repeat_ngram_size ep_size
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id
    gradient_checkpointing id2label initial_context_length initializer_range is_decoder
    keys_to_ignore_at_inference label2id length_penalty max_length max_sequence_length min_length model_type
    name_or_path neftune_noise_alpha no_repeat_ngram_size num_beam_groups num_beams num_labels
    num_return_sequences output_attentions output_hidden_states output_past output_router_logits output_scores
    predict_special_tokens prefix pretraining_tp problem_type remove_invalid_values reorder_and_upcast_attn
    repetition_penalty resid_pdrop return_dict return_dict_in_generate router_aux_loss_coef router_jitter_noise
    sep_token_id seq_aux summary_activation summary_first_dropout summary_proj_to_labels summary_type
    summary_use_proj suppress_tokens task_specific_params temperature tf_legacy_loss tokenizer_class top_k top_p
    torch_dtype torchscript transformers.js_config transformers_version typical_p unsloth_fixed unsloth_version
    use_bfloat16 use_cache
    """.split()
)
#: Fields that say nothing at the one value that a decoder-only model has.
INERT_AT: dict[str, Any] = {
    "add_cross_attention": False,
    "is_encoder_decoder": False,
    "is_llama_config": True,
    "n_special": 0,
    "pruned_heads": {},
    "rope_interleaved": False,
    "shared_expert_intermediate_size": 0,
    "tie_encoder_decoder": False,
}
UNKNOWN = "a field that is not known in this family: it may change the architecture"
TOKEN_FIELD = re.compile(r"[a-z_]+_token_(id|ids|index)")
Fields = TypeVar("Fields", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a config says.

    ``spec``: the decoder. ``extras``: what a file of this model may hold besides, each under
    its own name. ``not_counted``: what the config describes and no number covers. ``path``
    is None for a published config and for bytes or a dict.

    Of the file's tensors alone speak ``dtype``, the word that the config has for it, the section
    ``quantization``, the blocks of ``prediction``, and ``beside``: how the names of those begin
    that belong to no decoder.
    """

    name: str
    model_type: str
    sha256: str
    spec: ModelSpec
    extras: tuple[Extra, ...]
    not_counted: tuple[str, ...]
    path: str | None = None
    dtype: str | None = None
    quantization: Mapping[str, Any] | None = None
    prediction: tuple[Block, ...] = ()
    beside: tuple[str, ...] = ()


def published_config(name: str) -> dict[str, Any]:
    """The fields of a published config.

    Raises InputError for a name that is not among ``published.names()``.
    """
    if name not in published.names():
        raise InputError(name, f"not a published model, {published.suggestion(name)}")
    fields: dict[str, Any] = json.loads(published.data(name))
    return fields


def load(config: str | Path) -> Reading:
    """Read a ``config.json``, the one in a folder, or a published one by its name.

    Raises InputError in one line that names the file, the field and what was expected.
    """
    if not str(config):
        raise InputError("CONFIG", "expected a path or a name, got nothing")
    path = Path(config)
    try:
        if os.path.isdir(path):
            file, name = files.inside(path, "config.json"), path.resolve().name
            if not os.path.lexists(file):
                raise InputError(path, "a folder without a config.json")
            return read(files.read(file, CONFIG_LIMIT), name=name, path=str(file))
        if os.path.exists(path):
            name = path.resolve().parent.name if path.name == "config.json" else path.stem
            return read(files.read(path, CONFIG_LIMIT), name=name, path=str(path))
    except OSError as error:
        raise InputError(config, (error.strerror or "cannot be read").lower()) from None
    if (name := str(config)) in published.names():
        return read(published.data(name), name=name)
    raise InputError(config, f"no such file or folder, and not a published model, {published.suggestion(name)}")


def read(config: bytes | Mapping[str, Any], *, name: str = "config", path: str | None = None) -> Reading:
    """Read a config that is at hand, as the bytes of a file or as the object that they hold.

    Raises InputError in one line that names the source, the field and what was expected.
    """
    source = path or name
    if isinstance(config, bytes):
        data = config
    else:
        try:
            data = json.dumps(dict(config)).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(source, f"not an object that JSON can hold ({error})") from None
    try:
        fields = _decode(data)
        model_type = _model_type(fields)
        if model_type == "gemma3":
            text, left_out = _text_model(fields)
            beside = Gemma3Multimodal.beside if left_out else ()
            reader, spec = _decoder(text, FAMILIES["gemma3_text"], section="text_config.")
        else:
            left_out, beside, text = (), (), fields
            reader, spec = _decoder(fields, FAMILIES[model_type])
        return Reading(
            name=files.printable(name),
            model_type=model_type,
            sha256=hashlib.sha256(data).hexdigest(),
            spec=spec,
            extras=tuple(reader.extras(spec)),
            not_counted=tuple(map(files.printable, (*reader.not_counted(), *left_out))),
            path=path,
            dtype=_dtype(fields) or _dtype(text),
            quantization=reader.quantized,
            prediction=reader.prediction(),
            beside=beside,
        )
    except SpecError as error:
        raise InputError(source, f"{error.field}: {error.problem}") from None


def _decode(data: bytes) -> dict[str, Any]:
    """The object in a JSON text; NaN, infinities, repeated keys and other encodings are refused."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for name, value in pairs:
            if name in fields:
                raise SpecError(name, "given more than once")
            fields[name] = value
        return fields

    def finite(text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            raise SpecError("config", f"expected finite numbers, got {text}")
        return value

    if not data.strip():
        raise SpecError("config", "expected a JSON object, got an empty file")
    try:
        text = data.decode("utf-8")
        if text.startswith("\ufeff"):
            raise SpecError("config", "expected JSON in UTF-8 without a byte order mark")
        fields = json.loads(text, object_pairs_hook=once, parse_float=finite, parse_constant=finite)
        json.dumps(fields, ensure_ascii=False).encode()
    except SpecError:
        raise
    except UnicodeEncodeError:
        raise SpecError("config", "expected text, got half of a surrogate pair") from None
    except UnicodeDecodeError as error:
        raise SpecError("config", f"expected JSON in UTF-8, got byte {data[error.start]:#04x}") from None
    except RecursionError:
        raise SpecError("config", "expected a JSON object, got one nested too deep") from None
    except json.JSONDecodeError as error:
        problem = f"line {error.lineno} column {error.colno}: {error.msg}"
        raise SpecError("config", f"expected a JSON object, {problem}") from None
    except ValueError:
        raise SpecError("config", "expected a JSON object, got an integer of thousands of digits") from None
    if not isinstance(fields, dict):
        raise SpecError("config", f"expected a JSON object, got {type(fields).__name__}")
    return fields


def _dtype(fields: dict[str, Any]) -> str | None:
    """The dtype that a config names, under either of its two names."""
    named = fields.get("dtype") or fields.get("torch_dtype")
    return named.removeprefix("torch.") if isinstance(named, str) else None


def _model_type(fields: dict[str, Any]) -> str:
    """The family that a config names, one that has a reader."""
    known = sorted([*FAMILIES, "gemma3"])
    match fields.get("model_type"):
        case str(name) if name in known:
            return name
        case str(name):
            got = repr(name)
        case None:
            got = "nothing"
        case other:
            got = type(other).__name__
    raise SpecError("model_type", f"expected one of {', '.join(known)}, got {got}")


def _text_model(fields: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The fields of the text model in a config of several models, and what stands beside it."""
    outer = _convert(fields, Gemma3Multimodal)
    inner = outer.text_config
    if inner.get("model_type") not in (None, "gemma3_text"):
        raise SpecError("text_config.model_type", f"expected 'gemma3_text', got {inner['model_type']!r}")
    if inner.get("tie_word_embeddings") not in (None, outer.tie_word_embeddings):
        raise SpecError("text_config.tie_word_embeddings", "expected what the config says outside text_config")
    text = {
        "architectures": outer.architectures,
        "quantization_config": outer.quantization_config,
        "quantization": outer.mlx_quantization,
        "tie_word_embeddings": outer.tie_word_embeddings,
        **{name: value for name, value in inner.items() if value is not None},
    }
    left_out = ("vision_config: the vision tower and its projector",) if outer.vision_config is not None else ()
    return text, left_out


def _decoder(fields: dict[str, Any], family: type[Config], section: str = "") -> tuple[Config, ModelSpec]:
    """The family's reader of the fields, which are a section of the config, and its spec."""
    try:
        reader = _convert(fields, family)
        return reader, _spec(reader)
    except SpecError as error:
        raise SpecError(section + error.field, error.problem) from None


def _spec(reader: Config) -> ModelSpec:
    """The reader's spec; an error names the field as the config does."""
    try:
        reader.check()
        return reader.spec()
    except SpecError as error:
        raise SpecError(reader.names.get(error.field, error.field), error.problem) from None


def _convert(fields: dict[str, Any], into: type[Fields]) -> Fields:
    """The struct of a family. An inert field is dropped; a null stands for an absent field."""
    known = {field.encode_name: field for field in msgspec.structs.fields(into)}
    kept = {}
    for name, value in fields.items():
        field = known.get(name)
        if field is None:
            if not _inert(name, value):
                raise SpecError(name, UNKNOWN)
        elif value is not None or field.required or _takes_null(field.type):
            kept[name] = _without_nulls(value) if name.startswith("rope_") else value
    if kept.get("rope_scaling") == {}:  # says nothing, unlike an empty rope_parameters: that has no scaling
        del kept["rope_scaling"]
    try:
        return msgspec.convert(kept, into)
    except msgspec.ValidationError as error:
        raise _refusal(str(error), kept, into) from None


def _without_nulls(section: Any) -> Any:
    """A section of the config with its absent fields left out."""
    if not isinstance(section, dict):
        return section
    return {name: _without_nulls(value) for name, value in section.items() if value is not None}


def _inert(name: str, value: Any) -> bool:
    """Whether a field that the family does not have leaves the decoder as it is."""
    if value is None or name in INERT or TOKEN_FIELD.fullmatch(name):
        return True
    return name in INERT_AT and INERT_AT[name] == value


def _takes_null(annotation: Any) -> bool:
    return annotation is NoneType or NoneType in get_args(annotation)


def _words(annotation: Any) -> Iterator[str]:
    """The words that a field of this type may hold, where it is one of a few."""
    if get_origin(annotation) is Literal:
        yield from map(str, get_args(annotation))
    else:
        for part in get_args(annotation):
            yield from _words(part)


def _refusal(message: str, fields: dict[str, Any], into: type[msgspec.Struct]) -> SpecError:
    """The error that names the field, from a message of msgspec's."""
    problem, _, location = message.partition(" - at `$")
    location = location.rstrip("`")
    if named := re.fullmatch(r"Object (missing required|contains unknown) field `(.*)`", problem):
        reason = {
            "missing required": "missing, and the family has no default for it",
            "contains unknown": UNKNOWN,
        }
        field = f"{location}.{named[2]}".lstrip(".")
        return SpecError(field, reason[named[1]])
    field = location.lstrip(".")
    expected = problem.replace("`", "").replace("Expected", "expected")
    types = {known.encode_name: known.type for known in msgspec.structs.fields(into)}
    words = ", ".join(_words(types.get(field.partition("[")[0])))
    expected = re.sub("Invalid enum value", f"expected one of {words}, got" if words else "unknown value", expected)
    value = fields.get(field)
    got = f", got {value!r}" if value is not None and "got" not in expected and repr(value) not in expected else ""
    return SpecError(field, f"{expected}{got}")
