"""Every kernel lowers for CUDA at production shapes, on a machine without a GPU."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import pallas_kernels
from pallas_kernels import compat

pytestmark = pytest.mark.skipif(
    not compat.HAS_MOSAIC, reason="Mosaic GPU kernels need jax 0.11, which needs Python 3.12"
)
B, S, C, K = 32, 131072, 1229, 512
i32, f32, u32 = jnp.int32, jnp.float32, jnp.uint32


def struct(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype)


def lower(function, *arguments, donate=()):
    with compat.tracing_for_hopper("assumed"):
        jitted = jax.jit(lambda *x: function(*x), donate_argnums=donate)
        return jitted.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def kernels(text):
    return text.count("custom_call @mosaic_gpu")


@pytest.mark.parametrize(
    "dtype,blocks,rows",
    [
        (jnp.bfloat16, "all", 1),
        (jnp.bfloat16, "some", 4),
        (jnp.float8_e4m3fn, "all", 4),
        (jnp.float8_e4m3fn, "some", 1),
    ],
)
def test_index_scores(dtype, blocks, rows):
    def call(q, w, keys, num_slots, ids, scales):
        return pallas_kernels.index_scores(
            q, w, keys, num_slots, block_ids=ids, key_scales=scales, fill=rows > 1,
            implementation="mosaic",
        )  # fmt: skip

    text = lower(
        call, struct(dtype, B, rows, 64, 128), struct(f32, B, rows, 64), struct(dtype, B, S, 128),
        struct(i32, B, rows), struct(i32, B, C) if blocks == "some" else None,
        struct(f32, B, S) if dtype != jnp.bfloat16 else None,
    )  # fmt: skip
    assert kernels(text) == 1


@pytest.mark.parametrize("k,blocks", [(512, C), (512, 2 * C), (2048, 4096), (512, 128)])
def test_top_k_slots(k, blocks):
    def call(scores, ids, group_max, num_blocks):
        return pallas_kernels.top_k_slots(
            scores, k, block_ids=ids, group_max=group_max, num_blocks=num_blocks,
            implementation="mosaic",
        )  # fmt: skip

    maxima = struct(f32, B, blocks * 4)
    for counts in (None, struct(i32, B)):
        text = lower(call, struct(f32, B, blocks * 64), struct(i32, B, blocks), maxima, counts)
        assert kernels(text) == 1


def mix(product, square, scale, base):
    return pallas_kernels.mixing_weights(
        product, square, scale, base, width=16384, rms_eps=1e-6, iterations=20, eps=1e-6,
        implementation="mosaic",
    )  # fmt: skip


def mix_arguments(tokens, m):
    rows = m * (m + 2)
    return struct(f32, *tokens, rows), struct(f32, *tokens), struct(f32, 3), struct(f32, rows)


@pytest.mark.parametrize("tokens,m", [((32, 1), 4), ((1000, 1), 2), ((3, 7), 8)])
@pytest.mark.parametrize("call", [mix, jax.vmap(mix, in_axes=(0, 0, None, None))])
def test_mixing_weights(tokens, m, call):
    text = lower(call, *mix_arguments(tokens, m))
    assert kernels(text) == 1
    # Nothing around the kernel that would be a launch of its own.
    operations = set(re.findall(r"stablehlo\.(\w+)", text))
    assert operations <= {"reshape", "custom_call", "output_operand_alias"}


@pytest.mark.parametrize("dtype", [f32, jnp.bfloat16])
@pytest.mark.parametrize("slots", [8192, 262144])
def test_select_blocks(slots, dtype):
    def call(*x):
        return pallas_kernels.select_blocks(
            *x, block_size=64, capacity=slots // 107, implementation="mosaic"
        )

    numbers = [struct(i32, B)] * 3
    tables = [struct(dtype, B, slots)] * 2
    assert kernels(lower(call, *tables, *numbers, struct(u32, B, slots // 64))) == 2


def test_select_blocks_of_all_layers_takes_two_launches():
    def call(V, D_rev, *x):
        return pallas_kernels.select_blocks_of_layers(
            V, D_rev, *x, block_size=64, capacity=C, implementation="mosaic"
        )

    tables = [[struct(f32, B, S)] * 21] * 2
    numbers = [struct(i32, 21, B)] * 3
    text = lower(call, *tables, *numbers, struct(u32, 21, B, S // 64))
    assert kernels(text) == 2
    assert f"21x{B}x{S}x" not in text  # nothing is copied together


def ema(V, D_rev, scores, ids, num_slots):
    return pallas_kernels.ema_scatter(
        V, D_rev, scores, ids, num_slots, block_size=64, decay=0.5, implementation="mosaic"
    )


EMA_ARGUMENTS = (struct(f32, B, S), struct(f32, B, S), struct(f32, B, C * 64), struct(i32, B, C),
                 struct(i32, B))  # fmt: skip


def test_ema_scatter_updates_its_operands_in_place():
    text = lower(ema, *EMA_ARGUMENTS, donate=(0, 1))
    assert kernels(text) == 1
    assert text.count("#stablehlo.output_operand_alias<") == 2
    for argument in (0, 1):
        assert f"tf.aliasing_output = {argument}" in text


def test_top_k_and_observe_updates_its_operands_in_place():
    def call(V, D_rev, scores, ids, num_slots):
        return pallas_kernels.top_k_and_observe(
            scores, K, V, D_rev, ids, num_slots, block_size=64, decay=0.5, implementation="mosaic"
        )

    text = lower(call, *EMA_ARGUMENTS, donate=(0, 1))
    assert kernels(text) == 1
    assert text.count("#stablehlo.output_operand_alias<") == 2


def test_kernels_lower_under_scan_and_vmap():
    def loop(V, D_rev, *rest):
        return jax.lax.scan(lambda c, _: (ema(*c, *rest), None), (V, D_rev), length=3)[0]

    assert kernels(lower(loop, *EMA_ARGUMENTS)) == 1
    twice = [struct(x.dtype, 2, *x.shape) for x in EMA_ARGUMENTS]
    assert kernels(lower(jax.vmap(ema), *twice)) == 1
    top_k = lambda s: pallas_kernels.top_k_slots(s, K, implementation="mosaic")  # noqa: E731
    assert kernels(lower(jax.vmap(top_k), struct(f32, 2, B, 8192))) == 1


def test_vmap_does_not_copy_shared_keys():
    def call(q, w, keys, num_slots):
        one = lambda q, w, n: pallas_kernels.index_scores(  # noqa: E731
            q, w, keys, n, implementation="mosaic"
        )[0]
        return jax.vmap(one)(q, w, num_slots)

    text = lower(
        call, struct(jnp.bfloat16, 2, B, 1, 64, 128), struct(f32, 2, B, 1, 64),
        struct(jnp.bfloat16, B, S, 128), struct(i32, 2, B, 1),
    )  # fmt: skip
    assert f"2x{B}x{S}x128" not in text


def test_kernels_lower_under_shard_map():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    shard = jax.shard_map(
        ema, mesh=mesh, in_specs=(P("data"),) * 5, out_specs=P("data"), check_vma=False
    )
    assert f"{B // 4}x{S}" in lower(shard, *EMA_ARGUMENTS)
    top_k = jax.shard_map(
        lambda s: pallas_kernels.top_k_slots(s, K, implementation="mosaic"),
        mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False,
    )  # fmt: skip
    assert kernels(lower(top_k, struct(f32, B, 8192))) == 1
    shard = jax.shard_map(
        mix, mesh=mesh, in_specs=(P("data"), P("data"), P(), P()), out_specs=P("data"),
        check_vma=False,
    )  # fmt: skip
    assert kernels(lower(shard, *mix_arguments((B, 1), 4))) == 1


@pytest.mark.parametrize("slots", ["none", "listed", "first"])
@pytest.mark.parametrize("heads,rows,k", [(64, 1, 512), (128, 4, 1024)])
def test_sparse_attention(slots, heads, rows, k):
    def call(q, window, ids, sink, table, listed, count):
        return pallas_kernels.sparse_attention(
            q, window, ids, sink, slots=table, slot_ids=listed, num_slots=count, scale=0.04,
            implementation="mosaic",
        )  # fmt: skip

    arguments = [
        struct(jnp.bfloat16, B, rows, heads, 512), struct(jnp.bfloat16, B, 135, 512),
        struct(i32, B, rows, 128), struct(f32, heads),
        None if slots == "none" else struct(jnp.bfloat16, B, 4096, 512),
        struct(i32, B, rows, k) if slots == "listed" else None,
        struct(i32, B, rows) if slots == "first" else None,
    ]  # fmt: skip
    assert kernels(lower(call, *arguments)) == 1
    axes = [0] * 3 + [None] + [None if x is None else 0 for x in arguments[4:]]
    mapped = [
        x if axis is None else struct(x.dtype, 2, *x.shape)
        for x, axis in zip(arguments, axes, strict=True)
    ]
    assert kernels(lower(jax.vmap(call, in_axes=axes), *mapped)) == 1
