"""The commands that make drafters, train and tune-skip, and every form of --draft with what they made."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from test_cli import WORDS, check_mistake, word_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from specdec_triton import models as model_names
from specdec_triton.cli import main

pytestmark = pytest.mark.usefixtures("few_row_tests")
TEMPLATE = "{% for m in messages %}{{ 'w1 ' + m['content'] + ' w2 ' }}{% endfor %}"
LAYERS = 6
SMALL = ("--tokens", 1000, "--chats", 40, "--epochs", 1, "--steps", 2)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """Two of its layers do nothing, and its answers seldom stop."""
    folder = tmp_path_factory.mktemp("target")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        initializer_range=0.3,
        eos_token_id=2,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(4.0)
        for layer in (2, 3):
            model.model.layers[layer].self_attn.o_proj.weight.zero_()
            model.model.layers[layer].mlp.down_proj.weight.zero_()
    model.save_pretrained(folder)
    word_tokenizer(WORDS, chat_template=TEMPLATE).save_pretrained(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def apart(monkeypatch, tmp_path_factory):
    monkeypatch.setattr(model_names, "_hub_unreachable", lambda: True)
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def command(capsys):
    def run(*args):
        capsys.readouterr()  # of what loads models here
        status = main([str(arg) for arg in args])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture
def generate(command, target):
    def run(*args):
        options = ("--dtype", "float32", "--max-new-tokens", 24, "--json", "--no-adaptive")
        status, out, err = command("generate", "--target", target, "w1 w5 w9 w5", *options, *args)
        assert status == 0, err
        return json.loads(out)

    return run


@pytest.mark.parametrize(
    ("kind", "forms"),
    [
        ("eagle3", [("eagle:{}",), ("cascade:eagle:{}",), ("eagle:{}", "--tree", "3x2", "-k", 6)]),
        ("medusa", [("medusa:{}",), ("cascade:medusa:{}",), ("medusa:{}", "--tree", "2x3", "-k", 5)]),
        ("draft", [("{}",), ("cascade:{}",)]),
    ],
)
def test_what_was_trained_drafts(command, generate, target, tmp_path, kind, forms):
    """The command, from chats to a drafter; stopped at once, and again; the text is the target's."""
    out = tmp_path / "drafter"
    train = ("train", "--target", target, "--out", out, "--kind", kind, "--draft-vocab", 40, "--layers", 3, *SMALL)
    status, text, _ = command(*train, "--max-hours", 0)
    assert (status, text) == (0, "stopped; the same command goes on from here\n")
    status, text, err = command(*train, "--json")
    assert status == 0, err
    result = json.loads(text)
    assert result["finished"]
    assert result["stage"] == "training"
    assert set(result["held_out"]) == {"agreement", "tokens_per_pass"}
    shards = len(list((out / "work" / "features").glob("shard-*")))
    status, text, _ = command(*train)
    assert status == 0
    assert text.startswith(f"the drafter is in {out}; held-out: agreement by step [")
    assert len(list((out / "work" / "features").glob("shard-*"))) == shards
    if kind == "eagle3":  # and on with other chats
        status, text, err = command(*train, "--out", tmp_path / "more", "--start", out, "--seed", 7, "--json")
        assert status == 0, err
        chats = (
            load_file(next((x / "work" / "features").glob("*.safetensors")))["0.tokens"]
            for x in (out, tmp_path / "more")
        )
        assert not torch.equal(*chats)
    want = generate("--draft", "none")["token_ids"]
    for form, *options in forms:
        result = generate("--draft", form.format(out), *options)
        assert result["token_ids"] == want
        assert result["acceptance_rate"] is not None


def test_train_on_a_text(command, generate, target, tmp_path):
    path, out = tmp_path / "text", tmp_path / "head"
    path.write_text("\n".join(" ".join(f"w{(3 * i + j) % 57}" for i in range(40)) for j in range(30)))
    status, text, err = command("train", "--target", target, "--out", out, "--text", path, "--json", *SMALL)
    assert status == 0, err
    assert json.loads(text)["finished"]
    assert generate("--draft", f"eagle:{out}")["token_ids"] == generate("--draft", "none")["token_ids"]


def test_mistakes_in_training(command, target, tmp_path):
    mute = tmp_path / "mute"
    LlamaForCausalLM.from_pretrained(target).save_pretrained(mute)
    word_tokenizer(WORDS).save_pretrained(mute)
    out = tmp_path / "out"
    for args, part in (
        (("--target", mute), "no chat template"),
        (("--text", tmp_path / "none"), "there is no file"),
        (("--kind", "eagle9"), "eagle9"),
        (("--tokens", 5), "--tokens"),
        (("--target", "no-such/model"), "no-such/model"),
        (("--start", tmp_path / "none"), "--start"),
        (("--start", target, "--kind", "medusa"), "--start is for --kind eagle3"),
        (("--start", target), "--start"),
    ):
        check_mistake(command("train", "--target", target, "--out", out, *SMALL, *args), part)
    args = ("train", "--target", target, "--out", out, "--kind", "draft", "--layers", 7)
    check_mistake(command(*args), "--layers 7", "has 6")  # before hours of writing


def test_tune_skip(command, generate, target):
    """It finds the layers that do nothing; --draft skip then leaves them out, and every draft is right."""
    status, out, err = command("tune-skip", "--target", target, "--dtype", "float32", "--new-tokens", 12, "--json")
    assert status == 0, err
    found = json.loads(out)
    assert {2, 3} <= set(found["skip"])
    assert found["agreement"] > 0.9
    result = generate("--draft", "skip")
    assert result["token_ids"] == generate("--draft", "none")["token_ids"]
    assert result["acceptance_rate"] > 0.5
    assert generate("--draft", "suffix")["token_ids"] == result["token_ids"]


def test_mistakes_in_naming_drafters(command, target):
    for draft, parts in (
        (("eagle",), ["no head for", "specdec-triton train"]),
        (("cascade",), ["no head for"]),
        (("medusa",), ["say where the head is"]),
        (("cascade:ngram",), ["--draft cascade"]),
        (("cascade:",), ["--draft cascade"]),
        (("eagle:/no/such/head",), ["/no/such/head"]),
        (("ngram", "--tree", "3x2"), ["--tree is for"]),
        (("eagle:x", "--tree", "3"), ["--tree", "such as 5x8"]),
        (("eagle:x", "--tree", "9x20"), ["--tree", "at most 8"]),
    ):
        check_mistake(command("generate", "--target", target, "w1", "--draft", *draft), *parts)
