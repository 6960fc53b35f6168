"""scripts/bench.py drafts: its prompts, and that its report is of the runs it made."""

import argparse
import json

import bench
import bench_drafts
import numpy as np
import pytest
from draft_policies import POLICIES, SPARSITIES
from pocket_data import TASKS

from models.pocket import pocket_config
from models.presets import shrink, tiny_config


def arguments(**changes):
    values = {"checkpoint": None, "prompts": 9, "prompt_length": 300, "seed": 0}
    return argparse.Namespace(**values | changes)


def test_the_pocket_model_is_asked_for_what_its_prompts_hold():
    prompts, samples = bench_drafts.make_prompts(arguments(), pocket_config())
    assert [s.task for s in samples] == [*TASKS, TASKS[0]]
    assert samples[0] != samples[8]  # a task that comes again is another sample
    assert {len(p) for p in prompts} == {300}
    facts = {s.task: (s.prompts[0], s.answers[0]) for s in samples}
    text, answer = facts["single"]
    key = text[-4:-1]
    assert text.endswith(b"\n?" + key + b":")
    assert b"#" + key + b":" + answer.strip() + b"." in text
    assert int(answer) % 8 == 3  # a held-out value
    with pytest.raises(ValueError, match="ask for more tokens"):
        bench_drafts.make_prompts(arguments(prompt_length=20), pocket_config())


def test_other_models_are_given_random_tokens():
    cfg = tiny_config()
    prompts, samples = bench_drafts.make_prompts(arguments(checkpoint="random"), cfg)
    assert samples == [] and np.shape(prompts) == (9, 300)
    assert 0 <= np.min(prompts) and 255 < np.max(prompts) < cfg.vocab_size


@pytest.mark.slow
def test_the_report_is_of_every_policy_at_every_sparsity(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench_drafts, "SPARSITIES", SPARSITIES[::3])
    monkeypatch.setattr(
        bench_drafts.command, "tiny_config", lambda: shrink(tiny_config(), experts=4)
    )
    out = tmp_path / "drafts.json"
    options = ["--prompts", "2", "--prompt-length", "70", "--steps", "12", "--block-size", "1"]
    bench.main(["drafts", "--checkpoint", "random", *options, "--out", str(out)])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert json.loads(out.read_text()) == report
    assert report["checkpoint"] == "random" and report["texts"] == []
    plain, drafted, *spin = report["live"]
    assert "acceptance_length" not in plain and "realized_sparsity" not in drafted
    assert [(r["mask"], r["update"]) for r in spin] == list(bench_drafts.LIVE)
    assert "same_tokens" not in plain and drafted["same_tokens"] == 1
    for row in (drafted, *spin):
        assert 1 <= row["acceptance_length"] <= 4 and 0 <= row["draft_acceptance_rate"] <= 1
        assert "right_answers" not in row
    for row in spin:
        assert 0 < row["realized_sparsity"] < 0.4
    assert spin[1]["identical_masks"] == 1  # of row 0's blocks for all rows
    wanted = [(*pair, sparsity) for pair in POLICIES for sparsity in SPARSITIES[::3]]
    assert [(r["mask"], r["update"], r["sparsity"]) for r in report["offline"]] == wanted
