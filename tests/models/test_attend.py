"""Attention over groups of rows with a sink against numpy."""

import dataclasses

import numpy as np
import pytest

from models import attention
from models.cache import make_step, plan_ring
from models.presets import tiny_config


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


@pytest.mark.parametrize("window,max_draft", [(1, 0), (4, 3), (16, 7)])
def test_listed_window_rows_hold_what_the_mask_lets_through(window, max_draft):
    """Of rings that are not full, or just rolled back, and steps longer than the ring."""
    cfg = dataclasses.replace(tiny_config(), sliding_window=window)
    rng = np.random.default_rng(window)
    for tokens in (1, 2, max_draft + 1, window, 2 * window + max_draft + 3):
        length = rng.integers(0, 4 * window + 9, 24).astype(np.int32)
        length[:3] = 0, window, window + max_draft
        num_new = rng.integers(1, tokens + 1, 24).astype(np.int32)
        step = make_step(length, num_new, tokens)
        ring = plan_ring(step, window + max_draft, max_draft)
        seen = np.asarray(attention._in_window(step, ring, cfg))
        rows = np.asarray(attention._window_rows(step, max_draft, cfg))
        held = np.asarray(ring.held)
        for b, t in np.ndindex(24, tokens):
            listed = rows[b, t][rows[b, t] >= 0]
            assert (rows[b, t][len(listed) :] < 0).all() and len(set(listed)) == len(listed)
            if t < num_new[b]:
                assert set(held[b, listed]) == set(held[b, seen[b, t]])
            else:  # padding: any rows that hold a token that is there
                assert ((held[b, listed] >= 0) & (held[b, listed] < length[b] + num_new[b])).all()
