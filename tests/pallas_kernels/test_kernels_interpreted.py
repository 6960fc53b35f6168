"""The kernels under Pallas' GPU interpreter, on small shapes, against the references.

The interpreter's scatter rewrites whole references, so only one warpgroup and one writer of a
reference run at a time; several of them are the GPU tests' subject.
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
    selection_case,
    unwritten,
)

import pallas_kernels
from pallas_kernels import compat

pytestmark = pytest.mark.skipif(
    not compat.HAS_MOSAIC, reason="Mosaic GPU kernels need jax 0.11, which needs Python 3.12"
)


def interpret(function, *arguments):
    with compat.tracing_for_hopper("interpreted"):
        return jax.jit(lambda *x: function(*x))(*arguments)


@pytest.mark.parametrize("grouped", [False, True])
def test_top_k_slots(grouped, monkeypatch):
    from pallas_kernels.mosaic import topk

    monkeypatch.setattr(topk, "WARPGROUPS", 1)
    monkeypatch.setattr("pallas_kernels.topk.BUFFER", 512 if grouped else 8192)
    cases = adversarial_scores(2560, 48)
    cases = dict(list(cases.items())[grouped::2])  # half with maxima, half without: time
    got = interpret(
        lambda s: pallas_kernels.top_k_slots(s, 48, implementation="mosaic"),
        np.stack(list(cases.values())),
    )
    for (name, row), slots in zip(cases.items(), got, strict=True):
        assert slots.tolist() == brute_force.top_k_slots(row, 48), name


def test_top_k_slots_of_windows_that_are_partly_full(monkeypatch):
    """Two groups are searched as one while enough of those hold a score, then each, then none."""
    from pallas_kernels.mosaic import topk

    monkeypatch.setattr(topk, "WARPGROUPS", 1)
    length, k = 32768, 200
    rows = np.random.default_rng(0).normal(size=(5, length)).astype(np.float32)
    for row, full in zip(rows, (length, 12000, 4000, 1500, 0), strict=True):
        row[full:] = -np.inf
    assert topk.Ranking.of(length, k, 64).joined == 2
    got = interpret(lambda s: pallas_kernels.top_k_slots(s, k, implementation="mosaic"), rows)
    for row, slots in zip(rows, got, strict=True):
        assert slots.tolist() == brute_force.top_k_slots(row, k)


@pytest.mark.parametrize("length", [4096, 32768])
def test_top_k_slots_of_the_first_scores(length, monkeypatch):
    """Scores in one buffer, few groups all read, and many of which the highest are searched for."""
    from pallas_kernels.mosaic import topk

    monkeypatch.setattr(topk, "WARPGROUPS", 1)
    counts = np.array([length, length - 17, length // 3, 1000, 3, 0], np.int32)
    rows = np.random.default_rng(0).normal(size=(6, length)).astype(np.float32)
    scores, group_max = unwritten(rows, counts)

    def call(s, m, n):
        return pallas_kernels.top_k_slots(
            s, 100, group_max=m, num_scores=n, implementation="mosaic"
        )

    for row, n, slots in zip(rows, counts, interpret(call, scores, group_max, counts), strict=True):
        expected = brute_force.top_k_slots(row[:n], 100)
        assert slots.tolist() == expected + [-1] * (100 - len(expected))


@pytest.mark.parametrize("size", [32, 128])
def test_select_blocks(size):
    capacity = 60 * 32 // size
    rng = np.random.default_rng(0)
    cases = [selection_case(rng, 4800, size, ties) for ties in (False, True) * 3]
    arguments = [np.stack(x) for x in zip(*cases, strict=True)]
    arguments[2:5] = [x.astype(np.int32) for x in arguments[2:5]]
    ids, count = interpret(
        lambda *x: pallas_kernels.select_blocks(
            *x, block_size=size, capacity=capacity, implementation="mosaic"
        ),
        *arguments,
    )
    for b, case in enumerate(cases):
        assert (ids[b].tolist(), int(count[b])) == brute_force.select_blocks(*case, size, capacity)


def test_select_blocks_of_layers():
    rng = np.random.default_rng(1)
    cases = [[selection_case(rng, 4800, 64, ties) for ties in (False, True)] for _ in range(3)]
    stacked = [[np.stack(x) for x in zip(*layer, strict=True)] for layer in cases]
    V, D_rev, *numbers = zip(*stacked, strict=True)
    numbers = [np.stack(x) for x in numbers]
    numbers[:3] = [x.astype(np.int32) for x in numbers[:3]]
    ids, count = interpret(
        lambda *x: pallas_kernels.select_blocks_of_layers(
            *x, block_size=64, capacity=30, implementation="mosaic"
        ),
        V, D_rev, *numbers,
    )  # fmt: skip
    for layer, row in np.ndindex(3, 2):
        expected = brute_force.select_blocks(*cases[layer][row], 64, 30)
        assert (ids[layer][row].tolist(), int(count[layer][row])) == expected


@pytest.mark.parametrize("mapped", [False, True])
def test_ema_scatter(mapped, monkeypatch):
    from pallas_kernels.mosaic import ema

    monkeypatch.setattr(ema, "TILE", 256)
    rng = np.random.default_rng(0)
    V, D_rev = rng.normal(size=(2, 4, 768)).astype(np.float32)
    V[rng.random(V.shape) < 0.3] = -np.inf
    ids = np.stack([ascending_blocks(rng, 96, c, 40) for c in (40, 30, 1, 0)])
    scores = rng.normal(size=(4, 320)).astype(np.float32)
    for bad in (np.nan, -np.inf, np.inf, np.finfo(np.float32).min):
        scores[rng.random(scores.shape) < 0.1] = bad
    N = np.array([768, 700, 300, 1], np.int32)
    arguments = (V, D_rev, scores, ids, N)

    def call(*x, named="mosaic"):
        return pallas_kernels.ema_scatter(*x, block_size=8, decay=0.5, implementation=named)

    if mapped:
        twice = [np.stack([x, x[::-1]]) for x in arguments]
        got = [x[1, ::-1] for x in interpret(jax.vmap(call), *twice)]
    else:
        got = interpret(call, *arguments)
    for mine, reference in zip(got, call(*arguments, named="xla"), strict=True):
        np.testing.assert_allclose(mine, reference, atol=1e-6)


def test_top_k_and_observe(monkeypatch):
    from pallas_kernels.mosaic import observe, topk

    monkeypatch.setattr(topk, "WARPGROUPS", 1)
    monkeypatch.setattr(observe, "WARPGROUPS", 1)
    monkeypatch.setattr(observe, "TILE", 256)
    rng = np.random.default_rng(0)
    V, D_rev = rng.normal(size=(2, 3, 768)).astype(np.float32)
    ids = np.stack([ascending_blocks(rng, 48, c, 20) for c in (20, 5, 1)])
    N = np.array([768, 500, 10], np.int32)
    scores = rng.normal(size=(3, 320)).astype(np.float32)
    counts = np.sum(ids >= 0, axis=1)
    scores[np.repeat(ids, 16, 1) < 0] = -np.inf

    def call(*x, named="mosaic"):
        return pallas_kernels.top_k_and_observe(
            x[0], 50, *x[1:5], num_blocks=None if len(x) < 6 else x[5],
            block_size=16, decay=0.25, implementation=named,
        )  # fmt: skip

    reference = call(scores, V, D_rev, ids, N, named="xla")
    for arguments in ((scores,), (unwritten(scores, counts * 16)[0], counts.astype(np.int32))):
        got = interpret(call, arguments[0], V, D_rev, ids, N, *arguments[1:])
        for mine, expected in zip(got, reference, strict=True):
            np.testing.assert_allclose(mine, expected, atol=1e-6)


@pytest.mark.parametrize("blocks,thread_blocks", [("all", 99), ("some", 99), ("some", 2)])
def test_index_scores(blocks, thread_blocks, monkeypatch):
    from pallas_kernels.mosaic import scoring

    monkeypatch.setattr(scoring, "RING_BYTES", 3 * 64 * 128)
    monkeypatch.setattr(scoring, "LONGEST_RUN", 5)
    monkeypatch.setattr(scoring, "MOST_THREAD_BLOCKS", thread_blocks)
    rng = np.random.default_rng(0)
    B, R, n, x, S = 3, 2, 8, 64, 448
    q, keys = rng.normal(size=(B, R, n, x)), rng.normal(size=(B, S, x))
    q, keys = jnp.asarray(q, jnp.bfloat16), jnp.asarray(keys, jnp.bfloat16)
    w = rng.normal(size=(B, R, n)).astype(np.float32)
    scales = np.exp2(rng.integers(-3, 3, (B, S))).astype(np.float32)
    num_slots = np.array([[S - 1, S], [65, 66], [0, 1]], np.int32)
    ids = None
    if blocks == "some":
        ids = np.array([[0, 1, 3, 4, 6, 7], [0, 1, 3, -1, -1, -1], [0] + [-1] * 5], np.int32)
        ids[0, 5] = -1

    def call(*x, named="mosaic"):
        return pallas_kernels.index_scores(
            *x, block_ids=ids, key_scales=scales, implementation=named
        )

    arguments = (q, w, keys, num_slots)
    reference = call(*arguments, named="xla")
    for mine, expected in zip(interpret(call, *arguments), reference, strict=True):
        np.testing.assert_allclose(mine, expected, atol=1e-4)

    def call_without_filling(*x):
        return pallas_kernels.index_scores(
            *x, block_ids=ids, key_scales=scales, fill=False, implementation="mosaic"
        )

    written = np.arange(S)[None] < -(-num_slots.max(1)[:, None] // 64) * 64
    if ids is not None:
        written = np.repeat(ids >= 0, 64, axis=1)
    written = np.broadcast_to(written[:, None], reference[0].shape)
    got = interpret(call_without_filling, *arguments)
    for mine, expected, known in zip(got, reference, (written, written[..., ::16]), strict=True):
        np.testing.assert_allclose(mine[known], expected[known], atol=1e-4)


@pytest.mark.parametrize("tokens,m,iterations", [((8, 1), 4, 20), ((130,), 2, 3), ((), 8, 1)])
def test_mixing_weights(tokens, m, iterations):
    case = mixing_case(np.random.default_rng(m), tokens, m)
    call = lambda *x: pallas_kernels.mixing_weights(  # noqa: E731
        *x, iterations=iterations, **MIXING, implementation="mosaic"
    )
    got = interpret(call, *case)
    if tokens:
        mapped = interpret(jax.vmap(call, in_axes=(0, 0, None, None)), *case)
        for mine, theirs in zip(mapped, got, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-6)
    expected = brute_force.mixing_weights(*case, iterations=iterations, **MIXING)
    for mine, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("slots", ["none", "listed", "first"])
def test_sparse_attention(slots, monkeypatch):
    """Shares of one tile and of all tiles, lists that end inside a tile, and empty ones."""
    from pallas_kernels.mosaic import attention

    monkeypatch.setattr(
        attention, "tiles_each", lambda blocks, tiles: 1 if slots == "listed" else 3
    )
    case = attention_case(np.random.default_rng(0), 2, 3, 64, 128)
    q, window, ids, sink, table, slot_ids, num_slots = case
    q, window, table = (jnp.asarray(x, jnp.bfloat16) for x in (q, window, table))
    window, table = window.at[:, -1].set(jnp.nan), table.at[:, -1].set(jnp.nan)
    ids, slot_ids = (np.where(x == n - 1, 0, x) for x, n in ((ids, 70), (slot_ids, 200)))
    named = {
        "none": {},
        "listed": {"slots": table, "slot_ids": slot_ids},
        "first": {"slots": table, "num_slots": np.minimum(num_slots, 199)},
    }[slots]

    def call(q, implementation):
        return pallas_kernels.sparse_attention(
            q, window, ids, sink, scale=0.1, implementation=implementation, **named
        )

    got = interpret(lambda q: call(q, "mosaic"), q)
    # The kernel reads only what is listed; the reference multiplies the rest by zero.
    window, table = (jnp.nan_to_num(x) for x in (window, table))
    named = {name: table if name == "slots" else x for name, x in named.items()}
    np.testing.assert_allclose(got, call(q, "xla"), atol=0.02)
