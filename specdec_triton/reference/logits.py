"""What the sampling parameters do to a row of logits; shared by ``sample`` and ``accept_reject``.

Order: temperature, top-k, top-p, min-p, typical-p, each on what the one before it left, as transformers does; ties at a
boundary are all kept. The same function serves draft rows, so that q is exactly the distribution the draft was drawn from.
"""

from __future__ import annotations

import torch

MIN_TEMPERATURE = 1e-5  # smaller positive temperatures count as this one: x / T stays finite
NEG_INF = float("-inf")
_PREFIX = 1024  # of a sorted row, on the CPU: it nearly always decides, and sorting the whole row costs milliseconds


def scaled_logits(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    typical_p: torch.Tensor | None = None,
    has_filters: bool | None = None,
) -> torch.Tensor:
    """Logits over the temperature, fp32 ``[R,V]``, -inf where filtered out: log-probabilities but for a constant a row.

    Args:
        logits: ``[R,V]``, any floating dtype; -inf masks a token.
        temperature, top_k, top_p, min_p, typical_p (None: off): ``[R]``. Rows with temperature 0 come back as if it were 1, unfiltered.
    """
    greedy = temperature <= 0
    scaled = over_temperature(logits, temperature)
    if has_filters is None:
        least = typical_p is not None or logits.device.type != "cpu"
        has_filters = least or bool(((top_k > 0) | (top_p < 1) | (min_p > 0)).any())
    if has_filters:
        scaled = _filter(
            scaled,
            torch.where(greedy, 0, top_k),
            torch.where(greedy, 1.0, top_p),
            torch.where(greedy, 0.0, min_p),
        )
        if typical_p is not None:
            scaled = _keep_typical(scaled, torch.where(greedy, 1.0, typical_p))
    return scaled


def _filter(scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    if scaled.device.type == "cpu" and scaled.shape[-1] > 4 * _PREFIX:
        lowest, decided = _lowest_kept(scaled.topk(_PREFIX).values, scaled, top_k, top_p, min_p)
        if bool(decided.all()):
            return scaled.masked_fill(scaled < lowest, NEG_INF)
    lowest, _ = _lowest_kept(scaled.sort(-1, descending=True).values, scaled, top_k, top_p, min_p)
    return scaled.masked_fill(scaled < lowest, NEG_INF)


def _lowest_kept(
    ordered: torch.Tensor, scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest value kept ``[R,1]``, from the rows' largest values in order, and whether those were enough to know it."""
    vocab, known = scaled.shape[-1], ordered.shape[-1]
    # top-k: nothing below the k-th largest.
    limited = (top_k > 0) & (top_k < vocab)
    k = torch.where(limited, top_k, known).clamp(max=known).long()
    lowest = torch.where(limited[:, None], ordered.gather(-1, k[:, None] - 1), NEG_INF)
    whole = (ordered[:, -1:] < lowest)[:, 0]  # all that top-k leaves, ties included, is known
    # top-p: a token stays while the tokens before it hold less than p of what top-k left; the most likely one always does.
    highest = ordered[:, :1]
    mass = (ordered - highest).exp().masked_fill(ordered < lowest, 0.0).cumsum(-1, dtype=torch.float64)
    total = torch.where(limited, mass[:, -1], (scaled - highest).exp().sum(-1, dtype=torch.float64))
    enough = (top_p.double() * total)[:, None]
    before = torch.cat([torch.zeros_like(mass[:, :1]), mass[:, :-1]], -1)
    last = ordered.gather(-1, (before < enough).sum(-1, keepdim=True).clamp(min=1) - 1)
    lowest = torch.where((top_p < 1)[:, None], torch.maximum(lowest, last), lowest)
    # min-p: nothing below min_p times the largest probability.
    lowest = torch.maximum(lowest, highest + min_p[:, None].log())
    reached = torch.where(limited, whole, mass[:, -1] >= enough[:, 0])
    return lowest, (~limited | (top_k <= known)) & ((top_p >= 1) | reached)


def _keep_typical(scaled: torch.Tensor, typical_p: torch.Tensor) -> torch.Tensor:
    """Locally typical sampling (Meister et al. 2022): the tokens whose information is nearest to the entropy stay, up to the mass.

    -log p - H is the expected logit less the token's own.
    """
    shifted = scaled - scaled.amax(-1, keepdim=True)
    weight = shifted.exp().double()
    total = weight.sum(-1, keepdim=True)
    mean = (weight * shifted.masked_fill(weight == 0, 0.0)).sum(-1, keepdim=True) / total
    distance = (shifted - mean.float()).abs()
    enough = typical_p.double()[:, None] * total
    vocab = scaled.shape[-1]
    for known in (_PREFIX, vocab) if scaled.device.type == "cpu" and vocab > 4 * _PREFIX else (vocab,):
        ordered, order = distance.topk(known, largest=False)
        mass = weight.gather(-1, order).cumsum(-1)
        if known == vocab or bool(((mass[:, -1:] >= enough) | (typical_p >= 1)[:, None]).all()):
            break
    last = (mass < enough).sum(-1, keepdim=True).clamp(max=known - 1)
    return scaled.masked_fill((distance > ordered.gather(-1, last)) & (typical_p < 1)[:, None], NEG_INF)


def over_temperature(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """fp32 ``[R,V]``; as they are where the temperature ``[R]`` is 0."""
    return logits.float() * _inverse(temperature)[:, None]


def _inverse(temperature: torch.Tensor) -> torch.Tensor:
    """1 / temperature, by which kernels and reference multiply alike; 1 where it is 0 (greedy)."""
    return torch.where(temperature <= 0, 1.0, temperature.clamp(min=MIN_TEMPERATURE)).reciprocal()


def best_of(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest value of each row (NaN if there is one) and its id, the lowest of equal ones.

    On a CPU NumPy takes a sixth of PyTorch's time, a fifteenth in half precision: with a model of 135M parameters that is 1
    to 3 % of a pass.
    """
    if logits.device.type != "cpu" or logits.requires_grad:
        return logits.max(-1)
    known = logits if logits.dtype in (torch.float32, torch.float64) else logits.float()  # NumPy has no bfloat16
    ids = torch.from_numpy(known.numpy().argmax(-1))
    return logits.gather(-1, ids[..., None])[..., 0], ids


def bad_rows(largest: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Rows ``[B,R]`` whose largest logit over the temperature is not finite: they held NaN, +inf, or nothing but -inf."""
    return ~(largest.float() * _inverse(temperature)[:, None]).isfinite()
