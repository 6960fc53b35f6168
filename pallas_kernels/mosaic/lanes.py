"""What Pallas lacks on the GPU: gather, scatter and prefix sums over the threads of a warpgroup.

Each is a few instructions a thread, written with Mosaic's inline escape. An array of n elements is
"blocked": thread t of the 128 holds elements t * n/128 to (t+1) * n/128 - 1, so that a prefix sum
is a sum inside each thread, one scan over threads, and an addition. Under the interpreter, which
cannot run inline code, each is the same operation in ``jnp``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, memref, nvvm, scf, vector

from pallas_kernels.compat import interpreted

THREADS = 128
WARPS = 4


def padded(length: int) -> int:
    """The next length that every operation takes: masks need a multiple of 8 elements a thread."""
    return -(-length // (8 * THREADS)) * (8 * THREADS)


def blocked(length: int) -> Any:
    """The layout that gives each thread consecutive elements; length is a multiple of 1024."""
    return plgpu.Layout.WG_STRIDED((length,), vec_size=length // THREADS)


def coalesced(length: int, vec_size: int = 1) -> Any:
    """The layout that gives neighbouring threads neighbouring groups of vec_size elements."""
    return plgpu.Layout.WG_STRIDED((length,), vec_size=vec_size)


def iota(length: int, layout: Any) -> jax.Array:
    """0 to length - 1."""
    return plgpu.layout_cast(jax.lax.broadcasted_iota(jnp.int32, (length,), 0), layout)


class OneOf(NamedTuple):
    """The one of several references of one shape and type, in global memory, that a scalar names.

    ``gather`` and ``scatter`` take it for a reference: one launch works on arrays that lie apart.
    """

    refs: tuple[Any, ...]
    which: jax.Array

    @property
    def dtype(self) -> Any:
        return self.refs[0].dtype


def _as_operands(ref: Any) -> tuple[tuple[Any, ...], jax.Array]:
    return (ref.refs, ref.which) if isinstance(ref, OneOf) else ((ref,), jnp.int32(0))


def _one_of(refs: tuple[ir.Value, ...], which: Any) -> ir.Value:
    if len(refs) == 1:
        return refs[0]
    i32 = ir.IntegerType.get_signless(32)
    pointer = mgpu.utils.memref_ptr(refs[0])
    for at, ref in enumerate(refs[1:], 1):
        named = arith.cmpi(arith.CmpIPredicate.eq, which.registers.item(), mgpu.utils.c(at, i32))
        pointer = arith.select(named, mgpu.utils.memref_ptr(ref), pointer)
    kind = ir.MemRefType(refs[0].type)
    return mgpu.utils.ptr_as_memref(pointer, ir.MemRefType.get(kind.shape, kind.element_type))


def gather(
    ref: Any, index: jax.Array, layout: Any, *, consecutive: int = 1, repeated: int = 1
) -> jax.Array:
    """``ref[index]`` for a one-dimensional reference, or ``OneOf`` some; all indices are in bounds.

    ``consecutive``: each group of that many elements has consecutive, aligned indices and is loaded
    at once. ``repeated``: each group of that many elements has the same index.
    """
    refs, which = _as_operands(ref)
    if interpreted():
        return jnp.take(jnp.stack([ref[...] for ref in refs])[which], index, axis=0)
    result = plgpu.ShapeDtypeStruct(index.shape, ref.dtype, layout)
    types = ((plgpu.RefType(),) * len(refs), plgpu.Layout.WG_SPLAT(()), layout)

    @plgpu.inline_mgpu(arg_types=types, return_type=result)
    def load(_, refs, which, index):
        source = _one_of(refs, which)
        element = ir.MemRefType(source.type).element_type
        registers = index.registers.copy()
        for at, indices in _each(index.registers):
            lanes = _lanes(indices)
            values: list[ir.Value] = []
            for first in range(0, len(lanes), consecutive * repeated):
                start = arith.index_cast(ir.IndexType.get(), lanes[first])
                if consecutive == 1:
                    values.extend([memref.load(source, [start])] * repeated)
                else:
                    group = vector.load(ir.VectorType.get((consecutive,), element), source, [start])
                    values.extend(_lanes(group))
            out = vector.from_elements(ir.VectorType.get((len(lanes),), element), values)
            registers[at] = out
        return mgpu.FragmentedArray(
            _registers=registers, _layout=index.layout, _is_signed=mgpu.utils.is_signed(ref.dtype)
        )

    return load(refs, which, index)


def gather_row(ref: Any, index: jax.Array, layout: Any) -> jax.Array:
    """``ref[index]`` for consecutive, aligned indices; what lies beyond the end is arbitrary.

    ``ref`` must be the row of a matrix: a length of whole 16 bytes aligns it for wide loads.
    """
    [length] = ref.shape
    if length % 4:
        return gather(ref, jnp.minimum(index, length - 1), layout)
    return gather(ref, jnp.minimum(index, length - 4 + index % 4), layout, consecutive=4)


def scatter(
    targets: list[tuple[Any, jax.Array]],
    index: jax.Array,
    where: jax.Array,
    layout: Any,
    *,
    fence: Literal["both", "after", "none"] = "both",
) -> None:
    """``ref[index] = values`` of every target, for the elements of ``where``; indices are distinct.

    The warpgroup meets before, so that earlier reads of shared memory are done, and after, so that
    later ones see the values, unless the caller knows better.
    """
    operands = [_as_operands(ref) for ref, _ in targets]
    arrays = tuple(values for _, values in targets)
    if interpreted():
        for (refs, which), values in zip(operands, arrays, strict=True):
            for number, ref in enumerate(refs):
                at = jnp.where(where & (which == number), index, ref.shape[0])
                ref[...] = ref[...].at[at].set(values, mode="drop")
        return
    scalar = plgpu.Layout.WG_SPLAT(())
    kinds = tuple(((plgpu.RefType(),) * len(refs), scalar) for refs, _ in operands)

    @plgpu.inline_mgpu(arg_types=(kinds, (layout,) * len(arrays), layout, layout))
    def store(_, operands, arrays, index, where):
        refs = [_one_of(*operand) for operand in operands]
        if fence == "both":
            mgpu.utils.warpgroup_barrier()
        for at, indices in _each(index.registers):
            columns = [_lanes(x.registers[at]) for x in (where, *arrays)]
            for slot, wanted, *values in zip(_lanes(indices), *columns, strict=True):
                branch = scf.IfOp(wanted)
                with ir.InsertionPoint(branch.then_block):
                    to = arith.index_cast(ir.IndexType.get(), slot)
                    for ref, value in zip(refs, values, strict=True):
                        memref.store(value, ref, [to])
                    scf.YieldOp([])
        if fence != "none":
            mgpu.utils.warpgroup_barrier()

    store(tuple(operands), arrays, index, where)


def reduce(
    kind: Literal["add", "max", "min"],
    x: jax.Array,
    layout: Any,
    scratch: Any,
    *,
    fresh: bool = False,
) -> jax.Array:
    """The sum, maximum or minimum of an int32 array.

    Mosaic's own reductions share one piece of shared memory, so only one warpgroup of a thread
    block may use them; here each brings an int32 [4] of its own. ``fresh`` promises that the
    warpgroup has met at a barrier since it last read that: one barrier less.
    """
    if interpreted():
        return {"add": jnp.sum, "max": jnp.max, "min": jnp.min}[kind](x)
    result = plgpu.ShapeDtypeStruct((), jnp.int32, plgpu.Layout.WG_SPLAT(()))
    combine, across = {
        "add": (arith.addi, nvvm.ReductionKind.ADD),
        "max": (arith.maxsi, nvvm.ReductionKind.MAX),
        "min": (arith.minsi, nvvm.ReductionKind.MIN),
    }[kind]

    @plgpu.inline_mgpu(arg_types=(layout, plgpu.RefType()), return_type=result)
    def run(_, x, scratch):
        lanes = [lane for _, register in _each(x.registers) for lane in _lanes(register)]
        return _across_warps(across, combine, _tree(combine, lanes), scratch, fresh)

    return run(x, scratch)


def _across_warps(kind: Any, combine: Any, value: ir.Value, scratch: ir.Value, fresh: bool) -> Any:
    """Each thread's value, combined over the warpgroup."""
    value = nvvm.redux_sync(value, kind, mgpu.utils.c(0xFFFFFFFF, ir.IntegerType.get_signless(32)))
    if not fresh:
        mgpu.utils.warpgroup_barrier()
    _store_by_warp(value, scratch, mgpu.utils.thread_idx(), leader=0)
    mgpu.utils.warpgroup_barrier()
    value = _tree(combine, [_load(scratch, warp) for warp in range(WARPS)])
    return mgpu.FragmentedArray.splat(value, (), is_signed=True)


