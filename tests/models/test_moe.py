"""The mixture of experts against loops over tokens and experts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import moe
from models.presets import tiny_config

HIDDEN, INNER = 24, 16


def silu(x):
    return x / (1 + np.exp(-x))


def brute_force(p, x, tokens, cfg):
    """Straight from the formulas, in float64."""

    def expert(w1, w2, w3, row, weight):
        gate = np.minimum(w1 @ row, cfg.swiglu_limit)
        up = np.clip(w3 @ row, -cfg.swiglu_limit, cfg.swiglu_limit)
        return w2 @ (weight * silu(gate) * up)

    out = np.zeros_like(x)
    for n, row in enumerate(x):
        scores = np.sqrt(np.log1p(np.exp(p["gate"] @ row)))
        if "tid2eid" in p:
            chosen = p["tid2eid"][tokens[n]]
        else:
            chosen = np.argsort(-(scores + p["bias"]), kind="stable")[: cfg.num_experts_per_tok]
        total = scores[chosen].sum()
        for e in chosen:
            weight = scores[e] / total * cfg.routed_scaling_factor
            matrices = (p["experts"][name][e] for name in ("w1", "w2", "w3"))
            out[n] += expert(*matrices, row, weight)
        out[n] += expert(*(p["shared"][name] for name in ("w1", "w2", "w3")), row, 1.0)
    return out


@pytest.mark.parametrize("hashed", [False, True])
@pytest.mark.parametrize(
    "count,experts,strategy",
    [
        (1, 32, moe._gathered_experts),
        (5, 32, moe._gathered_experts),
        (17, 32, moe.every_expert),
        (64, 32, moe.every_expert),
        (70, 8, moe.every_expert),
        (70, 32, moe._grouped_experts),
    ],
)
def test_every_strategy_computes_the_mixture(count, experts, strategy, hashed):
    cfg = dataclasses.replace(
        tiny_config(), n_routed_experts=experts, num_experts_per_tok=2, hidden_size=HIDDEN,
        moe_intermediate_size=INNER, swiglu_limit=1.5,
    )  # fmt: skip
    assert moe._strategy(count, 2, experts) is strategy
    rng = np.random.default_rng(count)

    def normal(*shape):
        return rng.standard_normal(shape) / np.sqrt(shape[-1])

    p = {
        "gate": normal(experts, HIDDEN) * 3,
        "experts": {
            "w1": normal(experts, INNER, HIDDEN) * 2,
            "w3": normal(experts, INNER, HIDDEN) * 2,
            "w2": normal(experts, HIDDEN, INNER),
        },
        "shared": {
            "w1": normal(INNER, HIDDEN),
            "w3": normal(INNER, HIDDEN),
            "w2": normal(HIDDEN, INNER),
        },
    }
    vocabulary = 40
    if hashed:
        draws = [rng.choice(experts, 2, replace=False) for _ in range(vocabulary)]
        p["tid2eid"] = np.stack(draws).astype(np.int32)
    else:
        p["bias"] = rng.standard_normal(experts)
    x = normal(count, HIDDEN) * 5
    tokens = rng.integers(0, vocabulary, count)
    single = jax.tree.map(lambda a: a.astype(np.float32) if a.dtype == float else a, p)
    got = jax.jit(lambda p, x, t: moe.moe(p, x, t, cfg))(
        single, x[None].astype(np.float32), tokens[None].astype(np.int32)
    )
    np.testing.assert_allclose(got[0], brute_force(p, x, tokens, cfg), rtol=2e-4, atol=2e-5)


def test_what_an_expert_that_is_not_chosen_computes_does_not_matter():
    cfg = dataclasses.replace(tiny_config(), n_routed_experts=4, num_experts_per_tok=2)
    rng = np.random.default_rng(0)
    w = {"w1": (4, INNER, HIDDEN), "w3": (4, INNER, HIDDEN), "w2": (4, HIDDEN, INNER)}
    p = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in w.items()}
    x = rng.standard_normal((3, HIDDEN)).astype(np.float32)
    weights = np.full((3, 2), 0.5, np.float32)
    chosen = np.array([[0, 1], [1, 2], [2, 0]], np.int32)
    clean = moe.every_expert(p, x, weights, chosen, cfg.swiglu_limit)
    p["w1"][3] = np.nan
    spoiled = moe.every_expert(p, x, weights, chosen, cfg.swiglu_limit)
    np.testing.assert_array_equal(spoiled, clean)


def test_every_expert_in_bfloat16_is_as_near_as_the_fetched_ones():
    rng = np.random.default_rng(1)
    w = {"w1": (4, INNER, HIDDEN), "w3": (4, INNER, HIDDEN), "w2": (4, HIDDEN, INNER)}
    p = {k: (rng.standard_normal(s) / np.sqrt(s[-1])).astype(np.float32) for k, s in w.items()}
    x = rng.standard_normal((9, HIDDEN)).astype(np.float32)
    weights = rng.random((9, 2)).astype(np.float32)
    chosen = np.stack([rng.choice(4, 2, replace=False) for _ in range(9)]).astype(np.int32)
    p, x = jax.tree.map(jnp.asarray, (p, x))
    exact = moe._gathered_experts(p, x, weights, chosen, 10.0)
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (p, x))
    error = {}
    for run in (moe.every_expert, moe._gathered_experts):
        got = np.asarray(run(*half, weights, chosen, 10.0), np.float32)
        error[run] = np.linalg.norm(got - exact) / np.linalg.norm(exact)
    assert error[moe.every_expert] < 1.2 * error[moe._gathered_experts] < 0.02
