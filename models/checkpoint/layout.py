"""Orbax's folder layout, written directly: one zarr array a parameter, one file a chunk.

``_METADATA`` names the tree's leaves; leaf ``("layers", "0", "attn", "wq_a")`` is the zarr (v2)
array in folder ``layers.0.attn.wq_a``. Chunks are stored uncompressed (weights do not compress),
so a chunk file is the chunk's values in C order, padded at the array's far edges, and its size is
known beforehand. That lets a conversion stream, resume and be checked with ordinary file calls,
and any Orbax (0.11.20 and 0.12.8 were tried) reads the result.

Chunks follow the logical axes: each holds one expert at most, and an axis that can be split over
devices is cut into pieces, so that a device reads only its own part.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from models.config import ModelConfig
from models.params import ParamSpec, is_spec, param_specs

METADATA_NAME = "_METADATA"
CONFIG_NAME = "config.json"

PIECES = 16
"""A splittable axis is cut into up to this many pieces: a device count that divides it aligns."""
SMALL_CHUNK = 1 << 20
LARGE_CHUNK = 64 << 20
"""Bytes: pieces are not cut below the one, rows are cut further above the other."""
TILE_VALUES = 1 << 22
"""Values decoded at a time, so that one worker needs some 50 MB."""


def leaf_specs(cfg: ModelConfig) -> dict[tuple[str, ...], ParamSpec]:
    """Key path -> spec of every parameter, in tree order; list positions as decimal strings."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(param_specs(cfg), is_leaf=is_spec)
    return {key_path(path): spec for path, spec in leaves}


def key_path(path: Iterable[Any]) -> tuple[str, ...]:
    """A jax key path as strings."""
    return tuple(str(getattr(key, "key", getattr(key, "idx", None))) for key in path)


def some(names: Iterable[str], limit: int = 8) -> str:
    """The first few of many names, and how many more there are."""
    names = list(names)
    more = f" ... and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def leaf_name(path: Sequence[str]) -> str:
    """Folder of a leaf."""
    return ".".join(path)


