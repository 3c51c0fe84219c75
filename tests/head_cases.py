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


def eagle_chain(
    target: Any,
    tensors: dict[str, torch.Tensor],
    text: list[int],
    k: int,
    *,
    taps: tuple[int, ...] = (),
    theta: float = 500.0,
    norm_first: bool = False,
) -> list[int]:
    """The k greedy drafts after a text: the whole text through the head anew for each."""
    three = "norm.weight" in tensors
    layer = "midlayer." if three else "layers.0."
    embedding = tensors.get("embed_tokens.weight", target.get_input_embeddings().weight.detach())
    lm_head = tensors.get("lm_head.weight", target.get_output_embeddings().weight.detach())
    states = hidden_states(target, text)
    features = torch.cat([states[tap] for tap in taps], -1) if three else states[-1]
    hidden = _linear(tensors, "fc", features) if three else features
    hidden = hidden[:-1]  # the last one's next token is the draft
    tokens, drafts = list(text), []
    for _ in range(k):
        out = _layer(tensors, layer, embedding[torch.tensor(tokens[1:])], hidden, theta, norm_first)
        last = _norm(out[-1], tensors["norm.weight"]) if three else out[-1]
        best = int((last @ lm_head.T).argmax())
        drafts.append(best + int(tensors["d2t"][best]) if "d2t" in tensors else best)
        tokens.append(drafts[-1])
        hidden = torch.cat((hidden, out[-1:]))
    return drafts


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
