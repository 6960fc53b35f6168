"""Drafts of the MTP block verified by the trunk: the answers stay what they were."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draft_cases import agreeable
from random_params import random_params

from models.acceptance import accept
from models.cache import init_cache
from models.decode import decode_steps, verify_step
from models.generate import Session
from models.model import forward
from models.presets import shrink, tiny_config
from models.programs import compiled_program
from models.sampling import GREEDY, Sampling, filtered_logits
from models.selector import ALL_KEEP

VOCAB = 16
# One layer of each compressed kind; windows are in both.
CFG = dataclasses.replace(
    shrink(tiny_config(), layers=2),
    compress_ratios=(4, 128, 0),
    vocab_size=VOCAB,
    hc_sinkhorn_iters=3,
)
BATCH, MAX_LEN, NEW = 16, 352, 24
LIMITS = [1 + 7 * i % NEW for i in range(BATCH)]  # ends at every place of a draft


@pytest.fixture(scope="module")
def params():
    return agreeable(random_params(CFG, 3), 1.5)


def session(params, draft_length, **options):
    options = {"batch": BATCH, "max_len": MAX_LEN, "chunk": 32} | options
    return Session(params, CFG, draft_length=draft_length, **options)


def prompts_of(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, n).tolist() for n in lengths]


@pytest.fixture(scope="module")
def plain(params):
    """Plain greedy answers to ragged prompts of 1 to 300 tokens, then to a second turn."""
    prompts = prompts_of([1, 2, 3, 4, 5, 15, 16, 17, 31, 63, 127, 128, 129, 191, 255, 300])
    stop = [[t] for t in [5, 7, 11, 2] * 4]
    second = prompts_of([1 + i % 9 for i in range(BATCH)], seed=1)
    one = session(params, 0)
    answers = one.turn(prompts, NEW, stop=stop), one.turn(second, LIMITS, stop=[])
    return (prompts, second, stop), answers


@pytest.mark.parametrize(
    "draft_length", [3, 7, *(pytest.param(d, marks=pytest.mark.slow) for d in (1, 2, 4, 5, 6))]
)
def test_greedy_answers_are_the_plain_ones(params, plain, draft_length):
    """Ragged requests, stops and limits inside a draft, a second turn."""
    (prompts, second, stop), answers = plain
    one = session(params, draft_length)
    assert one.turn(prompts, NEW, stop=stop) == answers[0]
    assert one.turn(second, LIMITS, stop=[]) == answers[1]
    counts = one.draft_counts
    assert 1.3 < counts.acceptance_length < 1 + 0.8 * draft_length  # drafts stand and fall
    new = sum(len(a) for turn in answers for a in turn)
    assert counts.committed == new - 2 * BATCH == one.timing.decode_tokens
    np.testing.assert_array_equal(one.cache.length, one.lengths)
    np.testing.assert_array_equal(one.draft.cache.length, one.lengths - 1)


def test_every_remainder(params):
    """Prompts of every length mod 128, and with it mod 4."""
    for start in range(1, 129, BATCH):
        prompts = prompts_of(range(start, start + BATCH), seed=start)
        answers = [session(params, d).turn(prompts, 12, stop=[]) for d in (0, 3)]
        assert answers[0] == answers[1]


def test_a_full_cache(params):
    """The last token fills the cache to its last place; nothing is written beyond."""
    prompts = prompts_of([MAX_LEN - NEW + i % 4 - 3 for i in range(BATCH)])
    limits = [MAX_LEN - len(p) for p in prompts]
    answers = [session(params, d).turn(prompts, limits, stop=[]) for d in (0, 7)]
    assert answers[0] == answers[1]
    assert [len(a) for a in answers[1]] == limits


def test_a_stream_yields_the_same_tokens(params, plain):
    (prompts, _, stop), answers = plain
    parts = list(session(params, 3).stream_turn(prompts, NEW, stop=stop, every=8))
    assert len(parts) > 2
    assert [sum(parts, []) for parts in zip(*parts, strict=True)] == answers[0]


@pytest.mark.slow
@pytest.mark.parametrize("layers", [2, 7])
def test_other_shapes(layers):
    """The golden size with all its layers; and sliding windows alone, with no indexer."""
    cfg = dataclasses.replace(shrink(tiny_config(), layers=layers), hc_sinkhorn_iters=3)
    params = agreeable(random_params(cfg, 0), 1.5)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, cfg.vocab_size, n).tolist() for n in (70, 37)]
    one = Session(params, cfg, batch=2, max_len=144, chunk=70, draft_length=2)
    answers = one.turn(prompts, [40, 73], stop=[])
    assert one.draft_counts.accepted > 10
    # Greedy answers are what one forward step over prompt and answer predicts, place by place.
    tokens = jnp.asarray([p + a for p, a in zip(prompts, answers, strict=True)], jnp.int32)
    cache = init_cache(cfg, 2, tokens.shape[1])
    predicted = np.argmax(forward(params, tokens, cache, cfg).logits, axis=-1)
    for prompt, answer, row in zip(prompts, answers, predicted, strict=True):
        assert row[len(prompt) - 1 : -1].tolist() == answer


def test_forced_acceptance_differs_by_request(params, plain):
    """None, some, all: every request commits what it is told to, and goes on from there."""
    d, prompts = 3, plain[0][0]
    states = []

    class Stopped(Session):
        def _decode(self, state, steps, selector):
            states.append(state)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Stopped(params, CFG, batch=BATCH, max_len=MAX_LEN, chunk=32, draft_length=d).turn(
            prompts, NEW, stop=[[]] * BATCH
        )
    forced = jnp.arange(BATCH, dtype=jnp.int32) % (d + 1)
    options = {"cfg": CFG, "selector": ALL_KEEP, "sampling": GREEDY, "draft_length": d}
    after = jax.jit(partial(verify_step, **options))(params, states[0], forced=forced)
    np.testing.assert_array_equal(after.count, 2 + forced)
    np.testing.assert_array_equal(after.cache.length, states[0].cache.length + forced + 1)
    np.testing.assert_array_equal(after.draft.accepted, forced)
    tokens, count = np.array(after.tokens), np.array(after.count)
    begun = [tokens[b, : count[b]].tolist() for b in range(BATCH)]
    args = (params, after, jnp.int32(NEW))
    end = compiled_program(decode_steps, args, **options)(*args)
    # What follows is what plain decoding makes of the same tokens: rejected ones left no trace.
    histories = [p + t for p, t in zip(prompts, begun, strict=True)]
    rest = session(params, 0).turn(histories, [NEW - len(t) for t in begun], stop=[])
    for b in range(BATCH):
        assert end.tokens[b, :NEW].tolist() == begun[b] + rest[b], b


SAMPLING = Sampling(temperature=0.9, top_k=5, top_p=0.95)


@pytest.mark.parametrize("sampling", [Sampling(temperature=1.3), SAMPLING])
def test_rejection_sampling_is_lossless(sampling):
    """The first two tokens that a step commits are distributed as the target's, by chi-square."""
    vocab, draws = 6, 100_000
    logits, draft = 1.5 * jax.random.normal(jax.random.key(1), (2, 3, vocab))
    draft = filtered_logits(draft[:2], sampling)  # the drafts of two rows

    def draw(key):
        keys = jax.random.split(key, 5)
        drafts = jax.vmap(jax.random.categorical)(keys[:2], draft).astype(jnp.int32)
        accepted, following = accept(
            logits[None], drafts[None], draft[None], keys[None, 2:], sampling
        )
        first = jnp.where(accepted[0, 0], drafts[0], following[0, 0])
        second = jnp.where(accepted[0, 1], drafts[1], following[0, 1])
        third = following[0, 2]
        # Rows after a rejection are not committed: the next step draws them anew.
        return (
            first,
            jnp.where(accepted[0, 0], second, -1),
            jnp.where(accepted[0, 0] & accepted[0, 1], third, -1),
        )

    columns = jax.jit(jax.vmap(draw))(jax.random.split(jax.random.key(2), draws))
    for row, tokens in zip(filtered_logits(logits, sampling), columns, strict=True):
        tokens = np.asarray(tokens)
        tokens = tokens[tokens >= 0]
        assert len(tokens) > 2_000
        p = np.asarray(jax.nn.softmax(row), np.float64)
        counts = np.bincount(tokens, minlength=vocab)
        assert counts[p == 0].sum() == 0
        expected = len(tokens) * p[p > 0]
        statistic = ((counts[p > 0] - expected) ** 2 / expected).sum()
        assert statistic < 25  # five degrees of freedom at most: one in 7,000


