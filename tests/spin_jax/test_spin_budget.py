"""Budgets are exact integers, and a configuration that makes no sense is refused."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spin_jax import SpinConfig, block_budget, init_spin, select_blocks, steady_capacity
from spin_jax.config import exploration_share, share, slot_budget

BLOCKS = np.concatenate([np.arange(300), [999, 1000, 1001, 4096, 65_537, 999_999, 2**20, 2**24]])


def test_every_permille_is_exact():
    blocks = jnp.asarray(BLOCKS, jnp.int32)

    @jax.jit
    def shares(numerator, denominator):
        return share((numerator, denominator), blocks, "ceil")

    for permille in range(1000):
        cfg = SpinConfig(sparsity=permille / 1000)
        assert Fraction(*cfg.keep_ratio) == 1 - Fraction(permille, 1000)
        want = [-(-(1000 - permille) * int(n) // 1000) for n in BLOCKS]
        np.testing.assert_array_equal(shares(*cfg.keep_ratio), want)
        assert share(cfg.keep_ratio, 10**9, "ceil") == (1000 - permille) * 10**6


def test_the_example_that_floats_get_wrong():
    assert math.ceil((1 - 0.7) * 10) == 4  # 1 - 0.7 is 0.30000000000000004
    assert share(SpinConfig(sparsity=0.7).keep_ratio, 10, "ceil") == 3
    assert share(SpinConfig(sparsity=0.9).keep_ratio, 10, "ceil") == 1


@pytest.mark.parametrize(
    "sparsity, want",
    [
        (0, (1, 1)),
        (1 / 3, (2, 3)),
        (0.3333, (6667, 10_000)),
        (0.1 + 0.2, (7, 10)),
        (np.float32(0.9), (1, 10)),
        (float(np.float32(0.9)), (1, 10)),
        (Fraction(3, 8), (5, 8)),
        (1e-9, (1, 1)),
    ],
)
def test_sparsity_is_the_decimal_that_was_meant(sparsity, want):
    assert SpinConfig(sparsity=sparsity).keep_ratio == want


@pytest.mark.parametrize("rounding", ["floor", "ceil", "nearest"])
def test_exploration_is_rounded_exactly(rounding):
    how = {
        "floor": math.floor,
        "ceil": math.ceil,
        "nearest": lambda x: math.floor(x + Fraction(1, 2)),
    }[rounding]
    for gamma in (0.0, 0.05, 0.1, 0.125, 0.3, 1.0):
        cfg = SpinConfig(exploration=gamma, exploration_rounding=rounding)
        got = exploration_share(jnp.asarray(BLOCKS, jnp.int32), cfg)
        np.testing.assert_array_equal(got, [how(Fraction(str(gamma)) * int(n)) for n in BLOCKS])
    assert exploration_share(20, SpinConfig(exploration=0.05)) == 1


def test_budget_rules():
    cfg = SpinConfig(sparsity=0.9, block_size=64)
    assert [block_budget(n, cfg, 512) for n in (0, 1, 2, 7, 8, 9, 81, 100)] == [
        *(0, 1, 2, 7, 8, 8, 9, 10)
    ]
    # The forced blocks raise a smaller budget.
    assert [block_budget(n, SpinConfig(sparsity=0.9), 1) for n in (0, 1, 2, 10)] == [0, 1, 2, 2]
    assert block_budget(1_000_000, SpinConfig(sparsity=0.999), 512) == 1000
    array = block_budget(jnp.array([2**20, 2**24], jnp.int32), SpinConfig(sparsity=0.4), 512)
    assert array.dtype == jnp.int32
    np.testing.assert_array_equal(array, [-(-6 * 2**20 // 10), -(-6 * 2**24 // 10)])
    assert slot_budget(64_000_000, SpinConfig(sparsity=0.4), 512) == 38_400_000


@pytest.mark.parametrize("reduction", ["A1", "A0", "A2"])
def test_steady_capacity_suffices_and_is_reached(reduction):
    """Over every length, and for A0 over predictions that lie as far apart as they can."""
    slots, top_k = 61, 5
    cfg = SpinConfig(
        sparsity=0.85, block_size=4, reduction=reduction, exploration=0.3, policy="random"
    )
    capacity = steady_capacity(cfg, slots, top_k)
    lengths = jnp.arange(slots + 1)
    state = init_spin(cfg, batch=slots + 1, max_slots=slots, key=jax.random.key(0))
    apart = (jnp.arange(state.V.shape[1]) % 4 == 1).astype(jnp.float32)
    apart = apart.at[:4].set(0).at[60:].set(0)
    state = state.replace(
        V=jnp.broadcast_to(apart[None], state.V.shape), first=jnp.zeros_like(state.first)
    )
    selection, _ = select_blocks(state, lengths, cfg, top_k=top_k, capacity=capacity)
    assert int(selection.count.max()) == capacity
    assert not selection.truncated.any()


def test_contexts_of_up_to_k_slots_prune_nothing():
    for block_size in (1, 4, 64, 100):
        cfg = SpinConfig(sparsity=0.95, block_size=block_size)
        for n in range(513):
            blocks = -(-n // block_size)
            assert block_budget(blocks, cfg, 512) == blocks
    # The first slot that opens a block beyond ceil(K / b) = 8 already costs one.
    assert block_budget(-(-513 // 64), SpinConfig(sparsity=0.95), 512) == 8


@pytest.mark.parametrize(
    "change, part",
    [
        (dict(sparsity=1.0), "sparsity is 1.0; allowed: 0 <= sparsity < 1"),
        (dict(sparsity=-0.1), "sparsity is -0.1"),
        (dict(sparsity=float("nan")), "sparsity is nan"),
        (dict(sparsity="0.4"), "sparsity is '0.4'"),
        (dict(block_size=0), "block_size is 0; allowed: an integer of at least 1"),
        (dict(block_size=64.0), "block_size is 64.0"),
        (dict(block_size=True), "block_size is True"),
        (dict(decay=1.0), "decay is 1.0"),
        (dict(exploration=1.5), "exploration is 1.5"),
        (dict(exploration_rounding="up"), "one of 'floor', 'ceil', 'nearest'"),
        (dict(policy="oldest"), "policy is 'oldest'; allowed: one of 'random'"),
        (dict(reduction="A3"), "reduction is 'A3'"),
        (dict(pooling="avg"), "pooling is 'avg'"),
        (dict(unobserved="inf"), "unobserved is 'inf'"),
        (dict(state_dtype="float16"), "state_dtype is 'float16'"),
        (dict(staleness_epsilon=0.0), "staleness_epsilon is 0.0"),
    ],
)
def test_bad_configurations_are_refused(change, part):
    with pytest.raises(ValueError) as error:
        SpinConfig(**change)
    assert part in str(error.value)


def test_configurations_are_hashable_and_equal_by_value():
    assert hash(SpinConfig()) == hash(SpinConfig()) and SpinConfig() == SpinConfig()
    assert SpinConfig() != SpinConfig(sparsity=0.3)
