"""SPIN as a selector of the model's attention: one state a CSA layer, carried by the decode loop.

A step selects blocks, scores only those, keeps the top K of the compact scores, and remembers
the scores once it is known which rows stand: at once where that is known beforehand. Source: the
paper's Algorithm 1 and 3.2.2.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int32, Key, UInt32

from models.selector import IndexKeys, IndexQuery
from pallas_kernels import index_scores, top_k_slots
from pallas_kernels.scoring import GROUP
from spin_jax.config import SpinConfig, steady_capacity
from spin_jax.metrics import MissSummary, kept_slots, miss, summarize_miss
from spin_jax.observation import observe, top_k_and_observe
from spin_jax.selection import BlockSelection, allocated_slots, select_layers
from spin_jax.speculative import Mask, Update, check_mode, observe_rows, select_rows
from spin_jax.state import SpinState, init_spin, reset


class SpinLayer(struct.PyTreeNode):
    """What SPIN keeps for one CSA layer."""

    spin: SpinState
    scored: UInt32[Array, " B"]
    """Blocks scored since the last reset."""
    visible: UInt32[Array, " B"]
    """Blocks there were to score in the same steps."""
    verified: UInt32[Array, " B"]
    """Draft verifications since the last reset, a first step aside."""
    identical: UInt32[Array, " B"]
    """Those of them whose rows all chose the same blocks."""
    misses: Float[Array, "B M"] | None = None
    """Diagnosis only: the miss of each committed row since the last reset, the first M of them;
    NaN where nothing could be missed, as on a first step or where no block was skipped."""
    rows: Int32[Array, " B"] | None = None
    """Diagnosis only: committed rows so far."""


class Prepared(NamedTuple):
    """A layer's state and its selection for a step of one row, made with all layers' together."""

    layer: SpinLayer
    selection: BlockSelection
    after: SpinState


class Observation(NamedTuple):
    """A step's scores, held back until it is known how many of its T rows stand."""

    after: SpinState
    """The state that the selection returned: V and D unchanged, unless ``scores`` is None."""
    selection: BlockSelection
    scores: Float[Array, "B T C*b"] | None
    """None where they have been remembered already; arbitrary at the selection's padding."""
    num_slots: Int32[Array, "B T"]
    misses: Float[Array, "B T"] | None


