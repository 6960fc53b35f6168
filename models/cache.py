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
"""CSA slots are allocated in whole selection blocks, so that kernels see full blocks, and more HCA
slots than that too: a product over an odd number of them would have XLA pad the cache each step."""


class LayerCache(struct.PyTreeNode):
    """What one layer keeps. Ring row of token p is ``p % ring length``; R rows, S slots."""

    window: Float[Array, "B R d"]
    """Key = value vectors of the last tokens, RoPE applied."""
    compressed: Float[Array, "B S d"] | None = None
    """Slot c pools tokens r*c .. r*c + r - 1 (and, for CSA, the slot before), RoPE applied."""
    pending: Float[Array, "B R 2 c w"] | None = None
    """Raw compressor projections of the last tokens, float32: kv, then gate + ape. For CSA c = 2
    (what the next slot pools, then what the own one does) and the w channels are the main
    compressor's followed by the indexer's."""
    index_keys: IndexKeys | None = None
    """CSA only: the lightning indexer's key of each slot."""


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
    if max_len >= 2**31 - max_draft:
        raise ValueError(f"max_len is {max_len}; positions are int32, choose less than 2^31")
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
        ring = (batch, pooled_tokens(ratio) + max_draft, 2)
        if ratio == CSA or slots > SLOT_MULTIPLE:
            slots += -slots % SLOT_MULTIPLE
        if ratio != CSA:
            compressed = jnp.zeros((batch, slots, cfg.head_dim), dtype)
            return LayerCache(window, compressed, jnp.zeros((*ring, 1, cfg.head_dim), F32))
        return LayerCache(
            window,
            jnp.zeros((batch, slots, cfg.head_dim), dtype),
            jnp.zeros((*ring, 2, cfg.head_dim + cfg.index_head_dim), F32),
            _empty_index_keys(batch, slots, dtype, cfg),
        )

    return Cache(
        length=jnp.zeros((batch,), jnp.int32),
        layers=tuple(layer(r) for r in ratios),
        max_len=max_len,
        max_draft=max_draft,
    )


def _empty_index_keys(batch: int, slots: int, dtype: Any, cfg: ModelConfig) -> IndexKeys:
    shape = (batch, slots, cfg.index_head_dim)
    if cfg.fp8_index_keys:
        return IndexKeys(jnp.zeros(shape, jnp.float8_e4m3fn), jnp.zeros(shape[:2], F32))
    return IndexKeys(jnp.zeros(shape, dtype))


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


class RingPlan(NamedTuple):
    """How a step of tokens meets a ring of ``size`` rows: the same for every layer.

    Steps of at most ``max_draft + 1`` tokens overwrite nothing that they need, so their history
    is the ring itself after the write. The history of longer steps (prefill) is the old ring and
    the new rows side by side.
    """

    write: Int32[Array, "B T"]
    """Ring row of each new token; beyond ``size``, which drops it, for those not to be kept."""
    held: Int32[Array, "B M"]
    """The token in each row of the history; negative where there is none."""


def plan_ring(step: Step, size: int, max_draft: int) -> RingPlan:
    tokens = step.positions.shape[1]
    # Of a step longer than the ring only the last tokens stay.
    keep = step.valid & (step.positions >= step.end[:, None] - size)
    # Dropped rows get distinct places beyond the end, as the scatter's indices must be.
    beyond = size + jnp.arange(tokens, dtype=jnp.int32)[None]
    write = jnp.where(keep, jax.lax.rem(step.positions, jnp.int32(size)), beyond)
    short = tokens <= max_draft + 1
    last = (step.end if short else step.length)[:, None] - 1
    age = last + size - jnp.arange(size, dtype=jnp.int32)[None]
    held = last - jax.lax.rem(age, jnp.int32(size))
    if not short:
        new = jnp.where(step.valid, step.positions, -1)
        held = jnp.concatenate((held, new), axis=1)
    return RingPlan(write, held)


def history_rows(
    positions: Int32[Array, "B P"], step: Step, size: int, max_draft: int
) -> Int32[Array, "B P"]:
    """Rows of the history that hold the given tokens; any row for tokens it does not hold."""
    tokens = step.positions.shape[1]
    row = jax.lax.rem(jnp.maximum(positions, 0), jnp.int32(size))
    if tokens <= max_draft + 1:
        return row
    new = size + jnp.minimum(positions - step.length[:, None], tokens - 1)
    return jnp.where(positions < step.length[:, None], row, new)


def extend_ring(
    ring: Float[Array, "B R ..."], new: Float[Array, "B T ..."], plan: RingPlan
) -> tuple[Float[Array, "B R ..."], Float[Array, "B M ..."]]:
    """Write a step's new rows into a ring; returns the ring and the history that the step sees."""
    written = put_rows(ring, plan.write, new)
    if plan.held.shape[1] == ring.shape[1]:
        return written, written
    return written, jnp.concatenate((ring, new.astype(ring.dtype)), axis=1)


def put_rows(
    array: Float[Array, "B M ..."], index: Int32[Array, "B P"], rows: Float[Array, "B P ..."]
) -> Float[Array, "B M ..."]:
    """Scatter distinct rows in place, dropping those beyond the end.

    The barrier keeps XLA from fusing the write into each of its readers, which would make every
    reader write a copy of the whole cache.
    """
    written = array.at[_batch(index), index].set(
        rows.astype(array.dtype), mode="drop", unique_indices=True, wrap_negative_indices=False
    )
    return jax.lax.optimization_barrier(written)


def take_rows(
    array: Float[Array, "B M ..."], index: Int32[Array, "B *P"]
) -> Float[Array, "B *P ..."]:
    """Gather each request's rows; every index must be one of its M rows."""
    return array.at[_batch(index), index].get(mode="promise_in_bounds", wrap_negative_indices=False)


def _batch(index: Array) -> Array:
    return jax.lax.broadcasted_iota(jnp.int32, (index.shape[0],) + (1,) * (index.ndim - 1), 0)
