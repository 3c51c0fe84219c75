"""The decoder: prompts in, rounds of draft, verify, accept, text out."""

from __future__ import annotations

import warnings
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch

from specdec_triton import ops
from specdec_triton._checks import check_integer, check_tensor, require
from specdec_triton.adapter import ModelAdapter
from specdec_triton.drafters import Drafter, Drafts, NoDraft, Round
from specdec_triton.engine.request import GenerationOutput, RequestHandle
from specdec_triton.errors import OutOfPagesError
from specdec_triton.exactness import ExactnessError
from specdec_triton.sampling import MAX_DRAFT_TOKENS, SamplingBatch, SamplingParams, draw_seed

METHODS = ("auto", *ops.METHODS)
_PATHLESS = ("rejection", "block", "typical")  # a text of theirs depends on how its rounds fell, so bits buy nothing
PREFILL_CHUNK = 512  # prompts are processed in chunks that begin at multiples of this
_MISFIT_DRAFTS, _MISFIT_RATE = 200, 0.02
_HEADROOM = 1024  # pages are reserved this many tokens ahead when the pool may grow


class SpeculativeDecoder:
    """Generates with a target model and a drafter; the text is what the target alone would have written.

    Args:
        target: a transformers causal language model on one device, or another decoder's ``target``, which spares the
            checks of the model and of this machine.
        drafter: where drafts come from; None: :class:`~specdec_triton.NoDraft` (plain decoding).
        num_draft_tokens: K, the most tokens drafted a round, 0 to 63.
        max_batch_size: requests decoded at once; further ones wait.
        max_seq_len: longest text, prompt included; None: what the requests need, up to the model's context.
        page_size: tokens per KV page.
        num_pages: pages in the pool; None: it grows with the requests.
        method: ``auto`` (greedy at temperature 0, coupled with a seed, else rejection), or for all requests one of
            ``greedy``, ``rejection``, ``block``, ``coupled``, and ``typical``, which is lossy; see ``ops.accept_reject``.
        exact: logits bit-identical however many rows are scored together. None: where it can be had, for greedy and
            coupled requests; True: or an error; False: never.
        backend: of the ops; see :mod:`specdec_triton.ops`.

    Raises:
        UnsupportedModelError: the target or the drafter's model cannot be decoded here.
        ValueError: an argument out of its range, a drafter that does not fit, or ``exact=True`` where it cannot hold.

    The model itself stays as it is: its own ``forward`` and ``generate`` work as before.
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
    ) -> None:
        check_integer("num_draft_tokens", num_draft_tokens, 0, MAX_DRAFT_TOKENS)
        check_integer("max_batch_size", max_batch_size, 1)
        check_integer("page_size", page_size, 1)
        for name, value in (("max_seq_len", max_seq_len), ("num_pages", num_pages)):
            if value is not None:
                check_integer(name, value, 1)
        if method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
        if drafter is not None and not isinstance(drafter, Drafter):
            raise ValueError(f"drafter must be a Drafter such as PromptLookup(), got {type(drafter).__name__}")
        self.num_draft_tokens = num_draft_tokens
        self.method = method
        self._backend = backend
        self._target = target if isinstance(target, ModelAdapter) else ModelAdapter(target, backend=backend)
        limits = [n for n in (max_seq_len, self._target.max_len) if n is not None]
        self.max_seq_len = min(limits, default=None)
        self._exact = exact
        if exact:
            self._target.invariant_rows()
        self._cache = self._target.new_cache(
            slots=max_batch_size, page_size=page_size, num_pages=num_pages or 0, growable=num_pages is None
        )
        self._drafts = (drafter or NoDraft()).bind(
            self._target, slots=max_batch_size, page_size=page_size, backend=backend
        )
        self._stepping = False
        self._misfit: Counter[str] = Counter()
        self._warned = False
        self._waiting: deque[RequestHandle] = deque()
        self._slots: list[RequestHandle | None] = [None] * max_batch_size
        self._texts = torch.zeros(max_batch_size, 0, dtype=torch.int64, device=self._target.device)

    @property
    def target(self) -> ModelAdapter:
        """The target over paged KV, for other decoders of the same model."""
        return self._target

    @property
    def free_pages(self) -> int:
        return self._cache.free_pages

    @property
    def num_pages(self) -> int:
        return self._cache.num_pages

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[GenerationOutput]:
        """Decode all prompts; outputs in their order.

        Args:
            prompts: token ids of each prompt.
            params: one for all, or one each; None: the defaults of :class:`SamplingParams`.

        Raises:
            ValueError: a prompt or a parameter that cannot be decoded; nothing has been started then.
        """
        if isinstance(prompts, (str, bytes, Mapping)) or not isinstance(prompts, Iterable):
            raise ValueError(f"prompts must be a list of token id lists, got {type(prompts).__name__}")
        prompts = list(prompts)
        if prompts and not isinstance(prompts[0], Iterable):
            raise ValueError("prompts must be a list of token id lists; for one prompt give [prompt]")
        each = [params or SamplingParams()] * len(prompts) if not isinstance(params, Sequence) else list(params)
        if len(each) != len(prompts):
            raise ValueError(f"params must be one, or one per prompt ({len(prompts)}), got {len(each)}")
        handles = [self._request(prompt, p) for prompt, p in zip(prompts, each, strict=True)]
        self._waiting.extend(handles)
        try:
            while any(handle.output is None for handle in handles):
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
        """
        handle = self._request(prompt, params or SamplingParams())
        self._waiting.append(handle)
        return handle

    @torch.inference_mode()
    def cancel(self, handle: RequestHandle) -> None:
        """End a request with finish_reason ``cancelled``; what it has written stays in its output."""
        if handle.output is not None:
            return
        if handle in self._waiting:
            self._waiting.remove(handle)
            handle.finish("cancelled")
        elif handle in self._slots:
            self._end(self._slots.index(handle), "cancelled")
        else:
            raise ValueError("handle must be a request of this decoder")

    def run(self) -> None:
        """Step until no work is left."""
        while self.step():
            pass

    @torch.inference_mode()
    def step(self) -> bool:
        """Admit waiting requests, then one round for all active ones. Returns whether work is left.

        An exception of a request's own logits processor ends that request with finish_reason ``error`` and is raised; the
        others go on with the next step.
        """
        if self._stepping:
            raise RuntimeError("the decoder is in the middle of a round: a logits processor or drafter cannot step it")
        self._stepping = True
        try:
            self._admit()
            active = [slot for slot, handle in enumerate(self._slots) if handle is not None]
            if active:
                self._round(active)
        finally:
            self._stepping = False
        return bool(self._waiting) or any(handle is not None for handle in self._slots)

    def warmup(self) -> None:
        """Do ahead of the first request what it would wait for: test the row counts that its passes will need."""
        for n in range(1, self.num_draft_tokens + 2):
            self._invariant(n)

    # A round: draft, verify, accept.

    def _round(self, active: Sequence[int]) -> None:
        groups = self._by_method(active)
        drafted = [(group, self._draft(group)) for group in groups]
        batch = [slot for group in groups for slot in group.slots]
        tokens, lens = _merge([drafts for _, drafts in drafted], self._target.device)
        logits = self._verify(batch, tokens, lens)
        first = 0
        for group, drafts in drafted:
            rows = slice(first, first + len(group.slots))
            first = rows.stop
            self._accept(group, drafts, tokens[rows], lens[rows], logits[rows])

    def _draft(self, group: _Group) -> Drafts:
        handles = [self._handle(slot) for slot in group.slots]
        limits = [min(self._k(handle), handle.remaining - 1) for handle in handles]
        index = torch.tensor(group.slots, device=self._target.device)
        longest = max(len(handle) for handle in handles)
        drafts = self._drafts.propose(
            Round(
                slots=group.slots,
                texts=self._texts[index, :longest],
                lens=[len(handle) for handle in handles],
                limits=limits,
                params=group.params,
                method=group.method,
            )
        )
        _check_drafts(drafts, len(handles), type(self._drafts))
        drafts.lens = [min(n, limit) for n, limit in zip(drafts.lens, limits, strict=True)]
        return drafts

    def _verify(self, slots: Sequence[int], drafts: torch.Tensor, lens: Sequence[int]) -> torch.Tensor:
        """Score every draft and the place after it in one pass: logits ``[B,K+1,V]``."""
        device = self._target.device
        handles = [self._handle(slot) for slot in slots]
        for slot, handle, n in zip(slots, handles, lens, strict=True):
            self._cache.reserve(slot, len(handle) + n)
        last = torch.tensor([[handle.token_ids[-1]] for handle in handles], device=device)
        context = torch.tensor([len(handle) - 1 for handle in handles], dtype=torch.int32, device=device)
        new = torch.cat([last, drafts], 1).clamp(0, self._target.vocab_size - 1)  # accept_reject stops at other ids
        queries = [n + 1 for n in lens]
        return self._target.forward(
            new,
            self._cache,
            self._cache.block_table[torch.tensor(slots, device=device)],
            context,
            queries,
            rows=self._padded(handles, sum(queries)),
        )

    def _accept(
        self, group: _Group, drafts: Drafts, tokens: torch.Tensor, lens: Sequence[int], logits: torch.Tensor
    ) -> None:
        """Keep the right prefix of each draft and the token that the target adds."""
        k = tokens.shape[1]
        draft_logits, draft_lse = drafts.logits, drafts.lse
        if draft_logits is not None and draft_logits.shape[1] != k:  # another group drafted more, or drafts were cut
            draft_logits = torch.nn.functional.pad(draft_logits, (0, 0, 0, k - draft_logits.shape[1]))
            if draft_lse is not None:
                draft_lse = torch.nn.functional.pad(draft_lse, (0, k - draft_lse.shape[1]))
        logits = self._process(group.slots, tokens, lens, logits)
        result = ops.accept_reject(
            tokens,
            logits,
            draft_logits,
            draft_lse=draft_lse,
            draft_lens=torch.tensor(lens, dtype=torch.int32, device=logits.device),
            params=group.params,
            method=group.method,
            backend=self._backend,
        )
        rows = zip(group.slots, tokens.tolist(), lens, *(x.tolist() for x in result), strict=True)
        for slot, drafts_of, length, emitted, accepted, status in rows:
            if self._slots[slot] is None:
                continue  # cancelled by a logits processor
            # An id outside the vocabulary ends the draft: it and what follows are not counted.
            vocab = range(self._target.vocab_size)
            drafted = next((i for i, token in enumerate(drafts_of[:length]) if token not in vocab), length)
            if status:
                self._end(slot, "error", "the target's logits held NaN, +inf, or nothing but -inf")
                continue
            self._drafts.judge(slot, drafted, accepted)
            self._notice_misfit(drafted, accepted)
            self._emit(slot, emitted[: accepted + 1], drafted, accepted)

    def _notice_misfit(self, drafted: int, accepted: int) -> None:
        """Warn, once, of drafts that are hardly ever right: a misloaded draft model costs time and shows nowhere else."""
        self._misfit += Counter(drafted=drafted, accepted=accepted)
        if self._misfit["drafted"] < _MISFIT_DRAFTS:
            return
        if not self._warned and self._misfit["accepted"] < _MISFIT_RATE * self._misfit["drafted"]:
            self._warned = True
            warnings.warn(
                f"only {self._misfit['accepted']} of the last {self._misfit['drafted']} drafts were accepted: plain"
                " decoding would be faster (does the draft model belong to the target?)",
                stacklevel=5,
            )
        self._misfit.clear()

    def _process(
        self, slots: Sequence[int], drafts: torch.Tensor, lens: Sequence[int], logits: torch.Tensor
    ) -> torch.Tensor:
        """Apply each request's logits processors to each of its rows, with that row's own history."""
        if not any(self._handle(slot).params.logits_processors for slot in slots):
            return logits
        logits = logits.float()
        if logits.is_inference():
            logits = logits.clone()
        for b, slot in enumerate(slots):
            handle = self._handle(slot)
            for t in range(lens[b] + 1 if handle.params.logits_processors else 0):
                history = torch.cat([self._texts[slot, : len(handle)], drafts[b, :t]])[None]
                row = logits[b, t][None]
                try:
                    for processor in handle.params.logits_processors:
                        row = processor(history, row)
                except Exception as error:
                    if self._slots[slot] is handle:
                        self._end(slot, "error", f"a logits processor failed: {error}")
                    raise
                logits[b, t] = row[0]
        return logits

    def _emit(self, slot: int, tokens: list[int], drafted: int, accepted: int) -> None:
        handle = self._handle(slot)
        before = len(handle)
        stop_ids = frozenset(handle.params.stop_token_ids)
        if not handle.params.ignore_eos:
            stop_ids |= self._target.stop_ids
        reason = handle.emit(tokens, drafted, accepted, stop_ids)
        if reason is not None:
            self._end(slot, reason)
            return
        new = torch.tensor(handle.token_ids[before - len(handle.prompt) :], device=self._texts.device)
        self._texts[slot, before : before + len(new)] = new

    # Requests come and go.

    def _request(self, prompt: Sequence[int], params: SamplingParams) -> RequestHandle:
        ids = _token_ids(prompt)
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params must be SamplingParams, got {type(params).__name__}")
        if not ids:
            raise ValueError("prompt is empty: give at least one token id")
        bad = next((token for token in ids if not 0 <= token < self._target.vocab_size), None)
        if bad is not None:
            raise ValueError(f"prompt holds the token id {bad}; ids go from 0 to {self._target.vocab_size - 1}")
        limit = len(ids) + params.max_new_tokens
        if self.max_seq_len is not None:
            if len(ids) >= self.max_seq_len:
                raise ValueError(
                    f"prompt of {len(ids)} tokens leaves no room in the context of {self.max_seq_len} tokens"
                )
            limit = min(limit, self.max_seq_len)
        if not self._cache.growable and self._cache.pages_for(limit) > self._cache.num_pages:
            raise OutOfPagesError(
                f"a prompt of {len(ids)} tokens and {limit - len(ids)} new ones need {self._cache.pages_for(limit)}"
                f" pages, the pool has {self._cache.num_pages}: raise num_pages, or lower max_new_tokens"
            )
        method = self.method
        if method == "auto":
            method = "greedy" if params.greedy else "coupled" if params.seed is not None else "rejection"
        seed = params.seed if params.seed is not None else 0 if params.greedy else draw_seed()
        return RequestHandle(self, ids, params, seed, method, limit)

    def _admit(self) -> None:
        while self._waiting and None in self._slots:
            handle = self._waiting[0]
            slot = self._slots.index(None)
            tokens = handle.max_total
            if self._cache.growable:
                tokens = min(tokens, len(handle) + _HEADROOM)
            if not self._cache.can_reserve(slot, tokens):
                return
            self._slots[slot] = self._waiting.popleft()
            handle.start()
            try:
                self._cache.reserve(slot, tokens)
                self._drafts.admit(slot, handle.prompt, handle.max_total)
                self._prefill(slot)
            except Exception as error:
                if self._slots[slot] is handle:
                    self._end(slot, "error", str(error))
                raise

    def _prefill(self, slot: int) -> None:
        """The prompt's keys, and the first token."""
        handle = self._handle(slot)
        device = self._target.device
        if (missing := handle.max_total - self._texts.shape[1]) > 0:
            self._texts = torch.nn.functional.pad(self._texts, (0, missing))
        prompt = torch.tensor(handle.prompt, device=device)
        self._texts[slot, : len(prompt)] = prompt
        table = self._cache.block_table[slot : slot + 1]
        for start in range(0, len(prompt), PREFILL_CHUNK):
            context = torch.tensor([start], dtype=torch.int32, device=device)
            chunk = prompt[None, start : start + PREFILL_CHUNK]
            logits = self._target.forward(chunk, self._cache, table, context, last_only=True)
        group = _Group([slot], handle.method, self._sampling([slot]))
        nothing = torch.empty(1, 0, dtype=torch.int64, device=device)
        self._accept(group, Drafts(nothing, [0]), nothing, [0], logits)

    def _end(self, slot: int, reason: str, error: str | None = None) -> None:
        handle = self._handle(slot)
        self._slots[slot] = None
        self._cache.release(slot)
        self._drafts.release(slot)
        handle.finish(reason, error)

    # Small helpers.

    def _handle(self, slot: int) -> RequestHandle:
        handle = self._slots[slot]
        assert handle is not None
        return handle

    def _k(self, handle: RequestHandle) -> int:
        k = handle.params.num_draft_tokens
        return self.num_draft_tokens if k is None else k

    def _by_method(self, active: Sequence[int]) -> list[_Group]:
        """Requests judged by one method each; greedy rows go with any."""
        methods = {slot: self._handle(slot).method for slot in active}
        sampled = sorted({method for method in methods.values() if method != "greedy"}) or ["greedy"]
        groups = [[s for s in active if methods[s] in (("greedy", m) if m == sampled[0] else (m,))] for m in sampled]
        return [_Group(g, m, self._sampling(g)) for g, m in zip(groups, sampled, strict=True)]

    def _sampling(self, slots: Sequence[int]) -> SamplingBatch:
        handles = [self._handle(slot) for slot in slots]
        batch = SamplingBatch.from_params(
            [h.params for h in handles], [len(h) for h in handles], self._target.device, seeds=[h.seed for h in handles]
        )
        if self.method == "greedy":
            batch.temperature.zero_()
        return batch

    def _padded(self, handles: Sequence[RequestHandle], rows: int) -> int | None:
        """Rows of an exact pass; None: as many as there are."""
        if self._exact is None and all(handle.method in _PATHLESS for handle in handles):
            return None
        return self._invariant(rows)

    def _invariant(self, rows: int) -> int | None:
        """The next row count whose bits do not depend on it; None where exactness is off, or cannot be had."""
        if self._exact is False or self._target.device.type == "meta":
            return None
        try:
            return self._target.invariant_rows().pad(rows)
        except ExactnessError as error:
            if self._exact:
                raise
            self._exact = False
            warnings.warn(f"{error}; the text may differ from plain decoding at near-ties", stacklevel=4)
            return None


