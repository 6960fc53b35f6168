"""Rows of a table, listed by number, copied to where the matrix units want them.

Bulk copies take runs of rows only. Here each thread copies 16 bytes at a time, from any row to the
place that the swizzle gives them. Under the interpreter, which cannot run inline code, the same is
done in ``jnp``.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

from pallas_kernels.compat import interpreted
from pallas_kernels.mosaic import lanes

ROWS = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(64))
"""How rows lie in shared memory. Both sides of a product want the same swizzle, and weights of 32
bfloat16 rows allow no wider one."""


def copy_rows(first: Any, second: Any, of_first: jax.Array, ids: jax.Array, target: Any) -> None:
    """Starts copying rows ``ids`` of one of two bfloat16 tables to shared memory.

    The target is [2, 32, half a row], swizzled for the matrix units. Thread t of the warpgroup
    copies a quarter of row t / 4, whose number is ``ids``, one a thread; rows below zero become
    zeros. Later ``wait_copies``, then a barrier.
    """
    if interpreted():
        table = jnp.where(of_first, _rows(first, ids[::4]), _rows(second, ids[::4]))
        halves = jnp.moveaxis(table.reshape(table.shape[0], 2, -1), 1, 0)
        target[...] = halves
        return
    scalar = plgpu.Layout.WG_SPLAT(())
    types = [
        plgpu.RefType(),
        plgpu.RefType(),
        scalar,
        lanes.coalesced(lanes.THREADS),
        plgpu.RefType(ROWS),
    ]
    half_bytes = 2 * target.shape[2]

    @plgpu.inline_mgpu(arg_types=types)
    def copy(_, first, second, of_first, ids, target):
        i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
        c = lambda value: mgpu.utils.c(value, i32)  # noqa: E731
        byte, device = ir.IntegerType.get_signless(8), llvm.PointerType.get(address_space=1)
        thread = arith.andi(mgpu.utils.thread_idx(), c(lanes.THREADS - 1))
        row, quarter = arith.shrui(thread, c(2)), arith.andi(thread, c(3))
        id_ = vector.extract(ids.registers.item(), [], ir.DenseI64ArrayAttr.get([0]))
        bases = [llvm.ptrtoint(i64, mgpu.utils.memref_ptr(table)) for table in (first, second)]
        base = arith.select(of_first.registers.item(), *bases)
        missing = arith.cmpi(arith.CmpIPredicate.slt, id_, c(0))
        start = arith.extui(i64, arith.maxsi(id_, c(0)))
        start = arith.muli(start, mgpu.utils.c(2 * half_bytes, i64))
        start = arith.addi(arith.addi(base, start), arith.extui(i64, arith.shli(quarter, c(4))))
        length = arith.select(missing, c(0), c(16))
        # A tile of the target is 8 rows of 64 bytes, the chunks of each in an order of its own.
        chunk = arith.xori(quarter, arith.andi(arith.shrui(row, c(1)), c(3)))
        place = arith.muli(arith.shrui(row, c(3)), c(8 * half_bytes))
        place = arith.addi(place, arith.shli(arith.andi(row, c(7)), c(6)))
        place = arith.addi(place, arith.shli(chunk, c(4)))
        to = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(target), [place], byte)
        for at in range(0, 2 * half_bytes, 64):
            half, inside = divmod(at, half_bytes)
            offset = half * 32 * half_bytes + inside * 8
            source = llvm.inttoptr(device, arith.addi(start, mgpu.utils.c(at, i64)))
            nvvm.cp_async_shared_global(
                mgpu.utils.getelementptr(to, [offset], byte), source, 16,
                nvvm.LoadCacheModifierKind.CG, cp_size=length,
            )  # fmt: skip
        nvvm.cp_async_commit_group()

    copy(first, second, of_first, ids, target)


def _rows(table: Any, ids: jax.Array) -> jax.Array:
    rows = jnp.take(table[...], jnp.clip(ids, 0, table.shape[0] - 1), axis=0)
    return jnp.where(ids[:, None] >= 0, rows, 0)


def wait_copies() -> None:
    """Waits for this thread's ``copy_rows``; the matrix units may read them after a barrier."""
    if interpreted():
        return

    @plgpu.inline_mgpu()
    def wait(_):
        nvvm.cp_async_wait_group(0)
        nvvm.fence_proxy(nvvm.ProxyKind.async_shared, space=nvvm.SharedSpace.shared_cta)

    wait()
