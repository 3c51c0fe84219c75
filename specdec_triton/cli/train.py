"""``specdec-triton train``: a drafter for a model, trained on what the model itself writes."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec_triton.cli.common import PROGRAM, UsageError, integer, note, number, write
from specdec_triton.cli.loading import device_name, pick_device, quiet_transformers
from specdec_triton.errors import ModelNotFoundError, UnsupportedModelError
from specdec_triton.models import load_config, load_model, load_tokenizer

if TYPE_CHECKING:
    import torch

    from specdec_triton.drafters.heads.eagle_head import EagleHead
    from specdec_triton.training.features import Features
    from specdec_triton.training.student import Student

NAME = "train"
HELP = "train a drafter for a model"
DESCRIPTION = """Train a drafter for a model on what the model itself writes: it makes up both sides of chats from its own template, so no data
is needed. Everything is kept in the folder's work/, and a run that was stopped goes on where it was; delete work/ when it is done."""
KINDS = ("eagle3", "medusa", "draft")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = f"{PROGRAM} train --out DIR [options]"
    parser.add_argument(
        "--target", metavar="MODEL", default="smollm2", help="the model to draft for (default: smollm2)"
    )
    parser.add_argument(
        "--kind",
        choices=KINDS,
        default="eagle3",
        help="what is trained: a head (default: eagle3), or a draft model of the target's own layers",
    )
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="where the drafter goes")
    parser.add_argument(
        "--tokens", metavar="N", type=integer(1000), default=1_000_000, help="to learn from (default: 1,000,000)"
    )
    parser.add_argument(
        "--text", metavar="FILE", type=Path, help="learn from this text, a document a line, not from chats"
    )
    parser.add_argument(
        "--start", metavar="DIR", type=Path, help="eagle3: begin with this head, not with the target's last layer"
    )
    parser.add_argument(
        "--seed",
        metavar="N",
        type=integer(0, 2**31 - 1),
        default=0,
        help="of the chats: another one gives others (default: 0)",
    )
    parser.add_argument("--epochs", metavar="N", type=integer(1), default=2, help="passes over them (default: 2)")
    parser.add_argument(
        "--draft-vocab",
        metavar="N",
        type=integer(16),
        default=8192,
        help="eagle3: ids that are drafted (default: 8192)",
    )
    parser.add_argument(
        "--steps",
        metavar="N",
        type=integer(1, 8),
        default=3,
        help="eagle3: of feeding on its own drafts; medusa: heads (default: 3)",
    )
    parser.add_argument("--layers", metavar="N", type=integer(1), default=4, help="of a draft model (default: 4)")
    parser.add_argument("--rate", metavar="X", type=number(1e-7), default=8e-4, help="learning rate (default: 8e-4)")
    parser.add_argument(
        "--chats", metavar="N", type=integer(1, 512), default=256, help="written at once (default: 256)"
    )
    parser.add_argument(
        "--max-hours", metavar="X", type=number(0.0), help="stop after so long; the same command goes on"
    )
    parser.add_argument(
        "--device",
        metavar="auto|cpu|cuda",
        type=device_name,
        default="auto",
        help="auto: the GPU if there is one (default)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")


def run(args: argparse.Namespace) -> int:
    until = math.inf if args.max_hours is None else time.monotonic() + 3600 * args.max_hours
    if args.text is not None and not args.text.is_file():
        raise UsageError(f"--text: there is no file {str(args.text)!r}")
    with contextlib.redirect_stdout(sys.stderr):  # whatever a library prints
        quiet_transformers()
        load_config(args.target)
        result = _train(args, until)
    if args.json:
        write(json.dumps(result) + "\n")
    elif result["finished"]:
        write(f"the drafter is in {args.out}; {_judged(result['held_out'])}\n")
    else:
        write("stopped; the same command goes on from here\n")
    return 0


def _judged(held_out: dict[str, Any]) -> str:
    return (
        f"held-out: agreement by step {held_out['agreement']}, {held_out['tokens_per_pass']} tokens a pass as a chain"
    )


