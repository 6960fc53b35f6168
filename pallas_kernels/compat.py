"""What this installation of JAX can run: everything that depends on a version or a device.

Kernels use Pallas' Mosaic GPU backend, whose interface settled in jax 0.11, and Hopper's wgmma
and bulk copies. Elsewhere (CPU, TPU, other GPUs, jax 0.10) the plain ``jnp`` references serve.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
from jax.experimental.xla_metadata import set_xla_metadata

Implementation = Literal["mosaic", "xla"]

JAX_VERSION = tuple(int(part) for part in jax.__version__.split(".")[:2])
HAS_MOSAIC = JAX_VERSION >= (0, 11)
MANY_CALLS = 16
"""From so many calls of a function on, compiling it once is worth slower calls."""

Device = Literal["actual", "assumed", "interpreted"]
_device: contextvars.ContextVar[Device] = contextvars.ContextVar("device", default="actual")


@contextlib.contextmanager
def tracing_for_hopper(device: Device) -> Iterator[None]:
    """Traces as if a Hopper GPU were there: to lower for one, or to interpret kernels."""
    token = _device.set(device)
    try:
        yield
    finally:
        _device.reset(token)


def interpreted() -> bool:
    """Whether kernels are being traced for Pallas' interpreter."""
    return _device.get() == "interpreted"


def mosaic_kernel(body: Callable[..., None], **options: Any) -> Callable[..., Any]:
    """``plgpu.kernel``, launched while the kernel before it drains, or interpreted."""
    import jax.experimental.pallas.mosaic_gpu as plgpu

    if interpreted():
        params = plgpu.InterpretGPUParams()  # pyright: ignore[reportAttributeAccessIssue]
        return plgpu.kernel(body, interpret=params, **options)

    def overlapped(*refs, **scratch):
        # Programmatic dependent launch: the next kernel may be launched as soon as this one runs,
        # and none touches memory before the one before it has finished.
        plgpu.griddepcontrol_launch_dependents()
        plgpu.griddepcontrol_wait()
        body(*refs, **scratch)

    overlapped.__name__ = body.__name__
    return plgpu.kernel(overlapped, **options)


def full_precision(x: jax.Array) -> jax.lax.Precision | None:
    """Float32 products stay float32: by default a GPU would round their factors to TF32."""
    return jax.lax.Precision.HIGHEST if x.dtype == "float32" else None


def runs_on_gpu() -> bool:
    """Whether what is traced now is for a GPU, where layouts should suit it."""
    return _device.get() == "assumed" or jax.default_backend() == "gpu"


def compiled_once(result: jax.Array, calls: int) -> jax.Array:
    """``result``; XLA is told to take the calls of the jitted function that made it apart late.

    On a CPU, where a deep model's compilation is mostly the same layer again: until then XLA
    handles one function for all ``calls``, which takes a third less in all. Steps are some 10%
    slower, so in a model of few layers nothing changes; nor before jax 0.11. Not for functions
    that return a cache which they were given: a call would copy it.
    """
    inline: Any = getattr(jax, "Inline", None)
    if calls < MANY_CALLS or inline is None or jax.default_backend() != "cpu" or runs_on_gpu():
        return result
    marked: Any = set_xla_metadata(result, inlineable=inline.XLA_LATE.value)
    return marked


def runs_on_hopper() -> bool:
    """Whether what is traced now is for a Hopper GPU, with its kernels or without."""
    return runs_on_gpu() and (_device.get() == "assumed" or _why_no_hopper() is None)


@functools.cache
def _why_no_hopper() -> str | None:
    if jax.default_backend() != "gpu":
        return f"the default backend is {jax.default_backend()!r}, not a GPU"
    device = jax.local_devices()[0]
    capability = getattr(device, "compute_capability", None)
    if capability != "9.0":
        return f"{device.device_kind} has compute capability {capability}, not 9.0 (Hopper)"
    return None


def why_no_mosaic() -> str | None:
    """Why Mosaic GPU kernels cannot run here; None if they can."""
    if not HAS_MOSAIC:
        return f"jax {jax.__version__} is older than 0.11"
    return None if _device.get() != "actual" else _why_no_hopper()


def choose(op: str, implementation: str | None, unsupported: str | None) -> Implementation:
    """The implementation to trace: the kernel where it can run, or the one that is named.

    ``unsupported`` says why these shapes or types do not suit the kernel (None: they do). The
    platform is JAX's default backend at trace time: a program traced on a GPU machine for another
    device should name ``implementation="xla"``.

    Raises:
        ValueError: the named implementation is unknown or cannot run; the message says why.
    """
    if implementation not in (None, "mosaic", "xla"):
        raise ValueError(
            f"{op}: implementation={implementation!r} is unknown; use 'mosaic', 'xla' or None"
        )
    if implementation == "xla":
        return "xla"
    reason = why_no_mosaic() or unsupported
    if reason is None:
        return "mosaic"
    if implementation == "mosaic":
        raise ValueError(
            f"{op}: implementation='mosaic' cannot run: {reason}; use implementation=None or 'xla'"
        )
    return "xla"
