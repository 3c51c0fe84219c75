"""Models over the paged cache: equal means the same greedy tokens as transformers' own ``generate``, and logits within
fp32 rounding of the module's own forward pass; whatever cannot be so is refused with its reason.
"""

from __future__ import annotations

import random
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import pytest
import torch

from specdec_triton import DraftModel, NoDraft, PromptLookup, SamplingParams, SpeculativeDecoder
from specdec_triton.adapter import ModelAdapter
from specdec_triton.errors import UnsupportedModelError
from specdec_triton.observe import RECORDING, attention_configs
from specdec_triton.passes import IMPLEMENTATION
from specdec_triton.testing import always_wrong, own_logits, plain_greedy, random_drafts, toy_model

WINDOW = {"sliding_window": 4}
MIXED = {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}

# id: settings; the part before # is transformers' model type
ARCHITECTURES = {
    "llama": {},
    "llama#multi-query": {"num_key_value_heads": 1},
    "llama#tied": {"tie_word_embeddings": True},
    "llama#rope-llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    },
    "llama#rope-yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    },
    "mistral": WINDOW,
    "qwen2": {},
    "qwen3": {},
    "gemma": {},
    "gemma2": {**MIXED, "attn_logit_softcapping": 2.0},
    "gemma3_text": MIXED,
    "phi": {},
    "phi3": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": MIXED,
    "granite": {},
    "smollm3": {"no_rope_layers": [1, 0]},
    "starcoder2": WINDOW,
    "cohere": {},
    "cohere2": MIXED,
    "gpt2": GPT2,
    "gpt_neox": {},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 64},
    "mixtral": MOE,
    "qwen2_moe": {**MOE, "shared_expert_intermediate_size": 32},
    "qwen3_moe": MOE,
    "gpt_oss": {**MOE, **MIXED},
    "glm": {},
    "glm4": {},
    "exaone4": MIXED,
    "seed_oss": {},
    "arcee": {},
    "ernie4_5": {},
    "bitnet": {},
    "persimmon": {},
    "apertus": {},
    "granitemoe": MOE,
    "olmoe": MOE,
    "phimoe": MOE,
    "flex_olmo": MOE,
    "vaultgemma": {**MIXED, "attn_logit_softcapping": 2.0},
}

PROMPTS = [[3, 5, 7, 3, 5, 7, 3, 5, 7, 11, 3], [2, 9]]  # the first longer than the window
NEW = 16


@lru_cache(maxsize=4)
def model_of(name, seed=0):
    return toy_model(name.split("#")[0], seed=seed, **ARCHITECTURES[name])


@lru_cache(maxsize=4)
def plain_texts(name):
    return [plain_greedy(model_of(name), prompt, NEW) for prompt in PROMPTS]


def decode(target, drafter, k):
    decoder = SpeculativeDecoder(target, drafter, num_draft_tokens=k, page_size=3, exact=False)
    outputs = decoder.generate(PROMPTS, SamplingParams(temperature=0, max_new_tokens=NEW))
    assert [out.finish_reason for out in outputs] == ["length"] * len(PROMPTS)
    return outputs


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_text_equals_plain_generate(name):
    """faults.md A1, E3, E4, E6, I14: right, half-right and always wrong drafts; every wrong one is a rollback."""
    target, want = ModelAdapter(model_of(name)), plain_texts(name)
    assert len(set(want[0])) >= 3, "a text of one token proves nothing"
    whole = [prompt + text for prompt, text in zip(PROMPTS, want, strict=True)]
    for drafter, k in (
        (PromptLookup(), 4),
        (DraftModel(model_of(name, seed=1)), 1),
        (always_wrong(whole), 4),
        (random_drafts(whole), 4),
    ):
        outputs = decode(target, drafter, k)
        assert [out.token_ids for out in outputs] == want, (type(drafter).__name__, k)
    assert any(out.stats.accepted for out in outputs)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_equal_the_modules_own(name):
    """Teacher-forced, in ragged passes over two texts, each preceded by drafts that are rolled back."""
    model = model_of(name)
    texts = [prompt + text for prompt, text in zip(PROMPTS, plain_texts(name), strict=True)]
    own = [own_logits(model, text) for text in texts]
    adapter = ModelAdapter(model)
    cache = adapter.new_cache(slots=2, page_size=3, num_pages=30)
    for slot in (1, 0):
        cache.reserve(slot, 40)
    done, rng = [0, 0], random.Random(0)
    with torch.inference_mode():
        while min(n - len(text) for n, text in zip(done, texts, strict=True)) < 0:
            counts = [min(rng.randint(0, 6), len(text) - n) for n, text in zip(done, texts, strict=True)]
            context = torch.tensor(done, dtype=torch.int32)
            wrong = torch.randint(0, adapter.vocab_size, (2, 5))
            adapter.forward(wrong, cache, cache.block_table, context)
            if max(counts) == 0:
                continue
            tokens = torch.zeros(2, max(counts), dtype=torch.int64)
            for b, n in enumerate(counts):
                tokens[b, :n] = torch.tensor(texts[b][done[b] : done[b] + n])
            lens = torch.tensor(counts, dtype=torch.int32)
            logits = adapter.forward(tokens, cache, cache.block_table, context, lens)
            for b, n in enumerate(counts):
                want = own[b][done[b] : done[b] + n]
                assert torch.allclose(logits[b, :n], want, rtol=0, atol=3e-5 * float(own[b].abs().max()))
                done[b] += n


