"""The drafter protocol. A drafter is a recipe; ``bind`` makes the session that serves one decoder.

A session drafts for the slots 0 .. n-1 of its decoder, from tensors on the device. On a device it may read nothing back to
the host and branch on no value, since its drafting is part of a step that is captured and replayed; where values may be read
(:attr:`Round.reads`) it should skip what nobody asked for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from specdec_triton.sampling import MAX_DRAFT_TOKENS, SamplingBatch

if TYPE_CHECKING:
    from specdec_triton.adapter import ModelAdapter
    from specdec_triton.head import Head
    from specdec_triton.kv_cache import KVCache


class Drawn(NamedTuple):
    """A draft of each request: tokens int64 ``[n]``; the logits that they were drawn from (None: never written), and those
    logits' lse ``[n]`` (see ``ops.sample``), which is not finite where they held NaN or +inf; the chances that they are right, ``[n]``, as far
    as the drafter knows (None: nobody asked)."""

    tokens: torch.Tensor
    lse: torch.Tensor
    logits: torch.Tensor | None
    chance: torch.Tensor | None = None


class Draw(Protocol):
    def __call__(self, logits: torch.Tensor, j: int, ids: torch.Tensor | None = None) -> Drawn: ...


class Children(NamedTuple):
    """The likeliest tokens of some nodes, int64 ``[n,M,count]``, best first, and their log-probabilities, fp32; those are NaN where the
    drafter's numbers were."""

    tokens: torch.Tensor
    scores: torch.Tensor


class Branch(Protocol):
    def __call__(self, logits: torch.Tensor, j: int, count: int, ids: torch.Tensor | None = None) -> Children: ...


@dataclass
class Round:
    """What a session may look at, for the n requests in the slots 0 .. n-1.

    Attributes:
        k: the most tokens to draft, K, at least 1.
        texts: int64 ``[n,L]``, prompt and output so far, the decoder's own: not to be written to.
        lens: int32 ``[n]``, their lengths; 0 for a slot at rest.
        limits: int32 ``[n]``, the most tokens that may be drafted for each request: 0 to K, 0 for a slot at rest.
        params: the requests' sampling parameters; ``position`` is that of the first draft.
        draw: ``(logits [n,V'], j, ids) -> Drawn`` draws draft number j, after 0 .. j-1, with the noise that each request's method
            asks for, under the request's filters and logit rules. The columns are the first V' ids, V' <= V; or ``ids``, int64
            ``[V']``, each once.
        needs_logits: whether any request's method judges drafts by their probabilities.
        reads: whether values may be read on the host.
        branch: ``(logits [n,M,V'], j, count, ids) -> Children`` gives the children of M nodes of depth j in a tree, ``count`` <= V' of
            them: where a request's method draws, with the noise that the target will draw with at their position. None: only chains
            are of use, since rules follow the text.
        worth: the chance that all drafts so far are right from which on one more is worth a pass of the drafter.
        draw_from: ``(head, hidden [n,H], j) -> Drawn`` does so from what a model's head is given, without writing logits; None: rows of
            logits are needed.
    """

    k: int
    texts: torch.Tensor
    lens: torch.Tensor
    limits: torch.Tensor
    params: SamplingBatch
    draw: Draw
    needs_logits: bool
    reads: bool
    branch: Branch | None = None
    worth: float = 0.0
    draw_from: Callable[[Head, torch.Tensor, int], Drawn] | None = None


