"""The doubly stochastic mixing matrices of hyper-connections."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.compat import Implementation, choose

LARGEST = 8
"""Rows of a matrix that a thread of the kernel can hold in registers."""


def sinkhorn(
    logits: Float[Array, "*N m m"],
    iterations: int,
    eps: float,
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "*N m m"]:
    """Alternate row and column normalisation of ``softmax(logits) + eps``.

    A softmax over rows, plus eps, and one column normalisation, then ``iterations - 1`` rounds of
    row and column normalisation, each dividing by (sum + eps).

    Args:
        logits: Float32.
        iterations: At least 1.
        eps: Added to the softmax and to every sum.
        implementation: "mosaic" (one launch instead of some for every round; no gradient), "xla",
            or None to choose by platform, version and shape.

    Raises:
        ValueError: matrices that are not square, no iteration, or a named implementation that
            cannot run.

    Source: the spec's "Block" heading.
    """
    if iterations < 1 or logits.ndim < 2 or logits.shape[-1] != logits.shape[-2]:
        raise ValueError(
            f"sinkhorn of {list(logits.shape)} with {iterations} iterations: matrices must be "
            "square and iterations at least 1"
        )
    # Shifts cancel, so the maximum needs no gradient; its own divides by the number of equal
    # entries, which is 0 where XLA computes the logits twice and the copies differ in rounding.
    top = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    matrix = jnp.exp(logits - top)
    matrix = matrix / jnp.sum(matrix, axis=-1, keepdims=True) + eps
    matrix = matrix / (jnp.sum(matrix, axis=-2, keepdims=True) + eps)
    if choose("sinkhorn", implementation, _why_not_mosaic(logits)) == "mosaic":
        from pallas_kernels.mosaic.sinkhorn import rounds_mosaic

        return rounds_mosaic(matrix, iterations - 1, eps)

    def round_(_: Any, matrix: Array) -> Array:
        matrix = matrix / (jnp.sum(matrix, axis=-1, keepdims=True) + eps)
        return matrix / (jnp.sum(matrix, axis=-2, keepdims=True) + eps)

    # A loop, not twenty copies: unrolled, the compile time of a deep model doubles.
    return jax.lax.fori_loop(0, iterations - 1, round_, matrix)


def _why_not_mosaic(logits: jax.Array) -> str | None:
    if logits.dtype != jnp.float32:
        return f"logits are {logits.dtype}, not float32"
    if logits.shape[-1] > LARGEST:
        return f"matrices of {logits.shape[-1]} rows are larger than {LARGEST}"
    if math.prod(logits.shape) == 0:
        return f"there is nothing in {logits.shape}"
    return None
