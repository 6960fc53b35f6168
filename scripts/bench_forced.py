"""Speculative decoding under a stopwatch, with the acceptance of a trained model forced on it.

Random weights accept no draft, so the number of accepted drafts follows a table by step and
request, whose mean is the one asked for; all else is done as ever.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import bench_loop
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from models.config import ModelConfig
from models.decode import DecodeState, run_steps, verify_step
from models.draft import init_draft
from models.sampling import GREEDY
from models.selector import Selector

PERIOD = 10
"""Steps after which the table repeats: tenths of a token can be asked for."""


def accepted_drafts(tokens: float, draft_length: int) -> Int32[Array, "P"]:
    """How many drafts to accept at each step so that steps give ``tokens`` tokens on average.

    Raises:
        ValueError: a step cannot give so many.
    """
    if not 1 <= tokens <= draft_length + 1:
        raise ValueError(
            f"--acceptance {tokens} is not between 1 and {draft_length + 1}, what steps with "
            f"{draft_length} drafts can give"
        )
    steps = np.arange(PERIOD + 1)
    whole = np.floor(steps * round((tokens - 1) * PERIOD) / PERIOD + 1e-9)
    return jnp.asarray(np.diff(whole), jnp.int32)


@partial(jax.jit, static_argnames=("cfg", "selector", "draft_length"), donate_argnames=("state",))
def forced_steps(
    params: Any,
    state: DecodeState,
    num_steps: Int32[Array, ""],
    table: Int32[Array, "P"],
    *,
    cfg: ModelConfig,
    selector: Selector,
    draft_length: int,
) -> DecodeState:
    """``num_steps`` verifications in one dispatch; each request reads its own place of the table.

    Donates ``state``.
    """

    def step(state: DecodeState) -> DecodeState:
        assert state.draft is not None
        request = jnp.arange(state.token.shape[0], dtype=jnp.int32)
        forced = table[(state.draft.steps + request) % PERIOD]
        return verify_step(params, state, cfg, selector, GREEDY, draft_length, forced=forced)

    return run_steps(step, state, num_steps)


def with_draft(state: DecodeState, params: Any, cfg: ModelConfig, tokens: int) -> DecodeState:
    """The same requests at ``tokens`` tokens, about to draft."""
    state = bench_loop.rewind(state, tokens)
    batch, max_len = state.token.shape[0], state.cache.max_len
    draft = init_draft(params, cfg, batch, max_len, dtype=params["embed"].dtype)
    # The block lags one behind the trunk.
    length = jnp.full((batch,), tokens - 1, jnp.int32)
    return state.replace(draft=draft.replace(cache=draft.cache.replace(length=length)))


def lower(
    params: Any,
    state: DecodeState,
    cfg: ModelConfig,
    selector: Selector,
    selector_state: Any,
    draft_length: int,
) -> Any:
    """The loop with drafts, lowered for a state without them."""
    table = accepted_drafts(1, draft_length)
    state = state.replace(selector_state=selector_state)
    shapes = jax.eval_shape(partial(with_draft, cfg=cfg, tokens=2), state, params)
    return forced_steps.lower(
        params, shapes, jnp.int32(1), table,
        cfg=cfg, selector=selector, draft_length=draft_length,
    )  # fmt: skip


def measure(
    program: Any,
    params: Any,
    state: DecodeState,
    cfg: ModelConfig,
    selector_state: Any,
    *,
    tokens: int,
    steps: int,
    repeats: int,
    table: Int32[Array, "P"],
) -> tuple[dict[str, Any], DecodeState]:
    """Median seconds a verification and tokens a second; ``state`` is used up, a new one returned.

    One dispatch is not counted.
    """
    seconds, acceptance = [], math.nan
    for _ in range(repeats + 1):
        state = with_draft(state.replace(selector_state=selector_state), params, cfg, tokens)
        run = program._replace(run=lambda p, s, n: program.run(p, s, n, table))
        state, passed = bench_loop.dispatch(run, params, state, steps)
        assert state.draft is not None
        selector_state = state.selector_state
        acceptance = float(jnp.sum(state.draft.committed) / jnp.sum(state.draft.steps))
        seconds.append(passed / steps)
    step = float(np.median(seconds[1:]))
    row = {
        "acceptance_length": round(acceptance, 3),
        "step_ms": round(step * 1e3, 3),
        "step_ms_all": [round(t * 1e3, 3) for t in seconds[1:]],
        "tokens_per_second": round(acceptance * state.token.shape[0] / step, 1),
        "compile_seconds": round(program.compile_seconds, 1),
    }
    return row, state.replace(draft=None)
