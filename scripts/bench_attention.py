"""Attention over listed rows, ours and XLA's: a CSA layer's lists and an HCA layer's dense slots.

``python scripts/bench.py attention`` on a GPU prints kernel durations from the profiler beside the
floors of reading rows and of multiplying them, a table and one JSON line. Rows of tokens that share
their slots are counted once a token, as the kernel copies them. What is timed is compared with
float32.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from pathlib import Path
from typing import Any

import bench_timing
import jax
import jax.numpy as jnp
import numpy as np
from environment import environment

from pallas_kernels import sparse_attention

HEADS, WIDTH, WINDOW, HELD, TOP_K = 64, 512, 128, 135, 512
READ, RATE = 4.66e6, 790e6
"""Bytes a microsecond that an H200 reads (results/kernels_h200.json), and operations in bf16."""


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench.py attention", description=__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[24, 1])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--csa-slots", type=int, default=126976)
    parser.add_argument("--hca-slots", type=int, default=3968)
    parser.add_argument("--out", type=Path, default=Path("results/attention_h200.json"))
    args = parser.parse_args(argv)
    if jax.default_backend() != "gpu":
        sys.exit(
            f"bench.py attention needs a GPU; JAX's default backend is {jax.default_backend()}"
        )
    report: dict[str, Any] = environment() | {
        "command": " ".join(["python scripts/bench.py attention", *argv]),
        "heads": HEADS,
        "width": WIDTH,
        "window": WINDOW,
        "rows": [],
    }
    for batch in args.batches:
        for rows in args.rows:
            for kind, slots in (("CSA", args.csa_slots), ("HCA", args.hca_slots)):
                report["rows"].append(timed(kind, batch, rows, slots))
                args.out.parent.mkdir(parents=True, exist_ok=True)
                args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))


def make_inputs(kind: str, batch: int, rows: int, slots: int) -> dict[str, Any]:
    """Random arguments of ``sparse_attention``: every token sees a full window."""
    keys, rng = jax.random.split(jax.random.key(0), 4), np.random.default_rng(0)

    def normal(key, *shape):
        return jax.random.normal(key, shape, jnp.bfloat16)

    def lists(size: int, count: int) -> jax.Array:
        drawn = [rng.choice(size, count, replace=False) for _ in range(batch * rows)]
        return jnp.asarray(np.sort(drawn).reshape(batch, rows, count), jnp.int32)

    inputs = {
        "q": normal(keys[0], batch, rows, HEADS, WIDTH),
        "window": normal(keys[1], batch, HELD, WIDTH),
        "window_ids": lists(HELD, WINDOW),
        "sink": jax.random.normal(keys[2], (HEADS,)),
        "slots": normal(keys[3], batch, slots, WIDTH),
    }
    if kind == "CSA":
        return inputs | {"slot_ids": lists(slots, min(TOP_K, slots))}
    return inputs | {"num_slots": jnp.full((batch, rows), slots, jnp.int32)}


def timed(kind: str, batch: int, rows: int, slots: int) -> dict[str, Any]:
    """Microseconds of both implementations and of the floors."""
    inputs = make_inputs(kind, batch, rows, slots)
    seen = WINDOW + (inputs["slot_ids"].shape[2] if kind == "CSA" else slots)
    tokens = batch * rows
    result: dict[str, Any] = {"kind": kind, "batch": batch, "tokens_each": rows, "seen": seen}
    outputs = {}
    for impl in ("mosaic", "xla"):
        call = jax.jit(functools.partial(sparse_attention, scale=WIDTH**-0.5, implementation=impl))
        outputs[impl] = call(**inputs)
        us = bench_timing.time_kernels(lambda x, call=call: call(**x), inputs)
        result["pallas" if impl == "mosaic" else impl] = round(us, 1)
    # Two requests in float32: all of them would be gigabytes of gathered rows.
    some = {
        name: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x
        for name, x in (inputs | {k: v[:2] for k, v in inputs.items() if k != "sink"}).items()
    }
    exact = sparse_attention(**some, scale=WIDTH**-0.5, implementation="xla")
    error = float(jnp.linalg.norm(outputs["mosaic"][:2] - exact) / jnp.linalg.norm(exact))
    if not error < 5e-3:
        raise AssertionError(f"{kind}, batch {batch}: the kernel is {error} away from float32")
    result["error"] = error
    result["floor_reading"] = round(tokens * seen * WIDTH * 2 / READ, 1)
    result["floor_multiplying"] = round(tokens * seen * HEADS * WIDTH * 4 / RATE, 1)
    print("  ".join(f"{name} {value}" for name, value in result.items()), flush=True)
    return result
