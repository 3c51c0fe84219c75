"""Chats of which the target writes both sides, from its own chat template: no data set is needed.

The user's side is one of our questions, or is drawn at temperature 1 behind an opening that spreads the tasks; the answer is greedy or
drawn. A few hundred chats are written side by side, a token of each at every pass, also where it is the template's and known before: so all have the same
length, there is no padding and no mask, and a pass is one large matrix product, which is what counts here (the decoder of this package
is made for few rows). What the target knows at each token is kept as it is written.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from inspect import signature
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from specdec_triton.taps import Taps
from specdec_triton.training.features import Example, split_states
from specdec_triton.training.questions import question

OPENINGS = (
    "", "", "", "What is", "What are", "What causes", "What should I", "What happens when", "What is the difference between", "Which",
    "Who", "Who was", "When did", "Where", "Why", "Why do", "Why is", "How", "How do I", "How does", "How many", "How can I",
    "Is it", "Should I", "Can you", "I need", "I want to", "My", "Help me", "Please", "Explain", "Explain to a child", "Tell me about",
    "Describe", "Compare", "List", "Give me", "Give me ideas for", "Write", "Write a short story about", "Write a poem about",
    "Write an email", "Write a Python function that", "Fix this Python code:", "Make a plan for", "Summarize the following text in two sentences:",
    "Translate to French:", "Translate to Spanish:", "Rewrite this politely:", "Correct the grammar:", "Solve:", "Calculate", "If I have",
    "A train", "A shop sells", "A farmer", "Tom has", "Answer the question from the context.\n\nContext:",
)  # fmt: skip
_SENTINEL = "\u241f placeholder \u241f"
_TOP_K = 50
_USER, _ANSWER = 1.0, 0.8  # temperatures
_GREEDY = 2 / 3  # of the answers
# Of the questions: ours, which are well formed, but about few things: a head soon knows their answers by heart.
_ASKED = 0.2
_FEW = 0.1  # of a wave's chats: they are cut off where they are, for small passes cost nearly as much as large ones


class _Chat:
    """A chat that is being written.

    Args:
        opening: of what the user says. closing: where that is all of it, what comes between it and the answer; else nothing.

    Attributes:
        forced: tokens that come next whatever the target says, the nearest last. answer: where the answer begins. best: the target's likeliest token
            after each of the tokens it has seen, -1 where the next one was known before.
    """

    def __init__(self, opening: Sequence[int], closing: Sequence[int], greedy: bool) -> None:
        self.tokens: list[int] = []
        self.forced = [*opening, *closing][::-1]
        self.said = len(closing)  # by the user, beside the opening
        self.answer: int | None = None
        self.greedy = greedy
        self.best: list[int] = []
        self.states: list[torch.Tensor] = []

    @property
    def temperature(self) -> float:
        return _USER if self.answer is None else 0.0 if self.greedy else _ANSWER


class ChatWriter:
    """Lets a model write chats.

    Args:
        model: loaded. tokenizer: with a chat template. taps: after how many of its layers its states are kept, besides what its head is given.
        batch: chats at once. max_user, max_answer: the most tokens of a turn.

    Raises:
        ValueError: the tokenizer has no chat template, or one that changes what the user says.
    """

    def __init__(
        self, model: Any, tokenizer: Any, taps: Sequence[int], *, batch: int = 256, max_user: int = 64,
        max_answer: int = 128,
    ) -> None:  # fmt: skip
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError("the tokenizer has no chat template: give texts of your own with --text")
        self._model, self._tokenizer = model, tokenizer
        self._batch, self._max_user, self._max_answer = batch, max_user, max_answer
        self._taps = Taps(model, (*taps, model.config.get_text_config().num_hidden_layers))
        stop = model.generation_config.eos_token_id
        self._stops = {tokenizer.eos_token_id, *(stop if isinstance(stop, list) else [stop])}
        self._cache_name = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
        before, between = self._frame()
        self._before, self._between = self._ids(before), self._ids(between)
        self._openings = [self._ids(opening) for opening in OPENINGS]

    def _frame(self) -> tuple[str, str]:
        """What the template puts before the user's words, and between them and the answer."""
        text = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": _SENTINEL}], tokenize=False, add_generation_prompt=True
        )
        if text.count(_SENTINEL) != 1:
            raise ValueError("the chat template does not give the user's words as they are")
        before, _, between = text.partition(_SENTINEL)
        return before, between

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def examples(self, seed: int = 0) -> Iterator[Example]:
        """Chats without end, each when it is finished; of the same seed the same ones, on one machine."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield from self._wave(generator)

    @torch.inference_mode()
    def _wave(self, generator: torch.Generator) -> Iterator[Example]:
        """Chats that begin together."""
        rng = random.Random(int(torch.randint(1 << 31, (), generator=generator)))
        chats = [self._begun(rng) for _ in range(self._batch)]
        cache = DynamicCache(config=self._model.config)
        cache.layers = [_RoomyLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
        logits, states = self._pass(torch.tensor([self._before]), cache)  # alike for all of them
        cache.batch_repeat_interleave(self._batch)
        logits = logits.expand(self._batch, -1)
        for chat in chats:
            chat.tokens += self._before
            chat.best += [-1] * (len(self._before) - 1)
            chat.states.append(states[0])
        while True:
            best = logits.argmax(-1)
            drawn = _draw(logits, best, torch.tensor([chat.temperature for chat in chats]), generator)
            both = zip(chats, drawn.tolist(), best.tolist(), strict=True)
            going = [self._say(chat, token, likeliest) for chat, token, likeliest in both]
            yield from (self._example(chat) for chat, on in zip(chats, going, strict=True) if not on and chat.answer)
            chats = [chat for chat, on in zip(chats, going, strict=True) if on]
            if len(chats) <= _FEW * self._batch:
                yield from (self._example(chat) for chat in chats if chat.answer and len(chat.tokens) > chat.answer + 1)
                return
            if not all(going):
                cache.batch_select_indices(torch.tensor(going).nonzero()[:, 0])
            logits, states = self._pass(torch.tensor([[chat.tokens[-1]] for chat in chats]), cache)
            for chat, state in zip(chats, states, strict=True):
                chat.states.append(state)

    def _begun(self, rng: random.Random) -> _Chat:
        greedy = rng.random() < _GREEDY
        if rng.random() < _ASKED:
            return _Chat(self._ids(question(rng)), self._between, greedy)
        return _Chat(rng.choice(self._openings), (), greedy)

    def _pass(self, tokens: torch.Tensor, cache: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The target's logits after the last of the new tokens, fp32 ``[B,V]``, and its states at all of them, bf16 ``[B,n,F]``."""
        with self._taps.watching():
            given = {self._cache_name: cache, "use_cache": True, "logits_to_keep": 1}
            out = self._model(input_ids=tokens.to(self._model.device), **given)
        self._taps.take()
        return out.logits[:, -1].float().cpu(), self._taps.states.to(torch.bfloat16).cpu()

    def _say(self, chat: _Chat, token: int, likeliest: int) -> bool:
        """The chat's next token, drawn unless it is known before; whether the chat goes on."""
        stops = token in self._stops or chat.said == self._max_user
        if not chat.forced and chat.answer is None and stops:
            if not chat.said:
                return False
            chat.forced = self._between[::-1]
        chat.best.append(-1 if chat.forced else likeliest)
        if chat.forced:
            chat.tokens.append(chat.forced.pop())
            if not chat.forced and chat.said:
                chat.answer = len(chat.tokens)
            return True
        chat.tokens.append(token)
        if chat.answer is None:
            chat.said += 1
            return True
        return token not in self._stops and len(chat.tokens) - chat.answer < self._max_answer

    def _example(self, chat: _Chat) -> Example:
        """All but the last token where the target has not seen it."""
        assert chat.answer is not None
        states = torch.cat(chat.states)
        tokens, best = (torch.tensor(x[: len(states)], dtype=torch.int32) for x in (chat.tokens, chat.best))
        learnt = torch.arange(len(tokens)) >= chat.answer
        return Example(tokens, learnt, best, *split_states(states, self._model))


