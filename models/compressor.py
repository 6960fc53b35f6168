"""Compressed slots: a gated pooling of token projections, with overlap for CSA.

Source: the spec's "Compressed slots, exactly". Projections and pooling are float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from models.cache import (
    RingPlan,
    Step,
    extend_ring,
    history_rows,
    plan_ring,
    pooled_tokens,
    take_rows,
)
from models.config import CSA, ModelConfig
from models.layers import (
    F32,
    Rotation,
    apply_rope,
    linear,
    rms_norm,
    rope_frequencies,
    rope_rotation,
)


class SlotPlan(NamedTuple):
    """The run of slots that a step can complete, for all layers of one ratio.

    Slot c completes with token r*c + r - 1. Slots of the run that do not complete yet are
    computed all the same: they stay invisible, and are written again by the step that does.
    """

    ring: RingPlan
    first: Int32[Array, "B"]
    """The run's first slot."""
    rows: Int32[Array, "B n P"]
    """History rows of the P tokens that each slot pools."""
    exists: Bool[Array, "B n P"]
    """False for the tokens before token 0, which slot 0's overlap would pool."""
    phase: Int32[Array, "B T"]
    """Index of each new token in its own slot: its row of ape."""
    rotations: dict[int, Rotation]
    """Rotary factors of the slots, by head width."""


def plan_slots(step: Step, ratio: int, max_draft: int, cfg: ModelConfig) -> SlotPlan:
    pooled = pooled_tokens(ratio)
    ring = pooled + max_draft
    first = step.length // ratio
    count = -(-step.positions.shape[1] // ratio)
    slot = first[:, None] + jnp.arange(count, dtype=jnp.int32)[None]
    begin = (slot + 1) * ratio - pooled
    tokens = begin[..., None] + jnp.arange(pooled, dtype=jnp.int32)[None, None]
    rows = history_rows(tokens.reshape(tokens.shape[0], -1), step, ring, max_draft)
    freqs = rope_frequencies(cfg, compressed=True)
    widths = {cfg.head_dim, cfg.index_head_dim} if ratio == CSA else {cfg.head_dim}
    return SlotPlan(
        plan_ring(step, ring, max_draft),
        first,
        rows.reshape(tokens.shape),
        tokens >= 0,
        jax.lax.rem(step.positions, jnp.int32(ratio)),
        {width: rope_rotation(slot * ratio, freqs, width) for width in sorted(widths)},
    )


def compress(
    compressors: Sequence[Any],
    x: Float[Array, "B T D"],
    ring: Float[Array, "B R 2 c w"],
    plan: SlotPlan,
    ratio: int,
    cfg: ModelConfig,
) -> tuple[list[Float[Array, "B n d"]], Float[Array, "B R 2 c w"]]:
    """Each compressor's slots of the step's run, after norm and RoPE, and the ring extended.

    ``slot = rope(norm(sum_t softmax_t(gate_t + ape_t) * kv_t))`` per channel. For CSA (c = 2) the
    rows are the slot's own four tokens with the second half of the channels and the previous
    slot's with the first half. The row of ape is the token's index in its own slot, so it is added
    before the projections are stored. A layer's compressors pool the same tokens, so their
    channels lie side by side in one ring and are pooled together.
    """
    widths = [p["norm"].shape[0] for p in compressors]

    def halves(projected: Float[Array, "B T cw"], width: int) -> Float[Array, "B T c w"]:
        return projected.reshape(*projected.shape[:2], -1, width)

    kv, gate = [], []
    for p, width in zip(compressors, widths, strict=True):
        kv.append(halves(linear(x, p["wkv"], F32), width))
        gate.append(halves(linear(x, p["wgate"], F32) + _phase_rows(p["ape"], plan), width))
        # XLA merges products with the same left side, and on a GPU reads their matrices where they
        # are; but more than four are copied together at every step. Each compressor has its own.
        x = jax.lax.optimization_barrier(x)
    new = jnp.stack((jnp.concatenate(kv, -1), jnp.concatenate(gate, -1)), axis=2)
    ring, history = extend_ring(ring, new, plan.ring)
    rows = take_rows(history, plan.rows)
    if ratio == CSA:
        rows = jnp.concatenate((rows[:, :, :ratio, :, 0], rows[:, :, ratio:, :, 1]), axis=2)
    else:
        rows = rows[..., 0, :]
    weight = jnp.where(plan.exists[..., None], rows[..., 1, :], -jnp.inf)
    weight = jnp.exp(weight - jnp.max(weight, axis=2, keepdims=True))
    content = jnp.sum(weight * rows[..., 0, :], axis=2) / jnp.sum(weight, axis=2)

    slots, begin = [], 0
    for p, width in zip(compressors, widths, strict=True):
        own = content[..., begin : begin + width].astype(x.dtype)
        own = rms_norm(own, p["norm"], cfg.rms_norm_eps)
        slots.append(apply_rope(own, plan.rotations[width]))
        begin += width
    return slots, ring


def _phase_rows(ape: Float[Array, "r cw"], plan: SlotPlan) -> Float[Array, "B T cw"]:
    return ape.at[plan.phase].get(mode="promise_in_bounds", wrap_negative_indices=False)
