"""Every reduction, pooling and policy against loops in numpy, set for set, in closed loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from spin_brute_force import Request

from spin_jax import SpinConfig, init_spin, observe, reset, select_blocks, steady_capacity

BATCH, STEPS, SLOTS = 48, 24, 72

VARIANTS = [("A1", "max"), ("A1", "top4"), ("A1", "mean"), ("A0", "max")]
VARIANTS += [("A2", "max"), ("A2", "top4"), ("A2", "mean")]
# Sparsity, exploration, rounding, block size, K, unobserved, scores with NaN.
SETTINGS = {
    "random": [(0.5, 0.2, "floor", 4, 9, "zero", False), (0.95, 0.5, "ceil", 1, 3, "-inf", True)],
    "none": [(0.7, 0.3, "floor", 7, 1, "zero", True)],
    "staleness": [(0.6, 0.35, "nearest", 3, 5, "zero", False)],
    "age": [(0.8, 0.4, "ceil", 2, 8, "-inf", False)],
}
EDGES = [
    (("A1", "max"), "random", (0.0, 0.05, "floor", 4, 5, "zero", False)),
    (("A1", "max"), "random", (0.333, 0.05, "nearest", 128, 5, "zero", False)),
    (("A1", "top4"), "none", (0.25, 0.05, "nearest", 16, 20, "-inf", False)),
    (("A0", "max"), "staleness", (0.9, 0.1, "ceil", 5, 4, "-inf", True)),
    (("A1", "max"), "staleness", (0.9, 0.5, "ceil", 1, 4, "-inf", True)),
    (("A2", "max"), "age", (0.45, 0.5, "ceil", 1, 100, "zero", True)),
]
QUICK = {
    "random": [("A1", "max"), ("A1", "mean"), ("A0", "max"), ("A2", "top4")],
    "none": [("A2", "mean"), ("A2", "top4")],
    "staleness": [("A1", "top4")],
    "age": [("A1", "max"), ("A2", "max")],
}
CASES = [pytest.param(*case, id=str(case)) for case in EDGES]
for policy, settings in SETTINGS.items():
    for setting in settings:
        for variant in VARIANTS:
            # Every policy and every variant by default, all of their pairs with -m slow.
            marks = () if variant in QUICK[policy] else pytest.mark.slow
            case = (variant, policy, setting)
            CASES.append(pytest.param(*case, id=str(case), marks=marks))


def traces(rng, bad_scores):
    """Contexts that start ragged and grow by 0, 1 or several slots; coarse scores, so many ties.

    Scores are small integers and resets come every 10 steps at most: all averages and sums are
    exact in float32, in whatever order they are added.
    """
    start = rng.integers(0, SLOTS // 2, BATCH)
    grow = rng.choice([0, 0, 1, 1, 1, 2, 5], (STEPS, BATCH))
    num_slots = np.minimum(start + np.cumsum(grow, axis=0), SLOTS)
    scores = rng.integers(-4, 3, (STEPS, BATCH, SLOTS)).astype(np.float32)
    # Slots that stay important, so that prediction is not all noise.
    scores += 3 * (rng.random((1, BATCH, SLOTS)) < 0.1)
    if bad_scores:
        bad = rng.choice([np.nan, np.inf, -np.inf, np.finfo(np.float32).min], scores.shape)
        scores = np.where(rng.random(scores.shape) < 0.05, bad, scores).astype(np.float32)
    phase = rng.integers(0, 10, BATCH)
    resets = (np.arange(STEPS)[:, None] + phase) % 10 == 9
    return num_slots.astype(np.int32), scores, resets


def run(cfg, top_k, num_slots, scores, resets):
    state = init_spin(cfg, batch=BATCH, max_slots=SLOTS, key=jax.random.key(1))

    @jax.jit
    def loop(state, inputs):
        def step(state, inputs):
            n, z, again = inputs
            state = reset(state, again)
            selection, state = select_blocks(state, n, cfg, top_k=top_k)
            ids = selection.block_ids[..., None]
            slot = (ids * cfg.block_size + jnp.arange(cfg.block_size)[None, None]).reshape(
                BATCH, -1
            )
            seen = (slot >= 0) & (slot < n[:, None])
            z = jnp.take_along_axis(z, jnp.clip(slot, 0, SLOTS - 1), axis=1)
            # What stands beyond the visible slots must not matter.
            state = observe(state, selection, jnp.where(seen, z, 1e30), n, cfg)
            return state, (selection.block_ids, selection.count, selection.truncated)

        return jax.lax.scan(step, state, inputs)

    state, selections = loop(state, (num_slots, scores, resets))
    return state, [np.asarray(x) for x in selections]


@pytest.mark.parametrize("variant, policy, setting", CASES)
def test_equals_loops(variant, policy, setting):
    sparsity, exploration, rounding, block_size, top_k, unobserved, bad = setting
    cfg = SpinConfig(
        sparsity=sparsity,
        exploration=exploration,
        exploration_rounding=rounding,
        block_size=block_size,
        policy=policy,
        reduction=variant[0],
        pooling=variant[1],
        unobserved=unobserved,
    )
    rng = np.random.default_rng([block_size, top_k, round(1000 * sparsity)])
    num_slots, scores, resets = traces(rng, bad)
    state, (ids, count, truncated) = run(cfg, top_k, num_slots, scores, resets)
    assert not truncated.any()

    requests = [Request(cfg, top_k) for _ in range(BATCH)]
    pruned = explored = 0
    most = steady_capacity(cfg, SLOTS, top_k)
    for t in range(STEPS):
        for r, request in enumerate(requests):
            if resets[t, r]:
                request.reset()
            n = int(num_slots[t, r])
            steady = not request.first
            certain, free, e = request.select(n)
            got = ids[t, r]
            chosen = got[got >= 0].tolist()
            assert chosen == sorted(set(chosen)) and (got[len(chosen) :] == -1).all()
            drawn = set(chosen) - certain
            assert certain <= set(chosen) and drawn <= free, (t, r, certain, chosen)
            assert len(drawn) == e and count[t, r] == len(certain) + e, (t, r, e, drawn)
            assert not steady or len(chosen) <= most
            pruned += bool(set(range(-(-n // block_size))) - set(chosen))
            explored += len(drawn)
            request.observe(n, set(chosen), scores[t, r])
    # Unless there is nothing to prune, the case has to have pruned and drawn.
    if sparsity and block_size < 128 and top_k < 100:
        assert pruned > BATCH
        assert explored > 0 or policy != "random"

    size = state.V.shape[1]
    V, D = np.asarray(state.V), np.asarray(state.D)
    for r, request in enumerate(requests):
        want_V = [request.V.get(i, np.float32(cfg.empty)) for i in range(size)]
        want_D = [request.D.get(i, np.float32(cfg.empty)) for i in range(size)]
        np.testing.assert_array_equal(V[r], want_V)
        np.testing.assert_array_equal(D[r], want_D)
        assert set(request.D) <= set(range(size))
        if state.ages is not None:
            want = [request.age.get(j, 0) for j in range(state.ages.shape[1])]
            np.testing.assert_array_equal(state.ages[r], want)


def test_other_decays_to_rounding():
    rng = np.random.default_rng(5)
    num_slots, scores, resets = traces(rng, False)
    scores = rng.normal(size=scores.shape).astype(np.float32)
    cfg = SpinConfig(decay=0.85, block_size=4, policy="none", sparsity=0.5)
    state, (ids, _, _) = run(cfg, 6, num_slots, scores, resets)
    for r in range(BATCH):
        request = Request(cfg, 6)
        for t in range(STEPS):
            if resets[t, r]:
                request.reset()
            got = ids[t, r]
            request.observe(int(num_slots[t, r]), set(got[got >= 0].tolist()), scores[t, r])
        want = [request.V.get(i, 0.0) for i in range(SLOTS)]
        np.testing.assert_allclose(state.V[r], want, atol=1e-6)
        want = [request.D.get(i, 0.0) for i in range(SLOTS)]
        np.testing.assert_allclose(state.D[r], want, atol=1e-6)
