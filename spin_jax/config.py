"""What SPIN is asked to do, and its budgets in exact integers."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable
from fractions import Fraction
from numbers import Integral, Real
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

MAX_DENOMINATOR = 10_000
"""Shares are ratios with at most this denominator: four decimals exactly, products in int32."""

_ALLOWED = {
    "exploration_rounding": ("floor", "ceil", "nearest"),
    "policy": ("random", "none", "staleness", "age"),
    "reduction": ("A1", "A0", "A2"),
    "pooling": ("max", "top4", "mean"),
    "unobserved": ("zero", "-inf"),
    "state_dtype": ("float32", "bfloat16"),
}


@dataclasses.dataclass(frozen=True)
class SpinConfig:
    """Predictive block selection, the paper's defaults. Hashable: pass it as a static argument.

    Raises ``ValueError`` for a value that is not allowed. Source: the paper, 3.2 and 4.6; the
    spec's "One decode step". ``sparsity`` and ``exploration`` are read as decimal fractions, so
    0.9 is exactly 9/10; the nearest ratio of denominator 10,000 or less is used.
    """

    sparsity: float = 0.4
    """rho: the share of blocks to skip, in [0, 1)."""
    block_size: int = 64
    """b: slots a block."""
    decay: float = 0.5
    """alpha: the old value's weight in the moving averages, in [0, 1)."""
    exploration: float = 0.05
    """gamma: the explored share of the block budget, in [0, 1]."""
    exploration_rounding: Literal["floor", "ceil", "nearest"] = "floor"
    """How ``gamma m`` becomes a number of blocks; nearest sends halves up."""
    policy: Literal["random", "none", "staleness", "age"] = "random"
    """Which unselected blocks are explored: at random, none, by age times predicted importance,
    or the least recently observed."""
    reduction: Literal["A1", "A0", "A2"] = "A1"
    """A1 pools predictions over a block, A0 keeps every block that holds a top slot (``pooling``
    does not apply), A2 pools scores before they are remembered, a value a block."""
    pooling: Literal["max", "top4", "mean"] = "max"
    """max, mean of up to four largest, or mean, over a block's visible slots."""
    unobserved: Literal["zero", "-inf"] = "zero"
    """What a slot that was never scored is predicted to be: 0, which outranks a negative score,
    or minus infinity, which nothing outranks less and which counts as 0 in its first update."""
    state_dtype: Literal["float32", "bfloat16"] = "float32"
    """What V and D are stored as; arithmetic is float32."""
    staleness_epsilon: float = 1e-6
    """Added to the predicted importance, so that age alone decides between unimportant blocks."""

    def __post_init__(self) -> None:
        for name, allowed in _ALLOWED.items():
            value = getattr(self, name)
            if value not in allowed:
                _refuse(name, value, "one of " + ", ".join(map(repr, allowed)))
        check_count("block_size", self.block_size)
        _check_real("sparsity", self.sparsity, lambda x: 0 <= x < 1, "0 <= sparsity < 1: 0 for all")
        _check_real("decay", self.decay, lambda x: 0 <= x < 1, "0 <= decay < 1")
        _check_real("exploration", self.exploration, lambda x: 0 <= x <= 1, "0 to 1: 0 for none")
        _check_real(
            "staleness_epsilon", self.staleness_epsilon, lambda x: 0 < x < math.inf,
            "more than 0, and finite",
        )  # fmt: skip

    @property
    def empty(self) -> float:
        """The value of an entry that was never observed."""
        return 0.0 if self.unobserved == "zero" else -math.inf

    @property
    def keep_ratio(self) -> tuple[int, int]:
        """``1 - rho`` as (numerator, denominator)."""
        keep = 1 - _ratio(self.sparsity)
        return keep.numerator, keep.denominator

    @property
    def exploration_ratio(self) -> tuple[int, int]:
        """``gamma`` as (numerator, denominator)."""
        return _ratio(self.exploration).as_integer_ratio()


