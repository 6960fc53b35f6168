"""CPU with eight virtual devices, strict promotion of ranks and full matmul precision."""

import os
import sys
from pathlib import Path

if "SPIN_JAX_TEST_GPU" not in os.environ:
    os.environ["JAX_PLATFORMS"] = "cpu"
    # Most programs run a few times at most, so quick machine code is worth less than quick
    # compilation; what XLA itself optimises stays as users have it.
    os.environ["XLA_FLAGS"] = (
        f"--xla_backend_optimization_level=0 {os.environ.get('XLA_FLAGS', '')} "
        "--xla_force_host_platform_device_count=8"
    )

import jax
import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests")]

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")


def pytest_collection_modifyitems(config, items):
    """Leave ``slow`` and ``gpu`` tests out unless -m asks for them."""
    expression = config.getoption("-m")
    for item in items:
        for marker in ("slow", "gpu"):
            if item.get_closest_marker(marker) and marker not in expression:
                item.add_marker(pytest.mark.skip(reason=f"run with -m {marker}"))