def _train(args: argparse.Namespace, until: float) -> dict[str, Any]:
    import torch
    from tqdm import tqdm

    from specdec_triton.training.features import Features, frequent_ids
    from specdec_triton.training.trainer import Schedule, Trainer

    work = args.out / "work"
    tokenizer = load_tokenizer(args.target)
    model = load_model(args.target, dtype=torch.float32, device=pick_device(args.device))
    layers = model.config.get_text_config().num_hidden_layers
    if args.kind == "draft" and args.layers > layers:
        raise UsageError(f"--layers {args.layers}: {args.target!r} has {layers}")
    taps: tuple[int, ...] = (
        (2, layers // 2, layers - 3) if layers >= 6 else (1, max(layers // 2, 1), max(layers - 1, 1))
    )
    start, start_ids = None, None
    if args.start is not None:
        start, start_ids, taps = _start(args, model)
    features = Features(work / "features", taps)
    tokens, enough = _collect(args, features, model, tokenizer, until)
    if not enough:
        return {"finished": False, "stage": "chats", "tokens": tokens}

    ids = torch.arange(model.get_output_embeddings().weight.shape[0])
    if start_ids is not None:
        ids = start_ids
    elif args.kind == "eagle3":  # the others draft with the target's own last product, over all ids
        ids = frequent_ids(features.learnt_tokens(), args.draft_vocab, tokenizer.all_special_ids, len(ids))
    student = _student(args, model, tokenizer, ids, taps, start)
    steps = 1 if args.kind == "draft" else args.steps
    # The first step comes first in a new head; one to begin with has it, and other kinds are not fed on their own outputs.
    single = Schedule.single if args.kind == "eagle3" and start is None else 0.0
    schedule = Schedule(epochs=args.epochs, steps=steps, rate=args.rate, single=single)
    trainer = Trainer(student, features, schedule, work / "state.pt")
    with tqdm(total=trainer.total, initial=trainer.done, desc="training", unit=" shards", file=sys.stderr) as bar:

        def progress(done: int, facts: dict[str, Any]) -> None:
            bar.update(done - bar.n)
            bar.set_postfix_str(f"loss {facts['loss']:.3f}, agreement {facts['agreement']}")
            if "held_out" in facts:
                note(_judged(facts["held_out"]))
            student.save(args.out)

        finished = trainer.run(until=until, progress=progress)
    held_out = trainer.judge()
    return {"finished": finished, "stage": "training", "held_out": held_out, "out": str(args.out), "log": trainer.log}


def _start(args: argparse.Namespace, model: Any) -> tuple[EagleHead, torch.Tensor, tuple[int, ...]]:
    from specdec_triton.training.eagle3 import read_start

    if args.kind != "eagle3":
        raise UsageError(f"--start is for --kind eagle3, not {args.kind}")
    try:
        return read_start(args.start, model)
    except (ModelNotFoundError, UnsupportedModelError) as error:
        raise UsageError(f"--start: {error}") from error


def _student(
    args: argparse.Namespace,
    model: Any,
    tokenizer: Any,
    ids: torch.Tensor,
    taps: tuple[int, ...],
    start: EagleHead | None,
) -> Student:
    from specdec_triton.training.draft import DraftStudent
    from specdec_triton.training.eagle3 import Eagle3Student
    from specdec_triton.training.medusa import MedusaStudent

    try:
        if args.kind == "draft":
            return DraftStudent(model, ids, tokenizer, args.layers)
        return (
            MedusaStudent(model, ids, args.steps) if args.kind == "medusa" else Eagle3Student(model, ids, taps, start)
        )
    except UnsupportedModelError as error:
        raise UsageError(str(error)) from error


def _collect(
    args: argparse.Namespace, features: Features, model: Any, tokenizer: Any, until: float
) -> tuple[int, bool]:
    """Features of chats, or of the user's own text; how many tokens there are to learn, and whether these are all."""
    from tqdm import tqdm

    from specdec_triton.training.chats import ChatWriter
    from specdec_triton.training.features import TextReader, fill

    done, shards = sum(len(tokens) for tokens in features.learnt_tokens()), len(features.shards)
    if args.text is not None:
        if shards:
            return done, True
        texts = args.text.read_text().splitlines()
        examples = TextReader(model, tokenizer, features.taps).examples(texts)
        until, wanted = math.inf, math.inf
    elif done >= args.tokens:
        return done, True
    else:
        try:
            writer = ChatWriter(model, tokenizer, features.taps, batch=args.chats)
            examples = writer.examples((args.seed << 16) + shards)
        except ValueError as error:
            raise UsageError(str(error)) from error
        wanted = args.tokens
    with tqdm(total=args.tokens, initial=done, desc="what the target says", unit=" tokens", file=sys.stderr) as bar:
        for more in fill(features, examples):
            done += more
            bar.update(more)
            if done >= wanted or time.monotonic() >= until:
                break
    return done, done >= wanted or args.text is not None
