"""The last layer and the decision in one: the logits of ``hidden @ weight.T`` are used where they arise, and never written.

All four ops give the tokens that ``accept_reject`` or ``sample`` would give on the logits

    round(hidden @ weight.T + bias), then round(scale x), then round(softcap tanh(round(x / softcap)))

each rounded to hidden's dtype, as transformers computes them. Top-k, top-p, min-p and typical-p need the whole row and are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from specdec_triton._checks import check_floating, check_integer, check_positive, check_tensor, integers, require
from specdec_triton._library import register, resolve_backend
from specdec_triton.kernels._config import head_part
from specdec_triton.ops.sampling import AcceptResult, lengths, unpacked
from specdec_triton.sampling import MAX_DRAFT_TOKENS, SamplingBatch

METHODS = ("greedy", "coupled", "rejection", "block")  # of which a decision needs a few numbers of each row


class HeadStats(NamedTuple):
    """What a decision needs of B requests' T rows of logits, over C parts of the (shard of the) vocabulary: 24 bytes a row and part.

    s is a logit over the row's temperature. Ids are those of the whole vocabulary.

    Attributes:
        stats: float32 ``[B,T,C,3]``: the maximum m of s (+inf: it found NaN or +inf), the sum of exp(s - m), and s of the row's
            drafted token (-inf: it lies in another part, or no probability decides on it).
        best: float32 ``[B,T,C,2]``: the winner's s + noise as an exact sum of two numbers, the larger one first.
        best_id: int32 ``[B,T,C]``: the winner.
        vocab: V, the size of the whole vocabulary.
    """

    stats: torch.Tensor
    best: torch.Tensor
    best_id: torch.Tensor
    vocab: int


_LAYER = "Tensor hidden, Tensor weight, Tensor? bias, float? scale, float? softcap"
_NOISE = "Tensor temperature, Tensor seed, Tensor position"


def _fake_stats(hidden: torch.Tensor, weight: torch.Tensor, *rest: object) -> tuple[torch.Tensor, ...]:
    vocab = weight.shape[0]
    shape = (*hidden.shape[:2], -(-vocab // head_part(vocab)))
    return (
        hidden.new_empty((*shape, 3), dtype=torch.float32),
        hidden.new_empty((*shape, 2), dtype=torch.float32),
        hidden.new_empty(shape, dtype=torch.int32),
    )


def _fake_result(drafts: torch.Tensor) -> tuple[torch.Tensor, ...]:
    batch, k = drafts.shape
    return (
        drafts.new_empty((batch, k + 1)),
        drafts.new_empty((batch,), dtype=torch.int32),
        drafts.new_empty((batch,), dtype=torch.int32),
    )


_head_stats = register(
    f"head_stats({_LAYER}, Tensor draft_tokens, Tensor? draft_lens, {_NOISE}, int first_id, int vocab, str method,"
    " str backend) -> (Tensor, Tensor, Tensor)",
    fake=_fake_stats,
)
_accept_stats = register(
    f"accept_stats(Tensor stats, Tensor best, Tensor best_id, Tensor draft_tokens, Tensor? draft_lens, {_NOISE}, int vocab,"
    " str method, str backend) -> (Tensor, Tensor, Tensor)",
    fake=lambda stats, best, best_id, drafts, *rest: _fake_result(drafts),
)
_verify_head = register(
    f"verify_head({_LAYER}, Tensor draft_tokens, Tensor? draft_logits, Tensor? draft_lse, Tensor? draft_lens, {_NOISE},"
    " str method, str backend) -> (Tensor, Tensor, Tensor)",
    fake=lambda hidden, weight, bias, scale, softcap, drafts, *rest: _fake_result(drafts),
)
_sample_head = register(
    f"sample_head({_LAYER}, {_NOISE}, int? node, str backend) -> (Tensor, Tensor)",
    fake=lambda hidden, *rest: (
        hidden.new_empty((hidden.shape[0],), dtype=torch.int64),
        hidden.new_empty((hidden.shape[0],), dtype=torch.float32),
    ),
)


def verify_head(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft_logits: torch.Tensor | None = None,
    *,
    draft_lse: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    draft_lens: torch.Tensor | None = None,
    params: SamplingBatch,
    method: str,
    backend: str | None = None,
) -> AcceptResult:
    """``accept_reject`` on the logits of ``hidden @ weight.T``, which are never written: the weight is read once.

    Args:
        hidden: ``[B,K+1,H]``; row j is the hidden state after drafts 0..j-1.
        weight: ``[V,H]``, of hidden's dtype and any row stride.
        draft_tokens: int64 ``[B,K]``, K >= 0. An id below 0 or >= V ends the row's draft.
        draft_logits: ``[B,K,V]``, what the drafts were drawn from under ``params``; None: q is one-hot. Only ``rejection`` reads
            them, and then the logits are written after all: the token in a rejected draft's place takes a whole row of p, and
            to compute that row once more would read the weight twice.
        draft_lse: float32 ``[B,K]``, what ``sample(..., return_lse=True)`` gave for those rows.
        bias: ``[V]``, of hidden's dtype; -inf masks a token (unless softcap makes it a number again).
        softcap: c of c tanh(x / c), as in Gemma 2.
        scale: a factor on the logits: Cohere's logit_scale, 1 / Granite's logits_scaling. Before softcap.
        draft_lens: int32 ``[B]``, drafts of each row (None: K).
        params: the requests' parameters, without filters: ``params.has_filters`` False. ``greedy`` takes any.
        method: ``greedy``, ``coupled``, ``rejection``, or ``block`` without draft_logits (the same as ``rejection``).

    Returns:
        :class:`AcceptResult`, the integers of ``accept_reject``.

    Raises:
        ValueError: shapes, dtypes, devices, strides or a method that do not fit; parameters that filter.

    Example:
        >>> from specdec_triton import SamplingParams
        >>> greedy = SamplingBatch.from_params([SamplingParams(temperature=0)], [0])
        >>> hidden = torch.eye(4)[None, :3]
        >>> verify_head(hidden, torch.eye(4), torch.tensor([[0, 3]]), params=greedy, method="greedy").tokens.tolist()
        [[0, 1, -1]]
    """
    _check_layer(hidden, weight, bias, scale, softcap, 3)
    batch, rows = hidden.shape[:2]
    _check_method(method, draft_logits)
    draft_tokens = integers("draft_tokens", draft_tokens, (batch, rows - 1), hidden, torch.int64)
    if draft_logits is not None:
        check_tensor("draft_logits", draft_logits, (batch, rows - 1, weight.shape[0]), hidden)
        check_floating("draft_logits", draft_logits)
    if draft_lse is not None:
        require(draft_logits is not None, "draft_lse", "given together with draft_logits", "it alone")
        check_tensor("draft_lse", draft_lse, (batch, rows - 1), hidden)
        require(draft_lse.dtype == torch.float32, "draft_lse", "float32", draft_lse.dtype)
    draft_lens = lengths(draft_lens, batch, rows - 1, hidden)
    noise = _noise(params, batch, hidden, method, "accept_reject")
    if method != "rejection" or rows == 1:
        draft_logits = draft_lse = None
    chosen = resolve_backend(backend, "verify_head", hidden)
    return AcceptResult(
        *_verify_head(
            hidden, weight, bias, scale, softcap, draft_tokens, draft_logits, draft_lse, draft_lens, *noise, method, chosen
        )
    )  # fmt: skip


def sample_head(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    params: SamplingBatch,
    node: int | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """``sample`` on the logits of ``hidden @ weight.T``, which are never written: the weight is read once.

    A drafter with a reduced vocabulary gives that vocabulary's rows as the weight; the ids are then those of its rows.

    Args:
        hidden: ``[B,H]``.
        weight, bias, softcap, scale, params: as of :func:`verify_head`. node, return_lse: as of :func:`sample`.

    Returns:
        tokens int64 ``[B]``, or (tokens, lse float32 ``[B]``): the tokens of ``sample``, its lse up to rounding.

    Raises:
        ValueError: shapes, dtypes, devices or strides that do not fit; parameters that filter.

    Example:
        >>> from specdec_triton import SamplingParams
        >>> greedy = SamplingBatch.from_params([SamplingParams(temperature=0)], [0])
        >>> sample_head(torch.tensor([[0.0, 1.0]]), torch.eye(2), params=greedy).tolist()
        [1]
    """
    _check_layer(hidden, weight, bias, scale, softcap, 2)
    if node is not None:
        check_integer("node", node, 0, MAX_DRAFT_TOKENS)
    noise = _noise(params, hidden.shape[0], hidden, "", "sample")
    chosen = resolve_backend(backend, "sample_head", hidden)
    tokens, lse = _sample_head(hidden, weight, bias, scale, softcap, *noise, node, chosen)
    return (tokens, lse) if return_lse else tokens


def head_stats(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    draft_tokens: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    draft_lens: torch.Tensor | None = None,
    first_id: int = 0,
    vocab: int | None = None,
    params: SamplingBatch,
    method: str,
    backend: str | None = None,
) -> HeadStats:
    """The first half of :func:`verify_head`, on a shard of the vocabulary: of each row what the decision needs.

    Tensor-parallel ranks each call it on their rows of the weight, gather the results (a few KB a row), and call
    :func:`accept_stats` on all of them.

    Args:
        hidden, bias, softcap, scale, draft_lens, params, method: as of :func:`verify_head`; q is one-hot.
        weight: ``[N,H]``, rows first_id .. first_id + N - 1 of the head. bias: ``[N]``, of the same rows.
        draft_tokens: int64 ``[B,K]``, ids of the whole vocabulary.
        first_id: a multiple of 4 (four tokens share a draw of the generator).
        vocab: V, the size of the whole vocabulary; None: first_id + N.

    Returns:
        :class:`HeadStats`; rows past draft_lens hold anything.

    Raises:
        ValueError: as :func:`verify_head`.
    """
    _check_layer(hidden, weight, bias, scale, softcap, 3)
    _check_method(method, None)
    batch, rows = hidden.shape[:2]
    draft_tokens = integers("draft_tokens", draft_tokens, (batch, rows - 1), hidden, torch.int64)
    draft_lens = lengths(draft_lens, batch, rows - 1, hidden)
    require(isinstance(first_id, int) and first_id % 4 == 0, "first_id", "a multiple of 4", first_id)
    end = first_id + weight.shape[0]
    check_integer("first_id", first_id, 0, 2**31 - 1 - weight.shape[0])
    if vocab is not None:
        check_integer("vocab", vocab, end, 2**31 - 1)
    noise = _noise(params, batch, hidden, method, "accept_reject")
    chosen = resolve_backend(backend, "head_stats", hidden)
    whole = end if vocab is None else vocab
    stats, best, best_id = _head_stats(
        hidden, weight, bias, scale, softcap, draft_tokens, draft_lens, *noise, first_id, whole, method, chosen
    )
    return HeadStats(stats, best, best_id, whole)


def accept_stats(
    stats: HeadStats | Sequence[HeadStats],
    draft_tokens: torch.Tensor,
    *,
    draft_lens: torch.Tensor | None = None,
    params: SamplingBatch,
    method: str,
    backend: str | None = None,
) -> AcceptResult:
    """The second half of :func:`verify_head`: the decision, from the statistics of all shards of the vocabulary.

    Args:
        stats: what :func:`head_stats` gave for each shard, in any order, or for the whole. A shard that is missing is a part of
            the vocabulary that cannot win.
        draft_tokens, draft_lens, params, method: what it was given.

    Returns:
        :class:`AcceptResult`. Winners do not depend on how the vocabulary was cut; an acceptance by probability can, where
        log u and log p differ by a rounding of the log-sum-exp.

    Raises:
        ValueError: shapes, dtypes, devices or a method that do not fit; shards of different passes.
    """
    shards: Sequence[HeadStats] = [stats] if isinstance(stats, HeadStats) else stats
    listed = isinstance(shards, (list, tuple)) and len(shards) > 0
    require(
        listed, "stats", "a HeadStats or a list of them", stats if isinstance(stats, list) else type(stats).__name__
    )
    for shard in shards:
        require(isinstance(shard, HeadStats), "stats", "a HeadStats or a list of them", type(shard).__name__)
        check_integer("stats.vocab", shard.vocab, 1, 2**31 - 1)
        check_tensor("stats.stats", shard.stats, (None, None, None, 3))
        check_tensor("stats.best", shard.best, (*shard.stats.shape[:3], 2), shard.stats)
        check_tensor("stats.best_id", shard.best_id, tuple(shard.stats.shape[:3]), shard.stats)
        same = shard.stats.shape[:2] == shards[0].stats.shape[:2] and shard.vocab == shards[0].vocab
        require(same, "stats", "shards of one pass: equal B, T and vocab", (list(shard.stats.shape), shard.vocab))
        for name, dtype in (("stats", torch.float32), ("best", torch.float32), ("best_id", torch.int32)):
            x = getattr(shard, name)
            require(x.dtype == dtype, f"stats.{name}", str(dtype).removeprefix("torch."), x.dtype)
    fields = shards[0][:3] if len(shards) == 1 else [torch.cat(x, 2) for x in list(zip(*shards, strict=True))[:3]]
    first = fields[0]
    _check_method(method, None)
    batch, rows = first.shape[:2]
    require(min(rows, first.shape[2]) >= 1, "stats.stats", "of shape [B,T,C,3] with T, C >= 1", list(first.shape))
    draft_tokens = integers("draft_tokens", draft_tokens, (batch, rows - 1), first, torch.int64)
    draft_lens = lengths(draft_lens, batch, rows - 1, first)
    noise = _noise(params, batch, first, method, "accept_reject")
    chosen = resolve_backend(backend, "accept_stats", first)
    return AcceptResult(*_accept_stats(*fields, draft_tokens, draft_lens, *noise, shards[0].vocab, method, chosen))


def _check_layer(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float | None,
    softcap: float | None,
    rank: int,
) -> None:
    check_tensor("hidden", hidden, (None,) * rank)
    check_floating("hidden", hidden)
    width = hidden.shape[-1]
    shape = "[B,H]" if rank == 2 else "[B,K+1,H]"
    require(width >= 1 and (rank == 2 or hidden.shape[1] >= 1), "hidden", f"of shape {shape}", list(hidden.shape))
    check_tensor("weight", weight, (None, width), hidden)
    require(weight.shape[0] >= 1, "weight", "of shape [V,H] with V >= 1", list(weight.shape))
    for name, x in (("weight", weight), ("bias", bias)):
        if x is not None:
            check_tensor(name, x, tuple(weight.shape[: x.dim()]) if name == "weight" else (weight.shape[0],), hidden)
            require(x.dtype == hidden.dtype, name, f"of hidden's dtype {hidden.dtype}", x.dtype)
            check_floating(name, x)
    check_positive("scale", scale)
    check_positive("softcap", softcap)


def _check_method(method: str, draft_logits: torch.Tensor | None) -> None:
    if method == "block" and draft_logits is not None:
        raise ValueError(
            "method must be rejection, coupled or greedy with draft_logits, got 'block', which weighs whole rows: use accept_reject"
        )
    if method == "typical":
        raise ValueError(
            f"method must be one of {', '.join(METHODS)}, got 'typical', which needs each row's entropy: use accept_reject"
        )
    require(method in METHODS, "method", f"one of {', '.join(METHODS)}", repr(method))


def _noise(
    params: SamplingBatch, batch: int, like: torch.Tensor, method: str, other: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """temperature, seed and position of parameters that do not filter."""
    temperature, top_k, top_p, min_p, typical_p, seed, position, has_filters = unpacked(params, batch, like)
    if has_filters is None and like.device.type == "cpu":
        has_filters = bool(((top_k > 0) | (top_p < 1) | (min_p > 0)).any())
        has_filters = has_filters or (typical_p is not None and bool((typical_p < 1).any()))
    if has_filters is not False and method != "greedy":
        raise ValueError(
            f"params.has_filters must be False, got {has_filters}: top-k, top-p, min-p and typical-p need whole rows; use {other}"
        )
    return temperature, seed, position
