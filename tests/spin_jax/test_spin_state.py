"""First steps, capacity, resets, purity, odd sizes and odd numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from spin_closed_loop import closed_loop_step

from spin_jax import SpinConfig, init_spin, observe, reset, select_blocks, steady_capacity
from spin_jax.selection import select_layers

CFG = SpinConfig(block_size=4, sparsity=0.75, exploration=0.2)
SLOTS, TOP_K = 64, 4


def fresh(batch=2, cfg=CFG, max_slots=SLOTS):
    return init_spin(cfg, batch=batch, max_slots=max_slots, key=jax.random.key(0))


def step(state, num_slots, scores, cfg=CFG, top_k=TOP_K):
    return closed_loop_step(state, jnp.asarray(num_slots), scores, cfg, top_k)


def as_numpy(state):
    state = state.replace(key=jax.random.key_data(state.key))
    return [np.asarray(x) for x in jax.tree.leaves(state)]


def same(a, b):
    return all(
        np.array_equal(x, y, equal_nan=True) for x, y in zip(as_numpy(a), as_numpy(b), strict=True)
    )


def chosen(selection, row):
    ids = np.asarray(selection.block_ids[row])
    return ids[ids >= 0].tolist()


def noise(seed, batch=2, slots=SLOTS):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=(batch, slots)), jnp.float32)


def test_first_step_is_unpruned_for_each_request_on_its_own():
    state = fresh()
    selection, state = step(state, [50, 0], noise(0))
    assert selection.count.tolist() == [13, 0] and state.first.tolist() == [False, True]
    # Every visible slot is observed, nothing else.
    assert (np.asarray(state.V[0, :50]) != 0).all() and not state.V[0, 50:].any()
    assert (np.asarray(state.D[0, :50]) != 0).all() and not state.D[0, 50:].any()
    assert not state.V[1].any() and not state.D[1].any()
    selection, state = step(state, [51, 30], noise(1))
    assert selection.count.tolist() == [4, 8] and not state.first.any()
    state = reset(state, jnp.array([True, False]))
    selection, state = step(state, [52, 30], noise(2))
    assert selection.count.tolist() == [13, 2]


def test_reset_restores_the_start_of_the_marked_requests_only():
    cfg = SpinConfig(block_size=4, policy="age", unobserved="-inf", sparsity=0.75)
    start = fresh(cfg=cfg)
    state = start
    for t in range(3):
        _, state = step(state, [40 + t, 60], noise(t), cfg)
    again = reset(state, jnp.array([False, True]))
    assert same(reset(again, jnp.array([False, False])), again)
    for name in ("V", "D_rev", "first", "ages"):
        old, new, kept = (np.asarray(getattr(s, name)) for s in (start, again, state))
        np.testing.assert_array_equal(new[1], old[1])
        np.testing.assert_array_equal(new[0], kept[0])
    data = jax.random.key_data
    np.testing.assert_array_equal(data(again.key), data(state.key))
    keyed = reset(state, jnp.array([False, True]), jax.random.key(0))
    np.testing.assert_array_equal(data(keyed.key[1]), data(start.key[1]))
    np.testing.assert_array_equal(data(keyed.key[0]), data(state.key[0]))


def test_capacity_too_small_is_an_error_outside_jit_and_a_flag_inside():
    state = fresh()
    num_slots = jnp.array([50, 14])
    with pytest.raises(ValueError, match="capacity is 5, but request 0 with 50 slots needs 13"):
        select_blocks(state, num_slots, CFG, top_k=TOP_K, capacity=5)

    @jax.jit
    def small(state):
        return select_blocks(state, num_slots, CFG, top_k=TOP_K, capacity=5)

    selection, after = small(state)
    assert selection.truncated.tolist() == [True, False]
    assert after.first.tolist() == [True, False]  # it still has its first step to come
    # What it gets is its pruned selection, m = ceil(13 / 4).
    assert selection.count.tolist() == [4, 4] and {0, 12} <= set(chosen(selection, 0))
    assert chosen(selection, 1) == [0, 1, 2, 3]
    full, _ = select_blocks(state, num_slots, CFG, top_k=TOP_K)
    assert full.block_ids.shape == (2, 16) and not full.truncated.any()


def test_a_selection_cut_to_fit_keeps_the_highest():
    cfg = SpinConfig(block_size=4, sparsity=0.5, exploration=0.5)
    state = fresh(1, cfg).replace(first=jnp.zeros(1, bool))
    state = state.replace(
        V=state.V.at[0, jnp.array([9, 17, 33, 41])].set(jnp.array([1.0, 4, 3, 2]))
    )
    # m = 8 of 16, e = 4: sink, newest, blocks 4 and 8, then four explored.
    select = jax.jit(select_blocks, static_argnames=("cfg", "top_k", "capacity"))
    for capacity, want in [(1, [0]), (3, [0, 4, 15])]:
        selection, _ = select(state, jnp.array([64]), cfg=cfg, top_k=4, capacity=capacity)
        assert chosen(selection, 0) == want and bool(selection.truncated[0])
    selection, _ = select(state, jnp.array([64]), cfg=cfg, top_k=4, capacity=6)
    assert {0, 4, 8, 15} < set(chosen(selection, 0)) and int(selection.count[0]) == 6
    selection, _ = select_blocks(state, jnp.array([64]), cfg, top_k=4, capacity=8)
    assert int(selection.count[0]) == 8 and not selection.truncated.any()


def test_more_slots_than_the_state_holds():
    with pytest.raises(ValueError, match="num_slots of request 1 is 65; allowed: 0 to 64"):
        select_blocks(fresh(), jnp.array([3, 65]), CFG, top_k=TOP_K)
    jitted = jax.jit(lambda s, n: select_blocks(s, n, CFG, top_k=TOP_K))
    selection, _ = jitted(fresh(), jnp.array([3, 65]))
    assert selection.truncated.tolist() == [False, True] and int(selection.count.max()) <= 16


@pytest.mark.parametrize(
    "max_slots, block_size, sparsity", [(1, 64, 0.999), (10, 64, 0), (67, 64, 0.999), (7, 3, 0.999)]
)
def test_odd_sizes(max_slots, block_size, sparsity):
    cfg = SpinConfig(sparsity=sparsity, block_size=block_size, exploration=1.0)
    state = fresh(1, cfg, max_slots)
    for n in range(max(0, max_slots - 3), max_slots + 1):
        selection, state = step(state, [n], noise(n, 1, max_slots), cfg, top_k=1)
        blocks = -(-n // block_size)
        ids = chosen(selection, 0)
        assert len(ids) == int(selection.count[0]) and set(ids) <= set(range(blocks))
        assert n == 0 or {0, (n - 1) // block_size} <= set(ids)
        assert sparsity or len(ids) == blocks
    np.testing.assert_array_equal(np.isfinite(state.V), True)


def test_k_beyond_what_exists_keeps_everything():
    state = fresh().replace(first=jnp.zeros(2, bool))
    selection, _ = select_blocks(state, jnp.array([64, 9]), CFG, top_k=640)
    assert selection.count.tolist() == [16, 3]


def test_functions_are_pure_so_a_rollback_is_the_old_state():
    state = fresh()
    for t in range(3):
        _, state = step(state, [40 + t, 60], noise(t))
    before = as_numpy(state)
    _, speculative = step(state, [43, 61], noise(10))
    _, speculative = step(speculative, [44, 62], noise(11))
    for x, y in zip(before, as_numpy(state), strict=True):
        np.testing.assert_array_equal(x, y)
    selection1, after1 = step(state, [43, 61], noise(3))
    selection2, after2 = step(state, [43, 61], noise(3))
    np.testing.assert_array_equal(selection1.block_ids, selection2.block_ids)
    assert same(after1, after2) and not same(after1, speculative)


def test_bad_scores_and_a_bad_state_stay_with_their_entry():
    """A NaN is no observation; one that is in the state anyway selects nothing invalid."""
    clean, dirty = fresh(), fresh()
    bad = jnp.array([jnp.nan, jnp.inf, -jnp.inf, jnp.finfo(jnp.float32).min])
    for t in range(6):
        z = noise(t)
        broken = z.at[1, ::3].set(jnp.resize(bad, z[1, ::3].shape))
        a, clean = step(clean, [50 + t, 21 + t], z)
        b, dirty = step(dirty, [50 + t, 21 + t], broken)
        assert chosen(a, 0) == chosen(b, 0)
        np.testing.assert_array_equal(clean.V[0], dirty.V[0])
        np.testing.assert_array_equal(clean.D[0], dirty.D[0])
    assert np.isfinite(dirty.V).all() and np.isfinite(dirty.D).all()

    for poison in (jnp.nan, jnp.inf, -jnp.inf):
        state = dirty.replace(V=dirty.V.at[1].set(poison), D_rev=dirty.D_rev.at[1, ::2].set(poison))
        selection, _ = select_blocks(state, jnp.array([56, 22]), CFG, top_k=TOP_K)
        ids = chosen(selection, 1)
        assert len(ids) == len(set(ids)) == int(selection.count[1]) == 2
        assert set(ids) <= set(range(6)) and {0, 5} <= set(ids)


def test_unobserved_entries_by_option():
    """Blocks never seen outrank a negative score if they count as 0, and not as -infinity."""
    for unobserved, want in (("zero", [0, 1, 2, 15]), ("-inf", [0, 3, 9, 15])):
        cfg = SpinConfig(block_size=4, sparsity=0.75, policy="none", unobserved=unobserved)
        state = fresh(1, cfg).replace(first=jnp.zeros(1, bool))
        seen = jnp.array([0, 13, 37, 50, 63])
        state = state.replace(V=state.V.at[0, seen].set(jnp.array([-3.0, -1, -2, -4, -9])))
        selection, after = select_blocks(state, jnp.array([64]), cfg, top_k=4)
        assert chosen(selection, 0) == want
        after = observe(after, selection, jnp.full((1, 64), 6.0), jnp.array([64]), cfg)
        # An entry that was never observed counts as 0 in its first update.
        assert float(after.V[0, 1]) == 3.0 and float(after.V[0, 63]) == -1.5


def test_ten_thousand_steps_leave_nothing_growing():
    """Contexts of 50 to 300 and 150 to 292 slots, in one scan, at the steady capacity."""
    cfg = SpinConfig(block_size=16, sparsity=0.5)
    slots, top_k, steps = 320, 32, 10_000
    capacity = steady_capacity(cfg, slots, top_k)
    state = init_spin(cfg, batch=2, max_slots=slots, key=jax.random.key(0))

    @jax.jit
    def loop(state):
        def body(state, t):
            n = jnp.stack([50 + t // 40, 150 + t // 70])
            selection, state = select_blocks(state, n, cfg, top_k=top_k, capacity=capacity)
            noise = jax.random.bits(jax.random.fold_in(jax.random.key(1), t), (2, capacity * 16))
            z = noise.astype(jnp.float32) / 2.0**31 - 1
            state = observe(state, selection, z, n, cfg)
            blocks = -(-n // 16)
            due = jnp.minimum(blocks, jnp.maximum(2, (blocks + 1) // 2))
            wrong = (selection.count != due) | selection.truncated
            return state, jnp.any(wrong)

        return jax.lax.scan(body, state, jnp.arange(steps))

    after, wrong = loop(state)
    assert not wrong[2:].any()
    assert [x.shape for x in as_numpy(after)] == [x.shape for x in as_numpy(state)]
    for entries in (after.V, after.D):
        assert np.isfinite(entries).all() and np.abs(entries).max() <= 1
    assert not after.V[:, 300:].any() and after.V[:, :290].any()


def test_loops_vmap_and_donation():
    """The same steps under while_loop with the state donated, and under vmap over layers."""
    scores = jnp.stack([noise(t) for t in range(5)])
    state, eager = fresh(), []
    for t in range(5):
        selection, state = step(state, [40 + t, 60], scores[t])
        eager.append(selection.block_ids)

    def loop(state, scores):
        def body(carry):
            t, state, out = carry
            selection, state = step(state, jnp.stack([40 + t, jnp.array(60)]), scores[t])
            return t + 1, state, out.at[t].set(selection.block_ids)

        out = jnp.zeros((5, 2, 16), jnp.int32)
        return jax.lax.while_loop(lambda c: c[0] < 5, body, (jnp.array(0), state, out))[1:]

    after, ids = jax.jit(loop, donate_argnums=0)(fresh(), scores)
    np.testing.assert_array_equal(ids, jnp.stack(eager))
    assert same(after, state)

    layers = jax.tree.map(lambda *x: jnp.stack(x), fresh(), reset(state, jnp.ones(2, bool)))
    _, both = jax.vmap(lambda s, z: step(s, [40, 60], z))(layers, scores[:2])
    _, one = step(fresh(), [40, 60], scores[0])
    assert same(jax.tree.map(lambda x: x[0], both), one)


@pytest.mark.parametrize(
    "call, part",
    [
        (lambda: fresh(batch=0), "batch is 0"),
        (lambda: fresh(max_slots=-1), "max_slots is -1"),
        (lambda: init_spin(CFG, batch=2, max_slots=8, key=0), "not a typed key"),
        (
            lambda: init_spin(CFG, batch=2, max_slots=8, key=jax.random.key(0, impl="rbg")),
            "key uses rbg; allowed: threefry2x32",
        ),
        (
            lambda: init_spin(
                CFG, batch=2, max_slots=8, key=jax.random.split(jax.random.key(0), 3)
            ),
            "key has shape (3,); allowed: () or (2,)",
        ),
        (lambda: select_blocks(fresh(), jnp.array([1]), CFG, top_k=4), "allowed: [2]"),
        (lambda: select_blocks(fresh(), jnp.ones(2), CFG, top_k=4), "num_slots is float32"),
        (lambda: select_blocks(fresh(), jnp.array([1, 2]), CFG, top_k=0), "top_k is 0"),
        (
            lambda: select_blocks(fresh(), jnp.array([1, 2]), CFG, top_k=4, capacity=17),
            "capacity is 17; allowed: an integer from 1 to 16",
        ),
        (
            lambda: select_blocks(fresh(), jnp.array([1, 2]), SpinConfig(policy="age"), top_k=4),
            "policy is 'age' and the state has no ages",
        ),
        (
            lambda: select_blocks(
                fresh(), jnp.array([1, 2]), SpinConfig(state_dtype="bfloat16"), top_k=4
            ),
            "pass the configuration given to init_spin",
        ),
        (lambda: reset(fresh(), jnp.ones(2)), "where is float32[2]; allowed: bool[2]"),
    ],
)
def test_mistakes_are_named(call, part):
    with pytest.raises(ValueError) as error:
        call()
    assert part in str(error.value)


def test_scores_of_the_wrong_shape():
    selection, state = select_blocks(fresh(), jnp.array([9, 2]), CFG, top_k=4)
    with pytest.raises(ValueError, match=r"scores has shape \[2, 63\]; allowed: \[2, 64\], 4"):
        observe(state, selection, jnp.zeros((2, 63)), jnp.array([9, 2]), CFG)


@pytest.mark.parametrize(
    "changes",
    [{}, {"policy": "none"}, {"unobserved": "-inf"}]
    # These are selected one by one: the paper's other variants go through the same door.
    + [{"policy": "age"}, {"policy": "staleness"}, {"reduction": "A2"}, {"reduction": "A0"}]
    + [{"pooling": "mean"}],
)
def test_layers_selected_together_are_as_selected_alone(changes):
    cfg = SpinConfig(**({"block_size": 4, "sparsity": 0.75, "exploration": 0.2} | changes))
    states = []
    for layer in range(3):
        state = init_spin(cfg, batch=3, max_slots=SLOTS, key=jax.random.key(layer))
        for t in range(layer):
            _, state = step(state, [50 + t, 20, 3], noise(10 * layer + t, 3), cfg)
        states.append(reset(state, jnp.array([False, layer == 1, False])))
    num_slots = jnp.array([60, 33, 0])
    together = jax.jit(lambda s, n: select_layers(s, n, cfg, top_k=TOP_K))(states, num_slots)
    for state, (selection, after) in zip(states, together, strict=True):
        expected, unchanged = select_blocks(state, num_slots, cfg, top_k=TOP_K)
        for a, b in zip(jax.tree.leaves(selection), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(a, b)
        assert same(after, unchanged)


def test_layers_selected_together_are_truncated_alone():
    states = [fresh(), fresh()]
    _, states[0] = step(states[0], [64, 64], noise(0))
    with pytest.raises(ValueError, match="request 0 with 64 slots needs 16 blocks"):
        select_layers(states, jnp.array([64, 9]), CFG, top_k=TOP_K, capacity=5)
    jitted = jax.jit(lambda s, n: select_layers(s, n, CFG, top_k=TOP_K, capacity=5))
    selected = jitted(states, jnp.array([64, 9]))
    assert [s.truncated.tolist() for s, _ in selected] == [[False, False], [True, False]]


@pytest.mark.parametrize(
    "states,message",
    [
        (lambda: [], "at least one layer"),
        (lambda: [fresh(), fresh(max_slots=32)], r"\[\[2, 64\], \[2, 32\]\]; allowed: one shape"),
        (
            lambda: [fresh(), fresh(cfg=SpinConfig(block_size=4, unobserved="-inf"))],
            "starts at -inf, the configuration",
        ),
    ],
)
def test_layers_that_differ_are_named(states, message):
    with pytest.raises(ValueError, match=message):
        select_layers(states(), jnp.array([5, 6]), CFG, top_k=TOP_K)
