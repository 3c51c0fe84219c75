"""What do a pass and a round ask of a GPU? Launches and bytes, counted on the meta device, where a host read raises.

    python -m bench.bench_round                                    # whole rounds: Llama-3.1-8B, Qwen3-8B, Gemma-3-12B, SmolLM2 shapes
    python -m bench.bench_round --layers                           # one layer of a verify pass, and what is beside the layers
    python -m bench.bench_round --models smollm2-135m --batch 1
    python -m bench.bench_round --out bench/results/round.jsonl && python -m bench.bench_round --layers --out bench/results/layers.jsonl
    python -m bench.bench_round --readme README.md                 # the table, from those two files

Before: the module as transformers wrote it, with our attention over the pages, logits written and then judged. After: rewritten by
``optimize()``, judged in the head's epilogue. The round is the one that a CUDA graph captures: drafting, one pass of the target over
``[B,K+1]``, accept/reject, commit. A launch is a kernel: views and allocations cost none, our own ops as many as they have;
PyTorch's ops count as one each. Bytes are what the ops read and write once, weights included, with ``--context`` tokens of
context a request. "rest" is what neither model's passes nor our ops launch: lengths, limits, stop tokens, reports and, if adaptive,
the choice of K.

Nothing here is a time. ``predicted_ms`` is one only of a pass or a round that waits for nothing but memory: bytes over the chip's
bandwidth, without launches and latency. It is a prediction.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bench.common import RESULTS, fill_in, provenance, read_rows, write_rows
from specdec_triton import DraftModel, NoDraft, PromptLookup, SamplingParams, SpeculativeDecoder, optimize
from specdec_triton.adapter import ModelAdapter
from specdec_triton.engine.shapes import Shape
from specdec_triton.kernels._config import CHIPS
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
FORMS = ("before", "after")
METHODS = {"greedy": SamplingParams(temperature=0), "coupled": SamplingParams(seed=0), "rejection": SamplingParams()}


def on_meta(name: str, layers: int | None = None, *, after: bool = False) -> Any:
    """The model without numbers, in bf16; with ``layers`` only so many layers."""
    sizes = MODELS[name] | ({} if layers is None else {"num_hidden_layers": layers})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**sizes), dtype=torch.bfloat16).eval()
    return optimize(model) if after else model


def adapter(model: Any, *, after: bool) -> ModelAdapter:
    """Before, logits are written."""
    made = ModelAdapter(model)
    if not after:
        made.without_head()
    return made


class _Writing(DraftModel):
    """A draft model whose logits are written."""

    def bind(self, target: ModelAdapter, options: Any) -> Any:
        session = super().bind(target, options)
        assert session.adapter is not None
        session.adapter.without_head()
        return session


def drafter(kind: str, name: str, *, after: bool) -> Any:
    """``model``: one layer of the target's own kind."""
    if kind == "model":
        return (DraftModel if after else _Writing)(on_meta(name, 1, after=after))
    return {"none": NoDraft, "ngram": PromptLookup}[kind]()


def count(decoder: SpeculativeDecoder, shape: Shape, context: int) -> dict[str, Any]:
    """A round's launches and bytes; a copy from the host counts as an upload."""
    decoder._loop.rounds.costs.curve(shape.rows)  # made once for each batch size
    passes: list[int] = []
    ways = {name: getattr(ModelAdapter, name) for name in ("forward", "hidden")}

    def counted(way: Any) -> Any:
        def run(*args: Any, **options: Any) -> torch.Tensor:
            before = trace.launches
            out: torch.Tensor = way(*args, **options)
            passes.append(trace.launches - before)
            return out

        return run

    for name, way in ways.items():
        setattr(ModelAdapter, name, counted(way))
    try:
        with Trace(context=context) as trace:
            decoder._loop.rounds.run(shape)
    finally:
        for name, way in ways.items():
            setattr(ModelAdapter, name, way)
    around = ("accept_reject", "sample", "verify_head", "sample_head", "ngram_propose")
    own = sum(trace.by_op[f"specdec.{op}"].launches for op in around)
    return {
        "launches": trace.launches,
        "passes": len(passes),
        "launches_in_passes": sum(passes),
        "launches_of_target": passes[-1],
        "launches_of_ops": own,
        "launches_rest": trace.launches - sum(passes) - own,
        "bytes": trace.bytes,
        "uploads": trace.uploads,
        "predicted_ms": predicted(trace.bytes),
    }


def predicted(moved: int) -> dict[str, float]:
    """Milliseconds that the bytes take at each chip's bandwidth: a prediction."""
    return {chip.arch: round(moved / chip.bandwidth / 1e6, 4) for chip in CHIPS.values()}


def rounds(args: argparse.Namespace) -> list[dict[str, Any]]:
    origin = provenance() | {"bench": "round", "device": "meta", "batch_size": args.batch, "context": args.context}
    out = []
    for name in args.models:
        for after in (False, True):
            target = adapter(on_meta(name, after=after), after=after)
            for kind in ("none", "ngram", "model"):
                for method, params in METHODS.items():
                    for adaptive in (False, True) if kind != "none" else (False,):
                        k = 0 if kind == "none" else args.k
                        decoder = SpeculativeDecoder(
                            target,
                            drafter(kind, name, after=after),
                            num_draft_tokens=args.k,
                            max_batch_size=args.batch,
                            adaptive=adaptive,
                        )
                        settings = {
                            "model": name, "form": FORMS[after], "draft": kind, "method": method, "k": k, "adaptive": adaptive
                        }  # fmt: skip
                        counts = count(decoder, shape_of(decoder, params, k, adaptive, args), args.context)
                        out.append(origin | settings | counts)
    return out


