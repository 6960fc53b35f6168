"""Compiled programs, shared by all sessions of a process."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import jax

_PROGRAMS: dict[Any, Future[Any]] = {}
_MOST_PROGRAMS = 64
_PROGRAMS_LOCK = threading.Lock()


def compiled_program(function: Any, args: tuple[Any, ...], **static: Any) -> Any:
    """The jitted function compiled for these arguments; every session shares the programs.

    Threads that ask for the same one wait for the first; different ones compile side by side.
    """
    leaves, tree = jax.tree.flatten(args)
    shapes = tuple((x.shape, x.dtype, x.sharding) for x in leaves)
    config: Any = jax.config
    context = (config.jax_default_matmul_precision, config.jax_enable_x64)
    name = (function, tree, shapes, context, *sorted(static.items(), key=lambda item: item[0]))
    with _PROGRAMS_LOCK:
        found = _PROGRAMS.get(name)
        program = Future() if found is None else found
        if found is None:
            if len(_PROGRAMS) == _MOST_PROGRAMS:
                del _PROGRAMS[next(iter(_PROGRAMS))]
            _PROGRAMS[name] = program
    if found is None:
        try:
            program.set_result(function.lower(*args, **static).compile())
        except BaseException as error:
            # Those who wait see the error too; who asks later tries again.
            with _PROGRAMS_LOCK:
                if _PROGRAMS.get(name) is program:
                    del _PROGRAMS[name]
            program.set_exception(error)
    try:
        return program.result()
    finally:
        del program  # or an error's traceback, which holds this frame, keeps the arguments alive
