"""The decode loop: many tokens in one dispatch, everything on the device.

A step is plain, one token a request, or it drafts with the MTP block and verifies the draft in one
forward step of the trunk. ``decode_steps`` is one ``lax.while_loop`` over such steps; the state is
donated, and nothing returns to the host until the steps are done or every request is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int32, Key

from models.acceptance import DRAFTING, accept
from models.cache import Cache, rollback
from models.config import ModelConfig
from models.draft import DraftState, catch_up, follow_prompt, propose
from models.model import Forward, forward
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
    draft: DraftState | None = None
    """Needed to draft."""


def append(
    state: DecodeState, tokens: Int32[Array, "B R"], num: Int32[Array, "B"]
) -> tuple[DecodeState, Int32[Array, "B"]]:
    """Append the first ``num[b]`` tokens to each request, up to a stop token or its limit.

    Requests that must stop are then done. Also returns how many tokens were appended.
    """
    column = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    stops = jnp.any(tokens[..., None] == state.stop[:, None], axis=-1)
    before_stop = jnp.min(jnp.where(stops, column, tokens.shape[1]), axis=1)
    num = jnp.minimum(jnp.minimum(num, before_stop + 1), state.limit - state.count)
    num = jnp.where(state.done, 0, num)
    batch = jnp.arange(tokens.shape[0], dtype=jnp.int32)[:, None]
    # What is dropped gets distinct places beyond the end.
    place = jnp.where(column < num[:, None], state.count[:, None], state.tokens.shape[1]) + column
    written = state.tokens.at[batch, place].set(tokens, mode="drop", unique_indices=True)
    newest = jnp.take_along_axis(tokens, jnp.maximum(num - 1, 0)[:, None], axis=1)[:, 0]
    count = state.count + num
    state = state.replace(
        token=jnp.where(num > 0, newest, state.token),
        tokens=written,
        count=count,
        done=state.done | (before_stop < num) | (count >= state.limit),
    )
    return state, num


def record(state: DecodeState, logits: Float[Array, "B V"], sampling: Sampling) -> DecodeState:
    """Sample each unfinished request's next token, append it, and finish those that must stop."""
    keys = jax.vmap(jax.random.fold_in)(state.keys, state.count)
    token = sample(logits, keys, sampling)
    return append(state, token[:, None], jnp.ones_like(state.count))[0]


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
    state = state.replace(cache=out.cache, selector_state=_commit(selector, state, out, num_new))
    return record(state, out.logits[:, 0], sampling)


def verify_step(
    params: Any,
    state: DecodeState,
    cfg: ModelConfig,
    selector: Selector,
    sampling: Sampling,
    draft_length: int,
    *,
    forced: Int32[Array, "B"] | None = None,
) -> DecodeState:
    """Draft ``draft_length`` tokens, verify them in one forward step, keep what is accepted.

    A request commits its accepted drafts and one token of the target's own, ``1 .. d + 1`` in all,
    fewer where a stop token or its limit cuts them. Only the rows of tokens that precede the
    newest committed one reach the caches and the selector's state; the others leave no trace.

    Args:
        forced: accept so many drafts whatever they are, for measurements and tests.
    """
    assert state.draft is not None
    draft, start = state.draft, state.cache.length
    row = jnp.arange(draft_length + 1, dtype=jnp.int32)
    # No more rows than tokens are left to generate: nothing beyond max_len is ever written.
    rows = jnp.where(state.done, 0, jnp.minimum(draft_length + 1, state.limit - state.count))
    fold = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))
    keys = fold(state.keys, state.count[:, None] + row[None])
    draft_keys = jax.vmap(lambda k: jax.vmap(jax.random.fold_in, (0, None))(k, DRAFTING))(keys)
    drafts, draft_logits, proposed = propose(
        params, draft, state.token, ~state.done, draft_keys[:, :-1], cfg, sampling
    )
    out = forward(
        params,
        jnp.concatenate((state.token[:, None], drafts), axis=1),
        state.cache,
        cfg,
        num_new=rows,
        selector=selector,
        selector_state=state.selector_state,
    )
    accepted, following = accept(out.logits, drafts, draft_logits, keys, sampling)
    if forced is not None:
        accepted = row[None, :-1] < forced[:, None]
    # Draft r stands if all before it do and there is a row after it.
    stands = jnp.cumprod(accepted & (row[None, 1:] < rows[:, None]), axis=1, dtype=jnp.int32)
    num_accepted = jnp.sum(stands, axis=1, dtype=jnp.int32)
    # Where a limit leaves no row after an accepted draft, the draft is itself the last token.
    tokens = jnp.where(
        jnp.pad(accepted, ((0, 0), (0, 1))), jnp.pad(drafts, ((0, 0), (0, 1))), following
    )
    active = ~state.done
    state, num = append(state, tokens, num_accepted + 1)
    draft = catch_up(params, draft, proposed, start, out.streams, tokens, num, cfg)
    draft = draft.replace(
        steps=draft.steps + active,
        proposed=draft.proposed + jnp.maximum(rows - 1, 0),
        accepted=draft.accepted + jnp.minimum(num_accepted, num),
        committed=draft.committed + num,
    )
    return state.replace(
        cache=rollback(out.cache, start + num),
        selector_state=_commit(selector, state, out, num),
        draft=draft,
    )


