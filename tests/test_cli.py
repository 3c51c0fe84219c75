"""The command: what it prints where, its exit status, and one clear line for every mistake.

Models are tiny and random, so their text is noise; what counts is that stdout, the JSON and the tokenizer's own
decoding of the ids agree.
"""

import io
import json
import os
import random
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, MambaConfig, MambaForCausalLM, PreTrainedTokenizerFast

from specdec_triton import GenerationOutput
from specdec_triton import models as model_names
from specdec_triton.cli import generate, main
from specdec_triton.cli.stream import TextStream, decode
from specdec_triton.engine import SpeculativeDecoder
from specdec_triton.engine.request import GenerationStats

pytestmark = pytest.mark.usefixtures("few_row_tests")
hub_unreachable = model_names._hub_unreachable
CONTEXT = 64
WORDS = ["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(57))]
TEMPLATE = "{% for m in messages %}{{ m['role'] + ' w1 ' + m['content'] + ' ' }}{% endfor %}"
RESULT = {
    "text": str,
    "token_ids": list,
    "finish_reason": str,
    "tokens_per_second": float,
    "acceptance_rate": (float, type(None)),
    "tokens_per_target_pass": float,
}


def word_tokenizer(words, *, eos="</s>", **kwargs):
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token=eos, **kwargs
    )


def byte_tokenizer():
    """One token a byte, so an emoji is four; id 256 is special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def save_llama(folder, vocab_size, *, tokenizer=None, seed=0):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        initializer_range=0.5,
        eos_token_id=None,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Model folders by name."""
    root = tmp_path_factory.mktemp("models")
    renamed = ["<unk>", "<s>", "<end>", *WORDS[3:]]  # another special token
    swapped = [*WORDS[:10], WORDS[11], WORDS[10], *WORDS[12:]]
    made = {
        "words": save_llama(root / "words", len(WORDS), tokenizer=word_tokenizer(WORDS)),
        "chat": save_llama(root / "chat", len(WORDS), tokenizer=word_tokenizer(WORDS, chat_template=TEMPLATE)),
        "bytes": save_llama(root / "bytes", 257, tokenizer=byte_tokenizer()),
        "draft": save_llama(root / "draft", len(WORDS) + 4, tokenizer=word_tokenizer(WORDS), seed=1),
        "renamed": save_llama(root / "renamed", len(WORDS), tokenizer=word_tokenizer(renamed, eos="<end>")),
        "swapped": save_llama(root / "swapped", len(WORDS), tokenizer=word_tokenizer(swapped)),
        "bare": save_llama(root / "bare", len(WORDS)),
        "bare-large": save_llama(root / "bare-large", len(WORDS) + 2000),
    }
    mamba = MambaConfig(vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=1, state_size=4)
    MambaForCausalLM(mamba).save_pretrained(root / "mamba")
    word_tokenizer(WORDS).save_pretrained(root / "mamba")
    save_llama(root / "headless", len(WORDS), tokenizer=word_tokenizer(WORDS))
    weights = load_file(root / "headless" / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, root / "headless" / "model.safetensors", metadata={"format": "pt"})
    (root / "empty").mkdir()
    (root / "broken").mkdir()
    (root / "broken" / "config.json").write_text("{")
    return made | {name: str(root / name) for name in ("mamba", "headless", "empty", "broken")}


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    monkeypatch.setattr(model_names, "_hub_unreachable", lambda: True)


@pytest.fixture
def command(folders, capsys):
    """``command("words", "a prompt", ...)`` runs generate on that target: (status, stdout, stderr)."""

    def run(target, *args):
        status = main(
            ["generate", "--target", folders[target], "--dtype", "float32", "--max-new-tokens", "12", *map(str, args)]
        )
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def check_result(result):
    for key, kind in RESULT.items():
        assert isinstance(result[key], kind), key
    assert result["finish_reason"] in ("stop", "length")
    assert result["tokens_per_second"] > 0


# What is printed.


