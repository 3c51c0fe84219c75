"""Is it the same text, and what does that cost? Counted and measured on a real model.

    python -m bench.bench_lossless --identical          # ids of every K, batch, drafter, method and dtype against plain decoding
    python -m bench.bench_lossless --exactness          # tokens/s with exact=True and exact=False, interleaved
    python -m bench.bench_lossless --table --readme README.md

The draft model is the target without some of its layers, since no smaller one of its family ships with it. ``--identical`` writes
a row for each configuration as it is done, and a second run goes on where the first was stopped. Beside ours stand transformers'
own assisted and prompt lookup decoding against its plain one; they decode one prompt at a time and know no seeds.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from bench.bench_generate import Transformers, encode
from bench.common import RESULTS, fill_in, median, prompts, provenance, quantile, read_rows, write_rows
from specdec_triton import DraftModel, NoDraft, PromptLookup, SamplingParams, SpeculativeDecoder, optimize
from specdec_triton.models import load_model, load_tokenizer

DTYPES = ("bfloat16", "float32")
DRAFTERS = ("ngram", "model")
METHODS = ("greedy", "coupled")
BATCHES = (1, 8)
# Layers of SmolLM2 that a draft model does without: it agrees with 6 of 10 of its greedy tokens.
LEFT_OUT = (3, 4, 5, 7, 14, 26)
SEED = 1234


def without_layers(model: Any, left_out: Sequence[int]) -> Any:
    """The model without some layers; the weights of the others are shared."""
    layers = model.model.layers
    kept = [i for i in range(len(layers)) if i not in left_out]
    shorter = copy.copy(model)
    shorter._modules = dict(model._modules)
    shorter.model = copy.copy(model.model)
    shorter.model._modules = dict(model.model._modules)
    shorter.config = copy.deepcopy(model.config)
    shorter.model.config = shorter.config
    shorter.config.num_hidden_layers = len(kept)
    if getattr(shorter.config, "layer_types", None):
        shorter.config.layer_types = [shorter.config.layer_types[i] for i in kept]
    shorter.model.layers = torch.nn.ModuleList(_at(layers[i], place, shorter.config) for place, i in enumerate(kept))
    return shorter


def _at(layer: Any, place: int, config: Any) -> Any:
    """A layer that takes another place."""
    moved = copy.copy(layer)
    moved._modules = dict(layer._modules)
    moved.self_attn = copy.copy(layer.self_attn)
    moved.self_attn._modules = dict(layer.self_attn._modules)
    moved.self_attn.layer_idx, moved.self_attn.config = place, config
    return moved


class Models:
    """Target and draft model in one dtype, each loaded when it is asked for."""

    def __init__(self, name: str, dtype: str) -> None:
        self._name, self._dtype = name, getattr(torch, dtype)
        self._known: dict[str, Any] = {}

    def __getitem__(self, which: str) -> Any:
        """``target``, ``draft``: transformers' own; ``fast``, ``fast draft``: optimized."""
        if which not in self._known:
            model = load_model(self._name, dtype=self._dtype)
            if "draft" in which:
                model = without_layers(model, LEFT_OUT)
            self._known[which] = optimize(model) if which.startswith("fast") else model
        return self._known[which]


def params_of(method: str, new_tokens: int) -> SamplingParams:
    if method == "greedy":
        return SamplingParams(temperature=0, max_new_tokens=new_tokens)
    return SamplingParams(temperature=0.8, top_p=0.95, seed=SEED, max_new_tokens=new_tokens)


def drafter_of(name: str, models: Models) -> Any:
    return {"none": NoDraft, "ngram": PromptLookup, "model": lambda: DraftModel(models["fast draft"])}[name]()


# The same text.


def identical(args: argparse.Namespace) -> None:
    """One row for each configuration, in how many prompts the text is plain decoding's."""
    tokenizer = load_tokenizer(args.model)
    texts = [encode(tokenizer, prompt["prompt"]) for prompt in prompts(args.tasks, args.per_task)]
    rows = read_rows(args.out) if args.out and args.out.exists() else []
    done = {_key(row) for row in rows}
    for dtype in args.dtypes:
        models = Models(args.model, dtype)
        origin = provenance() | {"bench": "identical", "model": args.model, "dtype": dtype}
        origin |= {"max_new_tokens": args.max_new_tokens, "prompts": len(texts)}
        for row in _configurations(dtype, models, texts, args, done):
            rows.append(origin | row)
            print({key: row[key] for key in ("provider", "method", "k", "batch", "identical")}, file=sys.stderr)
            if args.out:
                write_rows(args.out, rows)
    print(table(rows))


