"""The configuration of a DeepSeek-V4 model, read from a release's ``config.json`` and nothing else.

Source: the spec's "Configurations" and "Checkpoint" headings. Letters used throughout: D hidden,
H heads, r compress ratio (0 sliding window only, 4 CSA, 128 HCA).
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SLIDING, CSA, HCA = 0, 4, 128
"""The three attention kinds by compress ratio: sliding window, compressed sparse, heavily
compressed."""


@dataclasses.dataclass(frozen=True)
class YarnConfig:
    """YaRN context extension of the compressed layers' rotary frequencies."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0


OURS = ("quant_sim", "fp8_index_keys")
"""Fields of :class:`ModelConfig` that no release's file has."""


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Every number of a DeepSeek-V4 model; keys as in the release's ``config.json``.

    Frozen and hashable, so it travels as a static argument of jitted functions. Build it with
    :meth:`from_dict` or :meth:`load`.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    compress_ratios: tuple[int, ...]
    """One entry a layer, then one for each MTP layer."""
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    num_hash_layers: int
    routed_scaling_factor: float
    swiglu_limit: float
    hc_mult: int
    hc_sinkhorn_iters: int
    rope_theta: float
    compress_rope_theta: float
    max_position_embeddings: int
    yarn: YarnConfig | None = None
    n_shared_experts: int = 1
    num_nextn_predict_layers: int = 1
    norm_topk_prob: bool = True
    hc_eps: float = 1e-6
    rms_norm_eps: float = 1e-6
    bos_token_id: int = 0
    eos_token_ids: tuple[int, ...] = (1,)
    quant_sim: bool = False
    """Simulate the release's training grids: FP8 on window and compressed kv, FP4 on the index
    query and key. Not a key of the release; set with :meth:`with_quant_sim`."""
    fp8_index_keys: bool = False
    """Keep index keys as FP8, half of bf16's bytes; set with :meth:`with_fp8_index_keys`."""

    def __post_init__(self) -> None:
        _validate(self)

    @property
    def layer_ratios(self) -> tuple[int, ...]:
        """Compress ratio of each trunk layer."""
        return self.compress_ratios[: self.num_hidden_layers]

    @property
    def csa_layers(self) -> tuple[int, ...]:
        """Numbers of the layers that have a lightning indexer."""
        return tuple(i for i, r in enumerate(self.layer_ratios) if r == CSA)

    def with_quant_sim(self) -> ModelConfig:
        """The same model with the release's training grids simulated."""
        return dataclasses.replace(self, quant_sim=True)

    def with_fp8_index_keys(self) -> ModelConfig:
        """The same model with the lightning indexer's keys and queries kept as FP8 (e4m3).

        A float32 power of two scales each key and each head's query. What FP4 simulation leaves
        fits e4m3 exactly unless blocks of a key differ by 2^11 or more, so both select alike.
        """
        return dataclasses.replace(self, fp8_index_keys=True)

    @classmethod
    def load(cls, path: str | Path) -> ModelConfig:
        """Read ``config.json`` from ``path`` (the file, or the folder that holds it)."""
        path = Path(path)
        if path.is_dir():
            path = path / "config.json"
        if not path.is_file():
            raise ValueError(f"no model configuration at {path}: expected a release's config.json")
        try:
            data = json.loads(path.read_text())
        except ValueError as error:
            raise ValueError(f"{path} is not valid JSON ({error}); fetch it again") from error
        return cls.from_dict(data)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelConfig:
        """Build from the parsed ``config.json``; both spellings of the rotary keys are read.

        Raises:
            ValueError: a key is missing, or a value is one that this architecture cannot have.
        """
        if not isinstance(data, Mapping):
            raise ValueError(f"config.json must hold one JSON object, not {type(data).__name__}")
        data = _with_derived({k: v for k, v in data.items() if v is not None})
        kind = data.get("model_type", "deepseek_v4")
        if kind != "deepseek_v4":
            raise ValueError(f"model_type is {kind!r}; only 'deepseek_v4' is supported")
        rope = _rope_values(data)
        values: dict[str, Any] = {}
        missing = []
        for field in dataclasses.fields(cls):
            if field.name in ("yarn", "eos_token_ids", *OURS):
                continue
            raw = rope[field.name] if field.name in rope else data.get(field.name)
            if raw is None:
                if field.default is dataclasses.MISSING:
                    missing.append(field.name)
                continue
            values[field.name] = _coerce(field.name, raw, str(field.type))
        if missing:
            raise ValueError(f"config.json lacks {', '.join(missing)}; take it from the release")
        eos = data.get("eos_token_id", [])
        eos = eos if isinstance(eos, list | tuple) else [eos]
        values["eos_token_ids"] = tuple(_coerce("eos_token_id", e, "int") for e in eos)
        values["yarn"] = rope.get("yarn")
        _check_fixed_choices(data)
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """The release's spelling of this configuration; :meth:`from_dict` reads it back."""
        data: dict[str, Any] = {
            "architectures": ["DeepseekV4ForCausalLM"],
            "model_type": "deepseek_v4",
            "hidden_act": "silu",
            "num_key_value_heads": 1,
            "scoring_func": "sqrtsoftplus",
            "topk_method": "noaux_tc",
            "tie_word_embeddings": False,
        }
        for field in dataclasses.fields(self):
            if field.name not in ("yarn", "eos_token_ids", *OURS):
                data[field.name] = getattr(self, field.name)
        data["compress_ratios"] = list(self.compress_ratios)
        eos = self.eos_token_ids
        data["eos_token_id"] = eos[0] if len(eos) == 1 else list(eos) or None
        if self.yarn is not None:
            data["rope_scaling"] = {"type": "yarn", **dataclasses.asdict(self.yarn)}
        return data


