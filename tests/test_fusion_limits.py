"""What ``optimize`` and the head must leave alone, or see: found by trying to break them. Both forms, of kernels and of few operations."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from torch import nn
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from specdec_triton import DraftModel, SamplingParams, SpeculativeDecoder, ops, optimize
from specdec_triton.adapter import ModelAdapter
from specdec_triton.errors import UnsupportedModelError
from specdec_triton.fusion.decoder_layer import FusedDecoderLayer
from specdec_triton.fusion.norms import fused_norm
from specdec_triton.fusion.siblings import fuse_siblings
from specdec_triton.head import find_head
from specdec_triton.testing import plain_greedy, toy_model

BOTH = pytest.mark.parametrize("kernels", [False, True], ids=["short", "kernels"])
TOKENS = (torch.arange(1, 41)[None] * 37) % 90 + 3
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": 16, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5,
}  # fmt: skip


def own_logits(model):
    with torch.inference_mode():
        return model(input_ids=TOKENS, use_cache=False).logits[0]


def paged_logits(model, split=(17, 1, 5, 6, 1, 5, 5)):
    adapter = model if isinstance(model, ModelAdapter) else ModelAdapter(model)
    cache = adapter.new_cache(slots=1, page_size=5, num_pages=8)
    cache.reserve(0, 40)
    parts, start = [], 0
    for n in split:
        context = torch.tensor([start], dtype=torch.int32)
        parts.append(adapter.forward(TOKENS[:, start : start + n], cache, cache.block_table, context)[0])
        start += n
    return torch.cat(parts)


def distance(a, b):
    return float((a - b).abs().max() / b.abs().max())


def forms(model):
    return sum(isinstance(module, FusedDecoderLayer) for module in model.modules())


@BOTH
def test_a_layer_that_looks_at_positions(kernels):
    """Ministral 3 scales its queries from a position on that no short pass reaches."""
    model = toy_model("ministral3", rope_parameters=YARN, max_position_embeddings=256)
    want = own_logits(model)
    optimize(model, kernels=kernels)
    assert forms(model) == 0
    assert distance(paged_logits(model), want) < 1e-5


def test_an_activation_that_is_clipped():
    model = optimize(toy_model(hidden_act="gelu_10"), kernels=True)
    assert forms(model) == 0


@BOTH
@pytest.mark.parametrize("part", ["mlp", "self_attn.o_proj", "input_layernorm"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_forward_that_was_replaced(part, when, kernels):
    """As accelerate does it; in bf16, where a lost change of a few percent hides in the rounding."""
    model = toy_model(dtype=torch.bfloat16)
    calls = []

    def replace(model):
        module = model.model.layers[0].get_submodule(part)
        forward = module.forward
        module.forward = lambda *args, **kwargs: calls.append(0) or forward(*args, **kwargs) * 1.02

    if when == "before":
        replace(model)
    optimize(model, kernels=kernels)
    adapter = ModelAdapter(model)
    if when == "after":
        replace(model)
    calls.clear()
    got = paged_logits(adapter)
    assert len(calls) == 7  # passes
    assert distance(got.float(), own_logits(model).float()) < 0.1


@BOTH
def test_a_module_that_was_swapped(kernels):
    """As an adapter of low rank is put around a layer."""

    class Around(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x) * 3

    model = optimize(toy_model(), kernels=kernels)
    adapter = ModelAdapter(model)
    attention = model.model.layers[1].self_attn
    attention.o_proj = Around(attention.o_proj)
    assert distance(paged_logits(adapter), own_logits(model)) < 1e-5


@BOTH
def test_a_rotary_module_that_uses_its_tensors_again(kernels):
    model = toy_model()
    want = own_logits(model)
    optimize(model, kernels=kernels)
    rotary, kept = model.model.rotary_emb, {}
    forward = rotary.forward

    def again(x, position_ids):
        new = forward(x, position_ids)
        old = kept.setdefault(position_ids.shape[1], tuple(torch.empty_like(table) for table in new))
        return tuple(table.copy_(value) for table, value in zip(old, new, strict=True))

    rotary.forward = again
    assert distance(paged_logits(model), want) < 1e-5


def test_a_norm_of_two_arguments():
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.rand(8) + 0.5), 1e-6

        def forward(self, x, gate=None):
            x = x if gate is None else x * gate
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight

    assert fused_norm(Gated()) is None


def test_casts_of_norms_in_kernels():
    """What a norm has made of its weight follows the weight."""
    norm = fused_norm(transformers.models.gemma.modeling_gemma.GemmaRMSNorm(16))
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    norm.bfloat16().float()
    x = torch.randn(3, 16)
    want = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.eps) * (1 + norm.weight)
    assert distance(norm(x), want) < 1e-6


def test_another_form_is_another_model():
    model = optimize(toy_model(), kernels=True)
    assert optimize(model) is optimize(model, kernels=True) is model
    with pytest.raises(ValueError, match="kernels must be None or True for a model that was rewritten so, got False"):
        optimize(model, kernels=False)


# Heads.


class Masked(LlamaForCausalLM):
    """Changes its logits in place, as Chameleon does."""

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits[..., 3:60] = -1e9
        return out


class Raised(LlamaForCausalLM):
    """Its head is wider than its body."""

    def forward(self, input_ids, **kwargs):
        kwargs.pop("logits_to_keep", None)
        hidden = self.model(input_ids=input_ids, **kwargs).last_hidden_state
        logits = self.lm_head(hidden.to(self.lm_head.weight.dtype))
        return transformers.modeling_outputs.CausalLMOutputWithPast(logits=logits)


def test_heads_that_are_more_than_a_product():
    config = toy_model().config
    assert find_head(LlamaForCausalLM(config).eval()) is not None
    assert find_head(Masked(config).eval()) is None
    raised = Raised(config).eval().bfloat16()
    raised.lm_head.float()
    assert find_head(raised) is None


@pytest.mark.parametrize(
    ("kind", "option"),
    [
        ("cohere", {"logit_scale": -0.5}),
        ("granite", {"logits_scaling": -4.0}),
        ("gemma2", {"final_logit_softcapping": -5.0}),
    ],
    ids=["scale", "divisor", "softcap"],
)
def test_factors_that_the_ops_refuse(kind, option):
    assert find_head(toy_model(kind, **option)) is None


def test_a_head_that_was_replaced():
    model = toy_model()
    plan = find_head(model)
    assert plan.of(model).linear is model.lm_head
    model.lm_head = copy.deepcopy(model.lm_head)
    assert plan.of(model) is None


# A draft model whose position table ends.


@pytest.mark.parametrize("mode", ["reads", "device"])
def test_a_row_beyond_the_draft_models_positions(mode, recwarn):
    """faults.md J1: it goes on without drafts, and the others keep theirs."""
    sizes = {"n_embd": 64, "n_layer": 1, "n_head": 4, "n_positions": 32}
    unset = dict.fromkeys(
        ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
    )
    draft = toy_model("gpt2", **unset, **sizes)
    adapter = ModelAdapter(toy_model())
    adapter.fixed_shapes = mode == "device"
    decoder = SpeculativeDecoder(adapter, DraftModel(draft), num_draft_tokens=3, exact=False, adaptive=False)
    prompts = [TOKENS[0, :40].tolist(), TOKENS[0, :5].tolist()]
    outputs = decoder.generate(prompts, SamplingParams(temperature=0, max_new_tokens=12))
    assert [out.token_ids for out in outputs] == [plain_greedy(adapter.model, prompt, 12) for prompt in prompts]
    assert outputs[0].stats.drafted == 0
    assert outputs[1].stats.drafted > 0
    assert not [w for w in recwarn if "failed" in str(w.message)]


@pytest.mark.parametrize("name", ["append_kv", "rope_append"])
def test_an_empty_batch(name):
    k, cache = torch.zeros(0, 3, 2, 16), torch.zeros(4, 2, 2, 16)
    table, none = torch.zeros(0, 2, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
    if name == "append_kv":
        ops.append_kv(k, k, cache, cache.clone(), table, none)
    else:
        assert ops.rope_append(k, k, k, None, None, cache, cache.clone(), table, none).shape == k.shape


def test_threads_in_one_module_keep_their_own_parts() -> None:
    """What other threads do between the calls of two siblings, done in one."""
    torch.manual_seed(0)
    parent = nn.Module()
    parent.first, parent.second = nn.Linear(4, 3), nn.Linear(4, 5)
    mine, theirs = torch.randn(2, 4), torch.randn(2, 4)
    want = [layer(x) for layer in (parent.first, parent.second) for x in (mine, theirs)]
    fuse_siblings(parent, ["first", "second"])
    got = [parent.first(mine), parent.first(theirs), parent.second(mine), parent.second(theirs)]
    torch.testing.assert_close(got, want)


def test_what_is_no_fault_of_the_rewrite() -> None:
    """Heads of nothing but zeros are fine; numbers that are not finite were there before; a model without a head is none."""
    model = toy_model()
    model.lm_head.weight.data.zero_()
    assert not optimize(model)(input_ids=torch.tensor([[1, 2, 3]])).logits.any()
    broken = toy_model()
    broken.model.embed_tokens.weight.data.fill_(float("nan"))
    with pytest.raises(UnsupportedModelError, match="its logits hold NaN or infinity"):
        optimize(broken)
    with pytest.raises(UnsupportedModelError, match="no language-model head"):
        optimize(toy_model().model)
