"""Generation from the host's side: prompts in, tokens out, over one turn or a dialogue."""

from __future__ import annotations

import dataclasses
import time
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models.cache import Cache, init_cache
from models.config import ModelConfig
from models.decode import DecodeState, decode_steps, prefill_chunk, record
from models.draft import DraftCounts, DraftState, init_draft
from models.params import beside
from models.programs import compiled_program
from models.sampling import GREEDY, Sampling
from models.selector import ALL_KEEP, Selector

PREFILL_CHUNK, SHORT_CHUNK, MAX_DRAFT = 256, 32, 7


def check_ids(ids: Any, cfg: ModelConfig, name: str = "ids", *, ndim: int = 1) -> np.ndarray:
    """``ids`` as a non-empty int32 array of tokens of the vocabulary: [T], or [B, T] for ndim 2.

    Raises:
        ValueError: it is not.
    """
    array = np.asarray(ids)
    if array.ndim != ndim or array.size == 0:
        wanted = "a list [T]" if ndim == 1 else "an array [B, T]"
        raise ValueError(f"{name}: shape {array.shape}; expected {wanted} of at least one token")
    if not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"{name}: type {array.dtype}; tokens are integers")
    outside = array[(array < 0) | (array >= cfg.vocab_size)]
    if outside.size:
        raise ValueError(
            f"{name}: token {outside[0]} (one of {outside.size}) is outside the vocabulary "
            f"0..{cfg.vocab_size - 1}; check that the tokenizer belongs to the checkpoint"
        )
    return array.astype(np.int32)


def request_keys(key: jax.Array, prompts: Sequence[np.ndarray]) -> jax.Array:
    """One PRNG key a request, from its prompt: draws belong to a request, not to its row.

    Equal prompts in one batch get different keys, by order among themselves.
    """
    seen: dict[bytes, int] = {}
    keys = []
    for prompt in prompts:
        content = prompt.tobytes()
        number = seen[content] = seen.get(content, -1) + 1
        keys.append(jax.random.fold_in(jax.random.fold_in(key, zlib.crc32(content)), number))
    return jnp.stack(keys)


