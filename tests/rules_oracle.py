"""What logit rules make of logits, by the definition, a token at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specdec_triton import SamplingParams

INF = float("inf")

RULES = {
    "nothing": {},
    "repetition": {"repetition_penalty": 1.7},
    "repetition-below-1": {"repetition_penalty": 0.6},
    "presence": {"presence_penalty": 0.9},
    "frequency": {"frequency_penalty": 0.4},
    "frequency-negative": {"frequency_penalty": -2.0},
    "bias": {"logit_bias": {0: 1.5, 7: -100.0, 10: -INF}},
    "allowed": {"allowed_token_ids": [1, 4, 10]},
    "banned": {"banned_token_ids": [0, 10, 5]},
    "min-new": {"min_new_tokens": 5, "stop_token_ids": [3, 10]},
    "no-repeat-1": {"no_repeat_ngram_size": 1},
    "no-repeat-2": {"no_repeat_ngram_size": 2},
    "no-repeat-3": {"no_repeat_ngram_size": 3},
    "no-repeat-beyond-the-text": {"no_repeat_ngram_size": 99},
    "all": {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "logit_bias": {2: 0.7, 3: -1.0},
        "banned_token_ids": [6],
        "allowed_token_ids": [0, 1, 2, 3, 4, 6, 7],
        "min_new_tokens": 4,
        "stop_token_ids": [0, 3],
        "no_repeat_ngram_size": 2,
    },
}


def ruled(row: torch.Tensor, params: SamplingParams, prompt: Sequence[int], new: Sequence[int]) -> torch.Tensor:
    """Logits ``[V]`` of the token after prompt and new tokens, in fp64."""
    text, n = [*prompt, *new], params.no_repeat_ngram_size
    grams = {tuple(text[i : i + n]) for i in range(len(text) - n + 1)} if n else set()
    out = []
    for v, logit in enumerate(row.double().tolist()):
        value = logit + (params.logit_bias or {}).get(v, 0.0)
        if v in text:
            value = value * params.repetition_penalty if value < 0 else value / params.repetition_penalty
        value -= params.frequency_penalty * new.count(v) + params.presence_penalty * (v in new)
        banned = (
            v in params.banned_token_ids
            or (params.allowed_token_ids is not None and v not in params.allowed_token_ids)
            or (n > 0 and len(text) >= n - 1 and (*text[len(text) - n + 1 :], v) in grams)
            or (v in params.stop_token_ids and len(new) < params.min_new_tokens)
        )
        out.append(-INF if banned else value)
    return torch.tensor(out, dtype=torch.float64)
