"""One metadata tree of the parameters, from which shapes, random values, shardings and the
conversion of release checkpoints all derive.

The tree mirrors the release's tensor names, less ``.weight``; a layer's routed experts are stacked
along a leading expert axis. Matrices keep the release's ``[out, in]`` orientation. Source: the
spec's "Checkpoint" table.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from models.config import CSA, ModelConfig

Params = dict[str, Any]
"""A pytree of arrays (or of what stands for arrays) in the structure of :func:`param_specs`."""

FP8, FP4, BF16, F32, I64 = "F8_E4M3", "FP4", "BF16", "F32", "I64"
"""How the release stores a tensor; FP4 is packed, two to an I8 byte. The first two have scales."""


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """What is known of a parameter before it has a value. A leaf of :func:`param_specs`."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    """Logical axis names, one a dimension; :data:`DEFAULT_RULES` maps them to mesh axes."""
    release: str
    """Name in the release's files. A stacked parameter has ``{}`` where the expert number goes."""
    storage: str
    """:data:`FP8`, :data:`FP4`, :data:`BF16`, :data:`F32` or :data:`I64` in the release."""
    init: str = "fan_in"
    """``fan_in`` (normal, variance 1 / last dimension), ``ones``, ``zeros``, ``small`` (normal,
    0.02) or ``experts`` (distinct random expert numbers in each row)."""

    @property
    def stacked(self) -> bool:
        """Whether the leading axis runs over experts that the release stores one by one."""
        return "{}" in self.release

    def dtype(self, compute_dtype: Any = jnp.float32) -> jnp.dtype:
        """In-memory type: float32 stays float32, ids are int32, all else is the compute type."""
        if self.storage == F32:
            return jnp.dtype(jnp.float32)
        return jnp.dtype(jnp.int32) if self.storage == I64 else jnp.dtype(compute_dtype)


DEFAULT_RULES: Mapping[str, str | None] = {
    "vocab": "model",
    "heads": "model",
    "groups": "model",
    "index_heads": "model",
    "expert": "model",
    "shared_moe": "model",
}
"""Logical axis -> mesh axis; an axis that is not named is replicated."""


def _hyper(prefix: str, cfg: ModelConfig, *, head: bool) -> dict[str, ParamSpec]:
    m = cfg.hc_mult
    rows = m if head else (2 + m) * m
    return {
        "fn": ParamSpec((rows, m * cfg.hidden_size), (None, None), f"{prefix}_fn", F32),
        "base": ParamSpec((rows,), (None,), f"{prefix}_base", F32, "small"),
        "scale": ParamSpec((1 if head else 3,), (None,), f"{prefix}_scale", F32, "ones"),
    }


def _norm(name: str, width: int) -> ParamSpec:
    return ParamSpec((width,), (None,), f"{name}.weight", BF16, "ones")


def _compressor(prefix: str, ratio: int, width: int, hidden: int) -> dict[str, ParamSpec]:
    rows = (2 if ratio == CSA else 1) * width
    return {
        "wkv": ParamSpec((rows, hidden), (None, None), f"{prefix}.wkv.weight", BF16),
        "wgate": ParamSpec((rows, hidden), (None, None), f"{prefix}.wgate.weight", BF16),
        "ape": ParamSpec((ratio, rows), (None, None), f"{prefix}.ape", F32, "small"),
        "norm": _norm(f"{prefix}.norm", width),
    }


