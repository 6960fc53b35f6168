"""The pairs of draft policies, side by side on a trace."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from spin_jax import SpinConfig, SpinSelector, recorded_miss, savings
from spin_jax.speculative import Mask, Update
from spin_jax.trace import Trace, replay

SPARSITIES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)
POLICIES: tuple[tuple[Mask, Update], ...] = (
    ("union", "prefix"),
    ("union", "row0"),
    ("row0", "prefix"),
    ("row0", "row0"),
)


def compare(
    trace: Trace, sparsities: Sequence[float], base: SpinConfig, seed: int
) -> list[dict[str, Any]]:
    """Miss and realized sparsity of every pair of draft policies at every sparsity, printed too."""
    rows = []
    policies = POLICIES if trace.num_slots.shape[2] > 1 else POLICIES[:1]
    print("mask    update  sparsity  realized  mean miss  p99 miss  identical")
    for mask, update in policies:
        for sparsity in sparsities:
            config = dataclasses.replace(base, sparsity=sparsity)
            selector = SpinSelector(config, mask=mask, update=update)
            states = replay(trace, selector, jax.random.key(seed))
            missed = recorded_miss(states)
            saved = savings(states, config, trace.q.shape[-1], "float32")
            known = int(missed.rows) > 0
            row = {
                "mask": mask,
                "update": update,
                "sparsity": sparsity,
                "realized_sparsity": saved.realized_sparsity,
                "miss_mean": float(missed.mean) if known else None,
                "miss_p99": float(missed.p99) if known else None,
                "miss_mean_of_p99": float(missed.mean_of_p99) if known else None,
                "miss_rows": int(missed.rows),
                "identical_masks": saved.identical_masks,
            }
            rows.append(row)
            cells = (saved.realized_sparsity, row["miss_mean"], row["miss_p99"])
            shown = ["-" if x is None else f"{x:.4f}" for x in (*cells, saved.identical_masks)]
            print(
                f"{mask:7} {update:7} {sparsity:8.2f} {shown[0]:>9} {shown[1]:>10} "
                f"{shown[2]:>9} {shown[3]:>10}",
                flush=True,
            )
    return rows
