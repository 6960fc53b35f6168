"""Write a random checkpoint in exactly the names, types and files of a DeepSeek-V4 release."""

from __future__ import annotations

import argparse
import json
import sys
import time

from tqdm import tqdm

from models.checkpoint.random_release import SHARD_BYTES, write_random_release
from models.params import count_params
from models.presets import PRESETS, shrink

EXAMPLES = """examples:
  python scripts/make_checkpoint.py --preset tiny --out tiny
  python scripts/make_checkpoint.py --preset flash-shape --layers 4 --experts 8 --out small-flash

The same seed gives the same bytes; a tensor's values depend on seed and name alone.
"""


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", required=True, choices=list(PRESETS), help="which shapes")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to create")
    parser.add_argument(
        "--layers", type=int, metavar="N", help="fewer layers; from 3 up, of all kinds"
    )
    parser.add_argument("--experts", type=int, metavar="N", help="fewer routed experts a layer")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="default %(default)s")
    parser.add_argument(
        "--plain", action="store_true", help="BF16 where a release has FP8 and packed FP4"
    )
    parser.add_argument(
        "--shard-bytes",
        type=int,
        default=SHARD_BYTES,
        metavar="N",
        help="split into files of about this size (default %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args(argv)
    begin = time.perf_counter()
    # In a log file a line now and then is enough.
    interval = 0.1 if sys.stderr.isatty() else 30
    bar = tqdm(unit="B", unit_scale=True, desc="write", mininterval=interval)

    def progress(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)

    try:
        with bar:
            cfg = shrink(PRESETS[args.preset](), layers=args.layers, experts=args.experts)
            written = write_random_release(
                cfg,
                args.out,
                seed=args.seed,
                quantised=not args.plain,
                shard_bytes=args.shard_bytes,
                progress=progress,
            )
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    result = {
        "out": args.out,
        "parameters": count_params(cfg),
        "layers": cfg.num_hidden_layers,
        "experts": cfg.n_routed_experts,
        "bytes": written,
        "seconds": time.perf_counter() - begin,
    }
    print(f"{result['parameters']} parameters, {written} bytes: {args.out}")
    if args.json:
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
