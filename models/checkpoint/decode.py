"""Stored numbers to numbers: FP8 and packed FP4 with E8M0 scales, plain floats, expert ids.

Everything works on a tile of rows, so that the memory needed does not depend on the tensor.
Multiplying by a power of two is exact, so decoded values are exact in float32, and in bfloat16
too down to its smallest normal number. Source: the spec's "Checkpoint" heading.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
from jaxtyping import Float, Float32, Int32, Integer, UInt8

FP8_BLOCK = 128
FP4_GROUP = 32

_FP8_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)

_FP4_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_FP4_VALUES = np.concatenate([_FP4_VALUES, -_FP4_VALUES])
# One look-up a byte gives both values: the pair (low nibble, high nibble) as one 64-bit item.
_FP4_PAIRS = np.stack(
    [_FP4_VALUES[np.arange(256) & 15], _FP4_VALUES[np.arange(256) >> 4]], axis=1
).view(np.uint64)[:, 0]


def e8m0_values(codes: UInt8[np.ndarray, "*S"]) -> Float32[np.ndarray, "*S"]:
    """``2^(code - 127)``, exactly.

    Raises:
        ValueError: a code is 255, which stands for NaN.
    """
    if (codes == 255).any():
        position = tuple(int(i) for i in np.argwhere(codes == 255)[0])
        raise ValueError(f"scale {position} is NaN (byte 255)")
    return np.ldexp(np.float32(1), codes.astype(np.int32) - 127)


def fp8_rows(
    codes: UInt8[np.ndarray, "R C"], scales: UInt8[np.ndarray, "M N"], first_row: int
) -> Float32[np.ndarray, "R C"]:
    """``e4m3(code) * 2^(scale - 127)``, one scale for each 128 x 128 block.

    ``codes`` are rows ``first_row, first_row + 1, ...`` of a matrix; ``scales`` are the block rows
    from ``first_row // 128`` on that these rows touch. Blocks start at the matrix' corner, the
    last of a row or column may be partial.

    Raises:
        ValueError: a code or a scale stands for NaN, or a product overflows float32.
    """
    nan = (codes & 0x7F) == 0x7F
    if nan.any():
        row, column = np.argwhere(nan)[0]
        raise ValueError(f"weight [{first_row + row}, {column}] is NaN")
    values = _FP8_VALUES[codes]
    factors = e8m0_values(scales)
    block_of_row = np.arange(first_row, first_row + len(codes)) // FP8_BLOCK
    factors = factors[block_of_row - first_row // FP8_BLOCK]
    _scale(values, np.repeat(factors, FP8_BLOCK, axis=1)[:, : codes.shape[1]])
    return values


def fp4_rows(
    packed: UInt8[np.ndarray, "R P"], scales: UInt8[np.ndarray, "R G"], columns: int
) -> Float32[np.ndarray, "R C"]:
    """``e2m1(nibble) * 2^(scale - 127)``, one scale for each 32 columns of a row.

    The low nibble of byte ``p`` is column ``2p``, the high one ``2p + 1``; the last group of a row
    may be partial, and with an odd ``columns`` the last high nibble is padding.

    Raises:
        ValueError: a scale stands for NaN, or a product overflows float32.
    """
    rows, groups = scales.shape
    values = np.take(_FP4_PAIRS, packed).view(np.float32)
    factors = e8m0_values(scales)
    if columns == groups * FP4_GROUP:
        _scale(values.reshape(rows, groups, FP4_GROUP), factors[:, :, None])
        return values
    values = values[:, :columns]
    _scale(values, np.repeat(factors, FP4_GROUP, axis=1)[:, :columns])
    return values


def _scale(values: np.ndarray, factors: np.ndarray) -> None:
    try:
        with np.errstate(over="raise"):
            values *= factors
    except FloatingPointError as error:
        raise ValueError("a scale takes its weights beyond float32's range") from error


def expert_ids(ids: Integer[np.ndarray, "R K"], experts: int) -> Int32[np.ndarray, "R K"]:
    """The ids as int32.

    Raises:
        ValueError: an id is not in ``[0, experts)``.
    """
    bad = (ids < 0) | (ids >= experts)
    if bad.any():
        row, column = np.argwhere(bad)[0]
        raise ValueError(
            f"{int(bad.sum())} expert ids are outside 0..{experts - 1}, the first is "
            f"{int(ids[row, column])} at row {row}, column {column}"
        )
    return ids.astype(np.int32)


def cast(values: Float[np.ndarray, "*S"], dtype: np.dtype) -> Float[np.ndarray, "*S"]:
    """The values rounded to ``dtype``, to nearest even; the same array if it has that type."""
    return values if values.dtype == dtype else values.astype(dtype)