def _with_derived(data: dict[str, Any]) -> dict[str, Any]:
    """Add the release's keys where a file names layers in the transformers library's way."""
    kinds = {
        "sliding_attention": SLIDING,
        "compressed_sparse_attention": CSA,
        "heavily_compressed_attention": HCA,
    }
    layers = data.get("layer_types")
    if "compress_ratios" not in data and isinstance(layers, list):
        unknown = [name for name in layers if name not in kinds]
        if unknown:
            raise ValueError(f"layer_types has {unknown[0]!r}; known: {', '.join(kinds)}")
        mtp = data.get("num_nextn_predict_layers", 1)
        data["compress_ratios"] = [kinds[name] for name in layers] + [SLIDING] * mtp
        rates = data.get("compress_rates", {})
        for name, ratio in kinds.items():
            if isinstance(rates, Mapping) and rates.get(name, ratio) != ratio:
                raise ValueError(f"compress_rates of {name} is {rates[name]}; it must be {ratio}")
    experts = data.get("mlp_layer_types")
    if "num_hash_layers" not in data and isinstance(experts, list):
        count = experts.count("hash_moe")
        if "hash_moe" in experts[count:]:
            raise ValueError("mlp_layer_types must have its hash_moe layers first")
        data["num_hash_layers"] = count
    share = data.get("partial_rotary_factor")
    if "qk_rope_head_dim" not in data and share is not None and "head_dim" in data:
        data["qk_rope_head_dim"] = data["head_dim"] * share
    return data


def _coerce(name: str, raw: Any, annotation: str) -> Any:
    """Give a JSON value the field's type, or say which key has the wrong one."""
    if name == "compress_ratios":
        if not isinstance(raw, list | tuple):
            raise ValueError(f"compress_ratios must be a list of integers, not {raw!r}")
        return tuple(_coerce(name + " entry", r, "int") for r in raw)
    numeric = isinstance(raw, int | float) and not isinstance(raw, bool)
    if annotation == "bool" and isinstance(raw, bool):
        return raw
    if annotation == "int" and numeric and float(raw).is_integer():
        return int(raw)
    if annotation == "float" and numeric:
        return float(raw)
    raise ValueError(f"config key {name} must be of type {annotation}, not {raw!r}")


def _rope_values(data: Mapping[str, Any]) -> dict[str, Any]:
    """``rope_theta``, ``compress_rope_theta`` and YaRN from flat or nested ``rope_parameters``.

    The nested spelling has one table for the sliding layers and one for the compressed layers,
    under names that differ between writers; the one that scales is the compressed one.
    """
    found: dict[str, Any] = {}
    for key in ("rope_theta", "compress_rope_theta"):
        if data.get(key) is not None:
            found[key] = data[key]
    scaling = data.get("rope_scaling")
    nested = data.get("rope_parameters")
    if isinstance(nested, Mapping):
        tables = {k: v for k, v in nested.items() if isinstance(v, Mapping)}
        if tables:
            for name, table in tables.items():
                theta = table.get("rope_theta")
                if "compress" in name:
                    found.setdefault("compress_rope_theta", theta)
                    scaling = scaling or table
                else:
                    found.setdefault("rope_theta", theta)
        else:
            found.setdefault("rope_theta", nested.get("rope_theta"))
            found.setdefault("compress_rope_theta", nested.get("compress_rope_theta"))
            scaling = scaling or nested
    if scaling is not None and not isinstance(scaling, Mapping):
        raise ValueError(f"rope_scaling must be a JSON object or null, not {scaling!r}")
    if isinstance(scaling, Mapping):
        kind = scaling.get("rope_type") or scaling.get("type") or "default"
        if kind == "yarn":
            values = {}
            for field in dataclasses.fields(YarnConfig):
                raw = scaling.get(field.name)
                if raw is not None:
                    values[field.name] = _coerce(f"rope_scaling {field.name}", raw, str(field.type))
                elif field.default is dataclasses.MISSING:
                    raise ValueError(f"the YaRN rope_scaling lacks {field.name}")
            found["yarn"] = YarnConfig(**values)
        elif kind not in ("default", "main", "compress"):
            raise ValueError(f"rope scaling {kind!r} is not supported; expected 'yarn' or none")
    return found


