"""Conversions that are killed, run twice, run out of disk; and how much memory they take."""

import collections
import dataclasses
import errno
import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoint_cases import folder_bytes, small_release

from models.checkpoint import convert, load_checkpoint
from models.checkpoint.partial import partial_folder
from models.checkpoint.random_release import write_random_release
from models.presets import shrink, tiny_config

ROOT = Path(__file__).resolve().parents[2]

# Kills its own process just before the n-th thing that it would do to the disk (create, sync,
# rename or remove), or before the first that has a given name. Forks for each kill, because
# importing takes seconds.
KILLER = """
import os, signal, sys
from models.checkpoint import convert

src, out, *points = sys.argv[1:]
steps = 0

def step(name):
    global steps
    steps += 1
    if point in (str(steps), name):
        os.kill(os.getpid(), signal.SIGKILL)

def hook(event, args):
    if event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR):
        step(os.path.basename(args[0]))
    elif event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir"):
        step(event)

real_fsync = os.fsync
def fsync(descriptor):
    step("sync")
    real_fsync(descriptor)

for point in points:
    pid = os.fork()
    if not pid:
        os.fsync = fsync
        sys.addaudithook(hook)
        report = convert(src, out, workers=1)
        print("resumed", report.resumed, flush=True)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    print("killed" if os.WIFSIGNALED(status) else "ended", os.path.exists(out), flush=True)
"""


