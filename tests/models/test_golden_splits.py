"""Every way to cut a sequence into steps gives the logits of one long prompt.

The model has the published golden model's sizes; expected values are the transformers library's,
which saw each sequence whole. Sixteen requests run at once with different lengths, so every test
is also one of ragged batches. Three steps are compiled: 64 tokens (prefill), 8 (a draft's
verification), and 1 (decode) of two requests, so few that experts are gathered, not grouped.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle_cases import (
    TOLERANCE,
    Case,
    Outputs,
    State,
    advance,
    cut,
    empty,
    golden,
    load_case,
)

from models.cache import clear, rollback
from models.config import CSA

ROWS, DRAFT = 16, 7
PROMPTS = np.array([1, 2, 3, 4, 5, 15, 16, 17, 18, 66, 127, 128, 129, 255, 256, 257])


@pytest.fixture(scope="module")
def case(tmp_path_factory) -> Case:
    name = "reference_sizes"
    return load_case(name, golden(name), tmp_path_factory.mktemp(name))


class Runs:
    """Requests, alternately the two sequences of the golden file, each at its own length."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.source = np.arange(ROWS) % len(case.ids)
        self.state = empty(case.cfg, ROWS, case.ids.shape[1], max_draft=DRAFT)
        self.at = np.zeros(ROWS, np.int64)

    @property
    def ids(self) -> np.ndarray:
        return self.case.ids[self.source]

    @property
    def total(self) -> int:
        return self.case.ids.shape[1]

    def pairs(self) -> Iterator[Runs]:
        """The requests two by two, to go on apart."""
        state = jax.tree.map(np.asarray, self.state)
        for b in range(0, len(self.at), 2):
            pair = copy.copy(self)
            pair.state = jax.tree.map(lambda x, b=b: x[b : b + 2], state)
            pair.source, pair.at = self.source[b : b + 2], self.at[b : b + 2]
            yield pair

    def step(self, count: Any, width: int) -> None:
        """Take ``count[b]`` tokens, at most those left, and check everything that comes out."""
        count = np.minimum(count, self.total - self.at)
        drafted = np.clip(self.total - 1 - self.at, 0, count)
        tokens, following = cut(self.ids, self.at, width)
        self.state, out = advance(self.case, self.state, tokens, following, (count, drafted))
        self.check(out, count, drafted)
        self.at = self.at + count

    def check(self, out: Outputs, count: np.ndarray, drafted: np.ndarray) -> None:
        """The first ``count[b]`` rows, and ``drafted[b]`` of the MTP block, as the golden ones."""
        width = out.logits.shape[1]
        position = self.at[:, None] + np.arange(width)
        given = {
            "logits": (out.logits, count),
            "mtp_logits": (out.mtp_logits, drafted),
            **{
                f"slots_{layer}": (-np.sort(-slots, axis=-1), count)
                for layer, slots in zip(self.case.cfg.csa_layers, out.slots, strict=True)
            },
        }
        for name, (found, rows) in given.items():
            full = self.case.expected[name]
            want = full[self.source[:, None], np.minimum(position, full.shape[1] - 1)]
            checked = np.arange(width) < rows[:, None]
            np.testing.assert_allclose(
                found[checked],
                want[checked],
                rtol=0,
                atol=0 if name.startswith("slots") else TOLERANCE,
                err_msg=f"{name} of requests at {self.at} by {rows} tokens",
            )

    def prefill(self, lengths: np.ndarray) -> None:
        while (left := lengths - self.at).max() > 0:
            self.step(np.clip(left, 0, 64), 64)

    def finish(self, count: Any, width: int) -> None:
        while self.at.min() < self.total:
            self.step(count, width)


@pytest.fixture(scope="module")
def prompts(case) -> Runs:
    runs = Runs(case)
    runs.prefill(PROMPTS)
    return runs


def test_prompts_of_every_kind_then_decode(prompts):
    for pair in prompts.pairs():
        for _ in range(24):  # beyond the window of 16, in every phase of a slot
            pair.step(1, 1)


def test_token_by_token(case):
    first, *_ = Runs(case).pairs()
    first.finish(1, 1)
    assert (first.at == first.total).all()


@pytest.mark.slow
def test_chunks_of_up_to_eight(case):
    runs = Runs(case)
    sizes = np.array([7, 3, 4, 5, 6, 7, 8, 7, 3, 8, 5, 4, 7, 6, 5, 8])
    while runs.at.min() < runs.total:
        runs.step(sizes, 8)
        # Sevens, fives and eights keep their chunks at the ends; the others change, to finish soon.
        sizes[1:14] = np.roll(sizes[1:14], 5)


def test_chunks_of_up_to_sixty_four(case):
    sizes = np.array([64, 63, 61, 50, 48, 33, 32, 31, 17, 16, 15, 11, 10, 9, 64, 40])
    runs = Runs(case)
    while runs.at.min() < runs.total:
        runs.step(sizes, 64)
        # The two rows of 64 keep their chunks; the others change sizes with each step.
        sizes[1:14] = np.roll(sizes[1:14], 5)


