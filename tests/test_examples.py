"""The examples run, and do what they say."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


OP = "verify_head"


@pytest.mark.parametrize("seed", [None, 7], ids=["greedy", "sampled"])
def test_own_engine(backend, seed, monkeypatch):
    """With drafts the texts of plain decoding, in fewer passes; on both backends."""
    monkeypatch.setenv("SPECDEC_BACKEND", backend)
    engine = load("own_engine")
    model, new = engine.Model("cpu", torch.float32), 48 if backend == "torch" else 4
    plain, slow = engine.decode(model, engine.PROMPTS, 0, new, seed=seed)
    texts, fast = engine.decode(model, engine.PROMPTS, engine.K, new, seed=seed)
    assert texts == plain
    assert slow == new
    assert fast <= slow
    if backend == "torch" and seed is None:  # sampled from random weights, a text repeats itself less
        assert fast < slow
    assert all(len(text) == len(prompt) + new for text, prompt in zip(texts, engine.PROMPTS, strict=True))


def test_own_engine_as_a_command():
    out = subprocess.run(
        [sys.executable, EXAMPLES / "own_engine.py"], capture_output=True, text=True, check=True
    ).stdout
    assert out.count("the same texts: True") == 2


def test_docs_on_drafters():
    """Its Python runs, and the drafter that it writes decodes."""
    from specdec_triton import SamplingParams, SpeculativeDecoder
    from specdec_triton.testing import plain_greedy, toy_model

    text = (EXAMPLES.parent / "docs" / "drafters.md").read_text()
    names: dict = {}
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        exec(block, names)
    model = toy_model()
    (out,) = SpeculativeDecoder(model, names["Stutter"](), adaptive=False).generate(
        [[5, 17, 3]], SamplingParams(temperature=0, max_new_tokens=20)
    )
    assert out.token_ids == plain_greedy(model, [5, 17, 3], 20)
    assert out.stats.drafted > 0
