"""Attention of a token to the rows that it may see: a list of its window's, and chosen slots."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.compat import Implementation, choose, full_precision

TILE = 64
"""Rows that the kernel takes at a time: lists are whole tiles of them."""
WIDEST = 512
"""Channels of a row, of which the kernel has room for two tiles and a query."""
LONGEST = 2**15 - TILE
"""Rows of a list: the kernel counts two lists in one integer."""


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
    for 64 heads, and nothing else: rows that are not listed may hold anything. It has no gradient.

    Args:
        q: Queries, after rotation.
        window: Rows of the sliding window, in any order.
        window_ids: Rows of ``window`` that each token sees: these first, all in bounds, then -1. To
            the kernel a list ends at as many rows as it names; -1 in between is a mistake.
        sink: The logit of each head's sink, to which no row belongs.
        slots: Rows of compressed slots; None for layers that have none.
        slot_ids: Slots that each token sees, likewise.
        num_slots: How many of the first slots each token sees, instead of ``slot_ids``.
        scale: Of the scores, commonly d^-1/2.
        implementation: "mosaic", "xla", or None to choose by platform, version and shape.

    Raises:
        ValueError: arguments that do not fit, or a named implementation cannot run.

    Source: the spec's "Attention".
    """
    if q.ndim != 4:
        raise ValueError(f"q has shape {list(q.shape)}; allowed: [B, T, heads, channels]")
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
    lists = [x for x in (window_ids, slot_ids) if x is not None]
    numbers = [*lists, *([] if num_slots is None else [num_slots[..., None]])]
    if any(x.ndim != 3 or x.shape[:2] != (batch, rows) or x.dtype != jnp.int32 for x in numbers):
        raise ValueError(
            f"lists are {[f'{x.dtype}{list(x.shape)}' for x in lists]} and num_slots "
            f"{None if num_slots is None else f'{num_slots.dtype}{list(num_slots.shape)}'}; "
            f"allowed: int32[{batch}, {rows}, rows listed] and int32[{batch}, {rows}]"
        )
    if sink.shape != (heads,):
        raise ValueError(
            f"sink has shape {list(sink.shape)}; allowed: [{heads}], one for each head"
        )
    why_not = _why_not_mosaic(q, tables, lists)
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
    precision = full_precision(rows)
    return jnp.einsum(formula, x, rows, precision=precision, preferred_element_type=jnp.float32)


def _why_not_mosaic(q: jax.Array, tables: list[jax.Array], lists: list[jax.Array]) -> str | None:
    dtypes = {str(x.dtype) for x in (q, *tables)}
    if dtypes != {"bfloat16"}:
        return f"queries and rows are {', '.join(sorted(dtypes))}, not bfloat16"
    heads, width = q.shape[2:]
    if heads % TILE or width % (2 * TILE) or not 0 < width <= WIDEST:
        return (
            f"{heads} heads of {width} channels are not a multiple of {TILE} heads of a multiple "
            f"of {2 * TILE} channels up to {WIDEST}"
        )
    for x in (q, *tables, *lists):
        if x.size == 0:
            return f"there is nothing in {list(x.shape)}"
    for x in lists:
        if x.shape[2] > LONGEST:
            return f"lists of {x.shape[2]} rows are longer than {LONGEST}"
    return None
