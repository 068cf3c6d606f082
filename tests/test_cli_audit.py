"""``sixnd audit``, and ``sixnd params`` of a checkpoint without a config: what they print, and how they end."""

import json

import pytest

from accounting import cli, params, published
from accounting.huggingface import load
from tests.checkpoints import headed, index_of, shards, sparse, write_index
from tests.checkpoints import published as published_tensors
from tests.test_cli import run

NAME = "qwen2.5-1.5b"
UP = "model.layers.0.mlp.up_proj.weight"
TENSORS = published_tensors(NAME)


@pytest.fixture
def folder(tmp_path):
    """A full-size checkpoint in two files."""
    shards(tmp_path, TENSORS, 2)
    return tmp_path


def test_a_checkpoint_that_agrees(folder, capsys, monkeypatch):
    """Exit 0, what was found in numbers, and that nothing differs."""
    code, out, err = run(capsys, monkeypatch, "audit", NAME, str(folder))
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == f"{folder}: 338 tensors, 3,087,428,608 bytes in 2 files"
    assert lines[1] == f"against {NAME} (qwen2)"
    assert lines[3].split()[:5] == ["decoder", "338", "1,543,714,304", "3,087,428,608", "BF16"]
    assert lines[-1] == "No difference."


def test_json(folder, capsys, monkeypatch):
    """One object: the model, the files, the groups in integers, and each difference."""
    write_index(folder, index_of(folder)["weight_map"], total_size=5)
    code, out, _ = run(capsys, monkeypatch, "audit", NAME, str(folder), "--json")
    answer = json.loads(out)
    assert code == 1
    assert list(answer) == [
        *("schema", "version", "model", "checkpoint"),
        *("decoder", "extras", "agrees", "differences", "not_counted"),
    ]
    assert (answer["schema"], answer["model"]["name"], answer["agrees"]) == ("sixnd.audit/1", NAME, False)
    assert answer["checkpoint"] == {"path": str(folder), "files": 2, "tensors": 338, "bytes": 3_087_428_608}
    assert answer["decoder"]["scalars"] == params.count(load(NAME).spec).stored and answer["decoder"]["dtypes"] == [
        "BF16"
    ]
    (difference,) = answer["differences"]
    assert (difference["kind"], difference["name"]) == ("total_size", "index")


def test_each_difference_is_a_line_up_to_a_hundred(tmp_path, capsys, monkeypatch):
    """Exit 1; behind the hundredth there is a count."""
    path = tmp_path / "model.safetensors"
    sparse(path, TENSORS | {UP: ("F32", TENSORS[UP][1])})
    code, out, _ = run(capsys, monkeypatch, "audit", NAME, str(path))
    assert code == 1 and out.splitlines()[-2:] == [f"dtype: {UP}: expected BF16, got F32", "1 difference"]
    sparse(path, {name: ("F32", shape) for name, (_, shape) in TENSORS.items()})
    code, out, _ = run(capsys, monkeypatch, "audit", NAME, str(path))
    lines = out.splitlines()
    assert code == 1 and lines[-2:] == ["and 238 more", "338 differences"]
    assert sum(line.startswith("dtype: ") for line in lines) == 100


def test_against_another_checkpoint(folder, tmp_path_factory, capsys, monkeypatch):
    """Exit 0 where both hold the same, however they are split, and 1 where they do not."""
    other = tmp_path_factory.mktemp("other") / "model.safetensors"
    sparse(other, TENSORS)
    code, out, _ = run(capsys, monkeypatch, "audit", "--against", str(other), str(folder))
    assert code == 0 and out.splitlines()[1] == f"against {other}: 338 tensors, 3,087,428,608 bytes in 1 file"
    sparse(other, {name: value for name, value in TENSORS.items() if name != UP})
    code, out, _ = run(capsys, monkeypatch, "audit", "--against", str(other), str(folder), "--json")
    answer = json.loads(out)
    assert code == 1 and answer["model"] is None and answer["against"]["tensors"] == 337
    assert [difference["kind"] for difference in answer["differences"]] == ["unknown"]


def test_a_folder_with_both_is_named_twice(folder, capsys, monkeypatch):
    """A config beside its checkpoint."""
    (folder / "config.json").write_bytes(published.data(NAME))
    assert run(capsys, monkeypatch, "audit", str(folder), str(folder))[0] == 0


