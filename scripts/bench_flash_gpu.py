"""Decoding at the real widths of DeepSeek-V4-Flash on one GPU: all-keep against SPIN.

All 43 layers, the routed experts reduced to fit one card, bf16; caches are filled with random
values, as if every request had been prefilled. What the indexer stage costs is the difference to
the same loop with slots that are not scored.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import bench_forced
import bench_loop
import jax
import jax.numpy as jnp

from models.config import ModelConfig
from models.params import Params, abstract_params, is_spec, param_specs
from models.presets import PRESETS, shrink
from models.selector import ALL_KEEP
from pallas_kernels.compat import HAS_MOSAIC, tracing_for_hopper
from spin_jax import SpinConfig, SpinSelector, savings

GIB = 2**30
CARD_BYTES = 139 * GIB
RELEASED_EXPERT_BYTES = 0.5 + 1 / 32
"""A value of a routed expert in the release: FP4, and a one-byte scale for every 32."""


def model_config(args: Any) -> ModelConfig:
    """The preset with fewer experts. The number a token uses stays where there are enough."""
    cfg = PRESETS[args.preset]()
    experts = None if args.experts is None else min(args.experts, cfg.n_routed_experts)
    return shrink(cfg, layers=args.layers, experts=experts)


def byte_table(
    cfg: ModelConfig, state: Any, dtype: Any, spin_states: int, *, mtp: bool = False
) -> dict[str, int]:
    """Bytes of everything that stays in memory, from shapes alone."""
    table: dict[str, int] = dict.fromkeys([*_GROUPS, "other weights"], 0)
    specs = param_specs(cfg) if mtp else {**param_specs(cfg), "mtp": []}
    for path, spec in jax.tree_util.tree_leaves_with_path(specs, is_leaf=is_spec):
        names = {getattr(k, "key", None) for k in path}
        group = next((g for g, marks in _GROUPS.items() if names & marks), "other weights")
        table[group] += math.prod(spec.shape) * spec.dtype(dtype).itemsize
    for layer in state.cache.layers:
        kind = "sliding" if layer.compressed is None else "CSA" if layer.index_keys else "HCA"
        for name, leaf in (
            ("window rings", layer.window),
            ("raw projection rings", layer.pending),
            (f"compressed slots, {kind}", layer.compressed),
            ("index keys", layer.index_keys),
        ):
            size = sum(_nbytes(x) for x in jax.tree.leaves(leaf))
            if size:
                table[name] = table.get(name, 0) + size
    slots = [_nbytes(c.index_keys.values) for c in state.cache.layers if c.index_keys]
    width = cfg.index_head_dim * jnp.dtype(dtype).itemsize
    # V and D, float32, for each slot of each CSA layer.
    table[f"SPIN states, {spin_states}"] = spin_states * sum(s // width * 8 for s in slots)
    return table


_GROUPS = {
    "routed experts": {"experts"},
    "indexer": {"indexer"},
    "attention": {"attn"},
    "embedding and head": {"embed", "head"},
}


def _nbytes(x: Any) -> int:
    return math.prod(x.shape) * jnp.dtype(x.dtype).itemsize


def expert_bytes(cfg: ModelConfig, batch: int, value_bytes: float) -> float:
    """``L E (1 - (1 - k/E)^B) 3 D I`` values: the experts that B tokens are expected to use."""
    experts, k = cfg.n_routed_experts, cfg.num_experts_per_tok
    used = experts * (1 - (1 - k / experts) ** batch)
    matrices = 3 * cfg.hidden_size * cfg.moe_intermediate_size
    return cfg.num_hidden_layers * used * matrices * value_bytes


def with_all_experts(
    cfg: ModelConfig, args: Any, step: float, fixed: float, value_bytes: float
) -> dict[str, float]:
    """The step and the indexer's share of it, were all experts there: time by bytes added."""
    every = PRESETS[args.preset]()
    every = dataclasses.replace(cfg, n_routed_experts=every.n_routed_experts,
                                num_experts_per_tok=every.num_experts_per_tok)  # fmt: skip
    here = expert_bytes(cfg, args.batch, jnp.dtype(args.dtype).itemsize)
    more = expert_bytes(every, args.batch, value_bytes) - here
    whole = step + more / (args.bandwidth * 1e12)
    return {"step_ms": round(whole * 1e3, 3), "indexer_share": round((step - fixed) / whole, 3)}


