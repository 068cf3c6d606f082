"""Files that strangers wrote: found inside one folder, opened with care, read within a bound."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader, FileIO
from pathlib import Path


class InputError(ValueError):
    """Something that a person handed over cannot be used; the message says what, in one line."""

    def __init__(self, source: object, problem: str) -> None:
        super().__init__(f"{printable(str(source))}: {printable(problem)}")


def printable(text: str, limit: int = 400) -> str:
    """The text on one line, whatever a hostile file put into it."""
    safe = "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)
    return safe if len(safe) <= limit else f"{safe[:limit]}..."


def counted(number: int, what: str) -> str:
    """So many of something, in the plural that takes an s."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def inside(folder: Path, name: str) -> Path:
    """The file ``name`` of a folder, which may be a link only within the same repository.

    A snapshot in Hugging Face's cache is a folder of links into the ``blobs`` of its
    ``models--org--name`` folder: these are followed, all others refused.
    """
    path = folder / name
    try:
        target, home = path.resolve(), folder.resolve()
    except (OSError, RuntimeError):
        raise InputError(path, "a link that leads nowhere") from None
    root = next((parent for parent in home.parents if parent.name.startswith("models--")), home)
    if not target.is_relative_to(root):
        raise InputError(path, "a link that leaves the folder is not followed")
    return path


@contextmanager
def regular(path: Path) -> Iterator[FileIO]:
    """A regular file, opened for reading without a buffer."""
    try:
        # A pipe would block an ordinary open until somebody writes to it.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise InputError(path, "expected a regular file")
            with open(descriptor, "rb", buffering=0, closefd=False) as file:
                yield file
        finally:
            os.close(descriptor)
    except OSError as error:
        raise InputError(path, (error.strerror or "cannot be read").lower()) from None


def listing(folder: Path) -> dict[str, bool]:
    """The names in a folder, and whether each is a link."""
    try:
        with os.scandir(folder) as entries:
            return {entry.name: entry.is_symlink() for entry in entries}
    except OSError as error:
        raise InputError(folder, (error.strerror or "cannot be read").lower()) from None


def read(path: Path, limit: int) -> bytes:
    """The bytes of a regular file, at most ``limit`` of them."""
    with regular(path) as file, BufferedReader(file) as reader:
        data = reader.read(limit + 1)
    if len(data) > limit:
        raise InputError(path, f"larger than {limit:,} bytes")
    return data
