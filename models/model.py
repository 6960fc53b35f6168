"""The forward step: T tokens of every request from any length, for prefill, decode and verify.

Source: the spec's "Block" and "MTP" headings.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from models.attention import StepPlan, attention, plan_step
from models.cache import Cache, LayerCache, Step
from models.config import CSA, ModelConfig
from models.hyper import Mixing, head_read, mixing, read_streams, write_streams
from models.layers import F32, embed, linear, rms_norm
from models.moe import moe
from models.selector import ALL_KEEP, IndexQuery, Selector
from pallas_kernels.compat import compiled_once


class LayerTrace(NamedTuple):
    """What one layer computed, for inspection."""

    streams: Float[Array, "B T m D"]
    """The layer's output."""
    slots: Int32[Array, "B T K"] | None
    query: IndexQuery | None


class Forward(NamedTuple):
    """Results of one step."""

    logits: Float[Array, "B T V"]
    """Float32; only row ``num_new - 1`` of each request ([B, 1, V]) with ``last_only``."""
    streams: Float[Array, "B T m D"]
    """After the last block, before the head: the MTP block's input."""
    cache: Cache
    observations: tuple[Any, ...]
    """The selector's, one a CSA layer, to be committed once it is known which tokens stand."""
    trace: tuple[LayerTrace, ...]
    """Empty unless asked for."""


