"""SPIN while drafts are verified: rows keep to their own blocks, rejected rows leave no trace."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from spin_brute_force import Request, highest

from models.selector import IndexKeys, IndexQuery
from spin_jax import SpinConfig, SpinSelector, savings

SPIN = SpinConfig(sparsity=0.5, block_size=4, exploration=0.25)
BATCH, ROWS, SLOTS, TOP_K, WIDTH = 4, 4, 96, 8, 8


@pytest.fixture(scope="module")
def keys():
    """Index keys of small integers: every score is exact, in any order of summation."""
    rng = np.random.default_rng(0)
    return rng.integers(-3, 4, (BATCH, SLOTS, WIDTH)).astype(np.float32)


def queries(rng, rows=ROWS):
    q = rng.integers(-3, 4, (BATCH, rows, 2, WIDTH)).astype(np.float32)
    w = rng.integers(-2, 4, (BATCH, rows, 2)).astype(np.float32)
    return q, w


def scores_of(q, w, keys):
    return np.einsum("brn,brns->brs", w, np.maximum(np.einsum("brnx,bsx->brns", q, keys), 0))


def programs(selector, keys):
    def select(q, w, num_slots, state):
        return selector.select(
            IndexQuery(q, w), IndexKeys(jnp.asarray(keys)), num_slots, state, top_k=TOP_K
        )

    return jax.jit(select), jax.jit(selector.commit)


def draws(count):
    return jax.random.split(jax.random.key(5), count)


@pytest.mark.parametrize(
    ("config", "mask", "update"),
    [
        (SPIN, "union", "prefix"),
        (dataclasses.replace(SPIN, policy="age"), "union", "prefix"),
        (dataclasses.replace(SPIN, reduction="A2"), "union", "row0"),
        (SPIN, "row0", "row0"),
    ],
)
def test_rows_equal_the_oracle(keys, config, mask, update):
    """Sets of blocks and slots, and the state, for acceptance of none, some, all, by request."""
    selector = SpinSelector(config, mask=mask, update=update)
    first, steady = (programs(selector.for_step(first=f), keys) for f in (True, False))
    (state,) = selector.init(1, SLOTS, draws(BATCH))
    oracle = [Request(config, TOP_K) for _ in range(BATCH)]
    rng = np.random.default_rng(1)
    position = np.array([43, 90, 170, 211])
    scored = visible = verified = identical = 0
    for t in range(30):
        seen = (position[:, None] + np.arange(ROWS)[None] + 1) // 4
        q, w = queries(rng)
        z = scores_of(q, w, keys)
        select, commit = first if t == 0 else steady
        slots, observation = select(q, w, jnp.asarray(seen, jnp.int32), state)
        num_rows = rng.integers(0, ROWS + 1, BATCH) if t else np.full(BATCH, 2)
        state = commit(state, observation, jnp.asarray(num_rows, jnp.int32))
        chosen = observation.selection
        for b, request in enumerate(oracle):
            unpruned, own = request.first, []
            ids = np.asarray(chosen.block_ids[b])
            for r in range(ROWS):
                request.first = unpruned
                n = int(seen[b, 0 if mask == "row0" and not unpruned else r])
                n = int(seen[b, -1]) if mask == "row0" and unpruned else n
                certain, open_, explored = request.select(n)
                got = set(ids[np.asarray(chosen.rows[b, r])].tolist())
                assert certain <= got and got - certain <= open_
                assert len(got) == len(certain) + explored
                own.append(got)
                candidates = {
                    i: z[b, r, i] for j in got for i in request.block_slots(j, int(seen[b, r]))
                }
                wanted = sorted(highest(candidates, TOP_K))
                row = np.asarray(slots[b, r])
                assert row[row >= 0].tolist() == wanted
            assert set(ids[ids >= 0].tolist()) == set().union(*own)
            for r in range(num_rows[b] if update == "prefix" else min(num_rows[b], 1)):
                blocks = {j for j in own[r] if j * 4 < seen[b, r]}
                request.observe(int(seen[b, r]), blocks, z[b, r])
            request.first = unpruned and num_rows[b] == 0
            if num_rows[b]:
                scored += len(set().union(*own))
                visible += -(-int(seen[b, -1]) // 4)
                verified += not unpruned
                identical += not unpruned and all(x == own[0] for x in own)
            for entries, array in ((request.V, state.spin.V[b]), (request.D, state.spin.D[b])):
                dense = np.zeros(array.shape[0], np.float32)
                dense[list(entries)] = list(entries.values())
                np.testing.assert_array_equal(array, dense)
        position = position + num_rows
    saved = savings((state,), config, WIDTH, "float32")
    assert (saved.blocks_scored, saved.blocks_visible) == (scored, visible)
    assert (saved.verified, saved.identical) == (verified, identical)
    assert identical == verified if mask == "row0" else 0 < identical < verified


@pytest.mark.parametrize("policy", ["random", "age"])
def test_rejected_drafts_cost_nothing_but_time(keys, policy):
    """Rejected at every step, slots and state are bit for bit those of never drafting."""
    selector = SpinSelector(dataclasses.replace(SPIN, policy=policy))
    drafting, plain = (
        [programs(selector.for_step(first=f), keys) for f in (True, False)] for _ in range(2)
    )
    (one,) = selector.init(1, SLOTS, draws(BATCH))
    (two,) = selector.init(1, SLOTS, draws(BATCH))
    rng = np.random.default_rng(2)
    position = np.array([0, 2, 140, 200])  # also where only rejected rows see a slot
    ones = jnp.ones(BATCH, jnp.int32)
    for t in range(25):
        q, w = queries(rng)
        seen = jnp.asarray((position[:, None] + np.arange(ROWS)[None] + 1) // 4, jnp.int32)
        select, commit = drafting[t > 0]
        rows, observation = select(q, w, seen, one)
        one = commit(one, observation, ones)
        select, commit = plain[t > 0]
        row, observation = select(q[:, :1], w[:, :1], seen[:, :1], two)
        two = commit(two, observation, ones)
        np.testing.assert_array_equal(rows[:, :1], row)
        position = position + 1
    for x, y in zip(jax.tree.leaves(one.spin), jax.tree.leaves(two.spin), strict=True):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_array_equal(x, y)


def test_a_drafts_miss_is_of_each_rows_own_blocks(keys):
    selector = SpinSelector(SPIN, diagnose=64)
    select, commit = programs(selector, keys)
    first, _ = programs(selector.for_step(first=True), keys)
    (state,) = selector.init(1, SLOTS, draws(BATCH))
    rng = np.random.default_rng(3)
    seen = jnp.asarray([[40, 40, 41, 41]] * BATCH, jnp.int32)
    _, observation = first(*queries(rng), seen, state)
    state = commit(state, observation, jnp.full(BATCH, 4, jnp.int32))
    assert np.isnan(state.misses).all()
    q, w = queries(rng)
    _, observation = select(q, w, seen, state)
    state = commit(state, observation, jnp.full(BATCH, 3, jnp.int32))
    z, chosen = scores_of(q, w, keys), observation.selection
    for b in range(BATCH):
        for r in range(3):
            n = int(seen[b, r])
            best = highest(dict(enumerate(z[b, r, :n])), TOP_K)
            own = set(np.asarray(chosen.block_ids[b])[np.asarray(chosen.rows[b, r])].tolist())
            missed = sum(i // 4 not in own for i in best) / len(best)
            np.testing.assert_allclose(state.misses[b, 4 + r], missed, rtol=1e-6)
    assert np.isnan(state.misses[:, 7:]).all()


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="mask is 'own'; allowed: 'union', 'row0'"):
        SpinSelector(SPIN, mask="own")
    with pytest.raises(ValueError, match="update is 'all'; allowed: 'prefix', 'row0'"):
        SpinSelector(SPIN, update="all")
