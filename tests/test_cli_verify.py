"""``specdec-triton verify``, from the command line to the exit status, on tiny models saved to a folder."""

from __future__ import annotations

import json

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specdec_triton import models as model_names
from specdec_triton import ops, verification
from specdec_triton._library import why_not_triton
from specdec_triton.cli import main, verify
from specdec_triton.testing import TOY_VOCAB, toy_model
from specdec_triton.verification import Check

pytestmark = pytest.mark.usefixtures("few_row_tests")
PROMPT = "w3 w5 w7 w3 w5 w7 w3"


def save(model, folder):
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(TOY_VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    draft, generator = toy_model(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter += 0.01 * torch.randn(parameter.shape, generator=generator)
    made = {
        "target": toy_model(),
        "draft": draft,
        "mixture": toy_model("mixtral", num_local_experts=4, num_experts_per_tok=2),
        "large": toy_model(vocab_size=3000),
        "small": toy_model(num_hidden_layers=1, tie_word_embeddings=True, seed=3, max_position_embeddings=32),
    }
    return {name: save(model, root / name) for name, model in made.items()}


@pytest.fixture
def command(folders, capsys, monkeypatch, tmp_path):
    """``command(...)`` runs verify on two prompts with few tokens and samples: (status, stdout, stderr)."""
    monkeypatch.setattr(model_names, "_hub_unreachable", lambda: True)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(f"{PROMPT}\n\nw2 w9 w2 w9\n")
    few = ["--max-new-tokens", "8", "--samples", "100", "-k", "2", "--dtype", "float32"]

    def run(*args, target="target"):
        argv = ["verify", "--target", folders[target], "--prompts", str(prompts), *few, *map(str, args)]
        status = main(argv)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture
def wrong(monkeypatch):
    """Every draft is accepted."""
    accept = ops.accept_reject

    def lenient(draft_tokens, *args, draft_lens, **options):
        tokens, _, status = accept(draft_tokens, *args, draft_lens=draft_lens, **options)
        step = torch.arange(tokens.shape[1])
        drafts = torch.nn.functional.pad(draft_tokens, (0, 1))
        tokens = torch.where(step < draft_lens[:, None], drafts, tokens.clamp(min=0))
        return ops.AcceptResult(tokens, draft_lens, status)

    monkeypatch.setattr(ops, "accept_reject", lenient)


def test_a_sound_pair(command):
    status, out, err = command()
    lines = out.splitlines()
    assert status == 0
    assert [line.split("  ")[0] for line in lines[:-1]] == [
        "module",
        "bits",
        "greedy, PromptLookup",
        "seeds, PromptLookup",
        "distribution, PromptLookup, rejection",
        "acceptance, PromptLookup",
        "speed, PromptLookup",
    ]
    assert ["passed" in line for line in lines[:-1]] == [True] * 5 + [False] * 2
    assert lines[-1] == "lossless: greedy, seeded and sampled text is what the target alone writes"
    assert [line.split(":")[0] for line in err.splitlines()] == [line.split("  ")[0] for line in lines[:-1]]


def test_json_of_a_draft_model(command, folders):
    status, out, _ = command("--draft", folders["draft"], "--json", "--seed", 5)
    result = json.loads(out)
    assert status == 0
    assert [(check["name"], check["of"], check["passed"]) for check in result["checks"]] == [
        ("module", "", True),
        ("bits", "", True),
        ("greedy", "DraftModel", True),
        ("greedy", "PromptLookup", True),
        ("seeds", "DraftModel", True),
        ("seeds", "PromptLookup", True),
        ("distribution", "DraftModel, rejection", True),
        ("distribution", "DraftModel, block", True),
        ("distribution", "PromptLookup, rejection", True),
        ("acceptance", "DraftModel", None),
        ("speed", "DraftModel", None),
    ]
    assert all(check["seconds"] >= 0 and check["detail"] for check in result["checks"])
    assert result["checks"][2]["facts"]["texts"] == 2 * (1 + 2 * 2 + 2)
    assert result["checks"][6]["facts"]["samples"] == 100
    assert {"coupled", "rejection", "block"} <= result["checks"][9]["facts"].keys()
    settings = {"lossless": True, "complete": True, "k": 2, "seed": 5, "prompts": 2, "dtype": "float32", "samples": 100}
    assert {name: result[name] for name in settings} == settings


def test_a_broken_pair(command, wrong):
    status, out, err = command()
    assert status == 1
    assert out.splitlines()[-1].startswith("NOT lossless: greedy, PromptLookup; seeds, PromptLookup and distribution")
    assert "plain decoding writes" in out
    assert "as text: 'w" in out
    assert "greedy, PromptLookup: FAILED" in err
    status, out, _ = command("--json")
    assert (status, json.loads(out)["lossless"]) == (1, False)


def test_a_mixture_of_experts(command):
    status, out, _ = command(target="mixture")
    assert status == 0
    assert "not available" in out.splitlines()[1]
    assert out.splitlines()[-1].startswith("lossless up to rounding: ")


def test_nothing_shown_is_no_success(command, monkeypatch):
    monkeypatch.setattr(verify, "plan", lambda *args: [lambda: Check("greedy", None, "nothing was drafted")])
    status, out, _ = command()
    assert (status, out.splitlines()[-1]) == (1, "nothing is shown: no check could judge a draft")


def test_draft_none_checks_ngrams(command):
    assert "greedy, PromptLookup  " in command("--draft", "none")[1]


@pytest.mark.parametrize("flags", [[], ["--json"]], ids=["table", "json"])
def test_interrupt_prints_what_was_found(command, monkeypatch, flags):
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(verification, "check_seeds", interrupted)
    status, out, err = command(*flags)
    assert (status, err.splitlines()[-1]) == (130, "specdec-triton: interrupted, 3 checks were done")
    if flags:
        result = json.loads(out)
        assert ([check["name"] for check in result["checks"]], result["complete"]) == (
            ["module", "bits", "greedy"],
            False,
        )
        sentence = result["verdict"]
    else:
        assert len(out.splitlines()) == 4
        sentence = out.splitlines()[-1]
    assert sentence.startswith("interrupted after 3 checks; so far: ")
    assert sentence.endswith("seeded and sampled text is not checked")


@pytest.mark.skipif(why_not_triton("verify_attention", "cpu") is not None, reason="the kernels cannot run here")
def test_on_the_kernels(command, monkeypatch, tmp_path):
    monkeypatch.setenv("SPECDEC_BACKEND", "triton")
    (tmp_path / "one").write_text("w21 w20 w32 w67 w21 w20 w32 w67")  # after which the small model repeats itself
    few = ["--prompts", tmp_path / "one", "-k", "1", "--max-new-tokens", "4", "--samples", "2"]
    status, out, _ = command(*few, "--json", target="small")
    found = json.loads(out)
    assert (status, found["lossless"]) == (0, True), out
    assert {check["name"] for check in found["checks"] if check["passed"]} == {"module", "bits", "greedy", "seeds"}


def test_prompts_of_a_file(tmp_path):
    path = tmp_path / "prompts"
    path.write_text("Why?\n\n  indented \r\nlast")
    assert verify.read_prompts(str(path)) == ["Why?", "  indented ", "last"]
    path.write_text('\n{"prompt": "Why?", "id": 1}\n{"prompt": "{"}\n')
    assert verify.read_prompts(str(path)) == ["Why?", "{"]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "the prompt is empty: '"),
        ('{"prompt": "a"}\n\nplain\n', "line 3"),
        ('{"prompt": 7}', "line 1"),
        ('{"text": "a"}', "line 1"),
        ('{"prompt": " "}', "line 1"),
        ("w1 " * 200, "prompt 1 has 200 tokens, the target's context 128"),
        ("w1\n" + "w1 " * 128, "prompt 2 has 128 tokens"),
    ],
    ids=["empty", "mixed", "number", "no prompt", "blank", "long", "fills the context"],
)
def test_bad_prompts(command, tmp_path, text, part):
    path = tmp_path / "bad"
    path.write_text(text)
    check_mistake(command("--prompts", path), part)


def test_other_mistakes(command, folders):
    check_mistake(command("--prompts", "/no/such/file"), "/no/such/file")
    check_mistake(command("-k", 0), "-k must be at least 1")
    check_mistake(command("--samples", 0), "--samples")
    check_mistake(command("--draft", "no-such/model"), "no-such/model")
    check_mistake(command("--draft", folders["large"]), "another vocabulary")


def check_mistake(outcome, part):
    status, out, err = outcome
    assert (status, out) == (2, "")
    assert err.startswith("specdec-triton: error: ")
    assert part in err