def test_text_and_summary(command):
    status, out, err = command("words", "w1 w2 w3 w1 w2")
    ids = json.loads(command("words", "w1 w2 w3 w1 w2", "--json")[1])["token_ids"]
    assert status == 0
    assert out == decode(word_tokenizer(WORDS), ids) + "\n"
    assert len(err.splitlines()) == 1
    for part in ("tokens/s", "tokens per target pass", "finish reason: length"):
        assert part in err


@pytest.mark.parametrize("draft", ["none", "ngram", "draft", "words"])
def test_json(command, folders, draft):
    status, out, err = command("words", "w1 w2 w3 w1 w2", "--json", "--draft", folders.get(draft, draft), "-k", 3)
    result = json.loads(out)
    check_result(result)
    assert (status, err) == (0, "")
    assert result["text"] == decode(word_tokenizer(WORDS), result["token_ids"])
    assert (result["prompt_tokens"], result["new_tokens"], len(result["token_ids"])) == (5, 12, 12)
    assert (result["acceptance_rate"] is None) == (draft == "none")
    if draft == "none":
        assert result["tokens_per_target_pass"] == 1
    if draft == "words":  # the target drafts for itself
        assert result["acceptance_rate"] == 1
        assert result["tokens_per_target_pass"] > 2


def test_k_0_drafts_nothing(command, folders):
    result = json.loads(command("words", "w1 w1 w1", "--json", "-k", 0, "--draft", folders["draft"])[1])
    assert result["acceptance_rate"] is None
    assert result["k"] == 0


@pytest.mark.parametrize("sampling", [[], ["--temperature", "1", "--seed", "5", "--top-k", "20", "--top-p", "0.9"]])
def test_compare(command, folders, sampling):
    arguments = ("words", "w1 w2 w1 w2", "--compare", "--draft", folders["draft"], *sampling)
    status, out, err = command(*arguments, "--json")
    result = json.loads(out)
    assert (status, err) == (0, "")
    check_result(result["plain"])
    check_result(result["speculative"])
    assert result["identical"] is True
    assert result["plain"]["token_ids"] == result["speculative"]["token_ids"]
    assert result["plain"]["acceptance_rate"] is None
    assert result["speculative"]["acceptance_rate"] is not None
    ratio = result["speculative"]["tokens_per_second"] / result["plain"]["tokens_per_second"]
    assert result["speedup"] == pytest.approx(ratio)

    status, out, err = command(*arguments)
    assert status == 0
    assert out == result["plain"]["text"] + "\n"
    for part in ("plain:", "speculative:", "best of", "identical"):
        assert part in err


def test_difference_names_the_first_place():
    outputs = [GenerationOutput(ids, "length", GenerationStats()) for ids in ([3, 4, 5], [3, 9], [3, 4])]
    assert "from token 2 on: 'w6', in plain decoding 'w1'" in generate.difference(word_tokenizer(WORDS), *outputs[:2])
    assert "from token 3 on: the end" in generate.difference(word_tokenizer(WORDS), outputs[0], outputs[2])


def test_options_have_an_effect(command, folders):
    """An option that is accepted and ignored is a bug (faults.md L4)."""

    def run(*args):
        return json.loads(command("words", "w1 w2 w3", "--json", *args)[1])

    plain = run()
    assert run("--temperature", 2, "--seed", 1)["token_ids"] != run("--temperature", 2, "--seed", 2)["token_ids"]
    for narrow in (["--top-k", 1], ["--top-p", 0], ["--min-p", 1]):
        assert run("--temperature", 2, *narrow)["token_ids"] == plain["token_ids"]
    assert run("--max-new-tokens", 3)["new_tokens"] == 3
    assert run("--dtype", "bfloat16")["dtype"] == "bfloat16"
    assert run("--no-optimize")["token_ids"] == plain["token_ids"]
    long = run("--draft", folders["words"], "-k", 8)["tokens_per_target_pass"]
    assert long > run("--draft", folders["words"], "-k", 1)["tokens_per_target_pass"]


def test_context_ends_the_text(command):
    result = json.loads(command("words", "w1 " * (CONTEXT - 4), "--json")[1])
    assert (result["new_tokens"], result["finish_reason"]) == (4, "length")


