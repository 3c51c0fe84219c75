"""Log-probabilities of what a round emits, on their way to the host: a report of their own, since few requests ask for them."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch

from specdec_triton.engine.judge import Judge, Verdict
from specdec_triton.engine.slots import Slots
from specdec_triton.logprobs import TokenLogprob, token_logprobs
from specdec_triton.sampling import MAX_DRAFT_TOKENS, MAX_LOGPROBS

COLUMNS = (MAX_DRAFT_TOKENS + 1) * (1 + 2 * MAX_LOGPROBS)  # of the largest report


class Details:
    """Writes, for each token, its log-probability, then ids and log-probabilities of the most likely ones.

    Numbers travel as the bits of an fp64 in an int64, like everything else in a report.

    Args:
        reads: whether values may be read: then only what is asked for is computed.
    """

    def __init__(self, slots: Slots, *, reads: bool) -> None:
        self._slots = slots
        self._reads = reads
        self._report: torch.Tensor | None = None

    def report(self, rows: slice, k: int, top: int) -> torch.Tensor:
        """Of the last round of these slots: int64 ``[n, (K+1) (1 + 2 top)]``."""
        assert self._report is not None
        return self._report[rows, : (k + 1) * _columns(top)]

    def prepare(self) -> None:
        """Make the buffer, before a round is captured that writes to it."""
        if self._report is None:
            with torch.inference_mode(False):
                size = len(self._slots.lens), COLUMNS
                self._report = torch.zeros(size, dtype=torch.int64, device=self._slots.device)

    def write(self, rows: slice, verdict: Verdict, logits: torch.Tensor, counts: torch.Tensor | None, top: int) -> None:
        """Report on the emitted tokens.

        Args:
            verdict: what the round's requests get.
            logits: the target's own, ``[n,K+1,V]``, or ``[N,V]`` if packed, with counts int32 ``[n]``.
            top: at most so many of the most likely tokens are reported.
        """
        tokens = verdict.tokens
        width, vocab = tokens.shape[1], logits.shape[-1]
        into = self.report(rows, width - 1, top).view(-1, width, _columns(top))
        if self._reads:
            emitted = (tokens >= 0) & (self._slots.logprobs[rows] >= 0)[:, None]
            request, step = emitted.nonzero(as_tuple=True)
            node = step if verdict.path is None else verdict.path[request, step]
            scores = logits[request, node] if counts is None else logits[Judge.packed_rows(counts, request, node)]
            into[request, step] = _encoded(scores, tokens[request, step], top)
        else:
            known = tokens.clamp(0, vocab - 1).flatten()
            into.copy_(_encoded(verdict.on_path(logits).flatten(0, 1), known, top).view(into.shape))


def _columns(top: int) -> int:
    return 1 + 2 * top


def _encoded(logits: torch.Tensor, tokens: torch.Tensor, top: int) -> torch.Tensor:
    """int64 ``[R, 1 + 2 top]``."""
    kept = min(top, logits.shape[1])
    own, ids, values = token_logprobs(logits, tokens, kept)
    numbers = torch.nn.functional.pad(torch.cat((own[:, None], values), 1).double(), (0, top - kept)).view(torch.int64)
    return torch.cat((numbers, torch.nn.functional.pad(ids, (0, top - kept), value=-1)), 1)


def decoded(row: Sequence[int], tokens: Sequence[int], top: int, wanted: int) -> list[TokenLogprob]:
    """What a request is told about its tokens, of which a report with ``top`` candidates was made."""
    numbers = struct.Struct("q"), struct.Struct("d")
    known = []
    for t, token in enumerate(tokens):
        part = row[t * _columns(top) : (t + 1) * _columns(top)]
        values = [numbers[1].unpack(numbers[0].pack(bits))[0] for bits in part[: 1 + top]]
        ids = part[1 + top :][:wanted]
        likely = {token_id: value for token_id, value in zip(ids, values[1:], strict=False) if token_id >= 0}
        known.append(TokenLogprob(token, values[0], likely))
    return known