def _key(row: dict[str, Any]) -> tuple:
    return tuple(row[name] for name in ("dtype", "provider", "method", "k", "batch", "prompts", "max_new_tokens"))


def _configurations(
    dtype: str, models: Models, texts: list[list[int]], args: argparse.Namespace, done: set[tuple]
) -> Iterator[dict[str, Any]]:
    def todo(provider: str, method: str, k: int, batch: int) -> bool:
        row = {"dtype": dtype, "provider": provider, "method": method, "k": k, "batch": batch}
        return _key(row | {"prompts": len(texts), "max_new_tokens": args.max_new_tokens}) not in done

    def compared(row: dict[str, Any], got: list[list[int]], plain: list[list[int]], **counts: Any) -> dict[str, Any]:
        differing = [i for i, (a, b) in enumerate(zip(got, plain, strict=True)) if a != b]
        return row | counts | {"identical": len(plain) - len(differing), "differing": differing}

    new = args.max_new_tokens
    for method in args.methods:
        params = params_of(method, new)
        plain: list[list[int]] = []
        for name, batch, k in itertools.product(args.drafters, args.batches, args.ks):
            if not todo(name, method, k, batch):
                continue
            if not plain:
                alone = SpeculativeDecoder(models["fast"], NoDraft(), num_draft_tokens=0, max_batch_size=1)
                plain = [alone.generate([ids], params)[0].token_ids for ids in tqdm(texts, desc=f"{dtype} {method}")]
            decoder = SpeculativeDecoder(
                models["fast"], drafter_of(name, models), num_draft_tokens=k, max_batch_size=batch, adaptive=False
            )
            outputs = decoder.generate(texts, params)
            row = {"provider": name, "method": method, "k": k, "batch": batch}
            rate = decoder.stats.acceptance_rate
            yield compared(row, [out.token_ids for out in outputs], plain, acceptance_rate=rate)
    if not args.peers:
        return
    theirs: list[list[int]] = []
    for k, (name, options) in itertools.product(args.ks, _PEERS.items()):
        if not todo(name, "greedy", k, 1):
            continue
        if not theirs:
            own = Transformers(models["target"], None)
            theirs = [own(ids, new)["token_ids"] for ids in tqdm(texts, desc=f"{dtype} transformers")]
        peer = Transformers(models["target"], None)
        peer.options = options(models, k)
        got = [peer(ids, new)["token_ids"] for ids in texts]
        yield compared({"provider": name, "method": "greedy", "k": k, "batch": 1}, got, theirs)


def _assisted(models: Models, k: int) -> dict[str, Any]:
    draft = models["draft"]
    draft.generation_config.num_assistant_tokens = k
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    return {"assistant_model": draft}


_PEERS = {
    "transformers assisted": _assisted,
    "transformers prompt lookup": lambda models, k: {"prompt_lookup_num_tokens": k},
}


# What it costs.


def exactness(args: argparse.Namespace) -> None:
    """Tokens per second with and without exact passes, prompt by prompt, interleaved."""
    tokenizer = load_tokenizer(args.model)
    texts = [encode(tokenizer, prompt["prompt"]) for prompt in prompts(args.tasks, args.per_task)]
    rows = []
    for dtype, batch in itertools.product(args.dtypes, args.batches):
        models = Models(args.model, dtype)
        for name, k in (("none", 0), ("ngram", 4)):
            decoders = {
                exact: SpeculativeDecoder(
                    models["fast"], drafter_of(name, models), num_draft_tokens=k, max_batch_size=batch, exact=exact
                )
                for exact in (False, True)
            }
            for decoder in decoders.values():
                decoder.warmup()
                decoder.generate(texts[:batch], params_of("greedy", 8))
            speeds: dict[bool, list[float]] = {False: [], True: []}
            groups = [texts[i : i + batch] for i in range(0, len(texts) - batch + 1, batch)]
            for group in tqdm(groups, desc=f"{dtype} {name} batch {batch}"):
                for exact, decoder in decoders.items():
                    best = 0.0
                    for _ in range(args.repeats):
                        start = time.perf_counter()
                        outputs = decoder.generate(group, params_of("greedy", args.max_new_tokens))
                        new = sum(len(out.token_ids) for out in outputs)
                        best = max(best, new / (time.perf_counter() - start))
                    speeds[exact].append(best)
            ratios = [a / b for a, b in zip(speeds[True], speeds[False], strict=True)]
            row = {
                "drafter": name,
                "k": k,
                "batch": batch,
                "exact": median(speeds[True]),
                "free": median(speeds[False]),
            }
            row |= {"ratio": median(ratios), "ratio_p20": quantile(ratios, 0.2), "ratio_p80": quantile(ratios, 0.8)}
            origin = provenance() | {"bench": "exactness", "model": args.model, "dtype": dtype}
            rows.append(origin | {"max_new_tokens": args.max_new_tokens, "groups": len(groups)} | row)
            print(f"{dtype} {name} batch {batch}: {row['ratio']:.3f} of the speed without", file=sys.stderr)
            if args.out:
                write_rows(args.out, rows)


