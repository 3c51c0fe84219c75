"""The engine over table models: tens of thousands of short texts at once, through the rounds that decode real ones.

The models are tables, everything else is the decoder's own: its loop, slots, rounds and reports, and the session of
``DraftModel``. What is known of the decoder's inside is in :func:`decode` and what it calls. Not collected; what is checked
with it is in ``statistics_checks.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from specdec_triton import SamplingParams, SpeculativeDecoder
from specdec_triton.adapter import ModelAdapter
from specdec_triton.drafters import Drafter, Drafts, DraftSession, Round, SessionOptions
from specdec_triton.drafters.base import nothing
from specdec_triton.drafters.draft_model import _Session as DraftModelSession
from specdec_triton.engine.loop import Loop
from specdec_triton.engine.round import COLUMNS
from specdec_triton.engine.shapes import Shape
from specdec_triton.head import Head
from specdec_triton.kv_cache import KVCache
from specdec_triton.logit_rules import bias_of
from specdec_triton.ops import PAD
from specdec_triton.testing import NAN, exact_probs

PAGE = 64  # longer than any text here
PROMPT = 2  # tokens: as many as a table looks at


@dataclass
class Table:
    """Logits of the next token, by the last tokens.

    Attributes:
        rows: ``[R,V]``. R = V * V: row ``a * V + b`` follows the tokens a, b; R <= V: row ``b % R`` follows b.
        prompt: the two tokens with which texts begin.
    """

    rows: torch.Tensor
    prompt: tuple[int, int] = (0, 0)

    @property
    def vocab(self) -> int:
        return self.rows.shape[1]

    @property
    def start(self) -> torch.Tensor:
        """The row after the prompt, int64 ``[1]``."""
        before, last = torch.tensor(self.prompt)[:, None]
        return self.row_after(before, last)

    def row_after(self, before: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """The row that follows the tokens ``before``, ``last``."""
        before, last = torch.broadcast_tensors(before, last)
        return last % len(self.rows) if len(self.rows) <= self.vocab else before * self.vocab + last

    def next_row(self, row: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        """The row that follows a token which followed ``row``."""
        return self.row_after(row % self.vocab, token)

    def probs(self, params: SamplingParams) -> torch.Tensor:
        """fp64 ``[R,V]``."""
        given = {name: getattr(params, name) for name in ("temperature", "top_k", "top_p", "min_p", "typical_p")}
        bias = bias_of(params, self.vocab)
        return torch.stack([exact_probs(row.float() + bias, **given) for row in self.rows])


def random_table(vocab: int, *, seed: int, spread: float = 1.0, near: Table | None = None, rows: int = 0) -> Table:
    """Normal logits, added to those of another table if one is given; ``rows`` 0: of the last two tokens."""
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(rows or vocab * vocab, vocab, generator=generator)
    return Table(logits if near is None else near.rows.float() + logits)


class TableModel(ModelAdapter):
    """A table in place of a model over paged KV: row b of a pass is slot b, whose tokens it remembers as a model its keys.

    A pass that begins at a wrong place so has another text before it.
    """

    head = None

    def __init__(self, table: Table, *, fixed_shapes: bool = False) -> None:
        self.table = table
        self.device = torch.device("cpu")
        self.dtype = table.rows.dtype
        self.vocab_size = table.vocab
        self.max_len = None
        self.stop_ids = frozenset()
        self.fixed_shapes = fixed_shapes
        if fixed_shapes and bool(table.rows.isfinite().all()):  # 0 times -inf would be NaN
            linear = torch.nn.Linear(*table.rows.shape, bias=False, dtype=self.dtype)
            linear.weight = torch.nn.Parameter(table.rows.t().contiguous())
            self.head = Head(linear, linear, (), None, None, table.vocab)

    def check_ready(self) -> None: ...

    def new_cache(self, *, slots: int, page_size: int, num_pages: int, growable: bool = False, max_tokens=None):
        # The last column is for what lies past a request's new tokens.
        self._memory = torch.zeros(slots, PAGE + 1, dtype=torch.int64)
        return KVCache(
            [], slots=slots, page_size=page_size, num_pages=0, growable=True, dtype=self.dtype, device=self.device
        )

    def forward(
        self,
        tokens,
        cache,
        block_table,
        context_lens,
        query_lens=None,
        *,
        rows=None,
        last_only=False,
        packed=False,
        taps=None,
        tree=None,
    ):
        """As :meth:`ModelAdapter.forward`, of chains; logits that nobody may read are NaN."""
        assert tree is None
        row, given = self._rows(tokens, context_lens, query_lens, last_only)
        return self.table.rows[row[given]] if packed else self.table.rows[row].masked_fill(~given[..., None], NAN)

    def hidden(
        self, tokens, cache, block_table, context_lens, query_lens=None, *, exact=False, last_only=False, taps=None
    ):
        """As :meth:`ModelAdapter.hidden`: a one for the table's row; NaN that nobody may read."""
        row, given = self._rows(tokens, context_lens, query_lens, last_only)
        ones = torch.nn.functional.one_hot(row, len(self.table.rows)).to(self.dtype)
        return ones.masked_fill(~given[..., None], NAN)

    def _rows(self, tokens, context_lens, query_lens, last_only):
        """Of each new token its row of the table, int64 ``[B,T]`` (``[B,1]`` with ``last_only``), and whether it is one."""
        batch, count = tokens.shape
        counts = context_lens.new_full((batch,), count) if query_lens is None else query_lens
        step = torch.arange(count)
        given = step < counts[:, None]
        place = torch.where(given, context_lens[:, None] + step, PAGE)
        memory = self._memory[:batch]
        memory.scatter_(1, place, tokens)
        row = self.table.row_after(memory.gather(1, (place - 1).clamp(min=0)), tokens)
        if last_only:
            last = (counts - 1).clamp(min=0).long()[:, None]
            row, given = row.gather(1, last), given.gather(1, last)
        return row, given


