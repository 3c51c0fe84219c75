"""What the tokens of two tokenizers have in common: their texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

PIECES = 8  # the most tokens that one token becomes; the rest of a longer one is lost to the drafter
_PART = "\ufffd"  # where a token is part of a character


def token_texts(tokenizer: Any) -> list[str]:
    """The text of each id behind other text, where it has one by itself; else the empty text.

    Raises:
        ValueError: what is given cannot decode.
    """
    try:
        before = tokenizer("a", add_special_tokens=False)["input_ids"][-1:]
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        start = tokenizer.decode(before, **options)
        found = tokenizer.batch_decode([[*before, i] for i in range(len(tokenizer))], **options)
    except (AttributeError, TypeError, KeyError) as error:
        raise ValueError(f"tokenizer must be a tokenizer of transformers, got {type(tokenizer).__name__}") from error
    texts = [text.removeprefix(start) if text.startswith(start) else "" for text in found]
    return ["" if _PART in text else text for text in texts]


def same_texts(ours: Sequence[str], theirs: Sequence[str]) -> bool:
    """Whether ids mean the same, as far as both know them."""
    return all(a == b for a, b in zip(ours, theirs, strict=False))


class Translation:
    """From a target's token ids to a drafter's and back.

    Args:
        target, draft: the texts of their ids. size, draft_size: of their logits, which may have more columns. fallback: the drafter's id
            for what it has no text for.

    Attributes:
        draft: as given.
        shared: int64 ``[S]``, ids of the target whose whole text is one token of the drafter's, ascending; own: int64 ``[S]``, that token.
        pieces: int64 ``[V,8]``, each of the target's tokens as the drafter's, padded with -1; counts: int32 ``[V]``, how many, at least 1.

    Raises:
        ValueError: they share no token.
    """

    def __init__(self, target: Sequence[str], draft: Sequence[str], size: int, draft_size: int, fallback: int) -> None:
        self.draft = draft
        ids: dict[str, int] = {}
        for i, text in enumerate(draft[:draft_size]):
            if text:
                ids.setdefault(text, i)
        self._ids, self._longest = ids, max(map(len, ids), default=0)
        pieces = torch.full((size, PIECES), -1, dtype=torch.int64)
        pieces[:, 0] = fallback
        shared: dict[int, int] = {}  # by the drafter's
        for i, text in enumerate(target[:size]):
            own = self._split(text)[:PIECES]
            if own:
                pieces[i, : len(own)] = torch.tensor(own)
            if text in ids:
                shared.setdefault(ids[text], i)
        if not shared:
            raise ValueError("the draft model's tokenizer shares no token with the target's")
        pairs = sorted((target_id, own_id) for own_id, target_id in shared.items())
        self.shared, self.own = torch.tensor(pairs).T.contiguous().unbind(0)
        self.pieces = pieces
        self.counts = (pieces >= 0).sum(1, dtype=torch.int32)

    def _split(self, text: str) -> list[int]:
        """The longest tokens from left to right; characters that are none are left out."""
        found, at = [], 0
        while at < len(text):
            for length in range(min(self._longest, len(text) - at), 0, -1):
                if (token := self._ids.get(text[at : at + length])) is not None:
                    found.append(token)
                    at += length
                    break
            else:
                at += 1
        return found

    def to(self, device: torch.device) -> Translation:
        self.shared, self.own = self.shared.to(device), self.own.to(device)
        self.pieces, self.counts = self.pieces.to(device), self.counts.to(device)
        return self


class Recutting:
    """A drafter's tokens as the target's tokenizer would have cut their text behind what is there already.

    Args:
        tokenizer: the target's. draft: the texts of the drafter's ids.
    """

    def __init__(self, tokenizer: Any, draft: Sequence[str]) -> None:
        self._tokenizer, self._draft = tokenizer, draft

    def __call__(self, tail: Sequence[int], own: Sequence[int]) -> list[int]:
        """Up to the first token that has no text by itself; nothing where the joint text would have been cut otherwise before its end."""
        texts = [self._draft[i] if i < len(self._draft) else "" for i in own]
        whole = texts[: texts.index("")] if "" in texts else texts
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        for start in range(len(tail)):  # cut within a character or a word, a tail may not give its own tokens again
            before = list(tail[start:])
            text = self._tokenizer.decode(before, **options)
            ids = list(self._tokenizer(text + "".join(whole), add_special_tokens=False)["input_ids"])
            if ids[: len(before)] == before:
                return ids[len(before) :]
        return []