@pytest.mark.slow
def test_sampled_answers_follow_the_plain_distribution(params):
    """Whole steps: triples of tokens from many requests, plain and with drafts, two samples."""
    sampling = Sampling(temperature=0.7, top_k=3)
    counts = np.zeros((2, VOCAB**3))
    for row, d in enumerate((0, 3)):
        for seed in range(24):
            one = session(params, d, sampling=sampling, key=jax.random.key(seed))
            answers = one.turn([[1, 2, 3]] * BATCH, 4, stop=[])
            for _, *triple in answers:
                counts[row, np.ravel_multi_index(triple, (VOCAB,) * 3)] += 1
    total = counts.sum(axis=0)
    common = total >= 10
    folded = np.concatenate((counts[:, common], counts[:, ~common].sum(axis=1)[:, None]), axis=1)
    statistic = ((folded[0] - folded[1]) ** 2 / np.maximum(folded.sum(axis=0), 1)).sum()
    freedom = folded.shape[1] - 1
    assert 3 < freedom and statistic < freedom + 4 * np.sqrt(2 * freedom)


def test_mistakes_are_named(params):
    with pytest.raises(ValueError, match="draft_length is -1"):
        session(params, -1)
    cfg = dataclasses.replace(CFG, num_nextn_predict_layers=0, compress_ratios=(4, 128))
    with pytest.raises(ValueError, match="no MTP block to draft with"):
        Session(params, cfg, batch=1, max_len=8, draft_length=1)
