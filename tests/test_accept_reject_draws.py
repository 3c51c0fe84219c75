"""``accept_reject``, where the result is drawn: goodness of fit with the target's distribution, and the noise itself.

On PyTorch only; the kernels are shown to give the same integers (test_accept_reject.py).
"""

from __future__ import annotations

import itertools

import pytest
import torch

from specdec_triton import ops
from specdec_triton.reference.noise import Stream, gumbel, philox, uniform
from specdec_triton.testing import assert_follows, batch_of, exact_probs

LOSSLESS = ("rejection", "block", "coupled")
ROWS = 20000
GRID = {
    f"T{t}-k{k}-p{p}-m{m}": {"temperature": t, "top_k": k, "top_p": p, "min_p": m}
    for (t, (k, p, m)) in itertools.product(
        (0.5, 1.0, 2.0), ((0, 1.0, 0.0), (3, 1.0, 0.0), (0, 0.8, 0.0), (0, 1.0, 0.2), (5, 0.9, 0.05))
    )
}


def chains(method, target, draft, params, rows=ROWS, certain=None):
    """Drafts drawn as a drafter draws them, then judged: target ``[K+1,V]``, draft ``[K,V]``."""
    k, vocab = draft.shape
    q = draft.expand(rows, k, vocab).contiguous()
    batch = batch_of(rows, position=100, **params)
    if certain is not None:
        drafts, q = torch.tensor(certain).expand(rows, k), None
    elif method == "coupled":
        at = [batch_of(rows, position=100 + j, **params) for j in range(k)]
        drafts = torch.stack([ops.sample(q[:, j], params=at[j]) for j in range(k)], 1)
    else:
        drafts = torch.stack([ops.sample(q[:, j], params=batch, node=j) for j in range(k)], 1)
    logits = target.expand(rows, k + 1, vocab).contiguous()
    return drafts, ops.accept_reject(drafts, logits, q, params=batch, method=method)


def assert_positions_follow(result, target, params):
    """At each position, given that it is reached, the token follows the target, and so it does after each previous
    token (noise shared between streams or positions would show there: faults.md B6, B7)."""
    for j in range(result.tokens.shape[1]):
        reached = result.num_accepted >= j
        probs = exact_probs(target[j], **params)
        assert_follows(result.tokens[reached, j], probs)
        if j:
            previous = result.tokens[:, j - 1]
            for token in range(target.shape[1]):
                if (chosen := reached & (previous == token)).sum() >= 200:
                    assert_follows(result.tokens[chosen, j], probs)


@pytest.mark.parametrize("method", LOSSLESS)
@pytest.mark.parametrize("params", GRID.values(), ids=GRID)
def test_distribution(params, method):
    """faults.md B1, B2, B3: every position follows the target, whatever the parameters."""
    generator = torch.Generator().manual_seed(len(str(params)))
    target = torch.randn(4, 8, generator=generator).bfloat16().float()
    draft = target[:3] + 0.7 * torch.randn(3, 8, generator=generator)
    _, result = chains(method, target, draft, params)
    assert_positions_follow(result, target, params)


@pytest.mark.parametrize("method", LOSSLESS)
def test_distribution_of_half_precision_logits(method):
    """faults.md B2, B13: bf16 logits, fp32 arithmetic."""
    target, draft = torch.randn(3, 8).bfloat16(), torch.randn(2, 8).bfloat16()
    _, result = chains(method, target, draft, {"temperature": 0.9})
    assert_positions_follow(result, target.float(), {"temperature": 0.9})


@pytest.mark.parametrize("method", LOSSLESS)
def test_distribution_with_certain_drafts(method):
    """faults.md B16: p = [.7, .3], draft id 1: accepted with probability .3, and never drawn after its rejection."""
    p = torch.tensor([0.7, 0.3]).log().expand(3, 2)
    _, result = chains(method, p, p[:2], {}, rows=100_000, certain=[1, 0])
    assert_positions_follow(result, p, {})
    rejected = result.num_accepted == 0
    assert set(result.tokens[rejected, 0].tolist()) == {0}
    assert abs((~rejected).double().mean() - 0.3) < 0.005


@pytest.mark.parametrize("method", LOSSLESS)
def test_streams_are_disjoint(method):
    """faults.md B6: the case in which shared noise gave 63% for a token of 60%, with 131,072 draws."""
    p = torch.tensor([0.1, 0.6, 0.3]).log().expand(4, 3)
    q = torch.tensor([0.3, 0.4, 0.3]).log().expand(3, 3)
    _, result = chains(method, p, q, {}, rows=1 << 17)
    assert_positions_follow(result, p, {})


