"""Training: chats, features on disk, an EAGLE-3 head that learns and can be loaded, and runs that were stopped."""

from __future__ import annotations

import random

import pytest
import torch

from specdec_triton import EagleDrafter, SamplingParams, SpeculativeDecoder
from specdec_triton.testing import plain_greedy, toy_model
from specdec_triton.training.chats import Chat, ChatFile
from specdec_triton.training.eagle3 import Eagle3Student, save_eagle3
from specdec_triton.training.features import Features, frequent_ids
from specdec_triton.training.trainer import Schedule, Trainer

TAPS = (2, 3, 5)


def target():
    """A model whose texts depend on their last tokens, so that there is something to learn."""
    model = toy_model(hidden_size=32, intermediate_size=48, num_hidden_layers=6, initializer_range=0.2)
    model.lm_head.weight.data.mul_(8.0)  # it is sure of itself
    return model


def chats(model, count=24, length=40):
    rng = random.Random(0)
    found = []
    for _ in range(count):
        prompt = [rng.randrange(3, 90) for _ in range(4)]
        found.append(Chat(prompt + plain_greedy(model, prompt, length), [(4, 4 + length)]))
    return found


def test_chats_are_taken_up_where_they_were_cut_off(tmp_path):
    file = ChatFile(tmp_path / "chats.jsonl")
    some = [Chat([1, 2, 3, 4], [(2, 4)]), Chat([5, 6, 7], [(1, 3)])]
    file.append(some)
    file.append(some[:1])
    assert (file.batches, file.tokens(), list(file)) == (2, 6, [*some, some[0]])
    with file.path.open("a") as damaged:
        damaged.write('{"tokens": [1, 2], "answer": [[0, 2]]}\n{"tok')
    again = ChatFile(file.path)
    assert (again.batches, again.tokens(), list(again)) == (2, 6, [*some, some[0]])


def test_frequent_ids():
    chat = [Chat([9, 9, 5, 5, 5, 7, 7, 3], [(1, 8)])]
    assert frequent_ids(chat, 3, [1], 20).tolist() == [1, 5, 7]
    assert frequent_ids(chat, 8, [], 20).tolist() == [0, 1, 2, 3, 4, 5, 7, 9]


def test_features_are_the_models(tmp_path):
    model, features = target(), Features(tmp_path, TAPS)
    some = chats(model, 3)
    features.collect(model, some)
    assert len(features.shards) == 1
    for chat, example in zip(some, features.read(features.shards), strict=True):
        out = model(input_ids=torch.tensor([chat.tokens]), output_hidden_states=True)
        states = torch.cat([out.hidden_states[tap][0] for tap in TAPS], -1)
        assert example.tokens.tolist() == chat.tokens
        torch.testing.assert_close(example.states.float(), states, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(example.last.float(), out.hidden_states[-1][0], rtol=1e-2, atol=1e-2)
        assert example.learnt.tolist() == [False] * 4 + [True] * 40
    with pytest.raises(ValueError, match="holds features of other layers"):
        Features(tmp_path, (1, 2, 3)).collect(model, some)


def trained(tmp_path, model, until=float("inf"), progress=lambda done, facts: None, **schedule):
    features = Features(tmp_path / "features", TAPS)
    if not features.shards:
        features.collect(model, chats(model))
    torch.manual_seed(1)
    student = Eagle3Student(model, torch.arange(3, 90), TAPS)
    trainer = Trainer(student, features, Schedule(**schedule), tmp_path / "state.pt")
    trainer.run(until=until, progress=progress)
    return student, trainer


def test_a_head_learns_and_can_be_loaded(tmp_path):
    """Its agreement rises at every step; as an EagleDrafter its drafts are accepted as often as that says."""
    model = target()
    torch.manual_seed(1)
    student, trainer = trained(tmp_path, model, epochs=40, batch=240, rate=3e-3, steps=3)
    first, last = trainer.log[0]["agreement"], trainer.log[-1]["agreement"]
    assert last[0] > first[0] + 0.2
    assert min(last) > 0.55
    save_eagle3(student, tmp_path / "head", torch.float32)
    drafter = EagleDrafter(tmp_path / "head")
    decoder = SpeculativeDecoder(model, drafter, num_draft_tokens=3, adaptive=False)
    prompts = [chat.tokens[:4] for chat in chats(model, 6)]
    outs = decoder.generate(prompts, SamplingParams(temperature=0, max_new_tokens=40))
    assert [out.token_ids for out in outs] == [plain_greedy(model, prompt, 40) for prompt in prompts]
    rates = decoder.stats.acceptance_by_position
    assert abs(rates[0] - last[0]) < 0.2
    assert decoder.stats.tokens_per_target_pass > 1.5


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
    for a, b in zip(whole.head.parameters(), again.head.parameters(), strict=True):
        torch.testing.assert_close(a, b)
