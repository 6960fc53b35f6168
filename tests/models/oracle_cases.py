"""The variants of ``tests/oracle`` loaded for JAX, and one jitted step to run them with."""

import sys
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from models.cache import Cache, init_cache
from models.checkpoint import load_release
from models.config import ModelConfig
from models.model import forward, mtp_forward

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS / "oracle"))

import variants  # noqa: E402

GOLDEN = TESTS / "golden" / "variants"
TOLERANCE = 1e-4


class Case(NamedTuple):
    cfg: ModelConfig
    params: Any
    expected: dict[str, np.ndarray]

    @property
    def ids(self) -> np.ndarray:
        return self.expected["ids"]


def load_case(name: str, expected: dict[str, np.ndarray], folder: Path) -> Case:
    """Make the variant's weights again, read them as a release, and pair them with outputs."""
    checksum = variants.write_release(name, int(expected["seed"]), folder)
    assert checksum == str(expected["checksum"]), "these are not the weights of the outputs"
    params, cfg = load_release(folder, "float32")
    # Arrays bound to no device, as the caches are: a step with some of each compiles twice.
    params = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), params)
    return Case(cfg, params, expected)


@cache
def golden(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / f"{name}.npz") as file:
        return dict(file)


class State(NamedTuple):
    """The caches of trunk and MTP block (None without one)."""

    trunk: Cache
    mtp: Cache | None


def empty(cfg: ModelConfig, batch: int, max_len: int, **options: Any) -> State:
    mtp = None
    if cfg.num_nextn_predict_layers:
        mtp = init_cache(cfg, batch, max_len, mtp=True, **options)
    return State(init_cache(cfg, batch, max_len, **options), mtp)


class Outputs(NamedTuple):
    logits: jax.Array
    mtp_logits: jax.Array | None
    slots: tuple[jax.Array, ...]
    """One array a CSA layer."""


def _step(
    params: Any, state: State, tokens: jax.Array, following: jax.Array, counts: jax.Array, *, cfg
) -> tuple[State, Outputs]:
    """Extend by ``counts[0, b]`` tokens, and the MTP block by ``counts[1, b]``."""
    out = forward(params, tokens, state.trunk, cfg, num_new=counts[0], trace=True)
    slots = tuple(t.slots for t in out.trace if t.slots is not None)
    if state.mtp is None:
        return State(out.cache, None), Outputs(out.logits, None, slots)
    draft = mtp_forward(params, out.streams, following, state.mtp, cfg, num_new=counts[1])
    return State(out.cache, draft.cache), Outputs(out.logits, draft.logits, slots)


step = jax.jit(_step, static_argnames="cfg")
# Compiles in half the time, for steps that run once.
step_once = jax.jit(
    _step, static_argnames="cfg", compiler_options={"xla_backend_optimization_level": 0}
)


def cut(ids: np.ndarray, at: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens ``at[b] .. at[b] + width - 1`` of each row and the ones after them, padded."""
    last, row = ids.shape[1] - 1, np.arange(len(ids))[:, None]
    position = at[:, None] + np.arange(width)
    return ids[row, np.minimum(position, last)], ids[row, np.minimum(position + 1, last)]


def advance(
    case: Case,
    state: State,
    tokens: np.ndarray,
    following: np.ndarray,
    counts: Any,
    run: Any = step,
) -> tuple[State, Outputs]:
    """One step of ``counts[0][b]`` tokens, ``counts[1][b]`` in the MTP block; results as numpy."""
    counts = jnp.asarray(np.stack(counts), jnp.int32)
    state, out = run(case.params, state, tokens, following, counts, cfg=case.cfg)
    return state, jax.tree.map(np.asarray, out)


def whole_prompt(case: Case) -> Outputs:
    """All of ``case.ids`` in one step from an empty cache just as long."""
    rows, total = case.ids.shape
    count = np.full(rows, total)
    tokens, following = cut(case.ids, 0 * count, total)
    state = empty(case.cfg, rows, total)
    return advance(case, state, tokens, following, (count, count - 1), step_once)[1]


def assert_whole_prompt(case: Case) -> None:
    """Slots, logits and MTP logits as expected."""
    out = whole_prompt(case)
    for layer, slots in zip(case.cfg.csa_layers, out.slots, strict=True):
        assert_slots(slots, case.expected[f"slots_{layer}"])
    np.testing.assert_allclose(out.logits, case.expected["logits"], rtol=0, atol=TOLERANCE)
    assert (out.mtp_logits is None) == ("mtp_logits" not in case.expected)
    if out.mtp_logits is not None:
        np.testing.assert_allclose(
            out.mtp_logits[:, :-1], case.expected["mtp_logits"], rtol=0, atol=TOLERANCE
        )


def assert_slots(found: np.ndarray, expected: np.ndarray) -> None:
    """Equal sets, -1 being none; expected ones come in descending order."""
    found = -np.sort(-found, axis=-1)
    width = expected.shape[-1]
    np.testing.assert_array_equal(found[..., :width], expected)
    assert (found[..., width:] == -1).all()
