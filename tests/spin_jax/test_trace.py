"""Recording what the indexers are asked, and replaying policies on it."""

import dataclasses
import json
import trace as trace_command

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draft_cases import agreeable
from draft_policies import POLICIES
from random_params import random_params

from models.cache import init_cache
from models.generate import Session
from models.model import forward
from models.presets import shrink, tiny_config
from models.sampling import Sampling
from spin_jax import SpinConfig, SpinSelector, recorded_miss, savings
from spin_jax.trace import RecordingSelector, replay, trace_of

CFG = dataclasses.replace(
    shrink(tiny_config(), layers=1),
    compress_ratios=(4, 0),
    vocab_size=16,
    index_topk=8,
    hc_sinkhorn_iters=2,
)
SPIN = SpinConfig(sparsity=0.5, block_size=4, policy="none")
NEW, DRAFT = 24, 2


@pytest.fixture(scope="module")
def params():
    return agreeable(random_params(CFG, 1), 1.5)


@pytest.fixture(scope="module")
def prompts():
    return np.random.default_rng(0).integers(0, 16, (2, 100))


@pytest.fixture(scope="module")
def recorded(params, prompts):
    """A run of SPIN with drafts on two prompts, recorded."""
    selector = RecordingSelector(
        NEW, DRAFT + 1, CFG.index_n_heads, CFG.index_head_dim, SpinSelector(SPIN)
    )
    session = Session(
        params,
        CFG,
        batch=2,
        max_len=100 + NEW + 1,
        chunk=32,
        draft_length=DRAFT,
        selector=selector,
        sampling=Sampling(1.0),
    )
    answers = session.turn(prompts, [NEW, NEW - 3], stop=[])
    return session, answers, trace_of(session.selector_state, session.cache, CFG.index_topk)


def test_a_replay_of_the_recorded_policy_is_the_run(recorded):
    """Queries, keys, acceptances: with all of them right, V and D come out the same."""
    session, answers, trace = recorded
    assert trace.num_rows.sum(axis=1).tolist() == [len(a) - 1 for a in answers]
    assert len(np.unique(trace.num_rows)) > 2  # drafts stood and fell, requests ended
    states = replay(trace, SpinSelector(SPIN), jax.random.key(0))
    for record, state in zip(session.selector_state, states, strict=True):
        np.testing.assert_allclose(state.spin.V, record.inner.spin.V, atol=1e-5)
        np.testing.assert_allclose(state.spin.D, record.inner.spin.D, atol=1e-5)
        np.testing.assert_array_equal(state.scored, record.inner.scored)
    assert recorded_miss(states).rows > 20