def test_chat_template(command):
    def prompt_tokens(target, *args):
        return json.loads(command(target, "w5 w6", "--json", *args)[1])["prompt_tokens"]

    assert prompt_tokens("words") == 2
    assert prompt_tokens("chat") == 4
    assert prompt_tokens("chat", "--no-chat") == 2
    assert prompt_tokens("chat", "--system", "w9") == 7


def test_prompt_from_file_and_stdin(command, tmp_path, monkeypatch):
    expected = json.loads(command("bytes", "w1 😀", "--json")[1])
    path = tmp_path / "prompt.txt"
    path.write_bytes("w1 😀\r\n".encode())
    sources = [["--file", path], ["--file", "-"], ["-"], []]
    for source in sources:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("w1 😀\n".encode())))
        result = json.loads(command("bytes", *source, "--json")[1])
        assert (result["prompt_tokens"], result["token_ids"]) == (7, expected["token_ids"]), source


# Streaming.


def test_streamed_bytes_are_the_full_decoding(command):
    """faults.md D8: a random byte model writes broken characters at every turn, some of them at the end."""
    for seed in range(2):
        arguments = ("bytes", "hi", "--temperature", 1, "--seed", seed, "--max-new-tokens", 40)
        _, out, _ = command(*arguments)
        ids = json.loads(command(*arguments, "--json")[1])["token_ids"]
        assert out == byte_tokenizer().decode(ids, skip_special_tokens=True) + "\n"


def rounds(ids, generator):
    while ids:
        n = generator.randint(1, 6)
        yield ids[:n]
        ids = ids[n:]


@pytest.mark.parametrize("seed", range(5))
def test_stream_of_characters(seed):
    tokenizer = byte_tokenizer()
    text = "naïve 😀😀 — 漢字, 👩‍👩‍👧 ok" * 3
    stream, generator = TextStream(tokenizer), random.Random(seed)
    pieces = [stream.push(tokens) for tokens in rounds(tokenizer(text)["input_ids"], generator)]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert stream.flush() == ""


@pytest.mark.parametrize("seed", range(5))
def test_stream_of_noise(seed):
    tokenizer, generator = byte_tokenizer(), random.Random(seed)
    ids = [generator.randrange(257) for _ in range(300)]
    stream = TextStream(tokenizer)
    text = "".join([stream.push(tokens) for tokens in rounds(ids, generator)]) + stream.flush()
    assert text == tokenizer.decode(ids, skip_special_tokens=True)


def test_stream_flushes_what_it_held():
    tokenizer = byte_tokenizer()
    ids = tokenizer("ab😀")["input_ids"][:-1]
    stream = TextStream(tokenizer)
    assert stream.push(ids) == "ab"
    assert stream.flush() == tokenizer.decode(ids)[2:] != ""
    assert TextStream(tokenizer).flush() == ""


@pytest.mark.parametrize("seed", range(5))
def test_stream_of_other_tokenizers(seed):
    """Words joined by spaces, spaces tidied up, and a space dropped at the start."""
    words = ["<unk>", "<s>", "</s>", "do", "n't", ".", ",", "'", "we", "'re", "a"]
    metaspace = Tokenizer(models.WordLevel({w: i for i, w in enumerate(["<unk>", "▁", "▁a", "b", "▁▁"])}, "<unk>"))
    metaspace.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    generator = random.Random(seed)
    for tokenizer in (
        word_tokenizer(words),
        word_tokenizer(words, clean_up_tokenization_spaces=True),
        PreTrainedTokenizerFast(tokenizer_object=metaspace, unk_token="<unk>"),
    ):
        ids = [generator.randrange(len(tokenizer)) for _ in range(100)]
        stream = TextStream(tokenizer)
        text = "".join([stream.push(tokens) for tokens in rounds(ids, generator)]) + stream.flush()
        assert text == tokenizer.decode(ids, skip_special_tokens=True)


# Mistakes.