FORMULA = (
    "step' = step + (bytes of the experts that B tokens are expected to use, all there, less those "
    "here) / bandwidth, with L E (1 - (1 - k/E)^B) 3 D I values; share' = (step - fixed) / step'"
)


def flash_gpu(args: Any) -> dict[str, Any]:
    """Rows of all-keep and each sparsity; with ``--plan`` only the table of bytes.

    Raises:
        ValueError: what has to stay in memory is more than the card has.
    """
    cfg, dtype = model_config(args), jnp.dtype(args.dtype)
    room = args.steps * (args.draft_length + 1) + 1
    table, drafting = None, args.draft_length > 0
    if drafting:
        table = bench_forced.accepted_drafts(args.acceptance, args.draft_length)
    key = jax.random.key(0, impl="rbg")

    def make_state() -> Any:
        return bench_loop.synthetic_state(
            cfg, key, batch=args.batch, tokens=args.tokens, room=room, dtype=dtype
        )

    shapes = jax.eval_shape(make_state)
    bytes_kept = byte_table(cfg, shapes, dtype, len(args.sparsity), mtp=drafting)
    total = sum(bytes_kept.values())
    for name, size in bytes_kept.items():
        print(f"{name:28} {size / GIB:9.3f} GiB")
    print(f"{'all that stays':28} {total / GIB:9.3f} GiB of {CARD_BYTES / GIB:.0f}")
    if total > CARD_BYTES:
        raise ValueError(
            f"{total / GIB:.1f} GiB do not fit the card's {CARD_BYTES / GIB:.0f}: take fewer "
            f"--experts than {cfg.n_routed_experts}, --tokens or --batch"
        )
    result: dict[str, Any] = {
        "preset": args.preset,
        "layers": cfg.num_hidden_layers,
        "experts": cfg.n_routed_experts,
        "dtype": args.dtype,
        "batch": args.batch,
        "tokens": args.tokens,
        "exploration": args.exploration,
        "bytes": bytes_kept,
        "bytes_total": total,
    }
    selectors: dict[str, Any] = {"fixed slots": bench_loop.FixedSlots(), "all-keep": ALL_KEEP}
    spins = [SpinConfig(sparsity=s, exploration=args.exploration) for s in args.sparsity]
    selectors |= {f"SPIN {c.sparsity:g}": SpinSelector(c) for c in spins}
    if args.plan:
        return result | {"kernel_calls": _lower_only(cfg, dtype, shapes, selectors)}

    params: Params = bench_loop.device_params(cfg, key, dtype, mtp=drafting)
    drafted = _drafted(selectors) if drafting else []
    state = make_state()

    def more(states: dict[str, Any]) -> list[Any]:
        return [
            functools.partial(
                bench_forced.lower, params, state, cfg,
                selectors[name].for_step(first=False), states[name], args.draft_length,
            )
            for name in drafted
        ]  # fmt: skip

    measured, programs, state = bench_loop.compare(
        params, state, cfg, selectors,
        tokens=args.tokens, steps=args.steps, repeats=args.repeats, more=more,
    )  # fmt: skip
    fixed, keep = measured["fixed slots"].median, measured["all-keep"].median
    rows = []
    for name, selector in selectors.items():
        one = measured[name]
        hlo = one.program.run.as_text()
        final = shapes.replace(selector_state=one.selector_state)
        row = {
            "selector": name,
            "step_ms": round(one.median * 1e3, 3),
            "step_ms_all": [round(t * 1e3, 3) for t in one.step_seconds],
            "tokens_per_second": round(args.batch / one.median, 1),
            "gain_percent": round(100 * (keep / one.median - 1), 1),
            "indexer_share": round(1 - fixed / one.median, 3),
            "all_experts_bf16": with_all_experts(cfg, args, one.median, fixed, 2),
            "all_experts_fp4": with_all_experts(
                cfg, args, one.median, fixed, RELEASED_EXPERT_BYTES
            ),
            "temporary_gib": round(one.program.run.memory_analysis().temp_size_in_bytes / GIB, 3),
            "host_transfers": bench_loop.host_transfers(hlo),
            "cache_copies": bench_loop.cache_copies(hlo, final),
            "compile_seconds": round(one.program.compile_seconds, 1),
        }
        if isinstance(selector, SpinSelector):
            saved = savings(one.selector_state, selector.config, cfg.index_head_dim, dtype)
            row["realized_sparsity"] = round(saved.realized_sparsity, 4)
        rows.append(row)
        print(
            f"{name:12} {row['step_ms']:9.3f} ms  {row['tokens_per_second']:9.1f} tokens/s  "
            f"{row['gain_percent']:+6.1f}%  indexer {row['indexer_share']:6.1%}  all experts "
            f"{row['all_experts_bf16']['indexer_share']:6.1%} (bf16) "
            f"{row['all_experts_fp4']['indexer_share']:6.1%} (FP4)",
            flush=True,
        )
    estimate = {"formula": FORMULA, "bandwidth_tb_s": args.bandwidth}
    drafts = []
    for name, program in zip(drafted, programs, strict=True):
        one = measured[name]
        assert table is not None
        row, state = bench_forced.measure(
            program, params, state, cfg, one.selector_state,
            tokens=args.tokens, steps=args.steps, repeats=args.repeats, table=table,
        )  # fmt: skip
        times = row["tokens_per_second"] * one.median / args.batch
        row = {"selector": name, "draft_length": args.draft_length, **row}
        drafts.append(row | {"times_plain": round(times, 3)})
        print(
            f"{name:12} with {args.draft_length} drafts {row['step_ms']:9.3f} ms a verification of "
            f"{row['acceptance_length']:.2f} tokens  {row['tokens_per_second']:9.1f} tokens/s  "
            f"{times:.2f} times plain",
            flush=True,
        )
    result |= {"rows": rows, "all_experts_estimate": estimate}
    return result | ({"drafts": drafts} if drafts else {})


