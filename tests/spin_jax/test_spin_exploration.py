"""Explored blocks are uniform, reproducible, and belong to the request and nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
from spin_closed_loop import closed_loop_step

from spin_jax import SpinConfig, init_spin, reset, select_blocks

CFG = SpinConfig(block_size=4, sparsity=0.5, exploration=0.3)


def steady(cfg, batch, max_slots, key, seed=0):
    """A state past its first step, with the same predictions for every width."""
    state = init_spin(cfg, batch=batch, max_slots=max_slots, key=key)
    noise = np.random.default_rng(seed).normal(size=(batch, 64)).astype(np.float32)
    V = jnp.zeros((batch, max_slots)).at[:, :64].set(noise[:, :max_slots])
    return state.replace(V=V, first=jnp.zeros(batch, bool))


def test_draws_are_uniform_and_without_replacement():
    """Chi-square over which of 15 free blocks are drawn, 3 a step, 4,000 steps.

    Counts drawn without replacement vary less than multinomial ones, by (15 - 3) / (15 - 1), so
    the statistic is divided by that; it then has 14 degrees of freedom.
    """
    cfg = SpinConfig(block_size=1, sparsity=0.5, exploration=0.25)
    blocks, draws = 24, 4000
    state = init_spin(cfg, batch=1, max_slots=blocks, key=jax.random.key(11))
    best = jnp.arange(blocks) % 3 == 0
    state = state.replace(V=best[None].astype(jnp.float32), first=jnp.zeros(1, bool))

    @jax.jit
    def loop(state):
        def step(state, _):
            selection, state = select_blocks(state, jnp.array([blocks]), cfg, top_k=1)
            return state, (selection.block_ids[0], selection.count[0])

        return jax.lax.scan(step, state, None, length=draws)[1]

    ids, count = map(np.asarray, loop(state))
    assert (count == 12).all()
    drawn = np.zeros((draws, blocks))
    for t, row in enumerate(ids):
        drawn[t, row[row >= 0]] = 1
    # 0, 3, ..., 21 and the newest, 23, are the nine that are chosen.
    always = [*range(0, blocks, 3), blocks - 1]
    assert (drawn[:, always] == 1).all()
    free = [j for j in range(blocks) if j not in always]
    counts = drawn[:, free].sum(axis=0)
    size, each = len(free), 3
    assert counts.sum() == each * draws
    expected = each * draws / size
    statistic = ((counts - expected) ** 2 / expected).sum() * (size - 1) / (size - each)
    assert statistic < 36.12  # the 99.9% quantile
    # One step tells nothing of the next: they share no more blocks than chance has them share.
    shared = (drawn[1:, free] * drawn[:-1, free]).sum(axis=1).mean()
    mean, sd = each * each / size, np.sqrt(each * each / size / draws)
    assert abs(shared - mean) < 4 * sd


def test_same_key_same_draws_other_key_other_draws():
    def ids(seed):
        state = steady(CFG, 4, 64, jax.random.key(seed))
        out = []
        for _ in range(4):
            selection, state = select_blocks(state, jnp.array([40, 64, 55, 61]), CFG, top_k=4)
            out.append(np.asarray(selection.block_ids))
        return np.stack(out)

    np.testing.assert_array_equal(ids(0), ids(0))
    assert (ids(0) != ids(1)).any()
    assert (ids(0)[0] != ids(0)[1]).any()  # the key moves on


def test_permuting_the_rows_permutes_the_result():
    num_slots = jnp.array([40, 64, 23, 0])
    order = jnp.array([2, 0, 3, 1])
    state = steady(CFG, 4, 64, jax.random.key(2))
    selection, after = select_blocks(state, num_slots, CFG, top_k=4)
    shuffled = jax.tree.map(lambda x: x[order], state)
    selection2, after2 = select_blocks(shuffled, num_slots[order], CFG, top_k=4)
    np.testing.assert_array_equal(selection.block_ids[order], selection2.block_ids)
    np.testing.assert_array_equal(selection.count[order], selection2.count)
    np.testing.assert_array_equal(
        jax.random.key_data(after.key[order]), jax.random.key_data(after2.key)
    )


def test_draws_depend_on_neither_batch_nor_allocation():
    keys = jax.random.split(jax.random.key(3), 4)
    num_slots = jnp.array([40, 64, 55, 61])
    state = steady(CFG, 4, 64, keys)
    together, _ = select_blocks(state, num_slots, CFG, top_k=4)
    for row in range(4):
        alone = jax.tree.map(lambda x, row=row: x[row : row + 1], state)
        # A larger window holds D further back.
        pad = jnp.zeros((1, 137 - 64))
        wide = alone.replace(
            V=jnp.concatenate([alone.V, pad], 1), D_rev=jnp.concatenate([pad, alone.D_rev], 1)
        )
        for one in (alone, wide):
            selection, _ = select_blocks(one, num_slots[row : row + 1], CFG, top_k=4)
            ids = np.asarray(selection.block_ids[0, :16])
            np.testing.assert_array_equal(ids, together.block_ids[row])


def test_a_key_gives_each_row_the_key_of_its_number():
    key = jax.random.key(9)
    wide = init_spin(CFG, batch=5, max_slots=64, key=key)
    narrow = init_spin(CFG, batch=2, max_slots=64, key=key)
    np.testing.assert_array_equal(
        jax.random.key_data(wide.key[:2]), jax.random.key_data(narrow.key)
    )
    own = init_spin(CFG, batch=5, max_slots=64, key=wide.key)
    np.testing.assert_array_equal(jax.random.key_data(own.key), jax.random.key_data(wide.key))


def test_a_neighbour_that_idles_or_joins_later_changes_nothing():
    """A row that sees no slot yet neither draws nor spends its first step."""
    start = init_spin(CFG, batch=2, max_slots=64, key=jax.random.key(5))
    _, after = select_blocks(start, jnp.array([0, 40]), CFG, top_k=4)
    moved = jax.random.key_data(start.key) != jax.random.key_data(after.key)
    assert moved.any(axis=1).tolist() == [False, True] and after.first.tolist() == [True, False]

    scores = np.random.default_rng(4).normal(size=(12, 2, 64)).astype(np.float32)

    def run(lengths, resets=None):
        state = init_spin(CFG, batch=2, max_slots=64, key=jax.random.key(5))
        out = []
        for t, n in enumerate(lengths):
            if resets and t in resets:
                state = reset(state, jnp.array([False, True]), resets[t])
            selection, state = closed_loop_step(state, jnp.array(n), scores[t], CFG, 4)
            out.append(np.asarray(selection.block_ids))
        return np.stack(out)

    both = run([(40 + t, 50 + t) for t in range(12)])
    late = run([(40 + t, 0 if t < 5 else 30 + t) for t in range(12)])
    np.testing.assert_array_equal(both[:, 0], late[:, 0])
    assert (late[5, 1] >= 0).sum() == 9  # ceil(35 / 4): its first step is unpruned
    # A request that takes over a row with its own key draws as it would in a fresh state.
    key = jax.random.key(77)
    reused = run([(40, 50 + t if t < 4 else 26 + t) for t in range(8)], {4: key})
    other = run([(40, 0 if t < 4 else 26 + t) for t in range(8)], {4: key})
    np.testing.assert_array_equal(reused[4:, 1], other[4:, 1])
