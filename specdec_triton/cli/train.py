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
from specdec_triton.cli.loading import quiet_transformers
from specdec_triton.models import load_config, load_model, load_tokenizer

if TYPE_CHECKING:
    from specdec_triton.training.chats import ChatFile

NAME = "train"
HELP = "train a drafter for a model"
DESCRIPTION = """Train a drafter for a model on what the model itself writes: it makes up both sides of chats from its own template, so no data
is needed. Everything is kept in the folder's work/, and a run that was stopped goes on where it was; delete work/ when it is done."""
KINDS = ("eagle3",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = f"{PROGRAM} train --out DIR [options]"
    parser.add_argument(
        "--target", metavar="MODEL", default="smollm2", help="the model to draft for (default: smollm2)"
    )
    parser.add_argument("--kind", choices=KINDS, default="eagle3", help="what is trained (default: eagle3)")
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="where the drafter goes")
    parser.add_argument(
        "--tokens", metavar="N", type=integer(1000), default=1_000_000, help="to learn from (default: 1,000,000)"
    )
    parser.add_argument(
        "--text", metavar="FILE", type=Path, help="learn from this text, a document a line, not from chats"
    )
    parser.add_argument("--epochs", metavar="N", type=integer(1), default=2, help="passes over them (default: 2)")
    parser.add_argument(
        "--draft-vocab", metavar="N", type=integer(16), default=8192, help="ids that are drafted (default: 8192)"
    )
    parser.add_argument(
        "--steps", metavar="N", type=integer(1, 8), default=3, help="of feeding on its own drafts (default: 3)"
    )
    parser.add_argument("--rate", metavar="X", type=number(1e-7), default=4e-4, help="learning rate (default: 4e-4)")
    parser.add_argument("--chats", metavar="N", type=integer(1, 512), default=64, help="written at once (default: 64)")
    parser.add_argument(
        "--max-hours", metavar="X", type=number(0.0), help="stop after so long; the same command goes on"
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
        write(f"the drafter is in {args.out}; held-out agreement by step: {result['held_out']}\n")
    else:
        write("stopped; the same command goes on from here\n")
    return 0


def _train(args: argparse.Namespace, until: float) -> dict[str, Any]:
    import torch
    from tqdm import tqdm

    from specdec_triton.training.chats import ChatFile
    from specdec_triton.training.eagle3 import Eagle3Student, save_eagle3
    from specdec_triton.training.features import Features, frequent_ids
    from specdec_triton.training.trainer import Schedule, Trainer

    work = args.out / "work"
    work.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer(args.target)
    file = ChatFile(work / "chats.jsonl")
    if not _write(args, file, tokenizer, until):
        return {"finished": False, "stage": "chats", "tokens": file.tokens()}

    model = load_model(args.target, dtype=torch.float32)
    layers = model.config.get_text_config().num_hidden_layers
    taps = (2, layers // 2, layers - 3) if layers >= 6 else (1, max(layers // 2, 1), max(layers - 1, 1))
    features = Features(work / "features", taps)
    from specdec_triton import optimize

    with tqdm(desc="the target's hidden states", unit=" chats", file=sys.stderr) as bar:
        reader = optimize(load_model(args.target, dtype=torch.bfloat16))
        features.collect(reader, file, progress=lambda done: bar.update(done - bar.n))
        del reader
    vocab_size = model.get_output_embeddings().weight.shape[0]
    ids = frequent_ids(file, min(args.draft_vocab, vocab_size), tokenizer.all_special_ids, vocab_size)
    student = Eagle3Student(model, ids, taps)
    schedule = Schedule(epochs=args.epochs, steps=args.steps, rate=args.rate)
    trainer = Trainer(student, features, schedule, work / "state.pt")
    with tqdm(total=trainer.total, initial=trainer.done, desc="training", unit=" shards", file=sys.stderr) as bar:

        def progress(done: int, facts: dict[str, Any]) -> None:
            bar.update(done - bar.n)
            bar.set_postfix_str(f"loss {facts['loss']:.3f}, agreement {facts['agreement']}")
            if "held_out" in facts:
                note(f"held-out agreement by step: {facts['held_out']}")
            save_eagle3(student, args.out)

        finished = trainer.run(until=until, progress=progress)
    held_out = trainer.judge()
    return {"finished": finished, "stage": "training", "held_out": held_out, "out": str(args.out), "log": trainer.log}


def _write(args: argparse.Namespace, file: ChatFile, tokenizer: Any, until: float) -> bool:
    """Chats, or the user's own text, in the file; whether there are enough."""
    import torch
    from tqdm import tqdm

    from specdec_triton import optimize
    from specdec_triton.training.chats import ChatWriter, text_chats, write_chats

    if args.text is not None:
        if file.batches == 0:
            file.append(list(text_chats(args.text.read_text().splitlines(), tokenizer)))
        return True
    if file.tokens() >= args.tokens:
        return True
    model = optimize(load_model(args.target, dtype=torch.bfloat16))
    try:
        writer = ChatWriter(model, tokenizer, batch=args.chats)
    except ValueError as error:
        raise UsageError(str(error)) from error
    with tqdm(total=args.tokens, desc="the target writes chats", unit=" tokens", file=sys.stderr) as bar:
        return write_chats(file, writer, args.tokens, until=until, progress=lambda done: bar.update(done - bar.n))
