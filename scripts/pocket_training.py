"""One dispatch of pocket training: many optimiser steps over batches that are already there."""

from __future__ import annotations

import dataclasses
import math
import re
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jaxtyping import Array, Float, Int32, UInt8

from models.config import CSA, ModelConfig
from models.params import is_spec, param_specs
from models.pocket import init_for_training
from models.training import sequence_loss

CLASS_WEIGHTS = (0.0, 0.1, 1.0)
"""Of random text, filler and answers in the loss."""
BALANCE_RATE = 1e-3
"""How far a step moves the routing bias of an expert that has more or less than its share."""
REMAT_LENGTH = 16384
"""Sequences from this length on recompute their blocks in the backward pass."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """``steps`` steps of ``rows`` sequences of ``length`` tokens."""

    length: int
    rows: int
    steps: int
    sparse: bool
    """Attend to the indexer's top K slots; otherwise to all, to warm the indexers up."""

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.length * self.rows


def parse_stages(text: str) -> tuple[Stage, ...]:
    """``256x128x4000d,1024x64x2000s``: length x rows x steps, d for dense and s for sparse.

    Raises:
        ValueError: anything else.
    """
    stages = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)x(\d+)x(\d+)([ds])", part.strip())
        if match is None or "0" in match.groups()[:3]:
            raise ValueError(
                f"stage {part!r} is not LENGTHxROWSxSTEPS and d (dense) or s (sparse), as in "
                "256x128x4000d"
            )
        length, rows, steps = map(int, match.groups()[:3])
        stages.append(Stage(length, rows, steps, match[4] == "s"))
    return tuple(stages)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """All that decides the numbers of a run, besides the data's seed."""

    stages: tuple[Stage, ...]
    lr: float = 2e-3
    warmup: int = 300
    weight_decay: float = 0.05
    compute: str = "bfloat16"

    @property
    def steps(self) -> int:
        return sum(stage.steps for stage in self.stages)

    def at(self, step: int) -> tuple[Stage, int]:
        """The stage that step number ``step`` belongs to, and how many steps are left in it."""
        for stage in self.stages:
            if step < stage.steps:
                return stage, stage.steps - step
            step -= stage.steps
        raise ValueError(f"the recipe has {self.steps} steps; all are done")

    def rates(self, first: int, count: int) -> np.ndarray:
        """Learning rates of steps: a linear warm-up, then a cosine to a twentieth."""
        step = np.arange(first, first + count)
        warmup = max(1, min(self.warmup, self.steps // 4))
        progress = np.clip((step - warmup) / max(1, self.steps - warmup), 0, 1)
        decay = 0.05 + 0.95 * (1 + np.cos(np.pi * progress)) / 2
        return (self.lr * np.minimum((step + 1) / warmup, 1) * decay).astype(np.float32)


def optimizer(weight_decay: float) -> optax.GradientTransformation:
    """AdamW of learning rate 1 on clipped gradients; only matrices decay.

    Updates are linear in the rate, so the step multiplies by it: programs do not depend on it.
    """

    def matrices(tree: Any) -> Any:
        return jax.tree.map(lambda x: x.ndim >= 2, tree)

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(1.0, b1=0.9, b2=0.95, weight_decay=weight_decay, mask=matrices),
    )


class TrainState(struct.PyTreeNode):
    """What a checkpoint holds."""

    weights: Any
    """Float32 parameters; None where the tree has the tables of expert ids."""
    tables: Any
    """The rest: int32 tables, None elsewhere."""
    optimizer: Any
    step: Int32[Array, ""]


class Metrics(NamedTuple):
    """Means over the steps of a dispatch."""

    loss: Float[Array, ""]
    next_token: Float[Array, ""]
    mtp: Float[Array, ""]
    index: Float[Array, ""]
    index_mass: Float[Array, ""]
    answers: Float[Array, ""]
    mtp_answers: Float[Array, ""]
    gradient: Float[Array, ""]
    """Norm before clipping."""
    imbalance: Float[Array, ""]
    """Largest share of a score-routed expert, times the number of experts: 1 is balanced."""


def init_state(cfg: ModelConfig, recipe: Recipe, seed: int) -> TrainState:
    params = init_for_training(cfg, seed)
    floats = jax.tree.map(lambda x: x if _trained(x) else None, params)
    tables = jax.tree.map(lambda x: None if _trained(x) else x, params)
    memory = optimizer(recipe.weight_decay).init(floats)
    return TrainState(floats, tables, memory, jnp.int32(0))


def _trained(x: Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def whole_params(state: TrainState, weights: Any = None) -> Any:
    """The parameters as one tree."""
    floats = state.weights if weights is None else weights
    return jax.tree.map(
        lambda a, b: b if a is None else a, floats, state.tables, is_leaf=lambda x: x is None
    )


@partial(
    jax.jit,
    static_argnames=("cfg", "sparse", "compute", "weight_decay"),
    donate_argnames=("state",),
)
def train_steps(
    state: TrainState,
    tokens: UInt8[Array, "N B T"],
    classes: UInt8[Array, "N B T"],
    rates: Float[Array, "N"],
    *,
    cfg: ModelConfig,
    sparse: bool,
    compute: str,
    weight_decay: float,
) -> tuple[TrainState, Metrics]:
    """N steps, one batch each at its learning rate, in one dispatch. ``state`` is donated."""
    kinds = jax.tree.map(
        lambda spec: spec.dtype(jnp.dtype(compute)), param_specs(cfg), is_leaf=is_spec
    )
    importance = jnp.asarray(CLASS_WEIGHTS)

    def step(state: TrainState, batch: tuple[Array, Array, Array]) -> tuple[TrainState, Metrics]:
        ids, weight = batch[0].astype(jnp.int32), importance[batch[1]]

        def loss_of(weights: Any) -> Any:
            cast = jax.tree.map(lambda x, kind: x.astype(kind), whole_params(state, weights), kinds)
            remat = tokens.shape[2] >= REMAT_LENGTH
            return sequence_loss(cast, ids, weight, cfg, sparse=sparse, remat=remat)

        (loss, parts), gradient = jax.value_and_grad(loss_of, has_aux=True)(state.weights)
        updates, memory = optimizer(weight_decay).update(gradient, state.optimizer, state.weights)
        weights: Any = jax.tree.map(lambda w, u: w + batch[2] * u, state.weights, updates)
        imbalance = _balance(weights, parts.expert_load)
        means = {k: v for k, v in parts._asdict().items() if k != "expert_load"}
        norm = optax.tree.norm(gradient)
        metrics = Metrics(loss=loss, gradient=norm, imbalance=imbalance, **means)
        return state.replace(weights=weights, optimizer=memory, step=state.step + 1), metrics

    state, metrics = jax.lax.scan(step, state, (tokens, classes, rates))
    return state, jax.tree.map(jnp.mean, metrics)


def _balance(weights: Any, loads: tuple[Array, ...]) -> Array:
    """Move each routing bias towards equal load, in place; the largest load times E.

    Source: "Auxiliary-loss-free load balancing", as DeepSeek-V3 trains its routers.
    """
    most = jnp.ones(())
    for block, load in zip([*weights["layers"], *weights["mtp"]], loads, strict=True):
        if block["ffn"].get("bias") is None:
            continue
        block["ffn"]["bias"] = block["ffn"]["bias"] + BALANCE_RATE * jnp.sign(
            1 / load.shape[0] - load
        )
        most = jnp.maximum(most, jnp.max(load) * load.shape[0])
    return most


def flops_per_token(cfg: ModelConfig, length: int) -> float:
    """Of forward and backward, 3 x 2 per multiplication: chosen experts, attended positions.

    Attention counts what a model has to do: the window, min(K, slots) attended slots and all
    scored slots of a CSA layer, all slots of an HCA layer, each at its mean over the sequence.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(param_specs(cfg), is_leaf=is_spec)
    weights = 0.0
    for _, spec in leaves:
        if len(spec.shape) >= 2 and spec.release != "embed.weight" and spec.storage != "I64":
            share = cfg.num_experts_per_tok / cfg.n_routed_experts if spec.stacked else 1.0
            weights += math.prod(spec.shape) * share
    if cfg.num_nextn_predict_layers:
        weights += cfg.vocab_size * cfg.hidden_size
    heads = cfg.num_attention_heads * cfg.head_dim
    attended = 0.0
    for ratio in cfg.compress_ratios:
        attended += 2 * heads * cfg.sliding_window
        slots = length / (2 * ratio) if ratio else 0.0
        if ratio == CSA:
            attended += 2 * heads * min(cfg.index_topk, slots)
            attended += cfg.index_n_heads * cfg.index_head_dim * slots
        else:
            attended += 2 * heads * slots
    return 6 * (weights + attended)