def test_turns_in_any_order(case):
    """Prefill, decode, later turns and idle steps, at random for every request."""
    random = np.random.default_rng(5)
    runs = Runs(case)
    while runs.at.min() < runs.total - 1:
        width = int(random.choice([8, 8, 8, 64]))
        busy = random.random(ROWS) < 0.7
        runs.step(np.where(busy, random.integers(1, width + 1, ROWS), 0), width)


def test_rejected_drafts_leave_no_trace(case):
    """Verify eight tokens of which 0..8 stand, roll the others back, and go on, to the end."""
    runs, random = Runs(case), np.random.default_rng(6)
    runs.prefill(PROMPTS % 40)
    rounds = 0
    while runs.at.min() < runs.total - 1:
        stand = (np.arange(ROWS) + rounds) % (DRAFT + 2)
        # The last positions have no room for eight tokens.
        count = np.minimum(DRAFT + 1, runs.total - 1 - runs.at)
        stand = np.minimum(stand, count)
        tokens, following = cut(runs.ids, runs.at, DRAFT + 1)
        wrong = np.arange(DRAFT + 1) >= stand[:, None]
        shift = random.integers(1, case.cfg.vocab_size, tokens.shape)
        tokens = np.where(wrong, (tokens + shift) % case.cfg.vocab_size, tokens)
        following = np.where(wrong, (following + shift) % case.cfg.vocab_size, following)
        state, out = advance(case, runs.state, tokens, following, (count, count))
        runs.check(out, stand, stand)
        runs.at = runs.at + stand
        kept = jnp.asarray(runs.at, jnp.int32)
        runs.state = State(rollback(state.trunk, kept), rollback(state.mtp, kept))
        rounds += 1
    runs.finish(1, 8)


def beyond(ratio: int, path: str, rows: int, length: np.ndarray, window: int) -> np.ndarray:
    """Which rows of a cache leaf no later step may see, [B, rows].

    ``length`` tokens stand; a draft may have been written over everything but the last
    ``window - 1`` tokens of the window ring and the tokens that the current slot pools.
    """
    row = np.arange(rows)[None]
    if "window" in path or "pending" in path:
        if "window" in path:
            first = length - window + 1
        else:
            first = length // ratio * ratio - (ratio if ratio == CSA else 0)
        first = np.maximum(first, 0)[:, None]
        # The token in row r is the last one that is r modulo the ring's length.
        held = length[:, None] - 1 - (length[:, None] - 1 - row) % rows
        return held < first
    return row >= (length // ratio)[:, None]


def poison(state: State, case: Case, length: np.ndarray) -> State:
    """Large finite garbage wherever the cache holds nothing that counts."""

    def leaf(ratio: int, path: Any, x: jax.Array) -> jax.Array:
        garbage = beyond(
            ratio, jax.tree_util.keystr(path), x.shape[1], length, case.cfg.sliding_window
        )
        noise = 1e4 * np.random.default_rng(7).standard_normal(x.shape)
        garbage = garbage.reshape(garbage.shape + (1,) * (x.ndim - 2))
        return jnp.where(garbage, jnp.asarray(noise, x.dtype), x)

    def layer(ratio: int, cache: Any) -> Any:
        return jax.tree_util.tree_map_with_path(lambda p, x: leaf(ratio, p, x), cache)

    def spoil(cache: Any, ratios: Any) -> Any:
        layers = tuple(layer(r, c) for r, c in zip(ratios, cache.layers, strict=True))
        return cache.replace(layers=layers)

    return State(spoil(state.trunk, case.cfg.layer_ratios), spoil(state.mtp, (0,)))


@pytest.mark.parametrize("width", [8, 64])
def test_garbage_beyond_the_length_is_never_seen(case, prompts, width):
    runs = copy.copy(prompts)
    count = np.clip(runs.total - 1 - runs.at, 0, width)
    tokens, following = cut(runs.ids, runs.at, width)
    results = []
    for state in (runs.state, poison(runs.state, case, runs.at)):
        _, out = advance(case, state, tokens, following, (count, count))
        runs.check(out, count, count)
        results.append(jax.tree.map(lambda x: x[np.arange(width) < count[:, None]], out))
    jax.tree.map(np.testing.assert_array_equal, *results)


@pytest.mark.parametrize("forget", ["clear", "length"])
def test_a_reused_row_shows_nothing_of_the_old_request(prompts, forget):
    runs = copy.copy(prompts)
    again = np.arange(ROWS) % 3 == 0
    if forget == "clear":
        marked = jnp.asarray(again)
        runs.state = State(clear(runs.state.trunk, marked), clear(runs.state.mtp, marked))
    else:
        kept = jnp.asarray(np.where(again, 0, runs.at), jnp.int32)
        runs.state = State(*(cache.replace(length=kept) for cache in runs.state))
    runs.at = np.where(again, 0, runs.at)
    runs.source = np.where(again, 1 - runs.source, runs.source)
    runs.step(np.where(again, PROMPTS[::-1] % 64, 3), 64)
    runs.step(64, 64)
    for pair in runs.pairs():
        for _ in range(5):
            pair.step(1, 1)
