"""The head of a model, and rounds that judge and draft from what it is given: the same texts as with logits."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import transformers
from torch import nn

from specdec_triton import DraftModel, NoDraft, PromptLookup, SamplingParams, SpeculativeDecoder, ops, optimize
from specdec_triton.adapter import ModelAdapter
from specdec_triton.head import find_head
from specdec_triton.testing import toy_model

OP = "verify_head"
HEADS = {  # factor and softcap
    "llama": ({}, None, None),
    "tied": ({"tie_word_embeddings": True}, None, None),
    "gemma2": ({"final_logit_softcapping": 5.0}, None, 5.0),
    "cohere": ({"logit_scale": 0.25}, 0.25, None),
    "granite": ({"logits_scaling": 8.0}, 0.125, None),
    "phi": ({}, None, None),  # with a bias
    "mixtral": ({"num_local_experts": 4, "num_experts_per_tok": 2}, None, None),
}
PROMPTS = [[3, 5, 7, 3, 5, 7, 3, 5, 7, 11, 3], [2, 9], list(range(20, 40)), [8, 8, 8]]


def model_of(kind, dtype=torch.float32):
    model = toy_model("llama" if kind == "tied" else kind, dtype=dtype, **HEADS[kind][0])
    if model.get_output_embeddings().bias is not None:
        nn.init.normal_(model.get_output_embeddings().bias)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", HEADS)
def test_found_by_what_it_computes(kind, dtype):
    model = model_of(kind, dtype)
    head = find_head(model).of(model)
    assert (head.scale, head.softcap, head.size) == (*HEADS[kind][1:], 97)
    tokens = torch.tensor([[3, 5, 7, 11]])
    with torch.inference_mode():
        hidden = head.decoder(input_ids=tokens, use_cache=False).last_hidden_state[0]
        logits = model(input_ids=tokens, use_cache=False).logits[0]
    params = ops.SamplingBatch.from_params([SamplingParams(temperature=0)] * 4, [0] * 4)
    assert torch.equal(head.sample(hidden, params=params), logits.argmax(-1))
    result = head.verify(
        hidden[None], logits[None, :3].argmax(-1), None, params=params.of(torch.tensor([0])), method="greedy"
    )
    assert result.tokens.tolist() == [logits.argmax(-1).tolist()]
    few = head.first(50)
    assert torch.equal(few.sample(hidden, params=params), logits[:, :50].argmax(-1))


def test_other_heads_are_left_alone():
    class Shifted(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    assert find_head(optimize(toy_model(dtype=torch.bfloat16))) is None  # packed weights
    model = toy_model()
    model.lm_head = Shifted(64, 97, bias=False)
    assert find_head(model) is None
    model = toy_model()
    forward = model.forward
    model.forward = lambda **kwargs: transformers.modeling_outputs.CausalLMOutputWithPast(
        logits=forward(**kwargs).logits * 2
    )
    assert find_head(model) is None


def test_a_head_that_somebody_watches_is_not_passed_by():
    model = toy_model()
    head = find_head(model).of(model)
    assert head.usable
    for module in (model, model.lm_head):
        hook = module.register_forward_hook(lambda *args: None)
        assert not head.usable
        hook.remove()
        module.forward = module.forward
        assert not head.usable
        del module.forward
    assert head.usable


# Rounds as on a device.


def adapter_of(model, *, head=True):
    adapter = ModelAdapter(model)
    adapter.fixed_shapes = True
    if not head:
        adapter.without_head()
    return adapter


class Writing(DraftModel):
    """Its logits are written."""

    def bind(self, target, options):
        session = super().bind(target, options)
        session.adapter.without_head()
        return session


DRAFTERS = {
    "none": lambda head: NoDraft(),
    "lookup": lambda head: PromptLookup(),
    "model": lambda head: (DraftModel if head else Writing)(toy_model(seed=1, num_hidden_layers=1)),
}
PARAMS = {
    "greedy": SamplingParams(temperature=0, max_new_tokens=16),
    "coupled": SamplingParams(seed=3, temperature=0.8, max_new_tokens=16),
    "rejection": SamplingParams(seed=5, max_new_tokens=16),
    "block": SamplingParams(seed=5, max_new_tokens=16),
}


@pytest.fixture
def calls(monkeypatch):
    """Of the ops around a pass."""
    counts = dict.fromkeys(("verify_head", "sample_head", "accept_reject", "sample"), 0)
    for name in counts:

        def counted(name, op, *args, **options):
            counts[name] += 1
            return op(*args, **options)

        monkeypatch.setattr(ops, name, partial(counted, name, getattr(ops, name)))
    return counts


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("method", PARAMS)
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_the_same_texts_as_with_logits(kind, method, drafter, calls):
    """Where drafts come with probabilities, rounds write logits."""
    texts = {}
    model = model_of(kind)
    for head in (True, False):
        before = dict(calls)
        decoder = SpeculativeDecoder(
            adapter_of(model, head=head), DRAFTERS[drafter](head), num_draft_tokens=3, exact=False, adaptive=False,
            method="auto" if method in ("greedy", "coupled") else method,
        )  # fmt: skip
        texts[head] = [out.token_ids for out in decoder.generate(PROMPTS, PARAMS[method])]
        used = {name: calls[name] - before[name] for name in calls}
        judged = head and not (drafter == "model" and method in ("rejection", "block"))
        assert (used["verify_head"] > 0) is judged
        assert (used["sample_head"] > 0) is (judged and drafter == "model")
        assert used["accept_reject"] == len(PROMPTS) or not judged  # after the prompts
        assert used["sample"] == 0 or not judged
    assert texts[True] == texts[False]


@pytest.mark.parametrize(
    "more",
    [{"top_k": 5}, {"logprobs": 2}, {"repetition_penalty": 1.2}, {"logit_bias": {3: 1.0}}],
    ids=lambda more: next(iter(more)),
)
def test_options_that_need_rows_get_them(more, calls):
    decoder = SpeculativeDecoder(adapter_of(toy_model()), PromptLookup(), exact=False, adaptive=False)
    decoder.generate(PROMPTS[:2], SamplingParams(seed=1, max_new_tokens=6, **more))
    assert calls["verify_head"] == 0
    assert calls["accept_reject"] > 2


def test_methods_in_one_batch_share_the_logits(calls):
    """Two would read the head's weight twice."""
    decoder = SpeculativeDecoder(adapter_of(toy_model()), PromptLookup(), exact=False, adaptive=False)
    decoder.generate(PROMPTS[:2], [SamplingParams(seed=1, max_new_tokens=6), SamplingParams(max_new_tokens=6)])
    assert calls["verify_head"] == 0
    decoder.generate(
        PROMPTS[:2], [SamplingParams(seed=1, max_new_tokens=6), SamplingParams(temperature=0, max_new_tokens=6)]
    )
    assert calls["verify_head"] > 0


