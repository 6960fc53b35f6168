"""Norms, linear maps and rotary embeddings: the small parts every block shares.

Source: the spec's "Attention" heading for the rotary frequencies.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from models.config import ModelConfig
from pallas_kernels.compat import full_precision

F32 = jnp.float32
SMALL_VOCABULARY = 4096
"""Up to so many rows an embedding's gradient is a product: added row by row, the few rows of a
byte vocabulary queue up for a GPU's atomic additions (46 of 71 ms of a training step)."""


def linear(
    x: Float[Array, "... i"], weight: Float[Array, "o i"], dtype: Any = None
) -> Float[Array, "... o"]:
    """``x W^T`` accumulated in float32; the result has ``dtype``, by default that of ``x``."""
    dims = (((x.ndim - 1,), (1,)), ((), ()))
    precision = full_precision(x)
    out = jax.lax.dot_general(x, weight, dims, precision=precision, preferred_element_type=F32)
    return out.astype(x.dtype if dtype is None else dtype)


def einsum(formula: str, a: Array, b: Array) -> Array:
    """A product of two arrays accumulated, and returned, in float32."""
    return jnp.einsum(formula, a, b, precision=full_precision(b), preferred_element_type=F32)


@jax.custom_vjp
def embed(table: Float[Array, "V D"], tokens: Int32[Array, "..."]) -> Float[Array, "... D"]:
    """The tokens' rows of the table."""
    return table[tokens]


def _embed_forward(table: Array, tokens: Array) -> tuple[Array, tuple[Array, Array]]:
    return table[tokens], (table, tokens)


def _embed_backward(kept: tuple[Array, Array], gradient: Array) -> tuple[Array, None]:
    table, tokens = kept
    rows, tokens = gradient.reshape(-1, table.shape[1]), tokens.reshape(-1)
    if table.shape[0] <= SMALL_VOCABULARY:
        chosen = jax.nn.one_hot(tokens, table.shape[0], dtype=rows.dtype)
        return einsum("nv,nd->vd", chosen, rows).astype(table.dtype), None
    total = jnp.zeros(table.shape, F32).at[tokens].add(rows.astype(F32))
    return total.astype(table.dtype), None


embed.defvjp(_embed_forward, _embed_backward)


def mean_square_scale(x: Float[Array, "... c"], eps: float) -> Float[Array, "... 1"]:
    """``(mean(x^2) + eps)^-1/2`` over the last axis, in float32."""
    x = x.astype(F32)
    # A product instead of a mean of squares: one operation to compile where there were five.
    square = jnp.einsum("...c,...c->...", x, x)[..., None]
    return jax.lax.rsqrt(square * (1 / x.shape[-1]) + eps)


def rms_norm(
    x: Float[Array, "... c"], weight: Float[Array, "c"], eps: float
) -> Float[Array, "... c"]:
    """``x (mean(x^2) + eps)^-1/2 weight``, computed in float32 and returned in the type of x."""
    scale = jnp.expand_dims(weight.astype(F32), tuple(range(x.ndim - 1)))
    return (x.astype(F32) * mean_square_scale(x, eps) * scale).astype(x.dtype)


def rope_frequencies(cfg: ModelConfig, *, compressed: bool) -> np.ndarray:
    """Angles per position, ``f_k = base^(-2k/n)`` for k < n/2, float32 [n/2].

    Sliding layers use ``rope_theta`` as it is; everything in a compressed layer, its window keys
    included, uses ``compress_rope_theta`` with YaRN: frequencies that turn less than
    ``beta_slow`` times over the original context are divided by ``factor``, those that turn more
    than ``beta_fast`` times are kept, with a linear ramp between.
    """
    n = cfg.qk_rope_head_dim
    base = cfg.compress_rope_theta if compressed else cfg.rope_theta
    k = np.arange(n // 2, dtype=np.float64)
    freqs = base ** (-2 * k / n)
    if compressed and cfg.yarn is not None:
        yarn = cfg.yarn

        def dimension(turns: float) -> float:
            wavelength = yarn.original_max_position_embeddings / (2 * math.pi * turns)
            return n * math.log(wavelength) / (2 * math.log(base))

        low = max(math.floor(dimension(yarn.beta_fast)), 0)
        high = min(math.ceil(dimension(yarn.beta_slow)), n - 1)
        # Equal bounds leave a step instead of a ramp; the small width avoids 0 / 0.
        ramp = np.clip((k - low) / ((high - low) or 1e-3), 0, 1)
        freqs = freqs / yarn.factor * ramp + freqs * (1 - ramp)
    return freqs.astype(np.float32)


Rotation = tuple[Float[Array, "... c"], Float[Array, "... c"]]
"""Factors of a rotary embedding for whole heads: of the channel itself, and of its partner."""


def rope_rotation(positions: Int32[Array, ...], freqs: np.ndarray, width: int) -> Rotation:
    """Rotation of heads of ``width`` channels at the given positions, angle ``position * f_k``.

    Only the last n channels turn; the others get the factors 1 and 0, so that a rotation is two
    multiplications without any splitting and joining of heads.
    """
    angle = positions[..., None].astype(F32) * jnp.expand_dims(freqs, tuple(range(positions.ndim)))
    plain = [(0, 0)] * positions.ndim + [(width - 2 * freqs.shape[0], 0)]
    cos, sin = jnp.repeat(jnp.cos(angle), 2, axis=-1), jnp.repeat(jnp.sin(angle), 2, axis=-1)
    sign = jnp.expand_dims(
        np.tile(np.array([-1, 1], np.float32), freqs.shape[0]), tuple(range(angle.ndim - 1))
    )
    return jnp.pad(cos, plain, constant_values=1), jnp.pad(sin * sign, plain)


def apply_rope(
    x: Float[Array, "... c"], rotation: Rotation, *, inverse: bool = False
) -> Float[Array, "... c"]:
    """Turn the interleaved channel pairs of x, ``(a, b) -> (a cos - b sin, b cos + a sin)``.

    ``rotation`` broadcasts against x; the arithmetic is float32, the result has the type of x.
    """
    own, partner = rotation
    if inverse:
        partner = -partner
    value = x.astype(F32)
    swapped = jnp.flip(value.reshape(*x.shape[:-1], -1, 2), axis=-1).reshape(x.shape)
    return (value * own + swapped * partner).astype(x.dtype)


def hadamard_rotate(x: Float[Array, "... x"]) -> Float[Array, "... x"]:
    """``x H / sqrt(x)`` with the Hadamard matrix of Sylvester's order; float32 inside."""
    width = x.shape[-1]
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < width:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    rotated = linear(x, jnp.asarray(matrix, x.dtype), F32)
    return (rotated * width**-0.5).astype(x.dtype)
