"""The kernels on a Hopper GPU against the references and numpy, at sizes near production.

``SPIN_JAX_TEST_GPU=1 python -m pytest -m gpu tests/pallas_kernels``; with SPIN_JAX_GPU_RECORD set
to a file name, the outcome is kept there.
"""

import jax
import jax.numpy as jnp
import kernel_brute_force as brute_force
import numpy as np
import pytest
from kernel_cases import (
    MIXING,
    adversarial_scores,
    ascending_blocks,
    attention_case,
    mixing_case,
    unwritten,
)

import pallas_kernels

pytestmark = pytest.mark.gpu


def both(call, *arguments):
    return [
        jax.jit(lambda *x, named=named: call(*x, implementation=named))(*arguments)
        for named in ("mosaic", "xla")
    ]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("blocks", ["all", "some"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_index_scores(dtype, blocks, rows):
    rng = np.random.default_rng(rows)
    B, S, C = 5, 4096, 40
    q = jnp.asarray(rng.normal(size=(B, rows, 64, 128)), dtype)
    keys = jnp.asarray(rng.normal(size=(B, S, 128)), dtype)
    w = jnp.asarray(rng.normal(size=(B, rows, 64)), jnp.float32)
    scales = jnp.asarray(np.exp2(rng.integers(-3, 3, (B, S))), jnp.float32)
    first = np.array([S - rows, 1000, 64, 1, 0])
    num_slots = jnp.asarray(first[:, None] + np.arange(rows), jnp.int32)
    ids = np.stack([ascending_blocks(rng, S // 64, c, C) for c in (C, 30, 5, 1, 0)])
    ids = ids if blocks == "some" else None

    def call(*x, fill=True, implementation="mosaic"):
        return pallas_kernels.index_scores(
            *x, block_ids=ids, key_scales=scales if dtype == "float8_e4m3fn" else None,
            fill=fill, implementation=implementation,
        )  # fmt: skip

    got, expected = both(call, q, w, keys, num_slots)
    finite = np.isfinite(expected[0])
    np.testing.assert_array_equal(np.isfinite(got[0]), finite)
    np.testing.assert_array_equal(got[1], np.asarray(got[0]).reshape(B, rows, -1, 16).max(axis=-1))
    mine, reference = np.asarray(got[0])[finite], np.asarray(expected[0])[finite]
    error = np.linalg.norm(mine - reference) / np.linalg.norm(reference)
    # Hopper's FP8 matrix units add with about 14 bits; bf16 products are added in float32.
    assert error < (1e-6 if dtype == "bfloat16" else 5e-4)

    written = np.repeat(np.arange(S // 64)[None] * 64 < first[:, None] + rows - 1, 64, axis=1)
    if ids is not None:
        written = np.repeat(ids >= 0, 64, axis=1)
    written = np.broadcast_to(written[:, None], got[0].shape)
    unfilled = call(q, w, keys, num_slots, fill=False)
    for mine, filled, known in zip(unfilled, got, (written, written[..., ::16]), strict=True):
        np.testing.assert_array_equal(np.asarray(mine)[known], np.asarray(filled)[known])


def test_scores_that_are_not_numbers_stay_selectable():
    keys = jnp.ones((1, 128, 128), jnp.bfloat16).at[0, 3].set(jnp.nan).at[0, 70].set(jnp.inf)
    q, w = jnp.ones((1, 1, 64, 128), jnp.bfloat16), -jnp.ones((1, 1, 64))
    scores, group_max = pallas_kernels.index_scores(
        q, w, keys, jnp.array([[100]], jnp.int32), implementation="mosaic"
    )
    expected = np.where(np.arange(128) < 100, -64.0 * 128, -np.inf).astype(np.float32)
    expected[[3, 70]] = np.finfo(np.float32).min
    np.testing.assert_array_equal(scores[0, 0], expected)
    lowest = np.where(np.arange(8) < 7, -64.0 * 128, -np.inf)
    np.testing.assert_array_equal(group_max[0, 0], lowest)


@pytest.mark.parametrize(
    "length,k",
    [(1000, 1000), (8192, 512), (131072, 512), (157312, 512), (16384, 2048), (262144, 2048)],
)
def test_top_k_slots(length, k):
    cases = adversarial_scores(length, k)
    got = pallas_kernels.top_k_slots(
        jnp.asarray(np.stack(list(cases.values()))), k, implementation="mosaic"
    )
    for (name, row), slots in zip(cases.items(), np.asarray(got), strict=True):
        assert slots.tolist() == brute_force.top_k_slots(row, k), name


@pytest.mark.parametrize("length,k", [(131072, 512), (262144, 1024)])
def test_top_k_slots_of_windows_that_are_partly_full(length, k):
    rng = np.random.default_rng(length)
    scores = rng.normal(size=(10, length)).astype(np.float32)
    for row, full in zip(scores, range(0, 10), strict=True):
        row[length * full // 9 if full < 6 else 3**full :] = -np.inf
    got, expected = both(
        lambda s, implementation: pallas_kernels.top_k_slots(s, k, implementation=implementation),
        scores,
    )
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("length,k", [(8192, 512), (131072, 512), (524288, 1024)])
def test_top_k_slots_of_the_first_scores(length, k):
    rng = np.random.default_rng(length)
    counts = [length, length - 17, length // 3, length // 9, 8193, 8192, 2048, 100, 1, 0]
    scores = rng.normal(size=(10, length)).astype(np.float32)
    arguments = *unwritten(scores, counts), np.array(counts, np.int32)
    got, expected = both(
        lambda s, m, n, implementation: pallas_kernels.top_k_slots(
            s, k, group_max=m, num_scores=n, implementation=implementation
        ),
        *arguments,
    )
    np.testing.assert_array_equal(got, expected)


def test_top_k_slots_of_blocks_for_several_rows():
    rng = np.random.default_rng(1)
    ids = np.stack([ascending_blocks(rng, 2048, c, 1229) for c in (1229, 600)])
    scores = rng.normal(size=(2, 3, 1229 * 64)).astype(np.float32)
    scores[1, :, 600 * 64 :] = -np.inf
    group_max = scores.reshape(2, 3, -1, 16).max(-1)
    got, expected = both(
        lambda s, i, m, implementation: pallas_kernels.top_k_slots(
            s, 512, block_ids=i, group_max=m, implementation=implementation
        ),
        scores, ids, group_max,
    )  # fmt: skip
    np.testing.assert_array_equal(got, expected)


def selection(slots, dtype, size, ties):
    rng = np.random.default_rng(slots)
    B = 8
    V, D_rev = rng.normal(size=(2, B, slots)) if not ties else rng.integers(-2, 3, (2, B, slots))
    V, D_rev = jnp.asarray(V, dtype), jnp.asarray(D_rev, dtype)
    N = np.array([slots, slots - 1, slots // 2 + 7, 64, 1, 0, slots - 63, 300], np.int32)
    active = -(-N // size)
    budget = np.maximum(np.minimum(active, 2), (active * 6 + 9) // 10)
    budget[1] = active[1]
    explore = np.minimum(budget // 20, budget - np.minimum(active, 2))
    priority = rng.integers(0, 3 if ties else 2**32, (B, slots // size), dtype=np.uint32)
    return V, D_rev, N, budget.astype(np.int32), explore.astype(np.int32), priority


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(
    "slots,dtype,size", [(8192, "bfloat16", 32), (8256, "float32", 64), (131072, "float32", 64)]
)
def test_select_blocks(slots, dtype, size, ties):
    arguments = selection(slots, dtype, size, ties)
    for capacity in (slots // size, slots * 3 // (5 * size)):
        got, expected = both(
            lambda *x, capacity=capacity, implementation: pallas_kernels.select_blocks(
                *x, block_size=size, capacity=capacity, implementation=implementation
            ),
            *arguments,
        )
        for mine, reference in zip(got, expected, strict=True):
            np.testing.assert_array_equal(mine, reference)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_select_blocks_of_layers_that_lie_apart(dtype):
    layers = [
        selection(slots, dtype, 64, ties) for slots, ties in ((8192, False), (8192, True)) * 3
    ]
    layers = [tuple(np.roll(x, i, axis=0) for x in layer) for i, layer in enumerate(layers)]
    V, D_rev, *numbers = zip(*layers, strict=True)
    numbers = [np.stack(x) for x in numbers]
    got, expected = both(
        lambda *x, implementation: pallas_kernels.select_blocks_of_layers(
            *x, block_size=64, capacity=90, implementation=implementation
        ),
        V, D_rev, *numbers,
    )  # fmt: skip
    for mine, reference in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(mine, reference)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ema_scatter(dtype):
    rng = np.random.default_rng(0)
    B, S, C = 4, 131072, 1229
    V, D_rev = rng.normal(size=(2, B, S)).astype(np.float32)
    V[rng.random(V.shape) < 0.3] = -np.inf
    ids = np.stack([ascending_blocks(rng, S // 64, c, C) for c in (C, 600, 1, 0)])
    scores = rng.normal(size=(B, C * 64)).astype(np.float32)
    scores[rng.random(scores.shape) < 0.1] = np.nan
    N = np.array([S, S - 77, S // 2, 100], np.int32)
    got, expected = both(
        lambda *x, implementation: pallas_kernels.ema_scatter(
            *x, block_size=64, decay=0.5, implementation=implementation
        ),
        jnp.asarray(V, dtype), jnp.asarray(D_rev, dtype), scores, ids, N,
    )  # fmt: skip
    for mine, reference in zip(got, expected, strict=True):
        np.testing.assert_array_equal(mine, reference)


@pytest.mark.parametrize("batch", [1, 40, 96, 300])
def test_top_k_and_observe(batch):
    rng = np.random.default_rng(batch)
    S, C, K = 32768, 300, 200
    V, D_rev = rng.normal(size=(2, batch, S)).astype(np.float32)
    ids = np.stack(
        [ascending_blocks(rng, S // 64, rng.integers(1, C + 1), C) for _ in range(batch)]
    )
    ids[-1] = -1
    N = rng.integers(1, S + 1, batch).astype(np.int32)
    scores = rng.normal(size=(batch, C * 64)).astype(np.float32)
    slots = np.repeat(ids, 64, 1) * 64 + np.tile(np.arange(64), C)
    scores[(np.repeat(ids, 64, 1) < 0) | (slots >= N[:, None])] = -np.inf
    got, expected = both(
        lambda *x, implementation: pallas_kernels.top_k_and_observe(
            x[0], K, *x[1:], block_size=64, decay=0.25, implementation=implementation
        ),
        scores, V, D_rev, ids, N,
    )  # fmt: skip
    counts = np.sum(ids >= 0, axis=1).astype(np.int32)
    scores, group_max = unwritten(scores, counts * 64)
    of_first = pallas_kernels.top_k_and_observe(
        scores, K, V, D_rev, ids, N, group_max=group_max, num_blocks=counts,
        block_size=64, decay=0.25, implementation="mosaic",
    )  # fmt: skip
    for result in (got, of_first):
        np.testing.assert_array_equal(result[0], expected[0])
        for mine, reference in zip(result[1:], expected[1:], strict=True):
            np.testing.assert_allclose(mine, reference, atol=1e-6)


def test_a_donated_state_is_not_copied():
    S = 8192
    ids = jnp.zeros((2, 2), jnp.int32).at[:, 1].set(5)
    state = jnp.zeros((2, S)), jnp.zeros((2, S))
    arguments = (*state, jnp.ones((2, 128)), ids, jnp.full(2, S, jnp.int32))
    update = jax.jit(
        lambda *x: pallas_kernels.ema_scatter(*x, block_size=64, decay=0.5), donate_argnums=(0, 1)
    )
    text = update.lower(*arguments).compile().as_text()
    assert "mosaic_gpu" in text
    assert " copy(" not in text and "copy-start" not in text


@pytest.mark.parametrize(
    "tokens,m", [((), 4), ((8, 1), 4), ((1000,), 4), ((7,), 2), ((300,), 8), ((3, 2), 1)]
)
def test_mixing_weights(tokens, m):
    case = mixing_case(np.random.default_rng(0), tokens, m)

    got, reference = both(
        lambda *x, implementation: pallas_kernels.mixing_weights(
            *x, iterations=20, **MIXING, implementation=implementation
        ),
        *case,
    )
    expected = brute_force.mixing_weights(*case, iterations=20, **MIXING)
    for three in zip(got, reference, expected, strict=True):
        np.testing.assert_allclose(three[0], three[1], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(three[0], three[2], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("slots", ["none", "listed", "first"])
@pytest.mark.parametrize("batch,rows,heads,width", [(3, 2, 64, 512), (1, 1, 128, 128)])
def test_sparse_attention(batch, rows, heads, width, slots):
    rng = np.random.default_rng(rows)
    sizes = {"window": (135, 128), "slots": 5000, "listed": 512}
    case = attention_case(rng, batch, rows, heads, width, **sizes)
    q, window, ids, sink, table, slot_ids, num_slots = case
    named = {
        "none": {},
        "listed": {"slots": table, "slot_ids": slot_ids},
        "first": {"slots": table, "num_slots": num_slots},
    }[slots]

    def call(dtype, implementation):
        x = {"q": q, "window": window, "slots": named.get("slots")}
        x = {name: v if v is None else jnp.asarray(v, jnp.bfloat16).astype(dtype)
             for name, v in x.items()}  # fmt: skip
        return pallas_kernels.sparse_attention(
            window_ids=ids, sink=sink, scale=width**-0.5, implementation=implementation,
            **(named | x),
        )  # fmt: skip

    expected = np.asarray(call(jnp.float32, "xla"))
    got = np.asarray(call(jnp.bfloat16, "mosaic"))
    # Weights are rounded to bfloat16, as everywhere in a bfloat16 model.
    assert np.linalg.norm(got - expected) < 3e-3 * np.linalg.norm(expected)


def test_sparse_attention_reads_listed_rows_only():
    rng = np.random.default_rng(0)
    q, window, ids, sink, table, slot_ids, _ = attention_case(rng, 5, 1, 64, 256)
    q, window, table = (jnp.asarray(x, jnp.bfloat16) for x in (q, window, table))
    call = lambda window, table: pallas_kernels.sparse_attention(  # noqa: E731
        q, window, ids, sink, slots=table, slot_ids=slot_ids, scale=0.06, implementation="mosaic"
    )
    unlisted = [
        np.stack([~np.isin(np.arange(x.shape[1]), listed) for listed in i])
        for x, i in ((window, ids), (table, slot_ids))
    ]
    poisoned = [
        jnp.where(hidden[..., None], jnp.nan, x)
        for x, hidden in zip((window, table), unlisted, strict=True)
    ]
    np.testing.assert_array_equal(call(*poisoned), call(window, table))
