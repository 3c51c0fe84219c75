"""``specdec-triton verify``: does speculation change what these models write on these prompts?"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from specdec_triton.cli.common import PROGRAM, UsageError, integer, note, write
from specdec_triton.cli.generate import encode, read_prompt
from specdec_triton.cli.loading import (
    Tokenizers,
    add_model_arguments,
    check_models,
    load_drafter,
    load_target,
    pick_device,
    quiet_transformers,
)
from specdec_triton.cli.stream import decode

if TYPE_CHECKING:
    from specdec_triton.adapter import ModelAdapter
    from specdec_triton.drafters import Drafter
    from specdec_triton.verification import Check

NAME = "verify"
HELP = "check that speculation does not change the text"
DESCRIPTION = """Check on your own models and prompts that speculation does not change what the target writes: plain text against the
module's own logits, greedy and seeded text token by token, logits bit by bit, text without a seed by chi-square tests. Exit
status 0: all checks that apply here passed; 1: one failed, or none could be made. What exactness costs, and how many drafts
are accepted, is shown beside."""
PROMPTS = (
    "Why is the sky blue?",
    "Write the numbers from one to twelve in words, then write them again.",
    "Repeat this sentence three times: The quick brown fox jumps over the lazy dog.",
    "Correct the spelling: I recieved you're letter yestarday and was realy hapy to here from you.",
)
_OUTCOMES = {True: "passed", False: "FAILED", None: "-"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = f"{PROGRAM} verify [options]"
    for name, low, default, text in (
        ("--max-new-tokens", 1, 48, "tokens of each text (default: 48)"),
        (
            "--samples",
            1,
            1000,
            "texts whose frequencies are tested: ten times as many see faults a third the size (default: 1000)",
        ),
        ("--seed", 0, 0, "of the first prompt's seeded text, and of the samples (default: 0)"),
    ):
        parser.add_argument(name, metavar="N", type=integer(low, 1 << 62), default=default, help=text)
    parser.add_argument(
        "--prompts",
        metavar="FILE",
        help='one prompt a line, or JSON lines with a "prompt" each (default: four built in)',
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    add_model_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.num_draft_tokens == 0:
        raise UsageError("verify compares drafting with plain decoding: -k must be at least 1")
    prompts = PROMPTS if args.prompts is None else read_prompts(args.prompts)
    device = pick_device(args.device)
    with contextlib.redirect_stdout(sys.stderr):  # whatever a library prints
        quiet_transformers()
        tokenizers = check_models(args)
        ids = [encode(tokenizers.target, prompt, None, None) for prompt in prompts]
        target, drafters = load(args, device, tokenizers)
        check_lengths(ids, target.max_len)
        found, status = [], 0
        try:
            for check in plan(args, target, drafters, ids):
                found.append(timed(check))
        except KeyboardInterrupt:
            note(f"{PROGRAM}: interrupted, {len(found)} checks were done")
            status = 130
    from specdec_triton.verification import verdict

    settings = {name: getattr(args, name) for name in ("target", "draft", "dtype", "max_new_tokens", "samples", "seed")}
    settings |= {"k": args.num_draft_tokens, "device": device, "prompts": len(ids), "complete": status == 0}
    lossless, sentence = verdict([check for check, _ in found])
    if status:
        sentence = f"interrupted after {len(found)} checks; so far: {sentence}"
    if args.json:
        write(json.dumps(as_json(found) | {"lossless": lossless, "verdict": sentence} | settings) + "\n")
    else:
        write(as_text([check for check, _ in found], tokenizers.target, sentence))
    return status or int(lossless is not True)


def read_prompts(path: str) -> list[str]:
    """One prompt a line, empty lines left out; JSON lines if the first one begins with a brace."""
    lines = [(number, line) for number, line in enumerate(read_prompt(None, path).split("\n"), 1) if line.strip()]
    if not lines[0][1].lstrip().startswith("{"):
        return [line.removesuffix("\r") for _, line in lines]
    prompts = []
    for number, line in lines:
        try:
            prompt = json.loads(line)["prompt"]
        except (ValueError, KeyError, TypeError):
            prompt = None
        if not isinstance(prompt, str) or not prompt.strip():
            raise UsageError(f'line {number} of {path!r} is not a JSON object with a "prompt" that holds text')
        prompts.append(prompt)
    return prompts


def load(args: argparse.Namespace, device: str, tokenizers: Tokenizers) -> tuple[ModelAdapter, list[Drafter]]:
    """The target, and the drafters to check: the user's, and n-grams."""
    from specdec_triton.drafters import NoDraft, PromptLookup
    from specdec_triton.engine import SpeculativeDecoder

    model = load_target(args, device)
    drafter = load_drafter(args, device, model, tokenizers)
    try:
        target = SpeculativeDecoder(model, drafter).target
    except ValueError as error:  # the drafter does not fit
        raise UsageError(str(error)) from error
    if isinstance(drafter, (NoDraft, PromptLookup)):
        return target, [PromptLookup()]
    return target, [drafter, PromptLookup()]


