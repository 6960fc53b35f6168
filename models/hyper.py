"""Hyper-connections: the residual is m streams that every sublayer reads and writes by mixing.

Source: the spec's "Block" heading. All of it is float32, whatever the streams' type.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from models.config import ModelConfig
from models.layers import F32, linear, mean_square_scale
from pallas_kernels import mixing_weights
from pallas_kernels.compat import Implementation, runs_on_hopper


class Mixing(NamedTuple):
    """How one sublayer reads the streams (``pre``) and how its output returns."""

    pre: Float[Array, "B T m"]
    post: Float[Array, "B T m"]
    comb: Float[Array, "B T m m"]
    """``comb[i, j]``: how much of old stream i goes to new stream j; doubly stochastic."""


def _flat(streams: Float[Array, "B T m D"]) -> Float[Array, "B T m*D"]:
    return streams.reshape(*streams.shape[:2], -1).astype(F32)


def _product(flat: Float[Array, "B T c"], fn: Float[Array, "r c"], dtype: Any) -> Array:
    """``fn . x`` in float32, for streams that are of ``dtype``."""
    if dtype != jnp.bfloat16 or not runs_on_hopper():
        return linear(flat, fn)
    # Three TF32 products: exact streams times two parts of fn that hold 22 of its 24 bits. As
    # close to float64 as float32's own products, for which the matrix units do not serve, and
    # faster: 5.0 us for 9.0 at 24 rows, 6.8 for 18.3 at 96.
    return jax.lax.dot_general(
        flat, fn, (((2,), (1,)), ((), ())), preferred_element_type=F32,
        precision=jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3,
    )  # fmt: skip


def mixing(
    p: Any,
    streams: Float[Array, "B T m D"],
    cfg: ModelConfig,
    *,
    implementation: Implementation | None = None,
) -> Mixing:
    """Read and write weights of a sublayer from the streams themselves.

    ``implementation`` is that of :func:`pallas_kernels.mixing_weights`: "xla" has a gradient.
    """
    flat = _flat(streams)
    square = jnp.einsum("...c,...c->...", flat, flat)
    weights = mixing_weights(
        _product(flat, p["fn"], streams.dtype), square, p["scale"], p["base"],
        width=flat.shape[-1], rms_eps=cfg.rms_norm_eps, iterations=cfg.hc_sinkhorn_iters,
        eps=cfg.hc_eps, implementation=implementation,
    )  # fmt: skip
    return Mixing(*weights)


def read_streams(
    streams: Float[Array, "B T m D"], pre: Float[Array, "B T m"]
) -> Float[Array, "B T D"]:
    """``sum_i pre_i x_i``, in the streams' type."""
    return jnp.sum(streams.astype(F32) * pre[..., None], axis=2).astype(streams.dtype)


def write_streams(
    streams: Float[Array, "B T m D"], update: Float[Array, "B T D"], mix: Mixing
) -> Float[Array, "B T m D"]:
    """``x'_j = post_j y + sum_i comb[i, j] x_i``, in the streams' type."""
    kept = jnp.sum(streams.astype(F32)[..., :, None, :] * mix.comb[..., None], axis=2)
    return (update.astype(F32)[..., None, :] * mix.post[..., None] + kept).astype(streams.dtype)


def head_read(p: Any, streams: Float[Array, "B T m D"], cfg: ModelConfig) -> Float[Array, "B T D"]:
    """The streams' last reading, before the final norm: sigmoid weights alone, one scale."""
    flat = _flat(streams)
    mix = _product(flat, p["fn"], streams.dtype) * mean_square_scale(flat, cfg.rms_norm_eps)
    mix = mix * p["scale"][None, None] + p["base"][None, None]
    return read_streams(streams, jax.lax.logistic(mix) + cfg.hc_eps)