def test_acceptance_probability():
    """faults.md B4, B5: sum of min(p, q), within 3 sigma. anchors.md F: draft [.6, .3, .1], target [.2, .5, .3]: id 0
    is accepted 1/3 of the time, the residual is [0, .5, .5]."""
    q, p = torch.tensor([[0.6, 0.3, 0.1]]).log(), torch.tensor([[0.2, 0.5, 0.3]]).log().expand(2, 3)
    rows = 100_000
    drafts, result = chains("rejection", p, q, {}, rows=rows)
    accepted = result.num_accepted == 1
    expected = 0.2 + 0.3 + 0.1
    assert abs(accepted.double().mean() - expected) < 3 * (expected * (1 - expected) / rows) ** 0.5
    first = drafts[:, 0] == 0
    assert abs(accepted[first].double().mean() - 1 / 3) < 3 * (2 / 9 / first.sum()) ** 0.5
    assert_follows(result.tokens[~accepted, 0], torch.tensor([0.0, 0.5, 0.5]))


@pytest.mark.parametrize("method", ["rejection", "block"])
def test_joint_distribution_of_a_round(method):
    """Two drafts of a Markov chain judged against another: what the round emits, continued by later rounds to three tokens,
    has the target's distribution over all sequences (exact enumeration)."""
    vocab, rows = 3, 100_000
    generator = torch.Generator().manual_seed(3)
    p, q = torch.randn(2, vocab + 1, vocab, generator=generator)  # logits after each token; last: at the beginning
    params = batch_of(rows, position=7)
    drafts = torch.full((rows, 3), vocab)
    for j in range(2):
        drafts[:, j] = ops.sample(q[drafts[:, j - 1]], params=params, node=j)
    before = torch.cat([torch.full((rows, 1), vocab), drafts[:, :2]], 1)
    result = ops.accept_reject(drafts[:, :2], p[before], q[before[:, :2]], params=params, method=method)
    tokens = result.tokens.clone()
    nothing = torch.empty(rows, 0, dtype=torch.int64)
    for j in (1, 2):
        later = batch_of(rows, position=7 + j)
        following = ops.accept_reject(nothing, p[tokens[:, j - 1]][:, None], params=later, method=method)
        tokens[:, j] = torch.where(result.num_accepted < j, following.tokens[:, 0], tokens[:, j])
    after = torch.stack([exact_probs(row) for row in p])
    exact = after[vocab][:, None, None] * after[:vocab, :, None] * after[None, :vocab]
    assert_follows((tokens[:, 0] * vocab + tokens[:, 1]) * vocab + tokens[:, 2], exact.flatten())


def test_block_verification_accepts_more():
    """The example of Sun et al. 2024: target (1/3, 2/3), draft (2/3, 1/3), two drafts: 10/9 accepted token by token, 11/9 as a
    block."""
    p, q = torch.tensor([1.0, 2.0]).log().expand(3, 2), torch.tensor([2.0, 1.0]).log().expand(2, 2)
    for method, expected in (("rejection", 10 / 9), ("block", 11 / 9)):
        accepted = chains(method, p, q, {}, rows=100_000)[1].num_accepted.double()
        assert abs(accepted.mean() - expected) < 4 * accepted.std() / len(accepted) ** 0.5


def test_block_verification_never_accepts_fewer():
    """On random pairs of distributions, within four standard deviations of the difference."""
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        p = 1.5 * torch.randn(5, 6, generator=generator)
        q = p[:4] + torch.randn(4, 6, generator=generator)
        token, block = (chains(m, p, q, {"temperature": 0.8})[1].num_accepted.double() for m in ("rejection", "block"))
        assert block.mean() - token.mean() > -4 * ((token.var() + block.var()) / len(token)) ** 0.5


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
    """Any change of the key gives other numbers; u lies in the open interval (0, 1) (faults.md B10)."""
    keys = list(itertools.product((0, 1, -1, 1 << 40), (0, 1, 1 << 20), (0, 1, 63), Stream))
    rows = [gumbel(*(torch.tensor(x) for x in key[:3]), key[3], 64) for key in keys]
    assert len({tuple(row.tolist()) for row in rows}) == len(keys)
    n = 1 << 20
    u = uniform(torch.arange(n), torch.zeros(n, dtype=torch.int64), torch.tensor(0), Stream.ACCEPT)
    assert u.min() > 0
    assert u.max() < 1
    assert abs(u.mean() - 0.5) < 0.002


def test_noise_of_different_streams_is_uncorrelated():
    n = 1 << 16
    seed, zero = torch.arange(n), torch.zeros(n, dtype=torch.int64)
    columns = [uniform(seed, zero, torch.tensor(node), stream) for stream in Stream for node in (0, 1)]
    correlation = torch.corrcoef(torch.stack(columns)) - torch.eye(len(columns))
    assert correlation.abs().max() < 6 / n**0.5
