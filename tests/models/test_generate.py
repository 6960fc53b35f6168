"""Sessions and the decode loop: ragged batches, turns, stops, streams, draws, compiled programs."""

import dataclasses
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_params import random_params

from models import programs
from models.cache import init_cache
from models.decode import DecodeState, decode_steps
from models.generate import Session, check_ids, generate, request_keys
from models.params import init_params
from models.presets import shrink, tiny_config
from models.programs import compiled_program
from models.sampling import GREEDY, Sampling, filtered_logits, sample
from models.selector import ALL_KEEP

CFG = shrink(tiny_config(), layers=3)  # one layer of each kind: what is compiled counts here
MAX_LEN = 320
CHUNK = 32
LENGTHS = (1, 6, 37, 150)


@pytest.fixture(scope="module")
def params():
    return random_params(CFG, 0)


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(1)
    return [rng.integers(0, CFG.vocab_size, n).tolist() for n in LENGTHS]


@pytest.fixture(scope="module")
def answered(params, prompts):
    """A ragged batch over two turns: the session, both turns' prompts and both answers."""
    session = Session(params, CFG, batch=4, max_len=MAX_LEN, chunk=CHUNK)
    rng = np.random.default_rng(2)
    second = [rng.integers(0, CFG.vocab_size, n).tolist() for n in (7, 3, 30, 1)]
    answers = [session.turn(p, 24, stop=[]) for p in (prompts, second)]
    return session, (prompts, second), answers


@pytest.fixture(scope="module")
def single(params):
    """Greedy answers one request at a time."""

    def answer(prompt, count):
        fresh = Session(params, CFG, batch=1, max_len=MAX_LEN, chunk=CHUNK)
        return fresh.turn([prompt], count, stop=[])[0]

    return answer


def test_a_ragged_batch_equals_single_runs(answered, single):
    _, (prompts, _), (first, _) = answered
    for prompt, answer in zip(prompts, first, strict=True):
        assert single(prompt, 24) == answer


def test_a_second_turn_equals_one_long_prompt(answered, single):
    _, (prompts, second), (first, answers) = answered
    for p, a, q, answer in zip(prompts, first, second, answers, strict=True):
        assert single([*p, *a, *q], 24) == answer


def test_streaming_and_limits_give_the_same_tokens(params, answered):
    session, (prompts, _), (first, _) = answered
    fresh = Session(params, CFG, batch=4, max_len=MAX_LEN, chunk=CHUNK)
    limits = [24, 3, 1, 20]
    pieces = list(fresh.stream_turn(prompts, limits, stop=[], every=7))
    assert [len(p[0]) for p in pieces[:3]] == [1, 1, 7]
    joined = [sum((piece[b] for piece in pieces), []) for b in range(4)]
    assert joined == [a[:n] for a, n in zip(first, limits, strict=True)]
    assert fresh.lengths.tolist() == [
        n + limit - 1 for n, limit in zip(LENGTHS, limits, strict=True)
    ]


def test_an_abandoned_stream_leaves_a_session_that_goes_on(params, answered, single):
    session, (prompts, second), (first, _) = answered
    fresh = Session(params, CFG, batch=4, max_len=MAX_LEN, chunk=CHUNK)
    stream = fresh.stream_turn(prompts, 24, stop=[], every=4)
    seen = [next(stream) for _ in range(3)]
    stream.close()
    told = [sum((piece[b] for piece in seen), []) for b in range(4)]
    assert told == [a[: len(t)] for a, t in zip(first, told, strict=True)]
    answers = fresh.turn(second, 20, stop=[])
    for p, t, q, answer in zip(prompts, told, second, answers, strict=True):
        assert single([*p, *t, *q], 20) == answer


def test_each_request_stops_at_its_own_tokens(params, answered):
    session, (prompts, _), (first, _) = answered
    fresh = Session(params, CFG, batch=4, max_len=MAX_LEN, chunk=CHUNK)
    stops = [[first[0][5]], [], [first[2][2]], [first[0][1]]]
    answers = fresh.turn(prompts, 24, stop=stops)
    for answer, whole, stop in zip(answers, first, stops, strict=True):
        ends = [i for i, t in enumerate(whole) if t in stop]
        assert answer == whole[: ends[0] + 1 if ends else 24]


def test_eos_of_the_config_stops_by_default(params, answered):
    session, (prompts, _), (first, _) = answered
    eos = dataclasses.replace(CFG, eos_token_ids=(first[1][3],))
    fresh = Session(params, eos, batch=4, max_len=MAX_LEN, chunk=CHUNK)
    answers = fresh.turn(prompts, 24)
    assert answers[1] == first[1][: first[1].index(first[1][3]) + 1]


