"""The score and generate commands, in process, on a converted random release."""

import json

import generate
import numpy as np
import pytest
import score
import tokenizers
from convert import main as convert_main
from make_checkpoint import main as make_main
from tokenizers import models as tokenizer_models

from models.checkpoint import load_checkpoint
from models.text import Bytes, load_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("commands")
    release, model = str(folder / "release"), str(folder / "model")
    assert make_main(["--preset", "tiny", "--layers", "3", "--out", release]) == 0
    assert convert_main(["--hf", release, "--out", model, "--dtype", "float32"]) == 0
    rng = np.random.default_rng(0)
    np.save(folder / "ids.npy", rng.integers(0, 512, (2, 70)))
    return folder


def last_json(capsys):
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def run_score(folder, name, *extra):
    out = folder / name
    arguments = ["--checkpoint", str(folder / "model"), "--ids", str(folder / "ids.npy")]
    code = score.main([*arguments, "--out", str(out), "--json", *extra])
    return code, (dict(np.load(out)) if code == 0 else None)


def run_generate(folder, capsys, *extra):
    code = generate.main(["--checkpoint", str(folder / "model"), "--json", *extra])
    return last_json(capsys) if code == 0 else code


@pytest.fixture(scope="module")
def whole(folder):
    code, arrays = run_score(folder, "whole.npz", "--mtp")
    assert code == 0
    return arrays


def test_scores_have_the_documented_shapes_and_likelihood(folder, whole, capsys):
    assert whole["logits"].shape == (2, 70, 512) and whole["logits"].dtype == np.float32
    assert whole["mtp_logits"].shape == (2, 69, 512) and whole["mtp_logits"].dtype == np.float32
    run_score(folder, "again.npz", "--mtp")
    report = last_json(capsys)
    logits = whole["logits"][:, :-1].astype(np.float64)
    ids = np.load(folder / "ids.npy")
    chosen = np.take_along_axis(logits, ids[:, 1:, None], -1)[..., 0]
    expected = (chosen - np.log(np.exp(logits).sum(-1))).mean()
    assert report["mean_log_likelihood"] == pytest.approx(expected, abs=1e-5)
    assert report["batch"] == 2 and report["tokens"] == 70


@pytest.mark.parametrize("split", [["--prefill", "37", "--chunk", "16"], ["--prefill", "0"]])
def test_any_split_gives_the_same_scores(folder, whole, split):
    code, arrays = run_score(folder, "split.npz", "--mtp", *split)
    assert code == 0
    for name in ("logits", "mtp_logits"):
        np.testing.assert_allclose(arrays[name], whole[name], atol=1e-4)


@pytest.mark.slow
def test_spin_scores_differ_and_say_what_they_saved(folder, whole, capsys):
    spin = ["--prefill", "40", "--sparsity", "0.6", "--block-size", "1", "--policy", "none"]
    code, arrays = run_score(folder, "spin.npz", *spin)
    report = last_json(capsys)
    assert code == 0 and 0 < report["realized_sparsity"] < 0.6
    assert report["indexer_bytes_read"] < report["indexer_bytes_all_keep"]
    assert "miss_mean" not in report
    code, measured = run_score(folder, "miss.npz", *spin, "--diagnose")
    report = last_json(capsys)
    assert code == 0 and report["miss_rows"] > 0
    assert 0 < report["miss_mean"] < 1 and report["miss_mean"] <= report["miss_p99"] <= 1
    np.testing.assert_array_equal(measured["logits"], arrays["logits"])
    np.testing.assert_allclose(arrays["logits"][:, :40], whole["logits"][:, :40], atol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prefill", "71"], "prefill is 71; ids have 70 tokens"),
        (["--chunk", "0"], "chunk is 0"),
        (["--diagnose"], "give a --sparsity"),
        (["--sparsity", "1.0"], "sparsity is 1.0"),
        (["--block-size", "0", "--sparsity", "0.4"], "block_size is 0"),
        (["--checkpoint", "nowhere"], "nowhere"),
        (["--ids", "nowhere.npy"], "nowhere.npy"),
    ],
)
def test_mistakes_are_one_line_and_leave_no_file(folder, capsys, arguments, message):
    code, _ = run_score(folder, "mistake.npz", *arguments)
    error = capsys.readouterr().err
    assert code == 2 and message in error and "Traceback" not in error
    assert not list(folder.glob("mistake.npz*"))


