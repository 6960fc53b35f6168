"""The predictors that section 2 of the paper compares, over recorded score traces.

A trace is dense scores [L, T, S] of L indexer layers over T decode steps, with the N of each step.
A predictor returns its own scores of that shape and which (layer, step) it can predict.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, Key

from spin_jax.metrics import pearson, top_k_recall, visible_slots

Prediction = tuple[Float[Array, "L T S"], Bool[Array, "L T"]]
Measure = Callable[[Float[Array, "L T S"], Float[Array, "L T S"]], Float[Array, "L T"]]


def random_scores(scores: Float[Array, "L T S"], key: Key[Array, ""]) -> Prediction:
    """Uniform noise."""
    return jax.random.uniform(key, scores.shape), jnp.ones(scores.shape[:2], bool)


def previous_layer(scores: Float[Array, "L T S"], back: int = 1) -> Prediction:
    """``x[l, t, i] = z[l - back, t, i]``."""
    layer = jnp.arange(scores.shape[0])[:, None]
    valid = jnp.broadcast_to(layer >= back, scores.shape[:2])
    return jnp.roll(scores, back, axis=0), valid


def previous_step(
    scores: Float[Array, "L T S"], num_slots: Int32[Array, " T"], offset: int = 0
) -> Prediction:
    """``x[l, t, i] = z[l, t - 1, i - offset]``; 0 where that slot was not there. [choice]

    ``offset=1`` is what D does when the query moves on by one slot: the diagonal goes with it.
    """
    visible = visible_slots(num_slots, scores.shape[-1])[None]
    seen = jnp.where(visible, scores, 0.0)
    moved = jnp.pad(seen, ((0, 0), (0, 0), (offset, 0)))[..., : scores.shape[-1]]
    valid = jnp.broadcast_to(jnp.arange(scores.shape[1])[None] >= 1, scores.shape[:2])
    return jnp.roll(moved, 1, axis=1), valid


def best_previous_layer(
    scores: Float[Array, "L T S"], measure: Measure, back: int = 5
) -> tuple[Float[Array, "L T"], Bool[Array, "L T"]]:
    """``max_{1 <= k <= back} measure(z[l - k], z[l])``: an oracle, for each measure on its own."""
    best = jnp.full(scores.shape[:2], -jnp.inf)
    for distance in range(1, min(back, scores.shape[0] - 1) + 1):
        predicted, valid = previous_layer(scores, distance)
        best = jnp.maximum(best, jnp.where(valid, measure(predicted, scores), -jnp.inf))
    return best, best > -jnp.inf


def compare_predictors(
    scores: Float[Array, "L T S"], num_slots: Int32[Array, " T"], top_k: int, key: Key[Array, ""]
) -> dict[str, dict[str, Float[Array, ""]]]:
    """Pearson correlation and top-K recall of every predictor, averaged over layers and steps.

    ``num_slots`` [T] is N at each step. NaN where a predictor can predict nothing (one layer, or
    one step). Source: the spec's "Predictors compared in section 2".
    """
    seen = jnp.broadcast_to(num_slots[None], scores.shape[:2])
    measures: dict[str, Measure] = {
        "pearson": lambda x, y: pearson(x, y, seen),
        "recall": lambda x, y: top_k_recall(x, y, seen, top_k),
    }
    predictions = {
        "random": random_scores(scores, key),
        "prev-layer": previous_layer(scores),
        "prev-iter": previous_step(scores, num_slots),
        "prev-iter offset 1": previous_step(scores, num_slots, offset=1),
    }
    table = {
        name: {label: _mean(measure(x, scores), valid) for label, measure in measures.items()}
        for name, (x, valid) in predictions.items()
    }
    table["prev-layer best-of-5"] = {
        label: _mean(*best_previous_layer(scores, measure)) for label, measure in measures.items()
    }
    return table


def _mean(values: Float[Array, "L T"], valid: Bool[Array, "L T"]) -> Float[Array, ""]:
    return jnp.nanmean(jnp.where(valid, values, jnp.nan))
