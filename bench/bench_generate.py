"""How fast is greedy text, and is it the same text? transformers and this package, interleaved in one run.

    python -m bench.bench_generate                          # SmolLM2 in bf16, 42 prompts, 128 new tokens
    python -m bench.bench_generate --per-task 2 --max-new-tokens 64
    python -m bench.bench_generate --memory                 # peak memory of each provider, in a process of its own

Providers: transformers plain; transformers prompt lookup (``--lookup`` drafts a round); ours plain (NoDraft); ours with PromptLookup;
for a model whose head comes with the package, ours with that head behind a SuffixDrafter, the default. Each prompt runs through all of
them before the next begins. Speeds include the prompt's pass. "identical" is against the plain decoding of the same package. One short generation of each provider comes first and is not counted.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from bench.common import RESULTS, fill_in, median, prompts, provenance, quantile, read_rows, write_rows
from specdec_triton import (
    Cascade,
    EagleDrafter,
    NoDraft,
    PromptLookup,
    SamplingParams,
    SpeculativeDecoder,
    optimize,
)
from specdec_triton.models import load_model, load_tokenizer, shipped_head

PROVIDERS = ("transformers", "transformers-lookup", "specdec-plain", "specdec-ngram", "specdec-cascade")
DRAFTING = ("specdec-ngram", "specdec-cascade")
COPYING_TASKS = ("code_edit", "rag", "summarize")


class Transformers:
    """``model.generate``, greedy; with ``lookup``, its prompt lookup decoding."""

    def __init__(self, model: Any, lookup: int | None) -> None:
        self.model = model
        self.options = {} if lookup is None else {"prompt_lookup_num_tokens": lookup}

    def __call__(self, ids: list[int], new_tokens: int) -> dict[str, Any]:
        inputs = torch.tensor([ids])
        out = self.model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            do_sample=False,
            max_new_tokens=new_tokens,
            **self.options,
        )
        return {"token_ids": out[0, len(ids) :].tolist()}


class Ours:
    """A decoder over the optimized model."""

    def __init__(self, decoder: SpeculativeDecoder) -> None:
        self.decoder = decoder
        decoder.warmup()

    def __call__(self, ids: list[int], new_tokens: int) -> dict[str, Any]:
        params = SamplingParams(temperature=0, max_new_tokens=new_tokens)
        out = self.decoder.generate([ids], params)[0]
        stats = out.stats
        return {
            "token_ids": out.token_ids,
            "drafted": stats.drafted,
            "accepted": stats.accepted,
            "target_passes": stats.target_passes,
        }


def make(name: str, args: argparse.Namespace, loaded: dict[str, Any]) -> Callable[[list[int], int], dict[str, Any]]:
    """A provider; models are shared between the two providers of a package."""
    dtype = getattr(torch, args.dtype)
    package = name.split("-")[0]
    if package not in loaded:
        loaded[package] = load_model(args.model, dtype=dtype)
        if package == "specdec":
            optimize(loaded[package])
    model = loaded[package]
    if package == "transformers":
        return Transformers(model, args.lookup if name.endswith("lookup") else None)
    drafters = {
        "plain": NoDraft,
        "ngram": PromptLookup,
        "cascade": lambda: Cascade.after_suffix(EagleDrafter(args.model)),
    }
    return Ours(SpeculativeDecoder(model, drafters[name.split("-")[1]](), num_draft_tokens=args.k))


def providers(args: argparse.Namespace) -> list[str]:
    """Those that there are for the model."""
    return [name for name in PROVIDERS if name != "specdec-cascade" or shipped_head(args.model) is not None]


def encode(tokenizer: Any, text: str) -> list[int]:
    chat = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]


def timed(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per prompt and provider."""
    tokenizer, loaded = load_tokenizer(args.model), {}
    made = {name: make(name, args, loaded) for name in providers(args)}
    warm = encode(tokenizer, "Hello!")
    for provider in made.values():
        provider(warm, 8)
    origin = provenance() | {"bench": "generate", "model": args.model, "dtype": args.dtype, "k": args.k}
    origin |= {"lookup": args.lookup, "max_new_tokens": args.max_new_tokens}
    rows = []
    for prompt in tqdm(prompts(args.tasks, args.per_task), file=sys.stderr, unit="prompt"):
        ids = encode(tokenizer, prompt["prompt"])
        results = {}
        for name, provider in made.items():
            seconds = []
            for _ in range(args.repeats):
                start = time.perf_counter()
                results[name] = provider(ids, args.max_new_tokens)
                seconds.append(time.perf_counter() - start)
            results[name]["seconds"] = median(seconds)
        for name, result in results.items():
            plain = results["transformers" if name.startswith("transformers") else "specdec-plain"]
            new = result["token_ids"]
            result |= {"new_tokens": len(new), "identical": new == plain["token_ids"]}
            row = {"provider": name, "id": prompt["id"], "task": prompt["task"], "prompt_tokens": len(ids)}
            rows.append(origin | row | {key: value for key, value in result.items() if key != "token_ids"})
        if args.out:
            write_rows(args.out, rows)
    return rows


