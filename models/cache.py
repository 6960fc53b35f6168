"""The decoding cache: per-layer leaves addressed by absolute position.

Everything beyond a request's ``length`` is garbage that no mask ever lets through, so a rollback
is only a smaller ``length``. That holds because the rings (the sliding window, and the raw
projections that a compressor pools) keep ``max_draft`` more tokens than they need: tokens written
and then rejected never overwrite one that is still needed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int32

from models.config import CSA, ModelConfig
from models.layers import F32
from models.selector import IndexKeys

SLOT_MULTIPLE = 64
"""CSA slots are allocated in whole selection blocks, so that kernels see full blocks."""


class LayerCache(struct.PyTreeNode):
    """What one layer keeps. Ring row of token p is ``p % ring length``; R rows, S slots."""

    window: Float[Array, "B R d"]
    """Key = value vectors of the last tokens, RoPE applied."""
    compressed: Float[Array, "B S d"] | None = None
    """Slot c pools tokens r*c .. r*c + r - 1 (and, for CSA, the slot before), RoPE applied."""
    pending: Float[Array, "B R 2 w"] | None = None
    """Raw compressor projections of the last tokens, float32: [kv, gate + ape]."""
    index_keys: IndexKeys | None = None
    """CSA only: the lightning indexer's key of each slot."""
    index_pending: Float[Array, "B R 2 w"] | None = None
    """CSA only: as ``pending`` for the indexer's own compressor."""


class Cache(struct.PyTreeNode):
    """State of B requests: how many tokens each has, and what the layers keep of them."""

    length: Int32[Array, "B"]
    layers: tuple[LayerCache, ...]
    max_len: int = struct.field(pytree_node=False)
    """Tokens a request may hold; forward steps beyond it are the caller's error."""
    max_draft: int = struct.field(pytree_node=False)
    """A step of up to ``max_draft + 1`` tokens can be rolled back by any number of them."""


class Step(NamedTuple):
    """Where the T tokens of one step stand."""

    length: Int32[Array, "B"]
    """Tokens before the step."""
    num_new: Int32[Array, "B"]
    """Tokens of the step that are real; the rest is padding on the right."""
    positions: Int32[Array, "B T"]

    @property
    def valid(self) -> Bool[Array, "B T"]:
        return jnp.arange(self.positions.shape[1])[None] < self.num_new[:, None]

    @property
    def end(self) -> Int32[Array, "B"]:
        """Tokens after the step."""
        return self.length + self.num_new


def make_step(length: Int32[Array, "B"], num_new: Int32[Array, "B"], tokens: int) -> Step:
    return Step(length, num_new, length[:, None] + jnp.arange(tokens, dtype=jnp.int32)[None])


def pooled_tokens(ratio: int) -> int:
    """Tokens one slot pools: its own r and, with CSA's overlap, the previous slot's."""
    return 2 * ratio if ratio == CSA else ratio