def check_mistake(outcome, *parts):
    status, out, err = outcome
    assert (status, out) == (2, "")
    assert err.startswith("specdec-triton: error: ")
    assert err.count("\n") == 1
    for part in parts:
        assert part in err


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([], ["a command is missing"]),
        (["frobnicate"], ["frobnicate", "generate", "doctor"]),
        (["--frobnicate"], ["--frobnicate"]),
        (["generate", "hi", "--frobnicate"], ["--frobnicate"]),
        (["generate", "hi", "--max-new"], ["--max-new"]),
        (["generate", "hi", "there"], ["there"]),
        (["generate", "hi", "-k", "-1"], ["-k", "0 to 63", "'-1'"]),
        (["generate", "hi", "-k", "64"], ["-k", "0 to 63", "'64'"]),
        (["generate", "hi", "-k", "1000"], ["-k", "0 to 63", "'1000'"]),
        (["generate", "hi", "-k", "abc"], ["-k", "0 to 63", "'abc'"]),
        (["generate", "hi", "-k", "1.5"], ["-k", "'1.5'"]),
        (["generate", "hi", "-k"], ["-k"]),
        (["generate", "hi", "--temperature", "-0.1"], ["--temperature"]),
        (["generate", "hi", "--temperature", "nan"], ["--temperature"]),
        (["generate", "hi", "--temperature", "inf"], ["--temperature"]),
        (["generate", "hi", "--temperature", "warm"], ["--temperature", "'warm'"]),
        (["generate", "hi", "--top-p", "1.1"], ["--top-p", "0 to 1"]),
        (["generate", "hi", "--min-p", "-1"], ["--min-p"]),
        (["generate", "hi", "--top-k", "-2"], ["--top-k"]),
        (["generate", "hi", "--seed", "x"], ["--seed", "'x'"]),
        (["generate", "hi", "--seed", str(1 << 64)], ["--seed"]),
        (["generate", "hi", "--max-new-tokens", "0"], ["--max-new-tokens"]),
        (["generate", "hi", "--dtype", "int3"], ["--dtype", "bfloat16"]),
        (["generate", "hi", "--device", "tpu"], ["--device", "'tpu'"]),
        (["generate", "hi", "--file", "x"], ["PROMPT", "--file"]),
        (["generate", ""], ["prompt is empty"]),
        (["generate", " \n"], ["prompt is empty"]),
        (["generate", "hi", "--target", ""], ["name is empty"]),
        (["generate", "hi", "--target", "no-such/model"], ["no-such/model", "smollm2"]),
        (["generate", "hi", "--target", "/no/such/folder"], ["'/no/such/folder'", "no such folder"]),
        (["generate", "hi", "--target", __file__], ["that is a file"]),
        (["generate", "--file", "/no/such/prompt.txt"], ["/no/such/prompt.txt", "No such file"]),
        (["generate", "--file", "/"], ["'/'"]),
        (["generate", "\udcff"], ["UTF-8"]),
    ],
    ids=lambda value: " ".join(value).encode("ascii", "replace").decode()[:40] if isinstance(value, list) else None,
)
def test_mistakes_in_the_arguments(capsys, arguments, parts):
    status = main(arguments)
    captured = capsys.readouterr()
    check_mistake((status, captured.out, captured.err), *parts)


@pytest.mark.parametrize(
    ("target", "draft", "parts"),
    [
        ("empty", "none", ["the folder has no config.json"]),
        ("broken", "none", ["config.json"]),
        ("bare", "none", ["the folder has no tokenizer.json"]),
        ("headless", "none", ["lacks", "lm_head.weight"]),
        ("mamba", "none", ["MambaForCausalLM", "cannot be decoded"]),
        ("words", "mamba", ["MambaForCausalLM", "cannot be decoded"]),
        ("words", "empty", ["the folder has no config.json"]),
        ("words", "no-such/draft", ["no-such/draft"]),
        ("words", "bare-large", ["another vocabulary", "2060"]),
    ],
)
def test_mistakes_in_the_models(command, folders, target, draft, parts):
    check_mistake(command(target, "w1 w2", "--draft", folders.get(draft, draft)), *parts)


