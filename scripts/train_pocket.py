"""Train the pocket model: a small DeepSeek-V4 that retrieves from long contexts."""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import command
import jax
import numpy as np
import orbax.checkpoint as ocp
from pocket_data import MIXED, SINGLE_ONLY, Mixture, training_batch
from pocket_training import (
    Recipe,
    Stage,
    TrainState,
    flops_per_token,
    init_state,
    parse_stages,
    train_steps,
    whole_params,
)

from models.checkpoint.export import export_release
from models.config import ModelConfig
from models.params import count_params
from models.pocket import pocket_config, toy_config

STAGES = "256x256x5000d,1024x64x4000d,1024x64x2000s,4096x16x2500s,16384x4x500s"
TOY_STAGES = "128x8x24d,128x8x8s"
EXAMPLES = """examples:
  python scripts/train_pocket.py --out runs/pocket --minutes 9
  python scripts/train_pocket.py --out runs/toy --toy

The same command goes on from where the last call stopped; OUT/model is the model so far, OUT/log.jsonl
the losses. Stages are LENGTHxROWSxSTEPS with d (all slots attended, which warms the indexers up) or
s (top K slots); --scale multiplies their steps.
"""


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = command.make_parser(__doc__, EXAMPLES)
    parser.add_argument("--out", required=True, metavar="DIR", help="checkpoints, log and model")
    parser.add_argument("--minutes", type=float, metavar="M", help="stop, to be resumed, after M")
    parser.add_argument(
        "--checkpoint-minutes", type=float, default=4.0, metavar="N", help="apart (%(default)s)"
    )
    parser.add_argument("--stages", help=f"curriculum ({STAGES})")
    parser.add_argument("--scale", type=float, default=1.0, help="of all stages' steps")
    parser.add_argument("--lr", type=float, default=Recipe.lr, help="peak (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data")
    parser.add_argument("--single", action="store_true", help="single needles only")
    parser.add_argument("--toy", action="store_true", help="small model, short stages: for a CPU")
    parser.add_argument("--dtype", choices=list(command.DTYPES), help="of activations")
    parser.add_argument("--dispatch", type=int, default=20, metavar="N", help="steps at a time")
    parser.add_argument("--workers", type=int, metavar="N", help="processes that make data")
    args = parser.parse_args(argv)
    return command.run(lambda: _train(args))


def _train(args: argparse.Namespace) -> None:
    if args.dispatch < 1 or args.scale <= 0 or args.seed < 0:
        raise ValueError(
            f"--dispatch {args.dispatch} and --scale {args.scale} must be positive, --seed "
            f"{args.seed} not negative"
        )
    cfg = toy_config() if args.toy else pocket_config()
    stages = parse_stages(args.stages or (TOY_STAGES if args.toy else STAGES))
    recipe = Recipe(
        tuple(dataclasses.replace(s, steps=max(1, round(s.steps * args.scale))) for s in stages),
        lr=args.lr,
        compute=args.dtype or ("float32" if args.toy else "bfloat16"),
    )
    out = Path(os.path.abspath(args.out))
    out.mkdir(parents=True, exist_ok=True)
    if jax.default_backend() == "gpu":
        # Each stage compiles for a minute; a resumed call should not compile again.
        jax.config.update("jax_compilation_cache_dir", str(out / "compiled"))
    run = Run(cfg, recipe, args.seed, SINGLE_ONLY if args.single else MIXED, out)
    workers = 0 if args.toy else max(1, min(12, (os.cpu_count() or 1) - 2))
    run.train(
        minutes=args.minutes,
        checkpoint_minutes=args.checkpoint_minutes,
        dispatch=args.dispatch,
        workers=workers if args.workers is None else args.workers,
    )


