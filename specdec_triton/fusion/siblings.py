"""Linear layers that are given the same tensor (query, key and value; gate and up) as one product."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class SharedProduct(nn.Module):
    """The product of sibling layers: computed when the first is called, handed out part by part.

    Threads that are in the module at once each have parts of their own input, or compute them once more.
    """

    def __init__(self, product: nn.Module, sizes: list[int]) -> None:
        super().__init__()
        self.product = product
        self.sizes = sizes
        self._given: tuple[torch.Tensor, list[torch.Tensor | None]] | None = (
            None  # an input, and what is left of its product
        )

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("an optimized model cannot be saved: its weights are joined; save it before optimize()")

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(
            "an optimized model cannot be loaded into: its weights are joined; load them before optimize()"
        )

    def part(self, index: int, x: torch.Tensor) -> torch.Tensor:
        given = self._given
        if given is None or given[0] is not x or given[1][index] is None:
            given = self._given = (x, list(self.product(x).split(self.sizes, -1)))
        parts = given[1]
        out = parts[index]
        parts[index] = None
        if self._given is given and not any(part is not None for part in parts):
            self._given = None
        assert out is not None
        return out


class FusedPart(nn.Module):
    """One of several sibling linear layers whose product is computed together; all of them hold the shared module."""

    def __init__(self, shared: SharedProduct, index: int) -> None:
        super().__init__()
        self.shared = shared
        self.index = index
        self.out_features = shared.sizes[index]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shared.part(self.index, x)


def fuse_siblings(parent: nn.Module, names: list[str]) -> None:
    """Replace the named children of ``parent``, given the same tensor, by parts of one product."""
    layers: list[nn.Linear] = [getattr(parent, name) for name in names]
    first = layers[0]
    if any((x.bias is None) != (first.bias is None) or x.weight.dtype != first.weight.dtype for x in layers):
        return
    weight = torch.cat([layer.weight.detach() for layer in layers])
    product = nn.Linear(first.in_features, len(weight), first.bias is not None, device="meta")
    product.weight = nn.Parameter(weight, requires_grad=False)
    if first.bias is not None:
        product.bias = nn.Parameter(torch.cat([layer.bias.detach() for layer in layers]), requires_grad=False)
    shared = SharedProduct(product, [layer.out_features for layer in layers])
    for index, name in enumerate(names):
        setattr(parent, name, FusedPart(shared, index))