def test_ids_outside_the_vocabulary_are_named(folder, capsys):
    np.save(folder / "bad.npy", np.array([[1, 2, 512]]))
    code, _ = run_score(folder, "bad.npz", "--ids", str(folder / "bad.npy"))
    assert code == 2 and "token 512" in capsys.readouterr().err


# One shape for all: what is compiled once serves every test.
SAME = ["--max-len", "192", "--chunk", "32", "--max-new-tokens", "20", "--ignore-eos"]


def test_greedy_tokens_are_the_argmax_of_the_scores(folder, capsys):
    """One implementation path against another: the loop's tokens, scored afterwards."""
    prompt = np.arange(50) * 7 % 512
    np.save(folder / "prompt.npy", prompt)
    report = run_generate(folder, capsys, "--ids", str(folder / "prompt.npy"), *SAME)
    (tokens,) = report["tokens"]
    assert len(tokens) == 20 and report["tokens_per_second"] > 0 and report["prefill_seconds"] > 0
    np.save(folder / "both.npy", np.array([[*prompt, *tokens]] * 2))
    code, arrays = run_score(folder, "both.npz", "--mtp", "--ids", str(folder / "both.npy"))
    assert code == 0
    assert arrays["logits"][0, 49:-1].argmax(-1).tolist() == tokens

    # Ragged, padded with -1; the first row is the prompt from before.
    ragged = np.full((2, 50), -1)
    ragged[0], ragged[1, :5] = prompt, [9, 8, 7, 6, 5]
    np.save(folder / "ragged.npy", ragged)
    report = run_generate(folder, capsys, "--ids", str(folder / "ragged.npy"), *SAME)
    assert report["tokens"][0] == tokens


def test_spin_reports_what_it_saved(folder, capsys):
    np.save(folder / "long.npy", np.arange(150) * 11 % 512)
    base = ["--ids", str(folder / "long.npy"), *SAME]
    plain = run_generate(folder, capsys, *base)
    assert "realized_sparsity" not in plain
    report = run_generate(folder, capsys, *base, "--sparsity", "0.4", "--block-size", "4")
    assert 0.2 < report["realized_sparsity"] < 0.4
    assert 0 < report["blocks_scored"] < report["blocks_visible"]
    assert report["indexer_bytes_read"] == report["blocks_scored"] * 4 * 64 * 4


@pytest.mark.slow
def test_drafts_report_what_was_accepted(folder, capsys):
    np.save(folder / "drafts.npy", np.arange(150) * 11 % 512)
    base = ["--ids", str(folder / "drafts.npy"), *SAME, "--sparsity", "0.4", "--block-size", "4"]
    report = run_generate(folder, capsys, *base, "--draft-length", "2")
    assert len(report["tokens"][0]) == 20
    assert 1 <= report["acceptance_length"] <= 3
    assert 0 <= report["draft_acceptance_rate"] <= 1
    assert 0 <= report["identical_masks"] <= 1 and 0 < report["realized_sparsity"] < 0.4
    assert (
        generate.main(["--checkpoint", str(folder / "model"), *base, "--draft-length", "-1"]) == 2
    )
    assert "draft_length is -1" in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--draft-mask", "union"], ["--draft-update", "row0"]])
def test_policies_of_drafts_need_drafts_and_spin(capsys, option):
    base = ["--prompt", "hello", "--max-new-tokens", "2", *option]
    assert generate.main([*base, "--sparsity", "0.4"]) == 2
    error = capsys.readouterr().err
    assert option[0] in error and "give a --draft-length of 1 or more" in error
    assert generate.main([*base, "--draft-length", "2"]) == 2
    assert "give a --sparsity above 0" in capsys.readouterr().err