def _check_fixed_choices(data: Mapping[str, Any]) -> None:
    """Refuse configurations that this architecture spells but does not have."""
    fixed = {
        "scoring_func": "sqrtsoftplus",
        "hidden_act": "silu",
        "num_key_value_heads": 1,
        "tie_word_embeddings": False,
        "attention_bias": False,
    }
    for key, expected in fixed.items():
        value = data.get(key, expected)
        if value != expected:
            raise ValueError(f"{key} is {value!r}; DeepSeek-V4 has {expected!r}")
    expert_dtype = data.get("expert_dtype")
    if expert_dtype not in (None, "fp4", "fp8", "bf16", "bfloat16", "float32"):
        raise ValueError(f"expert_dtype {expert_dtype!r} is unknown; expected 'fp4' or 'fp8'")


def _validate(cfg: ModelConfig) -> None:
    """Raise ``ValueError`` for numbers that contradict each other."""

    def require(condition: bool, message: str) -> None:
        if not condition:
            raise ValueError(message)

    for name in (
        "vocab_size hidden_size num_hidden_layers num_attention_heads head_dim q_lora_rank "
        "o_groups o_lora_rank sliding_window index_n_heads index_head_dim index_topk "
        "n_routed_experts num_experts_per_tok moe_intermediate_size hc_mult hc_sinkhorn_iters "
        "max_position_embeddings"
    ).split():
        value = getattr(cfg, name)
        require(value >= 1, f"{name} must be at least 1, not {value}")
    for name in "num_hash_layers n_shared_experts num_nextn_predict_layers".split():
        value = getattr(cfg, name)
        require(value >= 0, f"{name} must not be negative, not {value}")
    positive = "swiglu_limit rms_norm_eps hc_eps routed_scaling_factor rope_theta".split()
    numbers = {name: getattr(cfg, name) for name in (*positive, "compress_rope_theta")}
    if cfg.yarn is not None:
        numbers |= {f"rope_scaling {k}": v for k, v in dataclasses.asdict(cfg.yarn).items()}
    for name, value in numbers.items():
        require(
            math.isfinite(value) and value > 0, f"{name} must be a positive number, not {value}"
        )
    layers = cfg.num_hidden_layers + cfg.num_nextn_predict_layers
    require(
        len(cfg.compress_ratios) == layers,
        f"compress_ratios has {len(cfg.compress_ratios)} entries; num_hidden_layers + "
        f"num_nextn_predict_layers needs {layers}",
    )
    for i, ratio in enumerate(cfg.compress_ratios):
        require(
            ratio in (SLIDING, CSA, HCA),
            f"compress_ratios[{i}] is {ratio}; known ratios are 0 (sliding window), 4 (CSA) and "
            "128 (HCA)",
        )
    for ratio in cfg.compress_ratios[cfg.num_hidden_layers :]:
        require(ratio == SLIDING, f"an MTP layer must have compress ratio 0, not {ratio}")
    for name in ("rope_theta", "compress_rope_theta"):
        value = getattr(cfg, name)
        require(value > 1, f"{name} must be more than 1, the base of a falling series, not {value}")
    n = cfg.qk_rope_head_dim
    require(cfg.head_dim % 2 == 0, f"head_dim must be even (rotary pairs), not {cfg.head_dim}")
    require(
        n >= 2 and n % 2 == 0 and n <= cfg.head_dim,
        f"qk_rope_head_dim must be even and at most head_dim {cfg.head_dim}, not {n}",
    )
    if CSA in cfg.layer_ratios:
        x = cfg.index_head_dim
        require(
            x & (x - 1) == 0,
            f"index_head_dim must be a power of two (Hadamard rotation), not {x}",
        )
        require(n <= x, f"qk_rope_head_dim {n} is larger than index_head_dim {x}")
    require(
        cfg.num_attention_heads % cfg.o_groups == 0,
        f"num_attention_heads {cfg.num_attention_heads} must be a multiple of o_groups "
        f"{cfg.o_groups}",
    )
    require(
        cfg.num_experts_per_tok <= cfg.n_routed_experts,
        f"num_experts_per_tok {cfg.num_experts_per_tok} exceeds n_routed_experts "
        f"{cfg.n_routed_experts}",
    )
    require(
        cfg.num_nextn_predict_layers <= 1,
        f"num_nextn_predict_layers must be 0 or 1, not {cfg.num_nextn_predict_layers}",
    )