def test_windows_and_softcaps_matter():
    """Otherwise the cases above would prove nothing. transformers 5.17 drops the softcap in its sdpa, and so do we:
    the text is what the module itself writes."""
    text = PROMPTS[0]
    cases = [("mistral", {"sliding_window": None})]
    if model_of("gemma2").config._attn_implementation != "sdpa":
        cases.append(("gemma2", {"attn_logit_softcapping": 50.0}))
    for name, off in cases:
        settings = {**ARCHITECTURES[name], **off}
        other = toy_model(name, **settings)
        assert not torch.allclose(own_logits(model_of(name), text), own_logits(other, text), atol=1e-2)


@pytest.mark.parametrize("name", ["gemma2", "vaultgemma"])
def test_softcap_of_eager_attention(name):
    """faults.md F16: with the implementation that applies it in every version of transformers."""
    model = toy_model(name, **ARCHITECTURES[name])
    model.set_attn_implementation("eager")
    uncapped = toy_model(name, **{**ARCHITECTURES[name], "attn_logit_softcapping": None})
    want = [plain_greedy(model, prompt, NEW) for prompt in PROMPTS]
    assert not torch.allclose(own_logits(model, PROMPTS[0]), own_logits(uncapped, PROMPTS[0]), atol=1e-2)
    assert [out.token_ids for out in decode(model, random_drafts(), 4)] == want


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype):
    """Token by token the choice of the module's own logits, up to rounding (faults.md A1's teacher-forced rule)."""
    model = toy_model("llama", dtype=dtype)
    for out, prompt in zip(decode(model, PromptLookup(), 4), PROMPTS, strict=True):
        logits = own_logits(model, prompt + out.token_ids)[len(prompt) - 1 : -1].float()
        chosen = logits.gather(1, torch.tensor(out.token_ids)[:, None])[:, 0]
        assert (logits.amax(1) - chosen).max() <= 0.05 * logits.abs().max()


# Refusals.

