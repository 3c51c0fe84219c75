"""The target's logits bit for bit: a position scored alone, in a verify pass, and beside other texts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specdec_triton.adapter import ModelAdapter
from specdec_triton.verification.check import Check
from specdec_triton.verification.scoring import Scorer, checked, why_inexact

_BATCH = 8  # texts together; the logits of all of them are held


def check_bits(
    target: ModelAdapter, prompts: Sequence[Sequence[int]], *, k: int = 4, max_new_tokens: int = 32
) -> Check:
    """Logits along the prompts' greedy texts: one token a pass, then K+1 a pass, then K+1 each of all texts together."""
    prompts = checked(target, prompts, k=k, max_new_tokens=max_new_tokens)
    if (reason := why_inexact(target)) is not None:
        return Check("bits", None, f"not available: {reason}", facts={"rounding": True})
    positions = 0
    for begin in range(0, len(prompts), _BATCH):
        group = prompts[begin : begin + _BATCH]
        scorer = Scorer(target, len(group))
        texts, want = _one_by_one(scorer, group, max_new_tokens)
        positions += sum(map(len, texts))
        alone = [_in_passes(scorer, group[b : b + 1], texts[b : b + 1], k, b)[0] for b in range(len(group))]
        together = _in_passes(scorer, group, texts, k)
        for where, got in (("alone", alone), ("together", together)):
            for b, (rows, expected) in enumerate(zip(got, want, strict=True)):
                differs = (rows != expected).any(1)
                if not differs.any():
                    continue
                at, apart = int(differs.int().argmax()), float((rows.float() - expected.float()).abs().amax())
                detail = (
                    f"prompt {begin + b + 1}: the logits after new token {at + 1} are not those of a pass of one token when"
                    f" it is scored in passes of up to {k + 1}, {where}; {int(differs.sum())} of {len(differs)} rows differ,"
                    f" by up to {apart:.3g}"
                )
                facts = {"prompt": begin + b + 1, "token": at + 1, "together": where == "together", "apart": apart}
                return Check("bits", False, detail, facts=facts)
    detail = f"{positions} rows of logits bit-equal one by one, {k + 1} a pass, and beside other texts"
    return Check("bits", True, detail, facts={"positions": positions, "rounding": False})


def _one_by_one(
    scorer: Scorer, prompts: Sequence[Sequence[int]], new: int
) -> tuple[list[list[int]], list[torch.Tensor]]:
    """The greedy text of each slot's prompt, and the logits ``[n,V]`` after each of its tokens."""
    texts, logits = [], []
    for slot, prompt in enumerate(prompts):
        room = new if scorer.target.max_len is None else min(new, scorer.target.max_len - len(prompt))
        row = scorer.prefill(slot, prompt)
        text, rows = [], []
        for at in range(room):
            text.append(int(row.argmax()))
            row = scorer.after(text[-1], len(prompt) + at, slot)
            rows.append(row)
        texts.append(text)
        logits.append(torch.stack(rows))
    return texts, logits


def _in_passes(
    scorer: Scorer, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]], k: int, first: int = 0
) -> list[torch.Tensor]:
    """The same logits from passes of up to K+1 tokens of each text; their first passes differ in length, so the rest too."""
    done = [0] * len(texts)
    parts: list[list[torch.Tensor]] = [[] for _ in texts]
    while any(start < len(text) for start, text in zip(done, texts, strict=True)):
        counts = [k + 1 if start else 1 + (first + b) % (k + 1) for b, start in enumerate(done)]
        chains = [text[start : start + n] for text, start, n in zip(texts, done, counts, strict=True)]
        contexts = [len(prompt) + start for prompt, start in zip(prompts, done, strict=True)]
        for rows, part in zip(scorer.score(chains, contexts, first), parts, strict=True):
            part.append(rows)
        done = [start + len(chain) for start, chain in zip(done, chains, strict=True)]
    return [torch.cat(part) for part in parts]
