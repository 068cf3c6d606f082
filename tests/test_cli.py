"""The command: what it prints, in which form, and how it fails."""

import hashlib
import json
import subprocess
import sys
from dataclasses import asdict

import pytest

from accounting import __version__, cli, params, published
from accounting.huggingface import load


def run(capsys, monkeypatch, *arguments):
    """Exit code, standard output and standard error of the command."""
    monkeypatch.setattr(sys, "argv", ["sixnd", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    out, err = capsys.readouterr()
    return stop.value.code, out, err


@pytest.mark.parametrize("name", published.names())
def test_json_has_every_count_as_an_integer(name, capsys, monkeypatch):
    """One object: what was counted, by which program, and all counts under their names."""
    code, out, _ = run(capsys, monkeypatch, "params", name, "--json")
    answer = json.loads(out)
    reading = load(name)
    assert code == 0
    assert list(answer) == ["schema", "version", "model", "parameters", "parts", "extras", "not_counted"]
    assert (answer["schema"], answer["version"]) == ("sixnd.params/1", __version__)
    assert answer["model"] == {
        "name": name,
        "model_type": reading.model_type,
        "path": None,
        "sha256": reading.sha256,
    }
    assert answer["parameters"] == asdict(params.count(reading.spec))
    for field, total in answer["parameters"].items():
        assert sum(part[field] for part in answer["parts"]) == total
    assert [extra["scalars"] for extra in answer["extras"]] == [extra.scalars for extra in reading.extras]
    assert answer["not_counted"] == list(reading.not_counted)


def test_the_first_three_counts_come_first(capsys, monkeypatch):
    """Unique, stored and active; the rest on demand; what is left out by name."""
    _, out, _ = run(capsys, monkeypatch, "params", "deepseek-v3")
    lines = out.splitlines()
    assert lines[0] == "deepseek-v3 (deepseek_v3)"
    assert [line.split()[:2] for line in lines[2:5]] == [
        ["unique", "671,026,404,352"],
        ["stored", "671,026,419,200"],
        ["active", "37,552,282,624"],
    ]
    assert "matmul_active" not in out and "684,531,386,000" in out
    _, out, _ = run(capsys, monkeypatch, "params", "gemma-3-27b", "--all")
    assert "matmul_active" in out and "Not counted: vision_config" in out


@pytest.mark.parametrize(("by", "rows"), [("part", 8), ("layer", 33), ("tensor", 291)])
def test_splits_as_tables_and_as_json(by, rows, capsys, monkeypatch):
    """By part, by layer and by tensor, with the same numbers in both forms."""
    _, out, _ = run(capsys, monkeypatch, "params", "llama-3.1-8b", "--by", by, "--json")
    split = json.loads(out)[f"{by}s"]
    field = "scalars" if by == "tensor" else "unique"
    assert sum(row[field] for row in split) == 8_030_261_248
    _, table, _ = run(capsys, monkeypatch, "params", "llama-3.1-8b", "--by", by)
    assert all(f"{row[field]:,}" in table for row in split)
    assert len(split) == rows if by != "part" else len(split) <= rows


def test_tensors_are_listed_with_their_copies_and_uses(capsys, monkeypatch):
    """Experts are one entry with a count and a fraction of a use; buffers are listed too."""
    _, out, _ = run(capsys, monkeypatch, "params", "deepseek-v3", "--by", "tensor", "--json")
    rows = {row["tensor"]: row for row in json.loads(out)["tensors"]}
    assert sum(row["scalars"] for row in rows.values()) == 671_026_419_200
    expert = rows["blocks.3.feed_forward.experts.{expert}.gate.weight"]
    assert (expert["copies"], expert["uses"], expert["shape"]) == (256, "1/32", [2048, 7168])
    assert rows["embedding.weight"]["uses"] == "0"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["params", "nothing-here"], "nothing-here: no such file or folder, and not a published model"),
        (["params"], "Missing argument 'CONFIG'"),
        (["params", "gpt2", "--by", "colour"], "'colour' is not one of"),
        (["params", "gpt2", "--fast"], "No such option"),
        (["weigh", "gpt2"], "No such command 'weigh'"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(arguments, expected, capsys, monkeypatch):
    """Nothing on standard output, one line on standard error, exit code 2."""
    code, out, err = run(capsys, monkeypatch, *arguments)
    assert (code, out) == (2, "")
    assert expected in err and err.startswith("sixnd: ") and err.count("\n") == 1


def test_a_bad_file_is_named(tmp_path, capsys, monkeypatch):
    """The line names the file, the field and what was expected."""
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "gpt2", "vocab_size": true}')
    code, out, err = run(capsys, monkeypatch, "params", str(path))
    assert (code, out) == (2, "")
    assert err == f"sixnd: {path}: vocab_size: expected int, got bool\n"


def test_the_hash_is_the_files(tmp_path, capsys, monkeypatch):
    """A config is identified by the SHA-256 of its bytes."""
    path = tmp_path / "config.json"
    path.write_bytes(published.data("gpt2"))
    _, out, _ = run(capsys, monkeypatch, "params", str(path), "--json")
    assert json.loads(out)["model"]["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert json.loads(out)["model"]["path"] == str(path)


def test_a_full_disk_is_one_line():
    """Output that cannot be written is an error in words."""
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "accounting", "params", "gpt2"], stdout=full, stderr=-1, text=True)
    assert done.returncode == 1
    assert done.stderr == "sixnd: standard output: no space left on device\n"


def test_the_module_is_the_command():
    """``python -m accounting`` does what ``sixnd`` does, in a process of its own."""
    command = [sys.executable, "-m", "accounting", "params", "gpt2"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "124,439,808" in done.stdout and not done.stderr


@pytest.mark.parametrize("module", ["accounting", "accounting.audit", "accounting.cli", "accounting.flops"])
def test_counting_imports_no_framework(module):
    """Neither torch nor jax nor numpy is loaded to count."""
    code = f"import sys, {module}; sys.exit(len({{'torch', 'jax', 'numpy'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
