"""What the device knows of the requests: tensors with one row a slot, which a step reads and writes in place.

Requests always fill the slots 0 .. n-1: when one ends, the last moves into its place. So a step works on the first n rows of
static buffers, which a captured graph can read without an index.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from specdec_triton import ops
from specdec_triton._upload import upload
from specdec_triton.sampling import MAX_DRAFT_TOKENS, SamplingBatch

if TYPE_CHECKING:
    from specdec_triton.engine.request import RequestHandle

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
    "seed": torch.int64,
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
        temperature, top_k, top_p, min_p, seed: as in :class:`~specdec_triton.sampling.SamplingBatch`.
        columns: all but texts and stop_ids, by name.
        version: increases when ``texts`` or ``stop_ids`` is replaced by a wider one.
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
    seed: torch.Tensor

    @torch.inference_mode(False)  # what a step makes must stay writable outside it
    def __init__(self, slots: int, width: int, device: torch.device) -> None:
        self.device = device
        self.version = 0
        self.texts = torch.zeros(slots, width + _MARGIN, dtype=torch.int64, device=device)
        self.stop_ids = torch.full((slots, 1), ops.PAD, dtype=torch.int64, device=device)

        self.columns = {name: torch.zeros(slots, dtype=dtype, device=device) for name, dtype in _COLUMNS.items()}
        vars(self).update(self.columns)

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
            "seed": handle.seed,
        }
        for name, column in self.columns.items():
            column[slot] = values[name]

    @torch.inference_mode()
    def move(self, src: int, dst: int) -> None:
        """The request of slot src goes to dst."""
        for tensor in (*self.columns.values(), self.texts, self.stop_ids):
            tensor[dst] = tensor[src]
        self.leave(src)

    @torch.inference_mode()
    def leave(self, slot: int) -> None:
        """Make the slot inert."""
        self.live[slot] = False
        self.lens[slot] = 0

    def params(self, rows: slice, has_filters: bool) -> SamplingBatch:
        """The sampling parameters of the rows' next token."""
        return SamplingBatch(
            self.temperature[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.min_p[rows],
            self.seed[rows],
            self.lens[rows].long(),
            has_filters,
        )

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
