"""scripts/make_checkpoint.py and scripts/convert.py as a user runs them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import convert
import make_checkpoint
import pytest

from models.checkpoint import load_checkpoint
from models.config import ModelConfig

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--preset", "tiny", "--layers", "3", "--experts", "2"]


def test_make_then_convert_then_load(tmp_path, capsys):
    hf, out = str(tmp_path / "hf"), str(tmp_path / "out")
    assert make_checkpoint.main([*SMALL, "--out", hf, "--shard-bytes", "300000", "--json"]) == 0
    made = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (made["layers"], made["experts"], made["out"]) == (3, 2, hf)
    shards = list((tmp_path / "hf").glob("model-*.safetensors"))
    assert len(shards) > 2 and sum(p.stat().st_size for p in shards) > made["bytes"]
    assert convert.main(["--hf", hf, "--out", out, "--dtype", "float32", "--json"]) == 0
    done = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(done) == {"out", "dtype", "tensors", "resumed", "bytes", "seconds"}
    assert (done["out"], done["dtype"], done["resumed"]) == (out, "float32", 0)
    params, cfg = load_checkpoint(out)
    assert cfg == ModelConfig.load(hf)
    assert params["embed"].dtype == "float32"


def test_errors_are_one_line_and_exit_code_2(tmp_path, capsys):
    hf = str(tmp_path / "hf")
    (tmp_path / "file").touch()
    for argv, message in (
        ([*SMALL, "--out", str(tmp_path)], f"error: {tmp_path} already holds files"),
        ([*SMALL[:2], "--out", hf, "--experts", "99"], "error: experts must be 1 to 8"),
        ([*SMALL, "--out", hf, "--shard-bytes", "0"], "error: shard_bytes must be positive"),
    ):
        assert make_checkpoint.main(argv) == 2
        assert capsys.readouterr().err.splitlines()[-1].startswith(message)
    assert convert.main(["--hf", hf, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error == f"error: {hf} is not a folder; expected a release's files in it"


@pytest.mark.parametrize("script", ["convert.py", "make_checkpoint.py"])
def test_help_has_examples(script):
    """In a process of its own, from another folder: the script finds the packages by itself."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / script), "--help"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert "examples:" in done.stdout and f"python scripts/{script} --" in done.stdout
