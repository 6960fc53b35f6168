"""A step of the indexer and SPIN as the benchmark times it: inputs, stages and whole steps."""

from __future__ import annotations

import functools
import os
from typing import Any, NamedTuple

import bench_timing
import jax
import jax.numpy as jnp

import pallas_kernels as ops

BLOCK, HEADS, WIDTH = 64, 64, 128
EXPLORATION, DECAY = 0.05, 0.5
REPEATS = 5


class LayerInputs(NamedTuple):
    """What a layer scores."""

    q: Any
    w: Any
    keys: Any
    scales: Any


class Inputs(NamedTuple):
    """A step's inputs for L layers: everything but V, D and the position."""

    layers: tuple[LayerInputs, ...]
    num_slots: Any
    """[B]; what follows is [L, B, ...]."""
    budget: Any
    explore: Any
    priority: Any


def budget_of(live: int, sparsity: float, top_k: int) -> int:
    blocks = -(-live // BLOCK)
    kept = -(-(1000 - round(sparsity * 1000)) * blocks // 1000)
    return min(blocks, max(-(-top_k // BLOCK), kept))


def make_inputs(
    args, batch: int, slots: int, fp8: bool, sparsity: float, live: int | None = None,
    layers: int = 1,
) -> tuple[Inputs, tuple[Any, ...], tuple[Any, ...]]:  # fmt: skip
    """Fresh random inputs, and each layer's V and D."""
    live = live or slots
    seed = jax.random.key(int.from_bytes(os.urandom(4), "big") >> 1)
    keys = iter(jax.random.split(seed, 1 + 6 * layers))
    dtype = jnp.float8_e4m3fn if fp8 else jnp.bfloat16

    def normal(*shape, dtype=jnp.float32):
        return _normal(next(keys), shape, dtype)

    def layer() -> LayerInputs:
        return LayerInputs(
            normal(batch, 1, HEADS, WIDTH, dtype=dtype),
            normal(batch, 1, HEADS) * 0.1,
            normal(batch, slots, WIDTH, dtype=dtype),
            jnp.exp2(jnp.round(normal(batch, slots))) if fp8 else None,
        )

    m = budget_of(live, sparsity, args.top_k)
    inputs = Inputs(
        tuple(layer() for _ in range(layers)),
        jnp.full(batch, live, jnp.int32),
        jnp.full((layers, batch), m, jnp.int32),
        jnp.full((layers, batch), int(EXPLORATION * m), jnp.int32),
        jax.random.bits(next(keys), (layers, batch, slots // BLOCK), jnp.uint32),
    )
    V, D_rev = (tuple(normal(batch, slots) for _ in range(layers)) for _ in range(2))
    return inputs, V, D_rev


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _normal(key, shape, dtype):
    return jax.random.normal(key, shape, jnp.bfloat16).astype(dtype)


class Stages(NamedTuple):
    """The operations of a step as functions of arrays; ``both`` does the two before it at once."""

    select: Any
    score: Any
    top_k: Any
    ema: Any
    both: Any


def stages(impl: Any, k: int, capacity: int) -> Stages:
    """All layers' selection, and one layer's other stages.

    ``count`` is how many scores, or blocks, of each request there are; XLA's are all written.
    """

    def select(V, D_rev, x):
        num_slots = jnp.broadcast_to(x.num_slots[None], x.budget.shape)
        return ops.select_blocks_of_layers(
            V, D_rev, num_slots, x.budget, x.explore, x.priority,
            block_size=BLOCK, capacity=capacity, implementation=impl,
        )  # fmt: skip

    def score(own, num_slots, ids):
        return ops.index_scores(
            own.q, own.w, own.keys, num_slots[:, None], block_ids=ids, key_scales=own.scales,
            fill=False, implementation=impl,
        )  # fmt: skip

    def top_k(scores, ids, group_max, count):
        if impl == "xla":
            return xla_top_k(scores[:, 0], ids, k)
        number = {"num_scores" if ids is None else "num_blocks": count}
        return ops.top_k_slots(
            scores[:, 0], k, block_ids=ids, group_max=group_max[:, 0], implementation=impl, **number
        )

    def ema(V, D_rev, scores, ids, num_slots):
        return ops.ema_scatter(
            V, D_rev, scores[:, 0], ids, num_slots,
            block_size=BLOCK, decay=DECAY, implementation=impl,
        )  # fmt: skip

    def both(V, D_rev, scores, ids, num_slots, group_max, count):
        return ops.top_k_and_observe(
            scores[:, 0], k, V, D_rev, ids, num_slots, group_max=group_max[:, 0],
            num_blocks=count, block_size=BLOCK, decay=DECAY, implementation=impl,
        )  # fmt: skip

    return Stages(select, score, top_k, ema, both)


def xla_top_k(scores, block_ids, top_k):
    """The strongest plain baseline: ``lax.top_k``, unsorted by slot."""
    _, at = jax.lax.top_k(scores, top_k)
    if block_ids is None:
        return at
    return jnp.take_along_axis(block_ids, at // BLOCK, axis=1) * BLOCK + at % BLOCK


def all_keep_step(i, state, x: Inputs, *, impl: Any, top_k: int):
    """Scores every visible slot and takes the K highest, layer by layer."""
    stage, num_slots = stages(impl, top_k, 0), x.num_slots - i % 8

    @jax.jit  # lowered once for all layers
    def choose(own, num_slots):
        scores, group_max = stage.score(own, num_slots, None)
        return stage.top_k(scores, None, group_max, num_slots)

    return state, tuple(choose(own, num_slots) for own in x.layers)


def spin_step(i, state, x: Inputs, *, impl: Any, top_k: int, capacity: int, fused: bool):
    """Selects all layers' blocks, then layer by layer scores, takes the K highest, updates V, D."""
    V, D_rev = state
    x = x._replace(num_slots=x.num_slots - i % 8)
    stage = stages(impl, top_k, capacity)

    @jax.jit
    def choose(own, V, D_rev, ids, count, num_slots):
        scores, group_max = stage.score(own, num_slots, ids)
        if fused:
            return stage.both(V, D_rev, scores, ids, num_slots, group_max, count)
        slots = stage.top_k(scores, ids, group_max, count)
        return slots, *stage.ema(V, D_rev, scores, ids, num_slots)

    layers = zip(x.layers, V, D_rev, *stage.select(V, D_rev, x), strict=True)
    chosen = [choose(*layer, x.num_slots) for layer in layers]
    results, V, D_rev = zip(*chosen, strict=True)
    return (V, D_rev), results


def total(args, impl: Any, batch, slots, fp8, sparsity, *, live, capacity, unroll, fused, layers):
    """What to lower for one total: a loop, and a function that runs it on fresh inputs.

    The time is that of a layer; the layers have keys and states of their own, as in a model.
    """
    iterations = 8 if impl == "xla" or layers > 1 else 32
    step = functools.partial(all_keep_step, impl=impl, top_k=args.top_k)
    if sparsity:
        capacity = capacity or budget_of(live or slots, sparsity, args.top_k)
        fused = fused and impl == "mosaic"
        step = functools.partial(
            spin_step, impl=impl, top_k=args.top_k, capacity=capacity, fused=fused
        )

    def prepare(sparsity=sparsity):
        x, V, D_rev = make_inputs(args, batch, slots, fp8, sparsity, live, layers)
        return (V, D_rev) if sparsity else (), (x,)

    def lower():
        return bench_timing.lower_loop(
            step, *jax.eval_shape(prepare), iterations=iterations, unroll=unroll
        )

    def run(loop, **changes):
        us = bench_timing.time_loop(
            loop, *prepare(**changes), iterations=iterations, repeats=REPEATS
        )
        return us / layers

    return lower, run
