"""``exact``: equal means equal bits. In bf16, where rounding is coarse, the text is the same for every K and batch."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from functools import lru_cache
from types import SimpleNamespace

import pytest
import torch
import transformers

from specdec_triton import DraftModel, NoDraft, PromptLookup, SamplingParams, SpeculativeDecoder, exactness
from specdec_triton.adapter import ModelAdapter
from specdec_triton.exactness import ExactnessError, InvariantRows, _layer_probes
from specdec_triton.fusion.packed_linear import FbgemmLinear
from specdec_triton.testing import always_right, random_drafts, toy_model

PROMPTS = [[3, 5, 7, 3, 5, 7, 3, 5, 7, 11, 3], [2, 9], list(range(20, 50))]
NEW = 16
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}


@lru_cache
def model_of(dtype, kind="llama", **config):
    return toy_model(kind, dtype=dtype, **config)


@lru_cache
def small():
    return toy_model(seed=1, dtype=torch.bfloat16, num_hidden_layers=1)


def run(target, drafter, k, params, prompts=PROMPTS, **options):
    engine = SpeculativeDecoder(target, drafter, num_draft_tokens=k, page_size=5, exact=True, **options)
    return [out.token_ids for out in engine.generate(prompts, params)]


GREEDY = SamplingParams(temperature=0, max_new_tokens=NEW)
SEEDED = SamplingParams(seed=11, top_p=0.95, max_new_tokens=NEW)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "coupled"])
def test_text_is_the_same_for_every_k_and_batch(dtype, params):
    """faults.md A1, A7, B17."""
    target = ModelAdapter(model_of(dtype))
    want = [run(target, NoDraft(), 0, params, [prompt])[0] for prompt in PROMPTS]
    assert all(len(set(text)) > 3 for text in want)
    whole = [prompt + text for prompt, text in zip(PROMPTS, want, strict=True)]
    assert run(target, None, 0, params) == want
    for k in range(1, 9):
        assert run(target, random_drafts(whole), k, params) == want, k
    for drafter in (PromptLookup(), DraftModel(small()), always_right(whole)):
        assert run(target, drafter, 4, params) == want
    assert run(target, random_drafts(whole), 5, params, PROMPTS[::-1], max_batch_size=2) == want[::-1]


@pytest.fixture
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("kind", "threads"),
    [("llama", 1), ("llama", 2), ("mistral", 1), ("gemma2", 1), ("qwen3", 1)],
    indirect=["threads"],
)
def test_logits_bits_do_not_depend_on_the_pass(kind, threads):
    """A chain scored in one pass, in pieces, token by token, and beside another text."""
    model = model_of(torch.bfloat16, kind, **({} if kind in ("llama", "qwen3") else {"sliding_window": 4}))
    adapter = ModelAdapter(model)
    invariant = InvariantRows(adapter)
    text = (torch.arange(17) * 31 + 5) % adapter.vocab_size
    cache = adapter.new_cache(slots=2, page_size=3, num_pages=20)
    for slot in (0, 1):
        cache.reserve(slot, 24)

    def score(counts):
        rows, start = [], 0
        for n in counts:
            context = torch.tensor([start], dtype=torch.int32)
            new = text[None, start : start + n]
            rows.append(adapter.forward(new, cache, cache.block_table[1:], context, rows=invariant.pad(n))[0])
            start += n
        return torch.cat(rows)

    want = score([17])
    for counts in ([1] * 17, [5, 3, 9], [7, 1, 1, 8])[threads - 1 :]:
        assert torch.equal(score(counts), want), counts
    both = torch.stack([text.flip(0), text])
    zero = torch.zeros(2, dtype=torch.int32)
    assert torch.equal(adapter.forward(both, cache, cache.block_table, zero, rows=invariant.pad(34))[1], want)
    ragged = adapter.forward(
        both, cache, cache.block_table, zero, torch.tensor([4, 17], dtype=torch.int32), rows=invariant.pad(21)
    )
    assert torch.equal(ragged[1], want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_pad(dtype):
    """The next invariant count: at least as large, within reach, itself invariant, the same when asked again."""
    rows = InvariantRows(ModelAdapter(model_of(dtype)))
    padded = [rows.pad(n) for n in range(1, 70)]
    for n, p in enumerate(padded, 1):
        assert n <= p <= n + 16
        assert rows.pad(p) == p
    assert padded == sorted(padded)
    assert padded == [rows.pad(n) for n in range(1, 70)]


class FakeAdapter:
    """A machine whose rounding follows a rule: ``error(count, row)`` is added to row ``row`` of a pass of ``count``."""

    device, vocab_size, model = torch.device("cpu"), 97, torch.nn.Module()
    pads, invariant_products = True, nullcontext
    observation = SimpleNamespace(mixture=False)

    def __init__(self, error):
        self._error = error

    def new_cache(self, **_):
        return SimpleNamespace(reserve=lambda *_: None, block_table=None)

    def forward(self, tokens, cache, table, context, rows=None):
        count = max(rows or 0, tokens.numel())
        error = [self._error(count, row) for row in range(tokens.numel())]
        return (tokens + torch.tensor(error).view(tokens.shape))[..., None]


def test_pad_finds_the_counts_that_are_invariant():
    rows = InvariantRows(FakeAdapter(lambda count, row: 0.0 if count % 4 == 0 else 0.5))
    assert [rows.pad(n) for n in (1, 3, 4, 5, 8, 9)] == [4, 4, 4, 8, 8, 12]
    rows = InvariantRows(FakeAdapter(lambda count, row: 0.0 if count in (2, 8, 9) else 0.5))
    assert [rows.pad(n) for n in (1, 2, 3, 9)] == [2, 2, 8, 9]
    with pytest.raises(ExactnessError, match="no invariant row count from 10 to 26"):
        rows.pad(10)


def test_canonical_count_is_one_that_agrees_with_itself():
    """8 rows whose last row differs are not invariant; 16 are."""
    rows = InvariantRows(FakeAdapter(lambda count, row: float(count == 8 and row == 7)))
    assert rows.pad(1) == 1
    assert rows.pad(8) == 9


def test_a_machine_without_invariant_counts_is_refused():
    with pytest.raises(ExactnessError, match="depend on its place"):
        InvariantRows(FakeAdapter(lambda count, row: row * 0.5))


class RareFlips(torch.nn.Linear):
    """A half-precision layer that rounds one output of 4,096 differently when it is given a single row."""

    def forward(self, x):
        out = super().forward(x)
        if len(x) == 1 and float(x[0, 0]) < -3:  # 0.13% of random rows
            out = out.clone()
            out[0, 0] += 0.5
        return out


def test_rare_differences_are_found():
    """A whole pass of a few tokens would not show them."""
    adapter = FakeAdapter(lambda count, row: 0.0)
    torch.manual_seed(0)
    adapter.model = RareFlips(16, 16, dtype=torch.bfloat16)
    rows = InvariantRows(adapter)
    assert [rows.pad(n) for n in (1, 2, 3)] == [2, 2, 3]
    adapter.model = torch.nn.Linear(16, 16, dtype=torch.bfloat16)
    assert [InvariantRows(adapter).pad(n) for n in (2, 3)] == [2, 3]


def test_every_kind_of_layer_is_tested_once():
    """Linear layers, packed ones, transformers' Conv1D, norms; not embeddings, convolutions, containers."""
    conv1d = transformers.pytorch_utils.Conv1D(12, 8)
    layers = [torch.nn.Linear(8, 4), torch.nn.Linear(8, 4), torch.nn.Linear(4, 8), FbgemmLinear, conv1d]
    layers[3] = FbgemmLinear(torch.randn(16, 8).bfloat16())
    norms = [torch.nn.LayerNorm(8), torch.nn.LayerNorm(8), torch.nn.RMSNorm(4)]
    others = [torch.nn.Embedding(5, 8), torch.nn.Conv1d(2, 2, 3), torch.nn.SiLU(), torch.nn.Dropout(0.5)]
    probes = list(_layer_probes(torch.nn.Sequential(*layers, *norms, *others), 8, remember=False))
    widths = [(probe._inputs.shape[1], probe.want.shape[1]) for probe in probes]
    assert widths == [(8, 4), (4, 8), (8, 16), (8, 12), (8, 8), (4, 4)]
    assert all(probe.want.numel() >= 2**17 for probe in probes)


