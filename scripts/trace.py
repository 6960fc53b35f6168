"""Record what the indexers are asked during a run, and replay any SPIN policy on the record.

A trace is an .npz file. L indexer layers, B requests, M steps, R = draft length + 1 rows a step,
n index heads, x channels, S slots:

  version    int      1
  top_k      int      slots that attention keeps (index_topk)
  q          f32      [L, B, M, R, n, x]  index queries, RoPE and Hadamard applied
  w          f32      [L, B, M, R, n]     head weights, scales applied
  keys       f32      [L, B, S, x]        index keys at the end of the run
  num_slots  int32    [B, M, R]           slots that each row saw
  num_rows   int32    [B, M]              rows that stood: accepted drafts and one; 0 when done

The score of slot i in a row is sum_h w[h] relu(q[h] . keys[i]) for i < num_slots.
"""

from __future__ import annotations

import argparse
import json
import sys
import zipfile
from typing import Any

import command
import jax
import numpy as np
from draft_policies import SPARSITIES, compare

from models.generate import PREFILL_CHUNK, Session
from models.sampling import Sampling
from models.text import load_tokenizer
from spin_jax import SpinConfig
from spin_jax.trace import RecordingSelector, Trace, trace_of

VERSION = 1

EXAMPLES = """examples:
  python scripts/trace.py record --checkpoint flash-bf16 --prompt "Once upon a time" \\
      --max-new-tokens 200 --draft-length 3 --out trace.npz
  python scripts/trace.py replay --trace trace.npz --sparsity 0.2 0.4 --json
"""


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = command.make_parser(__doc__, EXAMPLES)
    commands = parser.add_subparsers(required=True, metavar="record | replay")

    record = commands.add_parser("record", help="generate, and write the trace")
    record.add_argument("--checkpoint", metavar="DIR", help=command.CHECKPOINT_HELP)
    source = record.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT")
    source.add_argument("--ids", metavar="FILE", help=".npy of integers [T] or [B, T]")
    record.add_argument("--max-new-tokens", type=int, required=True, metavar="N")
    record.add_argument("--draft-length", type=int, default=0, metavar="d")
    record.add_argument("--temperature", type=float, default=0.0)
    record.add_argument("--seed", type=int, default=0)
    record.add_argument("--ignore-eos", action="store_true", help="go on to --max-new-tokens")
    record.add_argument("--dtype", choices=list(command.DTYPES), help=command.DTYPE_HELP)
    record.add_argument("--chunk", type=int, default=PREFILL_CHUNK, help="of prefill")
    record.add_argument("--out", required=True, metavar="FILE", help=".npz to write")
    record.add_argument("--json", action="store_true", help="end with one line of JSON")
    command.add_spin_options(record)
    command.add_draft_options(record)
    record.set_defaults(run=_record)

    again = commands.add_parser("replay", help="miss and sparsity of policies on a trace")
    again.add_argument("--trace", required=True, metavar="FILE")
    again.add_argument("--sparsity", type=float, nargs="+", default=list(SPARSITIES), metavar="R")
    again.add_argument("--exploration", type=float, default=SpinConfig().exploration)
    again.add_argument("--policy", choices=["random", "none", "staleness", "age"], default="random")
    again.add_argument("--reduction", choices=["A0", "A1", "A2"], default="A1")
    again.add_argument("--pooling", choices=["max", "top4", "mean"], default="max")
    again.add_argument("--decay", type=float, default=SpinConfig().decay, metavar="A")
    again.add_argument("--block-size", type=int, default=SpinConfig().block_size, metavar="b")
    again.add_argument("--seed", type=int, default=0)
    again.add_argument("--json", action="store_true", help="end with one line of JSON")
    again.set_defaults(run=_replay)

    args = parser.parse_args(argv)
    return command.run(lambda: args.run(args))


def _record(args: argparse.Namespace) -> None:
    command.check_out(args.out)
    if args.max_new_tokens < 2:
        raise ValueError(f"--max-new-tokens is {args.max_new_tokens}; a trace needs 2 or more")
    inner = command.selector_from(args, args.max_new_tokens)
    params, cfg = command.load_model(args.checkpoint, args.dtype)
    if not cfg.csa_layers:
        raise ValueError("this model has no CSA layer, so no indexer to record")
    if args.prompt is not None:
        prompts = [load_tokenizer(args.checkpoint, cfg).encode(args.prompt, chat=True)]
    else:
        prompts = list(np.atleast_2d(command.load_ids(args.ids)))
    selector = RecordingSelector(
        args.max_new_tokens - 1,
        args.draft_length + 1,
        cfg.index_n_heads,
        cfg.index_head_dim,
        inner,
    )
    session = Session(
        params,
        cfg,
        batch=len(prompts),
        max_len=max(len(p) for p in prompts) + args.max_new_tokens,
        selector=selector,
        sampling=Sampling(args.temperature),
        key=jax.random.key(args.seed),
        dtype=params["embed"].dtype,
        chunk=args.chunk,
        draft_length=args.draft_length,
    )
    answers = session.turn(prompts, args.max_new_tokens, stop=[] if args.ignore_eos else None)
    if max(map(len, answers)) < 2:
        raise ValueError(
            "every answer ended with its first token, which comes of prefill, so no indexer was "
            "asked in decoding; pass --ignore-eos or another prompt"
        )
    trace = trace_of(session.selector_state, session.cache, cfg.index_topk)
    command.write_npz(args.out, {"version": VERSION} | trace._asdict())
    layers, batch, steps, rows = trace.q.shape[:4]
    print(f"{layers} layers, {batch} requests, {steps} steps of {rows} rows in {args.out}")
    if args.json:
        drafted = session.draft_counts
        report: dict[str, Any] = {
            "layers": layers,
            "batch": batch,
            "steps": steps,
            "rows": rows,
            "out": args.out,
            "tokens": answers,
        }
        if drafted is not None:
            report["acceptance_length"] = drafted.acceptance_length
            report["draft_acceptance_rate"] = drafted.acceptance_rate
        print(json.dumps(report))


def load_trace(path: str) -> Trace:
    """A trace file.

    Raises:
        ValueError: it is not one.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            if int(file["version"]) != VERSION:
                raise ValueError(f"version {int(file['version'])}; this program reads {VERSION}")
            arrays = {name: file[name] for name in Trace._fields}
    except (ValueError, KeyError, EOFError, TypeError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is not a trace that trace.py record wrote: {error}") from error
    top_k = int(arrays.pop("top_k"))
    return Trace(**arrays, top_k=top_k)


def _replay(args: argparse.Namespace) -> None:
    trace = load_trace(args.trace)
    config = SpinConfig(
        block_size=args.block_size,
        exploration=args.exploration,
        policy=args.policy,
        reduction=args.reduction,
        pooling=args.pooling,
        decay=args.decay,
    )
    rows = compare(trace, args.sparsity, config, args.seed)
    if args.json:
        print(json.dumps({"trace": args.trace, "rows": rows}))


if __name__ == "__main__":
    sys.exit(main())
