"""Floats as integers in the same order: comparisons that no rounding mode or NaN can upset."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

LOWEST = float(jnp.finfo(jnp.float32).min)
"""What a NaN or minus-infinite score of a *visible* slot counts as: last, but still a slot."""

NEVER = int(jnp.iinfo(jnp.int32).min)
"""The key of minus infinity and NaN: below every other."""

HIGHEST = int(jnp.iinfo(jnp.int32).max)
"""No key is above it."""


def ordered_keys(x: Float[Array, " ..."]) -> Int32[Array, " ..."]:
    """``x < y <=> key(x) < key(y)``, ``-0.0 = 0.0``, denormals in order; -inf and NaN -> NEVER.

    A float32's bits are its magnitude below a sign bit, so flipping the magnitude of negative
    numbers orders them all as two's complement integers.
    """
    x = x.astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    magnitude = bits & 0x7FFFFFFF
    keys = jnp.where(bits < 0, -magnitude, magnitude)
    infinity = 0x7F800000
    selectable = (magnitude <= infinity) & (keys != -infinity)
    return jnp.where(selectable, keys, NEVER)


def ordered_floats(x: Float[Array, " ..."]) -> Float[Array, " ..."]:
    """Floats in the order of ``ordered_keys``, by their bits: for a float top-K.

    ``-0.0`` becomes 0.0 and NaN minus infinity, in integers: float arithmetic may flush denormals.
    """
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
    magnitude = bits & 0x7FFFFFFF
    bits = jnp.where(magnitude == 0, 0, bits)
    lowest = jax.lax.bitcast_convert_type(jnp.float32(-jnp.inf), jnp.int32)
    bits = jnp.where(magnitude > 0x7F800000, lowest, bits)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
