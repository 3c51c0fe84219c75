"""``optimize``: what it rewrites, and that the untouched module is its oracle."""

from __future__ import annotations

import copy
import pickle
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from specdec_triton import NoDraft, PromptLookup, SamplingParams, SpeculativeDecoder, optimize
from specdec_triton.adapter import ModelAdapter
from specdec_triton.fusion import rewrite
from specdec_triton.fusion.checkpoint_pages import CheckpointPages
from specdec_triton.fusion.decoder_layer import FusedDecoderLayer
from specdec_triton.fusion.norms import FusedRMSNorm, fused_norm
from specdec_triton.fusion.packed_linear import FbgemmLinear, OneDNNLinear, PackedLinear, best_packing
from specdec_triton.fusion.siblings import FusedPart
from specdec_triton.testing import toy_model

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
# name, options, whether its decoder layer has the usual structure
MODELS = [
    ("Llama", {}, True),
    ("Mistral", {"sliding_window": 4}, True),
    ("Qwen2", {}, True),
    ("Qwen3", {"head_dim": 16}, True),
    ("Granite", {"residual_multiplier": 0.5}, False),
    ("Gemma", {"head_dim": 16}, True),
    ("Phi3", {}, True),
    ("Gemma2", {"head_dim": 16, "sliding_window": 4}, True),
    ("Gemma3Text", {"head_dim": 16, "sliding_window": 4}, True),
    ("SmolLM3", {"no_rope_layer_interval": 2}, True),
    ("Olmo2", {}, False),
    ("Starcoder2", {}, False),
    ("GPTNeoX", {}, False),
]
TOKENS = torch.tensor([[3, 14, 15, 92, 65, 35, 8, 9, 79, 32]])


def toy(name: str, options: dict[str, object], dtype: torch.dtype = torch.float32) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SHAPE, **options)
    model = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config).eval()
    for parameter_name, parameter in model.named_parameters():
        if "norm" in parameter_name:  # weights of one hide a norm that is applied twice or never
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model.to(dtype)


def logits(model: transformers.PreTrainedModel) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=TOKENS, use_cache=False).logits[0].double()


def paged_logits(model: transformers.PreTrainedModel) -> torch.Tensor:
    adapter = ModelAdapter(model)
    cache = adapter.new_cache(slots=1, page_size=3, num_pages=4)
    cache.reserve(0, TOKENS.shape[1])
    parts = []
    for start, stop in ((0, 6), (6, 7), (7, 10)):
        context = torch.tensor([start], dtype=torch.int32)
        parts.append(adapter.forward(TOKENS[:, start:stop], cache, cache.block_table, context)[0])
    return torch.cat(parts).double()