# Drafters.


@dataclass
class TableDrafter(Drafter):
    """``DraftModel`` with a table as its model."""

    table: Table

    def bind(self, target: ModelAdapter, options: SessionOptions) -> DraftSession:
        model = TableModel(self.table, fixed_shapes=target.fixed_shapes)
        cache = model.new_cache(slots=options.slots, page_size=options.page_size, num_pages=0)
        return DraftModelSession(model, cache, target.vocab_size, options)


@dataclass
class CertainDrafter(Drafter):
    """Drafts the likeliest tokens of a table, without probabilities, as a lookup does: q is one-hot."""

    table: Table

    def bind(self, target: ModelAdapter, options: SessionOptions) -> DraftSession:
        return _Certain(self.table)


class _Certain(DraftSession):
    def __init__(self, table: Table) -> None:
        self._table = table
        self._best = table.rows.argmax(-1)

    def propose(self, round_: Round) -> Drafts:
        if round_.k == 0:
            return nothing(round_.lens)
        ends = (round_.lens.long()[:, None] - torch.tensor([2, 1])).clamp(min=0)
        before, last = round_.texts.gather(1, ends).unbind(1)
        row, tokens = self._table.row_after(before, last), []
        for _ in range(round_.k):
            tokens.append(self._best[row])
            row = self._table.next_row(row, tokens[-1])
        return Drafts(torch.stack(tokens, 1), round_.limits.clone())


@dataclass
class Tampered(Drafter):
    """Another drafter, whose drafts ``change`` alters in place before the decoder sees them."""

    drafter: Drafter
    change: Callable[[Drafts], None]

    def bind(self, target: ModelAdapter, options: SessionOptions) -> DraftSession:
        session = self.drafter.bind(target, options)
        propose = session.propose

        def tampered(round_: Round) -> Drafts:
            drafts = propose(round_)
            if drafts.tokens.shape[1] > 0:
                self.change(drafts)
            return drafts

        session.propose = tampered
        return session


def ragged(drafts: Drafts) -> None:
    """Slot b drafts at most b mod 4 tokens. Not by the text: what is kept must not depend on what was drawn behind it."""
    drafts.lens = torch.minimum(drafts.lens, (torch.arange(len(drafts.lens)) % 4).int())


def with_foreign_ids(drafts: Drafts) -> None:
    """faults.md B8: slot b's draft number b mod 5, if there is one, is no token: -1, the first id past 8, or far out."""
    number = torch.arange(len(drafts.lens))
    hit = torch.arange(drafts.tokens.shape[1]) == (number % 5)[:, None]
    drafts.tokens[hit] = torch.tensor([PAD, 8, 1 << 40])[number % 3][:, None].expand_as(hit)[hit]


# Decoding.


class Request(NamedTuple):
    """A kind of request: parameters, and the method by which it is judged (greedy at temperature 0)."""

    method: str
    params: SamplingParams = SamplingParams()


