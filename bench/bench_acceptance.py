"""How many drafts does each method accept? Of the real pair: in expectation, and counted while decoding.

    python -m bench.bench_acceptance --out bench/results/acceptance.jsonl
    python -m bench.bench_acceptance --table bench/results/acceptance.jsonl --readme README.md

The draft models are the target without some of its layers (bench_lossless.py). Expected values are means over places of written
texts, of sums over the whole vocabulary: of the first draft sum min(p, q) for ``rejection``, and for ``coupled`` the probability that
two Gumbel races with common noise have one winner; of a block of K drafts, drawn from the draft model, how many ``rejection`` and
``block`` accept in expectation over their own noise, whose difference therefore has little noise of its own.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.bench_generate import encode
from bench.bench_lossless import LEFT_OUT, without_layers
from bench.common import RESULTS, fill_in, prompts, provenance, read_rows, write_rows
from specdec_triton import DraftModel, SamplingParams, SpeculativeDecoder, optimize
from specdec_triton.models import load_model, load_tokenizer

_BLOCKS = 16  # at each place
PAIRS = (LEFT_OUT[:2], LEFT_OUT, (*LEFT_OUT, 9, 15, 17, 25))


def acceptance(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each draft model and temperature."""
    tokenizer = load_tokenizer(args.model)
    texts = [encode(tokenizer, prompt["prompt"]) for prompt in prompts(args.tasks, args.per_task)]
    rows = []
    for left_out, temperature in itertools.product(PAIRS, args.temperatures):
        target = load_model(args.model, dtype=torch.float32)
        fast = optimize(load_model(args.model, dtype=torch.float32))
        short = optimize(without_layers(load_model(args.model, dtype=torch.float32), left_out))
        params = SamplingParams(temperature=temperature, max_new_tokens=args.max_new_tokens)
        row: dict[str, Any] = {
            "layers": f"{len(short.model.layers)} of {len(fast.model.layers)}",
            "temperature": temperature,
        }
        for method in ("coupled", "rejection", "block"):
            torch.manual_seed(0)
            seeds = range(len(texts)) if method == "coupled" else [None] * len(texts)
            each = [replace(params, seed=seed) for seed in seeds]
            decoder = SpeculativeDecoder(
                fast, DraftModel(short), num_draft_tokens=args.k, max_batch_size=8, method=method, adaptive=False
            )
            outputs = decoder.generate(texts, each)
            stats = decoder.stats
            rounds = stats.drafted_at[0]
            row[method] = {
                "accepted_per_round": stats.accepted / rounds,
                "first_draft": stats.accepted_at[0] / rounds,
                "rounds": rounds,
            }
            if method == "rejection":
                written = [ids + out.token_ids for ids, out in zip(texts, outputs, strict=True)]
        row |= _expected(target, without_layers(target, left_out), texts, written, temperature, args.k)
        origin = provenance() | {"bench": "acceptance", "model": args.model, "dtype": "float32", "k": args.k}
        rows.append(origin | row)
        print(row, file=sys.stderr)
        if args.out:
            write_rows(args.out, rows)
    return rows


@torch.inference_mode()
def _expected(
    target: Any, draft: Any, begun: list[list[int]], texts: list[list[int]], temperature: float, k: int
) -> dict[str, Any]:
    """Means over places of the texts: of the first draft sum min(p, q) and the coupled probability; of blocks of k drafts drawn from the
    draft model, the drafts that token-level and block verification accept in expectation over their own noise."""
    generator = torch.Generator().manual_seed(0)
    first: dict[str, list[float]] = {"rejection": [], "coupled": []}
    blocks: dict[str, list[float]] = {"rejection": [], "block": []}
    for prompt, text in zip(begun, texts, strict=True):
        ids = torch.tensor([text])
        p, q = (
            torch.log_softmax(m(ids, use_cache=False).logits[0].float() / temperature, -1).exp()
            for m in (target, draft)
        )
        for at in range(len(prompt) - 1, len(text) - 1, 4):
            first["rejection"].append(float(torch.minimum(p[at], q[at]).sum()))
            first["coupled"].append(coupled_acceptance(p[at], q[at]))
        for at in range(len(prompt), len(text), 12):
            drawn = list(_blocks(target, draft, text[:at], temperature, k, generator))
            for name, length in (("rejection", token_length), ("block", block_length)):
                blocks[name].append(sum(length(block_p, block_q, ids) for ids, block_p, block_q in drawn) / len(drawn))
    mean = {name: sum(x) / len(x) for name, x in first.items()}
    gain = torch.tensor(blocks["block"]) - torch.tensor(blocks["rejection"])
    return {
        "expected_first": mean,
        "places": len(first["coupled"]),
        "expected_per_round": {name: sum(x) / len(x) for name, x in blocks.items()},
        "block_gain": float(gain.mean()),
        "block_gain_error": float(gain.std() / len(gain) ** 0.5),
        "blocks": len(gain) * _BLOCKS,
    }