RECURRENT = ["linear_attention", "full_attention"]
MLA = {
    **{"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    **{"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
    **{"moe_intermediate_size": 32, "head_dim": None, "num_key_value_heads": None},
}
NO_INTERFACE = "does not go through transformers' attention interface"
REFUSED = {
    "bloom": ({"n_layer": 2, "n_head": 4}, NO_INTERFACE),
    "mpt": ({"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 128}, NO_INTERFACE),
    "falcon": ({"alibi": True, "head_dim": None, "num_key_value_heads": None}, NO_INTERFACE),
    "falcon#rope": ({"alibi": False, "head_dim": None, "num_key_value_heads": None}, NO_INTERFACE),
    "mamba": ({"state_size": 4}, NO_INTERFACE),
    "rwkv": ({}, NO_INTERFACE),
    "recurrent_gemma": ({}, NO_INTERFACE),
    "stablelm": ({}, "drops the keyword arguments"),
    "nemotron": ({}, "drops the keyword arguments"),
    "deepseek_v2": (MLA, "keys of size 16 but values of size 8"),
    "deepseek_v3": (MLA, "keys of size 16 but values of size 8"),
    "diffllama": ({}, "ran as"),
    "doge": ({}, "a bias or a mask of its own"),
    "lfm2": ({"block_auto_adjust_ff_dim": False, "layer_types": ["conv", "full_attention"]}, r"layers \[0\] \(conv\)"),
    "minimax": ({**MOE, "layer_types": RECURRENT}, r"layers \[0\] \(linear_attention\)"),
    "qwen3_next": (
        {
            **{**MOE, "layer_types": RECURRENT, "shared_expert_intermediate_size": 32},
            **{"linear_num_value_heads": 2, "linear_num_key_heads": 2},
            **{"linear_key_head_dim": 16, "linear_value_head_dim": 16},
        },
        r"layers \[0\] \(linear_attention\)",
    ),
    "deepseek_v4": (
        {**MOE, "layer_types": ["heavily_compressed_attention"] * 2, "num_local_experts": 4},
        "keeps state besides keys and values",
    ),
    "falcon_h1": ({"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_state": 8, "mamba_d_head": 16}, "keeps state"),
    "falcon_h1#small-weights": (
        {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_state": 8, "mamba_d_head": 16, "initializer_range": 0.02},
        "keeps state",
    ),
}


@pytest.mark.parametrize(("name", "settings", "reason"), [(n, *x) for n, x in REFUSED.items()], ids=REFUSED)
def test_refused_with_the_reason(name, settings, reason):
    """faults.md E3, E15: at load, never silently, and as target and drafter alike; the model stays usable."""
    model = toy_model(name.split("#")[0], **settings)
    before = own_logits(model, PROMPTS[0])
    with pytest.raises(UnsupportedModelError, match=rf"^{type(model).__name__} cannot be decoded here: .*{reason}"):
        SpeculativeDecoder(model, NoDraft())
    with pytest.raises(UnsupportedModelError, match=reason):
        SpeculativeDecoder(model_of("llama"), DraftModel(model))
    assert torch.equal(own_logits(model, PROMPTS[0]), before)


def test_encoder_decoder_is_refused():
    from transformers import T5Config, T5ForConditionalGeneration

    model = T5ForConditionalGeneration(T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=50))
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        ModelAdapter(model)


@pytest.mark.parametrize("target", [None, "gpt2", torch.nn.Linear(2, 2)], ids=["none", "name", "module"])
def test_not_a_transformers_model(target):
    with pytest.raises(UnsupportedModelError, match="must be a transformers model"):
        SpeculativeDecoder(target)


def test_float64_is_refused():
    with pytest.raises(UnsupportedModelError, match="its parameters are float64; load it in float32"):
        SpeculativeDecoder(toy_model().double())


def test_no_head():
    with pytest.raises(UnsupportedModelError, match="no language-model head"):
        ModelAdapter(model_of("llama").model)


def test_a_model_over_several_devices_is_refused():
    """The embedding on one device, the rest on another."""
    model = toy_model()
    model.model.embed_tokens.to("meta")
    with pytest.raises(UnsupportedModelError, match=r"spread over several devices \(cpu, meta\); load it on one"):
        ModelAdapter(model)


def test_a_model_over_several_processes_is_refused():
    """faults.md C5: ranks whose logits differ in the last bit would accept different drafts, and wait for one another."""
    import torch.distributed as dist
    from torch.distributed.tensor import distribute_module

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = distribute_module(toy_model(), dist.init_device_mesh("cpu", (1,)))
        with pytest.raises(UnsupportedModelError, match="shared out over several processes; load it without a tp_plan"):
            ModelAdapter(model)
    finally:
        dist.destroy_process_group()


def test_bidirectional_model_is_refused():
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=50)
    with pytest.raises(UnsupportedModelError):
        ModelAdapter(BertForMaskedLM(config).eval())


def test_chunked_attention_is_limited_to_its_chunk():
    """llama4's mask is causal up to the chunk's end only: longer texts are refused, shorter ones right."""
    model = toy_model(
        "llama4_text", **MOE, attention_chunk_size=16, intermediate_size_mlp=64, interleave_moe_layer_step=1
    )
    decoder = SpeculativeDecoder(model, PromptLookup(), exact=False)
    assert decoder.max_seq_len == 16
    prompt = PROMPTS[0]
    (out,) = decoder.generate([prompt], SamplingParams(temperature=0, max_new_tokens=20))
    assert out.token_ids == plain_greedy(model, prompt, 5)
    assert out.finish_reason == "length"
    with pytest.raises(ValueError, match="16"):
        decoder.generate([prompt * 2])


def test_rope_that_changes_with_the_length_is_limited():
    """faults.md I14: dynamic frequencies depend on a pass's longest position: only the unscaled range is exact."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 24}
    model = toy_model("llama", rope_parameters=rope, max_position_embeddings=24)
    decoder = SpeculativeDecoder(model, PromptLookup(), exact=False)
    assert decoder.max_seq_len == 24
    (out,) = decoder.generate([PROMPTS[0]], SamplingParams(temperature=0, max_new_tokens=50))
    assert out.token_ids == plain_greedy(model, PROMPTS[0], 13)


# The model afterwards.


def implementations(model):
    return [config._attn_implementation for config in attention_configs(model)]


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_model_is_as_before(name):
    model = toy_model(name, **ARCHITECTURES[name])
    names = implementations(model)
    assert not {IMPLEMENTATION, RECORDING} & set(names)
    logits, text = own_logits(model, PROMPTS[0]), plain_greedy(model, PROMPTS[0], NEW)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    decode(model, PromptLookup(), 4)
    assert implementations(model) == names
    assert torch.equal(own_logits(model, PROMPTS[0]), logits)
    assert plain_greedy(model, PROMPTS[0], NEW) == text
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())


def test_model_is_usable_between_rounds():
    """faults.md L4's spirit: the switch of attention lasts one pass, not one request."""
    model = model_of("llama")
    decoder = SpeculativeDecoder(model, PromptLookup(), exact=False)
    handle = decoder.submit(PROMPTS[0], SamplingParams(temperature=0, max_new_tokens=NEW))
    texts = []
    while decoder.step():
        texts.append(plain_greedy(model, PROMPTS[1], 5))
    assert handle.output.token_ids == plain_texts("llama")[0]
    assert texts == [plain_texts("llama")[1][:5]] * len(texts)


def test_attention_is_restored_after_an_exception():
    model = toy_model("llama")
    names = implementations(model)
    decoder = SpeculativeDecoder(model, PromptLookup(), exact=False)
    text = plain_greedy(model, PROMPTS[0], 5)
    calls = 0

    def fail(module, args):
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("planted")

    hook = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="planted"):
        decoder.generate([PROMPTS[0]], SamplingParams(temperature=0))
    hook.remove()
    assert implementations(model) == names
    assert plain_greedy(model, PROMPTS[0], 5) == text
    assert decoder.free_pages == decoder.num_pages
    (out,) = decoder.generate([PROMPTS[0]], SamplingParams(temperature=0, max_new_tokens=5))
    assert out.token_ids == text


def test_attention_is_restored_after_a_failed_observation():
    model = toy_model("llama")
    names = implementations(model)

    def fail(module, args):
        raise RuntimeError("planted")

    hook = model.model.layers[0].register_forward_pre_hook(fail)
    with pytest.raises(UnsupportedModelError, match="planted"):
        ModelAdapter(model)
    hook.remove()
    assert implementations(model) == names


def test_attention_set_by_the_user_is_kept():
    model = toy_model("llama")
    model.set_attn_implementation("eager")
    decode(model, PromptLookup(), 4)
    assert set(implementations(model)) == {"eager"}


def test_observation():
    """What is read off a model: shapes, limits, experts."""
    seen = ModelAdapter(model_of("gemma2")).observation
    assert [tuple(shape) for shape in seen.layers] == [(2, 16), (2, 16)]
    assert (seen.vocab_size, seen.max_len, seen.keeps_logits, seen.mixture) == (97, 128, True, False)
    assert ModelAdapter(model_of("mixtral")).observation.mixture


def test_padding_rows_change_nothing():
    """``rows=`` adds rows that nobody reads."""
    model = model_of("llama")
    adapter = ModelAdapter(model)
    cache = adapter.new_cache(slots=2, page_size=4, num_pages=8)
    for slot in (0, 1):
        cache.reserve(slot, 16)
    tokens = torch.tensor([[3, 4, 5], [6, 7, 0]])
    context = torch.zeros(2, dtype=torch.int32)
    args = (tokens, cache, cache.block_table, context)
    plain = adapter.forward(*args, torch.tensor([3, 2], dtype=torch.int32))
    before = [x.clone() for x in cache.layer(0)]
    padded = adapter.forward(*args, torch.tensor([3, 2], dtype=torch.int32), rows=16)
    assert torch.allclose(padded[0], plain[0], atol=1e-5)
    assert torch.allclose(padded[1, :2], plain[1, :2], atol=1e-5)
    for old, now in zip(before, cache.layer(0), strict=True):
        assert torch.allclose(old, now, atol=1e-6)
    last = adapter.forward(*args, torch.tensor([3, 2], dtype=torch.int32), last_only=True)
    assert last.shape == (2, 1, 97)
    assert torch.allclose(last[1, 0], plain[1, 1], atol=1e-5)


LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [3.0] * 8}


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("phi3", {"rope_parameters": {**LONGROPE, "original_max_position_embeddings": 64, "factor": 2.0}}),
        ("llama", {"rope_parameters": {**LONGROPE, "original_max_position_embeddings": 64, "factor": 2.0}}),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    ],
)
def test_rope_that_changes_with_the_length_limits_the_text(kind, settings):
    """faults.md I14: up to where the frequencies change the text is plain decoding's, and there it ends."""
    if kind == "phi3":
        settings["original_max_position_embeddings"] = 64
    model = toy_model(kind, **settings)
    adapter = ModelAdapter(model)
    assert adapter.max_len == (128 if "dynamic" in str(settings) else 64)
    engine = SpeculativeDecoder(adapter, NoDraft(), exact=False)
    params = SamplingParams(temperature=0, max_new_tokens=200)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = engine.generate([PROMPTS[0]], params)[0]
    assert len(PROMPTS[0]) + len(out.token_ids) == adapter.max_len
    assert out.token_ids == plain_greedy(model, PROMPTS[0], len(out.token_ids))


