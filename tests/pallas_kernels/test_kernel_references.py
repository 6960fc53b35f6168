"""The plain references against numpy loops."""

import jax
import jax.numpy as jnp
import kernel_brute_force as brute_force
import ml_dtypes
import numpy as np
import pytest
from kernel_cases import (
    MIXING,
    adversarial_scores,
    ascending_blocks,
    attention_case,
    mixing_case,
    selection_case,
)

import pallas_kernels


@pytest.mark.parametrize("blocks", ["all", "some"])
@pytest.mark.parametrize("slots", [48, 53])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_index_scores(dtype, slots, blocks):
    rng = np.random.default_rng(slots)
    B, R, n, x, block = 3, 2, 4, 16, 8
    q = rng.normal(size=(B, R, n, x)).astype(dtype)
    keys = rng.normal(size=(B, slots, x)).astype(dtype)
    w = rng.normal(size=(B, R, n)).astype(np.float32)
    scales = np.exp2(rng.integers(-3, 3, (B, slots))).astype(np.float32)
    scales = scales if dtype == "float8_e4m3fn" else None
    num_slots = np.array([[slots - 3, slots], [11, 12], [0, 1]], np.int32)
    num_blocks = -(-slots // block)
    ids = np.tile(np.arange(num_blocks, dtype=np.int32), (B, 1))
    if blocks == "some":
        ids = np.stack([ascending_blocks(rng, num_blocks, c, 5) for c in (5, 3, 1)])
    expected = brute_force.index_scores(
        q.astype(np.float64), w, keys.astype(np.float64), num_slots, ids, block, scales
    )
    got = jax.jit(pallas_kernels.index_scores, static_argnames="block_size")(
        q, w, keys, num_slots, block_ids=ids if blocks == "some" else None, block_size=block,
        key_scales=scales,
    )  # fmt: skip
    for mine, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)


def test_index_scores_that_are_not_numbers_stay_selectable():
    keys = np.ones((1, 8, 4), np.float32)
    keys[0, 2] = np.nan
    keys[0, 3] = np.inf
    q, w = np.ones((1, 1, 1, 4), np.float32), -np.ones((1, 1, 1), np.float32)
    scores, group_max = pallas_kernels.index_scores(
        q, w, keys, np.array([[6]], np.int32), block_size=4
    )
    lowest = np.finfo(np.float32).min
    np.testing.assert_array_equal(scores[0, 0], [-4, -4, lowest, lowest, -4, -4, -np.inf, -np.inf])
    np.testing.assert_array_equal(group_max[0, 0], [-4])


@pytest.mark.parametrize("length,k", [(64, 8), (256, 64), (40, 64)])
def test_top_k_slots(length, k):
    for name, row in adversarial_scores(length, min(k, length)).items():
        got = pallas_kernels.top_k_slots(row[None], k)
        assert got[0].tolist() == brute_force.top_k_slots(row, k), name


def test_top_k_slots_maps_positions_to_slots_of_blocks():
    rng = np.random.default_rng(0)
    ids = np.stack([ascending_blocks(rng, 40, c, 12) for c in (12, 5)])
    scores = rng.integers(0, 9, (2, 3, 12 * 8)).astype(np.float32)
    scores[1, :, 5 * 8 :] = -np.inf
    got = pallas_kernels.top_k_slots(scores, 50, block_ids=ids, block_size=8)
    for b in range(2):
        for r in range(3):
            expected = brute_force.top_k_slots(scores[b, r], 50, ids[b], 8)
            assert got[b, r].tolist() == expected


def test_top_k_slots_of_the_first_scores():
    scores = np.random.default_rng(0).normal(size=(2, 3, 40)).astype(np.float32)
    counts = np.array([[40, 7, 0], [41, 24, -1]], np.int32)
    got = jax.jit(lambda s, n: pallas_kernels.top_k_slots(s, 9, num_scores=n))(scores, counts)
    for b, r in np.ndindex(2, 3):
        expected = brute_force.top_k_slots(scores[b, r, : max(counts[b, r], 0)], 9)
        assert got[b, r].tolist() == expected + [-1] * (9 - len(expected))
    with pytest.raises(ValueError, match=r"num_scores has shape \[2\]; allowed: \[2, 3\]"):
        pallas_kernels.top_k_slots(scores, 9, num_scores=counts[:, 0])
    ids = np.array([[1, 4, 7, 8, 9], [0, 2, -1, -1, -1]], np.int32)
    blocks = np.array([5, 2], np.int32)
    got = pallas_kernels.top_k_slots(scores, 30, block_ids=ids, block_size=8, num_blocks=blocks)
    for b, r in np.ndindex(2, 3):
        expected = brute_force.top_k_slots(scores[b, r, : blocks[b] * 8], 30, ids[b], 8)
        assert got[b, r].tolist() == expected + [-1] * (30 - len(expected))
    with pytest.raises(ValueError, match="num_scores goes without block_ids"):
        pallas_kernels.top_k_slots(scores, 9, block_ids=ids, block_size=8, num_scores=counts)


