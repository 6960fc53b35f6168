"""Index keys kept as FP8: exact on the release's FP4 grid, close without it."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from random_params import random_params

from models.cache import init_cache
from models.config import ModelConfig
from models.model import forward
from models.presets import shrink, tiny_config
from models.quant_sim import quantise_fp8, simulate_fp4
from models.selector import ALL_KEEP
from spin_jax import SpinConfig, SpinSelector

CFG = dataclasses.replace(
    shrink(tiny_config(), layers=1), compress_ratios=(4, 0), hc_sinkhorn_iters=2
)
TOKENS = 230


@pytest.fixture(scope="module")
def params():
    return random_params(CFG, 0)


def run(params, cfg, selector):
    """All-keep prefill, then one pruned step: what both select, and the cache."""
    tokens = jax.random.randint(jax.random.key(1), (2, TOKENS), 0, cfg.vocab_size)

    @jax.jit
    def both(tokens):
        cache = init_cache(cfg, 2, TOKENS)
        first = forward(params, tokens[:, :-1], cache, cfg, trace=True)
        state = selector.init(1, 64, jax.random.split(jax.random.key(2), 2))
        last = forward(
            params,
            tokens[:, -1:],
            first.cache,
            cfg,
            selector=selector,
            selector_state=state,
            trace=True,
        )
        return first.trace[0].slots, last.trace[0].slots, last.logits, last.cache

    return both(tokens)


@pytest.mark.parametrize(
    "selector",
    [
        SpinSelector(SpinConfig(block_size=4), unpruned=True),
        pytest.param(ALL_KEEP, marks=pytest.mark.slow),
    ],
)
def test_on_the_fp4_grid_fp8_selects_the_same_slots(params, selector):
    simulated = CFG.with_quant_sim()
    one = run(params, simulated, selector)
    two = run(params, simulated.with_fp8_index_keys(), selector)
    np.testing.assert_array_equal(one[0], two[0])
    np.testing.assert_array_equal(one[1], two[1])
    np.testing.assert_allclose(one[2], two[2], atol=1e-6)
    values, scales = two[3].layers[0].index_keys
    assert values.dtype == jnp.float8_e4m3fn and scales.dtype == jnp.float32
    filled = TOKENS // 4
    np.testing.assert_array_equal(
        values.astype(jnp.float32)[:, :filled] * scales[:, :filled, None],
        one[3].layers[0].index_keys.values[:, :filled],
    )


def test_without_the_grid_it_selects_nearly_the_same(params):
    one = np.asarray(run(params, CFG, ALL_KEEP)[0])
    two = np.asarray(run(params, CFG.with_fp8_index_keys(), ALL_KEEP)[0])
    pairs = zip(one.reshape(-1, one.shape[-1]), two.reshape(-1, two.shape[-1]), strict=True)
    shared = [len(set(x) & set(y) - {-1}) / max((x >= 0).sum(), 1) for x, y in pairs if x[0] >= 0]
    assert 0.9 < np.mean(shared) < 1


def test_quantised_values_and_scales():
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(7, 64)) * 10.0 ** rng.integers(-6, 6, (7, 1))).astype(np.float32)
    x[0] = 0
    values, scales = quantise_fp8(jnp.asarray(x))
    amax = np.abs(x).max(axis=1)
    assert scales[0] == 1
    np.testing.assert_array_equal(np.exp2(np.ceil(np.log2(amax[1:] / 448))), scales[1:])
    np.testing.assert_array_equal(
        np.asarray(values), (x / np.asarray(scales)[:, None]).astype(ml_dtypes.float8_e4m3fn)
    )
    grid = simulate_fp4(jnp.asarray(x))
    values, scales = quantise_fp8(grid)
    np.testing.assert_array_equal(values.astype(jnp.float32) * scales[:, None], grid)


def test_it_is_no_part_of_the_file():
    cfg = CFG.with_fp8_index_keys()
    assert ModelConfig.from_dict(cfg.to_dict()) == CFG
