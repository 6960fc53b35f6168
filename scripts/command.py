"""What the commands share: options, loading, and errors as one line and exit code 2."""

from __future__ import annotations

import argparse
import os
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models.checkpoint import load_checkpoint, load_release
from models.config import ModelConfig
from models.params import init_params
from models.pocket import pocket_weights
from models.presets import shrink, tiny_config
from models.selector import ALL_KEEP, Selector
from spin_jax import SpinConfig, SpinSelector, recorded_miss, savings

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
DTYPE_HELP = "of weights and activations (as converted; float32 for a release folder)"

RANDOM = "random"
CHECKPOINT_HELP = (
    "converted checkpoint, or a release folder that fits memory; 'random' for small random weights "
    "(the trained pocket model)"
)
FP8_HELP = "keep the indexer's keys as FP8: half the bytes to score"


def make_parser(doc: str | None, examples: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        description=doc, epilog=examples, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def run(main: Callable[[], None]) -> int:
    """Run a command's body; a user's mistake is one line on stderr and exit code 2."""
    try:
        main()
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        print(f"error: out of memory: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130
    return 0


def add_spin_options(parser: argparse.ArgumentParser) -> None:
    defaults = SpinConfig()
    group = parser.add_argument_group("SPIN", "predictive block selection during decoding")
    group.add_argument(
        "--sparsity",
        type=float,
        default=0.0,
        metavar="R",
        help="share of KV blocks that the indexer skips, 0 <= R < 1; 0 scores all (%(default)s)",
    )
    group.add_argument(
        "--exploration",
        type=float,
        default=defaults.exploration,
        metavar="G",
        help="explored share of the block budget (%(default)s)",
    )
    group.add_argument(
        "--policy",
        choices=["random", "none", "staleness", "age"],
        default=defaults.policy,
        help="which blocks are explored (%(default)s)",
    )
    group.add_argument(
        "--block-size",
        type=int,
        default=defaults.block_size,
        metavar="b",
        help="slots a block; a slot is 4 tokens (%(default)s)",
    )
    group.add_argument(
        "--diagnose",
        action="store_true",
        help="also score densely, to report the miss; tokens stay the same, time does not",
    )


def add_draft_options(parser: argparse.ArgumentParser) -> None:
    """How SPIN treats the rows of a draft."""
    defaults = SpinSelector()
    group = parser.add_argument_group("SPIN with drafts", "see --draft-length")
    group.add_argument(
        "--draft-mask",
        choices=["union", "row0"],
        help=f"blocks of a draft's rows: each its own, read together, or row 0's ({defaults.mask})",
    )
    group.add_argument(
        "--draft-update",
        choices=["prefix", "row0"],
        help=f"rows that SPIN remembers: all that stand, or row 0 ({defaults.update})",
    )


def selector_from(args: argparse.Namespace, steps: int) -> Selector:
    """The selector that the SPIN options ask for: all-keep at sparsity 0."""
    config = SpinConfig(
        sparsity=args.sparsity,
        exploration=args.exploration,
        policy=args.policy,
        block_size=args.block_size,
    )
    if args.diagnose and not args.sparsity:
        raise ValueError("--diagnose measures what pruning misses; give a --sparsity above 0")
    draft = {k: v for k in ("mask", "update") if (v := getattr(args, f"draft_{k}", None))}
    for option in draft:
        if not args.draft_length:
            raise ValueError(
                f"--draft-{option} says how SPIN treats the rows of a draft, and nothing is "
                "drafted; give a --draft-length of 1 or more"
            )
        if not args.sparsity:
            raise ValueError(
                f"--draft-{option} says how SPIN treats the rows of a draft, and all blocks are "
                "kept; give a --sparsity above 0"
            )
    if not args.sparsity:
        return ALL_KEEP
    return SpinSelector(config, diagnose=max(steps, 1) if args.diagnose else 0, **draft)


def spin_report(
    selector: Selector, states: tuple[Any, ...], cfg: ModelConfig, dtype: Any
) -> dict[str, Any]:
    """What pruning saved, as fields of the JSON; empty without SPIN."""
    if not isinstance(selector, SpinSelector):
        return {}
    key_dtype = jnp.float8_e4m3fn if cfg.fp8_index_keys else dtype
    saved = savings(states, selector.config, cfg.index_head_dim, key_dtype)
    missed = {}
    if selector.diagnose and states:
        summary = recorded_miss(states)
        rows = int(summary.rows)
        missed = {
            "miss_rows": rows,
            "miss_mean": float(summary.mean) if rows else None,
            "miss_p99": float(summary.p99) if rows else None,
            "miss_mean_of_p99": float(summary.mean_of_p99) if rows else None,
        }
    return missed | {
        "sparsity": selector.config.sparsity,
        "realized_sparsity": saved.realized_sparsity,
        "blocks_scored": saved.blocks_scored,
        "blocks_visible": saved.blocks_visible,
        "indexer_bytes_read": saved.bytes_read,
        "indexer_bytes_all_keep": saved.bytes_visible,
        # Of verifications of drafts, a layer and request each; null without drafts.
        "identical_masks": saved.identical_masks,
    }


def load_model(checkpoint: str | None, dtype: str | None) -> tuple[Any, ModelConfig]:
    """Parameters and config of a converted checkpoint, or of a release folder that fits memory.

    Without a checkpoint the pocket model; ``random`` is a small model of random weights.
    """
    if checkpoint == RANDOM:
        cfg = shrink(tiny_config(), layers=4)
        return init_params(cfg, jax.random.key(0), DTYPES[dtype or "float32"]), cfg
    folder = pocket_weights() if checkpoint is None else Path(checkpoint)
    wanted = None if dtype is None else DTYPES[dtype]
    if any(folder.glob("*.safetensors")) or (folder / "model.safetensors.index.json").exists():
        return load_release(folder, "float32" if dtype is None else dtype)
    return load_checkpoint(folder, dtype=wanted)


def load_ids(path: str) -> np.ndarray:
    """An integer array from an ``.npy`` file."""
    try:
        ids = np.load(path, allow_pickle=False)
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is not an .npy file of integers: {error}") from error
    if not isinstance(ids, np.ndarray):
        raise ValueError(f"{path} is an archive; save one array with numpy.save")
    return ids


def check_out(path: str) -> None:
    """Raises ``ValueError`` where a result could not be written, before any work is done."""
    if not Path(path).absolute().parent.is_dir():
        raise ValueError(f"--out {path}: its folder does not exist; create it first")


def write_npz(out: str, arrays: dict[str, Any]) -> None:
    """Write beside the target and rename: what is there stays until the new file is whole."""
    path = Path(out)
    partial = path.with_name(path.name + ".partial")
    try:
        with open(partial, "wb") as file:
            np.savez(file, **arrays)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
