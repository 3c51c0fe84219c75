"""What does a round ask of a GPU? Launches and bytes of whole rounds, counted on the meta device, where a host read raises.

    python -m bench.bench_round                                    # Llama-3.1-8B, Qwen3-8B, Gemma-3-12B, SmolLM2 shapes
    python -m bench.bench_round --models smollm2-135m --batch 1 --out bench/results/round.jsonl

The round is the one that a CUDA graph captures: drafting, one pass of the target over ``[B,K+1]``, accept/reject, commit. A launch
is a kernel: views and allocations cost none, our own ops as many as they have; PyTorch's ops count as one each. Bytes are what
the ops read and write once, weights included, with ``--context`` tokens of context a request. "rest" is what neither model's
passes nor our ops launch: lengths, limits, stop tokens, reports and, if adaptive, the choice of K. Nothing here is a time.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bench.common import RESULTS, provenance, write_rows
from specdec_triton import DraftModel, NoDraft, PromptLookup, SamplingParams, SpeculativeDecoder
from specdec_triton.adapter import ModelAdapter
from specdec_triton.engine.shapes import Shape
from specdec_triton.tracing import Trace

MODELS: dict[str, dict[str, Any]] = {
    "llama3.1-8b": {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    },
    "qwen3-8b": {
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    },
    "gemma3-12b": {
        "model_type": "gemma3_text", "vocab_size": 262208, "hidden_size": 3840, "intermediate_size": 15360,
        "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
    },
    "smollm2-135m": {
        "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
    },
}  # fmt: skip
METHODS = {"greedy": SamplingParams(temperature=0), "coupled": SamplingParams(seed=0), "rejection": SamplingParams()}


def on_meta(name: str, layers: int | None = None) -> Any:
    """The model without numbers, in bf16; with ``layers`` only so many layers."""
    sizes = MODELS[name] | ({} if layers is None else {"num_hidden_layers": layers})
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**sizes), dtype=torch.bfloat16).eval()


def drafter(kind: str, name: str) -> Any:
    """``model``: one layer of the target's own kind."""
    return {"none": NoDraft, "ngram": PromptLookup, "model": lambda: DraftModel(on_meta(name, 1))}[kind]()


def count(decoder: SpeculativeDecoder, shape: Shape, context: int) -> dict[str, Any]:
    """A round's launches and bytes; a copy from the host counts as an upload."""
    decoder._loop.rounds.costs.curve(shape.rows)  # made once for each batch size
    passes: list[int] = []
    forward = ModelAdapter.forward

    def counted(*args: Any, **options: Any) -> torch.Tensor:
        before = trace.launches
        logits = forward(*args, **options)
        passes.append(trace.launches - before)
        return logits

    ModelAdapter.forward = counted  # type: ignore[method-assign]
    try:
        with Trace(context=context) as trace:
            decoder._loop.rounds.run(shape)
    finally:
        ModelAdapter.forward = forward  # type: ignore[method-assign]
    around = ("specdec.accept_reject", "specdec.sample", "specdec.ngram_propose")
    own = sum(cost.launches for op, cost in trace.by_op.items() if op in around)
    return {
        "launches": trace.launches,
        "passes": len(passes),
        "launches_in_passes": sum(passes),
        "launches_of_ops": own,
        "launches_rest": trace.launches - sum(passes) - own,
        "bytes": trace.bytes,
        "uploads": trace.uploads,
    }


def rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    origin = provenance() | {"bench": "round", "device": "meta", "batch_size": args.batch, "context": args.context}
    out = []
    for name in args.models:
        target = ModelAdapter(on_meta(name))
        for kind in ("none", "ngram", "model"):
            for method, params in METHODS.items():
                for adaptive in (False, True) if kind != "none" else (False,):
                    k = 0 if kind == "none" else args.k
                    decoder = SpeculativeDecoder(
                        target,
                        drafter(kind, name),
                        num_draft_tokens=args.k,
                        max_batch_size=args.batch,
                        adaptive=adaptive,
                    )
                    columns = -(-(args.context + args.k + 1) // decoder._loop.cache.page_size)
                    handle = decoder._request([0], params)
                    shape = Shape(
                        rows=args.batch,
                        k=k,
                        limit=k,
                        columns=columns,
                        width=decoder._loop._slots.texts.shape[1],
                        methods=(handle.method,),
                        has_filters=False,
                        exact=False,
                        adaptive=adaptive,
                    )
                    counts = count(decoder, shape, args.context)
                    settings = {"model": name, "draft": kind, "method": method, "k": k, "adaptive": adaptive}
                    out.append(origin | settings | counts)
    return out


def table(found: list[dict[str, Any]]) -> str:
    lines = [
        "| model | drafts | method | K | launches | in passes | our ops | rest | MB | uploads |",
        "| --- | --- | --- " + "| ---: " * 7 + "|",
    ]
    for row in found:
        name = row["draft"] + (", adaptive" if row["adaptive"] else "")
        lines.append(
            f"| {row['model']} | {name} | {row['method']} | {row['k']} | {row['launches']} | {row['launches_in_passes']}"
            f" | {row['launches_of_ops']} | {row['launches_rest']} | {row['bytes'] / 1e6:.0f} | {row['uploads']} |"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=1000, help="tokens of each request")
    parser.add_argument("-k", type=int, default=4)
    parser.add_argument("--out", type=Path, help=f"rows as JSON lines, such as {RESULTS.name}/round.jsonl")
    args = parser.parse_args(argv)
    found = rows(args)
    print(table(found))
    if args.out:
        write_rows(args.out, found)


if __name__ == "__main__":
    main()
