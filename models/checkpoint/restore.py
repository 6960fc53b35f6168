"""Checkpoints to parameters on devices, and parameters to checkpoints."""

from __future__ import annotations

import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Sharding, SingleDeviceSharding

from models.checkpoint import layout
from models.checkpoint.convert import DTYPES, float_type
from models.checkpoint.partial import JOURNAL, check_destination, open_partial, partial_folder
from models.checkpoint.release import open_release
from models.config import ModelConfig
from models.params import Params, ParamSpec, is_spec, param_specs


def load_checkpoint(
    path: str | Path, *, dtype: Any = None, shardings: Any = None
) -> tuple[Params, ModelConfig]:
    """The parameters in a converted checkpoint, each read straight to its devices, and the config.

    Orbax does the reading; every device's part of an array is read by itself, so no array is whole
    in host memory unless it is whole on a device.

    Args:
        dtype: ``bfloat16`` or ``float32`` instead of the type that the checkpoint was converted
            to. What the architecture keeps in float32 stays so, expert ids stay int32.
        shardings: a pytree as from :func:`models.params.param_shardings`, or one sharding for
            all. Default: everything on the first device.

    Returns:
        Parameters in the structure of :func:`models.params.param_specs`, and their config.

    Raises:
        ValueError: not a checkpoint, an unfinished one, a release that has not been converted, a
            config that contradicts the arrays, files that are absent or truncated.
    """
    path = Path(os.path.abspath(path))
    _require_checkpoint(path)
    cfg = ModelConfig.load(path)
    stored = _check_arrays(path, cfg)
    wanted = stored if dtype is None else float_type(dtype)
    specs = param_specs(cfg)
    shardings = _sharding_tree(specs, shardings)
    args = jax.tree.map(
        lambda spec, sharding: ocp.ArrayRestoreArgs(
            restore_type=jax.Array, dtype=spec.dtype(wanted), sharding=sharding
        ),
        specs,
        shardings,
        is_leaf=is_spec,
    )
    handler = ocp.PyTreeCheckpointHandler(restore_concurrent_gb=_concurrent_gb(specs, shardings))
    try:
        with ocp.Checkpointer(handler) as checkpointer:
            params = checkpointer.restore(path, args=ocp.args.PyTreeRestore(restore_args=args))
    except ValueError as error:
        raise ValueError(f"{path} cannot be restored, it may be corrupt: {error}") from error
    return params, cfg