def test_a_draft_with_another_tokenizer_is_translated(command, folders):
    """faults.md I3, I4: the first id that differs is named, and the text is the target's."""
    _, want, _ = command("words", "w1 w2", "--draft", "none")
    status, out, err = command("words", "w1 w2", "--draft", folders["swapped"])
    assert (status, out) == (0, want)
    assert "another vocabulary: id 10 is 'w7' for the target and 'w8' for the draft; what both have is drafted" in err
    status, out, err = command("words", "w1 w2", "--draft", folders["bytes"])
    assert (status, out) == (2, "")
    assert "id 0 is" in err.splitlines()[0]
    assert err.splitlines()[1].startswith("specdec-triton: error: ")
    assert "shares no token" in err


@pytest.mark.parametrize("reachable", [False, True])
def test_without_network_only_the_cache_is_asked(monkeypatch, reachable):
    """Otherwise transformers retries every file for 20 seconds."""

    class Session:
        def head(self, url, timeout):
            if not reachable:
                raise ConnectionError

    asked = {}

    class Auto:
        @staticmethod
        def from_pretrained(name, **kwargs):
            asked.update(kwargs)

    monkeypatch.setattr("huggingface_hub.utils.get_session", Session)
    monkeypatch.setattr(model_names, "_hub_unreachable", hub_unreachable)
    hub_unreachable.cache_clear()
    model_names._load(Auto, "model", "some/model")
    hub_unreachable.cache_clear()
    assert asked.get("local_files_only", False) is not reachable


def test_draft_without_tokenizer_or_with_other_special_tokens(command, folders):
    status, _, err = command("words", "w1 w2", "--draft", folders["bare"])
    assert (status, len(err.splitlines())) == (0, 1)
    status, _, err = command("words", "w1 w2", "--draft", folders["renamed"])
    assert status == 0
    assert "warning: the special tokens of the draft" in err
    assert "id 2 is '</s>' for the target and '<end>' for the draft" in err


def test_other_mistakes(command, monkeypatch, tmp_path):
    check_mistake(command("words", "w1 " * CONTEXT), f"prompt of {CONTEXT} tokens", "context")
    check_mistake(command("words", "w1", "--chat"), "no chat template")
    check_mistake(command("words", "w1", "--system", "w2"), "--system")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    check_mistake(command("words", "w1", "--device", "cuda"), "--device cuda", "no GPU")
    (tmp_path / "latin1.txt").write_bytes("caf\xe9".encode("latin-1"))
    check_mistake(command("words", "--file", tmp_path / "latin1.txt"), "not UTF-8")
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    check_mistake(command("words"), "prompt is empty")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    check_mistake(command("words"), "there is no prompt")


def test_template_that_refuses(folders, tmp_path, capsys):
    refuses = word_tokenizer(WORDS, chat_template="{{ raise_exception('no system role here') }}")
    target = save_llama(tmp_path / "refuses", len(WORDS), tokenizer=refuses)
    status = main(["generate", "w1", "--target", target])
    captured = capsys.readouterr()
    check_mistake((status, captured.out, captured.err), "no system role here", "--no-chat")


# Failures, interruptions, pipes.


def test_unexpected_failure_is_one_line(command, monkeypatch):
    def fail(*args):
        raise RuntimeError("out of\nluck")

    monkeypatch.setattr(generate, "load_target", fail)
    assert command("words", "w1") == (1, "", "specdec-triton: error: RuntimeError: out of luck\n")
    monkeypatch.setenv("SPECDEC_DEBUG", "1")
    assert "Traceback" in command("words", "w1")[2]


@pytest.mark.parametrize("flags", [[], ["--json"], ["--compare"]])
def test_decoding_error(command, monkeypatch, flags):
    failed = GenerationOutput([5], "error", GenerationStats(), error="logits held NaN")
    monkeypatch.setattr(generate, "decode_prompt", lambda *args: failed)
    status, out, err = command("words", "w1", *flags)
    assert (status, err.splitlines()[-1]) == (1, "specdec-triton: error: logits held NaN")
    if flags == ["--json"]:
        assert json.loads(out)["finish_reason"] == "error"


