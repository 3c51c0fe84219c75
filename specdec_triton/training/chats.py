"""Chats of which the target writes both sides, from its own chat template: no data set is needed.

A chat is token ids, and for each token whether it was the answer's: what a drafter is to learn. The user's side is drawn at a higher
temperature, behind an opening that spreads the tasks; half of the answers are greedy, half drawn.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specdec_triton.drafters import NoDraft
from specdec_triton.engine import SpeculativeDecoder
from specdec_triton.sampling import SamplingParams

OPENINGS = (
    "", "", "What is", "How do I", "Explain", "Why", "Write", "Write a short story about", "Give me", "List", "Can you", "I need",
    "Summarize the following text in two sentences:", "Translate to French:", "Translate to Spanish:", "Solve:",
    "Write a Python function that", "Fix this Python code:", "Answer the question from the context.\n\nContext:", "Tell me about",
    "What are the benefits of", "Describe", "Compare", "Who", "When did", "Rewrite this politely:", "Make a plan for", "Calculate",
    "A train", "If I have", "Correct the grammar:", "Write an email", "Help me understand", "What is the difference between",
)  # fmt: skip
_SENTINEL = "\u241f placeholder \u241f"
_USER: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95}
_ANSWER: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95}


@dataclass(frozen=True)
class Chat:
    """Attributes: tokens: the whole text. answer: where the answers' tokens lie, as ranges [start, stop)."""

    tokens: list[int]
    answer: list[tuple[int, int]]


class ChatWriter:
    """Lets a model write chats.

    Args:
        model: loaded, best after ``optimize``. tokenizer: with a chat template.
        batch: chats at once. max_user, max_answer: the most tokens of a turn.

    Raises:
        ValueError: the tokenizer has no chat template, or one that changes what the user says.
    """

    def __init__(
        self, model: Any, tokenizer: Any, *, batch: int = 64, max_user: int = 160, max_answer: int = 256
    ) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError("the tokenizer has no chat template: give texts of your own with --text")
        self._tokenizer = tokenizer
        self._batch = batch
        self._max_user, self._max_answer = max_user, max_answer
        longest = 2048 if (limit := getattr(model.config, "max_position_embeddings", None)) is None else limit
        self._decoder = SpeculativeDecoder(
            model, NoDraft(), max_batch_size=batch, max_seq_len=min(longest, 4096), exact=False, tokenizer=tokenizer
        )
        self._stops = set(self._decoder.target.stop_ids) | {tokenizer.eos_token_id}
        self._before, self._between = self._frame()

    def _frame(self) -> tuple[str, str]:
        """What the template puts before the user's words, and between them and the answer."""
        text = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": _SENTINEL}], tokenize=False, add_generation_prompt=True
        )
        if text.count(_SENTINEL) != 1:
            raise ValueError("the chat template does not give the user's words as they are")
        before, _, between = text.partition(_SENTINEL)
        return before, between

    def write(self, seed: int) -> Iterator[Chat]:
        """A batch of chats; of the same seed the same ones."""
        openings = [OPENINGS[(seed * self._batch + i) % len(OPENINGS)] for i in range(self._batch)]
        starts = [self._ids(self._before + opening) for opening in openings]
        seeds = [seed * self._batch + i for i in range(self._batch)]
        users = self._generate(starts, _USER, self._max_user, seeds)
        prompts = []
        for opening, user in zip(openings, users, strict=True):
            said = self._tokenizer.decode([token for token in user if token not in self._stops])
            words = (opening + said).strip()
            prompts.append(self._ids(self._before + words + self._between) if words else None)
        asked = [(prompt, s) for prompt, s in zip(prompts, seeds, strict=True) if prompt is not None]
        for greedy in (True, False):
            some = [x for x in asked if (x[1] % 2 == 0) == greedy]
            options: dict[str, Any] = {"temperature": 0.0} if greedy else _ANSWER
            answers = self._generate([x[0] for x in some], options, self._max_answer, [x[1] for x in some])
            for (prompt, _), answer in zip(some, answers, strict=True):
                if len(answer) > 1:
                    yield Chat(prompt + answer, [(len(prompt), len(prompt) + len(answer))])

    def _generate(
        self, prompts: Sequence[list[int]], options: dict[str, Any], most: int, seeds: Sequence[int]
    ) -> list[list[int]]:
        params = [SamplingParams(max_new_tokens=most, seed=seed, **options) for seed in seeds]
        return [list(out.token_ids) for out in self._decoder.generate(list(prompts), params)]

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def text_chats(lines: Sequence[str], tokenizer: Any, length: int = 512) -> Iterator[Chat]:
    """Texts of the user's own in the place of chats: every token is to be learnt."""
    for line in lines:
        ids = tokenizer(line)["input_ids"]
        for start in range(0, len(ids), length):
            part = ids[start : start + length]
            if len(part) > 8:
                yield Chat(list(part), [(1, len(part))])


class ChatFile:
    """Chats on disk, one JSON object a line; appended batch by batch, so that writing can be taken up again.

    Attributes:
        batches: how many are complete.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.batches = 0
        if path.is_file():
            lines = path.read_text().splitlines(keepends=True)
            whole = max(
                (i + 1 for i, line in enumerate(lines) if line.startswith('{"batch"') and line.endswith("\n")),
                default=0,
            )
            if whole < len(lines):  # cut off in a batch
                path.write_text("".join(lines[:whole]))
            self.batches = sum(line.startswith('{"batch"') for line in lines[:whole])

    def append(self, chats: Sequence[Chat]) -> None:
        """A batch."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            for chat in chats:
                file.write(json.dumps({"tokens": chat.tokens, "answer": chat.answer}) + "\n")
            file.write(json.dumps({"batch": self.batches, "chats": len(chats)}) + "\n")
        self.batches += 1

    def __iter__(self) -> Iterator[Chat]:
        if not self.path.is_file():
            return
        with self.path.open() as file:
            for line in file:
                row = json.loads(line)
                if "tokens" in row:
                    yield Chat(row["tokens"], [(start, stop) for start, stop in row["answer"]])

    def tokens(self) -> int:
        """Answers' tokens in all."""
        return sum(stop - start for chat in self for start, stop in chat.answer)


def write_chats(
    file: ChatFile,
    writer: ChatWriter,
    tokens: int,
    *,
    until: float = math.inf,
    progress: Callable[[int], None] = lambda done: None,
) -> bool:
    """Append batches of chats until the file holds so many answers' tokens, or until a time (``time.monotonic``); whether it does."""
    done = file.tokens()
    progress(done)
    while done < tokens and time.monotonic() < until:
        torch.manual_seed(file.batches)
        chats = list(writer.write(file.batches))
        file.append(chats)
        done += sum(stop - start for chat in chats for start, stop in chat.answer)
        progress(done)
    return done >= tokens
