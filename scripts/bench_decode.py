"""Times the decode loop: many tokens in one dispatch, on a CPU or at Flash's widths on a GPU.

The cases (``--case``):
  golden           7 layers of small widths, one request, after a short prefill (default on a CPU)
  flash-structure  Flash's 43 layers at tiny widths: how long the decode step takes to compile
  spin-cpu         all-keep against SPIN in a model that its indexer dominates, by context
  flash-gpu        Flash's real widths on one GPU, caches filled with random values (default there)

On one H200 (111 GiB; seven programs compile in two minutes on 16 cores):
  XLA_PYTHON_CLIENT_MEM_FRACTION=0.92 python scripts/bench.py decode --case flash-gpu \\
      --experts 8 --tokens 507904 --batch 24 --sparsity 0.4 0.3 0.5 --exploration 0.05 \\
      --steps 24 --repeats 5 --draft-length 3 --acceptance 2.4 --out results/decode_h200.json
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import bench_flash_gpu
import bench_loop
import bench_spin_cpu
import command
import jax
import jax.numpy as jnp
import numpy as np
from environment import environment

from models.cache import init_cache
from models.config import CSA, HCA, SLIDING, ModelConfig
from models.decode import prefill_chunk, record
from models.generate import MAX_DRAFT
from models.params import init_params
from models.presets import PRESETS, flash_tiny_config, tiny_config
from models.sampling import GREEDY
from models.selector import ALL_KEEP

EXAMPLES = """examples:
  python scripts/bench.py decode
  python scripts/bench.py decode --case golden flash-structure --out results/decode_cpu.json
  python scripts/bench.py decode --case spin-cpu --out results/spin_crossover_cpu.json
  python scripts/bench.py decode --case spin-cpu --slots 32768 --stages
  python scripts/bench.py decode --case flash-gpu --plan      (bytes and lowering, no GPU needed)
  python scripts/bench.py decode --case flash-gpu --batch 8 --out decode.json

The last line is the result as JSON.
"""
PREFILL = 32


def golden_config() -> ModelConfig:
    """Every kind of layer at small widths, indexer heads as wide as the release's."""
    return dataclasses.replace(
        tiny_config(),
        hidden_size=64,
        num_hidden_layers=7,
        compress_ratios=(SLIDING, SLIDING, CSA, HCA, CSA, HCA, CSA, SLIDING),
        head_dim=128,
        qk_rope_head_dim=64,
        q_lora_rank=48,
        o_lora_rank=32,
        index_n_heads=8,
        index_head_dim=128,
        moe_intermediate_size=48,
        vocab_size=96,
    )


