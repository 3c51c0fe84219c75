"""EAGLE heads: their drafts against the head written down without a cache, published layouts right and broken, exact texts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from head_cases import CONFIG, WIDTH, eagle_chain, eagle_logits, eagle_tensors, save

from specdec_triton import EagleDrafter, NoDraft, SamplingParams, SpeculativeDecoder, optimize
from specdec_triton.adapter import ModelAdapter
from specdec_triton.cli.loading import default_draft
from specdec_triton.drafters import SessionOptions
from specdec_triton.drafters.base import Drawn, Round
from specdec_triton.drafters.heads.checkpoint import Checkpoint
from specdec_triton.drafters.heads.load_eagle import read_eagle
from specdec_triton.errors import ModelNotFoundError, UnsupportedModelError
from specdec_triton.models import shipped_head
from specdec_triton.testing import batch_of, plain_greedy, toy_model

LAYERS = 6
TAPS = (2, 3, 3)  # 2, N/2 and N - 3


def target(**options):
    return toy_model(hidden_size=WIDTH, num_hidden_layers=LAYERS, **options)


VERSIONS = {
    "eagle": {"three": False},
    "eagle-bias": {"three": False, "biases": True},
    "eagle3": {},
    "eagle3-reduced": {"draft_size": 40},
    "eagle3-bias": {"draft_size": 40, "biases": True},
}


def drafts_of(model, source, text, k, *, parts=(), fixed=False, **options):
    """Drafts of a session that has seen the text in parts, the last token of it in no pass yet."""
    adapter = ModelAdapter(model)
    adapter.fixed_shapes = fixed
    session = EagleDrafter(source, **options).bind(adapter, SessionOptions(2, max_drafts=k))
    from specdec_triton.taps import Taps

    taps = Taps(model, session.taps)
    cache = adapter.new_cache(slots=2, page_size=4, num_pages=40)
    slot, texts = 1, torch.zeros(2, 64, dtype=torch.int64)
    texts[slot, : len(text)] = torch.tensor(text)
    cache.reserve(slot, len(text) + k)
    session.reserve(slot, len(text) + k)
    start = 0
    for stop in (*parts, len(text) - 1):
        context = torch.tensor([start], dtype=torch.int32)
        adapter.forward(
            texts[slot : slot + 1, start:stop], cache, cache.block_table[slot : slot + 1], context, taps=taps
        )
        session.see(slot, taps.states, context, None)
        session.extend(slot, texts[slot], start, stop)
        start = stop
    params = batch_of(2, temperature=0)

    def draw(logits, j, ids=None):
        tokens = logits.argmax(-1)
        return Drawn(tokens if ids is None else ids[tokens], logits.logsumexp(-1), None)

    lens, limits = torch.tensor([0, len(text)], dtype=torch.int32), torch.tensor([0, k], dtype=torch.int32)
    drafts = session.propose(Round(k, texts, lens, limits, params, draw, needs_logits=False, reads=not fixed))
    assert drafts.lens.tolist() == [0, k]
    return drafts.tokens[1].tolist()


TEXT = [(37 * i) % 90 + 3 for i in range(1, 24)]


@pytest.mark.parametrize("fixed", [False, True], ids=["reads", "device"])
@pytest.mark.parametrize("version", VERSIONS.values(), ids=VERSIONS)
def test_drafts_are_those_of_the_head(version, fixed, tmp_path):
    """Norms whose weights are not 1 (faults.md I12), and a head size of its own (I10)."""
    model = target()
    tensors = eagle_tensors(model, **version)
    source = save(tmp_path / "head", tensors, CONFIG)
    for parts in ((), (7, 8, 15)):
        got = drafts_of(model, source, TEXT, 4, parts=parts, fixed=fixed)
        assert got == eagle_chain(model, tensors, TEXT, 4, taps=TAPS)


def decode(model, drafter, prompts, params, **options):
    decoder = SpeculativeDecoder(model, drafter, **options)
    return decoder, decoder.generate(prompts, params)


PROMPTS = [TEXT, TEXT[:1], TEXT[3:9], [5, 5, 5, 5]]


@pytest.mark.parametrize("version", ["eagle", "eagle3-reduced"])
@pytest.mark.parametrize("rewritten", [False, True], ids=["plain", "optimized"])
def test_greedy_texts_are_the_targets(version, rewritten, tmp_path):
    model = target()
    source = save(tmp_path / "head", eagle_tensors(model, **VERSIONS[version]), CONFIG)
    want = [plain_greedy(model, prompt, 40) for prompt in PROMPTS]
    if rewritten:
        optimize(model)
    decoder, outs = decode(
        model, EagleDrafter(source), PROMPTS, SamplingParams(temperature=0, max_new_tokens=40), adaptive=False
    )
    assert [out.token_ids for out in outs] == want
    assert decoder.stats.drafted > 100


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("version", ["eagle", "eagle3-reduced"])
def test_seeded_texts_do_not_depend_on_the_head(version, adaptive, tmp_path):
    """Through plain rounds, drafts after a pause, preemption and slots that move."""
    model = target()
    source = save(tmp_path / "head", eagle_tensors(model, **VERSIONS[version]), CONFIG)
    params = [SamplingParams(seed=i, max_new_tokens=20 + 9 * i, temperature=0.9) for i in range(len(PROMPTS))]
    _, want = decode(model, NoDraft(), PROMPTS, params)
    for options in ({}, {"max_batch_size": 2}, {"num_pages": 30, "page_size": 4}):
        decoder, got = decode(model, EagleDrafter(source), PROMPTS, params, adaptive=adaptive, **options)
        assert [out.token_ids for out in got] == [out.token_ids for out in want]
        assert decoder.stats.drafted > 0


def test_a_text_that_was_not_drafted_for_is_caught_up_with(tmp_path):
    """What the head would have drafted had it followed all along."""
    model = target()
    tensors = eagle_tensors(model, three=True)
    source = save(tmp_path / "head", tensors, CONFIG)
    decoder = SpeculativeDecoder(model, EagleDrafter(source), num_draft_tokens=3, adaptive=False)
    session = decoder._loop.session
    seen = []
    propose = session.propose

    def watched(round_):
        drafts = propose(round_)
        n = int(round_.lens[0])
        seen.append((round_.texts[0, :n].tolist(), drafts.tokens[0, : int(drafts.lens[0])].tolist()))
        return drafts

    session.propose = watched
    decoder.generate([TEXT], SamplingParams(temperature=0, max_new_tokens=30))
    assert len(seen) > 5
    for text, drafts in seen:
        assert drafts == eagle_chain(model, tensors, text, len(drafts), taps=TAPS)


def test_drafting_ends_where_it_is_not_worth_it(tmp_path):
    """Each request by itself: behind a draft from which on all of them are unlikely; the next rounds draft as if nothing had been."""
    model = target()
    tensors = eagle_tensors(model)
    drafter = EagleDrafter(save(tmp_path / "head", tensors, CONFIG))
    decoder = SpeculativeDecoder(model, drafter, num_draft_tokens=4)
    session, seen = decoder._loop.session, []
    propose = session.propose
    limit = 0.05

    def watched(round_):
        assert round_.worth > 0
        round_.worth = limit
        round_.limits = torch.where(round_.lens > 0, round_.k, 0).int()
        drafts = propose(round_)
        for row, n in enumerate(round_.lens.tolist()):
            count = int(drafts.lens[row])
            seen.append((round_.texts[row, :n].tolist(), drafts.tokens[row, :count].tolist(), round_.k))
        drafts.lens = torch.minimum(drafts.lens, round_.limits)
        return drafts

    session.propose = watched
    decoder._loop.rounds._proposals._plan = lambda index, shape, limits, given: limits
    outs = decoder.generate(PROMPTS, SamplingParams(temperature=0, max_new_tokens=30))
    assert [out.token_ids for out in outs] == [plain_greedy(model, prompt, 30) for prompt in PROMPTS]
    lengths = set()
    for text, drafts, k in seen:
        chance, want = 1.0, []
        while len(want) < k and chance >= limit:
            probs = eagle_logits(model, tensors, text, want, taps=TAPS).softmax(-1)
            want.append(int(probs.argmax()))
            chance *= float(probs.max())
        assert drafts == want or abs(chance - limit) < 1e-4
        lengths.add(len(drafts))
    assert len(lengths) >= 3


BROKEN = {
    "missing": (lambda t, c: t.pop("midlayer.self_attn.k_proj.weight"), "lacks the tensor 'midlayer.self_attn.k_proj"),
    "unused": (lambda t, c: t.update(extra=torch.ones(2)), "1 of its tensors are of no known use, 'extra' first"),
    "unused-bias": (
        lambda t, c: t.update({"midlayer.mlp.up_proj.bias": torch.ones(24)}),
        "'midlayer.mlp.up_proj.bias'",
    ),
    "shape": (
        lambda t, c: t.update({"norm.weight": torch.ones(3)}),
        r"'norm.weight' has the shape \[3\], expected \[16\]",
    ),
    "nan": (lambda t, c: t["norm.weight"].fill_(float("nan")), "'norm.weight' holds NaN"),
    "no-d2t": (lambda t, c: t.pop("d2t"), "lacks the tensor 'd2t'"),
    "absolute-d2t": (lambda t, c: t["d2t"].add_(torch.arange(40)), "the target has|two of its ids"),
    "d2t-twice": (lambda t, c: t["d2t"][1].sub_(1 + t["d2t"][1] - t["d2t"][0]), "two of its ids"),
    "t2d": (lambda t, c: t["t2d"].logical_not_(), "d2t and t2d name different ids"),
    "head-norm": (
        lambda t, c: t.update({"midlayer.self_attn.q_norm.weight": torch.ones(6)}),
        "'midlayer.self_attn.q_norm.weight'",
    ),
    "head-dim": (
        lambda t, c: c.pop("head_dim"),
        r"'midlayer.self_attn.q_proj.weight' has the shape \[24, 32\], expected \[16, 32\]",
    ),
    "mtp": (lambda t, c: t.update({"mtp.fc.weight": torch.ones(2)}), "multi-token-prediction modules"),
    "mtp-deepseek": (
        lambda t, c: t.update({"model.layers.61.eh_proj.weight": torch.ones(2)}),
        "multi-token-prediction modules",
    ),
    "layers": (lambda t, c: c.update(num_hidden_layers=2), "2 layers"),
    "config": (lambda t, c: c.pop("hidden_size"), "config.json must have 'hidden_size'"),
    "taps": (
        lambda t, c: c.update(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2]}),
        "its fc takes 48 numbers",
    ),
    "tap-range": (lambda t, c: c.update(eagle_aux_hidden_state_layer_ids=[1, 2, 9]), "the target has 6"),
    "no-lm-head": (lambda t, c: t.pop("lm_head.weight"), "no lm_head|d2t"),
}


@pytest.mark.parametrize(("spoil", "message"), BROKEN.values(), ids=BROKEN)
def test_broken_heads_are_refused(spoil, message, tmp_path):
    """faults.md I5, I6, I9, I10, I11, I13, I16."""
    model = target()
    tensors, config = eagle_tensors(model, draft_size=40), dict(CONFIG)
    config["draft_vocab_size"] = 40
    spoil(tensors, config)
    drafter = EagleDrafter(save(tmp_path / "head", tensors, config))
    with pytest.raises(UnsupportedModelError, match=message):
        SpeculativeDecoder(model, drafter)


def test_no_such_head(tmp_path):
    for source in (tmp_path / "none", tmp_path, ""):
        with pytest.raises(ModelNotFoundError):
            EagleDrafter(source)


@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_layouts(form, tmp_path):
    """Prefixes, ``layers.0`` for ``midlayer``, embeddings and heads of its own or borrowed (faults.md I6)."""
    model = target()
    plain = eagle_tensors(model)
    want = eagle_chain(model, plain, TEXT, 4, taps=TAPS)

    def check(tensors, config=CONFIG, want=want, **options):
        source = save(tmp_path / f"head{len(list(tmp_path.iterdir()))}", tensors, config, form=form)
        assert drafts_of(model, source, TEXT, 4, **options) == want

    check(plain)
    check({f"model.{name}": x for name, x in plain.items()})
    check({name.replace("midlayer.", "layers.0."): x for name, x in plain.items()})
    own = plain | {"embed_tokens.weight": torch.randn(model.config.vocab_size, WIDTH)}
    check(own, want=eagle_chain(model, own, TEXT, 4, taps=TAPS))
    borrowed = {name: x for name, x in plain.items() if name != "lm_head.weight"}
    check(borrowed, want=eagle_chain(model, borrowed, TEXT, 4, taps=TAPS))
    # The two habits of counting (faults.md I11), and the word of the user.
    others = eagle_chain(model, plain, TEXT, 4, taps=(1, 3, 5))
    assert others != want
    check(plain, CONFIG | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]}}, others)
    check(plain, CONFIG | {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}, others)
    check(plain, want=others, aux_layers=(1, 3, 5))
    # The speculators library's residual.
    first = eagle_chain(model, plain, TEXT, 4, taps=TAPS, norm_first=True)
    check(plain, CONFIG | {"norm_before_residual": True}, first)
    # Both ways to write RoPE's base (faults.md I14).
    base = {name: x for name, x in CONFIG.items() if name != "rope_theta"}
    far = eagle_chain(model, plain, TEXT, 4, taps=TAPS, theta=3.0)
    check(plain, base | {"rope_theta": 3.0}, far)
    check(plain, base | {"rope_parameters": {"rope_type": "default", "rope_theta": 3.0}}, far)


@pytest.mark.parametrize("version", ["eagle", "eagle3-reduced"])
def test_sampled_texts_follow_the_target(version, tmp_path):
    """With the drafter's own probabilities, enumerated (rejection), and its favourites counted."""
    from specdec_triton.verification import check_distribution

    model = target()
    source = save(tmp_path / "head", eagle_tensors(model, **VERSIONS[version]), CONFIG)
    report = check_distribution(ModelAdapter(model), EagleDrafter(source), TEXT, samples=400)
    assert report.passed, report


def test_the_head_that_comes_with_the_package():
    """It is small, whole, for SmolLM2's shapes, and what the command drafts with if nothing is said."""
    folder = shipped_head("smollm2")
    assert folder is not None
    assert (folder / "model.safetensors").stat().st_size < 25e6
    assert "| all |" in (folder / "README.md").read_text()
    config = SimpleNamespace(num_hidden_layers=30)
    model = SimpleNamespace(get_input_embeddings=lambda: SimpleNamespace(weight=torch.empty(49152, 576)))
    target = SimpleNamespace(hidden_size=576, vocab_size=49152, config=config, model=model)
    head, taps = read_eagle(Checkpoint("smollm2"), target, None)
    assert taps == (2, 15, 27)
    assert len(head.ids) == 8192
    assert head.three
    assert (default_draft("smollm2"), default_draft("some/model")) == ("cascade", "ngram")
