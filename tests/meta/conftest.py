"""Small projects of their own, with claims and tests, run inside a test."""

import json
from pathlib import Path
from typing import Any

import numpy  # noqa: F401 (a run within a run unloads what it loaded first, and NumPy loads once in a process)
import pytest

Record = dict[str, Any]

CONFIGURATION = """
[pytest]
testpaths = ["."]
strict = true
filterwarnings = ["error"]
ledger_claims = "claims"
"""


class Project:
    """A project with a register, tests and a ledger."""

    def __init__(self, pytester: pytest.Pytester) -> None:
        self.path = pytester.path
        self._pytester = pytester
        self.write("pytest.toml", CONFIGURATION)
        self.write("conftest.py", 'pytest_plugins = ["accounting.ledger.plugin"]\n')

    def write(self, name: str, text: str) -> Path:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def record(self, id: str = "demo.a.one", **fields: Any) -> Record:
        """A valid claim, with `fields` changed; a field of None is left out."""
        record = {
            "id": id,
            "where": "Section 1",
            "says": "The model has 4.72M parameters.",
            "value": "4.72M",
            "kind": "rounded",
            "authorities": ["arithmetic"],
            "needs": ["cpu"],
            "verdict": "confirmed",
        }
        return {name: value for name, value in (record | fields).items() if value is not None}

    def claims(self, *records: Record, document: str = "demo", folder: str = "claims", excluded: Any = ()) -> None:
        """Write the register of one document. A JSON text or list of texts is a TOML one."""
        tables = [("[document]", {"id": document, "title": f"The document {document}"})]
        tables += [("[[claim]]", record) for record in records] + [("[[excluded]]", entry) for entry in excluded]
        text = "".join(
            f"{header}\n" + "".join(f"{name} = {json.dumps(value)}\n" for name, value in fields.items())
            for header, fields in tables
        )
        self.write(f"{folder}/{document}.toml", text)

    def run(self, tests: str, *arguments: str) -> pytest.RunResult:
        """Run `tests`, the source of one module; the ledger is written."""
        header = "import os, sys\nimport pytest\nfrom accounting.ledger import case\n\n"
        self.write("test_demo.py", header + tests)
        return self._pytester.runpytest_inprocess("--ledger=ledger.html", *arguments)

    def plain(self, *arguments: str) -> pytest.RunResult:
        """Run pytest as it is."""
        return self._pytester.runpytest_inprocess(*arguments)

    def take(self, record: Record, body: str, *arguments: str) -> pytest.RunResult:
        """Run one test that takes the claim of `record`."""
        self.claims(record)
        return self.run(f"@pytest.mark.claim({record['id']!r})\ndef test_one(claim):\n    {body}\n", *arguments)

    def ledger(self) -> Any:
        return json.loads((self.path / "ledger.json").read_text(encoding="utf-8"))

    def states(self) -> dict[str, str | None]:
        """What the last run found, by claim."""
        return {claim["id"]: claim["run"] for claim in self.ledger()["claims"]}


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    return Project(pytester)
