"""What becomes of logits: ``accept_reject``, ``accept_tree``, ``sample`` and ``apply_logit_rules``; and ``ngram_propose``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from gpu_checks.common import DTYPES, add, call
from specdec_triton import SamplingParams, ops
from specdec_triton.logit_rules import LogitRules
from specdec_triton.ops import METHODS
from specdec_triton.testing import NAN, batch_of, unexplained

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
            add(_name, check_accept, _method, _options, torch.bfloat16, 1000, 150, _given)
    _options = {} if _method == "greedy" else FILTERS["all"]
    add(f"accept-{_method}-wide", check_accept, _method, {}, torch.bfloat16, 151_936, 4, "lse")
    add(f"accept-{_method}-wide-filters", check_accept, _method, _options, torch.float16, 151_936, 4, "lse")
    add(f"accept-{_method}-fp32", check_accept, _method, _options, torch.float32, 8193, 20, "draft")


def check_tree(method: str, options: dict, dtype: torch.dtype, vocab: int, nodes: int, drawn: bool) -> None:
    """Random trees of ragged sizes whose children are often the likeliest tokens."""
    rows = 40 if vocab < 5000 else 3
    logits = (torch.randn(rows, nodes, vocab) * 2).to(dtype)
    draft = (logits.float() + 0.5 * torch.randn(rows, nodes, vocab)).to(dtype)
    step = torch.arange(nodes)
    parents = (torch.rand(rows, nodes) * step).long().masked_fill(step == 0, -1)
    above = parents.clamp(min=0)
    ranks = torch.randint(0, 3, (rows, nodes, 1))
    likely = (draft if drawn else logits).topk(3, -1).indices
    tokens = likely.gather(1, above[..., None].expand(-1, -1, 3)).gather(2, ranks)[..., 0]
    params = batch_of(rows, position=17, **options)
    params.temperature[::9] = 0.0
    lens = torch.randint(0, nodes + 1, (rows,)).int()
    same = {"node_lens": lens, "params": params, "method": method}

    def judge(change: Callable[[torch.Tensor], torch.Tensor]) -> object:
        q = change(draft) if drawn else None
        return ops.accept_tree(tokens, change(logits), parents, q, **same, backend="torch")

    got = call(ops.accept_tree, tokens, logits, parents, draft if drawn else None, **same)
    assert_same(got, judge, exact=method == "greedy")


for _method in ops.TREE_METHODS:
    for _drawn in (False, True) if _method == "rejection" else (False,):
        _name = f"tree-{_method}{'-drawn' if _drawn else ''}"
        add(_name, check_tree, _method, {}, torch.bfloat16, 1000, 17, _drawn)
        add(f"{_name}-wide", check_tree, _method, {}, torch.bfloat16, 151_936, 64, _drawn)
        if _method != "greedy":
            add(f"{_name}-filters", check_tree, _method, FILTERS["all"], torch.float32, 8193, 9, _drawn)


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
    add(f"bad-logits-{_method}", check_bad_logits, _method)
for _filters, _options in FILTERS.items():
    for _dtype, _type in DTYPES.items():
        add(f"sample-{_filters}-{_dtype}", check_sample, _options, _type, 5003, 60, None)
    add(f"sample-{_filters}-wide", check_sample, _options, torch.bfloat16, 151_936, 6, 2)


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
        add(f"rules-{_name}-{_dtype}", check_rules, _options, _name in ("mask", "all"), DTYPES[_dtype], 5003, 30)
add("rules-wide", check_rules, RULES["all"], True, torch.bfloat16, 151_936, 4)


def check_ngram(vocab: int, capacity: int, rows: int) -> None:
    tokens = torch.randint(0, vocab, (rows, capacity))
    lens = torch.randint(0, capacity + 1, (rows,)).int()
    lens[0] = capacity
    for k, low, high in ((5, 1, 3), (1, 2, 4), (16, 1, 1)):
        got = call(ops.ngram_propose, tokens, lens, k, low, high)
        want = ops.ngram_propose(tokens, lens, k, low, high, backend="torch")
        assert all(torch.equal(a.cpu(), b) for a, b in zip(got, want, strict=True))


for _vocab, _capacity, _rows in ((2, 40, 30), (40, 300, 64), (1000, 4000, 8), (40, 32768, 2)):
    add(f"ngram-{_vocab}-{_capacity}", check_ngram, _vocab, _capacity, _rows)