@pytest.mark.parametrize("flags", [[], ["--json"], ["--compare"]])
def test_interrupt_keeps_what_was_written(command, monkeypatch, flags):
    step, count = SpeculativeDecoder.step, iter(range(100))

    def interrupted(self):
        if next(count) == 3:
            raise KeyboardInterrupt
        return step(self)

    expected = json.loads(command("words", "w1", "--json", "--draft", "none")[1])["token_ids"][
        :4
    ]  # the first step writes two
    monkeypatch.setattr(SpeculativeDecoder, "step", interrupted)
    status, out, err = command("words", "w1", "--draft", "none", *flags)
    assert status == 130
    if flags == ["--json"]:
        assert json.loads(out)["token_ids"] == expected
    elif flags == ["--compare"]:
        assert (out, err.splitlines()[-1]) == ("", "specdec-triton: interrupted")
    else:
        assert out == decode(word_tokenizer(WORDS), expected) + "\n"
        assert "cancelled" in err


def python(*arguments, **kwargs):
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": ""}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, stderr=subprocess.PIPE, text=True, timeout=120, **kwargs
    )


def closed_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def test_broken_pipe_is_quiet(folders, monkeypatch, capsys):
    writer = closed_pipe()
    result = python("-m", "specdec_triton", "generate", "-h", stdout=writer)
    os.close(writer)
    assert (result.returncode, result.stderr) == (141, "")
    with os.fdopen(closed_pipe(), "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert main(["generate", "w1", "--target", folders["words"], "--max-new-tokens", "4"]) == 141
    assert capsys.readouterr().err == ""


def test_as_a_program(folders):
    """Nothing but the object is printed, even into a pipe; the prompt comes out of one."""
    model = ["--target", folders["bytes"], "--dtype", "float32", "--max-new-tokens", "4", "--json"]
    result = python("-m", "specdec_triton", "generate", *model, input="hi", stdout=subprocess.PIPE)
    assert (result.returncode, result.stderr) == (0, "")
    assert json.loads(result.stdout)["prompt_tokens"] == 2


def test_help_and_mistakes_need_no_torch():
    program = """
import sys
from specdec_triton.cli import main
for arguments in (["-h"], ["generate", "-h"], ["doctor", "-h"], ["--version"]):
    assert main(arguments) == 0
assert main(["generate", "hi", "-k", "64"]) == main(["generate", ""]) == 2
assert not {"torch", "transformers", "numpy"} & set(sys.modules)
"""
    result = python("-c", program, stdout=subprocess.PIPE)
    assert result.returncode == 0, result.stderr
    assert "--num-draft-tokens" in result.stdout
    assert result.stdout.count("\n") < 90  # each help fits a screen


def test_version(capsys):
    from specdec_triton import __version__

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"specdec-triton {__version__}\n"


# doctor


def test_doctor(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "not" / "yet"))
    monkeypatch.delenv("SPECDEC_BACKEND", raising=False)
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["torch"] == torch.__version__
    assert {"python", "transformers", "triton", "numpy", "safetensors", "specdec_triton"} <= found["versions"].keys()
    assert {"append_kv", "verify_attention", "accept_reject", "sample", "ngram_propose"} <= found["ops"].keys()
    assert all(op["backend"] in ("torch", "triton") and op["why"] for op in found["ops"].values())
    assert found["cache"] == {"folder": str(tmp_path / "not" / "yet"), "writable": True}
    assert found["smollm2"]["state"]
    assert found["problems"] == []
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for part in (torch.__version__, "verify_attention", "smollm2", "no problems found"):
        assert part in text


def test_doctor_names_problems(capsys, monkeypatch):
    monkeypatch.setenv("SPECDEC_BACKEND", "cuda")
    assert main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["ops"]["sample"]["backend"] is None
    assert "SPECDEC_BACKEND" in found["problems"][0]


def test_a_backend_that_cannot_run_is_a_users_mistake(monkeypatch, command):
    """Exit status 2, the reason, no traceback."""
    monkeypatch.setenv("SPECDEC_BACKEND", "triton")
    monkeypatch.setattr("specdec_triton._library.why_not_triton", lambda op, device: "it is not installed")
    status, _, err = command("words", "a")
    assert status == 2
    assert "SPECDEC_BACKEND='triton' cannot run" in err
    assert "Traceback" not in err
