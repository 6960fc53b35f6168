"""Attention over whole sequences: what ``models.attention`` computes step by step, differentiable.

Every token of a sequence is known, so nothing is cached or gathered: the window is a band of
blocks, slots are pooled by reshaping, and a CSA layer attends to all slots with the unselected
ones masked. Gathered rows [B, T, K, d] would take d / H times the memory of the masked scores
[B, H, T, S] whenever S < K d / H. Source: the spec's "Attention" and "Compressed slots, exactly".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from models.attention import index_query, project_in, project_out
from models.config import CSA, ModelConfig
from models.layers import (
    F32,
    Rotation,
    apply_rope,
    einsum,
    hadamard_rotate,
    linear,
    rms_norm,
    rope_frequencies,
    rope_rotation,
)
from pallas_kernels.ranking import top_mask

_MASKED = -1e30
"""Finite, so that rows without any slot have gradients of 0 and not NaN."""


class SequencePlan(NamedTuple):
    """Rotary factors of T tokens and of their slots, shared by all layers."""

    tokens: dict[tuple[bool, int], Rotation]
    """By (compressed layer, head width)."""
    slots: dict[tuple[int, int], Rotation]
    """By (ratio, head width)."""


class SequenceAttention(NamedTuple):
    """One layer's output and, of a CSA layer, how far its indexer is from its attention."""

    out: Float[Array, "B T D"]
    index_loss: Float[Array, "B T"] | None
    """``KL(attention over the attended slots || softmax of their index scores)``, nats."""
    index_mass: Float[Array, "B T"] | None
    """Share of the attention over all visible slots that the indexer's top K hold."""


