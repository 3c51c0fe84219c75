"""``apply_logit_rules``: equal to its definition, spelt out here token by token, and to what transformers' processors do; every row
with the text before it, drafts included (faults.md H1, H4, H5, H6)."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from rules_oracle import RULES, ruled
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from specdec_triton import SamplingParams, ops
from specdec_triton.logit_rules import IN_PROMPT, LogitRules
from specdec_triton.testing import INF, NAN, assert_guards, guarded, poisoned_outputs

OP = "apply_logit_rules"


def defined(logits, drafts, params, prompts, outputs):
    """fp64 ``[B,T,V]``."""
    each = zip(params, prompts, outputs, strict=True)
    rows = [
        [ruled(logits[b, t], p, prompt, [*output, *drafts[b, :t].tolist()]) for t in range(logits.shape[1])]
        for b, (p, prompt, output) in enumerate(each)
    ]
    return torch.stack([torch.stack(x) for x in rows])


def packed(masks):
    """bool ``[B,T,V]`` -> int32 ``[B,T,ceil(V/32)]``."""
    pad = torch.nn.functional.pad(masks, (0, -masks.shape[-1] % 32))
    bits = pad.view(*pad.shape[:-1], -1, 32).long() << torch.arange(32)
    return bits.sum(-1).int()


VOCAB = 11
PROMPTS = [[1, 2, 3, 1, 2], [4], [0, 0, 0], [9, 8, 1, 2, 1, 2, 1]]
OUTPUTS = [[3, 1, 2], [], [0, 0], [2, 1, 7, 7]]
DRAFTS = torch.tensor([[3, 1, 2], [4, 4, 4], [5, 0, 0], [7, 1, 2]])


def case(dtype=torch.float32, vocab=VOCAB, rows=4):
    generator = torch.Generator().manual_seed(vocab)
    return (2 * torch.randn(4, rows, vocab, generator=generator)).to(dtype), DRAFTS[:, : rows - 1]


def rules_of(params, vocab=VOCAB):
    return LogitRules.from_params(params, PROMPTS, OUTPUTS, vocab)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", RULES)
def test_is_what_is_defined(name, dtype, backend):
    logits, drafts = case(dtype)
    params = [SamplingParams(**RULES[name])] * 4
    with poisoned_outputs():
        out = ops.apply_logit_rules(logits, drafts, rules=rules_of(params), backend=backend)
    torch.testing.assert_close(out.double(), defined(logits, drafts, params, PROMPTS, OUTPUTS), rtol=2e-6, atol=2e-6)


def test_requests_have_rules_of_their_own(backend):
    """A batch of different rules is each request's own; those without rules come back as they were."""
    logits, drafts = case()
    for names in (["all", "nothing", "presence", "no-repeat-2"], ["nothing", "bias", "min-new", "no-repeat-3"]):
        params = [SamplingParams(**RULES[name]) for name in names]
        out = ops.apply_logit_rules(logits, drafts, rules=rules_of(params), backend=backend)
        want = defined(logits, drafts, params, PROMPTS, OUTPUTS)
        torch.testing.assert_close(out.double(), want, rtol=2e-6, atol=2e-6)
        still = [b for b, name in enumerate(names) if name == "nothing"]
        assert torch.equal(out[still], logits[still])


def test_backends_agree_bit_for_bit(backend):
    """Penalties are computed by the same operations in the same order."""
    logits, drafts = case(torch.bfloat16, vocab=2051)
    params = [SamplingParams(**RULES[name]) for name in ("all", "repetition", "frequency", "presence")]
    rules = rules_of(params, 2051)
    want = ops.apply_logit_rules(logits, drafts, rules=rules, backend="torch")
    assert torch.equal(ops.apply_logit_rules(logits, drafts, rules=rules, backend=backend), want)


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 1024, 1025])
def test_masks(vocab, backend):
    """A mask for each row, its last word partly used (faults.md H6)."""
    logits, drafts = torch.randn(2, 3, vocab), torch.zeros(2, 2, dtype=torch.int64)
    masks = torch.rand(2, 3, vocab) < 0.5
    rules = LogitRules(torch.tensor([1, 1], dtype=torch.int32), mask=packed(masks))
    out = ops.apply_logit_rules(logits, drafts, rules=rules, backend=backend)
    assert torch.equal(out, logits.masked_fill(~masks, -INF))


