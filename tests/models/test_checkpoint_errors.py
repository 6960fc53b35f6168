"""Releases and checkpoints that are not what they should be: every one named, nothing lost."""

import json
import os
import re
import shutil

import ml_dtypes
import numpy as np
import pytest
from checkpoint_cases import folder_bytes, read_raw, small_release, write_raw

from models.checkpoint import convert, load_checkpoint, load_release

WQ_A = "layers.0.attn.wq_a"
EXPERT = "layers.2.ffn.experts.1.w3"
TID = "layers.0.ffn.gate.tid2eid"


@pytest.fixture(scope="module", autouse=True)
def _no_waiting_for_the_disk():
    """Most of a small conversion is fsync, and nothing here cuts the power."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    folder = tmp_path_factory.mktemp("release") / "hf"
    small_release(folder)
    return folder, read_raw(folder / "model.safetensors")


@pytest.fixture(scope="module")
def converted(release, tmp_path_factory):
    out = tmp_path_factory.mktemp("converted") / "out"
    convert(release[0], out)
    return out


def _refused(tmp_path, release, *messages, change=None, config=None):
    """Converting the release with its tensors or config changed fails so, and writes nothing."""
    folder, raw = release
    (tmp_path / "hf").mkdir()
    raw = dict(raw)
    if change:
        change(raw)
    write_raw(tmp_path / "hf" / "model.safetensors", raw)
    data = json.loads((folder / "config.json").read_text())
    data.update(config or {})
    (tmp_path / "hf" / "config.json").write_text(json.dumps(data))
    with pytest.raises(ValueError) as error:
        convert(tmp_path / "hf", tmp_path / "out")
    for message in messages:
        assert re.search(message, str(error.value)), str(error.value)
    assert not (tmp_path / "out").exists()
    return tmp_path / "out.partial"


TENSORS = {
    "missing": (lambda t: t.pop("norm.weight"), ["1 missing: norm.weight", "remedy: fetch"]),
    "extra": (
        lambda t: t.update(extra=("F32", np.zeros(3, np.float32))),
        [r"1 extra: extra \(F32 \[3\]\)"],
    ),
    "layers": (
        lambda t: [t.pop(n) for n in list(t) if n.startswith("layers.2.")],
        [r"missing: layers\.2\..*\.\.\. and \d+ more", "num_hidden_layers is 3 .* files have 2"],
    ),
    "experts": (
        lambda t: [t.pop(n) for n in list(t) if ".experts.2." in n],
        ["12 missing", "n_routed_experts is 3 .* files have 2"],
    ),
    "no mtp": (
        lambda t: [t.pop(n) for n in list(t) if n.startswith("mtp.")],
        ["missing: mtp.0", "num_nextn_predict_layers is 1 but the files have no MTP block"],
    ),
    "shape": (
        lambda t: t.update({"norm.weight": ("BF16", np.zeros(159, ml_dtypes.bfloat16))}),
        [r"1 wrongly shaped: norm.weight \(BF16 \[159\]\), the config asks for \[160\]"],
    ),
    "transposed": (
        lambda t: t.update({f"{WQ_A}.weight": ("F8_E4M3", t[f"{WQ_A}.weight"][1].T.copy())}),
        [r"wrongly shaped: layers.0.attn.wq_a.weight \(F8_E4M3 \[160, 96\]\).*\[96, 160\]"],
    ),
    "unpacked": (
        lambda t: t.update({f"{EXPERT}.weight": ("I8", np.zeros((80, 160), np.int8))}),
        [r"wrongly shaped: .*experts.1.w3.weight \(I8 \[80, 160\]\).*\[80, 80\]"],
    ),
    "type": (
        lambda t: t.update({"norm.weight": ("I32", np.zeros(160, np.int32))}),
        [r"1 wrongly typed: norm.weight \(I32 \[160\]\), allowed are BF16/F32/F16"],
    ),
    "float64": (
        lambda t: t.update({"norm.weight": ("F64", np.zeros(160))}),
        ["1 wrongly typed: norm.weight .F64"],
    ),
    "float ids": (
        lambda t: t.update({TID: ("F32", t[TID][1].astype(np.float32))}),
        ["1 wrongly typed: layers.0.ffn.gate.tid2eid .* allowed are I64/I32"],
    ),
    "quantised norm": (
        lambda t: t.update({"norm.weight": ("F8_E4M3", np.zeros(160, np.uint8))}),
        ["1 wrongly typed: norm.weight .F8_E4M3"],
    ),
    "fp8 without scale": (
        lambda t: t.pop(f"{WQ_A}.scale"),
        [rf"1 quantised without its scale: {WQ_A}.weight .* lacks {WQ_A}.scale .F8_E8M0 \[1, 2\]"],
    ),
    "fp4 without scale": (
        lambda t: t.pop(f"{EXPERT}.scale"),
        [rf"1 quantised without its scale: {EXPERT}.weight .* \[80, 5\]"],
    ),
    "scale without weight": (
        lambda t: t.pop(f"{WQ_A}.weight"),
        [f"1 missing: {WQ_A}.weight", f"1 scale without its weight: {WQ_A}.scale"],
    ),
    "scale of plain": (
        lambda t: t.update({f"{WQ_A}.weight": ("F32", np.zeros((96, 160), np.float32))}),
        [f"1 scale of a weight that is not quantised: {WQ_A}.scale"],
    ),
    "scale shape": (
        lambda t: t.update({f"{WQ_A}.scale": ("F8_E8M0", np.zeros((2, 1), np.uint8))}),
        [rf"1 wrong scale: {WQ_A}.scale .F8_E8M0 \[2, 1\]., needed is F8_E8M0 \[1, 2\]"],
    ),
    "scale type": (
        lambda t: t.update({f"{WQ_A}.scale": ("F32", np.ones((1, 2), np.float32))}),
        [f"1 wrong scale: {WQ_A}.scale .F32"],
    ),
    "several": (
        lambda t: [t.pop("norm.weight"), t.pop("embed.weight"), t.update(x=t["hc_head_fn"])],
        ["2 missing: embed.weight, norm.weight", "1 extra: x"],
    ),
    "other naming": (
        lambda t: [t.update({f"model.{n}": t.pop(n)}) for n in list(t)],
        ["transformers library's names"],
    ),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_do_not_fit_the_config(tmp_path, release, case):
    change, messages = TENSORS[case]
    partial = _refused(tmp_path, release, *messages, change=change)
    assert not partial.exists()


CONFIGS = {
    "ratio": ({"compress_ratios": [0, 8, 128, 0]}, [r"compress_ratios\[1\] is 8; known ratios"]),
    "count": ({"compress_ratios": [0, 4, 128]}, ["compress_ratios has 3 entries"]),
    "order": ({"compress_ratios": [4, 0, 128, 0]}, ["missing: layers.0", "extra: layers.1"]),
    "fewer layers": (
        {"num_hidden_layers": 2, "compress_ratios": [0, 4, 0]},
        ["extra: layers.2", "num_hidden_layers is 2 .* files have 3"],
    ),
    "mtp off": (
        {"num_nextn_predict_layers": 0, "compress_ratios": [0, 4, 128]},
        ["extra: mtp.0", "num_nextn_predict_layers is 0 but the files have an MTP block"],
    ),
    "width": ({"hidden_size": 192}, ["wrongly shaped", "are of different models"]),
    "more experts": ({"n_routed_experts": 4}, ["n_routed_experts is 4 .* the files have 3"]),
    "hash layers": (
        {"num_hash_layers": 1},
        ["1 missing: layers.1.ffn.gate.bias", "1 extra: layers.1.ffn.gate.tid2eid"],
    ),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_configs_that_contradict_the_tensors(tmp_path, release, case):
    config, messages = CONFIGS[case]
    partial = _refused(tmp_path, release, *messages, config=config)
    assert not partial.exists()


def _set(name, position, value):
    def change(tensors):
        kind, stored = tensors[name]
        stored = stored.copy()
        stored[position] = value
        tensors[name] = kind, stored

    return change


VALUES = {
    "expert id": (_set(TID, (7, 1), 3), r"gate.tid2eid.*outside 0\.\.2, the first is 3 at row 7"),
    "scale": (_set(f"{EXPERT}.scale", (5, 2), 255), r"experts.1.w3.*scale \(5, 2\) is NaN"),
    "weight": (_set(f"{WQ_A}.weight", (95, 159), 0xFF), r"wq_a.weight.*\[95, 159\] is NaN"),
}


@pytest.mark.parametrize("case", VALUES)
def test_values_that_no_checkpoint_has(tmp_path, release, case):
    change, message = VALUES[case]
    _refused(tmp_path, release, message + "(.|\n)*fetch it again", change=change)
    with pytest.raises(ValueError, match=message):
        load_release(tmp_path / "hf")


def test_folders_that_are_no_release(tmp_path, release):
    folder, _ = release
    with pytest.raises(ValueError, match="nowhere is not a folder"):
        convert(tmp_path / "nowhere", tmp_path / "out")
    (tmp_path / "hf").mkdir()
    with pytest.raises(ValueError, match="no model configuration at .*config.json"):
        convert(tmp_path / "hf", tmp_path / "out")
    shutil.copy(folder / "config.json", tmp_path / "hf")
    with pytest.raises(ValueError, match="has neither model.safetensors nor .*fetch the release"):
        convert(tmp_path / "hf", tmp_path / "out")
    (tmp_path / "hf" / "model-00001-of-00002.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="it has model-00001-of-00002.*fetch the index too"):
        convert(tmp_path / "hf", tmp_path / "out")
    with pytest.raises(ValueError, match="dtype 'float16' is not supported.*bfloat16, float32"):
        convert(folder, tmp_path / "out", "float16")
    assert {p.name for p in tmp_path.iterdir()} == {"hf"}


def test_truncated_release_file(tmp_path, release):
    shutil.copytree(release[0], tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match="model.safetensors is truncated: .* ends at byte"):
        convert(tmp_path / "hf", tmp_path / "out")


def test_shards_and_indices_that_disagree(tmp_path):
    hf = tmp_path / "hf"
    small_release(hf, shard_bytes=400_000)
    index = hf / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    first, second = sorted(hf.glob("model-*"))[:2]

    def refused(message, data=None):
        index.write_text(json.dumps(data) if data is not None else "{")
        with pytest.raises(ValueError, match=message):
            convert(hf, tmp_path / "out")

    refused("index.json is corrupt")
    refused("index.json is corrupt", [])
    refused("index.json is corrupt", {"weight_map": {"embed.weight": ["x"]}})
    refused("files outside its folder: ../x", {"weight_map": {"embed.weight": "../x"}})
    moved = {**good["weight_map"], "norm.weight": first.name, "hc_head_fn": second.name}
    refused(rf"1 tensors that .* says that {first.name} holds, but .*: norm", {"weight_map": moved})
    fewer = {k: v for k, v in good["weight_map"].items() if k != "embed.weight"}
    refused(r"1 tensors that .* holds, but .* does not say so: embed", {"weight_map": fewer})
    second.rename(tmp_path / "elsewhere")
    refused(f"lacks 1 of the .* files .*: {second.name}; fetch", good)
    (tmp_path / "elsewhere").rename(second)
    second.write_bytes(second.read_bytes()[:1000])
    refused(f"{second.name} is truncated", good)
    assert not (tmp_path / "out").exists()


def test_an_output_folder_that_is_not_empty_is_left_as_it_is(tmp_path, release, converted):
    before = folder_bytes(converted)
    with pytest.raises(ValueError, match="out already holds a checkpoint.*another folder"):
        convert(release[0], converted)
    assert folder_bytes(converted) == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    with pytest.raises(ValueError, match="mine already holds files"):
        convert(release[0], tmp_path / "mine")
    for name in ("file", "link"):
        with pytest.raises(ValueError, match=f"{name} is not a folder"):
            convert(release[0], tmp_path / name)
    with pytest.raises(ValueError, match="already holds files"):
        convert(release[0], release[0])
    assert {p.name for p in tmp_path.iterdir()} == {"mine", "file", "link"}


def test_an_empty_output_folder_is_used(tmp_path, release, converted):
    (tmp_path / "deep" / "out").mkdir(parents=True)
    convert(release[0], tmp_path / "deep" / "out")
    assert folder_bytes(tmp_path / "deep" / "out") == folder_bytes(converted)


def _json(change):
    def apply(path):
        data = json.loads(path.read_text())
        change(data)
        path.write_text(json.dumps(data))

    return apply


CHECKPOINTS = {
    "no config": ("config.json", lambda p: p.unlink(), "no model configuration"),
    "bad config": ("config.json", lambda p: p.write_text("{"), "config.json is not valid JSON"),
    "other config": (
        "config.json",
        _json(lambda d: d.update(hidden_size=192)),
        r"do not fit its config.json: \d+ of another shape or type: embed",
    ),
    "more layers": (
        "config.json",
        _json(lambda d: d.update(num_hidden_layers=4, compress_ratios=[0, 4, 128, 0, 0])),
        "missing: layers.3",
    ),
    "no mtp": (
        "config.json",
        _json(lambda d: d.update(num_nextn_predict_layers=0, compress_ratios=[0, 4, 128])),
        "extra: mtp.0",
    ),
    "no metadata": ("_METADATA", lambda p: p.unlink(), "it has no _METADATA"),
    "bad metadata": ("_METADATA", lambda p: p.write_text('{"tree_metadata": 1}'), "is corrupt"),
    "no array": ("norm/.zarray", lambda p: p.unlink(), "norm/.zarray is absent or corrupt"),
    "bad array": ("norm/.zarray", lambda p: p.write_text("{}"), "norm/.zarray is absent or corr"),
    "other type": (
        "norm/.zarray",
        _json(lambda d: d.update(dtype="<f4")),
        "1 of another shape or type: norm",
    ),
    "compressed": (
        "norm/.zarray",
        _json(lambda d: d.update(compressor={"id": "zstd"})),
        "norm/.zarray is not of the layout",
    ),
    "no chunk": (
        "layers.1.ffn.experts.w2/1.0.0",
        lambda p: p.unlink(),
        "1 files of .* are absent or truncated: layers.1.ffn.experts.w2/1.0.0; convert again",
    ),
    "short chunk": (
        "embed/0.0",
        lambda p: p.write_bytes(p.read_bytes()[:-2]),
        "truncated: embed/0.0",
    ),
}


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_checkpoints_that_are_damaged(tmp_path, converted, case):
    file, damage, message = CHECKPOINTS[case]
    shutil.copytree(converted, tmp_path / "ck")
    damage(tmp_path / "ck" / file)
    with pytest.raises(ValueError, match=message):
        load_checkpoint(tmp_path / "ck")


def test_folders_that_are_no_checkpoint(tmp_path, release):
    with pytest.raises(ValueError, match="no checkpoint at .*nowhere; check the path"):
        load_checkpoint(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="is not a checkpoint: it has no _METADATA"):
        load_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="release, not a converted.*run scripts/convert.py --hf"):
        load_checkpoint(release[0])
