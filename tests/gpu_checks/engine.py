"""Whole rounds: texts, graphs, and that the host waits for nothing."""

from __future__ import annotations

import random
import warnings
from typing import Any

import torch

from gpu_checks import common
from gpu_checks.common import DTYPES, add, needs_gpu, on_gpu
from specdec_triton import DraftModel, NoDraft, PromptLookup, SamplingParams, SpeculativeDecoder, ops, optimize
from specdec_triton.adapter import ModelAdapter
from specdec_triton.engine.graphs import StepGraphs, graphs_for
from specdec_triton.testing import batch_of, paged_case, toy_model


def check_graph() -> None:
    """A CUDA graph of a verify pass's ops, replayed on other inputs, gives what the ops give."""
    needs_gpu()
    case = paged_case([40, 300], 5, q_heads=8, kv_heads=2, dim=64, dtype=torch.bfloat16)
    q, *pages = on_gpu(case.args)
    target = torch.randn(2, 6, 32000, device=common.device).bfloat16()
    drafts, params = torch.randint(0, 32000, (2, 5), device=common.device), on_gpu(batch_of(2, top_p=0.9))

    def step() -> tuple[torch.Tensor, ...]:
        out = ops.verify_attention(q, *pages, backend="triton")
        result = ops.accept_reject(drafts, target, params=params, method="coupled", backend="triton")
        return out, *result

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        q.copy_(torch.randn(q.shape, generator=generator))
        target.copy_(torch.randn(target.shape, generator=generator))
        params.seed.fill_(seed)
        graph.replay()
        for a, b in zip(captured, step(), strict=True):
            assert torch.equal(a, b)


PROMPTS = [[3, 5, 7, 3, 5, 7, 3, 5, 7, 11, 3], [2, 9], [8, 8, 8, 8]]


def texts(kind: str, where: torch.device, exact: bool, params: dict, fused: bool = False) -> list[list[int]]:
    model = toy_model(kind, **({"sliding_window": 4} if kind == "gemma2" else {})).to(where)
    if fused:
        optimize(model, kernels=True)
    backend = "triton" if where == common.device else "torch"
    engine = SpeculativeDecoder(model, PromptLookup(), num_draft_tokens=3, exact=exact, backend=backend)
    outs = engine.generate(PROMPTS, SamplingParams(max_new_tokens=24, **params))
    return [out.token_ids for out in outs]


def check_text(kind: str, exact: bool = False, fused: bool = False, **params: object) -> None:
    """Tiny models in fp32: the CPU's text (their logits are far apart). Bit-exact decoding is to be had on every chip."""
    assert texts(kind, common.device, exact, params, fused) == texts(kind, torch.device("cpu"), exact, params)


def check_exact_passes(kind: str, dtype: torch.dtype) -> None:
    """A position's logits have the same bits token by token, in pieces, and beside other texts."""
    adapter = ModelAdapter(toy_model(kind, dtype=dtype).to(common.device), backend="triton")
    invariant = adapter.invariant_rows()
    text = ((torch.arange(17) * 31 + 5) % adapter.vocab_size).to(common.device)
    cache = adapter.new_cache(slots=5, page_size=16, num_pages=10)
    for slot in range(5):
        cache.reserve(slot, 17)

    def score(tokens: torch.Tensor, start: int) -> torch.Tensor:
        context = torch.full((len(tokens),), start, dtype=torch.int32, device=common.device)
        rows = invariant.pad(tokens.numel())
        return adapter.forward(tokens, cache, cache.block_table[: len(tokens)], context, rows=rows)

    whole = score(text[None], 0)[0].clone()
    for count in (1, 5, 8):
        parts = [score(text[None, start : start + count], start)[0] for start in range(0, 17, count)]
        assert torch.equal(torch.cat(parts), whole), count
    others = torch.stack([text.roll(i) for i in range(1, 5)] + [text])
    assert torch.equal(score(others, 0)[-1], whole)


DRAFTERS = {
    "none": NoDraft,
    "lookup": PromptLookup,
    "model": lambda: DraftModel(toy_model(seed=1, num_hidden_layers=1).to(common.device)),
}


def rounds_on_gpu(drafter: str, **options: Any) -> SpeculativeDecoder:
    options = {"max_seq_len": 64, "num_pages": 64, "exact": False, "adaptive": False, "backend": "triton"} | options
    return SpeculativeDecoder(toy_model().to(common.device), DRAFTERS[drafter](), num_draft_tokens=3, **options)


