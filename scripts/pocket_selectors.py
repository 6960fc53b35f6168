"""Selectors that evaluation needs: a record of what another selects, several at once, and random
slots as a control."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int32, Key

from models.selector import IndexKeys, IndexQuery, Selector


class RecordedLayer(struct.PyTreeNode):
    """The recorded selector's state, and what it selected since the last reset."""

    inner: Any
    slots: Int32[Array, "B M K"]
    """Slots attended to at each of the first M rows that stand; -1 elsewhere."""
    rows: Int32[Array, " B"]


@dataclasses.dataclass(frozen=True)
class Recorded:
    """Selects as ``inner`` does and keeps the slots of ``rows`` rows, ``top_k`` a row.

    First and later steps run one program, that of ``inner`` as it is: evaluation compiles more
    than it decodes, so for SPIN pass a selector with ``unpruned=True``, which serves both.
    """

    inner: Selector
    rows: int
    top_k: int

    def init(self, num_layers: int, max_slots: int, keys: Key[Array, " B"]) -> tuple[Any, ...]:
        batch = keys.shape[0]
        return tuple(
            RecordedLayer(
                state,
                jnp.full((batch, self.rows, self.top_k), -1, jnp.int32),
                jnp.zeros((batch,), jnp.int32),
            )
            for state in self.inner.init(num_layers, max_slots, keys)
        )

    def for_step(self, *, first: bool) -> Recorded:
        del first
        return self

    def reset(self, state: RecordedLayer, where: Bool[Array, " B"]) -> RecordedLayer:
        return RecordedLayer(
            self.inner.reset(state.inner, where),
            jnp.where(where[:, None, None], -1, state.slots),
            jnp.where(where, 0, state.rows),
        )

    def prepare(
        self, states: tuple[Any, ...], num_slots: Int32[Array, "B T"], *, top_k: int
    ) -> tuple[Any, ...]:
        inner = self.inner.prepare(tuple(s.inner for s in states), num_slots, top_k=top_k)
        return tuple(s.replace(inner=own) for s, own in zip(states, inner, strict=True))

    def select(
        self,
        query: IndexQuery,
        keys: IndexKeys,
        num_slots: Int32[Array, "B T"],
        state: RecordedLayer,
        *,
        top_k: int,
    ) -> tuple[Int32[Array, "B T K"], Any]:
        slots, seen = self.inner.select(query, keys, num_slots, state.inner, top_k=top_k)
        return slots, (seen, slots)

    def commit(
        self, state: RecordedLayer, observation: Any, num_rows: Int32[Array, " B"]
    ) -> RecordedLayer:
        seen, slots = observation
        row = jnp.arange(slots.shape[1], dtype=jnp.int32)[None]
        at = jnp.where(row < num_rows[:, None], state.rows[:, None] + row, self.rows)
        batch = jnp.arange(slots.shape[0], dtype=jnp.int32)[:, None]
        width = min(self.top_k, slots.shape[2])
        written = state.slots.at[batch, at, :width].set(slots[..., :width], mode="drop")
        return RecordedLayer(
            self.inner.commit(state.inner, seen, num_rows), written, state.rows + num_rows
        )


