"""Device times: loops of dependent steps inside one jit, and kernel durations of the profiler."""

from __future__ import annotations

import glob
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Step = Callable[..., Any]


def lower_loop(step: Step, state: Any, arguments: Any, *, iterations: int, unroll: int) -> Any:
    """A loop of ``state, result = step(i, state, *arguments)``, to compile.

    ``i`` counts the steps, so that no step is the same computation as another, and the results of
    an iteration are carried, so that none is dead. The arguments are returned: donated, they are
    not copied into the loop.
    """
    step = jax.jit(step)  # lowered once, however often it is unrolled

    def iterate(i, carry, arguments):
        state, results = carry[0], []
        for part in range(unroll):
            state, result = step(i * unroll + part, state, *arguments)
            results.append(result)
        return state, results

    def loop(carry, arguments):
        body = lambda i, carry: iterate(i, carry, arguments)  # noqa: E731
        return jax.lax.fori_loop(0, iterations // unroll, body, carry), arguments

    results = jax.eval_shape(lambda *x: iterate(0, x, arguments)[1], state)
    return jax.jit(loop, donate_argnums=(0, 1)).lower((state, results), arguments)


def time_loop(loop: Any, state: Any, arguments: Any, *, iterations: int, repeats: int) -> float:
    """The median microseconds of a step; what is passed in is used up.

    Three calls in a row less one call are two calls without the start-up and the synchronisation.
    """
    results = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), loop.out_info[0][1])
    carried = ((state, results), arguments)

    def run(calls):
        nonlocal carried
        start = time.perf_counter()
        for _ in range(calls):
            carried = loop(*carried)
        jax.block_until_ready(carried)
        return time.perf_counter() - start

    run(1)
    times = [(run(3) - run(1)) / (2 * iterations) for _ in range(repeats)]
    return float(np.median(times)) * 1e6


def time_kernels(function: Callable[..., Any], *arguments: Any, repeats: int = 9) -> float:
    """The median microseconds that the kernels of one call are running.

    Each call has finished before the next starts. A kernel may be launched while the one before
    drains, and waits for it: the union of their times counts, not the sum.
    """
    call = jax.jit(function)
    jax.block_until_ready(call(*arguments))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(repeats):
                jax.block_until_ready(call(*arguments))
        [file] = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        planes = jax.profiler.ProfileData.from_file(file).planes
        events = sorted(
            (event.start_ns, event.start_ns + event.duration_ns)
            for plane in planes
            if "GPU" in plane.name
            for line in plane.lines
            if "Stream" in line.name
            for event in line.events
        )
    if len(events) < repeats:
        raise RuntimeError(f"the profiler saw {len(events)} kernels in {repeats} calls")
    # Every call runs the same kernels; should the profiler have lost one, all calls are averaged.
    calls = 1 if len(events) % repeats else repeats
    each = len(events) // calls
    times = [_busy(events[first : first + each]) for first in range(0, len(events), each)]
    return float(np.median(times)) / 1e3 * calls / repeats


def _busy(events: list[tuple[float, float]]) -> float:
    """How long at least one of the events, sorted by start, is running."""
    busy, end = 0.0, 0.0
    for start, stop in events:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return busy
