"""The ops that draw tokens: sample, and judge drafts."""

from __future__ import annotations

from typing import NamedTuple

import torch

from specdec_triton._checks import check_bool, check_floating, check_integer, check_tensor, integers, require
from specdec_triton._library import register, resolve_backend
from specdec_triton.reference.accept_reject import METHODS
from specdec_triton.sampling import MAX_DRAFT_TOKENS, SamplingBatch


class AcceptResult(NamedTuple):
    """What a round emits: request b emits ``tokens[b, : num_accepted[b] + 1]``.

    Attributes:
        tokens: int64 ``[B,K+1]``, padded with -1.
        num_accepted: int32 ``[B]``.
        status: int32 ``[B]``; 1: the request's logits held NaN, +inf or a row of nothing but -inf. Its tokens are
            [0, -1, ...] and must not be emitted.
    """

    tokens: torch.Tensor
    num_accepted: torch.Tensor
    status: torch.Tensor


BY_PROBABILITY = ("rejection", "block")  # methods that judge a draft by the probability it was drawn with
PATHLESS = (*BY_PROBABILITY, "typical")  # of which a text depends on how its rounds fell

PARAMS_SCHEMA = (
    "Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor? typical_p, Tensor seed, Tensor position,"
    " bool? has_filters"
)

_accept_reject = register(
    "accept_reject(Tensor draft_tokens, Tensor target_logits, Tensor? draft_logits, Tensor? draft_lse,"
    f" Tensor? draft_lens, {PARAMS_SCHEMA}, str method, float epsilon, float delta, str backend) -> (Tensor, Tensor, Tensor)",
    fake=lambda drafts, *rest: (
        drafts.new_empty((drafts.shape[0], drafts.shape[1] + 1)),
        drafts.new_empty((drafts.shape[0],), dtype=torch.int32),
        drafts.new_empty((drafts.shape[0],), dtype=torch.int32),
    ),
)
_sample = register(
    f"sample(Tensor logits, {PARAMS_SCHEMA}, int? node, str backend) -> (Tensor, Tensor)",
    fake=lambda logits, *rest: (
        logits.new_empty((logits.shape[0],), dtype=torch.int64),
        logits.new_empty((logits.shape[0],), dtype=torch.float32),
    ),
)


def accept_reject(
    draft_tokens: torch.Tensor,
    target_logits: torch.Tensor,
    draft_logits: torch.Tensor | None = None,
    *,
    draft_lse: torch.Tensor | None = None,
    draft_lens: torch.Tensor | None = None,
    params: SamplingBatch,
    method: str,
    typical_epsilon: float = 0.3,
    typical_delta: float = 0.09,
    backend: str | None = None,
) -> AcceptResult:
    """Keep the right prefix of each drafted chain and add one token.

    Args:
        draft_tokens: int64 ``[B,K]``, K >= 0. An id below 0 or >= V ends the row's draft.
        target_logits: ``[B,K+1,V]``; row j scores the token after drafts 0..j-1. -inf masks a token.
        draft_logits: ``[B,K,V]``, the raw logits that the drafts were drawn from under ``params``; None: the drafts
            were certain (q is one-hot), as from an n-gram table.
        draft_lse: float32 ``[B,K]``, what ``sample(..., return_lse=True)`` gave for those rows.
        draft_lens: int32 ``[B]``, drafts of each row (None: K).
        params: the requests' parameters; ``params.position`` is that of the first drafted token.
        method: ``greedy``: accept while the draft is the argmax (ties: the lowest id). ``rejection``: the output
            follows the target's distribution exactly. ``block``: so it does, and on average never fewer drafts are
            accepted. ``coupled``: position i's token is a pure function of (seed, i, logits); a draft is accepted while
            it is that token. ``typical``: accept while the draft's probability exceeds min(epsilon, delta
            exp(-entropy)), then draw from the target; lossy. Rows with temperature 0 are greedy whatever the method.
        typical_epsilon, typical_delta: of ``typical``, from 0 to 1.

    Returns:
        :class:`AcceptResult`. Rows with status 1 have num_accepted 0 and must not be emitted.

    Raises:
        ValueError: shapes, dtypes, devices or a method that do not fit; on the CPU also draft_lens out of range.

    Source: Leviathan et al. 2023; Chen et al. 2023; Sun et al. 2024 (block); Cai et al. 2024 (typical). Proofs of
    exactness: kernels/README.md.

    Example:
        >>> from specdec_triton import SamplingParams
        >>> logits = torch.nn.functional.one_hot(torch.tensor([[1, 5, 3, 4]]), 8).float()
        >>> greedy = SamplingBatch.from_params([SamplingParams(temperature=0)], [0])
        >>> accept_reject(torch.tensor([[1, 2, 3]]), logits, params=greedy, method="greedy").tokens.tolist()
        [[1, 5, -1, -1]]
    """
    require(method in METHODS, "method", f"one of {', '.join(METHODS)}", repr(method))
    check_tensor("target_logits", target_logits, (None, None, None))
    batch, rows, vocab = target_logits.shape
    require(rows >= 1 and vocab >= 1, "target_logits", "of shape [B,K+1,V] with V >= 1", list(target_logits.shape))
    check_floating("target_logits", target_logits)
    draft_tokens = integers("draft_tokens", draft_tokens, (batch, rows - 1), target_logits, torch.int64)
    if draft_logits is not None:
        check_tensor("draft_logits", draft_logits, (batch, rows - 1, vocab), target_logits)
        check_floating("draft_logits", draft_logits)
    if draft_lse is not None:
        require(draft_logits is not None, "draft_lse", "given together with draft_logits", "it alone")
        check_tensor("draft_lse", draft_lse, (batch, rows - 1), target_logits)
        require(draft_lse.dtype == torch.float32, "draft_lse", "float32", draft_lse.dtype)
    draft_lens = lengths(draft_lens, batch, rows - 1, target_logits)
    epsilon, delta = check_typical(typical_epsilon, typical_delta)
    fields = unpacked(params, batch, target_logits)
    chosen = resolve_backend(backend, "accept_reject", target_logits)
    return AcceptResult(
        *_accept_reject(
            draft_tokens, target_logits, draft_logits, draft_lse, draft_lens, *fields, method, epsilon, delta, chosen
        )
    )