def check_lengths(prompts: Sequence[Sequence[int]], max_len: int | None) -> None:
    for number, prompt in enumerate(prompts, 1):
        if max_len is not None and len(prompt) >= max_len:
            raise UsageError(f"prompt {number} has {len(prompt)} tokens, the target's context {max_len}")


def plan(
    args: argparse.Namespace, target: ModelAdapter, drafters: Sequence[Drafter], prompts: Sequence[Sequence[int]]
) -> list[Callable[[], Check]]:
    """The checks, the cheap and telling ones first."""
    from specdec_triton import verification as v

    texts: dict[str, Any] = {"k": args.num_draft_tokens, "max_new_tokens": args.max_new_tokens}
    sampled: dict[str, Any] = {"k": args.num_draft_tokens, "samples": args.samples, "seed": args.seed}
    # What n-grams draft is certain; there block verification is token-level verification.
    methods = ("rejection",) if len(drafters) == 1 else ("rejection", "block")
    judged = [(drafters[0], method) for method in methods] + [(drafter, "rejection") for drafter in drafters[1:]]
    checks: list[Callable[[], Check]] = [
        partial(v.check_module, target, prompts, max_new_tokens=args.max_new_tokens),
        partial(v.check_bits, target, prompts, k=args.num_draft_tokens),
    ]
    checks += [partial(v.check_greedy, target, drafter, prompts, **texts) for drafter in drafters]
    checks += [partial(v.check_seeds, target, drafter, prompts, seed=args.seed, **texts) for drafter in drafters]
    checks += [
        partial(v.check_distribution, target, drafter, prompts[0], method=method, **sampled)
        for drafter, method in judged
    ]
    measured = (target, drafters[0], prompts)
    checks.append(partial(v.measure_acceptance, *measured, methods=("coupled", *methods), seed=args.seed, **texts))
    checks.append(partial(v.measure_speed, *measured, **texts))
    return checks


def timed(check: Callable[[], Check]) -> tuple[Check, float]:
    """The outcome and its seconds, told at once."""
    start = time.perf_counter()
    outcome = check()
    seconds = time.perf_counter() - start
    note(f"{outcome.label}: {_OUTCOMES[outcome.passed]} ({seconds:.0f} s)")
    return outcome, seconds


def as_json(found: Sequence[tuple[Check, float]]) -> dict[str, Any]:
    names = ("name", "of", "passed", "detail", "facts")
    return {"checks": [{name: getattr(check, name) for name in names} | {"seconds": s} for check, s in found]}


def as_text(checks: Sequence[Check], tokenizer: Any, sentence: str) -> str:
    """A row for each check, with the tokens of a failure as text, and the verdict."""
    width = max((len(check.label) for check in checks), default=0)
    lines = []
    for check in checks:
        lines.append(f"{check.label:{width}}  {_OUTCOMES[check.passed]:6}  {check.detail}")
        if "expected" in check.facts:
            got, expected = (_token(tokenizer, check.facts[name]) for name in ("got", "expected"))
            lines.append(f"{'':{width}}          as text: {got}, expected {expected}")
    return "\n".join([*lines, sentence]) + "\n"


def _token(tokenizer: Any, token: int | None) -> str:
    return "the end" if token is None else repr(decode(tokenizer, [token]))