@dataclass
class _Group:
    slots: list[int]
    method: str
    params: SamplingBatch


def _merge(parts: Sequence[Drafts], device: torch.device) -> tuple[torch.Tensor, list[int]]:
    """All groups' drafts as one ``[B,K]``, K the longest."""
    lens = [n for drafts in parts for n in drafts.lens]
    k = max(lens)
    tokens = [
        torch.nn.functional.pad(d.tokens[:, :k], (0, max(k - d.tokens.shape[1], 0)), value=ops.PAD) for d in parts
    ]
    return torch.cat(tokens) if len(tokens) > 1 else tokens[0], lens


def _check_drafts(drafts: Any, batch: int, session: type) -> None:
    name = f"{session.__module__.rsplit('.', 1)[-1]}'s drafts"
    require(isinstance(drafts, Drafts), name, "Drafts", type(drafts).__name__)
    check_tensor(f"{name}.tokens", drafts.tokens, (batch, None))
    require(drafts.tokens.dtype == torch.int64, f"{name}.tokens", "int64", drafts.tokens.dtype)
    k = drafts.tokens.shape[1]
    fits = len(drafts.lens) == batch and all(isinstance(n, int) and 0 <= n <= k for n in drafts.lens)
    require(fits, f"{name}.lens", f"a list of {batch} integers from 0 to {k}", drafts.lens)


def _token_ids(prompt: Any) -> list[int]:
    """A prompt as a list: of integers, or a tensor or array of one dimension."""
    values = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    fits = isinstance(values, Iterable) and not isinstance(values, (str, bytes, Mapping))
    ids = list(values) if fits else []
    fits = fits and all(isinstance(x, Integral) and not isinstance(x, bool) for x in ids)
    require(fits, "prompt", "a list of integer token ids", repr(prompt)[:60])
    return [int(x) for x in ids]
