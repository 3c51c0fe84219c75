"""Drafts from the target's own layers and from Medusa heads."""

from __future__ import annotations

import pytest
import torch
from head_cases import hidden_states, save

from specdec_triton import LayerSkip, MedusaDrafter, NoDraft, SamplingParams, SpeculativeDecoder, optimize
from specdec_triton.adapter import ModelAdapter
from specdec_triton.errors import UnsupportedModelError
from specdec_triton.skipping import skipping
from specdec_triton.testing import own_logits, plain_greedy, toy_model
from specdec_triton.tune_skip import Skip, recall, remember, search

LAYERS = 6
PROMPTS = [[(37 * i) % 90 + 3 for i in range(1, 24)], [5], [8, 8, 8, 9], [3, 60, 4, 50]]


def target(kind="llama", **options):
    return toy_model(kind, num_hidden_layers=LAYERS, **options)


def decode(model, drafter, params, **options):
    decoder = SpeculativeDecoder(model, drafter, **options)
    return [out.token_ids for out in decoder.generate(PROMPTS, params)], decoder


KINDS = ("llama", "qwen3", "gemma3_text", "gpt2", "phi", "cohere2")


@pytest.mark.parametrize("kind", KINDS)
def test_skipped_layers_do_nothing(kind):
    """As the model without them; afterwards it is whole again."""
    model = target(kind)
    text = PROMPTS[0]
    whole = own_logits(model, text)
    with skipping(model, {1, 4}):
        less = own_logits(model, text)
    adapter = ModelAdapter(model)
    cache = adapter.new_cache(slots=1, page_size=8, num_pages=8)
    cache.reserve(0, len(text))
    context = torch.zeros(1, dtype=torch.int32)
    paged = adapter.forward(torch.tensor([text]), cache, cache.block_table, context, skip=frozenset({1, 4}))[0]
    torch.testing.assert_close(paged, less, rtol=1e-4, atol=1e-4)
    assert float((less - whole).abs().max()) > 1e-2
    assert torch.equal(own_logits(model, text), whole)


@pytest.mark.parametrize("rewritten", [False, True], ids=["plain", "optimized"])
@pytest.mark.parametrize(
    "drafter", [LayerSkip(3), LayerSkip(skip=[1, 2]), LayerSkip(skip=[])], ids=["exit", "skip", "none"]
)
def test_texts_are_the_targets(drafter, rewritten):
    model = target()
    want = [plain_greedy(model, prompt, 40) for prompt in PROMPTS]
    if rewritten:
        optimize(model)
    got, decoder = decode(model, drafter, SamplingParams(temperature=0, max_new_tokens=40), adaptive=False)
    assert got == want
    assert decoder.stats.drafted > 100
    if drafter.skip == frozenset():
        assert decoder.stats.acceptance_rate == 1.0


@pytest.mark.parametrize("options", [{}, {"max_batch_size": 2}, {"num_pages": 40, "page_size": 4}], ids=str)
def test_seeded_texts_do_not_depend_on_it(options):
    params = [SamplingParams(seed=i, max_new_tokens=20 + 9 * i, temperature=0.9) for i in range(len(PROMPTS))]
    want, _ = decode(target(), NoDraft(), params)
    got, decoder = decode(target(), LayerSkip(4), params, adaptive=False, **options)
    assert got == want
    assert decoder.stats.drafted > 0


def test_layer_skip_refuses():
    for drafter, message in (
        (LayerSkip(7), "exit_layer must be at most the target's 6 layers"),
        (LayerSkip(skip=[6]), "skip must be layers below"),
        (LayerSkip(skip=range(6)), "fewer than all"),
    ):
        with pytest.raises(ValueError, match=message):
            SpeculativeDecoder(target(), drafter)
    with pytest.raises(ValueError, match="skip must be None where exit_layer is given"):
        LayerSkip(2, skip=[1])
    with pytest.raises(ValueError, match="exit_layer"):
        LayerSkip(0)


def test_the_search_finds_layers_that_do_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path))
    model = target()
    for layer in (2, 4):
        model.model.layers[layer].self_attn.o_proj.weight.data.zero_()
        model.model.layers[layer].mlp.down_proj.weight.data.zero_()
    texts = [(prompt + plain_greedy(model, prompt, 20), len(prompt)) for prompt in PROMPTS]
    seen: list[Skip] = []
    found = search(model, texts, step=seen.append)
    assert {2, 4} <= found.layers
    assert seen[1].layers == {2, 4}
    assert seen[1].agreement == 1.0
    assert seen[1].speed > 1.1
    adapter = ModelAdapter(model)
    assert recall(adapter) is None
    with pytest.raises(ValueError, match="tune-skip"):
        SpeculativeDecoder(model, LayerSkip())
    remember(adapter, seen[1])
    _, decoder = decode(model, LayerSkip(), SamplingParams(temperature=0, max_new_tokens=20), adaptive=False)
    assert decoder.stats.acceptance_rate == 1.0


