"""Counter-based noise: every random number is a pure function of a key and a counter (Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3", 2011; Philox-4x32-10, the generator that Triton has built in).

Key: the request's seed. Counter: (token id // 4 or 0, position, node, stream); the lane is token id % 4. Nothing
depends on the batch row, so a request's noise is the same wherever it is decoded. One stream per purpose: noise that
drafted a token never decides on it, nor replaces it (faults.md B6, B7).
"""

from __future__ import annotations

from enum import IntEnum

import torch

from specdec_triton.reference.logits import NEG_INF, best_of

_MASK = 0xFFFFFFFF
_LARGEST_BELOW_ONE = 1.0 - 2.0**-24


class Stream(IntEnum):
    COUPLED = 0  # keyed by absolute position alone; node is 0
    DRAFT = 1
    ACCEPT = 2
    RECOVERED = 3
    BONUS = 4


def philox(
    seed: torch.Tensor, c0: torch.Tensor, c1: torch.Tensor, c2: torch.Tensor, c3: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Philox-4x32-10 on int64 tensors that hold 32-bit words (seed: all 64 bits). Returns four such tensors."""
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(10):
        # Low 64 bits of the products are exact in wrapping int64 arithmetic; the mask undoes the sign.
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = ((b >> 32) & _MASK) ^ c1 ^ k0, b & _MASK, ((a >> 32) & _MASK) ^ c3 ^ k1, a & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return c0, c1, c2, c3


def to_uniform(bits: torch.Tensor) -> torch.Tensor:
    """32-bit words to fp32 in the open interval (0, 1), with full floating-point resolution near 0."""
    return (bits.to(torch.float32) * 2.0**-32 + 2.0**-33).clamp(max=_LARGEST_BELOW_ONE)


def uniform(seed: torch.Tensor, position: torch.Tensor, node: torch.Tensor, stream: Stream) -> torch.Tensor:
    """One uniform number for each element of the broadcast of ``seed``, ``position`` and ``node`` (int64)."""
    seed, position, node = torch.broadcast_tensors(seed, position, node)
    zero = torch.zeros_like(position)
    return to_uniform(philox(seed, zero, position & _MASK, node, zero + int(stream))[0])


def gumbel(
    seed: torch.Tensor,
    position: torch.Tensor,
    node: torch.Tensor,
    stream: Stream | torch.Tensor,
    vocab: int,
    first: int = 0,
) -> torch.Tensor:
    """Standard Gumbel noise, fp32 ``[..., vocab]``, one row for each element of the (equal-shaped) int64 arguments.

    It is that of the tokens ``first`` (a multiple of 4) .. first + vocab - 1.

    A Gumbel number is -log of an exponential one; the exponential comes from -log1p(-u), whose winners lie near u = 0
    where u is finely resolved.
    """
    groups = torch.arange(first // 4, (first + vocab + 3) // 4, device=seed.device)
    of_stream = torch.zeros_like(seed) + stream
    keys = (x[..., None] for x in (seed, position & _MASK, node, of_stream))
    seed, position, node, of_stream, groups = torch.broadcast_tensors(*keys, groups)
    words = philox(seed, groups, position, node, of_stream)
    return _to_gumbel(torch.stack(words, dim=-1).flatten(-2)[..., :vocab])


def gumbel_of(
    seed: torch.Tensor, position: torch.Tensor, node: torch.Tensor, stream: torch.Tensor, token: torch.Tensor
) -> torch.Tensor:
    """The same numbers for single token ids ``[N]``; the other arguments are ``[N]`` too."""
    words = philox(seed, token // 4, position & _MASK, node, stream)
    return _to_gumbel(torch.stack(words, dim=-1).gather(-1, token[:, None] % 4)[:, 0])


def race(
    logits: torch.Tensor, seed: torch.Tensor, position: torch.Tensor, node: torch.Tensor, stream: Stream | torch.Tensor
) -> torch.Tensor:
    """argmax(logits + noise) ``[B]`` of ``logits [B,V]``, the lowest id of equal ones; the other arguments are ``[B]``.

    The sums are compared exactly: who wins depends on nothing but these numbers.
    """
    stream = torch.zeros_like(seed) + stream
    if logits.device.type == "cpu":  # the numbers of filtered tokens need not be known
        row, token = (logits > NEG_INF).nonzero(as_tuple=True)
        if 8 * len(row) < logits.numel():
            noise = torch.zeros_like(logits)
            noise[row, token] = gumbel_of(seed[row], position[row], node[row], stream[row], token)
            return largest_sum(logits, noise)
    return largest_sum(logits, gumbel(seed, position, node, stream, logits.shape[-1]))


def largest_sum(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """argmax(a + b) over the last axis, exactly; the lowest id of equal ones."""
    high = a + b
    best, ids = best_of(high)
    ties = high == best[..., None]
    if a.device.type == "cpu" and int(ties.sum()) <= best.numel():
        return ids
    return best_of(two_sum(a, b)[1].masked_fill(~ties, NEG_INF))[1]


def two_sum(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """a + b, exactly: the rounded sum, and what rounding took (Knuth's TwoSum); 0 where the sum is not finite."""
    high = a + b
    part = high - a
    low = (a - (high - part)) + (b - part)
    return high, low.where(high.isfinite(), 0.0)


def _to_gumbel(bits: torch.Tensor) -> torch.Tensor:
    return -torch.log(-torch.log1p(-to_uniform(bits)))
