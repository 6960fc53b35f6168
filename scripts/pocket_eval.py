"""Closed-loop evaluation of retrieval: one prefill of the contexts, many selectors after it."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from pocket_data import TASKS, Sample, make_sample
from pocket_selectors import RandomSlots, Recorded, SideBySide

from models.config import CSA, ModelConfig
from models.generate import SHORT_CHUNK, Session, Timing
from models.selector import ALL_KEEP, Selector
from spin_jax import SpinConfig, SpinSelector
from spin_jax.selector import SpinLayer

ROWS = 32
"""Room for an answer's tokens."""


@dataclasses.dataclass(frozen=True)
class Mode:
    """A way to select slots, and its name in the report."""

    name: str
    selector: Selector


def modes(
    cfg: ModelConfig, sparsities: Sequence[float], explorations: Sequence[float], block_size: int
) -> list[Mode]:
    """All-keep, random slots, and SPIN at each sparsity; without exploration under another name."""
    found = [Mode("all_keep", ALL_KEEP), Mode("random_slots", RandomSlots())]
    for exploration in explorations:
        for sparsity in sparsities:
            config = SpinConfig(sparsity=sparsity, exploration=exploration, block_size=block_size)
            name = f"spin_{sparsity:g}" + ("" if exploration else "_unexplored")
            found.append(Mode(name, SpinSelector(config, unpruned=True, diagnose=ROWS)))
    return [Mode(m.name, Recorded(m.selector, ROWS, cfg.index_topk)) for m in found]


@dataclasses.dataclass
class Outcome:
    """What became of one sample under one mode."""

    sample: Sample
    length: int
    answers: list[bytes]
    misses: np.ndarray
    """[layers x turns, M]: share of the dense top K that was not scored; NaN where all were."""
    slots: np.ndarray
    """[L, M, K]: slots that each CSA layer attended to at each decode step of the first turn."""

    @property
    def score(self) -> float:
        """The share of turns whose answer is right to the last byte."""
        return float(
            np.mean([a == b for a, b in zip(self.answers, self.sample.answers, strict=True)])
        )


def make_samples(
    seed: int, repeat: int, length: int, per_task: int, tasks: Sequence[str] = TASKS
) -> list[Sample]:
    """Held-out samples, the same for every mode."""
    return [
        make_sample(f"evaluation {seed} {repeat} {i}", task, length)
        for task in tasks
        for i in range(per_task)
    ]


def prefill(
    params: Any, cfg: ModelConfig, samples: Sequence[Sample], capacity: int
) -> tuple[Session, list[list[int]]]:
    """A session that holds all but the end of each first prompt, and the ends."""
    ids = [list(s.prompts[0]) for s in samples]
    session = Session(params, cfg, batch=len(ids), max_len=capacity, dtype=params["embed"].dtype)
    # Generates one token, which never enters the cache.
    session.turn([row[:-SHORT_CHUNK] for row in ids], 1)
    return session, [row[-SHORT_CHUNK:] for row in ids]


def fork(base: Session, selector: Selector, copies: int, key: jax.Array) -> Session:
    """A session of ``copies`` times the requests of ``base``, going on from what its cache holds.

    ``base`` stays as it is; what it sampled last is forgotten, and the selector starts anew, as at
    any turn.
    """
    session = copy.copy(base)
    # Always new arrays: steps donate what they are given.
    session.cache = jax.tree.map(lambda x: jnp.concatenate([x] * copies), base.cache)
    session.lengths = np.tile(base.lengths, copies)
    session.unfed = [[] for _ in session.lengths]
    session.selector, session.key, session.keys = selector, key, None
    # What is still to be fed is short, and of most requests a token: one program, little padding.
    session.chunk = SHORT_CHUNK
    session.timing = Timing()
    return session


def warm_up(
    params: Any, cfg: ModelConfig, batch: int, capacity: int, chosen: Sequence[Mode]
) -> None:
    """Compile what :func:`run_modes` needs for ``batch`` samples of sessions of ``capacity``."""
    base = Session(params, cfg, batch=batch, max_len=capacity, dtype=params["embed"].dtype)
    selector = SideBySide(tuple(mode.selector for mode in chosen))
    session = fork(base, selector, len(chosen), jax.random.key(0))
    # The room for an answer and the number of stops are part of the program; this stop never comes.
    never = [cfg.vocab_size] * len(cfg.eos_token_ids)
    stream = session.stream_turn([[0]] * batch * len(chosen), ROWS, stop=never, every=1)
    # The first token comes from prefill, the second from decoding.
    for _ in range(2):
        next(stream)


def run_modes(
    base: Session,
    ends: list[list[int]],
    samples: Sequence[Sample],
    chosen: Sequence[Mode],
    seed: int,
) -> dict[str, list[Outcome]]:
    """Answer every turn of every sample under every mode, all in one batch.

    Samples of one turn idle through the further ones.
    """
    length = int(base.lengths[0]) + len(ends[0])
    selector = SideBySide(tuple(mode.selector for mode in chosen))
    session = fork(base, selector, len(chosen), jax.random.key(seed))
    found = {
        mode.name: [Outcome(s, length, [], np.zeros((0, ROWS)), _NO_SLOTS) for s in samples]
        for mode in chosen
    }
    for turn in range(max(len(s.prompts) for s in samples)):
        prompts = ends
        if turn:
            prompts = [list(s.prompts[turn]) if turn < len(s.prompts) else [10] for s in samples]
        # One limit for all gives one program; an answer ends with its newline anyhow.
        answers = session.turn(prompts * len(chosen), ROWS)
        for m, outcomes in enumerate(found.values()):
            layers = [state[m] for state in session.selector_state]
            for b, outcome in enumerate(outcomes):
                if turn < len(outcome.sample.prompts):
                    own = answers[m * len(samples) + b]
                    # A token beyond the bytes is no byte of an answer.
                    outcome.answers.append(bytes(t if t < 256 else 0 for t in own))
            _record(outcomes, layers, turn)
    return found


