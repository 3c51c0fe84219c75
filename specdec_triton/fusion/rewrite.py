"""``optimize(model)``: the same model with fewer operations a pass and faster small-row products on the CPU.

Four rewrites, each found by structure and by watching a short pass, never by model name:

* linear layers that are given the same tensor become one product (``siblings.py``);
* RMS norms take fewer operations (``norms.py``);
* on the CPU, half-precision weights are packed where that is faster on this machine (``packed_linear.py``), and
  activations are fp32;
* decoder layers of the usual structure take a shorter way in the adapter's passes (``decoder_layer.py``).

What is not recognised stays as it is. The untouched module is the oracle: logits are compared before and after, and each
decoder layer's output in fp32.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from specdec_triton.errors import UnsupportedModelError
from specdec_triton.fusion.decoder_layer import RopeTables, fused_decoder_layer, layer_agrees
from specdec_triton.fusion.norms import FusedRMSNorm, fused_norm
from specdec_triton.fusion.packed_linear import PackedLinear, can_pack
from specdec_triton.fusion.siblings import fuse_siblings
from specdec_triton.observe import observe

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
        >>> model = optimize(AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-135M-Instruct"))
    """
    if getattr(model, "_specdec_optimized", False):
        return model
    vocab_size = model.config.get_text_config().vocab_size
    tokens = (torch.arange(1, _PROBE_TOKENS + 1, device=model.device)[None] * 7919) % vocab_size
    before, siblings = _watch(model, tokens)
    for parent, name, module in _children(model):
        if not _has_hooks(module) and (norm := fused_norm(module)) is not None:
            setattr(parent, name, norm)
    packs = _packing_pays(model)
    for parent, names in siblings:
        fuse_siblings(parent, names, packs)
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
    _fuse_layers(model, tokens)
    model._specdec_optimized = True
    return model


def _watch(model: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, list[tuple[nn.Module, list[str]]]]:
    """Logits of a short pass, and the sibling linear layers that were given the very same tensor in it."""
    inputs: dict[nn.Module, list[torch.Tensor]] = {}

    def note(module: nn.Module, args: tuple[Any, ...]) -> None:
        inputs.setdefault(module, []).append(args[0])

    linears = [module for module in model.modules() if type(module) is nn.Linear and not _has_hooks(module)]
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
            if len(inputs.get(child, ())) == 1:
                groups.setdefault(id(inputs[child][0]), []).append(name)
        siblings += [(parent, names) for names in groups.values() if len(names) > 1]
    return logits, siblings


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


def _fuse_layers(model: Any, tokens: torch.Tensor) -> None:
    """Shorten the decoder layers that compute what the usual structure suggests."""
    try:
        observation = observe(model)
    except UnsupportedModelError:
        return  # no adapter will run it
    windows = {call.layer: call.sliding_window for call in observation.calls}
    rope = RopeTables()
    candidates = {}
    for parent, name, module in _children(model):
        layer = getattr(getattr(module, "self_attn", None), "layer_idx", None)
        if layer in windows and not _has_hooks(module) and fused_decoder_layer(module, windows[layer], rope):
            candidates[module] = (parent, name, windows[layer])
    if not candidates:
        return
    inputs: dict[nn.Module, tuple[torch.Tensor, dict[str, Any]]] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs[module] = (args[0], kwargs)

    hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in candidates]
    try:
        with torch.inference_mode():
            model(input_ids=tokens, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    for module, (parent, name, window) in candidates.items():
        if module in inputs and layer_agrees(module, window, *inputs[module], observation.layers):
            setattr(parent, name, fused_decoder_layer(module, window, rope))


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _children(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            yield parent, name, child
