"""Drafts of the MTP block: proposing tokens, and keeping its cache in step with the trunk's.

The block's row i pairs the trunk's streams at token i with token i + 1, so it always lags one
behind: once the trunk holds L tokens its cache holds L - 1 rows, and the trunk's last streams wait
for the next token. Source: the spec's "MTP"; the paper, 3.2.2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int32, Key

from models.cache import Cache, init_cache, rollback
from models.config import ModelConfig
from models.model import mtp_forward
from models.sampling import Sampling, filtered_logits, sample


class DraftState(struct.PyTreeNode):
    """What drafting carries for B requests, and counts over all turns."""

    cache: Cache
    """The MTP block's own."""
    streams: Float[Array, "B m D"]
    """The trunk's, at the newest token in its cache."""
    steps: Int32[Array, "B"]
    """Drafts verified."""
    proposed: Int32[Array, "B"]
    """Draft tokens that were verified: no more than a request had left to generate."""
    accepted: Int32[Array, "B"]
    committed: Int32[Array, "B"]
    """Tokens that came of it, the target's own included."""


class DraftCounts(NamedTuple):
    """Drafts of all requests over all turns of a session."""

    steps: int
    """Verifications, a request each."""
    proposed: int
    accepted: int
    committed: int
    """Tokens that verifications gave, the target's own included."""

    @property
    def acceptance_length(self) -> float:
        """Tokens a verification, 1 to d + 1; 0 where there was none."""
        return self.committed / self.steps if self.steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted over proposed draft tokens; 0 where there were none."""
        return self.accepted / self.proposed if self.proposed else 0.0


def init_draft(
    params: Any,
    cfg: ModelConfig,
    batch: int,
    max_len: int,
    *,
    dtype: Any = jnp.float32,
    max_draft: int = 7,
) -> DraftState:
    """Drafting before the first token.

    Raises:
        ValueError: the model has no MTP block.
    """
    if not cfg.num_nextn_predict_layers:
        raise ValueError(
            "this model has no MTP block to draft with (num_nextn_predict_layers is 0): "
            "use draft length 0"
        )
    return DraftState(
        init_cache(cfg, batch, max_len, dtype=dtype, max_draft=max_draft, mtp=True),
        jnp.zeros((batch, cfg.hc_mult, cfg.hidden_size), params["embed"].dtype),
        *(jnp.zeros((batch,), jnp.int32) for _ in range(4)),
    )


def follow_prompt(
    params: Any,
    draft: DraftState,
    tokens: Int32[Array, "B T"],
    streams: Float[Array, "B T m D"],
    length: Int32[Array, "B"],
    num_new: Int32[Array, "B"],
    cfg: ModelConfig,
) -> DraftState:
    """The block's rows that a prefilled chunk completes.

    ``length`` is the trunk's before the chunk. A request's first token completes no row.
    """
    fresh = length == 0
    shifted = jnp.concatenate((draft.streams[:, None], streams[:, :-1]), axis=1)
    rows = jnp.where(fresh[:, None, None, None], streams, shifted)
    following = jnp.where(fresh[:, None], jnp.roll(tokens, -1, axis=1), tokens)
    num_rows = jnp.maximum(num_new - fresh, 0)
    cache = mtp_forward(params, rows, following, draft.cache, cfg, num_new=num_rows).cache
    return draft.replace(cache=cache, streams=newest_streams(draft.streams, streams, num_new))


def newest_streams(
    old: Float[Array, "B m D"], streams: Float[Array, "B T m D"], num: Int32[Array, "B"]
) -> Float[Array, "B m D"]:
    """Each request's streams at the last of its ``num`` new tokens; with none, the old ones."""
    last = jax.vmap(lambda rows, i: rows[i])(streams, jnp.maximum(num - 1, 0))
    return jnp.where((num > 0)[:, None, None], last, old)


def propose(
    params: Any,
    draft: DraftState,
    token: Int32[Array, "B"],
    active: Bool[Array, "B"],
    keys: Key[Array, "B d"],
    cfg: ModelConfig,
    sampling: Sampling,
) -> tuple[Int32[Array, "B d"], Float[Array, "B d V"] | None, Cache]:
    """``d`` draft tokens after ``token``, each sampled from the block's own prediction.

    The first row takes the trunk's streams, every further one the streams that the block made of
    the row before it. Also returns the filtered logits they were drawn from (None when greedy)
    and the block's cache, of whose new rows only the first will stand.
    """

    def one(carry: tuple[Array, Array, Cache], key: Key[Array, "B"]) -> tuple[Any, Any]:
        streams, token, cache = carry
        num_new = active.astype(jnp.int32)
        out = mtp_forward(params, streams[:, None], token[:, None], cache, cfg, num_new=num_new)
        logits = out.logits[:, 0]
        token = sample(logits, key, sampling)
        drawn_from = filtered_logits(logits, sampling) if sampling.temperature else None
        return (out.streams[:, 0], token, out.cache), (token, drawn_from)

    start = (draft.streams, token, draft.cache)
    (_, _, cache), (tokens, logits) = jax.lax.scan(one, start, jnp.swapaxes(keys, 0, 1))
    return tokens.T, None if logits is None else jnp.swapaxes(logits, 0, 1), cache


def catch_up(
    params: Any,
    draft: DraftState,
    proposed: Cache,
    length: Int32[Array, "B"],
    streams: Float[Array, "B R m D"],
    tokens: Int32[Array, "B R"],
    num: Int32[Array, "B"],
    cfg: ModelConfig,
) -> DraftState:
    """The block's rows again with the trunk's streams, once ``num`` of R tokens were committed.

    ``length`` is the trunk's before the step and ``proposed`` the cache after :func:`propose`; its
    row of the last committed token before the step stands, as it came of the trunk's streams.
    """
    cache = rollback(proposed, length)
    if tokens.shape[1] > 1:
        cache = mtp_forward(
            params,
            streams[:, :-1],
            tokens[:, :-1],
            cache,
            cfg,
            num_new=jnp.maximum(num - 1, 0),
        ).cache
    return draft.replace(cache=cache, streams=newest_streams(draft.streams, streams, num))