def load_release(
    path: str | Path, dtype: Any = "bfloat16", *, shardings: Any = None
) -> tuple[Params, ModelConfig]:
    """The parameters of a release folder, decoded in memory: for models that fit, without files.

    Arguments, results and errors as in :func:`load_checkpoint` and :func:`convert`.
    """
    release = open_release(path)
    wanted = float_type(dtype)
    values: dict[tuple[str, ...], np.ndarray] = {}
    for unit in release.units:
        kind = np.dtype(unit.spec.dtype(wanted))
        if unit.path not in values:
            values[unit.path] = np.empty(unit.spec.shape, kind)
        target = values[unit.path] if unit.expert is None else values[unit.path][unit.expert]
        tile = max(1, layout.TILE_VALUES // max(1, math.prod(unit.shape[1:])))
        for start in range(0, unit.shape[0], tile):
            stop = min(start + tile, unit.shape[0])
            target[start:stop] = unit.rows(start, stop, kind, release.cfg.n_routed_experts)
    specs = param_specs(release.cfg)
    treedef = jax.tree.structure(specs, is_leaf=is_spec)
    tree = jax.tree.unflatten(treedef, [values[p] for p in layout.leaf_specs(release.cfg)])
    return jax.device_put(tree, _sharding_tree(specs, shardings)), release.cfg


def save_checkpoint(params: Params, cfg: ModelConfig, out: str | Path) -> None:
    """Write parameters, leaf by leaf, as the checkpoint that :func:`load_checkpoint` reads.

    Like a conversion it shows under its name only when it is complete.

    Raises:
        ValueError: ``out`` is not empty or is being written, or ``params`` has other leaves,
            shapes or types than ``cfg`` asks for (weights all bfloat16 or all float32).
    """
    out = Path(os.path.abspath(out))
    check_destination(out)
    specs = layout.leaf_specs(cfg)
    flat = {layout.key_path(p): v for p, v in jax.tree_util.tree_flatten_with_path(params)[0]}
    kind = float_type(flat["embed",].dtype) if ("embed",) in flat else DTYPES["float32"]
    problems = _differences(
        {layout.leaf_name(p): (s.shape, np.dtype(s.dtype(kind))) for p, s in specs.items()},
        {layout.leaf_name(p): (tuple(v.shape), np.dtype(v.dtype)) for p, v in flat.items()},
    )
    if problems:
        raise ValueError(f"the parameters do not fit the config: {problems}")
    config = json.dumps(cfg.to_dict(), indent=1).encode()
    digest = hashlib.sha256(config).hexdigest()
    with open_partial(out, {"source": f"parameters of {digest}", "dtype": kind.name}) as partial:
        # Whatever an earlier call left is of the same shapes, and is written over.
        for path, spec in specs.items():
            values = np.asarray(flat[path])
            folder = partial.folder / layout.leaf_name(path)
            folder.mkdir(exist_ok=True)
            for expert in range(spec.shape[0]) if spec.stacked else (None,):
                part = values if expert is None else values[expert]
                layout.write_values(
                    folder, spec, values.dtype, expert, lambda a, b, part=part: part[a:b]
                )
        layout.write_metadata(partial.folder, cfg, kind, {layout.CONFIG_NAME: config})
        partial.finish()


def _require_checkpoint(path: Path) -> None:
    """Raise ``ValueError`` with a remedy unless ``path`` looks like a finished checkpoint."""
    unfinished = "is an unfinished conversion; run convert.py with --out {} again to finish it"
    for folder in (path, path.parent):
        if folder.suffix == ".partial" and (folder / JOURNAL).exists():
            raise ValueError(f"{path} " + unfinished.format(folder.with_suffix("")))
    if not path.is_dir():
        left = partial_folder(path)
        hint = f"{left} " + unfinished.format(path) if left.exists() else "check the path"
        raise ValueError(f"there is no checkpoint at {path}; {hint}")
    if (path / layout.METADATA_NAME).is_file():
        return
    if any(path.glob("*.safetensors*")):
        raise ValueError(
            f"{path} holds a release, not a converted checkpoint; run scripts/convert.py --hf "
            f"{path} --out DIR and load DIR"
        )
    raise ValueError(
        f"{path} is not a checkpoint: it has no {layout.METADATA_NAME}; name the folder that "
        "scripts/convert.py wrote"
    )


def _check_arrays(path: Path, cfg: ModelConfig) -> np.dtype:
    """The type of the stored weights, once all arrays are found to be what ``cfg`` asks for."""
    specs = {layout.leaf_name(p): spec for p, spec in layout.leaf_specs(cfg).items()}
    try:
        tree = json.loads((path / layout.METADATA_NAME).read_text())["tree_metadata"]
        listed = {
            layout.leaf_name([key["key"] for key in entry["key_metadata"]])
            for entry in tree.values()
            if not entry["value_metadata"]["skip_deserialize"]
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path / layout.METADATA_NAME} is corrupt ({error!r})") from error
    arrays = {name: layout.read_array_metadata(path / name / ".zarray") for name in listed}
    stored = {n: (tuple(f["shape"]), f["dtype"]) for n, f in arrays.items()}
    names = {layout.zarr_type(kind): kind for kind in DTYPES.values()}
    kind = names.get(stored.get("embed", (0, ""))[1], DTYPES["float32"])
    wanted = {n: (s.shape, layout.zarr_type(np.dtype(s.dtype(kind)))) for n, s in specs.items()}
    problems = _differences(wanted, stored)
    if problems:
        raise ValueError(
            f"the arrays in {path} do not fit its config.json: {problems}; restore the config.json "
            "that it was converted with, or convert again"
        )
    bad = [
        f"{name}/{file}"
        for name, fields in arrays.items()
        for file in layout.wrong_files(path / name, fields)
    ]
    if bad:
        raise ValueError(
            f"{len(bad)} files of {path} are absent or truncated: {layout.some(bad)}; convert again"
        )
    return kind


def _differences(wanted: dict[str, tuple], found: dict[str, tuple]) -> str:
    """The leaves that differ, named and counted; empty if none do."""
    lines = {
        "missing": sorted(set(wanted) - set(found)),
        "extra": sorted(set(found) - set(wanted)),
        "of another shape or type": [
            f"{n} (is {found[n]}, should be {wanted[n]})"
            for n in wanted
            if n in found and found[n] != wanted[n]
        ],
    }
    return "; ".join(f"{len(v)} {kind}: {layout.some(v)}" for kind, v in lines.items() if v)


def _sharding_tree(specs: Params, shardings: Any) -> Params:
    """One sharding a parameter, from such a tree, from one for all, or from nothing."""
    if shardings is None:
        shardings = SingleDeviceSharding(jax.devices()[0])
    if isinstance(shardings, Sharding):
        return jax.tree.map(lambda _: shardings, specs, is_leaf=is_spec)
    wanted = jax.tree.structure(specs, is_leaf=is_spec)
    found = jax.tree.structure(shardings, is_leaf=lambda s: isinstance(s, Sharding))
    if wanted != found:
        raise ValueError(
            "shardings must be one Sharding, or a tree like param_shardings(cfg, mesh) gives for "
            f"this checkpoint's config; the tree has {found.num_leaves} leaves, needed are "
            f"{wanted.num_leaves}"
        )
    return shardings


def _concurrent_gb(specs: Params, shardings: Params) -> int:
    """Gigabytes that Orbax may hold on the host at a time: room for the largest part, twice."""

    def part(spec: ParamSpec, sharding: Sharding) -> int:
        return 4 * math.prod(sharding.shard_shape(spec.shape))

    parts = jax.tree.leaves(jax.tree.map(part, specs, shardings, is_leaf=is_spec))
    return 8 + 2 * max(parts) // 10**9
