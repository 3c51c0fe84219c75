"""``optimize(model)``: the same model with fewer launches and operations a pass, and faster small-row products on the CPU.

Four rewrites, each found by structure and by watching a short pass, never by model name:

* RMS norms take fewer operations, on a GPU one launch (``norms.py``);
* linear layers that are given the same tensor become one product (``siblings.py``);
* on the CPU, weights are packed where that is faster on this machine (``packed_linear.py``);
* decoder layers of the usual structure take a shorter way in the adapter's passes (``decoder_layer.py``): on a GPU one launch of a
  kernel for each of their steps (``kernel_form.py``), on the CPU few operations (``short_form.py``).

What is not recognised stays as it is. The untouched module is the oracle: logits are compared before and after, and each
decoder layer's output in fp32 (on the meta device, where there are no numbers, nothing). The work goes layer by layer, so that no more than one layer is in memory twice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import nn

from specdec_triton._checks import check_bool, require
from specdec_triton.errors import UnsupportedModelError
from specdec_triton.exactness import kernels_backend
from specdec_triton.fusion.checkpoint_pages import CheckpointPages, trim
from specdec_triton.fusion.decoder_layer import LayerForms
from specdec_triton.fusion.norms import FusedRMSNorm, fused_norm
from specdec_triton.fusion.packed_linear import PackedLinear, best_packing
from specdec_triton.fusion.siblings import FusedPart, fuse_siblings
from specdec_triton.observe import Observation, check_kind, is_steered, observe, row_distance, shapes_alone

_PROBE_TOKENS = 5
_RELOAD = "load the model again and use it without optimize()"


def optimize(model: Any, *, kernels: bool | None = None) -> Any:
    """Rewrite ``model`` in place for fast inference, and return it.

    Args:
        model: a transformers causal language model in evaluation mode.
        kernels: whether layers run in our kernels; None: on a GPU with Triton, and on the meta device, where passes are counted.

    Afterwards the module is for inference: weights are joined, so it can be neither trained, saved nor loaded into, and on the CPU
    packed, so it can be neither cast nor moved; a weight that is changed in place may have been copied before, and go on as it was.
    ``forward`` and ``generate`` work as before, up to rounding: in half precision a text can part ways with the original's where two
    tokens are nearly equally likely. On a CPU hidden states and logits of a half-precision model are fp32 then, where that is
    faster. Calling it twice does nothing more.

    Raises:
        ValueError: ``kernels`` is neither a bool nor None, or not what the model was rewritten with before.
        UnsupportedModelError: not a decoder-only language model of transformers in evaluation mode; its logits are not finite; or
            the rewritten model's differ from them by more than rounding.

    Example:
        >>> model = optimize(AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-135M-Instruct"))
    """
    check_kind(model)
    check_bool("kernels", kernels, optional=True)
    if getattr(model, "_specdec_optimized", False):
        known = getattr(model, "_specdec_kernels", kernels)
        require(kernels in (None, known), "kernels", f"None or {known} for a model that was rewritten so", kernels)
        return model
    if kernels is None:
        kernels = kernels_backend(None, next(model.parameters())) is not None
    vocab_size = model.config.get_text_config().vocab_size
    tokens = (torch.arange(1, _PROBE_TOKENS + 1, device=model.device)[None] * 7919) % vocab_size
    try:
        observation: Observation | None = observe(model)
    except UnsupportedModelError:
        observation = None  # no adapter will run it: the decoder layers stay
    short_pass = _watch(model, tokens)
    if not short_pass.logits.is_meta and not bool(short_pass.logits.isfinite().any(-1).all()):
        raise UnsupportedModelError(f"{type(model).__name__} cannot be optimized: its logits hold NaN or infinity")
    for parent, name, module in _children(model):
        if not is_steered(module) and (norm := fused_norm(module)) is not None:
            norm.kernels = kernels and norm.weight.device.type != "cpu"
            setattr(parent, name, norm)
    packing = None
    replaced = any("forward" in vars(module) for module in model.modules())  # who may use a weight as it is
    if not kernels and not replaced:
        packing = best_packing(module for _, _, module in _children(model) if _is_plain_linear(module))
    pages, forms = CheckpointPages(), LayerForms(kernels=kernels)
    head = model.get_output_embeddings()
    _pack((child for child in _children(model) if child[2] is head), packing, pages)  # the largest, while there is room
    for parent, name, module in _children(model):
        layer = getattr(getattr(module, "self_attn", None), "layer_idx", None)
        if observation is None or layer is None or module not in short_pass.arguments or is_steered(module):
            continue
        _fuse_siblings(module, short_pass.siblings, pages)
        call = next(call for call in observation.calls if call.layer == layer)
        order, arguments = short_pass.orders[module], short_pass.arguments[module]
        index = forms.find(module, order, call, arguments, observation.layers)
        _pack(_children(module), packing, pages)
        if index is not None:
            setattr(parent, name, forms.fused(module, order, call, index))
    _fuse_siblings(model, short_pass.siblings, pages)
    _pack(_children(model), packing, pages)
    if packing is not None:
        _widen(model)
        _refuse_first(model)
    model.requires_grad_(False)
    if not short_pass.logits.is_meta:
        _check(model, tokens, short_pass.logits, mixture=observation is not None and observation.mixture)
    model._specdec_optimized, model._specdec_kernels = True, kernels
    return model


def _check(model: Any, tokens: torch.Tensor, before: torch.Tensor, *, mixture: bool) -> None:
    """Raises UnsupportedModelError if the logits have changed by more than rounding."""
    try:
        with torch.inference_mode():
            after = model(input_ids=tokens, use_cache=False).logits
        rows = row_distance(after[0].float(), before[0].float())
        distance = float(
            rows.median() if mixture else rows.max()
        )  # the median forgives an expert that was nearly chosen
    except Exception as error:
        raise UnsupportedModelError(f"optimize() broke {type(model).__name__} ({error}); {_RELOAD}") from error
    if not distance < (1e-4 if before.dtype == torch.float32 else 0.1):
        raise UnsupportedModelError(
            f"optimize() changed the logits of {type(model).__name__} by {distance:.2g} of their size; {_RELOAD}"
        )


@dataclass
class _ShortPass:
    """What a short pass of the untouched model showed.

    Attributes:
        siblings: parent and names of linear layers that were given the very same tensor.
        arguments: hidden states and keyword arguments of the modules that hold a ``self_attn``. orders: names of their children,
            as they were called.
    """

    logits: torch.Tensor
    siblings: list[tuple[nn.Module, list[str]]]
    arguments: dict[nn.Module, tuple[torch.Tensor, dict[str, Any]]]
    orders: dict[nn.Module, list[str]]


def _watch(model: Any, tokens: torch.Tensor) -> _ShortPass:
    inputs: dict[nn.Module, list[torch.Tensor]] = {}
    arguments: dict[nn.Module, tuple[torch.Tensor, dict[str, Any]]] = {}
    orders: dict[nn.Module, list[str]] = defaultdict(list)

    def note_input(module: nn.Module, args: tuple[Any, ...]) -> None:
        inputs.setdefault(module, []).append(args[0])

    def note_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if len(args) == 1:
            arguments[module] = (args[0], kwargs)

    def note_call(layer: nn.Module, name: str, *ignored: Any) -> None:
        orders[layer].append(name)

    linears = [module for module in model.modules() if _is_plain_linear(module)]
    layers = [module for module in model.modules() if hasattr(module, "self_attn") and not is_steered(module)]
    hooks = [module.register_forward_pre_hook(note_input) for module in linears]
    hooks += [module.register_forward_pre_hook(note_arguments, with_kwargs=True) for module in layers]
    hooks += [
        child.register_forward_pre_hook(partial(note_call, layer, name))
        for layer in layers
        for name, child in layer.named_children()
        if not isinstance(child, (nn.Dropout, nn.Identity))
    ]
    try:
        with shapes_alone(model), torch.inference_mode():
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
    return _ShortPass(logits, siblings, arguments, orders)


def _fuse_siblings(root: nn.Module, siblings: list[tuple[nn.Module, list[str]]], pages: CheckpointPages) -> None:
    """Fuse the siblings inside ``root`` that are still apart."""
    inside = set(root.modules())
    for parent, names in siblings:
        if parent not in inside or isinstance(getattr(parent, names[0]), FusedPart):
            continue
        weights = [getattr(parent, name).weight for name in names]
        fuse_siblings(parent, names)
        if isinstance(getattr(parent, names[0]), FusedPart):
            for weight in weights:
                pages.release(weight)


def _pack(
    children: Iterable[tuple[nn.Module, str, nn.Module]], packing: type[PackedLinear] | None, pages: CheckpointPages
) -> None:
    """Pack those of the children (see ``_children``) that are linear layers which the packing can hold."""
    if packing is None:
        return
    for parent, name, module in children:
        if _is_plain_linear(module) and packing.can_pack(module.weight):
            setattr(parent, name, packing(module.weight, module.bias))
            pages.release(module.weight)
    trim()


def _is_plain_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    return type(module) is nn.Linear and not is_steered(module)


class WideEmbedding(nn.Module):
    """An embedding whose rows come out in fp32: with packed linear layers all activations are fp32."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    @property
    def weight(self) -> torch.Tensor:
        return self.inner.weight  # type: ignore[return-value]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.inner(ids).float()


def _widen(model: Any) -> None:
    """Let fp32 activations enter a half-precision model: the CPU's small operations (norms, rotary embedding, residuals)
    are faster in fp32, and rounded less. Only if nothing is left that computes in half precision.
    """
    norms = [module for module in model.modules() if isinstance(module, (FusedRMSNorm, nn.LayerNorm))]
    others = (module for module in model.modules() if module not in norms and not isinstance(module, nn.Embedding))
    left = (weight for module in others for weight in module._parameters.values() if weight is not None)
    if any(weight.dtype != torch.float32 for weight in left):
        return
    embedding = model.get_input_embeddings()
    if embedding.weight.dtype == torch.float32 or not isinstance(embedding, nn.Embedding):
        return
    model.set_input_embeddings(WideEmbedding(embedding))
    for norm in norms:
        norm.float()
    for module in model.modules():
        if isinstance(module, PackedLinear):
            module.input_dtype = torch.float32


def _refuse_first(model: Any) -> None:
    """Packed children first: they refuse a cast, which must not have reached others by then."""
    children = model._modules
    for name in [name for name, child in children.items() if not isinstance(child, PackedLinear)]:
        children[name] = children.pop(name)


def _children(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            yield parent, name, child
