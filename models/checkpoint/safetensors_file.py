"""Reading and writing ``.safetensors`` files, with the 8-bit types that numpy's own reader lacks.

A file is: 8 bytes, the little-endian length n of the header; n bytes of JSON, tensor name ->
``{dtype, shape, data_offsets}`` with offsets from the end of the header; then the values, C order.

Rows are read with plain positioned reads into fresh arrays. A memory map would save that copy, but
its pages count as the process's own memory, which would then grow with the checkpoint, and a file
that shrinks while it is mapped kills the process where a read gives an error.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

NUMPY_TYPES: Mapping[str, np.dtype] = {
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "I16": np.dtype("<i2"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
    "BOOL": np.dtype("?"),
}
"""Type names of the format that can be read. Others may stand in a header, unread."""

MAX_HEADER_BYTES = 100_000_000
_AGAIN = "; fetch the file again"


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies: ``nbytes`` from byte ``offset`` of ``file``."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int

    def __str__(self) -> str:
        return f"{self.name} ({self.dtype} {list(self.shape)})"


def read_header(path: str | Path) -> dict[str, TensorInfo]:
    """Name -> :class:`TensorInfo` of every tensor in the file, in the order of their bytes.

    Raises:
        ValueError: the file is truncated, is not a safetensors file, or its header contradicts
            itself or the file's size. Names the file and, where there is one, the tensor.
    """
    path = Path(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        if len(head) < 8:
            raise ValueError(f"{path} has {size} bytes, too few for a safetensors file{_AGAIN}")
        (length,) = struct.unpack("<Q", head)
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"{path} is corrupt or no safetensors file: header of {length} bytes")
        if 8 + length > size:
            raise ValueError(
                f"{path} is truncated: its header needs {8 + length} bytes, the file has {size}"
                f"{_AGAIN}"
            )
        text = file.read(length)
    try:
        header = json.loads(text, object_pairs_hook=_no_duplicates)
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} has a corrupt header ({error}){_AGAIN}") from error
    if not isinstance(header, dict):
        raise ValueError(f"{path} has a corrupt header: no JSON object{_AGAIN}")
    header.pop("__metadata__", None)
    entries = [_parse_entry(path, n, e, 8 + length, size) for n, e in header.items()]
    entries.sort(key=lambda t: (t.offset, t.offset + t.nbytes))
    end = 8 + length
    for tensor in entries:
        if tensor.offset != end:
            what = "overlaps the tensor before it" if tensor.offset < end else "follows a gap"
            raise ValueError(f"{path} is corrupt: {tensor.name} {what} at byte {end}{_AGAIN}")
        end += tensor.nbytes
    if end != size:
        raise ValueError(f"{path} is corrupt: {size - end} bytes after its last tensor{_AGAIN}")
    return {tensor.name: tensor for tensor in entries}


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} stands twice")
    return found


def _parse_entry(path: Path, name: str, entry: Any, start: int, size: int) -> TensorInfo:
    def natural(value: Any, length: int | None = None) -> bool:
        return (
            isinstance(value, list)
            and (length is None or len(value) == length)
            and all(type(v) is int and v >= 0 for v in value)
        )

    if (
        not isinstance(entry, dict)
        or not isinstance(entry.get("dtype"), str)
        or not natural(entry.get("shape"))
        or not natural(entry.get("data_offsets"), 2)
    ):
        raise ValueError(f"{path} has a corrupt header entry for {name}: {entry!r}{_AGAIN}")
    shape = tuple(entry["shape"])
    begin, end = entry["data_offsets"]
    if begin > end:
        raise ValueError(f"{path} is corrupt: {name} ends at {end}, before its begin {begin}")
    if start + end > size:
        raise ValueError(
            f"{path} is truncated: {name} ends at byte {start + end}, the file has {size}{_AGAIN}"
        )
    kind = NUMPY_TYPES.get(entry["dtype"])
    if kind is not None and math.prod(shape) * kind.itemsize != end - begin:
        raise ValueError(
            f"{path} is corrupt: {name} is {entry['dtype']} {list(shape)}, which takes "
            f"{math.prod(shape) * kind.itemsize} bytes, but has {end - begin}{_AGAIN}"
        )
    return TensorInfo(name, entry["dtype"], shape, path, start + begin, end - begin)


def read_rows(tensor: TensorInfo, start: int = 0, stop: int | None = None) -> np.ndarray:
    """Rows ``[start, stop)`` of the leading axis, freshly read from the file.

    Raises:
        ValueError: the file has become shorter than its header says, or the type is not one of
            :data:`NUMPY_TYPES`.
    """
    kind = NUMPY_TYPES.get(tensor.dtype)
    if kind is None:
        raise ValueError(f"{tensor} has a type that cannot be read; known: {list(NUMPY_TYPES)}")
    rows = tensor.shape[0] if tensor.shape else 1
    stop = rows if stop is None else stop
    shape = (stop - start, *tensor.shape[1:]) if tensor.shape else ()
    row_bytes = math.prod(tensor.shape[1:]) * kind.itemsize
    buffer = np.empty((stop - start) * row_bytes, np.uint8)
    view, done = buffer.data, 0
    with tensor.file.open("rb", buffering=0) as file:
        file.seek(tensor.offset + start * row_bytes)
        # One read call returns at most 2 GiB, hence the loop.
        while done < len(view):
            count = file.readinto(view[done:])
            if not count:
                raise ValueError(
                    f"{tensor.file} ended inside {tensor.name}: it was truncated{_AGAIN}"
                )
            done += count
    return buffer.view(kind).reshape(shape)


def write_file(
    path: str | Path,
    tensors: Mapping[str, tuple[str, tuple[int, ...]]],
    rows: Callable[[str], Iterable[np.ndarray]],
) -> int:
    """Write a file from ``name -> (type, shape)`` and a function giving a tensor's rows in tiles.

    The header comes first, so no tensor has to be whole in memory. The file appears under its
    name only when it is complete.

    Returns:
        The number of bytes of all tensors.

    Raises:
        ValueError: the tiles of a tensor add up to another size than its shape says.
    """
    path = Path(path)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (kind, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * NUMPY_TYPES[kind].itemsize
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    unfinished = path.with_name(path.name + ".tmp")
    try:
        with unfinished.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for name, (kind, shape) in tensors.items():
                written = sum(file.write(b) for b in _as_bytes(rows(name)))
                wanted = math.prod(shape) * NUMPY_TYPES[kind].itemsize
                if written != wanted:
                    raise ValueError(f"{name}: {written} bytes given, {kind} {shape} has {wanted}")
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return end


def _as_bytes(tiles: Iterable[np.ndarray]) -> Iterator[memoryview]:
    for tile in tiles:
        yield np.ascontiguousarray(tile).reshape(-1).view(np.uint8).data
