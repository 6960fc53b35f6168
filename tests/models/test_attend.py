"""Attention over groups of rows with a sink against numpy."""

import numpy as np
import pytest

from models import attention


@pytest.mark.parametrize("rows,scale", [(1, 1), (3, 1), (3, 300)])
def test_attention_with_a_sink(rows, scale):
    rng = np.random.default_rng(rows)
    B, H, d = 2, 4, 16

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    q, sink = scale * normal(B, rows, H, d), normal(H)
    shared, own = normal(B, 7, d), normal(B, rows, 5, d)
    masks = [rng.random((B, rows, m)) < 0.6 for m in (7, 5)]
    masks[0][0] = masks[1][0] = False  # a request that sees nothing but the sink
    groups = [
        attention._Group(values, mask) for values, mask in zip((shared, own), masks, strict=True)
    ]
    got = np.asarray(attention._attend_on_cpu(q, groups, sink))
    for b, t, h in np.ndindex(B, rows, H):
        vectors = np.concatenate((shared[b][masks[0][b, t]], own[b, t][masks[1][b, t]]))
        s = vectors.astype(np.float64) @ q[b, t, h] / np.sqrt(d)
        e = np.exp(s - max(s, default=0.0))
        expected = e @ vectors / (e.sum() + np.exp(float(sink[h]) - max(s, default=0.0)))
        # Scores in the hundreds have an absolute error of their own rounding.
        tolerance = 1e-5 if scale == 1 else 1e-3
        np.testing.assert_allclose(got[b, t, h], expected, rtol=tolerance, atol=1e-6)
