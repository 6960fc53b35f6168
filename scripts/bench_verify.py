"""What verifier rows cost in scoring: one read of each key block serves all rows of a draft.

``python scripts/bench.py verify`` on a GPU prints kernel durations from the profiler, a table and
one JSON line. Rows of a draft score the same blocks, as many as one row selects.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from pathlib import Path
from typing import Any

import bench_steps
import bench_timing
import jax
import jax.numpy as jnp
from environment import environment

import pallas_kernels


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench.py verify", description=__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[32, 8])
    parser.add_argument("--slots", type=int, default=131072)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--sparsities", type=float, nargs="+", default=[0.0, 0.4])
    parser.add_argument("--top-k", type=int, default=512)
    parser.add_argument("--out", type=Path, default=Path("results/verify_h200.json"))
    args = parser.parse_args(argv)
    if min(args.rows) < 1:
        sys.exit(f"--rows {min(args.rows)} must be at least 1")
    args.rows = [1, *(n for n in args.rows if n > 1)]
    if jax.default_backend() != "gpu":
        sys.exit(f"bench.py verify needs a GPU; JAX's default backend is {jax.default_backend()}")
    report: dict[str, Any] = environment() | {
        "command": " ".join(["python scripts/bench.py verify", *argv]),
        "slots": args.slots,
        "rows": [],
    }
    for batch in args.batches:
        for fp8 in (False, True):
            for sparsity in args.sparsities:
                report["rows"] += timed(args, batch, fp8, sparsity)
                args.out.parent.mkdir(parents=True, exist_ok=True)
                args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))


def timed(args: argparse.Namespace, batch: int, fp8: bool, sparsity: float) -> list[dict[str, Any]]:
    """Scoring by number of rows, on one set of keys and blocks."""
    x, V, D_rev = bench_steps.make_inputs(args, batch, args.slots, fp8, sparsity)
    capacity = bench_steps.budget_of(args.slots, sparsity, args.top_k)
    select = bench_steps.stages("mosaic", args.top_k, capacity).select
    ids = jax.jit(select)(V, D_rev, x)[0] if sparsity else None
    [layer] = x.layers
    found: list[dict[str, Any]] = []
    for rows in args.rows:
        q, w = (jnp.repeat(a, rows, axis=1) for a in (layer.q, layer.w))
        seen = x.num_slots[:, None] - rows + 1 + jnp.arange(rows, dtype=jnp.int32)[None]
        score = functools.partial(pallas_kernels.index_scores, implementation="mosaic")
        us = bench_timing.time_kernels(
            lambda q, w, keys, seen, ids, scales, score=score: score(
                q, w, keys, seen, block_ids=ids, key_scales=scales
            ),
            q, w, layer.keys, seen, ids, layer.scales,
        )  # fmt: skip
        one = found[0]["us"] if found else us
        keys = "fp8" if fp8 else "bf16"
        found.append(
            {"batch": batch, "keys": keys, "sparsity": sparsity, "rows": rows, "us": round(us, 1),
             "times_one_row": round(us / one, 3)}
        )  # fmt: skip
        print(f"batch {batch:3} {keys:4} sparsity {sparsity:.1f} rows {rows}: {us:8.1f} us, "
              f"{us / one:.2f} times one row", flush=True)  # fmt: skip
    return found
