"""The host's side of decoding: which requests a round is made of, and what came of it.

On a device enqueueing and reading are a round apart: while the device works on one round, the host reads the one before and
enqueues the next. Nothing here is safe to call from two threads at once; :mod:`~specdec_triton.engine.decoder` sees to that.
"""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from specdec_triton.adapter import ModelAdapter
from specdec_triton.drafters import Drafter, SessionOptions
from specdec_triton.engine.controller import Controller, Controllers
from specdec_triton.engine.costs import CostModel
from specdec_triton.engine.details import COLUMNS as DETAILS
from specdec_triton.engine.details import decoded
from specdec_triton.engine.drafting import Drafting
from specdec_triton.engine.graphs import graphs_for
from specdec_triton.engine.host_rules import HostRules, end_of_text
from specdec_triton.engine.notices import Notices
from specdec_triton.engine.phases import Phases
from specdec_triton.engine.proposals import DrafterError, sources_of
from specdec_triton.engine.request import RequestHandle
from specdec_triton.engine.results import ResultRing, Ticket
from specdec_triton.engine.round import COLUMNS, Rounds
from specdec_triton.engine.scheduler import PREFILL_CHUNK, Scheduler
from specdec_triton.engine.shapes import Shape, Shapes
from specdec_triton.engine.slots import ERROR, LENGTH, STOP, Slots
from specdec_triton.engine.stats import DecoderStats
from specdec_triton.exactness import ExactPasses
from specdec_triton.sampling import MAX_DRAFT_TOKENS

REASONS = {STOP: "stop", LENGTH: "length", ERROR: "error"}
_DEPTH = 1  # rounds that a device is given ahead of the host's reading