def init_cache(
    cfg: ModelConfig,
    batch: int,
    max_len: int,
    *,
    dtype: Any = jnp.float32,
    max_draft: int = 7,
    mtp: bool = False,
) -> Cache:
    """An empty cache for ``batch`` requests of up to ``max_len`` tokens.

    ``mtp=True`` gives the MTP block's own cache instead of the trunk's.

    Raises:
        ValueError: a size that is not positive.
    """
    if batch < 1 or max_len < 1 or max_draft < 0:
        raise ValueError(
            f"batch {batch} and max_len {max_len} must be at least 1 and max_draft {max_draft} "
            "not negative"
        )
    ratios = cfg.compress_ratios[cfg.num_hidden_layers :] if mtp else cfg.layer_ratios

    def layer(ratio: int) -> LayerCache:
        window = jnp.zeros((batch, cfg.sliding_window + max_draft, cfg.head_dim), dtype)
        if not ratio:
            return LayerCache(window)
        slots = -(-max_len // ratio)
        overlap = 2 if ratio == CSA else 1
        ring = pooled_tokens(ratio) + max_draft

        def pending(width: int) -> Array:
            return jnp.zeros((batch, ring, 2, overlap * width), F32)

        if ratio != CSA:
            compressed = jnp.zeros((batch, slots, cfg.head_dim), dtype)
            return LayerCache(window, compressed, pending(cfg.head_dim))
        slots += -slots % SLOT_MULTIPLE
        return LayerCache(
            window,
            jnp.zeros((batch, slots, cfg.head_dim), dtype),
            pending(cfg.head_dim),
            IndexKeys(jnp.zeros((batch, slots, cfg.index_head_dim), dtype)),
            pending(cfg.index_head_dim),
        )

    return Cache(
        length=jnp.zeros((batch,), jnp.int32),
        layers=tuple(layer(r) for r in ratios),
        max_len=max_len,
        max_draft=max_draft,
    )


def rollback(cache: Cache, length: Int32[Array, "B"]) -> Cache:
    """Forget all tokens from ``length`` on: at most ``max_draft + 1`` of the newest ones."""
    return cache.replace(length=jnp.minimum(cache.length, length))


def clear(cache: Cache, where: Bool[Array, "B"]) -> Cache:
    """Empty the requests marked in ``where``, so that their rows can serve new ones.

    The values are zeroed as well: what is invisible has probability zero, but zero times a NaN
    that an old request left would still be a NaN.
    """

    def zero(x: Array) -> Array:
        return jnp.where(jnp.expand_dims(where, tuple(range(1, x.ndim))), jnp.zeros((), x.dtype), x)

    return jax.tree.map(zero, cache)


class History(NamedTuple):
    """The ring's tokens together with a step's new ones, addressable by position."""

    rows: Float[Array, "B M ..."]
    positions: Int32[Array, "B M"]
    """The token of each row; negative where there is none."""

    def at(self, positions: Int32[Array, "B P"], step: Step, ring: int) -> Float[Array, "B P ..."]:
        """Rows of the given tokens; garbage for tokens that the history does not hold."""
        index = positions % ring
        if self.rows.shape[1] > ring:
            new = ring + positions - step.length[:, None]
            index = jnp.where(positions < step.length[:, None], index, new)
            index = jnp.clip(index, 0, self.rows.shape[1] - 1)
        return jax.vmap(lambda rows, i: rows[i])(self.rows, index)


def extend_ring(
    ring: Float[Array, "B R ..."], new: Float[Array, "B T ..."], step: Step, max_draft: int
) -> tuple[Float[Array, "B R ..."], History]:
    """Write a step's real tokens into a ring; and all that the step can see, ring and new.

    Steps of at most ``max_draft + 1`` tokens overwrite nothing that they need: they read the ring
    itself after the write. Longer ones (prefill) read the old ring and the new rows side by side.
    """
    size, tokens = ring.shape[1], new.shape[1]
    end = step.end[:, None]
    # Of a step longer than the ring only the last tokens stay; the others are dropped.
    keep = step.valid & (step.positions >= end - size)
    index = jnp.where(keep, step.positions % size, size)
    batch = jnp.arange(ring.shape[0], dtype=jnp.int32)[:, None]
    written = ring.at[batch, index].set(new.astype(ring.dtype), mode="drop", unique_indices=True)

    row = jnp.arange(size, dtype=jnp.int32)[None]
    last = (end if tokens <= max_draft + 1 else step.length[:, None]) - 1
    held = last - (last - row) % size
    if tokens <= max_draft + 1:
        return written, History(written, held)
    rows = jnp.concatenate((ring, new.astype(ring.dtype)), axis=1)
    held = jnp.where(held >= 0, held, -1)
    return written, History(
        rows, jnp.concatenate((held, jnp.where(step.valid, step.positions, -1)), axis=1)
    )


def write_slots(
    slots: Float[Array, "B S ..."], first: Int32[Array, "B"], new: Float[Array, "B n ..."]
) -> Float[Array, "B S ..."]:
    """Write n consecutive slots from ``first`` on; what falls outside is dropped."""
    index = first[:, None] + jnp.arange(new.shape[1], dtype=jnp.int32)[None]
    batch = jnp.arange(slots.shape[0], dtype=jnp.int32)[:, None]
    return slots.at[batch, index].set(new.astype(slots.dtype), mode="drop", unique_indices=True)