def test_drafts_are_history_only_to_the_rows_after_them(backend):
    """faults.md H1, H3: row t counts drafts 0 .. t-1, and nothing is left behind: the counts are the caller's."""
    drafts = torch.tensor([[5, 5, 6]])
    rules = LogitRules.from_params([SamplingParams(frequency_penalty=1.0)], [[5]], [[6]], 8)
    before = rules.counts.clone()
    out = ops.apply_logit_rules(torch.zeros(1, 4, 8), drafts, rules=rules, backend=backend)
    assert out[0, :, 5].tolist() == [0, -1, -2, -2]
    assert out[0, :, 6].tolist() == [-1, -1, -1, -2]
    assert torch.equal(rules.counts, before)
    assert before[0, 5] == IN_PROMPT
    assert before[0, 6] == 1


@pytest.mark.parametrize("name", RULES)
def test_single_rows(name, backend):
    """Row j alone, after j drafts, as a drafter draws them."""
    logits, drafts = case()
    params = [SamplingParams(**RULES[name])] * 4
    whole = ops.apply_logit_rules(logits, drafts, rules=rules_of(params), backend=backend)
    for j in range(4):
        row = ops.apply_logit_rules(
            logits[:, j : j + 1], drafts[:, :j], rules=rules_of(params), first=j, backend=backend
        )
        assert torch.equal(row[:, 0], whole[:, j])


def test_drafts_outside_the_vocabulary_are_no_history(backend):
    drafts = torch.tensor([[-1, 8, 10**9]])
    params = [SamplingParams(frequency_penalty=1.0, repetition_penalty=2.0, no_repeat_ngram_size=1)]
    rules = LogitRules.from_params(params, [[1]], [[]], 8)
    logits = torch.ones(1, 4, 8)
    out = ops.apply_logit_rules(logits, drafts, rules=rules, backend=backend)
    assert torch.equal(out, torch.tensor([1, -INF, 1, 1, 1, 1, 1, 1]).expand(1, 4, 8))


def test_rows_past_the_draft_cost_nothing(backend):
    """Nothing is read or written there; rows up to draft_lens are as without the others."""
    logits, drafts = case()
    params = [SamplingParams(**RULES["all"])] * 4
    lens = torch.tensor([0, 1, 3, 2], dtype=torch.int32)
    whole = ops.apply_logit_rules(logits, drafts, rules=rules_of(params), backend=backend)
    out = ops.apply_logit_rules(logits, drafts, rules=rules_of(params), draft_lens=lens, backend=backend)
    for b, n in enumerate(lens.tolist()):
        assert torch.equal(out[b, : n + 1], whole[b, : n + 1])


def test_a_row_does_not_depend_on_its_neighbours(backend):
    logits, drafts = case()
    params = [SamplingParams(**RULES[name]) for name in ("all", "repetition", "bias", "no-repeat-2")]
    out = ops.apply_logit_rules(logits, drafts, rules=rules_of(params), backend=backend)
    for order in ([3, 1, 0, 2], [2], [0, 0]):
        some = torch.tensor(order)
        alone = ops.apply_logit_rules(logits[some], drafts[some], rules=rules_of(params).of(some), backend=backend)
        assert torch.equal(alone, out[some])


def test_strides_and_guards(backend):
    """Logits as rows of a larger tensor, tables as rows of the engine's; nothing next to them is touched."""
    logits, drafts = case()
    params = [SamplingParams(**RULES["all"])] * 4
    rules = rules_of(params)
    want = ops.apply_logit_rules(logits, drafts, rules=rules, backend=backend)
    wide = torch.full((4, 9, VOCAB + 5), NAN)
    wide[:, 1:9:2, :VOCAB] = logits
    tables = {name: guarded(getattr(rules, name), padding=3) for name in ("counts", "bias", "texts")}
    views = replace(rules, **tables)
    out = ops.apply_logit_rules(wide[:, 1:9:2, :VOCAB], drafts, rules=views, backend=backend)
    assert torch.equal(out, want)
    assert_guards(*tables.values())


def test_ngrams_over_block_edges(backend):
    """A text longer than one program looks at, with the repetition across the edge."""
    text = list(range(3, 1030))
    history = [*text, 1, 2, *text[:1022]]  # places 1022, 1023, 1024 lie around the edge of 1024
    params = SamplingParams(no_repeat_ngram_size=4)
    rules = LogitRules.from_params([params], [history], [[]], 2000)
    drafts = torch.tensor([text[1022:1025]])
    out = ops.apply_logit_rules(torch.zeros(1, 4, 2000), drafts, rules=rules, backend=backend)
    banned = [row.nonzero().flatten().tolist() for row in (out[0] == -INF)]
    assert banned == [[text[1022]], [text[1023]], [text[1024]], [text[1025]]]