@pytest.mark.parametrize(("name", "options", "usual"), MODELS, ids=[m[0] for m in MODELS])
def test_logits_and_text_in_fp32(name: str, options: dict[str, object], usual: bool) -> None:
    model = toy(name, options)
    oracle = copy.deepcopy(model)
    assert optimize(model) is model
    want = logits(oracle)
    for got in (logits(model), paged_logits(model)):
        assert float((got - want).abs().max() / want.abs().max()) < 1e-5
    fused = [m for m in model.modules() if isinstance(m, FusedDecoderLayer)]
    assert len(fused) == (SHAPE["num_hidden_layers"] if usual else 0)

    plain = oracle.generate(TOKENS, attention_mask=torch.ones_like(TOKENS), do_sample=False, max_new_tokens=24)
    params = SamplingParams(temperature=0, max_new_tokens=24)
    for drafter in (NoDraft(), PromptLookup()):
        out = SpeculativeDecoder(model, drafter).generate(TOKENS.tolist(), params)[0]
        assert out.token_ids == plain[0, TOKENS.shape[1] :].tolist()
    again = model.generate(TOKENS, attention_mask=torch.ones_like(TOKENS), do_sample=False, max_new_tokens=24)
    assert torch.equal(again, plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("packing", [None, OneDNNLinear, FbgemmLinear], ids=["native", "onednn", "fbgemm"])
@pytest.mark.parametrize(("name", "options", "usual"), MODELS[:5], ids=[m[0] for m in MODELS[:5]])
def test_error_in_half_precision(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    options: dict[str, object],
    usual: bool,
    packing: type[PackedLinear] | None,
    dtype: torch.dtype,
) -> None:
    """At most twice the untouched module's own error (root mean square), against fp64 with the same weights."""
    if packing is not None and not packing.can_pack(torch.ones(8, 8, dtype=dtype)):
        pytest.skip(f"{packing.__name__} cannot compute in {dtype} on this CPU")
    monkeypatch.setattr(rewrite, "best_packing", lambda layers: packing)
    model = toy(name, options, dtype)
    exact = logits(copy.deepcopy(model).double())
    own = float((logits(model) - exact).square().mean().sqrt())
    optimize(model)
    assert {type(m) for m in model.modules() if isinstance(m, PackedLinear)} == ({packing} if packing else set())
    for got in (logits(model), paged_logits(model)):
        assert float((got - exact).square().mean().sqrt()) <= 2 * own


def test_twice_is_once() -> None:
    model = optimize(toy("Llama", {}))
    modules = [id(m) for m in model.modules()]
    assert [id(m) for m in optimize(model).modules()] == modules


def test_fused_parts_share_one_product_and_keep_no_input() -> None:
    model = optimize(toy("Qwen2", {}))
    attention = model.model.layers[0].self_attn
    parts = [attention.q_proj, attention.k_proj, attention.v_proj]
    assert all(isinstance(part, FusedPart) and part.shared is parts[0].shared for part in parts)
    x, y = torch.randn(2, 64), torch.randn(2, 64)
    want = parts[0].shared.product(x).split(parts[0].shared.sizes, -1)
    for part, expected in zip(parts, want, strict=True):
        assert torch.equal(part(x), expected)
    assert parts[0].shared._given is None
    # Another order, an abandoned input, and the same part twice are all right too.
    parts[1](y)
    assert torch.equal(parts[2](x), want[2])
    assert torch.equal(parts[2](x), want[2])


def test_hooked_layers_stay() -> None:
    model = toy("Llama", {})
    seen = []
    model.model.layers[1].mlp.up_proj.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    layer = model.model.layers[1].mlp.up_proj
    optimize(model)
    assert model.model.layers[1].mlp.up_proj is layer
    logits(model)
    assert seen


def test_a_changed_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoiled(module: nn.Module) -> FusedRMSNorm | None:
        norm = fused_norm(module)
        if norm is not None:
            norm._wide_scale.mul_(1.5)
        return norm

    monkeypatch.setattr(rewrite, "fused_norm", spoiled)
    with pytest.raises(ValueError, match="changed the logits of LlamaForCausalLM"):
        optimize(toy("Llama", {}))


@pytest.mark.parametrize("width", [1, 5, 64])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norm_is_recognised_by_what_it_computes(width: int, offset: float) -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(width) + 0.5)
            self.eps = 1e-4

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (self.weight + offset)

    module = Norm()
    norm = fused_norm(module)
    assert norm is not None
    x = torch.randn(7, width) * 10
    want = module.double()(x.double()).detach()
    assert float((norm(x).double() - want).abs().max()) < 1e-5 * float(want.abs().max())