def memory(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Peak resident memory of one generation, each provider in its own process."""
    rows = []
    for name in providers(args):
        command = [sys.executable, "-m", "bench.bench_generate", "--peak-of", name, "--dtype", args.dtype]
        command += ["--model", args.model, "--max-new-tokens", str(args.max_new_tokens), "-k", str(args.k)]
        peak = json.loads(subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL).splitlines()[-1])
        rows.append(
            provenance() | {"bench": "memory", "model": args.model, "dtype": args.dtype, "provider": name} | peak
        )
    return rows


def peak_of(name: str, args: argparse.Namespace) -> None:
    tokenizer = load_tokenizer(args.model)
    ids = encode(tokenizer, prompts(["rag"], 1)[0]["prompt"])
    make(name, args, {})(ids, args.max_new_tokens)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    print(json.dumps({"peak_mib": round(peak / 2**20), "prompt_tokens": len(ids)}))


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By task, and over all prompts and the copying tasks: medians over prompts of speeds and of speed ratios."""
    out = []
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    groups = [(task, [task]) for task in tasks] + [("all", tasks)]
    if all(task in tasks for task in COPYING_TASKS):
        groups.append(("+".join(COPYING_TASKS), list(COPYING_TASKS)))
    for label, members in groups:
        chosen = [row for row in rows if row["task"] in members]
        names = [name for name in PROVIDERS if any(row["provider"] == name for row in chosen)]
        by = {name: {row["id"]: row for row in chosen if row["provider"] == name} for name in names}
        speed = {name: {i: r["new_tokens"] / r["seconds"] for i, r in by[name].items()} for name in names}

        def ratio(ours: str, theirs: str, speed: dict[str, dict[str, float]] = speed) -> list[float]:
            return [speed[ours][i] / speed[theirs][i] for i in speed[ours]]

        group = {
            "task": label,
            "prompts": len(by["specdec-plain"]),
            "tokens_per_second": {name: median(speed[name].values()) for name in names},
            "identical": {name: sum(row["identical"] for row in by[name].values()) for name in names},
            "plain_vs_transformers": median(ratio("specdec-plain", "transformers")),
        }
        for name in DRAFTING:
            if name in names:
                mine = by[name].values()
                drafted = sum(row["drafted"] for row in mine)
                group[name] = {
                    "vs_lookup": median(ratio(name, "transformers-lookup")),
                    "vs_transformers": median(ratio(name, "transformers")),
                    "vs_plain": median(ratio(name, "specdec-plain")),
                    "vs_plain_p20": quantile(ratio(name, "specdec-plain"), 0.2),
                    "acceptance_rate": sum(row["accepted"] for row in mine) / drafted if drafted else None,
                    "tokens_per_pass": sum(r["new_tokens"] for r in mine) / sum(r["target_passes"] for r in mine),
                }
        out.append(group)
    return out


def table(rows: list[dict[str, Any]]) -> str:
    """The summary as a Markdown table."""
    groups = summary(rows)
    titles = {"specdec-ngram": "n-gram", "specdec-cascade": "cascade"}
    drafting = [name for name in DRAFTING if name in groups[0]]
    ours = [titles[name] for name in drafting]
    head = ["task", "transformers", "its prompt lookup", "ours plain", *(f"ours {title}" for title in ours)]
    head += [f"{title} / transformers" for title in ours] + [f"tokens per pass: {title}" for title in ours]
    head += ["same text: theirs", *(f"ours {title}" for title in ours)]
    lines = ["| " + " | ".join(head) + " |", "| --- " + "| ---: " * (len(head) - 1) + "|"]
    for group in groups:
        speed, same, n = group["tokens_per_second"], group["identical"], group["prompts"]
        cells = [group["task"].replace("+", " + ")]
        cells += [f"{speed[name]:.1f}" for name in ("transformers", "transformers-lookup", "specdec-plain", *drafting)]
        cells += [f"{group[name]['vs_transformers']:.2f} ×" for name in drafting]
        cells += [f"{group[name]['tokens_per_pass']:.2f}" for name in drafting]
        cells += [f"{same[name]} of {n}" for name in ("transformers-lookup", *drafting)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write_table(readme: Path, rows: list[dict[str, Any]]) -> None:
    """Put the table, and where it was measured, between the README's markers."""
    row = rows[0]
    caption = (
        f"Tokens per second, medians over {len({r['id'] for r in rows})} prompts; greedy, {row['dtype']},"
        f" {row['max_new_tokens']} new tokens, speeds include the prompt's pass. {row['device']}, {row['threads']} threads,"
        f" torch {row['torch']}, transformers {row['transformers']}; transformers' prompt lookup with {row['lookup']}"
        f' drafts, ours with up to {row["k"]}. "Same text" is against the same package\'s plain decoding.'
    )
    fill_in(readme, "generate table", f"{table(rows)}\n\n{caption}")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32", "float16"))
    parser.add_argument("--tasks", nargs="*")
    parser.add_argument("--per-task", type=int)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("-k", type=int, default=8, help="most drafts a round (ours)")
    parser.add_argument("--lookup", type=int, default=5, help="drafts a round of transformers' prompt lookup")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--peak-of", choices=PROVIDERS, help=argparse.SUPPRESS)
    parser.add_argument("--table", type=Path, help="print the table of an existing file and stop")
    parser.add_argument("--readme", type=Path, help="with --table: write it into this file, between its markers")
    parser.add_argument("--out", type=Path, help=f"rows as JSON lines, such as {RESULTS.name}/generate.jsonl")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    if args.table:
        print(table(read_rows(args.table)))
        if args.readme:
            write_table(args.readme, read_rows(args.table))
    elif args.peak_of:
        peak_of(args.peak_of, args)
    elif args.memory:
        rows = memory(args)
        for row in rows:
            print(f"{row['provider']:24} {row['peak_mib']} MiB")
        if args.out:
            write_rows(args.out, rows)
    else:
        rows = timed(args)
        print(table(rows))
        for group in summary(rows):
            print(json.dumps(group), file=sys.stderr)


if __name__ == "__main__":
    main()
