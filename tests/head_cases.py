"""Synthetic heads in the published layouts, and what they compute, written down without a cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn import functional as F

WIDTH, HEADS, KV_HEADS, DIM, INNER, EPS = 16, 4, 2, 6, 24, 1e-5
CONFIG = {
    "hidden_size": WIDTH,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "intermediate_size": INNER,
    "rms_norm_eps": EPS,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rope_theta": 500.0,
    "num_hidden_layers": 1,
}


def eagle_tensors(
    target: Any, *, three: bool = True, draft_size: int | None = None, biases: bool = False, taps: int = 3
) -> dict[str, torch.Tensor]:
    """A random head for a target of hidden size WIDTH, as the EAGLE repository saves it."""
    size, hidden = target.config.vocab_size, target.config.hidden_size
    layer, inputs = ("midlayer.", 2 * WIDTH) if three else ("layers.0.", WIDTH)
    shapes = {
        "fc.weight": (WIDTH, taps * hidden if three else 2 * WIDTH),
        f"{layer}self_attn.q_proj.weight": (HEADS * DIM, inputs),
        f"{layer}self_attn.k_proj.weight": (KV_HEADS * DIM, inputs),
        f"{layer}self_attn.v_proj.weight": (KV_HEADS * DIM, inputs),
        f"{layer}self_attn.o_proj.weight": (WIDTH, HEADS * DIM),
        f"{layer}mlp.gate_proj.weight": (INNER, WIDTH),
        f"{layer}mlp.up_proj.weight": (INNER, WIDTH),
        f"{layer}mlp.down_proj.weight": (WIDTH, INNER),
        f"{layer}post_attention_layernorm.weight": (WIDTH,),
    }
    if three:
        shapes |= {f"{layer}{name}.weight": (WIDTH,) for name in ("hidden_norm", "input_layernorm")}
        shapes |= {"norm.weight": (WIDTH,), "lm_head.weight": (draft_size or size, WIDTH)}
    if biases:
        shapes |= {"fc.bias": (WIDTH,)}
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            shapes[f"{layer}self_attn.{name}_proj.bias"] = (heads * DIM,)
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for name, shape in shapes.items():
        x = torch.randn(shape, generator=generator)
        tensors[name] = 1 + 0.1 * x if "norm" in name else x * (0.4 if "bias" in name else 1.2 / shape[-1] ** 0.5)
    if draft_size is not None:
        ids = torch.randperm(size, generator=generator)[:draft_size].sort().values
        tensors["d2t"] = ids - torch.arange(draft_size)
        tensors["t2d"] = torch.zeros(size, dtype=torch.bool).index_fill(0, ids, True)
    return tensors


def save(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any], *, form: str = "safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if form == "safetensors":
        save_file({name: x.contiguous() for name, x in tensors.items()}, folder / "model.safetensors")
    else:
        torch.save(tensors, folder / "pytorch_model.bin")
    return folder


def hidden_states(target: Any, text: list[int]) -> tuple[torch.Tensor, ...]:
    """``[L,H]`` after 0 .. N - 1 layers, and what the head is given."""
    with torch.inference_mode():
        out = target(input_ids=torch.tensor([text]), output_hidden_states=True, use_cache=False)
    return tuple(x[0] for x in out.hidden_states)


def eagle_logits(
    target: Any,
    tensors: dict[str, torch.Tensor],
    text: list[int],
    path: list[int],
    *,
    taps: tuple[int, ...] = (),
    theta: float = 500.0,
    norm_first: bool = False,
) -> torch.Tensor:
    """``[V']`` of what follows a text and drafts behind it: the whole of it through the head anew for each draft."""
    three = "norm.weight" in tensors
    layer = "midlayer." if three else "layers.0."
    embedding = tensors.get("embed_tokens.weight", target.get_input_embeddings().weight.detach())
    lm_head = tensors.get("lm_head.weight", target.get_output_embeddings().weight.detach())
    states = hidden_states(target, text)
    features = torch.cat([states[tap] for tap in taps], -1) if three else states[-1]
    hidden = _linear(tensors, "fc", features) if three else features
    hidden = hidden[:-1]  # the last one's next token is the first draft
    for n in range(len(path) + 1):
        tokens = [*text, *path[:n]]
        out = _layer(tensors, layer, embedding[torch.tensor(tokens[1:])], hidden, theta, norm_first)
        hidden = torch.cat((hidden, out[-1:]))
    last = _norm(out[-1], tensors["norm.weight"]) if three else out[-1]
    return last @ lm_head.T


def eagle_ids(tensors: dict[str, torch.Tensor], size: int) -> torch.Tensor:
    """The target's ids of the head's columns."""
    return tensors["d2t"] + torch.arange(len(tensors["d2t"])) if "d2t" in tensors else torch.arange(size)


def eagle_chain(target: Any, tensors: dict[str, torch.Tensor], text: list[int], k: int, **options: Any) -> list[int]:
    """The k greedy drafts after a text."""
    drafts: list[int] = []
    for _ in range(k):
        logits = eagle_logits(target, tensors, text, drafts, **options)
        drafts.append(int(eagle_ids(tensors, len(logits))[logits.argmax()]))
    return drafts


def likeliest_nodes(log_probs: Any, depth: int, branch: int, k: int) -> list[tuple[int, ...]]:
    """EAGLE-2's tree, as paths, likeliest first.

    Args:
        log_probs: path -> {token: log-probability} of what follows.
    """
    level, pool = {(): 0.0}, {}
    for _ in range(depth):
        found = {}
        for path, above in level.items():
            after = log_probs(path)
            for token in sorted(after, key=after.get, reverse=True)[:branch]:
                found[(*path, token)] = above + after[token]
        pool |= found
        level = {path: found[path] for path in sorted(found, key=found.get, reverse=True)[:branch]}
    return sorted(pool, key=pool.get, reverse=True)[:k]


def _layer(tensors, layer, embedded, hidden, theta, norm_first):
    three = "norm.weight" in tensors
    if three:
        normed = _norm(hidden, tensors[f"{layer}hidden_norm.weight"])
        x = normed if norm_first else hidden
        joined = torch.cat((_norm(embedded, tensors[f"{layer}input_layernorm.weight"]), normed), -1)
    else:
        x = joined = _linear(tensors, "fc", torch.cat((embedded, hidden), -1))
    length = len(x)
    q, k, v = (
        _linear(tensors, f"{layer}self_attn.{name}_proj", joined).view(length, -1, DIM).transpose(0, 1)
        for name in "qkv"
    )
    angle = torch.outer(torch.arange(length), 1.0 / theta ** (torch.arange(0, DIM, 2) / DIM)).float().repeat(1, 2)

    def rotate(h):
        half = DIM // 2
        return h * angle.cos() + torch.cat((-h[..., half:], h[..., :half]), -1) * angle.sin()

    attended = F.scaled_dot_product_attention(
        rotate(q)[None], rotate(k)[None], v[None], is_causal=True, enable_gqa=True
    )
    x = x + _linear(tensors, f"{layer}self_attn.o_proj", attended[0].transpose(0, 1).reshape(length, -1))
    normed = _norm(x, tensors[f"{layer}post_attention_layernorm.weight"])
    gated = F.silu(_linear(tensors, f"{layer}mlp.gate_proj", normed)) * _linear(tensors, f"{layer}mlp.up_proj", normed)
    return x + _linear(tensors, f"{layer}mlp.down_proj", gated)


def _linear(tensors, name, x):
    return F.linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))


def _norm(x, weight):
    return F.rms_norm(x, weight.shape, weight, EPS)


def path_to(parents: Any, node: int) -> list[int]:
    """The drafts from the root's child down to a node."""
    path = []
    while node:
        path.append(node - 1)
        node = parents[node - 1]
    return path[::-1]


def paths_of(drafts: Any, row: int = 0) -> list[tuple[int, ...]]:
    """The tokens from the root's child down to each of a tree's drafts."""
    tokens, parents = drafts.tokens[row].tolist(), drafts.parents[row].tolist()
    assert all(0 <= parent <= i for i, parent in enumerate(parents))
    return [tuple(tokens[i] for i in path_to(parents, node + 1)) for node in range(len(tokens))]