@dataclasses.dataclass(frozen=True)
class SpinSelector:
    """Scores predicted blocks only. Prefill does not use it: its scores do not seed the state."""

    config: SpinConfig = SpinConfig()
    mask: Mask = "union"
    """Whose blocks the rows of a draft score: each its own, read together, or those of row 0."""
    update: Update = "prefix"
    """Which rows are remembered: all that stand, or row 0 alone."""
    unpruned: bool = False
    """Room for all blocks, so that requests on their first step can score them all. The steady
    state has room for the blocks of its budget alone, and compiles nothing larger."""
    at_once: bool = False
    """Whether a step of one row remembers in ``select``, beside the top-K, as its row surely
    stands; ``commit`` must then be told one row wherever a slot was seen."""
    diagnose: int = 0
    """Rows whose miss is recorded. Each then costs a dense scoring, which only measures: what is
    selected, attended to and remembered stays the same."""

    def __post_init__(self) -> None:
        check_mode("mask", self.mask, "union")
        check_mode("update", self.update, "prefix")

    def init(self, num_layers: int, max_slots: int, keys: Key[Array, " B"]) -> tuple[Any, ...]:
        """V = D = 0 in every layer; a request draws alike in all layers.

        Raises:
            ValueError: keys that are not typed, or not one a request.
        """
        if not jnp.issubdtype(keys.dtype, jax.dtypes.prng_key) or keys.ndim != 1:
            raise ValueError(
                f"keys are {keys.dtype}{list(keys.shape)}; allowed: typed keys [B], one a request, "
                "as jax.random.split(jax.random.key(seed), B) gives"
            )
        zero = jnp.zeros(keys.shape, jnp.uint32)

        def layer() -> SpinLayer:
            # The keys are copied, as a donated buffer may be given away only once.
            own = jax.random.wrap_key_data(jnp.array(jax.random.key_data(keys)))
            spin = init_spin(self.config, batch=keys.shape[0], max_slots=max_slots, key=own)
            layer = SpinLayer(spin, zero.copy(), zero.copy(), zero.copy(), zero.copy())
            if not self.diagnose:
                return layer
            misses = jnp.full((keys.shape[0], self.diagnose), jnp.nan)
            return layer.replace(misses=misses, rows=jnp.zeros(keys.shape, jnp.int32))

        return tuple(layer() for _ in range(num_layers))

    def for_step(self, *, first: bool) -> SpinSelector:
        """The program with room for a first step, or the steady one; both remember at once."""
        return dataclasses.replace(self, unpruned=first, at_once=True)

    def reset(self, state: SpinLayer, where: Bool[Array, " B"]) -> SpinLayer:
        """A new turn for the marked requests."""

        def restart(count: Array) -> Array:
            return jnp.where(where, jnp.uint32(0), count)

        layer = state.replace(
            spin=reset(state.spin, where),
            scored=restart(state.scored),
            visible=restart(state.visible),
            verified=restart(state.verified),
            identical=restart(state.identical),
        )
        if state.misses is None or state.rows is None:
            return layer
        misses = jnp.where(where[:, None], jnp.nan, state.misses)
        return layer.replace(misses=misses, rows=jnp.where(where, 0, state.rows))

    def prepare(
        self, states: tuple[SpinLayer, ...], num_slots: Int32[Array, "B T"], *, top_k: int
    ) -> tuple[SpinLayer | Prepared, ...]:
        """The blocks of a step of one row, for all layers: history alone decides them."""
        if num_slots.shape[1] != 1:
            return states
        cfg, kept = self.config, allocated_slots(states[0].spin, self.config)
        selected = select_layers(
            [state.spin for state in states], num_slots[:, 0], cfg, top_k=top_k,
            capacity=self._capacity(kept, top_k, 1),
        )  # fmt: skip
        return tuple(Prepared(s, *own) for s, own in zip(states, selected, strict=True))

    def _capacity(self, max_slots: int, top_k: int, rows: int) -> int | None:
        return None if self.unpruned else steady_capacity(self.config, max_slots, top_k, rows)

    def select(
        self,
        query: IndexQuery,
        keys: IndexKeys,
        num_slots: Int32[Array, "B T"],
        state: SpinLayer | Prepared,
        *,
        top_k: int,
    ) -> tuple[Int32[Array, "B T K"], Observation]:
        """Slots for each row from the blocks selected for all rows of a request together."""
        cfg, rows = self.config, num_slots.shape[1]
        given, state = state, state.layer if isinstance(state, Prepared) else state
        slots, kept = keys.values.shape[1], allocated_slots(state.spin, cfg)
        if -(-slots // cfg.block_size) != -(-kept // cfg.block_size):
            raise ValueError(
                f"there are keys of {slots} slots and a state of {kept} under this configuration; "
                "pass the state that init of the same selector gave for so many slots"
            )
        if rows == 1:
            if not isinstance(given, Prepared):
                [given] = self.prepare((state,), num_slots, top_k=top_k)
            assert isinstance(given, Prepared)
            selection, after = given.selection, given.after
        else:
            selection, after = select_rows(
                state.spin,
                num_slots,
                cfg,
                top_k=top_k,
                capacity=self._capacity(kept, top_k, rows),
                mode=self.mask,
            )
        scores, group_max = index_scores(
            query.q,
            query.w,
            keys.values,
            num_slots,
            block_ids=selection.block_ids,
            block_size=cfg.block_size,
            key_scales=keys.scales,
            fill=False,
        )
        misses = None
        if self.diagnose:
            misses = self._misses(query, keys, num_slots, state, selection, top_k)
        if self.at_once and rows == 1:
            slots, after = top_k_and_observe(
                after, selection, scores[:, 0], group_max[:, 0], num_slots[:, 0], top_k, cfg
            )
            return slots[:, None], Observation(after, selection, None, num_slots, misses)
        if selection.rows is not None:
            own, groups = selection.rows, cfg.block_size // GROUP
            scores = jnp.where(jnp.repeat(own, cfg.block_size, axis=2), scores, -jnp.inf)
            group_max = (
                None if cfg.block_size % GROUP
                else jnp.where(jnp.repeat(own, groups, axis=2), group_max, -jnp.inf)
            )  # fmt: skip
        slots = top_k_slots(
            scores,
            top_k,
            block_ids=selection.block_ids,
            block_size=cfg.block_size,
            group_max=group_max,
            num_blocks=selection.count,
        )
        return slots, Observation(after, selection, scores, num_slots, misses)

    def _misses(
        self,
        query: IndexQuery,
        keys: IndexKeys,
        num_slots: Int32[Array, "B T"],
        state: SpinLayer,
        selection: BlockSelection,
        top_k: int,
    ) -> Float[Array, "B T"]:
        slots, size = keys.values.shape[1], self.config.block_size
        dense, _ = index_scores(query.q, query.w, keys.values, num_slots, key_scales=keys.scales)
        own = (selection.block_ids >= 0)[:, None] if selection.rows is None else selection.rows

        def of_row(own: Bool[Array, "B C"], seen: Int32[Array, " B"]) -> Bool[Array, "B S"]:
            ids = jnp.where(own, selection.block_ids, -1)
            return kept_slots(selection.replace(block_ids=ids), seen, size, slots)

        kept = jax.vmap(of_row, 1, 1)(own, num_slots)
        missed = miss(dense[..., :slots], kept, num_slots, top_k)
        pruned = jnp.sum(own, axis=2) < -(-num_slots // size)
        return jnp.where(pruned & ~state.spin.first[:, None], missed, jnp.nan)

    def commit(
        self, state: SpinLayer, observation: Observation, num_rows: Int32[Array, " B"]
    ) -> SpinLayer:
        """Remember the scores of the first ``num_rows`` rows, unless ``select`` has done so.

        Requests with none do not change.
        """
        seen, cfg = observation, self.config
        stands = num_rows > 0
        # A step in which no row that stands sees a slot is no step of SPIN's.
        last = jnp.maximum(num_rows - 1, 0)[:, None]
        spent = stands & (jnp.take_along_axis(seen.num_slots, last, axis=1)[:, 0] > 0)
        spin = state.spin.replace(
            key=jnp.where(spent, seen.after.key, state.spin.key),
            first=jnp.where(spent, seen.after.first, state.spin.first),
        )
        if seen.scores is None:
            spin = spin.replace(V=seen.after.V, D_rev=seen.after.D_rev, ages=seen.after.ages)
        elif seen.num_slots.shape[1] == 1:
            slots = jnp.where(stands, seen.num_slots[:, 0], 0)
            spin = observe(spin, seen.selection, seen.scores[:, 0], slots, cfg)
        else:
            spin = observe_rows(
                spin,
                seen.selection,
                seen.scores,
                seen.num_slots,
                num_rows - 1,
                cfg,
                mode=self.update,
            )
        verified = identical = jnp.zeros_like(stands)
        if seen.selection.rows is not None:
            verified = stands & ~state.spin.first
            shared = seen.selection.rows | (seen.selection.block_ids < 0)[:, None]
            identical = verified & jnp.all(shared, axis=(1, 2))
        blocks = -(-jnp.max(seen.num_slots, axis=1) // cfg.block_size)
        misses, rows = _recorded(state, seen.misses, num_rows)
        return SpinLayer(
            spin,
            state.scored + jnp.where(stands, seen.selection.count, 0).astype(jnp.uint32),
            state.visible + jnp.where(stands, blocks, 0).astype(jnp.uint32),
            state.verified + verified.astype(jnp.uint32),
            state.identical + identical.astype(jnp.uint32),
            misses,
            rows,
        )


def _recorded(
    state: SpinLayer, misses: Float[Array, "B T"] | None, num_rows: Int32[Array, " B"]
) -> tuple[Array | None, Array | None]:
    """The misses of the rows that stand, appended to the record."""
    if misses is None or state.misses is None or state.rows is None:
        return state.misses, state.rows
    row = jnp.arange(misses.shape[1], dtype=jnp.int32)[None]
    room = state.misses.shape[1]
    at = jnp.where(row < num_rows[:, None], state.rows[:, None] + row, room)
    batch = jnp.arange(misses.shape[0], dtype=jnp.int32)[:, None]
    return state.misses.at[batch, at].set(misses, mode="drop"), state.rows + num_rows


def recorded_miss(states: tuple[SpinLayer, ...]) -> MissSummary:
    """Mean and p99 of the misses that a selector with ``diagnose`` recorded, over all layers."""
    records = [state.misses for state in states if state.misses is not None]
    if not records:
        raise ValueError("no miss was recorded; use SpinSelector(config, diagnose=number of rows)")
    misses = jnp.stack(records)
    return summarize_miss(misses, ~jnp.isnan(misses))


class Savings(NamedTuple):
    """What pruning saved since the last reset, over all CSA layers and requests."""

    blocks_scored: int
    blocks_visible: int
    bytes_read: int
    """Index-key bytes of the scored blocks (whole blocks, scales included)."""
    bytes_visible: int
    """The same for all blocks: what all-keep reads."""

    verified: int
    """Verifications of drafts by SPIN, a layer and request each; first steps aside."""
    identical: int
    """Those whose rows all chose the same blocks."""

    @property
    def identical_masks(self) -> float | None:
        """``identical / verified``; None where no draft was verified."""
        return self.identical / self.verified if self.verified else None

    @property
    def realized_sparsity(self) -> float:
        """Fraction of blocks skipped; 0 where there were none."""
        return 1 - self.blocks_scored / self.blocks_visible if self.blocks_visible else 0.0


def savings(
    states: tuple[SpinLayer, ...], cfg: SpinConfig, index_head_dim: int, key_dtype: Any
) -> Savings:
    """Blocks scored, skipped and read; counts of the host, so call it outside jit."""

    def total(count: str) -> int:
        return sum(int(np.asarray(getattr(s, count)).sum(dtype=np.int64)) for s in states)

    scored, visible = total("scored"), total("visible")
    item = jnp.dtype(key_dtype).itemsize
    slot_bytes = index_head_dim * item + (4 if item == 1 else 0)
    block_bytes = cfg.block_size * slot_bytes
    return Savings(
        scored,
        visible,
        scored * block_bytes,
        visible * block_bytes,
        total("verified"),
        total("identical"),
    )
