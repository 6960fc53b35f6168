"""Generate text or tokens, all-keep or with SPIN, over one prompt, a batch or a dialogue."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import command
import jax
import numpy as np

from models.draft import DraftCounts
from models.generate import PREFILL_CHUNK, Session, check_ids
from models.sampling import Sampling
from models.text import Tokenizer, load_tokenizer

EXAMPLES = """examples:
  python scripts/generate.py --checkpoint flash-bf16 --prompt "Why is the sky blue?" \\
      --max-new-tokens 200 --stream
  python scripts/generate.py --checkpoint flash-bf16 --ids prompts.npy --max-new-tokens 64 \\
      --sparsity 0.4 --json
  python scripts/generate.py --checkpoint flash-bf16 --turns dialogue.jsonl --max-new-tokens 100
  python scripts/generate.py --prompt $'The key is #bak:731. Much follows.\\n?bak:' \\
      --max-new-tokens 32 --draft-length 3 --json

Without --checkpoint the trained pocket model answers: bytes, facts such as #bak:731. anywhere in
the prompt, and the question ?bak: on its last line. SPIN's blocks should be small for it:
--block-size 8.

--ids holds [T] or, for a batch, [B, T] integers; shorter prompts are padded on the right with -1.
A line of --turns is {"prompt": "..."} or {"ids": [...]}: the KV cache stays from turn to turn,
SPIN starts anew at each.
"""
STREAM_EVERY = 8


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = command.make_parser(__doc__, EXAMPLES)
    parser.add_argument("--checkpoint", metavar="DIR", help=command.CHECKPOINT_HELP)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT", help="text, as a user's turn of a chat")
    source.add_argument("--ids", metavar="FILE", help=".npy of integers [T] or [B, T]")
    source.add_argument("--turns", metavar="FILE", help="a dialogue: a JSON object a line")
    parser.add_argument("--max-new-tokens", type=int, required=True, metavar="N", help="a turn")
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="0 takes the likeliest token (%(default)s)"
    )
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="nucleus; 1: all")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="likeliest K; 0: all")
    parser.add_argument("--seed", type=int, default=0, help="of sampling and exploration")
    parser.add_argument("--ignore-eos", action="store_true", help="go on to --max-new-tokens")
    parser.add_argument("--raw", action="store_true", help="no chat markers around the prompt")
    parser.add_argument("--stream", action="store_true", help="print text as it comes")
    parser.add_argument("--dtype", choices=list(command.DTYPES), help=command.DTYPE_HELP)
    parser.add_argument(
        "--max-len", type=int, metavar="L", help="tokens of cache (what the prompts need)"
    )
    parser.add_argument("--chunk", type=int, default=PREFILL_CHUNK, help="of prefill (%(default)s)")
    parser.add_argument("--fp8-index-keys", action="store_true", help=command.FP8_HELP)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument(
        "--draft-length",
        type=int,
        default=0,
        metavar="d",
        help="tokens that the MTP block drafts for each verification (%(default)s: none)",
    )
    command.add_spin_options(parser)
    command.add_draft_options(parser)
    args = parser.parse_args(argv)
    return command.run(lambda: _generate(args))


def _generate(args: argparse.Namespace) -> None:
    selector = command.selector_from(args, args.max_new_tokens)
    sampling = Sampling(args.temperature, args.top_k, args.top_p)
    if args.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens is {args.max_new_tokens}; it must be at least 1")
    if not 0 <= args.seed < 2**63:
        raise ValueError(f"--seed is {args.seed}; it must be from 0 to 2^63 - 1")
    params, cfg = command.load_model(args.checkpoint, args.dtype)
    cfg = cfg.with_fp8_index_keys() if args.fp8_index_keys else cfg
    tokenizer = load_tokenizer(args.checkpoint, cfg)
    turns = _read_turns(args, tokenizer)
    # All of a dialogue before its first turn runs, so that no answer is lost to a later mistake.
    for number, prompts in enumerate(turns, 1):
        for row, prompt in enumerate(prompts):
            check_ids(prompt, cfg, f"prompt {row}" if args.turns is None else f"turn {number}")
    total = max(sum(len(turn[b]) for turn in turns) for b in range(len(turns[0])))
    session = Session(
        params,
        cfg,
        batch=len(turns[0]),
        max_len=total + len(turns) * args.max_new_tokens if args.max_len is None else args.max_len,
        selector=selector,
        sampling=sampling,
        key=jax.random.key(args.seed),
        dtype=params["embed"].dtype,
        chunk=args.chunk,
        draft_length=args.draft_length,
    )
    reports = []
    for prompts in turns:
        before = session.draft_counts
        answers = _answer(session, prompts, tokenizer, args)
        report: dict[str, Any] = {"tokens": answers}
        report["text"] = [tokenizer.decode(a) for a in answers]
        report |= _draft_report(session, before)
        report |= command.spin_report(selector, session.selector_state, cfg, params["embed"].dtype)
        reports.append(report)
    timing = session.timing
    print(
        f"{timing.decode_tokens} tokens decoded at {timing.tokens_per_second:.1f} tokens/s, "
        f"prefill {timing.prefill_seconds:.2f} s, compilation {timing.compile_seconds:.1f} s",
        file=sys.stderr,
    )
    if "realized_sparsity" in reports[-1]:
        last = reports[-1]
        print(
            f"SPIN scored {last['blocks_scored']} of {last['blocks_visible']} blocks "
            f"({last['realized_sparsity']:.1%} skipped)",
            file=sys.stderr,
        )
    drafted = session.draft_counts
    if drafted is not None:
        print(
            f"{drafted.acceptance_length:.2f} tokens a verification, "
            f"{drafted.acceptance_rate:.1%} of the drafts accepted",
            file=sys.stderr,
        )
    if args.json:
        report = dict(reports[-1])
        if args.turns is not None:
            report["turns"] = reports
        report |= {
            "tokens_per_second": timing.tokens_per_second,
            "prefill_seconds": timing.prefill_seconds,
            "decode_seconds": timing.decode_seconds,
            "compile_seconds": timing.compile_seconds,
        }
        print(json.dumps(report))


def _draft_report(session: Session, before: DraftCounts | None) -> dict[str, Any]:
    """Of the last turn's drafts, as fields of the JSON; empty without drafts."""
    after = session.draft_counts
    if after is None or before is None:
        return {}
    turn = DraftCounts(*(y - x for x, y in zip(before, after, strict=True)))
    return {
        "draft_length": session.draft_length,
        "acceptance_length": turn.acceptance_length,
        "draft_acceptance_rate": turn.acceptance_rate,
    }