def test_draws_belong_to_the_request(params, prompts):
    sampling = Sampling(temperature=1.0, top_p=0.9)
    same = [*prompts[:3], prompts[1]]
    session = Session(params, CFG, batch=4, max_len=64, chunk=CHUNK, sampling=sampling)
    answers = session.turn(same, 12, stop=[])
    order = [2, 0, 3, 1]
    fresh = Session(params, CFG, batch=4, max_len=64, chunk=CHUNK, sampling=sampling)
    permuted = fresh.turn([same[i] for i in order], 12, stop=[])
    assert permuted[1] == answers[0] and permuted[0] == answers[2]
    # Equal prompts are told apart by order, so their two answers swap with it.
    assert permuted[2] == answers[1] and permuted[3] == answers[3]
    assert answers[1] != answers[3]
    other = Session(
        params, CFG, batch=4, max_len=64, chunk=CHUNK, sampling=sampling, key=jax.random.key(5)
    )
    assert other.turn(same, 12, stop=[]) != answers


def test_request_keys_differ_for_equal_prompts():
    a, b, c = request_keys(jax.random.key(0), [np.array([1, 2]), np.array([3]), np.array([1, 2])])
    assert len({tuple(jax.random.key_data(k).tolist()) for k in (a, b, c)}) == 3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.turn([[]] * 4, 5), "prompt 0: shape .* at least one token"),
        (
            lambda s: s.turn([[1], [2], [3], [CFG.vocab_size]], 5),
            f"token {CFG.vocab_size} .*outside",
        ),
        (lambda s: s.turn([[1], [2], [-1], [1]], 5), "token -1 .*outside"),
        (lambda s: s.turn([[1], [2], [0.5], [1]], 5), "tokens are integers"),
        (lambda s: s.turn([[1]] * 3, 5), "3 prompts for a session of 4"),
        (lambda s: s.turn([[1]] * 4, 0), "max_new_tokens is 0"),
        (lambda s: s.turn([[1]] * 4, [5, 6, 7, MAX_LEN]), "request 3 .* max_len is 320: raise"),
        (lambda s: s.turn([[1]] * 4, 5, stop=[[1], [2]]), "stop has 2 lists"),
        (lambda s: list(s.stream_turn([[1]] * 4, 5, every=0)), "every 0"),
        (lambda s: s.turn([[1]] * 4, 2.7), "one integer or 4"),
        (lambda s: s.turn([[1]] * 4, [1, 2]), "one integer or 4"),
        (lambda s: s.turn([[1]] * 4, 5, stop=[2**40]), "stop token"),
    ],
)
def test_mistakes_are_named_and_change_nothing(params, call, message):
    session = Session(params, CFG, batch=4, max_len=MAX_LEN, chunk=CHUNK)
    with pytest.raises(ValueError, match=message):
        call(session)
    assert session.lengths.tolist() == [0] * 4 and session.keys is None


def test_an_interrupted_step_ends_the_session_loudly(params, prompts, monkeypatch):
    session = Session(params, CFG, batch=4, max_len=MAX_LEN, chunk=CHUNK)
    run = session._decode

    def interrupted(state, *args):
        run(state, *args)  # donates the state, then is cut off
        raise KeyboardInterrupt

    monkeypatch.setattr(session, "_decode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        session.turn(prompts, 24, stop=[])
    with pytest.raises(ValueError, match="interrupted .* make a new one"):
        session.turn(prompts, 24, stop=[])


def test_options_are_checked(params):
    with pytest.raises(ValueError, match="chunk is 0"):
        Session(params, CFG, batch=1, max_len=8, chunk=0)
    with pytest.raises(ValueError, match="batch 0"):
        Session(params, CFG, batch=0, max_len=8)
    for options in ({"temperature": -1.0}, {"top_p": 0.0}, {"top_k": -1}):
        (name,) = options
        with pytest.raises(ValueError, match=f"{name} is"):
            Sampling(**options)
    with pytest.raises(ValueError, match="an array"):
        check_ids([1, 2], CFG, ndim=2)


def _abstract_state(batch, max_len, room=64):
    cache = jax.eval_shape(lambda: init_cache(CFG, batch, max_len))
    ints = jax.ShapeDtypeStruct((batch,), jnp.int32)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), batch))
    return DecodeState(
        cache=cache,
        token=ints,
        tokens=jax.ShapeDtypeStruct((batch, room), jnp.int32),
        count=ints,
        limit=ints,
        stop=jax.ShapeDtypeStruct((batch, 1), jnp.int32),
        done=jax.ShapeDtypeStruct((batch,), jnp.bool_),
        keys=keys,
        selector_state=((),) * len(CFG.csa_layers),
    )


def _compile(batch, max_len):
    params = jax.eval_shape(lambda: init_params(CFG, jax.random.key(0)))
    steps = jax.ShapeDtypeStruct((), jnp.int32)
    return decode_steps.lower(
        params,
        _abstract_state(batch, max_len),
        steps,
        cfg=CFG,
        selector=ALL_KEEP,
        sampling=GREEDY,
    ).compile()


