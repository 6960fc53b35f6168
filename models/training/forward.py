"""The trunk and the MTP block over whole sequences, for training.

The parameters are the decode path's own, and so are norms, rotations, hyper-connections and
routing: what is trained here runs unchanged in ``models.model.forward``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from models.config import ModelConfig
from models.hyper import mixing, read_streams, write_streams
from models.layers import F32, embed, rms_norm
from models.model import head_logits, mtp_streams
from models.moe import every_expert, route, shared_expert
from models.training.attention import SequencePlan, attend_sequences, plan_sequences


class SequenceForward(NamedTuple):
    """Results for B sequences of T tokens."""

    logits: Float[Array, "B T V"]
    """At position i, of token i + 1; float32."""
    mtp_logits: Float[Array, "B T V"] | None
    """At position i, of token i + 2; the last position's input is no token of the sequence."""
    index_loss: Float[Array, "L B T"]
    """KL of each CSA layer's indexer, nats."""
    index_mass: Float[Array, "L B T"]
    """Share of each CSA layer's attention over its slots that the indexer's top K hold."""
    expert_load: tuple[Float[Array, "E"], ...]
    """Share of the (token, expert) choices that each expert got: one a trunk layer, then MTP."""


def forward_sequences(
    params: Any,
    tokens: Int32[Array, "B T"],
    cfg: ModelConfig,
    *,
    sparse: bool = True,
    remat: bool = False,
) -> SequenceForward:
    """Logits at every position of B sequences, from their first token on.

    Args:
        sparse: CSA layers attend to the indexer's top K slots, as in decoding; otherwise to all
            visible ones, which is the indexer's warm-up.
        remat: recompute blocks in the backward pass: a third more time, a fraction of the memory.

    Raises:
        ValueError: T is no multiple of the window and of 4, or quantised values, which have no
            gradient, are asked for.
    """
    if cfg.quant_sim or cfg.fp8_index_keys:
        raise ValueError(
            f"quant_sim is {cfg.quant_sim} and fp8_index_keys {cfg.fp8_index_keys}; rounded values "
            "have no gradient: train without, and set them for decoding"
        )
    plan = plan_sequences(tokens.shape[1], cfg, cfg.layer_ratios)
    run = jax.checkpoint(_block, static_argnums=(4, 5, 6)) if remat else _block
    streams = jnp.broadcast_to(
        embed(params["embed"], tokens)[:, :, None], (*tokens.shape, cfg.hc_mult, cfg.hidden_size)
    )
    index, loads = [], []
    for p, ratio in zip(params["layers"], cfg.layer_ratios, strict=True):
        streams, load, indexed = run(p, streams, tokens, plan, ratio, cfg, sparse)
        loads.append(load)
        if indexed is not None:
            index.append(indexed)
    logits = head_logits(params, params, streams, cfg)
    mtp_logits = None
    if params["mtp"]:
        p = params["mtp"][0]
        following = jnp.concatenate((tokens[:, 1:], jnp.zeros_like(tokens[:, :1])), axis=1)
        streams = mtp_streams(params, streams, following, cfg)
        streams, load, _ = run(p, streams, following, plan, 0, cfg, sparse)
        loads.append(load)
        mtp_logits = head_logits(params, p, streams, cfg)
    empty = jnp.zeros((0, *tokens.shape), F32)
    losses = jnp.stack([loss for loss, _ in index]) if index else empty
    masses = jnp.stack([mass for _, mass in index]) if index else empty
    return SequenceForward(logits, mtp_logits, losses, masses, tuple(loads))


def _block(
    p: Any,
    streams: Float[Array, "B T m D"],
    tokens: Int32[Array, "B T"],
    plan: SequencePlan,
    ratio: int,
    cfg: ModelConfig,
    sparse: bool,
) -> tuple[Float[Array, "B T m D"], Float[Array, "E"], tuple[Array, Array] | None]:
    mix = mixing(p["hc_attn"], streams, cfg, implementation="xla")
    x = rms_norm(read_streams(streams, mix.pre), p["attn_norm"], cfg.rms_norm_eps)
    attended = attend_sequences(p["attn"], x, plan, ratio, cfg, sparse=sparse)
    streams = write_streams(streams, attended.out, mix)
    mix = mixing(p["hc_ffn"], streams, cfg, implementation="xla")
    x = rms_norm(read_streams(streams, mix.pre), p["ffn_norm"], cfg.rms_norm_eps)
    y, load = _all_experts(p["ffn"], x, tokens, cfg)
    streams = write_streams(streams, y, mix)
    if attended.index_loss is None or attended.index_mass is None:
        return streams, load, None
    return streams, load, (attended.index_loss, attended.index_mass)


def _all_experts(
    p: Any, x: Float[Array, "B T D"], tokens: Int32[Array, "B T"], cfg: ModelConfig
) -> tuple[Float[Array, "B T D"], Float[Array, "E"]]:
    """The mixture with every expert computed, and each one's share of the choices."""
    flat = x.reshape(-1, x.shape[-1])
    weights, experts = route(p, flat, tokens.reshape(-1), cfg)
    chosen = jax.nn.one_hot(experts, cfg.n_routed_experts, dtype=F32)
    load = jnp.mean(jnp.sum(chosen, axis=1), axis=0) / cfg.num_experts_per_tok
    out = every_expert(p["experts"], flat, weights, experts, cfg.swiglu_limit)
    if "shared" in p:
        out = out + shared_expert(p["shared"], flat, cfg.swiglu_limit)
    return out.astype(x.dtype).reshape(x.shape), load
