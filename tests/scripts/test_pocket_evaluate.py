"""Evaluation on a random toy: every mode runs, figures add up, intervals hold their means."""

import dataclasses
import json

import evaluate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pocket_data import TASKS, make_sample
from pocket_eval import (
    ROWS,
    Outcome,
    acceptance,
    interval,
    miss_summary,
    modes,
    prefill,
    recovery,
    run_modes,
    warm_up,
)
from pocket_selectors import RandomSlots

from models import programs
from models.checkpoint import load_release
from models.checkpoint.export import export_release
from models.config import CSA, SLIDING
from models.generate import Session
from models.pocket import init_for_training, toy_config
from models.selector import IndexKeys, IndexQuery

# One CSA layer and the MTP block: programs compile in seconds, and nothing here depends on depth.
CFG = dataclasses.replace(
    toy_config(), num_hidden_layers=1, compress_ratios=(CSA, SLIDING), num_hash_layers=0
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluate") / "model"
    export_release(init_for_training(CFG, 0), CFG, folder)
    return folder


@pytest.mark.slow
def test_the_command_reports_every_mode(folder, capsys):
    arguments = ["--checkpoint", str(folder), "--lengths", "128", "--per-task", "1"]
    arguments += ["--repeats", "1", "--sparsities", "0.5", "--exploration", "0", "--json"]
    assert evaluate.main([*arguments, "--block-size", "2", "--draft-length", "0"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    names = {"all_keep", "random_slots", "spin_0.5_unexplored"}
    assert set(result["accuracy"]) == set(result["by_task"]) == names
    for name in names:
        low, high = result["intervals"][name]
        assert 0 <= low <= result["accuracy"][name] <= high <= 1
        assert set(result["by_task"][name]) == set(TASKS)
    assert result["samples"] == len(TASKS)
    missed = result["miss"]["spin_0.5_unexplored"]
    assert missed["rows"] > 0 and 0 <= missed["mean"] <= missed["p99"] <= 1
    assert "mtp" not in result


@pytest.mark.slow
def test_acceptance_counts_the_tokens_of_a_verification(folder):
    params, cfg = load_release(folder, "float32")
    samples = [make_sample("x", task, 128) for task in ("single", "late")]
    found = acceptance(params, cfg, samples, 2)
    assert 1 <= found["acceptance_length"] <= 3
    assert found["steps"] * found["acceptance_length"] == pytest.approx(2 * (ROWS - 1))
    # An untrained block drafts hardly anything right.
    assert found["acceptance_rate"] < 0.9


@pytest.mark.slow
def test_modes_in_one_batch_answer_like_sessions_of_their_own(folder):
    params, cfg = load_release(folder, "float32")
    samples = [make_sample("x", task, 128) for task in TASKS]
    chosen = modes(cfg, [0.5], [0.0], 2)
    warm_up(params, cfg, len(samples), 128 + evaluate.ROOM, chosen)
    base, ends = prefill(params, cfg, samples, 128 + evaluate.ROOM)
    compiled = set(programs._PROGRAMS)
    found = run_modes(base, ends, samples, chosen, 0)
    assert set(programs._PROGRAMS) == compiled
    assert base.lengths.tolist() == [96] * len(TASKS)
    # The same programs as above, then those of one selector alone.
    for mode in (chosen[0], chosen[2]):
        fresh = Session(params, cfg, batch=len(TASKS), max_len=384, selector=mode.selector)
        answers = fresh.turn([list(s.prompts[0]) for s in samples], ROWS)
        for outcome, answer in zip(found[mode.name], answers, strict=True):
            assert outcome.answers[0] == bytes(answer)
            assert len(outcome.answers) == len(outcome.sample.prompts)
    for outcome in found["all_keep"]:
        # All-keep attends to as many slots as are visible, at most K, all of them distinct.
        for row in outcome.slots[:, : len(outcome.answers[0]) - 1].reshape(-1, cfg.index_topk):
            assert len(set(row)) == cfg.index_topk and row.min() >= 0


def test_random_slots_are_visible_distinct_and_new_each_step():
    selector = RandomSlots()
    keys = jax.random.split(jax.random.key(0), 2)
    state = selector.init(2, 64, keys)
    query = IndexQuery(jnp.zeros((2, 3, 1, 8)), jnp.zeros((2, 3, 1)))
    index = IndexKeys(jnp.zeros((2, 64, 8)))
    seen = jnp.array([[0, 5, 64], [40, 41, 42]])
    draws = []
    for layer in (state[0], selector.commit(state[0], (), jnp.array([1, 1])), state[1]):
        slots, _ = selector.select(query, index, seen, layer, top_k=8)
        draws.append(np.asarray(slots))
        for row, count in zip(draws[-1].reshape(-1, 8), np.asarray(seen).reshape(-1), strict=True):
            held = row[row >= 0]
            assert len(set(held)) == min(8, count) and (held < count).all()
    assert (draws[0][1] != draws[1][1]).any() and (draws[0][1] != draws[2][1]).any()


def test_intervals_hold_the_mean_and_narrow_with_samples():
    rng = np.random.default_rng(0)
    widths = []
    for count in (20, 2000):
        values = (rng.random(count) < 0.3).astype(float)
        groups = np.arange(count) % 2
        mean, low, high = interval(values, groups)
        assert low <= mean <= high
        assert mean == pytest.approx((values[::2].mean() + values[1::2].mean()) / 2)
        widths.append(high - low)
    assert widths[1] < widths[0] / 5
    # Groups weigh equally, whatever their sizes; equal values leave no doubt.
    assert interval(np.array([1.0, 1, 1, 0]), np.array([0, 0, 0, 1])) == (0.5, 0.5, 0.5)


def outcome(answers, misses=(), slots=None):
    sample = make_sample("r", "late", 600)
    given = sample.answers[0] if answers is None else answers
    slots = np.full((2, ROWS, 4), -1) if slots is None else slots
    return Outcome(sample, 600, [given], np.array(misses).reshape(-1, ROWS), slots)


def test_misses_are_pooled_over_pruned_rows():
    first = np.full((2, ROWS), np.nan)
    first[0, 1:3] = 0.5, 1.0
    summary = miss_summary([outcome(None, first), outcome(None, np.zeros((1, ROWS)))])
    assert summary["rows"] == 2 + ROWS
    assert summary["mean"] == pytest.approx(1.5 / (2 + ROWS))
    assert miss_summary([outcome(None, np.full((1, ROWS), np.nan))])["mean"] is None


def test_recovery_counts_steps_from_the_jump():
    sample = make_sample("r", "late", 600)
    jump = sample.answers[0].rindex(b",") + 1
    value = sample.places[0][-1] + 5
    slots = np.full((2, ROWS, 4), -1)
    # Before the jump does not count; the second layer gets there two steps after it.
    slots[0, jump - 1, 0] = slots[1, jump + 2, 3] = value // 4
    elsewhere = np.full((2, ROWS, 4), value // 4 + 40)
    found = recovery(
        [outcome(None, slots=slots), outcome(None, slots=elsewhere), outcome(b"wrong\n")]
    )
    assert found == {"answers": 2, "mean_steps": [None, 2.0], "never": [1.0, 0.5]}
    assert recovery([]) == {"answers": 0, "mean_steps": [], "never": []}


def test_options_are_checked(capsys):
    assert evaluate.main(["--lengths", "64"]) == 2
    assert "--lengths 64 must be at least 128" in capsys.readouterr().err
