"""The presets against the spec's table, and random releases."""

import dataclasses
import json

import numpy as np
import pytest
from checkpoint_cases import decode_raw, read_raw, small_config

from models.checkpoint.random_release import write_random_release
from models.checkpoint.release import open_release
from models.config import ModelConfig
from models.params import count_params
from models.presets import PRESETS, flash_config, flash_tiny_config, pro_config, shrink, tiny_config


def test_flash_and_pro_are_what_the_table_says():
    flash, pro = flash_config(), pro_config()
    kinds = [[c.layer_ratios.count(r) for r in (0, 4, 128)] for c in (flash, pro)]
    assert kinds == [[2, 21, 20], [0, 30, 31]]
    assert (len(flash.compress_ratios), len(pro.compress_ratios)) == (44, 62)
    assert 280e9 < count_params(flash, mtp=False) < 290e9
    assert 1.5e12 < count_params(pro, mtp=False) < 1.65e12
    for cfg in (flash, pro):
        assert ModelConfig.from_dict(cfg.to_dict()) == cfg


def test_flash_tiny_has_flash_layers_at_tiny_widths():
    cfg = flash_tiny_config()
    assert cfg.compress_ratios == flash_config().compress_ratios
    assert cfg.hidden_size == tiny_config().hidden_size
    assert count_params(cfg) < 30e6


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("layers", [1, 2, 3, 4, 6])
def test_shrinking_keeps_a_mix_of_kinds(preset, layers):
    cfg = PRESETS[preset]()
    kinds = set(cfg.layer_ratios)
    small = shrink(cfg, layers=layers, experts=2)
    assert small.num_hidden_layers == layers and small.compress_ratios[-1] == 0
    assert len(set(small.layer_ratios)) == min(layers, len(kinds))
    assert 4 in small.layer_ratios
    assert small.num_hash_layers < layers
    assert small.num_experts_per_tok <= small.n_routed_experts == 2


@pytest.mark.parametrize("wrong", [{"layers": 0}, {"layers": 8}, {"experts": 9}, {"experts": -1}])
def test_shrinking_only_shrinks(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=f"{name} must be 1 to .*, not {value}"):
        shrink(tiny_config(), **wrong)


def test_values_depend_on_seed_and_name_alone(tmp_path):
    cfg = small_config()
    write_random_release(cfg, tmp_path / "a")
    write_random_release(cfg, tmp_path / "b")
    write_random_release(cfg, tmp_path / "c", seed=1)
    more = dataclasses.replace(cfg, n_routed_experts=4)
    write_random_release(more, tmp_path / "d")
    raw = {n: read_raw(tmp_path / n / "model.safetensors") for n in "abcd"}
    a = (tmp_path / "a" / "model.safetensors").read_bytes()
    assert a == (tmp_path / "b" / "model.safetensors").read_bytes()
    for name, (kind, values) in raw["a"].items():
        other = raw["c"][name][1]
        assert other.shape == values.shape
        if kind != "F8_E8M0":
            assert not np.array_equal(other, values), name
        if raw["d"][name][1].shape == values.shape and kind != "I64":
            np.testing.assert_array_equal(raw["d"][name][1], values)


def test_types_and_scales_of_values(tmp_path):
    cfg = small_config()
    total = write_random_release(cfg, tmp_path / "q")
    write_random_release(cfg, tmp_path / "plain", quantised=False)
    raw, plain = (read_raw(tmp_path / n / "model.safetensors") for n in ("q", "plain"))
    assert {kind for kind, _ in raw.values()} == {"F8_E4M3", "F8_E8M0", "I8", "BF16", "F32", "I64"}
    assert {kind for kind, _ in plain.values()} == {"BF16", "F32", "I64"}
    assert total == sum(v.nbytes for _, v in raw.values())
    seen = set()
    for name, (kind, _) in raw.items():
        values = decode_raw(raw, name) if kind != "F8_E8M0" else None
        if kind in ("F8_E4M3", "I8"):
            seen.add(kind)
            # Scales are powers of two, and differ by up to two from block to block.
            assert 0.33 < values.std() * values.shape[1] ** 0.5 < 3.0, name
        elif kind == "I64":
            assert all(len(set(row)) == cfg.num_experts_per_tok for row in values.tolist())
            assert set(np.unique(values)) == set(range(cfg.n_routed_experts))
    assert seen == {"F8_E4M3", "I8"}
    for folder in ("q", "plain"):
        release = open_release(tmp_path / folder)
        assert release.cfg == cfg
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    assert config["quantization_config"]["weight_block_size"] == [128, 128]


def test_a_folder_with_files_is_left_alone(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "x").write_text("mine")
    with pytest.raises(ValueError, match="already holds files"):
        write_random_release(small_config(), tmp_path / "out")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["x"]
