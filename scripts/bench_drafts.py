"""Drafts: how many tokens a verification gives, with and without SPIN, and policies compared.

``live`` runs generate with drafts once all-keep and under two pairs of policies. ``offline``
replays every pair at seven sparsities on the record of the all-keep run (the shape of the paper's
Figure 2). Seconds are of the whole decode loop, so tokens a second of a small model on a CPU say
what drafting costs there, not what it saves where reading weights is the cost.

The pocket model (no --checkpoint) gets held-out prompts of its own tasks in turn, other models
random tokens. Nothing ends an answer: the pocket model answers the question, and after the newline
writes on in filler it knows by heart, for it was never trained to ask questions. ``right_answers``
is the share of texts that begin with the right answer, ``same_tokens`` the share of tokens that
plain all-keep has at the same place, ``texts`` what all-keep's drafts gave.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import command
import jax
import numpy as np
from draft_policies import SPARSITIES, compare
from environment import environment
from pocket_data import TASKS, Sample, make_sample

from models.config import ModelConfig
from models.generate import Session
from models.selector import ALL_KEEP
from spin_jax import SpinConfig, SpinSelector, savings
from spin_jax.speculative import Mask, Update
from spin_jax.trace import RecordingSelector, trace_of

EXAMPLES = """examples:
  python scripts/bench.py drafts --prompt-length 2048 --block-size 8 \\
      --out results/drafts_pocket.json
  python scripts/bench.py drafts --checkpoint tiny-f32 --block-size 2 --out results/drafts.json
"""
LIVE: tuple[tuple[Mask, Update], ...] = (("union", "prefix"), ("row0", "row0"))


def main(argv: list[str]) -> None:
    """Measures, prints a table and one line of JSON."""
    parser = command.make_parser(__doc__, EXAMPLES)
    parser.add_argument("--checkpoint", metavar="DIR", help=command.CHECKPOINT_HELP)
    parser.add_argument("--draft-length", type=int, default=3, metavar="d")
    parser.add_argument("--prompts", type=int, default=8, metavar="B", help="requests")
    parser.add_argument("--prompt-length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=128, help="new tokens a request")
    parser.add_argument("--sparsity", type=float, default=0.4, help="of the live runs")
    parser.add_argument("--block-size", type=int, default=SpinConfig().block_size, metavar="b")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", metavar="FILE", help="JSON to write as well")
    args = parser.parse_args(argv)
    if code := command.run(lambda: _measure(args, argv)):
        sys.exit(code)


def make_prompts(
    args: argparse.Namespace, cfg: ModelConfig
) -> tuple[list[list[int]], list[Sample]]:
    """Prompts of --prompt-length tokens, and the samples they are of: none for random tokens."""
    if args.checkpoint is None:
        samples = [
            make_sample(f"drafts {args.seed} {i}", TASKS[i % len(TASKS)], args.prompt_length)
            for i in range(args.prompts)
        ]
        return [list(sample.prompts[0]) for sample in samples], samples
    rng = np.random.default_rng(args.seed)
    return rng.integers(0, cfg.vocab_size, (args.prompts, args.prompt_length)).tolist(), []


def _measure(args: argparse.Namespace, argv: list[str]) -> None:
    if args.out:
        command.check_out(args.out)
    params, cfg = command.load_model(args.checkpoint, None)
    prompts, samples = make_prompts(args, cfg)
    spin = SpinConfig(sparsity=args.sparsity, block_size=args.block_size)
    rows = args.draft_length + 1
    if not cfg.csa_layers:
        raise ValueError("this model has no CSA layer, so no indexer to measure")
    recording = RecordingSelector(args.steps, rows, cfg.index_n_heads, cfg.index_head_dim)
    plain: list[list[int]] = []

    def run(selector: Any, draft_length: int) -> tuple[Session, dict[str, Any], list[bytes]]:
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
        answers = session.turn(prompts, args.steps, stop=[])
        texts = [bytes(answer) for answer in answers] if samples else []
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
        if samples:
            right = [t.startswith(s.answers[0]) for t, s in zip(texts, samples, strict=True)]
            row["right_answers"] = float(np.mean(right))
        if plain:
            row["same_tokens"] = float(np.mean(np.equal(answers, plain)))
        else:
            plain.extend(answers)
        print(row, flush=True)
        return session, row, texts

    live = [run(ALL_KEEP, d)[1] for d in (0, args.draft_length)]
    for mask, update in LIVE:
        live.append(run(SpinSelector(spin, mask=mask, update=update), args.draft_length)[1])

    # Not timed: it writes what it is asked.
    recorded, _, texts = run(recording, args.draft_length)
    trace = trace_of(recorded.selector_state, recorded.cache, cfg.index_topk)
    offline = compare(trace, SPARSITIES, SpinConfig(block_size=args.block_size), args.seed)
    report = {
        "checkpoint": Path(args.checkpoint).name if args.checkpoint else "pocket",
        "prompts": args.prompts,
        "prompts_of": "held-out pocket tasks" if samples else "random tokens",
        "prompt_length": args.prompt_length,
        "new_tokens": args.steps,
        "index_topk": cfg.index_topk,
        "block_size": args.block_size,
        "live": live,
        "texts": [text.decode(errors="replace") for text in texts],
        "offline": offline,
        "command": " ".join(["python scripts/bench.py drafts", *argv]),
        **environment(),
    }
    if args.out:
        Path(args.out).write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))
