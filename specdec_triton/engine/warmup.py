"""What a decoder does ahead of its first request, lest that wait for it: row counts, costs, graphs."""

from __future__ import annotations

from typing import Any

from specdec_triton.engine import cost_files
from specdec_triton.engine.costs import CostModel
from specdec_triton.engine.graphs import captured
from specdec_triton.engine.loop import Loop
from specdec_triton.engine.measuring import measure

_MOST_ROWS = 160  # larger row counts are tested when they first occur


class Warmup:
    """Prepares one decoder's loop.

    Args:
        exact: as the decoder was asked for it. backend: of the ops.
    """

    def __init__(
        self, loop: Loop, *, num_draft_tokens: int, max_batch_size: int, exact: bool | None, backend: str | None
    ) -> None:
        self._loop = loop
        self._num_draft_tokens = num_draft_tokens
        self._max_batch_size = max_batch_size
        self._exact = exact
        self._backend = backend

    @property
    def _most_drafts(self) -> int:
        return self._num_draft_tokens if self._loop.drafting.on else 0

    def test_rows(self) -> None:
        """Find the invariant row counts that rounds will need."""
        for rows in range(1, min(self._max_batch_size * (self._most_drafts + 1), _MOST_ROWS) + 1):
            self._loop.passes.pad(rows)

    def capture(self, *, adaptive: bool) -> None:
        """Run, and capture, greedy rounds of empty slots in all shapes, where those are known."""
        if self._loop.scheduler.busy:
            return
        for shape in self._loop.shapes.greedy(self._most_drafts, adaptive=adaptive):
            self._loop.round(shape)

    def recall_costs(self) -> None:
        """Take what was measured earlier on this machine, if anything was."""
        kept = cost_files.load(self._key(), device=self._loop.target.device)
        if kept is not None and kept.covers(self._max_batch_size):
            self._loop.rounds.costs = kept

    def measure_costs(self, *, again: bool) -> CostModel:
        """What passes cost here: from the cache folder what it holds, unless ``again``; the rest is timed and kept."""
        loop, key = self._loop, self._key()
        kept = cost_files.load(key, device=loop.target.device)
        measured = measure(
            loop.target,
            loop.rounds.rehearse,
            None if loop.session.free else loop.session.drafting,
            slots=self._max_batch_size,
            max_k=self._num_draft_tokens,
            known=None if again else kept,
            replay=captured(loop.target.device),
        )
        loop.rounds.costs = measured.merged(kept)
        cost_files.save(loop.rounds.costs, key)
        return loop.rounds.costs

    def _key(self) -> dict[str, Any]:
        loop = self._loop
        return cost_files.fingerprint(
            loop.target,
            loop.session.adapter or loop.session.costs_like or None,
            exact=self._exact is not False,
            backend=self._backend,
        )
