"""How a sublayer of hyper-connections reads and writes its streams, token by token."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.compat import Implementation, choose

LARGEST = 8
"""Streams whose matrix a thread of the kernel can hold in registers."""


def mixing_weights(
    product: Float[Array, "*N m*(m+2)"],
    square: Float[Array, "*N"],
    scale: Float[Array, "3"],
    base: Float[Array, "m*(m+2)"],
    *,
    width: int,
    rms_eps: float,
    iterations: int,
    eps: float,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "*N m"], Float[Array, "*N m"], Float[Array, "*N m m"]]:
    """``a, b, C = product (square / width + rms_eps)^-1/2 scale + base``, m, m and m x m numbers,
    then ``sigmoid(a) + eps``, ``2 sigmoid(b)`` and ``sinkhorn(C)``.

    Sinkhorn is a softmax over rows, plus eps, and one column normalisation, then
    ``iterations - 1`` rounds of row and column normalisation, each dividing by (sum + eps).

    Args:
        product: ``fn . flatten(x)`` of the m streams, float32.
        square: ``|flatten(x)|^2``, float32; on a GPU its root would be a launch of its own.
        scale: A factor for each of a, b and C.
        base: Added to every number.
        width: Channels of ``flatten(x)``.
        rms_eps: Added to the mean square.
        iterations: At least 1.
        eps: Added to the read weights, to the softmax and to every sum.
        implementation: "mosaic" (one launch instead of some for every round; no gradient), "xla",
            or None to choose by platform, version and shape.

    Returns:
        Read weights, write weights, and the doubly stochastic matrix whose entry [i, j] says how
        much of stream i goes to stream j; float32.

    Raises:
        ValueError: shapes that do not fit, no iteration, or a named implementation that cannot
            run.

    Source: the spec's "Block" heading.
    """
    m = math.isqrt(base.size + 1) - 1
    if m < 1 or base.shape != (m * (m + 2),):
        raise ValueError(
            f"base has shape {list(base.shape)}; allowed: [m (m + 2)] for m streams: 3, 8, 15, 24.."
        )
    shapes = (*product.shape[:-1], base.size), product.shape[:-1], (3,)
    for name, x, shape in zip(
        ("product", "square", "scale"), (product, square, scale), shapes, strict=True
    ):
        if x.shape != shape:
            raise ValueError(
                f"{name} has shape {list(x.shape)}; allowed: {list(shape)}, as {base.size} numbers "
                f"of base and a product of {list(product.shape)} go together"
            )
    for name, count in (("iterations", iterations), ("width", width)):
        if count < 1 or count != int(count):
            raise ValueError(f"{name} is {count}; allowed: an integer of at least 1")
    arguments = (product, square, scale, base, m, width, rms_eps, iterations, eps)
    unsupported = _why_not_mosaic(m, product=product, square=square, scale=scale, base=base)
    if choose("mixing_weights", implementation, unsupported) == "mosaic":
        from pallas_kernels.mosaic.hyper import mixing_weights_mosaic

        return mixing_weights_mosaic(*arguments)
    return mixing_weights_reference(*arguments)


def _why_not_mosaic(m: int, **arrays: jax.Array) -> str | None:
    for name, x in arrays.items():
        if x.dtype != jnp.float32:
            return f"{name} is {x.dtype}, not float32"
        if x.size == 0:
            return f"there is nothing in {name} {list(x.shape)}"
    if m > LARGEST:
        return f"{m} streams are more than {LARGEST}"
    return None


def mixing_weights_reference(
    product: jax.Array,
    square: jax.Array,
    scale: jax.Array,
    base: jax.Array,
    m: int,
    width: int,
    rms_eps: float,
    iterations: int,
    eps: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The same in plain ``jnp``, for any m."""
    factors = jnp.concatenate(
        [jnp.broadcast_to(scale[i], (n,)) for i, n in enumerate((m, m, m * m))]
    )
    factors, base = (jnp.expand_dims(x, tuple(range(product.ndim - 1))) for x in (factors, base))
    inverse_rms = jax.lax.rsqrt(square * (1 / width) + rms_eps)
    mix = product * inverse_rms[..., None] * factors + base
    gates = jax.lax.logistic(mix[..., : 2 * m])
    logits = mix[..., 2 * m :].reshape(*mix.shape[:-1], m, m)
    return gates[..., :m] + eps, 2 * gates[..., m:], _sinkhorn(logits, iterations, eps)


def _sinkhorn(logits: jax.Array, iterations: int, eps: float) -> jax.Array:
    # Shifts cancel, so the maximum needs no gradient; its own divides by the number of equal
    # entries, which is 0 where XLA computes the logits twice and the copies differ in rounding.
    top = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    matrix = jnp.exp(logits - top)
    matrix = matrix / jnp.sum(matrix, axis=-1, keepdims=True) + eps
    matrix = matrix / (jnp.sum(matrix, axis=-2, keepdims=True) + eps)

    def round_(_: Any, matrix: Array) -> Array:
        matrix = matrix / (jnp.sum(matrix, axis=-1, keepdims=True) + eps)
        return matrix / (jnp.sum(matrix, axis=-2, keepdims=True) + eps)

    # A loop, not twenty copies: unrolled, the compile time of a deep model doubles.
    return jax.lax.fori_loop(0, iterations - 1, round_, matrix)
