"""Whole texts on the Triton backend: the same tokens as on PyTorch. Each op's kernel is tested in the op's own file."""

from __future__ import annotations

import pytest
import torch

from specdec_triton import PromptLookup, SamplingParams, SpeculativeDecoder
from specdec_triton._library import why_not_triton
from specdec_triton.testing import toy_model

REASON = why_not_triton("verify_attention", "cpu")
PROMPTS = [[3, 5, 7, 3, 5, 7, 3, 5, 7, 11, 3], [2, 9]]


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("llama", {"temperature": 0}),
        ("llama", {"seed": 3}),
        ("llama", {"seed": 3, "top_k": 20}),
        ("llama", {}),
        ("gemma2", {"temperature": 0}),
    ],
    ids=str,
)
def test_texts_are_those_of_the_reference(kind, params):
    """Greedy, coupled with and without filters, rejection (seeded by torch's generator); a window with softcap."""
    model = toy_model(kind, **({"sliding_window": 4} if kind == "gemma2" else {}))
    texts = []
    for backend in ("torch", "triton"):
        torch.manual_seed(1)
        engine = SpeculativeDecoder(model, PromptLookup(), num_draft_tokens=3, exact=False, backend=backend)
        outs = engine.generate(PROMPTS, SamplingParams(max_new_tokens=4, **params))
        texts.append([out.token_ids for out in outs])
    assert texts[0] == texts[1]