def check_count(name: str, value: Any, most: int | None = None, remedy: str = "") -> None:
    """Raises ``ValueError`` unless ``value`` is an integer from 1 to ``most``."""
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not whole or not 1 <= int(value) <= (sys.maxsize if most is None else most):
        allowed = "an integer of at least 1" if most is None else f"an integer from 1 to {most}"
        _refuse(name, value, allowed + (f"; {remedy}" if remedy else ""))


def share(ratio: tuple[int, int], x: Any, rounding: str) -> Any:
    """``x n / d`` rounded, for a Python int or an int32 array, with no product beyond int32.

    With ``x = q d + r`` it is ``q n`` plus the rounded ``r n / d``, and ``r n < d^2``.
    """
    numerator, denominator = ratio
    whole, rest = x // denominator, x % denominator * numerator
    if rounding == "ceil":
        part = (rest + denominator - 1) // denominator
    elif rounding == "nearest":
        part = (2 * rest + denominator) // (2 * denominator)
    else:
        part = rest // denominator
    return whole * numerator + part


def block_budget(num_blocks: Any, cfg: SpinConfig, top_k: int) -> Any:
    """``m = min(B, max(ceil(K / b), ceil((1 - rho) B)))``, at least the forced blocks.

    ``num_blocks`` B is an int or an int32 array; the forced blocks are 0 and B - 1.
    Source: the spec's "One decode step", 3 and 4.
    """
    xp = jnp if isinstance(num_blocks, jax.Array) else np
    floor = -(-top_k // cfg.block_size)
    wanted = xp.maximum(floor, share(cfg.keep_ratio, num_blocks, "ceil"))
    return xp.maximum(xp.minimum(num_blocks, wanted), xp.minimum(num_blocks, 2))


def slot_budget(num_slots: Any, cfg: SpinConfig, top_k: int) -> Any:
    """A0's budget: ``min(N, max(K, ceil((1 - rho) N)))`` slots, of an int or an int32 array."""
    xp = jnp if isinstance(num_slots, jax.Array) else np
    return xp.minimum(num_slots, xp.maximum(top_k, share(cfg.keep_ratio, num_slots, "ceil")))


def exploration_share(budget: Any, cfg: SpinConfig) -> Any:
    """``round(gamma m)`` of an int or an int32 array, before it is cut to what is free."""
    return share(cfg.exploration_ratio, budget, cfg.exploration_rounding)


def steady_capacity(cfg: SpinConfig, max_slots: int, top_k: int, rows: int = 1) -> int:
    """The least number of blocks that no step but a first one can exceed.

    For A1 and A2 it is ``m`` at the longest context. A0 keeps a block for each of its top slots
    if they lie apart, and explores on top of them. ``rows`` of a draft that select on their own
    (``select_rows``) share the forced blocks at most, so their union can need that many times
    as much. Never more than the allocated blocks; a first step needs all of a row's blocks.
    """
    check_count("max_slots", max_slots)
    check_count("top_k", top_k)
    check_count("rows", rows)
    blocks = -(-max_slots // cfg.block_size)
    if cfg.reduction == "A0":
        kept = min(blocks, slot_budget(max_slots, cfg, top_k) + 2)
        budget = kept + (0 if cfg.policy == "none" else exploration_share(kept, cfg))
    else:
        budget = block_budget(blocks, cfg, top_k)
    return int(min(blocks, rows * budget))


def _ratio(value: float) -> Fraction:
    """The decimal that was written, not the binary float that came of it."""
    return Fraction(str(value)).limit_denominator(MAX_DENOMINATOR)


def _check_real(name: str, value: object, fits: Callable[[Any], bool], allowed: str) -> None:
    if not isinstance(value, Real) or isinstance(value, bool) or not fits(value):
        _refuse(name, value, allowed)


def _refuse(name: str, value: object, allowed: str) -> None:
    raise ValueError(f"{name} is {value!r}; allowed: {allowed}")
