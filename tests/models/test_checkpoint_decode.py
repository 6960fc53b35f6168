"""Decoding against element-by-element loops over the formats' definitions."""

import ml_dtypes
import numpy as np
import pytest
from checkpoint_cases import e2m1, e4m3

from models.checkpoint.decode import cast, e8m0_values, expert_ids, fp4_rows, fp8_rows

NAN_CODES = (0x7F, 0xFF)


def _fp8(rows, columns, seed=0):
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (rows, columns)).astype(np.uint8)
    codes[np.isin(codes, NAN_CODES)] = 0x7E
    scales = rng.integers(100, 150, (-(-rows // 128), -(-columns // 128))).astype(np.uint8)
    return codes, scales


@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (129, 1), (3, 257), (130, 130), (256, 40)])
def test_fp8_blocks_start_at_the_corner_and_the_last_is_partial(shape):
    codes, scales = _fp8(*shape)
    expected = [
        [
            e4m3(codes[i, j]) * 2.0 ** (int(scales[i // 128, j // 128]) - 127)
            for j in range(shape[1])
        ]
        for i in range(shape[0])
    ]
    values = fp8_rows(codes, scales, 0)
    assert values.dtype == np.float32
    np.testing.assert_array_equal(values.astype(np.float64), expected)


@pytest.mark.parametrize("step", [1, 50, 128, 200])
def test_fp8_tiles_equal_the_whole(step):
    codes, scales = _fp8(300, 140)
    whole = fp8_rows(codes, scales, 0)
    for start in range(0, 300, step):
        stop = min(start + step, 300)
        tile = fp8_rows(codes[start:stop], scales[start // 128 : -(-stop // 128)], start)
        np.testing.assert_array_equal(tile, whole[start:stop])


@pytest.mark.parametrize("columns", [1, 2, 31, 32, 33, 64, 80, 95])
def test_fp4_low_nibble_first_and_partial_groups(columns):
    rng = np.random.default_rng(columns)
    packed = rng.integers(0, 256, (5, -(-columns // 2))).astype(np.uint8)
    scales = rng.integers(100, 150, (5, -(-columns // 32))).astype(np.uint8)
    expected = [
        [
            e2m1(packed[i, j // 2] >> 4 if j % 2 else packed[i, j // 2] & 15)
            * 2.0 ** (int(scales[i, j // 32]) - 127)
            for j in range(columns)
        ]
        for i in range(5)
    ]
    values = fp4_rows(packed, scales, columns)
    assert values.dtype == np.float32
    np.testing.assert_array_equal(values.astype(np.float64), expected)


def test_every_code_once():
    all_fp8 = np.array([c for c in range(256) if c not in NAN_CODES], np.uint8)[None]
    one = np.full((1, 2), 127, np.uint8)
    np.testing.assert_array_equal(fp8_rows(all_fp8, one, 0)[0], [e4m3(int(c)) for c in all_fp8[0]])
    every = np.arange(256, dtype=np.uint8)[None]
    values = fp4_rows(every, np.full((1, 16), 127, np.uint8), 512)
    np.testing.assert_array_equal(values[0, 0::2], [e2m1(c & 15) for c in range(256)])
    np.testing.assert_array_equal(values[0, 1::2], [e2m1(c >> 4) for c in range(256)])
    np.testing.assert_array_equal(
        e8m0_values(np.arange(255, dtype=np.uint8)), [2.0 ** (c - 127) for c in range(255)]
    )


def test_bfloat16_holds_decoded_values_exactly():
    codes, scales = _fp8(128, 128)
    values = fp8_rows(codes, scales, 0)
    rounded = cast(values, np.dtype(ml_dtypes.bfloat16))
    np.testing.assert_array_equal(rounded.astype(np.float32), values)


def test_codes_that_are_no_numbers():
    codes, scales = _fp8(200, 10)
    codes[150, 3] = 0xFF
    with pytest.raises(ValueError, match=r"weight \[150, 3\] is NaN"):
        fp8_rows(codes[130:], scales[1:], 130)
    with pytest.raises(ValueError, match=r"scale \(1, 0\) is NaN \(byte 255\)"):
        fp4_rows(np.zeros((2, 16), np.uint8), np.array([[1], [255]], np.uint8), 32)
    with pytest.raises(ValueError, match="beyond float32"):
        fp8_rows(np.full((1, 1), 0x7E, np.uint8), np.full((1, 1), 254, np.uint8), 0)


def test_expert_ids_are_checked():
    ids = expert_ids(np.array([[0, 3], [2, 1]]), 4)
    assert ids.dtype == np.int32 and ids.tolist() == [[0, 3], [2, 1]]
    for bad in (4, -1, 2**40):
        with pytest.raises(ValueError, match=rf"1 expert ids.*0\.\.3.*{bad} at row 1, column 0"):
            expert_ids(np.array([[0, 3], [bad, 1]]), 4)
