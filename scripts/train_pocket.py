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
from collections.abc import Generator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
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

STAGES = "512x64x6000d,2048x16x2000d,8192x4x800d,8192x4x1800s"
TOY_STAGES = "128x8x24d,128x8x8s"
EXAMPLES = """examples:
  JAX_COMPILATION_CACHE_DIR=runs/compiled python scripts/train_pocket.py --out runs/pocket \\
      --minutes 9
  python scripts/train_pocket.py --out runs/toy --toy

The same command goes on from where the last call stopped; OUT/model is the model so far,
OUT/log.jsonl the losses. Stages are LENGTHxROWSxSTEPS with d (all slots attended, which warms the
indexers up) or s (top K slots); --scale multiplies their steps.
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
    parser.add_argument("--dispatch", type=int, metavar="N", help="steps at a time (20; toy 4)")
    parser.add_argument("--workers", type=int, metavar="N", help="processes that make data")
    args = parser.parse_args(argv)
    return command.run(lambda: _train(args))


def _train(args: argparse.Namespace) -> None:
    dispatch = (4 if args.toy else 20) if args.dispatch is None else args.dispatch
    if dispatch < 1 or args.scale <= 0 or args.seed < 0:
        raise ValueError(
            f"--dispatch {dispatch} and --scale {args.scale} must be positive, --seed "
            f"{args.seed} not negative"
        )
    cfg = toy_config() if args.toy else pocket_config()
    stages = parse_stages(args.stages or (TOY_STAGES if args.toy else STAGES))
    # Whole dispatches: a shorter one at a stage's end would be another program to compile.
    steps = [max(1, round(s.steps * args.scale / dispatch)) * dispatch for s in stages]
    recipe = Recipe(
        tuple(dataclasses.replace(s, steps=n) for s, n in zip(stages, steps, strict=True)),
        lr=args.lr,
        compute=args.dtype or ("float32" if args.toy else "bfloat16"),
    )
    out = Path(os.path.abspath(args.out))
    out.mkdir(parents=True, exist_ok=True)
    run = Run(cfg, recipe, args.seed, SINGLE_ONLY if args.single else MIXED, out)
    workers = 0 if args.toy else max(1, min(12, (os.cpu_count() or 1) - 2))
    run.train(
        minutes=args.minutes,
        checkpoint_minutes=args.checkpoint_minutes,
        dispatch=dispatch,
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
        programs = Programs(self.cfg, self.recipe, self.state)
        self._forget_lines_after(self.step)
        with (self.out / "log.jsonl").open("a") as log:
            for stage, tokens, classes in batches:
                program = programs.get(stage, len(tokens))
                start = time.monotonic()
                rates = self.recipe.rates(self.step, len(tokens))
                state, metrics = program(self.state, tokens, classes, rates)
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
            "lr": float(self.recipe.rates(self.step - 1, 1)[0]),
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
    ) -> Generator[tuple[Stage, np.ndarray, np.ndarray], None, None]:
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
                steps = range(step, step + count)
                parts = [_batch(self.seed, s, stage, self.mixture) for s in steps]
                tokens, classes = zip(*parts, strict=True)
                yield stage, np.stack(tokens), np.stack(classes)
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


_PROGRAMS: dict[tuple, Future] = {}
"""Shared by all runs of a process."""


class Programs:
    """The training step compiled for each stage, the next stage's while this one trains."""

    def __init__(self, cfg: ModelConfig, recipe: Recipe, state: TrainState) -> None:
        self._cfg, self._recipe = cfg, recipe
        self._state = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
        self._pool = ThreadPoolExecutor(1)

    def get(self, stage: Stage, steps: int) -> Any:
        """The program of ``steps`` steps; those of the stage after it begin to compile."""
        program = self._start(stage, steps)
        stages = self._recipe.stages
        following = stages.index(stage) + 1
        if following < len(stages):
            self._start(stages[following], min(steps, stages[following].steps))
        return program.result()

    def _start(self, stage: Stage, steps: int) -> Future:
        options = (self._cfg, self._recipe.compute, self._recipe.weight_decay)
        name = (stage.length, stage.rows, stage.sparse, steps, *options)
        if name not in _PROGRAMS:
            _PROGRAMS[name] = self._pool.submit(self._compile, stage, steps)
        return _PROGRAMS[name]

    def _compile(self, stage: Stage, steps: int) -> Any:
        batch = jax.ShapeDtypeStruct((steps, stage.rows, stage.length), np.uint8)
        return train_steps.lower(
            self._state,
            batch,
            batch,
            jax.ShapeDtypeStruct((steps,), np.float32),
            cfg=self._cfg,
            sparse=stage.sparse,
            compute=self._recipe.compute,
            weight_decay=self._recipe.weight_decay,
        ).compile()


def _batch(seed: int, step: int, stage: Stage, mixture: Mixture) -> tuple[np.ndarray, np.ndarray]:
    return training_batch(seed, step, stage.rows, stage.length, mixture)


def _collected(job: tuple[Stage, list[Future]]) -> tuple[Stage, np.ndarray, np.ndarray]:
    stage, futures = job
    tokens, classes = zip(*(f.result() for f in futures), strict=True)
    return stage, np.stack(tokens), np.stack(classes)


if __name__ == "__main__":
    sys.exit(main())
