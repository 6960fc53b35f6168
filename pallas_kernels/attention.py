"""Attention of a token to the rows that it may see: a list of its window's, and chosen slots."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.compat import Implementation, choose

TILE = 64
"""Rows that the kernel takes at a time: lists are whole tiles of them."""
WIDEST = 512
"""Channels of a row, of which the kernel has room for two tiles and a query."""


def sparse_attention(
    q: Float[Array, "B T H d"],
    window: Float[Array, "B M d"],
    window_ids: Int32[Array, "B T W"],
    sink: Float[Array, "H"],
    *,
    slots: Float[Array, "B S d"] | None = None,
    slot_ids: Int32[Array, "B T K"] | None = None,
    num_slots: Int32[Array, "B T"] | None = None,
    scale: float,
    implementation: Implementation | None = None,
) -> Float[Array, "B T H d"]:
    """``o = sum e^s v / (sum e^s + e^sink)`` with ``s = scale q . k``, over listed rows, float32.

    Each vector is both key and value, and serves all heads. The kernel reads each listed row once
    for 64 heads, and nothing else: rows that are not listed may hold anything.

    Args:
        q: Queries, after rotation.
        window: Rows of the sliding window, in any order.
        window_ids: Rows of ``window`` that each token sees; those come first, then -1.
        sink: The logit of each head's sink, to which no row belongs.
        slots: Rows of compressed slots; None for layers that have none.
        slot_ids: Slots that each token sees; those come first, then -1.
        num_slots: How many of the first slots each token sees, instead of ``slot_ids``.
        scale: Of the scores, commonly d^-1/2.
        implementation: "mosaic", "xla", or None to choose by platform, version and shape.

    Raises:
        ValueError: arguments that do not fit, or a named implementation cannot run.

    Source: the spec's "Attention".
    """
    batch, rows, heads, width = q.shape
    tables = [window] if slots is None else [window, slots]
    if any(x.ndim != 3 or x.shape[0] != batch or x.shape[2] != width for x in tables):
        raise ValueError(
            f"q is {list(q.shape)} and the tables of rows are {[list(x.shape) for x in tables]}; "
            f"allowed: [{batch}, rows, {width}]"
        )
    if (slots is None) != (slot_ids is None and num_slots is None) or (
        slot_ids is not None and num_slots is not None
    ):
        raise ValueError("slots need slot_ids or num_slots, one of them, and neither without slots")
    lists = [x for x in (window_ids, slot_ids, num_slots) if x is not None]
    if any(x.shape[:2] != (batch, rows) for x in lists):
        raise ValueError(
            f"lists are {[list(x.shape) for x in lists]}; allowed: one for each of the "
            f"{batch} x {rows} tokens"
        )
    if sink.shape != (heads,):
        raise ValueError(f"{sink.size} sinks for {heads} heads; allowed: one for each head")
    why_not = why_not_mosaic(q, *tables)
    if choose("sparse_attention", implementation, why_not) == "mosaic":
        from pallas_kernels.mosaic.attention import sparse_attention_mosaic

        return sparse_attention_mosaic(
            q, window, window_ids, sink, slots, slot_ids, num_slots, scale
        )
    groups = [(_take(window, window_ids), window_ids >= 0)]
    if slots is not None and slot_ids is not None:
        groups.append((_take(slots, slot_ids), slot_ids >= 0))
    elif slots is not None and num_slots is not None:
        groups.append((slots, jnp.arange(slots.shape[1])[None, None] < num_slots[..., None]))
    # Scores as [B, T, H, M]: one row of all groups and the sink is one softmax, in one kernel.
    scores = [
        jnp.where(seen[:, :, None], _product("bthd,{}->bthm", q, x) * scale, -jnp.inf)
        for x, seen in groups
    ]
    column = jnp.broadcast_to(sink[:, None], (*q.shape[:3], 1))
    weights = jax.nn.softmax(jnp.concatenate((*scores, column), axis=-1), axis=-1)
    out, first = jnp.zeros(q.shape, jnp.float32), 0
    for x, seen in groups:
        part = weights[..., first : first + seen.shape[-1]].astype(x.dtype)
        out = out + _product("bthm,{}->bthd", part, x)
        first += seen.shape[-1]
    return out


def _take(table: jax.Array, ids: jax.Array) -> jax.Array:
    return jax.vmap(lambda rows, index: rows[index])(table, jnp.maximum(ids, 0))


def _product(formula: str, x: jax.Array, rows: jax.Array) -> jax.Array:
    """With rows that all tokens share, [B, M, d], or each has for itself, [B, T, M, d]."""
    formula = formula.format("bmd" if rows.ndim == 3 else "btmd")
    return jnp.einsum(formula, x, rows, preferred_element_type=jnp.float32)


def why_not_mosaic(q: jax.Array, *tables: jax.Array) -> str | None:
    """Why the kernel does not suit these arrays; None if it does."""
    dtypes = {str(x.dtype) for x in (q, *tables)}
    if dtypes != {"bfloat16"}:
        return f"queries and rows are {', '.join(sorted(dtypes))}, not bfloat16"
    heads, width = q.shape[2:]
    if heads % TILE or width % (2 * TILE) or not 0 < width <= WIDEST:
        return (
            f"{heads} heads of {width} channels are not a multiple of {TILE} heads of a multiple "
            f"of {2 * TILE} channels up to {WIDEST}"
        )
    return None if q.size else f"there is nothing in {list(q.shape)}"
