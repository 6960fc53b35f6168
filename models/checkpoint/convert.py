"""Release folder to Orbax checkpoint, tensor by tensor.

Memory stays at a few tiles a worker, whatever the model's size: each tensor is read, decoded and
written in tiles of rows. A run that was killed goes on where it stopped.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import islice
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from models.checkpoint import layout
from models.checkpoint.partial import Partial, check_destination, open_partial, partial_folder
from models.checkpoint.release import Release, Unit, open_release

DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}
"""Types that weights can have in memory and in a checkpoint."""
COMPANIONS = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
"""Files copied along when a release has them."""

_FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclasses.dataclass(frozen=True)
class Report:
    """What a conversion did. ``tensors`` counts release tensors less their scales, ``resumed``
    those among them that an earlier run had finished; ``bytes`` is what the checkpoint's arrays
    take on disk; ``seconds`` is of this run."""

    out: str
    dtype: str
    tensors: int
    resumed: int
    bytes: int
    seconds: float


def float_type(dtype: Any) -> np.dtype:
    """The numpy type for a name of :data:`DTYPES`, or for such a type itself.

    Raises:
        ValueError: it is another.
    """
    try:
        found = next((d for n, d in DTYPES.items() if dtype == n or d == np.dtype(dtype)), None)
    except TypeError:  # not a type at all
        found = None
    if found is None:
        raise ValueError(f"dtype {dtype!r} is not supported; allowed are {', '.join(DTYPES)}")
    return found


def convert(
    src: str | Path,
    out: str | Path,
    dtype: Any = "bfloat16",
    *,
    progress: Callable[[int, int], None] | None = None,
    workers: int | None = None,
) -> Report:
    """Decode the release in folder ``src`` into an Orbax checkpoint at ``out``.

    Every weight becomes ``dtype``, except what the architecture keeps in float32 and the expert
    ids, which become int32. The tree is that of :func:`models.params.param_specs`; ``config.json``
    and the tokenizer's files are copied into the folder. An unfinished run leaves
    ``<out>.partial``, which loads as nothing and from which the same call goes on.

    Args:
        dtype: ``"bfloat16"`` or ``"float32"``, by name or as a type.
        progress: called with (bytes done, bytes in all), at the start and after each tensor.
        workers: threads that decode and write; one a core, at most 4, by default.

    Raises:
        ValueError: the release is incomplete or corrupt (see :func:`~release.open_release`),
            ``out`` is not empty or is being written by another process, an unfinished run had
            another source or dtype, or the disk is too small.
    """
    begin = time.perf_counter()
    kind = float_type(dtype)
    # Not resolve(): a symbolic link at the destination itself is to be refused, not followed.
    out = Path(os.path.abspath(out))
    check_destination(out)
    release = open_release(src)
    purpose = {"source": _fingerprint(release), "dtype": kind.name}
    job = _Job(release, kind, progress)
    try:
        with open_partial(out, purpose) as partial:
            job.resume(partial)
            free = shutil.disk_usage(out.parent).free
            if job.missing > free:
                raise ValueError(
                    f"{out} needs {job.missing} more bytes, {out.parent} has {free} free: free "
                    f"{job.missing - free} bytes or choose another disk"
                )
            job.run(partial, workers or min(4, os.cpu_count() or 1))
            job.finish(partial)
    except OSError as error:
        if error.errno not in _FULL_DISK:
            raise
        raise ValueError(
            f"the disk is full ({error}): {out} needs {job.missing} more bytes; what is finished "
            f"is kept in {partial_folder(out)}: make room and run the same command again"
        ) from error
    seconds = time.perf_counter() - begin
    return Report(str(out), kind.name, len(release.units), job.resumed, job.total, seconds)


def _fingerprint(release: Release) -> str:
    """Changes whenever a file of the release does, as far as that shows without reading it all."""
    digest = hashlib.sha256((release.folder / layout.CONFIG_NAME).read_bytes())
    for file in release.files:
        state = file.stat()
        digest.update(f"{file.name} {state.st_size} {state.st_mtime_ns}\n".encode())
    return digest.hexdigest()


class _Job:
    """The tensors that are still to do."""

    def __init__(
        self, release: Release, dtype: np.dtype, progress: Callable[[int, int], None] | None
    ):
        self.release, self.dtype = release, dtype
        self.progress = progress or (lambda done, total: None)
        self.pending = list(release.units)
        self.total = self.missing = sum(map(self._bytes, release.units))
        self.resumed = 0

    def _dtype(self, unit: Unit) -> np.dtype:
        return np.dtype(unit.spec.dtype(self.dtype))

    def _bytes(self, unit: Unit) -> int:
        stored = layout.stored_bytes(unit.spec, self._dtype(unit))
        return stored if unit.expert is None else stored // unit.spec.shape[0]

    def resume(self, partial: Partial) -> None:
        """Drop what an earlier run has done."""

        def done(unit: Unit) -> bool:
            # The sizes matter after a power cut, which may lose files that the journal names.
            folder = partial.folder / layout.leaf_name(unit.path)
            return unit.name in partial.done and not layout.missing_files(
                folder, unit.spec, self._dtype(unit), unit.expert
            )

        self.pending = [unit for unit in self.pending if not done(unit)]
        self.missing = sum(map(self._bytes, self.pending))
        self.resumed = len(self.release.units) - len(self.pending)

    def run(self, partial: Partial, workers: int) -> None:
        """Convert all pending tensors; the first error ends the run."""
        self.progress(self.total - self.missing, self.total)
        queue = iter(self.pending)
        with ThreadPoolExecutor(workers) as pool:

            def submit(count: int) -> set[Future[Unit]]:
                return {pool.submit(self._convert, unit, partial) for unit in islice(queue, count)}

            # Few at a time, so that an error or Ctrl-C does not wait for the whole queue.
            running = submit(2 * workers)
            while running:
                finished, running = wait(running, return_when=FIRST_COMPLETED)
                for future in finished:
                    unit = future.result()
                    partial.record(unit.name)
                    self.missing -= self._bytes(unit)
                    self.progress(self.total - self.missing, self.total)
                running |= submit(len(finished))

    def _convert(self, unit: Unit, partial: Partial) -> Unit:
        folder, dtype = partial.folder / layout.leaf_name(unit.path), self._dtype(unit)
        folder.mkdir(exist_ok=True)
        experts = self.release.cfg.n_routed_experts
        layout.write_values(
            folder,
            unit.spec,
            dtype,
            unit.expert,
            lambda start, stop: unit.rows(start, stop, dtype, experts),
        )
        return unit

    def finish(self, partial: Partial) -> None:
        """Add what makes the folder a checkpoint, last of all the tree's metadata."""
        source = self.release.folder
        names = [n for n in (layout.CONFIG_NAME, *COMPANIONS) if (source / n).is_file()]
        files = {name: (source / name).read_bytes() for name in names}
        layout.write_metadata(partial.folder, self.release.cfg, self.dtype, files)
        partial.finish()