def test_a_narrower_draft_vocabulary(calls):
    """And a wider one, of which the ids beyond the target's are not drawn."""
    target = toy_model()
    for vocab in (90, 110):
        texts = []
        for head in (True, False):
            draft = (DraftModel if head else Writing)(toy_model(seed=1, num_hidden_layers=1, vocab_size=vocab))
            decoder = SpeculativeDecoder(adapter_of(target, head=head), draft, exact=False, adaptive=False)
            texts.append([out.token_ids for out in decoder.generate(PROMPTS, PARAMS["coupled"])])
        assert texts[0] == texts[1]
    assert calls["sample_head"] > 0


def test_logits_that_are_no_numbers_end_their_request():
    """faults.md: nothing of such a row is emitted, and the others go on."""
    model = toy_model()
    adapter = adapter_of(model)
    embedding = model.get_input_embeddings().weight
    with torch.no_grad():
        embedding[50] = float("nan")
    decoder = SpeculativeDecoder(adapter, NoDraft(), exact=False)
    params = SamplingParams(temperature=0, max_new_tokens=5)
    outputs = decoder.generate([[3, 5], [3, 50]], params)
    assert outputs[1].finish_reason == "error"
    assert outputs[1].token_ids == []
    assert outputs[0].finish_reason == "length"


def test_exact_passes_on_the_kernels(backend, monkeypatch):
    """As on a GPU: the texts of rounds with logits, bit for bit the same decisions."""
    if backend == "torch":
        pytest.skip("the torch backend's exact passes write logits")
    monkeypatch.setattr("specdec_triton.exactness._OUTPUTS", 2**9)  # of thousands of rows the interpreter takes minutes
    monkeypatch.setattr("specdec_triton.exactness._KERNEL_COUNTS", (1, 5))
    model = toy_model(dtype=torch.bfloat16, num_hidden_layers=1)
    texts = []
    for head in (True, False):
        adapter = ModelAdapter(copy.deepcopy(model), backend="triton")
        adapter._invariant_backend, adapter.fixed_shapes = "triton", True
        if not head:
            adapter.without_head()
        decoder = SpeculativeDecoder(adapter, PromptLookup(), num_draft_tokens=3, adaptive=False, backend="triton")
        params = [SamplingParams(temperature=0, max_new_tokens=6), SamplingParams(seed=2, max_new_tokens=6)]
        texts.append([out.token_ids for out in decoder.generate(PROMPTS[:2], params)])
    assert texts[0] == texts[1]
