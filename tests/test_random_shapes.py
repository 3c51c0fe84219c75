"""Any shape: the paged ops, rotation, the n-gram search and the rules of logits on problems that nobody chose."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from rules_oracle import ruled
from test_ngram_propose import search
from test_rope_append import assert_right, whole_problem

from specdec_triton import SamplingParams, ops
from specdec_triton.interpreter import counted
from specdec_triton.logit_rules import LogitRules
from specdec_triton.testing import FP8, GARBAGE, attention_oracle, lay_out, paged_case

pytest.importorskip("hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st

OP = "verify_attention"  # the others have kernels as well
EXAMPLES = {"torch": 25, "triton": 10}
DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])


def examples(backend):
    return settings(max_examples=EXAMPLES[backend])


def watched(backend):
    """The interpreter raises on accesses outside the op's tensors."""
    return counted() if backend == "triton" else nullcontext()


def maybe(strategy):
    return st.none() | strategy


@st.composite
def attention_problems(draw):
    """Arguments of ``paged_case`` and options of the op.

    Scores stay within some 20: an error of a score is amplified by its size, and then a single run of the yardstick says little.
    """
    batch, count = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    kv_heads = draw(st.integers(1, 3))
    shape = {
        "context_lens": draw(st.lists(st.integers(0, 300), min_size=batch, max_size=batch)),
        "new": count,
        "query_lens": draw(maybe(st.lists(st.integers(0, count), min_size=batch, max_size=batch))),
        "q_heads": kv_heads * draw(st.integers(1, 9)),
        "kv_heads": kv_heads,
        "dim": draw(st.integers(16, 256)),
        "page_size": draw(st.integers(1, 70)),
        "dtype": draw(DTYPES),
        "fp8": draw(st.booleans()),
        "amplitude": draw(st.sampled_from([0.1, 1.0, 3.0])),
        "seed": draw(st.integers(0, 2**31)),
    }
    options = {
        "scale": draw(maybe(st.floats(0.1, 2.0).map(lambda x: x * shape["dim"] ** -0.5))),
        "sliding_window": draw(maybe(st.integers(1, 330))),
        "softcap": draw(maybe(st.floats(0.5, 60.0))),
    }
    masks = st.lists(st.integers(0, 2**count - 1), min_size=count, max_size=count)
    tree_mask = draw(maybe(masks | st.lists(masks, min_size=batch, max_size=batch)))
    if tree_mask is not None:
        options["tree_mask"] = torch.tensor(tree_mask)
    if draw(st.booleans()):
        options["sinks"] = torch.linspace(-2.0, 3.0, shape["q_heads"]).to(draw(DTYPES))
    return shape, options


def test_verify_attention(backend, few_splits):
    """Error against fp64 at most twice that of PyTorch in the same dtype, which is at least that of rounding the result."""

    @examples(backend)
    @given(attention_problems())
    def check(problem):
        shape, options = problem
        case = paged_case(**shape)
        dtype = case.q.dtype
        with watched(backend):
            out = ops.verify_attention(*case.args, **case.scales, **options, backend=backend)
        truth = attention_oracle(case, **options)
        plain = attention_oracle(case, **options, dtype=dtype)
        error = max((x.double() - truth).abs().max() for x in (plain, truth.to(dtype)))
        assert out.shape == case.q.shape
        assert (out.double() - truth).abs().max() <= max(2 * error, 1e-5 if dtype == torch.float32 else 0.0)

    check()


@st.composite
def append_problems(draw):
    batch, count = draw(st.integers(1, 4)), draw(st.integers(0, 7))
    return {
        "contexts": draw(st.lists(st.integers(0, 90), min_size=batch, max_size=batch)),
        "count": count,
        "lens": draw(st.lists(st.integers(0, count), min_size=batch, max_size=batch)),
        "shape": (draw(st.integers(1, 9)), draw(st.integers(16, 256))),
        "page_size": draw(st.integers(1, 40)),
        "dtype": draw(DTYPES | st.just(FP8)),
        "transposed": draw(st.tuples(st.booleans(), st.booleans())),
        "seed": draw(st.integers(0, 2**31)),
    }


