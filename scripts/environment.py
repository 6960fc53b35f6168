"""Where and with what a measurement was made: beside every figure in ``results/``."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import jax


def environment() -> dict[str, Any]:
    """Where and with what the numbers were made."""
    device = jax.devices()[0]
    hardware = device.device_kind
    if device.platform == "cpu":
        info = Path("/proc/cpuinfo")
        names = (
            [x for x in info.read_text().splitlines() if "model name" in x] if info.exists() else []
        )
        name = names[0].split(":")[1].strip() if names else platform.processor()
        hardware = f"{os.cpu_count()} cores, {name or platform.machine()}"
    git = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    here = Path(__file__).parent
    done = subprocess.run(git, capture_output=True, text=True, check=False, cwd=here)
    return {
        "hardware": hardware,
        "versions": {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "jaxlib": importlib.metadata.version("jaxlib"),
        },
        "commit": os.environ.get("SPIN_JAX_COMMIT") or done.stdout.strip(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