@torch.inference_mode()
def check_no_waiting(drafter: str, adaptive: bool, params: dict) -> None:
    """Whole steps, with requests that come and pages that are taken, make the host wait for nothing (faults.md G2)."""
    needs_gpu()
    engine = rounds_on_gpu(drafter, adaptive=adaptive)
    each = SamplingParams(max_new_tokens=40, **params)
    engine.generate(PROMPTS, each)  # compiles and captures
    handles = [engine.submit(prompt, each) for prompt in PROMPTS]
    loop = engine._loop
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in PROMPTS:
            loop._prefill(loop.scheduler.prefilling())
        for _ in range(8):
            loop._enqueue(loop._make_room())
            while len(loop._pending) > 1:  # reading waits for an event, which is what it is there for
                torch.cuda.set_sync_debug_mode("default")
                loop._read(1)
                torch.cuda.set_sync_debug_mode("error")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    engine.run()
    assert all(len(handle.token_ids) == 40 for handle in handles)


def check_captured(drafter: str, params: dict) -> None:
    """Rounds are captured without a warning and replayed; texts are those of eager rounds (faults.md G1, G3)."""
    needs_gpu()
    each = [SamplingParams(max_new_tokens=20 + 9 * i, **params) for i in range(len(PROMPTS))]
    eager = rounds_on_gpu(drafter)
    eager._loop._graphs = StepGraphs(None)
    want = [out.token_ids for out in eager.generate(PROMPTS, each)]
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        engine = rounds_on_gpu(drafter)
        engine.warmup()
        for order in (slice(None), slice(None, None, -1)):
            got = [out.token_ids for out in engine.generate(PROMPTS[order], each[order])]
            assert got == want[order]
    graphs = engine._loop._graphs
    assert graphs.captured > 0
    assert graphs.replays > 20


def check_failed_capture() -> None:
    """A step that waits for the device cannot be captured: one warning, eager steps, and the device goes on working."""
    needs_gpu()
    x, graphs = torch.zeros(4, device=common.device), graphs_for(common.device)

    def step() -> None:
        x.add_(1)
        x.sum().item()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            graphs.run("key", step)
    assert sum("cannot be captured" in str(w.message) for w in caught) == 1
    assert x.tolist() == [4.0] * 4
    torch.cuda.empty_cache()
    assert float(torch.ones(1000, device=common.device).sum()) == 1000


def check_batching(drafter: str) -> None:
    """60 requests through 4 slots and few pages, some cancelled: texts are those of a request alone (faults.md E9, E10)."""
    rng = random.Random(0)
    alone = rounds_on_gpu(drafter, max_batch_size=1)
    params = [SamplingParams(temperature=0, max_new_tokens=24), SamplingParams(seed=3, max_new_tokens=24)]
    jobs = [(prompt, each, alone.generate([prompt], each)[0].token_ids) for prompt in PROMPTS for each in params]
    engine = rounds_on_gpu(drafter, max_batch_size=4, num_pages=7, page_size=5)
    chosen = [rng.choice(jobs) for _ in range(60)]
    handles = [engine.submit(prompt, each) for prompt, each, _ in chosen]
    while engine.step():
        waiting = [handle for handle in handles if handle.output is None]
        if waiting and rng.random() < 0.05:
            rng.choice(waiting).cancel()
    for handle, (_, _, text) in zip(handles, chosen, strict=True):
        assert handle.token_ids == text[: len(handle.token_ids)]
        assert len(handle.token_ids) == 24 or handle.output.finish_reason == "cancelled"
    assert engine.stats.preemptions > 0
    assert engine.free_pages == engine.num_pages


for _drafter in DRAFTERS:
    add(f"batching-{_drafter}", check_batching, _drafter)
    for _name, _params in {"greedy": {"temperature": 0}, "coupled": {"seed": 3, "top_p": 0.9}, "rejection": {}}.items():
        add(f"no-waiting-{_drafter}-{_name}", check_no_waiting, _drafter, False, _params)
        if _name != "rejection":  # unseeded requests draw other seeds in another order
            add(f"captured-{_drafter}-{_name}", check_captured, _drafter, _params)
    add(f"no-waiting-{_drafter}-adaptive", check_no_waiting, _drafter, True, {"temperature": 0})
add("failed-capture", check_failed_capture)
add("graph", check_graph)
add("text-llama-greedy", check_text, "llama", temperature=0)
add("text-llama-coupled", check_text, "llama", seed=3, top_k=20)
add("text-gemma2-greedy", check_text, "gemma2", temperature=0)
add("text-exact", check_text, "llama", exact=True, temperature=0)
for _kind in ("llama", "qwen3", "gemma3_text"):
    add(f"text-{_kind}-fused", check_text, _kind, fused=True, temperature=0)
    add(f"text-{_kind}-fused-exact", check_text, _kind, exact=True, fused=True, seed=3)
for _kind in ("llama", "gemma3_text", "qwen2"):
    for _dtype in ("fp32", "bf16"):
        add(f"exact-{_kind}-{_dtype}", check_exact_passes, _kind, DTYPES[_dtype])
