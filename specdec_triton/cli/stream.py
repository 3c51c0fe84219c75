"""Token ids to text while they arrive."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_INCOMPLETE = "\ufffd"  # what a tokenizer shows for the first bytes of a character


class TextStream:
    """Decodes a growing list of tokens; the pieces joined are the decoding of the whole list.

    What a token adds to the text depends on its neighbours: several tokens can make one character, and some tokenizers
    drop the space at the very start. So each piece is the difference between two decodings of a short window, which
    begins where the text before the last piece ended; characters that may still be incomplete wait.

    Args:
        tokenizer: of transformers. Special tokens are left out of the text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # Tokenizers that tidy spaces up ("do n't" becomes "don't") look back as far as the last space.
        self._tidies = bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))
        self._ids: list[int] = []
        self._start = 0  # the window's first token
        self._clean = 0  # a later place where the window may begin: the text before it is complete
        self._sent = 0  # characters of the window's text that have been handed out

    def push(self, tokens: Sequence[int]) -> str:
        """The text that is certain now and was not before; may be empty."""
        self._ids += tokens
        text = self._window()
        stable = text.rstrip(_INCOMPLETE)
        if self._tidies:
            stable = stable[: max(stable.rfind(" "), 0)]
        piece = stable[self._sent :]
        self._sent += len(piece)
        if piece and len(stable) == len(text):
            self._start, self._clean = self._clean, len(self._ids)
            self._sent = len(self._window())
        return piece

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        piece = self._window()[self._sent :]
        self._sent += len(piece)
        return piece

    def _window(self) -> str:
        return decode(self._tokenizer, self._ids[self._start :])


def decode(tokenizer: Any, tokens: Sequence[int]) -> str:
    """The text of tokens, without special ones."""
    return tokenizer.decode(list(tokens), skip_special_tokens=True)
