"""Tiny DeepSeek-V4 models that differ in everything a config may say, and their weights.

numpy only, so that the environment with the oracle and the one with JAX make the same values: a
value depends on nothing but the seed, the tensor's name and its shape. Names and shapes come from
the spec's "Checkpoint" table, not from ``models.params``, which they thereby check.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

BASE: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": 48,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 24,
    "o_groups": 2,
    "o_lora_rank": 20,
    "sliding_window": 16,
    "compress_ratios": [0, 4, 128, 4, 0],
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": 8,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 24,
    "num_hash_layers": 1,
    "num_nextn_predict_layers": 1,
    "norm_topk_prob": True,
    "scoring_func": "sqrtsoftplus",
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 1.5,
    "hidden_act": "silu",
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "max_position_embeddings": 1024,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
    "attention_bias": False,
}

# name -> (seed, rows of ids, tokens, what differs from BASE). Seeds are chosen so that no choice
# of slots or experts hangs on a difference that float32 rounding could turn over.
VARIANTS: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    # The published golden model's sizes.
    "reference_sizes": (
        0,
        2,
        300,
        {
            "vocab_size": 96,
            "hidden_size": 64,
            "num_hidden_layers": 7,
            "head_dim": 128,
            "qk_rope_head_dim": 64,
            "q_lora_rank": 48,
            "o_lora_rank": 32,
            "compress_ratios": [0, 0, 4, 128, 4, 128, 4, 0],
            "index_n_heads": 8,
            "index_head_dim": 128,
            "index_topk": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "num_hash_layers": 3,
        },
    ),
    "sliding_only": (
        0,
        1,
        90,
        {
            "num_hidden_layers": 3,
            "compress_ratios": [0, 0, 0, 0],
            "num_attention_heads": 3,
            "o_groups": 1,
            "qk_rope_head_dim": 32,
            "sliding_window": 5,
            "num_hash_layers": 0,
            "n_routed_experts": 5,
            "num_experts_per_tok": 1,
            "hc_mult": 2,
            "rms_norm_eps": 1e-3,
        },
    ),
    "csa_only": (
        0,
        1,
        150,
        {
            "num_hidden_layers": 2,
            "compress_ratios": [4, 4, 0],
            "sliding_window": 5,
            "num_hash_layers": 2,
            "index_n_heads": 3,
            "index_topk": 4,
            "n_routed_experts": 7,
            "num_experts_per_tok": 4,
            "rope_scaling": None,
        },
    ),
    "hca_only": (
        0,
        1,
        270,
        {
            "num_hidden_layers": 2,
            "compress_ratios": [128, 128, 0],
            "num_attention_heads": 8,
            "o_groups": 4,
            "sliding_window": 33,
            "num_hash_layers": 0,
            "n_routed_experts": 2,
            "num_experts_per_tok": 2,
            "hc_mult": 1,
            "hc_sinkhorn_iters": 1,
            "rms_norm_eps": 1e-5,
        },
    ),
    # The big model's order; a YaRN ramp that ends within the rotary channels and moves angles at
    # these positions; the nested spelling of the rotary keys.
    "pro_order": (
        0,
        1,
        280,
        {
            "num_hidden_layers": 5,
            "compress_ratios": [128, 128, 4, 128, 4, 0],
            "num_attention_heads": 8,
            "o_groups": 4,
            "head_dim": 64,
            "qk_rope_head_dim": 32,
            "index_n_heads": 8,
            "index_head_dim": 64,
            "index_topk": 8,
            "num_hash_layers": 3,
            "n_routed_experts": 16,
            "num_experts_per_tok": 4,
            "routed_scaling_factor": 2.5,
            "rope_theta": None,
            "compress_rope_theta": None,
            "rope_scaling": None,
            "rope_parameters": {
                "main": {"rope_type": "default", "rope_theta": 5000.0},
                "compress": {
                    "rope_type": "yarn",
                    "rope_theta": 40000.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 512,
                    "beta_fast": 16,
                    "beta_slow": 2,
                },
            },
        },
    ),
    # CSA first; more slots allowed than there ever are; a tight clamp; odd widths; no MTP block.
    "csa_first": (
        0,
        1,
        150,
        {
            "num_hidden_layers": 4,
            "compress_ratios": [4, 128, 0, 4],
            "num_nextn_predict_layers": 0,
            "hidden_size": 40,
            "head_dim": 48,
            "q_lora_rank": 20,
            "o_lora_rank": 12,
            "index_n_heads": 1,
            "index_head_dim": 128,
            "index_topk": 512,
            "sliding_window": 33,
            "swiglu_limit": 0.3,
            "moe_intermediate_size": 17,
        },
    ),
    # HCA first; rotary channels fill the heads and the index heads; few, coarse Sinkhorn rounds.
    "hca_first": (
        2,
        1,
        270,
        {
            "num_hidden_layers": 3,
            "compress_ratios": [128, 4, 0, 0],
            "head_dim": 64,
            "qk_rope_head_dim": 64,
            "index_head_dim": 64,
            "index_topk": 4,
            "hc_mult": 2,
            "hc_sinkhorn_iters": 2,
            "hc_eps": 1e-3,
            "n_routed_experts": 16,
            "num_experts_per_tok": 3,
        },
    ),
    # One index head, so that many index scores are exactly zero and the lowest slots win.
    "index_ties": (
        0,
        1,
        90,
        {
            "num_hidden_layers": 3,
            "compress_ratios": [4, 0, 4, 0],
            "num_attention_heads": 2,
            "index_n_heads": 1,
            "index_topk": 5,
            "num_hash_layers": 3,
            "hc_sinkhorn_iters": 3,
        },
    ),
    # Expert weights not normalised; the smallest window; hc_mult that is no power of two.
    "unnormalised": (
        0,
        1,
        90,
        {
            "num_hidden_layers": 2,
            "compress_ratios": [4, 0, 0],
            "norm_topk_prob": False,
            "sliding_window": 1,
            "hc_mult": 3,
            "num_attention_heads": 6,
            "o_groups": 3,
            "n_routed_experts": 5,
            "num_experts_per_tok": 3,
            "routed_scaling_factor": 1.0,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 40.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "one_layer": (
        0,
        1,
        40,
        {
            "num_hidden_layers": 1,
            "compress_ratios": [4, 0],
            "num_hash_layers": 0,
            "num_attention_heads": 1,
            "o_groups": 1,
            "vocab_size": 7,
            "index_n_heads": 8,
            "index_topk": 2,
            "sliding_window": 3,
        },
    ),
}


def config(name: str) -> dict[str, Any]:
    """The variant's ``config.json``."""
    return {k: v for k, v in (BASE | VARIANTS[name][3]).items() if v is not None}