def _commit(
    selector: Selector, state: DecodeState, out: Forward, num_rows: Int32[Array, "B"]
) -> tuple[Any, ...]:
    return tuple(
        selector.commit(before, seen, num_rows)
        for before, seen in zip(state.selector_state, out.observations, strict=True)
    )


def run_steps(
    step: Callable[[DecodeState], DecodeState], state: DecodeState, num_steps: Int32[Array, ""]
) -> DecodeState:
    """Up to ``num_steps`` steps, fewer if every request finishes: one ``lax.while_loop``."""

    def running(carry: tuple[Array, DecodeState]) -> Array:
        number, state = carry
        return (number < num_steps) & ~jnp.all(state.done)

    def advance(carry: tuple[Array, DecodeState]) -> tuple[Array, DecodeState]:
        number, state = carry
        return number + 1, step(state)

    return jax.lax.while_loop(running, advance, (jnp.int32(0), state))[1]


@partial(
    jax.jit,
    static_argnames=("cfg", "selector", "sampling", "draft_length"),
    donate_argnames=("state",),
)
def decode_steps(
    params: Any,
    state: DecodeState,
    num_steps: Int32[Array, ""],
    *,
    cfg: ModelConfig,
    selector: Selector,
    sampling: Sampling,
    draft_length: int = 0,
) -> DecodeState:
    """Up to ``num_steps`` steps, plain or with drafts of ``draft_length``. Donates ``state``."""
    options = (cfg, selector, sampling)
    if draft_length:
        return run_steps(lambda s: verify_step(params, s, *options, draft_length), state, num_steps)
    return run_steps(lambda s: decode_step(params, s, *options), state, num_steps)


@partial(jax.jit, static_argnames=("cfg",), donate_argnames=("cache", "logits", "draft"))
def prefill_chunk(
    params: Any,
    tokens: Int32[Array, "B C"],
    num_new: Int32[Array, "B"],
    cache: Cache,
    logits: Float[Array, "B V"],
    draft: DraftState | None = None,
    *,
    cfg: ModelConfig,
) -> tuple[Cache, Float[Array, "B V"], DraftState | None]:
    """Extend the caches by a chunk; logits after each request's last token so far. Donates all."""
    out = forward(params, tokens, cache, cfg, num_new=num_new, last_only=True)
    if draft is not None:
        draft = follow_prompt(params, draft, tokens, out.streams, cache.length, num_new, cfg)
    return out.cache, jnp.where(num_new[:, None] > 0, out.logits[:, 0], logits), draft
