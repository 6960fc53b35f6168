"""What SPIN remembers of each request, and how it starts and starts again."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, Key

from spin_jax.config import SpinConfig, check_count


class SpinState(flax.struct.PyTreeNode):
    """The moving averages of one indexer layer: ``V`` by slot, ``D`` by distance from the query.

    S is ``max_slots``, or the number of blocks N under reduction A2. A plain pytree of fixed
    shapes: carry it through jit, scan and while_loop, donate it, stack layers, vmap.
    """

    V: Float[Array, "B S"]
    """``V[i]``: the average of slot i's scores, in score units."""
    D_rev: Float[Array, "B S"]
    """``D`` back to front, so that ``D[q - i]`` for ascending i is one contiguous slice."""
    key: Key[Array, " B"]
    """A typed key a request: a draw belongs to the request, whatever row it sits in."""
    first: Bool[Array, " B"]
    """Whether the request's next step is its first since a reset, which runs unpruned."""
    ages: Int32[Array, "B N"] | None
    """Steps since a block was last scored (else since it became visible); only if the policy
    needs it."""
    empty: float = flax.struct.field(pytree_node=False)
    """What V and D hold where nothing was observed."""

    @property
    def D(self) -> Float[Array, "B S"]:
        """``D[offset]``, offset 0 being the newest visible slot (block under A2)."""
        return self.D_rev[..., ::-1]


def init_spin(cfg: SpinConfig, *, batch: int, max_slots: int, key: Key[Array, " ..."]) -> SpinState:
    """``V = D = 0`` (or minus infinity, as ``cfg.unobserved`` says) and every request at its first.

    ``key`` is one key, from which row b's is ``fold_in(key, b)``, or an array of ``batch`` keys.
    The generator must be threefry: others draw differently under vmap. Source: the spec's "State".
    """
    check_count("batch", batch)
    check_count("max_slots", max_slots)
    blocks = -(-max_slots // cfg.block_size)
    entries = blocks if cfg.reduction == "A2" else max_slots
    dtype = jnp.dtype(cfg.state_dtype)
    return SpinState(
        # Two arrays, not one twice: a donated buffer may be given away once only.
        V=jnp.full((batch, entries), cfg.empty, dtype),
        D_rev=jnp.full((batch, entries), cfg.empty, dtype),
        key=_request_keys(key, batch),
        first=jnp.ones(batch, bool),
        ages=jnp.zeros((batch, blocks), jnp.int32) if needs_ages(cfg) else None,
        empty=cfg.empty,
    )


def needs_ages(cfg: SpinConfig) -> bool:
    """Whether the policy explores by block age."""
    return cfg.policy in ("staleness", "age")


def reset(
    state: SpinState, where: Bool[Array, " B"], key: Key[Array, " ..."] | None = None
) -> SpinState:
    """V, D and ages as after ``init_spin``, next step unpruned, for the requests in ``where``.

    Keys go on where they are; with ``key`` (as for ``init_spin``) the marked requests take new
    ones, which makes a request's draws independent of who held its row before. Source: "State".
    """
    where = jnp.asarray(where)
    batch = state.first.shape[0]
    if where.shape != (batch,) or where.dtype != jnp.bool_:
        raise ValueError(
            f"where is {where.dtype}{list(where.shape)}; allowed: bool[{batch}], one a request"
        )
    marked = where[:, None]
    kept = state.key if key is None else jnp.where(where, _request_keys(key, batch), state.key)
    return state.replace(
        V=jnp.where(marked, jnp.asarray(state.empty, state.V.dtype), state.V),
        D_rev=jnp.where(marked, jnp.asarray(state.empty, state.D_rev.dtype), state.D_rev),
        key=kept,
        first=state.first | where,
        ages=None if state.ages is None else jnp.where(marked, 0, state.ages),
    )


def _request_keys(key: Key[Array, " ..."], batch: int) -> Key[Array, " B"]:
    remedy = "pass jax.random.key(seed, impl='threefry2x32') or an array of such keys"
    if not isinstance(key, jax.Array) or not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        raise ValueError(f"key is {getattr(key, 'dtype', type(key))}, not a typed key; {remedy}")
    if str(jax.random.key_impl(key)) != "threefry2x32":
        # rbg draws depend on the batch under vmap, so requests would influence each other.
        raise ValueError(f"key uses {jax.random.key_impl(key)}; allowed: threefry2x32; {remedy}")
    if key.shape == ():
        return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(batch))
    if key.shape != (batch,):
        raise ValueError(f"key has shape {key.shape}; allowed: () or ({batch},), one a request")
    return key
