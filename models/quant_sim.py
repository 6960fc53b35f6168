"""Simulated quantisation: the grids the release trains on, applied and undone in place.

Source: the spec's "Compressed slots": FP8 on the non-rotary channels of window and compressed kv,
FP4 on the index query and key after RoPE and Hadamard. Rounding is to nearest even.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from models.layers import F32

FP8_BLOCK, FP8_MAX, FP8_LEAST_AMAX = 64, 448.0, 1e-4
FP4_BLOCK, FP4_MAX = 32, 6.0


def _ceil_log2(x: Float[Array, ...]) -> Int32[Array, ...]:
    """The least e with 2^e >= x > 0, exactly: a float logarithm can miss at powers of two."""
    mantissa, exponent = jnp.frexp(x)
    return exponent - (mantissa == 0.5)


def _on_blocks(x: Float[Array, "... c"], block: int) -> tuple[Float[Array, "... n b"], int]:
    """The last axis in blocks, the last one padded with zeros; and the axis's length."""
    width = x.shape[-1]
    pad = [(0, 0)] * (x.ndim - 1) + [(0, -width % block)]
    return jnp.pad(x.astype(F32), pad).reshape(*x.shape[:-1], -1, block), width


def simulate_fp8(x: Float[Array, "... c"], rotary: int) -> Float[Array, "... c"]:
    """E4M3 with one power-of-two scale per 64 channels, on all but the last ``rotary`` ones.

    ``scale = 2^ceil(log2(max(amax, 1e-4) / 448))``.
    """
    plain = x[..., : x.shape[-1] - rotary]
    if plain.shape[-1] == 0:
        return x
    blocks, width = _on_blocks(plain, FP8_BLOCK)
    amax = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True)
    scale = jnp.ldexp(F32(1), _ceil_log2(jnp.maximum(amax, FP8_LEAST_AMAX) / FP8_MAX))
    rounded = (blocks / scale).astype(jnp.float8_e4m3fn).astype(F32) * scale
    rounded = rounded.reshape(*x.shape[:-1], -1)[..., :width].astype(x.dtype)
    return jnp.concatenate((rounded, x[..., x.shape[-1] - rotary :]), axis=-1)


def quantise_fp8(x: Float[Array, "... c"]) -> tuple[Float[Array, "... c"], Float[Array, ...]]:
    """E4M3 values and one float32 scale for all channels: ``scale = 2^ceil(log2(amax / 448))``.

    The scale is a power of two, so that values on a coarser grid stay as they are.
    """
    x = x.astype(F32)
    amax = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    exponent = jnp.where(amax > 0, _ceil_log2(jnp.where(amax > 0, amax, 1) / FP8_MAX), 0)
    # No smaller than the least normal number: its inverse must be finite.
    scale = jnp.ldexp(F32(1), jnp.maximum(exponent, -126))
    return (x / scale).astype(jnp.float8_e4m3fn), scale[..., 0]


def simulate_fp4(x: Float[Array, "... c"]) -> Float[Array, "... c"]:
    """E2M1 with one power-of-two scale per 32 channels: ``scale = 2^ceil(log2(amax / 6))``."""
    blocks, width = _on_blocks(x, FP4_BLOCK)
    amax = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True)
    exponent = jnp.where(amax > 0, _ceil_log2(jnp.where(amax > 0, amax, 1) / FP4_MAX), 0)
    scale = jnp.ldexp(F32(1), exponent)
    rounded = _round_e2m1(blocks / scale) * scale
    return rounded.reshape(*x.shape[:-1], -1)[..., :width].astype(x.dtype)


def _round_e2m1(x: Float[Array, ...]) -> Float[Array, ...]:
    """Nearest of 0, .5, 1, 1.5, 2, 3, 4, 6 with sign, ties to the even mantissa; |x| <= 6.

    The spacing is 1/2 below 2, 1 below 4 and 2 above, and ``round`` is to nearest even.
    """
    size = jnp.abs(x)
    step = jnp.where(size < 2, 0.5, jnp.where(size < 4, 1.0, 2.0))
    return jnp.sign(x) * jnp.round(size / step) * step
