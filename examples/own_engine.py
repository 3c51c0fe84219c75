"""Another engine's decode loop on three of our ops: ``append_kv``, ``verify_attention`` and ``verify_head``.

    python examples/own_engine.py

The engine here is a small one, whole in this file: a transformer in plain PyTorch with random weights, a paged KV cache, and a drafter
that guesses that a text goes on as it did after its last two tokens were seen before. It knows nothing of transformers or of this
package's decoder. What it takes from us:

* ``append_kv`` writes the keys and values of K+1 new tokens into the pages of each request;
* ``verify_attention`` lets those tokens see the pages and one another;
* ``verify_head`` is the last matrix product and the decision at once: which drafts are right, and the next token. Logits are not
  written.

Whoever rejects drafts has nothing to undo: the length of a request says how much of its pages counts. On a GPU the ops run in Triton,
elsewhere in PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from specdec_triton import SamplingParams, ops

VOCAB, WIDTH, LAYERS, HEADS, KV_HEADS, DIM = 64, 128, 2, 4, 2, 32
PAGE_SIZE, K, NEW_TOKENS = 16, 4, 48
PROMPTS = [[3, 14, 15, 3, 14], [27, 18, 28], [16, 18, 3, 39, 8, 8, 8]]


class Model:
    """Pre-norm layers with rotary embedding and grouped queries, as most language models have them."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(3)

        def weight(rows: int, columns: int) -> torch.Tensor:
            return (torch.randn(rows, columns, generator=generator) / columns**0.5).to(device, dtype)

        self.embedding = weight(VOCAB, WIDTH) * WIDTH**0.5
        self.layers = [
            {
                "qkv": weight((HEADS + 2 * KV_HEADS) * DIM, WIDTH),
                "out": weight(WIDTH, HEADS * DIM),
                "up": weight(4 * WIDTH, WIDTH),
                "down": weight(WIDTH, 4 * WIDTH),
            }
            for _ in range(LAYERS)
        ]
        self.head = weight(VOCAB, WIDTH)


@dataclass
class Pages:
    """Keys and values of each layer ``[pages, PAGE_SIZE, KV_HEADS, DIM]``, and which pages a request has, int32 ``[B, most]``."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    table: torch.Tensor


def hidden_states(model: Model, pages: Pages, tokens: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
    """One pass over new tokens int64 ``[B,T]`` of requests with ``context`` tokens in their pages: ``[B,T,WIDTH]``."""
    batch, count = tokens.shape
    positions = context[:, None] + torch.arange(count, device=tokens.device)
    x = model.embedding[tokens]
    for index, layer in enumerate(model.layers):
        qkv = F.linear(F.rms_norm(x, (WIDTH,)), layer["qkv"]).view(batch, count, -1, DIM)
        q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], 2)
        q, k = rotated(q, positions), rotated(k, positions)
        cache = pages.keys[index], pages.values[index]
        ops.append_kv(k, v, *cache, pages.table, context)
        attended = ops.verify_attention(q, *cache, pages.table, context)
        x = x + F.linear(attended.flatten(2), layer["out"])
        x = x + F.linear(F.silu(F.linear(F.rms_norm(x, (WIDTH,)), layer["up"])), layer["down"])
    return F.rms_norm(x, (WIDTH,))


def rotated(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding of ``[B,T,heads,DIM]``."""
    frequencies = 10000.0 ** (-torch.arange(DIM // 2, device=x.device) / (DIM // 2))
    angles = (positions[..., None] * frequencies)[:, :, None]
    first, second = x.float().chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def guess(text: list[int], k: int) -> list[int]:
    """What followed the last earlier occurrence of the text's last two tokens."""
    for start in range(len(text) - 3, -1, -1):
        if text[start : start + 2] == text[-2:]:
            return text[start + 2 : start + 2 + k]
    return []


def decode(
    model: Model, prompts: list[list[int]], k: int, new_tokens: int, *, seed: int | None = None
) -> tuple[list[list[int]], int]:
    """Texts with ``new_tokens`` more tokens each, and the number of passes that it took.

    Args:
        k: the most drafts of a round; 0: one token a pass. seed: None: greedy, else sampled with temperature 1; the text depends on the
            seed, not on the drafts.
    """
    device = model.head.device
    batch, longest = len(prompts), max(map(len, prompts)) + new_tokens + k + 1
    per_request = -(-longest // PAGE_SIZE)
    shape = batch * per_request, PAGE_SIZE, KV_HEADS, DIM
    keys, values = ([torch.zeros(shape, device=device, dtype=model.head.dtype) for _ in model.layers] for _ in "kv")
    table = torch.arange(shape[0], dtype=torch.int32, device=device).view(batch, per_request)
    pages = Pages(keys, values, table)
    params = [SamplingParams(temperature=0) if seed is None else SamplingParams(seed=seed + b) for b in range(batch)]
    method = "greedy" if seed is None else "coupled"

    texts, passes = [list(prompt) for prompt in prompts], 0
    for b, text in enumerate(texts):  # all of a prompt but its last token, which begins the first round
        if len(text) > 1:
            start = torch.zeros(1, dtype=torch.int32, device=device)
            own = Pages(keys, values, table[b : b + 1])
            hidden_states(model, own, torch.tensor([text[:-1]], device=device), start)

    while any(len(text) < len(prompt) + new_tokens for text, prompt in zip(texts, prompts, strict=True)):
        drafts = [guess(text, k) for text in texts]
        rows = [[text[-1], *draft, *[0] * (k - len(draft))] for text, draft in zip(texts, drafts, strict=True)]
        tokens = torch.tensor(rows, device=device)
        context = torch.tensor([len(text) - 1 for text in texts], dtype=torch.int32, device=device)
        result = ops.verify_head(
            hidden_states(model, pages, tokens, context),
            model.head,
            tokens[:, 1:],
            draft_lens=torch.tensor([len(draft) for draft in drafts], dtype=torch.int32, device=device),
            params=ops.SamplingBatch.from_params(params, [len(text) for text in texts], device),
            method=method,
        )
        passes += 1
        for b, (text, count) in enumerate(zip(texts, result.num_accepted.tolist(), strict=True)):
            room = len(prompts[b]) + new_tokens - len(text)
            text += result.tokens[b, : min(count + 1, room)].tolist()  # keys of rejected drafts are written over
    return texts, passes


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Model(device, torch.float32)
    for seed in (None, 7):
        plain, slow = decode(model, PROMPTS, 0, NEW_TOKENS, seed=seed)
        texts, fast = decode(model, PROMPTS, K, NEW_TOKENS, seed=seed)
        print(
            f"{'greedy' if seed is None else f'seed {seed}'}: {slow} passes plain, {fast} with drafts, the same texts: {texts == plain}"
        )


if __name__ == "__main__":
    main()
