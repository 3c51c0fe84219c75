"""Layers rewritten into kernels: launches counted on the meta device, numbers on both backends, the untouched module as oracle."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

from specdec_triton import NoDraft, PromptLookup, SamplingParams, SpeculativeDecoder, optimize
from specdec_triton._library import why_not_triton
from specdec_triton.adapter import ModelAdapter
from specdec_triton.fusion.decoder_layer import FusedDecoderLayer
from specdec_triton.fusion.kernel_form import KernelForm
from specdec_triton.fusion.norms import FusedRMSNorm
from specdec_triton.testing import plain_greedy
from specdec_triton.tracing import Trace

REASON = why_not_triton("rope_append", "cpu")
needs_kernel = pytest.mark.skipif(REASON is not None, reason=str(REASON))

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "eos_token_id": None,
    "pad_token_id": 0,
    "attention_dropout": 0.0,
}
# Each kind of rotation, of norm, of MLP and of projections that is recognised.
KINDS = {
    "llama": {},
    "llama-scaled": {
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    },
    "mistral": {"sliding_window": 5},
    "qwen2": {},
    "qwen3": {},
    "gemma": {},
    "gemma2": {"sliding_window": 5, "attn_implementation": "eager", "attn_logit_softcapping": 5.0},
    "gemma3_text": {"sliding_window": 5},
    "phi3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "glm": {},
    "glm4": {},
    "ernie4_5": {},
    "smollm3": {"no_rope_layer_interval": 2},
    "seed_oss": {},
}  # fmt: skip
OTHERS = {  # another order, another norm, a factor, experts
    "olmo2": {},
    "cohere": {},
    "granite": {"residual_multiplier": 0.5},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
TOKENS = torch.tensor([[3, 14, 15, 92, 65, 35, 8, 9, 79, 32]])


def toy(kind, dtype=torch.float32, **more):
    torch.manual_seed(0)
    options = SIZES | (KINDS | OTHERS)[kind] | more
    implementation = options.pop("attn_implementation", None)
    config = transformers.AutoConfig.for_model(kind.split("-")[0], **options)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:  # weights of one hide a norm that is applied twice or never
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model.to(dtype)


def own_logits(model, tokens=TOKENS):
    with torch.inference_mode():
        return model(input_ids=tokens, use_cache=False).logits[0].double()


def paged_logits(adapter, tokens=TOKENS, split=(6, 1, 3), rows=None):
    cache = adapter.new_cache(slots=1, page_size=3, num_pages=-(-tokens.shape[1] // 3))
    cache.reserve(0, tokens.shape[1])
    parts, start = [], 0
    for n in split:
        context = torch.tensor([start], dtype=torch.int32)
        new = tokens[:, start : start + n]
        parts.append(adapter.forward(new, cache, cache.block_table, context, rows=None if rows is None else n)[0])
        start += n
    return torch.cat(parts)


def forms(model):
    return [m._form for m in model.modules() if isinstance(m, FusedDecoderLayer)]


@pytest.mark.parametrize("kind", KINDS)
def test_logits_in_fp32(kind):
    """Also those of the module itself, which keeps its layers there; and texts."""
    model = toy(kind)
    oracle = copy.deepcopy(model)
    optimize(model, kernels=True)
    assert [type(form) for form in forms(model)] == [KernelForm] * SIZES["num_hidden_layers"]
    want = own_logits(oracle)
    for got in (own_logits(model), paged_logits(ModelAdapter(model)).double()):
        assert float((got - want).abs().max() / want.abs().max()) < 1e-5
    decoder = SpeculativeDecoder(model, PromptLookup(), adaptive=False)
    (out,) = decoder.generate(TOKENS.tolist(), SamplingParams(temperature=0, max_new_tokens=20))
    assert out.token_ids == plain_greedy(oracle, TOKENS[0].tolist(), 20)


@pytest.mark.parametrize("kind", OTHERS)
def test_other_layers_stay(kind):
    model = optimize(toy(kind), kernels=True)
    assert forms(model) == []
    want = own_logits(toy(kind))
    assert float((paged_logits(ModelAdapter(model)).double() - want).abs().max() / want.abs().max()) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("kind", KINDS)
def test_error_in_half_precision(kind, dtype):
    """At most twice the untouched module's own (root mean square), against fp64 with the same weights."""
    model = toy(kind, dtype)
    exact = own_logits(copy.deepcopy(model).double())
    own = float((own_logits(model) - exact).square().mean().sqrt())
    got = paged_logits(ModelAdapter(optimize(model, kernels=True))).double()
    assert float((got - exact).square().mean().sqrt()) <= 2 * own


