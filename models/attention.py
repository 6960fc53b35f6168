"""The three attention kinds: sliding window, CSA with its lightning indexer, and HCA.

All share one key = value vector a token, a softmax with a sink, an inverse rotation of the output
and a grouped output projection; they differ in the compressed slots they add to the window.
Source: the spec's "Attention" and "Compressed slots, exactly".
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from models.cache import History, LayerCache, Step, extend_ring, write_slots
from models.compressor import Angles, compress, step_slots
from models.config import CSA, ModelConfig
from models.layers import (
    F32,
    apply_rope,
    hadamard_rotate,
    linear,
    mean_square_scale,
    rms_norm,
    rope_angles,
    rope_frequencies,
)
from models.quant_sim import simulate_fp4, simulate_fp8
from models.selector import IndexKeys, IndexQuery, Selector


class Rotations(NamedTuple):
    """The step's rotary angles: by layer kind at the tokens, by ratio at the slots."""

    tokens: dict[bool, Angles]
    slots: dict[int, Angles]


def step_rotations(step: Step, cfg: ModelConfig, ratios: tuple[int, ...]) -> Rotations:
    """All angles that layers of the given ratios need, computed once a step."""
    tokens = {
        compressed: rope_angles(step.positions, rope_frequencies(cfg, compressed=compressed))
        for compressed in sorted({bool(r) for r in ratios})
    }
    slots = {}
    for ratio in sorted(set(ratios) - {0}):
        first, count = step_slots(step, ratio)
        slot = first[:, None] + jnp.arange(count, dtype=jnp.int32)[None]
        slots[ratio] = rope_angles(slot * ratio, rope_frequencies(cfg, compressed=True))
    return Rotations(tokens, slots)


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
    step: Step,
    rotations: Rotations,
    ratio: int,
    cfg: ModelConfig,
    *,
    max_draft: int,
    selector: Selector,
    selector_state: Any,
) -> Attended:
    """Attention of one layer over window and compressed slots, and its cache extended."""
    angles = rotations.tokens[bool(ratio)]
    head_angles = (angles[0][:, :, None], angles[1][:, :, None])
    rotary = cfg.qk_rope_head_dim

    qr = rms_norm(linear(x, p["wq_a"]), p["q_norm"], cfg.rms_norm_eps)
    q = linear(qr, p["wq_b"], F32).reshape(*x.shape[:2], -1, cfg.head_dim)
    q = apply_rope(q * mean_square_scale(q, cfg.rms_norm_eps), head_angles).astype(x.dtype)
    kv = apply_rope(rms_norm(linear(x, p["wkv"]), p["kv_norm"], cfg.rms_norm_eps), angles)
    if cfg.quant_sim:
        kv = simulate_fp8(kv, rotary)
    window, history = extend_ring(cache.window, kv, step, max_draft)
    cache = cache.replace(window=window)
    groups = [_window_group(history, step, cfg.sliding_window)]

    observation, slots, query = (), None, None
    if ratio:
        content, pending = compress(
            p["compressor"], x, cache.pending, step, rotations.slots[ratio], ratio, max_draft, cfg
        )
        if cfg.quant_sim:
            content = simulate_fp8(content, rotary)
        first, _ = step_slots(step, ratio)
        compressed = write_slots(cache.compressed, first, content)
        cache = cache.replace(compressed=compressed, pending=pending)
        # Position p sees the slots that are complete with it, its own included.
        num_slots = (step.positions + 1) // ratio
        if ratio == CSA:
            query, cache = _index(
                p["indexer"], x, qr, head_angles, cache, step, rotations, max_draft, cfg
            )
            slots, observation = selector.select(
                query, cache.index_keys, num_slots, selector_state, top_k=cfg.index_topk
            )
            chosen = jax.vmap(lambda rows, i: rows[i])(compressed, jnp.maximum(slots, 0))
            groups.append(_Group(chosen, slots >= 0))
        else:
            visible = jnp.arange(compressed.shape[1])[None, None] < num_slots[..., None]
            groups.append(_Group(compressed, visible))

    o = _attend(q, groups, p["attn_sink"])
    o = apply_rope(o, head_angles, inverse=True).astype(x.dtype)
    # Group j projects its own heads with its own rows of wo_a.
    o = o.reshape(*x.shape[:2], cfg.o_groups, -1)
    wo_a = p["wo_a"].reshape(cfg.o_groups, cfg.o_lora_rank, -1)
    o = jnp.einsum("btgc,goc->btgo", o, wo_a, preferred_element_type=F32).astype(x.dtype)
    out = linear(o.reshape(*x.shape[:2], -1), p["wo_b"])
    return Attended(out, cache, observation, slots, query)


