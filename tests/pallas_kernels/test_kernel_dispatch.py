"""Which implementation runs, and what a named one says when it cannot."""

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels
from pallas_kernels import compat

needs_mosaic = pytest.mark.skipif(
    not compat.HAS_MOSAIC, reason="Mosaic GPU kernels need jax 0.11, which needs Python 3.12"
)


def test_a_named_kernel_says_why_it_cannot_run():
    with pytest.raises(ValueError, match="'mosaic' cannot run: .*use implementation=None"):
        pallas_kernels.top_k_slots(jnp.zeros((1, 64)), 4, implementation="mosaic")


def test_an_unknown_implementation_is_named():
    with pytest.raises(ValueError, match="implementation='triton' is unknown"):
        pallas_kernels.top_k_slots(jnp.zeros((1, 64)), 4, implementation="triton")


@needs_mosaic
@pytest.mark.parametrize(
    "call,reason",
    [
        (lambda named: scored(heads=6, named=named), "6 heads of 128 channels"),
        (lambda named: scored(dtype=jnp.float32, named=named), "queries are float32"),
        (lambda named: scored(slots=96, named=named), "96 slots are not whole blocks of 64"),
        (lambda named: scored(block_size=32, slots=64, named=named), "block_size=32"),
        (lambda named: ranked(length=8192, k=4096, named=named), "k=4096 is more than 2048"),
        (lambda named: ranked(length=66, k=4, named=named), "66 scores"),
        (lambda named: ranked(length=2**22, k=8, named=named), "16384 or fewer"),
        (lambda named: selected(slots=2**20, named=named), "more than 4096 blocks"),
        (lambda named: selected(slots=64, block_size=4, named=named), "block_size=4"),
        (lambda named: attended(heads=32, named=named), "32 heads of 512 channels"),
        (lambda named: attended(width=576, named=named), "64 heads of 576 channels"),
        (lambda named: attended(dtype=jnp.float32, named=named), "rows are float32"),
        (
            lambda named: attended(window_ids=struct(2, 1, 0, dtype=jnp.int32), named=named),
            r"nothing in \[2, 1, 0\]",
        ),
        (
            lambda named: attended(slot_ids=struct(2, 1, 32768, dtype=jnp.int32), named=named),
            "lists of 32768 rows",
        ),
        (lambda named: mixed(m=9, named=named), "9 streams are more than 8"),
        (lambda named: mixed(tokens=(0, 1), named=named), "there is nothing in product"),
        (lambda named: mixed(named=named, base=struct(24, dtype=jnp.bfloat16)), "base is bfloat16"),
    ],
)
def test_shapes_that_no_kernel_takes_get_the_reference_or_an_error(call, reason):
    with compat.tracing_for_hopper("assumed"):
        with pytest.raises(ValueError, match=reason):
            call("mosaic")
        call(None)


def struct(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def scored(heads=64, dtype=jnp.bfloat16, slots=128, block_size=64, named=None):
    call = lambda q, w, keys, n: pallas_kernels.index_scores(  # noqa: E731
        q, w, keys, n, block_size=block_size, implementation=named
    )
    q, keys = struct(1, 1, heads, 128, dtype=dtype), struct(1, slots, 128, dtype=dtype)
    return jax.eval_shape(call, q, struct(1, 1, heads), keys, struct(1, 1, dtype=jnp.int32))


def ranked(length, k, named):
    call = lambda x: pallas_kernels.top_k_slots(x, k, implementation=named)  # noqa: E731
    return jax.eval_shape(call, struct(1, length))


def selected(slots, named, block_size=64):
    call = lambda V, n, p: pallas_kernels.select_blocks(  # noqa: E731
        V, V, n, n, n, p, block_size=block_size, capacity=8, implementation=named
    )
    blocks = struct(1, slots // block_size, dtype=jnp.uint32)
    return jax.eval_shape(call, struct(1, slots), struct(1, dtype=jnp.int32), blocks)


def mixed(tokens=(2, 1), m=4, iterations=2, named=None, **changes):
    rows = m * (m + 2)
    arguments = {
        "product": struct(*tokens, rows),
        "square": struct(*tokens),
        "scale": struct(3),
        "base": struct(rows),
    } | changes
    call = lambda x: pallas_kernels.mixing_weights(  # noqa: E731
        **x, width=64, rms_eps=1e-6, iterations=iterations, eps=1e-6, implementation=named
    )
    return jax.eval_shape(call, arguments)


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"base": struct(23)}, r"base has shape \[23\].*m \(m \+ 2\)"),
        ({"base": struct(0)}, r"base has shape \[0\]"),
        ({"base": struct(15)}, r"product has shape \[2, 1, 24\]; allowed: \[2, 1, 15\]"),
        ({"square": struct(2, 1, 1)}, r"square has shape \[2, 1, 1\]; allowed: \[2, 1\]"),
        ({"scale": struct(1)}, r"scale has shape \[1\]; allowed: \[3\]"),
        ({"iterations": 0}, "iterations is 0; allowed: an integer of at least 1"),
    ],
)
def test_mixing_weights_name_what_does_not_fit(changes, message):
    with pytest.raises(ValueError, match=message):
        mixed(**changes)