def sample(
    logits: torch.Tensor,
    *,
    params: SamplingBatch,
    return_lse: bool = False,
    node: int | None = None,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row under the request's parameters; the argmax (lowest id of ties) at temperature 0.

    Args:
        logits: ``[B,V]``; -inf masks a token.
        params: ``params.position`` is the absolute position of the token being drawn.
        return_lse: also return the log-sum-exp of logits / temperature over the tokens that the filters keep.
        node: None: the noise is keyed by (seed, position), the ``coupled`` noise that any drafter and the target
            share. An integer j: draft j of a round of ``rejection`` that begins at ``params.position``; its stream
            is separate from every stream that decides on the draft.

    Returns:
        tokens int64 ``[B]``, or (tokens, lse float32 ``[B]``).

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
    """
    check_tensor("logits", logits, (None, None))
    batch, vocab = logits.shape
    require(vocab >= 1, "logits", "of shape [B,V] with V >= 1", list(logits.shape))
    check_floating("logits", logits)
    if node is not None:
        check_integer("node", node, 0, MAX_DRAFT_TOKENS)
    tokens, lse = _sample(logits, *unpacked(params, batch, logits), node, resolve_backend(backend, "sample", logits))
    return (tokens, lse) if return_lse else tokens


def lengths(draft_lens: torch.Tensor | None, batch: int, k: int, like: torch.Tensor) -> torch.Tensor | None:
    """Draft lengths as int32, on the CPU checked to be from 0 to K."""
    if draft_lens is None:
        return None
    draft_lens = integers("draft_lens", draft_lens, (batch,), like, torch.int32)
    if draft_lens.device.type == "cpu" and batch:
        low, high = int(draft_lens.min()), int(draft_lens.max())
        require(low >= 0 and high <= k, "draft_lens", f"from 0 to K = {k}", (low, high))
    return draft_lens


def check_typical(epsilon: float, delta: float) -> tuple[float, float]:
    """The parameters of ``typical``, from 0 to 1."""
    for name, value in (("typical_epsilon", epsilon), ("typical_delta", delta)):
        ok = isinstance(value, (int, float)) and 0 <= value <= 1
        require(ok, name, "a number from 0 to 1", repr(value))
    return float(epsilon), float(delta)


def unpacked(params: SamplingBatch, batch: int, like: torch.Tensor) -> tuple:
    """The parameter tensors in the order in which the ops take them."""
    require(isinstance(params, SamplingBatch), "params", "a SamplingBatch", type(params).__name__)
    for name in ("temperature", "top_p", "min_p", "typical_p"):
        x = getattr(params, name)
        if x is None and name == "typical_p":
            continue
        check_tensor(f"params.{name}", x, (batch,), like)
        require(x.dtype == torch.float32, f"params.{name}", "float32", x.dtype)
        if batch and x.device.type == "cpu":
            low, high = (float(end) for end in x.aminmax())
            most = 1.0 if name != "temperature" else torch.finfo(torch.float32).max
            require(low >= 0 and high <= most, f"params.{name}", f"from 0 to {most:g}", (low, high))
    flag = params.has_filters
    check_bool("params.has_filters", flag, optional=True)
    whole = ((name, torch.int32 if name == "top_k" else torch.int64) for name in ("top_k", "seed", "position"))
    top_k, seed, position = (
        integers(f"params.{name}", getattr(params, name), (batch,), like, dtype) for name, dtype in whole
    )
    if batch and like.device.type == "cpu":
        require(int(top_k.min()) >= -1, "params.top_k", "at least 0 (0 and -1: off)", int(top_k.min()))
        require(int(position.min()) >= 0, "params.position", "at least 0", int(position.min()))
    return params.temperature, top_k, params.top_p, params.min_p, params.typical_p, seed, position, params.has_filters
