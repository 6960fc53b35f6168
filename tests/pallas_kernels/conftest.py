"""Shared inputs on the path, and a record of the runs on a GPU."""

import datetime
import json
import os
import subprocess
import sys
from pathlib import Path

import jax

sys.path.insert(0, str(Path(__file__).parent))


def pytest_sessionfinish(session, exitstatus):
    """Writes what ran where to the file that SPIN_JAX_GPU_RECORD names."""
    path = os.environ.get("SPIN_JAX_GPU_RECORD")
    if not path:
        return
    commit = (
        os.environ.get("SPIN_JAX_COMMIT")
        or subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
    )
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    outcomes = {name: len(reporter.stats.get(name, [])) for name in ("passed", "failed", "error")}
    record = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": "SPIN_JAX_TEST_GPU=1 python -m pytest -m gpu tests/pallas_kernels",
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "python": sys.version.split()[0],
        "commit": commit,
        **outcomes,
        "green": exitstatus == 0,
    }
    Path(path).write_text(json.dumps(record, indent=2) + "\n")