def _blocks(
    target: Any, draft: Any, text: list[int], temperature: float, k: int, generator: torch.Generator
) -> Iterator[tuple[list[int], torch.Tensor, torch.Tensor]]:
    """Blocks of k drafts behind a text, drawn from the draft model, with p ``[k+1,V]`` and q ``[k,V]``."""

    def read(model: Any) -> tuple[torch.Tensor, Any]:
        """The next token's logits ``[blocks,V]``, and the text's keys and values for every block."""
        out = model(torch.tensor([text]), use_cache=True, logits_to_keep=1)
        out.past_key_values.batch_repeat_interleave(_BLOCKS)
        return out.logits[:, -1].expand(_BLOCKS, -1), out.past_key_values

    row, cache = read(draft)
    q, drafts = [], []
    for _ in range(k):
        q.append((row.float() / temperature).softmax(-1))
        drafts.append(torch.multinomial(q[-1], 1, generator=generator))
        row = draft(drafts[-1], past_key_values=cache, use_cache=True).logits[:, -1]
    tokens = torch.cat(drafts, 1)
    row, cache = read(target)
    rows = target(tokens, past_key_values=cache, use_cache=True).logits
    p = (torch.cat((row[:, None], rows), 1).float() / temperature).softmax(-1)
    yield from zip(tokens.tolist(), p, torch.stack(q, 1), strict=True)


def coupled_acceptance(p: torch.Tensor, q: torch.Tensor) -> float:
    """P(argmax(log p + g) = argmax(log q + g)) = sum over i of 1 / sum_j max(p_j / p_i, q_j / q_i), g standard Gumbel.

    Token i wins both races iff E_i / p_i <= E_j / p_j and E_i / q_i <= E_j / q_j for all j, E exponential: of rate max(...).
    Tokens in the order of p / q: those with a ratio at least as large count with p, the others with q.
    """
    both = (p > 0) & (q > 0)
    left = float(p[~both].double().sum()), float(q[~both].double().sum())  # of either, in every sum
    p, q = p[both].double(), q[both].double()
    order = (p / q).argsort(descending=True)
    p, q = p[order], q[order]
    above_p = p.cumsum(0) + left[0]  # its own ratio included
    below_q = q.sum() - q.cumsum(0) + left[1]
    return float((1 / (above_p / p + below_q / q)).sum())


def token_length(p: torch.Tensor, q: torch.Tensor, drafts: Sequence[int]) -> float:
    """Drafts that token-level verification accepts in expectation over its uniform numbers."""
    kept, total = 1.0, 0.0
    for j, x in enumerate(drafts):
        kept *= min(1.0, float(p[j, x] / q[j, x]))
        total += kept
    return total


def block_length(p: torch.Tensor, q: torch.Tensor, drafts: Sequence[int]) -> float:
    """Drafts that block verification accepts in expectation over its uniform numbers (Sun et al. 2024)."""
    weight, h = 1.0, []
    for j, x in enumerate(drafts):
        weight = min(1.0, weight * float(p[j, x] / q[j, x]))
        if j + 1 == len(drafts) or weight >= 1:
            h.append(weight)
        else:
            mass = float((weight * p[j + 1] - q[j + 1]).clamp(min=0).sum())
            h.append(mass / (mass + 1 - weight))
    none_from, total = 1.0, 0.0
    for chance in reversed(h):  # at least i drafts are kept unless every longer prefix fails as well
        none_from *= 1 - chance
        total += 1 - none_from
    return total


def table(rows: list[dict[str, Any]]) -> str:
    """A line for each draft model and temperature."""
    head = "| draft | T | first draft: rejection | counted | coupled | counted | a round: rejection | block | gain (standard error) |"
    lines = [head, "| --- " + "| ---: " * 8 + "|"]
    for row in rows:
        first, rounds = row["expected_first"], row["expected_per_round"]
        lines.append(
            f"| {row['layers']} layers | {row['temperature']} | {first['rejection']:.1%} | {row['rejection']['first_draft']:.1%}"
            f" | {first['coupled']:.1%} | {row['coupled']['first_draft']:.1%} | {rounds['rejection']:.2f} | {rounds['block']:.2f}"
            f" | {row['block_gain']:+.3f} ({row['block_gain_error']:.3f}) |"
        )
    return "\n".join(lines)


def write_table(readme: Path, rows: list[dict[str, Any]]) -> None:
    """Put the table, and where it was counted, between the README's markers."""
    row = rows[0]
    caption = (
        f"SmolLM2, {row['dtype']}, with drafts of itself without some layers; {row['places']} to {max(r['places'] for r in rows)}"
        f" places and {row['blocks']} to {max(r['blocks'] for r in rows)} blocks of {row['k']} drafts are summed over the whole"
        f" vocabulary, the counted shares are those of decoding. {row['device']}, torch {row['torch']}, transformers"
        f" {row['transformers']}."
    )
    fill_in(readme, "acceptance table", f"{table(rows)}\n\n{caption}")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tasks", nargs="*")
    parser.add_argument("--per-task", type=int, default=2)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--temperatures", nargs="*", type=float, default=(1.0, 0.6))
    parser.add_argument("-k", type=int, default=4, help="drafts a round")
    parser.add_argument("--out", type=Path, help=f"rows as JSON lines, such as {RESULTS.name}/acceptance.jsonl")
    parser.add_argument("--table", type=Path, metavar="ROWS", help="print the table of these rows, and measure nothing")
    parser.add_argument("--readme", type=Path, help="with --table: write it into this file, between its markers")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    rows = read_rows(args.table) if args.table else acceptance(args)
    print(table(rows))
    if args.table and args.readme:
        write_table(args.readme, rows)


if __name__ == "__main__":
    main()
