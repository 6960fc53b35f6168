"""A question about facts buried in a long text, answered by the pocket model with and without SPIN.

Converts the trained weights from their release files, as one would a larger model's, and prints
what is asked, what is answered, and what SPIN left unscored.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import command
import convert
from pocket_data import ONE_TURN, Sample, make_sample

from models.checkpoint import load_checkpoint
from models.generate import Session
from models.pocket import pocket_weights
from models.selector import ALL_KEEP, Selector
from models.text import Bytes
from spin_jax import SpinConfig, SpinSelector, savings

EXAMPLES = """examples:
  python scripts/demo.py
  python scripts/demo.py --task late --length 8192 --sparsity 0.5 --seed 3

Prompts are held out: their keys, values and filler never occur in training.
"""
ANSWER = 32
"""Tokens that an answer may take; its newline ends it."""
AROUND = 48
"""Bytes of text shown on either side of a fact."""
FACT = len("#bak:731.")


def main(argv: list[str] | None = None) -> int:
    """Run the demo; returns its exit code."""
    parser = command.make_parser(__doc__, EXAMPLES)
    parser.add_argument("--task", choices=list(ONE_TURN), default="multi_needle")
    parser.add_argument(
        "--length", type=int, default=4096, metavar="T", help="tokens of the prompt (%(default)s)"
    )
    parser.add_argument(
        "--sparsity", type=float, default=0.4, metavar="R", help="of SPIN (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the prompt (%(default)s)")
    args = parser.parse_args(argv)
    return command.run(lambda: _demo(args))


def _demo(args: argparse.Namespace) -> None:
    begin = time.perf_counter()
    spin = SpinConfig(sparsity=args.sparsity, block_size=8)
    sample = make_sample(f"demo {args.seed}", args.task, args.length)
    with tempfile.TemporaryDirectory(prefix="spin-jax-demo-") as folder:
        model = os.path.join(folder, "model")
        arguments = ["--hf", _shown(pocket_weights()), "--out", model, "--dtype", "float32"]
        print("$ python scripts/convert.py", *arguments, flush=True)
        if convert.main(arguments):
            raise ValueError("the pocket model could not be converted; see the message above")
        params, cfg = load_checkpoint(model)

    print(f"\nA text of {args.length} tokens, a byte each, with facts in it:\n")
    for place in sorted(sample.places[0]):
        print(f"  {place:6}  ... {_excerpt(sample, place)} ...")
    text = Bytes()
    print(f"\nand at its end the question {_question(sample)}", flush=True)

    def answer(selector: Selector) -> tuple[str, Session]:
        prompt = list(sample.prompts[0])
        session = Session(
            params, cfg, batch=1, max_len=len(prompt) + ANSWER, selector=selector, dtype="float32"
        )
        return text.decode(session.turn([prompt], ANSWER)[0]).strip(), session

    # Side by side: most of the time goes into compiling, and each has programs of its own.
    with ThreadPoolExecutor(2) as pool:
        (kept, _), (pruned, session) = pool.map(answer, (ALL_KEEP, SpinSelector(spin)))
    print(f"\n  right answer         {text.decode(list(sample.answers[0])).strip()}")
    print(f"  all blocks scored    {kept}")
    print(f"  SPIN at {args.sparsity:<13.0%}{pruned}")
    _print_savings(session, spin, cfg.index_head_dim)
    print(f"\n{time.perf_counter() - begin:.0f} s in all, most of it compiling")


def _print_savings(session: Session, spin: SpinConfig, index_head_dim: int) -> None:
    saved = savings(session.selector_state, spin, index_head_dim, "float32")
    print(
        f"\nWhile answering, SPIN scored {saved.blocks_scored} of {saved.blocks_visible} blocks of "
        f"index keys ({saved.realized_sparsity:.1%} skipped)\nand read "
        f"{saved.bytes_read / 1e6:.1f} MB of them in place of {saved.bytes_visible / 1e6:.1f} MB. "
        "Its first step scores all."
    )


def _shown(folder: Path) -> str:
    """Short where it can be."""
    return str(folder.relative_to(Path.cwd())) if folder.is_relative_to(Path.cwd()) else str(folder)


def _line(text: bytes) -> str:
    return " ".join(Bytes().decode(list(text)).split())


def _excerpt(sample: Sample, place: int) -> str:
    return _line(sample.prompts[0][max(0, place - AROUND) : place + FACT + AROUND])


def _question(sample: Sample) -> str:
    return _line(sample.prompts[0].rsplit(b"\n", 1)[1])


if __name__ == "__main__":
    sys.exit(main())
