"""Metrics and the predictors of section 2 against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spin_jax import metrics
from spin_jax.predictors import best_previous_layer, compare_predictors, previous_step
from spin_jax.selection import BlockSelection

# Whole functions compile sooner than their operations one by one.
kept_slots = jax.jit(metrics.kept_slots, static_argnums=(2, 3))
miss, pearson, top_k_recall = map(jax.jit, (metrics.miss, metrics.pearson, metrics.top_k_recall))
eligible_rows, summarize_miss = map(jax.jit, (metrics.eligible_rows, metrics.summarize_miss))
realized_sparsity = jax.jit(metrics.realized_sparsity)

LAYERS, STEPS, SLOTS, TOP_K = 7, 6, 30, 5


def top(scores, n, k):
    order = sorted(range(n), key=lambda i: (-scores[i], i))
    return set(order[: min(k, n)])


@pytest.fixture(scope="module")
def recorded():
    """Scores with ties, minus infinity beyond the visible slots as the indexer gives them."""
    rng = np.random.default_rng(0)
    num_slots = np.array([3, 11, 12, 17, 17, 30])
    scores = rng.integers(-6, 6, (LAYERS, STEPS, SLOTS)).astype(np.float32)
    scores += 3 * rng.random((1, 1, SLOTS)).round(1).astype(np.float32)
    return np.where(np.arange(SLOTS) < num_slots[:, None], scores, -np.inf), num_slots


def test_miss_and_kept_slots(recorded):
    scores, num_slots = recorded
    ids = np.array([[0, -1, -1], [0, 2, -1], [1, 2, -1], [0, 1, 4], [4, -1, -1], [2, 5, 7]])
    count = (ids >= 0).sum(axis=1)
    selection = BlockSelection(jnp.asarray(ids), jnp.asarray(count), jnp.zeros(STEPS, bool))
    kept = kept_slots(selection, jnp.asarray(num_slots), 4, SLOTS)
    got = miss(jnp.asarray(scores[0]), kept, jnp.asarray(num_slots), TOP_K)
    for t, n in enumerate(num_slots):
        want = {i for i in range(n) if i // 4 in ids[t]}
        assert set(np.flatnonzero(kept[t])) == want
        best = top(scores[0, t], n, TOP_K)
        assert float(got[t]) == pytest.approx(len(best - want) / len(best))
    warm = jnp.array([False, True, True, True, True, True])
    got = eligible_rows(selection, jnp.asarray(num_slots), warm, 4)
    assert got.tolist() == [False, True, True, True, True, True]
    total = sum(-(-n // 4) for n in num_slots)
    sparsity = realized_sparsity(jnp.asarray(count), jnp.asarray(num_slots), 4)
    assert float(sparsity) == pytest.approx(1 - count.sum() / total)


def test_no_visible_slots():
    zero, scores = jnp.zeros(2, jnp.int32), jnp.full((2, 8), -jnp.inf)
    assert miss(scores, jnp.zeros((2, 8), bool), zero, 4).tolist() == [0, 0]
    assert top_k_recall(scores, scores, zero, 4).tolist() == [1, 1]
    assert pearson(scores, scores, zero).tolist() == [0, 0]
    assert float(realized_sparsity(zero, zero, 4)) == 0


def test_summary_both_ways():
    rng = np.random.default_rng(1)
    misses = rng.random((3, 4, 50)).astype(np.float32)
    eligible = rng.random((3, 4, 50)) < 0.7
    eligible[1, 2] = False
    got = summarize_miss(jnp.asarray(misses), jnp.asarray(eligible))
    pooled = misses[eligible]
    own = [
        np.percentile(misses[i, j][eligible[i, j]], 99)
        for i in range(3)
        for j in range(4)
        if eligible[i, j].any()
    ]
    assert len(own) == 11 and int(got.rows) == pooled.size
    np.testing.assert_allclose(got.mean, pooled.mean(), rtol=1e-5)
    np.testing.assert_allclose(got.p99, np.percentile(pooled, 99), rtol=1e-5)
    np.testing.assert_allclose(got.mean_of_p99, np.mean(own), rtol=1e-5)
    nothing = summarize_miss(jnp.asarray(misses), jnp.zeros_like(jnp.asarray(eligible)))
    assert np.isnan(nothing.mean) and int(nothing.rows) == 0


def test_pearson_and_recall(recorded):
    scores, num_slots = recorded
    n = jnp.asarray(num_slots)
    corr = pearson(jnp.asarray(scores[1]), jnp.asarray(scores[0]), n)
    recall = top_k_recall(jnp.asarray(scores[1]), jnp.asarray(scores[0]), n, TOP_K)
    for t, size in enumerate(num_slots):
        x, y = scores[1, t, :size], scores[0, t, :size]
        np.testing.assert_allclose(corr[t], np.corrcoef(x, y)[0, 1], atol=1e-5)
        best = top(scores[0, t], size, TOP_K)
        want = len(best & top(scores[1, t], size, TOP_K)) / len(best)
        assert float(recall[t]) == pytest.approx(want)
    flat = jnp.ones((STEPS, SLOTS))
    assert pearson(flat, jnp.asarray(scores[0]), n).tolist() == [0] * STEPS


def test_predictors(recorded):
    scores, num_slots = recorded
    table = jax.jit(compare_predictors, static_argnames="top_k")(
        jnp.asarray(scores), jnp.asarray(num_slots), top_k=TOP_K, key=jax.random.key(0)
    )

    def measured(x, layer, t):
        n = num_slots[t]
        y = scores[layer, t]
        best = top(y, n, TOP_K)
        recall = len(best & top(x, n, TOP_K)) / len(best)
        return np.corrcoef(x[:n], y[:n])[0, 1], recall

    def earlier(layer, t, offset):
        x = np.zeros(SLOTS)
        for i in range(offset, num_slots[t - 1] + offset):
            if i < SLOTS:
                x[i] = scores[layer, t - 1, i - offset]
        return x

    rows = {"prev-layer": [], "prev-iter": [], "prev-iter offset 1": []}
    rows["prev-layer best-of-5"] = []
    for layer in range(LAYERS):
        for t in range(STEPS):
            if layer:
                rows["prev-layer"].append(measured(scores[layer - 1, t], layer, t))
                five = [measured(scores[layer - k, t], layer, t) for k in range(1, 6) if layer >= k]
                rows["prev-layer best-of-5"].append(np.max(five, axis=0))
            if t:
                rows["prev-iter"].append(measured(earlier(layer, t, 0), layer, t))
                rows["prev-iter offset 1"].append(measured(earlier(layer, t, 1), layer, t))
    assert set(table) == {*rows, "random"}
    for name, values in rows.items():
        want = np.mean(values, axis=0)
        np.testing.assert_allclose(table[name]["pearson"], want[0], atol=1e-5)
        np.testing.assert_allclose(table[name]["recall"], want[1], atol=1e-6)
    assert abs(float(table["random"]["pearson"])) < 0.15


def test_offset_one_is_the_move_of_a_diagonal():
    """A pattern at a fixed distance from the query is the same one slot further on."""
    num_slots = jnp.array([20, 21, 22])
    scores = jnp.stack([(jnp.arange(SLOTS) == n - 5).astype(jnp.float32) for n in num_slots])[None]
    moved, valid = previous_step(scores, num_slots, offset=1)
    assert valid.tolist() == [[False, True, True]]
    np.testing.assert_array_equal(moved[:, 1:], scores[:, 1:])
    best, _ = best_previous_layer(scores, lambda x, y: jnp.ones(x.shape[:2]))
    assert not np.isfinite(best).any()  # there is no layer before the first
