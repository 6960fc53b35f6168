"""The pocket model: every part of DeepSeek-V4 at a size that trains in minutes on one GPU.

A window of 32 tokens forces retrieval through the compressed slots, and 32 slots of 4 tokens are
few against the hundreds or thousands that a context of 2K to 16K tokens has: the indexer matters.
A token is a byte, and the newline ends an answer.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from models.config import CSA, HCA, SLIDING, ModelConfig, YarnConfig
from models.params import I64, Params, ParamSpec, is_spec, param_specs

END_OF_ANSWER = 10
"""The newline."""


def pocket_weights() -> Path:
    """The folder of the trained pocket model, a release's files, which the package brings along.

    Raises:
        ValueError: the files are not there.
    """
    folder = Path(__file__).with_name("pocket_weights")
    missing = [n for n in ("config.json", "model.safetensors") if not (folder / n).is_file()]
    if missing:
        raise ValueError(
            f"the pocket model's {' and '.join(missing)} should be in {folder}: install the "
            "package anew, or train the model with scripts/train_pocket.py --out runs/pocket and "
            "pass --checkpoint runs/pocket/model"
        )
    return folder


def pocket_config() -> ModelConfig:
    """4.4M parameters: two sliding layers, three CSA, one HCA, and the MTP block."""
    return ModelConfig(
        vocab_size=256,
        hidden_size=256,
        num_hidden_layers=6,
        compress_ratios=(SLIDING, SLIDING, CSA, CSA, HCA, CSA, SLIDING),
        num_attention_heads=4,
        head_dim=64,
        qk_rope_head_dim=16,
        q_lora_rank=128,
        o_groups=2,
        o_lora_rank=64,
        sliding_window=32,
        index_n_heads=4,
        index_head_dim=64,
        index_topk=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=96,
        num_hash_layers=1,
        routed_scaling_factor=1.0,
        swiglu_limit=10.0,
        hc_mult=2,
        # A doubly stochastic 2 x 2 matrix is found in a few rounds.
        hc_sinkhorn_iters=4,
        rope_theta=10000.0,
        compress_rope_theta=160000.0,
        yarn=YarnConfig(4.0, 4096, 32.0, 1.0),
        max_position_embeddings=16384,
        bos_token_id=0,
        eos_token_ids=(END_OF_ANSWER,),
    )


def toy_config() -> ModelConfig:
    """The same kinds of layers, a twentieth of the parameters: for tests and CPU trials."""
    return dataclasses.replace(
        pocket_config(),
        hidden_size=96,
        num_hidden_layers=4,
        compress_ratios=(SLIDING, CSA, HCA, CSA, SLIDING),
        num_attention_heads=2,
        head_dim=48,
        q_lora_rank=64,
        o_lora_rank=48,
        sliding_window=16,
        index_n_heads=2,
        index_head_dim=32,
        index_topk=16,
        moe_intermediate_size=48,
    )


def init_for_training(cfg: ModelConfig, seed: int) -> Params:
    """Float32 parameters to start training from, each from its own generator.

    Unlike ``init_params``, whose purpose is random test models: embeddings of deviation 1 beside
    sublayers that start small (by ``1 / sqrt(2 L)``), streams that keep to themselves (a mixing
    matrix near the identity), no bias towards any expert. Drawn by numpy: a hundred shapes are
    drawn before jax has compiled one.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(param_specs(cfg), is_leaf=is_spec)
    values = []
    for i, (path, spec) in enumerate(leaves):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        values.append(_initial(name, spec, np.random.default_rng([seed, i]), cfg))
    # Copies: an array that shares numpy's memory must not be donated.
    return jax.tree.unflatten(tree, [jnp.array(v, copy=True) for v in values])


def _initial(name: str, spec: ParamSpec, rng: np.random.Generator, cfg: ModelConfig) -> np.ndarray:
    last = name.rsplit(".", 1)[-1]
    if spec.storage == I64:
        order = np.argsort(rng.random((spec.shape[0], cfg.n_routed_experts)), axis=1)
        return order[:, : spec.shape[1]].astype(np.int32)
    if last == "scale":
        return np.full(spec.shape, 0.1, np.float32)
    if spec.init == "ones":
        return np.ones(spec.shape, np.float32)
    if last == "bias":
        return np.zeros(spec.shape, np.float32)
    deviation = 0.02 if spec.init == "small" else spec.shape[-1] ** -0.5
    if name == "embed":
        deviation = 1.0
    if last in ("wo_b", "w2"):
        deviation *= (2 * cfg.num_hidden_layers) ** -0.5
    value = deviation * rng.standard_normal(spec.shape, np.float32)
    if last == "base" and "hc_head" not in name:
        value[2 * cfg.hc_mult :] += 3 * np.eye(cfg.hc_mult, dtype=np.float32).reshape(-1)
    return value.astype(np.float32)
