"""The package as a whole: cheap to import, complete, usable without Triton, and honest about which backend runs."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import os
import subprocess
import sys

import pytest
import torch

import specdec_triton
from specdec_triton import SamplingParams, _library, ops
from specdec_triton.logit_rules import LogitRules
from specdec_triton.testing import batch_of, paged_case

OPS = [
    "append_kv", "compact_kv", "verify_attention", "accept_reject", "sample", "ngram_propose", "skinny_linear", "row_mean",
    "apply_logit_rules", "rms_norm", "gated_mlp_activation", "gated_linear", "rope_append", "verify_head", "sample_head",
    "head_stats", "accept_stats",
]  # fmt: skip


def python(code, **env):
    """The code's output in a fresh interpreter."""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **env}, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


def test_import_is_cheap():
    """No heavy package is loaded, and it takes less than 0.3 s (the best of three, on a busy machine)."""
    code = (
        "import sys, time; start = time.perf_counter(); import specdec_triton; print(time.perf_counter() - start);"
        "print(*sorted({'torch', 'transformers', 'triton', 'numpy'} & set(sys.modules)))"
    )
    runs = [python(code) for _ in range(3)]
    assert [run[1:] for run in runs] == [[]] * 3
    assert min(float(run[0]) for run in runs) < 0.3


def test_sampling_params_need_no_torch():
    code = "from specdec_triton import SamplingParams; SamplingParams(top_p=0.9)"
    assert python(f"{code}; import sys; print('torch' in sys.modules)") == ["False"]


@pytest.mark.parametrize("name", specdec_triton.__all__)
def test_every_public_name_resolves(name):
    value = getattr(specdec_triton, name)
    assert value.__doc__
    assert name in dir(specdec_triton)
    assert value is getattr(specdec_triton, name)


def test_all_is_sorted_and_names_are_few():
    assert sorted(specdec_triton.__all__) == specdec_triton.__all__
    assert len(specdec_triton.__all__) <= 16


def test_unknown_names():
    with pytest.raises(AttributeError, match="specdec_triton' has no attribute 'SuffixTree'"):
        specdec_triton.SuffixTree  # noqa: B018
    with pytest.raises(ImportError):
        exec("from specdec_triton import nothing_of_the_kind")


def test_kernels_are_a_subpackage_and_not_a_package_of_their_own():
    """design.md 2: importable as specdec_triton.kernels, without an __init__.py."""
    spec = importlib.util.find_spec("specdec_triton.kernels")
    assert spec is not None
    assert spec.origin is None


def test_works_without_triton():
    """faults.md K7: import, automatic choice and explicit error."""
    code = """
import sys
sys.modules["triton"] = None  # as if it were not installed
import torch
from specdec_triton import ops, SamplingParams
params = ops.SamplingBatch.from_params([SamplingParams(temperature=0)], [0])
print(ops.sample(torch.tensor([[0.0, 1.0]]), params=params).tolist())
try:
    ops.sample(torch.tensor([[0.0, 1.0]]), params=params, backend="triton")
except RuntimeError as error:
    print(error)
"""
    out = " ".join(python(code))
    assert out.startswith("[1] backend='triton' cannot run sample on cpu: the package triton is not installed")


@pytest.mark.parametrize(
    ("name", "at_least"),
    [
        ("ops.paged", 10),
        ("ops.sampling", 4),
        ("ops.drafting", 1),
        ("ops.linear", 3),
        ("ops.rowwise", 2),
        ("sampling", 1),
    ],
)
def test_examples_in_docstrings(name, at_least):
    results = doctest.testmod(importlib.import_module(f"specdec_triton.{name}"))
    assert results.failed == 0
    assert results.attempted >= at_least


# Backends.


