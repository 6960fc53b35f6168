"""Choosing the next token from logits: greedy, temperature, top-k and top-p."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Key


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How to sample. Temperature 0 is greedy, ties to the lowest token; the filters stack."""

    temperature: float = 0.0
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the fewest likeliest tokens whose probabilities reach p; 1 keeps all."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(
                f"temperature is {self.temperature}; it must be 0 (greedy) or a positive number"
            )
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; it must be 0 (all tokens) or positive")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be in (0, 1]")


GREEDY = Sampling()


def filtered_logits(logits: Float[Array, "B V"], sampling: Sampling) -> Float[Array, "B V"]:
    """``(logits - max) / temperature`` with minus infinity outside top-k and then top-p.

    The softmax of the result is the distribution that is sampled. Tokens equal to the last one
    kept are cut off by number, so exactly k stay; the likeliest token always stays.
    """
    # The maximum first: a tiny temperature would overflow, and several infinities tie.
    temperature = max(sampling.temperature, float(jnp.finfo(jnp.float32).tiny))
    logits = (logits - jnp.max(logits, axis=-1, keepdims=True)) / temperature
    vocab = logits.shape[-1]
    top_k = min(sampling.top_k or vocab, vocab)
    if top_k == vocab and sampling.top_p == 1:
        return logits
    values, tokens = jax.lax.top_k(logits, top_k)
    probabilities = jax.nn.softmax(values, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    values = jnp.where((before < sampling.top_p) | (before == 0), values, -jnp.inf)
    blank = jnp.full_like(logits, -jnp.inf)
    return jax.vmap(lambda row, i, v: row.at[i].set(v, unique_indices=True))(blank, tokens, values)


def sample(
    logits: Float[Array, "B V"], keys: Key[Array, "B"], sampling: Sampling
) -> Int32[Array, "B"]:
    """One token a request, each drawn with the request's own key."""
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    drawn = jax.vmap(jax.random.categorical)(keys, filtered_logits(logits, sampling))
    return drawn.astype(jnp.int32)
