"""``accept_reject`` called alone, where the result is drawn; and the noise itself.

On PyTorch only; the kernels are shown to give the same integers (test_accept_reject_kernels.py). Whole texts, and all that a
decoder does with the op: test_statistics.py.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from specdec_triton import ops
from specdec_triton.reference.noise import Stream, gumbel, philox, uniform
from specdec_triton.testing import assert_follows, batch_of, exact_probs

ROWS = 50_000
PARAMS = {"plain": {}, "all": {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "min_p": 0.05}}


@pytest.mark.parametrize("gives_lse", [True, False], ids=["lse", "no-lse"])
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize("method", ["rejection", "block", "coupled"])
def test_every_position_follows_the_target(method, params, gives_lse):
    """Given that a position is reached, and after each token before it. A decoder always has draft_lse; others may not."""
    target = torch.randn(4, 8)
    draft = target[:3] + 0.7 * torch.randn(3, 8)
    batch = batch_of(ROWS, position=100, **params)
    drawn = []
    for j, row in enumerate(draft):
        at, node = (batch.after(j), None) if method == "coupled" else (batch, j)
        drawn.append(ops.sample(row.expand(ROWS, -1), params=at, node=node, return_lse=True))
    drafts, lse = (torch.stack(x, 1) for x in zip(*drawn, strict=True))
    rows, q = target.expand(ROWS, -1, -1), draft.expand(ROWS, -1, -1)
    given = {"draft_lse": lse} if gives_lse else {}
    result = ops.accept_reject(drafts, rows, q, params=batch, method=method, **given)
    for j, row in enumerate(target):
        reached, probs = result.num_accepted >= j, exact_probs(row, **params)
        assert_follows(result.tokens[reached, j], probs)
        for token in range(8) if j else ():
            if (chosen := reached & (result.tokens[:, j - 1] == token)).sum() >= 200:
                assert_follows(result.tokens[chosen, j], probs)


# Noise.


def test_philox_known_answers():
    """The vectors published with Random123 (Salmon et al. 2011)."""
    vectors = [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ]
    for counter, (low, high), want in vectors:
        seed = low | high << 32
        seed -= (seed >> 63) << 64
        out = philox(torch.tensor([seed]), *(torch.tensor([c]) for c in counter))
        assert tuple(int(x) for x in out) == want


def test_noise_is_keyed_by_seed_position_node_and_stream():
    """Any change of the key gives other numbers."""
    keys = list(itertools.product((0, 1, -1, 1 << 40), (0, 1, 1 << 20), (0, 1, 63), Stream))
    rows = [gumbel(*(torch.tensor(x) for x in key[:3]), key[3], 64) for key in keys]
    assert len({tuple(row.tolist()) for row in rows}) == len(keys)
    n = 1 << 20
    u = uniform(torch.arange(n), torch.zeros(n, dtype=torch.int64), torch.tensor(0), Stream.ACCEPT)
    assert abs(u.mean() - 0.5) < 0.002


def test_noise_of_different_streams_is_uncorrelated():
    n = 1 << 16
    seed, zero = torch.arange(n), torch.zeros(n, dtype=torch.int64)
    columns = [uniform(seed, zero, torch.tensor(node), stream) for stream in Stream for node in (0, 1)]
    correlation = torch.corrcoef(torch.stack(columns)) - torch.eye(len(columns))
    assert correlation.abs().max() < 6 / n**0.5