@pytest.mark.parametrize("slots,block", [(96, 8), (90, 16), (17, 1)])
def test_select_blocks(slots, block):
    rng = np.random.default_rng(slots)
    cases = [selection_case(rng, slots, block, ties) for ties in (False, True) * 40]
    V, D_rev, N, budget, explore, priority = (np.stack(x) for x in zip(*cases, strict=True))
    N, budget, explore = (x.astype(np.int32) for x in (N, budget, explore))
    for capacity in (-(-slots // block), 4):
        select = jax.jit(pallas_kernels.select_blocks, static_argnames=("block_size", "capacity"))
        ids, count = select(
            V, D_rev, N, budget, explore, priority, block_size=block, capacity=capacity
        )
        for b, case in enumerate(cases):
            expected = brute_force.select_blocks(*case, block, capacity)
            assert (ids[b].tolist(), int(count[b])) == expected


def test_select_blocks_reads_bf16_and_pads_a_larger_capacity():
    V = np.arange(32, dtype=ml_dtypes.bfloat16)[None]
    D_rev = np.zeros((1, 32), ml_dtypes.bfloat16)
    one, three = np.array([0], np.int32), np.array([3], np.int32)
    ids, count = pallas_kernels.select_blocks(
        V, D_rev, np.array([30], np.int32), three, one, np.zeros((1, 4), np.uint32),
        block_size=8, capacity=6,
    )  # fmt: skip
    assert ids[0].tolist() == [0, 2, 3, -1, -1, -1] and count[0] == 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("slots,block", [(96, 8), (90, 16)])
def test_ema_scatter(slots, block, dtype):
    rng = np.random.default_rng(slots)
    B, C, num_blocks = 5, 4, -(-slots // block)
    V, D_rev = rng.normal(size=(2, B, slots)).astype(dtype)
    V[rng.random(V.shape) < 0.3] = -np.inf
    D_rev[rng.random(V.shape) < 0.3] = -np.inf
    scores = rng.normal(size=(B, C * block)).astype(np.float32)
    for bad in (np.nan, -np.inf, np.inf, np.finfo(np.float32).min):
        scores[rng.random(scores.shape) < 0.1] = bad
    ids = np.stack([ascending_blocks(rng, num_blocks, c, C) for c in (4, 3, 2, 1, 0)])
    N = np.array([slots, slots - 3, 11, 1, 0], np.int32)
    update = jax.jit(pallas_kernels.ema_scatter, static_argnames=("block_size", "decay"))
    got = update(V, D_rev, scores, ids, N, block_size=block, decay=0.75)
    for b in range(B):
        expected = brute_force.ema_scatter(V[b], D_rev[b], scores[b], ids[b], N[b], block, 0.75)
        for mine, theirs, old in zip(got, expected, (V, D_rev), strict=True):
            before, after = old[b].astype(np.float64), np.asarray(mine[b]).astype(np.float64)
            np.testing.assert_array_equal(after[theirs == before], before[theirs == before])
            tolerance = 1e-6 if dtype == "float32" else 2e-2
            np.testing.assert_allclose(after, theirs, atol=tolerance)


def test_top_k_and_observe_is_both():
    rng = np.random.default_rng(3)
    V, D_rev = rng.normal(size=(2, 2, 64)).astype(np.float32)
    ids = np.stack([ascending_blocks(rng, 8, c, 5) for c in (5, 2)])
    scores = rng.normal(size=(2, 40)).astype(np.float32)
    scores[1, 16:] = -np.inf
    N = np.array([64, 60], np.int32)
    both = jax.jit(
        lambda s, *x: pallas_kernels.top_k_and_observe(s, 9, *x, block_size=8, decay=0.5)
    )
    got = both(scores, V, D_rev, ids, N)
    for b in range(2):
        assert got[0][b].tolist() == brute_force.top_k_slots(scores[b], 9, ids[b], 8)
        expected = brute_force.ema_scatter(V[b], D_rev[b], scores[b], ids[b], N[b], 8, 0.5)
        for mine, theirs in zip(got[1:], expected, strict=True):
            np.testing.assert_allclose(mine[b], theirs, atol=1e-6)


def test_references_work_under_vmap_and_scan():
    rng = np.random.default_rng(5)
    scores = jnp.asarray(rng.normal(size=(3, 2, 64)), jnp.float32)
    mapped = jax.vmap(lambda s: pallas_kernels.top_k_slots(s, 5))(scores)
    _, scanned = jax.lax.scan(lambda c, s: (c, pallas_kernels.top_k_slots(s, 5)), 0, scores)
    np.testing.assert_array_equal(mapped, scanned)
    np.testing.assert_array_equal(mapped[1], pallas_kernels.top_k_slots(scores[1], 5))


@pytest.mark.parametrize("iterations", [1, 4, 20])
@pytest.mark.parametrize("tokens,m", [((), 4), ((3,), 2), ((2, 5), 9), ((2, 1, 3), 1)])
def test_mixing_weights(tokens, m, iterations):
    case = mixing_case(np.random.default_rng(m), tokens, m)
    got = pallas_kernels.mixing_weights(*case, iterations=iterations, **MIXING)
    expected = brute_force.mixing_weights(*case, iterations=iterations, **MIXING)
    for mine, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scale", [0.25, 75.0])
@pytest.mark.parametrize("slots", ["none", "listed", "first"])
def test_sparse_attention(slots, scale):
    rng = np.random.default_rng(0)
    q, window, ids, sink, table, slot_ids, num_slots = attention_case(rng, 2, 3, 4, 16)
    tables, lists, named = [window], [ids], {}
    if slots == "listed":
        tables, lists, named = [window, table], [ids, slot_ids], {"slot_ids": slot_ids}
    if slots == "first":
        first = np.arange(table.shape[1])
        first = np.where(first < num_slots[..., None], first, -1)
        tables, lists, named = [window, table], [ids, first], {"num_slots": num_slots}
    got = jax.jit(pallas_kernels.sparse_attention, static_argnames="scale")(
        q, window, ids, sink, slots=None if slots == "none" else table, scale=scale, **named
    )
    expected = brute_force.sparse_attention(q, tables, lists, sink, scale)
    # Scores in the hundreds have an absolute error of their own rounding.
    tolerance = 1e-5 if scale < 1 else 1e-3
    np.testing.assert_allclose(got, expected, rtol=tolerance, atol=1e-6)
