"""The training forward against the decode path's, its losses against numpy, and gradients."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.cache import init_cache
from models.config import CSA, HCA, SLIDING
from models.hyper import mixing
from models.layers import embed
from models.model import forward, mtp_forward
from models.params import init_params
from models.pocket import init_for_training, toy_config
from models.presets import tiny_config
from models.training import forward_sequences, sequence_loss
from pallas_kernels.ranking import top_mask

CFG = dataclasses.replace(
    tiny_config(),
    vocab_size=97,
    hidden_size=48,
    num_hidden_layers=2,
    compress_ratios=(CSA, HCA, SLIDING),  # the sliding one is the MTP block
    head_dim=32,
    qk_rope_head_dim=16,
    q_lora_rank=24,
    o_lora_rank=16,
    index_head_dim=32,
    index_topk=6,
    num_hash_layers=1,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    hc_mult=2,
    hc_sinkhorn_iters=4,
)
TOKENS = 272  # 17 windows, 68 CSA slots, 2 HCA slots
SHALLOW = dataclasses.replace(
    CFG,
    num_hidden_layers=1,
    compress_ratios=(CSA,),
    num_hash_layers=0,
    num_nextn_predict_layers=0,
)
"""One CSA layer, for what does not depend on depth: it compiles in a second."""


@pytest.fixture(scope="module")
def model():
    params = init_params(CFG, jax.random.key(3))
    tokens = jax.random.randint(jax.random.key(4), (2, TOKENS), 0, CFG.vocab_size)
    return params, tokens


@pytest.fixture(scope="module")
def weights():
    return np.random.default_rng(0).choice([0.0, 0.25, 1.0], (2, TOKENS)).astype(np.float32)


@pytest.fixture(scope="module")
def trained(model, weights):
    """The forward's results, and the loss of the same model, in one program."""

    def both(params, tokens):
        _, parts = sequence_loss(params, tokens, weights, CFG, sparse=True)
        return forward_sequences(params, tokens, CFG), parts

    return jax.jit(both)(*model)


@pytest.fixture(scope="module")
def shallow():
    return init_params(SHALLOW, jax.random.key(5))


@pytest.fixture(scope="module")
def indexed(model, shallow):
    """The gradient of the shallow model's index loss, and its forward's results."""

    @jax.jit
    @partial(jax.grad, has_aux=True)
    def gradient(params):
        out = forward_sequences(params, model[1][:1, :64], SHALLOW)
        return jnp.sum(out.index_loss), out

    return gradient(shallow)


def shallow_forward(params, tokens, cfg=SHALLOW, **options):
    return jax.jit(lambda p, t: forward_sequences(p, t, cfg, **options))(params, tokens)