# Medusa.

HEADS = 3


def medusa_tensors(model, *, layout="medusa", lm_heads="own", layers=1):
    width, size = model.config.hidden_size, model.config.vocab_size
    generator = torch.Generator().manual_seed(2)

    def normal(*shape):
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    tensors = {}
    for i in range(HEADS):
        for j in range(layers):
            name = f"blocks.{i}.layers.{j}" if layout == "vllm" else f"{i}.{j}.linear"
            tensors[f"{name}.weight"] = normal(width, width)
            if layout != "vllm":
                tensors[f"{name}.bias"] = normal(width)
        if lm_heads == "own":
            tensors[f"lm_heads.{i}.weight" if layout == "vllm" else f"{i}.{layers}.weight"] = normal(size, width)
    if lm_heads == "shared":
        tensors["lm_head.weight"] = normal(size, width)
    return tensors


def medusa_logits(model, tensors, text):
    """``[V]`` of each head, behind a text whose last token is in no pass yet."""
    state = hidden_states(model, text[:-1])[-1][-1]
    found = []
    for i in range(HEADS):
        x = state
        j = 0
        while (
            name := f"blocks.{i}.layers.{j}" if f"blocks.{i}.layers.{j}.weight" in tensors else f"{i}.{j}.linear"
        ) + ".weight" in tensors:
            x = x + torch.nn.functional.silu(
                torch.nn.functional.linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))
            )
            j += 1
        own = next(
            (tensors[n] for n in (f"{i}.{j}.weight", f"lm_heads.{i}.weight", "lm_head.weight") if n in tensors), None
        )
        weight = model.get_output_embeddings().weight.detach() if own is None else own
        found.append(x @ weight.T)
    return found


def medusa_drafts(model, tensors, text):
    return [int(logits.argmax()) for logits in medusa_logits(model, tensors, text)]


LAYOUTS = {
    "medusa": {},
    "two-blocks": {"layers": 2},
    "vllm": {"layout": "vllm"},
    "shared": {"lm_heads": "shared"},
    "borrowed": {"lm_heads": "none"},
    "vllm-borrowed": {"layout": "vllm", "lm_heads": "none"},
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_medusa_drafts(layout, tmp_path):
    """faults.md I15. Every round's, and the text is the target's."""
    model = target()
    tensors = medusa_tensors(model, **layout)
    drafter = MedusaDrafter(save(tmp_path / "heads", tensors, {"medusa_num_heads": HEADS}, form="bin"))
    decoder = SpeculativeDecoder(model, drafter, num_draft_tokens=5, adaptive=False)
    session, seen = decoder._loop.session, []
    propose = session.propose

    def watched(round_):
        drafts = propose(round_)
        n = int(round_.lens[0])
        seen.append((round_.texts[0, :n].tolist(), drafts.tokens[0, : int(drafts.lens[0])].tolist()))
        return drafts

    session.propose = watched
    out = decoder.generate([PROMPTS[0]], SamplingParams(temperature=0, max_new_tokens=25))[0]
    assert out.token_ids == plain_greedy(model, PROMPTS[0], 25)
    assert len(seen) > 5
    for text, drafts in seen:
        assert drafts == medusa_drafts(model, tensors, text)[: len(drafts)]
    assert max(len(drafts) for _, drafts in seen) == HEADS


def test_medusa_in_batches(tmp_path):
    params = [SamplingParams(seed=i, max_new_tokens=20 + 9 * i, temperature=0.9) for i in range(len(PROMPTS))]
    want, _ = decode(target(), NoDraft(), params)
    source = save(tmp_path / "heads", medusa_tensors(target()), {})
    for options in ({}, {"max_batch_size": 2}, {"num_pages": 40, "page_size": 4}):
        got, decoder = decode(target(), MedusaDrafter(source), params, adaptive=False, **options)
        assert got == want
        assert decoder.stats.drafted > 0


BROKEN = {
    "missing": (
        lambda t: [t.pop(f"1.0.linear.{x}") for x in ("bias", "weight")],
        "lacks the tensor '1.0.linear.weight'",
    ),
    "unused": (lambda t: t.update(extra=torch.ones(1)), "no known use, 'extra' first"),
    "shape": (lambda t: t.update({"2.1.weight": torch.ones(3, 3)}), "'2.1.weight' has the shape"),
    "nan": (lambda t: t["0.0.linear.weight"].fill_(float("nan")), "holds NaN"),
    "nothing": (lambda t: t.clear() or t.update(x=torch.ones(1)), "has no Medusa heads"),
}


@pytest.mark.parametrize(("spoil", "message"), BROKEN.values(), ids=BROKEN)
def test_broken_medusa_heads(spoil, message, tmp_path):
    model = target()
    tensors = medusa_tensors(model)
    spoil(tensors)
    with pytest.raises(UnsupportedModelError, match=message):
        SpeculativeDecoder(model, MedusaDrafter(save(tmp_path / "heads", tensors, {})))
