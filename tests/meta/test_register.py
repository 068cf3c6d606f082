"""The register is read strictly: each mistake is one line that names the file and the claim."""

from pathlib import Path
from typing import Any

import pytest

from accounting.ledger.printed import parse
from accounting.ledger.register import RegisterError, load

REGISTER = Path(__file__).parents[2] / "fixtures" / "claims"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sais": "x"}, "demo.toml: demo.a.one: unknown field 'sais'"),
        ({"where": None}, "demo.toml: demo.a.one: the field 'where' is missing"),
        (
            {"where": None, "kind": None, "needs": None},
            "demo.toml: demo.a.one: the fields 'where', 'kind', 'needs' are missing",
        ),
        (
            {"says": None, "verdict": "refuted"},
            "demo.toml: demo.a.one: a claim that is refuted must have the fields 'says', 'right'",
        ),
        ({"id": None}, "demo.toml: claim 1: the field 'id' is missing"),
        ({"value": 3}, "demo.toml: demo.a.one: the field 'value' must be a text that is not blank"),
        ({"says": " "}, "demo.toml: demo.a.one: the field 'says' must be a text that is not blank"),
        ({"needs": "cpu"}, "demo.toml: demo.a.one: the field 'needs' must be a list of texts, at least one"),
        ({"authorities": []}, "demo.toml: demo.a.one: the field 'authorities' must be a list of texts, at least one"),
        ({"printed": [4]}, "demo.toml: demo.a.one: the field 'printed' must be a list of texts, at least one"),
        ({"printed": ["many"]}, "demo.toml: demo.a.one: the field 'printed': 'many' is not a printed number"),
        ({"right_printed": ["1,2"]}, "demo.toml: demo.a.one: the field 'right_printed': '1,2' is not a printed number"),
        ({"id": "other.a"}, "demo.toml: other.a: an id of this document starts with 'demo' and a dot"),
        ({"id": "demo.a b"}, "demo.toml: demo.a b: an id is letters, digits, '_' and '-', in parts joined by dots"),
        ({"needs": ["tpu"]}, "demo.toml: demo.a.one: unknown need 'tpu'"),
        ({"verdict": "true"}, "demo.toml: demo.a.one: unknown verdict 'true'"),
        ({"verdict": "qualified"}, "demo.toml: demo.a.one: a claim that is qualified must have the field 'condition'"),
        ({"verdict": "refuted"}, "demo.toml: demo.a.one: a claim that is refuted must have the field 'right'"),
        ({"verdict": "cited"}, "demo.toml: demo.a.one: a claim that is cited must have the field 'source'"),
        (
            {"verdict": "unrun", "needs": ["gpu"]},
            "demo.toml: demo.a.one: a claim that is unrun must have the field 'run'",
        ),
        ({"verdict": "unrun", "run": "x"}, "demo.toml: demo.a.one: a claim that needs only a CPU cannot be unrun"),
    ],
)
def test_bad_claim(project: Any, fields: dict[str, Any], message: str) -> None:
    """A claim that breaks a rule of the register says which, where."""
    project.claims(project.record() | fields if None not in fields.values() else project.record(**fields))
    with pytest.raises(RegisterError) as raised:
        load(project.path / "claims")
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("id = ", "demo.toml: not valid TOML: "),
        ("", "demo.toml: the table [document] is missing"),
        ('[document]\nid = "demo"', "demo.toml: document: the field 'title' is missing"),
        ('[document]\nid = "demo"\ntitle = "x"\n[claims]', "demo.toml: unknown table 'claims'"),
        ('[document]\nid = "demo"\ntitle = "x"\n[claim]', "demo.toml: claim must be an array of tables, [[claim]]"),
        ('[document]\nid = "demo"\ntitle = "x"\n[[excluded]]\nid = "demo.x"', "demo.toml: demo.x: the field 'where'"),
    ],
)
def test_bad_file(project: Any, text: str, message: str) -> None:
    """A file that is no document of the register says so."""
    project.write("claims/demo.toml", text)
    with pytest.raises(RegisterError) as raised:
        load(project.path / "claims")
    assert str(raised.value).startswith(message)


def test_id_twice(project: Any) -> None:
    """An id belongs to one claim, and what is left out does not share it."""
    project.claims(project.record(), project.record())
    with pytest.raises(RegisterError, match=r"^demo\.toml: demo\.a\.one: this id is used twice$"):
        load(project.path / "claims")
    project.claims(project.record(), excluded=[{"id": "demo.a.one", "where": "1", "says": "x", "reason": "opinion"}])
    with pytest.raises(RegisterError, match="used twice"):
        load(project.path / "claims")


def test_no_register(tmp_path: Path) -> None:
    """A folder without claims is an error and not an empty register."""
    with pytest.raises(RegisterError, match="no claims here"):
        load(tmp_path)


def test_bad_register_stops_the_run(project: Any) -> None:
    """Pytest reports a mistake in the register as one line, before any test."""
    result = project.take(project.record(sais="x"), "claim.holds(True, 'seen')")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: demo.toml: demo.a.one: unknown field 'sais'"])


def test_record(project: Any) -> None:
    """A claim gives its record back as the file has it."""
    record = project.record(printed=["4.72M"], right="Five.", right_printed=["5"], condition="Tied.")
    project.claims(record)
    claim = load(project.path / "claims").claims["demo.a.one"]
    assert claim.as_record() == record
    assert claim.printed == (parse("4.72M"),)
    assert claim.group == "demo.a"


def test_printed_numbers_of_the_register() -> None:
    """Each number of the register matches itself and is no longer matched by itself moved by one unit."""
    claims = load(REGISTER).claims
    for claim in claims.values():
        for number in (*claim.printed, *claim.right_printed):
            assert number.matches(number.value), (claim.id, number)
            assert not number.matches(number.value + number.ulp), (claim.id, number)
            assert not number.matches(number.value - number.ulp), (claim.id, number)


def test_right_value_is_another() -> None:
    """The right value of a refuted claim is not the one that it refutes."""
    for claim in load(REGISTER).claims.values():
        if claim.verdict == "refuted" and len(claim.printed) == len(claim.right_printed):
            pairs = zip(claim.printed, claim.right_printed, strict=True)
            assert not claim.printed or any(not printed.matches(right.value) for printed, right in pairs), claim.id
