"""scripts/bench.py decode: what it reports is what ran, and its checks of programs can fail."""

import json
import math

import bench
import bench_decode
import bench_flash_gpu
import bench_forced
import bench_loop
import bench_spin_cpu
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.params import abstract_params
from models.presets import flash_config, shrink, tiny_config
from models.selector import IndexKeys, IndexQuery
from spin_jax import SpinConfig, SpinSelector

CFG = shrink(tiny_config(), layers=2, experts=4)
KEY = jax.random.key(0, impl="rbg")
TINY = ["--preset", "tiny", "--layers", "2", "--experts", "4", "--dtype", "float32"]


def run(capsys, *argv):
    bench.main(["decode", *argv])
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.slow
def test_flash_gpu_case_at_tiny_size(tmp_path, capsys):
    """The whole case on a CPU; the compiled loops talk to no host and copy no cache."""
    out = tmp_path / "new" / "decode.json"
    result = run(
        capsys, "--case", "flash-gpu", *TINY, "--tokens", "2100", "--batch", "2", "--steps", "3",
        "--repeats", "2", "--sparsity", "0.5", "--draft-length", "2", "--acceptance", "1.6",
        "--out", str(out),
    )  # fmt: skip
    assert json.loads(out.read_text()) == result
    assert {"hardware", "versions", "commit", "date", "load_average_before"} <= set(result)
    assert result["versions"]["jax"] == jax.__version__
    case = result["cases"]["flash-gpu"]
    rows = {r["selector"]: r for r in case["rows"]}
    assert set(rows) == {"fixed slots", "all-keep", "SPIN 0.5"}
    for row in rows.values():
        assert row["host_transfers"] == [] and row["cache_copies"] == []
        assert len(row["step_ms_all"]) == 2
        assert row["tokens_per_second"] == pytest.approx(2e3 / row["step_ms"], rel=1e-2)
        # The whole step needs less room than the smallest leaf that grows with the context.
        leaf = 2 * 525 * CFG.index_head_dim * 4
        assert row["temporary_gib"] * 2**30 < 8 * leaf
    drafts = {r["selector"]: r for r in case["drafts"]}
    assert set(drafts) == {"all-keep", "SPIN 0.5"}
    for name, row in drafts.items():
        # Places 0 and 1 of the table, three steps from each: 0, 1, 0 and 1, 0, 1 drafts accepted.
        assert row["acceptance_length"] == pytest.approx(1.5)
        speed = 2e3 * 1.5 / row["step_ms"]
        assert row["tokens_per_second"] == pytest.approx(speed, rel=1e-2)
        plain = rows[name]["tokens_per_second"]
        assert row["times_plain"] == pytest.approx(speed / plain, rel=2e-2)
    # 9 blocks, of which ceil(9 / 2) are scored in 3 x 3 steady steps, and all in the first.
    assert rows["SPIN 0.5"]["realized_sparsity"] == pytest.approx(1 - (9 + 9 * 5) / 90, abs=1e-4)


@pytest.mark.slow
def test_spin_cpu_case_at_small_size(capsys):
    """Also one request's loops: they talk to no host and copy nothing that grows."""
    result = run(
        capsys, "--case", "spin-cpu", "--slots", "2048", "--index-heads", "2", "--top-k", "16",
        "--steps", "2", "--repeats", "3", "--stages",
    )  # fmt: skip
    case = result["cases"]["spin-cpu"]
    [row] = case["rows"]
    # 32 blocks: 16 of them scored in 4 x 2 steps and all in the first.
    assert row["realized_sparsity"] == pytest.approx(1 - (32 + 8 * 16) / (9 * 32), abs=1e-3)
    assert row["all_keep_ms"] > 0 and row["spin_ms"] > 0
    assert row["host_transfers"] == [] and row["large_copies"] == []
    stages = case["stages_ms_one_layer_batch_1"]["2048"]
    assert {"select", "score selected", "top-K of selected", "EMA"} < set(stages)
    assert all(ms > 0 for ms in stages.values())


def test_crossover_is_where_all_larger_contexts_gain():
    def rows(*speedups):
        return [{"batch": 1, "slots": 2**i, "speedup": s} for i, s in enumerate(speedups)]

    assert bench_spin_cpu.crossover(rows(0.8, 1.1, 1.2), 1) == 2
    assert bench_spin_cpu.crossover(rows(1.1, 0.9, 1.2), 1) == 4
    assert bench_spin_cpu.crossover(rows(1.1, 1.2, 0.9), 1) is None
    assert bench_spin_cpu.crossover(rows(1.1), 4) is None