def test_what_was_found_of_a_kind_of_layer_holds_for_all_of_them(monkeypatch):
    """Of one shape, dtype and number of threads; a layer that somebody has changed, or a type from elsewhere, is tested itself."""
    compared = []
    compare = exactness._Probe._compare
    monkeypatch.setattr(exactness, "_found", {})
    monkeypatch.setattr(exactness._Probe, "_compare", lambda self, count: compared.append(self) or compare(self, count))

    def tested(layer, remember=True):
        compared.clear()
        (probe,) = _layer_probes(layer, 8, remember=remember)
        agrees = probe.agrees(3)
        assert probe.agrees(3) == agrees
        return len(compared)

    def linear(width=16, **options):
        return torch.nn.Linear(width, 12, **options)

    first = tested(linear())
    assert first == 2  # for 8 and for 3
    assert tested(linear()) == 0
    for other in (linear(24), linear(bias=False), linear(dtype=torch.bfloat16)):
        assert tested(other) == 2
    assert tested(linear(), remember=False) == 2
    changed = linear()
    changed.forward = lambda x: torch.nn.functional.linear(x, changed.weight, changed.bias)
    assert tested(changed) == 2
    assert tested(RareFlips(16, 16, dtype=torch.bfloat16)) == 2
    threads = torch.get_num_threads()
    torch.set_num_threads(3 - min(threads, 2))
    try:
        assert tested(linear()) == 2
    finally:
        torch.set_num_threads(threads)


