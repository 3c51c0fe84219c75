"""One round on the device: draft, verify, accept, commit.

Everything is a tensor: lengths, limits, stop tokens, what was emitted and why a request ended. On a device no value is read
back and no branch depends on one, so a round can be captured in a graph and enqueued before the one before it has been
read. The host learns of it from the *report*, one row a request, which is copied out behind the round. Where reading is
free (on a CPU) the same code narrows its shapes to what the values ask for.
"""

from __future__ import annotations

import torch

from specdec_triton import ops
from specdec_triton.adapter import ModelAdapter
from specdec_triton.drafters import Drafts, DraftSession
from specdec_triton.drafters.base import nothing
from specdec_triton.engine.controller import Controllers
from specdec_triton.engine.costs import CostModel
from specdec_triton.engine.details import Details
from specdec_triton.engine.drawing import Drawing
from specdec_triton.engine.host_rules import HostRules
from specdec_triton.engine.judge import Judge, Verdict
from specdec_triton.engine.phases import Phases
from specdec_triton.engine.proposals import DrafterError, Proposals
from specdec_triton.engine.shapes import Shape
from specdec_triton.engine.slots import ERROR, LENGTH, RUNNING, STOP, Slots
from specdec_triton.exactness import ExactPasses
from specdec_triton.head import Head
from specdec_triton.kv_cache import KVCache
from specdec_triton.ops.head import METHODS as HEAD_METHODS
from specdec_triton.sampling import MAX_DRAFT_TOKENS
from specdec_triton.taps import Taps
from specdec_triton.trees import Lineage, lineage

COLUMNS = (
    "count",
    "drafted",
    "accepted",
    "reason",
    "wanted",
    "seen",
    "failed",
    "foreign",
)  # of a report, before its tokens


