"""Stop strings: the token that completes one is the last of the output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import StopStringCriteria


class StopStrings:
    """Finds the end of an output, token by token, wherever tokens begin and end inside the strings.

    Args:
        tokenizer: of transformers.

    Raises:
        ValueError: transformers cannot look for strings in this tokenizer's tokens.
    """

    def __init__(self, tokenizer: Any, strings: Sequence[str]) -> None:
        try:
            self._criterion = StopStringCriteria(tokenizer, list(strings))
        except Exception as error:  # whatever a tokenizer that is none, or an unusual one, makes of it
            name = type(tokenizer).__name__
            raise ValueError(
                f"tokenizer must be one in which transformers finds strings, got {name}: {error}"
            ) from error
        self._reach = self._criterion.maximum_token_len  # tokens back from the end that can be part of one

    def first(self, before: Sequence[int], new: Sequence[int], early: int = 0) -> int | None:
        """Which of the new tokens, after the output ``before`` and but for the ``early`` first ones, completes a string first;
        None: none does."""
        output = [*before[-self._reach :], *new]
        for i in range(early, len(new)):
            tail = output[: len(output) - len(new) + i + 1][-self._reach :]
            if bool(self._criterion(torch.tensor([tail]), None)[0]):  # type: ignore[arg-type]
                return i
        return None
