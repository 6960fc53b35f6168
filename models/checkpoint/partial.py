"""The unfinished checkpoint beside its final place: locked, journalled, renamed when complete.

``OUT.partial/checkpoint`` grows file by file, ``OUT.partial/journal.jsonl`` names what is done: a
first line that says what is being written, then one line a tensor, appended once its files are on
the disk. A process killed at any moment leaves at worst an unjournalled tensor, which the next run
writes again, and a torn last line, which it drops. ``OUT`` itself appears by one rename.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

CHECKPOINT, JOURNAL = "checkpoint", "journal.jsonl"


def partial_folder(out: Path) -> Path:
    """Where the checkpoint ``out`` stands while it is unfinished."""
    return out.with_name(out.name + ".partial")


def check_destination(out: Path) -> None:
    """Make sure that a finished checkpoint can be renamed to ``out``.

    Raises:
        ValueError: something is there already, or it is a mount point, which no rename replaces.
    """
    if not out.name:
        raise ValueError(f"{out} cannot hold a checkpoint; name a folder that does not exist yet")
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise ValueError(f"{out} is not a folder; name one that does not exist yet")
    if out.is_dir():
        if any(out.iterdir()):
            holds = "a checkpoint" if (out / "_METADATA").exists() else "files"
            raise ValueError(
                f"{out} already holds {holds} and was left as it is; name another folder, or "
                "remove it first"
            )
        if out.is_mount():
            raise ValueError(f"{out} is a mount point; name a folder inside it")


class Partial:
    """An open, locked unfinished checkpoint. Made by :func:`open_partial`."""

    def __init__(self, out: Path, journal: BinaryIO, done: set[str]):
        self.out = out
        self.folder = partial_folder(out) / CHECKPOINT
        self.done = done
        self._journal = journal

    def record(self, name: str) -> None:
        """Note that the files of tensor ``name`` are complete and on the disk."""
        self._journal.write(json.dumps({"done": name}).encode() + b"\n")
        self._journal.flush()

    def finish(self) -> None:
        """Bring the folder to the disk and rename it to its final place.

        Raises:
            ValueError: something has appeared there in the meantime; the work is kept.
        """
        for folder in [*(p for p in self.folder.iterdir() if p.is_dir()), self.folder]:
            _sync_folder(folder)
        check_destination(self.out)
        try:
            # An empty folder at the destination is replaced.
            self.folder.rename(self.out)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                check_destination(self.out)
            raise
        _sync_folder(self.out.parent)
        shutil.rmtree(self.folder.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def open_partial(out: Path, purpose: Mapping[str, Any]) -> Iterator[Partial]:
    """Start an unfinished checkpoint, or go on with the one that an earlier run left.

    Args:
        purpose: what is being written, as JSON values; an earlier run must have had the same.

    Raises:
        ValueError: another process is writing it, or the earlier run had another purpose.
    """
    folder = partial_folder(out)
    busy = f"another process is writing {out}; wait for it to end, or name another folder"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        journal = (folder / JOURNAL).open("a+b")
    except FileNotFoundError as error:  # the other process finished at this very moment
        raise ValueError(busy) from error
    with journal:
        try:
            fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(busy) from error
        # The lock may be on the journal of a run that has finished since it was opened.
        if not _same_file(journal, folder / JOURNAL):
            raise ValueError(busy)
        check_destination(out)
        done = _replay(journal, folder, purpose)
        (folder / CHECKPOINT).mkdir(exist_ok=True)
        yield Partial(out, journal, done)


def _same_file(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _replay(journal: BinaryIO, folder: Path, purpose: Mapping[str, Any]) -> set[str]:
    """Names that the journal says are done; a torn last line is cut off, an empty one begun."""
    journal.seek(0)
    content = journal.read()
    whole = content[: content.rfind(b"\n") + 1]
    journal.truncate(len(whole))
    lines = whole.splitlines()
    if len(lines) <= 1:  # nothing is done, so it can as well be begun for another purpose
        shutil.rmtree(folder / CHECKPOINT, ignore_errors=True)
        journal.truncate(0)
        journal.write(json.dumps(dict(purpose)).encode() + b"\n")
        journal.flush()
        os.fsync(journal.fileno())
        return set()
    try:
        before, *records = map(json.loads, lines)
        done = {record["done"] for record in records}
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{folder / JOURNAL} is corrupt; remove {folder} and start again"
        ) from error
    differing = [k for k in purpose if not isinstance(before, dict) or before.get(k) != purpose[k]]
    if differing:
        was = before.get(differing[0]) if isinstance(before, dict) else before
        raise ValueError(
            f"{folder} was begun with another {' and '.join(differing)} ({was!r}, now "
            f"{purpose[differing[0]]!r}); run with the same again to go on, or remove it to start "
            "anew"
        )
    return done
