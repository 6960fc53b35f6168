"""The main job on a small random model: write a release, convert it, score it, generate from it.

The weights are random, so the text is noise; every file, command and code path is the real one.
"""

from __future__ import annotations

import shlex
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np

import convert  # isort: skip
import generate  # isort: skip
import make_checkpoint  # isort: skip
import score  # isort: skip

PROMPT = "Attention scores every block of a long context. Most of them do not matter. " * 4


def main() -> int:
    """Run the steps; returns the exit code of the first that fails, or 0."""
    folder = Path(tempfile.mkdtemp(prefix="spin-jax-demo-"))
    try:
        ids = folder / "ids.npy"
        np.save(ids, np.frombuffer(PROMPT.encode(), np.uint8)[None, :96].astype(np.int32))
        release, model = str(folder / "release"), str(folder / "model")
        chat = ["--checkpoint", model, "--prompt", PROMPT, "--max-new-tokens", "64"]
        chat += ["--ignore-eos", "--json"]
        for command, arguments in (
            (make_checkpoint, ["--preset", "tiny", "--layers", "4", "--out", release]),
            (convert, ["--hf", release, "--out", model, "--dtype", "float32"]),
            (
                score,
                ["--checkpoint", model, "--ids", str(ids), "--out", str(folder / "scores.npz")],
            ),
            (generate, chat),
            (generate, [*chat, "--sparsity", "0.4", "--block-size", "4"]),
        ):
            shown = shlex.join(a.replace(str(folder), "DEMO") for a in arguments)
            print(f"\n$ python scripts/{command.__name__}.py {shown}", flush=True)
            code = command.main(arguments)
            if code:
                return code
    finally:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