@dataclasses.dataclass
class Timing:
    """Seconds of a session so far; compilation is kept apart."""

    compile_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    decode_tokens: int = 0
    """Tokens sampled by decode steps; each turn's first tokens come from prefill."""

    @property
    def tokens_per_second(self) -> float:
        """Decoded tokens of all requests over the time of the decode loop."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0


class Session:
    """B requests that share a cache over one or more turns.

    The KV cache stays from turn to turn; the selector starts anew at each, as SPIN's rules want.

    Args:
        params: parameters, see ``models.params``.
        max_len: tokens a request may hold over all turns, prompts and answers together.
        key: a PRNG key; each request derives its own from it and from its first prompt.
        dtype: of the cache; by default that of the activations.
        chunk: prompts are prefilled in chunks of this many tokens.
        draft_length: tokens that the MTP block drafts a step, to be verified by the trunk in one
            forward step; 0 decodes plainly. Greedy all-keep answers are the same either way.

    Raises:
        ValueError: sizes that are not positive, or drafts asked of a model without an MTP block.
    """

    def __init__(
        self,
        params: Any,
        cfg: ModelConfig,
        *,
        batch: int,
        max_len: int,
        selector: Selector = ALL_KEEP,
        sampling: Sampling = GREEDY,
        key: jax.Array | None = None,
        dtype: Any = None,
        chunk: int = PREFILL_CHUNK,
        draft_length: int = 0,
    ) -> None:
        if draft_length < 0:
            raise ValueError(f"draft_length is {draft_length}; it must be 0 (none) or positive")
        if chunk < 1:
            raise ValueError(f"chunk is {chunk}; prefill takes at least one token at a time")
        self.params, self.cfg = jax.tree.map(jnp.asarray, params), cfg
        self.selector = selector if cfg.csa_layers else ALL_KEEP
        self.sampling = sampling
        self.chunk = chunk
        self.key = jax.random.key(0) if key is None else key
        self.draft_length = draft_length
        dtype = self.params["embed"].dtype if dtype is None else dtype
        # Also plain sessions leave room for a draft, so that both have the same shapes.
        options = {"dtype": dtype, "max_draft": max(draft_length, MAX_DRAFT)}
        cache = init_cache(cfg, batch, max_len, **options)
        self.cache: Cache = beside(self.params, cache)
        self.draft: DraftState | None = None
        if draft_length:
            self.draft = beside(
                self.params, init_draft(self.params, cfg, batch, max_len, **options)
            )
        self.lengths = np.zeros(batch, np.int64)
        """Tokens in the cache, as the host knows them."""
        self.unfed: list[list[int]] = [[] for _ in range(batch)]
        """The last turn's final token, which is not in the cache yet."""
        self.keys: jax.Array | None = None
        self.selector_state: tuple[Any, ...] = ()
        self.timing = Timing()
        self._interrupted = False

    @property
    def draft_counts(self) -> DraftCounts | None:
        """None without drafts."""
        if self.draft is None:
            return None
        counts = (getattr(self.draft, name) for name in DraftCounts._fields)
        return DraftCounts(*(int(np.asarray(c).sum(dtype=np.int64)) for c in counts))

    def turn(
        self, prompts: Sequence[Any], max_new_tokens: int | Sequence[int], **options: Any
    ) -> list[list[int]]:
        """Append a prompt to each request and generate an answer; see :meth:`stream_turn`."""
        answers: list[list[int]] = [[] for _ in prompts]
        for new in self.stream_turn(prompts, max_new_tokens, **options):
            for answer, tokens in zip(answers, new, strict=True):
                answer.extend(tokens)
        return answers

    def stream_turn(
        self,
        prompts: Sequence[Any],
        max_new_tokens: int | Sequence[int],
        *,
        stop: Sequence[int] | Sequence[Sequence[int]] | None = None,
        every: int | None = None,
    ) -> Iterator[list[list[int]]]:
        """Generate an answer to each prompt, yielding the new tokens of every request at times.

        Args:
            prompts: one list of tokens a request.
            max_new_tokens: of all requests, or one number each.
            stop: tokens that end a request, for all or one list each; by default the config's
                EOS. The stopping token is part of the answer. An empty list never stops.
            every: yield after about this many tokens (whole verifications of drafts, and what they
                accept); by default once, at the end.

        Raises:
            ValueError: an empty prompt, a token outside the vocabulary, or more tokens than
                ``max_len`` allows; nothing has changed then.
        """
        if self._interrupted:
            raise ValueError(
                "this session's stream is still open: close it; or it was interrupted within a "
                "step and its state is lost: make a new one"
            )
        batch = len(self.lengths)
        if len(prompts) != batch:
            raise ValueError(f"{len(prompts)} prompts for a session of {batch} requests")
        given = [check_ids(p, self.cfg, f"prompt {i}") for i, p in enumerate(prompts)]
        limit = np.asarray(max_new_tokens)
        if not np.issubdtype(limit.dtype, np.integer) or limit.shape not in ((), (batch,)):
            raise ValueError(
                f"max_new_tokens is {max_new_tokens!r}; expected one integer or {batch} of them"
            )
        limit = np.broadcast_to(limit.astype(np.int64), (batch,))
        if (limit < 1).any():
            raise ValueError(f"max_new_tokens is {limit.min()}; it must be at least 1")
        if every is not None and every < 1:
            raise ValueError(f"streaming every {every} tokens; it must be at least 1")
        rows = [np.asarray([*u, *p], np.int32) for u, p in zip(self.unfed, given, strict=True)]
        needed = self.lengths + [len(r) for r in rows] + limit
        if (needed > self.cache.max_len).any():
            i = int(needed.argmax())
            raise ValueError(
                f"request {i} needs {needed[i]} tokens ({self.lengths[i]} cached, {len(rows[i])} "
                f"of prompt, {limit[i]} new) but max_len is {self.cache.max_len}: raise max_len "
                "or shorten the prompt"
            )
        stops = _stop_rows(self.cfg.eos_token_ids if stop is None else stop, batch)
        yield from self._run(given, rows, limit, stops, every)

    def _run(
        self,
        given: list[np.ndarray],
        rows: list[np.ndarray],
        limit: np.ndarray,
        stop: np.ndarray,
        every: int | None,
    ) -> Iterator[list[list[int]]]:
        # Steps donate their state: what an interrupted one was given is gone.
        self._interrupted = True
        batch, layers = len(rows), len(self.cfg.csa_layers)
        if self.keys is None:
            self.keys = request_keys(self.key, given)
            slots = [c.index_keys.values.shape[1] for c in self.cache.layers if c.index_keys]
            initial = self.selector.init(layers, max(slots, default=0), self.keys)
            self.selector_state = beside(self.params, initial)
        else:
            everyone = jnp.ones((batch,), bool)
            self.selector_state = tuple(
                self.selector.reset(s, everyone) for s in self.selector_state
            )
        logits = self._prefill(rows)
        room = 1 << int(limit.max() - 1).bit_length()
        state = DecodeState(
            cache=self.cache,
            token=jnp.zeros((batch,), jnp.int32),
            tokens=jnp.zeros((batch, room), jnp.int32),
            count=jnp.zeros((batch,), jnp.int32),
            limit=jnp.asarray(limit, jnp.int32),
            stop=jnp.asarray(stop),
            done=jnp.zeros((batch,), bool),
            # A turn's draws start from its own keys: token numbers begin at 0 again.
            keys=jax.vmap(jax.random.fold_in)(self.keys, jnp.asarray(self.lengths, jnp.int32)),
            selector_state=self.selector_state,
            draft=self.draft,
        )
        state = beside(self.params, state)
        state = _first_token(state, logits, self.sampling)
        yielded = np.zeros(batch, np.int64)
        first = True
        try:
            while True:
                count, done = np.asarray(state.count), bool(np.asarray(state.done).all())
                if done or every is not None:
                    tokens = np.asarray(state.tokens)
                    self.selector_state, self.draft = state.selector_state, state.draft
                    yield [tokens[b, yielded[b] : count[b]].tolist() for b in range(batch)]
                    yielded = count.astype(np.int64)
                if done:
                    break
                steps = int(limit.max())
                if first:
                    steps = 1
                elif every is not None:
                    steps = max(1, every // (self.draft_length + 1))
                state = self._decode(state, steps, self.selector.for_step(first=first))
                first = False
        finally:
            # Also when the consumer stops early: the session goes on from what was generated.
            if not any(leaf.is_deleted() for leaf in jax.tree.leaves(state)):
                self.cache, self.selector_state = state.cache, state.selector_state
                self.draft = state.draft
                self.unfed = [[int(t)] for t in np.asarray(state.token)]
                self.lengths = self.lengths + np.asarray(state.count) - 1
                self._interrupted = False

    def _prefill(self, rows: list[np.ndarray]) -> jax.Array:
        lengths = np.array([len(r) for r in rows])
        # One smaller shape serves short prompts; more would cost more compiling than they save.
        chunk = min(self.chunk, SHORT_CHUNK if lengths.max() <= SHORT_CHUNK else self.chunk)
        logits = jnp.zeros((len(rows), self.cfg.vocab_size), jnp.float32)
        logits = beside(self.params, logits)
        for start in range(0, int(lengths.max()), chunk):
            tokens = np.zeros((len(rows), chunk), np.int32)
            for i, row in enumerate(rows):
                part = row[start : start + chunk]
                tokens[i, : len(part)] = part
            num_new = jnp.asarray(np.clip(lengths - start, 0, chunk), jnp.int32)
            new = beside(self.params, (jnp.asarray(tokens), num_new))
            args = (self.params, *new, self.cache, logits, self.draft)
            compiled = self._program(prefill_chunk, args, cfg=self.cfg)
            begin = time.perf_counter()
            # Where XLA chose to shard a result over the mesh, the next chunk would compile anew.
            self.cache, logits, self.draft = beside(self.params, compiled(*args))
            jax.block_until_ready(logits)
            self.timing.prefill_seconds += time.perf_counter() - begin
        self.lengths = self.lengths + lengths
        return logits

    def _decode(self, state: DecodeState, steps: int, selector: Selector) -> DecodeState:
        args = (self.params, state, beside(self.params, jnp.int32(steps)))
        compiled = self._program(
            decode_steps,
            args,
            cfg=self.cfg,
            selector=selector,
            sampling=self.sampling,
            draft_length=self.draft_length,
        )
        before = int(np.asarray(state.count).sum())
        begin = time.perf_counter()
        state = jax.block_until_ready(beside(self.params, compiled(*args)))
        self.timing.decode_seconds += time.perf_counter() - begin
        self.timing.decode_tokens += int(np.asarray(state.count).sum()) - before
        return state

    def _program(self, function: Any, args: tuple[Any, ...], **static: Any) -> Any:
        """Compile ahead of the first call, so that timings hold no compilation."""
        begin = time.perf_counter()
        compiled = compiled_program(function, args, **static)
        self.timing.compile_seconds += time.perf_counter() - begin
        return compiled


# One program in place of a dozen operations compiled one by one.
_first_token = jax.jit(record, static_argnames=("sampling",), donate_argnames=("state",))


def _stop_rows(stop: Sequence[int] | Sequence[Sequence[int]], batch: int) -> np.ndarray:
    """Stop tokens as a [B, E] array, padded with -1, which no token equals."""
    if isinstance(stop, np.ndarray):
        stop = stop.tolist()
    each = [s if isinstance(s, Sequence) else None for s in stop]
    rows: list[Sequence[int]]
    if any(s is not None for s in each):
        if len(each) != batch or any(s is None for s in each):
            raise ValueError(f"stop has {len(each)} lists; expected one a request, {batch}")
        rows = [s for s in each if s is not None]
    else:
        rows = [[int(s) for s in stop]] * batch  # type: ignore[arg-type]
    wrong = [s for row in rows for s in row if not 0 <= int(s) < 2**31]
    if wrong:
        raise ValueError(f"stop token {wrong[0]} is no token; leave the list empty to never stop")
    array = np.full((batch, max(1, *(len(r) for r in rows))), -1, np.int32)
    for i, row in enumerate(rows):
        array[i, : len(row)] = row
    return array


def generate(
    params: Any,
    cfg: ModelConfig,
    prompts: Sequence[Any],
    max_new_tokens: int | Sequence[int],
    *,
    max_len: int | None = None,
    stop: Sequence[int] | Sequence[Sequence[int]] | None = None,
    **options: Any,
) -> list[list[int]]:
    """Answers to a batch of prompts of any lengths: a one-turn :class:`Session`.

    ``max_len`` defaults to what the longest request needs; ``options`` are the session's.
    """
    if max_len is None:
        longest = np.max(max_new_tokens) + max((np.size(p) for p in prompts), default=0)
        max_len = max(int(longest), 1)
    session = Session(params, cfg, batch=len(prompts), max_len=max_len, **options)
    return session.turn(prompts, max_new_tokens, stop=stop)
