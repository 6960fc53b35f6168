"""What training minimises: next token, next but one (MTP), and the indexers' divergence."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from models.config import ModelConfig
from models.layers import F32
from models.training.forward import forward_sequences


@dataclasses.dataclass(frozen=True)
class LossWeights:
    """Weights of the parts in the sum."""

    mtp: float = 0.3
    index: float = 1.0
    z: float = 1e-4
    """Of the squared log of the softmax's denominator, which keeps logits from drifting."""


class LossParts(NamedTuple):
    """Weighted means over tokens; nats."""

    next_token: Float[Array, ""]
    mtp: Float[Array, ""]
    index: Float[Array, ""]
    """Mean over the CSA layers."""
    index_mass: Float[Array, ""]
    """Share of CSA attention that the indexers' top K hold; 1 is a perfect indexer."""
    answers: Float[Array, ""]
    """Share of the tokens of full weight that are predicted right."""
    mtp_answers: Float[Array, ""]
    """The same of the MTP block."""
    expert_load: tuple[Float[Array, "E"], ...]


def sequence_loss(
    params: Any,
    tokens: Int32[Array, "B T"],
    weights: Float[Array, "B T"],
    cfg: ModelConfig,
    *,
    sparse: bool,
    remat: bool = False,
    parts: LossWeights = LossWeights(),  # noqa: B008  frozen
) -> tuple[Float[Array, ""], LossParts]:
    """``CE + mtp CE' + index KL``, each a mean over tokens weighted by ``weights``.

    ``weights[b, i]`` is how much predicting token i counts, from 0 to 1; the indexers at position
    i count as much as the token that is predicted there. Token 0 is never predicted.
    """
    out = forward_sequences(params, tokens, cfg, sparse=sparse, remat=remat)
    ahead = jnp.pad(weights[:, 1:], ((0, 0), (0, 1)))
    following = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)))
    next_token, right, z = _cross_entropy(out.logits, following, ahead)
    loss = next_token + parts.z * z
    mtp, mtp_right = jnp.zeros(()), jnp.zeros(())
    if out.mtp_logits is not None:
        ahead2 = jnp.pad(weights[:, 2:], ((0, 0), (0, 2)))
        mtp, mtp_right, mtp_z = _cross_entropy(
            out.mtp_logits, jnp.pad(tokens[:, 2:], ((0, 0), (0, 2))), ahead2
        )
        loss = loss + parts.mtp * (mtp + parts.z * mtp_z)
    index, mass = jnp.zeros(()), jnp.ones(())
    if out.index_loss.shape[0]:
        index = jnp.mean(_mean(out.index_loss, ahead[None]))
        mass = jnp.mean(_mean(out.index_mass, ahead[None]))
        loss = loss + parts.index * index
    return loss, LossParts(next_token, mtp, index, mass, right, mtp_right, out.expert_load)


def _cross_entropy(
    logits: Float[Array, "B T V"], targets: Int32[Array, "B T"], weights: Float[Array, "B T"]
) -> tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]]:
    """Weighted mean loss, accuracy over the tokens of weight 1, and mean of ``log(sum e)^2``."""
    total = jax.nn.logsumexp(logits, axis=-1)
    label = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    full = (weights >= 1).astype(F32)
    right = _mean((label >= jnp.max(logits, axis=-1)).astype(F32), full)
    return _mean(total - label, weights), right, _mean(jnp.square(total), weights)


def _mean(values: Float[Array, "*S"], weights: Float[Array, "*S"]) -> Float[Array, "*R"]:
    """Weighted mean over the last two axes."""
    total = jnp.sum(weights, axis=(-2, -1))
    return jnp.sum(values * weights, axis=(-2, -1)) / jnp.maximum(total, 1e-6)
