"""A decoder layer of the usual structure, which takes a shorter way in the adapter's passes: of kernels, or of few operations.

It is recognised by structure (``structure.py``). What the structure does not show shows in the output, which
:func:`layer_agrees` compares in fp32: in half precision a wrong factor can hide in the rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from specdec_triton.fusion.kernel_form import KernelForm
from specdec_triton.fusion.rope_tables import RopeTables
from specdec_triton.fusion.short_form import ShortForm
from specdec_triton.fusion.structure import Structure, structures_of
from specdec_triton.kv_cache import KVCache, LayerShape
from specdec_triton.observe import Call
from specdec_triton.passes import Backends, Pass, applies_softcap

_TOLERANCE = 1e-4  # of what the layer adds; fp32 rounding is some 1e-6
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # of the kernels


class FusedDecoderLayer(nn.Module):
    """A decoder layer that takes the short way in the adapter's passes, and is the original everywhere else.

    Args:
        form: x ``[1,N,H]``, pass, (cos, sin) -> ``[1,N,H]``.
    """

    def __init__(self, inner: nn.Module, form: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.inner = inner
        self._form = form
        self._parts = tuple(inner.modules())

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        p = kwargs.get("specdec_pass")
        if not isinstance(p, Pass) or self._hooked():
            return self.inner(hidden_states, *args, **kwargs)
        return self._form(hidden_states, p, kwargs.get("position_embeddings"))

    def _hooked(self) -> bool:
        """Whether somebody watches or steers a module that the short way would pass by."""
        return any(module._forward_hooks or module._forward_pre_hooks for module in self._parts)


class LayerForms:
    """Finds the shorter way of each layer of one model.

    Args:
        kernels: of kernels; else of few operations of PyTorch.
    """

    def __init__(self, *, kernels: bool) -> None:
        self._kernels = kernels
        self._tables = RopeTables()

    def find(
        self,
        layer: nn.Module,
        order: Sequence[str],
        call: Call,
        arguments: tuple[torch.Tensor, dict[str, Any]],
        shapes: tuple[LayerShape, ...],
    ) -> int | None:
        """Which of the layer's possible structures computes what it does; None: none of them. Without numbers, on the meta device,
        the likeliest is taken.

        Args:
            order, call: see :func:`~specdec_triton.fusion.structure.structures_of`. arguments: hidden states ``[1,N,H]`` and keyword
                arguments that the model gave it. shapes: KV shape by layer index.
        """
        found = structures_of(layer, order, call)
        for index, structure in enumerate(found):
            if self._form(structure, layer) is None:
                continue
            if arguments[0].is_meta or self._agrees(layer, index, order, call, arguments, shapes):
                return index
        return None

    def fused(self, layer: nn.Module, order: Sequence[str], call: Call, index: int) -> FusedDecoderLayer:
        """The layer in its shorter form, once all its parts are what they will be."""
        form = self._form(structures_of(layer, order, call)[index], layer)
        assert form is not None
        return FusedDecoderLayer(layer, form)

    def _form(self, structure: Structure, layer: nn.Module) -> Callable[..., torch.Tensor] | None:
        if self._kernels:
            products = (structure.qkv, structure.out, structure.gate_up, structure.down)
            fit = all(type(x) is nn.Linear and x.weight.dtype in _DTYPES for x in products)
            return KernelForm(structure, self._tables) if fit else None
        if structure.rotation not in ("half", None):
            return None
        mlp = next(module for module in layer.modules() if hasattr(module, "down_proj"))
        return ShortForm(structure, getattr(mlp, "act_fn", None) or mlp.activation_fn, self._tables)  # type: ignore[arg-type]

    def _agrees(
        self,
        layer: nn.Module,
        index: int,
        order: Sequence[str],
        call: Call,
        arguments: tuple[torch.Tensor, dict[str, Any]],
        shapes: tuple[LayerShape, ...],
    ) -> bool:
        """Whether the form adds to the hidden states what the layer adds, in fp32 arithmetic."""
        wide = layer if arguments[0].dtype == torch.float32 else copy.deepcopy(layer).float()
        x, kwargs = arguments[0].float(), {name: _wide(value) for name, value in arguments[1].items()}
        p = _one_pass(x, shapes, wide)
        fused = LayerForms(kernels=self._kernels).fused(wide, order, call, index)
        with torch.inference_mode():
            theirs = wide(x, **kwargs)
            try:
                ours = fused(x, position_embeddings=kwargs["position_embeddings"], specdec_pass=p)
            except (KeyError, RuntimeError, TypeError, ValueError):
                return False  # it is called in another way, or its rotary part is not the whole head
        if not isinstance(theirs, torch.Tensor):
            return False
        return float((ours - theirs).abs().max()) < _TOLERANCE * float((theirs - x).abs().max())


def _one_pass(x: torch.Tensor, shapes: tuple[LayerShape, ...], layer: Any) -> Pass:
    """Over the rows of x ``[1,N,H]``, as one text of N tokens."""
    count, device = x.shape[1], x.device
    cache = KVCache(shapes, slots=1, page_size=count, num_pages=1, dtype=x.dtype, device=device)
    cache.reserve(0, count)
    return Pass(
        cache=cache,
        block_table=cache.block_table,
        context_lens=torch.zeros(1, dtype=torch.int32, device=device),
        query_lens=None,
        batch=1,
        count=count,
        rows=count,
        take=None,
        put=None,
        backends=Backends("torch", "torch", "torch"),
        exact=False,
        softcap=applies_softcap(layer.self_attn.config),
        plan=None,
    )


def _wide(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.float()
    return tuple(map(_wide, value)) if isinstance(value, tuple) else value
