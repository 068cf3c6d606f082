"""Headers and indexes: the safetensors library is the authority, in what it writes and in what it refuses."""

import json
import os
import resource
import struct
import subprocess
import sys
from importlib.metadata import distribution
from math import prod
from pathlib import Path

import ml_dtypes  # noqa: F401 (NumPy learns its dtypes)
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize, safe_open
from safetensors.numpy import save_file

from accounting import checkpoint, naming
from accounting.checkpoint import BITS, HEADER_LIMIT, MAX_INTEGER, inconsistencies
from accounting.files import InputError
from accounting.huggingface import load
from tests import strategies
from tests.checkpoints import entries, headed, index_of, shards, sparse, write_index

ONE = {"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}
SMALL = {
    "a.weight": ("BF16", (3, 2)),
    "b.weight": ("F32", (4,)),
    "c": ("F4", (2, 3)),
    "d": ("I64", ()),
    "e": ("U8", (0,)),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One folder for all examples of a test."""
    return tmp_path_factory.mktemp("checkpoint")


def whole(tensors=SMALL):
    """A file of the format, as bytes."""
    header, size = entries(tensors)
    return headed(header, bytes(size))


def written(folder, content, name="model.safetensors"):
    path = folder / name
    path.write_bytes(content)
    return path


def refused(path, **options):
    """The one line with which a file, an index or a folder is refused."""
    __tracebackhide__ = True
    with pytest.raises(InputError) as error:
        checkpoint.load(path, **options)
    line = str(error.value)
    assert line.isprintable() and len(line) < 1000
    return line


def as_library(path):
    """Names, dtypes, shapes and metadata, as the library reads a file."""
    with safe_open(path, "numpy") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        return {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}, file.metadata()


def as_here(path):
    header = checkpoint.header(path)
    return {name: (tensor.dtype, tensor.shape) for name, tensor in header.tensors.items()}, dict(header.metadata)


def same(path):
    """Assert that both read the same."""
    __tracebackhide__ = True
    (theirs, metadata), ours = as_library(path), as_here(path)
    assert ours == (theirs, metadata or {})


@given(tensors=strategies.tensor_tables(strategies.NUMPY_DTYPES, least=1), metadata=strategies.metadata())
def test_what_the_library_writes_is_read_equal(tensors, metadata, folder):
    """Arrays of every dtype that NumPy has, empty ones and scalars, under any name."""
    path = folder / "numpy.safetensors"
    arrays = {name: np.zeros(shape, strategies.NUMPY_DTYPES[dtype]) for name, (dtype, shape) in tensors.items()}
    save_file(arrays, path, metadata)
    same(path)
    assert as_here(path)[0] == tensors
    assert checkpoint.header(path).size == path.stat().st_size


def test_every_dtype_of_the_format_is_known(tmp_path):
    """The library's own list, from the line with which it refuses another, and the bits that each takes."""
    with pytest.raises(SafetensorError) as error:
        deserialize(headed({"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 1]}}, b"0"))
    assert set(str(error.value).partition("expected one of ")[2].split("`")[1::2]) == BITS.keys()
    for dtype, bits in BITS.items():
        path = written(tmp_path, headed({"a": {"dtype": dtype, "shape": [8], "data_offsets": [0, bits]}}, bytes(bits)))
        same(path)
        for wrong in (bits - 1, bits + 1):
            header = {"a": {"dtype": dtype, "shape": [8], "data_offsets": [0, wrong]}}
            with pytest.raises(SafetensorError):
                deserialize(headed(header, bytes(wrong)))
            assert f"a: {dtype} of shape [8] takes {bits} bytes" in refused(
                written(tmp_path, headed(header, bytes(wrong)))
            )


@given(tensors=strategies.tensor_tables(), metadata=strategies.metadata(), data=st.data())
def test_any_order_of_a_header_is_read_equal(tensors, metadata, data, folder):
    """Names, fields and metadata in any order, blanks between and behind them, dtypes below a byte among them."""
    header, size = entries(tensors)
    header["__metadata__"] = metadata
    items = data.draw(st.permutations(list(header.items())))
    fields = data.draw(st.permutations(["dtype", "shape", "data_offsets"]))
    turned = {name: {field: value[field] for field in fields} if name in tensors else value for name, value in items}
    text = json.dumps(turned, indent=data.draw(st.none() | st.just(1)), ensure_ascii=data.draw(st.booleans()))
    path = written(
        folder, headed(text.encode() + b" " * data.draw(st.integers(0, 9)), bytes(size)), "order.safetensors"
    )
    same(path)
    assert as_here(path)[0] == tensors


def test_thousands_of_tensors(tmp_path):
    """5,000 tensors, written by the library."""
    path = tmp_path / "many.safetensors"
    save_file({f"layers.{i}.weight": np.zeros((i % 7, 3), np.float16) for i in range(5000)}, path)
    same(path)


@pytest.mark.parametrize("text", ["{}", '{"__metadata__": {}}', '{"__metadata__": null}', '{"__metadata__":{"a":"b"}}'])
def test_a_file_without_tensors(text, tmp_path):
    """The library takes it, with metadata or without."""
    path = written(tmp_path, headed(text.encode()))
    same(path)
    assert checkpoint.load(path).tensors == {}


def with_entry(**fields):
    return headed({"a": ONE["a"] | fields}, b"00")


def two(first, second, size, shape=(2,)):
    """Two tensors at these offsets."""
    return headed(
        {n: {"dtype": "U8", "shape": shape, "data_offsets": o} for n, o in (("a", first), ("b", second))}, bytes(size)
    )


def raw(*pairs):
    """A header of these keys and values, as they are, before two bytes of data."""
    return headed(b"{" + b",".join(pairs) + b"}", b"00")


def sized(text):
    """A header whose tensor has this text for its shape."""
    return headed(json.dumps(ONE).encode().replace(b"[2]", text), b"00")


ENTRY = json.dumps(ONE["a"]).encode()
A, NONE = b'"a":' + ENTRY, b'"__metadata__":{}'
#: Files that the library refuses, and the cause that is named here.
CORRUPT = {
    "empty": (b"", "a file of 0 bytes is no safetensors file"),
    "seven bytes": (bytes(7), "a file of 7 bytes is no safetensors file"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "a pointer of Git LFS"),
    "cut-off header": (whole()[:60], f"a header of {whole()[0] + 256 * whole()[1]} bytes in a file of 60: cut off"),
    "cut-off data": (whole()[:-1], "cut off: the tensors take"),
    "trailing": (whole() + b"0", "1 trailing byte behind the last tensor"),
    "large header": (struct.pack("<Q", HEADER_LIMIT + 1), "a header of 100,000,001 bytes, more than 100,000,000"),
    "huge header": (b"\xff" * 8 + b"{}", "a header of 18,446,744,073,709,551,615 bytes, more than"),
    "no header": (headed(b""), "header: expected a JSON object, got b''"),
    "list": (headed(b"[]"), "header: expected a JSON object"),
    "null": (headed(b"null"), "header: expected a JSON object"),
    "text": (headed(b"<html>"), "header: expected a JSON object"),
    "mark": (headed(b"\xef\xbb\xbf{}"), "header: expected a JSON object"),
    "unclosed": (headed(b'{"a":'), "header: Input data was truncated"),
    "comma": (headed(b'{"__metadata__":{"a":"b"},}'), "header: JSON is malformed"),
    "nul": (headed(b"{}\0"), "header: JSON is malformed"),
    "nested": (headed(b'{"a":' + b"[" * 10**6), "header: nested too deep"),
    "nested objects": (headed(b'{"a":' * 10**6), "header: nested too deep"),
    "nested metadata": (headed(b'{"__metadata__":' + b"[" * 10**6), "header: nested too deep"),
    "UTF-8": (raw(b'"\xff":' + ENTRY), "header: Invalid UTF-8"),
    "surrogate": (raw(b'"\\ud800":' + ENTRY), "header: JSON is malformed"),
    "raw surrogate": (raw(b'"\xed\xa0\x80":' + ENTRY), "header: Invalid UTF-8"),
    "control": (raw(b'"\x01":' + ENTRY), "header: JSON is malformed"),
    "metadata of numbers": (headed({"__metadata__": {"a": 1}}), "header: __metadata__: expected str, got int"),
    "metadata of nulls": (headed({"__metadata__": {"a": None}}), "header: __metadata__: expected str, got null"),
    "metadata of a list": (headed({"__metadata__": []}), "header: __metadata__: expected object | null, got array"),
    "entry": (headed({"a": 3}), "header: a: expected object, got int"),
    "unknown dtype": (with_entry(dtype="F99"), "header: a: dtype: unknown dtype 'F99'"),
    "dtype of a number": (with_entry(dtype=3), "header: a: dtype: expected str, got int"),
    "no offsets": (raw(b'"a":{"dtype":"U8","shape":[2]}'), "header: a: Object missing required field data_offsets"),
    "three offsets": (with_entry(data_offsets=[0, 1, 2]), "header: a: data_offsets: "),
    "negative": (with_entry(shape=[-2]), "header: a: shape[0]: expected int >= 0"),
    "negative twice": (with_entry(shape=[-2, -1]), "header: a: shape[0]: expected int >= 0"),
    "negative zero": (sized(b"[2,-0]"), "header: a: expected int >= 0, got -0"),
    "negative zero behind metadata": (
        raw(NONE, A.replace(b"[0, 2]", b"[-0,2]"), b'"-0":' + ENTRY.replace(b"[0, 2]", b"[2, 4]")) + b"00",
        "header: a: expected int >= 0, got -0",
    ),
    "fraction": (with_entry(shape=[2.0]), "header: a: shape[0]: expected int, got float"),
    "exponent": (sized(b"[2e0]"), "header: a: shape[0]: expected int, got float"),
    "bool": (with_entry(shape=[True, 2]), "header: a: shape[0]: expected int, got bool"),
    "word": (with_entry(shape=["2"]), "header: a: shape[0]: expected int, got str"),
    "null size": (with_entry(shape=[None]), "header: a: shape[0]: expected int, got null"),
    "shape of a number": (with_entry(shape=2), "header: a: shape: expected array, got int"),
    "huge": (with_entry(shape=[2**64]), f"header: a: shape[0]: expected int <= {MAX_INTEGER}"),
    "thousands of digits": (sized(b"[" + b"9" * 5000 + b"]"), "header: a: shape[0]: Integer value out of range"),
    "huge product": (with_entry(shape=[2**62, 2**62]), "header: a: U8 of shape [4611686018427387904, 461"),
    "huge and empty": (with_entry(shape=[2**62, 2**62, 0], data_offsets=[0, 0]), "0] is larger than any file"),
    "shape too large": (with_entry(shape=[3]), "header: a: U8 of shape [3] takes 3 bytes, its data_offsets hold 2"),
    "backwards": (with_entry(shape=[0], data_offsets=[2, 0]), "header: a: data_offsets run backwards, from 2 to 0"),
    "gap": (two([0, 2], [3, 5], 5), "header: b: a gap of 1 byte before it"),
    "gap at the start": (two([1, 3], [3, 5], 5), "header: a: a gap of 1 byte before it"),
    "overlap": (two([0, 2], [1, 3], 3), "header: b: overlaps what is before it"),
    "same range": (two([0, 2], [0, 2], 2), "header: b: overlaps what is before it"),
    "empty in the middle": (two([0, 2], [1, 1], 2), "header: b: "),
    "empty behind": (two([0, 0], [9, 9], 0, shape=(0,)), "header: b: a gap of 9 bytes before it"),
    "half a byte": (with_entry(dtype="F4", shape=[3]), "header: a: F4 of shape [3] does not end with a byte"),
    "six bits": (with_entry(dtype="F6_E2M3"), "header: a: F6_E2M3 of shape [2] does not end with a byte"),
    "twice, digits": (raw(b'"a":[' + b"9" * 5000 + b"]", A), "header: a: given more than once"),
    "twice, UTF-8": (raw(b'"a":"\xff"', A), "header: expected UTF-8"),
    "twice, other places": (raw(A, A.replace(b"[0, 2]", b"[2, 4]")) + b"00", "header: a: given more than once"),
    "field twice": (raw(A[:-1] + b',"dtype":"U8"}'), "header: dtype: given more than once"),
    "metadata twice": (raw(NONE, NONE, A), "header: __metadata__: given more than once"),
    "metadata and a tensor": (raw(NONE, b'"__metadata__":' + ENTRY, A), "header: __metadata__: expected str"),
}  # fmt: skip


@pytest.mark.parametrize("name", CORRUPT)
def test_what_the_library_refuses_is_refused_with_its_cause(name, tmp_path):
    """In one line that names the file, the tensor and what is wrong with it."""
    content, cause = CORRUPT[name]
    with pytest.raises(SafetensorError):
        deserialize(content)
    line = refused(written(tmp_path, content))
    assert "model.safetensors: " in line and cause in line


#: Files that the library takes, and that no writer writes.
TAKEN = {
    "twice": (raw(A, A), "header: a: given more than once"),
    "twice under an escape": (raw(A, b'"\\u0061":' + ENTRY), "header: a: given more than once"),
    "twice in another shape": (raw(A.replace(b"[2]", b"[1,2]"), A), "header: a: given more than once"),
    "metadata": (raw(b'"__metadata__":{"x":"1","x":"2"}', A), "header: x: given more than once"),
    "metadata alone": (raw(b'"__metadata__":{"x":"1","x":"2"}')[:-2], "header: x: given more than once"),
    "unknown field": (with_entry(strides=[1]), "header: a: Object contains unknown field strides"),
    "as a list": (headed({"a": ["U8", [2], [0, 2]]}, b"00"), "header: a: expected object, got array"),
    "blank": (headed(b" " + json.dumps(ONE).encode(), b"00"), "header: expected a JSON object, got b' {"),
    "sizes": (with_entry(shape=[1] * 64 + [2]), "header: a: shape: expected array of length <= 64"),
}  # fmt: skip


@pytest.mark.parametrize("name", TAKEN)
def test_what_the_format_forbids_is_refused_though_the_library_takes_it(name, tmp_path):
    """A key that is given twice, of which the library takes the last, and what the format does not have."""
    content, cause = TAKEN[name]
    deserialize(content)
    assert cause in refused(written(tmp_path, content))


def test_a_name_may_have_what_a_size_may_not(tmp_path):
    """A minus before a zero, in a name and in the metadata."""
    path = written(tmp_path, whole({"-0": ("U8", (2, 0)), "[-0,": ("U8", (1,))}))
    same(path)
    same(written(tmp_path, headed({"__metadata__": {"-0": "-0"}, "a-0": ONE["a"]}, b"00")))


@pytest.mark.parametrize("ending", ["safetensors", "safetensors.index.json"])
def test_a_key_given_twice_is_refused_however_deep_its_value_is_nested(ending, tmp_path):
    """At every depth around the one at which a decoder gives up, with one of two causes."""
    causes = set()
    for depth in (*range(1, 1100), 10**6):
        nest = b"[" * depth + b"]" * depth
        header = headed(b'{"a":%b,%b}' % (nest, A), b"00")
        index = b'{"metadata": {"x": %b}, "weight_map": {"a": "m", "a": "n"}}' % nest
        path = written(tmp_path, index if ending.endswith("json") else header, f"model.{ending}")
        with pytest.raises(InputError) as error:
            checkpoint.load(path)
        causes.add(str(error.value).rpartition(": ")[2])
    assert causes == {"given more than once", "nested too deep"}


@given(content=strategies.mutations(whole()))
def test_a_changed_file_is_refused_or_read_as_the_library_reads_it(content, folder):
    """Whatever happened to its bytes, nothing but InputError comes of it."""
    path = written(folder, content, "mutated.safetensors")
    try:
        header = checkpoint.header(path)
    except InputError as error:
        assert str(error).isprintable()
    else:
        same(path)
        assert 8 + header.length + sum(tensor.bytes for tensor in header.tensors.values()) == len(content)


@given(content=st.binary(max_size=200))
def test_bytes_that_are_no_file_are_refused_as_an_index_and_as_a_header(content, folder):
    """Whatever they are."""
    for read in (lambda: checkpoint.index(content), lambda: checkpoint.header(written(folder, headed(content)))):
        try:
            read()
        except InputError as error:
            assert str(error).isprintable()


def test_hostile_headers_take_bounded_memory_and_time(tmp_path):
    """2 MB of the worst in each way, in a process of its own that may have 1 GB."""
    worst = {
        "brackets": b'{"a":' + b"[" * 2_000_000,
        "objects": b'{"a":' * 400_000,
        "sizes": b'{"a":{"dtype":"U8","shape":[' + b",".join([b"9" * 19] * 100_000) + b'],"data_offsets":[0,2]}}',
        "digits": b'{"a":{"dtype":"U8","shape":[' + b"9" * 2_000_000 + b'],"data_offsets":[0,2]}}',
        "backslashes": b'{"' + b"\\\\" * 1_000_000 + b'":3}',
        "names": b"{" + b",".join(b'"%d":%b' % (i, ENTRY) for i in range(30_000)) + b"}",
        "repeats": b'{"a":' + b',"a":'.join([ENTRY] * 30_000) + b"}",
    }
    for name, text in worst.items():
        written(tmp_path, headed(text, b"00"), f"{name}.safetensors")
    code = (
        "import pathlib, resource, sys; resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))\n"
        "from accounting import checkpoint, files\n"
        "for path in sorted(pathlib.Path(sys.argv[1]).iterdir()):\n"
        "    try: checkpoint.header(path); print('read', path)\n"
        "    except files.InputError as error: assert len(str(error)) < 1000\n"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    # Some 0.6 s on one core, most of it Python's start; what grows with a square takes minutes.
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 20


def test_the_cap_is_configurable(tmp_path):
    """A header of more bytes than the cap is refused with both numbers, and read under a larger one."""
    path = written(tmp_path, whole())
    length = checkpoint.header(path).length
    assert f"a header of {length} bytes, more than {length - 1}" in refused(path, limit=length - 1)
    assert checkpoint.load(path, limit=length).tensors.keys() == SMALL.keys()


def test_only_the_header_is_read(tmp_path, monkeypatch):
    """Of a file of a terabyte, 8 bytes and the header."""
    path = tmp_path / "model.safetensors"
    size = sparse(path, {"a": ("F32", (2**19, 2**19))})
    assert size == 2**40 and path.stat().st_blocks * 512 < 2**20
    before = _bytes_read()
    header = checkpoint.header(path)
    assert header.tensors["a"].bytes == size
    # What Python itself reads meanwhile, this very counter's file among it, is under 4 kB.
    assert _bytes_read() - before < 8 + header.length + 4096


def _bytes_read():
    return int(Path("/proc/self/io").read_text().split()[1])


def test_byte_ranges_are_those_of_the_data(tmp_path):
    """Where a tensor is said to lie, its values lie."""
    path = tmp_path / "model.safetensors"
    arrays = {"a": np.arange(6, dtype=np.int32).reshape(2, 3), "b": np.arange(5, dtype=np.float64)}
    save_file(arrays, path)
    header, content = checkpoint.header(path), path.read_bytes()
    for name, array in arrays.items():
        begin, end = (8 + header.length + offset for offset in header.tensors[name].data_offsets)
        assert content[begin:end] == array.tobytes()
        assert header.tensors[name].scalars == array.size and header.tensors[name].bytes == array.nbytes


# Several files


@given(tensors=strategies.tensor_tables(least=1), count=st.integers(1, 4))
def test_files_with_an_index_hold_what_one_file_holds(tensors, count, tmp_path_factory):
    """However the tensors are split, and nothing contradicts the index that was written with them."""
    folder = tmp_path_factory.mktemp("shards")
    shards(folder, tensors, count)
    held = checkpoint.load(folder)
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in held.tensors.items()} == tensors
    assert held.places == index_of(folder)["weight_map"]
    assert not list(inconsistencies(held))
    assert held.bytes == sum(BITS[dtype] * prod(shape) // 8 for dtype, shape in tensors.values())


INDEXES = {
    "pointer": (b"version https://git-lfs.github.com/spec/v1\n", "a pointer of Git LFS"),
    "empty": (b"", "Input data was truncated"),
    "list": (b"[]", "expected object, got array"),
    "no map": (b"{}", "Object missing required field weight_map"),
    "empty map": (b'{"weight_map": {}}', "weight_map: expected tensors, got none"),
    "map of numbers": (b'{"weight_map": {"a": 1}}', "expected str, got int"),
    "twice": (b'{"weight_map": {"a": "m.safetensors", "a": "n.safetensors"}}', "a: given more than once"),
    "map twice": (b'{"weight_map": {"b": "m"}, "weight_map": {"a": "m"}}', "weight_map: given more than once"),
    "total twice": (b'{"weight_map": {"a": "m"}, "metadata": {"total_size": 1, "total_size": 2}}', "size: given more"),
    "escaped": (b'{"weight_map": {"a\\"": "m", "\\u0061\\"": "m"}}', 'a": given more than once'),
    "unknown": (b'{"weight_map": {"a": "m"}, "shards": 3}', "Object contains unknown field shards"),
    "fraction": (b'{"metadata": {"total_size": 1.5}, "weight_map": {"a": "m"}}', "expected int | null, got float"),
    "negative": (b'{"metadata": {"total_size": -1}, "weight_map": {"a": "m"}}', "expected int >= 0"),
    "word": (b'{"metadata": {"total_size": "1"}, "weight_map": {"a": "m"}}', "expected int | null, got str"),
    "metadata of a list": (b'{"metadata": [], "weight_map": {"a": "m"}}', "expected object | null, got array"),
    "brackets": (b'{"metadata": ' + b"[" * 10**6, "nested too deep"),
    "brackets in the map": (b'{"weight_map": ' + b"[" * 10**6, "expected object, got array"),
    "UTF-8": (b'{"weight_map": {"\xff": "m"}}', "Invalid UTF-8"),
    "UTF-8 in metadata": (b'{"metadata": {"x": "\xff"}, "weight_map": {"a": "m"}}', "UTF-8"),
    "above": (b'{"weight_map": {"a": "../m.safetensors"}}', "names of files beside the index, got '../m.safetensors'"),
    "absolute": (b'{"weight_map": {"a": "/etc/passwd"}}', "names of files beside the index, got '/etc/passwd'"),
    "backslash": (b'{"weight_map": {"a": "..\\\\m"}}', "names of files beside the index"),
    "itself": (b'{"weight_map": {"a": "."}}', "names of files beside the index"),
    "nul": (b'{"weight_map": {"a": "m\\u0000"}}', "names of files beside the index"),
    "absent": (b'{"weight_map": {"a": "m.safetensors", "b": "n.safetensors"}}', "it is absent, and 1 other too"),
    "long": (b'{"weight_map": {"a": "' + b"m" * 5000 + b'"}}', "the index names it, and it is absent"),
}  # fmt: skip


@pytest.mark.parametrize("name", INDEXES)
def test_an_index_that_cannot_be_used_is_refused_with_its_cause(name, tmp_path):
    """In one line that names the file, whatever the index says."""
    content, cause = INDEXES[name]
    written(tmp_path, content, "model.safetensors.index.json")
    assert cause in refused(tmp_path)


def test_absent_files_are_refused_unless_asked_for(tmp_path):
    """A file that the index names and the folder lacks; without any file there is nothing to read."""
    shards(tmp_path, SMALL, 2)
    first, second = sorted(tmp_path.glob("*.safetensors"))
    second.unlink()
    assert f"{second.name}: the index names it, and it is absent" in refused(tmp_path)
    held = checkpoint.load(tmp_path, partial=True)
    assert held.absent == (second.name,) and list(held.headers) == [first.name]
    first.unlink()
    assert "it is absent, and 1 other too" in refused(tmp_path, partial=True)


def test_links_are_followed_within_one_repository_of_the_cache_alone(tmp_path):
    """A snapshot is made of links into its own blobs; a link to anything else is refused, by whatever name."""
    cache, elsewhere = tmp_path / "models--org--name", tmp_path / "elsewhere"
    snapshot, blobs = cache / "snapshots" / "abc", cache / "blobs"
    for folder in (snapshot, blobs, elsewhere):
        folder.mkdir(parents=True)
    shards(blobs, SMALL, 2)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(os.path.relpath(file, snapshot))
    assert checkpoint.load(snapshot).tensors.keys() == SMALL.keys()
    outside = written(elsewhere, whole())
    alone = cache / "one.safetensors"
    for link in (snapshot / "model-00001-of-00002.safetensors", alone):
        link.unlink(missing_ok=True)
        link.symlink_to(outside)
    line = "a link that leaves the folder is not followed"
    assert line in refused(snapshot)
    assert line in refused(alone)
    loop = tmp_path / "loop.safetensors"
    loop.symlink_to(loop)
    assert "loop.safetensors: " in refused(loop)


def test_a_folder_has_one_checkpoint(tmp_path):
    """The usual names, or the only index, or the only file; otherwise a person has to say which."""
    assert "a folder without a .safetensors file" in refused(tmp_path)
    other = written(tmp_path, whole(), "other.safetensors")
    assert list(checkpoint.load(tmp_path).headers) == [other.name]
    written(tmp_path, whole(), "another.safetensors")
    assert "got another.safetensors, other.safetensors: name one of them" in refused(tmp_path)
    written(tmp_path, whole())
    assert list(checkpoint.load(tmp_path).headers) == ["model.safetensors"]
    write_index(tmp_path, dict.fromkeys(SMALL, other.name))
    assert "name one of them" in refused(tmp_path)
    held = checkpoint.load(tmp_path / "model.safetensors.index.json")
    assert held.tensors.keys() == SMALL.keys() and held.index.total_size is None


def test_what_is_no_file_is_refused(tmp_path):
    """Nothing, a folder by a file's name, and a pipe that nobody writes to."""
    pipe = tmp_path / "pipe.safetensors"
    os.mkfifo(pipe)
    assert "no such file" in refused(tmp_path / "none.safetensors")
    assert "expected a regular file" in refused(pipe)
    (tmp_path / "folder").mkdir()
    write_index(tmp_path, {"a": "folder"})
    assert "folder: expected a regular file" in refused(tmp_path / "model.safetensors.index.json")


def test_a_published_index(request):
    """The index of Llama 3.1 8B names the tensors that its config describes, and the bytes that they take."""
    folder = request.config.getoption("ledger_data")
    if folder is None:
        pytest.skip("the index is not ours to publish: --ledger-data names the folder that has it")
    held = checkpoint.index((Path(folder) / "index" / "llama-3.1-8b.index.json").read_bytes())
    expected = {tensor.name: tensor.shape for tensor in naming.published(load("llama-3.1-8b").spec, "llama")}
    assert held.weight_map.keys() == expected.keys() and len(expected) == 291
    assert held.total_size == 2 * sum(map(prod, expected.values())) == 16_060_522_496


def test_a_published_file():
    """The file that a package on the registry ships, read as the library reads it: 32,000 tokens in 256 numbers."""
    (path,) = (file.locate() for file in distribution("wordllama").files if file.suffix == ".safetensors")
    same(path)
    held = checkpoint.load(path)
    assert held.tensors["embedding.weight"].shape == (32_000, 256)
    assert checkpoint.parameters(held) == 8_192_000 and held.bytes == 2 * 8_192_000


def test_headers_alone_count_floats(tmp_path):
    """What may be packed or quantised is no count of weights, and neither are files that contradict their index."""
    path = written(
        tmp_path, whole({"a": ("BF16", (3, 2)), "b": ("F32", (4,)), "ids": ("I64", (9,)), "m": ("BOOL", (2,))})
    )
    assert checkpoint.parameters(checkpoint.load(path)) == 10
    for dtype in sorted(BITS.keys() - {"BF16", "F16", "F32", "F64", "I64", "U64", "BOOL"}):
        held = checkpoint.load(written(tmp_path, whole({"a": ("BF16", (8,)), "q": (dtype, (8,))})))
        with pytest.raises(InputError, match=f"q: {dtype} may be packed or quantised"):
            checkpoint.parameters(held)
    path.unlink()
    shards(tmp_path, {"a": ("BF16", (8,)), "b": ("BF16", (8,))}, 2)
    write_index(tmp_path, index_of(tmp_path)["weight_map"], total_size=33)
    with pytest.raises(InputError, match="total_size: index: the index says 33 bytes, the tensors take 32"):
        checkpoint.parameters(checkpoint.load(tmp_path))