def calls():
    """One small call of each op."""
    case = paged_case([3], 2)
    k = torch.zeros(1, 2, 2, 16)
    logits, params = torch.zeros(1, 3, 5), batch_of(1)
    greedy = {"params": params, "method": "greedy"}
    stats = ops.head_stats(logits, logits[0], torch.tensor([[1, 2]]), **greedy, backend="torch")
    return {
        "append_kv": lambda **b: ops.append_kv(k, k, *case.args[1:], **b),
        "rope_append": lambda **b: ops.rope_append(k, k, k, None, None, *case.args[1:], **b),
        "compact_kv": lambda **b: ops.compact_kv(*case.args[1:5], torch.tensor([[0, 1]]), **b),
        "verify_attention": lambda **b: ops.verify_attention(*case.args, **b),
        "accept_reject": lambda **b: ops.accept_reject(
            torch.tensor([[1, 2]]), logits, params=params, method="greedy", **b
        ),
        "sample": lambda **b: ops.sample(logits[:, 0], params=params, **b),
        "ngram_propose": lambda **b: ops.ngram_propose(torch.tensor([[1, 1]]), torch.tensor([2]), 2, **b),
        "skinny_linear": lambda **b: ops.skinny_linear(logits[0], logits[0], **b),
        "row_mean": lambda **b: ops.row_mean(logits[0], **b),
        "verify_head": lambda **b: ops.verify_head(logits, logits[0], torch.tensor([[1, 2]]), **greedy, **b),
        "sample_head": lambda **b: ops.sample_head(logits[0], logits[0], params=batch_of(3), **b),
        "head_stats": lambda **b: ops.head_stats(logits, logits[0], torch.tensor([[1, 2]]), **greedy, **b),
        "accept_stats": lambda **b: ops.accept_stats(stats, torch.tensor([[1, 2]]), **greedy, **b),
        "apply_logit_rules": lambda **b: ops.apply_logit_rules(
            logits, torch.tensor([[1, 2]]), rules=LogitRules(torch.tensor([1])), **b
        ),
        "rms_norm": lambda **b: ops.rms_norm(logits, logits[0, 0], **b),
        "gated_mlp_activation": lambda **b: ops.gated_mlp_activation(k, **b),
        "gated_linear": lambda **b: ops.gated_linear(logits[0], logits.new_ones(4, 5), **b),
    }


@pytest.mark.parametrize("op", OPS)
def test_triton_is_never_replaced_silently(op, monkeypatch):
    """An explicit choice that cannot run is an error that says why, as a keyword and in the environment."""
    call = calls()[op]
    call(backend="torch")
    reason = _library.why_not_triton(op, "cpu")
    if reason is None:
        call(backend="triton")
        return
    with pytest.raises(RuntimeError, match=f"^backend='triton' cannot run {op} on cpu: {reason}"):
        call(backend="triton")
    monkeypatch.setenv("SPECDEC_BACKEND", "triton")
    with pytest.raises(RuntimeError, match=f"^SPECDEC_BACKEND='triton' cannot run {op} on cpu"):
        call()
    call(backend="torch")  # the keyword wins


@pytest.mark.parametrize("op", OPS)
def test_environment_chooses_the_backend(op, monkeypatch):
    call = calls()[op]
    for value in ("torch", ""):
        monkeypatch.setenv("SPECDEC_BACKEND", value)
        call()
    monkeypatch.setenv("SPECDEC_BACKEND", "cuda")
    with pytest.raises(ValueError, match=r"^SPECDEC_BACKEND must be one of triton, torch, got 'cuda'"):
        call()
    call(backend="torch")


@pytest.mark.parametrize("value", ["Triton", "", "numpy"])
def test_unknown_backend(value):
    for call in calls().values():
        with pytest.raises(ValueError, match=r"^backend must be one of triton, torch"):
            call(backend=value)


def test_decoder_takes_a_backend():
    from specdec_triton import SpeculativeDecoder
    from specdec_triton.testing import toy_model

    model = toy_model()
    engine = SpeculativeDecoder(model, backend="torch", exact=False)
    assert len(engine.generate([[1, 2]], SamplingParams(temperature=0, max_new_tokens=3))[0].token_ids) == 3
    if any(_library.why_not_triton(op, "cpu") for op in OPS):
        with pytest.raises(RuntimeError, match=r"^backend='triton' cannot run"):
            SpeculativeDecoder(model, backend="triton").generate([[1, 2]])


class FakeSpecs:
    """Stands in for importlib.util: some packages exist, others do not."""

    def __init__(self, *names):
        self.names = names

    def find_spec(self, name):
        return object() if name in self.names else None


NEW, OLD = {"triton": (3, 9), "numpy": (2, 4)}, {"triton": (3, 6), "numpy": (2, 4)}


@pytest.mark.parametrize(
    ("installed", "releases", "device", "interpret", "reason"),
    [
        ((), NEW, "cuda", None, "the package triton is not installed"),
        (("triton",), NEW, "cuda", None, "this op has no Triton kernel yet"),
        (("triton", "specdec_triton.kernels.sample"), NEW, "cpu", None, "set TRITON_INTERPRET=1"),
        (("triton", "specdec_triton.kernels.sample"), NEW, "cpu", "1", None),
        (("triton", "specdec_triton.kernels.sample"), OLD, "cpu", "1", "fails with numpy 2.4"),
        (("triton", "specdec_triton.kernels.sample"), OLD, "cuda", None, None),
    ],
)
def test_why_not_triton(installed, releases, device, interpret, reason, monkeypatch):
    monkeypatch.setattr(_library.importlib, "util", FakeSpecs(*installed))
    monkeypatch.setattr(_library, "_release", releases.get)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if interpret:
        monkeypatch.setenv("TRITON_INTERPRET", interpret)
    found = _library.why_not_triton.__wrapped__("sample", device)
    assert found is None if reason is None else reason in found
