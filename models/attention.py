"""The three attention kinds: sliding window, CSA with its lightning indexer, and HCA.

All share one key = value vector a token, a softmax with a sink, an inverse rotation of the output
and a grouped output projection; they differ in the compressed slots they add to the window.
Source: the spec's "Attention" and "Compressed slots, exactly".
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from models.cache import (
    LayerCache,
    RingPlan,
    Step,
    extend_ring,
    history_rows,
    make_step,
    plan_ring,
    put_rows,
    take_rows,
)
from models.compressor import SlotPlan, compress, plan_slots
from models.config import CSA, ModelConfig
from models.layers import (
    F32,
    Rotation,
    apply_rope,
    einsum,
    hadamard_rotate,
    linear,
    mean_square_scale,
    rms_norm,
    rope_frequencies,
    rope_rotation,
)
from models.quant_sim import quantise_fp8, simulate_fp4, simulate_fp8
from models.selector import IndexKeys, IndexQuery, Selector
from pallas_kernels import sparse_attention
from pallas_kernels.compat import compiled_once, runs_on_gpu


class StepPlan(NamedTuple):
    """All that a step's layers share, computed once: indices, masks and rotary factors."""

    step: Step
    window: RingPlan
    in_window: Bool[Array, "B T M"] | None
    """Rows of the window's history that each token sees, tokens max(0, p - W + 1) .. p; on a GPU
    those rows are listed instead."""
    window_rows: Int32[Array, "B T W"] | None
    """Those rows, the newest first, then -1."""
    seen: Int32[Array, "B T"]
    """Tokens that each row sees, its own included; rows of padding see what the last real one
    does, so that they never reach beyond the allocation nor add to what a selector scores. A
    request without new tokens sees none: nothing is scored for it, and nothing remembered."""
    rotations: dict[tuple[bool, int], Rotation]
    """Rotary factors at the tokens, by (compressed layer, head width)."""
    slots: dict[int, SlotPlan]
    """By compress ratio."""


def plan_step(
    length: Int32[Array, "B"],
    num_new: Int32[Array, "B"],
    tokens: int,
    max_draft: int,
    cfg: ModelConfig,
    ratios: tuple[int, ...],
) -> StepPlan:
    """The plan of a step of ``tokens`` tokens for layers of the given ratios."""
    step = make_step(length, num_new, tokens)
    window = plan_ring(step, cfg.sliding_window + max_draft, max_draft)
    on_gpu = runs_on_gpu()
    heads = {(bool(ratio), cfg.head_dim) for ratio in ratios}
    if CSA in ratios:
        heads.add((True, cfg.index_head_dim))
    plan = StepPlan(
        step,
        window,
        None if on_gpu else _in_window(step, window, cfg),
        _window_rows(step, max_draft, cfg) if on_gpu else None,
        jnp.where(step.num_new[:, None], jnp.minimum(step.positions + 1, step.end[:, None]), 0),
        {
            (compressed, width): rope_rotation(
                step.positions, rope_frequencies(cfg, compressed=compressed), width
            )
            for compressed, width in sorted(heads)
        },
        {r: plan_slots(step, r, max_draft, cfg) for r in sorted(set(ratios) - {0})},
    )
    # Without a barrier XLA recomputes these small arrays inside every fusion of every layer that
    # reads them: a third of the compile time, and slower steps.
    return jax.lax.optimization_barrier(plan)


def _in_window(step: Step, window: RingPlan, cfg: ModelConfig) -> Bool[Array, "B T M"]:
    held, p = window.held[:, None, :], step.positions[:, :, None]
    return (held >= 0) & (held <= p) & (held > p - cfg.sliding_window)


def _window_rows(step: Step, max_draft: int, cfg: ModelConfig) -> Int32[Array, "B T W"]:
    # Padding sees what the last real token does.
    newest = jnp.minimum(step.positions, step.end[:, None] - 1)
    tokens = newest[..., None] - jnp.arange(cfg.sliding_window, dtype=jnp.int32)[None, None]
    size = cfg.sliding_window + max_draft
    rows = history_rows(tokens.reshape(tokens.shape[0], -1), step, size, max_draft)
    return jnp.where(tokens >= 0, rows.reshape(tokens.shape), -1)


