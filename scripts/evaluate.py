"""Measure retrieval of the pocket model in closed loop: all-keep, SPIN, and random slots."""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import command
from environment import environment
from pocket_data import NEEDLE_TASKS, TASKS
from pocket_eval import (
    Outcome,
    acceptance,
    make_samples,
    modes,
    prefill,
    report,
    run_modes,
    warm_up,
)

EXAMPLES = """examples:
  python scripts/evaluate.py --quick
  python scripts/evaluate.py --checkpoint runs/pocket/model --lengths 1024 8192 \\
      --per-task 25 --json

Prompts are held out: their keys, values and filler never occur in training. Every mode answers the
same prompts from the same prefilled contexts. Intervals are 95%, from a bootstrap over prompts.
"""
ROOM = 256
"""Tokens of further turns and answers."""
QUICK_DRAFT_LENGTH = 512
"""Tokens of the prompts whose continuations are drafted in a quick run."""


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = command.make_parser(__doc__, EXAMPLES)
    parser.add_argument("--checkpoint", metavar="DIR", help=command.CHECKPOINT_HELP)
    parser.add_argument("--quick", action="store_true", help="under three minutes on two cores")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--lengths", type=int, nargs="+", metavar="T", help="of first prompts")
    parser.add_argument("--per-task", type=int, metavar="N", help="samples a task and repeat")
    parser.add_argument("--repeats", type=int, metavar="R", help="draws of samples")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), metavar="TASK")
    parser.add_argument("--sparsities", type=float, nargs="+", metavar="R")
    parser.add_argument("--exploration", type=float, default=0.05, metavar="G")
    parser.add_argument(
        "--block-size", type=int, default=8, metavar="b", help="slots a block (%(default)s)"
    )
    parser.add_argument("--draft-length", type=int, default=3, metavar="d", help="0: no MTP")
    parser.add_argument("--seed", type=int, default=0, help="of samples and exploration")
    parser.add_argument("--dtype", choices=list(command.DTYPES), help=command.DTYPE_HELP)
    args = parser.parse_args(argv)
    return command.run(lambda: _evaluate(args, sys.argv[1:] if argv is None else argv))


def _evaluate(args: argparse.Namespace, argv: list[str]) -> None:
    lengths = args.lengths or ([2048] if args.quick else [1024, 2048, 4096, 8192, 16384])
    per_task = args.per_task or (3 if args.quick else 16)
    repeats = args.repeats or (1 if args.quick else 3)
    sparsities = args.sparsities or (
        [0.2, 0.3, 0.4, 0.5] if args.quick else [0.1, 0.2, 0.3, 0.4, 0.5]
    )
    if min(lengths) < 128 or per_task < 1 or repeats < 1:
        raise ValueError(
            f"--lengths {min(lengths)} must be at least 128, --per-task {per_task} and --repeats "
            f"{repeats} at least 1"
        )
    # --quick leaves SPIN without exploration out: each mode adds to what is compiled.
    explorations = [args.exploration] if args.quick else list(dict.fromkeys([args.exploration, 0]))
    params, cfg = command.load_model(args.checkpoint, args.dtype)
    chosen = modes(cfg, sparsities, explorations, args.block_size)
    outcomes: dict[str, list[Outcome]] = {mode.name: [] for mode in chosen}
    begin = time.perf_counter()
    warm = drafts = None
    # Quick runs give all lengths the longest one's cache, and so the same programs.
    shared = max(lengths) + ROOM if args.quick else None
    # Beside the first prefill: a quick run spends most of its time on compiling.
    pool = ThreadPoolExecutor(2)
    if shared is not None:
        warm = pool.submit(warm_up, params, cfg, len(args.tasks) * per_task, shared, chosen)
    if args.draft_length and cfg.num_nextn_predict_layers:
        length = min(QUICK_DRAFT_LENGTH, *lengths) if args.quick else min(lengths)
        samples = make_samples(args.seed, 0, length, per_task, args.tasks)
        drafts = pool.submit(acceptance, params, cfg, samples, args.draft_length)
    for length in lengths:
        for repeat in range(repeats):
            samples = make_samples(args.seed, repeat, length, per_task, args.tasks)
            base, ends = prefill(params, cfg, samples, shared or length + ROOM)
            if warm is not None:
                warm.result()
            found = run_modes(base, ends, samples, chosen, args.seed + repeat)
            for name, own in found.items():
                outcomes[name] += own
            print(
                f"length {length}, repeat {repeat + 1} of {repeats}: "
                f"{time.perf_counter() - begin:.0f} s",
                file=sys.stderr,
                flush=True,
            )
    result = report(outcomes)
    if drafts is not None:
        result["mtp"] = drafts.result()
    result |= {"lengths": lengths, "per_task": per_task, "repeats": repeats, "seed": args.seed}
    result["seconds"] = time.perf_counter() - begin
    result |= {"command": " ".join(["python scripts/evaluate.py", *argv]), **environment()}
    _print_table(result, args.tasks)
    if args.json:
        print(json.dumps(result))


def _print_table(result: dict[str, Any], tasks: list[str]) -> None:
    names = list(result["accuracy"])
    width = max(map(len, names))
    print(f"{'':{width}}  accuracy [95%]         " + " ".join(f"{t[:12]:>12}" for t in tasks))
    for name in names:
        low, high = result["intervals"][name]
        cells = []
        for task in tasks:
            values = list(result["by_task"][name][task].values())
            cells.append(f"{sum(values) / len(values):12.1%}")
        print(
            f"{name:{width}}  {result['accuracy'][name]:6.1%} [{low:6.1%}, {high:6.1%}] "
            + " ".join(cells)
        )
    needles = [t for t in tasks if t in NEEDLE_TASKS]
    if needles:
        values = [v for t in needles for v in result["by_task"]["all_keep"][t].values()]
        print(f"all-keep on the needle tasks: {sum(values) / len(values):.1%}")
    for name, miss in result["miss"].items():
        change, low, high = result["difference"][name]
        missed = (
            "nothing pruned"
            if miss["mean"] is None
            else f"miss mean {miss['mean']:.1%} p99 {miss['p99']:.1%}"
        )
        print(f"{name}: {100 * change:+.1f} points [{100 * low:+.1f}, {100 * high:+.1f}], {missed}")
    for name, found in result["recovery"].items():
        layers = [
            f"{'-' if mean is None else f'{mean:.1f}'} ({never:.0%} never)"
            for mean, never in zip(found["mean_steps"], found["never"], strict=True)
        ]
        if layers:
            print(
                f"{name}: steps until each CSA layer attends to the old fact after the jump, in "
                f"{found['answers']} answers: {', '.join(layers)}"
            )
    if "mtp" in result:
        mtp = result["mtp"]
        print(
            f"MTP: {mtp['acceptance_length']:.2f} tokens a verification of {mtp['draft_length']} "
            f"drafts, {mtp['acceptance_rate']:.1%} accepted"
        )


if __name__ == "__main__":
    sys.exit(main())