def test_temporaries_do_not_grow_with_the_cache():
    """Only the index scores, one float32 a slot, and what ranks them may."""
    small, large = (_compile(1, n) for n in (4096, 65536))
    grown = large.memory_analysis().temp_size_in_bytes - small.memory_analysis().temp_size_in_bytes
    slots = (65536 - 4096) // 4
    heads = CFG.index_n_heads
    cache = sum(
        x.size * x.dtype.itemsize
        for layer in _abstract_state(1, 65536).cache.layers
        for x in jax.tree.leaves(layer)
    )
    # Scores before and after the sum over heads, their order keys and positions; HCA scores.
    assert grown < slots * 4 * (heads + 8) < cache / 8
    # No array of the size of a cache leaf is made anew in the loop.
    for width in (CFG.head_dim, CFG.index_head_dim):
        copies = re.findall(
            rf"f32\[(?:1,)?{65536 // 4},{width}\]\S* (?:copy|transpose)\(", large.as_text()
        )
        assert not copies


def test_the_loop_is_one_program_for_any_number_of_steps(params, prompts):
    """One to prefill and one to decode, whatever the session, its prompts and its steps."""
    before = set(programs._PROGRAMS)
    answer = generate(params, CFG, [prompts[1]], 30, stop=[], chunk=CHUNK)
    assert len(answer[0]) == 30
    made = set(programs._PROGRAMS) - before
    assert sorted(name[0].__name__ for name in made) == ["decode_steps", "prefill_chunk"]
    # 21 to 36 tokens in all: the same room for them and the same programs.
    again = generate(params, CFG, [prompts[0]], 17, stop=[], chunk=CHUNK, max_len=36)
    assert len(again[0]) == 17
    assert set(programs._PROGRAMS) - before == made


class Lowering:
    """A jitted function whose compilation waits for the test, and fails the first ``failures``
    times."""

    def __init__(self, failures):
        self.failures, self.compiled = failures, 0
        self.begun, self.may_end = threading.Event(), threading.Event()

    def lower(self, *args, **static):
        return self

    def compile(self):
        self.begun.set()
        assert self.may_end.wait(60)
        self.compiled += 1
        if self.compiled <= self.failures:
            raise RuntimeError("no room")
        return "program"


@pytest.mark.parametrize("failures", [0, 1])
def test_threads_wait_for_one_compilation(failures):
    """And a different program is compiled meanwhile; all who wait see a failure."""
    slow, quick = Lowering(failures), Lowering(0)
    quick.may_end.set()
    with ThreadPoolExecutor(4) as pool:
        found = [pool.submit(compiled_program, slow, (jnp.zeros(3),)) for _ in range(4)]
        assert slow.begun.wait(60)
        assert compiled_program(quick, (jnp.zeros(3),)) == "program"
        assert not any(f.done() for f in found)
        slow.may_end.set()
    errors = [f.exception() for f in found]
    if failures:
        # Who came only after the failure has tried again, with success.
        assert any(isinstance(e, RuntimeError) for e in errors) and slow.compiled <= 2
    else:
        assert errors == [None] * 4 and slow.compiled == 1


def test_a_failed_compilation_is_tried_again():
    function = Lowering(1)
    function.may_end.set()
    with pytest.raises(RuntimeError, match="no room"):
        compiled_program(function, (jnp.zeros(3),))
    assert compiled_program(function, (jnp.zeros(3),)) == "program"


def test_sampling_keeps_exactly_the_likeliest():
    logits = jnp.log(jnp.array([[0.4, 0.3, 0.2, 0.1]]))
    kept = filtered_logits(logits, Sampling(temperature=1.0, top_k=3, top_p=0.6))
    assert np.isfinite(np.asarray(kept)).tolist() == [[True, True, False, False]]
    tied = filtered_logits(jnp.zeros((1, 4)), Sampling(temperature=1.0, top_k=2))
    assert np.isfinite(np.asarray(tied)).tolist() == [[True, True, False, False]]
    cold = filtered_logits(jnp.array([[3.0, 5.0, 1.0, -2.0]]), Sampling(temperature=1e-46))
    assert np.asarray(cold).argmax() == 1 and np.isfinite(np.asarray(cold)).sum() >= 1
    sure = filtered_logits(logits, Sampling(temperature=1.0, top_p=1e-9))
    assert np.isfinite(np.asarray(sure)).tolist() == [[True, False, False, False]]


def test_samples_follow_the_distribution():
    probabilities = np.array([0.5, 0.25, 0.15, 0.1])
    keys = jax.random.split(jax.random.key(3), 20000)
    logits = jnp.broadcast_to(jnp.log(jnp.asarray(probabilities)), (20000, 4))
    drawn = np.asarray(sample(logits, keys, Sampling(temperature=1.0)))
    counts = np.bincount(drawn, minlength=4)
    chi2 = ((counts - 20000 * probabilities) ** 2 / (20000 * probabilities)).sum()
    assert chi2 < 16.3  # p = 0.001 at three degrees of freedom
    cold = np.asarray(sample(logits, keys, Sampling(temperature=0.25)))
    sharp = probabilities**4 / (probabilities**4).sum()
    counts = np.bincount(cold, minlength=4)
    assert ((counts - 20000 * sharp) ** 2 / (20000 * sharp)).sum() < 16.3