class Attended(NamedTuple):
    """One layer's attention output and what else the step made of it."""

    out: Float[Array, "B T D"]
    cache: LayerCache
    observation: Any
    """From the selector, to be committed; empty where the layer has no indexer."""
    slots: Int32[Array, "B T K"] | None
    """The selected slots of a CSA layer, -1 padded."""
    query: IndexQuery | None


def attention(
    p: Any,
    x: Float[Array, "B T D"],
    cache: LayerCache,
    plan: StepPlan,
    ratio: int,
    cfg: ModelConfig,
    selector: Selector,
    selector_state: Any,
) -> Attended:
    """Attention of one layer over window and compressed slots, and its cache extended."""
    token_rotation = plan.rotations[bool(ratio), cfg.head_dim]
    once = partial(compiled_once, calls=cfg.num_hidden_layers)
    qr, q, kv = project_in(p, x, token_rotation, cfg)
    qr = once(qr)
    kv = _kv_grid(kv, cfg)
    window, history = extend_ring(cache.window, kv, plan.window)
    cache = cache.replace(window=window)

    observation, slots, query = (), None, None
    compressed, num_slots = None, None
    if ratio:
        assert cache.pending is not None and cache.compressed is not None
        slot_plan = plan.slots[ratio]
        compressors = [p["compressor"]]
        if ratio == CSA:
            compressors.append(p["indexer"]["compressor"])
        contents, pending = compress(compressors, x, cache.pending, slot_plan, ratio, cfg)
        compressed = _write_slots(cache.compressed, slot_plan, _kv_grid(contents[0], cfg))
        cache = cache.replace(compressed=compressed, pending=pending)
        # Position p sees the slots that are complete with it, its own included.
        num_slots = plan.seen // ratio
        if ratio == CSA:
            assert cache.index_keys is not None
            key = _index_grid(hadamard_rotate(contents[1]), cfg)
            new = IndexKeys(*quantise_fp8(key)) if cfg.fp8_index_keys else IndexKeys(key)
            keys = jax.tree.map(
                lambda slots, rows: _write_slots(slots, slot_plan, rows), cache.index_keys, new
            )
            cache = cache.replace(index_keys=keys)
            index_rotation = plan.rotations[True, cfg.index_head_dim]
            query = index_query(p["indexer"], x, qr, index_rotation, cfg)
            slots, observation = selector.select(
                query, keys, num_slots, selector_state, top_k=cfg.index_topk
            )

    if plan.window_rows is not None:
        o = sparse_attention(
            q, history, plan.window_rows, p["attn_sink"], slots=compressed, slot_ids=slots,
            num_slots=num_slots if slots is None else None, scale=cfg.head_dim**-0.5,
        )  # fmt: skip
    else:
        assert plan.in_window is not None
        groups = [_Group(history, plan.in_window)]
        if compressed is not None and num_slots is not None:
            if slots is None:
                visible = jnp.arange(compressed.shape[1])[None, None] < num_slots[..., None]
                groups.append(_Group(compressed, visible))
            else:
                groups.append(_Group(take_rows(compressed, jnp.maximum(slots, 0)), slots >= 0))
        o = once(_attend_on_cpu(q, groups, p["attn_sink"]))
    out = once(project_out(p, o, token_rotation, cfg, x.dtype))
    return Attended(out, cache, observation, slots, query)


@partial(jax.jit, static_argnames=("cfg",))
def project_in(
    p: Any, x: Float[Array, "B T D"], rotation: Rotation, cfg: ModelConfig
) -> tuple[Float[Array, "B T q"], Float[Array, "B T H d"], Float[Array, "B T d"]]:
    """The compressed query, the heads' queries and the vector that is key and value."""
    qr = rms_norm(linear(x, p["wq_a"]), p["q_norm"], cfg.rms_norm_eps)
    q = linear(qr, p["wq_b"], F32).reshape(*x.shape[:2], -1, cfg.head_dim)
    q = apply_rope(q * mean_square_scale(q, cfg.rms_norm_eps), _per_head(rotation)).astype(x.dtype)
    kv = rms_norm(linear(x, p["wkv"]), p["kv_norm"], cfg.rms_norm_eps)
    return qr, q, apply_rope(kv, rotation)


