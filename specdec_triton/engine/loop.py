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

from specdec_triton._warn import warn
from specdec_triton.adapter import ModelAdapter
from specdec_triton.drafters import Drafter
from specdec_triton.engine import costs
from specdec_triton.engine.controller import Controller
from specdec_triton.engine.costs import CostModel
from specdec_triton.engine.graphs import captured, graphs_for
from specdec_triton.engine.notices import Notices
from specdec_triton.engine.phases import Phases
from specdec_triton.engine.request import PATHLESS, RequestHandle
from specdec_triton.engine.results import ResultRing, Ticket
from specdec_triton.engine.round import COLUMNS, Process, Rounds, Shape
from specdec_triton.engine.scheduler import Scheduler
from specdec_triton.engine.slots import ERROR, LENGTH, STOP, Slots
from specdec_triton.engine.stats import DecoderStats
from specdec_triton.exactness import ExactnessError
from specdec_triton.sampling import MAX_DRAFT_TOKENS

REASONS = {STOP: "stop", LENGTH: "length", ERROR: "error"}
_WARM_ROWS = 160  # larger row counts are tested when they first occur
_DEPTH = 1  # rounds that a device is given ahead of the host's reading


class Loop:
    """Steps over the requests of one decoder.

    Args:
        exact: see :class:`~specdec_triton.SpeculativeDecoder`, like the other arguments.
        width: the longest text, if it is known; the buffers are as wide from the beginning.

    Attributes:
        scheduler, session, cache: its parts.
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
        self._target = target
        self._exact = exact
        self._backend = backend
        self._width = width
        self._max_batch_size = max_batch_size
        self._num_draft_tokens = num_draft_tokens
        self.cache = target.new_cache(
            slots=max_batch_size,
            page_size=page_size,
            num_pages=num_pages or 0,
            growable=num_pages is None,
            max_tokens=width,
        )
        self.session = drafter.bind(target, slots=max_batch_size, page_size=page_size, backend=backend)
        self._slots = Slots(max_batch_size, width or 0, device)
        self._controller = Controller(max_batch_size, MAX_DRAFT_TOKENS, device, packed=not target.fixed_shapes)
        self._phases = Phases(device)
        self._rounds = Rounds(
            target,
            self.session,
            self.cache,
            self._slots,
            self._controller,
            CostModel(draft=None if self.session.adapter else {}, device=device),
            self.invariant,
            backend,
            self._phases,
        )
        self.scheduler = Scheduler(self.cache, self._slots, self.session, self._controller, max_batch_size)
        self._graphs = graphs_for(device)
        self._buffers: tuple[Any, ...] = ()
        self._depth = _DEPTH if target.fixed_shapes else 0
        columns = len(COLUMNS) + MAX_DRAFT_TOKENS + 1
        self._ring = ResultRing(device, max_batch_size + _DEPTH + 2, max_batch_size, columns)
        self._pending: deque[_InFlight] = deque()
        self._leaving: list[RequestHandle] = []
        self._ended = DecoderStats()
        self._notices = Notices(self.session.max_len)

    @property
    def stats(self) -> DecoderStats:
        """Sums over all requests so far."""
        self._phases.collect()
        total = copy.deepcopy(self._ended)
        for handle in self.scheduler.running:
            total.add(handle.stats)
        total.phase_seconds = dict(self._phases.seconds)
        total.pages_in_use = self.cache.num_pages - self.cache.free_pages
        total.graph_bytes = self._graphs.bytes
        return total

    def step(self) -> bool:
        """A piece of a waiting prompt, then one round for all requests that decode. Returns whether work is left."""
        start = time.perf_counter()
        budget = self.scheduler.chunk
        while budget > 0 and (handle := self.scheduler.prefilling()) is not None:
            budget -= self._prefill(handle)
            self.let_go()
        self._read(self._depth)
        shape = self._make_room()
        if shape is not None:
            self._enqueue(shape)
        self._read(self._depth if shape is not None else 0)
        self._ended.seconds += time.perf_counter() - start
        if not self.scheduler.busy:
            self._controller.restart()  # so that the same requests are decoded alike again, whatever came before
        return self.scheduler.busy

    def end(self, handle: RequestHandle, reason: str, error: str | None = None) -> None:
        """The request is over; its slot is freed by :meth:`let_go`."""
        if handle.output is not None:
            return
        handle.finish(reason, error)
        self._ended.add(handle.stats)
        self._ended.requests[reason] = self._ended.requests.get(reason, 0) + 1
        if handle.slot is not None:
            self._slots.live[handle.slot] = False
        self._leaving.append(handle)

    def let_go(self) -> None:
        """Free what ended requests hold. Slots move then, so nobody may be working on them."""
        while self._leaving:
            self.scheduler.remove(self._leaving.pop())

    def _prefill(self, handle: RequestHandle) -> int:
        """The keys of a chunk of the prompt; after the last, the first token. Returns the number of tokens processed."""
        slot, start = handle.slot, handle.prefilled
        assert slot is not None
        chunk = self.scheduler.chunk
        stop = min((start // chunk + 1) * chunk, len(handle.prompt))
        rows = slice(slot, slot + 1)
        text = self._slots.texts[slot]
        shape = self._shape([handle], slot + 1, 0)
        try:
            with self._phases("prefill"):
                logits = self._target.forward(
                    text[None, start:stop],
                    self.cache,
                    self.cache.block_table[rows, : shape.columns],
                    torch.full((1,), start, dtype=torch.int32, device=text.device),
                    last_only=True,
                )
                self._catch_up(handle, stop)
            handle.prefilled = stop
            self.cache.publish(slot, handle.prompt[:stop], chunk)
            if stop == len(handle.prompt):
                handle.decoding = True
                self._rounds.first_token(slot, shape, logits, self._processing([handle], first=slot))
                self._report([handle], rows, 0)
        except Exception as error:
            handle.exception = error
            self.end(handle, "error", f"the prompt could not be processed: {error}")
            if not isinstance(error, torch.OutOfMemoryError):  # a prompt too large is its own affair
                raise
        return stop - start

    def _make_room(self) -> Shape | None:
        """Pages for the next round, and its shape; None if nobody decodes. May preempt."""
        if any(handle.params.logits_processors for handle in self.scheduler.decoding()):
            self._read(0)  # they are shown the text
        k = self._most_drafts()
        for handle in sorted(self.scheduler.decoding(), key=lambda handle: handle.arrival):
            while handle.slot is not None and not self._reserve(handle, k):
                if self._pending:
                    self._read(0)  # lengths are known then, and some may have ended
                else:
                    self.scheduler.preempt(self.scheduler.newest())
        decoding = self.scheduler.decoding()
        for handle in decoding:
            if handle.wanted and len(handle) - handle.seen > 2:
                self._catch_up(handle, len(handle))
        rows = len(self.scheduler.running)
        return self._shape(decoding, rows, min(k, self._most_drafts())) if decoding else None

    def _reserve(self, handle: RequestHandle, k: int) -> bool:
        tokens = min(handle.longest + min(k, handle.limit) + 1, handle.max_total)
        if not self.scheduler.can_reserve(handle, tokens):
            return False
        self.scheduler.reserve(handle, tokens)
        return True

    def _catch_up(self, handle: RequestHandle, stop: int) -> None:
        """Show the drafter the request's text up to ``stop``."""
        if handle.limit and self.session.seen is not None and handle.slot is not None:
            self.session.extend(handle.slot, self._slots.texts[handle.slot], handle.seen, stop)
            handle.seen, handle.seen_since = stop, self._ended.rounds

    def _most_drafts(self) -> int:
        """K of the next round. Where values may be read the round itself finds out what is wanted."""
        decoding = self.scheduler.decoding()
        adapts = self._target.fixed_shapes
        return max((h.wanted if adapts and not h.fixed else h.limit for h in decoding), default=0)

    def _shape(self, handles: Sequence[RequestHandle], rows: int, k: int) -> Shape:
        sampled = sorted({handle.method for handle in handles} - {"greedy"}) or ["greedy"]
        longest = max(handle.longest for handle in handles)
        columns = self._columns(min(longest + k + 1, max(handle.max_total for handle in handles)))
        return Shape(
            rows=self._bucket(rows),
            k=k,
            limit=max(handle.limit for handle in handles),
            columns=columns,
            width=self._text_width(columns),
            methods=tuple(sampled),
            has_filters=any(handle.params.has_filters for handle in handles),
            exact=self._exact is not False and (bool(self._exact) or any(h.method not in PATHLESS for h in handles)),
            adaptive=any(handle.limit and not handle.fixed for handle in handles),
        )

    def _bucket(self, rows: int) -> int:
        """Rows of a round of ``rows`` requests; rounds are captured for powers of two, the rows above are inert."""
        if not self._target.fixed_shapes:
            return rows
        return min(1 << (rows - 1).bit_length(), self._max_batch_size)

    def _text_width(self, columns: int) -> int:
        return min(columns * self.cache.page_size, self._slots.texts.shape[1])

    def _columns(self, tokens: int) -> int:
        """Columns of the block table for texts of up to ``tokens`` tokens."""
        if self._target.fixed_shapes and self._width is not None:
            return self.cache.block_table.shape[1]  # one shape, and one graph, for all lengths
        return self.cache.columns(tokens)

    def _enqueue(self, shape: Shape) -> None:
        handles = self.scheduler.decoding()
        process = self._processing(handles)
        if process is not None:
            self._rounds.run(shape, process)
        else:
            self._run(shape)
        self._report(handles, slice(shape.rows), shape.k)
        self._ended.rounds += 1

    def _run(self, shape: Shape) -> None:
        """A round, from its graph if there is one."""
        buffers = (self.cache.version, self._slots.version, self.session.version, self._rounds.costs)
        if buffers != self._buffers:
            self._buffers = buffers
            self._graphs.invalidate()
        self._graphs.run((shape, self.session.key), lambda: self._rounds.run(shape))

    def _report(self, handles: Sequence[RequestHandle], rows: slice, k: int) -> None:
        """Send the rows' report on its way to the host."""
        first = rows.start or 0
        for handle in handles:
            handle.in_flight += k + 1
        places = [(handle, handle.slot - first) for handle in handles if handle.slot is not None]
        ticket = self._ring.push(self._rounds.report(rows, k))
        self._pending.append(_InFlight(ticket, places, k + 1, self._ended.rounds))

    def _read(self, depth: int) -> None:
        """Read reports until no more than ``depth`` rounds are unread."""
        while len(self._pending) > depth:
            flight = self._pending.popleft()
            report = flight.ticket.wait().tolist()
            for handle, row in flight.places:
                handle.in_flight -= flight.tokens
                if handle.output is None:
                    self._take(handle, report[row], flight.number)
        self.let_go()

    def _take(self, handle: RequestHandle, row: list[int], number: int) -> None:
        facts = dict(zip(COLUMNS, row, strict=False))
        tokens = row[len(COLUMNS) :][: facts["count"]]
        handle.wanted = facts["wanted"]
        if number >= handle.seen_since:  # older rounds do not know of what the drafter was shown since
            handle.seen = min(facts["seen"], len(handle) + len(tokens) - 1)
        if facts["failed"]:
            self._notices.not_finite()
        if facts["reason"] == ERROR:
            self.end(handle, "error", "the target's logits held NaN, +inf, or nothing but -inf")
            return
        handle.token_ids += tokens
        handle.stats.count_round(len(tokens), facts["drafted"], facts["accepted"])
        self._notices.judged(facts["drafted"], facts["accepted"])
        if facts["reason"]:
            self.end(handle, REASONS[facts["reason"]])
        elif handle.limit:
            self._notices.grown(len(handle))

    def _processing(self, handles: Sequence[RequestHandle], first: int = 0) -> Process | None:
        """Applies the requests' logits processors to each of their rows, with that row's own history."""
        handles = [handle for handle in handles if handle.params.logits_processors]
        if not handles:
            return None

        def process(tokens: torch.Tensor, lens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            logits = logits.float().clone()
            drafted = lens.tolist()
            for handle in handles:
                assert handle.slot is not None
                b = handle.slot - first
                text = self._slots.texts[handle.slot, : len(handle)]
                try:
                    for t in range(drafted[b] + 1):
                        history = torch.cat([text, tokens[b, :t]])[None]
                        row = logits[b, t][None]
                        for processor in handle.params.logits_processors:
                            row = processor(history, row)
                        logits[b, t] = row[0]
                except Exception as error:
                    handle.exception = error
                    self.end(handle, "error", f"a logits processor failed: {error}")
            return logits

        return process

    def test_rows(self) -> None:
        """Find the invariant row counts that rounds will need."""
        k = 0 if self.session.silent else self._num_draft_tokens
        for rows in range(1, min(self._max_batch_size * (k + 1), _WARM_ROWS) + 1):
            self.invariant(rows)

    def capture(self, *, adaptive: bool) -> None:
        """Run, and capture, greedy rounds of empty slots in all shapes, where those are known: texts as long as the buffers."""
        if self._width is None or self.scheduler.busy:
            return
        k = 0 if self.session.silent else self._num_draft_tokens
        columns = self._columns(self._width)
        greedy = Shape(
            rows=1,
            k=0,
            limit=k,
            columns=columns,
            width=self._text_width(columns),
            methods=("greedy",),
            has_filters=False,
            exact=self._exact is not False,
            adaptive=adaptive and k > 0,
        )
        for rows in {self._bucket(n) for n in range(1, self._max_batch_size + 1)}:
            for drafts in range(k + 1) if adaptive else [k]:
                self._run(replace(greedy, rows=rows, k=drafts))

    def measure(self, *, again: bool) -> CostModel:
        """What passes cost here: from the cache folder what it holds, unless ``again``; the rest is timed and kept."""
        key = self._costs_key()
        kept = None if again else costs.load(key, device=self._target.device)
        self._rounds.costs = costs.measure(
            self._target,
            self.session.drafting,
            slots=self._max_batch_size,
            max_k=self._num_draft_tokens,
            rows_of=self.invariant,
            known=kept,
            replay=captured(self._target.device),
        )
        costs.save(self._rounds.costs, key)
        return self._rounds.costs

    def recall_costs(self) -> None:
        """Take what was measured earlier on this machine, if anything was."""
        self._rounds.costs = costs.load(self._costs_key(), device=self._target.device) or self._rounds.costs

    def _costs_key(self) -> dict[str, Any]:
        return costs.fingerprint(
            self._target, self.session.adapter, exact=self._exact is not False, backend=self._backend
        )

    def invariant(self, rows: int) -> int | None:
        """The next row count whose bits do not depend on it; None where exactness is off, or cannot be had."""
        if self._exact is False or self._target.device.type == "meta":
            return None
        try:
            return self._target.invariant_rows().pad(rows)
        except ExactnessError as error:
            if self._exact:
                raise
            self._exact = False
            warn(f"{error}; the text may differ from plain decoding at near-ties")
            return None


@dataclass
class _InFlight:
    """A round whose report has not been read: of which requests, in which rows, and the most tokens that each may get."""

    ticket: Ticket
    places: list[tuple[RequestHandle, int]]
    tokens: int
    number: int