def _draw(
    logits: torch.Tensor, best: torch.Tensor, temperatures: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """A token for each row, int64 ``[B]``."""
    drawn, hot = best.clone(), temperatures > 0
    if bool(hot.any()):
        top, ids = logits[hot].topk(min(_TOP_K, logits.shape[-1]), -1)
        choice = (top / temperatures[hot, None]).softmax(-1).multinomial(1, generator=generator)
        drawn[hot] = ids.gather(-1, choice)[:, 0]
    return drawn


class _RoomyLayer(DynamicLayer):
    """A layer's keys and values with room to grow: transformers' own copies all of them for each token."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._rooms: list[torch.Tensor | None] = [None, None]
        self.keys, self.values = self._with(0, self.keys, key_states), self._with(1, self.values, value_states)
        return self.keys, self.values

    def _with(self, which: int, old: torch.Tensor | None, new: torch.Tensor) -> torch.Tensor:
        held = 0 if old is None or old.dim() < 4 else old.shape[2]
        total, room = held + new.shape[2], self._rooms[which]
        if (
            room is None or old is None or room.data_ptr() != old.data_ptr() or room.shape[2] < total
        ):  # too small, or rows were chosen
            room = new.new_empty(*new.shape[:2], total + 64, new.shape[3])
            if held and old is not None:
                room[:, :, :held] = old
            self._rooms[which] = room
        room[:, :, held:total] = new
        return room[:, :, :total]
