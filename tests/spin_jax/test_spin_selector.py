"""SPIN inside the model's decode loop."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_params import random_params

from models.cache import init_cache
from models.generate import Session
from models.model import forward
from models.params import init_params
from models.presets import shrink, tiny_config
from models.selector import ALL_KEEP, IndexKeys, IndexQuery
from pallas_kernels import index_scores
from spin_jax import SpinConfig, SpinSelector, block_budget, recorded_miss, savings

CFG = shrink(tiny_config(), layers=3)
LENGTHS = (2, 70, 150, 31)
SPIN = SpinConfig(sparsity=0.5, block_size=4, exploration=0.2)
ROOM = {"batch": 4, "max_len": 224, "chunk": 32}


@pytest.fixture(scope="module")
def params():
    return random_params(CFG, 0)


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(1)
    return [rng.integers(0, CFG.vocab_size, n).tolist() for n in LENGTHS]


@pytest.fixture(scope="module")
def kept(params, prompts):
    session = Session(params, CFG, **ROOM)
    return session, session.turn(prompts, 40, stop=[])


@pytest.fixture(scope="module")
def pruned(params, prompts, kept):
    session = Session(params, CFG, selector=SpinSelector(SPIN), **ROOM)
    return session, session.turn(prompts, 40, stop=[])


def fresh(params, config=SPIN):
    return Session(params, CFG, selector=SpinSelector(config), **ROOM)


def test_sparsity_zero_gives_the_all_keep_tokens(params, prompts, kept):
    session = Session(params, CFG, selector=SpinSelector(SpinConfig(sparsity=0.0)), **ROOM)
    assert session.turn(prompts, 40, stop=[]) == kept[1]
    assert savings(session.selector_state, SPIN, 64, "float32").realized_sparsity == 0


def test_savings_count_the_budget_of_every_step(params, pruned):
    session, _ = pruned
    counted = savings(session.selector_state, SPIN, CFG.index_head_dim, "float32")
    scored = visible = 0
    for length in LENGTHS:
        for step in range(39):
            slots = (length + step + 1) // 4
            blocks = -(-slots // SPIN.block_size)
            visible += blocks
            first = step == 0
            scored += blocks if first else int(block_budget(blocks, SPIN, CFG.index_topk))
    layers = len(CFG.csa_layers)
    assert counted.blocks_scored == scored * layers
    assert counted.blocks_visible == visible * layers
    assert counted.bytes_read == scored * layers * 4 * CFG.index_head_dim * 4
    assert counted.realized_sparsity > 0.2


def test_permuting_the_batch_permutes_the_answers(params, prompts, pruned):
    _, answers = pruned
    order = [3, 0, 2, 1]
    permuted = fresh(params).turn([prompts[i] for i in order], 40, stop=[])
    assert permuted == [answers[i] for i in order]


def test_a_neighbour_that_finishes_changes_nothing(params, prompts, pruned):
    _, answers = pruned
    limits = [40, 1, 9, 40]
    short = fresh(params).turn(prompts, limits, stop=[])
    assert short == [a[:n] for a, n in zip(answers, limits, strict=True)]


def test_a_turn_starts_spin_anew_and_keeps_the_cache(params, prompts, pruned):
    _, answers = pruned
    two = fresh(params)
    assert two.turn(prompts, 40, stop=[]) == answers
    before = two.lengths.copy()
    two.turn([[1, 2, 3]] * 4, 2, stop=[])
    # One decode step: the first of the turn, unpruned.
    saved = savings(two.selector_state, SPIN, CFG.index_head_dim, "float32")
    slots = [(int(n) + 4 + 1) // 4 for n in before]
    assert saved.blocks_scored == saved.blocks_visible
    assert saved.blocks_visible == len(CFG.csa_layers) * sum(-(-n // 4) for n in slots)


@pytest.mark.slow
def test_a_request_that_joins_later_decodes_the_same(params, prompts, pruned):
    """Rows are prefilled and stepped by ``forward`` while others wait with no new tokens."""
    selector = SpinSelector(SPIN, unpruned=True)
    keys = jax.random.split(jax.random.key(7), 2)
    step = jax.jit(forward, static_argnames=("cfg", "selector", "last_only"))

    def run(late):
        cache = init_cache(CFG, 2, 160)
        state = selector.init(len(CFG.csa_layers), cache.layers[1].index_keys.values.shape[1], keys)
        tokens = [list(prompts[1]), list(prompts[3])]
        start = [0, late]
        chosen = [[], []]
        for t in range(24 + late):
            active = [start[b] <= t < start[b] + 24 for b in range(2)]
            for b in range(2):
                if t == start[b]:
                    for at in range(0, len(tokens[b]), 32):
                        part = tokens[b][at : at + 32]
                        block = np.zeros((2, 32), np.int32)
                        block[b, : len(part)] = part
                        count = np.zeros(2, np.int32)
                        count[b] = len(part)
                        cache = step(params, block, cache, CFG, num_new=count).cache
            feed = np.array([[(3 + 11 * (t - start[b])) % 90] for b in range(2)], np.int32)
            count = jnp.asarray(active, jnp.int32)
            out = step(
                params,
                feed,
                cache,
                CFG,
                num_new=count,
                selector=selector,
                selector_state=state,
            )
            cache = out.cache
            state = tuple(
                selector.commit(s, o, count) for s, o in zip(state, out.observations, strict=True)
            )
            for b in range(2):
                if active[b]:
                    chosen[b].append(np.asarray(out.logits[b, 0]))
        return chosen

    together, apart = run(0), run(5)
    for a, b in zip(together, apart, strict=True):
        np.testing.assert_array_equal(np.stack(a), np.stack(b))


def test_selected_slots_are_the_best_of_the_scored(params):
    """One layer's select and commit against numpy, straight from the formulas."""
    rng = np.random.default_rng(3)
    batch, slots, heads, width, top_k = 2, 64, 3, 8, 6
    config = SpinConfig(sparsity=0.5, block_size=4, policy="none")
    steady = SpinSelector(config, diagnose=8)
    # Jitted: operation by operation, each would compile on its own.
    select = jax.jit(lambda selector, *x: selector.select(*x, top_k=top_k), static_argnums=0)
    commit = jax.jit(lambda selector, *x: selector.commit(*x), static_argnums=0)
    missed = [[], []]
    keys = IndexKeys(jnp.asarray(rng.normal(size=(batch, slots, width)), jnp.float32))
    (state,) = steady.init(1, slots, jax.random.split(jax.random.key(0), batch))
    V, D = np.zeros((2, batch, slots), np.float32)
    for t in range(6):
        seen = np.array([40 + t, 17 + 2 * t])
        q = rng.normal(size=(batch, 1, heads, width)).astype(np.float32)
        w = rng.normal(size=(batch, 1, heads)).astype(np.float32)
        selector = steady.for_step(first=t == 0)
        num_slots = jnp.asarray(seen[:, None], jnp.int32)
        query = IndexQuery(jnp.asarray(q), jnp.asarray(w))
        got, observation = select(selector, query, keys, num_slots, state)
        state = commit(selector, state, observation, jnp.ones(batch, jnp.int32))
        for b in range(batch):
            n = seen[b]
            dots = np.maximum(np.asarray(keys.values[b]) @ q[b, 0].T, 0)
            z = (dots * w[b, 0]).sum(-1)
            i = np.arange(n)
            predicted = np.maximum(V[b, :n], D[b, n - 1 - i])
            blocks = -(-n // 4)
            best = [predicted[4 * j : 4 * j + 4].max() for j in range(blocks)]
            m = blocks if t == 0 else max(2, -(-top_k // 4), -(-blocks // 2))
            order = sorted(set(range(blocks)) - {0, blocks - 1}, key=lambda j: (-best[j], j))
            chosen = sorted([0, blocks - 1, *order[: m - 2]])
            scored = [s for j in chosen for s in range(4 * j, min(4 * j + 4, n))]
            expected = sorted(sorted(scored, key=lambda s: (-z[s], s))[:top_k])
            if t > 0:
                best_k = sorted(range(n), key=lambda s: (-z[s], s))[:top_k]
                missed[b].append(len(set(best_k) - set(scored)) / len(best_k))
            assert [s for s in np.asarray(got[b, 0]).tolist() if s >= 0] == expected
            for s in scored:
                V[b, s] = 0.5 * V[b, s] + 0.5 * z[s]
                D[b, n - 1 - s] = 0.5 * D[b, n - 1 - s] + 0.5 * z[s]
        np.testing.assert_allclose(np.asarray(state.spin.V), V, atol=1e-5)
        np.testing.assert_allclose(np.asarray(state.spin.D), D, atol=1e-5)
    recorded = np.asarray(state.misses)
    assert np.isnan(recorded[:, 0]).all() and np.isnan(recorded[:, 6:]).all()
    np.testing.assert_allclose(recorded[:, 1:6], missed, atol=1e-6)
    summary = recorded_miss((state,))
    assert int(summary.rows) == 10 and float(summary.mean) > 0
    np.testing.assert_allclose(float(summary.mean), np.mean(missed), atol=1e-6)


@pytest.mark.parametrize(
    "config",
    [
        SpinConfig(sparsity=0.5, block_size=4, policy="age"),
        SpinConfig(sparsity=0.5, block_size=4, reduction="A2"),
        SpinConfig(sparsity=0.5, block_size=4, state_dtype="bfloat16"),
    ],
)
def test_remembering_at_once_is_remembering_later(config):
    """The loop's selector against one that waits for ``commit``.

    One request idles every third step; the last step claims more slots than there are.
    """
    rng = np.random.default_rng(5)
    batch, slots = 3, 64
    keys = IndexKeys(jnp.asarray(rng.normal(size=(batch, slots, 8)), jnp.float32))
    (state,) = SpinSelector(config).init(1, slots, jax.random.split(jax.random.key(0), batch))
    states = [state, state]
    select = jax.jit(lambda selector, *x: selector.select(*x, top_k=6), static_argnums=0)
    commit = jax.jit(lambda selector, *x: selector.commit(*x), static_argnums=0)
    for t in range(7):
        stands = np.array([1, 1, t % 3 > 0])
        seen = np.array([40, 17, 30]) + t if t < 6 else np.array([64, 70, 99])
        seen = jnp.asarray(seen * stands, jnp.int32)
        query = IndexQuery(
            jnp.asarray(rng.normal(size=(batch, 1, 3, 8)), jnp.float32),
            jnp.asarray(rng.normal(size=(batch, 1, 3)), jnp.float32),
        )
        found = []
        for i, selector in enumerate(
            SpinSelector(config, at_once=wait, unpruned=t == 0) for wait in (True, False)
        ):
            chosen, observation = select(selector, query, keys, seen[:, None], states[i])
            assert (observation.scores is None) == selector.at_once
            states[i] = commit(selector, states[i], observation, jnp.asarray(stands, jnp.int32))
            found.append(chosen)
        np.testing.assert_array_equal(*found)
    plain = [
        [jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
         for x in jax.tree.leaves(state)]
        for state in states
    ]  # fmt: skip
    for mine, theirs in zip(*plain, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_the_steady_step_scores_gathers_and_sorts_no_full_context(params):
    """Nothing of size slots x heads remains, nor a sort or gather over all slots."""
    cfg = CFG
    max_len = 32768
    slots = max_len // 4
    selector = SpinSelector(SpinConfig(sparsity=0.5, block_size=64))
    cache = jax.eval_shape(lambda: init_cache(cfg, 1, max_len))
    keys = jax.random.split(jax.random.key(0), 1)
    state = jax.eval_shape(lambda: selector.init(len(cfg.csa_layers), slots, keys))

    def step(selector):
        def run(params, tokens, cache, state):
            out = forward(params, tokens, cache, cfg, selector=selector, selector_state=state)
            one = jnp.ones((1,), jnp.int32)
            return (
                out.logits,
                out.cache,
                tuple(
                    selector.commit(s, o, one) for s, o in zip(state, out.observations, strict=True)
                ),
            )

        shapes = jax.eval_shape(lambda: init_params(cfg, jax.random.key(0)))
        tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
        jitted = jax.jit(run, donate_argnums=(2, 3))
        return jitted.lower(shapes, tokens, cache, state).compile().as_text()

    def sizes(text, op):
        found = []
        for dims in re.findall(rf"= \(?\w+\[([\d,]*)\][^=]* {op}\(", text):
            found.append(int(np.prod([int(d) for d in dims.split(",") if d] or [1])))
        return found

    def largest_scores(text):
        """The largest float array that has an axis of the heads and one of many slots."""
        heads = cfg.index_n_heads
        most = 0
        for dims in re.findall(r"f32\[([\d,]+)\]", text):
            axes = [int(d) for d in dims.split(",")]
            if axes[-1] == heads or heads in axes[1:]:
                most = max(most, int(np.prod(axes)))
        return most

    steady, first = step(selector), step(selector.for_step(first=True))
    heads = cfg.index_n_heads
    assert largest_scores(first) >= slots * heads > largest_scores(steady)
    assert max(sizes(steady, "sort") + [0]) < slots
    # Half of the blocks are gathered, never all.
    gathered = max(sizes(steady, "gather") + [0])
    assert gathered <= slots // 2 * cfg.index_head_dim + 64 * cfg.index_head_dim


def test_states_and_keys_that_do_not_fit_are_named():
    selector = SpinSelector(SpinConfig(block_size=4))
    with pytest.raises(ValueError, match=r"keys are uint32\[2, 2\]; allowed: typed keys"):
        selector.init(1, 64, jnp.zeros((2, 2), jnp.uint32))
    with pytest.raises(ValueError, match="one a request"):
        selector.init(1, 64, jax.random.key(0))
    (state,) = selector.init(1, 64, jax.random.split(jax.random.key(0), 2))
    query = IndexQuery(jnp.zeros((2, 1, 1, 8)), jnp.zeros((2, 1, 1)))
    with pytest.raises(ValueError, match="keys of 32 slots and a state of 64"):
        keys = IndexKeys(jnp.zeros((2, 32, 8)))
        selector.select(query, keys, jnp.ones((2, 1), jnp.int32), state, top_k=4)
    with pytest.raises(ValueError, match="staleness_epsilon is inf"):
        SpinConfig(policy="staleness", staleness_epsilon=float("inf"))


def scores_with_garbage(*arguments, fill=True, block_ids=None, block_size=64, **more):
    """As the kernel may leave them: anything where it writes nothing."""
    results = index_scores(*arguments, block_ids=block_ids, block_size=block_size, **more)
    if fill:
        return results
    place = np.arange(results[0].shape[2])
    if block_ids is None:
        unwritten = place >= -(-np.max(np.asarray(arguments[3]), axis=1)[:, None] // 64) * 64
    else:
        unwritten = np.repeat(np.asarray(block_ids) < 0, block_size, axis=1)
    garbage = np.where(place % 3, np.inf, np.nan).astype(np.float32)
    unwritten, garbage = unwritten[:, None], garbage[None, None]
    scores = jnp.where(unwritten, garbage, results[0])
    return scores, jnp.where(unwritten[..., ::16], garbage[..., ::16], results[1])


@pytest.mark.parametrize(
    "selector,rows,at_once",
    [(ALL_KEEP, 2, True)]
    + [(SpinSelector(SpinConfig(sparsity=0.6)), *x) for x in ((1, True), (1, False), (3, True))],
)
def test_what_scoring_leaves_unwritten_is_never_read(selector, rows, at_once, monkeypatch):
    B, S, K = 3, 1024, 40
    rng = np.random.default_rng(0)
    keys = IndexKeys(jnp.asarray(rng.normal(size=(B, S, 8)), jnp.float32))
    steps = [
        IndexQuery(jnp.asarray(rng.normal(size=(B, rows, 2, 8)), jnp.float32),
                   jnp.asarray(rng.normal(size=(B, rows, 2)), jnp.float32))
        for _ in range(3)
    ]  # fmt: skip

    def run():
        [state] = selector.init(1, S, jax.random.split(jax.random.key(0), B))
        results = []
        for i, query in enumerate(steps):
            seen = jnp.array([[S - 9 + i], [200 + i], [0]]) + jnp.arange(rows)[None] // 2
            used = selector.for_step(first=not i)
            if isinstance(used, SpinSelector):
                used = dataclasses.replace(used, at_once=at_once)
            [prepared] = used.prepare((state,), seen, top_k=K)
            slots, observation = used.select(query, keys, seen, prepared, top_k=K)
            state = used.commit(state, observation, jnp.array([1, rows, 1]))
            results.append(slots)
        return jax.tree.leaves((results, state))

    expected = run()
    for module in ("models.selector", "spin_jax.selector"):
        monkeypatch.setattr(f"{module}.index_scores", scores_with_garbage)
    for mine, theirs in zip(run(), expected, strict=True):
        if jnp.issubdtype(mine.dtype, jax.dtypes.prng_key):
            mine, theirs = jax.random.key_data(mine), jax.random.key_data(theirs)
        np.testing.assert_array_equal(mine, theirs)