def one_request(name: str, cfg: ModelConfig, args: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second of one request through all-keep's loop, and what compiling it takes."""
    params = init_params(cfg, jax.random.key(0, impl="rbg"))
    tokens = np.random.default_rng(0).integers(0, cfg.vocab_size, (1, PREFILL)).astype(np.int32)
    state = bench_loop.synthetic_state(
        cfg,
        jax.random.key(1, impl="rbg"),
        batch=1,
        tokens=PREFILL,
        room=args.steps + 1,
        dtype=jnp.float32,
    )
    cache, logits, _ = prefill_chunk(
        params,
        jnp.asarray(tokens),
        jnp.full(1, PREFILL, jnp.int32),
        init_cache(cfg, 1, state.cache.max_len),
        jnp.zeros((1, cfg.vocab_size), jnp.float32),
        cfg=cfg,
    )
    state = record(state.replace(cache=cache), logits, GREEDY)
    loops = [(ALL_KEEP, state.selector_state)]
    [program] = bench_loop.compile_all(bench_loop.lowerings(params, state, cfg, loops))
    seconds, processor = [], []
    for _ in range(args.repeats + 1):
        processor.append(time.process_time())
        state, passed = bench_loop.dispatch(
            program, params, bench_loop.rewind(state, PREFILL), args.steps
        )
        assert int(state.count[0]) == args.steps
        seconds.append(passed)
    processor.append(time.process_time())
    speeds = args.steps / np.array(seconds[1:])
    # What the process itself used: other work on the machine lengthens this much less.
    used = float(np.median(np.diff(processor[1:]))) / args.steps
    hlo = program.run.as_text()
    result = {
        "layers": cfg.num_hidden_layers,
        "hidden_size": cfg.hidden_size,
        "prefill": PREFILL,
        "steps_per_dispatch": args.steps,
        "tokens_per_second": round(float(np.median(speeds)), 1),
        "tokens_per_second_best": round(float(speeds.max()), 1),
        "tokens_per_second_worst": round(float(speeds.min()), 1),
        "processor_ms_per_token": round(used * 1e3, 3),
        "trace_and_lower_seconds": round(program.lower_seconds, 2),
        "compile_seconds": round(program.compile_seconds, 2),
        "compile_processor_seconds": round(program.processor_seconds, 2),
        "temporary_bytes": program.run.memory_analysis().temp_size_in_bytes,
        "host_transfers": bench_loop.host_transfers(hlo),
        "cache_copies": len(bench_loop.cache_copies(hlo, state)),
    }
    print(
        f"{name:16} {np.median(speeds):8.1f} tokens/s ({speeds.min():.1f} to {speeds.max():.1f})   "
        f"trace and lower {program.lower_seconds:.1f} s, compile {program.compile_seconds:.1f} s "
        f"({program.processor_seconds:.1f} s of processor)",
        flush=True,
    )
    return result


CASES = {
    "golden": lambda args: one_request("golden", golden_config(), args),
    "flash-structure": lambda args: one_request("flash-structure", flash_tiny_config(), args),
    "spin-cpu": bench_spin_cpu.spin_cpu,
    "flash-gpu": bench_flash_gpu.flash_gpu,
}
STEPS = {"golden": 384, "flash-structure": 64, "spin-cpu": 16, "flash-gpu": 32}
SPARSITY = {"spin-cpu": [0.5], "flash-gpu": [0.3, 0.4, 0.5]}


def parse(argv: list[str]) -> argparse.Namespace:
    parser = command.make_parser(__doc__, EXAMPLES)
    parser.prog = "bench.py decode"
    parser.add_argument("--case", nargs="+", choices=CASES, help="what to measure")
    parser.add_argument("--steps", type=int, help="decode steps a dispatch (by case)")
    parser.add_argument("--repeats", type=int, default=7, help="dispatches timed (%(default)s)")
    parser.add_argument(
        "--sparsity", type=float, nargs="+", help="SPIN's; 0.5, on a GPU 0.3 0.4 0.5"
    )
    parser.add_argument("--exploration", type=float, default=0.05, help="SPIN's (%(default)s)")
    parser.add_argument("--out", type=Path, help="also write the result here")
    cpu = parser.add_argument_group("spin-cpu")
    cpu.add_argument("--slots", type=int, nargs="+", default=[2048, 8192, 32768, 131072],
                     help="slots of 4 tokens that a request holds (%(default)s)")  # fmt: skip
    cpu.add_argument("--batches", type=int, nargs="+", default=[1], help="(%(default)s)")
    cpu.add_argument("--index-heads", type=int, default=64, help="(%(default)s)")
    cpu.add_argument("--top-k", type=int, default=512, help="slots attended to (%(default)s)")
    cpu.add_argument("--stages", action="store_true", help="time each stage of a layer too")
    gpu = parser.add_argument_group("flash-gpu")
    gpu.add_argument("--preset", choices=PRESETS, default="flash-shape", help="(%(default)s)")
    gpu.add_argument("--layers", type=int, help="fewer layers than the preset has")
    gpu.add_argument("--experts", type=int, default=8, help="routed experts (%(default)s)")
    gpu.add_argument("--tokens", type=int, default=507904, help="in each cache (%(default)s)")
    gpu.add_argument("--batch", type=int, default=8, help="requests (%(default)s)")
    gpu.add_argument("--dtype", choices=command.DTYPES, default="bfloat16", help="(%(default)s)")
    gpu.add_argument("--bandwidth", type=float, default=4.3, metavar="TB/S",
                     help="of the card, for the share with all experts (%(default)s)")  # fmt: skip
    gpu.add_argument("--draft-length", type=int, default=0, metavar="d",
                     help="also with drafts: all-keep and the first sparsity")  # fmt: skip
    gpu.add_argument("--acceptance", type=float, default=2.4, metavar="N",
                     help="tokens a verification, forced (%(default)s)")  # fmt: skip
    gpu.add_argument("--plan", action="store_true",
                     help="only the table of bytes, and lower the plain loops")  # fmt: skip
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    """Run the cases; the process ends with code 2 for a user's mistake."""
    args = parse(argv)
    if code := command.run(lambda: _run(args, argv)):
        sys.exit(code)


def _run(args: argparse.Namespace, argv: list[str]) -> None:
    default = "flash-gpu" if jax.default_backend() == "gpu" else "golden"
    for name in ("steps", "repeats", "batch", "tokens", "top_k", "index_heads"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} is {value}; it must be at least 1")
    if not 0 <= args.draft_length <= MAX_DRAFT:
        raise ValueError(f"--draft-length {args.draft_length} is not between 0 and {MAX_DRAFT}")
    # A compilation taken from a cache on disk would be no compilation.
    jax.config.update("jax_enable_compilation_cache", False)
    result: dict[str, Any] = {
        "benchmark": "decode",
        **environment(),
        "command": " ".join(["python scripts/bench.py decode", *argv]),
        "load_average_before": bench_loop.load_average(),
        "cases": {},
    }
    for case in args.case or [default]:
        own = argparse.Namespace(**vars(args))
        own.steps = args.steps or STEPS[case]
        own.sparsity = args.sparsity or SPARSITY.get(case)
        measured = CASES[case](own)
        result["cases"][case] = {"steps": own.steps, "repeats": own.repeats} | measured
        result["load_average_after"] = bench_loop.load_average()
        if args.out:  # after each case, should a later one fail
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1:])
