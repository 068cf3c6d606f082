"""Text and token ids: the documents' characters, and GPT-2's BPE from files whose hashes are tiktoken's own."""

import re
from string import ascii_letters

import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st
from tiktoken_ext import openai_public

from accounting.files import InputError
from model import tokens

SENTENCE = "To be, or not to be, that is the question."


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """An empty cache of tiktoken's, nothing loaded before, and no network."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})

    def refused(url):
        raise ConnectionError(url)

    monkeypatch.setattr("tiktoken.load.read_file", refused)
    return tmp_path / "cache"


def test_a_cleaned_text_has_letters_and_single_spaces():
    """Whatever is no letter from a to z, runs of it and markers of a corpus too, becomes one space."""
    assert tokens.clean("The  <unk>, N 1895\n\n— Café") == "the unk n caf "


def test_the_textbook_has_28_symbols_in_sorted_order():
    """Space, the unknown and the letters; what is none of them has the unknown's id."""
    assert len(tokens.LETTERS) == 28
    assert list(tokens.LETTERS.vocabulary) == sorted(tokens.LETTERS.vocabulary)
    assert tokens.LETTERS.encode("a é") == [2, 0, 1]


@given(text=st.text(ascii_letters + " ,.\n'é—"))
def test_a_cleaned_text_survives(text):
    """The textbook's ids decode to the text that was cleaned, and cleaning that changes nothing."""
    cleaned = tokens.clean(text)
    assert tokens.LETTERS.decode(tokens.LETTERS.encode(cleaned)) == tokens.clean(cleaned) == cleaned


@given(text=st.text(), other=st.characters())
def test_the_labs_characters_are_those_of_the_text(text, other):
    """Each id is a place among the text's distinct characters, sorted; a character that it lacks is refused."""
    tokenizer = tokens.characters(text)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert set(ids) == set(range(len(tokenizer)))
    assert [tokenizer.vocabulary[i] for i in range(len(tokenizer))] == sorted(set(text))
    if other not in text:
        with pytest.raises(ValueError, match=rf"^character {re.escape(repr(other))}: not in the vocabulary$"):
            tokenizer.encode(text + other)


def test_gpt2_encodes_the_labs_sentence_offline(offline):
    """The lab's sentence: 42 characters, 13 tokens with these ids, of 50,257; with no network."""
    bpe = tokens.gpt2()
    assert len(SENTENCE) == 42
    assert bpe.encode(SENTENCE) == [2514, 307, 11, 393, 407, 284, 307, 11, 326, 318, 262, 1808, 13]
    assert bpe.n_vocab == 50_257


@given(text=st.text())
def test_gpt2_decodes_what_it_encoded(text):
    """Byte-level: any text, in any script, comes back as it was."""
    bpe = tokens.gpt2()
    assert bpe.decode(bpe.encode_ordinary(text)) == text


def test_the_hashes_are_tiktokens():
    """Addresses and sha256 are those in the function that tiktoken builds GPT-2's encoding with."""
    known = {tokens.GPT2_URL + name for name in tokens.GPT2_FILES} | set(tokens.GPT2_FILES.values())
    assert known <= set(openai_public.gpt2.__code__.co_consts)


def test_a_damaged_cache_is_repaired(offline):
    """What lies in the cache and is not the file gives way to it, and what is the file stays."""
    tokens.gpt2()
    first, second = sorted(offline.iterdir())
    before = second.stat().st_mtime_ns
    first.write_bytes(first.read_bytes()[:-1])
    tokens.place(tokens.shipped(), offline)
    tiktoken.registry.ENCODINGS.clear()
    assert tokens.gpt2().n_vocab == 50_257
    assert second.stat().st_mtime_ns == before
    assert len(list(offline.iterdir())) == 2


def test_files_of_another_hash_are_refused(tmp_path):
    """A vocabulary with one byte changed is refused by name, and nothing is placed."""
    source, cache = tmp_path / "source", tmp_path / "cache"
    source.mkdir()
    for name in tokens.GPT2_FILES:
        (source / name).write_bytes((tokens.shipped() / name).read_bytes())
    (source / "encoder.json").write_bytes(b"[" + (source / "encoder.json").read_bytes()[1:])
    with pytest.raises(InputError, match=r"encoder\.json: expected sha256 196139668be6.*, got "):
        tokens.place(source, cache)
    assert not cache.exists()


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"TIKTOKEN_CACHE_DIR": "one", "DATA_GYM_CACHE_DIR": "two"}, "one"),
        ({"DATA_GYM_CACHE_DIR": "two"}, "two"),
        ({"TIKTOKEN_CACHE_DIR": ""}, None),
    ],
)
def test_the_cache_is_where_tiktoken_looks(variables, folder, monkeypatch):
    """Its two variables, in its order; empty, it keeps nothing."""
    for name in ("TIKTOKEN_CACHE_DIR", "DATA_GYM_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert tokens.cache_folder() == (folder and tokens.Path(folder))
