"""Compressed slots: a gated pooling of token projections, with overlap for CSA.

Source: the spec's "Compressed slots, exactly". Projections and pooling are float32.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from models.cache import Step, extend_ring, pooled_tokens
from models.config import CSA, ModelConfig
from models.layers import F32, apply_rope, linear, rms_norm

Angles = tuple[Float[Array, "B n n2"], Float[Array, "B n n2"]]


def step_slots(step: Step, ratio: int) -> tuple[Int32[Array, "B"], int]:
    """The first slot that a step can complete, and how many it can at most.

    Slot c completes with token r*c + r - 1. Slots of the run that do not complete yet are
    computed all the same: they stay invisible and are written again when they do.
    """
    return step.length // ratio, -(-step.positions.shape[1] // ratio)


def compress(
    p: Any,
    x: Float[Array, "B T D"],
    ring: Float[Array, "B R 2 w"],
    step: Step,
    angles: Angles,
    ratio: int,
    max_draft: int,
    cfg: ModelConfig,
) -> tuple[Float[Array, "B n c"], Float[Array, "B R 2 w"]]:
    """The slots that the step completes, after norm and RoPE, and the ring of projections.

    ``slot = rope(norm(sum_t softmax_t(gate_t + ape_t) * kv_t))`` per channel. For CSA the rows
    are the slot's own four tokens with the second half of the channels and the previous slot's
    with the first half. The row of ape is the token's index in its own slot, so it is added
    before the projections are stored.
    """
    ape = jnp.take(p["ape"], step.positions % ratio, axis=0)
    new = jnp.stack((linear(x, p["wkv"], F32), linear(x, p["wgate"], F32) + ape), axis=2)
    ring, history = extend_ring(ring, new, step, max_draft)

    first, count = step_slots(step, ratio)
    pooled = pooled_tokens(ratio)
    slot = first[:, None] + jnp.arange(count, dtype=jnp.int32)[None]
    begin = (slot + 1) * ratio - pooled
    tokens = begin[..., None] + jnp.arange(pooled, dtype=jnp.int32)[None, None]
    rows = history.at(tokens.reshape(tokens.shape[0], -1), step, ring.shape[1])
    rows = rows.reshape(*tokens.shape, *rows.shape[2:])
    if ratio == CSA:
        half = rows.shape[-1] // 2
        rows = jnp.concatenate((rows[:, :, :ratio, :, :half], rows[:, :, ratio:, :, half:]), axis=2)
    kv, gate = rows[..., 0, :], rows[..., 1, :]
    gate = jnp.where(tokens[..., None] >= 0, gate, -jnp.inf)
    content = jnp.sum(jax.nn.softmax(gate, axis=2) * kv, axis=2).astype(x.dtype)
    return apply_rope(rms_norm(content, p["norm"], cfg.rms_norm_eps), angles), ring