def test_mixtures_are_refused():
    """design.md 5: exact=True only where it can hold; by default such a model decodes with a warning."""
    model = model_of(torch.float32, "mixtral", **MOE)
    with pytest.raises(ExactnessError, match="mixture-of-experts"):
        SpeculativeDecoder(model, exact=True)
    engine = SpeculativeDecoder(model, PromptLookup())
    with pytest.warns(UserWarning, match="mixture-of-experts.*may differ from plain decoding at near-ties"):
        engine.generate(PROMPTS, GREEDY)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.generate(PROMPTS, GREEDY)  # warned once
        SpeculativeDecoder(model, PromptLookup(), exact=False).generate(PROMPTS, GREEDY)


def test_exact_is_the_default_for_greedy_and_coupled_text(monkeypatch):
    """None: probed when first needed, not for rejection; False: never. Once per model, also for several decoders."""
    built = []
    original = InvariantRows.__init__

    def spy(self, adapter):
        built.append(self)
        original(self, adapter)

    monkeypatch.setattr(InvariantRows, "__init__", spy)
    model, k = model_of(torch.bfloat16), 3
    engine = SpeculativeDecoder(model, PromptLookup(), num_draft_tokens=k)
    engine.generate(PROMPTS, SamplingParams(max_new_tokens=4))
    assert built == []
    for params in (GREEDY, SEEDED):
        SpeculativeDecoder(model, PromptLookup(), num_draft_tokens=k, exact=False).generate(PROMPTS, params)
    assert built == []
    engine.generate(PROMPTS, GREEDY)
    engine.generate(PROMPTS, SEEDED)
    SpeculativeDecoder(engine.target, exact=True)
    assert len(built) == 1
    SpeculativeDecoder(model, exact=True)
    assert len(built) == 2


def test_warmup_tests_the_counts_of_a_round():
    engine = SpeculativeDecoder(model_of(torch.bfloat16), PromptLookup(), num_draft_tokens=5)
    engine.warmup()
    assert set(range(1, 7)) <= set(engine.target.invariant_rows()._padded)


def test_few_counts_are_tested(monkeypatch):
    """Beyond 16 rows only round counts: a batch whose rows change from round to round does not wait for a test each time."""
    rows = object.__new__(InvariantRows)
    rows._adapter, rows._padded = FakeAdapter(None), {}
    tested = []
    monkeypatch.setattr(InvariantRows, "_is_invariant", lambda self, count: tested.append(count) or count % 3 != 0)
    padded = [rows.pad(n) for n in range(1, 257)]
    assert all(n <= p < 1.5 * n + 3 for n, p in zip(range(1, 257), padded, strict=True))
    assert all(p % 3 for p in padded)
    assert padded[:5] == [1, 2, 4, 4, 5]
    assert padded[16] == padded[19] == 20
    assert padded[64] == padded[79] == 80
    assert len(set(tested)) < 45
