"""Whole conversions against the tests' own decoder; reading them back in every way."""

import dataclasses
import json
import os
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from checkpoint_cases import (
    decode_raw,
    decoded_leaves,
    folder_bytes,
    read_raw,
    small_config,
    small_release,
    write_raw,
)

from models.checkpoint import convert, load_checkpoint, load_release, save_checkpoint
from models.checkpoint.layout import chunk_shape, key_path, leaf_specs
from models.checkpoint.random_release import write_random_release
from models.params import DEFAULT_RULES, abstract_params, param_shardings, param_specs
from models.presets import flash_config, pro_config


@pytest.fixture(scope="module", autouse=True)
def _no_waiting_for_the_disk():
    """Most of a small conversion is fsync, and nothing here cuts the power."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    folder = tmp_path_factory.mktemp("release") / "hf"
    cfg = small_release(folder)
    (folder / "tokenizer.json").write_text('{"a": "tokenizer"}')
    (folder / "other.txt").write_text("not copied")
    return folder, cfg, read_raw(folder / "model.safetensors")


@pytest.fixture(scope="module")
def converted(release, tmp_path_factory):
    out = tmp_path_factory.mktemp("converted") / "out"
    return out, convert(release[0], out)


def _assert_leaves(tree, expected):
    leaves = {key_path(p): v for p, v in jax.tree_util.tree_flatten_with_path(tree)[0]}
    assert set(leaves) == set(expected)
    for path, values in expected.items():
        assert leaves[path].dtype == values.dtype, path
        np.testing.assert_array_equal(np.asarray(leaves[path]), values, err_msg=str(path))


def test_the_release_has_partial_blocks_of_both_kinds(release):
    _, _, raw = release
    for suffix, kind, size in (("wo_b.weight", "F8_E4M3", 128), ("0.w2.weight", "I8", 16)):
        shapes = [v.shape for n, (k, v) in raw.items() if n.endswith(suffix) and k == kind]
        assert shapes and all(shape[1] % size for shape in shapes)


def test_plain_orbax_reads_exactly_the_decoded_values(release, converted):
    _, cfg, raw = release
    out, report = converted
    expected = decoded_leaves(cfg, raw, jnp.bfloat16)
    _assert_leaves(ocp.PyTreeCheckpointer().restore(out), expected)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device),
        abstract_params(cfg, jnp.bfloat16),
    )
    with ocp.StandardCheckpointer() as checkpointer:
        _assert_leaves(checkpointer.restore(out, abstract), expected)
    assert report.bytes == sum(v.nbytes for v in expected.values())
    assert report.tensors == sum(not name.endswith(".scale") for name in raw)
    assert (report.dtype, report.resumed) == ("bfloat16", 0)


def test_the_folder_has_config_and_tokenizer_and_nothing_is_left_over(release, converted):
    folder, cfg, _ = release
    out, _ = converted
    for name in ("config.json", "tokenizer.json"):
        assert (out / name).read_bytes() == (folder / name).read_bytes()
    leaves = {".".join(path) for path in leaf_specs(cfg)}
    files = {"config.json", "tokenizer.json", "_METADATA", "_CHECKPOINT_METADATA"}
    assert {p.name for p in out.iterdir()} == leaves | files
    assert [p.name for p in out.parent.iterdir()] == ["out"]


def test_load_checkpoint_in_its_own_and_in_another_type(release, converted):
    _, cfg, raw = release
    params, found = load_checkpoint(converted[0])
    assert found == cfg
    assert jax.tree.structure(params) == jax.tree.structure(param_specs(cfg))
    _assert_leaves(params, decoded_leaves(cfg, raw, jnp.bfloat16))
    # All decoded values of this release are exact in bfloat16, so widening gives them again.
    params, _ = load_checkpoint(converted[0], dtype="float32")
    _assert_leaves(params, decoded_leaves(cfg, raw, jnp.float32))


def test_every_device_gets_its_part(release, converted):
    _, cfg, raw = release
    mesh = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    wanted = param_shardings(cfg, mesh)
    params, _ = load_checkpoint(converted[0], shardings=wanted)
    _assert_leaves(params, decoded_leaves(cfg, raw, jnp.bfloat16))
    assert jax.tree.map(lambda x: x.sharding, params) == wanted
    split = [x for x in jax.tree.leaves(params) if not x.sharding.is_fully_replicated]
    assert split
    for x in split:
        assert x.addressable_shards[0].data.size == x.size // 2
    with pytest.raises(ValueError, match="shardings must be one Sharding, or a tree"):
        load_checkpoint(converted[0], shardings={"embed": wanted["embed"]})


def test_float32_and_load_release_agree(release, tmp_path):
    folder, cfg, raw = release
    expected = decoded_leaves(cfg, raw, jnp.float32)
    convert(folder, tmp_path / "out", jnp.float32, workers=1)
    _assert_leaves(load_checkpoint(tmp_path / "out")[0], expected)
    params, found = load_release(folder, "float32")
    assert found == cfg
    _assert_leaves(params, expected)


def test_a_plain_release_and_a_mixture(release, tmp_path):
    """BF16 and F32 in place of FP8 and FP4, F16, I32 ids, FP8 experts: each by its own type."""
    _, cfg, raw = release
    mixed = {}
    for i, (name, (kind, stored)) in enumerate(raw.items()):
        if kind in ("F8_E4M3", "I8") and i % 3:
            plain = ("F32", np.float32) if i % 3 == 1 else ("BF16", ml_dtypes.bfloat16)
            mixed[name] = plain[0], decode_raw(raw, name).astype(plain[1])
        elif kind == "I64":
            mixed[name] = "I32", stored.astype(np.int32)
        elif name == "norm.weight":
            mixed[name] = "F16", stored.astype(np.float16)
        elif kind != "F8_E8M0":
            mixed[name] = kind, stored
    for name in list(mixed):
        scale = name.removesuffix(".weight") + ".scale"
        if mixed[name][0] in ("F8_E4M3", "I8"):
            mixed[scale] = raw[scale]
    expert = "layers.1.ffn.experts.1.w2.weight"
    rng = np.random.default_rng(0)
    mixed[expert] = "F8_E4M3", rng.integers(0, 0x7F, (160, 80)).astype(np.uint8)
    mixed[expert.replace("weight", "scale")] = "F8_E8M0", np.array([[120], [125]], np.uint8)
    assert {kind for kind, _ in mixed.values()} >= {"F8_E4M3", "I8", "BF16", "F32", "F16", "I32"}
    (tmp_path / "hf").mkdir()
    write_raw(tmp_path / "hf" / "model.safetensors", mixed)
    shutil.copy(release[0] / "config.json", tmp_path / "hf")
    params, _ = load_release(tmp_path / "hf", "float32")
    _assert_leaves(params, decoded_leaves(cfg, mixed, jnp.float32))


def test_shards_with_an_index_convert_to_the_same_bytes(converted, tmp_path):
    small_release(tmp_path / "hf", shard_bytes=300_000)
    shards = sorted((tmp_path / "hf").glob("model-*.safetensors"))
    assert len(shards) > 3 and (tmp_path / "hf" / "model.safetensors.index.json").exists()
    convert(tmp_path / "hf", tmp_path / "out")
    ours, theirs = folder_bytes(tmp_path / "out"), folder_bytes(converted[0])
    theirs.pop("tokenizer.json")
    assert ours == theirs


def test_save_checkpoint_writes_what_a_conversion_does(converted, tmp_path):
    params, cfg = load_checkpoint(converted[0])
    save_checkpoint(params, cfg, tmp_path / "saved")
    ours, theirs = folder_bytes(tmp_path / "saved"), folder_bytes(converted[0])
    config = json.loads(ours.pop("config.json"))
    assert config["compress_ratios"] == list(cfg.compress_ratios)
    assert ours == {k: v for k, v in theirs.items() if not k.endswith(".json")}
    assert load_checkpoint(tmp_path / "saved")[1] == cfg
    bad = {**params, "norm": params["norm"][:-1]}
    with pytest.raises(ValueError, match="1 of another shape or type: norm"):
        save_checkpoint(bad, cfg, tmp_path / "bad")
    with pytest.raises(ValueError, match="already holds a checkpoint"):
        save_checkpoint(params, cfg, tmp_path / "saved")
    assert not (tmp_path / "bad").exists()


@pytest.mark.parametrize("config", [flash_config, pro_config])
def test_chunks_of_the_big_models_follow_the_devices(config):
    """A chunk is at most one expert and 64 MiB, and lies within one of 8 devices' parts."""
    for path, spec in leaf_specs(config()).items():
        itemsize = spec.dtype(jnp.bfloat16).itemsize
        chunk = chunk_shape(spec, itemsize)
        assert np.prod(chunk) * itemsize <= 64 << 20, path
        assert not spec.stacked or chunk[0] == 1
        for size, axis, piece in zip(spec.shape, spec.axes, chunk, strict=True):
            if DEFAULT_RULES.get(axis) and np.prod(spec.shape) * itemsize > 16 << 20:
                assert size // 8 % piece == 0, (path, spec.shape, chunk)
    expert = leaf_specs(config())["layers", "5", "ffn", "experts", "w1"]
    assert chunk_shape(expert, 2) == (1, *expert.shape[1:])


VARIANTS = {
    "odd widths": {"hidden_size": 131, "moe_intermediate_size": 37, "q_lora_rank": 33},
    "no mtp": {"num_nextn_predict_layers": 0, "compress_ratios": (128, 4, 0)},
    "no hash layers": {"num_hash_layers": 0, "compress_ratios": (4, 4, 4, 0)},
    "streams": {"hc_mult": 2, "n_shared_experts": 2},
    "lone expert": {"n_shared_experts": 0, "n_routed_experts": 1, "num_experts_per_tok": 1},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_other_shapes_of_model(tmp_path, variant):
    cfg = dataclasses.replace(small_config(), **VARIANTS[variant])
    write_random_release(cfg, tmp_path / "hf")
    raw = read_raw(tmp_path / "hf" / "model.safetensors")
    convert(tmp_path / "hf", tmp_path / "out", "float32")
    params, found = load_checkpoint(tmp_path / "out")
    assert found == cfg
    _assert_leaves(params, decoded_leaves(cfg, raw, jnp.float32))
    assert jax.tree.structure(params) == jax.tree.structure(param_specs(cfg))
    assert jax.tree.structure(ocp.PyTreeCheckpointer().restore(tmp_path / "out")) == (
        jax.tree.structure(params)
    )
