"""Compressed slots: a gated pooling of token projections, with overlap for CSA.

Source: the spec's "Compressed slots, exactly". Projections and pooling are float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from models.cache import RingPlan, Step, extend_ring, history_rows, plan_ring, pooled_tokens
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
    p: Any,
    x: Float[Array, "B T D"],
    ring: Float[Array, "B R 2 w"],
    plan: SlotPlan,
    ratio: int,
    cfg: ModelConfig,
) -> tuple[Float[Array, "B n c"], Float[Array, "B R 2 w"]]:
    """The slots of the step's run, after norm and RoPE, and the ring of projections.

    ``slot = rope(norm(sum_t softmax_t(gate_t + ape_t) * kv_t))`` per channel. For CSA the rows
    are the slot's own four tokens with the second half of the channels and the previous slot's
    with the first half. The row of ape is the token's index in its own slot, so it is added
    before the projections are stored.
    """
    gate = linear(x, p["wgate"], F32) + jnp.take(p["ape"], plan.phase, axis=0)
    new = jnp.stack((linear(x, p["wkv"], F32), gate), axis=2)
    ring, history = extend_ring(ring, new, plan.ring)
    rows = jax.vmap(lambda held, i: held[i])(history, plan.rows)
    if ratio == CSA:
        half = rows.shape[-1] // 2
        previous, own = rows[:, :, :ratio, :, :half], rows[:, :, ratio:, :, half:]
        rows = jnp.concatenate((previous, own), axis=2)
    kv, gate = rows[..., 0, :], rows[..., 1, :]
    gate = jnp.where(plan.exists[..., None], gate, -jnp.inf)
    content = jnp.sum(jax.nn.softmax(gate, axis=2) * kv, axis=2).astype(x.dtype)
    rotation = plan.rotations[content.shape[-1]]
    return apply_rope(rms_norm(content, p["norm"], cfg.rms_norm_eps), rotation), ring