def _attention(prefix: str, ratio: int, cfg: ModelConfig) -> dict[str, Any]:
    hidden, heads, d, q = cfg.hidden_size, cfg.num_attention_heads, cfg.head_dim, cfg.q_lora_rank
    g, o = cfg.o_groups, cfg.o_lora_rank
    tree: dict[str, Any] = {
        "wq_a": ParamSpec((q, hidden), (None, None), f"{prefix}.wq_a.weight", FP8),
        "wq_b": ParamSpec((heads * d, q), ("heads", None), f"{prefix}.wq_b.weight", FP8),
        "wkv": ParamSpec((d, hidden), (None, None), f"{prefix}.wkv.weight", FP8),
        "wo_a": ParamSpec((g * o, heads * d // g), ("groups", None), f"{prefix}.wo_a.weight", FP8),
        "wo_b": ParamSpec((hidden, g * o), (None, "groups"), f"{prefix}.wo_b.weight", FP8),
        "q_norm": _norm(f"{prefix}.q_norm", q),
        "kv_norm": _norm(f"{prefix}.kv_norm", d),
        "attn_sink": ParamSpec((heads,), ("heads",), f"{prefix}.attn_sink", F32, "small"),
    }
    if ratio:
        tree["compressor"] = _compressor(f"{prefix}.compressor", ratio, d, hidden)
    if ratio == CSA:
        n, x = cfg.index_n_heads, cfg.index_head_dim
        tree["indexer"] = {
            "wq_b": ParamSpec(
                (n * x, q), ("index_heads", None), f"{prefix}.indexer.wq_b.weight", FP8
            ),
            "weights_proj": ParamSpec(
                (n, hidden), ("index_heads", None), f"{prefix}.indexer.weights_proj.weight", BF16
            ),
            "compressor": _compressor(f"{prefix}.indexer.compressor", ratio, x, hidden),
        }
    return tree


def _moe(prefix: str, hashed: bool, cfg: ModelConfig) -> dict[str, Any]:
    hidden, width, experts = cfg.hidden_size, cfg.moe_intermediate_size, cfg.n_routed_experts

    def matrices(name: str, expert: bool) -> dict[str, ParamSpec]:
        inner = width if expert else width * cfg.n_shared_experts
        lead = (experts,) if expert else ()
        lead_axis = ("expert",) if expert else ()
        # Experts are split by expert, the shared expert by its width: never both on one axis.
        up = (*lead_axis, None if expert else "shared_moe", None)
        down = (*lead_axis, None, None if expert else "shared_moe")
        storage = FP4 if expert else FP8
        return {
            "w1": ParamSpec((*lead, inner, hidden), up, f"{name}.w1.weight", storage),
            "w2": ParamSpec((*lead, hidden, inner), down, f"{name}.w2.weight", storage),
            "w3": ParamSpec((*lead, inner, hidden), up, f"{name}.w3.weight", storage),
        }

    tree: dict[str, Any] = {
        "gate": ParamSpec((experts, hidden), (None, None), f"{prefix}.gate.weight", BF16),
        "experts": matrices(f"{prefix}.experts.{{}}", True),
    }
    if cfg.n_shared_experts:
        tree["shared"] = matrices(f"{prefix}.shared_experts", False)
    if hashed:
        shape = (cfg.vocab_size, cfg.num_experts_per_tok)
        tree["tid2eid"] = ParamSpec(shape, (None, None), f"{prefix}.gate.tid2eid", I64, "experts")
    else:
        tree["bias"] = ParamSpec((experts,), (None,), f"{prefix}.gate.bias", F32, "small")
    return tree


def _block(prefix: str, ratio: int, hashed: bool, cfg: ModelConfig) -> dict[str, Any]:
    return {
        "attn_norm": _norm(f"{prefix}.attn_norm", cfg.hidden_size),
        "ffn_norm": _norm(f"{prefix}.ffn_norm", cfg.hidden_size),
        "hc_attn": _hyper(f"{prefix}.hc_attn", cfg, head=False),
        "hc_ffn": _hyper(f"{prefix}.hc_ffn", cfg, head=False),
        "attn": _attention(f"{prefix}.attn", ratio, cfg),
        "ffn": _moe(f"{prefix}.ffn", hashed, cfg),
    }


def param_specs(cfg: ModelConfig) -> Params:
    """The tree of :class:`ParamSpec` leaves of a model.

    Keys: ``embed``, ``head``, ``norm``, ``hc_head``, ``layers`` (a list, one tree a layer) and
    ``mtp`` (a list, empty for a model without an MTP block).
    """
    hidden, vocab = cfg.hidden_size, cfg.vocab_size
    tree: Params = {
        "embed": ParamSpec((vocab, hidden), ("vocab", None), "embed.weight", BF16),
        "head": ParamSpec((vocab, hidden), ("vocab", None), "head.weight", BF16),
        "norm": _norm("norm", hidden),
        "hc_head": _hyper("hc_head", cfg, head=True),
        "layers": [
            _block(f"layers.{i}", ratio, i < cfg.num_hash_layers, cfg)
            for i, ratio in enumerate(cfg.layer_ratios)
        ],
        "mtp": [],
    }
    for i in range(cfg.num_nextn_predict_layers):
        block = _block(f"mtp.{i}", 0, False, cfg)
        for name in ("e_proj", "h_proj"):
            shape = (hidden, hidden)
            block[name] = ParamSpec(shape, (None, None), f"mtp.{i}.{name}.weight", FP8)
        for name in ("enorm", "hnorm", "norm"):
            block[name] = _norm(f"mtp.{i}.{name}", hidden)
        block["hc_head"] = _hyper(f"mtp.{i}.hc_head", cfg, head=True)
        tree["mtp"].append(block)
    return tree


def is_spec(leaf: Any) -> bool:
    """``is_leaf`` for trees of :class:`ParamSpec` (they are leaves anyhow; this states it)."""
    return isinstance(leaf, ParamSpec)


def abstract_params(cfg: ModelConfig, dtype: Any = jnp.float32) -> Params:
    """The parameters as ``jax.ShapeDtypeStruct``: for ``eval_shape``, lowering and restoring."""
    return jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype(dtype)), param_specs(cfg), is_leaf=is_spec
    )