@dataclass
class Texts:
    """What was written.

    Attributes:
        tokens: int64 ``[B,N]``, padded with -1 behind the end of a text.
        reasons: int64 ``[B]`` (``engine.slots``), 0 where the text could go on.
        drafted, accepted: int64 ``[B]`` of the first round.
        kinds: int64 ``[B]``, which of the kinds of requests a text is of.
    """

    tokens: torch.Tensor
    reasons: torch.Tensor
    drafted: torch.Tensor
    accepted: torch.Tensor
    kinds: torch.Tensor

    @property
    def fields(self) -> tuple[torch.Tensor, ...]:
        return self.tokens, self.reasons, self.drafted, self.accepted, self.kinds

    def of(self, rows: torch.Tensor) -> Texts:
        return Texts(*(x[rows] for x in self.fields))


@dataclass
class Setting:
    """What texts are decoded with.

    Attributes:
        requests: the kinds; slot b is of kind b mod their number. None: a slot at rest.
        length: tokens of each text that are looked at, N.
        k: the most drafts. device: fixed shapes, nothing read back, as on a GPU.
        rounds: after which decoding ends, if not before.
    """

    target: Table
    drafter: Drafter | None
    requests: Sequence[Request | None]
    length: int = 3
    k: int = 3
    device: bool = False
    backend: str | None = None
    rounds: int = PAGE


@torch.inference_mode()
def decode(setting: Setting, seeds: torch.Tensor, kinds: torch.Tensor | None = None) -> Texts:
    """One text for each seed int64 ``[B]``, all in one batch.

    Args:
        kinds: int64 ``[B]``; None: in turn.
    """
    rows, length = len(seeds), setting.length
    kinds = torch.arange(rows) % len(setting.requests) if kinds is None else kinds
    loop, shape = _started(setting, seeds, kinds)
    slots, block = loop._slots, torch.arange(shape.k + 1)
    written = torch.full((rows, PAGE), PAD)  # the last column is for what was not emitted
    lens, reasons = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64)
    first = None
    for _ in range(setting.rounds):
        loop.round(shape)
        report = loop.rounds.report(slice(rows), shape.k).clone()
        facts = dict(zip(COLUMNS, report[:, : len(COLUMNS)].unbind(1), strict=True))
        first = first or facts
        emitted = block < facts["count"][:, None]
        written.scatter_(1, torch.where(emitted, lens[:, None] + block, PAGE - 1), report[:, len(COLUMNS) :])
        lens += facts["count"]
        reasons += facts["reason"]  # but once it is 0
        if not bool((slots.live & (lens < length)).any()):
            break
    known = torch.arange(length) < lens[:, None]
    tokens, kept = (torch.where(known, x, PAD) for x in (written[:, :length], slots.texts[:, PROMPT : PROMPT + length]))
    assert torch.equal(tokens, kept), "what is reported is not what the slots hold"
    return Texts(tokens, reasons, first["drafted"], first["accepted"], kinds)


def _started(setting: Setting, seeds: torch.Tensor, kinds: torch.Tensor) -> tuple[Loop, Shape]:
    """A decoder's loop with a request in every slot, whose prompt has been processed, and the shape of its rounds."""
    decoder = SpeculativeDecoder(
        TableModel(setting.target, fixed_shapes=setting.device),
        setting.drafter,
        num_draft_tokens=setting.k,
        max_batch_size=len(seeds),
        page_size=PAGE,
        exact=False,
        adaptive=False,
        backend=setting.backend,
    )
    loop, slots = decoder._loop, decoder._loop._slots
    handles = []
    for slot, request in enumerate(setting.requests):
        if request is not None:
            decoder.method = request.method
            handles.append(decoder._request(setting.target.prompt, request.params))
            slots.enter(slot, handles[-1])
            slots.live[slot] = True
    for column in (*slots.columns.values(), slots.texts, slots.stop_ids, slots.counts, slots.bias):
        if column is not None:
            column.copy_(column[: len(setting.requests)][kinds])
    slots.seed.copy_(seeds)
    prompts = torch.tensor(setting.target.prompt).repeat(len(seeds), 1)
    loop.target.forward(prompts, loop.cache, loop.cache.block_table, torch.zeros(len(seeds), dtype=torch.int32))
    return loop, loop.shapes.of(handles, len(seeds), max(handle.limit for handle in handles))


def decode_many(setting: Setting, count: int, *, seed: int = 0, batch: int = 50_000) -> Texts:
    """``count`` texts with the seeds from ``seed`` on, in batches."""
    parts = [decode(setting, part) for part in torch.arange(seed, seed + count).split(batch)]
    return Texts(*(torch.cat(x) for x in zip(*(part.fields for part in parts), strict=True)))
