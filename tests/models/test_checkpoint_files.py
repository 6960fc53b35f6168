"""The safetensors reader and writer against the safetensors library, and broken files."""

import struct

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from checkpoint_cases import write_header, write_raw

from models.checkpoint.safetensors_file import read_header, read_rows, write_file


def _arrays():
    rng = np.random.default_rng(0)
    return {
        "a": rng.standard_normal((5, 7), np.float32),
        "b": rng.integers(-(2**60), 2**60, (3,)),
        "c": rng.integers(-128, 128, (4, 2, 3)).astype(np.int8),
        "d": rng.standard_normal((6, 1)).astype(ml_dtypes.bfloat16),
        "e": rng.standard_normal(9).astype(np.float16),
        "empty": np.zeros((0, 4), np.float32),
        "scalar": np.array(3.5, np.float32),
    }


def test_reads_what_the_safetensors_library_writes(tmp_path):
    arrays = _arrays()
    file = tmp_path / "x.safetensors"
    safetensors.numpy.save_file(arrays, file, metadata={"k": "v"})
    header = read_header(file)
    assert set(header) == set(arrays)
    for name, array in arrays.items():
        values = read_rows(header[name])
        assert values.dtype == array.dtype and values.shape == array.shape
        np.testing.assert_array_equal(values, array)
    np.testing.assert_array_equal(read_rows(header["c"], 1, 3), arrays["c"][1:3])
    np.testing.assert_array_equal(read_rows(header["a"], 4, 5), arrays["a"][4:])


def test_the_safetensors_library_reads_what_is_written(tmp_path):
    kinds = {"a": "F32", "b": "I64", "c": "I8", "d": "BF16", "e": "F16", "scalar": "F32"}
    arrays = {name: _arrays()[name] for name in kinds}
    file = tmp_path / "x.safetensors"
    codes = np.arange(256, dtype=np.uint8).reshape(2, 128)

    def rows(name):
        array = codes if name == "q" else arrays[name]
        return (array[i : i + 2] for i in range(0, len(array), 2)) if array.ndim else [array]

    layout = {n: (kinds[n], a.shape) for n, a in arrays.items()}
    write_file(file, {**layout, "q": ("F8_E4M3", (2, 128))}, rows)
    with safetensors.safe_open(file, "np") as opened:
        assert opened.get_slice("q").get_dtype() == "F8_E4M3"
        for name, array in arrays.items():
            np.testing.assert_array_equal(opened.get_tensor(name), array)
    np.testing.assert_array_equal(read_rows(read_header(file)["q"]).view(np.uint8), codes)
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]


def test_a_writer_given_too_few_rows_leaves_no_file(tmp_path):
    with pytest.raises(ValueError, match="x: 8 bytes given"):
        write_file(tmp_path / "f", {"x": ("F32", (3,))}, lambda _: [np.zeros(2, np.float32)])
    assert not list(tmp_path.iterdir())


def test_every_truncation_is_an_error(tmp_path):
    file = tmp_path / "x.safetensors"
    write_raw(file, {"one": ("F32", np.ones(3, np.float32)), "two": ("I64", np.arange(2))})
    whole = file.read_bytes()
    for size in range(len(whole)):
        file.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="x.safetensors.*(truncated|too few)"):
            read_header(file)
    file.write_bytes(whole)
    assert set(read_header(file)) == {"one", "two"}


def test_a_file_that_shrinks_after_its_header_was_read(tmp_path):
    file = tmp_path / "x.safetensors"
    write_raw(file, {"one": ("F32", np.ones((4, 4), np.float32))})
    tensor = read_header(file)["one"]
    file.write_bytes(file.read_bytes()[:-20])
    np.testing.assert_array_equal(read_rows(tensor, 0, 2), np.ones((2, 4)))
    with pytest.raises(ValueError, match="ended inside one.*fetch"):
        read_rows(tensor, 2, 4)


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"t": {**F32, "shape": [3]}}, r"t is F32 \[3\], which takes 12 bytes, but has 8"),
        ({"t": {**F32, "data_offsets": [0, 16]}}, "truncated: t ends at byte"),
        ({"t": {**F32, "data_offsets": [8, 0]}}, "t ends at 0, before its begin 8"),
        ({"t": {**F32, "data_offsets": [0, 8.0]}}, "corrupt header entry for t"),
        ({"t": {**F32, "data_offsets": [-8, 0]}}, "corrupt header entry for t"),
        ({"t": {**F32, "shape": [True, 2]}}, "corrupt header entry for t"),
        ({"t": {"dtype": "F32", "shape": [2]}}, "corrupt header entry for t"),
        ({"t": [1]}, "corrupt header entry for t"),
        ({"t": F32, "u": F32}, "overlaps"),
        ({"u": {**F32, "shape": [1], "data_offsets": [4, 8]}}, "u follows a gap"),
        ({"t": {**F32, "shape": [1], "data_offsets": [0, 4]}}, "4 bytes after its last tensor"),
    ],
)
def test_headers_that_contradict_the_file(tmp_path, header, message):
    write_header(tmp_path / "bad.safetensors", header, bytes(8))
    with pytest.raises(ValueError, match="bad.safetensors.*" + message):
        read_header(tmp_path / "bad.safetensors")


@pytest.mark.parametrize(
    "text",
    [b"{", b"[]", b"\xff\xfe{}", b'{"t": 1, "t": 2}', b"[" * 5000, b'{"t": NaN'],
    ids=range(6),
)
def test_headers_that_are_no_json_object(tmp_path, text):
    file = tmp_path / "bad.safetensors"
    file.write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(ValueError, match="bad.safetensors has a corrupt header"):
        read_header(file)


def test_a_file_of_another_kind(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"<html>Not found</html>" * 10)
    with pytest.raises(ValueError, match="corrupt or no safetensors file"):
        read_header(file)
