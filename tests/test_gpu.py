"""Every op's Triton kernel on a GPU against the reference on the CPU, and what only a chip can show: bits, host reads, graphs.

    python -m pytest -q tests/test_gpu.py
    python tests/test_gpu.py --shard 0/4          # the same checks without pytest, a quarter of them
    TRITON_INTERPRET=1 python tests/test_gpu.py --device cpu --only ragged     # the checks themselves, without a GPU

What counts as equal: attention is at most twice as far from fp64 as PyTorch in the same dtype (1e-5 in fp32); bytes and bits are
equal; so are integers, but for near ties by the rule of ``specdec_triton.testing.unexplained``. No op may read on the host.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import SkipTest

import torch

from specdec_triton import DraftModel, NoDraft, PromptLookup, SamplingParams, SpeculativeDecoder, ops
from specdec_triton._library import why_not_triton
from specdec_triton.adapter import ModelAdapter
from specdec_triton.engine.graphs import StepGraphs, graphs_for
from specdec_triton.logit_rules import LogitRules
from specdec_triton.ops import METHODS, SamplingBatch
from specdec_triton.testing import (
    FP8,
    NAN,
    attention_oracle,
    batch_of,
    paged_case,
    poisoned_outputs,
    toy_model,
    tree,
    unexplained,
)

device = torch.device("cuda")
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
CHECKS: dict[str, Callable[[], object]] = {}


def on_gpu(x: object) -> object:
    """Tensors, and those in tuples, dicts, parameters and rules, on the device."""
    if isinstance(x, torch.Tensor):
        return x.to(device)
    if isinstance(x, dict):
        return {name: on_gpu(value) for name, value in x.items()}
    if isinstance(x, SamplingBatch | LogitRules):
        return replace(x, **{name: on_gpu(value) for name, value in vars(x).items()})
    return tuple(map(on_gpu, x)) if isinstance(x, tuple | list) else x


@contextmanager
def no_host_reads() -> Iterator[None]:
    """A wait for the device raises inside (compiling a kernel does not wait)."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def call(op: Callable, *args: object, **options: object) -> object:
    """The op's kernel on the device's copies of the arguments; what it allocates holds NaN."""
    args, options = on_gpu(args), on_gpu(options)
    with no_host_reads(), poisoned_outputs():
        return op(*args, **options, backend="triton")


# Attention.


def on(context: list[int], new: int, **shape: object) -> dict[str, object]:
    return {"context_lens": context, "new": new, **shape}


ATTENTION = {
    "page-1": (on([0, 1, 5, 33], 3, page_size=1), {}),
    "page-48": (on([47, 1, 96], 3, page_size=48), {}),
    "group-1": (on([9, 300], 3, q_heads=3, kv_heads=3), {}),
    "group-3": (on([9, 300], 3, q_heads=9, kv_heads=3, dim=64), {}),
    "group-7": (on([9, 300], 3, q_heads=28, kv_heads=4), {}),
    "group-71": (on([9, 2], 3, q_heads=71, kv_heads=1), {}),
    **{f"head-{d}": (on([11, 300], 5, dim=d), {}) for d in (80, 96, 128, 192, 256)},
    **{f"T-{t}": (on([11, 300], t), {}) for t in (1, 2, 5, 8, 17, 64)},
    "ragged": (on([12, 0, 7, 300], 5, query_lens=[5, 1, 0, 3]), {}),
    "prefill": (on([0, 0], 40, query_lens=[40, 17], page_size=7), {}),
    "window-4": (on([12, 3, 0, 300], 5), {"sliding_window": 4}),
    "window-ragged": (on([300, 3], 5, query_lens=[2, 5], page_size=7), {"sliding_window": 260}),
    "softcap": (on([12, 300], 3, amplitude=40.0), {"softcap": 50.0}),
    "sinks": (on([12, 0, 300], 3), {"sinks": True}),
    "tree": (on([12, 300], 5), {"tree_mask": tree(-1, 0, 0, 1, 2)}),
    "tree-64": (on([5], 64), {"tree_mask": tree(-1, *range(63))}),
    "tree-window": (on([12, 300], 5), {"tree_mask": tree(-1, 0, 0, 1, 2), "sliding_window": 4}),
    "tree-empty-rows": (on([0, 0], 3), {"tree_mask": torch.tensor([1, 0, 5])}),
    "fp8": (on([12, 300], 3, fp8=True), {}),
    "fp8-128": (on([12, 300], 3, fp8=True, dim=128), {}),
    "everything": (
        on([60, 0, 9], 5, query_lens=[5, 2, 4], q_heads=6, dim=80, page_size=7, fp8=True, amplitude=5.0),
        {"tree_mask": tree(-1, 0, 0, 1, 2), "sliding_window": 6, "softcap": 3.0, "sinks": True, "scale": 0.3},
    ),
}
# Hq, Hkv, D of real models, at contexts of many chunks.
REAL = {
    "llama3-8b": (32, 8, 128),
    "qwen2-0.5b": (14, 2, 64),
    "gemma3-4b": (8, 4, 256),
    "gpt-oss-20b": (64, 8, 64),
    "phi2": (32, 32, 80),
    "smollm2": (9, 3, 64),
}


