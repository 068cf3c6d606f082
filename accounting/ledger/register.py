"""The register: every claim of every document, with the verdict that the project stands by.

A folder holds one TOML file a document: a `[document]` table (`id`, `title`), a `[[claim]]` table for each claim and
an `[[excluded]]` table for each statement that is knowingly left out. Loading is strict: whatever is unknown,
missing or ill-typed is a `RegisterError` of one line that names the file and the claim.
"""

import dataclasses
import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

from accounting.ledger.printed import Printed, parse

REQUIRED_BY_VERDICT = {
    "open": None,
    "confirmed": None,
    "qualified": "condition",
    "refuted": "right",
    "cited": "source",
    "unrun": "run",
}
_ID = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_NEED = re.compile(r"cpu|gpu|long-training|data:[A-Za-z0-9._-]+")


class RegisterError(ValueError):
    """A register that cannot be used, in one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One checkable statement of a document, and the verdict on it."""

    id: str
    where: str
    says: str
    value: str
    kind: str
    authorities: tuple[str, ...]
    needs: tuple[str, ...]
    verdict: str
    printed: tuple[Printed, ...] = ()
    condition: str = ""
    right: str = ""
    right_printed: tuple[Printed, ...] = ()
    source: str = ""
    run: str = ""

    @property
    def group(self) -> str:
        """The first two parts of the id."""
        return ".".join(self.id.split(".")[:2])

    @property
    def command(self) -> str:
        """The command that runs the tests of this claim alone."""
        return f"pytest --claim {self.id}"

    @property
    def missing_needs(self) -> tuple[str, ...]:
        """What a plain CPU run may lack."""
        return tuple(need for need in self.needs if need != "cpu")

    def how(self, need: str) -> str:
        """How to run the claim where `need` was missing."""
        return self.run or remedy(need, self.command)

    def as_record(self) -> dict[str, Any]:
        """The claim as its file has it, absent fields left out."""
        record: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, tuple):
                value = [item.text if isinstance(item, Printed) else item for item in value]
            if value or field.default is MISSING:
                record[field.name] = value
        return record


