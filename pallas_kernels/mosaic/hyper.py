"""Everything between a hyper-connection's product and its weights in one launch, a thread a token.

A thread holds the token's matrix in registers through all rounds. Reads and writes of neighbouring
threads are a row apart, which costs nothing at a few kilobytes; laying them out otherwise would
cost launches.
"""

from __future__ import annotations

import functools
import operator

import jax
import jax.numpy as jnp

from pallas_kernels.compat import mosaic_kernel
from pallas_kernels.mosaic import lanes


def mixing_weights_mosaic(
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
    """See ``pallas_kernels.hyper``."""
    tokens, count = square.shape, square.size
    layout = lanes.coalesced(lanes.THREADS)

    def mixing_weights(product_ref, square_ref, scale_ref, base_ref, pre_ref, post_ref, comb_ref):
        token = jax.lax.axis_index("tile") * lanes.THREADS + lanes.iota(lanes.THREADS, layout)
        at = jnp.minimum(token, count - 1)
        inverse_rms = jax.lax.rsqrt(lanes.gather(square_ref, at, layout) * (1 / width) + rms_eps)
        scales = [scale_ref[i] for i in range(3)]
        mix = [
            lanes.gather(product_ref.at[:, i], at, layout) * inverse_rms * scales[min(i // m, 2)]
            + base_ref[i]
            for i in range(m * (m + 2))
        ]
        pre = [jax.lax.logistic(x) + eps for x in mix[:m]]
        post = [2 * jax.lax.logistic(x) for x in mix[m : 2 * m]]
        rows = _sinkhorn([mix[i : i + m] for i in range(2 * m, len(mix), m)], iterations, eps)
        for ref, values in ((pre_ref, pre), (post_ref, post), (comb_ref, sum(rows, []))):
            targets = [(ref.at[:, i], x) for i, x in enumerate(values)]
            lanes.scatter(targets, token, token < count, layout, fence="none")

    kernel = mosaic_kernel(
        mixing_weights,
        out_type=[jax.ShapeDtypeStruct((count, n), jnp.float32) for n in (m, m, m * m)],
        grid=(-(-count // lanes.THREADS),),
        grid_names=("tile",),
    )
    pre, post, comb = kernel(product.reshape(count, -1), square.reshape(-1), scale, base)
    return pre.reshape(*tokens, m), post.reshape(*tokens, m), comb.reshape(*tokens, m, m)


Lines = list[list[jax.Array]]


def _sinkhorn(logits: Lines, iterations: int, eps: float) -> Lines:
    """Sinkhorn of matrices given by rows of entries."""

    def round_(_, rows: Lines) -> Lines:
        return _transposed(_normalised(_transposed(_normalised(rows, eps)), eps))

    tops = [functools.reduce(jnp.maximum, row) for row in logits]
    rows = [[jnp.exp(x - top) for x in row] for row, top in zip(logits, tops, strict=True)]
    rows = [[x + eps for x in row] for row in _normalised(rows, 0)]
    rows = _transposed(_normalised(_transposed(rows), eps))
    return jax.lax.fori_loop(0, iterations - 1, round_, rows)


def _normalised(lines: Lines, eps: float) -> Lines:
    # One division a line, not one an entry: two thirds of the instructions.
    inverses = [1 / (functools.reduce(operator.add, line) + eps) for line in lines]
    return [[x * inverse for x in line] for line, inverse in zip(lines, inverses, strict=True)]


def _transposed(lines: Lines) -> Lines:
    return [list(line) for line in zip(*lines, strict=True)]