@dataclasses.dataclass(frozen=True)
class SideBySide:
    """Selectors that share a batch: of n of them, the i-th serves the i-th n-th of the requests.

    All then run in one program, which compiles once, and decode at the cost of a larger batch.
    A layer's state is a tuple, one state a selector.
    """

    selectors: tuple[Selector, ...]

    def _parts(self, tree: Any) -> list[Any]:
        count = len(self.selectors)

        def part(i: int) -> Any:
            return jax.tree.map(
                lambda x: x[i * x.shape[0] // count : (i + 1) * x.shape[0] // count], tree
            )

        return [part(i) for i in range(count)]

    def init(self, num_layers: int, max_slots: int, keys: Key[Array, " B"]) -> tuple[Any, ...]:
        parts = zip(self.selectors, self._parts(keys), strict=True)
        states = [s.init(num_layers, max_slots, own) for s, own in parts]
        return tuple(zip(*states, strict=True))

    def for_step(self, *, first: bool) -> SideBySide:
        return SideBySide(tuple(s.for_step(first=first) for s in self.selectors))

    def reset(self, state: tuple[Any, ...], where: Bool[Array, " B"]) -> tuple[Any, ...]:
        parts = zip(self.selectors, state, self._parts(where), strict=True)
        return tuple(s.reset(own, here) for s, own, here in parts)

    def prepare(
        self, states: tuple[Any, ...], num_slots: Int32[Array, "B T"], *, top_k: int
    ) -> tuple[Any, ...]:
        parts = zip(self.selectors, zip(*states, strict=True), self._parts(num_slots), strict=True)
        prepared = [s.prepare(own, seen, top_k=top_k) for s, own, seen in parts]
        return tuple(zip(*prepared, strict=True))

    def select(
        self,
        query: IndexQuery,
        keys: IndexKeys,
        num_slots: Int32[Array, "B T"],
        state: tuple[Any, ...],
        *,
        top_k: int,
    ) -> tuple[Int32[Array, "B T K"], tuple[Any, ...]]:
        parts = zip(self.selectors, self._parts((query, keys, num_slots)), state, strict=True)
        found = [s.select(q, k, n, own, top_k=top_k) for s, (q, k, n), own in parts]
        slots, seen = zip(*found, strict=True)
        return jnp.concatenate(slots), seen

    def commit(
        self, state: tuple[Any, ...], observation: tuple[Any, ...], num_rows: Int32[Array, " B"]
    ) -> tuple[Any, ...]:
        parts = zip(self.selectors, state, observation, self._parts(num_rows), strict=True)
        return tuple(s.commit(own, seen, rows) for s, own, seen, rows in parts)


class RandomLayer(struct.PyTreeNode):
    """A key a request, and how many steps it has taken."""

    keys: Key[Array, " B"]
    steps: Int32[Array, " B"]


@dataclasses.dataclass(frozen=True)
class RandomSlots:
    """Any ``top_k`` visible slots, drawn anew at every step: what attention is worth without its
    indexer. Layers draw differently."""

    def init(self, num_layers: int, max_slots: int, keys: Key[Array, " B"]) -> tuple[Any, ...]:
        del max_slots
        fold = jax.vmap(jax.random.fold_in, (0, None))
        return tuple(
            RandomLayer(fold(keys, layer), jnp.zeros(keys.shape, jnp.int32))
            for layer in range(num_layers)
        )

    def for_step(self, *, first: bool) -> RandomSlots:
        del first
        return self

    def reset(self, state: RandomLayer, where: Bool[Array, " B"]) -> RandomLayer:
        # The draws go on: a turn is no reason to repeat them.
        del where
        return state

    def prepare(
        self, states: tuple[Any, ...], num_slots: Int32[Array, "B T"], *, top_k: int
    ) -> tuple[Any, ...]:
        del num_slots, top_k
        return states

    def select(
        self,
        query: IndexQuery,
        keys: IndexKeys,
        num_slots: Int32[Array, "B T"],
        state: RandomLayer,
        *,
        top_k: int,
    ) -> tuple[Int32[Array, "B T K"], Any]:
        del query
        slots = keys.values.shape[1]
        own = jax.vmap(jax.random.fold_in)(state.keys, state.steps)
        shape = (num_slots.shape[1], slots)
        order = jax.vmap(lambda key: jax.random.uniform(key, shape))(own)
        visible = jnp.arange(slots, dtype=jnp.int32)[None, None] < num_slots[..., None]
        best, chosen = jax.lax.top_k(jnp.where(visible, order, -1.0), min(top_k, slots))
        return jnp.where(best >= 0, chosen, -1).astype(jnp.int32), ()

    def commit(
        self, state: RandomLayer, observation: Any, num_rows: Int32[Array, " B"]
    ) -> RandomLayer:
        del observation
        return state.replace(steps=state.steps + (num_rows > 0))
