"""The shipped pocket model: its files, and that commands without a checkpoint answer with it."""

import json
import math
from collections import Counter

import command
import demo
import generate
import pytest
from pocket_text import HELD_OUT, synthetic
from safetensors import safe_open

from models import pocket
from models.pocket import pocket_config, pocket_weights

# Text that is the same for every Python version.
BEFORE, AFTER = synthetic(HELD_OUT)[:240].decode(), synthetic(HELD_OUT)[240:580].decode()


def answer(capsys, value):
    """What generate.py prints and reports about a fact in 600 tokens of filler."""
    prompt = f"{BEFORE}#bak:{value}.{AFTER}\n?bak:"
    assert generate.main(["--prompt", prompt, "--max-new-tokens", "20", "--json"]) == 0
    *printed, report = capsys.readouterr().out.splitlines()
    return printed, json.loads(report)


def test_generate_answers_with_the_pocket_model(capsys):
    printed, report = answer(capsys, "731")
    assert printed == ["731"]
    # The newline ends the answer, long before the limit.
    assert report["tokens"] == [list(b"731\n")] and report["text"] == ["731\n"]
    assert answer(capsys, "731")[1]["tokens"] == report["tokens"]
    # It reads the fact: another value, another answer.
    assert answer(capsys, "208")[0] == ["208"]


def test_the_files_are_a_small_release_of_the_pocket_config():
    folder = pocket_weights()
    weights = folder / "model.safetensors"
    assert weights.stat().st_size < 10e6
    with safe_open(str(weights), "numpy") as file:
        tensors = [file.get_slice(name) for name in file.keys()]
        values = Counter()
        for tensor in tensors:
            values[tensor.get_dtype()] += math.prod(tensor.get_shape())
    assert set(values) == {"BF16", "F32", "I64"}
    assert values["BF16"] > 0.98 * values.total()
    params, cfg = command.load_model(None, None)
    assert cfg == pocket_config() and params["embed"].dtype == "float32"
    assert (folder / "MODEL_CARD.md").is_file()


def test_random_weights_are_asked_for_by_name(monkeypatch):
    monkeypatch.setattr(command, "init_params", lambda cfg, key, dtype: ("random", dtype))
    params, cfg = command.load_model("random", "bfloat16")
    assert params == ("random", command.DTYPES["bfloat16"]) and cfg.vocab_size == 512


def test_missing_weights_are_named_with_a_remedy(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(pocket, "__file__", str(tmp_path / "pocket.py"))
    assert generate.main(["--prompt", "a", "--max-new-tokens", "1"]) == 2
    error = capsys.readouterr().err
    assert "config.json and model.safetensors" in error and str(tmp_path) in error
    assert "scripts/train_pocket.py" in error and "Traceback" not in error


@pytest.mark.slow
def test_the_demo_shows_facts_question_answers_and_savings(capsys):
    assert demo.main(["--task", "single", "--length", "1024"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (question,) = (line.split("?")[1] for line in lines if "the question" in line)
    found = {line[:23].strip(): line[23:].strip() for line in lines if line.startswith("  ")}
    right = found["right answer"]
    assert any(f"#{question}{right}." in line for line in lines)
    assert found["all blocks scored"] == found["SPIN at 40%"] == right
    (saved,) = (line for line in lines if line.startswith("While answering"))
    assert 0 < float(saved.split("(")[1].split("%")[0]) < 40


def test_the_demo_names_a_mistake(capsys):
    assert demo.main(["--length", "20"]) == 2
    assert "ask for more tokens" in capsys.readouterr().err
