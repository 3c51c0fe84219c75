"""``optimize(model)``: the same model with fewer operations a pass and faster small-row products on the CPU.

Three rewrites, each found by structure and by watching a short pass, never by model name:

* linear layers that are given the same tensor (query, key and value; gate and up) become one product;
* RMS norms become ``F.rms_norm``;
* on the CPU, half-precision weights are packed for FBGEMM where that is faster on this machine (``packed_linear.py``).

What is not recognised stays as it is. The untouched module is the oracle: logits are compared before and after, and a
rewrite that changes them beyond rounding is undone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from specdec_triton.errors import UnsupportedModelError
from specdec_triton.packed_linear import PackedLinear, can_pack

_PROBE_TOKENS = 5
_TIMING_ROWS = 4
_FASTER = 0.9  # packing must save at least a tenth to be worth giving up the original weights


def optimize(model: Any) -> Any:
    """Rewrite ``model`` in place for fast inference, and return it.

    Args:
        model: a transformers causal language model in evaluation mode.

    Afterwards the module is for inference: packed weights are not parameters any more, so it can be neither trained nor
    saved. ``forward`` and ``generate`` work as before. Calling it twice does nothing more.

    Raises:
        UnsupportedModelError: the rewritten model's logits differ from the original's by more than rounding.

    Example:
        >>> model = specdec_triton.optimize(AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-135M-Instruct"))
    """
    if getattr(model, "_specdec_optimized", False):
        return model
    tokens = (torch.arange(1, _PROBE_TOKENS + 1, device=model.device)[None] * 7919) % model.config.get_text_config().vocab_size
    before, siblings = _watch(model, tokens)
    _replace_norms(model)
    packs = _packing_pays(model)
    for parent, names in siblings:
        _fuse(parent, names, packs)
    if packs:
        _pack_rest(model)
        _widen(model)
    with torch.inference_mode():
        after = model(input_ids=tokens, use_cache=False).logits
    distance = float((after - before).float().abs().max() / before.float().abs().max())
    if not distance < (1e-4 if before.dtype == torch.float32 else 0.1):
        raise UnsupportedModelError(
            f"optimize() changed the logits of {type(model).__name__} by {distance:.2g} of their size; use it unoptimized"
        )
    model._specdec_optimized = True
    return model


def _watch(model: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, list[tuple[nn.Module, list[str]]]]:
    """Logits of a short pass, and the sibling linear layers that were given the very same tensor in it."""
    inputs: dict[nn.Module, list[torch.Tensor]] = {}

    def note(module: nn.Module, args: tuple[Any, ...]) -> None:
        inputs.setdefault(module, []).append(args[0])

    linears = [module for module in model.modules() if type(module) is nn.Linear]
    hooks = [module.register_forward_pre_hook(note) for module in linears]
    try:
        with torch.inference_mode():
            logits = model(input_ids=tokens, use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    siblings = []
    for parent in model.modules():
        groups: dict[int, list[str]] = {}
        for name, child in parent.named_children():
            if len(inputs.get(child, ())) == 1 and not _has_hooks(child):
                groups.setdefault(id(inputs[child][0]), []).append(name)
        siblings += [(parent, names) for names in groups.values() if len(names) > 1]
    return logits, siblings


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


# Sibling products.


class _Fused:
    """The shared product of sibling layers: computed when the first is called, handed out part by part."""

    def __init__(self, product: Callable[[torch.Tensor], torch.Tensor], sizes: list[int]) -> None:
        self.product = product
        self.sizes = sizes
        self.input: torch.Tensor | None = None
        self.parts: list[torch.Tensor | None] = []

    def part(self, index: int, x: torch.Tensor) -> torch.Tensor:
        if self.input is not x or self.parts[index] is None:
            self.input, self.parts = x, list(self.product(x).split(self.sizes, -1))
        out = self.parts[index]
        self.parts[index] = None
        if not any(part is not None for part in self.parts):
            self.input = None
        assert out is not None
        return out


class FusedPart(nn.Module):
    """One of several sibling linear layers whose product is computed together."""

    def __init__(self, shared: _Fused, index: int, owner: nn.Module | None) -> None:
        super().__init__()
        self._shared = shared
        self._index = index
        self.product = owner  # the first part owns the product, so that the model's modules stay complete

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._shared.part(self._index, x)


def _fuse(parent: nn.Module, names: list[str], packs: bool) -> None:
    layers = [getattr(parent, name) for name in names]
    first = layers[0]
    same = all(
        layer.in_features == first.in_features
        and (layer.bias is None) == (first.bias is None)
        and layer.weight.dtype == first.weight.dtype
        for layer in layers
    )
    if not same:
        return
    weight = torch.cat([layer.weight.detach() for layer in layers])
    bias = None if first.bias is None else torch.cat([layer.bias.detach() for layer in layers])
    sizes = [layer.out_features for layer in layers]
    product: nn.Module
    if packs and can_pack(weight):
        product = PackedLinear(weight, bias)
    else:
        product = nn.Linear(first.in_features, sum(sizes), bias is not None, device="meta")
        product.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            product.bias = nn.Parameter(bias, requires_grad=False)
    shared = _Fused(product, sizes)
    for index, name in enumerate(names):
        setattr(parent, name, FusedPart(shared, index, product if index == 0 else None))


# Norms.


class FusedRMSNorm(nn.Module):
    """RMS norm by ``F.rms_norm``; the weight may be stored as w or as w - 1."""

    def __init__(self, weight: nn.Parameter, eps: float, offset: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps
        self._scale = nn.Buffer(weight.detach() if offset == 0 else weight.detach().float() + offset, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._scale.dtype == x.dtype:
            return F.rms_norm(x, self._scale.shape, self._scale, self.eps)
        return F.rms_norm(x.float(), self._scale.shape, self._scale.float(), self.eps).to(x.dtype)


def _replace_norms(model: nn.Module) -> None:
    for parent, name, module in _children(model):
        parameters = dict(module.named_parameters())
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        if list(parameters) != ["weight"] or not isinstance(eps, float) or list(module.children()):
            continue
        if module.weight.dim() != 1 or type(module) is nn.LayerNorm or _has_hooks(module):
            continue
        for offset in (0.0, 1.0):
            fused = FusedRMSNorm(module.weight, eps, offset)
            if _agree(module, fused):
                setattr(parent, name, fused)
                break


def _agree(module: nn.Module, fused: nn.Module) -> bool:
    """Whether two norms compute the same up to rounding, on inputs small enough for eps to matter and large ones."""
    weight: torch.Tensor = module.weight  # type: ignore[assignment]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, weight.shape[0], generator=generator) * torch.tensor([[1e-3], [0.1], [1.0], [30.0]])
    x = x.to(weight.device, weight.dtype)
    try:
        with torch.inference_mode():
            theirs, ours = module(x), fused(x)
    except (RuntimeError, TypeError, AttributeError):
        return False  # not a function of one tensor of this width
    if not isinstance(theirs, torch.Tensor) or theirs.shape != ours.shape or theirs.dtype != ours.dtype:
        return False
    rounding = 4 * torch.finfo(weight.dtype).eps
    return bool(((theirs - ours).float().abs() <= rounding * theirs.float().abs() + 1e-6).all())


# Packing.


def _packing_pays(model: nn.Module) -> bool:
    """Time both ways on the model's own layers, one of each shape."""
    layers = {tuple(layer.weight.shape): layer for _, _, layer in _children(model) if type(layer) is nn.Linear}
    layers = {shape: layer for shape, layer in layers.items() if can_pack(layer.weight)}
    native = packed = 0.0
    for (_, width), layer in layers.items():
        x = torch.randn(_TIMING_ROWS, width, dtype=layer.weight.dtype)
        native += _seconds(layer, x)
        packed += _seconds(PackedLinear(layer.weight, layer.bias), x)
    return bool(layers) and packed < _FASTER * native


def _seconds(layer: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> float:
    best = float("inf")
    with torch.inference_mode():
        for _ in range(5):
            start = time.perf_counter()
            layer(x)
            best = min(best, time.perf_counter() - start)
    return best


def _pack_rest(model: nn.Module) -> None:
    for parent, name, module in _children(model):
        if type(module) is nn.Linear and not _has_hooks(module) and can_pack(module.weight):
            setattr(parent, name, PackedLinear(module.weight, module.bias))


class WideEmbedding(nn.Module):
    """A half-precision embedding whose rows come out in fp32: with packed linear layers all activations are fp32."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    @property
    def weight(self) -> torch.Tensor:
        return self.inner.weight  # type: ignore[return-value]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.inner(ids).float()


def _widen(model: Any) -> None:
    """Let fp32 activations enter the model, and keep the small parameters that would narrow them in fp32."""
    model.set_input_embeddings(WideEmbedding(model.get_input_embeddings()))
    for module in model.modules():
        if isinstance(module, (FusedRMSNorm, nn.LayerNorm)):
            module.float()


def _children(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            yield parent, name, child
