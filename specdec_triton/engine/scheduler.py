"""Which request is where: those that wait, those that hold a slot and pages, and who must make room.

Requests are served in the order in which they came. One prompt is processed at a time, in chunks; while it is, the others
decode. Pages are reserved as a text grows. When they run out, the newest request is preempted: its keys and values go to
host memory and come back bit for bit, so its text does not depend on it. The oldest is never preempted and its pages always
suffice (a request that the pool cannot hold is refused when it is submitted), so work always goes on.
"""

from __future__ import annotations

from collections import deque

from specdec_triton.engine.controller import Controllers
from specdec_triton.engine.drafting import Drafting
from specdec_triton.engine.request import RequestHandle
from specdec_triton.engine.slots import Slots
from specdec_triton.errors import OutOfPagesError
from specdec_triton.kv_cache import KVCache

PREFILL_CHUNK = 256  # prompts are processed in chunks that begin at multiples of this
HEADROOM = 1024  # a pool that grows reserves this many tokens ahead, lest it grow often


class Scheduler:
    """The requests of one decoder, and what they hold.

    Attributes:
        waiting: requests without a slot, the next one first. running: by slot.
        chunk: tokens of a prompt that are processed at once.
    """

    def __init__(
        self, cache: KVCache, slots: Slots, drafting: Drafting, controllers: Controllers, max_batch_size: int
    ) -> None:
        self.chunk = PREFILL_CHUNK
        self.waiting: deque[RequestHandle] = deque()
        self.running: list[RequestHandle] = []
        self._cache = cache
        self._slots = slots
        self._drafting = drafting
        self._controllers = controllers
        self._max_batch_size = max_batch_size

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def decoding(self) -> list[RequestHandle]:
        return [handle for handle in self.running if handle.decoding]

    def prefilling(self) -> RequestHandle | None:
        """The request whose prompt is being processed; the next one that waits, if there is room for it."""
        current = next((handle for handle in self.running if not handle.decoding), None)
        while current is None and self.waiting and len(self.running) < self._max_batch_size:
            if not self._enter(self.waiting[0]):
                break
            handle = self.waiting.popleft()
            current = None if handle.decoding else handle
        return current

    def _enter(self, handle: RequestHandle) -> bool:
        """Give the request a slot and pages, if there are any; else it has nothing, as before."""
        slot = len(self.running)
        try:
            entered = self._settle(handle, slot)
        except BaseException as error:
            self._empty(slot)
            if isinstance(error, OutOfPagesError):
                return False
            raise
        if not entered:
            self._empty(slot)
            return False
        handle.slot, handle.saved = slot, None
        handle.start()
        self.running.append(handle)
        return True

    def _empty(self, slot: int) -> None:
        self._cache.release(slot)
        self._drafting.release(slot)
        self._slots.leave(slot)

    def _settle(self, handle: RequestHandle, slot: int) -> bool:
        """Pages and rows of the free slot for the request; False: there are too few pages."""
        adopted = 0
        if (
            handle.saved is None and self._drafting.session.memory is None
        ):  # of what is adopted nobody sees the hidden states
            adopted = self._cache.adopt(slot, handle.prompt, self.chunk)
        wanted = handle.most_keys(handle.length + handle.limit + 1)
        # A page for each of the others: else the newcomer would be the one to go in the next round.
        if not self._cache.can_reserve(slot, wanted, spare=len(self.running)):
            return False
        self._slots.enter(slot, handle)
        self._controllers.reset(slot)
        if handle.saved is not None:
            pages, of_drafter = handle.saved
            self._cache.swap_in(slot, pages)
            if handle.limit:
                self._drafting.swap_in(slot, of_drafter)
            self._slots.live[slot] = handle.decoding
        else:
            handle.prefilled = handle.stats.shared_tokens = adopted
        tokens = handle.most_keys(wanted + HEADROOM) if self._cache.growable else wanted
        self._reserve(handle, slot, tokens)
        return True

    def reserve(self, handle: RequestHandle, tokens: int) -> bool:
        """Pages for so many tokens of a running request; False: there are too few."""
        assert handle.slot is not None
        try:
            self._reserve(handle, handle.slot, tokens)
        except OutOfPagesError:
            return False
        return True

    def _reserve(self, handle: RequestHandle, slot: int, tokens: int) -> None:
        self._cache.reserve(slot, tokens)
        if handle.limit:
            self._drafting.reserve(slot, tokens)

    def newest(self) -> RequestHandle:
        return max(self.running, key=lambda handle: handle.arrival)

    def preempt(self, handle: RequestHandle) -> None:
        """Take the request's slot and pages; it waits before all others, and comes back with what it had."""
        assert handle.slot is not None
        assert handle.in_flight == 0
        keys = handle.length - 1 if handle.decoding else handle.prefilled
        of_drafter = self._drafting.swap_out(handle.slot, min(handle.seen, keys)) if handle.limit else None
        handle.seen = min(handle.seen, keys)
        handle.saved = self._cache.swap_out(handle.slot, keys), of_drafter
        handle.stats.preemptions += 1
        self._vacate(handle)
        self.waiting.appendleft(handle)

    def remove(self, handle: RequestHandle) -> None:
        """Forget the request and free what it holds."""
        handle.saved = None
        if handle.slot is None:
            if handle in self.waiting:
                self.waiting.remove(handle)
            return
        self._cache.release(handle.slot)
        self._drafting.release(handle.slot)
        self._vacate(handle)

    def _vacate(self, handle: RequestHandle) -> None:
        """The last request moves into the slot."""
        slot = handle.slot
        assert slot is not None
        handle.slot = None
        last = self.running.pop()
        if last is handle:
            self._slots.leave(slot)
            return
        for part in (self._cache, self._drafting, self._slots, self._controllers):
            part.move(len(self.running), slot)
        self.running[slot] = last
        last.slot = slot
