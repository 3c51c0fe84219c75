"""The shapes of rounds: few, where each is captured in a graph; as small as the texts allow, where shapes are free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from specdec_triton.engine.request import RequestHandle
from specdec_triton.engine.slots import Slots
from specdec_triton.exactness import ExactPasses
from specdec_triton.kv_cache import KVCache
from specdec_triton.sampling import MAX_DRAFT_TOKENS


@dataclass(frozen=True)
class Shape:
    """What a round's shapes depend on: the key of a captured graph.

    Attributes:
        rows: the slots 0 .. rows-1 take part.
        k: the most drafts, K. limit: the most that a request may ever ask for.
        columns: of the block table. width: of the texts.
        methods: the accept/reject methods of the requests. has_filters: whether any uses top-k, top-p, min-p or typical-p;
            has_typical: the last.
        rules: which logit rules are in use (see :class:`~specdec_triton.engine.slots.Slots`). max_ngram: the largest size of an
            n-gram that must not occur again.
        logprobs: the most candidates that a request wants reported; None: nobody wants any.
        exact: whether row counts must be invariant.
        adaptive: whether the controller is asked.
    """

    rows: int
    k: int
    limit: int
    columns: int
    width: int
    methods: tuple[str, ...] = ("greedy",)
    has_filters: bool = False
    has_typical: bool = False
    rules: tuple[str, ...] = ()
    max_ngram: int = 0
    logprobs: int | None = None
    exact: bool = True
    adaptive: bool = False


class Shapes:
    """Makes the shapes of one decoder's rounds.

    Args:
        fixed: rounds are captured, so there must be few shapes.
        width: the longest text, if it is known.
    """

    def __init__(
        self,
        cache: KVCache,
        slots: Slots,
        passes: ExactPasses,
        *,
        fixed: bool,
        width: int | None,
        num_draft_tokens: int,
        max_batch_size: int,
    ) -> None:
        self._cache = cache
        self._slots = slots
        self._passes = passes
        self._fixed = fixed
        self._width = width
        self._num_draft_tokens = num_draft_tokens
        self._max_batch_size = max_batch_size

    def of(self, handles: Sequence[RequestHandle], rows: int, k: int) -> Shape:
        """Of a round of the first ``rows`` slots with up to k drafts."""
        longest = max(handle.longest for handle in handles)
        columns = self._columns(min(longest + k + 1, max(handle.most_keys() for handle in handles)))
        sampled = sorted({handle.method for handle in handles} - {"greedy"}) or ["greedy"]
        return Shape(
            rows=self._bucket(rows),
            k=k,
            limit=self._limit(max(handle.limit for handle in handles)),
            columns=columns,
            width=self._text_width(columns),
            methods=tuple(sampled),
            has_filters=any(handle.params.has_filters for handle in handles),
            has_typical=any(handle.params.has_filters and handle.params.typical_p < 1 for handle in handles),
            rules=tuple(sorted(set().union(*(handle.rules for handle in handles)))),
            max_ngram=max(handle.params.no_repeat_ngram_size for handle in handles),
            logprobs=max((n for handle in handles if (n := handle.params.logprobs) is not None), default=None),
            exact=self._passes.wanted(any(handle.depends_on_bits for handle in handles)),
            adaptive=any(handle.limit and not handle.fixed for handle in handles),
        )

    def greedy(self, max_k: int, *, adaptive: bool) -> Iterator[Shape]:
        """All shapes of rounds of greedy requests; none where they depend on how long the texts are."""
        if self._width is None:
            return
        columns = self._columns(self._width)
        for rows in {self._bucket(n) for n in range(1, self._max_batch_size + 1)}:
            for k in range(max_k + 1) if adaptive else [max_k]:
                yield Shape(
                    rows=rows,
                    k=k,
                    limit=max_k,
                    columns=columns,
                    width=self._text_width(columns),
                    exact=self._passes.wanted(True),
                    adaptive=adaptive and max_k > 0,
                )

    def _limit(self, most: int) -> int:
        """Of few values, where rounds are captured: requests may have limits of their own."""
        if not self._fixed or most == 0:
            return most
        return self._num_draft_tokens if most <= self._num_draft_tokens else MAX_DRAFT_TOKENS

    def _bucket(self, rows: int) -> int:
        """Rows of a round of ``rows`` requests; rounds are captured for powers of two, the rows above are inert."""
        if not self._fixed:
            return rows
        return min(1 << (rows - 1).bit_length(), self._max_batch_size)

    def _text_width(self, columns: int) -> int:
        return min(columns * self._cache.page_size, self._slots.texts.shape[1])

    def _columns(self, tokens: int) -> int:
        """Columns of the block table for texts of up to ``tokens`` tokens."""
        if self._fixed and self._width is not None:
            return self._cache.block_table.shape[1]  # one shape, and one graph, for all lengths
        return self._cache.columns(tokens)
