"""Mixture of experts: hash or score routing, clamped SwiGLU experts and a shared expert.

Source: the spec's "Block" heading.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from models.config import ModelConfig
from models.layers import F32, einsum, linear
from pallas_kernels.compat import full_precision, runs_on_gpu

BANDWIDTH_BOUND = 64
"""Up to so many tokens a GPU multiplies by a matrix in the time that it takes to read it."""


def route(
    p: Any, x: Float[Array, "N D"], tokens: Int32[Array, "N"], cfg: ModelConfig
) -> tuple[Float[Array, "N k"], Int32[Array, "N k"]]:
    """Weights and numbers of each token's experts.

    ``score = sqrt(softplus(x W))`` in float32. The bias moves only the choice; the weights are
    the chosen scores, normalised over the chosen and times ``routed_scaling_factor``. Hash layers
    read the choice from a table by token.
    """
    scores = jnp.sqrt(jax.nn.softplus(linear(x, p["gate"], F32)))
    if "tid2eid" in p:
        experts = p["tid2eid"][tokens]
    else:
        _, experts = jax.lax.top_k(scores + p["bias"][None], cfg.num_experts_per_tok)
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if cfg.norm_topk_prob:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return weights * cfg.routed_scaling_factor, experts


def swiglu(gate: Array, up: Array, limit: float) -> Array:
    """``silu(min(gate, limit)) * clip(up, -limit, limit)`` in float32."""
    gate, up = gate.astype(F32), up.astype(F32)
    return jax.nn.silu(jnp.minimum(gate, limit)) * jnp.clip(up, -limit, limit)


def every_expert(
    p: Any,
    x: Float[Array, "N D"],
    weights: Float[Array, "N k"],
    experts: Int32[Array, "N k"],
    limit: float,
) -> Float[Array, "N D"]:
    """All experts for all tokens, weight 0 where one is not chosen.

    Where tokens are few, or experts, this is quickest: each matrix is read once, in the layout it
    is stored in, and nothing is sorted. Its gradient needs no ragged product.
    """
    chosen = jax.nn.one_hot(experts, p["w1"].shape[0], dtype=F32)
    weight = jnp.einsum("nk,nke->ne", weights, chosen, precision="highest")[..., None]
    gate, up = einsum("nd,eid->nei", x, p["w1"]), einsum("nd,eid->nei", x, p["w3"])
    hidden = jnp.where(weight == 0, 0.0, weight * swiglu(gate, up, limit)).astype(x.dtype)
    # Expert by expert, then the sum: one product over both would transpose w2 first.
    return jnp.sum(einsum("nei,edi->end", hidden, p["w2"]), axis=0)


def _gathered_experts(
    p: Any,
    x: Float[Array, "N D"],
    weights: Float[Array, "N k"],
    experts: Int32[Array, "N k"],
    limit: float,
) -> Float[Array, "N D"]:
    """Many more experts than tokens: fetch each chosen expert's matrices and multiply."""
    w1, w2, w3 = (
        p[name].at[experts].get(mode="promise_in_bounds", wrap_negative_indices=False)
        for name in ("w1", "w2", "w3")
    )
    product = partial(jnp.einsum, precision=full_precision(x), preferred_element_type=F32)
    gate, up = product("nkid,nd->nki", w1, x), product("nkid,nd->nki", w3, x)
    hidden = (weights[..., None] * swiglu(gate, up, limit)).astype(x.dtype)
    return jnp.sum(product("nkdi,nki->nkd", w2, hidden), axis=1)


def _grouped_experts(
    p: Any,
    x: Float[Array, "N D"],
    weights: Float[Array, "N k"],
    experts: Int32[Array, "N k"],
    limit: float,
) -> Float[Array, "N D"]:
    """Many of both: sort the (token, expert) pairs by expert and multiply group by group."""
    count, chosen = experts.shape
    order = jnp.argsort(experts.reshape(-1), stable=True)
    token = order // chosen
    sizes = jnp.bincount(experts.reshape(-1), length=p["w1"].shape[0]).astype(jnp.int32)

    def grouped(rows: Array, matrices: Array) -> Array:
        return jax.lax.ragged_dot(
            rows,
            jnp.swapaxes(matrices, 1, 2),
            sizes,
            precision=full_precision(x),
            preferred_element_type=F32,
        )

    rows = x[token]
    hidden = swiglu(grouped(rows, p["w1"]), grouped(rows, p["w3"]), limit)
    hidden = (weights.reshape(-1)[order][:, None] * hidden).astype(x.dtype)
    out = grouped(hidden, p["w2"])
    return jnp.zeros((count, x.shape[1]), F32).at[token].add(out)


def _strategy(tokens: int, chosen: int, experts: int) -> Any:
    """What costs least. On a GPU a fetched matrix is read, written and read again; outside TPUs
    XLA's grouped product multiplies every pair's row by all experts, and copies the rows for it.
    """
    if (3 if runs_on_gpu() else 1) * tokens * chosen <= experts:
        return _gathered_experts
    if tokens <= BANDWIDTH_BOUND or experts <= 4 * chosen:
        return every_expert
    return _grouped_experts


def moe(
    p: Any, x: Float[Array, "B T D"], tokens: Int32[Array, "B T"], cfg: ModelConfig
) -> Float[Array, "B T D"]:
    """``sum_e w2_e(weight_e swiglu_e(x))`` over the chosen experts, plus the shared expert."""
    flat = x.reshape(-1, x.shape[-1])
    weights, experts = route(p, flat, tokens.reshape(-1), cfg)
    count, chosen = experts.shape
    run = _strategy(count, chosen, cfg.n_routed_experts)
    out = run(p["experts"], flat, weights, experts, cfg.swiglu_limit)
    if "shared" in p:
        out = out + shared_expert(p["shared"], flat, cfg.swiglu_limit)
    return out.astype(x.dtype).reshape(x.shape)


def shared_expert(p: Any, x: Float[Array, "N D"], limit: float) -> Float[Array, "N D"]:
    """The expert that all tokens use."""
    hidden = swiglu(linear(x, p["w1"], F32), linear(x, p["w3"], F32), limit)
    return linear(hidden.astype(x.dtype), p["w2"], F32)
