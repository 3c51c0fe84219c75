"""``specdec-triton generate``: one prompt, its text as it is written, and how fast that was."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from specdec_triton.cli.common import PROGRAM, UsageError, integer, note, number, one_line, write
from specdec_triton.cli.loading import (
    add_model_arguments,
    check_models,
    load_drafter,
    load_target,
    pick_device,
    quiet_transformers,
    split_draft,
)
from specdec_triton.cli.stream import TextStream, decode
from specdec_triton.sampling import MAX_LOGPROBS, SamplingParams

if TYPE_CHECKING:
    from specdec_triton.engine import SpeculativeDecoder
    from specdec_triton.engine.request import GenerationOutput, GenerationStats

NAME = "generate"
HELP = "write on from a prompt, and say how fast"
DESCRIPTION = """Write on from a prompt. The text goes to stdout as it is written, speed and acceptance to stderr.
Speeds include the prompt's pass, not loading."""
RUNS = 2  # of each kind, when comparing
_WARMUP_TOKENS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = f"{PROGRAM} generate [PROMPT] [options]"
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", help="the prompt; - or none: read from stdin")
    parser.add_argument("--file", metavar="PATH", help="read the prompt from a file (without its last line break)")
    parser.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help="put the prompt into the chat template (default: if there is one)",
    )
    parser.add_argument("--system", metavar="TEXT", help="the chat's system message")
    parser.add_argument(
        "--compare", action="store_true", help="decode plainly as well: both speeds, and whether the texts are equal"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the text")
    parser.add_argument(
        "--adaptive",
        action=argparse.BooleanOptionalAction,
        help="draft fewer than K tokens, or none, where more would not pay (default: with all but a draft MODEL)",
    )
    add_model_arguments(parser)
    group = parser.add_argument_group("sampling")
    for names, kind, metavar, default, text in (
        (["--max-new-tokens"], integer(1), "N", 128, "stop after N tokens (default: 128)"),
        (["--temperature"], number(0), "T", 0.0, "0: always the likeliest token (default); 1: the model's own"),
        (["--top-k"], integer(-1), "N", 0, "keep the N likeliest tokens (default: 0, all)"),
        (["--top-p"], number(0, 1), "P", 1.0, "keep the likeliest tokens up to probability P (default: 1, all)"),
        (["--min-p"], number(0, 1), "P", 0.0, "drop tokens below P times the likeliest (default: 0)"),
        (["--typical-p"], number(0, 1), "P", 1.0, "keep the most typical tokens up to probability P (default: 1, all)"),
        (
            ["--repetition-penalty"],
            number(1e-6),
            "R",
            1.0,
            "make tokens of prompt and text R times less likely (default: 1)",
        ),
        (["--presence-penalty"], number(-1e6), "X", 0.0, "take X from the logits of tokens in the text (default: 0)"),
        (["--frequency-penalty"], number(-1e6), "X", 0.0, "the same for every time they occur (default: 0)"),
        (["--no-repeat-ngram-size"], integer(0), "N", 0, "write no N tokens in a row twice (default: 0, off)"),
        (["--min-new-tokens"], integer(0), "N", 0, "no end of the text before N tokens (default: 0)"),
        (["--seed"], integer(-(1 << 63), (1 << 63) - 1), "N", 0, "same seed, same text, any --draft (default: 0)"),
    ):
        group.add_argument(*names, metavar=metavar, type=kind, default=default, help=text)
    group.add_argument(
        "--stop", metavar="TEXT", action="append", default=[], help="end with this text; may be repeated"
    )
    group.add_argument(
        "--logprobs",
        metavar="N",
        type=integer(0, MAX_LOGPROBS),
        help="with --json: of each token, and of the N likeliest",
    )


def run(args: argparse.Namespace) -> int:
    prompt = read_prompt(args.prompt, args.file)
    params = read_params(args)
    device = pick_device(args.device)
    with contextlib.redirect_stdout(sys.stderr):  # whatever a library prints
        quiet_transformers()
        tokenizers = check_models(args)
        tokenizer = tokenizers.target
        ids = encode(tokenizer, prompt, args.chat, args.system)
        target = load_target(args, device)
        drafter = load_drafter(args, device, target, tokenizers)
        _, kind, _ = split_draft(args.draft)
        adaptive = kind != "model" if args.adaptive is None else args.adaptive
        decoder = make_decoder(target, drafter, args.num_draft_tokens, adaptive, tokenizer)
    settings = {
        "target": args.target,
        "draft": args.draft,
        "k": 0 if args.draft == "none" else args.num_draft_tokens,
        "dtype": args.dtype,
        "device": device,
        "seed": args.seed,
        "prompt_tokens": len(ids),
    }
    if args.compare:
        return compare(args, decoder, tokenizer, ids, params, settings)
    return single(args, decoder, tokenizer, ids, params, settings)


def read_params(args: argparse.Namespace) -> SamplingParams:
    names = "temperature top_k top_p min_p typical_p seed max_new_tokens min_new_tokens logprobs repetition_penalty"
    names += " presence_penalty frequency_penalty no_repeat_ngram_size"
    if args.logprobs is not None and not args.json:
        raise UsageError("--logprobs needs --json")
    if args.temperature == 0 and (args.top_k > 0 or min(args.top_p, args.typical_p) < 1 or args.min_p > 0):
        note(f"{PROGRAM}: --top-k, --top-p, --min-p and --typical-p do nothing at --temperature 0, the default")
    try:
        return SamplingParams(**{name: getattr(args, name) for name in names.split()}, stop_strings=args.stop)
    except ValueError as error:  # values that do not go together, or an empty --stop
        raise UsageError(str(error).replace("SamplingParams.", "")) from error


def read_prompt(prompt: str | None, path: str | None) -> str:
    """The prompt from where it was named; a file's or stdin's last line break is not part of it."""
    if prompt is not None and path is not None:
        raise UsageError("give either PROMPT or --file, not both")
    if prompt is None and path is None and (sys.stdin is None or sys.stdin.isatty()):
        raise UsageError('there is no prompt: give one ("..."), or --file PATH, or pipe text to stdin')
    if path not in (None, "-"):
        try:
            with open(path, "rb") as file:  # type: ignore[arg-type]
                text = _decode_bytes(file.read(), path)  # type: ignore[arg-type]
        except OSError as error:
            raise UsageError(f"cannot read {path!r}: {error.strerror or error}") from error
    elif prompt not in (None, "-"):
        text = prompt  # type: ignore[assignment]
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise UsageError("the prompt is not UTF-8 text")
    elif hasattr(sys.stdin, "buffer"):
        text = _decode_bytes(sys.stdin.buffer.read(), "stdin")
    else:
        text = sys.stdin.read()
    if text is not prompt:
        text = text.removesuffix("\n").removesuffix("\r")
    if not text.strip():
        raise UsageError("the prompt is empty" if path in (None, "-") else f"the prompt is empty: {path!r}")
    return text


def _decode_bytes(data: bytes, source: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"cannot read {source!r}: not UTF-8 text (byte {error.start})") from error


def encode(tokenizer: Any, prompt: str, chat: bool | None, system: str | None) -> list[int]:
    """Token ids of the prompt, inside the chat template or as it is."""
    has_template = getattr(tokenizer, "chat_template", None) is not None
    if chat and not has_template:
        raise UsageError("--chat: the target's tokenizer has no chat template")
    if not (has_template if chat is None else chat):
        if system is not None:
            raise UsageError("--system needs the chat template")
        ids = list(tokenizer(prompt)["input_ids"])
    else:
        messages = [{"role": "system", "content": system}] if system is not None else []
        messages.append({"role": "user", "content": prompt})
        try:
            ids = list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
        except Exception as error:  # a template raises what it likes
            raise UsageError(f"the chat template failed: {error}; --no-chat does without") from error
    if not ids:
        raise UsageError("the prompt has no tokens")
    return ids


def make_decoder(target: Any, drafter: Any, k: int, adaptive: bool, tokenizer: Any) -> SpeculativeDecoder:
    """A decoder of one request, warmed up."""
    from specdec_triton.engine import SpeculativeDecoder

    try:
        decoder = SpeculativeDecoder(
            target, drafter, num_draft_tokens=k, max_batch_size=1, adaptive=adaptive, tokenizer=tokenizer
        )
    except ValueError as error:  # the drafter does not fit
        raise UsageError(str(error)) from error
    decoder.warmup()
    return decoder


def decode_prompt(
    decoder: SpeculativeDecoder,
    ids: Sequence[int],
    params: SamplingParams,
    show: Callable[[list[int]], None] = lambda tokens: None,
) -> GenerationOutput:
    """Decode one prompt; ``show`` gets each round's tokens. Ctrl-C cancels and keeps what was written."""
    try:
        handle = decoder.submit(ids, params)
    except ValueError as error:
        raise UsageError(str(error)) from error
    shown = 0
    try:
        while handle.output is None:
            decoder.step()
            new = handle.token_ids[shown:]
            shown += len(new)
            show(new)
    except KeyboardInterrupt:
        handle.cancel()
        show(handle.token_ids[shown:])
    assert handle.output is not None
    return handle.output


def single(
    args: argparse.Namespace,
    decoder: SpeculativeDecoder,
    tokenizer: Any,
    ids: Sequence[int],
    params: SamplingParams,
    settings: dict[str, Any],
) -> int:
    """Decode once and report."""
    if args.json:
        with contextlib.redirect_stdout(sys.stderr):
            output = decode_prompt(decoder, ids, params)
        print(json.dumps(report(tokenizer, output) | settings))
    else:
        stream = TextStream(tokenizer)
        output = decode_prompt(decoder, ids, params, lambda tokens: write(stream.push(tokens)))
        write(stream.flush() + "\n")
        if output.finish_reason != "error":
            note(summary(output))
    return _status(output)


def compare(
    args: argparse.Namespace,
    decoder: SpeculativeDecoder,
    tokenizer: Any,
    ids: Sequence[int],
    params: SamplingParams,
    settings: dict[str, Any],
) -> int:
    """Decode plainly and speculatively in turn, and report the faster run of each."""
    from specdec_triton.drafters import NoDraft

    decoders = {"plain": make_decoder(decoder.target, NoDraft(), 0, False, tokenizer), "speculative": decoder}
    best: dict[str, GenerationOutput] = {}
    warmup = replace(params, max_new_tokens=min(_WARMUP_TOKENS, params.max_new_tokens), min_new_tokens=0)
    if not args.json:
        note(f"comparing: {RUNS} runs each, plain and speculative in turn, after a warm-up")
    with contextlib.redirect_stdout(sys.stderr):
        for each, turn in ((warmup, 0), *((params, turn + 1) for turn in range(RUNS))):
            for name, one in decoders.items():
                output = decode_prompt(one, ids, each)
                if (status := _status(output)) == 130:
                    raise KeyboardInterrupt
                if status:
                    return status
                if turn and (name not in best or output.stats.seconds < best[name].stats.seconds):
                    best[name] = output
    plain, speculative = best["plain"], best["speculative"]
    speedup = (speculative.stats.tokens_per_second or 0) / (plain.stats.tokens_per_second or 1)
    identical = plain.token_ids == speculative.token_ids
    if args.json:
        result = {
            "plain": report(tokenizer, plain),
            "speculative": report(tokenizer, speculative),
            "speedup": speedup,
            "identical": identical,
            "best_of": RUNS,
        }
        print(json.dumps(result | settings))
        return 0
    write(decode(tokenizer, speculative.token_ids) + "\n")
    note(f"plain:       {summary(plain)}")
    note(f"speculative: {summary(speculative)}")
    same = "the token ids are identical" if identical else difference(tokenizer, plain, speculative)
    note(f"speedup {speedup:.2f}x (best of {RUNS} runs each); {same}")
    return 0


def _status(output: GenerationOutput) -> int:
    if output.finish_reason == "error":
        note(f"{PROGRAM}: error: {one_line(output.error or 'decoding failed')}")
        return 1
    return 130 if output.finish_reason == "cancelled" else 0


def report(tokenizer: Any, output: GenerationOutput) -> dict[str, Any]:
    """A run as JSON."""
    stats = output.stats
    more: dict[str, Any] = {"error": output.error} if output.error is not None else {}
    if output.logprobs is not None:
        each = [(decode(tokenizer, [x.token_id]), x) for x in output.logprobs]
        more["logprobs"] = [{"token": text, "logprob": x.logprob, "top": x.top} for text, x in each]
    return {
        "text": decode(tokenizer, output.token_ids),
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "tokens_per_second": stats.tokens_per_second,
        "acceptance_rate": stats.acceptance_rate,
        "tokens_per_target_pass": stats.tokens_per_target_pass,
        "new_tokens": stats.new_tokens,
        "seconds": stats.seconds,
    } | more


def summary(output: GenerationOutput) -> str:
    """A run as one line."""
    stats = output.stats
    return (
        f"{stats.new_tokens} tokens at {stats.tokens_per_second or 0:.1f} tokens/s, {_acceptance(stats)},"
        f" {stats.tokens_per_target_pass or 0:.2f} tokens per target pass, finish reason: {output.finish_reason}"
    )


def _acceptance(stats: GenerationStats) -> str:
    rate = stats.acceptance_rate
    return "nothing drafted" if rate is None else f"acceptance {rate:.0%} ({stats.accepted} of {stats.drafted} drafts)"


def difference(tokenizer: Any, plain: GenerationOutput, speculative: GenerationOutput) -> str:
    """Where two runs part."""
    a, b = plain.token_ids, speculative.token_ids
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    ours, theirs = (repr(decode(tokenizer, ids[at : at + 1])) if at < len(ids) else "the end" for ids in (b, a))
    return f"the texts DIFFER from token {at + 1} on: {ours}, in plain decoding {theirs}"
