"""``specdec-triton tune-skip``: without which of its layers a model drafts best for itself."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys

from specdec_triton.cli.common import PROGRAM, UsageError, integer, note, write
from specdec_triton.cli.loading import add_model_arguments, load_target, pick_device, quiet_transformers
from specdec_triton.models import load_config, load_tokenizer

NAME = "tune-skip"
HELP = "find the layers that a model drafts best without"
DESCRIPTION = """Find out which layers a model may leave out when it drafts for itself, on its own answers to sample prompts, and keep the
choice: --draft skip and LayerSkip() draft by it."""
PROMPTS = (
    "What is the capital of France, and what is it known for?",
    "Write a short story about a robot who learns to paint.",
    "If a train travels 60 miles in 1.5 hours, what is its speed?",
    "Explain photosynthesis to a ten-year-old.",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = f"{PROGRAM} tune-skip [options]"
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--new-tokens", metavar="N", type=integer(8, 512), default=64, help="of each answer (default: 64)"
    )
    add_model_arguments(parser)


def run(args: argparse.Namespace) -> int:
    device = pick_device(args.device)
    with contextlib.redirect_stdout(sys.stderr):  # whatever a library prints
        quiet_transformers()
        load_config(args.target)
        tokenizer = load_tokenizer(args.target)
        target = load_target(args, device)
        from specdec_triton import NoDraft, SamplingParams, SpeculativeDecoder
        from specdec_triton.tune_skip import Skip, remember, search

        decoder = SpeculativeDecoder(target, NoDraft())
        chat = getattr(tokenizer, "chat_template", None)
        prompts = []
        for text in PROMPTS:
            if chat:
                rows = [{"role": "user", "content": text}]
                text = tokenizer.apply_chat_template(rows, tokenize=False, add_generation_prompt=True)
            prompts.append(list(tokenizer(text, add_special_tokens=not chat)["input_ids"]))
        outs = decoder.generate(prompts, SamplingParams(temperature=0, max_new_tokens=args.new_tokens))
        texts = [(prompt + list(out.token_ids), len(prompt)) for prompt, out in zip(prompts, outs, strict=True)]

        def step(found: Skip) -> None:
            note(
                f"without layers {sorted(found.layers)}: agreement {found.agreement:.0%}, expected speed {found.speed:.2f} x"
            )

        found = search(target, texts, step=step)
        if not found.layers:
            raise UsageError(f"no layer of {args.target!r} can be left out to advantage: it was not trained for that")
        remember(decoder.target, found)
    facts = {"skip": sorted(found.layers), "agreement": found.agreement, "expected_speed": found.speed, "k": found.k}
    write(
        json.dumps(facts) + "\n"
        if args.json
        else f"skip layers {facts['skip']}: agreement {found.agreement:.0%}; drafting {found.k} tokens a round is expected to be"
        f" {found.speed:.2f} x as fast as plain decoding\n"
    )
    return 0
