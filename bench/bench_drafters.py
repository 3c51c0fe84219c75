"""What does each source of drafts bring, and what does it cost? The same prompts through all of them, interleaved.

    python -m bench.bench_drafters --head trained/head          # SmolLM2 in bf16, 42 prompts, 96 new tokens
    python -m bench.bench_drafters --head trained/head --tasks chat qa math --per-task 3
    python -m bench.bench_drafters --table bench/results/drafters.jsonl --docs docs/drafters.md

Chains of 4 without the controller show what a drafter can do; ``adaptive`` ones are what a user gets. ``skip`` leaves out the layers that
``specdec-triton tune-skip`` found on this machine. Speeds include the prompt's pass; "drafting" is its share of the time of drafting,
verifying and accepting. Trees are exact up to rounding, so in bf16 a few of their texts part from the plain one at a near-tie.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from bench.bench_generate import encode
from bench.common import RESULTS, fill_in, median, prompts, provenance, quantile, read_rows, write_rows
from specdec_triton import (
    Cascade,
    DraftModel,
    DynamicTree,
    EagleDrafter,
    LayerSkip,
    NoDraft,
    PromptLookup,
    SamplingParams,
    SpeculativeDecoder,
    SuffixDrafter,
    optimize,
)
from specdec_triton.drafters import Drafter
from specdec_triton.drafters.cascade import MIN_MATCH
from specdec_triton.models import load_model, load_tokenizer, shipped_head

TALK = ("chat", "qa", "math")
_TREE, _NODES = DynamicTree(5, 6), 20


def providers(args: argparse.Namespace) -> dict[str, tuple[Callable[[], Drafter], int, bool]]:
    """By name: the drafter, the most drafts of a round, and whether the controller decides how many."""
    found: dict[str, tuple[Callable[[], Drafter], int, bool]] = {
        "plain": (NoDraft, 1, False),
        "ngram": (PromptLookup, 4, False),
        "suffix": (SuffixDrafter, 4, False),
        "suffix, adaptive": (SuffixDrafter, 8, True),
    }
    if args.skip is not None:
        found["skip"] = (lambda: LayerSkip(skip=args.skip), 4, False)
    if args.draft_model is not None:
        model = optimize(load_model(args.draft_model, dtype=getattr(torch, args.dtype)))
        found["draft model"] = (lambda: DraftModel(model), 4, False)
    head = args.head or shipped_head(args.model)
    if head is not None:
        found["eagle"] = (lambda: EagleDrafter(head), 4, False)
        found["eagle, tree"] = (lambda: EagleDrafter(head, tree=_TREE), _NODES, False)
        found["eagle, adaptive"] = (lambda: EagleDrafter(head), 4, True)
        found["cascade, adaptive"] = (lambda: Cascade.after_suffix(EagleDrafter(head), args.match), 4, True)
    return {name: x for name, x in found.items() if not args.only or name in args.only or name == "plain"}


def timed(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per prompt and drafter."""
    tokenizer = load_tokenizer(args.model)
    model = optimize(load_model(args.model, dtype=getattr(torch, args.dtype)))
    decoders = {
        name: SpeculativeDecoder(model, make(), num_draft_tokens=k, adaptive=adaptive, max_batch_size=1)
        for name, (make, k, adaptive) in providers(args).items()
    }
    params = SamplingParams(temperature=0, max_new_tokens=args.max_new_tokens)
    for decoder in decoders.values():
        decoder.warmup()
        decoder.generate([encode(tokenizer, "Hello!")], SamplingParams(temperature=0, max_new_tokens=8))
    origin = provenance() | {"bench": "drafters", "model": args.model, "dtype": args.dtype}
    origin |= {"max_new_tokens": args.max_new_tokens}
    rows = []
    for prompt in tqdm(prompts(args.tasks, args.per_task), file=sys.stderr, unit="prompt"):
        ids = encode(tokenizer, prompt["prompt"])
        texts = {}
        for name, decoder in decoders.items():
            start = time.perf_counter()
            out = decoder.generate([ids], params)[0]
            seconds, stats = time.perf_counter() - start, out.stats
            texts[name] = out.token_ids
            rows.append(
                origin
                | {
                    "provider": name,
                    "id": prompt["id"],
                    "task": prompt["task"],
                    "seconds": seconds,
                    "new_tokens": len(out.token_ids),
                    "target_passes": stats.target_passes,
                    "drafted_at": stats.drafted_at,
                    "accepted_at": stats.accepted_at,
                    "phase_seconds": {key: round(value, 5) for key, value in stats.phase_seconds.items()},
                    "identical": out.token_ids == texts["plain"],
                }
            )
        if args.out:
            write_rows(args.out, rows)
    return rows


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By drafter: over the talking tasks and over all."""
    plain = {row["id"]: row["new_tokens"] / row["seconds"] for row in rows if row["provider"] == "plain"}
    out = []
    for name in dict.fromkeys(row["provider"] for row in rows):
        mine = [row for row in rows if row["provider"] == name]
        talk = [row for row in mine if row["task"] in TALK]
        phases = [sum(row["phase_seconds"].get(p, 0.0) for row in mine) for p in ("draft", "verify", "accept")]

        def ratios(some: Iterable[dict[str, Any]]) -> list[float]:
            return [row["new_tokens"] / row["seconds"] / plain[row["id"]] for row in some]

        out.append(
            {
                "provider": name,
                "tokens_per_pass": {
                    label: sum(r["new_tokens"] for r in some) / sum(r["target_passes"] for r in some)
                    for label, some in (("talk", talk), ("all", mine))
                    if some
                },
                "over_plain": {label: median(ratios(some)) for label, some in (("talk", talk), ("all", mine)) if some},
                "over_plain_by_task": {
                    task: median(ratios(r for r in mine if r["task"] == task))
                    for task in dict.fromkeys(row["task"] for row in mine)
                },
                "over_plain_p20": quantile(ratios(mine), 0.2),
                "first": _share(mine, 0),
                "second": _share(mine, 1),
                "drafting": phases[0] / sum(phases) if sum(phases) else 0.0,
                "identical": sum(row["identical"] for row in mine),
                "prompts": len(mine),
            }
        )
    return out


def _share(rows: list[dict[str, Any]], place: int) -> float | None:
    """Of the drafts at a place, those that were accepted."""
    drafted, accepted = (
        sum(row[key][place] for row in rows if len(row[key]) > place) for key in ("drafted_at", "accepted_at")
    )
    return accepted / drafted if drafted else None


def table(rows: list[dict[str, Any]]) -> str:
    """The summary as a Markdown table."""
    lines = [
        "| drafter | tokens per pass: chat, qa, math | all tasks | speed over plain: chat, qa, math | all tasks | slowest task"
        " | first draft kept | second | drafting | same text |",
        "| --- " + "| ---: " * 9 + "|",
    ]

    def share(value: float | None) -> str:
        return "–" if value is None else f"{value:.0%}"

    def number(values: dict[str, float], label: str, mark: str = "") -> str:
        return f"{values[label]:.2f}{mark}" if label in values else "–"

    for x in summary(rows):
        passes, speed = x["tokens_per_pass"], x["over_plain"]
        lines.append(
            f"| {x['provider']} | {number(passes, 'talk')} | {number(passes, 'all')} | {number(speed, 'talk', ' ×')}"
            f" | {number(speed, 'all', ' ×')} | {min(x['over_plain_by_task'].values()):.2f} × | {share(x['first'])}"
            f" | {share(x['second'])} | {share(x['drafting'])} | {x['identical']} of {x['prompts']} |"
        )
    return "\n".join(lines)


def by_task(rows: list[dict[str, Any]], provider: str = "eagle") -> str:
    """Of one drafter: how many of the drafts at each place were accepted, by task, as a Markdown table."""
    lines = ["| task | 1st draft kept | 2nd | 3rd | 4th | tokens per pass |", "| --- " + "| ---: " * 5 + "|"]
    mine = [row for row in rows if row["provider"] == provider]
    tasks = dict.fromkeys(row["task"] for row in mine)
    for label, members in [*((task, {task}) for task in tasks), ("all", {*tasks})]:
        some = [row for row in mine if row["task"] in members]
        shares = ["–" if (x := _share(some, place)) is None else f"{x:.0%}" for place in range(4)]
        passes = sum(row["new_tokens"] for row in some) / sum(row["target_passes"] for row in some)
        lines.append(f"| {label} | {' | '.join(shares)} | {passes:.2f} |")
    return "\n".join(lines)


def write_table(docs: Path, rows: list[dict[str, Any]]) -> None:
    row = rows[0]
    caption = (
        f"Greedy, {row['dtype']}, {row['max_new_tokens']} new tokens, {len({r['id'] for r in rows})} prompts; speeds are medians of paired"
        f" ratios and include the prompt's pass. {row['device']}, {row['threads']} threads, torch {row['torch']}."
    )
    fill_in(docs, "drafters table", f"{table(rows)}\n\n{caption}")


def write_card(card: Path, rows: list[dict[str, Any]]) -> None:
    """What the head's own card says of it."""
    row = rows[0]
    caption = (
        f"Chains of 4 drafts, greedy, {row['dtype']}, {row['max_new_tokens']} new tokens, {len({r['id'] for r in rows})} prompts that it was not"
        " trained on (`bench/prompts.jsonl`). Shares are of all drafts at that place; one is kept only where those before it were."
    )
    fill_in(card, "acceptance table", f"{by_task(rows)}\n\n{caption}")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32", "float16"))
    parser.add_argument("--head", help="an EAGLE head (default: the one that comes with the package, if any)")
    parser.add_argument("--draft-model")
    parser.add_argument("--skip", type=int, nargs="*", help="layers to leave out")
    parser.add_argument(
        "--match", type=int, default=MIN_MATCH, help="tokens that must repeat before the cascade's head is not asked"
    )
    parser.add_argument("--only", nargs="*", help="drafters by name, besides plain")
    parser.add_argument("--tasks", nargs="*")
    parser.add_argument("--per-task", type=int)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--table", type=Path, help="print the table of an existing file and stop")
    parser.add_argument("--docs", type=Path, help="with --table: write it into this file, between its markers")
    parser.add_argument(
        "--card", type=Path, help="with --table: write the head's acceptance into this file, between its markers"
    )
    parser.add_argument("--out", type=Path, help=f"rows as JSON lines, such as {RESULTS.name}/drafters.jsonl")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    rows = timed(args) if args.table is None else read_rows(args.table)
    print(table(rows))
    if args.table and args.docs:
        write_table(args.docs, rows)
    if args.table and args.card:
        write_card(args.card, rows)


if __name__ == "__main__":
    main()
