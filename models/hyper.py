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
from pallas_kernels import sinkhorn
from pallas_kernels.compat import Implementation


class Mixing(NamedTuple):
    """How one sublayer reads the streams (``pre``) and how its output returns."""

    pre: Float[Array, "B T m"]
    post: Float[Array, "B T m"]
    comb: Float[Array, "B T m m"]
    """``comb[i, j]``: how much of old stream i goes to new stream j; doubly stochastic."""


def _affine_mix(
    p: Any, streams: Float[Array, "B T m D"], counts: tuple[int, ...], cfg: ModelConfig
) -> Float[Array, "B T r"]:
    """``(fn . flatten(x)) rsqrt(mean(flatten(x)^2) + eps) * scale + base``.

    Scale number i serves the next ``counts[i]`` rows.
    """
    flat = streams.reshape(*streams.shape[:2], -1).astype(F32)
    mix = linear(flat, p["fn"]) * mean_square_scale(flat, cfg.rms_norm_eps)
    scale = jnp.concatenate([jnp.broadcast_to(p["scale"][i], (n,)) for i, n in enumerate(counts)])
    return mix * scale[None, None] + p["base"][None, None]


def mixing(
    p: Any,
    streams: Float[Array, "B T m D"],
    cfg: ModelConfig,
    *,
    implementation: Implementation | None = None,
) -> Mixing:
    """Read and write weights of a sublayer from the streams themselves.

    ``implementation`` is that of :func:`pallas_kernels.sinkhorn`: "xla" has a gradient.
    """
    m = cfg.hc_mult
    mix = _affine_mix(p, streams, (m, m, m * m), cfg)
    gates = jax.lax.logistic(mix[..., : 2 * m])
    logits = mix[..., 2 * m :].reshape(*mix.shape[:2], m, m)
    comb = sinkhorn(logits, cfg.hc_sinkhorn_iters, cfg.hc_eps, implementation=implementation)
    return Mixing(gates[..., :m] + cfg.hc_eps, 2 * gates[..., m:], comb)


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
    pre = jax.lax.logistic(_affine_mix(p, streams, (cfg.hc_mult,), cfg)) + cfg.hc_eps
    return read_streams(streams, pre)