@pytest.mark.parametrize(
    "options,message",
    [
        ({"k": 0}, "k is 0; allowed: an integer of at least 1"),
        ({"k": True}, "k is True"),
        ({"group_max": jnp.zeros((2, 4))}, r"group_max has shape \[2, 4\]; allowed: \[2, 8\]"),
        ({"block_ids": jnp.zeros((2, 1), jnp.int32)}, r"block_ids has shape \[2, 1\]; allowed"),
        ({"block_ids": jnp.zeros((2, 2), jnp.int32), "block_size": 60}, "block_size is 60"),
    ],
)
def test_rankings_that_do_not_fit_are_named(options, message):
    options = {"k": 4} | options
    with pytest.raises(ValueError, match=message):
        pallas_kernels.top_k_slots(jnp.zeros((2, 128)), options.pop("k"), **options)


def test_states_that_do_not_fit_are_named():
    ids, count = jnp.zeros((2, 2), jnp.int32), jnp.ones(2, jnp.int32)
    with pytest.raises(ValueError, match="as many slots"):
        pallas_kernels.top_k_and_observe(
            jnp.zeros((2, 128)), 4, jnp.zeros((2, 256)), jnp.zeros((2, 128)), ids, count,
            block_size=64, decay=0.5,
        )  # fmt: skip


def attended(heads=64, width=512, dtype=jnp.bfloat16, named=None, **changes):
    arguments = {
        "q": struct(2, 1, heads, width, dtype=dtype),
        "window": struct(2, 9, width, dtype=dtype),
        "window_ids": struct(2, 1, 8, dtype=jnp.int32),
        "sink": struct(heads),
        "slots": struct(2, 64, width, dtype=dtype),
        "slot_ids": struct(2, 1, 16, dtype=jnp.int32),
    } | changes
    call = lambda x: pallas_kernels.sparse_attention(  # noqa: E731
        **x, scale=0.1, implementation=named
    )
    return jax.eval_shape(call, arguments)


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"slots": None}, "neither without slots"),
        ({"slot_ids": None}, "one of them"),
        ({"num_slots": struct(2, 1, dtype=jnp.int32)}, "one of them"),
        ({"window": struct(1, 9, 512, dtype=jnp.bfloat16)}, r"\[1, 9, 512\].*allowed: \[2, rows"),
        ({"slot_ids": struct(2, 3, 16, dtype=jnp.int32)}, r"\[2, 3, 16\].*allowed: int32\[2, 1, "),
        ({"window_ids": struct(2, 1, 8)}, r"float32\[2, 1, 8\].*allowed: int32"),
        ({"window_ids": struct(2, 1, dtype=jnp.int32)}, r"int32\[2, 1\].*allowed: int32\[2, 1, "),
        (
            {"slot_ids": None, "num_slots": struct(2, 1, 9, dtype=jnp.int32)},
            r"num_slots int32\[2, 1, 9\].*int32\[2, 1\]",
        ),
        ({"q": struct(2, 64, 512)}, r"q has shape \[2, 64, 512\]"),
        ({"sink": struct(63)}, r"sink has shape \[63\].*\[64\]"),
    ],
)
def test_attention_names_what_does_not_fit(changes, message):
    with pytest.raises(ValueError, match=message):
        attended(**changes)


def test_attention_of_float32_rows_is_float32_whatever_the_default():
    with jax.default_matmul_precision("default"):
        lowered = jax.jit(
            lambda q, w, i, s: pallas_kernels.sparse_attention(q, w, i, s, scale=1.0)
        ).lower(struct(1, 1, 2, 4), struct(1, 3, 4), struct(1, 1, 3, dtype=jnp.int32), struct(2))
    products = [line for line in lowered.as_text().splitlines() if "dot_general" in line]
    assert len(products) == 2
    assert all("HIGHEST" in line for line in products)


def test_layers_to_select_for_must_be_alike():
    def select(V, D_rev, layers=2):
        number = jnp.ones((layers, 1), jnp.int32)
        priority = jnp.zeros((layers, 1, 4), jnp.uint32)
        return pallas_kernels.select_blocks_of_layers(
            V, D_rev, number, number, number, priority, block_size=4, capacity=4
        )

    V, other = jnp.zeros((1, 16)), jnp.zeros((1, 12))
    select([V, V], [V, V])
    for arguments in (
        ([V, V], [V]),
        ([V, other], [V, V]),
        ([V, V], [other, V]),
        ([V], [V]),
        ([], []),
    ):
        with pytest.raises(ValueError, match="as many layers in all, and one shape"):
            select(*arguments)
