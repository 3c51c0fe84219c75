"""What the device knows of the requests: tensors with one row a slot, which a step reads and writes in place.

Requests always fill the slots 0 .. n-1: when one ends, the last moves into its place. So a step works on the first n rows of
static buffers, which a captured graph can read without an index.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from specdec_triton import ops
from specdec_triton._upload import upload
from specdec_triton.logit_rules import LogitRules, bias_of, count_tokens
from specdec_triton.sampling import MAX_DRAFT_TOKENS, SamplingBatch

if TYPE_CHECKING:
    from specdec_triton.engine.request import RequestHandle
    from specdec_triton.engine.shapes import Shape

RUNNING, STOP, LENGTH, ERROR = range(4)  # the reasons in a report
_COLUMNS = {
    "lens": torch.int32,
    "ends": torch.int32,
    "live": torch.bool,
    "limits": torch.int32,
    "fixed": torch.bool,
    "methods": torch.int32,
    "temperature": torch.float32,
    "top_k": torch.int32,
    "top_p": torch.float32,
    "min_p": torch.float32,
    "typical_p": torch.float32,
    "seed": torch.int64,
    "ruled": torch.bool,
    "repetition_penalty": torch.float32,
    "presence_penalty": torch.float32,
    "frequency_penalty": torch.float32,
    "min_lens": torch.int32,
    "ngram": torch.int32,
    "logprobs": torch.int32,
}
_MARGIN = MAX_DRAFT_TOKENS + 1  # columns past the longest text: a step writes a whole block and keeps a part


class Slots:
    """Tensors ``[slots, ...]`` on the device.

    Attributes:
        texts: int64 ``[slots, width]``, prompt and output. lens: int32, how much of it is committed; 0 where empty.
        ends: int32, the longest that the text may become.
        live: bool, whether the request decodes: it has been prefilled and has not ended.
        limits: int32, the most drafts a round. fixed: bool, that number whatever the controller thinks.
        stop_ids: int64 ``[slots, S]``, padded with -1.
        methods: int32, the index in ``ops.METHODS`` (greedy requests: any).
        temperature, top_k, top_p, min_p, typical_p, seed: as in :class:`~specdec_triton.sampling.SamplingBatch`.
        ruled: bool, whether any logit rule is the request's own. repetition_penalty, presence_penalty, frequency_penalty,
            min_lens, ngram, counts, bias: as in :class:`~specdec_triton.logit_rules.LogitRules`; the last two, ``[slots,V]``,
            are None until a request needs them. logprobs: int32, how many of the likeliest tokens are reported; -1: nothing.
        columns: all with one number a slot, by name.
        version: increases when a tensor is replaced, by a wider one or at all.
    """

    lens: torch.Tensor
    ends: torch.Tensor
    live: torch.Tensor
    limits: torch.Tensor
    fixed: torch.Tensor
    methods: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    typical_p: torch.Tensor
    seed: torch.Tensor
    ruled: torch.Tensor
    repetition_penalty: torch.Tensor
    presence_penalty: torch.Tensor
    frequency_penalty: torch.Tensor
    min_lens: torch.Tensor
    ngram: torch.Tensor
    logprobs: torch.Tensor

    @torch.inference_mode(False)  # what a step makes must stay writable outside it
    def __init__(self, slots: int, width: int, vocab_size: int, device: torch.device) -> None:
        self.device = device
        self.vocab_size = vocab_size
        self.version = 0
        self.texts = torch.zeros(slots, width + _MARGIN, dtype=torch.int64, device=device)
        self.stop_ids = torch.full((slots, 1), ops.PAD, dtype=torch.int64, device=device)

        self.columns = {name: torch.zeros(slots, dtype=dtype, device=device) for name, dtype in _COLUMNS.items()}
        vars(self).update(self.columns)
        self.repetition_penalty.fill_(1.0)
        self.counts: torch.Tensor | None = None
        self.bias: torch.Tensor | None = None

    @torch.inference_mode()
    def enter(self, slot: int, handle: RequestHandle) -> None:
        """Write a request's row; it is not live yet."""
        stop_ids = handle.stop_ids
        self._widen(handle.max_total, len(stop_ids))
        text = [*handle.prompt, *handle.token_ids]
        self.texts[slot, : len(text)] = upload(text, torch.int64, self.device)
        self.stop_ids[slot] = ops.PAD
        self.stop_ids[slot, : len(stop_ids)] = upload(stop_ids, torch.int64, self.device)
        params = handle.params
        values = {
            "lens": len(text),
            "ends": handle.max_total,
            "live": False,
            "limits": handle.limit,
            "fixed": handle.fixed,
            "methods": ops.METHODS.index(handle.method),
            "temperature": 0.0 if handle.method == "greedy" else float(params.temperature or 0),
            "top_k": min(params.top_k, 2**31 - 1),
            "top_p": params.top_p,
            "min_p": params.min_p,
            "typical_p": params.typical_p,
            "seed": handle.seed,
            "ruled": bool(handle.rules),
            "repetition_penalty": params.repetition_penalty,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "min_lens": len(handle.prompt) + params.min_new_tokens,
            "ngram": params.no_repeat_ngram_size,
            "logprobs": -1 if params.logprobs is None else params.logprobs,
        }
        for name, column in self.columns.items():
            column[slot] = values[name]
        if params.penalizes:
            self.counts = self._table(self.counts, torch.int32)
            counts = count_tokens(handle.prompt, handle.token_ids, self.vocab_size)
            self.counts[slot] = upload(counts, torch.int32, self.device)
        if params.biases:
            self.bias = self._table(self.bias, torch.float32)
            self.bias[slot] = upload(bias_of(params, self.vocab_size), torch.float32, self.device)
        elif self.bias is not None:
            self.bias[slot] = 0.0

    @torch.inference_mode()
    def move(self, src: int, dst: int) -> None:
        """The request of slot src goes to dst."""
        for tensor in (*self.columns.values(), self.texts, self.stop_ids, self.counts, self.bias):
            if tensor is not None:
                tensor[dst] = tensor[src]
        self.leave(src)

    @torch.inference_mode()
    def leave(self, slot: int) -> None:
        """Make the slot inert."""
        self.live[slot] = False
        self.lens[slot] = 0

    def params(self, rows: slice, has_filters: bool, has_typical: bool = False) -> SamplingBatch:
        """The sampling parameters of the rows' next token."""
        return SamplingBatch(
            self.temperature[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.min_p[rows],
            self.seed[rows],
            self.lens[rows].long(),
            has_filters,
            self.typical_p[rows] if has_typical else None,
        )

    def rules(self, rows: slice, shape: Shape, mask: torch.Tensor | None) -> LogitRules:
        """The logit rules of the rows' next token, those that ``shape`` says are in use.

        Args:
            mask: int32 ``[n,K+1,ceil(V/32)]``, what the requests' grammars allow; None: anything.
        """
        used, live = (
            shape.rules,
            self.live[rows],
        )  # others wait for their prompt's pass: their texts may be longer than the shape
        rules = LogitRules(torch.where(live, self.lens[rows], 0), mask=mask)
        if "penalties" in used:
            assert self.counts is not None
            rules.counts = self.counts[rows]
            for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
                setattr(rules, name, self.columns[name][rows])
        if "bias" in used:
            assert self.bias is not None
            rules.bias = self.bias[rows]
        if "min_lens" in used:
            rules.min_lens, rules.stop_ids = self.min_lens[rows], self.stop_ids[rows]
        if "ngram" in used:
            rules.ngram, rules.texts = self.ngram[rows] * live, self.texts[rows, : shape.width]
            rules.max_ngram = shape.max_ngram
        return rules

    @torch.inference_mode(False)
    def _table(self, table: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        """``[slots,V]``, made when it is first needed."""
        if table is None:
            table = torch.zeros(len(self.lens), self.vocab_size, dtype=dtype, device=self.device)
            self.version += 1
        return table

    @torch.inference_mode(False)
    def _widen(self, width: int, stop_ids: int) -> None:
        """Room for texts of ``width`` tokens and for ``stop_ids`` stop tokens; doubling, so that it seldom happens."""
        if (missing := width + _MARGIN - self.texts.shape[1]) > 0:
            self.texts = torch.nn.functional.pad(self.texts, (0, max(missing, self.texts.shape[1])))
            self.version += 1
        if (missing := stop_ids - self.stop_ids.shape[1]) > 0:
            more = max(missing, self.stop_ids.shape[1])
            self.stop_ids = torch.nn.functional.pad(self.stop_ids, (0, more), value=ops.PAD)
            self.version += 1
