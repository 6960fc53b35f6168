"""The pocket model's configurations and training command, on a toy."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import safetensors.numpy
import train_pocket
from convert import main as convert_main
from pocket_data import MIXED
from pocket_training import Recipe, Stage, flops_per_token, parse_stages, whole_params

from models.checkpoint import load_checkpoint, load_release
from models.checkpoint.export import export_release
from models.config import CSA, SLIDING, ModelConfig
from models.params import count_params, is_spec, param_specs
from models.pocket import init_for_training, pocket_config, toy_config

# A hash-routed CSA layer and the score-routed, sliding MTP block: every block is another ten
# seconds of compilation, and at 128 tokens an HCA layer would have a single slot.
CFG = dataclasses.replace(
    toy_config(), num_hidden_layers=1, compress_ratios=(CSA, SLIDING), num_hash_layers=1
)
# A minute of compiling; CI runs it.
pytestmark = pytest.mark.slow

STEPS = 12
STAGES = (Stage(128, 4, 8, False), Stage(128, 4, STEPS - 8, True))
RECIPE = Recipe(STAGES, lr=3e-3, compute="float32")


def start(folder):
    folder.mkdir(exist_ok=True)
    return train_pocket.Run(CFG, RECIPE, 1, MIXED, folder)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    run = start(tmp_path_factory.mktemp("pocket") / "whole")
    run.train(dispatch=4)
    return run


def lines(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_training_lowers_every_loss(whole):
    log = lines(whole.out)
    assert [line["step"] for line in log] == [4, 8, 12]
    assert [line["sparse"] for line in log] == [False, False, True]
    assert log[0]["loss"] > 5
    for name in ("loss", "next_token", "mtp"):
        assert log[-1][name] < log[0][name] - 0.5, name


def test_a_resumed_run_ends_bit_for_bit_like_an_uninterrupted_one(whole, tmp_path):
    folder = tmp_path / "parts"
    for stop in (4, 8, STEPS):
        run = start(folder)
        assert run.step == stop - 4
        # No minutes are left after the first dispatch, but for the last call.
        run.train(dispatch=4, minutes=None if stop == STEPS else 0.0)
        assert run.step == stop
    for got, wanted in zip(jax.tree.leaves(run.state), jax.tree.leaves(whole.state), strict=True):
        np.testing.assert_array_equal(got, wanted)
    assert [line["step"] for line in lines(folder)] == [4, 8, 12]
    assert [p.name for p in (folder / "state").iterdir()] == ["12"]


def test_another_recipe_does_not_go_on_with_a_run(whole):
    with pytest.raises(ValueError, match="holds a run with other options"):
        train_pocket.Run(CFG, RECIPE, 2, MIXED, whole.out)


def test_the_model_is_a_release_that_converts(whole, tmp_path):
    model = whole.out / "model"
    params, cfg = load_release(model, "float32")
    assert cfg == CFG
    trained = whole_params(whole.state)
    leaves, _ = jax.tree.flatten(param_specs(cfg), is_leaf=is_spec)
    for spec, got, master in zip(
        leaves, jax.tree.leaves(params), jax.tree.leaves(trained), strict=True
    ):
        exact = spec.storage in ("F32", "I64")
        np.testing.assert_allclose(got, master, rtol=0 if exact else 2**-8, atol=1e-30)
    # An independent reader finds the release's names.
    names = set(safetensors.numpy.load_file(model / "model.safetensors"))
    assert {"layers.0.attn.indexer.wq_b.weight", "mtp.0.ffn.experts.3.w2.weight"} <= names
    assert convert_main(["--hf", str(model), "--out", str(tmp_path / "converted")]) == 0
    converted, _ = load_checkpoint(tmp_path / "converted")
    np.testing.assert_array_equal(converted["embed"].astype(np.float32), params["embed"])


def test_routing_biases_move_towards_balance_and_tables_stay(whole):
    fresh = init_for_training(CFG, 1)
    trained = whole_params(whole.state)
    np.testing.assert_array_equal(
        trained["layers"][0]["ffn"]["tid2eid"], fresh["layers"][0]["ffn"]["tid2eid"]
    )
    bias = np.asarray(trained["mtp"][0]["ffn"]["bias"])
    np.testing.assert_allclose(bias, np.round(bias / 1e-3) * 1e-3, atol=1e-6)
    assert 0 < np.abs(bias).max() <= STEPS * 1e-3 + 1e-6


def test_the_pocket_fits_ten_megabytes_and_round_trips():
    cfg = pocket_config()
    assert 3e6 < count_params(cfg) < 10e6
    assert ModelConfig.from_dict(json.loads(json.dumps(cfg.to_dict()))) == cfg
    sizes = {"F32": 4, "I64": 8}
    leaves, _ = jax.tree.flatten(param_specs(cfg), is_leaf=is_spec)
    assert sum(np.prod(s.shape) * sizes.get(s.storage, 2) for s in leaves) < 9.5e6
    assert 2e7 < flops_per_token(cfg, 256) < flops_per_token(cfg, 4096) < 6e7


def test_exports_do_not_overwrite(whole):
    with pytest.raises(ValueError, match="model"):
        export_release(whole_params(whole.state), CFG, whole.out / "model")


def test_options_are_checked(tmp_path, capsys):
    assert parse_stages("256x8x100d, 64x4x1s") == (
        Stage(256, 8, 100, False),
        Stage(64, 4, 1, True),
    )
    for stages in ("256x8x100", "256x0x100d", "256x8d", ""):
        with pytest.raises(ValueError, match="LENGTHxROWSxSTEPS"):
            parse_stages(stages)
    assert train_pocket.main(["--out", str(tmp_path / "x"), "--scale", "0"]) == 2
    assert "--scale 0.0 must be positive" in capsys.readouterr().err
