"""Times block selection, scoring, top-K and the EMA update: ours, XLA's and PyTorch's.

``python scripts/bench.py kernels`` on a GPU prints a table and one JSON line, and writes both to
``results/kernels_h200.json``; a run of some ``--parts`` leaves the rows of the others in the file.
All parts take about ten minutes, most of them compilation. Stages are kernel durations from the
profiler; a total is a whole step, timed in a loop inside one jit, whose position differs from step
to step and whose V and D are carried. Random priorities are an input. What is timed is checked.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import bench_timing
import bench_torch
import jax
import jax.numpy as jnp
from bench_steps import (
    BLOCK,
    EXPLORATION,
    HEADS,
    WIDTH,
    Inputs,
    budget_of,
    make_inputs,
    stages,
    total,
)
from environment import environment

from pallas_kernels.scoring import GROUP

PARTS = ("torch", "stages", "totals", "layers", "live", "grid")
LAYERS = 21
"""Layers with an indexer in Flash."""


def check_stages(args, x: Inputs, V, D_rev, ids, count, scores, group_max) -> dict[str, Any]:
    """Compares the kernels with float32 and the references on the inputs that are timed."""
    some, [layer] = slice(0, 2), x.layers
    exact = jnp.einsum(
        "bnx,bsx->bns",
        layer.q[some, 0].astype(jnp.float32),
        layer.keys[some].astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    )
    exact = jnp.sum(jax.nn.relu(exact) * layer.w[some, 0, :, None], axis=1)
    exact = exact if layer.scales is None else exact * layer.scales[some]
    error = jnp.linalg.norm(scores[some, 0] - exact) / jnp.linalg.norm(exact)
    named = {}
    capacity = ids.shape[1]
    for impl in ("mosaic", "xla"):
        stage = stages(impl, args.top_k, capacity)
        some_scores = scores[..., : capacity * BLOCK]
        some_max = group_max[..., : capacity * BLOCK // GROUP]
        named[impl] = (
            jnp.sort(jax.jit(stage.top_k)(scores, None, group_max, x.num_slots), axis=-1),
            *jax.tree.leaves(jax.jit(stage.select)(V, D_rev, x)),
            *jax.jit(stage.both)(*V, *D_rev, some_scores, ids, x.num_slots, some_max, count),
        )
    same = [bool(jnp.allclose(a, b, atol=1e-6)) for a, b in zip(*named.values(), strict=True)]
    if not (float(error) < 1e-3 and all(same)):
        raise AssertionError(f"kernels and references differ: score error {error}, equal {same}")
    return {"score_error": float(error), "top_k_select_ema_equal": True}


def stage_rows(args, batch: int, slots: int, fp8: bool, sparsity: float):
    """Profiled durations of each stage on one set of inputs: ours, and XLA's for bf16 keys."""
    x, V, D_rev = make_inputs(args, batch, slots, fp8, sparsity)
    m = budget_of(slots, sparsity, args.top_k)
    label = functools.partial(_row, keys=fp8, sparsity=sparsity, batch=batch, slots=slots)
    timer, rows, checks = bench_timing.time_kernels, [], {}
    for impl in ("mosaic",) if fp8 else ("mosaic", "xla"):
        stage = stages(impl, args.top_k, m)
        score = lambda x, ids, stage=stage: stage.score(*x.layers, x.num_slots, ids)  # noqa: E731
        [ids], [count] = [None], [x.num_slots]
        if sparsity:
            [ids], [count] = jax.jit(stage.select)(V, D_rev, x)
        scores, group_max = jax.jit(score)(x, ids)
        rows.append(label("score", impl, us=timer(score, x, ids)))
        if not fp8:  # the other stages do not see the keys
            rows.append(label("top_k", impl, us=timer(stage.top_k, scores, ids, group_max, count)))
        if sparsity and not fp8:
            rows.append(label("select", impl, us=timer(stage.select, V, D_rev, x)))
            # The profiled call keeps its operands, so it copies V and D first: not the kernel's.
            copies = timer(lambda V, D: (jnp.copy(V), jnp.copy(D)), *V, *D_rev)
            us = timer(stage.ema, *V, *D_rev, scores, ids, x.num_slots)
            rows.append(label("ema", impl, us=us - copies))
            if impl == "mosaic":
                us = timer(stage.both, *V, *D_rev, scores, ids, x.num_slots, group_max, count)
                rows.append(label("top_k+ema", impl, us=us - copies))
        if sparsity and impl == "mosaic":
            full = jax.jit(score)(x, None)
            checks = check_stages(args, x, V, D_rev, ids, count, *full)
    return rows, checks