def test_training_mode_with_dropout_is_refused():
    model = toy_model("gpt2", **GPT2)
    engine = SpeculativeDecoder(model, NoDraft(), exact=False)
    model.train()
    with pytest.raises(RuntimeError, match="training mode"):
        engine.generate([PROMPTS[0]], SamplingParams(temperature=0, max_new_tokens=4))
    with pytest.raises(UnsupportedModelError, match="training mode"):
        SpeculativeDecoder(model, NoDraft())
    SpeculativeDecoder(toy_model("llama").train(), NoDraft(), exact=False)  # without dropout nothing is random


def test_decoders_of_one_model_in_several_threads():
    """Each gives its own text; the module's own forward in another thread works or says what is wrong."""
    model = toy_model()
    want = [plain_greedy(model, prompt, 12) for prompt in PROMPTS]
    params = SamplingParams(temperature=0, max_new_tokens=12)

    def decode(i):
        engine = SpeculativeDecoder(model, NoDraft(), exact=False)
        return engine.generate([PROMPTS[i]], params)[0].token_ids

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        with ThreadPoolExecutor(3) as pool:
            order = [0, 1] * 4
            assert list(pool.map(decode, order)) == [want[i] for i in order]
    finally:
        sys.setswitchinterval(interval)


def test_a_model_that_masks_its_padding():
    """Columns of -inf are no difference; a model that masks other columns over paged KV is still found out."""
    model = toy_model()
    head, forward = model.lm_head, model.lm_head.forward
    head.forward = lambda x: forward(x).index_fill(-1, torch.arange(90, 97), -torch.inf)
    prompt = [3, 5, 7]
    drafter = random_drafts([prompt + plain_greedy(model, prompt, 8)])
    params = SamplingParams(temperature=0, max_new_tokens=8)
    out = SpeculativeDecoder(model, drafter, exact=False).generate([prompt], params)[0]
    assert out.token_ids == plain_greedy(model, prompt, 8)
    calls = iter(range(100))
    head.forward = lambda x: forward(x).index_fill(-1, torch.tensor([90 + next(calls)]), -torch.inf)
    with pytest.raises(UnsupportedModelError, match="differ from its own forward pass"):
        ModelAdapter(model)
