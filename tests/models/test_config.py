"""Configurations: both spellings, derived keys, and every contradiction named."""

import dataclasses
import json

import pytest

from models.config import ModelConfig, YarnConfig
from models.presets import flash_config, pro_config, tiny_config


@pytest.mark.parametrize("cfg", [flash_config(), pro_config(), tiny_config()])
def test_a_config_survives_its_file(cfg, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(cfg.to_dict()))
    assert ModelConfig.load(tmp_path) == cfg == ModelConfig.load(tmp_path / "config.json")


def test_the_kinds_of_layers_of_the_releases():
    for cfg, sliding, csa, hca in ((flash_config(), 2, 21, 20), (pro_config(), 0, 30, 31)):
        assert [cfg.layer_ratios.count(r) for r in (0, 4, 128)] == [sliding, csa, hca]


def nested(cfg):
    """The same configuration as the transformers library spells it."""
    data = cfg.to_dict()
    names = {
        0: "sliding_attention",
        4: "compressed_sparse_attention",
        128: "heavily_compressed_attention",
    }
    data["layer_types"] = [names[r] for r in cfg.layer_ratios]
    hashed = cfg.num_hash_layers
    data["mlp_layer_types"] = ["hash_moe"] * hashed + ["moe"] * (cfg.num_hidden_layers - hashed)
    yarn = {**data.pop("rope_scaling"), "rope_type": "yarn"}
    data["rope_parameters"] = {
        "main": {"rope_type": "default", "rope_theta": data.pop("rope_theta")},
        "compress": {**yarn, "rope_theta": data.pop("compress_rope_theta")},
    }
    data["partial_rotary_factor"] = data.pop("qk_rope_head_dim") / data["head_dim"]
    for key in ("compress_ratios", "num_hash_layers"):
        del data[key]
    return data


@pytest.mark.parametrize("cfg", [flash_config(), tiny_config()])
def test_the_nested_spelling_says_the_same(cfg):
    assert ModelConfig.from_dict(nested(cfg)) == cfg


def test_null_is_absent():
    data = tiny_config().to_dict()
    for key in ("model_type", "scoring_func", "hidden_act", "attention_bias", "n_shared_experts"):
        data[key] = None
    data["rope_scaling"]["beta_fast"] = None
    assert ModelConfig.from_dict(data) == tiny_config()
    data["rope_scaling"] = None
    assert ModelConfig.from_dict(data).yarn is None
    data["eos_token_id"] = None
    assert ModelConfig.from_dict(data).eos_token_ids == ()
    data["eos_token_id"] = [1, 7]
    assert ModelConfig.from_dict(data).eos_token_ids == (1, 7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"hidden_size": "64"}, "hidden_size must be of type int, not '64'"),
        ({"hidden_size": 0}, "hidden_size must be at least 1, not 0"),
        ({"compress_ratios": [0, 4]}, "has 2 entries; .* needs 8"),
        ({"compress_ratios": [0, 0, 4, 64, 4, 128, 4, 0]}, r"compress_ratios\[3\] is 64"),
        ({"compress_ratios": [0, 0, 4, 128, 4, 128, 4, 4]}, "MTP layer must have .* 0, not 4"),
        ({"compress_ratios": 4}, "list of integers, not 4"),
        ({"model_type": "llama"}, "'llama'; only 'deepseek_v4'"),
        ({"scoring_func": "softmax"}, "'softmax'; DeepSeek-V4 has 'sqrtsoftplus'"),
        ({"expert_dtype": "int3"}, "'int3' is unknown"),
        ({"o_groups": 3}, "4 must be a multiple of o_groups 3"),
        ({"num_experts_per_tok": 9}, "9 exceeds n_routed_experts 8"),
        ({"qk_rope_head_dim": 33}, "even and at most head_dim 64, not 33"),
        ({"index_head_dim": 48}, "power of two .*, not 48"),
        ({"index_head_dim": 16}, "qk_rope_head_dim 32 is larger than index_head_dim 16"),
        ({"rope_theta": 1}, "rope_theta must be more than 1"),
        ({"routed_scaling_factor": float("nan")}, "routed_scaling_factor must be a positive"),
        ({"rope_scaling": "yarn"}, "rope_scaling must be a JSON object or null, not 'yarn'"),
        ({"rope_scaling": {"type": "linear"}}, "'linear' is not supported"),
        ({"rope_scaling": {"type": "yarn"}}, "lacks factor"),
    ],
)
def test_contradictions_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict({**tiny_config().to_dict(), **change})


@pytest.mark.parametrize("key", ["factor", "original_max_position_embeddings", "beta_slow"])
def test_yarn_numbers_are_checked(key):
    data = tiny_config().to_dict()
    data["rope_scaling"][key] = 0
    with pytest.raises(ValueError, match=f"rope_scaling {key} must be a positive number, not 0"):
        ModelConfig.from_dict(data)
    data["rope_scaling"][key] = "x"
    with pytest.raises(ValueError, match=f"rope_scaling {key} must be of type"):
        ModelConfig.from_dict(data)


def test_unreadable_files_are_named(tmp_path):
    with pytest.raises(ValueError, match="no model configuration at"):
        ModelConfig.load(tmp_path)
    for content in (b"{", b"\xff\xfe", b"[]"):
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(ValueError, match="config.json"):
            ModelConfig.load(tmp_path)


def test_it_is_a_static_argument():
    cfg = dataclasses.replace(tiny_config(), yarn=YarnConfig(4, 128))
    assert hash(cfg) == hash(dataclasses.replace(cfg)) and cfg.with_quant_sim() != cfg
