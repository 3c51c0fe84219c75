"""A decoder layer of the usual structure, which takes a shorter way in the adapter's passes: of kernels, or of few operations.

It is recognised by structure (``structure.py``). What the structure does not show shows in the output, which
:class:`LayerForms` compares in fp32: in half precision a wrong factor can hide in the rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from specdec_triton.fusion.kernel_form import KernelForm
from specdec_triton.fusion.short_form import ShortForm
from specdec_triton.fusion.structure import Structure, structures_of
from specdec_triton.kv_cache import KVCache, LayerShape
from specdec_triton.observe import Call, is_steered
from specdec_triton.passes import Backends, Pass, applies_softcap

_TOLERANCE = 1e-4  # of what the layer adds; fp32 rounding is some 1e-6
_FAR, _LARGE = 20_011, 30.0  # by which positions and hidden states are multiplied to find out what depends on them
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
        self._links = [(x._modules, name, child) for x in inner.modules() for name, child in x.named_children()]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        p = kwargs.get("specdec_pass")
        if not isinstance(p, Pass) or self._steered():
            return self.inner(hidden_states, *args, **kwargs)
        return self._form(hidden_states, p, kwargs.get("position_embeddings"))

    def _steered(self) -> bool:
        """Whether somebody watches, steers or has replaced a module that the short way would pass by."""
        return is_steered(self.inner) or any(
            modules.get(name) is not child or is_steered(child) for modules, name, child in self._links
        )


class LayerForms:
    """Finds the shorter way of each layer of one model.

    Args:
        kernels: of kernels; else of few operations of PyTorch.
    """

    def __init__(self, *, kernels: bool) -> None:
        self._kernels = kernels

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
        if any(map(is_steered, layer.modules())):
            return None
        for index, structure in enumerate(found):
            if self._form(structure, layer) is None or not self._fits(structure, arguments[1]):
                continue
            if arguments[0].is_meta or self._agrees(layer, index, order, call, arguments, shapes):
                return index
        return None

    def _fits(self, structure: Structure, kwargs: dict[str, Any]) -> bool:
        """Whether the layer is given what the form rotates by: the short form turns whole heads."""
        tables = kwargs.get("position_embeddings")
        if structure.rotation is None:
            return True
        return isinstance(tables, tuple) and (self._kernels or tables[0].shape[-1] == structure.dim)

    def fused(self, layer: nn.Module, order: Sequence[str], call: Call, index: int) -> FusedDecoderLayer:
        """The layer in its shorter form, once all its parts are what they will be."""
        form = self._form(structures_of(layer, order, call)[index], layer)
        assert form is not None
        return FusedDecoderLayer(layer, form)

    def _form(self, structure: Structure, layer: nn.Module) -> Callable[..., torch.Tensor] | None:
        if self._kernels:
            products = (structure.qkv, structure.out, structure.gate_up, structure.down)
            fit = all(type(x) is nn.Linear and x.weight.dtype in _DTYPES for x in products)
            return KernelForm(structure) if fit else None
        if structure.rotation not in ("half", None):
            return None
        mlp = next(module for module in layer.modules() if hasattr(module, "down_proj"))
        return ShortForm(structure, getattr(mlp, "act_fn", None) or mlp.activation_fn)  # type: ignore[arg-type]

    def _agrees(
        self,
        layer: nn.Module,
        index: int,
        order: Sequence[str],
        call: Call,
        arguments: tuple[torch.Tensor, dict[str, Any]],
        shapes: tuple[LayerShape, ...],
    ) -> bool:
        """Whether the form adds to the hidden states what the layer adds, in fp32 arithmetic: at its own positions and far behind
        them, which a layer may look at besides its tables, for hidden states as they are and large ones."""
        wide = layer if arguments[0].dtype == torch.float32 else copy.deepcopy(layer).float()
        fused = LayerForms(kernels=self._kernels).fused(wide, order, call, index)
        kwargs = {name: _wide(value) for name, value in arguments[1].items()}
        far = {name: value * _FAR if _counts(value) else value for name, value in kwargs.items()}
        for x, given in ((arguments[0].float(), kwargs), (arguments[0].float() * _LARGE, far)):
            try:
                with torch.inference_mode():
                    theirs = wide(x, **given)
                    p = _one_pass(x, shapes, wide)
                    ours = fused(x, position_embeddings=given.get("position_embeddings"), specdec_pass=p)
            except (KeyError, RuntimeError, TypeError, ValueError):
                return False  # it is called in another way
            if not isinstance(theirs, torch.Tensor):
                return False
            if not float((ours - theirs).abs().max()) < _TOLERANCE * float((theirs - x).abs().max()):
                return False
        return True


def _counts(value: Any) -> bool:
    """Whether an argument is made of positions."""
    return isinstance(value, torch.Tensor) and value.dtype in (torch.int32, torch.int64)


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
        tree_mask=None,
        plan=None,
    )


def _wide(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.float()
    return tuple(map(_wide, value)) if isinstance(value, tuple) else value
