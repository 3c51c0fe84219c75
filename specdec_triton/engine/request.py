"""One request: what was asked, what has been written, how it went."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specdec_triton import ops
from specdec_triton.engine.stats import GenerationStats
from specdec_triton.logprobs import TokenLogprob
from specdec_triton.sampling import SamplingParams

if TYPE_CHECKING:
    from specdec_triton.engine import SpeculativeDecoder
    from specdec_triton.engine.stop_strings import StopStrings
    from specdec_triton.grammar import Matcher


@dataclass
class GenerationOutput:
    """What a request wrote.

    Attributes:
        token_ids: the new tokens; a stop token is the last of them.
        finish_reason: ``stop``, ``length``, ``cancelled`` or ``error`` (``error`` says why; token_ids keeps what was
            written before).
        logprobs: of each token, if the request asked for them.
    """

    token_ids: list[int]
    finish_reason: str
    stats: GenerationStats
    logprobs: list[TokenLogprob] | None = None
    error: str | None = None


class RequestHandle:
    """A submitted request. Iterating (plainly or with ``async for``) yields its tokens and drives the decoder.

    ``async for`` steps the decoder in a thread of its own, so the event loop stays responsive; several tasks may iterate over
    handles of one decoder at once. It cancels the request if the task is cancelled, or the iterator closed. An iteration ends
    with the request, however that ended: ``output`` tells.

    Attributes:
        prompt, params: as submitted.
        token_ids: the new tokens so far. logprobs: of each of them; None: not asked for.
        output: the :class:`GenerationOutput` once the request has ended, else None.
        exception: what ended it with an error, if that was an exception.
    """

    def __init__(
        self,
        decoder: SpeculativeDecoder,
        prompt: list[int],
        params: SamplingParams,
        *,
        seed: int,
        method: str,
        max_total: int,
        stop_ids: Sequence[int],
        limit: int,
        fixed: bool,
        trees: bool,
        arrival: int,
        stop_strings: StopStrings | None = None,
        matcher: Matcher | None = None,
    ) -> None:
        self.prompt = prompt
        self.params = params
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] | None = None if params.logprobs is None else []
        self.output: GenerationOutput | None = None
        self.exception: Exception | None = None
        self.stats = GenerationStats(prompt_tokens=len(prompt))

        self.seed = seed
        self.method = method
        self.max_total = max_total  # prompt and output together
        self.stop_ids = stop_ids  # any of them ends the text
        self.stop_strings = stop_strings  # so does what completes one of them
        self.matcher = matcher  # of the request's grammar
        self.rules = _rules(params, stop_ids)  # by name: what changes its logits on the device
        self.limit = limit  # the most drafts a round
        self.fixed = fixed  # that many, whatever the controller thinks
        self.trees = trees  # its drafts may be trees
        self.arrival = arrival  # requests are served in this order
        self.slot: int | None = None  # None: waiting, or ended
        self.prefilled = 0  # tokens of the prompt whose keys are in the cache
        self.decoding = False  # the prompt's pass is done
        self.in_flight = 0  # tokens that rounds not yet read may have written
        self.wanted = limit  # drafts that the last round would have liked
        self.seen = 0  # tokens that the drafter has processed, as far as is known
        self.seen_since = 0  # the first round that knows of it
        self.phases_before: dict[str, float] | None = None  # the decoder's phase_seconds when the prompt's pass began
        self.saved: tuple[Any, Any] | None = None  # pages of target and drafter while it is preempted
        self.decoder = decoder
        self._started: float | None = None

    def __repr__(self) -> str:
        state = "waiting" if self.slot is None else "running"
        state = state if self.output is None else self.output.finish_reason
        return f"<RequestHandle: {state}, {len(self.prompt)} prompt tokens, {len(self.token_ids)} new>"

    @property
    def depends_on_bits(self) -> bool:
        """Whether what is reported of the text depends on the last bit of the logits."""
        return self.method not in ops.PATHLESS or self.params.logprobs is not None

    @property
    def length(self) -> int:
        """Tokens of prompt and output."""
        return len(self.prompt) + len(self.token_ids)

    @property
    def longest(self) -> int:
        """Tokens that the text may have once all rounds in flight have been read."""
        return min(self.length + self.in_flight, self.max_total)

    def most_keys(self, tokens: int | None = None) -> int:
        """Keys that a pass over so many tokens of its text may leave in the cache, of drafts too (None: of the whole text). The nodes
        of a tree may lie behind the text's end."""
        most = self.max_total + (self.limit if self.trees else 0)
        return most if tokens is None else min(tokens, most)

    def cancel(self) -> None:
        """End the request. Its pages are free at once, or after the step that another thread is in. Without effect if it
        has ended."""
        self.decoder.cancel(self)

    def start(self) -> None:
        if self._started is None:
            self._started = time.perf_counter()

    def finish(self, reason: str, error: str | None = None) -> None:
        if self._started is not None:
            self.stats.seconds = time.perf_counter() - self._started
        self.output = GenerationOutput(self.token_ids, reason, self.stats, self.logprobs, error)

    def __iter__(self) -> Iterator[int]:
        sent = 0
        while True:
            for token in self.token_ids[sent:]:
                sent += 1
                yield token
            if self.output is None:
                self.decoder.advance(self, sent)
            elif sent == len(self.token_ids):  # another thread may have written between the two looks
                return

    async def __aiter__(self) -> AsyncIterator[int]:
        sent = 0
        try:
            while True:
                for token in self.token_ids[sent:]:
                    sent += 1
                    yield token
                if self.output is None:
                    await self.decoder.advance_async(self, sent)
                elif sent == len(self.token_ids):
                    return
        except (asyncio.CancelledError, GeneratorExit):  # nobody reads on
            self.cancel()
            raise


def _rules(params: SamplingParams, stop_ids: Sequence[int]) -> frozenset[str]:
    """The logit rules in use, by the names of :class:`~specdec_triton.engine.slots.Slots`; grammar is the host's."""
    used = {
        "penalties": params.penalizes,
        "bias": params.biases,
        "min_lens": params.min_new_tokens > 0 and len(stop_ids) > 0,
        "ngram": params.no_repeat_ngram_size > 0,
        "mask": params.grammar is not None,
    }
    return frozenset(name for name, holds in used.items() if holds)
