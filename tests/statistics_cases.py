"""The settings of the statistics suite; ``test_mutations.py`` takes the smallest that will do."""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch
from statistics_engine import (
    CertainDrafter,
    Request,
    Setting,
    Table,
    TableDrafter,
    Tampered,
    ragged,
    random_table,
    with_foreign_ids,
)

from specdec_triton import SamplingParams
from specdec_triton.drafters import Drafter
from specdec_triton.testing import INF, NAN

LOSSLESS = ("rejection", "block", "coupled")
GREEDY = Request("greedy", SamplingParams(temperature=0))
EACH = (*map(Request, LOSSLESS), GREEDY, Request("rejection", SamplingParams(temperature=0.7)))

TARGET = random_table(4, seed=1)
# So far from the target that a wrong residual shows: where most drafts are right, it takes draws by the million.
DRAFT = random_table(4, seed=2, spread=1.5, near=TARGET)


def table(*rows: list[float]) -> Table:
    """Of probabilities, of which the first follows token 0."""
    return Table(torch.tensor(rows).log())


def changed(given: Table, change) -> Table:
    """A table with other rows."""
    return replace(given, rows=change(given.rows.clone()))


def masked(given: Table, *ids: int) -> Table:
    """Without some tokens."""
    return changed(given, lambda rows: rows.index_fill(1, torch.tensor(ids), -INF))


def chain(method: str, k: int, *, device: bool = False) -> Setting:
    """Drafts of another model; the bonus token of the first round is looked at up to K = 3."""
    return Setting(TARGET, TableDrafter(DRAFT), [Request(method)], length=max(3, min(k + 1, 4)), k=k, device=device)


RAGGED = Tampered(TableDrafter(DRAFT), ragged)


def mixed(drafter: Drafter = RAGGED, *, device: bool) -> Setting:
    """One batch of all methods: ragged drafts, requests that never draft, greedy ones, filters, a slot at rest."""
    plain = SamplingParams(num_draft_tokens=0)
    short = SamplingParams(temperature=1.3, top_k=3, num_draft_tokens=2, max_new_tokens=2)
    requests = [*map(Request, LOSSLESS), GREEDY, None, Request("rejection", plain), Request("block", short)]
    return Setting(TARGET, drafter, requests, device=device)


def stopping(method: str, *, device: bool = False) -> Setting:
    """faults.md D1, D3: stop tokens inside blocks that are mostly accepted, and texts that end there for their length."""
    draft = random_table(4, seed=3, spread=0.2, near=TARGET)
    ends = [{"stop_token_ids": [1]}, {"stop_token_ids": [0, 2]}, {"stop_token_ids": [3], "max_new_tokens": 3}, {}]
    requests = [Request(method, SamplingParams(**end)) for end in ends]
    return Setting(TARGET, TableDrafter(draft), requests, length=4, k=4, device=device)


GRID = [
    SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m)
    for t, k, p, m in itertools.product((0.5, 1.0, 2.0), (0, 3), (1.0, 0.8), (0.0, 0.2))
]
GRID += [SamplingParams(temperature=t, top_k=k, typical_p=0.6) for t, k in itertools.product((0.5, 1.0, 2.0), (0, 4))]
GRID += [SamplingParams(temperature=t, logit_bias={0: 2.0, 3: -INF, 5: -0.7}, top_k=4) for t in (0.5, 1.0)]  # H4


def grid(method: str, params: list[SamplingParams] = GRID) -> Setting:
    """faults.md B1, B3: temperature and every filter on both sides."""
    target = random_table(6, seed=4, rows=6)
    draft = random_table(6, seed=5, rows=6, near=target)
    return Setting(target, TableDrafter(draft), [Request(method, each) for each in params], length=2, k=2)