def test_an_absent_file_is_a_difference(folder, capsys, monkeypatch):
    """The rest is compared; where nothing is there, there is nothing to compare."""
    (folder / "model-00002-of-00002.safetensors").unlink()
    code, out, _ = run(capsys, monkeypatch, "audit", NAME, str(folder))
    assert code == 1 and "absent file: model-00002-of-00002.safetensors: the index says that it holds 169 " in out
    (folder / "model-00001-of-00002.safetensors").unlink()
    assert run(capsys, monkeypatch, "audit", NAME, str(folder))[0] == 2


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"version https://git-lfs.github.com/spec/v1\n", "a pointer of Git LFS"),
        (headed(b'{"a":' + b"[" * 10**6), "header: nested too deep"),
        (headed({"\x1b[31m": {"dtype": "U8", "shape": [1], "data_offsets": [0, 2]}}, b"00"), r"\x1b[31m: U8 of shape"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(content, expected, tmp_path, capsys, monkeypatch):
    """It names the file and the cause, and nothing of what a stranger wrote reaches a terminal raw."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    code, out, err = run(capsys, monkeypatch, "audit", NAME, str(path))
    assert (code, out) == (2, "")
    assert err.startswith(f"sixnd: {path}: ") and expected in err and err.count("\n") == 1 and err[:-1].isprintable()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["audit"], "Missing argument"),
        (["audit", NAME], "expected CONFIG and CHECKPOINT, got 1 argument"),
        (["audit", NAME, "a", "b"], "expected CONFIG and CHECKPOINT, got 3 arguments"),
        (["audit", "--against", "a", NAME, "b"], "expected CHECKPOINT, got 2 arguments"),
        (["audit", NAME, "no.safetensors"], "no.safetensors: no such file or directory"),
        (["params", "no.safetensors"], "no.safetensors: no such file or directory"),
    ],
)
def test_arguments_that_do_not_fit(arguments, expected, capsys, monkeypatch):
    """One line and exit 2."""
    code, out, err = run(capsys, monkeypatch, *arguments)
    assert (code, out) == (2, "") and expected in err and err.count("\n") == 1


def test_parameters_without_a_config_are_counted_by_headers(folder, capsys, monkeypatch):
    """And it is said that they are."""
    code, out, _ = run(capsys, monkeypatch, "params", str(folder))
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == f"{folder}: counted from the headers, as there is no config"
    assert lines[2].split()[:2] == ["float_scalars", "1,543,714,304"]
    assert lines[5].split() == ["BF16", "338", "1,543,714,304", "3,087,428,608"]
    code, out, _ = run(capsys, monkeypatch, "params", str(folder), "--json")
    answer = json.loads(out)
    assert answer["float_scalars"] == 1_543_714_304 and "stored" not in answer
    assert answer["convention"] == "scalars of all float tensors, mask buffers and tied copies among them"
    assert answer["counted_from"] == "headers" and answer["model"] is None
    assert answer["dtypes"] == [{"dtype": "BF16", "tensors": 338, "scalars": 1_543_714_304, "bytes": 3_087_428_608}]
    code, _, err = run(capsys, monkeypatch, "params", str(folder), "--all")
    assert code == 2 and "--all and --by need a config" in err
    (folder / "config.json").write_bytes(published.data(NAME))
    assert "(qwen2)" in run(capsys, monkeypatch, "params", str(folder))[1]


def test_headers_without_a_tensor(tmp_path, capsys, monkeypatch):
    """No scalar, and no row."""
    (tmp_path / "model.safetensors").write_bytes(headed(b"{}"))
    code, out, err = run(capsys, monkeypatch, "params", str(tmp_path))
    assert (code, err) == (0, "") and out.splitlines()[2].split()[:2] == ["float_scalars", "0"]


@pytest.mark.parametrize("command", [["params"], ["audit", NAME]])
def test_a_folder_that_cannot_be_read(command, tmp_path, capsys, monkeypatch):
    """One line that names it, and exit 2."""

    def denied(path):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("os.scandir", denied)
    monkeypatch.setattr("os.listdir", denied)
    code, out, err = run(capsys, monkeypatch, *command, str(tmp_path))
    assert (code, out, err) == (2, "", f"sixnd: {tmp_path}: permission denied\n")


def test_headers_that_do_not_say_how_many_weights_there_are(tmp_path, capsys, monkeypatch):
    """Packed integers, and a file that is absent."""
    shards(tmp_path, {"a.qweight": ("I32", (8, 8)), "b": ("F16", (2,))}, 2)
    code, out, err = run(capsys, monkeypatch, "params", str(tmp_path))
    assert (code, out) == (2, "") and "a.qweight: I32 may be packed or quantised: count it by a config" in err
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    assert "the index names it, and it is absent" in run(capsys, monkeypatch, "params", str(tmp_path))[2]


def test_the_command_is_listed(capsys, monkeypatch):
    """Among the others, with one line of help."""
    assert "audit" in run(capsys, monkeypatch, "--help")[1] and "audit" in cli.cli.commands
