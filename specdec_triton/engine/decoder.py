"""The decoder: prompts in, text out; its requests, its threads, its preparation."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch

from specdec_triton import ops
from specdec_triton._checks import check_bool, check_integer
from specdec_triton.adapter import ModelAdapter
from specdec_triton.drafters import Drafter, NoDraft
from specdec_triton.engine.admission import (
    check_params,
    check_prompt,
    check_prompts,
    check_rules,
    make_matcher,
    text_limit,
)
from specdec_triton.engine.costs import CostModel
from specdec_triton.engine.interrupts import interrupts_held
from specdec_triton.engine.loop import Loop
from specdec_triton.engine.memory import MemoryEstimate, estimate
from specdec_triton.engine.request import GenerationOutput, RequestHandle
from specdec_triton.engine.stats import DecoderStats
from specdec_triton.engine.stop_strings import StopStrings
from specdec_triton.engine.turns import Turns
from specdec_triton.engine.warmup import Warmup
from specdec_triton.errors import OutOfPagesError
from specdec_triton.exactness import ExactnessError
from specdec_triton.grammar import Matcher
from specdec_triton.sampling import MAX_DRAFT_TOKENS, SamplingParams, draw_seed

METHODS = ("auto", *ops.METHODS)


class SpeculativeDecoder:
    """Generates with a target model and a drafter; the text is what the target alone would have written.

    Args:
        target: a transformers causal language model on one device, or another decoder's ``target``, which spares the
            checks of the model and of this machine.
        drafter: where drafts come from; None: :class:`~specdec_triton.NoDraft` (plain decoding).
        num_draft_tokens: K, the most tokens drafted a round, 0 to 63; a request may ask for another number.
        max_batch_size: requests decoded at once; further ones wait.
        max_seq_len: longest text, prompt included; None: what the requests need, up to the model's context.
        page_size: tokens per KV page.
        num_pages: pages in the pool; None: it grows with the requests. In a fixed pool the newest requests make room for the
            older ones, and go on later where they were.
        method: ``auto`` (greedy at temperature 0, coupled with a seed, else rejection), or for all requests one of
            ``greedy``, ``rejection``, ``block``, ``coupled``, and ``typical``, which is lossy; see ``ops.accept_reject``.
        exact: logits bit-identical however many rows are scored together. None: where it can be had, for greedy and
            coupled requests; True: or an error; False: never.
        backend: of the ops; see :mod:`specdec_triton.ops`.
        adaptive: draft as many tokens, up to num_draft_tokens, as pay by the acceptance seen so far and by what passes cost
            on this machine (:meth:`tune`), none if none do. Requests with a seed whose text depends on K (``rejection`` and
            the like) always draft num_draft_tokens. False: all do.
        tokenizer: of transformers; needed by requests with stop strings.

    Raises:
        UnsupportedModelError: the target or the drafter's model cannot be decoded here.
        ValueError: an argument out of its range, a drafter that does not fit, or ``exact=True`` where it cannot hold.

    The model itself stays as it is: its own ``forward`` and ``generate`` work as before. Methods may be called from several
    threads; a step of one of them lets the others wait.
    """

    def __init__(
        self,
        target: Any,
        drafter: Drafter | None = None,
        *,
        num_draft_tokens: int = 4,
        max_batch_size: int = 8,
        max_seq_len: int | None = None,
        page_size: int = 16,
        num_pages: int | None = None,
        method: str = "auto",
        exact: bool | None = None,
        backend: str | None = None,
        adaptive: bool = True,
        tokenizer: Any = None,
    ) -> None:
        check_integer("num_draft_tokens", num_draft_tokens, 0, MAX_DRAFT_TOKENS)
        check_integer("max_batch_size", max_batch_size, 1)
        check_integer("page_size", page_size, 1)
        for name, value in (("max_seq_len", max_seq_len), ("num_pages", num_pages)):
            if value is not None:
                check_integer(name, value, 1)
        check_bool("adaptive", adaptive)
        check_bool("exact", exact, optional=True)
        if method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
        if drafter is not None and not isinstance(drafter, Drafter):
            given = f"the class {drafter.__name__}" if isinstance(drafter, type) else type(drafter).__name__
            raise ValueError(f"drafter must be a Drafter such as PromptLookup(), got {given}")
        if exact and drafter is not None and drafter.trees:
            raise ExactnessError(
                "exact=True cannot hold with trees, whose keys lie in another order than a chain's: a tree is exact up to"
                " rounding; draft chains (tree=None), or leave exact out"
            )
        self.num_draft_tokens = num_draft_tokens
        self.method = method
        self._adaptive = adaptive
        self._tokenizer = tokenizer
        self._stop_strings: dict[tuple[str, ...], StopStrings] = {}
        self._max_batch_size = max_batch_size
        self._target = target if isinstance(target, ModelAdapter) else ModelAdapter(target, backend=backend)
        limits = [n for n in (max_seq_len, self._target.max_len) if n is not None]
        self.max_seq_len = min(limits, default=None)
        if exact:
            self._target.invariant_rows()
        self._loop = Loop(
            self._target,
            drafter or NoDraft(),
            num_draft_tokens=num_draft_tokens,
            max_batch_size=max_batch_size,
            width=None if max_seq_len is None else self.max_seq_len,
            page_size=page_size,
            num_pages=num_pages,
            exact=exact,
            backend=backend,
        )
        self._warmup = Warmup(
            self._loop, num_draft_tokens=num_draft_tokens, max_batch_size=max_batch_size, exact=exact, backend=backend
        )
        self._drafts_adaptively = adaptive and num_draft_tokens > 0 and not self._loop.session.silent
        if self._drafts_adaptively:
            self._warmup.recall_costs()
        self._arrivals = count()
        device = self._target.device
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._cancelled: deque[RequestHandle] = deque()
        self._turns = Turns()
        self._thread: ThreadPoolExecutor | None = None

    @property
    def target(self) -> ModelAdapter:
        """The target over paged KV, for other decoders of the same model."""
        return self._target

    @property
    def free_pages(self) -> int:
        return self._loop.cache.free_pages

    @property
    def num_pages(self) -> int:
        return self._loop.cache.num_pages

    @property
    def stats(self) -> DecoderStats:
        """Sums over all requests so far."""
        if self._turns.mine:
            return self._loop.stats
        with self._turn():
            return self._loop.stats

    # Requests.

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[GenerationOutput]:
        """Decode all prompts; outputs in their order.

        Args:
            prompts: token ids of each prompt.
            params: one for all, or one each; None: the defaults of :class:`SamplingParams`.

        Raises:
            ValueError, OutOfPagesError: arguments of another kind, or none of the prompts can be decoded; nothing has been
                started then. If only some cannot, their outputs say so (finish_reason ``error``) and the others are decoded.
        """
        prompts = check_prompts(prompts)
        handles, refused = [], None
        for prompt, each in zip(prompts, check_params(params, len(prompts)), strict=True):
            try:
                handles.append(self._request(prompt, each))
            except (ValueError, OutOfPagesError) as error:
                refused = error
                handles.append(self._refused(each, error))
        if refused is not None and all(handle.output is not None for handle in handles):
            raise refused
        self._loop.scheduler.waiting.extend(handle for handle in handles if handle.output is None)
        try:
            for handle in handles:
                while handle.output is None:
                    self.step()
        except BaseException:
            for handle in handles:
                self.cancel(handle)
            raise
        return [handle.output for handle in handles if handle.output is not None]

    def submit(self, prompt: Sequence[int], params: SamplingParams | None = None) -> RequestHandle:
        """Queue one prompt; it is decoded by :meth:`step`, :meth:`run`, or by iterating over the handle.

        Raises:
            ValueError: a prompt or a parameter that cannot be decoded.
            OutOfPagesError: the pool could not hold the text even if it were empty.
        """
        handle = self._request(prompt, *check_params(params, 1))
        self._loop.scheduler.waiting.append(handle)
        return handle

    def cancel(self, handle: RequestHandle) -> None:
        """End a request with finish_reason ``cancelled``; what it has written stays in its output.

        During a step, in another thread or in this one (a logits processor, a signal), this does not wait: the request ends
        with that step.
        """
        if not isinstance(handle, RequestHandle) or handle.decoder is not self:
            raise ValueError(f"handle must be a request of this decoder, got {handle!r}")
        self._cancelled.append(handle)
        self._cancel_waiting()

    def _cancel_waiting(self) -> None:
        """End what is to be cancelled, unless a thread is in a step: it does so at its end."""
        while self._cancelled:
            with interrupts_held():
                if not self._turns.take(wait=False):
                    return
                with self._working():
                    while self._cancelled:
                        self._loop.end(self._cancelled.popleft(), "cancelled")

    def _request(self, prompt: Any, params: SamplingParams) -> RequestHandle:
        ids = check_prompt(prompt, self._target.vocab_size)
        check_rules(params, self._target.vocab_size)
        limit = text_limit(len(ids), params.max_new_tokens, self.max_seq_len)
        handle = self._handle(ids, params, limit, self._stops_of(params), make_matcher(params))
        cache = self._loop.cache
        if not cache.growable and (pages := cache.pages_for(handle.most_keys())) > cache.num_pages:
            drafts = f" and {handle.limit} drafts in a tree" if handle.trees else ""
            raise OutOfPagesError(
                f"a prompt of {len(ids)} tokens and {limit - len(ids)} new ones{drafts} need {pages} pages, the pool has"
                f" {cache.num_pages}: raise num_pages, or lower max_new_tokens"
            )
        return handle

    def _handle(
        self,
        prompt: list[int],
        params: SamplingParams,
        limit: int,
        stop_strings: StopStrings | None = None,
        matcher: Matcher | None = None,
    ) -> RequestHandle:
        method = "greedy" if params.greedy else self.method
        if method == "auto":
            method = "coupled" if params.seed is not None else "rejection"
        k = self.num_draft_tokens if params.num_draft_tokens is None else params.num_draft_tokens
        return RequestHandle(
            self,
            prompt,
            params,
            seed=params.seed if params.seed is not None else 0 if params.greedy else draw_seed(),
            method=method,
            max_total=limit,
            stop_ids=sorted({*params.stop_token_ids, *(() if params.ignore_eos else self._target.stop_ids)}),
            limit=k if self._loop.drafting.on else 0,
            fixed=not self._adaptive or (method in ops.PATHLESS and params.seed is not None),
            trees=self._loop.session.trees,
            arrival=next(self._arrivals),
            stop_strings=stop_strings,
            matcher=matcher,
        )

    def _stops_of(self, params: SamplingParams) -> StopStrings | None:
        strings = tuple(params.stop_strings)
        if not strings:
            return None
        if self._tokenizer is None:
            raise ValueError("stop_strings needs the tokenizer: SpeculativeDecoder(..., tokenizer=tokenizer)")
        if strings not in self._stop_strings:
            self._stop_strings[strings] = StopStrings(self._tokenizer, strings)
        return self._stop_strings[strings]

    def _refused(self, params: SamplingParams, error: Exception) -> RequestHandle:
        """A request that ends before it begins."""
        handle = self._handle([], params, 0)
        handle.exception = error
        handle.finish("error", str(error))
        return handle

    # Steps.

    def run(self) -> None:
        """Step until no work is left."""
        while self.step():
            pass

    def step(self) -> bool:
        """Process a piece of a waiting prompt, then one round for all requests that decode. Returns whether work is left.

        What goes wrong with one request (a failing logits processor, logits that are no numbers) ends that request with
        finish_reason ``error``; the others do not notice. A drafter that fails is left out from then on, with a warning.
        """
        with self._turn():
            return self._loop.step()

    def advance(self, handle: RequestHandle, read: int) -> None:
        """Step, unless another thread has done so: unless the request has more than ``read`` tokens or has ended."""
        with self._turn():
            if handle.output is None and len(handle.token_ids) <= read:
                self._loop.step()

    async def advance_async(self, handle: RequestHandle, read: int) -> None:
        """:meth:`advance` in the decoder's own thread. One thread for all: each has a team of OpenMP threads of its own."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="specdec")
        await asyncio.get_running_loop().run_in_executor(self._thread, self.advance, handle, read)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """One thread at a time."""
        if self._turns.mine:
            raise RuntimeError("the decoder is in the middle of a round: a logits processor or drafter cannot step it")
        with interrupts_held():
            self._turns.take()
            with self._working():
                yield
        self._cancel_waiting()

    @contextmanager
    def _working(self) -> Iterator[None]:
        """The rest of a turn that has been taken; requests that ended inside leave their slots at its end."""
        try:
            with torch.inference_mode(), self._on_device():
                try:
                    yield
                finally:
                    self._loop.let_go()
        finally:
            self._turns.give()

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """The model's device and one stream, whatever is current in the calling thread."""
        if self._stream is None:
            yield
        else:
            with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream):
                yield

    # Preparation.

    def memory_estimate(self) -> MemoryEstimate:
        """What the decoder holds at its fullest: weights of both models, pages, logits."""
        return estimate(
            self._target,
            self._loop.session.adapter,
            slots=self._max_batch_size,
            k=self.num_draft_tokens,
            page_size=self._loop.cache.page_size,
            num_pages=None if self._loop.cache.growable else self.num_pages,
            max_tokens=self.max_seq_len,
        )

    def warmup(self) -> None:
        """Do ahead of the first request what it would wait for.

        The costs of passes are measured if this machine has not yet (a few seconds). On a CPU the row counts of exact passes are
        tested; on a GPU greedy rounds of all batch sizes and K are run and captured, if ``max_seq_len`` was given
        (``num_pages`` too: a pool that grows afterwards takes its place).
        """
        with self._turn():
            fixed_shapes = self._target.fixed_shapes
            if not fixed_shapes:
                self._warmup.test_rows()
            if self._drafts_adaptively:
                self._warmup.measure_costs(again=False)
            if fixed_shapes:
                self._warmup.capture(adaptive=self._adaptive)

    def tune(self) -> CostModel:
        """Measure what passes cost on this machine, and keep it in the cache folder for later decoders of these models.

        Raises:
            ValueError: there is nothing to choose: the decoder never drafts.
        """
        if self._loop.session.silent or self.num_draft_tokens == 0:
            raise ValueError("tune needs a drafter and num_draft_tokens of at least 1: this decoder never drafts")
        with self._turn():
            if not self._target.fixed_shapes:
                self._warmup.test_rows()  # lest that be timed
            return self._warmup.measure_costs(again=True)