def chunk_shape(spec: ParamSpec, itemsize: int) -> tuple[int, ...]:
    """Shape of the chunks in which a parameter is stored."""
    chunk = list(spec.shape)
    rows = 0
    if spec.stacked:
        chunk[0], rows = 1, 1

    def nbytes() -> int:
        return math.prod(chunk) * itemsize

    for i, axis in enumerate(spec.axes):
        if i >= rows and axis is not None:
            pieces = PIECES
            while pieces > 1 and nbytes() < pieces * SMALL_CHUNK:
                pieces //= 2
            chunk[i] = -(-chunk[i] // pieces)
    while nbytes() > LARGE_CHUNK and chunk[rows] > 1:
        chunk[rows] = -(-chunk[rows] // 2)
    return tuple(chunk)


def _chunk_files(
    shape: Sequence[int], chunk: Sequence[int], lead: int | None = None
) -> Iterable[str]:
    """Names of an array's chunk files; of one index of its leading axis if ``lead`` is given."""
    ranges = [range(-(-n // c)) for n, c in zip(shape, chunk, strict=True)]
    if lead is not None:
        ranges[0] = range(lead, lead + 1)
    return (".".join(map(str, index)) for index in itertools.product(*ranges))


def zarr_type(dtype: np.dtype) -> str:
    """Name of a type in ``.zarray``."""
    return "bfloat16" if dtype == ml_dtypes.bfloat16 else np.dtype(dtype).str


def _array_metadata(spec: ParamSpec, dtype: np.dtype) -> str:
    """Content of the ``.zarray`` file of a parameter stored as ``dtype``."""
    fields = {
        "chunks": chunk_shape(spec, dtype.itemsize),
        "compressor": None,
        "dimension_separator": ".",
        "dtype": zarr_type(dtype),
        "fill_value": None,
        "filters": None,
        "order": "C",
        "shape": spec.shape,
        "zarr_format": 2,
    }
    return json.dumps(fields)


def _tree_metadata(cfg: ModelConfig) -> str:
    """Content of ``_METADATA``: the tree's leaves and, as Orbax wants them, its empty lists."""
    dict_key, list_key = 2, 1
    entries: dict[str, Any] = {}
    for path in leaf_specs(cfg):
        keys = [{"key": k, "key_type": list_key if k.isdigit() else dict_key} for k in path]
        value = {"value_type": "np.ndarray", "skip_deserialize": False}
        entries[str(path)] = {"key_metadata": keys, "value_metadata": value}
    if not cfg.num_nextn_predict_layers:
        entries[str(("mtp",))] = {
            "key_metadata": [{"key": "mtp", "key_type": dict_key}],
            "value_metadata": {"value_type": "List", "skip_deserialize": True},
        }
    return json.dumps(
        {
            "tree_metadata": entries,
            "use_ocdbt": False,
            "use_zarr3": False,
            "store_array_data_equal_to_fill_value": True,
            "custom_metadata": None,
        }
    )


def _checkpoint_metadata() -> str:
    """Content of ``_CHECKPOINT_METADATA``; no times, so equal parameters make equal files."""
    handler = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"
    return json.dumps(
        {
            "item_handlers": handler,
            "metrics": {},
            "performance_metrics": {},
            "init_timestamp_nsecs": None,
            "commit_timestamp_nsecs": None,
            "custom_metadata": {},
        }
    )


def write_metadata(
    folder: Path, cfg: ModelConfig, dtype: np.dtype, files: Mapping[str, bytes]
) -> None:
    """Make a folder of chunk files a checkpoint: add ``files``, then what Orbax looks for.

    ``_METADATA`` comes last: without it nothing takes the folder for a checkpoint.
    """
    texts = {
        f"{leaf_name(path)}/.zarray": _array_metadata(spec, np.dtype(spec.dtype(dtype)))
        for path, spec in leaf_specs(cfg).items()
    }
    texts["_CHECKPOINT_METADATA"] = _checkpoint_metadata()
    texts[METADATA_NAME] = _tree_metadata(cfg)
    encoded = {name: text.encode() for name, text in texts.items()}
    for name, content in {**files, **encoded}.items():
        with (folder / name).open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())


def stored_bytes(spec: ParamSpec, dtype: np.dtype) -> int:
    """Bytes of all chunk files of a parameter, padding included."""
    chunk = chunk_shape(spec, dtype.itemsize)
    padded = (-(-n // c) * c for n, c in zip(spec.shape, chunk, strict=True))
    return math.prod(padded) * dtype.itemsize


def write_values(
    folder: Path,
    spec: ParamSpec,
    dtype: np.dtype,
    expert: int | None,
    rows: Callable[[int, int], np.ndarray],
) -> int:
    """Write the chunk files of a parameter, or of one expert of it, and bring them to the disk.

    Args:
        folder: the parameter's folder; it exists.
        rows: gives rows ``[start, stop)`` as ``dtype``; called for small tiles, in order.

    Returns:
        The bytes written.
    """
    lead = 0 if expert is None else 1
    shape, chunk = spec.shape[lead:], chunk_shape(spec, dtype.itemsize)[lead:]
    width = math.prod(shape[1:])
    piece = math.prod(chunk[1:])
    tile = max(1, TILE_VALUES // max(1, width))
    prefix = "" if expert is None else f"{expert}."
    written = 0
    for number, first in enumerate(range(0, shape[0], chunk[0])):
        last = min(first + chunk[0], shape[0])
        suffixes = [f".{i}" for i in range(-(-width // piece))] if len(shape) == 2 else [""]
        with ExitStack() as stack:
            files = [
                stack.enter_context((folder / f"{prefix}{number}{suffix}").open("wb"))
                for suffix in suffixes
            ]
            for start in range(first, last, tile):
                stop = min(start + tile, last)
                values = rows(start, stop).reshape(stop - start, width)
                for i, file in enumerate(files):
                    part = values[:, i * piece : (i + 1) * piece]
                    if part.shape[1] < piece:
                        part = np.pad(part, ((0, 0), (0, piece - part.shape[1])))
                    written += file.write(np.ascontiguousarray(part).view(np.uint8).data)
            missing_rows = chunk[0] - (last - first)
            for file in files:
                written += file.write(bytes(missing_rows * piece * dtype.itemsize))
                file.flush()
                os.fsync(file.fileno())
    return written


def missing_files(
    folder: Path, spec: ParamSpec, dtype: np.dtype, expert: int | None = None
) -> list[str]:
    """Chunk files of a parameter (or of one expert) that are absent or have a wrong size."""
    chunk = chunk_shape(spec, dtype.itemsize)
    size = math.prod(chunk) * dtype.itemsize
    return _of_other_size(folder, _chunk_files(spec.shape, chunk, expert), size)


def wrong_files(folder: Path, array: Mapping[str, Any]) -> list[str]:
    """Chunk files that are absent or have a wrong size, for what ``.zarray`` says."""
    itemsize = 2 if array["dtype"] == "bfloat16" else np.dtype(array["dtype"]).itemsize
    size = math.prod(array["chunks"]) * itemsize
    return _of_other_size(folder, _chunk_files(array["shape"], array["chunks"]), size)


def _of_other_size(folder: Path, names: Iterable[str], size: int) -> list[str]:
    bad = []
    for name in names:
        try:
            if os.stat(folder / name).st_size != size:
                bad.append(name)
        except FileNotFoundError:
            bad.append(name)
    return bad


def read_array_metadata(path: Path) -> Mapping[str, Any]:
    """The fields of a ``.zarray`` file.

    Raises:
        ValueError: the file is absent or corrupt, or describes another layout than this one.
    """
    try:
        fields = json.loads(path.read_text())
        plain = (
            fields["zarr_format"] == 2
            and fields["compressor"] is None
            and not fields["filters"]
            and fields["order"] == "C"
            and len(fields["chunks"]) == len(fields["shape"])
            and all(type(n) is int and n > 0 for n in (*fields["shape"], *fields["chunks"]))
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is absent or corrupt ({error!r}); convert again") from error
    if not plain:
        raise ValueError(f"{path} is not of the layout that convert.py writes; convert again")
    return fields