def transformers_rules(prompt_length):
    return {
        "repetition": ({"repetition_penalty": 1.7}, RepetitionPenaltyLogitsProcessor(1.7)),
        "no-repeat-2": ({"no_repeat_ngram_size": 2}, NoRepeatNGramLogitsProcessor(2)),
        "no-repeat-1": ({"no_repeat_ngram_size": 1}, NoRepeatNGramLogitsProcessor(1)),
        "banned": ({"banned_token_ids": [2, 4]}, SuppressTokensLogitsProcessor([2, 4])),
        "min-new": (
            {"min_new_tokens": 4, "stop_token_ids": [3, 7]},
            MinNewTokensLengthLogitsProcessor(prompt_length, 4, [3, 7]),
        ),
    }


@pytest.mark.parametrize("name", transformers_rules(1))
def test_is_what_transformers_does(name, backend):
    logits, drafts = case()
    for b, (prompt, output) in enumerate(zip(PROMPTS, OUTPUTS, strict=True)):
        params, processor = transformers_rules(len(prompt))[name]
        rules = LogitRules.from_params([SamplingParams(**params)], [prompt], [output], VOCAB)
        out = ops.apply_logit_rules(logits[b : b + 1], drafts[b : b + 1], rules=rules, backend=backend)
        for t in range(4):
            history = torch.tensor([[*prompt, *output, *drafts[b, :t].tolist()]])
            assert torch.equal(out[0, t], processor(history, logits[b, t : t + 1].clone())[0])


def test_nothing_to_do():
    rules = LogitRules(torch.zeros(0, dtype=torch.int32))
    empty = ops.apply_logit_rules(torch.zeros(0, 3, 5), torch.zeros(0, 2, dtype=torch.int64), rules=rules)
    assert empty.shape == (0, 3, 5)


def test_masked_logits_stay_masked(backend):
    """-inf in, -inf out, whatever is added; NaN stays NaN, so that a bad row is still seen to be one."""
    logits = torch.tensor([[[-INF, NAN, 1.0]]])
    params = SamplingParams(repetition_penalty=1.5, frequency_penalty=-3.0, logit_bias={0: 100.0})
    rules = LogitRules.from_params([params], [[0, 1]], [[0, 1, 1]], 3)
    out = ops.apply_logit_rules(logits, torch.zeros(1, 0, dtype=torch.int64), rules=rules, backend=backend)
    assert out[0, 0, 0] == -INF
    assert out[0, 0, 1].isnan()
    assert out[0, 0, 2] == 1.0


def test_a_banned_token_is_masked_whatever_its_logit(backend):
    """By a mask, by the text's least length, by an n-gram."""
    logits = torch.tensor([[[NAN, NAN, NAN, 1.0]]])
    params = [SamplingParams(min_new_tokens=1, stop_token_ids=[0], no_repeat_ngram_size=1)]
    rules = LogitRules.from_params(params, [[1]], [[]], 4)
    rules.mask = torch.tensor([[[0b1011]]], dtype=torch.int32)
    out = ops.apply_logit_rules(logits, torch.zeros(1, 0, dtype=torch.int64), rules=rules, backend=backend)
    assert out.tolist() == [[[-INF, -INF, -INF, 1.0]]]


def test_penalties_of_an_empty_text(backend):
    rules = LogitRules.from_params([SamplingParams(presence_penalty=1.0)], [[]], [[]], 5)
    logits = torch.randn(1, 2, 5)
    out = ops.apply_logit_rules(logits, torch.tensor([[-1]]), rules=rules, backend=backend)
    assert torch.equal(out, logits)


def good():
    logits, drafts = case()
    return {"logits": logits, "draft_tokens": drafts, "rules": rules_of([SamplingParams(**RULES["all"])] * 4)}


def changed(**fields):
    return {"rules": replace(good()["rules"], **fields)}