def prefix_sum(x: jax.Array, scratch: Any) -> tuple[jax.Array, jax.Array]:
    """The sum of the elements before each, and of all: int32 in the blocked layout.

    ``scratch`` is an int32 [4] in shared memory.
    """
    if interpreted():
        return jnp.cumsum(x) - x, jnp.sum(x)
    layout = blocked(x.shape[0])
    result = (
        plgpu.ShapeDtypeStruct(x.shape, jnp.int32, layout),
        plgpu.ShapeDtypeStruct((), jnp.int32, plgpu.Layout.WG_SPLAT(())),
    )

    @plgpu.inline_mgpu(arg_types=(layout, plgpu.RefType()), return_type=result)
    def scan(_, x, scratch):
        i32 = ir.IntegerType.get_signless(32)
        c = lambda value: mgpu.utils.c(value, i32)  # noqa: E731
        before, total = [], c(0)
        for lane in _lanes(x.registers[0]):
            before.append(total)
            total = arith.addi(total, lane)
        thread = mgpu.utils.thread_idx()
        lane_id = arith.andi(thread, c(31))
        inclusive = total
        for distance in (1, 2, 4, 8, 16):
            other = nvvm.shfl_sync(c(0xFFFFFFFF), inclusive, c(distance), c(0), nvvm.ShflKind.up)
            has_other = arith.cmpi(arith.CmpIPredicate.uge, lane_id, c(distance))
            inclusive = arith.addi(inclusive, arith.select(has_other, other, c(0)))
        warp = arith.andi(arith.shrui(thread, c(5)), c(WARPS - 1))
        mgpu.utils.warpgroup_barrier()
        _store_by_warp(inclusive, scratch, thread, leader=31)
        mgpu.utils.warpgroup_barrier()
        base, everything = arith.subi(inclusive, total), c(0)
        for other in range(WARPS):
            count = _load(scratch, other)
            earlier = arith.cmpi(arith.CmpIPredicate.ult, c(other), warp)
            base = arith.addi(base, arith.select(earlier, count, c(0)))
            everything = arith.addi(everything, count)
        sums = [arith.addi(base, b) for b in before]
        registers = x.registers.copy()
        registers[0] = vector.from_elements(ir.VectorType.get((len(sums),), i32), sums)
        return (
            mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=True),
            mgpu.FragmentedArray.splat(everything, (), is_signed=True),
        )

    return scan(x, scratch)


