"""Simulated FP8 and FP4 against a search through the grids, in float64, ties included."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from models.quant_sim import simulate_fp4, simulate_fp8


def e4m3_grid() -> np.ndarray:
    """The non-negative finite values in the order of their codes (0x7f is NaN)."""
    values = []
    for code in range(0x7F):
        exponent, fraction = code >> 3, code & 7
        scale = 2.0 ** (max(exponent, 1) - 7)
        values.append(scale * (fraction / 8 + (exponent > 0)))
    return np.array(values)


GRIDS = {
    "fp8": (e4m3_grid(), 64, 1e-4, ml_dtypes.float8_e4m3fn),
    "fp4": (np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6]), 32, 0.0, ml_dtypes.float4_e2m1fn),
}


def scale_of(amax: float, largest: float) -> float:
    """The least power of two that is not below ``amax / largest`` (a float32 quotient)."""
    ratio = float(np.float32(amax) / np.float32(largest))
    exponent = -149
    while 2.0**exponent < ratio:
        exponent += 1
    return 2.0**exponent


def brute_force(x: np.ndarray, kind: str) -> np.ndarray:
    """Round a vector block by block to the nearest grid value, ties to the even code."""
    grid, size, floor, small = GRIDS[kind]
    done = []
    for begin in range(0, len(x), size):
        block = x[begin : begin + size].astype(np.float64)
        amax = max(np.abs(block).max(), floor)
        scale = scale_of(amax, grid[-1]) if amax else 1.0
        for value in block / scale:
            distance = np.abs(grid - abs(value))
            nearest = np.flatnonzero(distance == distance.min())
            code = nearest[0] if len(nearest) == 1 else nearest[nearest % 2 == 0][0]
            assert grid[code] == abs(float(np.array(value, np.float32).astype(small)))
            done.append(np.copysign(grid[code], value) * scale)
    return np.array(done)


def blocks(kind: str) -> np.ndarray:
    """Blocks whose largest value fixes the scale and whose others are hard to round."""
    grid, size, _, _ = GRIDS[kind]
    random = np.random.default_rng(3)
    middle = (grid[1:] + grid[:-1]) / 2
    found = []
    for power in (-12, -3, 0, 1, 7):
        pool = np.concatenate([middle, grid, np.nextafter(np.float32(middle), np.float32(0))])
        picked = random.choice(pool, (12, size)) * random.choice([-1, 1], (12, size))
        picked[:, 0] = grid[-1]
        found.append(picked * 2.0**power)
    # Largest values at and next to a power of two, and at the edge of the next scale.
    for amax in (1.0, 2.0**-9, grid[-1], 2 * grid[-1]):
        for nudged in (
            amax,
            np.nextafter(np.float32(amax), 9e9),
            np.nextafter(np.float32(amax), 0),
        ):
            near = random.uniform(-1, 1, (1, size)) * amax
            near[:, 3] = nudged
            found.append(near)
    found += [
        np.zeros((1, size)),
        random.normal(size=(20, size)),
        random.normal(size=(5, size)) / 1e5,
    ]
    return np.concatenate(found).astype(np.float32)


@pytest.mark.parametrize("kind", ["fp8", "fp4"])
def test_hard_values(kind):
    x = blocks(kind)
    found = simulate_fp8(jnp.asarray(x), 0) if kind == "fp8" else simulate_fp4(jnp.asarray(x))
    np.testing.assert_array_equal(found, np.stack([brute_force(row, kind) for row in x]))


@pytest.mark.parametrize("width,rotary", [(128, 64), (100, 16), (40, 32), (32, 32), (200, 8)])
def test_fp8_leaves_the_rotary_channels(width, rotary):
    """The blocks start at channel 0 and the last one may be partial."""
    x = np.random.default_rng(4).normal(size=(2, 3, width)).astype(np.float32)
    found = np.asarray(simulate_fp8(jnp.asarray(x), rotary))
    plain = width - rotary
    np.testing.assert_array_equal(found[..., plain:], x[..., plain:])
    for row, want in zip(found.reshape(-1, width), x.reshape(-1, width), strict=True):
        np.testing.assert_array_equal(row[:plain], brute_force(want[:plain], "fp8"))


@pytest.mark.parametrize("width", [16, 32, 64, 80])
def test_fp4_widths(width):
    x = np.random.default_rng(5).normal(size=(4, width)).astype(np.float32)
    want = np.stack([brute_force(row, "fp4") for row in x])
    np.testing.assert_array_equal(simulate_fp4(jnp.asarray(x)), want)


def test_simulated_values_survive_bfloat16():
    """Both grids times powers of two are exact in bfloat16, and rounding twice changes nothing."""
    x = jnp.asarray(np.random.default_rng(6).normal(size=(8, 64)), jnp.bfloat16)
    for simulate in (lambda v: simulate_fp8(v, 0), simulate_fp4):
        once = simulate(x)
        assert once.dtype == jnp.bfloat16
        np.testing.assert_array_equal(once, simulate(x.astype(jnp.float32)).astype(jnp.bfloat16))
        np.testing.assert_array_equal(once.astype(jnp.float32), simulate(x.astype(jnp.float32)))
        np.testing.assert_array_equal(simulate(once), once)