@dataclass
class Drafts:
    """Proposals: tokens int64 ``[n,K']`` with K' <= K (anything past a request's length), lens int32 ``[n]``.

    Attributes:
        parents: int64 ``[n,K']``, the node that each draft follows (see :mod:`~specdec_triton.trees`); None: the one before it.
        logits: ``[n,K',V]``, those that the drafts were drawn from, and lse ``[n,K']``, as :attr:`Round.draw` gave them; None: the
            drafts were certain, as those of trees always are.
        failed: bool ``[n]``, whose drafts ended early because the drafter's numbers were not finite; None: nobody's.
        foreign: bool ``[n]``, whose held an id outside the target's vocabulary; the decoder finds that out.
    """

    tokens: torch.Tensor
    lens: torch.Tensor
    logits: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    parents: torch.Tensor | None = None
    failed: torch.Tensor | None = None
    foreign: torch.Tensor | None = None

    def first(self, k: int) -> Drafts:
        """The first k columns, which hold all that ``lens`` counts."""
        logits, lse, parents = (None if x is None else x[:, :k] for x in (self.logits, self.lse, self.parents))
        return replace(self, tokens=self.tokens[:, :k], logits=logits, lse=lse, parents=parents)

    def of(self, requests: torch.Tensor) -> Drafts:
        """The drafts of some requests, int64 ``[n']``, without the columns that none of them uses; a host read."""
        lens = self.lens[requests]
        cut = self.first(int(lens.max()))
        logits, lse, parents = (None if x is None else x[requests] for x in (cut.logits, cut.lse, cut.parents))
        return Drafts(cut.tokens[requests], lens, logits, lse, parents)


class DraftSession(ABC):
    """A drafter at work for one decoder, with what it remembers of each slot's request.

    Attributes:
        silent: it never drafts.
        free: drafts cost next to nothing, so that more may be asked for than will be verified; if not, :meth:`drafting` says
            what is to be timed.
        max_len: texts longer than this get no drafts; None: no limit.
        seen: int32 ``[slots]``, how much of each text the session has processed; a request of which more than ``reach``
            tokens are missing gets no drafts until :meth:`extend` has made up for it. None: it needs no preparation.
        adapter: of a second model, if there is one. costs_like: if there is none, what the time of drafting depends on, in words: measured
            costs are kept by it; empty: drafts are free.
        taps: hidden states of the target that :meth:`see` is shown, after how many layers each; see
            :class:`~specdec_triton.taps.Taps`.
        reach: how many missing tokens :meth:`propose` makes up for by itself.
        trees: whether it drafts trees where :attr:`Round.branch` is given. level: the drafts that it makes in a pass of its own, 1 but for trees.
        parts: sessions that a decoder that may read values asks one after the other in place of this one, each for those for whom those before
            it found nothing; everything else is told this one.
        memory: how many missing tokens :meth:`extend` can make up for, since it needs to have seen their hidden states; None: any number.
    """

    silent: bool = False
    free: bool = True
    max_len: int | None = None
    seen: torch.Tensor | None = None
    adapter: ModelAdapter | None = None
    costs_like: str = ""
    taps: tuple[int, ...] = ()
    reach: int = 2
    trees: bool = False
    level: int = 1
    parts: tuple[DraftSession, ...] = ()
    memory: int | None = None

    @property
    def version(self) -> int:
        """Increases when a tensor that :meth:`propose` reads or writes is replaced."""
        return 0

    @property
    def key(self) -> Hashable:
        """What the shapes of :meth:`propose` depend on besides the round's; part of the key of a captured step."""
        return ()

    @abstractmethod
    def propose(self, round_: Round) -> Drafts:
        """Draft up to ``limits[b]`` tokens for each request; fewer, or none, is fine."""

    def reserve(self, slot: int, tokens: int) -> None:
        """The slot's text, drafts included, will not be longer than this before the next call."""

    def see(self, first: int, states: torch.Tensor, start: torch.Tensor, counts: torch.Tensor | None) -> None:
        """The target's hidden states at ``start .. start + counts - 1`` of the texts in the slots from ``first`` on. What is drafted and
        then rejected is seen too: the next call overwrites it.

        Args:
            states: ``[n,T,F]``. start, counts: int32 ``[n]`` (counts None: T each).
        """

    def extend(self, slot: int, text: torch.Tensor, start: int, stop: int) -> None:
        """Process the tokens ``start .. stop-1`` of the slot's text int64 ``[L]``, which are final."""

    def move(self, src: int, dst: int) -> None:
        """The request of slot src goes to the empty slot dst."""

    def release(self, slot: int) -> None:
        """The slot's request has gone."""

    def swap_out(self, slot: int, tokens: int) -> Any:
        """Release the slot, of whose text ``tokens`` tokens were processed; returns what :meth:`swap_in` needs."""
        self.release(slot)
        return None

    def swap_in(self, slot: int, saved: Any) -> None:
        """Bring a request back."""

    def drafting(self, n: int) -> Callable[[], object]:
        """A function that does the work of drafting one token for n requests, to be timed; not of sessions that are free."""
        raise NotImplementedError


