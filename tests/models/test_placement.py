"""A session on the devices of its parameters: each program is compiled once."""

import dataclasses

import jax
import numpy as np
import pytest
from random_params import random_params

import models.programs
from models.generate import Session
from models.params import param_shardings
from models.presets import shrink, tiny_config

CFG = dataclasses.replace(
    shrink(tiny_config(), layers=2), compress_ratios=(4, 128, 0), hc_sinkhorn_iters=2
)


@pytest.fixture(scope="module")
def params():
    return random_params(CFG, 0)


@pytest.fixture
def programs(monkeypatch):
    compiled = {}
    monkeypatch.setattr(models.programs, "_PROGRAMS", compiled)
    return compiled


def answers(params, cfg):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, cfg.vocab_size, n).tolist() for n in (150, 40)]
    session = Session(params, cfg, batch=2, max_len=260, chunk=64)
    parts = list(session.stream_turn(prompts, 9, stop=[], every=4))
    return [sum(part, []) for part in zip(*parts, strict=True)], session.turn(prompts[::-1], 9)


def test_parameters_committed_to_a_device(params, programs):
    """As they come from a checkpoint: one program for prefill, one for decoding."""
    wanted = answers(params, CFG)
    assert len(programs) == 2
    programs.clear()
    device = jax.devices()[1]
    assert answers(jax.device_put(params, device), CFG) == wanted
    assert len(programs) == 2


def test_parameters_sharded_over_a_mesh(params, programs):
    mesh = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.device_put(params, param_shardings(CFG, mesh))
    assert any(not x.sharding.is_fully_replicated for x in jax.tree.leaves(sharded))
    got = answers(sharded, CFG)
    assert len(programs) == 2
    programs.clear()
    assert got == answers(params, CFG)


def test_meshes_of_explicit_sharding_are_named():
    mesh = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Explicit,))
    with pytest.raises(ValueError, match="mesh axis 'model' is of explicit"):
        param_shardings(CFG, mesh)
