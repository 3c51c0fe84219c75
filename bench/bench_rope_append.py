"""What does all that lies between a layer's QKV product and its attention cost, in one launch: norms, rotation, appending?

    python -m bench.bench_rope_append --out bench/results/rope_append.jsonl
    python -m bench.bench_rope_append --quick
    TRITON_INTERPRET=1 python -m bench.bench_rope_append      # launches and bytes

``torch``: what the model itself does, from views of the same product: ``F.rms_norm`` of each head where the model has norms,
transformers' own ``apply_rotary_pos_emb``, and ``index_put_`` at slots that were computed beforehand, after PyTorch's division and
cast where the cache is fp8. ``compiled``: the same under ``torch.compile``, on a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bench.micro import OURS, Bench, Problem, Provider, Skip, backend, normal, run
from specdec_triton import ops
from specdec_triton.audit import traffic
from specdec_triton.audit.cases.base import FP8, MODELS, PAGE_SIZE
from specdec_triton.audit.traffic import Traffic
from specdec_triton.kernels._config import Chip

SHAPES = {name: MODELS[name] for name in ("llama3-8b", "qwen3-0.6b", "gemma3-4b", "smollm2-135m", "phi2")}
NORMED = ("qwen3-0.6b", "gemma3-4b")
ROTARY = {"phi2": 32}  # of D = 80; elsewhere the whole head
EPS = 1e-6


@dataclass(frozen=True)
class Spec:
    shape: str
    batch: int
    steps: int
    fp8: bool = False
    context: int = 1000
    dtype: str = "bfloat16"

    @property
    def model(self) -> Any:
        return SHAPES[self.shape]

    @property
    def rotary(self) -> int:
        return ROTARY.get(self.shape, self.model.dim)

    @property
    def normed(self) -> bool:
        return self.shape in NORMED


def specs(machine: str, quick: bool) -> list[Spec]:
    if machine != "gpu":
        found = [
            Spec("smollm2-135m", 4, 5),
            Spec("qwen3-0.6b", 4, 5),
            Spec("smollm2-135m", 4, 5, fp8=True),
            Spec("phi2", 1, 1),
        ]
        return found[:2] if quick else found
    found = [Spec("llama3-8b", 64, 5), Spec("qwen3-0.6b", 64, 5), Spec("llama3-8b", 64, 5, fp8=True)]
    if quick:
        return found
    return [
        *found,
        *(Spec("llama3-8b", batch, steps) for batch, steps in ((1, 5), (8, 5), (64, 1), (1, 1), (8, 512))),
        *(Spec("qwen3-0.6b", batch, steps) for batch, steps in ((1, 5), (8, 5), (8, 512))),
        *(Spec(name, 64, 5) for name in ("gemma3-4b", "smollm2-135m", "phi2")),
    ]


def bytes_moved(spec: Spec, chip: Chip) -> Traffic:
    size, model = getattr(torch, spec.dtype).itemsize, spec.model
    stored = 1 if spec.fp8 else size
    return traffic.rope_append(
        traffic.RopeShape(
            spec.batch, spec.steps, model.heads, model.kv_heads, model.dim, spec.rotary, size, stored, spec.normed
        )
    )


def flops(spec: Spec) -> int:
    """None to speak of: what it does to an element takes less time than reading it."""
    return 0


def memory(spec: Spec) -> int:
    model = spec.model
    return 8 * spec.batch * (spec.context + spec.steps + PAGE_SIZE) * (2 * model.kv_heads + model.heads) * model.dim


def build(spec: Spec, device: torch.device) -> Problem:
    x = Tensors(spec, device)
    return Problem({"torch": Provider(x.torch), "compiled": Provider(x.compiled), OURS: Provider(x.ours)}, x.gate)


class Tensors:
    def __init__(self, spec: Spec, device: torch.device) -> None:
        self.spec, self.device, model = spec, device, spec.model
        dtype = getattr(torch, spec.dtype)
        heads = (model.heads, model.kv_heads, model.kv_heads)
        product = normal(spec.batch, spec.steps, sum(heads), model.dim, device=device, dtype=dtype, seed=1)
        self.q, self.k, self.v = product.split(heads, 2)
        columns = -(-(spec.context + spec.steps) // PAGE_SIZE)
        shape = (spec.batch * columns, PAGE_SIZE, model.kv_heads, model.dim)
        stored = FP8 if spec.fp8 else dtype
        self.caches = [torch.zeros(shape, dtype=dtype, device=device).to(stored) for _ in range(2)]
        order = torch.randperm(shape[0], generator=torch.Generator().manual_seed(0))
        self.table = order.view(spec.batch, columns).int().to(device)
        self.context = torch.full((spec.batch,), spec.context, dtype=torch.int32, device=device)
        position = spec.context + torch.arange(spec.steps, device=device)
        self.slots = (self.table[:, position // PAGE_SIZE].long() * PAGE_SIZE + position % PAGE_SIZE).flatten()
        self.options: dict[str, Any] = {}
        if spec.fp8:
            self.options = {name: torch.full((model.kv_heads,), 0.5, device=device) for name in ("k_scale", "v_scale")}
        if spec.normed:
            for i, name in enumerate(("q_norm", "k_norm")):
                self.options[name] = 1 + normal(model.dim, device=device, dtype=dtype, seed=2 + i, scale=0.3)
        frequency = 1e4 ** (-torch.arange(0, spec.rotary, 2, device=device) / spec.rotary)
        angle = (position[:, None] * frequency).repeat(1, 2).expand(spec.batch, -1, -1).contiguous()
        self.turns = angle.cos().to(dtype), angle.sin().to(dtype)

    def ours(self) -> Callable[[], torch.Tensor]:
        return lambda: self.append(self.caches)

    def append(self, caches: list[torch.Tensor]) -> torch.Tensor:
        args = (self.q, self.k, self.v, *self.turns, *caches, self.table, self.context)
        return ops.rope_append(*args, **self.options, eps=EPS, backend=backend())

    def rotated(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """q and k as the model has them, in ``dtype``."""
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        q, k = self.q.to(dtype), self.k.to(dtype)
        if self.spec.normed:
            q, k = (
                torch.nn.functional.rms_norm(x, x.shape[-1:], self.options[name].to(dtype), EPS)
                for x, name in ((q, "q_norm"), (k, "k_norm"))
            )
        rotary = self.spec.rotary
        turned = apply_rotary_pos_emb(
            q[..., :rotary], k[..., :rotary], *(x.to(dtype) for x in self.turns), unsqueeze_dim=2
        )
        if rotary == q.shape[-1]:
            return list(turned)
        return [torch.cat((x, rest[..., rotary:]), -1) for x, rest in zip(turned, (q, k), strict=True)]

    def gate(self) -> str | None:
        """q and stored keys at most twice as far from fp64 as the model's, values byte for byte, no other slot touched."""
        mine = [raw(x).clone().view(x.dtype) for x in self.caches]
        out = self.append(mine)
        plain = [raw(x).clone().view(x.dtype) for x in self.caches]
        q, k = self.rotated(self.q.dtype)
        self.put(plain, k)
        scale = self.options["k_scale"].double()[:, None] if self.spec.fp8 else 1.0
        truths = self.rotated(torch.float64)
        stored = [raw_rows(x, self.slots).double().view(self.k.shape) * scale for x in (mine[0], plain[0])]
        for name, truth, got, theirs in zip("qk", truths, (out, stored[0]), (q, stored[1]), strict=True):
            error, allowed = (float((x.double() - truth).abs().max()) for x in (got, theirs))
            if not error <= 2 * allowed:
                return f"{name} is {error:.2e} from fp64, allowed {2 * allowed:.2e}"
        for cache in (mine[0], plain[0]):
            raw(cache).flatten(0, 1)[self.slots] = 0
        wrong = [not torch.equal(raw(a), raw(b)) for a, b in zip(mine, plain, strict=True)]
        return "other bytes than PyTorch" if any(wrong) else None

    def put(self, caches: list[torch.Tensor], k: torch.Tensor) -> None:
        for cache, x, scale in ((caches[0], k, "k_scale"), (caches[1], self.v, "v_scale")):
            if self.spec.fp8:
                x = raw((x / self.options[scale][:, None]).to(FP8))
                cache = raw(cache)
            cache.flatten(0, 1).index_put_((self.slots,), x.flatten(0, 1))

    def torch(self) -> Callable[[], torch.Tensor]:
        def call() -> torch.Tensor:
            q, k = self.rotated(self.q.dtype)
            self.put(self.caches, k)
            return q

        return call

    def compiled(self) -> Callable[[], object]:
        if self.device.type != "cuda":
            raise Skip("compiled on a GPU alone")
        return torch.compile(self.torch(), dynamic=False)


def raw(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8) if x.dtype == FP8 else x


def raw_rows(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """What lies in the slots; fp8 cannot be indexed everywhere."""
    return raw(cache).flatten(0, 1)[slots].view(cache.dtype)


BENCH = Bench("rope_append", __doc__ or "", specs, build, bytes_moved, flops, memory, vs={"torch": "over_torch"})


def main(argv: list[str] | None = None) -> int:
    return run(BENCH, argv)


if __name__ == "__main__":
    sys.exit(main())