def shape_of(
    decoder: SpeculativeDecoder, params: SamplingParams, k: int, adaptive: bool, args: argparse.Namespace
) -> Shape:
    columns = -(-(args.context + args.k + 1) // decoder._loop.cache.page_size)
    return Shape(
        rows=args.batch,
        k=k,
        limit=k,
        columns=columns,
        width=decoder._loop._slots.texts.shape[1],
        methods=(decoder._request([0], params).method,),
        has_filters=False,
        exact=False,
        adaptive=adaptive,
    )


def layers(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A verify pass of models of one layer and of two: their difference is a layer."""
    origin = provenance() | {
        "bench": "layers",
        "device": "meta",
        "batch_size": args.batch,
        "context": args.context,
        "k": args.k,
    }
    out = []
    for name in args.models:
        for after in (False, True):
            one, two = (_traced(adapter(on_meta(name, n, after=after), after=after), args) for n in (1, 2))
            of_layer = {
                op: cost.launches - one.by_op[op].launches
                for op, cost in two.by_op.items()
                if cost.launches > one.by_op[op].launches
            }
            moved = two.bytes - one.bytes
            row = {
                "model": name,
                "form": FORMS[after],
                "launches_of_layer": sum(of_layer.values()),
                "by_op": of_layer,
                "bytes_of_layer": moved,
                "launches_beside_layers": one.launches - sum(of_layer.values()),
                "predicted_ms": predicted(moved),
            }
            out.append(origin | row)
    return out


def _traced(target: ModelAdapter, args: argparse.Namespace) -> Trace:
    """A pass over ``[B,K+1]``, the head included where it is a part of the pass."""
    cache = target.new_cache(slots=args.batch, page_size=16, num_pages=args.batch * (args.context // 16 + 2))
    tokens = torch.zeros(args.batch, args.k + 1, dtype=torch.int64, device="meta")
    context = torch.zeros(args.batch, dtype=torch.int32, device="meta")
    run = target.forward if target.head is None else target.hidden
    with Trace(context=args.context) as trace:
        run(tokens, cache, cache.block_table, context)
    return trace


def round_table(found: list[dict[str, Any]]) -> str:
    lines = [
        "| model | form | drafts | method | K | launches | in passes | our ops | rest | MB | uploads |",
        "| --- | --- | --- | --- " + "| ---: " * 7 + "|",
    ]
    for row in found:
        name = row["draft"] + (", adaptive" if row["adaptive"] else "")
        lines.append(
            f"| {row['model']} | {row['form']} | {name} | {row['method']} | {row['k']} | {row['launches']}"
            f" | {row['launches_in_passes']} | {row['launches_of_ops']} | {row['launches_rest']} | {row['bytes'] / 1e6:.0f}"
            f" | {row['uploads']} |"
        )
    return "\n".join(lines)


def layer_table(found: list[dict[str, Any]]) -> str:
    lines = [
        "| model | form | launches of a layer | beside the layers | MB of a layer | ms on an H100, predicted |",
        "| --- | --- " + "| ---: " * 4 + "|",
    ]
    for row in found:
        lines.append(
            f"| {row['model']} | {row['form']} | {row['launches_of_layer']} | {row['launches_beside_layers']}"
            f" | {row['bytes_of_layer'] / 1e6:.1f} | {row['predicted_ms']['sm_90']:.4f} |"
        )
    return "\n".join(lines)


def readme_table(layer_rows: list[dict[str, Any]], round_rows: list[dict[str, Any]]) -> str:
    """Both, for greedy rounds of drafts by a model of one layer."""
    lines = [
        "| model | a layer: before | after | beside the layers | after | a round: before | after | in the target's pass | MB of the round | after |",
        "| --- " + "| ---: " * 9 + "|",
    ]
    for name in MODELS:
        layer = [next(r for r in layer_rows if (r["model"], r["form"]) == (name, form)) for form in FORMS]
        whole = [
            next(
                r
                for r in round_rows
                if (r["model"], r["form"], r["draft"], r["method"], r["adaptive"])
                == (name, form, "model", "greedy", False)
            )
            for form in FORMS
        ]
        cells = [name, *(r["launches_of_layer"] for r in layer), *(r["launches_beside_layers"] for r in layer)]
        cells += [*(r["launches"] for r in whole), whole[1]["launches_of_target"]]
        cells += [round(r["bytes"] / 1e6) for r in whole]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    row = round_rows[0]
    caption = (
        f"Kernel launches of a verify pass over {row['batch_size']} requests with {layer_rows[0]['k']} drafts each and {row['context']} tokens"
        " of context, and of a greedy round with a draft model of one layer; bfloat16, counted on the meta device, not run. A PyTorch"
        " operation counts as one launch, allocations and views as none."
    )
    return "\n".join(lines) + f"\n\n{caption}"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--layers", action="store_true", help="a layer and what is beside the layers, not whole rounds")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=1000, help="tokens of each request")
    parser.add_argument("-k", type=int, default=4)
    parser.add_argument("--out", type=Path, help=f"rows as JSON lines, such as {RESULTS.name}/round.jsonl")
    parser.add_argument("--readme", type=Path, help="write the table of the rows in results/ into this file, and stop")
    args = parser.parse_args(argv)
    if args.readme:
        text = readme_table(read_rows(RESULTS / "layers.jsonl"), read_rows(RESULTS / "round.jsonl"))
        fill_in(args.readme, "launches table", text)
        return
    found = layers(args) if args.layers else rounds(args)
    print(layer_table(found) if args.layers else round_table(found))
    if args.out:
        write_rows(args.out, found)


if __name__ == "__main__":
    main()
