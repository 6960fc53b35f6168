"""Lightning-indexer scores of the slots of selected blocks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.compat import Implementation, choose
from pallas_kernels.ordering import LOWEST

FLOAT8 = jnp.dtype(jnp.float8_e4m3fn)
GROUP = 16
"""Scores that share a maximum: the rows of a key block that one warp holds."""


def index_scores(
    q: Float[Array, "B R n x"],
    w: Float[Array, "B R n"],
    keys: Float[Array, "B S x"],
    num_slots: Int32[Array, "B R"],
    *,
    block_ids: Int32[Array, "B C"] | None = None,
    block_size: int = 64,
    key_scales: Float[Array, "B S"] | None = None,
    fill: bool = True,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B R M"], Float[Array, "B R G"]]:
    """``s_c = scale_c sum_h w_h relu(q_h . k_c)`` of every slot c of the selected blocks.

    Args:
        q: Queries of R verifier rows, which share one read of each key: bf16, f32 or e4m3. A
            positive scale a head of FP8 queries belongs into ``w``.
        w: Float32 head weights, possibly negative.
        keys: bf16, f32 or e4m3.
        num_slots: How many slots each row sees: slot c is visible iff ``c < num_slots``.
        block_ids: Blocks to score, ascending, padded with -1; None scores all ceil(S / block_size).
        block_size: Slots a block.
        key_scales: Positive float32 scale of each slot of FP8 keys.
        fill: Whether everything is written. Without, what belongs to -1 blocks, or where there are
            no ids to 64 slots that no row sees, is arbitrary and costs nothing: for top-K that is
            told how many there are, and the update, which passes over it.
        implementation: "mosaic", "xla", or None to choose by platform, version and shape.

    Returns:
        Float32 scores in the order of ``block_ids``, M = C * block_size, and the maximum of every
        16 of them, G = ceil(M / 16), by which top-K leaves most of them unread. Minus infinity
        where a slot is not visible to the row, beyond S, or in a -1 block (see ``fill``); a visible
        slot whose score is NaN or minus infinity has the lowest finite float32.

    Raises:
        ValueError: a named implementation cannot run.

    Source: spec deepseek_v4, "Compressed slots"; paper, Algorithm 1 step 6.
    """
    arguments = (q, w, keys, num_slots, block_ids, block_size, key_scales)
    unsupported = _unsupported(q, keys, block_ids, block_size)
    if choose("index_scores", implementation, unsupported) == "mosaic":
        from pallas_kernels.mosaic.scoring import index_scores_mosaic

        return index_scores_mosaic(*arguments, fill)
    return index_scores_reference(*arguments)


def _unsupported(
    q: jax.Array, keys: jax.Array, block_ids: jax.Array | None, block_size: int
) -> str | None:
    rows, heads, width = q.shape[1:]
    slots = keys.shape[1]
    if q.dtype != keys.dtype or keys.dtype not in (jnp.bfloat16, FLOAT8):
        return f"queries are {q.dtype} and keys {keys.dtype}; both must be bfloat16 or {FLOAT8}"
    if block_size % 64:
        return f"block_size={block_size} is not a multiple of 64"
    if slots % (64 if block_ids is not None else block_size):
        return f"{slots} slots are not whole blocks of {block_size}"
    if heads % 8 or heads > 256 or width * keys.dtype.itemsize % 128 or width > 256:
        return f"{heads} heads of {width} channels do not tile: heads in 8s, channels in 128 bytes"
    if rows * heads * width * keys.dtype.itemsize > 128 * 1024:
        return f"the queries of {rows} rows do not fit shared memory"
    return None


def index_scores_reference(
    q: jax.Array,
    w: jax.Array,
    keys: jax.Array,
    num_slots: jax.Array,
    block_ids: jax.Array | None,
    block_size: int,
    key_scales: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """The same in plain ``jnp``, for any shapes and types."""
    batch, slots, _ = keys.shape
    num_blocks = -(-slots // block_size)
    if block_ids is None:
        slot_ids = jnp.arange(num_blocks * block_size)[None]
        padding = num_blocks * block_size - slots
        keys = jnp.pad(keys, ((0, 0), (0, padding), (0, 0)))
        scales = None if key_scales is None else jnp.pad(key_scales, ((0, 0), (0, padding)))
    else:
        slot_ids = slots_of(block_ids, block_size)
        keys = take_blocks(keys, block_ids, block_size)
        scales = None if key_scales is None else take_blocks(key_scales, block_ids, block_size)
    common = jnp.bfloat16 if q.dtype == keys.dtype != jnp.float32 else jnp.float32
    # Keys on the left in the layout they have: else XLA's CPU backend transposes a copy of them.
    dots = jnp.einsum(
        "bsx,brnx->bsrn",
        keys.astype(common),
        q.astype(common),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    # Not an einsum: a weighted sum fuses with the ReLU, a product of matrices does not.
    scores = jnp.sum(jax.nn.relu(dots) * w.astype(jnp.float32)[:, None], axis=3)
    scores = jnp.swapaxes(scores, 1, 2)
    if scales is not None:
        scores = scores * scales[:, None, :]
    limit = jnp.minimum(num_slots, slots)[:, :, None]
    visible = (slot_ids[:, None, :] >= 0) & (slot_ids[:, None, :] < limit)
    scores = jnp.where(visible, jnp.where(scores > LOWEST, scores, LOWEST), -jnp.inf)
    return scores, group_maxima(scores, GROUP)


def group_maxima(scores: Float[Array, "... M"], size: int) -> Float[Array, "... G"]:
    """The maximum of every ``size`` scores, the last group filled up with minus infinity."""
    padding = [(0, 0)] * (scores.ndim - 1) + [(0, -scores.shape[-1] % size)]
    padded = jnp.pad(scores, padding, constant_values=-jnp.inf)
    return jnp.max(padded.reshape(*scores.shape[:-1], -1, size), axis=-1)


def slots_of(block_ids: Int32[Array, "... C"], block_size: int) -> Int32[Array, "... C*b"]:
    """The slots of each block, in order; all -1 for a block of -1."""
    within = jax.lax.broadcasted_iota(jnp.int32, (*block_ids.shape, block_size), block_ids.ndim)
    slots = jnp.where(block_ids[..., None] < 0, -1, block_ids[..., None] * block_size + within)
    return slots.reshape(*block_ids.shape[:-1], -1)


def take_blocks(
    x: Float[Array, "B S ..."], block_ids: Int32[Array, "B C"], block_size: int
) -> Float[Array, "B C*b ..."]:
    """Gathers whole blocks of slots; what -1 blocks and slots beyond S hold is arbitrary."""
    batch, slots, *rest = x.shape
    if slots % block_size:
        at = jnp.clip(slots_of(block_ids, block_size), 0, slots - 1)
        return jnp.take_along_axis(x, at.reshape(*at.shape, *(1 for _ in rest)), axis=1)
    blocks = x.reshape(batch, slots // block_size, block_size, *rest)
    at = jnp.maximum(block_ids, 0).reshape(batch, -1, 1, *(1 for _ in rest))
    return jnp.take_along_axis(blocks, at, axis=1).reshape(batch, -1, *rest)
