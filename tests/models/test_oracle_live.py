"""Freshly drawn weights through the transformers library and through this one.

Needs ``SPIN_JAX_ORACLE_PYTHON``, a python with torch, transformers, safetensors and numpy. The
seed is new in every run; a failure names it, and ``SPIN_JAX_ORACLE_SEED`` sets it.
"""

import os
import subprocess
import time

import numpy as np
import pytest
from oracle_cases import TESTS, assert_whole_prompt, load_case

PYTHON = os.environ.get("SPIN_JAX_ORACLE_PYTHON")


@pytest.mark.skipif(
    PYTHON is None,
    reason="set SPIN_JAX_ORACLE_PYTHON to a python that has torch and transformers",
)
@pytest.mark.parametrize("name", ["csa_only", "pro_order", "unnormalised"])
def test_fresh_weights(name, tmp_path):
    seed = int(os.environ.get("SPIN_JAX_ORACLE_SEED", time.time_ns() % 10**9))
    print(f"SPIN_JAX_ORACLE_SEED={seed}")
    out = tmp_path / "expected.npz"
    script = str(TESTS / "oracle" / "make_variants.py")
    command = [PYTHON, script, "--variant", name, "--seed", str(seed), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with np.load(out) as file:
        expected = dict(file)
    assert_whole_prompt(load_case(name, expected, tmp_path / "release"))
