"""The op that changes logits before they are sampled from."""

from __future__ import annotations

import torch

from specdec_triton._checks import check_floating, check_integer, check_tensor, integers, require
from specdec_triton._library import register, resolve_backend
from specdec_triton.logit_rules import LogitRules

_apply_logit_rules = register(
    "apply_logit_rules(Tensor logits, Tensor draft_tokens, Tensor? draft_lens, Tensor lens, Tensor? repetition_penalty,"
    " Tensor? presence_penalty, Tensor? frequency_penalty, Tensor? counts, Tensor? bias, Tensor? mask, Tensor? min_lens,"
    " Tensor? stop_ids, Tensor? ngram, Tensor? texts, int max_ngram, str backend) -> Tensor",
    fake=lambda logits, *rest: logits.new_empty(logits.shape, dtype=torch.float32),
)


def apply_logit_rules(
    logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    *,
    rules: LogitRules,
    draft_lens: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Penalties, biases and bans: the logits that requests sample from, each row by the text before it, drafts included.

    Args:
        logits: ``[B,T,V]``, T = K+1; row t scores the token after drafts 0..t-1.
        draft_tokens: int64 ``[B,K]``. An id outside the vocabulary is no history.
        rules: of the requests; state that depends on the text (``rules.counts``, ``rules.texts``, ``rules.lens``) is that of the
            committed text, before the first draft.
        draft_lens: int32 ``[B]``, drafts of each row (None: K).

    Returns:
        fp32 ``[B,T,V]``, new; rows past draft_lens are unspecified. The order is that of
        :class:`~specdec_triton.SamplingParams`.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit; on the CPU also a penalty, size or length out of range.

    Source: Keskar et al. 2019 (repetition penalty); frequency and presence penalty as in OpenAI's API; no_repeat_ngram_size as
    in Paulus et al. 2017.

    Example:
        >>> from specdec_triton import SamplingParams
        >>> params = SamplingParams(frequency_penalty=0.5, logit_bias={2: 3.0})
        >>> rules = LogitRules.from_params([params], prompts=[[1]], outputs=[[0]], vocab_size=3)
        >>> apply_logit_rules(torch.zeros(1, 2, 3), torch.tensor([[0]]), rules=rules).tolist()
        [[[-0.5, 0.0, 3.0], [-1.0, 0.0, 3.0]]]
    """
    check_tensor("logits", logits, (None, None, None))
    batch, rows, vocab = logits.shape
    require(rows >= 1 and vocab >= 1, "logits", "of shape [B,K+1,V] with V >= 1", list(logits.shape))
    check_floating("logits", logits)
    draft_tokens = integers("draft_tokens", draft_tokens, (batch, rows - 1), logits, torch.int64)
    if draft_lens is not None:
        draft_lens = integers("draft_lens", draft_lens, (batch,), logits, torch.int32)
        _check_range("draft_lens", draft_lens, 0, rows - 1)
    fields = _unpacked(rules, batch, rows, vocab, logits)
    chosen = resolve_backend(backend, "apply_logit_rules", logits)
    return _apply_logit_rules(logits, draft_tokens, draft_lens, *fields, rules.max_ngram, chosen)


def _unpacked(rules: LogitRules, batch: int, rows: int, vocab: int, like: torch.Tensor) -> list[torch.Tensor | None]:
    """The rules' tensors in the order in which the op takes them."""
    require(isinstance(rules, LogitRules), "rules", "LogitRules", type(rules).__name__)
    shapes: dict[str, tuple[tuple[int | None, ...], torch.dtype]] = {
        "lens": ((batch,), torch.int32),
        "repetition_penalty": ((batch,), torch.float32),
        "presence_penalty": ((batch,), torch.float32),
        "frequency_penalty": ((batch,), torch.float32),
        "counts": ((batch, vocab), torch.int32),
        "bias": ((batch, vocab), torch.float32),
        "mask": ((batch, rows, (vocab + 31) // 32), torch.int32),
        "min_lens": ((batch,), torch.int32),
        "stop_ids": ((batch, None), torch.int64),
        "ngram": ((batch,), torch.int32),
        "texts": ((batch, None), torch.int64),
    }
    together = (
        ("repetition_penalty", "presence_penalty", "frequency_penalty", "counts"),
        ("min_lens", "stop_ids"),
        ("ngram", "texts"),
    )
    for names in together:
        given = [name for name in names if getattr(rules, name) is not None]
        require(
            len(given) in (0, len(names)), f"rules.{names[0]}", f"given together with {', '.join(names[1:])}", given
        )
    check_integer("rules.max_ngram", rules.max_ngram, 0)
    fields: list[torch.Tensor | None] = []
    for name, (shape, dtype) in shapes.items():
        x = getattr(rules, name)
        if x is not None or name == "lens":
            where = f"rules.{name}"
            if dtype.is_floating_point:
                check_tensor(where, x, shape, like)
                require(x.dtype == dtype, where, str(dtype).removeprefix("torch."), x.dtype)
            else:
                x = integers(where, x, shape, like, dtype)
            if len(shape) == 2 and x.shape[1] > 1:
                require(x.stride(1) == 1, where, "of stride 1 in its last dimension", list(x.stride()))
        fields.append(x)
    if like.device.type == "cpu" and batch:
        _check_range("rules.lens", rules.lens, 0, None if rules.texts is None else rules.texts.shape[1])
        if rules.repetition_penalty is not None:
            low = float(rules.repetition_penalty.min())
            require(low > 0, "rules.repetition_penalty", "above 0 (1: off)", low)
        if rules.ngram is not None:
            _check_range("rules.ngram", rules.ngram, 0, rules.max_ngram)
    return fields


def _check_range(name: str, x: torch.Tensor, low: int, high: int | None) -> None:
    """On the CPU, where values are at hand."""
    if x.device.type == "cpu" and x.numel():
        least, most = (int(end) for end in x.aminmax())
        require(low <= least and (high is None or most <= high), name, f"from {low} to {high}", (least, most))