def test_prompts_leave_their_products_to_the_library():
    """More than 64 rows, and the same rows within rounding."""
    tokens = (torch.arange(100)[None] * 31) % 96
    model = toy("gemma3_text")
    want = own_logits(model, tokens)
    got = paged_logits(ModelAdapter(optimize(model, kernels=True)), tokens, (80, 20)).double()
    assert float((got - want).abs().max() / want.abs().max()) < 1e-5


def test_joined_weights_are_not_saved(tmp_path):
    model = optimize(toy("llama"), kernels=True)
    for save in (model.state_dict, lambda: model.save_pretrained(tmp_path)):
        with pytest.raises(RuntimeError, match="save it before optimize"):
            save()


def test_no_weight_is_kept_twice():
    """faults.md: the joined weights take the place of the layers' own."""
    model = toy("qwen3")
    before = sum(p.numel() for p in model.parameters())
    optimize(model, kernels=True)
    assert sum(p.numel() for p in model.parameters()) == before


@pytest.mark.parametrize("wrong", ["yes", 1])
def test_kernels_is_a_bool(wrong):
    with pytest.raises(ValueError, match="kernels must be a bool or None"):
        optimize(toy("llama"), kernels=wrong)


def test_hooks_are_called_in_rounds():
    model = optimize(toy("llama"), kernels=True)
    adapter, seen = ModelAdapter(model), []
    before = paged_logits(adapter)
    hook = model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: seen.append(0) or out * 0)
    assert not torch.equal(paged_logits(adapter), before)
    assert seen
    hook.remove()
    assert torch.equal(paged_logits(adapter), before)


# In the interpreter.


@needs_kernel
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text", "glm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_rows_do_not_depend_on_their_number(kind, dtype):
    """Exact passes as on a GPU, in kernels: one pass, several, and beside another text give the same bits; and at most twice the
    module's own error."""
    model = toy(kind, dtype, num_hidden_layers=1)
    exact = own_logits(copy.deepcopy(model).double())
    own = float((own_logits(model) - exact).square().mean().sqrt())
    adapter = ModelAdapter(optimize(model, kernels=True), backend="triton")
    assert len(forms(model)) == 1
    adapter._invariant_backend = "triton"
    for module in model.modules():
        if isinstance(module, FusedRMSNorm):
            module.kernels = True
    whole = paged_logits(adapter, split=(10,), rows=True)
    for split in ((1, 4, 5), (3, 7)):
        assert torch.equal(paged_logits(adapter, split=split, rows=True), whole)
    both = torch.cat((TOKENS.flip(1), TOKENS))
    cache = adapter.new_cache(slots=2, page_size=4, num_pages=6)
    for slot in range(2):
        cache.reserve(slot, 10)
    context = torch.zeros(2, dtype=torch.int32)
    assert torch.equal(adapter.forward(both, cache, cache.block_table, context, rows=20)[1], whole)
    error = float((whole.double() - exact).square().mean().sqrt())
    assert error <= 2 * own


@needs_kernel
def test_text_in_the_interpreter():
    model = toy("qwen3")
    want = plain_greedy(model, TOKENS[0].tolist(), 4)
    decoder = SpeculativeDecoder(optimize(model, kernels=True), NoDraft(), backend="triton")
    (out,) = decoder.generate(TOKENS.tolist(), SamplingParams(temperature=0, max_new_tokens=4))
    assert out.token_ids == want


# On the meta device.


def on_meta(kind, layers):
    with torch.device("meta"):
        return toy(kind, torch.bfloat16, num_hidden_layers=layers)


def launches(kind, layers, count):
    adapter = ModelAdapter(optimize(on_meta(kind, layers)))
    cache = adapter.new_cache(slots=4, page_size=16, num_pages=16)
    tokens = torch.zeros(4, count, dtype=torch.int64, device="meta")
    with Trace(context=20) as trace:
        adapter.hidden(tokens, cache, cache.block_table, torch.zeros(4, dtype=torch.int32, device="meta"))
    return {op: cost.launches for op, cost in trace.by_op.items()}


@pytest.mark.parametrize("count", [1, 5], ids=["plain", "verify"])
@pytest.mark.parametrize(
    ("kind", "norms"), [("llama", 2), ("qwen3", 2), ("gemma3_text", 4), ("gemma2", 4), ("phi3", 2)]
)
def test_launches_of_a_layer(kind, norms, count):
    """Nine; two more where attention and MLP are normed once more."""
    one, two = (launches(kind, layers, count) for layers in (1, 2))
    of_layer = {op: n - one.get(op, 0) for op, n in two.items() if n > one.get(op, 0)}
    beside = {op: n for op, n in of_layer.items() if not op.startswith("specdec.")}
    assert beside == {}
    assert of_layer == {
        "specdec.rms_norm": norms,
        "specdec.skinny_linear": 3,
        "specdec.rope_append": 1,
        "specdec.verify_attention": 2,
        "specdec.gated_linear": 1,
    }
    assert sum(of_layer.values()) == 7 + norms
