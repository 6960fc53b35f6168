"""Retrieval tasks for the pocket model, made in place: bytes in, bytes out.

A context is filler with facts in it; questions follow, and an answer is one line.

    fact      #bak:731.       bak has the value 731; a key may get several values
    pointer   #zof:@bak.      zof has the value that bak has
    questions ?bak:           731
              ?bak,mil:       bak:731,mil:902      (several needles)
              ?*dup:          415,223              (every value of a key, in order)
              ?2dup:          223                  (its second value)
              ?@zof:          @bak:731             (follow the pointers)

Keys are three letters and values three digits. One key in eight and one value in eight, by
arithmetic on them, never occur in training, nor does the held-out filler. Everything is drawn from
``random.Random`` of a text seed, so a row depends on (seed, step, row) alone.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import string
import zlib
from collections.abc import Callable, Sequence

import numpy as np
from pocket_text import HELD_OUT, TRAIN, filler

UNTRAINED, FILLER, ANSWER = 0, 1, 2
"""Classes of a training token: random text, English, and what must be retrieved."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """One dialogue of evaluation: a prompt and the right answer for each turn."""

    task: str
    prompts: tuple[bytes, ...]
    answers: tuple[bytes, ...]
    """Each ends with the newline that ends an answer."""
    places: tuple[tuple[int, ...], ...]
    """For each turn, where the facts that its answer needs begin, in the order of need: tokens
    from the start of the dialogue if every answer is right."""


class World:
    """The facts so far, and new ones that do not contradict them."""

    def __init__(self, rng: random.Random, split: str) -> None:
        self.rng, self.split = rng, split
        self.plain: dict[str, str] = {}
        self.pointers: dict[str, str] = {}
        self.repeated: dict[str, list[str]] = {}
        self._deck: list[str] = []

    def deal(self) -> None:
        """Shuffle the plain keys for :meth:`draw`."""
        self._deck = self.rng.sample(list(self.plain), len(self.plain))

    def draw(self) -> str:
        """The next plain key: each comes once before any comes again, when its last answer is
        likely to lie outside the window."""
        self._deck.insert(0, key := self._deck.pop())
        return key

    def _own(self, number: int, residue: int) -> bool:
        return (number % 8 == residue) == (self.split == HELD_OUT)

    def key(self, near: str | None = None) -> str:
        """An unused key of the split, sharing a letter with ``near``, or two while there are any.

        Few of the 75 keys that share two letters belong to the held-out split.
        """
        for attempt in itertools.count():
            letters = self.rng.choices(string.ascii_lowercase, k=3)
            if near is not None:
                place = self.rng.randrange(3)
                two = attempt < 100
                letters = [c if (i == place) == two else near[i] for i, c in enumerate(letters)]
            key = "".join(letters)
            used = key in self.plain or key in self.pointers or key in self.repeated
            if not used and self._own(zlib.crc32(key.encode()), 0):
                return key
        raise AssertionError("counting ends")

    def value(self) -> str:
        """A value of the split."""
        while True:
            number = self.rng.randrange(1000)
            if self._own(number, 3):
                return f"{number:03}"

    def fact(self, near: str | None = None) -> tuple[str, bytes]:
        """A new key with its value."""
        key = self.key(near)
        self.plain[key] = self.value()
        return key, f"#{key}:{self.plain[key]}.".encode()

    def pointer(self, to: str) -> tuple[str, bytes]:
        """A new key that stands for another one."""
        key = self.key()
        self.pointers[key] = to
        return key, f"#{key}:@{to}.".encode()

    def repeat(self, times: int) -> tuple[str, list[bytes]]:
        """A new key with ``times`` different values."""
        key, values = self.key(), []
        while len(values) < times:
            value = self.value()
            if value not in values:
                values.append(value)
        self.repeated[key] = values
        return key, [f"#{key}:{value}.".encode() for value in values]

    def ask(self, key: str) -> tuple[bytes, bytes]:
        return f"\n?{key}:".encode(), f"{self.plain[key]}\n".encode()

    def ask_list(self, keys: Sequence[str]) -> tuple[bytes, bytes]:
        answer = ",".join(f"{k}:{self.plain[k]}" for k in keys)
        return f"\n?{','.join(keys)}:".encode(), f"{answer}\n".encode()

    def ask_all(self, key: str) -> tuple[bytes, bytes]:
        return f"\n?*{key}:".encode(), (",".join(self.repeated[key]) + "\n").encode()

    def ask_kth(self, key: str, k: int) -> tuple[bytes, bytes]:
        """The k-th value, k from 1."""
        return f"\n?{k}{key}:".encode(), f"{self.repeated[key][k - 1]}\n".encode()

    def ask_pointer(self, key: str) -> tuple[bytes, bytes]:
        answer, at = "", key
        while at in self.pointers:
            at = self.pointers[at]
            answer += f"@{at}:"
        return f"\n?@{key}:".encode(), f"{answer}{self.plain[at]}\n".encode()


def scatter(
    rng: random.Random, facts: Sequence[bytes], depths: Sequence[float], length: int, split: str
) -> tuple[bytes, list[int], list[tuple[int, int]]]:
    """``length`` bytes of filler with each fact at about its depth, from 0 to 1.

    Facts of equal depth keep their order. Returns the text, where each fact begins, and the
    (class, count) runs of the text.

    Raises:
        ValueError: the facts are longer than the text.
    """
    room = length - sum(map(len, facts))
    if room < 0:
        raise ValueError(f"{len(facts)} facts do not fit into {length} tokens; ask for more tokens")
    text = filler(rng, room, split)
    order = sorted(range(len(facts)), key=lambda i: depths[i])
    pieces, runs, places, used, at = [], [], [0] * len(facts), 0, 0
    for i in order:
        cut = int(depths[i] * room)
        pieces += [text[used:cut], facts[i]]
        runs += [(FILLER, cut - used), (UNTRAINED, len(facts[i]))]
        at += cut - used
        places[i] = at
        at += len(facts[i])
        used = cut
    pieces.append(text[used:])
    runs.append((FILLER, room - used))
    return b"".join(pieces), places, runs


def _ordered(rng: random.Random, count: int) -> list[float]:
    return sorted(rng.random() for _ in range(count))


def _single(w: World, rng: random.Random) -> tuple[list[bytes], list[float], tuple, list[int]]:
    key, fact = w.fact()
    return [fact], [rng.random()], w.ask(key), [0]


def _multi_needle(
    w: World, rng: random.Random
) -> tuple[list[bytes], list[float], tuple, list[int]]:
    keys, facts = zip(*(w.fact() for _ in range(6)), strict=True)
    wanted = rng.sample(range(6), 3)
    question = w.ask_list([keys[i] for i in wanted])
    return list(facts), [rng.random() for _ in facts], question, wanted


def _multi_key(w: World, rng: random.Random) -> tuple[list[bytes], list[float], tuple, list[int]]:
    first, fact = w.fact()
    facts = [fact] + [w.fact(first)[1] for _ in range(7)]
    return facts, [rng.random() for _ in facts], w.ask(first), [0]


def _multi_value(w: World, rng: random.Random) -> tuple[list[bytes], list[float], tuple, list[int]]:
    key, facts = w.repeat(rng.randint(2, 3))
    wanted = list(range(len(facts)))
    others = [w.fact()[1] for _ in range(3)]
    depths = _ordered(rng, len(facts)) + [rng.random() for _ in others]
    return facts + others, depths, w.ask_all(key), wanted


def _kth(w: World, rng: random.Random) -> tuple[list[bytes], list[float], tuple, list[int]]:
    key, facts = w.repeat(rng.randint(2, 3))
    k = rng.randint(1, len(facts))
    return facts, _ordered(rng, len(facts)), w.ask_kth(key, k), [k - 1]


def _tracking(w: World, rng: random.Random) -> tuple[list[bytes], list[float], tuple, list[int]]:
    root, fact = w.fact()
    middle, hop = w.pointer(root)
    last, hop2 = w.pointer(middle)
    facts = [fact, hop, hop2, w.pointer(w.fact()[0])[1]]
    del w.pointers[next(reversed(w.pointers))]
    return facts, [rng.random() for _ in facts], w.ask_pointer(last), [2, 1, 0]


def _late(w: World, rng: random.Random) -> tuple[list[bytes], list[float], tuple, list[int]]:
    """Three needles near the end keep attention there; then the answer needs an early one."""
    keys, facts = zip(*(w.fact() for _ in range(4)), strict=True)
    depths = [0.75 + 0.25 * rng.random() for _ in range(3)] + [0.05 + 0.45 * rng.random()]
    return list(facts), depths, w.ask_list(keys), list(range(4))


ONE_TURN: dict[str, Callable] = {
    "single": _single,
    "multi_needle": _multi_needle,
    "multi_key": _multi_key,
    "multi_value": _multi_value,
    "kth": _kth,
    "tracking": _tracking,
    "late": _late,
}
MULTI_TURN = "multi_turn"
TASKS = (*ONE_TURN, MULTI_TURN)
NEEDLE_TASKS = ("single", "multi_needle", "multi_key")


def make_sample(seed: str, task: str, length: int, split: str = HELD_OUT) -> Sample:
    """A sample whose first prompt has exactly ``length`` tokens.

    Raises:
        ValueError: an unknown task, or a length that cannot hold it.
    """
    if task not in TASKS:
        raise ValueError(f"task {task!r} is unknown; tasks are {', '.join(TASKS)}")
    rng = random.Random(f"{seed} {task} {length} {split}")
    world = World(rng, split)
    if task == MULTI_TURN:
        return _dialogue(rng, world, length, split)
    facts, depths, (question, answer), wanted = ONE_TURN[task](world, rng)
    text, places, _ = scatter(rng, facts, depths, length - len(question), split)
    return Sample(task, (text + question,), (answer,), (tuple(places[i] for i in wanted),))


def _dialogue(rng: random.Random, world: World, length: int, split: str) -> Sample:
    """Three turns: a new passage before the second, and each asks for something not yet asked."""
    keys, facts = (list(x) for x in zip(*(world.fact() for _ in range(5)), strict=True))
    asked = rng.sample(range(5), 4)
    question, answer = world.ask(keys[asked[0]])
    depths = [rng.random() for _ in facts]
    text, places, _ = scatter(rng, facts, depths, length - len(question), split)
    prompts, answers = [text + question], [answer]
    needed: list[tuple[int, ...]] = [(places[asked[0]],)]
    end = length + len(answer)
    question, answer = world.ask(keys[asked[1]])
    passage, _, _ = scatter(rng, [world.fact()[1]], [rng.random()], 64, split)
    prompts.append(passage + question)
    answers.append(answer)
    needed.append((places[asked[1]],))
    end += len(prompts[-1]) + len(answer)
    question, answer = world.ask_list([keys[i] for i in asked[2:]])
    prompts.append(question)
    answers.append(answer)
    needed.append(tuple(places[i] for i in asked[2:]))
    return Sample(MULTI_TURN, tuple(prompts), tuple(answers), tuple(needed))


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Chances of the kinds of questions in training rows; the rest are single needles."""

    several: float = 0.2
    repeated: float = 0.25
    pointers: float = 0.15


