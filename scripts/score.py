"""Logits of given tokens: prefill, decode, or first the one and then the other."""

from __future__ import annotations

import argparse
import json
import sys
import time

import command

from models.generate import PREFILL_CHUNK
from models.score import score

EXAMPLES = """examples:
  python scripts/score.py --checkpoint tiny-f32 --ids ids.npy --out scores.npz
  python scripts/score.py --checkpoint tiny-f32 --ids ids.npy --out scores.npz --prefill 100 --mtp
  python scripts/score.py --checkpoint tiny-f32 --ids ids.npy --out scores.npz --prefill 100 \\
      --sparsity 0.4 --block-size 8

OUT holds logits [B, T, V] (row i is for token i + 1), with --mtp also mtp_logits [B, T - 1, V]
(row i is for token i + 2).
"""


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = command.make_parser(__doc__, EXAMPLES)
    parser.add_argument("--checkpoint", metavar="DIR", help=command.CHECKPOINT_HELP)
    parser.add_argument("--ids", required=True, metavar="FILE", help=".npy of integers [B, T]")
    parser.add_argument("--out", required=True, metavar="FILE", help=".npz to write")
    parser.add_argument(
        "--prefill", type=int, metavar="P", help="tokens before decoding one by one (all)"
    )
    parser.add_argument(
        "--chunk", type=int, default=PREFILL_CHUNK, metavar="C", help="of prefill (%(default)s)"
    )
    parser.add_argument("--mtp", action="store_true", help="also the MTP block's logits")
    parser.add_argument("--dtype", choices=list(command.DTYPES), help=command.DTYPE_HELP)
    parser.add_argument(
        "--quant-sim", action="store_true", help="simulate the release's FP8 and FP4 grids"
    )
    parser.add_argument("--fp8-index-keys", action="store_true", help=command.FP8_HELP)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    command.add_spin_options(parser)
    args = parser.parse_args(argv)
    return command.run(lambda: _score(args))


def _score(args: argparse.Namespace) -> None:
    command.check_out(args.out)
    ids = command.load_ids(args.ids)
    decoded = ids.shape[-1] - (args.prefill or 0) if ids.ndim else 0
    selector = command.selector_from(args, decoded)
    params, cfg = command.load_model(args.checkpoint, args.dtype)
    cfg = cfg.with_quant_sim() if args.quant_sim else cfg
    cfg = cfg.with_fp8_index_keys() if args.fp8_index_keys else cfg
    dtype = params["embed"].dtype
    begin = time.perf_counter()
    scores = score(
        params,
        cfg,
        ids,
        prefill=args.prefill,
        chunk=args.chunk,
        mtp=args.mtp,
        selector=selector,
        dtype=dtype,
    )
    seconds = time.perf_counter() - begin
    arrays = {"logits": scores.logits}
    if scores.mtp_logits is not None:
        arrays["mtp_logits"] = scores.mtp_logits
    command.write_npz(args.out, arrays)
    print(f"mean log-likelihood {scores.mean_log_likelihood:.6f} nats a token")
    if args.json:
        report = {
            "mean_log_likelihood": scores.mean_log_likelihood if ids.shape[1] > 1 else None,
            "batch": ids.shape[0],
            "tokens": ids.shape[1],
            "seconds": seconds,
            "out": args.out,
            **command.spin_report(selector, scores.selector_state, cfg, dtype),
        }
        print(json.dumps(report))


if __name__ == "__main__":
    sys.exit(main())
