"""Linear layers for CPU decoding, with weights laid out once for the kernel that reads them.

A pass of K+1 rows should cost what a pass of one row costs: the time to read the weights. PyTorch's own linear layer is far
from it. It lays the weights out anew in every call, and where the CPU has no bf16 arithmetic (AVX-512 BF16, AMX), K+1 rows
cost almost K+1 times as much as one. Two libraries inside PyTorch read packed weights at memory speed:

* oneDNN computes in the weights' own dtype: fp32 everywhere, half precision where the CPU has it;
* FBGEMM (Khudia et al. 2021) takes fp16 weights and fp32 activations on any AVX2 machine, but pads the input width to a
  multiple of 512.

Both beat the plain layer wherever they can be used (:func:`best_packing`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

_TOLERANCE = 2.0**-24  # of the largest weight: below the rounding of one fp32 addition
_ROWS = 4  # oneDNN lays weights out for this many
_FBGEMM_WIDTH = 512
_CHECKED_OUTPUTS = 4096  # of a layer, when a packing is chosen; each layer is checked whole when it is packed


class PackedLinear(nn.Module):
    """``nn.Linear`` for inference, any dtype in and the same out; keeps the packed weights alone.

    Args:
        weight: ``[out,in]``, with ``can_pack(weight)``.
        bias: ``[out]`` or None.
    """

    _packed: Any
    _bias: torch.Tensor | None

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.input_dtype = weight.dtype  # of the activations that reach it
        self._bias = None if bias is None else bias.detach()
        self._packed = self._pack(weight.detach())

    def _pack(self, weight: torch.Tensor) -> Any:
        raise NotImplementedError

    @staticmethod
    def can_pack(weight: torch.Tensor) -> bool:
        """Whether this machine can compute with ``weight`` packed, without a loss."""
        raise NotImplementedError

    @property
    def packed_bytes(self) -> int:
        """What the packed weights take."""
        return self.out_features * self.in_features * self.dtype.itemsize

    @property
    def weight(self) -> torch.Tensor:
        """A copy of the weights, for code that inspects a layer's dtype, device or shape."""
        raise NotImplementedError

    @property
    def bias(self) -> torch.Tensor | None:
        return self._bias

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles carry the weights as they were before packing."""
        state = self.__dict__.copy()
        state["_packed"] = self.weight
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._packed = self._pack(state["_packed"])

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("an optimized model cannot be saved: its weights are packed; save it before optimize()")

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(
            "an optimized model cannot be loaded into: its weights are packed; load them before optimize()"
        )

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        raise RuntimeError(f"an optimized model's {name} cannot be set: it is packed; set or tie it before optimize()")

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> PackedLinear:
        moved = fn(torch.empty(0, dtype=self.dtype))
        if moved.dtype != self.dtype or moved.device.type != "cpu":
            raise RuntimeError(
                "an optimized model can be neither cast nor moved: load it again, and do that before optimize()"
            )
        return self

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, dtype={self.dtype}"


class OneDNNLinear(PackedLinear):
    """Computes in the weights' dtype."""

    def _pack(self, weight: torch.Tensor) -> Any:
        return torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)

    @staticmethod
    def can_pack(weight: torch.Tensor) -> bool:
        if weight.device.type != "cpu" or weight.dim() != 2 or not torch.backends.mkldnn.is_available():
            return False
        if weight.dtype == torch.bfloat16 and not _computes_in_bf16():
            return False
        try:
            torch.ops.mkldnn._reorder_linear_weight(weight.new_zeros(16, 16), _ROWS)
        except (AttributeError, RuntimeError):
            return False  # not in this build, or not this dtype on this CPU
        return True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        narrow = x.to(self.dtype)
        return torch.ops.mkldnn._linear_pointwise(narrow, self._packed, self._bias, "none", [], "").to(x.dtype)  # type: ignore[no-any-return]

    @property
    def weight(self) -> torch.Tensor:
        return self._packed.to_dense()  # type: ignore[no-any-return]


class FbgemmLinear(PackedLinear):
    """Computes in fp32; the weights must be exact in fp16."""

    def _pack(self, weight: torch.Tensor) -> Any:
        bias = None if self._bias is None else self._bias.float()
        return torch.ops.quantized.linear_prepack_fp16(weight.float(), bias)

    @staticmethod
    def can_pack(weight: torch.Tensor) -> bool:
        if weight.device.type != "cpu" or weight.dtype not in (torch.bfloat16, torch.float16) or weight.dim() != 2:
            return False
        if "fbgemm" not in torch.backends.quantized.supported_engines:
            return False
        weight = weight.detach()
        largest = float(weight.abs().max())
        if not 0 < largest <= torch.finfo(torch.float16).max:
            return False
        return all(
            float((rows.float() - rows.half().float()).abs().max()) <= _TOLERANCE * largest
            for rows in weight.split(4096)
        )

    @property
    def packed_bytes(self) -> int:
        return self.out_features * -(-self.in_features // _FBGEMM_WIDTH) * _FBGEMM_WIDTH * 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dim() == 1:
            return self.forward(x[None])[0]
        return torch.ops.quantized.linear_dynamic_fp16(x.float(), self._packed).to(x.dtype)  # type: ignore[no-any-return]

    @property
    def weight(self) -> torch.Tensor:
        return torch.ops.quantized.linear_unpack_fp16(self._packed)[0].to(self.dtype)  # type: ignore[no-any-return]


def _computes_in_bf16() -> bool:
    """Whether the CPU has bf16 arithmetic; without it oneDNN converts, slowly."""
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, lambda: False)() for name in names)


def best_packing(layers: Iterable[nn.Linear]) -> type[PackedLinear] | None:
    """The first packing that can hold ``layers``, or None.

    A rule, not a measurement: the packings round differently, and a model must not write another text because the machine
    was busy while it was loaded.
    """
    same_shape = {(layer.weight.dtype, layer.weight.shape): layer.weight for layer in layers}.values()
    for packing in (OneDNNLinear, FbgemmLinear):
        if same_shape and all(packing.can_pack(weight[:_CHECKED_OUTPUTS]) for weight in same_shape):
            return packing
    return None
