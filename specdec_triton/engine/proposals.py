"""What a round asks of the drafter, and how many drafts each request gets.

A drafter may have several sources, free ones before one that costs something (:class:`~specdec_triton.drafters.Cascade`). Where values may be
read they are asked here one after the other, each for the requests for which those before it found nothing, and each has a controller
of its own: that a text repeats itself says nothing of how good a head is, and the other way round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from specdec_triton import ops
from specdec_triton._checks import check_tensor, require
from specdec_triton.drafters import Drafts, DraftSession, Round
from specdec_triton.drafters.base import nothing
from specdec_triton.drafters.cascade import joined
from specdec_triton.engine.controller import Controllers
from specdec_triton.engine.costs import CostModel, Curve
from specdec_triton.engine.drawing import Drawing
from specdec_triton.engine.phases import Phases
from specdec_triton.engine.shapes import Shape
from specdec_triton.engine.slots import Slots
from specdec_triton.sampling import MAX_DRAFT_TOKENS


class DrafterError(Exception):
    """The drafter raised its cause, or did not keep to the protocol. The round has changed nothing."""


class Proposed(NamedTuple):
    """Attributes: wanted: int32 ``[n]``, how many drafts each request would like. drafts: that it gets. of: bool ``[n]`` for each source, whose drafts
    it made; empty: there is one."""

    wanted: torch.Tensor
    drafts: Drafts
    of: Sequence[torch.Tensor] = ()


class Proposals:
    """Asks the sources of one decoder.

    Args:
        session: the drafter's. controllers: one for each source; see :func:`sources_of`.
        reads: whether values may be read.

    Attributes:
        costs: what passes cost.
    """

    def __init__(
        self,
        session: DraftSession,
        slots: Slots,
        drawing: Drawing,
        controllers: Controllers,
        costs: CostModel,
        phases: Phases,
        *,
        reads: bool,
    ) -> None:
        self._session = session
        self._sources = sources_of(session, reads=reads)
        self._slots = slots
        self._drawing = drawing
        self._controllers = controllers
        self.costs = costs
        self._phases = phases
        self._reads = reads
        with torch.inference_mode(False):
            self._steps = torch.arange(MAX_DRAFT_TOKENS + 1, dtype=torch.int32, device=slots.device)

    def ask(self, shape: Shape, lens: torch.Tensor, *, trees: bool) -> Proposed:
        """Drafts of a round.

        Args:
            lens: int32 ``[n]``, 0 for a slot at rest. trees: whether they may be trees.
        """
        s, n = self._slots, shape.rows
        if shape.limit == 0:
            return Proposed(torch.zeros_like(lens), nothing(lens))
        room = s.ends[:n] - lens - 1
        if self._session.max_len is not None:
            room = torch.minimum(room, (self._session.max_len - lens).clamp(min=0))
        if trees and self._session.trees:  # a path is cut off where it leads out of the text
            room = torch.where(room > 0, shape.limit, room)
        limits = torch.minimum(s.limits[:n], room) * s.live[:n]
        if len(self._sources) == 1:
            return Proposed(*self._ask_one(0, shape, lens, limits, None, trees=trees))
        chosen, wanted, of = nothing(lens), torch.zeros_like(lens), []
        for index in range(len(self._sources)):
            left = torch.where(chosen.lens > 0, 0, limits)
            more, found = self._ask_one(index, shape, lens, left, chosen.lens, trees=trees)
            wanted = torch.where(chosen.lens > 0, wanted, more)
            of.append((chosen.lens == 0) & (found.lens > 0))
            chosen = joined(chosen, found, s.vocab_size, needs_logits=_needs_logits(shape))
        return Proposed(wanted, chosen, of)

    def learn(self, shape: Shape, proposed: Proposed, drafted: torch.Tensor, accepted: torch.Tensor) -> None:
        """What became of a round's drafts; drafted, accepted: int32 ``[n]``."""
        if self._reads and proposed.drafts.tokens.shape[1] == 0:
            return  # of no drafts nothing is learnt
        if not proposed.of:
            # A drafter that has to catch up first has not been heard yet.
            asked = self._levels(self._session, proposed.wanted.clamp(max=shape.k))
            self._controllers[0].update(shape.rows, drafted, accepted, asked if self._session.seen is None else None)
            return
        for controller, mine in zip(self._controllers, proposed.of, strict=True):
            controller.update(shape.rows, drafted * mine, accepted * mine)

    def _ask_one(
        self,
        index: int,
        shape: Shape,
        lens: torch.Tensor,
        wanted: torch.Tensor,
        given: torch.Tensor | None,
        *,
        trees: bool,
    ) -> tuple[torch.Tensor, Drafts]:
        """How many drafts of a source each request would like, and those that it gets.

        Args:
            wanted: int32 ``[n]``, the most. given: int32 ``[n]``, drafts of sources asked before; None: there are none.
        """
        s, n, session = self._slots, shape.rows, self._sources[index]
        # Free drafts are asked for first and then chosen among: those that are found may not be those that were hoped for.
        choosing = shape.adaptive and self._reads and session.free
        if shape.adaptive and not choosing:
            wanted = self._plan(index, shape, wanted, given)
        limits = wanted.clamp(max=shape.k)
        k = min(shape.k, int(limits.max())) if self._reads else shape.k
        if k == 0:
            return wanted, nothing(lens)
        params = s.params(slice(n), shape.has_filters, shape.has_typical)
        worth = self.costs.curve(n).worth if shape.adaptive and self._reads and not session.free else 0.0
        round_ = Round(
            k=k,
            texts=s.texts[:n, : shape.width],
            lens=lens.clone(),
            limits=limits.clone(),
            params=params,
            draw=self._drawing.chain(shape, params, sure=worth > 0),
            branch=self._drawing.branch(shape, params) if trees else None,
            draw_from=self._drawing.unwritten(shape, params),
            needs_logits=_needs_logits(shape),
            reads=self._reads,
            worth=worth,
        )
        try:
            with self._phases("draft"):
                drafts = session.propose(round_)
            self._check(session, drafts, n, k, trees)
        except Exception as error:
            raise DrafterError from error
        self._cut(drafts, limits)
        if choosing and drafts.tokens.shape[1] > 0 and bool(drafts.lens.any()):
            wanted = drafts.lens = self._plan(index, shape, drafts.lens, given)
        return wanted, self._slim(drafts)

    def _plan(self, index: int, shape: Shape, limits: torch.Tensor, given: torch.Tensor | None) -> torch.Tensor:
        """How many drafts of a source each request gets of the most that it may have, int32 ``[n]``."""
        s, n, session, controller = self._slots, shape.rows, self._sources[index], self._controllers[index]
        level, fixed, curve = session.level, s.fixed[:n], self.costs.curve(n)
        if given is not None:  # their rows are there whatever is planned for the others
            has = given > 0
            limits, fixed = torch.where(has, given, limits), fixed | has
            curve = _free(curve) if session.free else curve
        most = min(-(-shape.limit // level), controller.max_k)
        levels = controller.plan(n, self._levels(session, limits), fixed, curve, most, s.live[:n])
        planned = torch.minimum(levels * level, limits)
        return planned if given is None else torch.where(given > 0, 0, planned)

    @staticmethod
    def _levels(session: DraftSession, drafts: torch.Tensor) -> torch.Tensor:
        """Of trees the levels that so many drafts make; of chains they are the drafts."""
        level = session.level
        return drafts if level == 1 else (drafts + level - 1) // level

    def _cut(self, drafts: Drafts, limits: torch.Tensor) -> None:
        """Shorten drafts to their limits, and to what lies before an id outside the vocabulary, which is never verified."""
        width = drafts.tokens.shape[1]
        if width == 0:
            return
        foreign = (drafts.tokens < 0) | (drafts.tokens >= self._slots.vocab_size)
        first_foreign = torch.where(foreign, self._steps[:width], width).amin(1)
        lens = torch.minimum(drafts.lens, limits)
        drafts.lens = torch.minimum(lens, first_foreign)
        drafts.foreign = drafts.lens < lens
        if drafts.parents is not None:  # those of nodes that do not exist may be anything
            step = self._steps[:width]
            drafts.parents = torch.where(step < drafts.lens[:, None], drafts.parents, 0).clamp(min=0).minimum(step)

    def _slim(self, drafts: Drafts) -> Drafts:
        """Without the columns that nobody drafted, where that may be known."""
        width = drafts.tokens.shape[1]
        if width == 0 or not self._reads or width == (k := int(drafts.lens.max())):
            return drafts
        return drafts.first(k)

    def _check(self, session: DraftSession, drafts: Drafts, n: int, k: int, trees: bool) -> None:
        """Raises ValueError, naming the session, for what is not as :class:`Drafts` promises."""
        kind = type(session)
        name = f"{kind.__module__.rsplit('.', 1)[-1]}.{kind.__qualname__}'s drafts"
        require(isinstance(drafts, Drafts), name, "Drafts", type(drafts).__name__)
        check_tensor(f"{name}.tokens", drafts.tokens, (n, None), self._slots.lens)
        check_tensor(f"{name}.lens", drafts.lens, (n,), self._slots.lens)
        given = drafts.tokens.shape[1]
        require(given <= k, f"{name}.tokens", f"at most {k} columns", given)
        require(drafts.tokens.dtype == torch.int64, f"{name}.tokens", "int64", drafts.tokens.dtype)
        require(drafts.lens.dtype == torch.int32, f"{name}.lens", "int32", drafts.lens.dtype)
        if self._reads and n:
            low, high = (int(x) for x in drafts.lens.aminmax())
            require(low >= 0 and high <= given, f"{name}.lens", f"from 0 to {given}", [low, high])
        if drafts.parents is not None:
            require(trees and drafts.logits is None, name, "certain where they are trees, and chains where", "other")
            check_tensor(f"{name}.parents", drafts.parents, (n, given), self._slots.lens)
            require(drafts.parents.dtype == torch.int64, f"{name}.parents", "int64", drafts.parents.dtype)
            if self._reads:
                exists = self._steps[:given] < drafts.lens[:, None]
                fits = ((drafts.parents >= 0) & (drafts.parents <= self._steps[:given])) | ~exists
                require(bool(fits.all()), f"{name}.parents", "nodes before their children", drafts.parents.tolist())
        if drafts.failed is not None:
            check_tensor(f"{name}.failed", drafts.failed, (n,), self._slots.lens)
        if drafts.logits is not None:
            check_tensor(f"{name}.logits", drafts.logits, (n, given, self._slots.vocab_size), self._slots.lens)
            floating = drafts.logits.is_floating_point()
            require(floating, f"{name}.logits", "of a floating dtype", drafts.logits.dtype)
        if drafts.lse is not None:
            require(drafts.logits is not None, f"{name}.lse", "given together with logits", "alone")
            check_tensor(f"{name}.lse", drafts.lse, (n, given), self._slots.lens)
            require(drafts.lse.dtype == torch.float32, f"{name}.lse", "float32", drafts.lse.dtype)


def sources_of(session: DraftSession, *, reads: bool) -> tuple[DraftSession, ...]:
    """The sessions that a decoder asks one after the other, and counts apart."""
    return session.parts if reads and session.parts else (session,)


def _needs_logits(shape: Shape) -> bool:
    """Whether any request's method judges drafts by their probabilities."""
    return any(method in ops.BY_PROBABILITY for method in shape.methods)


def _free(curve: Curve) -> Curve:
    """The same costs, but of drafts that cost nothing."""
    return curve._replace(draft=torch.zeros_like(curve.draft))