def check_attention(arguments: dict, options: dict, dtype: torch.dtype) -> None:
    case = paged_case(**{"page_size": 16, **arguments}, dtype=dtype)
    if options.get("sinks") is True:
        options = {**options, "sinks": torch.linspace(-1.0, 2.0, case.q.shape[2]).to(dtype)}
    out = call(ops.verify_attention, *case.args, **case.scales, **options).cpu()
    truth = attention_oracle(case, **options)
    plain = attention_oracle(case, **options, dtype=dtype)
    allowed = max(2 * float((plain.double() - truth).abs().max()), 1e-5 if dtype == torch.float32 else 0.0)
    error = float((out.double() - truth).abs().max())
    assert error <= allowed, f"{error:.2e} from fp64, allowed {allowed:.2e}"
    for b, n in enumerate(case.query_lens.tolist()):
        assert not out[b, n:].any(), "rows past query_lens are not 0"


for _dtype in DTYPES:
    for _name, (_arguments, _options) in ATTENTION.items():
        CHECKS[f"attention-{_dtype}-{_name}"] = lambda a=_arguments, o=_options, d=_dtype: check_attention(
            a, o, DTYPES[d]
        )
for _name, (_hq, _hkv, _dim) in REAL.items():
    for _fp8 in (False, True):
        _arguments = on([0, 900, 4097], 5, q_heads=_hq, kv_heads=_hkv, dim=_dim, fp8=_fp8)
        CHECKS[f"attention-{_name}{'-fp8' if _fp8 else ''}"] = lambda a=_arguments: check_attention(
            a, {}, torch.bfloat16
        )


