"""The seam between attention and whatever chooses the slots a query attends to.

A CSA layer hands its index queries and keys to a *selector* and attends to the slots it returns.
All-keep, below, scores every visible slot; SPIN (in ``spin_jax``) scores predicted blocks. A
selector is a frozen, hashable object, so it is a static argument of jitted functions; what it
remembers is a pytree that the caller carries.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Protocol

from jaxtyping import Array, Bool, Float, Int32, Key

from pallas_kernels import index_scores, top_k_slots


class IndexQuery(NamedTuple):
    """What the lightning indexer asks at T positions: RoPE, Hadamard and scales are applied."""

    q: Float[Array, "B T n x"]
    w: Float[Array, "B T n"]
    """Float32 head weights, possibly negative; they hold the x^-1/2 n^-1/2 scale."""


class IndexKeys(NamedTuple):
    """The index keys of a layer's slots, and a float32 scale a slot if they are FP8."""

    values: Float[Array, "B S x"]
    scales: Float[Array, "B S"] | None = None


class Selector(Protocol):
    """Chooses the slots of each query row."""

    def init(self, num_layers: int, max_slots: int, keys: Key[Array, "B"]) -> tuple[Any, ...]:
        """The state before the first step, one pytree a CSA layer; one PRNG key a request."""
        ...

    def for_step(self, *, first: bool) -> Selector:
        """The selector for a first step after prefill or at a new turn, or for the steady state.

        The two may compile to different programs; one for a first step serves any request. Both may
        take it that in steps of one row a row that sees a slot will stand.
        """
        ...

    def reset(self, state: Any, where: Bool[Array, "B"]) -> Any:
        """A layer's state with the marked requests as before their first step (a new turn)."""
        ...

    def prepare(
        self, states: tuple[Any, ...], num_slots: Int32[Array, "B T"], *, top_k: int
    ) -> tuple[Any, ...]:
        """The layers' states as ``select`` gets them in this step.

        Called once a step, before its layers, with what all of them see: work that needs no query
        is done for all at once. A selector without such work returns the states; ``select`` takes
        those, too.
        """
        ...

    def select(
        self,
        query: IndexQuery,
        keys: IndexKeys,
        num_slots: Int32[Array, "B T"],
        state: Any,
        *,
        top_k: int,
    ) -> tuple[Int32[Array, "B T K"], Any]:
        """Slot numbers to attend to, the -1 of fewer than K at the end, and an observation.

        ``num_slots`` is how many slots each row sees; rows come in order of position. The state
        is one layer's, prepared or not, and is not changed here: the caller commits the
        observation once it knows how many rows stand.
        """
        ...

    def commit(self, state: Any, observation: Any, num_rows: Int32[Array, "B"]) -> Any:
        """The layer's state after the first ``num_rows[b]`` rows of each request stand."""
        ...


@dataclasses.dataclass(frozen=True)
class AllKeep:
    """Scores every visible slot: what the release does."""

    def init(self, num_layers: int, max_slots: int, keys: Key[Array, "B"]) -> tuple[Any, ...]:
        del max_slots, keys
        return ((),) * num_layers

    def for_step(self, *, first: bool) -> AllKeep:
        del first
        return self

    def reset(self, state: Any, where: Bool[Array, "B"]) -> Any:
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
        state: Any,
        *,
        top_k: int,
    ) -> tuple[Int32[Array, "B T K"], Any]:
        del state
        scores, group_max = index_scores(
            query.q, query.w, keys.values, num_slots, key_scales=keys.scales, fill=False
        )
        return top_k_slots(scores, top_k, group_max=group_max, num_scores=num_slots), ()

    def commit(self, state: Any, observation: Any, num_rows: Int32[Array, "B"]) -> Any:
        del observation, num_rows
        return state


ALL_KEEP = AllKeep()
