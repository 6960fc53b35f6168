"""A release folder: its files, their tensors, and whether these are what its config asks for.

Everything is decided from the files' headers, before a value is read. Source: the spec's
"Checkpoint" heading.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from models.checkpoint import decode
from models.checkpoint.layout import leaf_specs, some
from models.checkpoint.safetensors_file import TensorInfo, read_header, read_rows
from models.config import ModelConfig
from models.params import FP4, FP8, I64, ParamSpec

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

_PLAIN = ("BF16", "F32", "F16")
_PACKED = ("I8", "U8")
_QUANTISED = ("F8_E4M3", *_PACKED)
_IDS = ("I64", "I32")


@dataclasses.dataclass(frozen=True)
class Unit:
    """One release tensor on its way into one parameter: all of it, or one expert of a stack."""

    path: tuple[str, ...]
    spec: ParamSpec
    expert: int | None
    weight: TensorInfo
    scale: TensorInfo | None

    @property
    def name(self) -> str:
        return self.weight.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the decoded tensor."""
        return self.spec.shape if self.expert is None else self.spec.shape[1:]

    def rows(self, start: int, stop: int, dtype: np.dtype, experts: int) -> np.ndarray:
        """Rows ``[start, stop)`` decoded to ``dtype`` (expert ids to int32).

        Raises:
            ValueError: values that no checkpoint can have: NaN codes, ids of absent experts.
        """
        stored = read_rows(self.weight, start, stop)
        try:
            if self.spec.storage == I64:
                return decode.expert_ids(stored, experts)
            if self.scale is None:
                return decode.cast(stored, dtype)
            if self.weight.dtype in _PACKED:
                scales = read_rows(self.scale, start, stop).view(np.uint8)
                values = decode.fp4_rows(stored.view(np.uint8), scales, self.shape[1])
            else:
                block = decode.FP8_BLOCK
                scales = read_rows(self.scale, start // block, -(-stop // block)).view(np.uint8)
                values = decode.fp8_rows(stored.view(np.uint8), scales, start)
        except ValueError as error:
            raise ValueError(
                f"{self.weight.file}: {self.name}, rows {start} to {stop - 1}: {error}; the file "
                "is corrupt, fetch it again"
            ) from error
        return decode.cast(values, dtype)


@dataclasses.dataclass(frozen=True)
class Release:
    """A checked release: ``units`` cover every parameter of ``cfg`` exactly once."""

    folder: Path
    cfg: ModelConfig
    files: tuple[Path, ...]
    units: tuple[Unit, ...]


def open_release(folder: str | Path) -> Release:
    """Read config and headers of a release folder and check them against each other.

    Raises:
        ValueError: no or broken config, files missing or corrupt, or tensors that are missing,
            extra, wrongly shaped or typed, or whose scales are; all of them named and counted.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; expected a release's files in it")
    cfg = ModelConfig.load(folder)
    tensors = _read_tensors(folder)
    files = tuple(sorted({t.file for t in tensors.values()}))
    return Release(folder, cfg, files, _check(folder, cfg, tensors))


def _read_tensors(folder: Path) -> dict[str, TensorInfo]:
    index = folder / INDEX_NAME
    if not index.exists():
        single = folder / SINGLE_NAME
        if single.is_file():
            return read_header(single)
        found = sorted(p.name for p in folder.glob("*.safetensors"))
        raise ValueError(
            f"{folder} has neither {SINGLE_NAME} nor {INDEX_NAME}; "
            + (f"it has {some(found)}: fetch the index too" if found else "fetch the release")
        )
    try:
        where = json.loads(index.read_text())["weight_map"]
        by_file: dict[str, set[str]] = {}
        for name, file in where.items():
            by_file.setdefault(file, set()).add(name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is corrupt ({error!r}); fetch it again") from error
    outside = [f for f in by_file if not isinstance(f, str) or Path(f).name != f]
    if outside:
        raise ValueError(f"{index} names files outside its folder: {some(map(str, outside))}")
    absent = [file for file in sorted(by_file) if not (folder / file).is_file()]
    if absent:
        raise ValueError(
            f"{folder} lacks {len(absent)} of the {len(by_file)} files that {INDEX_NAME} names: "
            f"{some(absent)}; fetch them"
        )
    tensors: dict[str, TensorInfo] = {}
    for file, names in sorted(by_file.items()):
        header = read_header(folder / file)
        for what, differing in (
            (f"{INDEX_NAME} says that {file} holds, but it does not", names - set(header)),
            (f"{file} holds, but {INDEX_NAME} does not say so", set(header) - names),
        ):
            if differing:
                raise ValueError(
                    f"{folder}: {len(differing)} tensors that {what}: {some(sorted(differing))}; "
                    "fetch both again"
                )
        tensors.update(header)
    return tensors


def allowed_types(spec: ParamSpec) -> tuple[str, ...]:
    """On-disk types that a parameter may have: a release mixes them, tensor by tensor."""
    if spec.storage == I64:
        return _IDS
    return (*_QUANTISED, *_PLAIN) if spec.storage in (FP8, FP4) else _PLAIN


def stored_shapes(
    shape: tuple[int, ...], kind: str
) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """On-disk shapes of a tensor and of its scale (None: it has none) when stored as ``kind``."""
    if kind in _PACKED:
        out, columns = shape
        return (out, -(-columns // 2)), (out, -(-columns // decode.FP4_GROUP))
    if kind == "F8_E4M3":
        out, columns = shape
        return shape, (-(-out // decode.FP8_BLOCK), -(-columns // decode.FP8_BLOCK))
    return shape, None


def scale_name(weight: str) -> str:
    """``x.scale`` of ``x.weight``."""
    return weight.removesuffix(".weight") + ".scale"


def expected_tensors(
    cfg: ModelConfig,
) -> Iterator[tuple[str, tuple[str, ...], ParamSpec, int | None]]:
    """(release name, key path, spec, expert number if the parameter is a stack) of all tensors."""
    for path, spec in leaf_specs(cfg).items():
        if not spec.stacked:
            yield spec.release, path, spec, None
        else:
            for expert in range(spec.shape[0]):
                yield spec.release.format(expert), path, spec, expert


def _check(folder: Path, cfg: ModelConfig, tensors: Mapping[str, TensorInfo]) -> tuple[Unit, ...]:
    problems: dict[str, list[str]] = {
        "missing": [],
        "extra": [],
        "wrongly shaped": [],
        "wrongly typed": [],
        "quantised without its scale": [],
        "scale without its weight": [],
        "scale of a weight that is not quantised": [],
        "wrong scale": [],
    }
    units = []
    unclaimed = dict(tensors)
    for name, path, spec, expert in expected_tensors(cfg):
        weight, scale = unclaimed.pop(name, None), None
        shape = spec.shape if expert is None else spec.shape[1:]
        if name.endswith(".weight"):
            scale = unclaimed.pop(scale_name(name), None)
        if weight is None:
            problems["missing"].append(name)
            if scale is not None:
                problems["scale without its weight"].append(str(scale))
            continue
        allowed = allowed_types(spec)
        if weight.dtype not in allowed:
            problems["wrongly typed"].append(f"{weight}, allowed are {'/'.join(allowed)}")
            continue
        wanted, wanted_scale = stored_shapes(shape, weight.dtype)
        if weight.shape != wanted:
            problems["wrongly shaped"].append(f"{weight}, the config asks for {list(wanted)}")
        if wanted_scale is None and scale is not None:
            problems["scale of a weight that is not quantised"].append(f"{scale} of {weight}")
        elif wanted_scale is not None and scale is None:
            problems["quantised without its scale"].append(
                f"{weight} lacks {scale_name(name)} (F8_E8M0 {list(wanted_scale)})"
            )
        elif scale is not None and (scale.dtype, scale.shape) != ("F8_E8M0", wanted_scale):
            problems["wrong scale"].append(f"{scale}, needed is F8_E8M0 {list(wanted_scale or ())}")
        units.append(Unit(path, spec, expert, weight, scale))
    problems["extra"].extend(str(tensor) for tensor in unclaimed.values())
    if any(problems.values()):
        lines = [f"{len(v)} {kind}: {some(v)}" for kind, v in problems.items() if v]
        lines.append("remedy: " + _remedy(cfg, tensors, problems))
        raise ValueError(f"the tensors in {folder} do not fit its config.json\n" + "\n".join(lines))
    return tuple(units)


def _remedy(
    cfg: ModelConfig, tensors: Mapping[str, TensorInfo], problems: Mapping[str, list[str]]
) -> str:
    if any(name.startswith("model.") for name in tensors):
        return "these are the transformers library's names; take the release's own files"
    has_mtp = any(name.startswith("mtp.") for name in tensors)
    if has_mtp != bool(cfg.num_nextn_predict_layers):
        return (
            f"num_nextn_predict_layers is {cfg.num_nextn_predict_layers} but the files have "
            f"{'an' if has_mtp else 'no'} MTP block (mtp.*): make it {int(has_mtp)} in config.json "
            f"and {'add a' if has_mtp else 'drop the'} last 0 of compress_ratios, or fetch the "
            "files that belong to it"
        )

    def count(prefix: str, position: int) -> int:
        split = (name.split(".") for name in tensors if name.startswith("layers."))
        numbers = {p[position] for p in split if prefix in p and len(p) > position}
        return len({n for n in numbers if n.isdigit()})

    for key, wanted, found in (
        ("num_hidden_layers", cfg.num_hidden_layers, count("layers", 1)),
        ("n_routed_experts", cfg.n_routed_experts, count("experts", 4)),
    ):
        if found != wanted:
            return f"{key} is {wanted} in config.json, the files have {found}: fetch what is absent"
    if problems["wrongly shaped"]:
        return "config.json and the files are of different models: fetch both from one release"
    return "fetch the named tensors' files again; extra tensors must be removed"
