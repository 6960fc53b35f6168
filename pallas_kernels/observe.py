"""Top-K and SPIN's state update together, where the step that scored them surely stands."""

from __future__ import annotations

import jax
from jaxtyping import Array, Float, Int32

from pallas_kernels.compat import Implementation, choose
from pallas_kernels.ema import ema_scatter
from pallas_kernels.topk import check_ranking, top_k_slots, unsupported


def top_k_and_observe(
    scores: Float[Array, "B M"],
    k: int,
    V: Float[Array, "B S"],
    D_rev: Float[Array, "B S"],
    block_ids: Int32[Array, "B C"],
    num_slots: Int32[Array, " B"],
    *,
    block_size: int,
    decay: float,
    group_max: Float[Array, "B G"] | None = None,
    num_blocks: Int32[Array, " B"] | None = None,
    implementation: Implementation | None = None,
) -> tuple[Int32[Array, "B K"], Float[Array, "B S"], Float[Array, "B S"]]:
    """``top_k_slots`` and ``ema_scatter`` of the same scores: slots, V and D_rev.

    The kernel does both in one launch: the update costs nothing beside top-K. With drafts, what
    counts is known only after verification, and the two must stay apart.

    Args:
        scores: Float32 scores in the order of ``block_ids``, M = C * block_size.
        k: How many slots to select.
        V: See ``ema_scatter``.
        D_rev: See ``ema_scatter``.
        block_ids: Ascending blocks, padded with -1.
        num_slots: Visible slots.
        block_size: Slots a block.
        decay: The weight of the old value.
        group_max: The maximum of every 16 scores, if known; G = ceil(M / 16).
        num_blocks: Exactly how many of ``block_ids`` are not -1, if known; needed where
            ``index_scores`` did not fill the places of the others.
        implementation: "mosaic", "xla", or None to choose by platform, version and shape.

    Raises:
        ValueError: arguments that do not fit, or a named implementation cannot run.

    Source: paper, Algorithm 1 steps 7 and 8.
    """
    check_ranking(scores, k, block_ids, block_size, group_max, num_blocks)
    if not V.shape == D_rev.shape == (scores.shape[0], V.shape[-1]):
        raise ValueError(
            f"V has shape {list(V.shape)} and D_rev {list(D_rev.shape)}; allowed: a row for each "
            f"of {scores.shape[0]} requests, both of as many slots"
        )
    why_not = unsupported(scores, k)
    if choose("top_k_and_observe", implementation, why_not) == "mosaic":
        from pallas_kernels.mosaic.observe import top_k_and_observe_mosaic

        return top_k_and_observe_mosaic(
            scores, k, V, D_rev, block_ids, num_slots, block_size, decay, group_max, num_blocks
        )
    chosen = top_k_slots(
        scores, k, block_ids=block_ids, block_size=block_size, group_max=group_max,
        num_blocks=num_blocks, implementation=implementation,
    )  # fmt: skip
    update: tuple[jax.Array, jax.Array] = ema_scatter(
        V, D_rev, scores, block_ids, num_slots, block_size=block_size, decay=decay,
        implementation=implementation,
    )  # fmt: skip
    return chosen, *update
