"""``head_stats``: of each row of the head's logits, over parts of the vocabulary, what a decision needs.

Also the logits themselves, as transformers' modules compute them, for ``verify_head`` and ``sample_head``.
"""

from __future__ import annotations

import torch

from specdec_triton.kernels._config import head_part
from specdec_triton.reference.logits import NEG_INF, over_temperature
from specdec_triton.reference.noise import Stream, gumbel, two_sum


def head_logits(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scale: float | None, softcap: float | None
) -> torch.Tensor:
    """``[...,V]`` in hidden's dtype, rounded to it after every step."""
    return finished(torch.nn.functional.linear(hidden, weight, bias), scale, softcap)


def finished(product: torch.Tensor, scale: float | None, softcap: float | None) -> torch.Tensor:
    """The logits that a head makes of its product, each step rounded as transformers' models do."""
    if scale is not None:
        product = product * scale
    return product if softcap is None else torch.tanh(product / softcap) * softcap


def head_stats(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float | None,
    softcap: float | None,
    draft_tokens: torch.Tensor,
    draft_lens: torch.Tensor | None,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    first_id: int,
    vocab: int,
    method: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """stats ``[B,T,C,3]``, best ``[B,T,C,2]``, best_id ``[B,T,C]``; see ``specdec_triton.ops.HeadStats``."""
    if method == "greedy":
        temperature = torch.zeros_like(temperature)
    logits = head_logits(hidden, weight, bias, scale, softcap)
    batch, rows, columns = logits.shape
    s = over_temperature(logits.flatten(0, 1), temperature.repeat_interleave(rows)).view(logits.shape)
    bad = s.isnan() | (s == float("inf"))
    s = s.masked_fill(s.isnan(), NEG_INF)
    step = torch.arange(rows, device=hidden.device)
    lens = torch.full_like(position, rows - 1) if draft_lens is None else draft_lens
    drafts = torch.nn.functional.pad(draft_tokens, (0, 1), value=-1)
    draws = (temperature > 0)[:, None]
    judges = method in ("rejection", "block")
    drafted = (drafts >= 0) & (drafts < vocab) & (step < lens[:, None]) & draws & judges
    ids = torch.arange(first_id, first_id + columns, device=hidden.device)
    is_draft = drafted[..., None] & (ids == drafts[..., None])

    # A drafted row is followed by another token than its draft, if that is rejected; every other row by any.
    noise = torch.zeros_like(s)
    raced = s
    if method != "greedy":
        coupled = method == "coupled"
        for t in range(rows):
            stream = torch.where(drafted[:, t], int(Stream.RECOVERED), int(Stream.BONUS))
            node = torch.full_like(position, 0 if coupled else t)
            at = position + t if coupled else position
            drawn = gumbel(seed, at, node, Stream.COUPLED if coupled else stream, columns, first_id)
            noise[:, t] = drawn.where(draws, 0.0)
        raced = s.masked_fill(is_draft, NEG_INF)

    part = head_part(columns)
    count = -(-columns // part)

    def parts(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(x, (0, count * part - columns), value=NEG_INF).view(batch, rows, count, part)

    high, low = two_sum(
        parts(raced), torch.nn.functional.pad(noise, (0, count * part - columns)).view(batch, rows, count, part)
    )
    best = high.amax(-1)
    low = low.masked_fill(high != best[..., None], NEG_INF)
    best_low = low.amax(-1)
    best_id = (
        first_id + torch.arange(count, device=hidden.device) * part + (low == best_low[..., None]).int().argmax(-1)
    )
    highest = parts(s).amax(-1)
    total = (parts(s) - highest.where(highest > NEG_INF, 0.0)[..., None]).exp().sum(-1)
    found = parts(bad.float()).amax(-1) > 0
    stats = [highest.masked_fill(found, float("inf")), total, parts(s.masked_fill(~is_draft, NEG_INF)).amax(-1)]
    return torch.stack(stats, -1), torch.stack([best, best_low], -1), best_id.int()
