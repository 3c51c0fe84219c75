"""``ngram_propose``: equal means equal integers, against a search written straight from the rule."""

from __future__ import annotations

import random

import pytest
import torch

from specdec_triton import ops
from specdec_triton.testing import GARBAGE

OP = "ngram_propose"


def search(text, k, low, high):
    """The longest tail that occurs earlier; of its occurrences the most recent; what followed it."""
    for n in range(high, low - 1, -1):
        tail = text[len(text) - n :]
        if len(tail) < n:
            continue
        for end in range(len(text) - 1, n - 1, -1):  # the occurrence ends before index ``end``
            if text[end - n : end] == tail:
                return text[end : end + k]
    return []


# text, k, min_ngram, max_ngram, what is proposed
CASES = {
    "most-recent": ([5, 6, 7, 5, 6, 8, 5, 6], 3, 1, 3, [8, 5, 6]),  # faults.md J4
    "longest-before-most-recent": ([1, 2, 3, 9, 2, 3, 8, 1, 2, 3], 2, 1, 3, [9, 2]),
    "longest-is-limited": ([1, 2, 3, 9, 2, 3, 8, 1, 2, 3], 2, 1, 2, [8, 1]),
    "min-2-finds-nothing": ([1, 2, 3, 2], 2, 2, 3, []),
    "min-1-finds": ([1, 2, 3, 2], 2, 1, 3, [3, 2]),
    "one-token": ([1], 4, 1, 3, []),  # faults.md J3
    "two-equal": ([1, 1], 4, 1, 3, [1]),
    "no-repeat": ([1, 2, 3, 4], 4, 1, 3, []),
    "overlapping": ([7, 7, 7, 7], 4, 1, 3, [7]),
    "cut-at-the-end": ([1, 2, 3, 1], 5, 1, 3, [2, 3, 1]),
    "k-0": ([1, 1, 1], 0, 1, 3, []),
    "k-1": ([4, 5, 4], 1, 1, 3, [5]),
    "zeros-are-tokens": ([0, 3, 0], 2, 1, 3, [3, 0]),
    "tail-longer-than-text": ([2, 2], 2, 2, 5, []),
    "empty": ([], 3, 1, 3, []),
}


@pytest.mark.parametrize(("text", "k", "low", "high", "want"), CASES.values(), ids=CASES)
def test_by_hand(text, k, low, high, want, backend):
    assert search(text, k, low, high) == want
    tokens = torch.tensor([[*text, 1, 2, 3]])
    drafts, lens = ops.ngram_propose(tokens, torch.tensor([len(text)]), k, low, high, backend=backend)
    assert drafts.tolist() == [want + [-1] * (k - len(want))]
    assert lens.tolist() == [len(want)]
    assert (drafts.dtype, lens.dtype) == (torch.int64, torch.int32)


@pytest.mark.parametrize("vocab", [2, 5, 40])
def test_matches_the_search(vocab, backend):
    """Random ragged batches; what lies past a text is garbage that nobody reads."""
    rng = random.Random(vocab)
    for trial in range(60 if backend == "torch" else 5):
        k, low = rng.randint(0, 8), rng.randint(1, 3)
        high = low + rng.randint(0, 3)
        texts = [[rng.randrange(vocab) for _ in range(rng.randint(0, 40))] for _ in range(rng.randint(1, 6))]
        width = max(map(len, texts)) + rng.randint(0, 4)
        padded = [
            text + [GARBAGE[i % 4] if trial % 2 else text[-1] if text else 0 for i in range(width - len(text))]
            for text in texts
        ]
        lens = torch.tensor([len(text) for text in texts], dtype=torch.int32)
        drafts, found = ops.ngram_propose(
            torch.tensor(padded).view(len(texts), width), lens, k, low, high, backend=backend
        )
        for text, draft, n in zip(texts, drafts.tolist(), found.tolist(), strict=True):
            want = search(text, k, low, high)
            assert draft == want + [-1] * (k - len(want)), (text, k, low, high)
            assert n == len(want)


def test_rows_do_not_know_each_other(backend):
    texts = torch.randint(0, 4, (6, 30))
    lens = torch.tensor([30, 3, 17, 0, 29, 8])
    together = ops.ngram_propose(texts, lens, 4, backend=backend)
    order = torch.tensor([4, 2, 0, 5, 3, 1])
    for got, want in zip(ops.ngram_propose(texts[order], lens[order], 4, backend=backend), together, strict=True):
        assert torch.equal(got, want[order])


def test_strided_and_int32_tokens(backend):
    texts, lens = torch.randint(0, 4, (3, 40)), torch.tensor([20, 11, 5])
    view = texts[:, ::2]
    want = ops.ngram_propose(view.contiguous(), lens, 4, backend=backend)[0]
    assert torch.equal(ops.ngram_propose(view, lens, 4, backend=backend)[0], want)
    assert torch.equal(ops.ngram_propose(view.int(), lens.long(), 4, backend=backend)[0], want)


def test_no_requests_and_no_capacity(backend):
    for shape in ((0, 5), (2, 0)):
        drafts, lens = ops.ngram_propose(
            torch.zeros(shape, dtype=torch.int64), torch.zeros(shape[0], dtype=torch.int32), 3, backend=backend
        )
        assert drafts.tolist() == [[-1] * 3] * shape[0]
        assert lens.tolist() == [0] * shape[0]


BAD = {
    "tokens-rank": ("tokens", {"tokens": torch.zeros(5, dtype=torch.int64)}),
    "tokens-float": ("tokens", {"tokens": torch.zeros(2, 5)}),
    "lens-shape": ("lens", {"lens": torch.tensor([5])}),
    "lens-negative": ("lens", {"lens": torch.tensor([5, -1])}),
    "lens-above-L": ("lens", {"lens": torch.tensor([6, 1])}),
    "lens-float": ("lens", {"lens": torch.tensor([5.0, 1.0])}),
    "lens-device": ("lens", {"lens": torch.zeros(2, dtype=torch.int32, device="meta")}),
    "k-negative": ("k", {"k": -1}),
    "k-64": ("k", {"k": 64}),
    "k-float": ("k", {"k": 2.0}),
    "min-0": ("min_ngram", {"min_ngram": 0}),
    "max-below-min": ("max_ngram", {"min_ngram": 3, "max_ngram": 2}),
    "backend": ("backend", {"backend": "cuda"}),
}


@pytest.mark.parametrize(("named", "changes"), BAD.values(), ids=BAD)
def test_refuses(named, changes):
    args = {"tokens": torch.zeros(2, 5, dtype=torch.int64), "lens": torch.tensor([5, 1]), "k": 3}
    with pytest.raises(ValueError, match=f"^{named} must be"):
        ops.ngram_propose(**{**args, **changes})


def test_opcheck():
    args = (torch.randint(0, 4, (3, 20)), torch.tensor([20, 5, 0], dtype=torch.int32), 4, 1, 3, "torch")
    torch.library.opcheck(torch.ops.specdec.ngram_propose.default, args)


def test_shapes_on_meta():
    tokens, lens = torch.zeros(2, 9, dtype=torch.int64, device="meta"), torch.zeros(2, dtype=torch.int32, device="meta")
    drafts, found = ops.ngram_propose(tokens, lens, 4)
    assert (drafts.shape, found.shape, found.dtype) == ((2, 4), (2,), torch.int32)


def test_max_ngram_beyond_the_text_costs_nothing():
    tokens, lens = ops.ngram_propose(torch.tensor([[1, 2, 1]]), torch.tensor([3]), 2, 1, 10**9)
    assert (tokens.tolist(), lens.tolist()) == ([[2, 1]], [2])