class Run:
    """A training run in a folder: ``state/N`` (Orbax), ``log.jsonl``, ``recipe.json``, ``model``.

    Raises:
        ValueError: the folder holds a run of another recipe.
    """

    def __init__(
        self, cfg: ModelConfig, recipe: Recipe, seed: int, mixture: Mixture, out: Path
    ) -> None:
        self.cfg, self.recipe, self.seed, self.mixture, self.out = cfg, recipe, seed, mixture, out
        asked = json.dumps(
            {
                "config": cfg.to_dict(),
                "recipe": dataclasses.asdict(recipe),
                "mixture": dataclasses.asdict(mixture),
                "seed": seed,
            },
            indent=1,
        )
        record = out / "recipe.json"
        if record.exists() and record.read_text() != asked:
            raise ValueError(
                f"{out} holds a run with other options (see {record.name}); repeat its command, or "
                "name a new folder"
            )
        record.write_text(asked)
        self.state = init_state(cfg, recipe, seed)
        self.step = 0
        saved = self._saved()
        if saved:
            self.step = saved[-1]
            with ocp.StandardCheckpointer() as checkpointer:
                target = jax.tree.map(ocp.utils.to_shape_dtype_struct, self.state)
                self.state = checkpointer.restore(out / "state" / str(self.step), target)

    def train(
        self,
        *,
        minutes: float | None = None,
        checkpoint_minutes: float = 4.0,
        dispatch: int = 20,
        workers: int = 0,
    ) -> None:
        """Train to the recipe's end or for ``minutes``, then save and export."""
        print(
            f"{count_params(self.cfg):,} parameters, step {self.step} of {self.recipe.steps}, "
            f"{jax.devices()[0].device_kind}",
            flush=True,
        )
        begin = saved = time.monotonic()
        batches = self._batches(dispatch, workers)
        self._forget_lines_after(self.step)
        with (self.out / "log.jsonl").open("a") as log:
            for stage, tokens, classes in batches:
                start = time.monotonic()
                state, metrics = train_steps(
                    self.state, tokens, classes, cfg=self.cfg, recipe=self.recipe, stage=stage
                )
                values = {name: float(x) for name, x in metrics._asdict().items()}
                self.state, self.step = state, self.step + len(tokens)
                self._report(log, stage, len(tokens), values, time.monotonic() - start)
                if not np.isfinite(values["loss"]):
                    raise ValueError(
                        f"the loss is {values['loss']} at step {self.step}; the last checkpoint "
                        "stays: lower --lr and start anew"
                    )
                now = time.monotonic()
                if minutes is not None and now - begin >= 60 * minutes:
                    break
                if now - saved >= 60 * checkpoint_minutes:
                    self.save()
                    saved = now
        batches.close()
        self.save()
        self.export()

    def save(self) -> None:
        """Write the state, then forget older ones."""
        folder = self.out / "state"
        before = self._saved()
        if self.step not in before:
            with ocp.StandardCheckpointer() as checkpointer:
                checkpointer.save(folder / str(self.step), self.state)
        for old in before:
            if old != self.step:
                shutil.rmtree(folder / str(old))

    def export(self) -> None:
        """Write the model so far as a release folder."""
        model = self.out / "model"
        if model.exists():
            shutil.rmtree(model)
        size = export_release(whole_params(self.state), self.cfg, model)
        print(f"step {self.step}: {size / 1e6:.2f} MB in {model}", flush=True)

    def _saved(self) -> list[int]:
        folder = self.out / "state"
        names = [p.name for p in folder.iterdir()] if folder.exists() else []
        return sorted(int(n) for n in names if n.isdigit())

    def _forget_lines_after(self, step: int) -> None:
        log = self.out / "log.jsonl"
        if log.exists():
            lines = [s for s in log.read_text().splitlines() if json.loads(s)["step"] <= step]
            log.write_text("".join(s + "\n" for s in lines))

    def _report(
        self, log: Any, stage: Stage, steps: int, values: dict[str, float], seconds: float
    ) -> None:
        rate = steps * stage.tokens / seconds
        line = {
            "step": self.step,
            "length": stage.length,
            "sparse": stage.sparse,
            "lr": float(self.recipe.schedule()(self.step)),
            **values,
            "tokens_per_second": rate,
            "model_flops_per_second": rate * flops_per_token(self.cfg, stage.length),
        }
        log.write(json.dumps(line) + "\n")
        log.flush()
        print(
            f"{self.step:6d} T={stage.length} {'sparse' if stage.sparse else 'dense '} "
            f"loss {values['loss']:.3f} ce {values['next_token']:.3f} mtp {values['mtp']:.3f} "
            f"kl {values['index']:.3f} mass {values['index_mass']:.2f} "
            f"answers {values['answers']:.3f} mtp answers {values['mtp_answers']:.3f} "
            f"balance {values['imbalance']:.2f} {rate / 1e3:.0f}K tokens/s "
            f"{line['model_flops_per_second'] / 1e12:.2f} TFLOP/s",
            flush=True,
        )

    def _batches(
        self, dispatch: int, workers: int
    ) -> Iterator[tuple[Stage, np.ndarray, np.ndarray]]:
        """The batches of each dispatch from the current step on; dispatches end with stages."""
        plan = []
        step = self.step
        while step < self.recipe.steps:
            stage, left = self.recipe.at(step)
            # Dispatches begin at multiples of their size within a stage, also after a resumption.
            count = min(left, dispatch - (stage.steps - left) % dispatch)
            plan.append((stage, step, count))
            step += count
        if not workers:
            for stage, step, count in plan:
                parts = [_batch(self.seed, s, stage, self.mixture) for s in range(step, step + count)]
                yield stage, *map(np.stack, zip(*parts, strict=True))
            return
        # A forked child of a process that runs JAX may hang; a spawned one starts clean.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(workers, context) as pool:
            queue: deque[tuple[Stage, list[Future]]] = deque()
            try:
                for stage, step, count in plan:
                    queue.append(
                        (
                            stage,
                            [
                                pool.submit(_batch, self.seed, s, stage, self.mixture)
                                for s in range(step, step + count)
                            ],
                        )
                    )
                    if len(queue) > 3:
                        yield _collected(queue.popleft())
                while queue:
                    yield _collected(queue.popleft())
            finally:
                pool.shutdown(wait=False, cancel_futures=True)


def _batch(seed: int, step: int, stage: Stage, mixture: Mixture) -> tuple[np.ndarray, np.ndarray]:
    return training_batch(seed, step, stage.rows, stage.length, mixture)


def _collected(job: tuple[Stage, list[Future]]) -> tuple[Stage, np.ndarray, np.ndarray]:
    stage, futures = job
    tokens, classes = zip(*(f.result() for f in futures), strict=True)
    return stage, np.stack(tokens), np.stack(classes)


if __name__ == "__main__":
    sys.exit(main())
