"""Training: chats, features on disk, an EAGLE-3 head that learns and can be loaded, and runs that were stopped."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch

from specdec_triton import DraftModel, EagleDrafter, MedusaDrafter, SamplingParams, SpeculativeDecoder
from specdec_triton.errors import UnsupportedModelError
from specdec_triton.skipping import skipping
from specdec_triton.testing import own_logits, plain_greedy, toy_model
from specdec_triton.training.agreement import Agreement, shares, tokens_per_pass
from specdec_triton.training.chats import ChatWriter
from specdec_triton.training.draft import DraftStudent, shortened
from specdec_triton.training.eagle3 import Eagle3Student, read_start
from specdec_triton.training.features import Example, Features, TextReader, fill, frequent_ids
from specdec_triton.training.medusa import MedusaStudent
from specdec_triton.training.questions import question
from specdec_triton.training.trainer import Schedule, Trainer

TAPS = (2, 3, 5)


def target():
    """A model whose texts depend on their last tokens, so that there is something to learn."""
    model = toy_model(hidden_size=32, intermediate_size=48, num_hidden_layers=6, initializer_range=0.2)
    model.lm_head.weight.data.mul_(8.0)  # it is sure of itself
    return model


class Letters:
    """A tokenizer: a character is a token. Chats are between ^ and $, an answer begins behind a |."""

    chat_template = "^{user}$|"
    eos_token_id = ord("$") - 20
    all_special_ids = (eos_token_id,)

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [(ord(c) - 20) % 97 for c in text]}

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        return f"^{messages[0]['content']}$|"


def texts(model, count=24, length=40):
    rng = random.Random(0)
    for _ in range(count):
        prompt = [rng.randrange(3, 90) for _ in range(4)]
        yield torch.tensor(prompt + plain_greedy(model, prompt, length), dtype=torch.int32)


def examples(model, count=24, length=40):
    """Of texts whose first four tokens are a prompt."""
    reader = TextReader(model, Letters(), TAPS)
    for text in texts(model, count, length):
        example = reader.example(text)
        behind = torch.arange(len(text)) >= 4
        yield replace(example, learnt=behind, best=torch.where(behind.roll(-1), example.best, -1))


def check_example(model, example):
    """States and likeliest tokens are the model's own."""
    ids = example.tokens.long()[None]
    out = model(input_ids=ids, output_hidden_states=True)
    states = torch.cat([out.hidden_states[tap][0] for tap in TAPS], -1)
    torch.testing.assert_close(example.states.float(), states, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(example.last.float(), out.hidden_states[-1][0], rtol=1e-2, atol=1e-2)
    known = example.best >= 0
    assert example.best[known].tolist() == out.logits[0].argmax(-1)[known].tolist()
    assert known[:-1].tolist() == example.learnt[1:].tolist()


def test_texts_as_examples():
    model, tokenizer = target(), Letters()
    text = "What a fine day it is, all things considered, for a walk."
    (first, second) = TextReader(model, tokenizer, TAPS, length=40).examples([text, "short"])
    assert [*first.tokens.tolist(), *second.tokens.tolist()] == tokenizer(text)["input_ids"]
    for example in (first, second):
        assert example.learnt.tolist() == [False] + [True] * (len(example.tokens) - 1)
        check_example(model, example)


@torch.inference_mode()
def test_the_target_writes_chats():
    """Answers of which two thirds are the model's own greedy text; states as the model has them in one pass over the whole."""
    model, tokenizer = target(), Letters()
    writer = ChatWriter(model, tokenizer, TAPS, batch=12, max_user=6, max_answer=14)
    chats = list(islice(writer.examples(3), 30))
    greedy = 0
    for chat in chats:
        tokens, start = chat.tokens.tolist(), chat.learnt.tolist().index(True)
        assert tokens[0] == tokenizer("^")["input_ids"][0]
        assert tokens[start - 2 : start] == tokenizer("$|")["input_ids"]
        assert 2 <= len(tokens) - start <= 14
        assert chat.learnt.tolist() == [False] * start + [True] * (len(tokens) - start)
        ids = chat.tokens.long()[None]
        own = model(input_ids=ids).logits[0].argmax(-1)
        best = chat.best[start - 1 :]
        assert best[best >= 0].tolist() == own[start - 1 :][best >= 0].tolist()
        assert (best >= 0).sum() >= len(best) - 1
        states = torch.cat([model(input_ids=ids, output_hidden_states=True).hidden_states[tap][0] for tap in TAPS], -1)
        torch.testing.assert_close(chat.states.float(), states, rtol=2e-2, atol=2e-2)
        greedy += own[start - 1 : -1].tolist() == tokens[start:]
    assert 10 <= greedy <= 29
    again = list(islice(ChatWriter(model, tokenizer, TAPS, batch=12, max_user=6, max_answer=14).examples(3), 5))
    assert [chat.tokens.tolist() for chat in again] == [chat.tokens.tolist() for chat in chats[:5]]
    other = next(writer.examples(4))
    assert other.tokens.tolist() != chats[0].tokens.tolist()


def test_templates_that_cannot_be_used():
    tokenizer = Letters()
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        ChatWriter(target(), tokenizer, TAPS)
    tokenizer = Letters()
    tokenizer.apply_chat_template = lambda messages, **kwargs: messages[0]["content"].upper()
    with pytest.raises(ValueError, match="does not give the user's words as they are"):
        ChatWriter(target(), tokenizer, TAPS)


def test_questions():
    """Many different ones, whole, none of them one by which acceptance is measured."""
    rng = random.Random(1)
    asked = [question(rng) for _ in range(20_000)]
    assert len({*asked}) > 14_000
    assert not any(mark in text for text in asked for mark in "{}|\n")
    assert "  " not in " ".join(asked)
    rows = (json.loads(line) for line in Path("bench/prompts.jsonl").read_text().splitlines())
    measured = {row["prompt"].lower() for row in rows}
    assert not any(prompt in text.lower() or text.lower() in prompt for text in {*asked} for prompt in measured)


def test_frequent_ids():
    text = [torch.tensor([9, 5, 5, 5, 7, 7, 3], dtype=torch.int32)]
    assert frequent_ids(text, 3, [1], 20).tolist() == [1, 5, 7]
    assert frequent_ids(text, 8, [], 20).tolist() == [0, 1, 2, 3, 4, 5, 7, 9]


def test_features_on_disk(tmp_path):
    """What was cut off is not there; folders of other layers are refused."""
    model, features = target(), Features(tmp_path, TAPS)
    some = list(examples(model, 5))
    assert list(fill(features, iter(some))) == [sum(int(example.learnt.sum()) for example in some)]
    features.append(some[:2])
    (tmp_path / "shard-00002.part").write_bytes(b"half")
    again = Features(tmp_path, TAPS)
    assert len(again.shards) == 2
    for got, want in zip(again.read(again.shards), [*some, *some[:2]], strict=True):
        for field in ("tokens", "learnt", "best", "states", "last"):
            assert torch.equal(getattr(got, field), getattr(want, field))
    assert [x.tolist() for x in again.learnt_tokens()] == [x.tokens[x.learnt].tolist() for x in [*some, *some[:2]]]
    with pytest.raises(ValueError, match="holds features of other layers"):
        Features(tmp_path, (1, 2, 3))


STUDENTS = {
    "eagle3": lambda model, ids: Eagle3Student(model, ids, TAPS),
    "medusa": lambda model, ids: MedusaStudent(model, ids, 3),
    "draft": lambda model, ids: DraftStudent(model, ids, tokenizer=None, layers=2),
}


def trained(tmp_path, model, until=float("inf"), progress=lambda done, facts: None, kind="eagle3", **schedule):
    features = Features(tmp_path / "features", TAPS)
    if not features.shards:
        features.append(list(examples(model)))
    torch.manual_seed(1)
    student = STUDENTS[kind](model, torch.arange(3, 90) if kind == "eagle3" else torch.arange(97))
    trainer = Trainer(student, features, Schedule(**schedule), tmp_path / "state.pt")
    trainer.run(until=until, progress=progress)
    return student, trainer


def test_a_head_learns_and_can_be_loaded(tmp_path):
    """Its agreement rises at every step; as an EagleDrafter its drafts are accepted as often as that says."""
    model = target()
    torch.manual_seed(1)
    student, trainer = trained(tmp_path, model, epochs=40, batch=240, rate=3e-3, steps=3, single=0.25)
    first, last = trainer.log[0]["agreement"], trainer.log[-1]["agreement"]
    assert last[0] > first[0] + 0.2
    assert min(last) > 0.55
    student.save(tmp_path / "head", torch.float32)
    drafter = EagleDrafter(tmp_path / "head")
    decoder = SpeculativeDecoder(model, drafter, num_draft_tokens=3, adaptive=False)
    prompts = [text[:4].tolist() for text in texts(model, 6)]
    outs = decoder.generate(prompts, SamplingParams(temperature=0, max_new_tokens=40))
    assert [out.token_ids for out in outs] == [plain_greedy(model, prompt, 40) for prompt in prompts]
    rates = decoder.stats.acceptance_by_position
    assert abs(rates[0] - last[0]) < 0.2
    assert decoder.stats.tokens_per_target_pass > 1.5
    tally = [Agreement() for _ in range(3)]
    for example in examples(model, 6):
        for sums, found in zip(tally, student.losses(example, 3)[2], strict=True):
            sums.add(found)
    assert abs(decoder.stats.tokens_per_target_pass - tokens_per_pass(tally)) < 0.4


def test_training_begins_with_a_head(tmp_path):
    """One that was trained knows from the first shard on what it knew; heads that are not for it are refused."""
    model = target()
    student, trainer = trained(tmp_path, model, epochs=20, batch=240, rate=3e-3, steps=2)
    student.save(tmp_path / "head", torch.float32)
    head, ids, taps = read_start(tmp_path / "head", model)
    assert (ids.tolist(), taps) == ([*range(3, 90)], TAPS)
    again = Eagle3Student(model, ids, taps, head)
    for name, weight in student.module.state_dict().items():
        assert torch.equal(again.module.state_dict()[name], weight), name
    assert len(again.trained()) == len(student.trained())
    features = Features(tmp_path / "features", TAPS)
    more = Trainer(again, features, Schedule(epochs=1, steps=2, single=0.0, rate=1e-5), tmp_path / "more.pt")
    more.run()
    assert abs(more.log[0]["agreement"][1] - trainer.log[-1]["agreement"][1]) < 0.1
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    (tmp_path / "head" / "config.json").write_text(json.dumps(config | {"norm_before_residual": True}))
    with pytest.raises(UnsupportedModelError, match=r"has other layers.*the residual"):
        Eagle3Student(model, ids, taps, read_start(tmp_path / "head", model)[0])
    other = toy_model(hidden_size=32, intermediate_size=64, num_hidden_layers=6)
    with pytest.raises(UnsupportedModelError, match=r"has other layers.*down\.weight, gate_up\.weight$"):
        Eagle3Student(other, ids, taps, head)


def test_medusa_heads_learn_and_can_be_loaded(tmp_path):
    model = target()
    student, trainer = trained(tmp_path, model, kind="medusa", epochs=40, batch=240, rate=3e-3, steps=3, single=0.0)
    first, last = trainer.log[0]["agreement"], trainer.log[-1]["agreement"]
    assert all(b > a + 0.01 for a, b in zip(first, last, strict=True)), (first, last)
    with torch.no_grad():
        for p in student.module.parameters():
            p.copy_(p.bfloat16())  # as it is saved
    student.save(tmp_path / "heads")
    decoder = SpeculativeDecoder(model, MedusaDrafter(tmp_path / "heads"), num_draft_tokens=3, adaptive=False)
    session, drafted = decoder._loop.session, []
    propose = session.propose

    def watched(round_):
        drafts = propose(round_)
        for row, n in enumerate(round_.lens.tolist()):
            drafted.append((round_.texts[row, :n].tolist(), drafts.tokens[row, : int(drafts.lens[row])].tolist()))
        return drafts

    session.propose = watched
    prompts = [text[:4].tolist() for text in texts(model, 6)]
    outs = decoder.generate(prompts, SamplingParams(temperature=0, max_new_tokens=40))
    assert [out.token_ids for out in outs] == [plain_greedy(model, prompt, 40) for prompt in prompts]
    assert decoder.stats.accepted > 20
    assert len(drafted) > 50
    for text, drafts in drafted:  # the student's own predictions behind the last token that the target has seen
        tokens = torch.tensor(text, dtype=torch.int32)
        with torch.no_grad():
            out = model(input_ids=tokens[None, :-1].long(), output_hidden_states=True)
        states = out.hidden_states[-1][0]
        example = Example(
            tokens, tokens > 0, tokens, states, torch.cat((states, *[states[-1:]] * 3))
        )  # room for all heads
        rows = [(at, logits) for at, logits in student.predict(example, 3)]
        place = len(text) - 2  # of that token
        want = [int(logits(torch.arange(len(at)) == place)[0].argmax()) for at, logits in rows]
        assert drafts == want[: len(drafts)]


def test_a_draft_model_learns_and_can_be_loaded(tmp_path):
    from transformers import AutoModelForCausalLM

    class Saved:
        def save_pretrained(self, folder):
            (folder / "tokenizer.json").write_text("{}")

    model = target()
    student, trainer = trained(tmp_path, model, kind="draft", epochs=30, batch=240, rate=3e-3, steps=1)
    first, last = trainer.log[0]["agreement"][0], trainer.log[-1]["agreement"][0]
    assert last > first + 0.2
    student._tokenizer = Saved()
    student.save(tmp_path / "model")
    draft = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert draft.config.num_hidden_layers == 2
    assert torch.equal(draft.lm_head.weight, model.lm_head.weight.bfloat16().float())
    decoder = SpeculativeDecoder(model, DraftModel(draft), num_draft_tokens=3, adaptive=False)
    prompts = [text[:4].tolist() for text in texts(model, 6)]
    outs = decoder.generate(prompts, SamplingParams(temperature=0, max_new_tokens=40))
    assert [out.token_ids for out in outs] == [plain_greedy(model, prompt, 40) for prompt in prompts]
    assert abs(decoder.stats.acceptance_by_position[0] - last) < 0.2


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text", "gpt2", "phi"])
def test_shortened_models(kind):
    """As the model without the other layers, with a cache too; the model itself is left as it is."""
    model = toy_model(kind, num_hidden_layers=6)
    text = [5, 17, 3, 44, 8]
    whole = own_logits(model, text)
    torch.testing.assert_close(own_logits(shortened(model, 6), text), whole)
    with skipping(model, {0, 2, 4}):
        want = own_logits(model, text)
    short = shortened(model, 3)
    torch.testing.assert_close(own_logits(short, text), want, rtol=1e-5, atol=1e-5)
    assert len(plain_greedy(short, text, 5)) == 5
    assert torch.equal(own_logits(model, text), whole)
    for count in (0, 7):
        with pytest.raises(UnsupportedModelError, match="keeps 1 to 6"):
            shortened(model, count)


def test_agreement():
    steps = [Agreement(3, 4, 3), Agreement(2, 4, 1)]
    steps[0].add(Agreement(1, 4, 0))
    assert shares([*steps, Agreement()]) == [0.5, 0.5, 0.0]
    assert tokens_per_pass(steps) == round(1 + 3 / 8 + 1 / 4, 3)


class Stopped(Exception):
    pass


def test_a_run_goes_on_where_it_was_stopped(tmp_path):
    model = target()
    whole, _ = trained(tmp_path / "a", model, epochs=4, batch=200)

    def stop(done, facts):
        raise Stopped

    for done in range(1, 4):
        with pytest.raises(Stopped):
            trained(tmp_path / "b", model, progress=stop, epochs=4, batch=200)
        _, trainer = trained(tmp_path / "b", model, until=0.0, epochs=4, batch=200)
        assert trainer.done == done
    again, finished = trained(tmp_path / "b", model, epochs=4, batch=200)
    assert finished.done == finished.total == len(finished.log) == 4
    for a, b in zip(whole.module.parameters(), again.module.parameters(), strict=True):
        torch.testing.assert_close(a, b)