def check_bits(shape: tuple[int, int, int], dtype: torch.dtype, fp8: bool, **options: object) -> None:
    """A text's rows have the same bits for T in {1, 2, 5, 8, 17} and in batches of 1, 3 and 64, with query_lens or without."""
    q_heads, kv_heads, dim = shape
    lengths = [600, *(30 + 37 * i % 900 for i in range(63))]
    case = paged_case([n - 17 for n in lengths], 17, q_heads=q_heads, kv_heads=kv_heads, dim=dim, dtype=dtype, fp8=fp8)
    q, k_cache, v_cache, table, context = (x.to(device) for x in case.args[:5])
    scales = on_gpu({name: x for name, x in case.scales.items() if x is not None})

    def score(rows: int, first: int, count: int, lens: torch.Tensor | None = None) -> torch.Tensor:
        """Text 0 in a batch of ``rows``, positions first .. first + count - 1 of the 17."""
        order = torch.arange(rows - 1, -1, -1, device=device)
        part = q[order, first : first + count]
        pages = table[order, : -(-lengths[0] // 16) if rows == 1 else None]  # nor do bits depend on the table's width
        with no_host_reads():
            out = ops.verify_attention(
                part, k_cache, v_cache, pages, context[order] + first, lens, **scales, **options,
                backend="triton",
            )  # fmt: skip
        return out[-1]

    whole = score(1, 0, 17)
    for count in (1, 2, 5, 8):
        for first in (0, 17 - count):
            assert torch.equal(score(1, first, count), whole[first : first + count]), f"T = {count} at {first}"
    for rows in (3, 64):
        for count in (1, 5, 17):
            want = whole[17 - count :]
            assert torch.equal(score(rows, 17 - count, count), want), f"T = {count} in a batch of {rows}"
            lens = torch.full((rows,), count, dtype=torch.int32, device=device)
            assert torch.equal(score(rows, 17 - count, count, lens), want), f"T = {count}, {rows} rows, query_lens"


for _name, _shape in {"4x128": (8, 2, 128), "3x64": (9, 3, 64), "1x80": (4, 4, 80), "2x256": (4, 2, 256)}.items():
    for _dtype in ("fp32", "bf16"):
        CHECKS[f"bits-{_name}-{_dtype}"] = lambda s=_shape, d=_dtype: check_bits(s, DTYPES[d], False)
CHECKS["bits-fp8"] = lambda: check_bits((8, 2, 128), torch.bfloat16, True)
CHECKS["bits-window"] = lambda: check_bits((8, 2, 128), torch.bfloat16, False, sliding_window=100)
CHECKS["bits-softcap"] = lambda: check_bits((8, 2, 128), torch.bfloat16, False, softcap=5.0)


# Pages.


def raw(x: torch.Tensor) -> torch.Tensor:
    return x.cpu().view(torch.uint8)


def paged_problem(dtype: torch.dtype, page_size: int, kv_heads: int, dim: int, count: int) -> tuple:
    """k, v, caches, table, context_lens, query_lens, scales."""
    contexts, lens = [0, 5, page_size - 1, 300], [count, 0, 1, count]
    new = torch.float32 if dtype == FP8 else dtype
    k, v = (4 * torch.randn(4, count, kv_heads, dim).to(new) for _ in range(2))
    columns = -(-(300 + count) // page_size) + 1
    caches = [torch.randn(4 * columns + 3, page_size, kv_heads, dim).to(dtype) for _ in range(2)]
    table = torch.randperm(4 * columns + 3)[: 4 * columns].view(4, columns).int()
    scales = {}
    if dtype == FP8:
        scales = {"k_scale": torch.linspace(0.05, 2.0, kv_heads), "v_scale": torch.linspace(1.5, 0.01, kv_heads)}
    return k, v, caches, table, torch.tensor(contexts).int(), torch.tensor(lens).int(), scales


def check_append(dtype: torch.dtype, page_size: int, kv_heads: int, dim: int) -> None:
    """Every byte of the caches, those that must not change included."""
    k, v, caches, table, context, lens, scales = paged_problem(dtype, page_size, kv_heads, dim, 5)
    theirs, mine = [x.clone() for x in caches], [x.to(device) for x in caches]
    ops.append_kv(k, v, *theirs, table, context, lens, **scales, backend="torch")
    call(ops.append_kv, k, v, *mine, table, context, lens, **scales)
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(raw(a), raw(b))


# Hq, Hkv, D, R, norms: query heads in one tile and in several, halves that are no power of two, lanes that are not rotated.
ROPE = {
    "llama": (32, 8, 128, 128, False),
    "qwen3": (16, 8, 128, 128, True),
    "gemma3": (8, 4, 256, 256, True),
    "smollm2": (9, 3, 64, 64, False),
    "partial": (12, 4, 80, 20, True),
    "phi3": (4, 4, 96, 96, False),
    "no-rotation": (6, 2, 64, 0, True),
}


def rope(x: torch.Tensor, weight: torch.Tensor | None, turns: tuple, pairs: bool, dtype: torch.dtype) -> torch.Tensor:
    """Normed and rotated with every intermediate in ``dtype``."""
    x = x.to(dtype)
    if weight is not None:
        wide = x.double() if dtype == torch.float64 else x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        x = weight.to(dtype) * wide.to(dtype)
    if turns[0] is None:
        return x
    c, s = (t[:, :, None].to(dtype) for t in turns)
    part, rest = x[..., : c.shape[-1]], x[..., c.shape[-1] :]
    if pairs:
        turned = torch.stack([-part[..., 1::2], part[..., ::2]], -1).flatten(-2)
    else:
        turned = torch.cat([-part[..., c.shape[-1] // 2 :], part[..., : c.shape[-1] // 2]], -1)
    return torch.cat([part * c + turned * s, rest], -1)


def check_rope(shape: tuple[int, int, int, int, bool], dtype: torch.dtype, pairs: bool) -> None:
    """q and keys at most twice as far from fp64 as PyTorch, values byte for byte, all else untouched; a row's bits are its own."""
    q_heads, kv_heads, dim, rotary, norms = shape
    k, v, caches, table, context, lens, scales = paged_problem(dtype, 16, kv_heads, dim, 5)
    q = torch.randn(4, 5, q_heads, dim).to(k.dtype)
    angle = torch.rand(4, 5, rotary) * 6
    turns = (angle.cos().to(k.dtype), angle.sin().to(k.dtype)) if rotary else (None, None)
    weights = {f"{x}_norm": (torch.rand(dim) + 0.5).to(k.dtype) for x in "qk"} if norms else {}
    heads = (q_heads, kv_heads, kv_heads)
    given = on_gpu(torch.cat((q, k, v), 2)).split(heads, 2)  # views of one tensor
    options = {**scales, **weights, "interleaved": pairs}
    mine, theirs = [x.to(device) for x in caches], [x.clone() for x in caches]
    out = call(ops.rope_append, *given, *turns, *mine, table, context, lens, **options)
    ops.append_kv(k, v, *theirs, table, context, lens, **scales, backend="torch")
    assert torch.equal(raw(mine[1]), raw(theirs[1]))
    got, touched = mine[0].cpu(), torch.zeros(caches[0].shape[:2], dtype=torch.bool)
    keys = torch.zeros(k.shape, dtype=torch.float64)
    for b, n in enumerate(lens.tolist()):
        for t in range(n):
            position = int(context[b]) + t
            at = int(table[b, position // 16]), position % 16
            touched[at] = True
            keys[b, t] = got[at].double()
    assert torch.equal(raw(got)[~touched], raw(caches[0])[~touched])
    unused = torch.arange(5) >= lens[:, None]
    for x, name, found in ((q, "q_norm", out.cpu()), (k, "k_norm", keys)):
        truth, plain = (rope(x, weights.get(name), turns, pairs, of).double() for of in (torch.float64, x.dtype))
        if dtype == FP8 and name == "k_norm":
            scale = scales["k_scale"][:, None]
            plain = (plain.float() / scale).clamp(-448, 448).to(FP8).double() * scale.double()
            found = found * scale.double()
        truth[unused], plain[unused] = 0, 0
        least = 2.0**-22 * float(truth.abs().max()) if x.dtype == torch.float32 else 0.0
        allowed = max(2 * float((plain - truth).abs().max()), least)
        error = float((found.double() - truth).abs().max())
        assert error <= allowed, f"{name[0]} is {error:.2e} from fp64, allowed {allowed:.2e}"

    contiguous = on_gpu((q, k, v))
    for first, last in ((0, 1), (3, 4), (0, 4)):
        part = [None if x is None else x[first:last] for x in (*contiguous, *turns, table, context, lens)]
        again = [x.to(device) for x in caches]
        alone = call(ops.rope_append, *part[:5], *again, *part[5:], **options)
        assert torch.equal(alone, out[first:last]), (first, last)
    assert all(torch.equal(raw(a), raw(b)) for a, b in zip(again, mine, strict=True))


def check_compact(dtype: torch.dtype, page_size: int, kv_heads: int, dim: int, given: bool) -> None:
    _, _, caches, table, context, _, _ = paged_problem(dtype, page_size, kv_heads, dim, 9)
    path = torch.tensor([[0, 2, 5, 8], [0, 1, 2, 3], [1, 4, -1, -1], [-1, -1, -1, -1]]).int()
    path = torch.nn.functional.pad(path, (0, 5), value=-1)
    lens = (path >= 0).sum(1).int() if given else None
    theirs, mine = [x.clone() for x in caches], [x.to(device) for x in caches]
    ops.compact_kv(*theirs, table, context, path, lens, backend="torch")
    call(ops.compact_kv, *mine, table, context, path, lens)
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(raw(a), raw(b))


for _dtype, _type in {**DTYPES, "fp8": FP8}.items():
    for _size, _heads, _dim in ((1, 2, 64), (16, 8, 128), (7, 3, 80), (16, 1, 256)):
        _name = f"{_dtype}-page-{_size}-{_heads}x{_dim}"
        CHECKS[f"append-{_name}"] = lambda a=(_type, _size, _heads, _dim): check_append(*a)
        CHECKS[f"compact-{_name}"] = lambda a=(_type, _size, _heads, _dim, _size == 16): check_compact(*a)
for _dtype, _type in {**DTYPES, "fp8": FP8}.items():
    for _name, _shape in ROPE.items():
        for _pairs in (False, True) if _shape[3] else (False,):
            CHECKS[f"rope-{_dtype}-{_name}{'-interleaved' if _pairs else ''}"] = lambda a=(_shape, _type, _pairs): (
                check_rope(*a)
            )


# Tokens.

FILTERS = {
    "plain": {},
    "top-k": {"top_k": 50},
    "top-p": {"top_p": 0.9, "temperature": 0.7},
    "min-p": {"min_p": 0.05},
    "all": {"top_k": 40, "top_p": 0.95, "min_p": 0.01, "temperature": 0.8},
    "typical-p": {"typical_p": 0.6},
}


def assert_same(got: tuple, judge: Callable, *, exact: bool = False) -> None:
    """Equal integers; where nothing is drawn without an exception for near ties."""
    got = [x.cpu() for x in got]
    if exact:
        assert all(torch.equal(a, b) for a, b in zip(got, judge(lambda x: x), strict=True))
        return
    wrong = unexplained(got, judge)
    assert not wrong, f"requests {wrong} differ from the reference"


def check_accept(method: str, options: dict, dtype: torch.dtype, vocab: int, rows: int, given: str) -> None:
    """``given``: nothing, ``draft`` or ``lse`` too. Ragged, some rows greedy, some with ids outside the vocabulary."""
    k = 5 if vocab < 5000 else 2
    target = (torch.randn(rows, k + 1, vocab) * 2).to(dtype)
    target[:, :, vocab - vocab // 10 :] = -float("inf")
    draft = (target[:, :k].float() + 0.5 * torch.randn(rows, k, vocab)).to(dtype)
    params = batch_of(rows, position=17, **options)
    params.temperature[::9] = 0.0
    drawn = [ops.sample(draft[:, j], params=params, node=j, return_lse=True, backend="torch") for j in range(k)]
    drafts, lse = (torch.stack(x, 1) for x in zip(*drawn, strict=True))
    own = target[:, :k].argmax(-1)
    drafts = torch.where(torch.rand(rows, k) < (0.7 if method == "greedy" else 0.2), own, drafts)
    drafts[1 % rows, k - 1], drafts[2 % rows, 0] = -1, vocab
    lens = torch.randint(0, k + 1, (rows,)).int()
    draft = draft if given else None
    lse = lse if given == "lse" else None
    same = {"draft_lens": lens, "params": params, "method": method}

    def judge(change: Callable[[torch.Tensor], torch.Tensor]) -> object:
        q = None if draft is None else change(draft)
        return ops.accept_reject(drafts, change(target), q, draft_lse=lse, **same, backend="torch")

    got = call(ops.accept_reject, drafts, target, draft, draft_lse=lse, **same)
    assert_same(got, judge, exact=method == "greedy")


for _method in METHODS:
    for _filters, _options in FILTERS.items():
        if _method == "greedy" and _options:
            continue
        for _given in ("", "draft", "lse") if _method in ("rejection", "block") else ("",):
            _name = f"accept-{_method}-{_filters}{'-' + _given if _given else ''}"
            CHECKS[_name] = lambda a=(_method, _options, torch.bfloat16, 1000, 150, _given): check_accept(*a)
    _options = {} if _method == "greedy" else FILTERS["all"]
    CHECKS[f"accept-{_method}-wide"] = lambda a=(_method, {}, torch.bfloat16, 151_936, 4, "lse"): check_accept(*a)
    CHECKS[f"accept-{_method}-wide-filters"] = lambda a=(_method, _options, torch.float16, 151_936, 4, "lse"): (
        check_accept(*a)
    )
    CHECKS[f"accept-{_method}-fp32"] = lambda a=(_method, _options, torch.float32, 8193, 20, "draft"): check_accept(*a)


def check_bad_logits(method: str) -> None:
    """NaN, +inf and rows of -inf end their request alone."""
    logits = torch.randn(5, 4, 5000)
    logits[0, 1, 3], logits[2, 3, 4999], logits[3, 0] = NAN, float("inf"), -float("inf")
    drafts = logits.nan_to_num().argmax(-1)[:, :3]
    args = {"params": batch_of(5, seed=3), "method": method}
    want = ops.accept_reject(drafts, logits, **args, backend="torch")
    got = call(ops.accept_reject, drafts, logits, **args)
    assert got.status.tolist() == want.status.tolist() == [1, 0, 1, 1, 0]
    assert all(torch.equal(a.cpu(), b) for a, b in zip(got, want, strict=True))


def check_sample(options: dict, dtype: torch.dtype, vocab: int, rows: int, node: int | None) -> None:
    logits = (torch.randn(rows, vocab) * 2).to(dtype)
    logits[:, ::7] = logits[:, :1]  # ties
    params = batch_of(rows, position=5, **options)
    params.temperature[::9] = 0.0

    def judge(change: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        return [ops.sample(change(logits), params=params, node=node, backend="torch")]

    tokens, lse = call(ops.sample, logits, params=params, node=node, return_lse=True)
    assert_same((tokens,), judge)
    greedy = params.temperature == 0
    assert torch.equal(tokens.cpu()[greedy], logits[greedy].argmax(-1))
    if not params.has_filters:
        truth = (logits.double() / torch.where(greedy, 1.0, params.temperature)[:, None]).logsumexp(-1)
        plain = (logits.float() / torch.where(greedy, 1.0, params.temperature)[:, None]).logsumexp(-1)
        allowed = max(2 * float((plain - truth).abs().max()), 4e-6)  # 4 roundings of a number near 10
        assert float((lse.cpu() - truth).abs().max()) <= allowed


for _method in METHODS:
    CHECKS[f"bad-logits-{_method}"] = lambda m=_method: check_bad_logits(m)
for _filters, _options in FILTERS.items():
    for _dtype in DTYPES:
        CHECKS[f"sample-{_filters}-{_dtype}"] = lambda a=(_options, _dtype): check_sample(
            a[0], DTYPES[a[1]], 5003, 60, None
        )
    CHECKS[f"sample-{_filters}-wide"] = lambda o=_options: check_sample(o, torch.bfloat16, 151_936, 6, 2)


RULES = {
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    "bias": {"logit_bias": {1: 2.0, 5: -3.0}, "banned_token_ids": [7, 2]},
    "min-new": {"min_new_tokens": 9, "stop_token_ids": [3, 8]},
    "n-gram": {"no_repeat_ngram_size": 2},
}
RULES["all"] = {name: value for rules in RULES.values() for name, value in rules.items()}


def check_rules(options: dict, has_mask: bool, dtype: torch.dtype, vocab: int, rows: int) -> None:
    """The reference's bits; every other request has no rules. Then one row alone, after its drafts."""
    params = [SamplingParams(**options if b % 2 == 0 else {}) for b in range(rows)]
    texts = torch.randint(0, 9, (rows, 1500)).tolist()
    ends = [1 + 47 * b % 1490 for b in range(rows)]
    prompts, outputs = (
        [x[:n] for x, n in zip(texts, ends, strict=True)],
        [x[n : n + 7] for x, n in zip(texts, ends, strict=True)],
    )
    rules = LogitRules.from_params(params, prompts, outputs, vocab)
    if has_mask:
        rules.mask = torch.randint(-(2**31), 2**31, (rows, 6, -(-vocab // 32))).int()
    logits, drafts = torch.randn(rows, 6, vocab).to(dtype), torch.randint(-1, 9, (rows, 5))
    lens = torch.randint(0, 6, (rows,)).int()
    want = ops.apply_logit_rules(logits, drafts, rules=rules, backend="torch")
    got = call(ops.apply_logit_rules, logits, drafts, rules=rules, draft_lens=lens).cpu()
    for b, n in enumerate(lens.tolist()):
        assert torch.equal(got[b, : n + 1], want[b, : n + 1]), f"request {b}"
    own = replace(rules, mask=rules.mask[:, 3:4]) if has_mask else rules
    assert torch.equal(
        call(ops.apply_logit_rules, logits[:, 3:4], drafts[:, :3], rules=own, first=3).cpu(), want[:, 3:4]
    )


for _name, _options in {"mask": {}, **RULES}.items():
    for _dtype in ("fp32", "bf16"):
        _arguments = (_options, _name in ("mask", "all"), DTYPES[_dtype], 5003, 30)
        CHECKS[f"rules-{_name}-{_dtype}"] = lambda a=_arguments: check_rules(*a)
CHECKS["rules-wide"] = lambda: check_rules(RULES["all"], True, torch.bfloat16, 151_936, 4)


def check_ngram(vocab: int, capacity: int, rows: int) -> None:
    tokens = torch.randint(0, vocab, (rows, capacity))
    lens = torch.randint(0, capacity + 1, (rows,)).int()
    lens[0] = capacity
    for k, low, high in ((5, 1, 3), (1, 2, 4), (16, 1, 1)):
        got = call(ops.ngram_propose, tokens, lens, k, low, high)
        want = ops.ngram_propose(tokens, lens, k, low, high, backend="torch")
        assert all(torch.equal(a.cpu(), b) for a, b in zip(got, want, strict=True))


for _vocab, _capacity, _rows in ((2, 40, 30), (40, 300, 64), (1000, 4000, 8), (40, 32768, 2)):
    CHECKS[f"ngram-{_vocab}-{_capacity}"] = lambda a=(_vocab, _capacity, _rows): check_ngram(*a)


# Products and means.

# M, N, K, bias, whether the weight lies transposed
LINEAR = {
    "odd": (5, 97, 33, True, False),
    "conv1d": (8, 2304, 768, True, True),
    "splits": (40, 1024, 4096, False, False),
    "wide": (3, 50257, 768, False, False),
    "rows": (700, 1536, 576, True, False),
}


def layer(rows: int, n: int, k: int, has_bias: bool, transposed: bool, dtype: torch.dtype) -> tuple:
    x, weight, bias = (on_gpu(torch.randn(shape).to(dtype)) for shape in ((rows, k), (n, k), (n,)))
    return x, weight.t().contiguous().t() if transposed else weight, bias if has_bias else None


def check_rows_alone(op: Callable, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """What ``op`` gives for the rows of the inputs; each row's bits are those of the row alone, wherever it was."""

    def rows_of(given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        with no_host_reads(), poisoned_outputs():
            out = op(*given)
        return out if isinstance(out, tuple) else (out,)

    whole, count = rows_of(inputs), len(inputs[0])
    for first, last in ((0, 1), (count - 1, count), (1, 3), (0, count // 2 + 1)):
        part = rows_of(tuple(x[first:last] for x in inputs))
        assert all(torch.equal(a, b[first:last]) for a, b in zip(part, whole, strict=True)), (first, last)
    for copies in (8, 70):
        many = rows_of(tuple(x.repeat(copies, *[1] * (x.dim() - 1)).flip(0) for x in inputs))
        assert all(torch.equal(a[-count:].flip(0), b) for a, b in zip(many, whole, strict=True)), copies
    return whole


def assert_near(out: torch.Tensor, plain: Callable, *given: torch.Tensor | None, floor: float = 0.0) -> None:
    """At most twice as far from fp64 as ``plain`` in the inputs' dtypes, on the CPU."""
    cpu = [None if x is None else x.cpu() for x in given]
    truth = plain(*(None if x is None else x.double() for x in cpu))
    allowed = max(2 * float((plain(*cpu).double() - truth).abs().max()), floor)
    assert float((out.cpu().double() - truth).abs().max()) <= allowed


def check_linear(shape: tuple, dtype: torch.dtype) -> None:
    """With and without a residual."""
    x, weight, bias = layer(*shape, dtype)
    linear = torch.nn.functional.linear
    [out] = check_rows_alone(lambda x: ops.skinny_linear(x, weight, bias, backend="triton"), (x,))
    assert_near(out, linear, x, weight, bias)
    residual = on_gpu(torch.randn(out.shape).to(dtype) * shape[2] ** 0.5)
    [out] = check_rows_alone(
        lambda x, r: ops.skinny_linear(x, weight, bias, residual=r, backend="triton"), (x, residual)
    )
    assert_near(out, lambda x, w, b, r: linear(x, w, b) + r, x, weight, bias, residual)


def act(gate: torch.Tensor, activation: str) -> torch.Tensor:
    if activation == "silu":
        return torch.nn.functional.silu(gate)
    return torch.nn.functional.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")


def check_gated(shape: tuple, activation: str, dtype: torch.dtype) -> None:
    """In one launch the bits of product, then activation, as on every chip where ``skinny_linear`` does not split K."""
    rows, outputs, k, has_bias = shape
    x, weight, bias = layer(rows, 2 * outputs, k, has_bias, False, dtype)
    weight = (weight / k**0.5).to(dtype)

    def plain(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        gate, up = torch.nn.functional.linear(x, weight, bias).chunk(2, -1)
        return act(gate, activation) * up

    given = {"activation": activation, "backend": "triton"}
    [out] = check_rows_alone(lambda x: ops.gated_linear(x, weight, bias, **given), (x,))
    assert_near(out, plain, x, weight, bias)
    gate_up = ops.skinny_linear(x, weight, bias, backend="triton")
    [two] = check_rows_alone(lambda y: ops.gated_mlp_activation(y, **given), (gate_up,))
    assert torch.equal(out, two)


def check_norm(width: int, weight_dtype: torch.dtype, dtype: torch.dtype) -> None:
    """Alone, with a sum before it and after it; as heads of a packed product."""
    weight = on_gpu((1 + torch.randn(width) / 4).to(weight_dtype))
    x, residual = (on_gpu(torch.randn(40, width).to(dtype)) for _ in range(2))

    def plain(h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6) * weight

    def norm(x: torch.Tensor, r: torch.Tensor | None = None, after: bool = False) -> Any:
        return ops.rms_norm(x, weight, residual=r, residual_after=after, backend="triton")

    floor = 1e-6 if dtype == torch.float32 else 0.0
    [out] = check_rows_alone(norm, (x,))
    assert_near(out, plain, x, weight, floor=floor)
    [summed] = check_rows_alone(lambda x, r: norm(x, r, True), (x, residual))
    assert torch.equal(summed, residual + out)
    normed, total = check_rows_alone(norm, (x, residual))
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, norm(total))
    packed = on_gpu(torch.randn(6, 5, width).to(dtype))
    heads = call(ops.rms_norm, packed[:, 1:4], weight)
    assert torch.equal(heads, norm(packed[:, 1:4].reshape(-1, width)).view(heads.shape))


def check_mean(width: int, dtype: torch.dtype) -> None:
    x = on_gpu((torch.randn(200, width) + 0.5).to(dtype))
    out = call(ops.row_mean, x)
    truth = x.cpu().double().mean(1)
    allowed = max(2 * float((x.cpu().mean(1).double() - truth).abs().max()), 1e-6 if dtype == torch.float32 else 0.0)
    assert float((out.cpu().double() - truth).abs().max()) <= allowed
    for first, last in ((0, 1), (199, 200), (7, 12)):
        assert torch.equal(call(ops.row_mean, x[first:last]), out[first:last])


def check_head(method: str, dtype: torch.dtype, vocab: int, width: int, batch: int, options: dict) -> None:
    """The integers of ``accept_reject`` on logits that are written: the bits of the head's tiles are those of ``skinny_linear``.

    And so they are for shards, each with its own tiles.
    """
    k = 4
    hidden, weight = (
        on_gpu(torch.randn(shape).to(dtype)) for shape in ((batch, k + 1, width), (vocab, width))
    )  # fmt: skip
    weight *= 3 * width**-0.5
    params = on_gpu(batch_of(batch, position=17, temperature=0.8))
    params.temperature[::3] = 0.0
    logits = ops.skinny_linear(hidden.flatten(0, 1), weight, backend="triton").view(batch, k + 1, vocab)
    if "scale" in options:
        logits = logits * options["scale"]
    if "softcap" in options:
        logits = torch.tanh(logits / options["softcap"]) * options["softcap"]
    drawn = [ops.sample(logits[:, j], params=params.after(j), backend="triton") for j in range(k)]
    drafts = torch.stack(drawn, 1) if method == "coupled" else logits[:, :k].argmax(-1)
    drafts[1 % batch, k - 1], drafts[2 % batch, 0] = -1, vocab
    given = {"params": params, "method": method}
    want = call(ops.accept_reject, drafts, logits, **given)
    got = call(ops.verify_head, hidden, weight, drafts, **options, **given)
    cut = vocab // 12 * 4
    shards = [
        call(ops.head_stats, hidden, rows, drafts, first_id=first, vocab=vocab, **options, **given)
        for first, rows in ((0, weight[:cut]), (cut, weight[cut:]))
    ]
    merged = ops.accept_stats(shards, drafts, **given, backend="triton")
    for result in (got, merged):
        assert all(torch.equal(a, b) for a, b in zip(result, want, strict=True))
    tokens, lse = call(ops.sample_head, hidden[:, 0], weight, **options, params=params, return_lse=True)
    want_tokens, want_lse = call(ops.sample, logits[:, 0], params=params, return_lse=True)
    assert torch.equal(tokens, want_tokens)
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)


# V, H, B, what the layer does besides
HEADS = {
    "small": (1000, 576, 3, {}),
    "odd": (5003, 100, 4, {"scale": 0.5}),
    "capped": (20000, 768, 14, {"softcap": 30.0}),
    "wide": (49152, 1024, 2, {}),
}

for _dtype, _type in DTYPES.items():
    for _name, _head in HEADS.items():
        for _method in ("greedy", "coupled", "rejection"):
            CHECKS[f"head-{_dtype}-{_name}-{_method}"] = lambda a=(_method, _type, *_head): check_head(*a)
for _dtype, _type in DTYPES.items():
    for _name, _shape in LINEAR.items():
        CHECKS[f"linear-{_dtype}-{_name}"] = lambda a=(_shape, _type): check_linear(*a)
    for _name, _shape in {
        "odd": (5, 49, 33, True),
        "wide": (5, 14336, 512, False),
        "rows": (70, 1536, 576, True),
    }.items():
        for _activation in ("silu", "gelu_tanh", "gelu"):
            CHECKS[f"gated-{_dtype}-{_name}-{_activation}"] = lambda a=(_shape, _activation, _type): check_gated(*a)
    for _width in (1, 97, 128, 4096, 9000):
        for _weight in dict.fromkeys((_type, torch.float32)):
            _name = f"norm-{_dtype}-{_width}" + ("" if _weight == _type else "-fp32-weight")
            CHECKS[_name] = lambda a=(_width, _weight, _type): check_norm(*a)
    for _width in (5, 128, 576, 5000):
        CHECKS[f"mean-{_dtype}-{_width}"] = lambda a=(_width, _type): check_mean(*a)


# The whole.


def check_graph() -> None:
    """A CUDA graph of a verify pass's ops, replayed on other inputs, gives what the ops give."""
    if device.type != "cuda":
        raise SkipTest("needs a GPU")
    case = paged_case([40, 300], 5, q_heads=8, kv_heads=2, dim=64, dtype=torch.bfloat16)
    q, *pages = on_gpu(case.args)
    target = torch.randn(2, 6, 32000, device=device).bfloat16()
    drafts, params = torch.randint(0, 32000, (2, 5), device=device), on_gpu(batch_of(2, top_p=0.9))

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


def texts(kind: str, where: torch.device, exact: bool | None, params: dict) -> list[list[int]]:
    model = toy_model(kind, **({"sliding_window": 4} if kind == "gemma2" else {})).to(where)
    backend = "triton" if where == device else "torch"
    engine = SpeculativeDecoder(model, PromptLookup(), num_draft_tokens=3, exact=exact, backend=backend)
    outs = engine.generate(PROMPTS, SamplingParams(max_new_tokens=24, **params))
    return [out.token_ids for out in outs]


def check_text(kind: str, **params: object) -> None:
    """Tiny models in fp32: the CPU's text (their logits are far apart)."""
    assert texts(kind, device, False, params) == texts(kind, torch.device("cpu"), False, params)


def check_exact() -> None:
    """Bit-exact decoding is to be had on every chip."""
    assert texts("llama", device, True, {"temperature": 0}) == texts(
        "llama", torch.device("cpu"), True, {"temperature": 0}
    )


def check_exact_passes(kind: str, dtype: torch.dtype) -> None:
    """A position's logits have the same bits token by token, in pieces, and beside other texts."""
    adapter = ModelAdapter(toy_model(kind, dtype=dtype).to(device), backend="triton")
    invariant = adapter.invariant_rows()
    text = ((torch.arange(17) * 31 + 5) % adapter.vocab_size).to(device)
    cache = adapter.new_cache(slots=5, page_size=16, num_pages=10)
    for slot in range(5):
        cache.reserve(slot, 17)

    def score(tokens: torch.Tensor, start: int) -> torch.Tensor:
        context = torch.full((len(tokens),), start, dtype=torch.int32, device=device)
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
    "model": lambda: DraftModel(toy_model(seed=1, num_hidden_layers=1).to(device)),
}


def rounds_on_gpu(drafter: str, **options: Any) -> SpeculativeDecoder:
    options = {"max_seq_len": 64, "num_pages": 64, "exact": False, "adaptive": False, "backend": "triton"} | options
    return SpeculativeDecoder(toy_model().to(device), DRAFTERS[drafter](), num_draft_tokens=3, **options)


@torch.inference_mode()
def check_no_waiting(drafter: str, adaptive: bool, params: dict) -> None:
    """Whole steps, with requests that come and pages that are taken, make the host wait for nothing (faults.md G2)."""
    if device.type != "cuda":
        raise SkipTest("needs a GPU")
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
    if device.type != "cuda":
        raise SkipTest("needs a GPU")
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
    if device.type != "cuda":
        raise SkipTest("needs a GPU")
    x, graphs = torch.zeros(4, device=device), graphs_for(device)

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
    assert float(torch.ones(1000, device=device).sum()) == 1000


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
    CHECKS[f"batching-{_drafter}"] = lambda a=_drafter: check_batching(a)
    for _name, _params in {"greedy": {"temperature": 0}, "coupled": {"seed": 3, "top_p": 0.9}, "rejection": {}}.items():
        CHECKS[f"no-waiting-{_drafter}-{_name}"] = lambda a=(_drafter, False, _params): check_no_waiting(*a)
        if _name != "rejection":  # unseeded requests draw other seeds in another order
            CHECKS[f"captured-{_drafter}-{_name}"] = lambda a=(_drafter, _params): check_captured(*a)
    CHECKS[f"no-waiting-{_drafter}-adaptive"] = lambda a=_drafter: check_no_waiting(a, True, {"temperature": 0})
CHECKS["failed-capture"] = check_failed_capture
CHECKS["graph"] = check_graph
CHECKS["text-llama-greedy"] = lambda: check_text("llama", temperature=0)
CHECKS["text-llama-coupled"] = lambda: check_text("llama", seed=3, top_k=20)
CHECKS["text-gemma2-greedy"] = lambda: check_text("gemma2", temperature=0)
CHECKS["text-exact"] = check_exact
for _kind in ("llama", "gemma3_text", "qwen2"):
    for _dtype in ("fp32", "bf16"):
        CHECKS[f"exact-{_kind}-{_dtype}"] = lambda a=(_kind, _dtype): check_exact_passes(a[0], DTYPES[a[1]])


# With pytest, and without.


def pytest_generate_tests(metafunc):
    metafunc.parametrize("check", CHECKS.values(), ids=CHECKS)


def test_on_a_gpu(check):
    if not torch.cuda.is_available():
        raise SkipTest("needs a GPU")
    if (why := why_not_triton("verify_attention", "cuda")) is not None:
        raise SkipTest(f"needs Triton: {why}")
    check()


def main(argv: list[str] | None = None) -> int:
    """One line for each check that did not pass, and one that counts; 1: a failure."""
    global device
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shard", default="0/1", metavar="I/N", help="every N-th check, from the I-th on")
    parser.add_argument("--only", default="", metavar="TEXT", help="checks whose name holds it")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no check after so long")
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("no GPU: nothing to check")
        return 0
    index, of = map(int, args.shard.split("/"))
    torch.set_num_threads(max((os.cpu_count() or 1) // of, 1))
    begin, passed, failed, skipped, left = time.perf_counter(), 0, [], [], 0
    for name in [name for name in CHECKS if args.only in name][index::of]:
        if time.perf_counter() - begin > args.seconds:
            left += 1
            continue
        torch.manual_seed(0)
        try:
            CHECKS[name]()
            passed += 1
        except SkipTest as reason:
            skipped.append(name)
            print(f"SKIPPED {name}: {reason}", flush=True)
        except Exception as error:
            failed.append(name)
            print(f"FAILED {name}: {type(error).__name__}: {str(error)[:500]}", flush=True)
            if len(failed) <= 3:
                print(traceback.format_exc()[-3000:], flush=True)
    seconds = time.perf_counter() - begin
    print(
        f"shard {args.shard}: {passed} passed, {len(failed)} failed, {len(skipped)} skipped, {left} not run, {seconds:.0f} s"
    )
    return 1 if failed or left else 0


if __name__ == "__main__":
    sys.exit(main())
