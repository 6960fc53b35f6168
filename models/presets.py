"""Configurations of the released models, and small ones of the same kind.

Source: the spec's "Configurations" table.
"""

from __future__ import annotations

import dataclasses

from models.config import CSA, HCA, SLIDING, ModelConfig, YarnConfig

_RELEASED = {
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "o_lora_rank": 1024,
    "num_experts_per_tok": 6,
    "n_shared_experts": 1,
    "num_hash_layers": 3,
    "num_nextn_predict_layers": 1,
    "norm_topk_prob": True,
    "swiglu_limit": 10.0,
    "sliding_window": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "yarn": YarnConfig(16.0, 65536, 32.0, 1.0),
    "max_position_embeddings": 1048576,
    "vocab_size": 129280,
    "bos_token_id": 0,
    "eos_token_ids": (1,),
}


def flash_config() -> ModelConfig:
    """DeepSeek-V4-Flash: 43 layers, 284B class."""
    return ModelConfig(
        hidden_size=4096,
        num_hidden_layers=43,
        num_attention_heads=64,
        q_lora_rank=1024,
        o_groups=8,
        n_routed_experts=256,
        moe_intermediate_size=2048,
        routed_scaling_factor=1.5,
        index_topk=512,
        compress_ratios=(SLIDING, SLIDING, *(CSA, HCA) * 20, CSA, SLIDING),
        **_RELEASED,
    )


def pro_config() -> ModelConfig:
    """DeepSeek-V4-Pro: 61 layers, 1.6T class."""
    return ModelConfig(
        hidden_size=7168,
        num_hidden_layers=61,
        num_attention_heads=128,
        q_lora_rank=1536,
        o_groups=16,
        n_routed_experts=384,
        moe_intermediate_size=3072,
        routed_scaling_factor=2.5,
        index_topk=1024,
        compress_ratios=(HCA, HCA, *(CSA, HCA) * 29, CSA, SLIDING),
        **_RELEASED,
    )


_TINY = {
    # Widths that are no multiples of 128, so that the last FP8 block of a matrix is partial.
    "hidden_size": 160,
    "num_attention_heads": 4,
    "head_dim": 64,
    "qk_rope_head_dim": 32,
    "q_lora_rank": 96,
    "o_groups": 2,
    "o_lora_rank": 48,
    "sliding_window": 16,
    "index_n_heads": 4,
    "index_head_dim": 64,
    "index_topk": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 80,
    "swiglu_limit": 1.5,
    # Room for every byte and some markers.
    "vocab_size": 512,
}


def tiny_config() -> ModelConfig:
    """Every part of the architecture in 7 layers, a few megabytes as a checkpoint."""
    ratios = (SLIDING, SLIDING, CSA, HCA, CSA, HCA, CSA, SLIDING)
    return dataclasses.replace(flash_config(), num_hidden_layers=7, compress_ratios=ratios, **_TINY)


def flash_tiny_config() -> ModelConfig:
    """Flash's 43 layers at the widths of :func:`tiny_config`."""
    return dataclasses.replace(flash_config(), **_TINY)


PRESETS = {
    "tiny": tiny_config,
    "flash-tiny": flash_tiny_config,
    "flash-shape": flash_config,
    "pro-shape": pro_config,
}
"""Name -> function giving the configuration."""


def shrink(
    cfg: ModelConfig, *, layers: int | None = None, experts: int | None = None
) -> ModelConfig:
    """The same kind of model with fewer layers or routed experts.

    The first ``layers`` compress ratios are kept, or, where these lack an attention kind that the
    model has, as many different kinds as fit (CSA before HCA before sliding window). At least one
    layer stays score-routed, and ``num_experts_per_tok`` at most ``experts``.

    Raises:
        ValueError: more layers or experts than ``cfg`` has, or fewer than one.
    """
    for name, wanted, most in (
        ("layers", layers, cfg.num_hidden_layers),
        ("experts", experts, cfg.n_routed_experts),
    ):
        if wanted is not None and not 1 <= wanted <= most:
            raise ValueError(f"{name} must be 1 to {most}, which the preset has, not {wanted}")
    if layers is not None:
        kinds = tuple(dict.fromkeys(cfg.layer_ratios))
        ratios = cfg.layer_ratios[:layers]
        if len(set(ratios)) < len(kinds):
            chosen = [r for r in (CSA, HCA, SLIDING) if r in kinds][:layers]
            ratios = tuple(r for r in kinds if r in chosen)
            ratios += cfg.layer_ratios[len(ratios) : layers]
        cfg = dataclasses.replace(
            cfg,
            num_hidden_layers=layers,
            num_hash_layers=min(cfg.num_hash_layers, layers - 1),
            compress_ratios=ratios + (SLIDING,) * cfg.num_nextn_predict_layers,
        )
    if experts is not None:
        cfg = dataclasses.replace(
            cfg,
            n_routed_experts=experts,
            num_experts_per_tok=min(cfg.num_experts_per_tok, experts),
        )
    return cfg
