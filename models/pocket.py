"""The pocket model: every part of DeepSeek-V4 at a size that trains in half an hour on one GPU.

A window of 32 tokens forces retrieval through the compressed slots, and 32 slots of 4 tokens are
few against the hundreds or thousands that a context of 2K to 16K tokens has: the indexer matters.
A token is a byte, and the newline ends an answer.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from models.config import CSA, HCA, SLIDING, ModelConfig, YarnConfig
from models.params import Params, ParamSpec, init_leaf, is_spec, param_specs

END_OF_ANSWER = 10
"""The newline."""


def pocket_config() -> ModelConfig:
    """4.3M parameters: two sliding layers, three CSA, one HCA, and the MTP block."""
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


def init_for_training(cfg: ModelConfig, key: jax.Array) -> Params:
    """Float32 parameters to start training from.

    Unlike ``init_params``, whose purpose is random test models: embeddings of deviation 1 beside
    sublayers that start small (by ``1 / sqrt(2 L)``), streams that keep to themselves (a mixing
    matrix near the identity) and read and write equally, no bias towards any expert.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(param_specs(cfg), is_leaf=is_spec)
    depth = 1 / math.sqrt(2 * cfg.num_hidden_layers)
    values = []
    for i, (path, spec) in enumerate(leaves):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        values.append(_initial(name, spec, jax.random.fold_in(key, i), cfg, depth))
    return jax.tree.unflatten(tree, values)


def _initial(
    name: str, spec: ParamSpec, key: jax.Array, cfg: ModelConfig, depth: float
) -> jax.Array:
    value: Any = init_leaf(spec, key, cfg)
    last = name.rsplit(".", 1)[-1]
    if name == "embed":
        return value * spec.shape[-1] ** 0.5
    if last in ("wo_b", "w2"):
        return value * depth
    if ".hc_" in name or name.startswith("hc_"):
        if last == "scale":
            return jnp.full_like(value, 0.1)
        if last == "base" and "hc_head" not in name:
            m = cfg.hc_mult
            return value.at[2 * m :].add(3 * jnp.eye(m).reshape(-1))
    if last == "bias":
        return jnp.zeros_like(value)
    return value