BAD = {
    "logits-2d": ({"logits": torch.zeros(3, 4)}, "logits must be of shape"),
    "logits-int": ({"logits": torch.zeros(4, 4, VOCAB, dtype=torch.int64)}, "logits must be float32"),
    "drafts-shape": ({"draft_tokens": torch.zeros(4, 4, dtype=torch.int64)}, "draft_tokens must be of shape"),
    "drafts-float": ({"draft_tokens": torch.zeros(4, 3)}, "draft_tokens must be an integer"),
    "draft-lens": ({"draft_lens": torch.full((4,), 4)}, "draft_lens must be from 0 to 3"),
    "first-negative": ({"first": -1}, "first must be an integer from 0 to 63"),
    "first-without-drafts": ({"first": 1}, "draft_tokens must be of shape"),
    "no-rules": ({"rules": SamplingParams()}, "rules must be LogitRules, got SamplingParams"),
    "no-lens": (changed(lens=None), "rules.lens must be a tensor"),
    "counts-alone": (changed(repetition_penalty=None), "rules.repetition_penalty must be given together with"),
    "counts-shape": (changed(counts=torch.zeros(4, 5, dtype=torch.int32)), "rules.counts must be of shape"),
    "bias-dtype": (changed(bias=torch.zeros(4, VOCAB).double()), "rules.bias must be float32"),
    "mask-words": (changed(mask=torch.zeros(4, 4, 2, dtype=torch.int32)), "rules.mask must be of shape"),
    "mask-rows": (changed(mask=torch.zeros(4, 3, 1, dtype=torch.int32)), "rules.mask must be of shape"),
    "min-without-stop": (changed(stop_ids=None), "rules.min_lens must be given together with stop_ids"),
    "ngram-without-text": (changed(texts=None), "rules.ngram must be given together with texts"),
    "ngram-larger": (changed(max_ngram=1), "rules.ngram must be from 0 to 1"),
    "lens-beyond": (changed(lens=torch.full((4,), 99, dtype=torch.int32)), "rules.lens must be from 0 to"),
    "repetition-0": (changed(repetition_penalty=torch.zeros(4)), "rules.repetition_penalty must be above 0"),
    "backend": ({"backend": "cuda"}, "backend must be one of"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    change, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        ops.apply_logit_rules(**{**good(), **change})


@pytest.mark.parametrize(
    ("params", "prompts", "outputs", "message"),
    [
        ([SamplingParams()] * 2, [[1]], [[]], r"prompts must be one entry per request \(2\), got 1"),
        ([SamplingParams()], [[1]], [[], []], r"outputs must be one entry per request \(1\), got 2"),
        (SamplingParams(), [[1]], [[]], "params must be a list of SamplingParams"),
        ([SamplingParams()], [[-1]], [[]], "prompts must be of token ids from 0 to 4, got -1"),
        ([SamplingParams()], [[1]], [[5]], "outputs must be of token ids from 0 to 4, got 5"),
        ([SamplingParams()], [1], [[]], "prompts must be of lists of token ids, got int"),
        ([SamplingParams(banned_token_ids=[7])], [[1]], [[]], "params must be of token ids from 0 to 4, got 7"),
        (
            [SamplingParams(logits_processors=[print])],
            [[1]],
            [[]],
            "params must be without grammar and logits_processors",
        ),
    ],
)
def test_from_params_checks_its_lists(params, prompts, outputs, message):
    with pytest.raises(ValueError, match=message):
        LogitRules.from_params(params, prompts, outputs, 5)


def test_from_params_takes_tensors():
    rules = LogitRules.from_params(
        [SamplingParams(presence_penalty=1.0)], [torch.tensor([1, 2])], [torch.tensor([2])], 4
    )
    assert rules.counts.tolist() == [[0, IN_PROMPT, IN_PROMPT + 1, 0]]


@pytest.mark.parametrize("name", ["nothing", "repetition", "bias", "min-new", "no-repeat-2", "all"])
def test_opcheck(name):
    logits, drafts = case()
    rules = rules_of([SamplingParams(**RULES[name])] * 4)
    names = ("repetition_penalty", "presence_penalty", "frequency_penalty", "counts", "bias", "mask", "min_lens")
    fields = [getattr(rules, field) for field in (*names, "stop_ids", "ngram", "texts", "max_ngram")]
    args = (logits, drafts, None, rules.lens, *fields, 0, "torch")
    torch.library.opcheck(torch.ops.specdec.apply_logit_rules.default, args)


@pytest.mark.parametrize("order", itertools.permutations(["bias", "repetition", "presence"]), ids="-".join)
def test_order_does_not_depend_on_how_params_are_written(order):
    """logit_bias, then repetition_penalty, then the others, as documented."""
    params = {key: value for name in order for key, value in RULES[name].items()}
    rules = LogitRules.from_params([SamplingParams(**params)], [[0]], [[0]], VOCAB)
    out = ops.apply_logit_rules(torch.ones(1, 1, VOCAB), torch.zeros(1, 0, dtype=torch.int64), rules=rules)
    assert out[0, 0, 0].item() == pytest.approx((1 + 1.5) / 1.7 - 0.9)