_NO_SLOTS = np.zeros((0, ROWS, 0), np.int32)


def _record(outcomes: list[Outcome], layers: list[Any], turn: int) -> None:
    """Append what one mode's selectors recorded in a turn."""
    misses = [np.asarray(s.inner.misses) for s in layers if isinstance(s.inner, SpinLayer)]
    for b, outcome in enumerate(outcomes):
        if turn < len(outcome.sample.prompts):
            outcome.misses = np.concatenate([outcome.misses, *(m[b][None] for m in misses)])
        if not turn and layers:
            outcome.slots = np.stack([np.asarray(s.slots[b]) for s in layers])


def interval(
    values: np.ndarray, groups: np.ndarray, seed: int = 0, draws: int = 2000
) -> tuple[float, float, float]:
    """Mean over groups of their means, and its 95% bootstrap interval: samples are redrawn with
    replacement within each group."""
    rng = np.random.default_rng(seed)
    means, redrawn = [], []
    for group in np.unique(groups):
        own = values[groups == group]
        means.append(own.mean())
        redrawn.append(own[rng.integers(len(own), size=(draws, len(own)))].mean(axis=1))
    low, high = np.quantile(np.mean(redrawn, axis=0), [0.025, 0.975])
    return float(np.mean(means)), float(low), float(high)


def miss_summary(outcomes: Sequence[Outcome]) -> dict[str, float | int | None]:
    """Mean and p99 over all pruned rows, and the mean over layers and turns of their own p99."""
    rows = [row for o in outcomes for row in o.misses]
    rows = [own for row in rows if len(own := row[~np.isnan(row)])]
    if not rows:
        return {"rows": 0, "mean": None, "p99": None, "mean_of_p99": None}
    pooled = np.concatenate(rows)
    return {
        "rows": len(pooled),
        "mean": float(pooled.mean()),
        "p99": float(np.quantile(pooled, 0.99)),
        "mean_of_p99": float(np.mean([np.quantile(row, 0.99) for row in rows])),
    }


def recovery(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Decode steps from the jump of ``late`` samples to the first that attends to the old fact.

    The jump is where the answer begins to name its last key; the fact counts as attended to by a
    CSA layer when that selects a slot that pools its value. Only answers that are right up to the
    jump count. Layer by layer ``mean_steps`` of the answers where the layer gets there, and
    ``never``, the share where it does not before the answer ends.
    """
    steps: list[list[float]] = []
    for o in outcomes:
        right = o.sample.answers[0]
        jump = right.rfind(b",") + 1
        if o.sample.task != "late" or o.answers[0][:jump] != right[:jump] or not o.slots.size:
            continue
        value = o.sample.places[0][-1] + 5
        # Slot c pools its own four tokens and the four before them.
        wanted = np.arange(value // CSA, (value + 2) // CSA + 2)
        attended: np.ndarray = np.asarray(np.isin(o.slots, wanted).any(axis=2))
        held = attended[:, jump : len(right) - 1]
        steps.append([float(np.argmax(layer)) if layer.any() else np.inf for layer in held])
    layers = [[s for s in layer if np.isfinite(s)] for layer in zip(*steps, strict=True)]
    return {
        "answers": len(steps),
        "mean_steps": [float(np.mean(reached)) if reached else None for reached in layers],
        "never": [1 - len(reached) / len(steps) for reached in layers],
    }


def acceptance(
    params: Any, cfg: ModelConfig, samples: Sequence[Sample], draft_length: int
) -> dict[str, float | int]:
    """How many tokens of the model's own text a verification of MTP drafts gives, all-keep."""
    ids = [list(s.prompts[0]) for s in samples]
    session = Session(
        params,
        cfg,
        batch=len(ids),
        max_len=len(ids[0]) + ROWS,
        dtype=params["embed"].dtype,
        draft_length=draft_length,
    )
    session.turn(ids, ROWS, stop=[])
    counts = session.draft_counts
    assert counts is not None
    return {
        "draft_length": draft_length,
        "acceptance_length": counts.acceptance_length,
        "acceptance_rate": counts.acceptance_rate,
        "steps": counts.steps,
    }


def report(outcomes: dict[str, list[Outcome]]) -> dict[str, Any]:
    """All figures but MTP's, ready for JSON. Groups of equal weight are (task, length)."""
    groups = np.array(
        [json.dumps([o.sample.task, o.length]) for o in next(iter(outcomes.values()))]
    )
    scores = {name: np.array([o.score for o in found]) for name, found in outcomes.items()}
    result: dict[str, Any] = {"accuracy": {}, "intervals": {}, "difference": {}, "by_task": {}}
    for name, own in scores.items():
        mean, low, high = interval(own, groups)
        result["accuracy"][name] = mean
        result["intervals"][name] = [low, high]
        if name != "all_keep":
            result["difference"][name] = list(interval(own - scores["all_keep"], groups))
        table: dict[str, dict[str, float]] = {}
        for group in np.unique(groups):
            task, length = json.loads(group)
            table.setdefault(task, {})[str(length)] = float(own[groups == group].mean())
        result["by_task"][name] = table
    pruned = {n: o for n, o in outcomes.items() if n.startswith("spin")}
    result["miss"] = {name: miss_summary(found) for name, found in pruned.items()}
    result["recovery"] = {name: recovery(found) for name, found in outcomes.items()}
    result["samples"] = len(groups)
    return result