# The tables.


def table(rows: list[dict[str, Any]]) -> str:
    """Identical texts, by provider and method: all K and batches together, per dtype."""
    dtypes = [dtype for dtype in DTYPES if any(row["dtype"] == dtype for row in rows)]
    lines = ["| decoding | K | batch | " + " | ".join(dtypes) + " |", "| --- | --- | --- |" + " ---: |" * len(dtypes)]
    names = {"ngram": "ours, n-gram drafts", "model": "ours, draft model"}
    for provider, method in dict.fromkeys((row["provider"], row["method"]) for row in rows):
        chosen = [row for row in rows if (row["provider"], row["method"]) == (provider, method)]
        ks, batches = ({row[name] for row in chosen} for name in ("k", "batch"))
        counts = []
        for dtype in dtypes:
            mine = [row for row in chosen if row["dtype"] == dtype]
            counts.append(f"{sum(r['identical'] for r in mine)} of {sum(r['prompts'] for r in mine)}" if mine else "–")
        how = {"greedy": "greedy", "coupled": "sampled with a seed"}[method]
        lines.append(
            f"| {names.get(provider, provider)}, {how} | {min(ks)} – {max(ks)} | {', '.join(map(str, sorted(batches)))} | "
            + " | ".join(counts)
            + " |"
        )
    return "\n".join(lines)


def cost_table(rows: list[dict[str, Any]]) -> str:
    """Tokens per second with and without exact passes."""
    lines = [
        "| dtype | decoding | batch | exact, tokens/s | not exact | ratio |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        how = {"none": "plain", "ngram": f"n-gram drafts, K = {row['k']}"}[row["drafter"]]
        lines.append(
            f"| {row['dtype']} | {how} | {row['batch']} | {row['exact']:.1f} | {row['free']:.1f} | {row['ratio']:.2f} |"
        )
    return "\n".join(lines)


def write_tables(readme: Path, same: list[dict[str, Any]], costs: list[dict[str, Any]]) -> None:
    """Put both tables, and where they were measured, between the README's markers."""
    row = same[0]
    threads = " and ".join(map(str, sorted({row["threads"] for row in same})))
    caption = (
        f"Texts of {row['prompts']} prompts, {row['max_new_tokens']} new tokens each, that are those of the same package's plain"
        f" decoding, one prompt at a time. {row['device']}, threads: {threads}, torch {row['torch']}, transformers"
        f" {row['transformers']}. The draft model is SmolLM2 without {len(LEFT_OUT)} of its 30 layers."
    )
    fill_in(readme, "lossless table", f"{table(same)}\n\n{caption}")
    row = costs[0]
    caption = (
        f"Medians, interleaved; greedy, {row['max_new_tokens']} new tokens. {row['device']}, {row['threads']} threads, torch"
        f" {row['torch']}."
    )
    fill_in(readme, "exactness table", f"{cost_table(costs)}\n\n{caption}")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    for name in ("identical", "exactness", "table"):
        what.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tasks", nargs="*")
    parser.add_argument("--per-task", type=int)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--dtypes", nargs="*", choices=DTYPES, default=DTYPES)
    parser.add_argument("--drafters", nargs="*", choices=DRAFTERS, default=DRAFTERS)
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=METHODS)
    parser.add_argument("--batches", nargs="*", type=int, default=BATCHES)
    parser.add_argument("--ks", nargs="*", type=int, default=range(1, 9))
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True, help="transformers' own, too")
    parser.add_argument("--repeats", type=int, default=2, help="of which the faster counts (--exactness)")
    parser.add_argument("--readme", type=Path, help="with --table: write both into this file, between its markers")
    parser.add_argument("--out", type=Path, help=f"rows as JSON lines, such as {RESULTS.name}/identical.jsonl")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    if args.table:
        same, costs = (read_rows(RESULTS / f"{name}.jsonl") for name in ("identical", "exactness"))
        print(table(same), cost_table(costs), sep="\n\n")
        if args.readme:
            write_tables(args.readme, same, costs)
    elif args.identical:
        identical(args)
    else:
        exactness(args)


if __name__ == "__main__":
    main()
