"""What do many requests at once cost, and does drafting still pay? Plain, fixed K and adaptive K, interleaved in one run.

    python -m bench.bench_batching                        # SmolLM2 in bf16, batches of 1 to 32, n-gram drafts
    python -m bench.bench_batching --batch-sizes 1 8 --rounds 2
    python -m bench.bench_batching --tasks                # batch 1, task by task: is any slower than plain?
    python -m bench.bench_batching --plot bench/results/batching.jsonl

Each decoder has as many slots as the batch size and gets twice as many requests at once (at least 6), mixed from all tasks, each
of exactly ``--max-new-tokens`` tokens. Speeds include the prompts. Latencies are of a request alone: "first" from when it gets a
slot to its first token, "token" from one of its tokens to the next, those of one round counted as equally far apart.
A round runs all three decoders on the same requests; ratios are paired by round, with 95 % bootstrap intervals of the median.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from bench.bench_generate import encode
from bench.common import RESULTS, fill_in, median, prompts, provenance, quantile, read_rows, write_rows
from specdec_triton import DraftModel, NoDraft, PromptLookup, SamplingParams, SpeculativeDecoder, optimize
from specdec_triton.models import load_model, load_tokenizer

PROVIDERS = ("plain", "fixed", "adaptive")
REQUESTS = 2  # for each slot


def run(decoder: SpeculativeDecoder, ids: list[list[int]], new_tokens: int) -> dict[str, Any]:
    """Decode all prompts; speeds and latencies."""
    before = decoder.stats
    params = SamplingParams(temperature=0, max_new_tokens=new_tokens, ignore_eos=True)
    handles = [decoder.submit(prompt, params) for prompt in ids]
    waiting, started, last = list(handles), {}, {}
    first, gaps = [], []
    start = now = time.perf_counter()
    work = True
    while work:
        known = {handle: len(handle.token_ids) for handle in handles if handle.output is None}
        work = decoder.step()
        began, now = now, time.perf_counter()
        for handle in waiting[:]:
            if handle.slot is not None or handle.output is not None:
                started[handle] = began
                waiting.remove(handle)
        for handle, n in known.items():
            new = len(handle.token_ids) - n
            if new and n == 0:
                first.append(now - started[handle])
            elif new:
                gaps += [(now - last[handle]) / new] * new
            if new:
                last[handle] = now
    seconds = now - start
    after = decoder.stats
    busy = sum(after.phase_seconds.values()) - sum(before.phase_seconds.values())
    drafted, accepted = after.drafted - before.drafted, after.accepted - before.accepted
    return {
        "tokens_per_second": sum(len(handle.token_ids) for handle in handles) / seconds,
        "first_ms": 1e3 * median(first),
        "token_ms_p50": 1e3 * quantile(gaps, 0.5),
        "token_ms_p95": 1e3 * quantile(gaps, 0.95),
        "bookkeeping": 1 - busy / (after.seconds - before.seconds),
        "drafted": drafted,
        "accepted": accepted,
        "target_passes": after.target_passes - before.target_passes,
        "texts": [handle.token_ids for handle in handles],
    }


def make(args: argparse.Namespace, slots: int, target: Any, draft: Any) -> dict[str, SpeculativeDecoder]:
    """The decoders, warmed up; they share the target."""
    decoders = {}
    for name in PROVIDERS:
        drafter = NoDraft() if name == "plain" else PromptLookup() if draft is None else DraftModel(draft)
        decoders[name] = SpeculativeDecoder(
            target, drafter, num_draft_tokens=args.k, max_batch_size=slots, adaptive=name == "adaptive"
        )
        target = decoders[name].target
        decoders[name].warmup()
    return decoders


def compare(decoders: dict[str, SpeculativeDecoder], ids: list[list[int]], new_tokens: int) -> list[dict[str, Any]]:
    """One row a provider; in a random order, since the first of them meets other caches."""
    names = random.sample(PROVIDERS, len(PROVIDERS))
    results = {name: run(decoders[name], ids, new_tokens) for name in names}
    texts = {name: results[name].pop("texts") for name in PROVIDERS}
    return [{"provider": n, "identical": texts[n] == texts["plain"]} | results[n] for n in PROVIDERS]


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    tokenizer = load_tokenizer(args.model)
    target = optimize(load_model(args.model, dtype=getattr(torch, args.dtype)))
    draft = None if args.draft == "ngram" else optimize(load_model(args.draft, dtype=getattr(torch, args.dtype)))
    origin = provenance() | {"bench": "tasks" if args.tasks else "batching", "model": args.model, "dtype": args.dtype}
    origin |= {"draft": args.draft, "k": args.k, "max_new_tokens": args.max_new_tokens}
    asked = [(prompt, encode(tokenizer, prompt["prompt"])) for prompt in prompts()]
    random.seed(0)
    rows = []

    def add(more: list[dict[str, Any]]) -> None:
        rows.extend(origin | row for row in more)
        if args.out:
            write_rows(args.out, rows)

    for slots in [1] if args.tasks else args.batch_sizes:
        decoders = make(args, slots, target, draft)
        target = decoders["plain"].target
        compare(decoders, [ids for _, ids in asked[:slots]], 8)  # not counted
        if args.tasks:
            for prompt, ids in tqdm(asked * args.rounds, file=sys.stderr, unit="prompt"):
                group = {"batch_size": 1, "task": prompt["task"], "round": prompt["id"]}
                add([group | row for row in compare(decoders, [ids], args.max_new_tokens)])
        else:
            for i in tqdm(range(args.rounds), file=sys.stderr, desc=f"batch {slots}", unit="round"):
                chosen = random.choices(asked, k=max(REQUESTS * slots, 6))
                group = {"batch_size": slots, "task": "mixed", "round": i}
                add([group | row for row in compare(decoders, [ids for _, ids in chosen], args.max_new_tokens)])
    return rows


def interval(values: list[float], draws: int = 2000) -> tuple[float, float]:
    """The 95 % bootstrap interval of the median."""
    rng = random.Random(0)
    medians = sorted(median(rng.choices(values, k=len(values))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws) - 1]


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By batch size and task: medians of each provider, and paired ratios to plain."""
    out = []
    for group in dict.fromkeys((row["batch_size"], row["task"]) for row in rows):
        chosen = [row for row in rows if (row["batch_size"], row["task"]) == group]
        by = {name: [row for row in chosen if row["provider"] == name] for name in PROVIDERS}
        plain = [row["tokens_per_second"] for row in by["plain"]]
        for name in PROVIDERS:
            ratios = [row["tokens_per_second"] / p for row, p in zip(by[name], plain, strict=True)]
            drafted = sum(row["drafted"] for row in by[name])
            out.append(
                {"batch_size": group[0], "task": group[1], "provider": name, "rounds": len(by[name])}
                | {
                    key: median(row[key] for row in by[name])
                    for key in ("tokens_per_second", "first_ms", "token_ms_p50", "token_ms_p95", "bookkeeping")
                }
                | {
                    "vs_plain": median(ratios),
                    "vs_plain_95": interval(ratios),
                    "acceptance_rate": sum(row["accepted"] for row in by[name]) / drafted if drafted else None,
                    "drafts_per_pass": drafted / sum(row["target_passes"] for row in by[name]),
                    "identical": sum(row["identical"] for row in by[name]),
                }
            )
    return out


