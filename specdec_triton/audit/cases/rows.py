"""Ops on rows of logits: rules, drawing a token, judging drafts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from specdec_triton import ops
from specdec_triton.audit import traffic
from specdec_triton.audit.cases.base import INT, Case, Size, meta, name_of, parameters
from specdec_triton.audit.traffic import Traffic
from specdec_triton.logit_rules import LogitRules
from specdec_triton.reference.accept_reject import METHODS

if TYPE_CHECKING:
    from specdec_triton.kernels._config import Chip

_ROWS = (
    Size(8, 5, 0, 128256),
    Size(1, 2, 0, 151936),
    Size(64, 8, 0, 49152),
    Size(3, 6, 0, 262144),
    Size(5, 1, 0, 32000),
)
_DRAFTS_OF_8 = (Size(8, 9, 0, 128256), Size(1, 16, 0, 151936), Size(3, 12, 0, 49152))
_DRAFTS_OF_16 = (Size(8, 17, 0, 128256), Size(1, 32, 0, 151936), Size(3, 25, 0, 49152))
_LONG_DRAFTS = (Size(8, 33, 0, 128256), Size(1, 64, 0, 151936), Size(3, 40, 0, 49152))
_ODD_VOCAB = (Size(8, 5, 0, 50257), Size(1, 2, 0, 32003), Size(64, 8, 0, 99999))
_TEXTS = (
    Size(8, 5, 4096, 128256),
    Size(1, 2, 1, 151936),
    Size(64, 8, 130001, 49152),
    Size(3, 64, 77, 262144),
    Size(5, 1, 999, 32000),
)
_ODD_VOCAB_TEXTS = (Size(8, 5, 4096, 50257), Size(1, 2, 1, 32003), Size(64, 8, 130001, 99999))
_RULES = ("penalties", "bias", "mask", "min-new", "n-gram")


def cases() -> list[Case]:
    return [*_rule_cases(), *_sample_cases(), *_accept_cases()]


def _rule_cases() -> list[Case]:
    return [
        case
        for dtype in (torch.bfloat16, torch.float32)
        for case in (
            *(_rules(name, dtype) for name in (*_RULES, "all")),
            _rules("all", dtype, one_row=True),
            _rules("all", dtype, sizes=_ODD_VOCAB_TEXTS),
        )
    ]


def _rules(name: str, dtype: torch.dtype, *, sizes: tuple[Size, ...] = _TEXTS, one_row: bool = False) -> Case:
    """With draft lengths; ``one_row``: without, for the row after the drafts, as a drafter draws the next one."""
    used = _RULES if name == "all" else (name,)

    def rules_of(size: Size, rows: int) -> LogitRules:
        batch, vocab = size.batch, size.vocab
        rules = LogitRules(meta(batch, dtype=INT))
        if "penalties" in used:
            for penalty in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
                setattr(rules, penalty, meta(batch, dtype=torch.float32))
            rules.counts = meta(batch, vocab, dtype=INT)
        if "bias" in used:
            rules.bias = meta(batch, vocab, dtype=torch.float32)
        if "mask" in used:
            rules.mask = meta(batch, rows, -(-vocab // 32), dtype=INT)
        if "min-new" in used:
            rules.min_lens, rules.stop_ids = meta(batch, dtype=INT), meta(batch, size.steps, dtype=torch.int64)
        if "n-gram" in used:
            rules.ngram, rules.max_ngram = meta(batch, dtype=INT), 3
            rules.texts = meta(batch, size.context, dtype=torch.int64)
        return rules

    def call(size: Size) -> None:
        rows = 1 if one_row else size.steps
        ops.apply_logit_rules(
            meta(size.batch, rows, size.vocab, dtype=dtype),
            meta(size.batch, size.steps - 1, dtype=torch.int64),
            rules=rules_of(size, rows),
            draft_lens=None if one_row else meta(size.batch, dtype=INT),
            first=size.steps - rows,
            backend="triton",
        )

    def moved(chip: Chip) -> Traffic:
        size = sizes[0]
        return traffic.apply_logit_rules(
            size.batch,
            1 if one_row else size.steps,
            size.vocab,
            dtype.itemsize,
            penalties="penalties" in used,
            bias="bias" in used,
            mask="mask" in used,
            text=size.context if "n-gram" in used else 0,
        )

    kind = (
        f"{name_of(dtype)} {name}" + (", one row" if one_row else "") + (", odd V" if sizes is _ODD_VOCAB_TEXTS else "")
    )
    quick = kind in ("bf16 all", "fp32 all, one row")
    return Case("apply_logit_rules", kind, call, moved, sizes, quick=quick)


def _sample_cases() -> list[Case]:
    bf16, fp32 = torch.bfloat16, torch.float32
    return [
        _sample("race", bf16),
        _sample("race", fp32),
        _sample("race, filters", bf16, has_filters=True),
        _sample("race, typical-p", bf16, has_filters=True, has_typical=True),
        _sample("race, typical-p", fp32, has_filters=True, has_typical=True),
        _sample("draft", bf16, node=1),
        _sample("draft, typical-p", fp32, node=1, has_filters=True, has_typical=True),
        _sample("race, odd V", bf16, sizes=_ODD_VOCAB),
    ]


def _accept_cases() -> list[Case]:
    bf16, fp32 = torch.bfloat16, torch.float32
    found = []
    for method in METHODS:
        found.append(_accept(method, bf16, "K <= 7", _ROWS[:4]))
        found.append(_accept(method, bf16, "K 32-63", _LONG_DRAFTS))
        if method != "greedy":
            found.append(_accept(method, bf16, "K <= 7, filters", _ROWS[:4], has_filters=True))
    for method in ("rejection", "block"):
        draft = {"has_draft": True, "has_lse": True}
        found.append(_accept(method, bf16, "K <= 7, draft", _ROWS[:4], **draft))
        found.append(_accept(method, bf16, "K <= 7, draft, no lse", _ROWS[:4], has_draft=True))
        found.append(_accept(method, bf16, "K <= 7, draft, filters", _ROWS[:4], has_filters=True, **draft))
        found.append(_accept(method, bf16, "K 8-15, draft", _DRAFTS_OF_8, **draft))
        found.append(_accept(method, bf16, "K 16-31, draft", _DRAFTS_OF_16, **draft))
        found.append(_accept(method, bf16, "K 32-63, draft", _LONG_DRAFTS, **draft))
    typical: dict[str, bool] = {"has_filters": True, "has_typical": True}
    for dtype in (bf16, fp32):
        found.append(_accept("coupled", dtype, "K <= 7, typical-p", _ROWS[:4], **typical))
        for method in ("rejection", "block"):
            found.append(
                _accept(method, dtype, "K <= 7, draft, typical-p", _ROWS[:4], has_draft=True, has_lse=True, **typical)
            )
    found.append(_accept("coupled", fp32, "K <= 7", _ROWS[:4]))
    found.append(_accept("coupled", bf16, "K <= 7, odd V", _ODD_VOCAB))
    return found


def _sample(
    name: str,
    dtype: torch.dtype,
    *,
    sizes: tuple[Size, ...] = _ROWS,
    node: int | None = None,
    has_filters: bool = False,
    has_typical: bool = False,
) -> Case:
    def call(size: Size) -> None:
        logits = meta(size.batch, size.vocab, dtype=dtype)
        params = parameters(size.batch, has_filters, has_typical)
        ops.sample(logits, params=params, return_lse=True, node=node, backend="triton")

    def moved(chip: Chip) -> Traffic:
        return traffic.sample(sizes[0].batch, sizes[0].vocab, dtype.itemsize, filters=has_filters, typical=has_typical)

    quick = name.startswith("race") and dtype == torch.bfloat16
    return Case("sample", f"{name_of(dtype)} {name}", call, moved, sizes, quick=quick)


def _accept(
    method: str,
    dtype: torch.dtype,
    name: str,
    sizes: tuple[Size, ...],
    *,
    has_draft: bool = False,
    has_lse: bool = False,
    has_filters: bool = False,
    has_typical: bool = False,
) -> Case:
    def call(size: Size) -> None:
        batch, k, vocab = size.batch, size.steps - 1, size.vocab
        ops.accept_reject(
            meta(batch, k, dtype=torch.int64),
            meta(batch, k + 1, vocab, dtype=dtype),
            meta(batch, k, vocab, dtype=dtype) if has_draft else None,
            draft_lse=meta(batch, k, dtype=torch.float32) if has_lse else None,
            draft_lens=meta(batch, dtype=INT),
            params=parameters(batch, has_filters, has_typical),
            method=method,
            backend="triton",
        )

    def moved(chip: Chip) -> Traffic:
        size = sizes[0]
        return traffic.accept_reject(
            size.batch,
            size.steps - 1,
            size.vocab,
            dtype.itemsize,
            method=method,
            has_draft=has_draft,
            has_lse=has_lse,
            filters=has_filters,
            typical=has_typical,
        )

    short = name in ("K <= 7", "K <= 7, draft", "K <= 7, filters")
    quick = short and method in ("coupled", "rejection") and dtype == torch.bfloat16
    return Case("accept_reject", f"{method} {name_of(dtype)} {name}", call, moved, sizes, quick=quick)
