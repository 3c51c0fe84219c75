"""The head's epilogue: ``verify_head``, ``sample_head``, and ``head_stats`` of shards."""

from __future__ import annotations

import torch

from gpu_checks.common import DTYPES, add, call, on_gpu
from specdec_triton import ops
from specdec_triton.reference.head_stats import finished
from specdec_triton.testing import batch_of


def check_head(method: str, dtype: torch.dtype, vocab: int, width: int, batch: int, options: dict) -> None:
    """The integers of ``accept_reject`` on logits that are written: the bits of the head's tiles are those of ``skinny_linear``.

    And so they are for shards, each with its own tiles.
    """
    k = 4
    hidden, weight = (
        on_gpu(torch.randn(shape).to(dtype)) for shape in ((batch, k + 1, width), (vocab, width))
    )  # fmt: skip
    weight *= 3 * width**-0.5
    params = on_gpu(batch_of(batch, position=17, temperature=0.8))
    params.temperature[::3] = 0.0
    logits = ops.skinny_linear(hidden.flatten(0, 1), weight, backend="triton").view(batch, k + 1, vocab)
    logits = finished(logits, options.get("scale"), options.get("softcap"))
    drawn = [ops.sample(logits[:, j], params=params.after(j), backend="triton") for j in range(k)]
    drafts = torch.stack(drawn, 1) if method == "coupled" else logits[:, :k].argmax(-1)
    drafts[1 % batch, k - 1], drafts[2 % batch, 0] = -1, vocab
    given = {"params": params, "method": method}
    want = call(ops.accept_reject, drafts, logits, **given)
    got = call(ops.verify_head, hidden, weight, drafts, **options, **given)
    cut = vocab // 12 * 4
    shards = [
        call(ops.head_stats, hidden, rows, drafts, first_id=first, vocab=vocab, **options, **given)
        for first, rows in ((0, weight[:cut]), (cut, weight[cut:]))
    ]
    merged = ops.accept_stats(shards, drafts, **given, backend="triton")
    for result in (got, merged):
        assert all(torch.equal(a, b) for a, b in zip(result, want, strict=True))
    tokens, lse = call(ops.sample_head, hidden[:, 0], weight, **options, params=params, return_lse=True)
    want_tokens, want_lse = call(ops.sample, logits[:, 0], params=params, return_lse=True)
    assert torch.equal(tokens, want_tokens)
    torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-5)


# V, H, B, what the layer does besides
HEADS = {
    "small": (1000, 576, 3, {}),
    "odd": (5003, 100, 4, {"scale": 0.5}),
    "capped": (20000, 768, 14, {"softcap": 30.0}),
    "wide": (49152, 1024, 2, {}),
}

for _dtype, _type in DTYPES.items():
    for _name, _head in HEADS.items():
        for _method in ("greedy", "coupled", "rejection"):
            add(f"head-{_dtype}-{_name}-{_method}", check_head, _method, _type, *_head)
