"""Plain decoding against the module itself: all other checks compare this package's passes with one another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from specdec_triton.adapter import ModelAdapter
from specdec_triton.drafters import NoDraft
from specdec_triton.engine import SpeculativeDecoder
from specdec_triton.engine.scheduler import PREFILL_CHUNK
from specdec_triton.observe import model_lock
from specdec_triton.sampling import SamplingParams
from specdec_triton.verification.check import Check
from specdec_triton.verification.scoring import allowed_gap, checked, why_inexact
from specdec_triton.verification.texts import MAX_BATCH_SIZE


def check_module(target: ModelAdapter, prompts: Sequence[Sequence[int]], *, max_new_tokens: int = 48) -> Check:
    """Greedy text of plain decoding, scored by the module's own forward pass: whole texts, without a cache.

    Each token must be the best of the module's logits up to what rounding explains (``scoring.allowed_gap``): two passes that sum
    in another order each err by their own rounding. SmolLM2 in bf16, whose largest logits are 25, errs by up to 0.65 at the best
    token (against itself in fp32); 0.79 is allowed, and 0.25 the largest gap that was seen. One more prompt is made of the others,
    so long that it is processed in two chunks, where the model's context allows.
    """
    prompts = checked(target, prompts, max_new_tokens=max_new_tokens)
    params = SamplingParams(temperature=0, max_new_tokens=max_new_tokens, ignore_eos=True)
    several = [*prompts, _long(prompts, target.max_len, max_new_tokens)]
    decoder = SpeculativeDecoder(
        target,
        NoDraft(),
        num_draft_tokens=0,
        max_batch_size=MAX_BATCH_SIZE,
        exact=False if why_inexact(target) is not None else None,
    )
    largest = 0.0
    tokens = best = longest = 0
    for i, (prompt, output) in enumerate(zip(several, decoder.generate(several, params), strict=True)):
        which = f"prompt {i + 1}" if i < len(prompts) else f"the prompts together, {len(prompt)} tokens"
        if output.error is not None:
            return Check("module", False, f"plain decoding of {which} failed: {output.error}")
        rows = _own_logits(target, [*prompt, *output.token_ids[:-1]], len(output.token_ids))
        for at, (token, row) in enumerate(zip(output.token_ids, rows, strict=True)):
            gap, allowed = float(row.amax() - row[token]), allowed_gap(target, row)
            if not gap <= allowed:  # NaN neither
                expected = int(row.argmax())
                detail = (
                    f"{which}: plain decoding's token {at + 1} is {token}, the module's own best is {expected},"
                    f" {gap:.3g} above it; rounding explains {allowed:.3g}"
                )
                facts: dict[str, Any] = {"prompt": i + 1, "token": at + 1, "got": token, "expected": expected}
                return Check("module", False, detail, facts=facts | {"gap": gap, "allowed": allowed})
            largest = max(largest, gap)
            tokens += 1
            best += gap == 0
        longest = max(longest, len(prompt) + len(output.token_ids))
    detail = f"{best} of {tokens} greedy tokens are the best of the module's own logits"
    detail += f", the others at near-ties (largest gap {largest:.3g})" if best < tokens else ""
    found = {"tokens": tokens, "best": best, "gap": largest, "longest": longest}
    return Check("module", True, f"{detail}; texts of up to {longest} tokens", facts=found)


def _long(prompts: Sequence[Sequence[int]], max_len: int | None, new: int) -> list[int]:
    """The prompts, one after the other and again, until a few tokens are left for a second chunk."""
    length = PREFILL_CHUNK + 8
    if max_len is not None:
        length = max(min(length, max_len - new), 1)
    joined = [token for prompt in prompts for token in prompt]
    return (joined * -(-length // len(joined)))[:length]


@torch.inference_mode()
def _own_logits(target: ModelAdapter, text: Sequence[int], last: int) -> torch.Tensor:
    """The module's logits fp32 ``[last,V]`` behind the last tokens of a text."""
    keep: dict[str, Any] = {"logits_to_keep": last} if target.observation.keeps_logits else {}
    with model_lock(target.model):
        logits = target.model(
            input_ids=torch.tensor([list(text)], device=target.device), use_cache=False, **keep
        ).logits
    return logits[0, -last:].float()
