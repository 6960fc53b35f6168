"""Expected outputs from the transformers library: for the repository's variants or any folder.

Needs an environment of its own, ``pip install torch==2.13.0 transformers safetensors numpy``:

    python tests/oracle/make_variants.py --all                      # tests/golden/variants/*.npz
    python tests/oracle/make_variants.py --variant csa_only --seed 7 --out expected.npz
    python tests/oracle/make_variants.py --folder DIR --ids ids.npy --out expected.npz
    python tests/oracle/make_variants.py --check DIR                # against DIR/oracle.safetensors
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
import variants
from safetensors.numpy import load_file
from torch_model import Oracle

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "variants"
LEAST_MARGIN = 3e-5
"""Choices closer than this may turn over with float32 rounding."""


def expected(folder: Path, ids: np.ndarray, *, simulate: bool = False) -> dict[str, np.ndarray]:
    oracle = Oracle(folder)
    tokens = torch.from_numpy(ids.astype(np.int64))
    found = {k: v.numpy() for k, v in oracle.run(tokens).items()}
    margins = np.array([oracle.slot_margin, oracle.expert_margin])
    if simulate:
        found["logits_quant_sim"] = oracle.run(tokens, simulate=True)["logits"].numpy()
    return {"ids": ids, "margins": margins, **found}


def variant(name: str, seed: int, *, simulate: bool = False) -> dict[str, np.ndarray]:
    """The variant's outputs with the first seed from ``seed`` on without a close choice."""
    while True:
        with tempfile.TemporaryDirectory() as folder:
            checksum = variants.write_release(name, seed, Path(folder))
            found = expected(Path(folder), variants.ids(name, seed), simulate=simulate)
        print(f"{name}: seed {seed}, least gap of slots and experts {found['margins']}")
        if found["margins"].min() > LEAST_MARGIN:
            return {"seed": np.array(seed), "checksum": np.array(checksum), **found}
        seed += 1


def check(folder: Path) -> None:
    """Compare with a published golden folder."""
    golden = load_file(folder / "oracle.safetensors")
    found = expected(folder, golden["ids"], simulate="logits_quant_sim" in golden)
    for key in ("logits", "mtp_logits"):
        print(f"{key}: largest difference {np.abs(found[key] - golden[key]).max():.3g}")
    for key in [k for k in found if k.startswith("slots_")]:
        name = f"layer{key.removeprefix('slots_')}_topk_slots"
        if name in golden:
            width = found[key].shape[-1]
            same = (found[key] == golden[name][..., :width]).all(-1).mean()
            print(f"{name}: equal at {same:.2%} of positions")
    if "logits_quant_sim" in found:
        same = found["logits_quant_sim"].argmax(-1) == golden["logits_quant_sim"].argmax(-1)
        print(f"logits_quant_sim: greedy token equal at {same.mean():.2%} of positions")
    print(f"least gap of slots and experts {found['margins']}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--variant", choices=list(variants.VARIANTS))
    parser.add_argument("--seed", type=int)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--ids", type=Path)
    parser.add_argument("--check", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.all:
        GOLDEN.mkdir(parents=True, exist_ok=True)
        for name, (seed, *_) in variants.VARIANTS.items():
            found = variant(name, seed, simulate=name == "reference_sizes")
            np.savez_compressed(GOLDEN / f"{name}.npz", **found)
    elif args.check:
        check(args.check)
    elif args.variant and args.out:
        seed = variants.VARIANTS[args.variant][0] if args.seed is None else args.seed
        np.savez(args.out, **variant(args.variant, seed))
    elif args.folder and args.ids and args.out:
        np.savez(args.out, **expected(args.folder, np.load(args.ids)))
    else:
        parser.error("give --all, --check, --variant with --out, or --folder with --ids and --out")


if __name__ == "__main__":
    main()
