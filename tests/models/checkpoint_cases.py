"""Small releases for the checkpoint tests, with a reader, a writer and a decoder of their own."""

import json
import struct
from pathlib import Path

import ml_dtypes
import numpy as np

from models.checkpoint.layout import leaf_specs
from models.checkpoint.random_release import write_random_release
from models.config import ModelConfig
from models.presets import shrink, tiny_config

TYPES = {
    "BF16": ml_dtypes.bfloat16,
    "F16": np.float16,
    "F32": np.float32,
    "F64": np.float64,
    "I32": np.int32,
    "I64": np.int64,
    "I8": np.int8,
    "U8": np.uint8,
    "F8_E4M3": np.uint8,
    "F8_E8M0": np.uint8,
}
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def small_config() -> ModelConfig:
    """One layer of each attention kind and the MTP block; 160 columns, so partial blocks."""
    return shrink(tiny_config(), layers=3, experts=3)


def small_release(folder: Path, seed: int = 0, **options) -> ModelConfig:
    cfg = small_config()
    write_random_release(cfg, folder, seed=seed, **options)
    return cfg


def read_raw(file: Path) -> dict[str, tuple[str, np.ndarray]]:
    """Name -> (type, values); 8-bit floats as their bytes."""
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    body = data[8 + length :]
    return {
        name: (
            e["dtype"],
            np.frombuffer(body[slice(*e["data_offsets"])], TYPES[e["dtype"]]).reshape(e["shape"]),
        )
        for name, e in header.items()
    }


def write_raw(file: Path, tensors: dict[str, tuple[str, np.ndarray]]) -> None:
    header, body = {}, b""
    for name, (kind, values) in tensors.items():
        content = values.tobytes()
        offsets = [len(body), len(body) + len(content)]
        header[name] = {"dtype": kind, "shape": list(values.shape), "data_offsets": offsets}
        body += content
    write_header(file, header, body)


def write_header(file: Path, header: dict, body: bytes) -> None:
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + body)


def e4m3(code: int) -> float:
    """The number that an e4m3fn byte stands for, from the definition of the format."""
    code = int(code)
    sign = -1.0 if code & 0x80 else 1.0
    exponent, fraction = (code >> 3) & 15, code & 7
    if exponent == 0:
        return sign * fraction / 8 * 2.0**-6
    return sign * (1 + fraction / 8) * 2.0 ** (exponent - 7)


def e2m1(nibble: int) -> float:
    return -E2M1[nibble & 7] if nibble & 8 else E2M1[nibble]


def decode_raw(
    raw: dict[str, tuple[str, np.ndarray]], name: str, columns: int | None = None
) -> np.ndarray:
    """Values of a weight in float64, by the formats' definitions, one block at a time.

    ``columns`` less than twice the packed ones: the last high nibble of FP4 is padding.
    """
    kind, stored = raw[name]
    if kind not in ("F8_E4M3", "I8"):
        return stored if kind.startswith("I") else stored.astype(np.float64)
    scale = raw[name.removesuffix(".weight") + ".scale"][1]
    if kind == "I8":
        values = np.empty((stored.shape[0], 2 * stored.shape[1]))
        table = np.array([e2m1(n) for n in range(16)])
        values[:, 0::2] = table[stored.view(np.uint8) & 15]
        values[:, 1::2] = table[stored.view(np.uint8) >> 4]
        values = values[:, : None if columns is None else columns]
        height, width = 1, 32
    else:
        values = np.array([e4m3(c) for c in range(256)])[stored]
        height = width = 128
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            block = values[i * height : (i + 1) * height, j * width : (j + 1) * width]
            block *= 2.0 ** (int(scale[i, j]) - 127)
    return values


def decoded_leaves(cfg: ModelConfig, raw: dict, dtype) -> dict[tuple[str, ...], np.ndarray]:
    """What every parameter must be after a conversion to ``dtype``."""
    leaves = {}
    for path, spec in leaf_specs(cfg).items():
        names = [spec.release.format(e) for e in range(spec.shape[0])]
        values = [
            decode_raw(raw, n, spec.shape[-1]) for n in (names if spec.stacked else [spec.release])
        ]
        leaf = np.stack(values) if spec.stacked else values[0]
        leaves[path] = leaf.astype(spec.dtype(dtype))
    return leaves


def folder_bytes(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
