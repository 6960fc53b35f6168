"""Which tokens of a draft stand: exact match when greedy, lossless rejection sampling otherwise.

Source: the paper, 3.2.2; rejection sampling as in "Fast Inference from Transformers via
Speculative Decoding" (Leviathan et al., 2023), theorem in its appendix A.1.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, Key

from models.sampling import Sampling, filtered_logits, sample


def accept(
    logits: Float[Array, "B R V"],
    drafts: Int32[Array, "B d"],
    draft_logits: Float[Array, "B d V"] | None,
    keys: Key[Array, "B R"],
    sampling: Sampling,
) -> tuple[Bool[Array, "B d"], Int32[Array, "B R"]]:
    """Whether row r accepts its draft, and the token that follows row r if it is the last to stand.

    ``R = d + 1``: row r predicts the place of draft r, the last row the one after the draft.
    ``draft_logits`` are those the drafts were drawn from, filtered. The tokens up to and including
    the one that follows the accepted drafts are distributed as the target's own samples; greedy
    ones are the same tokens.
    """
    if draft_logits is None:
        own = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return own[:, :-1] == drafts, own
    last = sample(logits[:, -1], keys[:, -1], sampling)
    row = jax.vmap(jax.vmap(functools.partial(accept_row, sampling=sampling)))
    accepted, instead = row(logits[:, :-1], drafts, draft_logits, keys[:, :-1])
    return accepted, jnp.concatenate((instead, last[:, None]), axis=1)


def accept_row(
    logits: Float[Array, "V"],
    draft: Int32[Array, ""],
    draft_logits: Float[Array, "V"],
    key: Key[Array, ""],
    sampling: Sampling,
) -> tuple[Bool[Array, ""], Int32[Array, ""]]:
    """Accept draft x with probability ``min(1, p(x) / q(x))``; else draw from ``max(p - q, 0)``.

    p is the target's distribution in this row, q the one x was drawn from. A q that is no
    distribution (NaN) accepts nothing and leaves p as it is, as does a p that equals q to the last
    digit once its draft is rejected.
    """
    logits = filtered_logits(logits[None], sampling)[0]
    p, q = jax.nn.softmax(logits), jax.nn.softmax(draft_logits)
    accepted = jax.random.uniform(jax.random.fold_in(key, ACCEPTING)) * q[draft] < p[draft]
    left = jnp.maximum(p - q, 0)
    residual = jnp.where(jnp.sum(left) > 0, jnp.log(left), logits)
    instead = jax.random.categorical(key, residual)
    return accepted, instead.astype(jnp.int32)


DRAFTING, ACCEPTING = 1, 2
"""What a token's key is folded with to draw its draft, and whether the draft stands."""