def forward(
    params: Any,
    tokens: Int32[Array, "B T"],
    cache: Cache,
    cfg: ModelConfig,
    *,
    num_new: Int32[Array, "B"] | None = None,
    selector: Selector = ALL_KEEP,
    selector_state: tuple[Any, ...] | None = None,
    last_only: bool = False,
    trace: bool = False,
) -> Forward:
    """Extend each request by its next ``num_new[b] <= T`` tokens and give logits at each.

    Requests may have different lengths, and different numbers of new tokens (right-padded; zero
    leaves a request as it is). Rows of padding hold garbage. Nothing checks that
    ``length + num_new`` stays within ``cache.max_len``: lengths live on the device, so the caller
    who knows them checks (``generate`` and ``score`` do). More requests are a larger B: under vmap
    the grouped expert product of long steps has no batching rule.

    Args:
        selector_state: one state a CSA layer; needed by selectors that keep one.
    """
    if tokens.ndim != 2 or tokens.shape[1] < 1 or tokens.shape[0] != cache.length.shape[0]:
        raise ValueError(
            f"tokens have shape {tokens.shape}; expected [{cache.length.shape[0]}, T >= 1] for "
            "this cache: pad on the right and pass num_new"
        )
    if num_new is None:
        num_new = jnp.full_like(cache.length, tokens.shape[1])
    csa = len(cfg.csa_layers)
    states = ((),) * csa if selector_state is None else selector_state
    if len(states) != csa:
        raise ValueError(
            f"selector_state has {len(states)} entries; the model has {csa} CSA layers"
        )
    plan = plan_step(cache.length, num_new, tokens.shape[1], cache.max_draft, cfg, cfg.layer_ratios)
    if csa:
        states = selector.prepare(states, plan.seen // CSA, top_k=cfg.index_topk)

    embedded = embed(params["embed"], tokens)
    streams = jnp.broadcast_to(embedded[:, :, None], (*tokens.shape, cfg.hc_mult, cfg.hidden_size))
    layers, observations, traces = [], [], []
    for i, ratio in enumerate(cfg.layer_ratios):
        state = states[cfg.csa_layers.index(i)] if i in cfg.csa_layers else ()
        streams, layer, observation, traced = block(
            params["layers"][i],
            streams,
            tokens,
            cache.layers[i],
            plan,
            ratio,
            cfg,
            # One program for layers without an indexer, whatever the selector.
            selector if i in cfg.csa_layers else ALL_KEEP,
            state,
        )
        layers.append(layer)
        if i in cfg.csa_layers:
            observations.append(observation)
        traces.append(traced)
    logits = _head(params, params, streams, plan.step, cfg, last_only)
    cache = cache.replace(length=plan.step.end, layers=tuple(layers))
    return Forward(logits, streams, cache, tuple(observations), tuple(traces) if trace else ())


def mtp_forward(
    params: Any,
    streams: Float[Array, "B T m D"],
    next_tokens: Int32[Array, "B T"],
    cache: Cache,
    cfg: ModelConfig,
    *,
    num_new: Int32[Array, "B"] | None = None,
    last_only: bool = False,
) -> Forward:
    """The MTP block: position i pairs the streams of i with token i + 1 and predicts i + 2.

    ``x' = e_proj(enorm(embed(token))) + h_proj(hnorm(stream))`` for every stream, then one
    sliding-window block, its own head weights and the shared head. ``streams`` are the trunk's,
    or for further draft tokens the ones this function returned. ``cache`` is the block's own
    (``init_cache(..., mtp=True)``), one position behind the trunk's at most.

    Raises:
        ValueError: the model has no MTP block.
    """
    if not params["mtp"]:
        raise ValueError(
            "this model has no MTP block (num_nextn_predict_layers is 0); leave MTP options off"
        )
    p = params["mtp"][0]
    if num_new is None:
        num_new = jnp.full_like(cache.length, next_tokens.shape[1])
    plan = plan_step(cache.length, num_new, next_tokens.shape[1], cache.max_draft, cfg, (0,))
    streams = mtp_streams(params, streams, next_tokens, cfg)
    streams, layer, _, traced = block(
        p, streams, next_tokens, cache.layers[0], plan, 0, cfg, ALL_KEEP, ()
    )
    logits = _head(params, p, streams, plan.step, cfg, last_only)
    return Forward(
        logits, streams, cache.replace(length=plan.step.end, layers=(layer,)), (), (traced,)
    )


def mtp_streams(
    params: Any,
    streams: Float[Array, "B T m D"],
    next_tokens: Int32[Array, "B T"],
    cfg: ModelConfig,
) -> Float[Array, "B T m D"]:
    """The MTP block's input."""
    p, eps = params["mtp"][0], cfg.rms_norm_eps
    embedded = linear(rms_norm(embed(params["embed"], next_tokens), p["enorm"], eps), p["e_proj"])
    return embedded[:, :, None] + linear(rms_norm(streams, p["hnorm"], eps), p["h_proj"])


# Its own jit: layers of one kind are traced and lowered once, not once each.
@partial(jax.jit, static_argnames=("ratio", "cfg", "selector"))
def block(
    p: Any,
    streams: Float[Array, "B T m D"],
    tokens: Int32[Array, "B T"],
    cache: LayerCache,
    plan: StepPlan,
    ratio: int,
    cfg: ModelConfig,
    selector: Selector,
    selector_state: Any,
) -> tuple[Float[Array, "B T m D"], LayerCache, Any, LayerTrace]:
    """One transformer block: attention, then the mixture of experts, each through the streams."""
    once = partial(compiled_once, calls=cfg.num_hidden_layers)
    x, mix = _read(p["hc_attn"], p["attn_norm"], streams, cfg)
    attended = attention(
        p["attn"],
        once(x),
        cache,
        plan,
        ratio,
        cfg,
        selector,
        selector_state,
    )
    streams = write_streams(streams, attended.out, mix)
    own = {name: p[name] for name in ("hc_ffn", "ffn_norm", "ffn")}
    streams = once(_feed_forward(own, streams, tokens, cfg))
    traced = LayerTrace(streams, attended.slots, attended.query)
    return streams, attended.cache, attended.observation, traced


@partial(jax.jit, static_argnames=("cfg",))
def _read(
    hc: Any, norm: Float[Array, "D"], streams: Float[Array, "B T m D"], cfg: ModelConfig
) -> tuple[Float[Array, "B T D"], Mixing]:
    """What a sublayer reads, and how it will write."""
    mix = mixing(hc, streams, cfg)
    return rms_norm(read_streams(streams, mix.pre), norm, cfg.rms_norm_eps), mix


@partial(jax.jit, static_argnames=("cfg",))
def _feed_forward(
    p: Any, streams: Float[Array, "B T m D"], tokens: Int32[Array, "B T"], cfg: ModelConfig
) -> Float[Array, "B T m D"]:
    x, mix = _read(p["hc_ffn"], p["ffn_norm"], streams, cfg)
    return write_streams(streams, moe(p["ffn"], x, tokens, cfg), mix)


def _head(
    params: Any,
    own: Any,
    streams: Float[Array, "B T m D"],
    step: Step,
    cfg: ModelConfig,
    last_only: bool,
) -> Float[Array, "B T V"]:
    """Logits of all rows, or of the last real one."""
    if last_only:
        last = jnp.maximum(step.num_new - 1, 0)
        streams = jax.vmap(lambda rows, i: rows[i][None])(streams, last)
    return head_logits(params, own, streams, cfg)


def head_logits(
    params: Any, own: Any, streams: Float[Array, "B T m D"], cfg: ModelConfig
) -> Float[Array, "B T V"]:
    """Float32 logits by the stream weights and norm of ``own``, the trunk's or the MTP block's."""
    x = rms_norm(head_read(own["hc_head"], streams, cfg), own["norm"], cfg.rms_norm_eps)
    return linear(x, params["head"], F32)