class Loop:
    """Steps over the requests of one decoder.

    Args:
        exact: see :class:`~specdec_triton.SpeculativeDecoder`, like the other arguments.
        width: the longest text, if it is known; the buffers are as wide from the beginning.

    Attributes:
        target, cache, drafting, session, scheduler, passes, shapes, rounds: its parts.
    """

    def __init__(
        self,
        target: ModelAdapter,
        drafter: Drafter,
        *,
        num_draft_tokens: int,
        max_batch_size: int,
        width: int | None,
        page_size: int,
        num_pages: int | None,
        exact: bool | None,
        backend: str | None,
    ) -> None:
        device = target.device
        self.target = target
        self.cache = target.new_cache(
            slots=max_batch_size,
            page_size=page_size,
            num_pages=num_pages or 0,
            growable=num_pages is None,
            max_tokens=width,
        )
        self._notices = Notices()
        options = SessionOptions(
            max_batch_size, page_size, num_pages or 0, width, backend, num_draft_tokens, PREFILL_CHUNK, self.cache
        )
        self.drafting = Drafting(drafter, target, options, self._notices.failed)
        self.session = self.drafting.session
        self._silenced = not self.drafting.on  # the requests know that nobody drafts
        self._slots = Slots(max_batch_size, width or 0, target.vocab_size, device)
        self._controllers = Controllers(
            Controller(
                max_batch_size,
                max(MAX_DRAFT_TOKENS // source.level, 1),
                device,
                packed=not target.fixed_shapes,
                level=source.level,
            )
            for source in sources_of(self.session, reads=not target.fixed_shapes)
        )
        self._phases = Phases(device)
        self.passes = ExactPasses(target, exact, self._notices.inexact)
        self.shapes = Shapes(
            self.cache,
            self._slots,
            self.passes,
            fixed=target.fixed_shapes,
            width=width,
            num_draft_tokens=num_draft_tokens,
            max_batch_size=max_batch_size,
        )
        self.rounds = Rounds(
            target,
            self.session,
            self.cache,
            self._slots,
            self._controllers,
            CostModel(draft={} if self.session.free else None, device=device),
            self.passes,
            backend,
            self._phases,
        )
        self.scheduler = Scheduler(self.cache, self._slots, self.drafting, self._controllers, max_batch_size)
        sizes = max_batch_size.bit_length() + 1
        self._graphs = graphs_for(
            device, limit=max(64, 2 * sizes * (num_draft_tokens + 1)), failed=self._notices.uncaptured
        )
        self._buffers: tuple[Any, ...] = ()
        self._depth = _DEPTH if target.fixed_shapes else 0
        largest = self.rounds.report(slice(None), MAX_DRAFT_TOKENS).shape
        self._ring = ResultRing(device, max_batch_size + _DEPTH + 2, *largest)
        self._details: ResultRing | None = None  # made when a request first asks for log-probabilities
        self._pending: deque[_InFlight] = deque()
        self._leaving: list[RequestHandle] = []
        self._last_wanted: int | None = None  # by the requests of the last round that adapt
        self._ended = DecoderStats()

    @property
    def stats(self) -> DecoderStats:
        """Sums over all requests so far."""
        self._phases.collect()
        total = copy.deepcopy(self._ended)
        for handle in (*self.scheduler.running, *self.scheduler.waiting):
            if handle.output is None:
                total.add(handle.stats)
        total.phase_seconds = dict(self._phases.seconds)
        total.pages_in_use = self.cache.num_pages - self.cache.free_pages
        total.graph_bytes = self._graphs.bytes
        return total

    def step(self) -> bool:
        """A piece of a waiting prompt, then one round for all requests that decode. Returns whether work is left."""
        start = time.perf_counter()
        self.target.check_ready()
        budget = self.scheduler.chunk
        while budget > 0 and (handle := self._next_prompt()) is not None:
            budget -= self._prefill(handle)
            self._read(self._depth)
        shape = self._make_room()
        if shape is not None:
            self._enqueue(shape)
        self._read(self._depth if shape is not None else 0)
        self._ended.seconds += time.perf_counter() - start
        self._phases.collect()
        if not self.scheduler.busy:  # from here on the same requests are decoded alike again, whatever came before
            self._read(0)
            self._controllers.restart()
            self._last_wanted = None
        self._notices.give()
        return self.scheduler.busy

    def end(self, handle: RequestHandle, reason: str, error: str | None = None) -> None:
        """The request is over; its slot is freed by :meth:`let_go`."""
        if handle.output is not None:
            return
        if handle.phases_before is not None:
            handle.stats.phase_seconds = self._phases.since(handle.phases_before)
        handle.finish(reason, error)
        self._ended.add(handle.stats)
        self._ended.requests[reason] = self._ended.requests.get(reason, 0) + 1
        if handle.slot is not None:
            self._slots.live[handle.slot] = False
        self._leaving.append(handle)

    def let_go(self) -> None:
        """Free what ended requests hold. Slots move then, so nobody may be working on them."""
        while self._leaving:
            self.scheduler.remove(self._leaving[-1])
            self._leaving.pop()

    def _prefill(self, handle: RequestHandle) -> int:
        """The keys of a chunk of the prompt; after the last, the first token. Returns the number of tokens processed."""
        slot, start = handle.slot, handle.prefilled
        assert slot is not None
        if handle.phases_before is None:
            handle.phases_before = dict(self._phases.seconds)
        chunk = self.scheduler.chunk
        stop = min((start // chunk + 1) * chunk, len(handle.prompt))
        rows = slice(slot, slot + 1)
        text = self._slots.texts[slot]
        shape = self.shapes.of([handle], slot + 1, 0)
        try:
            with self._phases("prefill"):
                context, taps = torch.full((1,), start, dtype=torch.int32, device=text.device), self.rounds.taps
                logits = self.target.forward(
                    text[None, start:stop],
                    self.cache,
                    self.cache.block_table[rows, : shape.columns],
                    context,
                    last_only=True,
                    taps=taps,
                )
                if taps is not None:
                    self.drafting.see(slot, taps.states, context)
            self._catch_up(handle, stop)
            handle.prefilled = stop
            self.cache.publish(slot, handle.prompt[:stop], chunk)
            if stop == len(handle.prompt):
                handle.decoding = True
                if self.target.fixed_shapes:
                    handle.wanted = self._newcomer_wants(handle)
                self._prepare(shape)
                self.rounds.first_token(slot, shape, logits, self._host_rules([handle], first=slot))
                self._report([handle], rows, None, shape.logprobs)
        except Exception as error:  # the others go on
            handle.exception = error
            self.end(handle, "error", f"the prompt could not be processed: {error}")
        return stop - start

    def _next_prompt(self) -> RequestHandle | None:
        """The request whose prompt is to be processed, if there is one and room for it."""
        handle = self.scheduler.prefilling()
        while handle is None and self.scheduler.waiting and not self.scheduler.running and not self._pending:
            self._refuse(self.scheduler.waiting[0])
            handle = self.scheduler.prefilling()
        return handle

    def _newcomer_wants(self, handle: RequestHandle) -> int:
        """Drafts for a request of which nothing is known yet, where one K is chosen for all: what the others wanted last."""
        if handle.fixed or self._last_wanted is None:
            return handle.limit
        return min(self._last_wanted, handle.limit)

    def _refuse(self, handle: RequestHandle) -> None:
        """It cannot be had although it has everything for itself."""
        self.end(handle, "error", f"out of memory: the pages of a text of {handle.length} tokens cannot be had")
        self.let_go()

    def _make_room(self) -> Shape | None:
        """Pages for the next round, and its shape; None if nobody decodes. May preempt."""
        if any(handle.params.on_host for handle in self.scheduler.decoding()):
            self._read(0)  # processors are shown the text, grammars follow it
        self._silence()
        k = self._most_drafts()
        for handle in sorted(self.scheduler.decoding(), key=lambda handle: handle.arrival):
            while handle.slot is not None and not self._reserve(handle, k):
                if self._pending:
                    self._read(0)  # lengths are known then, and some may have ended
                elif len(self.scheduler.running) > 1:
                    self.scheduler.preempt(self.scheduler.newest())
                else:
                    self._refuse(handle)
        decoding = self.scheduler.decoding()
        for handle in decoding:
            missing, memory = handle.length - handle.seen, self.session.memory
            forgotten_soon = memory is not None and 2 * missing > memory
            if missing > self.session.reach and (
                handle.wanted or forgotten_soon
            ):  # a chunk a step: the others wait for it
                self._catch_up(handle, min(handle.length, handle.seen + self.scheduler.chunk))
        self._silence()
        rows = len(self.scheduler.running)
        return self.shapes.of(decoding, rows, min(k, self._most_drafts())) if decoding else None

    def _reserve(self, handle: RequestHandle, k: int) -> bool:
        return self.scheduler.reserve(handle, handle.most_keys(handle.longest + min(k, handle.limit) + 1))

    def _catch_up(self, handle: RequestHandle, stop: int) -> None:
        """Show the drafter the request's text up to ``stop``."""
        if handle.limit and self.session.seen is not None and handle.slot is not None:
            text = self._slots.texts[handle.slot]
            if self.drafting.extend(handle.slot, text, handle.seen, stop):
                handle.seen, handle.seen_since = stop, self._ended.rounds

    def _silence(self) -> None:
        """If the drafter has failed, all requests go on without it."""
        if self.drafting.on or self._silenced:
            return
        self._silenced = True
        self.rounds.taps = None
        self._slots.limits.zero_()
        for handle in (*self.scheduler.running, *self.scheduler.waiting):
            if handle.slot is not None and handle.limit:
                self.drafting.release(handle.slot)
            handle.limit = handle.wanted = 0

    def _most_drafts(self) -> int:
        """K of the next round. Where values may be read the round itself finds out what is wanted."""
        return max((self._asks(handle) for handle in self.scheduler.decoding()), default=0)

    def _asks(self, handle: RequestHandle) -> int:
        k = handle.wanted if self.target.fixed_shapes and not handle.fixed else handle.limit
        return k if self.session.max_len is None else min(k, max(self.session.max_len - handle.length, 0))

    def _enqueue(self, shape: Shape) -> None:
        handles = self.scheduler.decoding()
        host = self._host_rules(handles)
        self._prepare(shape)
        try:
            self.round(shape, host)
        except DrafterError as error:
            self.drafting.fail(error.__cause__ or error)
            self._silence()
            shape = replace(shape, k=0, limit=0, adaptive=False)
            self.round(shape, host)
        self._report(handles, slice(shape.rows), shape.k, shape.logprobs)
        self._ended.rounds += 1

    def _prepare(self, shape: Shape) -> None:
        """Buffers that only few rounds need."""
        if shape.logprobs is not None:
            self.rounds.details.prepare()
            if self._details is None:
                self._details = ResultRing(self.target.device, _DEPTH + 3, len(self._slots.lens), DETAILS)

    def round(self, shape: Shape, host: HostRules | None = None) -> None:
        """A round, from its graph if there is one; if the host takes part in it, always eagerly."""
        if host is not None:
            self.rounds.run(shape, host)
            return
        buffers = (self.cache.version, self._slots.version, self.session.version, self.rounds.costs)
        if buffers != self._buffers:
            self._buffers = buffers
            self._graphs.invalidate()
        self._graphs.run((shape, self.session.key), lambda: self.rounds.run(shape))

    def _report(self, handles: Sequence[RequestHandle], rows: slice, k: int | None, logprobs: int | None) -> None:
        """Send the rows' report on its way to the host. k: None after a prompt, of which nothing is to be learnt."""
        first, tokens = rows.start or 0, (k or 0) + 1
        places = [(h, h.slot - first) for h in handles if h.slot is not None and h.output is None]
        if not places:
            return
        for handle, _ in places:
            handle.in_flight += tokens
        ticket, details = self._ring.push(self.rounds.report(rows, k or 0)), None
        if logprobs is not None:
            assert self._details is not None
            details = self._details.push(self.rounds.details.report(rows, k or 0, logprobs))
        self._pending.append(_InFlight(ticket, places, tokens, self._ended.rounds, k is None, details, logprobs or 0))

    def _read(self, depth: int) -> None:
        """Read reports until no more than ``depth`` rounds are unread."""
        while len(self._pending) > depth:
            flight = self._pending.popleft()
            report = flight.ticket.wait().tolist()
            details = None if flight.details is None else flight.details.wait().tolist()
            if not flight.of_prompt:
                adapt = [report[row][COLUMNS.index("wanted")] for handle, row in flight.places if not handle.fixed]
                self._last_wanted = max(adapt, default=self._last_wanted)
            for handle, row in flight.places:
                handle.in_flight -= flight.tokens
                if handle.output is None:
                    self._take(handle, report[row], details and details[row], flight)
        self.let_go()

    def _take(self, handle: RequestHandle, row: list[int], details: list[int] | None, flight: _InFlight) -> None:
        facts = dict(zip(COLUMNS, row, strict=False))
        tokens = row[len(COLUMNS) :][: facts["count"]]
        if not flight.of_prompt:
            handle.wanted = facts["wanted"]
        if flight.number >= handle.seen_since:  # older rounds do not know of what the drafter was shown since
            handle.seen = min(facts["seen"], handle.length + len(tokens) - 1)
        if facts["failed"]:
            self._notices.not_finite()
        if facts["foreign"]:
            self._notices.foreign()
        if facts["reason"] == ERROR:
            rules = ", ".join(handle.params.rules)
            whose = f"the logits after the request's own rules ({rules})" if rules else "the target's logits"
            self.end(handle, "error", f"{whose} held NaN, +inf, or nothing but -inf")
            return
        drafted, accepted, reason = facts["drafted"], facts["accepted"], facts["reason"]
        end, error = end_of_text(handle, tokens)
        if end is not None:
            tokens, reason = tokens[:end], STOP
            drafted, accepted = end if end <= accepted else drafted, min(accepted, end)
        handle.token_ids += tokens
        if handle.logprobs is not None and details is not None:
            handle.logprobs += decoded(details, tokens, flight.logprobs, handle.params.logprobs or 0)
        handle.stats.count_round(len(tokens), drafted, accepted)
        self._notices.judged(drafted, accepted, self.session.adapter is not None)
        if error is not None:
            self.end(handle, "error", error)
        elif reason:
            self.end(handle, REASONS[reason])
        elif handle.limit:
            self._notices.grown(handle.length, self.session.max_len)

    def _host_rules(self, handles: Sequence[RequestHandle], first: int = 0) -> HostRules | None:
        """What the host has to do in a round whose first row is the slot ``first``."""
        handles = [handle for handle in handles if handle.params.on_host]
        return HostRules(handles, self._slots, first, self._fail) if handles else None

    def _fail(self, handle: RequestHandle, error: str) -> None:
        self.end(handle, "error", error)


@dataclass
class _InFlight:
    """A round whose report has not been read: of which requests, in which rows, and the most tokens that each may get; its
    report of log-probabilities, with up to how many candidates."""

    ticket: Ticket
    places: list[tuple[RequestHandle, int]]
    tokens: int
    number: int
    of_prompt: bool
    details: Ticket | None
    logprobs: int
