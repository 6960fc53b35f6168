"""The decode loop under a stopwatch: synthetic states, compiled programs, interleaved timings."""

from __future__ import annotations

import dataclasses
import os
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from models.cache import init_cache
from models.config import ModelConfig
from models.decode import DecodeState, decode_steps
from models.params import Params, ParamSpec, init_leaf, is_spec, param_specs
from models.sampling import GREEDY
from models.selector import ALL_KEEP, IndexKeys, IndexQuery, Selector

HOST_TRANSFERS = r"\b(infeed|outfeed|send|recv|send-done|recv-done)\(|custom_call_target=\"[^\"]*"
HOST_TRANSFERS += r"(callback|python)[^\"]*\""


@dataclasses.dataclass(frozen=True)
class FixedSlots:
    """K slots spread evenly over the visible ones, without scoring: a step less its indexer stage.

    The token's index query and key are still made, as SPIN does not save them.
    """

    def init(self, num_layers: int, max_slots: int, keys: jax.Array) -> tuple[Any, ...]:
        return ALL_KEEP.init(num_layers, max_slots, keys)

    def for_step(self, *, first: bool) -> FixedSlots:
        del first
        return self

    def reset(self, state: Any, where: jax.Array) -> Any:
        del where
        return state

    def prepare(
        self, states: tuple[Any, ...], num_slots: jax.Array, *, top_k: int
    ) -> tuple[Any, ...]:
        del num_slots, top_k
        return states

    def select(
        self, query: IndexQuery, keys: IndexKeys, num_slots: jax.Array, state: Any, *, top_k: int
    ) -> tuple[jax.Array, Any]:
        del state
        top_k = min(top_k, keys.values.shape[1])
        # A dependence on the query that the compiler cannot see through, or it would drop it.
        bad = jnp.isnan(jnp.sum(query.q, axis=(2, 3)) + jnp.sum(query.w, axis=2))
        chosen = jnp.minimum(num_slots, top_k)[..., None]
        rank = jnp.arange(top_k, dtype=jnp.int32)[None, None]
        # rank * N / K in two parts, as the product can leave int32.
        whole, rest = num_slots[..., None] // top_k, num_slots[..., None] % top_k
        spread = jnp.where(chosen < top_k, rank, rank * whole + rank * rest // top_k)
        return jnp.where(rank < chosen, spread + bad[..., None].astype(jnp.int32), -1), ()

    def commit(self, state: Any, observation: Any, num_rows: jax.Array) -> Any:
        del observation, num_rows
        return state


def device_params(cfg: ModelConfig, key: jax.Array, dtype: Any, *, mtp: bool = False) -> Params:
    """Random parameters made on the device, leaf by leaf, nothing larger beside them.

    The MTP block only on demand.

    Leaves of one shape share a compiled program: a model has few shapes and many leaves. ``key``
    is best of the ``rbg`` kind: quicker to compile and to draw.
    """
    specs = param_specs(cfg) if mtp else {**param_specs(cfg), "mtp": []}
    leaves, treedef = jax.tree.flatten(specs, is_leaf=is_spec)
    make = jax.jit(init_leaf, static_argnums=(0, 2, 3))
    alike = [ParamSpec(s.shape, (None,) * len(s.shape), "", s.storage, s.init) for s in leaves]
    values = [make(s, jax.random.fold_in(key, i), cfg, dtype) for i, s in enumerate(alike)]
    return jax.tree.unflatten(treedef, values)


@partial(jax.jit, static_argnums=(1, 2))
def _normal(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jax.random.normal(key, shape, dtype)


def synthetic_state(
    cfg: ModelConfig, key: jax.Array, *, batch: int, tokens: int, room: int, dtype: Any
) -> DecodeState:
    """All-keep's state of requests that hold ``tokens`` random tokens, with ``room`` for more."""
    shapes = jax.eval_shape(lambda: init_cache(cfg, batch, tokens + room, dtype=dtype))
    leaves, treedef = jax.tree.flatten(shapes)
    cache = jax.tree.unflatten(
        treedef,
        [_normal(jax.random.fold_in(key, i), x.shape, x.dtype) if x.ndim > 1
         else jnp.full(x.shape, tokens, x.dtype) for i, x in enumerate(leaves)],
    )  # fmt: skip
    return DecodeState(
        cache=cache,
        token=jnp.arange(batch, dtype=jnp.int32) % cfg.vocab_size,
        tokens=jnp.zeros((batch, room), jnp.int32),
        count=jnp.zeros(batch, jnp.int32),
        limit=jnp.full(batch, np.iinfo(np.int32).max, jnp.int32),
        stop=jnp.full((batch, 1), -1, jnp.int32),
        done=jnp.zeros(batch, bool),
        keys=jax.random.split(jax.random.key(1), batch),
        selector_state=((),) * len(cfg.csa_layers),
    )


def start_selector(selector: Selector, state: DecodeState, cfg: ModelConfig) -> tuple[Any, ...]:
    """The selector's state at a turn's beginning for the requests of ``state``."""
    slots = [c.index_keys.values.shape[1] for c in state.cache.layers if c.index_keys]
    return selector.init(len(cfg.csa_layers), max(slots, default=0), state.keys)


def rewind(state: DecodeState, tokens: int) -> DecodeState:
    """The same requests at an earlier length, with nothing generated."""
    length = jnp.full_like(state.cache.length, tokens)
    cache = state.cache.replace(length=length)
    return state.replace(cache=cache, count=jnp.zeros_like(state.count))


class Program(NamedTuple):
    """A compiled decode loop and the seconds it took."""

    run: Any
    lower_seconds: float
    compile_seconds: float
    processor_seconds: float
    """Of compiling, over all cores: what else runs on the machine hardly changes it. Programs that
    compile side by side count each other's."""


def lower(
    params: Params, state: DecodeState, cfg: ModelConfig, selector: Selector, *, cuda: bool = False
) -> Any:
    """The decode loop, traced and lowered, on demand for a GPU; arguments may be abstract."""
    traced = decode_steps.trace(
        params, state, jnp.int32(1), cfg=cfg, selector=selector, sampling=GREEDY
    )
    return traced.lower(lowering_platforms=("cuda",)) if cuda else traced.lower()


def lowerings(
    params: Params, state: DecodeState, cfg: ModelConfig, loops: Sequence[tuple[Selector, Any]]
) -> list[Callable[[], Any]]:
    """What lowers the loops of the selectors and their states."""
    return [partial(lower, params, state.replace(selector_state=s), cfg, x) for x, s in loops]


def compile_all(functions: list[Callable[[], Any]]) -> list[Program]:
    """Programs of what the functions lower, on a GPU's host compiled side by side."""
    lowered = []
    for function in functions:
        begin = time.perf_counter()
        lowered.append((function(), time.perf_counter() - begin))

    def finish(one: tuple[Any, float]) -> Program:
        begin, processor = time.perf_counter(), time.process_time()
        compiled = one[0].compile()
        passed = time.perf_counter() - begin
        return Program(compiled, one[1], passed, time.process_time() - processor)

    # On a CPU a single compilation uses the cores, and its own time is of interest.
    workers = 1 if jax.default_backend() == "cpu" else len(lowered)
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(finish, lowered))


def dispatch(program: Program, params: Params, state: DecodeState, steps: int) -> Any:
    """Run one dispatch of ``steps`` steps; the state after it and its seconds."""
    jax.block_until_ready(state)
    begin = time.perf_counter()
    state = jax.block_until_ready(program.run(params, state, jnp.int32(steps)))
    return state, time.perf_counter() - begin


class Measured(NamedTuple):
    """Seconds a step in each dispatch, and what compiling took."""

    step_seconds: list[float]
    program: Program
    selector_state: Any
    """After the last dispatch."""

    @property
    def median(self) -> float:
        return float(np.median(self.step_seconds))


def compare(
    params: Params,
    state: DecodeState,
    cfg: ModelConfig,
    selectors: dict[str, Selector],
    *,
    tokens: int,
    steps: int,
    repeats: int,
    more: Callable[[dict[str, Any]], list[Callable[[], Any]]] = lambda states: [],
) -> tuple[dict[str, Measured], list[Program], DecodeState]:
    """Time the steady decode loop with each selector, in turns so that all see the same machine.

    All share one cache, which is rewound before every dispatch. A selector with a state has had
    its first, unpruned step, and one dispatch is not counted. ``state`` is used up; the result has
    one to go on with. ``more`` gets the selectors' first states and says what else to lower and
    compile beside the loops.
    """
    states = {name: start_selector(s, state, cfg) for name, s in selectors.items()}
    stateful = [name for name, s in selectors.items() if s.for_step(first=True) != s]
    loops = [(s.for_step(first=False), states[name]) for name, s in selectors.items()]
    # A first step scores everything: one program serves selectors that differ in sparsity.
    loops += [(selectors[n].for_step(first=True), states[n]) for n in stateful[:1]]
    everything = compile_all(lowerings(params, state, cfg, loops) + more(states))
    compiled, others = everything[: len(loops)], everything[len(loops) :]
    programs = dict(zip(selectors, compiled, strict=False))

    def turn(name: str, program: Program, count: int) -> float:
        nonlocal state
        state = rewind(state, tokens).replace(selector_state=states[name])
        state, seconds = dispatch(program, params, state, count)
        states[name] = state.selector_state
        return seconds / count

    for name in stateful:
        turn(name, compiled[-1], 1)
    times: dict[str, list[float]] = {name: [] for name in selectors}
    for repeat in range(-1, repeats):
        for name, program in programs.items():
            passed = turn(name, program, steps)
            if repeat >= 0:
                times[name].append(passed)
    return {n: Measured(times[n], programs[n], states[n]) for n in selectors}, others, state


def host_transfers(hlo: str) -> list[str]:
    """Instructions of a compiled program that would talk to the host."""
    return [line.strip()[:160] for line in hlo.splitlines() if re.search(HOST_TRANSFERS, line)]


def cache_copies(hlo: str, state: DecodeState, *, least: int = 0) -> list[str]:
    """Copies of anything in the shape of a float leaf of the cache or of the selector's state.

    ``least``: leaves of fewer bytes are passed over.
    """
    names = {"float32": "f32", "bfloat16": "bf16", "float8_e4m3fn": "f8e4m3fn"}
    shapes = {
        f"{names[str(x.dtype)]}[{','.join(map(str, x.shape))}]"
        for x in jax.tree.leaves((state.cache.layers, state.selector_state))
        if str(x.dtype) in names and x.size * x.dtype.itemsize >= least
    }
    copy = re.compile(r"= \(?(\w+\[[\d,]*\])\S* (?:\S+ )*?copy(?:-start)?\(")
    found = ((copy.search(line), line) for line in hlo.splitlines())
    return [line.strip()[:160] for match, line in found if match and match[1] in shapes]


def load_average() -> list[float]:
    return [round(x, 2) for x in os.getloadavg()]