def _each(registers: np.ndarray) -> list[tuple[tuple[int, ...], ir.Value]]:
    return [(at, registers[at]) for at in np.ndindex(registers.shape)]


def _lanes(register: ir.Value) -> list[ir.Value]:
    if not isinstance(register.type, ir.VectorType):
        return [register]
    [length] = ir.VectorType(register.type).shape
    return [
        vector.extract(register, [], ir.DenseI64ArrayAttr.get([lane])) for lane in range(length)
    ]


def meet(*, everyone: bool = False) -> None:
    """The threads of the warpgroup wait for each other, or those of the thread block."""
    if interpreted():
        return

    @plgpu.inline_mgpu()
    def wait(_):
        gpu.barrier() if everyone else mgpu.utils.warpgroup_barrier()

    wait()


def store_warp_maxima(values: jax.Array, layout: Any, target: Any) -> None:
    """``target[warp]`` = the maximum of the warp's elements of a float32 array, of 16 rows of 64.

    No barrier; the target may be in global memory. Of a layout that gives each warp whole elements.
    """
    if interpreted():
        target[...] = jnp.max(values.reshape(WARPS, -1), axis=1)
        return

    @plgpu.inline_mgpu(arg_types=(layout, plgpu.RefType()))
    def store(_, values, target):
        lanes = [lane for _, register in _each(values.registers) for lane in _lanes(register)]
        value = _tree(arith.maximumf, lanes)
        for distance in (1, 2, 4, 8, 16):
            value = arith.maximumf(value, mgpu.utils.shfl_bfly(value, distance))
        _store_by_warp(value, target, mgpu.utils.thread_idx(), leader=0)

    store(values, target)


def store_chunk_maxima(values: jax.Array, scratch: Any) -> None:
    """``scratch[i]`` = the maximum of elements 32 i to 32 i + 31 of a coalesced float32 array.

    Chunks belong to warps, so each is one reduction; no barrier. NaN is not expected.
    """
    if interpreted():
        scratch[...] = jnp.max(values.reshape(-1, 32), axis=1)
        return
    # The hardware reduces integers: the order of floats, and back.
    bits = jax.lax.bitcast_convert_type(values, jnp.int32)
    keys = jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)

    @plgpu.inline_mgpu(arg_types=(coalesced(values.shape[0]), plgpu.RefType()))
    def store(_, keys, scratch):
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        c = lambda value: mgpu.utils.c(value, i32)  # noqa: E731
        thread = mgpu.utils.thread_idx()
        lane = arith.andi(thread, c(31))
        warp = arith.andi(arith.shrui(thread, c(5)), c(WARPS - 1))
        registers = [lane_ for _, r in _each(keys.registers) for lane_ in _lanes(r)]
        for first in range(0, len(registers), 32):
            # Lane i keeps the maximum of the warp's i-th chunk, so that one store serves 32.
            mine = c(0)
            for i, register in enumerate(registers[first : first + 32]):
                highest = nvvm.redux_sync(register, nvvm.ReductionKind.MAX, c(0xFFFFFFFF))
                is_mine = arith.cmpi(arith.CmpIPredicate.eq, lane, c(i))
                mine = arith.select(is_mine, highest, mine)
            negative = arith.cmpi(arith.CmpIPredicate.slt, mine, c(0))
            mine = arith.select(negative, arith.xori(mine, c(0x7FFFFFFF)), mine)
            chunk = arith.addi(arith.muli(arith.addi(lane, c(first)), c(WARPS)), warp)
            written = arith.cmpi(arith.CmpIPredicate.ult, lane, c(min(32, len(registers) - first)))
            branch = scf.IfOp(written)
            with ir.InsertionPoint(branch.then_block):
                at = arith.index_cast(ir.IndexType.get(), chunk)
                memref.store(arith.bitcast(f32, mine), scratch, [at])
                scf.YieldOp([])

    store(keys, scratch)