def _row(stage, impl, *, keys, sparsity, batch, slots, us, **more):
    impl = "pallas" if impl == "mosaic" else impl
    return {"stage": stage, "impl": impl, "keys": "fp8" if keys else "bf16", "sparsity": sparsity,
            "batch": batch, "slots": slots, "us": round(us, 1), **more}  # fmt: skip


def run_totals(specs: list[tuple[dict[str, Any], Any, Any, list[dict[str, Any]]]]):
    """Compiles everything on several threads, then times one after the other."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        compiling = [pool.submit(lower().compile) for _, lower, _, _ in specs]
    loops = [one.result() for one in compiling]
    rows = []
    for (labels, _, run, variants), loop in zip(specs, loops, strict=True):
        for changes in variants:
            rows.append(_row("total", us=run(loop, **changes), **{**labels, **changes}))
    return rows


def spec(
    args, impl, batch, slots, fp8, sparsity, variants=({},), *,
    live=None, capacity=None, unroll=1, fused=True, layers=1,
):  # fmt: skip
    """The labels of a total, how to lower and run it, and the variants to run it in."""
    labels = dict(impl=impl, keys=fp8, sparsity=sparsity, batch=batch, slots=slots)
    if live:
        labels["live_slots"] = live
    if sparsity and impl == "mosaic" and not fused:
        labels["launches"] = "top_k and ema apart"
    if layers > 1:
        labels["layers"] = layers
    options = dict(live=live, capacity=capacity, unroll=unroll, fused=fused, layers=layers)
    return labels, *total(args, impl, batch, slots, fp8, sparsity, **options), list(variants)


def floors() -> dict[str, float]:
    """What the card's memory does: reading alone, and reading and writing."""
    x = jnp.ones((2**29,), jnp.float32)
    reading = bench_timing.time_kernels(jnp.max, x)
    copying = bench_timing.time_kernels(lambda x: x + 1, x)
    gigabytes = x.nbytes / 1e3
    return {"read_tb_s": gigabytes / reading / 1e3, "copy_tb_s": 2 * gigabytes / copying / 1e3}


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench.py kernels", description=__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[32, 1])
    parser.add_argument("--slots", type=int, default=131072)
    parser.add_argument("--top-k", type=int, default=512)
    parser.add_argument("--grid-batches", type=int, nargs="+", default=[1, 8, 32, 96])
    parser.add_argument("--grid-slots", type=int, nargs="+", default=[8192, 32768, 131072, 262144])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path, default=Path("results/kernels_h200.json"))
    args = parser.parse_args(argv)
    torch = None
    if "torch" in args.parts:
        torch = bench_torch.run(args.batches, args.slots, args.top_k)
    if jax.default_backend() != "gpu":
        sys.exit(f"bench.py kernels needs a GPU; JAX's default backend is {jax.default_backend()}")

    made = environment()
    report: dict[str, Any] = {
        "hardware": made["hardware"],
        "versions": made["versions"] | {"torch": torch["torch"] if torch else None},
        "runs": {},
        "settings": {"top_k": args.top_k, "heads": HEADS, "width": WIDTH, "block": BLOCK,
                     "exploration": EXPLORATION},
        "floors": floors(),
        "checks": [],
        "rows": [],
    }  # fmt: skip
    if args.out.exists():
        before = json.loads(args.out.read_text())
        report["rows"] = [row for row in before["rows"] if row["part"] not in args.parts]
        report["runs"] = {k: v for k, v in before["runs"].items() if k not in args.parts}
        if torch is None:
            report["versions"]["torch"] = before["versions"]["torch"]
        if "stages" not in args.parts:
            report["checks"] = before["checks"]

    def add(part, rows):
        """Keeps what has been measured, should a later part fail."""
        report["rows"] += [row | {"part": part} for row in show(rows)]
        report["runs"][part] = {
            "commit": made["commit"],
            "date": made["date"],
            "command": " ".join(["python scripts/bench.py kernels", *argv]),
        }
        report["summary"] = summary(args, report["rows"])
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n")

    if torch:
        add("torch", torch["rows"])
    for batch in args.batches if "stages" in args.parts else ():
        for fp8 in (False, True):
            for sparsity in (0.0, 0.4):
                rows, checks = stage_rows(args, batch, args.slots, fp8, sparsity)
                report["checks"] += [{"batch": batch, "fp8": fp8} | checks] if checks else []
                add("stages", rows)
    if "totals" in args.parts:
        add("totals", run_totals(headline(args)))
    if "layers" in args.parts:
        add("layers", run_totals(model_layers(args)))
    if "live" in args.parts:
        add("live", run_totals(few_live(args)))
    if "grid" in args.parts:
        add("grid", run_totals(grid(args)))
    print(json.dumps({k: v for k, v in report.items() if k != "rows"}))