def test_logits_are_those_of_the_decode_path(model, trained):
    params, tokens = model

    @jax.jit
    def decode_path(params, tokens):
        out = forward(params, tokens, init_cache(CFG, 2, TOKENS), CFG)
        cache = init_cache(CFG, 2, TOKENS, mtp=True)
        return out, mtp_forward(params, out.streams[:, :-1], tokens[:, 1:], cache, CFG)

    out, mtp = decode_path(params, tokens)
    np.testing.assert_allclose(trained[0].logits, out.logits, atol=1e-5, rtol=0)
    np.testing.assert_allclose(trained[0].mtp_logits[:, :-1], mtp.logits, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_dense_differs_and_sparse_with_room_for_all_is_dense(model, shallow, indexed):
    tokens = model[1][:1, :64]
    sparse, dense = indexed[1], shallow_forward(shallow, tokens, sparse=False)
    assert np.abs(dense.logits - sparse.logits).max() > 1e-4
    roomy = dataclasses.replace(SHALLOW, index_topk=64)
    wide = shallow_forward(shallow, tokens, roomy, sparse=True)
    np.testing.assert_allclose(dense.logits, wide.logits, atol=1e-6, rtol=0)
    np.testing.assert_allclose(wide.index_mass[:, :, 3:], 1.0, atol=1e-5)


def test_index_loss_moves_the_indexer_alone(indexed):
    for path, grad in jax.tree_util.tree_flatten_with_path(indexed[0])[0]:
        indexer = "indexer" in jax.tree_util.keystr(path)
        assert bool(jnp.any(grad != 0)) == indexer, jax.tree_util.keystr(path)
        assert bool(jnp.all(jnp.isfinite(grad)))


def test_loss_is_the_weighted_mean_of_both_predictions(model, trained, weights):
    forwarded, parts = trained

    def mean_loss(logits, ahead):
        logits = np.asarray(logits, np.float64)[:, : TOKENS - ahead]
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        targets = np.asarray(model[1])[:, ahead:]
        loss = -np.take_along_axis(log_p, targets[..., None], -1)[..., 0]
        w, right = weights[:, ahead:], log_p.argmax(-1) == targets
        return (loss * w).sum() / w.sum(), right[w == 1].mean()

    np.testing.assert_allclose(
        (parts.next_token, parts.answers), mean_loss(forwarded.logits, 1), rtol=1e-4
    )
    np.testing.assert_allclose(
        (parts.mtp, parts.mtp_answers), mean_loss(forwarded.mtp_logits, 2), rtol=1e-4
    )
    for load in parts.expert_load:
        np.testing.assert_allclose(jnp.sum(load), 1.0, rtol=1e-5)


@pytest.mark.slow
def test_remat_changes_nothing(model, shallow, indexed):
    kept = shallow_forward(shallow, model[1][:1, :64], remat=True)
    np.testing.assert_allclose(indexed[1].logits, kept.logits, atol=1e-6, rtol=0)


def test_mixing_has_finite_gradients():
    # XLA may compute the mixing logits twice, rounded differently: no entry then equals the
    # maximum, and a gradient that divides by the number of those that do is NaN.
    cfg = toy_config()
    p = init_for_training(cfg, 1)["layers"][0]["hc_attn"]
    streams = jax.random.normal(jax.random.key(0), (4, 64, cfg.hc_mult, cfg.hidden_size))
    gradient = jax.jit(jax.grad(lambda p: jnp.sum(jnp.square(mixing(p, streams, cfg).comb))))(p)
    for leaf in jax.tree.leaves(gradient):
        assert bool(jnp.all(jnp.isfinite(leaf)))


@pytest.mark.parametrize("k", [1, 3, 40])
def test_top_mask_is_a_stable_sort(k):
    rng = np.random.default_rng(k)
    scores = rng.choice([-1.5, -0.0, 0.0, 0.25, 3.0], (2, 5, 33)).astype(np.float32)
    scores[1] = rng.normal(size=(5, 33))
    visible = rng.random((1, 5, 33)) < [[[0.0], [0.1], [0.5], [0.9], [1.0]]]
    got = np.asarray(top_mask(jnp.asarray(scores), jnp.asarray(visible), k))
    for b in range(2):
        for t in range(5):
            seen = np.flatnonzero(visible[0, t])
            best = seen[np.argsort(-scores[b, t, seen], kind="stable")[:k]]
            assert set(np.flatnonzero(got[b, t])) == set(best)


def test_lengths_that_do_not_fit_are_refused(model):
    params, tokens = model
    with pytest.raises(ValueError, match="33 tokens.*multiple of the window 16"):
        forward_sequences(params, tokens[:, :33], CFG)


def test_quantised_training_is_refused():
    with pytest.raises(ValueError, match="rounded values have no gradient"):
        forward_sequences({}, jnp.zeros((1, 32), jnp.int32), CFG.with_quant_sim())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [6, 5000])
def test_gradient_of_an_embedding(rows, dtype):
    """Repeated tokens add up, in float32, whichever way the gradient is computed."""
    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.standard_normal((rows, 8)), dtype)
    tokens = rng.integers(0, 6, (3, 40)).astype(np.int32)
    weight = jnp.asarray(rng.standard_normal((3, 40, 8)), dtype)
    got = jax.grad(lambda t: jnp.sum((embed(t, tokens) * weight).astype(jnp.float32)))(table)
    expected = np.zeros((rows, 8))
    np.add.at(expected, tokens, np.asarray(weight, np.float64))
    assert got.dtype == table.dtype
    tolerance = 1e-5 if dtype == "float32" else 1e-2
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, tolerance, tolerance)