def tensors(cfg: dict[str, Any]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Release name -> shape and how to draw values, from the spec's table."""
    D, H, d, q = (cfg[k] for k in ("hidden_size", "num_attention_heads", "head_dim", "q_lora_rank"))
    g, o, width, E = (
        cfg[k] for k in ("o_groups", "o_lora_rank", "moe_intermediate_size", "n_routed_experts")
    )
    V, n, x, m = (cfg[k] for k in ("vocab_size", "index_n_heads", "index_head_dim", "hc_mult"))
    found: dict[str, tuple[tuple[int, ...], str]] = {}

    def hyper(prefix: str, rows: int, scales: int) -> None:
        found[f"{prefix}_fn"] = (rows, m * D), "matrix"
        found[f"{prefix}_base"] = (rows,), "offset"
        found[f"{prefix}_scale"] = (scales,), "norm"

    def compressor(prefix: str, ratio: int, size: int) -> None:
        c = 2 if ratio == 4 else 1
        found[f"{prefix}.wkv.weight"] = (c * size, D), "matrix"
        found[f"{prefix}.wgate.weight"] = (c * size, D), "matrix"
        found[f"{prefix}.ape"] = (ratio, c * size), "offset"
        found[f"{prefix}.norm.weight"] = (size,), "norm"

    def block(prefix: str, ratio: int, hashed: bool) -> None:
        hyper(f"{prefix}.hc_attn", (2 + m) * m, 3)
        hyper(f"{prefix}.hc_ffn", (2 + m) * m, 3)
        for name in ("attn_norm", "ffn_norm"):
            found[f"{prefix}.{name}.weight"] = (D,), "norm"
        a = f"{prefix}.attn"
        found[f"{a}.wq_a.weight"] = (q, D), "matrix"
        found[f"{a}.wq_b.weight"] = (H * d, q), "matrix"
        found[f"{a}.wkv.weight"] = (d, D), "matrix"
        found[f"{a}.wo_a.weight"] = (g * o, H * d // g), "matrix"
        found[f"{a}.wo_b.weight"] = (D, g * o), "matrix"
        found[f"{a}.q_norm.weight"] = (q,), "norm"
        found[f"{a}.kv_norm.weight"] = (d,), "norm"
        found[f"{a}.attn_sink"] = (H,), "offset"
        if ratio:
            compressor(f"{a}.compressor", ratio, d)
        if ratio == 4:
            found[f"{a}.indexer.wq_b.weight"] = (n * x, q), "matrix"
            found[f"{a}.indexer.weights_proj.weight"] = (n, D), "matrix"
            compressor(f"{a}.indexer.compressor", 4, x)
        f = f"{prefix}.ffn"
        found[f"{f}.gate.weight"] = (E, D), "matrix"
        if hashed:
            found[f"{f}.gate.tid2eid"] = (V, cfg["num_experts_per_tok"]), "experts"
        else:
            found[f"{f}.gate.bias"] = (E,), "offset"
        for expert in ("shared_experts", *(f"experts.{e}" for e in range(E))):
            found[f"{f}.{expert}.w1.weight"] = (width, D), "matrix"
            found[f"{f}.{expert}.w3.weight"] = (width, D), "matrix"
            found[f"{f}.{expert}.w2.weight"] = (D, width), "matrix"

    found["embed.weight"] = (V, D), "plain"
    found["head.weight"] = (V, D), "matrix"
    found["norm.weight"] = (D,), "norm"
    hyper("hc_head", m, 1)
    for i in range(cfg["num_hidden_layers"]):
        block(f"layers.{i}", cfg["compress_ratios"][i], i < cfg["num_hash_layers"])
    for i in range(cfg["num_nextn_predict_layers"]):
        block(f"mtp.{i}", 0, False)
        found[f"mtp.{i}.e_proj.weight"] = (D, D), "matrix"
        found[f"mtp.{i}.h_proj.weight"] = (D, D), "matrix"
        for name in ("enorm", "hnorm", "norm"):
            found[f"mtp.{i}.{name}.weight"] = (D,), "norm"
        hyper(f"mtp.{i}.hc_head", m, 1)
    return found


def bell(label: str, shape: tuple[int, ...]) -> np.ndarray:
    """Float32 values of mean 0 and variance 1, nearly normal: sums of four 16-bit digits.

    Digits of a hash and exact arithmetic up to one division, hence the same on every machine and
    with every version of numpy.
    """
    count = int(np.prod(shape))
    digits = np.frombuffer(hashlib.shake_128(label.encode()).digest(8 * count), "<u2")
    total = digits.reshape(count, 4).sum(axis=1, dtype=np.int64) - 131070
    return (total / 37837.23).astype(np.float32).reshape(shape)


def weights(cfg: dict[str, Any], seed: int) -> dict[str, np.ndarray]:
    """Every tensor of a release. Nothing is left at a neutral value such as a norm of ones."""
    values = {}
    for name, (shape, kind) in tensors(cfg).items():
        label = f"{seed}/{name}"
        if kind == "experts":
            noise = bell(label, (shape[0], cfg["n_routed_experts"]))
            order = np.argsort(noise, axis=1, kind="stable")[:, : shape[1]]
            values[name] = np.ascontiguousarray(order).astype(np.int64)
            continue
        noise = bell(label, shape)
        if kind == "matrix":
            noise = noise * np.float32(shape[-1] ** -0.5)
        elif kind == "norm":
            noise = np.float32(1) + np.float32(0.2) * noise
        elif kind == "offset":
            noise = np.float32(0.5) * noise
        values[name] = noise
    return values


def ids(name: str, seed: int) -> np.ndarray:
    """Token ids [rows, tokens] that use the whole vocabulary."""
    _, rows, tokens, _ = VARIANTS[name]
    noise = bell(f"{seed}/{name}/ids", (rows, tokens, config(name)["vocab_size"]))
    return np.argmax(noise, axis=-1).astype(np.int32)


def checksum(values: dict[str, np.ndarray]) -> str:
    """Of all values, to tell other weights from another model."""
    digest = hashlib.sha256()
    for name in sorted(values):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(values[name]).tobytes())
    return digest.hexdigest()


def write_release(name: str, seed: int, folder: Path) -> str:
    """Write the variant as a release folder of plain F32 and I64; returns its checksum."""
    cfg = config(name)
    values = weights(cfg, seed)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(values, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(cfg, indent=1))
    return checksum(values)