def table(rows: list[dict[str, Any]]) -> str:
    """The summary as a Markdown table."""
    lines = [
        "| batch | task | decoder | tokens/s | against plain (95 %) | ms to first token | ms a token, p50 / p95"
        " | acceptance | bookkeeping |",
        "| ---: | --- | --- " + "| ---: " * 6 + "|",
    ]
    for group in summary(rows):
        rate, (low, high) = group["acceptance_rate"], group["vs_plain_95"]
        lines.append(
            f"| {group['batch_size']} | {group['task']} | {group['provider']} | {group['tokens_per_second']:.0f}"
            f" | {group['vs_plain']:.2f} × ({low:.2f} – {high:.2f}) | {group['first_ms']:.0f}"
            f" | {group['token_ms_p50']:.1f} / {group['token_ms_p95']:.1f} | {'–' if rate is None else format(rate, '.0%')}"
            f" | {group['bookkeeping']:.1%} |"
        )
    return "\n".join(lines)


def compact(rows: list[dict[str, Any]]) -> str:
    """The README's table: a line for each batch size or task."""
    lines = [
        "| batch | task | plain, tokens/s | fixed K | adaptive K (95 %) | ms a token, plain | adaptive | acceptance |",
        "| ---: | --- " + "| ---: " * 6 + "|",
    ]
    groups = {(group["batch_size"], group["task"], group["provider"]): group for group in summary(rows)}
    for batch, task in dict.fromkeys(key[:2] for key in groups):
        plain, fixed, adaptive = (groups[batch, task, name] for name in PROVIDERS)
        rate, (low, high) = adaptive["acceptance_rate"], adaptive["vs_plain_95"]
        lines.append(
            f"| {batch} | {task} | {plain['tokens_per_second']:.0f} | {fixed['vs_plain']:.2f} ×"
            f" | {adaptive['vs_plain']:.2f} × ({low:.2f} – {high:.2f}) | {plain['token_ms_p50']:.0f}"
            f" | {adaptive['token_ms_p50']:.0f} | {'–' if rate is None else format(rate, '.0%')} |"
        )
    return "\n".join(lines)