def test_a_prompt_streams_the_text_that_it_reports(folder, capsys):
    options = ["--prompt", "hello", "--stream", "--json", *SAME]
    assert generate.main(["--checkpoint", str(folder / "model"), *options]) == 0
    out = capsys.readouterr().out
    text, _, line = out.rstrip("\n").rpartition("\n")
    assert json.loads(line)["text"][0] == text


def test_a_dialogue_reports_its_turns(folder, capsys):
    turns = folder / "turns.jsonl"
    turns.write_text('{"prompt": "one"}\n\n{"ids": [5, 6, 7]}\n')
    report = run_generate(folder, capsys, "--turns", str(turns), *SAME)
    assert len(report["turns"]) == 2
    assert report["tokens"] == report["turns"][1]["tokens"]
    first = report["turns"][0]["tokens"][0]
    np.save(folder / "one.npy", np.array([*b"one", *first, 5, 6, 7]))
    longer = run_generate(folder, capsys, "--ids", str(folder / "one.npy"), *SAME)
    assert longer["tokens"] == report["tokens"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no turn"),
        ('{"prompt": 3}', "line 1 must be"),
        ('{"prompt": "a"}\nnonsense', "line 2 is not JSON"),
        ('{"ids": []}', "turn"),
    ],
)
def test_bad_dialogues_are_named(folder, capsys, content, message):
    turns = folder / "bad.jsonl"
    turns.write_text(content)
    options = ["--turns", str(turns), "--max-new-tokens", "4"]
    assert generate.main(["--checkpoint", str(folder / "model"), *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt", ""], "at least one token"),
        (["--prompt", "abc", "--max-len", "5"], "max_len is 5"),
        (["--prompt", "abc", "--temperature", "-1"], "temperature is -1"),
        (["--prompt", "abc", "--top-p", "0"], "top_p is 0"),
    ],
)
def test_bad_requests_are_named(folder, capsys, options, message):
    arguments = ["--checkpoint", str(folder / "model"), "--max-new-tokens", "4", *options]
    assert generate.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_padding_inside_a_prompt_is_named(folder, capsys):
    np.save(folder / "holes.npy", np.array([[1, -1, 2]]))
    options = ["--ids", str(folder / "holes.npy"), "--max-new-tokens", "4"]
    assert generate.main(["--checkpoint", str(folder / "model"), *options]) == 2
    assert "after a -1" in capsys.readouterr().err


def test_chat_markers_come_from_the_tokenizer_file(folder, tmp_path):
    _, cfg = load_checkpoint(folder / "model")
    vocabulary = {"<unk>": 0, "a": 1, "b": 2}
    plain = tokenizers.Tokenizer(tokenizer_models.WordLevel(vocabulary, "<unk>"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    plain.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path, cfg).encode("a b") == [1, 2]
    names = [
        "<\uff5cbegin\u2581of\u2581sentence\uff5c>",
        "<\uff5cUser\uff5c>",
        "<\uff5cAssistant\uff5c>",
    ]
    plain.add_special_tokens(names)
    plain.save(str(tmp_path / "tokenizer.json"))
    begin, user, assistant = (plain.token_to_id(n) for n in names)
    loaded = load_tokenizer(tmp_path, cfg)
    assert loaded.encode("a b") == [begin, user, 1, 2, assistant]
    assert loaded.encode("a b", chat=False) == [begin, 1, 2]
    assert loaded.decode([user, 1, 2]) == "a b"
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="not a tokenizer"):
        load_tokenizer(tmp_path, cfg)
    assert isinstance(load_tokenizer(tmp_path / "none", cfg), Bytes)
    assert Bytes().decode([104, 105, 300]) == "hi\ufffd"


@pytest.mark.parametrize("command", [score, generate])
def test_help_has_examples(command, capsys):
    with pytest.raises(SystemExit) as stop:
        command.main(["--help"])
    assert stop.value.code == 0 and "examples:" in capsys.readouterr().out