MIXED = Mixture()
SINGLE_ONLY = Mixture(0.0, 0.0, 0.0)


def training_row(
    rng: random.Random, length: int, mixture: Mixture = MIXED
) -> tuple[bytes, list[tuple[int, int]]]:
    """A text of ``length`` tokens, and its (class, count) runs.

    One to three passages of filler and facts, each followed by questions about all facts so far,
    as many as there is room for: a question costs ten tokens, and only answers teach retrieval.
    """
    world = World(rng, TRAIN)
    pieces: list[bytes] = []
    runs: list[tuple[int, int]] = []
    left = length
    passages = rng.choice((1, 1, 2, 3)) if length >= 256 else 1
    for passage in range(passages):
        share = left // (passages - passage)
        context = int(share * rng.uniform(0.45, 0.8))
        text, _, part = scatter(rng, *_new_facts(rng, world, context, mixture), context, TRAIN)
        pieces.append(text)
        runs += part
        left -= context
        until = left - (share - context)
        world.deal()
        for _ in range(2 * len(world.plain) + 3 * len(world.repeated)):
            if left <= until:
                break
            question, answer = _any_question(rng, world, mixture)
            if len(question) + len(answer) > left:
                break
            pieces += [question, answer]
            runs += [(UNTRAINED, len(question)), (ANSWER, len(answer))]
            left -= len(question) + len(answer)
    pieces.append(filler(rng, left, TRAIN))
    runs.append((FILLER, left))
    return b"".join(pieces), runs