def write_tables(readme: Path, folder: Path) -> None:
    """Put both tables, and where they were measured, between the README's markers."""
    mixed, tasks = (read_rows(folder / name) for name in ("batching.jsonl", "batching_tasks.jsonl"))
    row = mixed[0]
    table_rows = compact(mixed).splitlines() + compact(tasks).splitlines()[2:]
    caption = (
        f"Medians, speeds against plain decoding paired by round; greedy, {row['dtype']}, {row['max_new_tokens']} new tokens,"
        f" {row['draft']} drafts, K = {row['k']}. {row['device']}, {row['threads']} threads, torch {row['torch']}."
    )
    fill_in(readme, "batching table", "\n".join(table_rows) + f"\n\n{caption}")


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Throughput and time between tokens against batch size."""
    import matplotlib.pyplot as plt

    groups = summary(rows)
    figure, axes = plt.subplots(1, 2, figsize=(10, 4))
    for name in PROVIDERS:
        chosen = [group for group in groups if group["provider"] == name]
        sizes = [group["batch_size"] for group in chosen]
        axes[0].plot(sizes, [group["tokens_per_second"] for group in chosen], marker="o", label=name)
        (line,) = axes[1].plot(sizes, [group["token_ms_p50"] for group in chosen], marker="o", label=f"{name}, median")
        late = [group["token_ms_p95"] for group in chosen]
        axes[1].plot(sizes, late, linestyle="--", color=line.get_color(), label=f"{name}, 95 %")
    for axis, label in zip(axes, ("tokens per second, all requests", "ms between a request's tokens"), strict=True):
        axis.set(xscale="log", xlabel="batch size", ylabel=label, ylim=(0, None))
        axis.set_xticks(sorted({group["batch_size"] for group in groups}))
        axis.get_xaxis().set_major_formatter("{x:.0f}")
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.legend()
    row = rows[0]
    figure.suptitle(
        f"{row['model']}, {row['dtype']}, {row['draft']} drafts, K = {row['k']}; {row['device']}", fontsize=10
    )
    figure.tight_layout()
    figure.savefig(path)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--draft", default="ngram", help="ngram, or a draft model")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32", "float16"))
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--tasks", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("-k", type=int, default=4, help="most drafts a round")
    parser.add_argument(
        "--plot", type=Path, metavar="ROWS", help="draw the rows of an earlier run, beside them, and stop"
    )
    parser.add_argument("--readme", type=Path, help="write the tables of the committed rows into this file and stop")
    parser.add_argument("--out", type=Path, help=f"rows as JSON lines, such as {RESULTS.name}/batching.jsonl")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    if args.plot:
        plot(read_rows(args.plot), args.plot.with_suffix(".svg"))
        return
    if args.readme:
        write_tables(args.readme, RESULTS)
        return
    rows = measure(args)
    print(table(rows))
    for group in summary(rows):
        print(json.dumps(group), file=sys.stderr)


if __name__ == "__main__":
    main()