SIX = random_table(6, seed=6, rows=6)
SIX_DRAFT = random_table(6, seed=7, rows=6, near=SIX)
EVEN, ODD = (0, 2, 4), (1, 3, 5)
EIGHT = random_table(8, seed=8, rows=8)
ADVERSARIES = {
    "equal": (SIX, TableDrafter(SIX)),  # faults.md B18
    "minus-the-target": (SIX, TableDrafter(changed(SIX, torch.neg))),
    "disjoint": (masked(SIX, *ODD), TableDrafter(masked(SIX, *EVEN))),  # faults.md B5
    "uniform": (SIX, TableDrafter(changed(SIX, torch.zeros_like))),
    "certain": (SIX, CertainDrafter(SIX_DRAFT)),  # faults.md B16
    "certain-of-the-worst": (SIX, CertainDrafter(changed(SIX, torch.neg))),
    "certain-of-the-impossible": (masked(SIX, *ODD), CertainDrafter(masked(SIX, *EVEN))),
    "impossible-for-the-draft": (SIX, TableDrafter(masked(SIX_DRAFT, 0, 3))),  # faults.md B9
    "impossible-for-the-target": (masked(SIX, 1, 4), TableDrafter(SIX_DRAFT)),
    "nearly-certain": (changed(SIX, lambda rows: 8 * rows), TableDrafter(changed(SIX_DRAFT, lambda rows: 8 * rows))),
    # faults.md B2
    "half-precision": (changed(SIX, torch.Tensor.bfloat16), TableDrafter(changed(SIX_DRAFT, torch.Tensor.bfloat16))),
    "not-a-number": (SIX, TableDrafter(changed(SIX_DRAFT, lambda rows: rows.index_fill(0, torch.tensor([2, 5]), NAN)))),
    "foreign-ids": (EIGHT, Tampered(TableDrafter(random_table(8, seed=9, near=EIGHT, rows=8)), with_foreign_ids)),
    "ragged": (SIX, Tampered(TableDrafter(SIX_DRAFT), ragged)),
}


def adversary(name: str, *, device: bool = False) -> Setting:
    target, drafter = ADVERSARIES[name]
    return Setting(target, drafter, EACH, length=3 if target.vocab < 8 else 2, device=device)


def tied() -> Setting:
    """faults.md A2: greedy texts over ties, which the drafter breaks otherwise."""
    target = table([1, 4, 4, 1, 4], [3, 3, 3, 3, 3], [1, 1, 1, 1, 5])
    return Setting(target, TableDrafter(table([1, 1, 5, 1, 1], [1, 2, 2, 2, 2])), [GREEDY])


def lying() -> Setting:
    """Drafts that the drafter itself says it cannot have drawn, likely ones for the target."""

    def lie(drafts):
        drafts.tokens.fill_(0)

    requests = [Request("rejection"), Request("block")]
    return Setting(TARGET, Tampered(TableDrafter(masked(DRAFT, 0)), lie), requests)


PUBLISHED = {
    "streams": (
        table([0.1, 0.6, 0.3]),
        table([0.3, 0.4, 0.3]),
    ),  # faults.md B6: shared noise gave 63% for a token of 60%
    "argmax": (table([0.6, 0.4]), table([0.5, 0.5])),  # faults.md B4
    "block": (table([1 / 3, 2 / 3]), table([2 / 3, 1 / 3])),  # Sun et al. 2024
    "third": (table([0.2, 0.5, 0.3]), table([0.6, 0.3, 0.1])),
}


def published(name: str) -> Setting:
    target, draft = PUBLISHED[name]
    return Setting(target, TableDrafter(draft), [*map(Request, LOSSLESS)])


EDGES = (0, 1, 2, 3, 4, 30, 31, 32, 4094, 4095, 4096, 8191, 8192)  # of lanes, groups and blocks


def edge_bins(vocab: int) -> torch.Tensor:
    """Bins of ids, int64 ``[V]``: one for each id at an edge, and one for all others."""
    edges = torch.tensor(sorted({*(x for x in EDGES if x < vocab), vocab - 1}))
    bins = torch.full((vocab,), len(edges))
    bins[edges] = torch.arange(len(edges))
    return bins


def wide(vocab: int, *, full: bool = False) -> Setting:
    """Most of the mass on ids at the edges of what kernels split vocabularies into; the others are masked, or if ``full``
    unlikely."""
    bins = edge_bins(vocab)
    edges = bins < bins.max()
    generator = torch.Generator().manual_seed(vocab)
    rows = torch.full((2, 1, vocab), -8.0 if full else -INF)
    rows[..., edges] = torch.randn(2, 1, int(edges.sum()), generator=generator)
    rows[..., vocab // 2] = 0.0
    target, draft = map(Table, rows)
    return Setting(target, TableDrafter(draft), [*map(Request, LOSSLESS)], length=2, k=2)
