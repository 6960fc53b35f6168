"""Logits of given tokens, by prefill, by decode, or first the one and then the other."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from models.cache import Cache, init_cache
from models.config import ModelConfig
from models.generate import PREFILL_CHUNK, check_ids, request_keys
from models.model import forward, mtp_forward
from models.params import beside
from models.selector import ALL_KEEP, Selector


@dataclasses.dataclass
class Scores:
    """What :func:`score` returns, on the host."""

    logits: Float[np.ndarray, "B T V"]
    """Float32; row i is the distribution of token i + 1."""
    mtp_logits: Float[np.ndarray, "B T-1 V"] | None
    """The MTP block's: row i, from the streams of i and token i + 1, is for token i + 2."""
    mean_log_likelihood: float
    """Mean over tokens 1..T-1 of ``log p(token)``, in nats; NaN for T = 1."""
    selector_state: tuple[Any, ...]


@partial(jax.jit, static_argnames=("cfg", "selector"), donate_argnames=("cache", "mtp", "state"))
def score_step(
    params: Any,
    tokens: Int32[Array, "B T"],
    next_tokens: Int32[Array, "B T"],
    num_new: Int32[Array, "B"],
    num_next: Int32[Array, "B"],
    cache: Cache,
    mtp: Cache | None,
    state: tuple[Any, ...],
    *,
    cfg: ModelConfig,
    selector: Selector,
) -> tuple[Array, Array | None, Cache, Cache | None, tuple[Any, ...]]:
    """One step with known tokens: logits, MTP logits, caches and selector state."""
    out = forward(
        params,
        tokens,
        cache,
        cfg,
        num_new=num_new,
        selector=selector,
        selector_state=state if state else None,
    )
    if state:
        state = tuple(
            selector.commit(before, seen, num_new)
            for before, seen in zip(state, out.observations, strict=True)
        )
    if mtp is None:
        return out.logits, None, out.cache, None, state
    draft = mtp_forward(params, out.streams, next_tokens, mtp, cfg, num_new=num_next)
    return out.logits, draft.logits, out.cache, draft.cache, state


def score(
    params: Any,
    cfg: ModelConfig,
    ids: Any,
    *,
    prefill: int | None = None,
    chunk: int = PREFILL_CHUNK,
    mtp: bool = False,
    selector: Selector = ALL_KEEP,
    key: jax.Array | None = None,
    dtype: Any = jnp.float32,
) -> Scores:
    """Logits at every position of ``ids`` [B, T].

    The first ``prefill`` tokens (all by default) go through in chunks of ``chunk``, the others
    one by one through the decode step, where ``selector`` applies; prefill keeps all slots.

    Raises:
        ValueError: ids outside the vocabulary or not [B, T] integers, or an impossible split.
    """
    ids = check_ids(ids, cfg, ndim=2)
    batch, total = ids.shape
    split = total if prefill is None else prefill
    if not 0 <= split <= total:
        raise ValueError(f"prefill is {split}; ids have {total} tokens: choose 0..{total}")
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}; prefill takes at least one token at a time")
    if mtp and not cfg.num_nextn_predict_layers:
        raise ValueError("the model has no MTP block; leave MTP logits off")
    cache = beside(params, init_cache(cfg, batch, total, dtype=dtype))
    mtp_cache = None
    if mtp:
        mtp_cache = beside(params, init_cache(cfg, batch, total, dtype=dtype, mtp=True))
    key = jax.random.key(0) if key is None else key
    selector = selector if cfg.csa_layers else ALL_KEEP
    slots = [c.index_keys.values.shape[1] for c in cache.layers if c.index_keys]
    keys = request_keys(key, list(ids))
    state = beside(params, selector.init(len(cfg.csa_layers), max(slots, default=0), keys))

    logits = np.empty((batch, total, cfg.vocab_size), np.float32)
    mtp_logits = np.empty((batch, total - 1, cfg.vocab_size), np.float32) if mtp else None
    width = min(chunk, max(split, 1))
    steps = [(at, min(at + width, split), width) for at in range(0, split, width)]
    steps += [(at, at + 1, 1) for at in range(split, total)]
    for begin, end, size in steps:
        decoding = begin >= split
        padded = np.zeros((2, batch, size), np.int32)
        padded[0, :, : end - begin] = ids[:, begin:end]
        following = ids[:, begin + 1 : end + 1]
        padded[1, :, : following.shape[1]] = following
        step, draft, cache, mtp_cache, committed = score_step(
            params,
            padded[0],
            padded[1],
            jnp.full((batch,), end - begin, jnp.int32),
            jnp.full((batch,), following.shape[1], jnp.int32),
            cache,
            mtp_cache,
            state if decoding else (),
            cfg=cfg,
            selector=selector.for_step(first=begin == split) if decoding else ALL_KEEP,
        )
        state = committed if decoding else state
        logits[:, begin:end] = step[:, : end - begin]
        if mtp_logits is not None and draft is not None:
            mtp_logits[:, begin : begin + following.shape[1]] = draft[:, : following.shape[1]]
    return Scores(logits, mtp_logits, _mean_log_likelihood(logits, ids), state)


def _mean_log_likelihood(logits: np.ndarray, ids: np.ndarray) -> float:
    if ids.shape[1] == 1:
        return float("nan")
    total = 0.0
    for row, tokens in zip(logits[:, :-1], ids[:, 1:], strict=True):
        top = row.max(axis=-1)
        norm = top + np.log(np.exp(row - top[:, None]).sum(axis=-1))
        chosen = np.take_along_axis(row, tokens[:, None], axis=-1)[:, 0]
        total += float((chosen - norm).sum(dtype=np.float64))
    return total / ids[:, 1:].size
