"""Convert a DeepSeek-V4 release (safetensors) into an Orbax checkpoint."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys

from tqdm import tqdm

from models.checkpoint.convert import DTYPES, convert

EXAMPLES = """examples:
  python scripts/convert.py --hf DeepSeek-V4-Flash --out flash-bf16
  python scripts/convert.py --hf tiny --out tiny-f32 --dtype float32 --json

An interrupted conversion leaves OUT.partial; the same command goes on from there.
The result takes 2 bytes a weight in bfloat16, 4 in float32, so about four times
the size of a release with packed FP4 experts, or eight times.
"""


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hf", required=True, metavar="DIR", help="folder of the release's files")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to create")
    parser.add_argument(
        "--dtype",
        default="bfloat16",
        choices=list(DTYPES),
        help="type of the weights (%(default)s)",
    )
    parser.add_argument("--workers", type=int, metavar="N", help="threads (one a core, at most 4)")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args(argv)
    # In a log file a line now and then is enough.
    interval = 0.1 if sys.stderr.isatty() else 30
    bar = tqdm(unit="B", unit_scale=True, desc="convert", mininterval=interval)

    def progress(done: int, total: int) -> None:
        if bar.total != total:
            # What an earlier run did is no part of this run's rate.
            bar.reset(total)
            bar.initial = bar.n = done
        bar.update(done - bar.n)

    try:
        with bar:
            report = convert(args.hf, args.out, args.dtype, progress=progress, workers=args.workers)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("error: interrupted; run the same command again to go on", file=sys.stderr)
        return 130
    print(
        f"{report.tensors} tensors, {report.bytes / 1e9:.3f} GB as {report.dtype} in "
        f"{report.seconds:.1f} s"
        + (f" ({report.resumed} tensors were done before)" if report.resumed else "")
        + f": {report.out}"
    )
    if args.json:
        print(json.dumps(dataclasses.asdict(report)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