def headline(args) -> list[Any]:
    """Totals at the size that the targets are stated for; XLA's for bf16, and all-keep for FP8."""
    specs = []
    for batch in args.batches:
        for fp8 in (False, True):
            for sparsity in (0.0, 0.4, 0.5):
                case = (batch, args.slots, fp8, sparsity)
                specs.append(spec(args, "mosaic", *case, unroll=4))
                if not fp8 or not sparsity:
                    specs.append(spec(args, "xla", *case))
                if sparsity and batch == max(args.batches):
                    specs.append(spec(args, "mosaic", *case, unroll=4, fused=False))
    return specs


def model_layers(args) -> list[Any]:
    """Totals a layer of all of a model's, whose selections share their launches.

    Of the smallest batch, where launches count most.
    """
    return [
        spec(args, "mosaic", min(args.batches), slots, fp8, sparsity, layers=LAYERS)
        for slots in (args.slots, 2 * args.slots)
        for fp8 in (False, True)
        for sparsity in (0.0, 0.4, 0.5)
    ]


def grid(args) -> list[Any]:
    """Totals over batches and slots."""
    specs = []
    for batch in args.grid_batches:
        for slots in args.grid_slots:
            specs.append(spec(args, "mosaic", batch, slots, False, 0.0))
            # One compilation serves every sparsity: its lists have room for the lowest.
            capacity = budget_of(slots, 0.2, args.top_k)
            variants = [{"sparsity": s} for s in (0.2, 0.3, 0.4, 0.5)]
            specs.append(
                spec(args, "mosaic", batch, slots, False, 0.2, variants, capacity=capacity)
            )
    return specs


def few_live(args) -> list[Any]:
    """Totals of 2,048 live slots, in the largest window and in one of just as many."""
    return [
        spec(args, "mosaic", max(args.batches), slots, False, sparsity, live=2048)
        for slots in (max(args.grid_slots), 2048)
        for sparsity in (0.0, 0.4)
    ]


def summary(args, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Ratios of totals at the headline size, and from how many slots SPIN 40% pays."""
    totals = {
        tuple(r[name] for name in ("impl", "keys", "sparsity", "batch", "slots")): r["us"]
        for r in sorted(rows, key=lambda r: r["part"] == "totals")  # the last counts
        if r["stage"] == "total" and not {"live_slots", "launches", "layers"} & set(r)
    }

    def ratio(above, below):
        return round(totals[above] / totals[below], 3) if {above, below} <= set(totals) else None

    result: dict[str, Any] = {}
    for batch in args.batches:
        for keys in ("bf16", "fp8"):
            at = lambda impl, s, b=batch, k=keys: (impl, k, s, b, args.slots)  # noqa: E731
            result[f"batch {batch}, {keys}"] = {
                "all_keep_us": totals.get(at("pallas", 0.0)),
                "all_keep_over_spin_40": ratio(at("pallas", 0.0), at("pallas", 0.4)),
                "all_keep_over_spin_50": ratio(at("pallas", 0.0), at("pallas", 0.5)),
                "xla_all_keep_over_spin_40": ratio(at("xla", 0.0), at("pallas", 0.4)),
            }
    layers = {
        (r["keys"], r["sparsity"], r["batch"], r["slots"]): r["us"] for r in rows if "layers" in r
    }
    for (keys, sparsity, batch, slots), us in layers.items():
        if not sparsity and (keys, 0.4, batch, slots) in layers:
            result[f"batch {batch}, {keys}, {slots} slots, a layer of {LAYERS}"] = {
                "all_keep_us": us,
                "all_keep_over_spin_40": round(us / layers[keys, 0.4, batch, slots], 3),
                "all_keep_over_spin_50": round(us / layers[keys, 0.5, batch, slots], 3),
            }
    for batch in args.grid_batches:
        gains = {s: ratio(("pallas", "bf16", 0.0, batch, s), ("pallas", "bf16", 0.4, batch, s))
                 for s in args.grid_slots}  # fmt: skip
        if any(gains.values()):
            pays = [s for s, gain in gains.items() if gain and gain > 1]
            result[f"batch {batch}: SPIN 40% pays from slots"] = min(pays, default=None)
    return result


def show(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for r in rows:
        apart = ", " + r["launches"] if "launches" in r else ""
        apart += f", a layer of {r['layers']}" if "layers" in r else ""
        live = f" ({r['live_slots']} live)" if "live_slots" in r else ""
        size = f"sparsity {r['sparsity']:.1f} batch {r['batch']:3} slots {r['slots']:7}{live}"
        print(
            f"{r['stage']:9} {r['impl']:6} {r['keys']:4} {size} {r['us']:9.1f} us{apart}",
            flush=True,
        )
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
