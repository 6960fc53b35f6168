"""What V and D are each there for, and what storing them in bf16 costs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from spin_closed_loop import closed_loop_step

from spin_jax import SpinConfig, init_spin
from spin_jax.metrics import kept_slots, miss

SLOTS, START, STEPS = 256, 160, 200
CFG = SpinConfig(block_size=4, sparsity=0.65, policy="none")
# Each the last slot of its block: D points one slot too far, which is then in the next block.
PEAKS = np.array([23, 47, 75, 103, 119, 143])


def trace(moving):
    """Small noise, and six peaks that stay at their slot or at their distance from the query.

    The context grows by a slot every four tokens, so a moving peak shifts by one as often.
    """
    rng = np.random.default_rng(3)
    num_slots = START + np.arange(STEPS) // 4
    scores = rng.normal(size=(STEPS, SLOTS)).astype(np.float32) * 0.1
    for t, n in enumerate(num_slots):
        at = n - 1 - PEAKS if moving else PEAKS
        scores[t, at] += 5
    return jnp.asarray(num_slots, jnp.int32), jnp.asarray(scores)


@functools.partial(jax.jit, static_argnames=("cfg", "use"))
def misses(num_slots, scores, cfg, use):
    state = init_spin(cfg, batch=1, max_slots=SLOTS, key=jax.random.key(0))

    def step(state, inputs):
        n, z = inputs
        selection, state = closed_loop_step(state, n[None], z[None], cfg, len(PEAKS))
        if use == "V":
            state = state.replace(D_rev=jnp.zeros_like(state.D_rev))
        elif use == "D":
            state = state.replace(V=jnp.zeros_like(state.V))
        kept = kept_slots(selection, n[None], cfg.block_size, SLOTS)
        return state, miss(z[None], kept, n[None], len(PEAKS))[0]

    return jax.lax.scan(step, state, (num_slots, scores))[1]


@pytest.mark.parametrize("moving", [True, False], ids=["moving", "staying"])
def test_each_predictor_finds_its_pattern_and_the_other_misses_it(moving):
    """The pattern is found with both; without the one that it needs, it is lost."""
    run = trace(moving)
    both, right, wrong = (
        np.asarray(misses(*run, CFG, use))[1:] for use in ("both", *("DV" if moving else "VD"))
    )
    assert both.max() == 0 and right.max() == 0
    # Ten steps for the first peak to leave the blocks that the first step saw.
    assert wrong[40:].mean() > 0.5


def test_bf16_state_costs_little():
    """Mean miss on drifting scores with float32 and bf16 state, same budget, same trace."""
    rng = np.random.default_rng(0)
    steps = 300
    drift = np.zeros((steps, SLOTS), np.float32)
    value = rng.normal(size=SLOTS)
    for t in range(steps):
        value = 0.97 * value + 0.25 * rng.normal(size=SLOTS)
        drift[t] = value + 0.3 * rng.normal(size=SLOTS)
    num_slots = jnp.asarray(180 + np.arange(steps) // 4, jnp.int32)
    cfg = dict(block_size=4, sparsity=0.5, exploration=0.05)
    mean = {}
    for dtype in ("float32", "bfloat16"):
        result = misses(num_slots, jnp.asarray(drift), SpinConfig(state_dtype=dtype, **cfg), "both")
        mean[dtype] = float(result[1:].mean())
    print(mean)
    assert 0.01 < mean["float32"] < 0.5  # the trace is neither trivial nor hopeless
    assert abs(mean["bfloat16"] - mean["float32"]) < 0.01


def test_bf16_state_is_stored_as_such_and_survives_huge_scores():
    cfg = SpinConfig(state_dtype="bfloat16", block_size=4)
    state = init_spin(cfg, batch=1, max_slots=8, key=jax.random.key(0))
    z = jnp.array([[1.0, 3.3999e38, -3.4e38, 1e-3, 1e38, 2.0, 3.0, 4.0]])
    for _ in range(3):
        _, state = closed_loop_step(state, jnp.array([8]), z, cfg, 8)
    assert state.V.dtype == state.D_rev.dtype == jnp.bfloat16
    assert np.isfinite(np.asarray(state.V, np.float32)).all()
    assert float(state.V[0, 0]) == 0.875 and float(state.D[0, 7]) == 0.875
    # Beyond bf16's largest number: no observation.
    assert float(state.V[0, 1]) == 0 and float(state.V[0, 2]) == 0