def count_params(cfg: ModelConfig, *, mtp: bool = True) -> int:
    """Number of trained values (the hash tables of expert ids are not trained)."""
    tree = param_specs(cfg)
    if not mtp:
        tree = {**tree, "mtp": []}
    leaves = jax.tree.leaves(tree, is_leaf=is_spec)
    return sum(math.prod(s.shape) for s in leaves if s.storage != I64)


def param_shardings(
    cfg: ModelConfig, mesh: Mesh, rules: Mapping[str, str | None] = DEFAULT_RULES
) -> Params:
    """``NamedSharding`` of every parameter on ``mesh``.

    A dimension is split over the mesh axis that ``rules`` gives its logical axis, where the mesh
    has that axis and its size divides the dimension; otherwise it is replicated.

    Raises:
        ValueError: a mesh whose axes are not of automatic sharding.
    """
    explicit = [
        n for n, t in zip(mesh.axis_names, mesh.axis_types, strict=True) if t != AxisType.Auto
    ]
    if explicit:
        raise ValueError(
            f"mesh axis {explicit[0]!r} is of explicit or manual sharding; make the mesh with "
            "jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))"
        )

    def one(spec: ParamSpec) -> NamedSharding:
        parts: list[str | None] = []
        for size, axis in zip(spec.shape, spec.axes, strict=True):
            target = rules.get(axis) if axis is not None else None
            fits = target in mesh.shape and size % mesh.shape[target] == 0
            parts.append(target if fits else None)
        return NamedSharding(mesh, PartitionSpec(*parts))

    return jax.tree.map(one, param_specs(cfg), is_leaf=is_spec)


def init_params(cfg: ModelConfig, key: jax.Array, dtype: Any = jnp.float32) -> Params:
    """Random parameters: for tests and benchmarks, not a trained model.

    Each leaf draws from its own key, ``fold_in(key, leaf number)``, so the values of one do not
    depend on the sizes of the others.
    """
    leaves, treedef = jax.tree.flatten(param_specs(cfg), is_leaf=is_spec)
    values = [
        init_leaf(spec, jax.random.fold_in(key, i), cfg, dtype) for i, spec in enumerate(leaves)
    ]
    return jax.tree.unflatten(treedef, values)


def init_leaf(
    spec: ParamSpec, key: jax.Array, cfg: ModelConfig, dtype: Any = jnp.float32
) -> jax.Array:
    """A random value for one parameter, in the way its ``init`` names."""
    kind = spec.dtype(dtype)
    if spec.init == "ones":
        return jnp.ones(spec.shape, kind)
    if spec.init == "zeros":
        return jnp.zeros(spec.shape, kind)
    if spec.init == "experts":
        noise = jax.random.uniform(key, (spec.shape[0], cfg.n_routed_experts))
        return jnp.argsort(noise, axis=-1)[:, : spec.shape[1]].astype(kind)
    scale = 0.02 if spec.init == "small" else spec.shape[-1] ** -0.5
    return (scale * jax.random.normal(key, spec.shape, jnp.float32)).astype(kind)


def beside(params: Params, tree: Any) -> Any:
    """``tree`` on the devices of the parameters: on the same one, or replicated over their mesh.

    Arrays that no device is committed to would be moved by the first step that also takes
    parameters, and that step compiled again for what it returned.
    """
    leaf = jax.tree.leaves(params)[0]
    if not isinstance(leaf, jax.Array) or not leaf.committed:
        return tree
    where = leaf.sharding
    if isinstance(where, NamedSharding):
        where = NamedSharding(where.mesh, PartitionSpec())
    return jax.device_put(tree, where)
