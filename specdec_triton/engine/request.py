"""One request: what was asked, what has been written, how it went."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from specdec_triton.sampling import SamplingParams

if TYPE_CHECKING:
    from specdec_triton.engine import SpeculativeDecoder


@dataclass
class GenerationStats:
    """Counts of one request. Drafts that were cut off or follow an end-of-sequence token are not counted.

    Attributes:
        prompt_tokens, new_tokens: lengths.
        target_passes: passes of the target that emitted tokens, the prompt's included.
        drafted, accepted: draft tokens that the target scored, and those that it kept.
        drafted_at, accepted_at: the same by place in the draft (index 0: first draft of a round).
        seconds: from the start of the prompt's pass to the last token.
    """

    prompt_tokens: int = 0
    new_tokens: int = 0
    target_passes: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def acceptance_rate(self) -> float | None:
        """accepted / drafted; None when nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def tokens_per_target_pass(self) -> float | None:
        return self.new_tokens / self.target_passes if self.target_passes else None

    @property
    def tokens_per_second(self) -> float | None:
        """New tokens by wall clock, the prompt's pass included."""
        return self.new_tokens / self.seconds if self.seconds > 0 else None

    def count_round(self, drafted: int, accepted: int) -> None:
        self.drafted += drafted
        self.accepted += accepted
        while len(self.drafted_at) < drafted:
            self.drafted_at.append(0)
            self.accepted_at.append(0)
        for j in range(drafted):
            self.drafted_at[j] += 1
            self.accepted_at[j] += j < accepted


@dataclass
class GenerationOutput:
    """What a request wrote.

    Attributes:
        token_ids: the new tokens; a stop token is the last of them.
        finish_reason: ``stop``, ``length``, ``cancelled`` or ``error`` (``error`` says why; token_ids keeps what was
            written before).
    """

    token_ids: list[int]
    finish_reason: str
    stats: GenerationStats
    logprobs: list[Any] | None = None
    error: str | None = None


class RequestHandle:
    """A submitted request. Iterating (plainly or with ``async for``) yields its tokens and drives the decoder.

    Attributes:
        prompt, params: as submitted.
        token_ids: the new tokens so far.
        output: the :class:`GenerationOutput` once the request has ended, else None.
    """

    def __init__(
        self, decoder: SpeculativeDecoder, prompt: list[int], params: SamplingParams, seed: int, method: str, limit: int
    ) -> None:
        self.prompt = prompt
        self.params = params
        self.token_ids: list[int] = []
        self.output: GenerationOutput | None = None
        self.seed = seed
        self.method = method
        self.max_total = limit  # prompt and output together
        self.stats = GenerationStats(prompt_tokens=len(prompt))
        self._decoder = decoder
        self._started: float | None = None

    def __len__(self) -> int:
        """Tokens of prompt and output."""
        return len(self.prompt) + len(self.token_ids)

    @property
    def remaining(self) -> int:
        """Tokens that may still be written."""
        return self.max_total - len(self)

    def cancel(self) -> None:
        """End the request; its pages are free at once. Without effect if it has ended."""
        self._decoder.cancel(self)

    def start(self) -> None:
        self._started = time.perf_counter()

    def emit(self, tokens: Sequence[int], drafted: int, accepted: int, stop_ids: frozenset[int]) -> str | None:
        """Take a round's tokens up to a stop token or the limit; the finish reason if the request has ended."""
        taken = list(tokens[: self.remaining])
        stop = next((i for i, token in enumerate(taken) if token in stop_ids), None)
        if stop is not None:
            taken = taken[: stop + 1]
        if len(taken) <= accepted:  # cut inside the accepted drafts: what follows was never part of the text
            drafted = accepted = len(taken)
        self.token_ids += taken
        self.stats.new_tokens = len(self.token_ids)
        self.stats.target_passes += 1
        self.stats.count_round(drafted, accepted)
        if stop is not None:
            return "stop"
        return "length" if self.remaining <= 0 else None

    def finish(self, reason: str, error: str | None = None) -> None:
        if self._started is not None:
            self.stats.seconds = time.perf_counter() - self._started
        self.output = GenerationOutput(self.token_ids, reason, self.stats, error=error)

    def __iter__(self) -> Iterator[int]:
        sent = 0
        while True:
            yield from self.token_ids[sent:]
            sent = len(self.token_ids)
            if self.output is not None:
                return
            self._decoder.step()

    async def __aiter__(self) -> AsyncIterator[int]:
        import asyncio

        sent = 0
        while True:
            for token in self.token_ids[sent:]:
                sent += 1
                yield token
            if self.output is not None:
                return
            if sent == len(self.token_ids):
                self._decoder.step()
            await asyncio.sleep(0)
