"""Device times: loops of dependent steps inside one jit, and kernel durations of the profiler."""

from __future__ import annotations

import glob
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

Step = Callable[..., Any]


def lower_loop(step: Step, state: Any, arguments: Any, *, iterations: int, unroll: int) -> Any:
    """``state, arguments -> state``: ``step(i, state, *arguments)`` again and again, to compile.

    ``i`` counts the steps, so that no step is the same computation as another.
    """
    step = jax.jit(step)  # lowered once, however often it is unrolled

    def loop(state, arguments):
        def body(i, state):
            for part in range(unroll):
                state = step(i * unroll + part, state, *arguments)
            return state

        return jax.lax.fori_loop(0, iterations // unroll, body, state)

    return jax.jit(loop, donate_argnums=0).lower(state, arguments)


def time_loop(loop: Any, state: Any, arguments: Any, *, iterations: int, repeats: int) -> float:
    """The median microseconds of a step; the state that is passed in is used up."""
    state = jax.block_until_ready(loop(state, arguments))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        state = jax.block_until_ready(loop(state, arguments))
        times.append((time.perf_counter() - start) / iterations)
    return float(np.median(times)) * 1e6


def time_kernels(function: Callable[..., Any], *arguments: Any, repeats: int = 9) -> float:
    """Microseconds of one call: the sum of the medians of its kernels' durations.

    Each call has finished before the next starts, so no kernel's time includes waiting for another.
    """
    call = jax.jit(function)
    jax.block_until_ready(call(*arguments))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(repeats):
                jax.block_until_ready(call(*arguments))
        [file] = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        data = jax.profiler.ProfileData.from_file(file)
    durations = defaultdict(list)
    for plane in data.planes:
        for line in plane.lines if "GPU" in plane.name else ():
            for event in line.events if "Stream" in line.name else ():
                durations[event.name].append(event.duration_ns / 1e3)
    return sum(float(np.median(d)) * len(d) / repeats for d in durations.values())
