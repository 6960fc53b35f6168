"""All rounds of Sinkhorn's normalisation in one launch, a thread a matrix."""

from __future__ import annotations

import functools
import operator

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp

from pallas_kernels.compat import mosaic_kernel
from pallas_kernels.mosaic import lanes


def rounds_mosaic(matrix: jax.Array, rounds: int, eps: float) -> jax.Array:
    """``rounds`` of row and column normalisation of matrices [..., m, m], float32.

    Entries come first in the kernel's operand, so that neighbouring threads read neighbouring
    matrices; XLA merges the transpositions into what makes and what uses the matrices.
    """
    m = matrix.shape[-1]
    entries = matrix.reshape(-1, m * m).T
    count = entries.shape[1]
    # Rows of ones do no harm: 1 / (m + eps) and so on, and nobody reads them.
    entries = jnp.pad(entries, ((0, 0), (0, -count % lanes.THREADS)), constant_values=1)
    layout = lanes.coalesced(lanes.THREADS)

    def sinkhorn(entries_ref, out_ref):
        first = jax.lax.axis_index("tile") * lanes.THREADS
        at = first + lanes.iota(lanes.THREADS, layout)

        def normalised(lines):
            sums = [functools.reduce(operator.add, line) + eps for line in lines]
            return [[x / s for x in line] for line, s in zip(lines, sums, strict=True)]

        def transposed(lines):
            return [list(line) for line in zip(*lines, strict=True)]

        def round_(_, rows):
            return transposed(normalised(transposed(normalised(rows))))

        rows = [
            [lanes.gather(entries_ref.at[i * m + j], at, layout) for j in range(m)]
            for i in range(m)
        ]
        rows = jax.lax.fori_loop(0, rounds, round_, rows)
        for i, row in enumerate(rows):
            for j, x in enumerate(row):
                out_ref[i * m + j, pl.ds(first, lanes.THREADS)] = x

    kernel = mosaic_kernel(
        sinkhorn,
        out_type=jax.ShapeDtypeStruct(entries.shape, jnp.float32),
        grid=(entries.shape[1] // lanes.THREADS,),
        grid_names=("tile",),
    )
    return kernel(entries)[:, :count].T.reshape(matrix.shape)