def _tree(combine: Callable[..., ir.Value], values: list[ir.Value]) -> ir.Value:
    while len(values) > 1:
        pairs = [combine(a, b) for a, b in zip(values[::2], values[1::2], strict=False)]
        values = pairs + values[2 * len(pairs) :]
    return values[0]


def _store_by_warp(value: ir.Value, scratch: ir.Value, thread: ir.Value, leader: int) -> None:
    """``scratch[warp] = value`` of the warp's lane ``leader``."""
    i32 = ir.IntegerType.get_signless(32)
    lane = arith.andi(thread, mgpu.utils.c(31, i32))
    warp = arith.andi(arith.shrui(thread, mgpu.utils.c(5, i32)), mgpu.utils.c(WARPS - 1, i32))
    branch = scf.IfOp(arith.cmpi(arith.CmpIPredicate.eq, lane, mgpu.utils.c(leader, i32)))
    with ir.InsertionPoint(branch.then_block):
        memref.store(value, scratch, [arith.index_cast(ir.IndexType.get(), warp)])
        scf.YieldOp([])


def _load(ref: ir.Value, at: int) -> ir.Value:
    return memref.load(ref, [mgpu.utils.c(at, ir.IndexType.get())])


def pool_neighbours(x: jax.Array, size: int) -> jax.Array:
    """The maximum of every ``size`` neighbours of an int32 array in the blocked layout."""
    length = x.shape[0] // size
    if interpreted():
        return jnp.max(x.reshape(length, size), axis=1)
    result = plgpu.ShapeDtypeStruct((length,), jnp.int32, blocked(length))

    @plgpu.inline_mgpu(arg_types=(blocked(x.shape[0]),), return_type=result)
    def pool(_, x):
        lanes = _lanes(x.registers[0])
        pooled = [
            _tree(arith.maxsi, lanes[first : first + size]) for first in range(0, len(lanes), size)
        ]
        i32 = ir.IntegerType.get_signless(32)
        register = vector.from_elements(ir.VectorType.get((len(pooled),), i32), pooled)
        layout = mgpu.WGStridedFragLayout((length,), length // THREADS)
        return mgpu.FragmentedArray(
            _registers=np.asarray([register]), _layout=layout, _is_signed=True
        )

    return pool(x)


def count(halves: jax.Array, layout: Any, low: Any, high: Any, scratch: Any) -> jax.Array:
    """How many 31-bit keys are at least ``low``, and in the upper 16 bits at least ``high``.

    Of fewer than 32,768 keys; see ``reduce`` for scratch, which is ``fresh``.
    """
    if interpreted():
        return jnp.sum(halves >= low) + (jnp.sum(halves >= high) << 16)
    scalar = plgpu.Layout.WG_SPLAT(())
    result = plgpu.ShapeDtypeStruct((), jnp.int32, scalar)

    @plgpu.inline_mgpu(arg_types=(layout, scalar, scalar, plgpu.RefType()), return_type=result)
    def run(_, halves, below_low, below_high, scratch):
        c = lambda value: mgpu.utils.c(value, ir.IntegerType.get_signless(32))  # noqa: E731
        lanes = [lane for _, register in _each(halves.registers) for lane in _lanes(register)]
        totals = []
        for below in (below_low.registers.item(), below_high.registers.item()):
            signs = [arith.shrui(arith.subi(below, lane), c(31)) for lane in lanes]
            totals.append(_tree(arith.addi, signs))
        value = arith.addi(totals[0], arith.shli(totals[1], c(16)))
        return _across_warps(nvvm.ReductionKind.ADD, arith.addi, value, scratch, True)

    return run(halves, low - 1, high - 1, scratch)