def test_host_transfers_and_copies_are_found_where_there_are_some():
    def chatty(x):
        jax.debug.callback(lambda y: None, x[0, 0])
        return x + 1

    x = jnp.zeros((3, 5))
    assert bench_loop.host_transfers(jax.jit(chatty).lower(x).compile().as_text())
    assert not bench_loop.host_transfers(jax.jit(lambda x: x + 1).lower(x).compile().as_text())

    state = bench_loop.synthetic_state(CFG, KEY, batch=2, tokens=300, room=8, dtype=jnp.float32)
    [csa] = (c for c in state.cache.layers if c.index_keys)
    keys = csa.index_keys.values

    def overwrite(keys):
        # Both the old and the new array are needed: one must be a copy.
        return keys, keys.at[0, 0, 0].set(1.0)

    hlo = jax.jit(overwrite, donate_argnums=0).lower(keys).compile().as_text()
    assert bench_loop.cache_copies(hlo, state)
    hlo = jax.jit(lambda k: overwrite(k)[1], donate_argnums=0).lower(keys).compile().as_text()
    assert not bench_loop.cache_copies(hlo, state)


@pytest.mark.parametrize("top_k", [1, 16, 100])
def test_fixed_slots_are_distinct_visible_and_as_many_as_all_keep_takes(top_k):
    q, w = jnp.ones((4, 2, 3, 8)), jnp.ones((4, 2, 3))
    keys = IndexKeys(jnp.zeros((4, 130, 8)))
    num_slots = jnp.array([[0, 1], [15, 16], [17, 99], [129, 130]])
    slots, _ = bench_loop.FixedSlots().select(IndexQuery(q, w), keys, num_slots, (), top_k=top_k)
    assert slots.shape == (4, 2, top_k)
    for row, visible in zip(np.asarray(slots).reshape(8, -1), np.ravel(num_slots), strict=True):
        chosen = row[row >= 0]
        assert len(chosen) == min(top_k, visible) and (np.diff(chosen) > 0).all()
        assert (chosen < visible).all() and (row[len(chosen) :] == -1).all()


def test_device_params_are_those_of_the_model_and_differ_from_each_other():
    params = bench_loop.device_params(CFG, KEY, jnp.float32)
    wanted = {**abstract_params(CFG, jnp.float32), "mtp": []}
    assert jax.tree.map(lambda x: (x.shape, x.dtype), params) == jax.tree.map(
        lambda x: (x.shape, x.dtype), wanted
    )
    first, second = (params["layers"][i]["attn"]["wq_b"] for i in (0, 1))
    assert not jnp.array_equal(first, second)


def test_byte_table_adds_up_to_the_arrays():
    state = bench_loop.synthetic_state(CFG, KEY, batch=2, tokens=300, room=8, dtype=jnp.bfloat16)
    params = {**abstract_params(CFG, jnp.bfloat16), "mtp": []}
    spin = bench_loop.start_selector(SpinSelector(SpinConfig()), state, CFG)
    averages = [x for s in spin for x in (s.spin.V, s.spin.D_rev)]
    arrays = jax.tree.leaves((params, state.cache.layers, [averages] * 3))
    table = bench_flash_gpu.byte_table(CFG, state, jnp.bfloat16, 3)
    assert sum(table.values()) == sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)
    assert table["index keys"] == sum(
        c.index_keys.values.nbytes for c in state.cache.layers if c.index_keys
    )


def test_expert_bytes_are_those_of_the_experts_that_a_batch_uses():
    cfg, rng = flash_config(), np.random.default_rng(0)
    used = [
        len(set(np.concatenate([rng.permutation(256)[:6] for _ in range(8)]))) for _ in range(400)
    ]
    matrices = 43 * 3 * 4096 * 2048 * 2
    estimate = bench_flash_gpu.expert_bytes(cfg, 8, 2)
    assert estimate == pytest.approx(np.mean(used) * matrices, rel=0.01)
    every = shrink(cfg, experts=6)
    assert math.isclose(bench_flash_gpu.expert_bytes(every, 1, 2), 6 * matrices)


def test_mistakes_are_one_line_and_exit_code_2(capsys):
    for argv, message in (
        (["--case", "flash-gpu", "--plan", "--experts", "256"], "GiB do not fit the card's 139"),
        (["--steps", "0"], "error: --steps is 0; it must be at least 1"),
        (["--case", "flash-gpu", "--draft-length", "1"], "--acceptance 2.4 is not between 1 and 2"),
        (["--case", "flash-gpu", "--plan", "--sparsity", "1"], "error: sparsity is 1"),
    ):
        with pytest.raises(SystemExit) as stopped:
            bench.main(["decode", *argv])
        assert stopped.value.code == 2
        assert message in capsys.readouterr().err.splitlines()[-1]


def test_help_has_examples(capsys):
    with pytest.raises(SystemExit) as stopped:
        bench.main(["decode", "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert "examples:" in text and "python scripts/bench.py decode --case" in text
    assert set(bench_decode.CASES) == set(bench_decode.STEPS)


@pytest.mark.parametrize("tokens,draft_length", [(2.4, 3), (1, 1), (4, 3), (1.5, 2)])
def test_forced_acceptance_has_the_mean_that_is_asked_for(tokens, draft_length):
    table = np.asarray(bench_forced.accepted_drafts(tokens, draft_length))
    assert table.mean() + 1 == pytest.approx(tokens)
    assert table.min() >= 0 and table.max() <= draft_length
    assert np.ptp(table) <= 1