@dataclass(frozen=True)
class SessionOptions:
    """What a session is made for.

    Attributes:
        slots: the most requests at once.
        page_size, num_pages: of the target's cache; 0: that grows.
        max_tokens: the longest text, if it is known.
        backend: of the ops.
        cache: the target's own; of a request, pages behind its text are there for as many tokens as may be drafted.
        max_drafts: the most that is drafted in a round. chunk: the most tokens of a prompt that are processed at once.
    """

    slots: int
    page_size: int = 16
    num_pages: int = 0
    max_tokens: int | None = None
    backend: str | None = None
    max_drafts: int = MAX_DRAFT_TOKENS
    chunk: int = 256
    cache: KVCache | None = None


class Drafter(ABC):
    """A source of drafts.

    Attributes:
        trees: whether its drafts may be trees, so that texts are exact up to rounding only.
    """

    trees: bool = False

    @abstractmethod
    def bind(self, target: ModelAdapter, options: SessionOptions) -> DraftSession:
        """Start a session for a decoder of ``target``.

        Raises:
            ValueError: the drafter does not fit the target.
        """


def spread(logits: torch.Tensor, ids: torch.Tensor | None, vocab_size: int) -> torch.Tensor:
    """Logits ``[n,V']`` of some ids, int64 ``[V']``, as ``[n,V]``, where the others are impossible; None: as they are."""
    if ids is None:
        return logits
    whole = logits.new_full((len(logits), vocab_size), float("-inf"))
    whole[:, ids] = logits
    return whole


def nothing(lens: torch.Tensor) -> Drafts:
    """No drafts for anyone."""
    return Drafts(lens.new_empty(len(lens), 0, dtype=torch.int64), torch.zeros_like(lens))


class Turns:
    """Who gets one more draft, while chains are drafted one pass after the other.

    Args:
        limits: int32 ``[n]``, the most of each request. k: the most of all.

    Attributes:
        asked: bool ``[n]`` each, who was to get a draft of each number so far.
    """

    def __init__(self, round_: Round, limits: torch.Tensor, k: int) -> None:
        self._round, self._limits, self._k = round_, limits, k
        self.asked = [limits > 0]
        self._chance: torch.Tensor | None = None

    def next(self, drawn: Drawn) -> torch.Tensor | None:
        """Who gets another behind this one, int32 ``[n]``; None: nobody, as far as that may be known."""
        done = len(self.asked)
        if done == self._k:
            return None
        going = self._limits > done
        if drawn.chance is not None:
            self._chance = drawn.chance if self._chance is None else self._chance * drawn.chance
            going = going & (self._chance >= self._round.worth)
        if self._round.reads and not bool(going.any()):
            return None
        self.asked.append(going)
        return going.int()


def drafts_of(drawn: Sequence[Drawn], turns: Turns, vocab_size: int | None) -> Drafts:
    """What was drawn, up to where it is none.

    Args:
        turns: who was to get a draft of each number.
        vocab_size: of the target, if the drafts are to be judged by what they were drawn from.
    """
    lse, asked = torch.stack([draft.lse for draft in drawn]), torch.stack(turns.asked)
    # -inf: its own vocabulary, or a rule, leaves nothing to draft. NaN and +inf: it has failed.
    drafting = (asked & lse.isfinite()).int().cumprod(0, dtype=torch.int32)
    before = torch.cat((asked[:1], drafting[:-1].bool()))
    failed = (before & asked & (lse.isnan() | (lse == float("inf")))).any(0)
    tokens = torch.stack([draft.tokens for draft in drawn], 1)
    drafts = Drafts(tokens, drafting.sum(0, dtype=torch.int32), failed=failed)
    if vocab_size is not None:
        # Columns that the drafter lacks have probability zero.
        q = torch.stack([draft.logits for draft in drawn if draft.logits is not None], 1)
        drafts.logits = torch.nn.functional.pad(q, (0, vocab_size - q.shape[-1]), value=float("-inf"))
        drafts.lse = lse.T.contiguous()
    return drafts