def test_append_kv(backend):
    """Every byte of both caches, one position at a time from the definition."""

    @examples(backend)
    @given(append_problems())
    def check(problem):
        torch.manual_seed(problem["seed"])
        contexts, lens, page_size, dtype = (problem[key] for key in ("contexts", "lens", "page_size", "dtype"))
        heads, dim = problem["shape"]
        new = [torch.randn(len(contexts), problem["count"], heads, dim) * 50 for _ in range(2)]
        new = [x if dtype == FP8 else x.to(dtype) for x in new]
        new = [
            x.transpose(1, 2).contiguous().transpose(1, 2) if turned else x
            for x, turned in zip(new, problem["transposed"], strict=True)
        ]
        room = [torch.zeros(c + n, heads, dim).to(dtype) for c, n in zip(contexts, lens, strict=True)]
        *caches, table = lay_out(room, room, page_size, seed=problem["seed"])
        want = [cache.clone() for cache in caches]
        scales = [torch.rand(heads) + 0.05 if dtype == FP8 else None for _ in range(2)]
        for cache, x, scale in zip(want, new, scales, strict=True):
            if scale is not None:
                x = (x / scale[:, None]).clamp(-448, 448)
            for b, (context, n) in enumerate(zip(contexts, lens, strict=True)):
                for t in range(n):
                    page, slot = table[b, (context + t) // page_size], (context + t) % page_size
                    cache[page, slot] = x[b, t].to(dtype)
        args = (*new, *caches, table, torch.tensor(contexts), torch.tensor(lens))
        with watched(backend):
            ops.append_kv(*args, k_scale=scales[0], v_scale=scales[1], backend=backend)
        for cache, right in zip(caches, want, strict=True):
            assert torch.equal(cache.view(torch.uint8), right.view(torch.uint8))

    check()


@st.composite
def rope_problems(draw):
    """Arguments of ``whole_problem``, its options."""
    batch, count, kv_heads = draw(st.integers(1, 3)), draw(st.integers(1, 5)), draw(st.integers(1, 5))
    contexts = draw(st.lists(st.integers(0, 60), min_size=batch, max_size=batch))
    lens = draw(maybe(st.lists(st.integers(0, count), min_size=batch, max_size=batch)))
    dim = draw(st.integers(16, 256))
    rotary = 2 * draw(st.integers(0, dim // 2))
    shape = (kv_heads * draw(st.integers(1, 9)), kv_heads, dim, rotary)
    norms, dtype = draw(st.sampled_from(["", "q", "k", "qk"])), draw(DTYPES | st.just(FP8))
    pages = (draw(st.integers(1, 40)), contexts, count, lens)
    return (pages, *shape, norms, dtype), {"interleaved": draw(st.booleans()), "add_one": draw(st.booleans())}


def test_rope_append(backend):
    """Error of q and of the stored keys against fp64 at most twice PyTorch's; every other byte of the caches."""

    @examples(backend)
    @given(rope_problems())
    def check(problem):
        args, options = whole_problem(*problem[0], **problem[1])
        given = [None if x is None else x.clone() for x in args]
        with watched(backend):
            out = ops.rope_append(*given, **options, backend=backend)
        assert_right(out, args, options, given[5:7])

    check()


def test_ngram_propose(backend):
    texts = st.integers(1, 5).flatmap(lambda vocab: st.lists(st.integers(0, vocab - 1), max_size=60))

    @examples(backend)
    @given(st.lists(texts, min_size=1, max_size=5), st.integers(0, 9), st.integers(1, 4), st.integers(0, 4))
    def check(texts, k, low, more):
        width = max(map(len, texts)) + 1
        padded = [text + [GARBAGE[1]] * (width - len(text)) for text in texts]
        lens = torch.tensor([len(text) for text in texts])
        with watched(backend):
            drafts, found = ops.ngram_propose(torch.tensor(padded), lens, k, low, low + more, backend=backend)
        want = [search(text, k, low, low + more) for text in texts]
        assert drafts.tolist() == [right + [-1] * (k - len(right)) for right in want]
        assert found.tolist() == [len(right) for right in want]

    check()


@st.composite
def rule_problems(draw):
    """A vocabulary, each request's rules, prompt, output, drafts and draft length, and the first row."""
    vocab, count = draw(st.integers(1, 70)), draw(st.integers(0, 5))
    ids = st.integers(0, vocab - 1)
    some = st.lists(ids, max_size=4)
    rules = st.fixed_dictionaries(
        {},
        optional={
            "repetition_penalty": st.floats(0.5, 2.0),
            "presence_penalty": st.floats(-2.0, 2.0),
            "frequency_penalty": st.floats(-2.0, 2.0),
            "logit_bias": st.dictionaries(ids, st.floats(-5.0, 5.0), max_size=4),
            "banned_token_ids": some,
            "allowed_token_ids": st.lists(ids, min_size=1, max_size=4),
            "min_new_tokens": st.integers(1, 12),
            "stop_token_ids": some,
            "no_repeat_ngram_size": st.integers(1, 5),
        },
    ).filter(lambda x: not {*x.get("allowed_token_ids", [-1])} <= {*x.get("banned_token_ids", [])})
    text = st.lists(st.integers(0, min(vocab - 1, 2)), max_size=12)  # few kinds of tokens: n-grams repeat
    drafts = st.lists(st.integers(-1, min(vocab, 2)), min_size=count, max_size=count)
    request = st.tuples(rules, text.filter(bool), text, drafts, st.integers(0, count))
    return vocab, draw(st.lists(request, min_size=1, max_size=3)), draw(st.integers(0, count)), draw(st.booleans())


def test_apply_logit_rules(backend):
    """Each row that is not past its draft, a token at a time from the definition."""

    @examples(backend)
    @given(rule_problems())
    def check(problem):
        vocab, requests, first, has_lens = problem
        rules, prompts, outputs, drafts, lens = (list(x) for x in zip(*requests, strict=True))
        params = [SamplingParams(**x) for x in rules]
        given_rules = LogitRules.from_params(params, prompts, outputs, vocab)
        count = len(drafts[0])
        logits = torch.randn(len(requests), count + 1 - first, vocab)
        with watched(backend):
            out = ops.apply_logit_rules(
                logits, torch.tensor(drafts, dtype=torch.int64).view(len(drafts), count), rules=given_rules,
                draft_lens=torch.tensor(lens) if has_lens else None, first=first, backend=backend,
            )  # fmt: skip
        for b, length in enumerate(lens if has_lens else [count] * len(lens)):
            for drafted in range(first, length + 1):
                row = drafted - first
                want = ruled(logits[b, row], params[b], prompts[b], [*outputs[b], *drafts[b][:drafted]])
                torch.testing.assert_close(out[b, row].double(), want, rtol=1e-5, atol=1e-5)

    check()
