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

from models.cache import init_cache
from models.generate import Session
from models.model import forward
from models.params import init_params
from models.presets import shrink, tiny_config
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
    return agreeable(init_params(CFG, jax.random.key(1)), 1.5)


@pytest.fixture(scope="module")
def recorded(params):
    """A run of SPIN with drafts on two prompts, recorded."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 16, n).tolist() for n in (90, 140)]
    selector = RecordingSelector(
        NEW, DRAFT + 1, CFG.index_n_heads, CFG.index_head_dim, SpinSelector(SPIN)
    )
    session = Session(
        params, CFG, batch=2, max_len=164, chunk=32, draft_length=DRAFT, selector=selector
    )
    answers = session.turn(prompts, NEW, stop=[])
    return (
        session,
        prompts,
        answers,
        trace_of(session.selector_state, session.cache, CFG.index_topk),
    )


def test_a_replay_of_the_recorded_policy_is_the_run(recorded):
    """Queries, keys, acceptances: with all of them right, V and D come out the same."""
    session, _, answers, trace = recorded
    assert trace.num_rows.sum(axis=1).tolist() == [len(a) - 1 for a in answers]
    assert len(np.unique(trace.num_rows)) > 2  # drafts stood and fell, requests ended
    states = replay(trace, SpinSelector(SPIN), jax.random.key(0))
    for record, state in zip(session.selector_state, states, strict=True):
        np.testing.assert_allclose(state.spin.V, record.inner.spin.V, atol=1e-5)
        np.testing.assert_allclose(state.spin.D, record.inner.spin.D, atol=1e-5)
        np.testing.assert_array_equal(state.scored, record.inner.scored)
    assert recorded_miss(states).rows > 20


def test_an_all_keep_record_holds_the_models_own_queries(params):
    """Of every row that stood, against one forward step over the whole text."""
    rng = np.random.default_rng(1)
    prompt = rng.integers(0, 16, 61).tolist()
    selector = RecordingSelector(NEW, DRAFT + 1, CFG.index_n_heads, CFG.index_head_dim)
    session = Session(
        params, CFG, batch=1, max_len=88, chunk=32, draft_length=DRAFT, selector=selector
    )
    (answer,) = session.turn([prompt], NEW, stop=[])
    trace = trace_of(session.selector_state, session.cache, CFG.index_topk)
    tokens = jnp.asarray([prompt + answer], jnp.int32)
    whole = forward(params, tokens, init_cache(CFG, 1, tokens.shape[1]), CFG, trace=True)
    stood = np.arange(DRAFT + 1)[None] < np.asarray(trace.num_rows[0])[:, None]
    assert stood.sum() == NEW - 1 and not stood.all()
    for layer, traced in enumerate(whole.trace):
        np.testing.assert_allclose(
            trace.q[layer, 0][stood], traced.query.q[0, len(prompt) : -1], atol=1e-4
        )
        np.testing.assert_allclose(
            trace.w[layer, 0][stood], traced.query.w[0, len(prompt) : -1], atol=1e-4
        )
        slots = int(trace.num_slots[0][stood].max())
        np.testing.assert_allclose(
            trace.keys[layer, 0, :slots],
            whole.cache.layers[layer].index_keys.values[0, :slots],
            atol=1e-4,
        )
    np.testing.assert_array_equal(
        trace.num_slots[0][stood], (np.arange(len(prompt), tokens.shape[1] - 1) + 1) // 4
    )


def test_the_command_records_and_replays(params, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(trace_command.command, "load_model", lambda *_: (params, CFG))
    np.save(tmp_path / "ids.npy", np.arange(100) * 7 % 16)
    out = str(tmp_path / "trace.npz")
    options = ["--ids", str(tmp_path / "ids.npy"), "--max-new-tokens", "16", "--draft-length", "1"]
    assert trace_command.main(["record", *options, "--out", out, "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["layers"] == 1 and 1 <= report["acceptance_length"] <= 2
    options = ["--trace", out, "--sparsity", "0.6", "--block-size", "2", "--json"]
    assert trace_command.main(["replay", *options]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [(r["mask"], r["update"]) for r in rows] == list(POLICIES)
    trace = trace_command.load_trace(out)
    config = SpinConfig(sparsity=0.6, block_size=2)
    states = replay(trace, SpinSelector(config), jax.random.key(0))
    saved = savings(states, config, CFG.index_head_dim, "float32")
    assert rows[0]["realized_sparsity"] == saved.realized_sparsity > 0.3
    assert 0 <= rows[0]["miss_mean"] <= rows[0]["miss_p99"] <= 1


def test_mistakes_are_named(recorded, tmp_path, capsys):
    session, *_ = recorded
    with pytest.raises(ValueError, match="give RecordingSelector more steps"):
        short = [r.replace(q=r.q[:, :1]) for r in session.selector_state]
        trace_of(short, session.cache, CFG.index_topk)
    (tmp_path / "bad.npz").write_bytes(b"no archive")
    assert trace_command.main(["replay", "--trace", str(tmp_path / "bad.npz")]) == 2
    assert "is not a trace that trace.py record wrote" in capsys.readouterr().err
