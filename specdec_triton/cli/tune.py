"""``specdec-triton tune``: what passes cost on this machine, and how many drafts that makes worth while."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from typing import TYPE_CHECKING, Any

from specdec_triton.cli.common import PROGRAM, UsageError, integer, write
from specdec_triton.cli.loading import (
    add_model_arguments,
    check_models,
    load_drafter,
    load_target,
    pick_device,
    quiet_transformers,
)

if TYPE_CHECKING:
    from specdec_triton.engine.costs import CostModel, Curve

NAME = "tune"
HELP = "measure what passes cost on this machine"
DESCRIPTION = """Measure what passes of these models cost on this machine, and keep it for later runs, which choose by it how many
tokens to draft. They measure by themselves too, if nothing was kept; tune measures afresh."""
ACCEPTANCE = (0.3, 0.5, 0.7, 0.9)
_CERTAIN = 1e6  # judged drafts: no prior is left


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = f"{PROGRAM} tune [options]"
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the tables")
    parser.add_argument(
        "--max-batch-size",
        metavar="N",
        type=integer(1),
        default=8,
        help="measure batches of up to N requests (default: 8)",
    )
    add_model_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.draft == "none" or args.num_draft_tokens == 0:
        raise UsageError("tune needs drafts to choose from: a --draft other than none, and -k of at least 1")
    device = pick_device(args.device)
    with contextlib.redirect_stdout(sys.stderr):  # whatever a library prints
        quiet_transformers()
        tokenizers = check_models(args)
        target = load_target(args, device)
        drafter = load_drafter(args, device, target, tokenizers)
        costs, packed = _measure(target, drafter, args)
    choices = [
        {"batch_size": n, "acceptance": rate, "k": choose(costs.curve(n), n, args.num_draft_tokens, rate, packed)}
        for n in sorted({n for n, _ in costs.target})
        for rate in ACCEPTANCE
    ]
    if args.json:
        settings = {name: getattr(args, name) for name in ("target", "draft", "dtype", "max_batch_size")}
        settings |= {"k": args.num_draft_tokens, "device": device}
        write(json.dumps(as_json(costs) | {"choices": choices} | settings) + "\n")
    else:
        write(as_text(costs, choices))
    return 0


def _measure(target: Any, drafter: Any, args: argparse.Namespace) -> tuple[CostModel, bool]:
    """The costs of the batches asked for (the file may hold larger ones), and whether passes are packed."""
    from specdec_triton.engine import SpeculativeDecoder
    from specdec_triton.engine.costs import CostModel

    try:
        decoder = SpeculativeDecoder(
            target, drafter, num_draft_tokens=args.num_draft_tokens, max_batch_size=args.max_batch_size
        )
    except ValueError as error:  # the drafter does not fit
        raise UsageError(str(error)) from error
    measured = decoder.tune()
    asked = {(n, d): seconds for (n, d), seconds in measured.target.items() if n <= args.max_batch_size}
    draft = {n: seconds for n, seconds in (measured.draft or {}).items() if n <= args.max_batch_size}
    return CostModel(asked, draft, device=decoder.target.device), not decoder.target.fixed_shapes


def choose(curve: Curve, n: int, max_k: int, rate: float, packed: bool) -> list[int]:
    """What the controller would have n requests draft whose drafts are accepted at ``rate``."""
    import torch

    from specdec_triton.engine.controller import Controller

    device = curve.target.device
    controller = Controller(n, max_k, device, packed)
    controller.reached.fill_(_CERTAIN)
    controller.kept.fill_(_CERTAIN * rate)
    limits = torch.full((n,), max_k, dtype=torch.int32, device=device)
    return controller.plan(n, limits, torch.zeros(n, dtype=torch.bool, device=device), curve).tolist()


def as_json(costs: CostModel) -> dict[str, Any]:
    return {
        "passes": [{"batch_size": n, "drafts": d, "seconds": seconds} for (n, d), seconds in costs.target.items()],
        "drafting_passes": [{"batch_size": n, "seconds": seconds} for n, seconds in (costs.draft or {}).items()],
    }


def as_text(costs: CostModel, choices: list[dict[str, Any]]) -> str:
    """Two tables: milliseconds by batch and drafts of all its requests, and K by batch and acceptance."""
    counts = sorted({d for _, d in costs.target})
    passes = [["batch", *(f"{d} draft{'s' * (d != 1)}" for d in counts), *(["drafting"] if costs.draft else [])]]
    chosen = [["batch", *(f"{rate:.0%}" for rate in ACCEPTANCE)]]
    for n in sorted({n for n, _ in costs.target}):
        times = [costs.target.get((n, d)) for d in counts] + ([costs.draft.get(n)] if costs.draft else [])
        passes.append([str(n), *("-" if time is None else f"{1000 * time:.1f}" for time in times)])
        chosen.append([str(n), *(_spread(choice["k"]) for choice in choices if choice["batch_size"] == n)])
    return f"ms a pass, by drafts of the whole batch\n{_table(passes)}\ndrafts of a request, by acceptance\n{_table(chosen)}"


def _spread(numbers: list[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low}-{high}"


def _table(rows: list[list[str]]) -> str:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return "".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) + "\n" for row in rows)
