"""Text to tokens and back: a release's ``tokenizer.json`` where there is one, bytes otherwise."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from models.config import ModelConfig


class Tokenizer(Protocol):
    """What the commands need of a tokenizer."""

    def encode(self, text: str, *, chat: bool = True) -> list[int]:
        """A prompt; with ``chat``, between the markers of a user's and an assistant's turn."""
        ...

    def decode(self, tokens: Sequence[int]) -> str: ...


class Bytes:
    """A token a byte, for models without a tokenizer."""

    def encode(self, text: str, *, chat: bool = True) -> list[int]:
        del chat
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        """Tokens beyond 255 show as the replacement character."""
        pieces = [bytes([t]) if t < 256 else "\ufffd".encode() for t in tokens]
        return b"".join(pieces).decode(errors="replace")


class ReleaseTokenizer:
    """A ``tokenizer.json``, read by the ``tokenizers`` library.

    The chat markers are the file's own added tokens whose names say begin of sentence, user and
    assistant; a file that has none of them prompts with the plain text.
    """

    def __init__(self, path: Path, cfg: ModelConfig) -> None:
        try:
            import tokenizers
        except ImportError as error:
            raise ValueError(
                f"{path} needs the tokenizers package: pip install 'spin-jax[tokenizer]', or pass "
                "token ids"
            ) from error
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception for a bad file
            raise ValueError(f"{path} is not a tokenizer that can be read: {error}") from error
        added = self._tokenizer.get_added_tokens_decoder()
        names = {number: token.content for number, token in added.items()}
        self.user = _marker(names, r"user")
        self.assistant = _marker(names, r"assistant")
        begin = _marker(names, r"begin.?of.?sentence|bos|^<s>$")
        if begin is None and cfg.bos_token_id in names:
            begin = cfg.bos_token_id
        self.begin = begin

    def encode(self, text: str, *, chat: bool = True) -> list[int]:
        body = self._tokenizer.encode(text, add_special_tokens=False).ids
        begin = [] if self.begin is None else [self.begin]
        if not chat or self.user is None or self.assistant is None:
            return [*begin, *body]
        return [*begin, self.user, *body, self.assistant]

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)


def _marker(names: dict[int, str], pattern: str) -> int | None:
    """The first added token whose name, bare of brackets and bars, matches the whole pattern."""
    for number in sorted(names):
        bare = re.sub(r"^\W+|\W+$", "", names[number])
        if re.fullmatch(pattern, bare, re.IGNORECASE) or re.fullmatch(pattern, names[number]):
            return number
    return None


def load_tokenizer(folder: str | Path | None, cfg: ModelConfig) -> Tokenizer:
    """The tokenizer beside a checkpoint, or bytes."""
    path = None if folder is None else Path(folder) / "tokenizer.json"
    return ReleaseTokenizer(path, cfg) if path is not None and path.is_file() else Bytes()