@partial(jax.jit, static_argnames=("cfg", "dtype"))
def project_out(
    p: Any, o: Float[Array, "B T H d"], rotation: Rotation, cfg: ModelConfig, dtype: Any
) -> Float[Array, "B T D"]:
    """The inverse rotation; group j projects its own heads with its own rows of wo_a; then wo_b."""
    o = apply_rope(o, _per_head(rotation), inverse=True).astype(dtype)
    o = o.reshape(*o.shape[:2], cfg.o_groups, -1)
    wo_a = p["wo_a"].reshape(cfg.o_groups, cfg.o_lora_rank, -1)
    o = einsum("btgc,goc->btgo", o, wo_a).astype(dtype)
    return linear(o.reshape(*o.shape[:2], -1), p["wo_b"])


def _per_head(rotation: Rotation) -> Rotation:
    own, partner = rotation
    return own[:, :, None], partner[:, :, None]


def index_query(
    p: Any,
    x: Float[Array, "B T D"],
    qr: Float[Array, "B T q"],
    rotation: Rotation,
    cfg: ModelConfig,
) -> IndexQuery:
    """The lightning indexer's queries and head weights at the step's tokens."""
    width, heads = cfg.index_head_dim, cfg.index_n_heads
    q = linear(qr, p["wq_b"], F32).reshape(*x.shape[:2], heads, width)
    q = apply_rope(q, _per_head(rotation)).astype(x.dtype)
    # A left side of its own: XLA would merge this product with those of ``compress``, and copy
    # all their matrices together, as so few columns do not fill a tile of the product. The barrier
    # has qr beside x, or it would be the same operation as the one there.
    alone, _ = jax.lax.optimization_barrier((x, qr))
    w = linear(alone, p["weights_proj"], F32)
    w = w * (width**-0.5 * heads**-0.5)
    q = _index_grid(hadamard_rotate(q), cfg)
    if cfg.fp8_index_keys:
        # w relu(s q . k) = s w relu(q . k) for s > 0: the head's weight takes the query's scale.
        q, scale = quantise_fp8(q)
        w = w * scale
    return IndexQuery(q, w)


def _index_grid(x: Float[Array, "... x"], cfg: ModelConfig) -> Float[Array, "... x"]:
    return simulate_fp4(x) if cfg.quant_sim else x


def _kv_grid(x: Float[Array, "... d"], cfg: ModelConfig) -> Float[Array, "... d"]:
    return simulate_fp8(x, cfg.qk_rope_head_dim) if cfg.quant_sim else x


def _write_slots(
    slots: Float[Array, "B S ..."], plan: SlotPlan, new: Float[Array, "B n ..."]
) -> Float[Array, "B S ..."]:
    """Write the step's run of slots; what falls beyond the allocation is dropped."""
    run = jnp.arange(new.shape[1], dtype=jnp.int32)[None]
    return put_rows(slots, plan.first[:, None] + run, new)


class _Group(NamedTuple):
    """Vectors that act as keys and values, shared by a request's rows or one set a row."""

    rows: Float[Array, "B M d"] | Float[Array, "B T M d"]
    mask: Bool[Array, "B T M"]

    @property
    def axes(self) -> str:
        """Their letters in an einsum."""
        return "bmd" if self.rows.ndim == 3 else "btmd"


@jax.jit
def _attend_on_cpu(
    q: Float[Array, "B T H d"], groups: list[_Group], sink: Float[Array, "H"]
) -> Float[Array, "B T H d"]:
    """``o = sum e^s v / (sum e^s + e^sink)`` with ``s = q . k d^-1/2``, float32.

    Scores are key-major, [B, M, T, H]: the cached rows are the left side of both products, in the
    layout they have in memory, and XLA's CPU backend makes no transposed copy of a cache. Rows of a
    window serve all tokens of a step; ``pallas_kernels.sparse_attention`` gathers them for each.
    """
    scale = q.shape[-1] ** -0.5
    scores = []
    for group in groups:
        s = einsum(f"{group.axes},bthd->bmth", group.rows, q) * scale
        mask = jnp.moveaxis(group.mask, 2, 1)[..., None]
        scores.append(jnp.where(mask, s, -jnp.inf))
    sink = sink[None, None, None, :]
    top = sink
    for s in scores:
        top = jnp.maximum(top, jnp.max(s, axis=1, keepdims=True))
    total, out = jnp.exp(sink - top), jnp.zeros((), F32)
    for group, s in zip(groups, scores, strict=True):
        e = jnp.exp(s - top)
        total = total + jnp.sum(e, axis=1, keepdims=True)
        out = out + einsum(f"bmth,{group.axes}->bthd", e.astype(group.rows.dtype), group.rows)
    return out / jnp.moveaxis(total, 1, 3)
