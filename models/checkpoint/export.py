"""Parameters as a plain release folder: BF16 and F32 tensors under the release's names."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import jax
import ml_dtypes
import numpy as np

from models.checkpoint.layout import key_path
from models.checkpoint.partial import check_destination
from models.checkpoint.release import SINGLE_NAME, expected_tensors
from models.checkpoint.safetensors_file import NUMPY_TYPES, write_file
from models.config import ModelConfig
from models.params import BF16, F32, I64, Params


def export_release(params: Params, cfg: ModelConfig, out: str | Path) -> int:
    """Write ``model.safetensors`` and ``config.json`` into the folder ``out``.

    Weights are rounded to bfloat16, except those that a release keeps in float32; ids of experts
    are int64. ``load_release`` and ``scripts/convert.py`` read the result.

    Returns:
        The bytes of all tensors.

    Raises:
        ValueError: ``out`` is not empty.
    """
    out = Path(os.path.abspath(out))
    check_destination(out)
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    flat = {key_path(path): np.asarray(leaf) for path, leaf in leaves}
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    values: dict[str, np.ndarray] = {}
    for name, path, spec, expert in expected_tensors(cfg):
        kind = spec.storage if spec.storage in (F32, I64) else BF16
        value = flat[path] if expert is None else flat[path][expert]
        tensors[name] = (kind, value.shape)
        values[name] = value

    def rows(name: str) -> Iterator[np.ndarray]:
        kind = NUMPY_TYPES[tensors[name][0]]
        yield values[name].astype(np.float32 if kind == ml_dtypes.bfloat16 else kind).astype(kind)

    out.mkdir(parents=True, exist_ok=True)
    written = write_file(out / SINGLE_NAME, tensors, rows)
    config = {**cfg.to_dict(), "torch_dtype": "bfloat16"}
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    return written
