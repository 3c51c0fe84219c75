"""Whole texts on the Triton backend: the same tokens as on PyTorch. Each op's kernel is tested in the op's own file."""

from __future__ import annotations

import pytest
import torch

from specdec_triton import PromptLookup, SamplingParams, SpeculativeDecoder
from specdec_triton._library import why_not_triton
from specdec_triton.interpreter import counted
from specdec_triton.testing import toy_model

REASON = why_not_triton("verify_attention", "cpu")
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
PROMPTS = [[3, 5, 7, 3, 5, 7, 3, 5, 7, 11, 3], [2, 9]]


def texts(model, params, **options):
    torch.manual_seed(1)
    engine = SpeculativeDecoder(model, PromptLookup(), num_draft_tokens=3, **options)
    return [out.token_ids for out in engine.generate(PROMPTS, SamplingParams(max_new_tokens=4, **params))]


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("llama", {"temperature": 0}),
        ("llama", {"seed": 3}),
        ("llama", {"seed": 3, "top_k": 20}),
        ("llama", {}),
        (
            "llama",
            {"seed": 3, "typical_p": 0.8, "frequency_penalty": 3.0, "no_repeat_ngram_size": 2, "logit_bias": {3: 2.0}},
        ),
        ("gemma2", {"temperature": 0}),
    ],
    ids=str,
)
def test_texts_are_those_of_the_reference(kind, params, few_splits):
    """Greedy, coupled with and without filters, rejection (seeded by torch's generator), logit rules; a window with softcap."""
    model = toy_model(kind, **({"sliding_window": 4} if kind == "gemma2" else {}))
    want = texts(model, params, exact=False, backend="torch")
    assert texts(model, params, exact=False, backend="triton") == want


def test_backend_by_environment(few_splits, monkeypatch):
    """SPECDEC_BACKEND alone puts every op of a round on its kernel, or none."""
    model = toy_model()
    launched = {}
    for backend in ("torch", "triton"):
        monkeypatch.setenv("SPECDEC_BACKEND", backend)
        with counted() as traffic:
            launched[backend] = texts(model, {"temperature": 0}, exact=False), set(traffic)
    assert launched["torch"][0] == launched["triton"][0]
    assert launched["torch"][1] == set()
    ops = {"_append_kv_kernel", "_verify_attention_kernel", "_row_stats_kernel", "_ngram_propose_kernel"}
    assert launched["triton"][1] >= ops