def plan_sequences(tokens: int, cfg: ModelConfig, ratios: Sequence[int]) -> SequencePlan:
    """Plan for sequences of ``tokens`` tokens.

    Raises:
        ValueError: ``tokens`` is not a multiple of the window and of the CSA ratio.
    """
    if tokens < 1 or tokens % cfg.sliding_window or tokens % CSA:
        raise ValueError(
            f"sequences have {tokens} tokens; training wants a multiple of the window "
            f"{cfg.sliding_window} and of {CSA}: pad on the right with weight 0"
        )
    at = jnp.arange(tokens, dtype=jnp.int32)[None]
    plain, far = (rope_frequencies(cfg, compressed=compressed) for compressed in (False, True))
    widths = (cfg.head_dim, cfg.index_head_dim) if CSA in ratios else (cfg.head_dim,)
    token_rotations = {(False, cfg.head_dim): rope_rotation(at, plain, cfg.head_dim)}
    token_rotations |= {(True, width): rope_rotation(at, far, width) for width in widths}
    slots = {}
    for ratio in set(ratios) - {0}:
        begin = jnp.arange(tokens // ratio, dtype=jnp.int32)[None] * ratio
        for width in widths:
            slots[ratio, width] = rope_rotation(begin, far, width)
    return SequencePlan(token_rotations, slots)


def pool_slots(
    p: Any, x: Float[Array, "B T D"], ratio: int, rotation: Rotation, cfg: ModelConfig
) -> Float[Array, "B S d"]:
    """``rope(norm(sum_t softmax_t(gate_t + ape_t) * kv_t))`` of each complete slot, per channel.

    With CSA's overlap a slot pools its own four tokens with the second half of the channels and
    the previous slot's with the first half; slot 0 has no previous ones.
    """
    width, count = p["norm"].shape[0], x.shape[1] // ratio
    shape = (x.shape[0], count, ratio, -1, width)
    x = x[:, : count * ratio]
    kv = linear(x, p["wkv"], F32).reshape(shape)
    gate = linear(x, p["wgate"], F32).reshape(shape) + p["ape"].reshape(1, 1, *shape[2:])
    if ratio == CSA:
        kv = jnp.concatenate((_previous(kv[..., 0, :], 0.0), kv[..., 1, :]), axis=2)
        gate = jnp.concatenate((_previous(gate[..., 0, :], _MASKED), gate[..., 1, :]), axis=2)
    else:
        kv, gate = kv[..., 0, :], gate[..., 0, :]
    content = jnp.sum(jax.nn.softmax(gate, axis=2) * kv, axis=2).astype(x.dtype)
    return apply_rope(rms_norm(content, p["norm"], cfg.rms_norm_eps), rotation)


def _previous(rows: Float[Array, "B S r w"], empty: float) -> Float[Array, "B S r w"]:
    """Each slot's predecessor's rows; ``empty`` for slot 0."""
    return jnp.pad(rows[:, :-1], ((0, 0), (1, 0), (0, 0), (0, 0)), constant_values=empty)


def attend_sequences(
    p: Any,
    x: Float[Array, "B T D"],
    plan: SequencePlan,
    ratio: int,
    cfg: ModelConfig,
    *,
    sparse: bool,
) -> SequenceAttention:
    """Attention of one layer; ``sparse`` restricts CSA to the indexer's top K slots.

    The indexer's inputs are detached: it learns from its own loss alone, and that loss moves
    nothing else. Source: DeepSeek-V3.2-Exp, "DeepSeek Sparse Attention", continued pre-training.
    """
    tokens = x.shape[1]
    token_rotation = plan.tokens[bool(ratio), cfg.head_dim]
    qr, q, kv = project_in(p, x, token_rotation, cfg)
    window, band = _band_scores(q, kv, cfg.sliding_window)
    slots = mask = chosen = index_scores = selected = None
    if ratio and tokens >= ratio:
        slots = pool_slots(p["compressor"], x, ratio, plan.slots[ratio, cfg.head_dim], cfg)
        # Computed on the device: as constants the masks of long sequences are megabytes a layer.
        seen = (jnp.arange(tokens, dtype=jnp.int32) + 1) // ratio
        slot = jnp.arange(slots.shape[1], dtype=jnp.int32)
        mask = (slot[None] < seen[:, None])[None]
        chosen = mask
        if ratio == CSA:
            index_scores = _index_scores(p["indexer"], x, qr, plan, cfg)
            selected = top_mask(jax.lax.stop_gradient(index_scores), mask, cfg.index_topk)
            chosen = selected if sparse else mask
    o, probabilities = _softmax_sum(q, window, band, slots, chosen, p["attn_sink"])

    out = project_out(p, o, token_rotation, cfg, x.dtype)
    if index_scores is None or chosen is None:
        return SequenceAttention(out, None, None)
    assert probabilities is not None and selected is not None
    target = jax.lax.stop_gradient(jnp.sum(probabilities, axis=1))
    total = jnp.sum(target, axis=-1, keepdims=True)
    target = target / jnp.maximum(total, 1e-20)
    held = jnp.sum(jnp.where(selected, target, 0.0), axis=-1)
    return SequenceAttention(out, _divergence(target, index_scores, chosen), held)


def _band_scores(
    q: Float[Array, "B T H d"], kv: Float[Array, "B T d"], window: int
) -> tuple[Float[Array, "B N 2W d"], Float[Array, "B H N W 2W"]]:
    """Scores against the window ``max(0, p - W + 1) .. p``, and the vectors they belong to.

    Block n of W queries meets the keys of blocks n - 1 and n, which hold all their windows.
    """
    batch, tokens, heads, width = q.shape
    blocks = tokens // window
    keys = kv.reshape(batch, blocks, window, width)
    keys = jnp.concatenate((jnp.pad(keys[:, :-1], ((0, 0), (1, 0), (0, 0), (0, 0))), keys), axis=2)
    q = q.reshape(batch, blocks, window, heads, width)
    scores = einsum("bnqhd,bnkd->bhnqk", q, keys) * width**-0.5
    ahead = np.arange(2 * window)[None] - window - np.arange(window)[:, None]
    inside = (ahead <= 0) & (ahead > -window)
    exists = np.arange(2 * window)[None] >= np.where(np.arange(blocks) == 0, window, 0)[:, None]
    mask = inside[None] & exists[:, None]
    return keys, jnp.where(mask[None, None], scores, _MASKED)


def _softmax_sum(
    q: Float[Array, "B T H d"],
    window: Float[Array, "B N 2W d"],
    band: Float[Array, "B H N W 2W"],
    slots: Float[Array, "B S d"] | None,
    chosen: Bool[Array, "#B T S"] | None,
    sink: Float[Array, "H"],
) -> tuple[Float[Array, "B T H d"], Float[Array, "B H T S"] | None]:
    """``o = sum e^s v / (sum e^s + e^sink)`` and the weights of the slots in it, float32."""
    batch, tokens, heads, width = q.shape
    row = (batch, heads, tokens, 1)
    top = jnp.maximum(jnp.max(band, axis=-1).reshape(row), sink[None, :, None, None])
    far = None
    if slots is not None and chosen is not None:
        far = einsum("bthd,bsd->bhts", q, slots) * width**-0.5
        far = jnp.where(chosen[:, None], far, _MASKED)
        top = jnp.maximum(top, jnp.max(far, axis=-1, keepdims=True))
    top = jax.lax.stop_gradient(top)
    near = jnp.exp(band - top.reshape(*band.shape[:-1], 1))
    total = jnp.exp(sink[None, :, None, None] - top) + jnp.sum(near, axis=-1).reshape(row)
    out = einsum("bhnqk,bnkd->bnqhd", near.astype(window.dtype), window).reshape(q.shape)
    weights = None
    if far is not None and slots is not None:
        e = jnp.exp(far - top)
        total = total + jnp.sum(e, axis=-1, keepdims=True)
        out = out + einsum("bhts,bsd->bthd", e.astype(slots.dtype), slots)
        weights = e / total
    return out / jnp.moveaxis(total, 1, 2), weights


def _index_scores(
    p: Any,
    x: Float[Array, "B T D"],
    qr: Float[Array, "B T q"],
    plan: SequencePlan,
    cfg: ModelConfig,
) -> Float[Array, "B T S"]:
    """``s_c = sum_h w_h relu(q_h . k_c)`` of every slot, from detached inputs."""
    x, qr = jax.lax.stop_gradient((x, qr))
    width = cfg.index_head_dim
    q, w = index_query(p, x, qr, plan.tokens[True, width], cfg)
    keys = hadamard_rotate(pool_slots(p["compressor"], x, CSA, plan.slots[CSA, width], cfg))
    dots = jax.nn.relu(einsum("btnx,bsx->bnts", q, keys))
    return jnp.sum(dots * jnp.moveaxis(w, 2, 1)[..., None], axis=1)


def _divergence(
    target: Float[Array, "B T S"], scores: Float[Array, "B T S"], chosen: Bool[Array, "#B T S"]
) -> Float[Array, "B T"]:
    """``KL(target || softmax(scores))`` over the chosen slots; 0 where there are none."""
    log_q = jax.nn.log_softmax(jnp.where(chosen, scores, _MASKED), axis=-1)
    log_p = jnp.log(jnp.maximum(target, 1e-20))
    return jnp.sum(jnp.where(chosen, target * (log_p - log_q), 0.0), axis=-1)