def _index(
    p: Any,
    x: Float[Array, "B T D"],
    qr: Float[Array, "B T q"],
    head_angles: Angles,
    cache: LayerCache,
    step: Step,
    rotations: Rotations,
    max_draft: int,
    cfg: ModelConfig,
) -> tuple[IndexQuery, LayerCache]:
    """The lightning indexer's queries at the step's tokens, and its keys of the new slots."""
    x_dim, heads = cfg.index_head_dim, cfg.index_n_heads
    q = linear(qr, p["wq_b"], F32).reshape(*x.shape[:2], heads, x_dim)
    q = hadamard_rotate(apply_rope(q, head_angles).astype(x.dtype))
    w = linear(x, p["weights_proj"], F32) * (x_dim**-0.5 * heads**-0.5)
    key, pending = compress(
        p["compressor"], x, cache.index_pending, step, rotations.slots[CSA], CSA, max_draft, cfg
    )
    key = hadamard_rotate(key)
    if cfg.quant_sim:
        q, key = simulate_fp4(q), simulate_fp4(key)
    first, _ = step_slots(step, CSA)
    keys = IndexKeys(write_slots(cache.index_keys.values, first, key))
    return IndexQuery(q, w), cache.replace(index_keys=keys, index_pending=pending)


class _Group(NamedTuple):
    """Vectors that act as keys and values, shared by a request's rows or one set a row."""

    rows: Float[Array, "B M d"] | Float[Array, "B T M d"]
    mask: Bool[Array, "B T M"]


def _window_group(history: History, step: Step, window: int) -> _Group:
    """Token p sees the tokens max(0, p - W + 1) .. p."""
    held, p = history.positions[:, None, :], step.positions[:, :, None]
    return _Group(history.rows, (held >= 0) & (held <= p) & (held > p - window))


def _attend(
    q: Float[Array, "B T H d"], groups: list[_Group], sink: Float[Array, "H"]
) -> Float[Array, "B T H d"]:
    """``o = sum e^s v / (sum e^s + e^sink)`` with ``s = q . k d^-1/2``, float32."""
    scale = q.shape[-1] ** -0.5
    scores = []
    for group in groups:
        rows = "bmd" if group.rows.ndim == 3 else "btmd"
        s = jnp.einsum(f"bthd,{rows}->bthm", q, group.rows, preferred_element_type=F32) * scale
        scores.append(jnp.where(group.mask[:, :, None], s, -jnp.inf))
    sink = sink[None, None, :, None]
    top = sink
    for s in scores:
        top = jnp.maximum(top, jnp.max(s, axis=-1, keepdims=True))
    total, out = jnp.exp(sink - top), jnp.zeros((), F32)
    for group, s in zip(groups, scores, strict=True):
        rows = "bmd" if group.rows.ndim == 3 else "btmd"
        e = jnp.exp(s - top)
        total = total + jnp.sum(e, axis=-1, keepdims=True)
        e = e.astype(group.rows.dtype)
        out = out + jnp.einsum(f"bthm,{rows}->bthd", e, group.rows, preferred_element_type=F32)
    return out / total
