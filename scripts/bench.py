"""Benchmarks: ``bench.py kernels`` times the indexer's and SPIN's operations on a GPU,
``bench.py attention`` attention over listed rows, ``bench.py decode`` the whole decode loop,
``bench.py drafts`` speculative decoding and ``bench.py verify`` what a draft's rows cost in
scoring."""

from __future__ import annotations

import importlib
import sys

SUBCOMMANDS = {
    "kernels": "bench_kernels",
    "attention": "bench_attention",
    "decode": "bench_decode",
    "drafts": "bench_drafts",
    "verify": "bench_verify",
}


def main(argv: list[str]) -> None:
    """Hands the rest of the command line to the module of the subcommand."""
    if not argv or argv[0] not in SUBCOMMANDS:
        sys.exit(f"usage: bench.py {{{','.join(SUBCOMMANDS)}}} [options]; -h after it for help")
    importlib.import_module(SUBCOMMANDS[argv[0]]).main(argv[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
