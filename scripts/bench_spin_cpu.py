"""From which context on SPIN makes a small model's decode step faster on a CPU.

A sliding and a CSA layer, whose indexer (64 heads of 128, K = 512, as released) outweighs all
else; caches hold random values. Both selectors run the steady decode loop, in turns.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import bench_loop
import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels as ops
from models.config import CSA, SLIDING, ModelConfig
from models.presets import tiny_config
from models.selector import ALL_KEEP
from spin_jax import SpinConfig, SpinSelector, block_budget, savings, steady_capacity

LARGE = 2**15
"""Bytes of a leaf that a step must not copy. At one request the CPU compiler of jax 0.10 copies
some small ones (window rings), which do not grow with the context."""


def indexer_config(heads: int = 64, top_k: int = 512) -> ModelConfig:
    """Two layers in which the indexer is most of the work."""
    return dataclasses.replace(
        tiny_config(),
        num_hidden_layers=2,
        num_hash_layers=0,
        compress_ratios=(SLIDING, CSA, SLIDING),
        index_n_heads=heads,
        index_head_dim=128,
        index_topk=top_k,
    )


def spin_cpu(args: Any) -> dict[str, Any]:
    """Rows of all-keep and SPIN by context and batch, the crossover, and on demand the stages."""
    cfg = indexer_config(args.index_heads, args.top_k)
    spin = SpinConfig(sparsity=args.sparsity[0], exploration=args.exploration)
    params = bench_loop.device_params(cfg, jax.random.key(0, impl="rbg"), jnp.float32)
    rows, stages = [], {}
    for batch in args.batches:
        for slots in args.slots:
            rows.append(_row(params, cfg, spin, batch, slots, args))
            print(_line(rows[-1]), flush=True)
    for slots in args.slots if args.stages else ():
        stages[slots] = stage_times(cfg, spin, slots, args.repeats)
        for name, ms in stages[slots].items():
            print(f"  {slots:7} slots  {name:24} {ms:9.3f} ms")
    result: dict[str, Any] = {
        "model": "1 sliding + 1 CSA layer, hidden 160",
        "index_heads": cfg.index_n_heads,
        "top_k": cfg.index_topk,
        "sparsity": spin.sparsity,
        "exploration": spin.exploration,
        "block_size": spin.block_size,
        "rows": rows,
        "spin_faster_from_slots": {b: crossover(rows, b) for b in args.batches},
    }
    return result | ({"stages_ms_one_layer_batch_1": stages} if stages else {})


def crossover(rows: list[dict[str, Any]], batch: int) -> int | None:
    """The least measured number of slots from which on SPIN is faster at every larger one."""
    least = None
    for row in sorted((r for r in rows if r["batch"] == batch), key=lambda r: -r["slots"]):
        if row["speedup"] <= 1:
            break
        least = row["slots"]
    return least


def _row(
    params: Any, cfg: ModelConfig, spin: SpinConfig, batch: int, slots: int, args: Any
) -> dict[str, Any]:
    # Slots are full at first and grow by a few: rewound, every dispatch sees the same ones.
    tokens, room = CSA * slots, args.steps + 1
    state = bench_loop.synthetic_state(
        cfg, jax.random.key(1, impl="rbg"), batch=batch, tokens=tokens, room=room, dtype=jnp.float32
    )
    shapes = jax.eval_shape(lambda: state)
    measured, _, _ = bench_loop.compare(
        params,
        state,
        cfg,
        {"all_keep": ALL_KEEP, "spin": SpinSelector(spin)},
        tokens=tokens,
        steps=args.steps,
        repeats=args.repeats,
    )
    keep, pruned = measured["all_keep"], measured["spin"]
    saved = savings(pruned.selector_state, spin, cfg.index_head_dim, jnp.float32)
    ratios = np.divide(keep.step_seconds, pruned.step_seconds)
    programs = [(one, one.program.run.as_text()) for one in measured.values()]
    return {
        "batch": batch,
        "slots": slots,
        "all_keep_ms": round(keep.median * 1e3, 3),
        "spin_ms": round(pruned.median * 1e3, 3),
        "all_keep_least_ms": round(min(keep.step_seconds) * 1e3, 3),
        "spin_least_ms": round(min(pruned.step_seconds) * 1e3, 3),
        # Of dispatches that follow each other: what else runs on the machine slows both.
        "speedup": round(float(np.median(ratios)), 3),
        "realized_sparsity": round(saved.realized_sparsity, 3),
        "compile_seconds": round(pruned.program.compile_seconds, 1),
        "host_transfers": [x for _, hlo in programs for x in bench_loop.host_transfers(hlo)],
        "large_copies": [
            x
            for one, hlo in programs
            for x in bench_loop.cache_copies(
                hlo, shapes.replace(selector_state=one.selector_state), least=LARGE
            )
        ],
    }


def _line(row: dict[str, Any]) -> str:
    return (
        f"batch {row['batch']}  {row['slots']:7} slots  all-keep {row['all_keep_ms']:9.3f} ms  "
        f"SPIN {row['spin_ms']:9.3f} ms  speed-up {row['speedup']:.2f}"
    )


def stage_times(cfg: ModelConfig, spin: SpinConfig, slots: int, repeats: int) -> dict[str, float]:
    """Median milliseconds of each stage of one layer, each in a loop of its own on the device."""
    keys = iter(jax.random.split(jax.random.key(2), 8))
    normal = lambda *shape: jax.random.normal(next(keys), shape)  # noqa: E731
    capacity = steady_capacity(spin, slots, cfg.index_topk)
    budget = int(block_budget(-(-slots // spin.block_size), spin, cfg.index_topk))
    n, m = jnp.full(1, slots, jnp.int32), jnp.full(1, budget, jnp.int32)
    explored = jnp.full(1, int(spin.exploration * budget), jnp.int32)
    priority = jax.random.bits(next(keys), (1, -(-slots // spin.block_size)), jnp.uint32)
    V, D = normal(1, slots), normal(1, slots)
    q, w = normal(1, 1, cfg.index_n_heads, cfg.index_head_dim), normal(1, 1, cfg.index_n_heads)
    index_keys = normal(1, slots, cfg.index_head_dim)

    select = partial(ops.select_blocks, block_size=spin.block_size, capacity=capacity)
    ema = partial(ops.ema_scatter, block_size=spin.block_size, decay=spin.decay)
    ids = select(V, D, n, m, explored, priority)[0]
    every, _ = ops.index_scores(q, w, index_keys, n[:, None])
    some, _ = ops.index_scores(q, w, index_keys, n[:, None], block_ids=ids)

    # Each step changes an input that all its work depends on, or the compiler would move what
    # stays the same out of the loop, and returns a number from the result.
    first = lambda x: x.reshape(-1)[0]  # noqa: E731
    stages: dict[str, Callable[[jax.Array], jax.Array]] = {
        "select": lambda i: first(
            select(V + i, D + i, n, m, explored, priority + i.astype(jnp.uint32))[0]
        ),
        "score selected": lambda i: jnp.max(
            ops.index_scores(q + i, w, index_keys, n[:, None], block_ids=ids)[0]
        ),
        "score all": lambda i: jnp.max(ops.index_scores(q + i, w, index_keys, n[:, None])[0]),
        "top-K of selected": lambda i: first(
            ops.top_k_slots(some + i, cfg.index_topk, block_ids=ids)
        ),
        "top-K of all": lambda i: first(ops.top_k_slots(every + i, cfg.index_topk)),
    }
    times = {name: _time(stage, repeats) for name, stage in stages.items()}

    def update(i: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return ema(*state, some[:, 0] + i, ids, n)

    times["EMA"] = _time_carried(update, (V, D), repeats)
    return {name: round(ms, 3) for name, ms in times.items()}


def _time(stage: Callable[[jax.Array], jax.Array], repeats: int) -> float:
    def step(i: jax.Array, total: jax.Array) -> jax.Array:
        return total + stage(i.astype(jnp.float32)).astype(jnp.float32)

    return _time_carried(step, jnp.float32(0), repeats)


def _time_carried(step: Callable[..., Any], carry: Any, repeats: int, count: int = 10) -> float:
    loop = jax.jit(lambda carry: jax.lax.fori_loop(0, count, step, carry), donate_argnums=0)
    carry = jax.block_until_ready(loop(carry))
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        carry = jax.block_until_ready(loop(carry))
        times.append((time.perf_counter() - begin) / count * 1e3)
    return float(np.median(times))
