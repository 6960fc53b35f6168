"""The seam between attention and whatever chooses the slots a query attends to.

A CSA layer hands its index queries and keys to a *selector* and attends to the slots it returns.
All-keep, below, scores every visible slot; SPIN (in ``spin_jax``) scores predicted blocks. A
selector is a frozen, hashable object, so it is a static argument of jitted functions; what it
remembers is a pytree that the caller carries.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, Key


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

        The two may compile to different programs; one for a first step serves any request.
        """
        ...

    def reset(self, state: Any, where: Bool[Array, "B"]) -> Any:
        """A layer's state with the marked requests as before their first step (a new turn)."""
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
        """Slot numbers to attend to, -1 where there are fewer than K, and an observation.

        ``num_slots`` is how many slots each row sees; rows come in order of position. The state
        is one layer's and is not changed here: the caller commits the observation once it knows
        how many rows stand.
        """
        ...

    def commit(self, state: Any, observation: Any, num_rows: Int32[Array, "B"]) -> Any:
        """The layer's state after the first ``num_rows[b]`` rows of each request stand."""
        ...


LOWEST = float(jnp.finfo(jnp.float32).min)
"""What a NaN or minus-infinite score of a *visible* slot counts as: last, but still a slot."""


def index_scores(
    query: IndexQuery, keys: IndexKeys, num_slots: Int32[Array, "B T"]
) -> Float[Array, "B T S"]:
    """``s_c = sum_h w_h relu(q_h . k_c)`` in float32; minus infinity where c is not visible.

    Source: the spec's "Compressed slots", index score.
    """
    slots = keys.values.shape[1]
    # Keys on the left, in the layout of the cache: no transposed copy of it is made.
    dots = jnp.einsum(
        "bsx,btnx->bstn",
        keys.values.astype(query.q.dtype),
        query.q,
        preferred_element_type=jnp.float32,
    )
    scores = jnp.einsum("bstn,btn->bts", jax.nn.relu(dots), query.w)
    if keys.scales is not None:
        scores = scores * keys.scales[:, None, :]
    visible = jnp.arange(slots) < num_slots[..., None]
    return jnp.where(visible, jnp.where(scores > LOWEST, scores, LOWEST), -jnp.inf)


def top_k_slots(scores: Float[Array, "... S"], top_k: int) -> Int32[Array, "... K"]:
    """The K highest-scored slots, ties to the lowest number; -1 where fewer are visible."""
    values, slots = jax.lax.top_k(scores, min(top_k, scores.shape[-1]))
    return jnp.where(values > -jnp.inf, slots, -1)


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
        return top_k_slots(index_scores(query, keys, num_slots), top_k), ()

    def commit(self, state: Any, observation: Any, num_rows: Int32[Array, "B"]) -> Any:
        del observation, num_rows
        return state


ALL_KEEP = AllKeep()
