"""Random checkpoints in exactly a release's names, shapes, types and files.

For demonstrations, tests and benchmarks. Values are scaled so that activations stay of order one:
weights have a standard deviation of about ``columns^-1/2``.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import ml_dtypes
import numpy as np

from models.checkpoint import decode
from models.checkpoint.partial import check_destination
from models.checkpoint.release import (
    INDEX_NAME,
    SINGLE_NAME,
    expected_tensors,
    scale_name,
    stored_shapes,
)
from models.checkpoint.safetensors_file import NUMPY_TYPES, write_file
from models.config import ModelConfig
from models.params import BF16, FP4, FP8, I64, ParamSpec

SHARD_BYTES = 2 << 30
_TILE_VALUES = 1 << 22

# The 256 e4m3 codes are drawn so that their values are normal with deviation 32: large enough to
# be away from the subnormal codes, small enough to be away from the largest, 448.
_FP8_DEVIATION = 32.0
_FP4_DEVIATION = float(np.sqrt(np.mean(np.square([0, 0.5, 1, 1.5, 2, 3, 4, 6]))))


def write_random_release(
    cfg: ModelConfig,
    out: str | Path,
    *,
    seed: int = 0,
    quantised: bool = True,
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Write a random checkpoint with its ``config.json`` into the folder ``out``.

    A tensor's values depend on ``seed`` and its name alone, so two configs that share a tensor's
    shape share its values.

    Args:
        quantised: the release's FP8 and packed FP4 with E8M0 scales; otherwise those are BF16.
        shard_bytes: beyond this many bytes the tensors are split over files, with an index.
        progress: called with (bytes done, bytes in all).

    Returns:
        The bytes of all tensors.

    Raises:
        ValueError: ``out`` is not empty, or the disk has too little room.
    """
    out = Path(os.path.abspath(out))
    check_destination(out)
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes must be positive, not {shard_bytes}")
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    rows: dict[str, Callable[[], Iterator[np.ndarray]]] = {}
    for name, _, spec, _ in expected_tensors(cfg):
        _plan(name, spec, cfg, seed, quantised, tensors, rows)
    sizes = {n: math.prod(s) * NUMPY_TYPES[kind].itemsize for n, (kind, s) in tensors.items()}
    total = sum(sizes.values())
    out.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(out).free
    if total > free:
        raise ValueError(
            f"the checkpoint has {total} bytes, {out} has {free} free: make room, or use fewer "
            "layers or experts"
        )
    done = 0

    def stream(name: str) -> Iterator[np.ndarray]:
        nonlocal done
        for tile in rows[name]():
            yield tile
            done += tile.nbytes
            if progress:
                progress(done, total)

    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    where: dict[str, str] = {}
    for i, names in enumerate(shards):
        file = SINGLE_NAME
        if len(shards) > 1:
            file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        write_file(out / file, {name: tensors[name] for name in names}, stream)
        where.update(dict.fromkeys(names, file))
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (out / INDEX_NAME).write_text(json.dumps(index, indent=1))
    (out / "config.json").write_text(json.dumps(_config(cfg, quantised), indent=1) + "\n")
    return total


def _config(cfg: ModelConfig, quantised: bool) -> dict:
    data = {**cfg.to_dict(), "torch_dtype": "bfloat16"}
    if quantised:
        data["expert_dtype"] = "fp4"
        data["quantization_config"] = {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "scale_fmt": "ue8m0",
            "weight_block_size": [decode.FP8_BLOCK, decode.FP8_BLOCK],
        }
    return data


def _plan(
    name: str,
    spec: ParamSpec,
    cfg: ModelConfig,
    seed: int,
    quantised: bool,
    tensors: dict[str, tuple[str, tuple[int, ...]]],
    rows: dict[str, Callable[[], Iterator[np.ndarray]]],
) -> None:
    """Add a tensor, and its scale if it has one, to ``tensors`` and ``rows``."""
    shape = spec.shape[1:] if spec.stacked else spec.shape
    kind = {FP8: "F8_E4M3", FP4: "I8"}.get(spec.storage, spec.storage)
    if kind in ("F8_E4M3", "I8") and not quantised:
        kind = BF16
    stored, scale = stored_shapes(shape, kind)

    def rng(what: str) -> np.random.Generator:
        digest = hashlib.sha256(f"{seed} {what}".encode()).digest()
        return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))

    def tiles(what: str, shape: tuple[int, ...], draw: Callable) -> Iterator[np.ndarray]:
        generator = rng(what)
        step = max(1, _TILE_VALUES // math.prod(shape[1:]))
        for start in range(0, shape[0], step):
            yield draw(generator, (min(step, shape[0] - start), *shape[1:]))

    if scale is not None:
        tensors[name] = (kind, stored)
        codes = _fp8_codes if kind == "F8_E4M3" else _fp4_codes
        rows[name] = lambda: tiles(name, stored, codes)
        deviation = _FP8_DEVIATION if kind == "F8_E4M3" else _FP4_DEVIATION
        exponent = 127 + round(math.log2(shape[1] ** -0.5 / deviation))
        scaled = scale_name(name)
        tensors[scaled] = ("F8_E8M0", scale)
        rows[scaled] = lambda: tiles(
            scaled,
            scale,
            # Neighbouring blocks differ, or a mix-up of blocks would go unseen.
            lambda g, s: (exponent + g.integers(-1, 2, s)).astype(np.uint8),
        )
        return
    tensors[name] = (kind, stored)
    if spec.storage == I64:
        rows[name] = lambda: tiles(name, stored, _expert_rows(cfg.n_routed_experts))
        return
    mean, deviation = {"ones": (1.0, 0.1), "small": (0.0, 0.02), "zeros": (0.0, 0.0)}.get(
        spec.init, (0.0, shape[-1] ** -0.5)
    )
    rows[name] = lambda: tiles(
        name,
        stored,
        lambda g, s: (mean + deviation * g.standard_normal(s, np.float32)).astype(
            NUMPY_TYPES[kind]
        ),
    )


def _fp4_codes(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.frombuffer(generator.bytes(math.prod(shape)), np.int8).reshape(shape)


def _normal_fp8_codes() -> np.ndarray:
    """The e4m3 codes of 4096 equally likely quantiles of a normal distribution."""
    sample = np.random.Generator(np.random.PCG64(0)).standard_normal(1 << 16)
    quantiles = np.sort(sample)[8::16] * _FP8_DEVIATION
    return quantiles.astype(np.float32).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


_NORMAL_FP8 = _normal_fp8_codes()


def _fp8_codes(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    draws = np.frombuffer(generator.bytes(2 * math.prod(shape)), np.uint16)
    return _NORMAL_FP8[draws & (len(_NORMAL_FP8) - 1)].reshape(shape)


def _expert_rows(experts: int) -> Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]:
    def draw(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        order = np.argsort(generator.random((shape[0], experts), np.float32), axis=1)
        return order[:, : shape[1]].astype(np.int64)

    return draw
