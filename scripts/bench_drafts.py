"""Drafts: how many tokens a verification gives, with and without SPIN, and policies compared.

``live`` runs generate with drafts once all-keep and once under each pair of policies. ``offline``
replays every pair at seven sparsities on the record of the all-keep run (the shape of the paper's
Figure 2). Seconds are of the whole decode loop, so tokens a second of a small model on a CPU say
what drafting costs there, not what it saves where reading weights is the cost.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import bench_decode
import command
import jax
import numpy as np
from draft_policies import SPARSITIES, compare

from models.generate import Session
from models.selector import ALL_KEEP
from spin_jax import SpinConfig, SpinSelector, savings
from spin_jax.speculative import Mask, Update
from spin_jax.trace import RecordingSelector, trace_of

EXAMPLES = """examples:
  python scripts/bench.py drafts --checkpoint tiny-f32 --block-size 2 --out results/drafts.json
"""
LIVE: tuple[tuple[Mask, Update], ...] = (("union", "prefix"), ("row0", "row0"))


def main(argv: list[str]) -> None:
    """Measures, prints a table and one line of JSON."""
    parser = command.make_parser(__doc__, EXAMPLES)
    parser.add_argument("--checkpoint", metavar="DIR", help="as generate.py's")
    parser.add_argument("--draft-length", type=int, default=3, metavar="d")
    parser.add_argument("--prompts", type=int, default=8, metavar="B", help="random requests")
    parser.add_argument("--prompt-length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=128, help="new tokens a request")
    parser.add_argument("--sparsity", type=float, default=0.4, help="of the live runs")
    parser.add_argument("--block-size", type=int, default=SpinConfig().block_size, metavar="b")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", metavar="FILE", help="JSON to write as well")
    args = parser.parse_args(argv)
    if code := command.run(lambda: _measure(args, argv)):
        sys.exit(code)


def _measure(args: argparse.Namespace, argv: list[str]) -> None:
    if args.out:
        command.check_out(args.out)
    params, cfg = command.load_model(args.checkpoint, None)
    rng = np.random.default_rng(args.seed)
    prompts = rng.integers(0, cfg.vocab_size, (args.prompts, args.prompt_length)).tolist()
    spin = SpinConfig(sparsity=args.sparsity, block_size=args.block_size)
    rows = args.draft_length + 1
    if not cfg.csa_layers:
        raise ValueError("this model has no CSA layer, so no indexer to measure")
    recording = RecordingSelector(args.steps, rows, cfg.index_n_heads, cfg.index_head_dim)

    def run(selector: Any, draft_length: int) -> tuple[Session, dict[str, Any]]:
        session = Session(
            params,
            cfg,
            batch=args.prompts,
            max_len=args.prompt_length + args.steps,
            selector=selector,
            dtype=params["embed"].dtype,
            key=jax.random.key(args.seed),
            draft_length=draft_length,
        )
        session.turn(prompts, args.steps, stop=[])
        row: dict[str, Any] = {
            "selector": "spin" if isinstance(selector, SpinSelector) else "all_keep",
            "draft_length": draft_length,
            "tokens_per_second": session.timing.tokens_per_second,
        }
        if session.draft_counts is not None:
            row["acceptance_length"] = session.draft_counts.acceptance_length
            row["draft_acceptance_rate"] = session.draft_counts.acceptance_rate
        if isinstance(selector, SpinSelector):
            saved = savings(session.selector_state, spin, cfg.index_head_dim, "float32")
            row |= {"mask": selector.mask, "update": selector.update, "sparsity": args.sparsity}
            row["realized_sparsity"] = saved.realized_sparsity
            row["identical_masks"] = saved.identical_masks
        print(row, flush=True)
        return session, row

    live = [run(ALL_KEEP, d)[1] for d in (0, args.draft_length)]
    for mask, update in LIVE:
        live.append(run(SpinSelector(spin, mask=mask, update=update), args.draft_length)[1])

    recorded, _ = run(recording, args.draft_length)  # not timed: it writes what it is asked
    trace = trace_of(recorded.selector_state, recorded.cache, cfg.index_topk)
    offline = compare(trace, SPARSITIES, SpinConfig(block_size=args.block_size), args.seed)
    report = {
        "checkpoint": Path(args.checkpoint).name if args.checkpoint else "random",
        "prompts": args.prompts,
        "prompt_length": args.prompt_length,
        "new_tokens": args.steps,
        "index_topk": cfg.index_topk,
        "block_size": args.block_size,
        "live": live,
        "offline": offline,
        "command": " ".join(["python scripts/bench.py drafts", *argv]),
        **bench_decode.environment(),
    }
    if args.out:
        Path(args.out).write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))