def test_other_norms_are_left_alone() -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))
            self.eps = 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.layer_norm(x, (8,), self.weight, None, self.eps)

    assert fused_norm(Centred()) is None
    assert fused_norm(nn.LayerNorm(8)) is None
    assert fused_norm(nn.Linear(8, 8)) is None


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("packing", [OneDNNLinear, FbgemmLinear])
def test_packed_linear(packing: type[PackedLinear], dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(70, 33, bias=bias).to(dtype)
    if not packing.can_pack(layer.weight):
        assert dtype != torch.float32 or packing is FbgemmLinear
        pytest.skip(f"{packing.__name__} cannot compute in {dtype} on this CPU")
    packed = packing(layer.weight, layer.bias)
    assert torch.equal(packed.weight, layer.weight)
    assert (packed.in_features, packed.out_features, packed.dtype) == (70, 33, dtype)
    for shape in ((2, 3, 70), (0, 70), (70,)):
        x = torch.randn(shape).to(dtype).float()
        want = F.linear(x.double(), layer.weight.double(), None if layer.bias is None else layer.bias.double())
        got = packed(x)
        assert got.dtype == torch.float32
        assert got.shape == want.shape
        error = (got.double() - want).detach().abs()
        rounding = torch.finfo(dtype if packing is OneDNNLinear else torch.float32).eps
        assert bool((error <= 1e-5 + rounding * want.detach().abs()).all())


def test_weights_that_fp16_cannot_hold_are_not_packed_as_fp16() -> None:
    weight = torch.randn(4, 8).to(torch.bfloat16)
    assert FbgemmLinear.can_pack(weight)
    large = weight.clone()
    large[1, 2] = 1e5
    assert not FbgemmLinear.can_pack(large)
    small = weight * 2.0**-20  # subnormal in fp16: bits would be lost
    assert not FbgemmLinear.can_pack(small)
    assert not FbgemmLinear.can_pack(weight.float())
    assert not FbgemmLinear.can_pack(torch.zeros(4, 8, dtype=torch.bfloat16))


def test_packing_is_a_rule_and_not_a_measurement() -> None:
    """The packings round differently: a busy machine must not change a text."""
    for dtype in (torch.float32, torch.bfloat16):
        layers = [nn.Linear(64, 32, dtype=dtype), nn.Linear(32, 64, dtype=dtype)]
        fits = [p for p in (OneDNNLinear, FbgemmLinear) if all(p.can_pack(layer.weight) for layer in layers)]
        assert {best_packing(layers) for _ in range(5)} == {fits[0] if fits else None}


def test_an_optimized_model_can_be_neither_saved_nor_cast(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(rewrite, "best_packing", lambda layers: OneDNNLinear)
    model = optimize(toy("Llama", {}))
    want = logits(model)
    assert torch.equal(logits(model.cpu().float().eval()), want)
    for save in (model.state_dict, lambda: model.save_pretrained(tmp_path)):
        with pytest.raises(RuntimeError, match="save it before optimize"):
            save()
    for kind in (torch.float64, torch.bfloat16, "meta"):
        casting = optimize(toy("Llama", {}))
        with pytest.raises(RuntimeError, match="neither cast nor moved"):
            casting.to(kind)
        assert torch.equal(logits(casting), want)  # nothing was cast before the refusal
    tied = optimize(toy("Llama", {"tie_word_embeddings": True}))
    for change in (lambda: model.load_state_dict({}, strict=False), tied.tie_weights):
        with pytest.raises(RuntimeError, match="before optimize"):
            change()
    with pytest.raises(RuntimeError, match="does not require grad"):
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()


@pytest.mark.parametrize("wrong", ["smollm2", None, nn.Linear(2, 2)], ids=["str", "None", "module"])
def test_optimize_takes_a_model(wrong: object) -> None:
    with pytest.raises(ValueError, match=f"must be a transformers model, got {type(wrong).__name__}"):
        optimize(wrong)


def test_packing_is_chosen_among_those_that_hold_the_weights() -> None:
    assert best_packing([]) is None
    assert best_packing([nn.Linear(8, 8, device="meta")]) is None
    unfit = nn.Linear(64, 64, dtype=torch.float64)  # neither library computes in fp64
    assert best_packing([unfit]) is None


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_mapped_checkpoint_is_given_back(tmp_path: Path) -> None:
    """The pages leave the process's memory; whoever reads the weight again gets the same values. Modified weights stay."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SHAPE | {"intermediate_size": 4096, "tie_word_embeddings": True})
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    want = logits(model)

    def resident() -> int:
        size, inside = 0, False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if "-" in line.split(" ")[0]:
                inside = line.endswith(f"{tmp_path}/model.safetensors")
            elif inside and line.startswith("Rss:"):
                size += int(line.split()[1]) * 1024
        return size

    before = resident()
    weights = [layer.mlp.up_proj.weight for layer in model.model.layers]
    assert before > 2 * sum(weight.nbytes for weight in weights)
    pages = CheckpointPages()
    for weight in weights:
        pages.release(weight)
    gone = sum(weight.nbytes for weight in weights)
    assert gone - 4 * 4096 * len(weights) <= before - resident() <= gone
    assert torch.equal(logits(model), want)  # read again from the file

    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(2)
    changed, before = logits(model), resident()
    pages = CheckpointPages()
    for parameter in model.parameters():
        pages.release(parameter)
    assert resident() == before
    assert torch.equal(logits(model), changed)
    pages.release(torch.ones(10_000))  # not mapped from a file


@pytest.mark.parametrize("packing", [OneDNNLinear, FbgemmLinear])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_an_optimized_model_can_be_copied(
    monkeypatch: pytest.MonkeyPatch, packing: type[PackedLinear], dtype: torch.dtype
) -> None:
    monkeypatch.setattr(rewrite, "best_packing", lambda layers: packing)
    model = optimize(toy("Qwen2", {}, dtype))
    want = logits(model)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(copied), want)
        assert torch.equal(paged_logits(copied), paged_logits(model))


@pytest.mark.parametrize("packing", [OneDNNLinear, FbgemmLinear])
@pytest.mark.parametrize("kind", ["gpt2", "mixtral", "llama"])
def test_activations_stay_narrow_where_something_computes_in_half_precision(
    monkeypatch: pytest.MonkeyPatch, kind: str, packing: type[PackedLinear]
) -> None:
    """Conv1D weights, experts, and linear layers that the packing cannot hold would not take fp32 activations."""
    monkeypatch.setattr(rewrite, "best_packing", lambda layers: packing)
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128} if kind == "gpt2" else {}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2} if kind == "mixtral" else {}
    model = toy_model(kind, dtype=torch.bfloat16, **sizes, **experts)
    if kind == "llama":
        with torch.no_grad():
            model.model.layers[1].mlp.down_proj.weight[0, 0] = 1e6  # not in fp16
            model.model.layers[1].mlp.down_proj.weight[0, 1:] = 0
    oracle = copy.deepcopy(model)
    with torch.inference_mode():
        want = oracle(input_ids=TOKENS, use_cache=False).logits.float()
        optimize(model)
        got = model(input_ids=TOKENS, use_cache=False).logits.float()
    assert float((got - want).abs().max() / want.abs().max()) < 0.1
    SpeculativeDecoder(model, NoDraft(), exact=False).generate(
        TOKENS.tolist(), SamplingParams(temperature=0, max_new_tokens=4)
    )


def test_hooks_are_called_in_rounds() -> None:
    """Also on a module that the short way passes by, and whenever they were registered."""
    model = toy("Llama", {})
    optimize(model)
    decoder = SpeculativeDecoder(model, NoDraft())
    params = SamplingParams(temperature=0, max_new_tokens=10)
    before = decoder.generate(TOKENS.tolist(), params)[0].token_ids
    hook = model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: out * 0)
    plain = model.generate(TOKENS, attention_mask=torch.ones_like(TOKENS), do_sample=False, max_new_tokens=10)
    steered = decoder.generate(TOKENS.tolist(), params)[0].token_ids
    assert steered == plain[0, TOKENS.shape[1] :].tolist()
    assert steered != before
    hook.remove()
    assert decoder.generate(TOKENS.tolist(), params)[0].token_ids == before