def _drafted(selectors: dict[str, Any]) -> list[str]:
    """Whom to measure with drafts: all-keep, and the first SPIN."""
    return ["all-keep", *[n for n, s in selectors.items() if isinstance(s, SpinSelector)][:1]]


def _lower_only(
    cfg: ModelConfig, dtype: Any, shapes: Any, selectors: dict[str, Any]
) -> dict[str, int]:
    """Trace and lower every loop at the real size for a Hopper GPU, allocating nothing.

    The result counts the kernel calls in each program's text, where layers share functions; a jax
    without kernels lowers for the CPU.
    """
    params = {**abstract_params(cfg, dtype), "mtp": []}
    kernels = {}
    # Traces made for a GPU that is not there must not serve anything else, nor the reverse.
    jax.clear_caches()
    for name, selector in selectors.items():
        states = jax.eval_shape(lambda s, x=selector: bench_loop.start_selector(x, s, cfg), shapes)
        state = shapes.replace(selector_state=states)
        with tracing_for_hopper("assumed"):
            lowered = bench_loop.lower(
                params, state, cfg, selector.for_step(first=False), cuda=HAS_MOSAIC
            )
        kernels[name] = lowered.as_text().count("custom_call @mosaic_gpu")
        print(f"{name:12} lowered, {kernels[name]} kernel calls in the text", flush=True)
    jax.clear_caches()
    return kernels
