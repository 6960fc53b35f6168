"""A draft's rows: shared blocks from one state, and only the accepted rows remembered."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from spin_closed_loop import closed_loop_step

from spin_jax import (
    SpinConfig,
    init_spin,
    observe_rows,
    reset,
    select_blocks,
    select_rows,
    slots_of,
    steady_capacity,
)

CFG = SpinConfig(block_size=4, sparsity=0.6, exploration=0.2)
SLOTS, TOP_K, BATCH, ROWS = 64, 4, 6, 4


def blocks(selection):
    return [set(row[row >= 0].tolist()) for row in np.asarray(selection.block_ids)]


@pytest.fixture(scope="module")
def warm():
    """A state some steps on, and the slots that four rows see from there."""
    state = init_spin(CFG, batch=BATCH, max_slots=SLOTS, key=jax.random.key(0))
    rng = np.random.default_rng(0)
    start = np.array([40, 55, 60, 13, 33, 47])
    for t in range(4):
        scores = jnp.asarray(rng.normal(size=(BATCH, SLOTS)), jnp.float32)
        _, state = closed_loop_step(state, jnp.asarray(start - 4 + t), scores, CFG, TOP_K)
    return state, jnp.asarray(start[:, None] + np.array([0, 0, 1, 1]))


def test_union_of_the_rows_own_selections(warm):
    state, num_slots = warm
    selection, after = select_rows(state, num_slots, CFG, top_k=TOP_K)
    own = []
    for row in range(ROWS):
        one, advanced = select_blocks(state, num_slots[:, row], CFG, top_k=TOP_K)
        own.append(blocks(one))
    assert blocks(selection) == [set().union(*rows) for rows in zip(*own, strict=True)]
    assert selection.count.tolist() == [len(x) for x in blocks(selection)]
    ids = np.asarray(selection.block_ids)
    assert all((np.diff(row[row >= 0]) > 0).all() for row in ids)
    np.testing.assert_array_equal(jax.random.key_data(after.key), jax.random.key_data(advanced.key))
    # Rows with the same N choose the same, the shared draw included.
    assert own[0] == own[1] and own[2] == own[3]
    assert any(x != y for x, y in zip(own[0], own[2], strict=True))


def test_row_zero_sharing(warm):
    state, num_slots = warm
    selection, _ = select_rows(state, num_slots, CFG, top_k=TOP_K, mode="row0")
    one, _ = select_blocks(state, num_slots[:, 0], CFG, top_k=TOP_K)
    np.testing.assert_array_equal(selection.block_ids, one.block_ids)


@pytest.mark.parametrize("mode", ["union", "row0"])
def test_first_step_is_unpruned_for_all_rows(warm, mode):
    state, num_slots = warm
    state = reset(state, jnp.array([True, False, True, False, False, True]))
    num_slots = num_slots.at[0].set(jnp.array([32, 32, 33, 33]))  # row 2 opens a block
    selection, after = select_rows(state, num_slots, CFG, top_k=TOP_K, mode=mode)
    for b in (0, 2, 5):
        assert blocks(selection)[b] == set(range(-(-int(num_slots[b, -1]) // 4)))
    assert len(blocks(selection)[1]) < 14 and not after.first.any()


def test_capacity_of_a_union(warm):
    state, num_slots = warm
    full, _ = select_rows(state, num_slots, CFG, top_k=TOP_K)
    need = int(full.count.max())
    with pytest.raises(ValueError, match=f"needs {need} blocks; pass capacity={need}"):
        select_rows(state, num_slots, CFG, top_k=TOP_K, capacity=need - 1)
    cut = jax.jit(lambda s: select_rows(s, num_slots, CFG, top_k=TOP_K, capacity=need - 1)[0])
    selection = cut(state)
    first_row, _ = select_blocks(state, num_slots[:, 0], CFG, top_k=TOP_K)
    for b in range(BATCH):
        got, want = blocks(selection)[b], blocks(full)[b]
        newest = (int(num_slots[b, -1]) - 1) // 4
        assert {0, newest} <= got <= want
        # Row 0 comes first: it may lack a block only to make room for the newest.
        assert len(blocks(first_row)[b] - got) <= (newest not in blocks(first_row)[b])
        assert len(got) == min(len(want), need - 1) == int(selection.count[b])
        assert bool(selection.truncated[b]) == (len(want) >= need)
    assert steady_capacity(CFG, SLOTS, TOP_K, rows=ROWS) >= need


@pytest.mark.parametrize("policy, reduction", [("random", "A1"), ("age", "A2")])
def test_accepted_rows_are_replayed_in_order(policy, reduction):
    """Against the formulas, entry by entry, for every number of accepted drafts."""
    cfg = SpinConfig(block_size=4, policy=policy, reduction=reduction, pooling="mean")
    rng = np.random.default_rng(2)
    state = init_spin(cfg, batch=BATCH, max_slots=SLOTS, key=jax.random.key(0))
    num_slots = np.array([[30, 30, 31, 31]] * BATCH) + np.arange(BATCH)[:, None]
    num_slots[5] = [32, 32, 33, 33]
    accepted = np.array([-1, 0, 1, 2, 3, 3])
    selection, state = select_rows(state, jnp.asarray(num_slots), cfg, top_k=TOP_K)
    slots = np.asarray(slots_of(selection.block_ids, 4))
    scores = rng.integers(-8, 8, (BATCH, ROWS, slots.shape[1])).astype(np.float32)
    after = observe_rows(
        state, selection, jnp.asarray(scores), jnp.asarray(num_slots), jnp.asarray(accepted), cfg
    )
    only = observe_rows(
        state,
        selection,
        jnp.asarray(scores),
        jnp.asarray(num_slots),
        jnp.asarray(accepted),
        cfg,
        mode="row0",
    )
    for result, stand in ((after, accepted), (only, np.minimum(accepted, 0))):
        for b in range(BATCH):
            V, D = np.zeros(SLOTS), np.zeros(SLOTS)
            for r in range(stand[b] + 1):
                n = num_slots[b, r]
                z = {i: scores[b, r, p] for p, i in enumerate(slots[b]) if 0 <= i < n}
                if reduction == "A2":
                    entries = {}
                    for j in range(-(-n // 4)):
                        entries[j] = np.mean([z[i] for i in range(4 * j, min(4 * j + 4, n))])
                    z, q = entries, (n - 1) // 4
                else:
                    q = n - 1
                for i, value in z.items():
                    V[i] = 0.5 * V[i] + 0.5 * value
                    D[q - i] = 0.5 * D[q - i] + 0.5 * value
            size = result.V.shape[1]
            np.testing.assert_allclose(result.V[b], V[:size], rtol=1e-6)
            np.testing.assert_allclose(result.D[b], D[:size], rtol=1e-6)
    np.testing.assert_array_equal(after.V[0], state.V[0])


def test_mistakes_are_named(warm):
    state, num_slots = warm
    with pytest.raises(ValueError, match="mode is 'both'; allowed: 'union', 'row0'"):
        select_rows(state, num_slots, CFG, top_k=TOP_K, mode="both")
    with pytest.raises(ValueError, match=r"num_slots has shape \[6\]; allowed: \[6, rows\]"):
        select_rows(state, num_slots[:, 0], CFG, top_k=TOP_K)
    selection, state = select_rows(state, num_slots, CFG, top_k=TOP_K)
    scores = jnp.zeros((BATCH, ROWS, 64))
    with pytest.raises(ValueError, match=r"num_accepted has shape \[2\]; allowed: \[6\]"):
        observe_rows(state, selection, scores, num_slots, jnp.zeros(2, jnp.int32), CFG)
    with pytest.raises(ValueError, match=r"scores has shape \[6, 3, 64\]"):
        observe_rows(state, selection, scores[:, 1:], num_slots, jnp.zeros(6, jnp.int32), CFG)