class Rounds:
    """Runs rounds over the slots."""

    def __init__(
        self,
        target: ModelAdapter,
        session: DraftSession,
        cache: KVCache,
        slots: Slots,
        controllers: Controllers,
        costs: CostModel,
        passes: ExactPasses,
        backend: str | None,
        phases: Phases,
    ) -> None:
        self._target = target
        self._session = session
        self._cache = cache
        self._slots = slots
        self._passes = passes
        self._backend = backend
        self._phases = phases
        self._reads = not target.fixed_shapes
        self._judge = Judge(slots, backend, reads=self._reads)
        drawing = Drawing(slots, self._judge, backend, reads=self._reads)
        self._proposals = Proposals(session, slots, drawing, controllers, costs, phases, reads=self._reads)
        self.taps = Taps(target.model, session.taps) if session.taps else None
        self.details = Details(slots, reads=self._reads)
        columns = len(COLUMNS) + MAX_DRAFT_TOKENS + 1
        with torch.inference_mode(False):
            self._report = torch.zeros(len(slots.lens), columns, dtype=torch.int64, device=target.device)
            self._steps = torch.arange(MAX_DRAFT_TOKENS + 1, dtype=torch.int32, device=target.device)
            self._zeros = torch.zeros_like(slots.lens)

    @property
    def costs(self) -> CostModel:
        """What passes cost."""
        return self._proposals.costs

    @costs.setter
    def costs(self, costs: CostModel) -> None:
        self._proposals.costs = costs

    def report(self, rows: slice, k: int) -> torch.Tensor:
        """What the last round of these slots did: int64 ``[rows, len(COLUMNS) + K+1]``."""
        return self._report[rows, : len(COLUMNS) + k + 1]

    @torch.inference_mode()
    def run(self, shape: Shape, host: HostRules | None = None) -> None:
        """A round.

        Args:
            host: what grammars and logits processors have to say, if a request has any.
        """
        rows = slice(shape.rows)
        lens = torch.where(self._slots.live[rows], self._slots.lens[rows], 0)
        proposed = self._proposals.ask(shape, lens, trees=host is None and not shape.rules)
        drafts = proposed.drafts
        packed = host is None and self._packs(drafts)
        counts = torch.where(lens > 0, drafts.lens + 1, 0)
        head = self._head_of(shape, drafts, host)
        tree = None if drafts.parents is None else self._tree(rows, lens, drafts.parents)
        scored = self._verify(shape, lens, drafts, counts, packed, head, tree)
        packing = counts if packed else None
        verdict = self._decide(rows, shape, drafts, scored, packing, host, head)
        longest = drafts.lens
        if tree is not None:
            self._keep_path(shape, lens, verdict)
            longest = tree.depth.masked_fill(self._steps[: tree.depth.shape[1]] > longest[:, None], 0).amax(1)
        drafted, accepted = self._commit(rows, shape, drafts, verdict, longest, proposed.wanted)
        if shape.adaptive:
            self._proposals.learn(shape, proposed, drafted, accepted)

    def _tree(self, rows: slice, lens: torch.Tensor, parents: torch.Tensor) -> Lineage:
        """Nodes behind the text's end, which nobody will be given, stay at positions of the text."""
        mask, depth = lineage(parents)
        return Lineage(mask, torch.minimum(depth, (self._slots.ends[rows] - lens).clamp(min=0)[:, None]))

    @torch.inference_mode()
    def rehearse(self, tokens: torch.Tensor, cache: KVCache, context: torch.Tensor, counts: torch.Tensor) -> None:
        """Verify and judge drafts as those of greedy requests, over another cache: for the time that it takes.

        Args:
            tokens: int64 ``[n,K+1]``. context: int32 ``[n]``. counts: int32 ``[n]``, drafts and the token before them.
        """
        n, width = tokens.shape
        shape = Shape(rows=n, k=width - 1, limit=width - 1, columns=cache.block_table.shape[1], width=0)
        drafts = Drafts(tokens[:, 1:], counts - 1)
        packed, head = self._packs(drafts), self._head_of(shape, drafts, None)
        scored = self._score(tokens, cache, cache.block_table[:n], context, counts, shape.exact, packed, head)
        self._judge.decide(slice(n), shape, drafts, scored, counts if packed else None, head=head)

    @torch.inference_mode()
    def first_token(self, slot: int, shape: Shape, logits: torch.Tensor, host: HostRules | None = None) -> None:
        """The token after a prompt, from its last row of logits ``[1,1,V]``; the slot is live from now on."""
        rows = slice(slot, slot + 1)
        self._slots.live[rows] = True
        drafts = nothing(self._slots.lens[rows])
        verdict = self._decide(rows, shape, drafts, logits, None, host)
        self._commit(rows, shape, drafts, verdict, drafts.lens, self._slots.limits[rows])

    # Verify.

    def _head_of(self, shape: Shape, drafts: Drafts, host: HostRules | None) -> Head | None:
        """The target's, if the drafts can be judged without writing its logits; None where somebody looks at whole rows, and on
        a CPU, where writing them costs nothing beside the product."""
        (method, *others) = shape.methods
        rows_matter = shape.rules or shape.has_filters or shape.logprobs is not None or host is not None
        if self._reads or others or rows_matter or drafts.parents is not None or method not in HEAD_METHODS:
            return None
        if drafts.logits is not None and method in ops.BY_PROBABILITY:
            return None  # the rejected rows would need the whole weight again
        head = self._target.head
        return head if head is not None and head.usable else None

    def _packs(self, drafts: Drafts) -> bool:
        """Whether some requests drafted and others did not: then nobody's logits are padded to K+1 rows."""
        return self._reads and drafts.tokens.shape[1] > 0 and int(drafts.lens.min()) == 0

    def _verify(
        self,
        shape: Shape,
        lens: torch.Tensor,
        drafts: Drafts,
        counts: torch.Tensor,
        packed: bool,
        head: Head | None,
        tree: Lineage | None,
    ) -> torch.Tensor:
        """Score every draft and the place after it in one pass: logits ``[n,K+1,V]``, or packed (see ``forward``); with a head
        what it is given, ``[n,K+1,H]``."""
        s, n = self._slots, shape.rows
        context = (lens - 1).clamp(min=0)
        last = s.texts[:n, : shape.width].gather(1, context.long()[:, None])
        tokens = torch.cat([last, drafts.tokens], 1).clamp(0, self._target.vocab_size - 1)
        table = self._cache.block_table[:n, : shape.columns]
        taps = self.taps
        with self._phases("verify"):
            scored = self._score(tokens, self._cache, table, context, counts, shape.exact, packed, head, taps, tree)
        if taps is not None and tree is None:
            self._show(taps.states, context, counts)
        return scored

    def _show(self, states: torch.Tensor, context: torch.Tensor, counts: torch.Tensor) -> None:
        """The session sees the target's hidden states at the pass's tokens."""
        try:
            with self._phases("draft"):
                self._session.see(0, states, context, counts)
        except Exception as error:
            raise DrafterError from error

    def _score(
        self,
        tokens: torch.Tensor,
        cache: KVCache,
        table: torch.Tensor,
        context: torch.Tensor,
        counts: torch.Tensor,
        exact: bool,
        packed: bool,
        head: Head | None,
        taps: Taps | None = None,
        tree: Lineage | None = None,
    ) -> torch.Tensor:
        total = int(counts.sum()) if self._reads else tokens.numel()
        rows = self._passes.pad(total) if exact else None
        if head is not None:
            return self._target.hidden(tokens, cache, table, context, counts, exact=rows is not None, taps=taps)
        return self._target.forward(
            tokens, cache, table, context, counts, rows=rows, packed=packed, taps=taps, tree=tree
        )

    # Accept and commit.

    def _decide(
        self,
        rows: slice,
        shape: Shape,
        drafts: Drafts,
        scored: torch.Tensor,
        counts: torch.Tensor | None,
        host: HostRules | None,
        head: Head | None = None,
    ) -> Verdict:
        """What the target makes of the drafts; counts: int32 ``[n]``, if the logits are packed."""
        with self._phases("accept"):
            verdict = self._judge.decide(rows, shape, drafts, scored, counts, host, head)
            if shape.logprobs is not None:
                self.details.write(rows, verdict, scored, counts, shape.logprobs)
        return verdict

    def _keep_path(self, shape: Shape, lens: torch.Tensor, verdict: Verdict) -> None:
        """Of trees: keys, values and hidden states of what was kept go where a chain's would lie."""
        path = verdict.path
        assert path is not None
        context, kept = (lens - 1).clamp(min=0), torch.where(lens > 0, verdict.num_accepted + 1, 0)
        if self.taps is not None:
            self._show(verdict.on_path(self.taps.states), context, kept)
        with self._phases("accept"):
            if self._reads and bool(((path == self._steps[: path.shape[1]]) | (path < 0)).all()):
                return  # they lie there
            table = self._cache.block_table[: shape.rows, : shape.columns]
            for layer in range(len(self._target.observation.layers)):
                ops.compact_kv(*self._cache.layer(layer), table, context, path, kept, backend=self._backend)

    def _commit(
        self,
        rows: slice,
        shape: Shape,
        drafts: Drafts,
        verdict: Verdict,
        longest: torch.Tensor,
        wanted: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append what was accepted up to a stop token or the text's end, and report.

        Args:
            longest: int32 ``[n]``, the most drafts that could have been accepted.

        Returns:
            int32 ``[n]``: of these those that count, and how many were accepted.
        """
        s = self._slots
        tokens, accepted, status, _ = verdict
        width = tokens.shape[1]
        live, lens, step = s.live[rows], s.lens[rows], self._steps[:width]
        failed = live & (status != 0)
        room = s.ends[rows] - lens
        # Padding past the accepted drafts equals that of the stop ids: then the first stop is behind the last token.
        stops = (tokens[:, :, None] == s.stop_ids[rows][:, None]).any(2)
        first_stop = torch.where(stops, step, width).amin(1)
        count = torch.minimum(torch.minimum(accepted + 1, room), first_stop + 1) * (live & ~failed)
        reason = torch.where(first_stop < count, STOP, (count >= room) * LENGTH) * live
        reason = torch.where(failed, ERROR, reason)
        # Cut inside the accepted drafts: what follows was never part of the text.
        drafted = torch.where(count <= accepted, count, longest)
        accepted = torch.minimum(accepted, count)

        seen = self._zeros[rows] if self._session.seen is None else self._session.seen[rows]
        broken = self._zeros[rows] if drafts.failed is None else drafts.failed
        foreign = self._zeros[rows] if drafts.foreign is None else drafts.foreign
        facts = torch.stack((count, drafted, accepted, reason, wanted, seen, broken, foreign), 1)
        self.report(rows, width - 1).copy_(torch.cat((facts, tokens), 1))

        # All tokens, also those past the count: what lies past a text's length is never read.
        s.texts[rows].scatter_(1, lens.long()[:, None] + step, tokens)
        if "penalties" in shape.rules:
            assert s.counts is not None
            s.counts[rows].scatter_add_(1, tokens.clamp(min=0), (step < count[:, None]).int())
        lens += count
        live &= reason == RUNNING
        return drafted, accepted
