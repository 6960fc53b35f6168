"""The all-keep indexer in compiled PyTorch with ``torch.topk``, timed with CUDA events.

As a program it prints one JSON line; ``run`` runs it in a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any


def run(batches: list[int], slots: int, top_k: int) -> dict[str, Any] | None:
    """PyTorch's version and rows; None where it is not installed or fails."""
    command = [sys.executable, __file__, json.dumps(batches), str(slots), str(top_k)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    if done.returncode:
        print("no PyTorch rows:", done.stderr.strip().splitlines()[-1:])
        return None
    return json.loads(done.stdout.strip().splitlines()[-1])


def main(batches: list[int], slots: int, top_k: int) -> None:
    import torch  # pyright: ignore[reportMissingImports]

    def scores(q, w, keys):
        dots = torch.einsum("bnx,bsx->bns", q, keys)
        return (torch.relu(dots.float()) * w[..., None]).sum(1)

    compiled = torch.compile(scores)

    def timed(call):
        for _ in range(5):
            call()
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(20)]
        for start, end in pairs:
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return sorted(start.elapsed_time(end) for start, end in pairs)[10] * 1e3

    rows = []
    for batch in batches:
        q = torch.randn(batch, 64, 128, device="cuda", dtype=torch.bfloat16)
        keys = torch.randn(batch, slots, 128, device="cuda", dtype=torch.bfloat16)
        w = torch.randn(batch, 64, device="cuda")
        z = compiled(q, w, keys)
        times = {
            "score": timed(lambda q=q, w=w, keys=keys: compiled(q, w, keys)),
            "top_k": timed(lambda z=z: torch.topk(z, top_k)),
            "total": timed(
                lambda q=q, w=w, keys=keys: torch.topk(compiled(q, w, keys), top_k).indices
            ),
        }
        rows += [
            {"stage": stage, "impl": "torch", "keys": "bf16", "sparsity": 0.0, "batch": batch,
             "slots": slots, "us": round(us, 1)} for stage, us in times.items()
        ]  # fmt: skip
        del q, keys, w, z
    print(json.dumps({"torch": torch.__version__, "rows": rows}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
