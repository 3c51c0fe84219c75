"""The decision of a round: rules on the logits, accept or reject by each request's method, log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from specdec_triton import ops
from specdec_triton.drafters import Drafts
from specdec_triton.engine.host_rules import HostRules
from specdec_triton.engine.shapes import Shape
from specdec_triton.engine.slots import Slots
from specdec_triton.head import Head
from specdec_triton.reference.logits import bad_rows
from specdec_triton.sampling import MAX_DRAFT_TOKENS


class Verdict(NamedTuple):
    """What a round's requests get: ``tokens[b, : num_accepted[b] + 1]``.

    Attributes:
        tokens: int64 ``[n,K+1]``, padded with -1. num_accepted, status: int32 ``[n]``; see ``ops.AcceptResult``.
        path: int64 ``[n,K+1]``, of trees the nodes that were kept, padded with -1; None: drafts were chains.
    """

    tokens: torch.Tensor
    num_accepted: torch.Tensor
    status: torch.Tensor
    path: torch.Tensor | None = None

    def on_path(self, nodes: torch.Tensor) -> torch.Tensor:
        """``[n,K+1,...]``, one for each node, in the order of what was kept; anything behind it."""
        if self.path is None:
            return nodes
        index = self.path.clamp(min=0)
        return nodes.gather(1, index.view(*index.shape, *[1] * (nodes.dim() - 2)).expand(-1, -1, *nodes.shape[2:]))


class Judge:
    """Judges the drafts of the slots.

    Args:
        reads: whether values may be read on the host.
    """

    def __init__(self, slots: Slots, backend: str | None, *, reads: bool) -> None:
        self._slots = slots
        self._backend = backend
        self._reads = reads
        with torch.inference_mode(False):
            self._steps = torch.arange(MAX_DRAFT_TOKENS + 1, dtype=torch.int64, device=slots.device)

    def decide(
        self,
        rows: slice,
        shape: Shape,
        drafts: Drafts,
        scored: torch.Tensor,
        counts: torch.Tensor | None = None,
        host: HostRules | None = None,
        head: Head | None = None,
    ) -> Verdict:
        """Keep the right prefix, or path, of each draft, and the token that the target adds.

        Args:
            scored: the target's logits ``[n,K+1,V]``, or what its ``head`` makes them of, ``[n,K+1,H]``; then no request needs more
                of a row than its method does.
            counts: int32 ``[n]``, the logits' rows of each request, if those are packed ``[N,V]``. Then requests that drafted
                are judged apart from those that did not, so that the latter's logits are not padded to K+1 rows.
            host: what the requests' grammars and processors have to say; not with packed logits.
        """
        if head is not None:
            params, (method,) = self._slots.params(rows, False, False), shape.methods
            drawn = drafts.tokens, drafts.lens
            return Verdict(*head.verify(scored, *drawn, params=params, method=method, backend=self._backend))
        if counts is None:
            return self._of(rows, None, shape, drafts, scored, host)
        n, width = len(drafts.lens), drafts.tokens.shape[1] + 1
        tokens = drafts.tokens.new_full((n, width), ops.PAD)
        path = None if drafts.parents is None else tokens.clone()
        accepted, status = torch.zeros_like(drafts.lens), torch.zeros_like(drafts.lens)
        for some in ((drafts.lens > 0).nonzero()[:, 0], (drafts.lens == 0).nonzero()[:, 0]):
            part = drafts.of(some)
            columns = part.tokens.shape[1] + 1
            step = torch.minimum(self._steps[:columns], part.lens[:, None])
            scores = scored[self.packed_rows(counts, some[:, None], step).clamp(max=len(scored) - 1)]  # none at rest
            verdict = self._of(rows, some, shape, part, scores, None)
            tokens[some, :columns], accepted[some], status[some] = verdict[:3]
            if path is not None and verdict.path is not None:
                path[some, :columns] = verdict.path
        return Verdict(tokens, accepted, status, path)

    def draft_logits(self, shape: Shape, logits: torch.Tensor, before: Sequence[torch.Tensor]) -> torch.Tensor:
        """What a drafter's logits ``[n,V']`` after the drafts ``before``, int64 ``[n]`` each, become under the requests' rules:
        ``[n,V]``. A draft that breaks a rule would be in vain."""
        rules = self._slots.rules(slice(shape.rows), shape, None)
        tokens = torch.stack(tuple(before), 1) if before else self._steps[:0].expand(shape.rows, 0)
        missing = self._slots.vocab_size - logits.shape[-1]
        logits = torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
        ruled = ops.apply_logit_rules(logits[:, None], tokens, rules=rules, first=len(before), backend=self._backend)
        return ruled[:, 0]

    @staticmethod
    def packed_rows(counts: torch.Tensor, request: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        """Where the row of a request's step lies in packed logits."""
        return (counts.cumsum(0) - counts)[request] + step

    def _of(
        self,
        rows: slice,
        some: torch.Tensor | None,
        shape: Shape,
        drafts: Drafts,
        logits: torch.Tensor,
        host: HostRules | None,
    ) -> Verdict:
        """Of some of the rows, int64; None: of all."""
        params = self._slots.params(rows, shape.has_filters, shape.has_typical)
        methods = self._slots.methods[rows]
        if some is not None:
            params, methods = params.of(some), methods[some]
        logits = self._ruled(rows, some, shape, drafts, logits, host)
        result = None
        if self._reads or not (shape.rules or host is not None):
            result = self._by_methods(shape, methods, drafts, logits, params)
        # On a device nobody can look whether there is a dead end. Without rules only the model's own NaN makes one: it ends the request.
        if result is None or (self._reads and bool(result.status.any())):
            result = self._up_to_dead_ends(shape, methods, drafts, logits, params)
        return result

    def _up_to_dead_ends(
        self, shape: Shape, methods: torch.Tensor, drafts: Drafts, logits: torch.Tensor, params: ops.SamplingBatch
    ) -> Verdict:
        """A row that leaves no token (or is no number) behind a draft is not met unless that draft is accepted. Then the
        drafts up to there are all that the request gets in this round, and the next one begins with that row, as plain
        decoding would. What stands in such a row has no influence on the drafts before it."""
        step, largest = self._steps[: logits.shape[1]], logits.amax(-1)
        bad = bad_rows(largest, params.temperature) & (step <= drafts.lens[:, None]) & (step > 0)
        result = self._by_methods(shape, methods, drafts, logits.masked_fill(bad[:, :, None], 0.0), params)
        first = torch.where(result.on_path(bad), step, logits.shape[1]).amin(1)
        accepted = torch.minimum(result.num_accepted, first.int() - 1)
        return result._replace(
            tokens=result.tokens.masked_fill(step > accepted[:, None], ops.PAD), num_accepted=accepted
        )

    def _by_methods(
        self, shape: Shape, methods: torch.Tensor, drafts: Drafts, logits: torch.Tensor, params: ops.SamplingBatch
    ) -> Verdict:
        """Each request by its own method; methods: int32 ``[n]``."""
        result = self._by_method(shape.methods[0], drafts, logits, params)
        for method in shape.methods[1:]:
            other, mine = self._by_method(method, drafts, logits, params), methods == ops.METHODS.index(method)
            path = result.path
            if path is not None and other.path is not None:
                path = torch.where(mine[:, None], other.path, path)
            result = Verdict(
                torch.where(mine[:, None], other.tokens, result.tokens),
                torch.where(mine, other.num_accepted, result.num_accepted),
                torch.where(mine, other.status, result.status),
                path,
            )
        return result

    def _by_method(self, method: str, drafts: Drafts, logits: torch.Tensor, params: ops.SamplingBatch) -> Verdict:
        if drafts.parents is not None:
            return self._of_trees(method, drafts, drafts.parents, logits, params)
        by_probability = method in ops.BY_PROBABILITY
        result = ops.accept_reject(
            drafts.tokens,
            logits,
            drafts.logits if by_probability else None,
            draft_lse=drafts.lse if by_probability else None,
            draft_lens=drafts.lens,
            params=params,
            method=method,
            backend=self._backend,
        )
        return Verdict(*result)

    def _of_trees(
        self, method: str, drafts: Drafts, parents: torch.Tensor, logits: torch.Tensor, params: ops.SamplingBatch
    ) -> Verdict:
        """Children are certain, so ``block``, which is of chains alone, has nothing over ``rejection``."""
        pad = torch.nn.functional.pad
        path, tokens, accepted, status = ops.accept_tree(
            pad(drafts.tokens, (1, 0)),
            logits,
            pad(parents, (1, 0), value=ops.PAD),
            node_lens=drafts.lens + 1,
            params=params,
            method="rejection" if method == "block" else method,
            backend=self._backend,
        )
        return Verdict(tokens, accepted, status, path)

    def _ruled(
        self,
        rows: slice,
        some: torch.Tensor | None,
        shape: Shape,
        drafts: Drafts,
        logits: torch.Tensor,
        host: HostRules | None,
    ) -> torch.Tensor:
        """The logits ``[n,K+1,V]`` that are sampled from."""
        mask = None if host is None else host.masks(drafts.tokens, drafts.lens, logits.shape[-1])
        if shape.rules or mask is not None:
            rules, ruled = self._slots.rules(rows, shape, mask), self._slots.ruled[rows]
            if some is not None:
                rules, ruled = rules.of(some), ruled[some]
            tokens, lens = drafts.tokens, drafts.lens
            if not self._reads or bool(ruled.all()):
                logits = ops.apply_logit_rules(logits, tokens, rules=rules, draft_lens=lens, backend=self._backend)
            elif bool(ruled.any()):
                those = ruled.nonzero()[:, 0]
                logits = logits.to(torch.float32, copy=True)
                logits[those] = ops.apply_logit_rules(
                    logits[those], tokens[those], rules=rules.of(those), draft_lens=lens[those], backend=self._backend
                )
        return logits if host is None else host.process(drafts.tokens, drafts.lens, logits)
