"""Exact, deterministic top-K of compact scores, as slot numbers in ascending order."""

from __future__ import annotations

from numbers import Integral

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.compat import Implementation, choose
from pallas_kernels.ordering import ordered_floats
from pallas_kernels.scoring import GROUP

MAX_K = 2048
BUFFER = 8192
"""Scores that the kernel holds at once: as many need no maxima."""
MAX_GROUPS = 16384
"""The most maxima that the kernel ranks."""


def top_k_slots(
    scores: Float[Array, "... M"],
    k: int,
    *,
    block_ids: Int32[Array, "B C"] | None = None,
    block_size: int = 64,
    group_max: Float[Array, "... G"] | None = None,
    num_scores: Int32[Array, "..."] | None = None,
    num_blocks: Int32[Array, " B"] | None = None,
    implementation: Implementation | None = None,
) -> Int32[Array, "... K"]:
    """``TopK(s, min(k, M))``: the slots of the highest scores, ties to the lowest, ascending.

    Args:
        scores: Float32 [B, M] or [B, R, M]. Minus infinity and NaN are never selected.
        k: How many to select, at most 2048 for the kernel.
        block_ids: Ascending blocks, padded with -1, that the scores belong to: position p is
            slot ``block_ids[p // block_size] * block_size + p % block_size``. None: slot p.
        block_size: Slots a block.
        group_max: The maximum of every 16 scores but NaN, G = ceil(M / 16), as ``index_scores``
            returns it, if known: the K-th highest maximum bounds the K-th highest score, so that
            the kernel need not read groups that hold none of the K highest.
        num_scores: How many scores each row has, [B] or [B, R], M if None: whatever stands beyond
            them, and in maxima that reach beyond them, is not ranked. Few of many cost little more
            than as few alone.
        num_blocks: The same where there are ``block_ids``: how many of them are not -1.
        implementation: "mosaic", "xla", or None to choose by platform, version and shape.

    Returns:
        int32 slot numbers, K = min(k, M), ascending; -1 at the end where fewer are selectable.

    Raises:
        ValueError: arguments that do not fit, or a named implementation cannot run.

    Source: paper, Algorithm 1 step 7.
    """
    if (num_blocks if block_ids is None else num_scores) is not None:
        raise ValueError("num_scores goes without block_ids, and num_blocks with them")
    counts = num_scores if block_ids is None else num_blocks
    check_ranking(scores, k, block_ids, block_size, group_max, counts)
    arguments = (scores, k, block_ids, block_size, group_max, counts)
    if choose("top_k_slots", implementation, unsupported(scores, k)) == "mosaic":
        from pallas_kernels.mosaic.topk import top_k_slots_mosaic

        return top_k_slots_mosaic(*arguments)
    return top_k_slots_reference(*arguments)


def check_ranking(
    scores: jax.Array,
    k: int,
    block_ids: jax.Array | None,
    block_size: int,
    group_max: jax.Array | None,
    counts: jax.Array | None,
) -> None:
    """Raises ``ValueError`` unless what describes the scores fits them."""
    if isinstance(k, bool) or not isinstance(k, Integral) or k < 1:
        raise ValueError(f"k is {k!r}; allowed: an integer of at least 1")
    *leading, length = scores.shape
    groups = (*leading, -(-length // GROUP))
    if group_max is not None and group_max.shape != groups:
        raise ValueError(
            f"group_max has shape {list(group_max.shape)}; allowed: {list(groups)}, the maximum of "
            f"every {GROUP} scores, or None"
        )
    allowed = tuple(leading) if block_ids is None else block_ids.shape[:1]
    if counts is not None and counts.shape != allowed:
        name = "num_scores" if block_ids is None else "num_blocks"
        raise ValueError(
            f"{name} has shape {list(counts.shape)}; allowed: {list(allowed)}, or None"
        )
    if block_ids is None:
        return
    if block_size < 1 or length % block_size:
        raise ValueError(f"block_size is {block_size}; allowed: a divisor of {length} scores")
    wanted = (leading[0] if leading else 1, length // block_size)
    if block_ids.shape != wanted:
        raise ValueError(
            f"block_ids has shape {list(block_ids.shape)}; allowed: {list(wanted)}, a block for "
            f"every {block_size} scores"
        )


def unsupported(scores: jax.Array, k: int) -> str | None:
    """Why the kernel does not take these scores; None if it does."""
    length = scores.shape[-1]
    if k > MAX_K:
        return f"k={k} is more than {MAX_K}"
    if length % 4:
        return f"{length} scores are not a multiple of 4"
    if group_size(length) is None:
        return f"{length} scores are not whole groups of a size that makes {MAX_GROUPS} or fewer"
    return None


def group_size(length: int) -> int | None:
    """How many scores share a maximum in the kernel; 0: none do; None: no size suits it."""
    if length <= BUFFER:
        return 0
    for size in (GROUP, 2 * GROUP, 4 * GROUP, 8 * GROUP):
        if length % size == 0 and length // size <= MAX_GROUPS:
            return size
    return None


def few_groups(size: int) -> int:
    """So many groups are all read, without a search among their maxima."""
    return BUFFER // size


def first_scores(
    scores: Float[Array, "... M"], counts: Int32[Array, "#..."] | None
) -> Float[Array, "... M"]:
    """The first so many of each row, then minus infinity."""
    if counts is None:
        return scores
    place = jax.lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1)
    return jnp.where(place < counts[..., None], scores, -jnp.inf)


def top_k_slots_reference(
    scores: jax.Array,
    k: int,
    block_ids: jax.Array | None,
    block_size: int,
    group_max: jax.Array | None,
    counts: jax.Array | None,
) -> jax.Array:
    """The same in plain ``jnp``, for any shape."""
    del group_max
    *_, length = scores.shape
    if counts is not None and block_ids is not None:
        counts = counts.reshape(-1, *(1,) * (scores.ndim - 2)) * block_size
    scores = first_scores(scores, counts)
    values = ordered_floats(scores)
    if k < length:
        # In floats: XLA's CPU backend sorts integers in full, 40 times slower at 32,768 scores.
        # Its float top-K compares bits, as the ones elsewhere do, and takes the lowest of ties.
        values, positions = jax.lax.top_k(values, k)
    else:
        positions = jax.lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1)
    after_all = jnp.iinfo(jnp.int32).max
    if block_ids is not None:
        blocks = block_ids.reshape(block_ids.shape[0], *(1,) * (scores.ndim - 2), -1)
        blocks = jnp.broadcast_to(blocks, (*scores.shape[:-1], blocks.shape[-1]))
        block = jnp.take_along_axis(blocks, positions // block_size, axis=-1)
        positions = block * block_size + positions % block_size
    slots = jnp.sort(jnp.where(values == -jnp.inf, after_all, positions), axis=-1)
    return jnp.where(slots == after_all, -1, slots)