@pytest.mark.slow
def test_the_command_records_and_replays(params, prompts, tmp_path, capsys, monkeypatch):
    """What is recorded of the rows that stood is what one forward step over the text asks."""
    monkeypatch.setattr(trace_command.command, "load_model", lambda *_: (params, CFG))
    np.save(tmp_path / "ids.npy", prompts)
    out = str(tmp_path / "trace.npz")
    options = ["--ids", str(tmp_path / "ids.npy"), "--max-new-tokens", str(NEW), "--chunk", "32"]
    options += ["--draft-length", str(DRAFT), "--out", out, "--json", "--ignore-eos"]
    assert trace_command.main(["record", *options]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["layers"] == 1 and 1 < report["acceptance_length"] < DRAFT + 1
    trace = trace_command.load_trace(out)
    tokens = jnp.asarray(np.concatenate((prompts, report["tokens"]), axis=1), jnp.int32)
    whole = forward(params, tokens, init_cache(CFG, 2, tokens.shape[1]), CFG, trace=True)
    query, keys = whole.trace[0].query, whole.cache.layers[0].index_keys.values
    for b in range(2):
        stood = np.arange(DRAFT + 1)[None] < np.asarray(trace.num_rows[b])[:, None]
        assert stood.sum() == NEW - 1 and not stood.all()
        np.testing.assert_allclose(trace.q[0, b][stood], query.q[b, 100:-1], atol=1e-4)
        np.testing.assert_allclose(trace.w[0, b][stood], query.w[b, 100:-1], atol=1e-4)
        seen = trace.num_slots[b][stood]
        np.testing.assert_array_equal(seen, (np.arange(100, 99 + NEW) + 1) // 4)
        np.testing.assert_allclose(trace.keys[0, b, : seen.max()], keys[b, : seen.max()], atol=1e-4)

    options = ["--trace", out, "--sparsity", "0.6", "--block-size", "2", "--json"]
    assert trace_command.main(["replay", *options]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [(r["mask"], r["update"]) for r in rows] == list(POLICIES)
    config = SpinConfig(sparsity=0.6, block_size=2)
    states = replay(trace, SpinSelector(config), jax.random.key(0))
    saved = savings(states, config, CFG.index_head_dim, "float32")
    assert rows[0]["realized_sparsity"] == saved.realized_sparsity > 0.3
    assert all(0 <= row["miss_mean"] <= row["miss_p99"] <= 1 for row in rows)


def test_a_record_ends_with_the_answers(params, prompts, recorded, tmp_path, capsys, monkeypatch):
    """With EOS, and beyond it only where that is asked for."""
    monkeypatch.setattr(trace_command.command, "load_model", lambda *_: (params, CFG))
    np.save(tmp_path / "ids.npy", prompts)
    out = str(tmp_path / "trace.npz")
    options = ["--ids", str(tmp_path / "ids.npy"), "--max-new-tokens", str(NEW + 1), "--out", out]
    # The programs of the recorded run again.
    options += ["--chunk", "32", "--draft-length", str(DRAFT), "--temperature", "1", "--json"]
    options += ["--sparsity", "0.5", "--block-size", "4", "--policy", "none"]
    [end], early = CFG.eos_token_ids, 0
    for seed in range(4):
        answers = []
        for extra in (["--ignore-eos"], []):
            assert trace_command.main(["record", *options, "--seed", str(seed), *extra]) == 0
            answers.append(json.loads(capsys.readouterr().out.splitlines()[-1])["tokens"])
            lengths = trace_command.load_trace(out).num_rows.sum(axis=1)
            assert lengths.tolist() == [len(answer) - 1 for answer in answers[-1]]
        whole, cut = answers
        assert [len(a) for a in whole] == [NEW + 1] * 2
        assert cut == [(a[: a.index(end) + 1] if end in a else a) for a in whole]
        early += cut != whole
    assert early

    monkeypatch.setattr(trace_command.Session, "turn", lambda *_, **__: [[end], [end]])
    assert trace_command.main(["record", *options]) == 2
    assert "pass --ignore-eos or another prompt" in capsys.readouterr().err


def test_a_replay_is_of_the_policy_that_the_options_name(recorded, tmp_path, monkeypatch):
    out = str(tmp_path / "trace.npz")
    trace_command.command.write_npz(out, {"version": 1} | recorded[2]._asdict())
    seen = []
    monkeypatch.setattr(trace_command, "compare", lambda *args: seen.append(args))
    options = ["--pooling", "mean", "--decay", "0.9", "--reduction", "A2", "--policy", "age"]
    assert trace_command.main(["replay", "--trace", out, "--sparsity", "0.3", *options]) == 0
    assert trace_command.main(["replay", "--trace", out]) == 0
    wanted = SpinConfig(pooling="mean", decay=0.9, reduction="A2", policy="age")
    assert [config for _, _, config, _ in seen] == [wanted, SpinConfig()]


def test_mistakes_are_named(recorded, tmp_path, capsys):
    session, *_ = recorded
    with pytest.raises(ValueError, match="give RecordingSelector more steps"):
        short = [r.replace(q=r.q[:, :1]) for r in session.selector_state]
        trace_of(short, session.cache, CFG.index_topk)
    (tmp_path / "bad.npz").write_bytes(b"no archive")
    assert trace_command.main(["replay", "--trace", str(tmp_path / "bad.npz")]) == 2
    assert "is not a trace that trace.py record wrote" in capsys.readouterr().err