def _run(code, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module", autouse=True)
def _no_waiting_for_the_disk():
    """Most of a small conversion is fsync, and nothing here cuts the power."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    folder = tmp_path_factory.mktemp("release") / "hf"
    small_release(folder)
    return folder


@pytest.fixture(scope="module")
def whole(release, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "out"
    return out, convert(release, out)


def _interrupt(release, out, share=0.5, **options):
    """Convert until a share of the bytes is done; leaves the unfinished folder."""

    def stop(done, total):
        if done > share * total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(release, out, progress=stop, **options)
    assert partial_folder(out).exists() and not out.exists()


def test_killed_at_many_moments_and_run_again(release, whole, tmp_path):
    """Each run goes on where the last one was killed, up to the step before the rename."""
    out = tmp_path / "out"
    points = [*range(1, 10), 60, 61, 62, 63, 101, 202]
    names = ["config.json", "_CHECKPOINT_METADATA", "_METADATA", "os.rename"]
    lines = _run(KILLER, release, out, *points, *names, "never")
    assert lines[:-2] == ["killed False"] * (len(points) + len(names))
    assert lines[-2:] == [f"resumed {whole[1].tensors}", "ended True"]
    assert folder_bytes(out) == folder_bytes(whole[0])
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_killed_in_the_middle_nothing_can_be_loaded(release, whole, tmp_path):
    out = tmp_path / "out"
    assert _run(KILLER, release, out, "150") == ["killed False"]
    with pytest.raises(ValueError, match="no checkpoint.*out.partial is an unfinished.*--out"):
        load_checkpoint(out)
    for folder in (partial_folder(out), partial_folder(out) / "checkpoint"):
        with pytest.raises(ValueError, match="is an unfinished conversion; run convert.py"):
            load_checkpoint(folder)
    assert not (partial_folder(out) / "checkpoint" / "_METADATA").exists()
    report = convert(release, out)
    assert 0 < report.resumed < report.tensors
    assert folder_bytes(out) == folder_bytes(whole[0])


def test_killed_after_the_rename_it_is_finished(release, whole, tmp_path):
    out = tmp_path / "out"
    assert _run(KILLER, release, out, "os.remove") == ["killed True"]
    assert folder_bytes(out) == folder_bytes(whole[0])
    load_checkpoint(out)
    with pytest.raises(ValueError, match="already holds a checkpoint"):
        convert(release, out)
    # What is left beside it does no harm to a later conversion.
    shutil.rmtree(out)
    convert(release, out)
    assert folder_bytes(out) == folder_bytes(whole[0])
    assert not partial_folder(out).exists()


def test_files_lost_in_a_power_cut_are_written_again(release, whole, tmp_path):
    out = tmp_path / "out"
    _interrupt(release, out)
    (partial_folder(out) / "checkpoint" / "embed" / "0.0").unlink()
    (partial_folder(out) / "checkpoint" / "head" / "0.0").write_bytes(b"")
    with (partial_folder(out) / "journal.jsonl").open("ab") as journal:
        journal.write(b'{"done": "layers.0.at')
    report = convert(release, out)
    assert 0 < report.resumed < report.tensors
    assert folder_bytes(out) == folder_bytes(whole[0])


def test_an_unfinished_run_goes_on_only_with_the_same(release, whole, tmp_path):
    hf, out = tmp_path / "hf", tmp_path / "out"
    shutil.copytree(release, hf)
    _interrupt(hf, out)
    before = folder_bytes(partial_folder(out))
    with pytest.raises(ValueError, match="begun with another dtype .'bfloat16', now 'float32'"):
        convert(hf, out, "float32")
    times = os.stat(hf / "model.safetensors")
    os.utime(hf / "model.safetensors", ns=(times.st_atime_ns, times.st_mtime_ns + 1))
    with pytest.raises(ValueError, match="begun with another source .*remove it to start anew"):
        convert(hf, out)
    os.utime(hf / "model.safetensors", ns=(times.st_atime_ns, times.st_mtime_ns))
    assert folder_bytes(partial_folder(out)) == before
    journal = partial_folder(out) / "journal.jsonl"
    journal.write_text(journal.read_text().replace("done", "dune"))
    with pytest.raises(ValueError, match="journal.jsonl is corrupt; remove"):
        convert(hf, out)
    journal.write_bytes(before["journal.jsonl"])
    assert convert(hf, out).resumed
    assert folder_bytes(out) == folder_bytes(whole[0])


def test_two_conversions_at_once(release, tmp_path):
    out = tmp_path / "out"
    _interrupt(release, out)
    with (partial_folder(out) / "journal.jsonl").open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="another process is writing .*out; wait"):
            convert(release, out)
    assert convert(release, out).resumed


def test_progress_counts_every_byte_once(release, whole, tmp_path):
    calls = []
    _interrupt(release, tmp_path / "out", workers=1)
    convert(release, tmp_path / "out", progress=lambda *call: calls.append(call))
    done, totals = zip(*calls, strict=True)
    assert set(totals) == {whole[1].bytes}
    assert 0 < done[0] < done[-1] == whole[1].bytes
    assert list(done) == sorted(done)


Usage = collections.namedtuple("Usage", "total used free")


def test_too_little_room_is_said_before_anything_is_written(release, tmp_path, monkeypatch, whole):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**9, 10**9 - 1000, 1000))
    message = f"needs {whole[1].bytes} more bytes, .* has 1000 free"
    with pytest.raises(ValueError, match=message):
        convert(release, tmp_path / "out")
    assert not list((partial_folder(tmp_path / "out") / "checkpoint").iterdir())
    monkeypatch.undo()
    # As nothing was done, another type may be chosen.
    assert convert(release, tmp_path / "out", "float32").resumed == 0


def test_disk_full_in_the_middle(release, whole, tmp_path, monkeypatch):
    real, calls = os.fsync, []

    def fsync(descriptor):
        calls.append(descriptor)
        if len(calls) > 50:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(ValueError, match=r"disk is full.*needs \d+ more bytes.*kept in .*partial"):
        convert(release, tmp_path / "out")
    monkeypatch.undo()
    assert not (tmp_path / "out").exists()
    assert convert(release, tmp_path / "out").resumed >= 40
    assert folder_bytes(tmp_path / "out") == folder_bytes(whole[0])


FILE_LIMIT = """
import resource, sys
from models.checkpoint import convert
src, out = sys.argv[1:]
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
try:
    convert(src, out)
except ValueError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
print(convert(src, out).tensors)
"""


def test_the_system_refusing_to_write_more(release, whole, tmp_path):
    """A limit on file sizes: the write itself fails, as on a full disk or quota."""
    error, tensors = _run(FILE_LIMIT, release, tmp_path / "out")
    assert "disk is full" in error and "run the same command again" in error
    assert int(tensors) == whole[1].tensors
    assert folder_bytes(tmp_path / "out") == folder_bytes(whole[0])


MEMORY = """
import sys
from models.checkpoint import convert

def peak():
    with open("/proc/self/status") as status:
        return int(next(line for line in status if line.startswith("VmHWM")).split()[1]) * 1024

before = peak()
report = convert(sys.argv[1] + "/hf", sys.argv[1] + "/out", "float32", workers=2)
print(report.bytes, peak() - before)
"""


def _memory(folder, hidden, width, experts, vocab):
    """Bytes that a conversion wrote, and bytes of memory that it took."""
    cfg = dataclasses.replace(
        shrink(tiny_config(), layers=1),
        hidden_size=hidden,
        moe_intermediate_size=width,
        n_routed_experts=experts,
        vocab_size=vocab,
    )
    write_random_release(cfg, folder / "hf", shard_bytes=1 << 28)
    written, grown = map(int, _run(MEMORY, folder)[0].split())
    shutil.rmtree(folder)
    return written, grown


def test_memory_does_not_grow_with_the_checkpoint(tmp_path):
    """0.67 GB of experts, embedding and head."""
    written, grown = _memory(tmp_path, 1024, 512, 40, 20_000)
    assert written > 600e6
    assert grown < 250e6


@pytest.mark.slow
def test_memory_of_a_larger_checkpoint(tmp_path):
    written, grown = _memory(tmp_path, 2048, 2048, 64, 100_000)
    assert written > 4e9
    assert grown < 250e6
