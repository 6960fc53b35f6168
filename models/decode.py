"""The decode loop: many tokens in one dispatch, everything on the device.

``decode_steps`` is one ``lax.while_loop`` over the jitted forward step; the state is donated, and
nothing returns to the host until the steps are done or every request is.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int32, Key

from models.cache import Cache
from models.config import ModelConfig
from models.model import forward
from models.sampling import Sampling, sample
from models.selector import Selector


class DecodeState(struct.PyTreeNode):
    """What the loop carries for B requests; N is room for generated tokens, E for stop tokens."""

    cache: Cache
    token: Int32[Array, "B"]
    """The newest token, sampled but not yet in the cache."""
    tokens: Int32[Array, "B N"]
    """Tokens generated in this turn."""
    count: Int32[Array, "B"]
    """How many of them there are."""
    limit: Int32[Array, "B"]
    """How many there may be."""
    stop: Int32[Array, "B E"]
    """Tokens that end the request (they are kept in the output); -1 pads."""
    done: Bool[Array, "B"]
    keys: Key[Array, "B"]
    """Sampling keys: token number i of a turn is drawn with ``fold_in(key, i)``."""
    selector_state: tuple[Any, ...]


def record(state: DecodeState, logits: Float[Array, "B V"], sampling: Sampling) -> DecodeState:
    """Sample each unfinished request's next token, append it, and finish those that must stop."""
    keys = jax.vmap(jax.random.fold_in)(state.keys, state.count)
    token = sample(logits, keys, sampling)
    batch = jnp.arange(token.shape[0], dtype=jnp.int32)
    place = jnp.where(state.done, state.tokens.shape[1], state.count)
    tokens = state.tokens.at[batch, place].set(token, mode="drop", unique_indices=True)
    count = state.count + ~state.done
    stopped = jnp.any(token[:, None] == state.stop, axis=1) | (count >= state.limit)
    return state.replace(
        token=jnp.where(state.done, state.token, token),
        tokens=tokens,
        count=count,
        done=state.done | stopped,
    )


def decode_step(
    params: Any, state: DecodeState, cfg: ModelConfig, selector: Selector, sampling: Sampling
) -> DecodeState:
    """Feed each unfinished request its newest token and sample the next."""
    num_new = (~state.done).astype(jnp.int32)
    out = forward(
        params,
        state.token[:, None],
        state.cache,
        cfg,
        num_new=num_new,
        selector=selector,
        selector_state=state.selector_state,
    )
    committed = tuple(
        selector.commit(before, seen, num_new)
        for before, seen in zip(state.selector_state, out.observations, strict=True)
    )
    state = state.replace(cache=out.cache, selector_state=committed)
    return record(state, out.logits[:, 0], sampling)


@partial(jax.jit, static_argnames=("cfg", "selector", "sampling"), donate_argnames=("state",))
def decode_steps(
    params: Any,
    state: DecodeState,
    num_steps: Int32[Array, ""],
    *,
    cfg: ModelConfig,
    selector: Selector,
    sampling: Sampling,
) -> DecodeState:
    """Up to ``num_steps`` decode steps, fewer if every request finishes. ``state`` is donated."""

    def running(carry: tuple[Array, "DecodeState"]) -> Array:
        step, state = carry
        return (step < num_steps) & ~jnp.all(state.done)

    def advance(carry: tuple[Array, "DecodeState"]) -> tuple[Array, "DecodeState"]:
        step, state = carry
        return step + 1, decode_step(params, state, cfg, selector, sampling)

    return jax.lax.while_loop(running, advance, (jnp.int32(0), state))[1]


@partial(jax.jit, static_argnames=("cfg",), donate_argnames=("cache", "logits"))
def prefill_chunk(
    params: Any,
    tokens: Int32[Array, "B C"],
    num_new: Int32[Array, "B"],
    cache: Cache,
    logits: Float[Array, "B V"],
    *,
    cfg: ModelConfig,
) -> tuple[Cache, Float[Array, "B V"]]:
    """Extend the cache by a chunk; logits after each request's last token so far. Donates both."""
    out = forward(params, tokens, cache, cfg, num_new=num_new, last_only=True)
    return out.cache, jnp.where(num_new[:, None] > 0, out.logits[:, 0], logits)
