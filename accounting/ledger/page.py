"""The ledger as a self-contained HTML page, and as JSON beside it."""

import base64
import json
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import accounting
from accounting.ledger.register import Register
from accounting.ledger.report import plural, printed
from accounting.ledger.tally import STATES, Entry, count

SCHEMA = "sixnd.ledger/1"
_TEMPLATES = Path(__file__).with_name("templates")
_NUMBER = re.compile(r"([+-]?[0-9][\w.,]*(?:(?<=e)[+-][0-9]+)?)")
_ORDER = ("refuted", "failed", "qualified", "confirmed", "cited", "unrun", "untested", "open")
_PHRASES = {
    "confirmed": "confirmed",
    "qualified": "true under a condition",
    "refuted": "refuted",
    "cited": "cited from their sources",
    "unrun": "not run",
    "failed": "failed",
    "untested": "not part of this run",
    "open": "open",
}


def write(path: Path, register: Register, entries: tuple[Entry, ...]) -> None:
    """Write the page to `path` and the JSON beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = as_json(register, entries)
    path.write_text(as_html(register, entries, data["environment"]), encoding="utf-8")
    path.with_suffix(".json").write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def as_json(register: Register, entries: tuple[Entry, ...]) -> dict[str, Any]:
    """Everything that the run found, with the records of all claims."""
    return {
        "schema": SCHEMA,
        "version": accounting.__version__,
        "summary": count(entries),
        "environment": environment(),
        "claims": [entry.as_record() for entry in entries],
        "excluded": [
            {"id": entry.id, "where": entry.where, "says": entry.says, "reason": entry.reason}
            for entry in register.excluded
        ],
    }


def as_html(register: Register, entries: tuple[Entry, ...], environment: dict[str, str]) -> str:
    """The page, readable without scripts and without a network."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    jinja = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    by_id = {entry.claim.id: entry for entry in entries}
    sections = [
        (document, sorted((by_id[claim.id] for claim in document.claims), key=lambda entry: _ORDER.index(entry.state)))
        for document in register.documents
    ]
    return jinja.get_template("ledger.html.j2").render(
        sentence=_sentence(register, entries),
        sections=[(document, rows, count(rows)) for document, rows in sections],
        counts=count(entries),
        states=STATES,
        excluded=register.excluded,
        environment=environment,
        version=accounting.__version__,
        printed=printed,
        split=_NUMBER.split,
        data_url=_data_url,
    )


def environment() -> dict[str, str]:
    """What the run ran on: Python, the platform, and the frameworks that are installed."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for name in ("torch", "jax", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _data_url(svg: str) -> str:
    """A picture within the page, which nothing in it can reach out of."""
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"


def _sentence(register: Register, entries: tuple[Entry, ...]) -> str:
    parts = [f"{number} {_PHRASES[state]}" for state, number in count(entries).items() if number]
    listed = " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
    claims, documents = plural(len(entries), "claim"), plural(len(register.documents), "document")
    return f"{claims} in {documents}: {listed or 'none'}."
