"""What the indexer was asked in a run, recorded, and any policy replayed on it without the model.

A replay is closed loop: each policy scores and remembers only the blocks it selects, on the
queries, keys and acceptances of the recorded run. What it cannot show is how other attended slots
would have changed those.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int32, Key

from models.cache import Cache
from models.selector import ALL_KEEP, IndexKeys, IndexQuery, Selector
from spin_jax.selector import SpinLayer, SpinSelector


class Recording(struct.PyTreeNode):
    """One layer's record of M steps of R rows each, beside the state of the selector in use."""

    inner: Any
    q: Float[Array, "B M R n x"]
    w: Float[Array, "B M R n"]
    num_slots: Int32[Array, "B M R"]
    num_rows: Int32[Array, "B M"]
    """How many rows of a step stood; 0 once the request was done."""
    steps: Int32[Array, ""]


@dataclasses.dataclass(frozen=True)
class RecordingSelector:
    """Records what another selector is asked, up to ``steps`` steps of ``rows`` rows.

    A new turn starts the record anew.
    """

    steps: int
    rows: int
    heads: int
    width: int
    inner: Selector = ALL_KEEP

    def init(self, num_layers: int, max_slots: int, keys: Key[Array, " B"]) -> tuple[Any, ...]:
        """Empty records."""
        inner = self.inner.init(num_layers, max_slots, keys)
        (batch,) = keys.shape
        shape = (batch, self.steps, self.rows)
        return tuple(
            Recording(
                state,
                jnp.zeros((*shape, self.heads, self.width)),
                jnp.zeros((*shape, self.heads)),
                jnp.zeros(shape, jnp.int32),
                jnp.zeros(shape[:2], jnp.int32),
                jnp.int32(0),
            )
            for state in inner
        )

    def for_step(self, *, first: bool) -> RecordingSelector:
        """As the other selector does."""
        return dataclasses.replace(self, inner=self.inner.for_step(first=first))

    def reset(self, state: Recording, where: Bool[Array, " B"]) -> Recording:
        """A new turn."""
        return state.replace(
            inner=self.inner.reset(state.inner, where),
            num_rows=jnp.zeros_like(state.num_rows),
            steps=jnp.zeros_like(state.steps),
        )

    def prepare(
        self, states: tuple[Any, ...], num_slots: Int32[Array, "B T"], *, top_k: int
    ) -> tuple[Any, ...]:
        """As the other selector does."""
        inner = self.inner.prepare(tuple(s.inner for s in states), num_slots, top_k=top_k)
        return tuple(s.replace(inner=own) for s, own in zip(states, inner, strict=True))

    def select(
        self,
        query: IndexQuery,
        keys: IndexKeys,
        num_slots: Int32[Array, "B T"],
        state: Recording,
        *,
        top_k: int,
    ) -> tuple[Int32[Array, "B T K"], Any]:
        """What the other selector selects, and the question beside its observation."""
        slots, observation = self.inner.select(query, keys, num_slots, state.inner, top_k=top_k)
        return slots, (observation, query, num_slots)

    def commit(self, state: Recording, observation: Any, num_rows: Int32[Array, " B"]) -> Recording:
        """Append the step."""
        seen, query, num_slots = observation

        def put(record: Array, new: Array) -> Array:
            return record.at[:, state.steps].set(new.astype(record.dtype), mode="drop")

        return Recording(
            self.inner.commit(state.inner, seen, num_rows),
            put(state.q, query.q),
            put(state.w, query.w),
            put(state.num_slots, num_slots),
            put(state.num_rows, num_rows),
            state.steps + 1,
        )


class Trace(NamedTuple):
    """A run as its L indexers saw it. The fields are the arrays of a trace file, by name."""

    q: Float[Array, "L B M R n x"]
    """Index queries, RoPE and Hadamard applied."""
    w: Float[Array, "L B M R n"]
    """Head weights, scales applied."""
    keys: Float[Array, "L B S x"]
    """Index keys of all slots at the end of the run. A row that stood saw no slot that changed
    afterwards: rejected rows' slots were written again by the rows that took their places."""
    num_slots: Int32[Array, "B M R"]
    """Slots that each verifier row saw; R is the draft length and one."""
    num_rows: Int32[Array, "B M"]
    """Rows that stood: accepted drafts and one; 0 after a request's end."""
    top_k: int
    """``index_topk`` of the model."""


def trace_of(records: Sequence[Recording], cache: Cache, top_k: int) -> Trace:
    """The trace of a run from its layers' records and the cache after it."""
    steps = int(records[0].steps)
    if steps > records[0].q.shape[1]:
        raise ValueError(
            f"the run took {steps} steps and {records[0].q.shape[1]} were recorded; "
            "give RecordingSelector more steps"
        )
    one, keys = records[0], []
    for layer in cache.layers:
        if layer.index_keys is not None:
            values, scales = layer.index_keys
            values = values.astype(jnp.float32)
            keys.append(values if scales is None else values * scales[..., None])
    return Trace(
        jnp.stack([r.q[:, :steps] for r in records]),
        jnp.stack([r.w[:, :steps] for r in records]),
        jnp.stack(keys),
        one.num_slots[:, :steps],
        one.num_rows[:, :steps],
        top_k,
    )


def replay(trace: Trace, selector: SpinSelector, key: Key[Array, ""]) -> tuple[SpinLayer, ...]:
    """The states of a policy after the run, one a layer, with the miss of every row that stood.

    ``recorded_miss`` and ``savings`` read them. Requests and layers draw as in a session.

    Raises:
        ValueError: a trace without steps.
    """
    layers, batch, steps, rows = trace.q.shape[:4]
    if not layers or not steps:
        raise ValueError(f"the trace has {layers} layers and {steps} steps; record a longer run")
    selector = dataclasses.replace(selector, diagnose=steps * rows)
    states = selector.init(layers, trace.keys.shape[2], jax.random.split(key, batch))
    return tuple(
        _replay_layer(*of_layer, trace.num_slots, trace.num_rows, state, selector, trace.top_k)
        for *of_layer, state in zip(trace.q, trace.w, trace.keys, states, strict=True)
    )


@functools.partial(jax.jit, static_argnames=("selector", "top_k"))
def _replay_layer(
    q: Float[Array, "B M R n x"],
    w: Float[Array, "B M R n"],
    keys: Float[Array, "B S x"],
    num_slots: Int32[Array, "B M R"],
    num_rows: Int32[Array, "B M"],
    state: SpinLayer,
    selector: SpinSelector,
    top_k: int,
) -> SpinLayer:
    # Room for all blocks at every step, not only the first: the miss scores them all anyhow, and
    # compiling one program in place of two is most of what a replay takes.
    selector = dataclasses.replace(selector, unpruned=True, at_once=False)

    def step(state: SpinLayer, asked: Any) -> tuple[SpinLayer, None]:
        q, w, num_slots, num_rows = asked
        query = IndexQuery(q, w)
        _, seen = selector.select(query, IndexKeys(keys), num_slots, state, top_k=top_k)
        return selector.commit(state, seen, num_rows), None

    asked = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), (q, w, num_slots, num_rows))
    return jax.lax.scan(step, state, asked)[0]