def _new_facts(
    rng: random.Random, world: World, context: int, mixture: Mixture
) -> tuple[list[bytes], list[float]]:
    """Facts that fill at most half of a passage, and their depths."""
    most = max(1, min(context // 20, 48))
    count = rng.randint(1, most) if rng.random() < 0.7 else rng.randint(1, min(most, 6))
    facts: list[bytes] = []
    depths: list[float] = []
    last = ""
    while len(facts) < count:
        kind = rng.random()
        if kind < mixture.repeated and len(facts) + 3 <= most:
            _, new = world.repeat(rng.randint(2, 3))
            facts += new
            depths += _ordered(rng, len(new))
            continue
        if kind < mixture.repeated + mixture.pointers and world.plain:
            targets = [*world.plain, *list(world.pointers)[-1:]]
            _, fact = world.pointer(rng.choice(targets))
        else:
            last, fact = world.fact(last if last and rng.random() < 0.3 else None)
        facts.append(fact)
        depths.append(rng.random())
    return facts, depths


def _any_question(rng: random.Random, world: World, mixture: Mixture) -> tuple[bytes, bytes]:
    kind = rng.random()
    if world.repeated and (kind < mixture.repeated or not world.plain):
        key = rng.choice(list(world.repeated))
        if rng.random() < 0.4:
            return world.ask_all(key)
        return world.ask_kth(key, rng.randint(1, len(world.repeated[key])))
    kind -= mixture.repeated
    if world.pointers and kind < mixture.pointers:
        return world.ask_pointer(rng.choice(list(world.pointers)))
    keys = list(world.plain)
    if len(keys) > 1 and kind - mixture.pointers < mixture.several:
        return world.ask_list([world.draw() for _ in range(rng.randint(2, min(len(keys), 4)))])
    return world.ask(world.draw())


def training_batch(
    seed: int, step: int, rows: int, length: int, mixture: Mixture = MIXED
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and classes, uint8 [rows, length] each, of one step of training."""
    tokens = np.empty((rows, length), np.uint8)
    classes = np.empty((rows, length), np.uint8)
    for row in range(rows):
        text, runs = training_row(random.Random(f"{seed} {step} {row}"), length, mixture)
        tokens[row] = np.frombuffer(text, np.uint8)
        kinds, counts = zip(*runs, strict=True)
        classes[row] = np.repeat(np.array(kinds, np.uint8), counts)
    return tokens, classes
