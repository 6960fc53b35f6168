"""Filler between the facts of a retrieval task: real English, and made-up words.

The English is ``pydoc_data.topics`` of the Python standard library (PSF licence), the language
reference as plain text: half a megabyte that every Python installation has. Its wording changes a
little from one Python version to the next.
"""

from __future__ import annotations

import functools
import random
import zlib

TRAIN, HELD_OUT = "train", "held-out"
_SYLLABLES = "ba de fi go hu ka le mi no pu ra se ti vo wy xa zen dor mal tis".split()


@functools.cache
def english(split: str) -> bytes:
    """The text of a split, without the characters that facts and questions start with.

    Every eighth paragraph, by its checksum, is held out; topics share paragraphs, so each counts
    once.
    """
    from pydoc_data.topics import topics

    every = "\n\n".join(topics[name] for name in sorted(topics)).encode("ascii", "ignore")
    parts = dict.fromkeys(p.strip() for p in every.split(b"\n\n"))
    text = b"\n".join(p for p in parts if (zlib.crc32(p) % 8 == 0) == (split == HELD_OUT))
    # Rows of underlines and indentation are no English.
    for mark in (b"*", b"=", b"-", b" "):
        while mark * 2 in text:
            text = text.replace(mark * 2, mark)
    return text.translate(None, b"#?@")


@functools.cache
def synthetic(split: str) -> bytes:
    """Sentences of made-up words; another draw for each split."""
    rng = random.Random(f"pocket words {split}")
    sentences = []
    for _ in range(4000):
        words = (
            "".join(rng.choices(_SYLLABLES, k=rng.randint(1, 3))) for _ in range(rng.randint(3, 9))
        )
        sentences.append(" ".join(words).capitalize() + ". ")
    return "".join(sentences).encode()


def filler(rng: random.Random, length: int, split: str) -> bytes:
    """``length`` bytes from a random place of one of the two sources, English three times in four.

    Sources are read as rings, so any length is served.
    """
    source = english(split) if rng.random() < 0.75 else synthetic(split)
    start = rng.randrange(len(source))
    text = source[start : start + length]
    while len(text) < length:
        text += source[: length - len(text)]
    return text
