"""RMS norms of any model in few operations, recognised by structure and by what they compute."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from specdec_triton import ops


class FusedRMSNorm(nn.Module):
    """RMS norm of weight w, stored as w or as w - 1.

    On the CPU ``F.rms_norm`` is eight small operations. For fp32 there, half as many do: with n = |x| over H numbers,
    x / sqrt(mean(x^2) + eps) = x sqrt(H) / hypot(n, sqrt(H eps)).

    Attributes:
        add_one: whether the factor is 1 + weight. kernels: whether it is one launch of ``ops.rms_norm`` on a device.
    """

    def __init__(self, weight: nn.Parameter, eps: float, *, add_one: bool) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps
        self.add_one = add_one
        self.kernels = False
        self._derive()

    def _derive(self) -> None:
        """What :meth:`forward` needs of the weight."""
        weight = self.weight.detach()
        scale = weight.float() + 1 if self.add_one else weight
        width = len(weight)
        self._scale = nn.Buffer(scale, persistent=False)
        self._wide_scale = nn.Buffer(scale.float() * width**0.5, persistent=False)
        self._floor = nn.Buffer(torch.tensor((width * self.eps) ** 0.5, device=weight.device), persistent=False)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> FusedRMSNorm:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._derive()  # of the weight in its new dtype: cast themselves, they would be rounded twice
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)  # type: ignore[no-untyped-call]
        self._derive()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kernels:
            return ops.rms_norm(x, self.weight, eps=self.eps, add_one=self.add_one)  # type: ignore[no-any-return]
        if x.dtype == torch.float32 and x.device.type == "cpu":
            length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            return x.div(torch.hypot(length, self._floor)).mul_(self._wide_scale)
        scale = self._scale
        if scale.dtype == x.dtype:
            return F.rms_norm(x, scale.shape, scale, self.eps)
        return F.rms_norm(x.float(), scale.shape, scale.float(), self.eps).to(x.dtype)


def fused_norm(module: nn.Module) -> FusedRMSNorm | None:
    """The same norm by ``F.rms_norm``, or None if ``module`` is not an RMS norm."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if type(module) is nn.LayerNorm or not isinstance(eps, float) or list(module.children()):
        return None
    if [name for name, _ in module.named_parameters()] != ["weight"]:
        return None
    weight: nn.Parameter = module.weight  # type: ignore[assignment]
    if weight.dim() != 1 or len(inspect.signature(module.forward).parameters) != 1:
        return None
    if weight.is_meta:  # numbers can be compared elsewhere
        module = copy.deepcopy(module).to_empty(device="cpu")
        nn.init.uniform_(module.weight, 0.5, 1.5)  # type: ignore[arg-type]
    return next((norm(weight) for norm in _norms(eps) if _agree(module, norm(module.weight))), None)  # type: ignore[arg-type]


def _norms(eps: float) -> list[Callable[[nn.Parameter], FusedRMSNorm]]:
    return [partial(FusedRMSNorm, eps=eps, add_one=add_one) for add_one in (False, True)]


def _agree(module: nn.Module, fused: FusedRMSNorm) -> bool:
    """Whether two norms compute the same up to rounding, on inputs small enough for eps to matter and large ones."""
    weight = fused.weight
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