@dataclass(frozen=True, slots=True, kw_only=True)
class Excluded:
    """A statement that is knowingly left out, and why."""

    id: str
    where: str
    says: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One document and everything that is registered about it."""

    id: str
    title: str
    claims: tuple[Claim, ...] = ()
    excluded: tuple[Excluded, ...] = ()


@dataclass(frozen=True, slots=True)
class Register:
    """All documents; claims by id."""

    documents: tuple[Document, ...]

    @property
    def claims(self) -> dict[str, Claim]:
        return {claim.id: claim for document in self.documents for claim in document.claims}

    @property
    def excluded(self) -> tuple[Excluded, ...]:
        return tuple(entry for document in self.documents for entry in document.excluded)


def remedy(need: str, command: str = "pytest") -> str:
    """How to run `command` so that `need` is met."""
    if need.startswith("data:"):
        return f"{command} --ledger-data=DIR"
    return f"{command}, {'on a machine with a GPU' if need == 'gpu' else 'with time for a long training'}"


def load(folder: Path) -> Register:
    """The register in `folder`. RegisterError when anything in it is not as it must be."""
    paths = sorted(folder.glob("*.toml"))
    if not paths:
        raise RegisterError(f"{folder}: no claims here (no *.toml file)")
    register = Register(tuple(_document(path) for path in paths))
    seen: set[str] = set()
    for path, document in zip(paths, register.documents, strict=True):
        claims = (claim.id for claim in document.claims)
        for id in (document.id, *claims, *(entry.id for entry in document.excluded)):
            if id in seen:
                raise RegisterError(f"{path.name}: {id}: this id is used twice")
            seen.add(id)
    return register


def _document(path: Path) -> Document:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RegisterError(f"{path.name}: not valid TOML: {error}") from error
    header = content.pop("document", None)
    if not isinstance(header, dict):
        raise RegisterError(f"{path.name}: the table [document] is missing")
    document = _Table(f"{path.name}: document", header)
    id = document.identifier()
    title = document.text("title")
    document.close()
    claims = tuple(_claim(table, id) for table in _tables(path, content, "claim"))
    excluded = tuple(_excluded(table, id) for table in _tables(path, content, "excluded"))
    if content:
        raise RegisterError(f"{path.name}: unknown table {min(content)!r}")
    return Document(id=id, title=title, claims=claims, excluded=excluded)


def _claim(table: "_Table", document: str) -> Claim:
    table.require(field.name for field in dataclasses.fields(Claim) if field.default is MISSING)
    claim = Claim(
        id=table.identifier(document),
        where=table.text("where"),
        says=table.text("says"),
        value=table.text("value"),
        kind=table.text("kind"),
        authorities=table.texts("authorities"),
        needs=table.texts("needs"),
        verdict=table.text("verdict"),
        printed=table.numbers("printed"),
        condition=table.text("condition", optional=True),
        right=table.text("right", optional=True),
        right_printed=table.numbers("right_printed"),
        source=table.text("source", optional=True),
        run=table.text("run", optional=True),
    )
    table.close()
    for need in claim.needs:
        if not _NEED.fullmatch(need):
            raise table.error(f"unknown need {need!r}: not cpu, gpu, long-training or data:NAME")
    if claim.verdict not in REQUIRED_BY_VERDICT:
        raise table.error(f"unknown verdict {claim.verdict!r}: not one of {', '.join(REQUIRED_BY_VERDICT)}")
    if claim.verdict == "unrun" and not claim.missing_needs:
        raise table.error("a claim that needs only a CPU cannot be unrun")
    return claim


def _excluded(table: "_Table", document: str) -> Excluded:
    excluded = Excluded(
        id=table.identifier(document),
        where=table.text("where"),
        says=table.text("says"),
        reason=table.text("reason"),
    )
    table.close()
    return excluded


def _tables(path: Path, content: dict[str, Any], name: str) -> "Iterator[_Table]":
    entries = content.pop(name, [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise RegisterError(f"{path.name}: {name} must be an array of tables, [[{name}]]")
    for position, entry in enumerate(entries, start=1):
        yield _Table(f"{path.name}: {entry.get('id', f'{name} {position}')}", entry)


class _Table:
    """One table of a file, read field by field; a field that nobody read is unknown."""

    def __init__(self, place: str, fields: dict[str, Any]) -> None:
        self._place = place
        self._unread = dict(fields)

    def error(self, message: str) -> RegisterError:
        return RegisterError(f"{self._place}: {message}")

    def require(self, names: Iterable[str]) -> None:
        """Report every missing field at once: those of `names`, and the one that the verdict asks for."""
        verdict = self._unread.get("verdict")
        due = REQUIRED_BY_VERDICT.get(verdict) if isinstance(verdict, str) else None
        missing = [name for name in (*names, *filter(None, [due])) if name not in self._unread]
        if not missing:
            return
        fields, are = ("field", "is") if len(missing) == 1 else ("fields", "are")
        listed = f"the {fields} {', '.join(map(repr, missing))}"
        if due in missing:
            raise self.error(f"a claim that is {verdict} must have {listed}")
        raise self.error(f"{listed} {are} missing")

    def identifier(self, document: str = "") -> str:
        id = self.text("id")
        if not _ID.fullmatch(id):
            raise self.error("an id is letters, digits, '_' and '-', in parts joined by dots")
        if document and not id.startswith(f"{document}."):
            raise self.error(f"an id of this document starts with {document!r} and a dot")
        return id

    def text(self, name: str, *, optional: bool = False) -> str:
        if optional and name not in self._unread:
            return ""
        value = self._take(name)
        if not isinstance(value, str) or not value.strip():
            raise self.error(f"the field {name!r} must be a text that is not blank")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        values = self._take(name)
        if not isinstance(values, list) or not values or not all(isinstance(value, str) for value in values):
            raise self.error(f"the field {name!r} must be a list of texts, at least one")
        return tuple(values)

    def numbers(self, name: str) -> tuple[Printed, ...]:
        texts = self.texts(name) if name in self._unread else ()
        try:
            return tuple(parse(text) for text in texts)
        except ValueError as error:
            raise self.error(f"the field {name!r}: {error}") from error

    def close(self) -> None:
        if self._unread:
            raise self.error(f"unknown field {min(self._unread)!r}")

    def _take(self, name: str) -> Any:
        if name not in self._unread:
            raise self.error(f"the field {name!r} is missing")
        return self._unread.pop(name)