def _answer(
    session: Session,
    prompts: list[list[int]],
    tokenizer: Tokenizer,
    args: argparse.Namespace,
) -> list[list[int]]:
    """One turn, its text printed: as it comes with --stream (of the first request)."""
    answers: list[list[int]] = [[] for _ in prompts]
    shown = ""
    stream = session.stream_turn(
        prompts,
        args.max_new_tokens,
        stop=[] if args.ignore_eos else None,
        every=STREAM_EVERY if args.stream else None,
    )
    for new in stream:
        for answer, tokens in zip(answers, new, strict=True):
            answer.extend(tokens)
        if args.stream:
            # The text so far without a character that the next bytes may still complete.
            text = tokenizer.decode(answers[0]).rstrip("\ufffd")
            if text.startswith(shown):
                print(text[len(shown) :], end="", flush=True)
                shown = text
    if args.stream:
        rest = tokenizer.decode(answers[0])
        print(rest[len(shown) :].removesuffix("\n") if rest.startswith(shown) else "")
    if not args.stream or len(answers) > 1:
        for answer in answers[1 if args.stream else 0 :]:
            print(tokenizer.decode(answer).removesuffix("\n"))
    return answers


def _read_turns(args: argparse.Namespace, tokenizer: Tokenizer) -> list[list[list[int]]]:
    """The prompts of every request, turn by turn."""
    if args.prompt is not None:
        return [[tokenizer.encode(args.prompt, chat=not args.raw)]]
    if args.ids is not None:
        return [_rows(command.load_ids(args.ids), args.ids)]
    turns = []
    try:
        lines = Path(args.turns).read_text().splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{args.turns} is not UTF-8 text: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            turn = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{args.turns} line {number} is not JSON: {error}") from error
        if isinstance(turn, dict) and isinstance(turn.get("prompt"), str):
            turns.append([tokenizer.encode(turn["prompt"], chat=not args.raw)])
        elif isinstance(turn, dict) and _is_tokens(turn.get("ids")):
            turns.append([turn["ids"]])
        else:
            raise ValueError(
                f'{args.turns} line {number} must be {{"prompt": "text"}} or {{"ids": [1, 2]}}'
            )
    if not turns:
        raise ValueError(f"{args.turns} holds no turn; write one JSON object a line")
    return turns


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and all(type(v) is int for v in value)


def _rows(ids: np.ndarray, name: str) -> list[list[int]]:
    """The prompts of an array, without the -1 that pad on the right."""
    if ids.ndim not in (1, 2) or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(
            f"{name} holds {ids.dtype}{list(ids.shape)}; expected integers [T] or [B, T]"
        )
    rows = []
    for i, row in enumerate(np.atleast_2d(ids)):
        padding = np.flatnonzero(row == -1)
        end = padding[0] if padding.size else len(row)
        if (row[end:] != -1).any():
            raise ValueError(f"{name} row {i} has tokens after a -1; pad only on the right")
        rows.append(row[:end].tolist())
    if not rows:
        raise ValueError(f"{name} holds no prompt")
    return rows


if __name__ == "__main__":
    sys.exit(main())
