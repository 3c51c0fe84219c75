"""What a step would ask of a GPU, found out without one: it runs on the meta device, where shapes are all there is.

with Trace(context=1000) as trace:
    step()
trace.launches, trace.bytes, trace.by_op["aten.mm"].launches

Reading a value is an error there, as in the capture of a CUDA graph.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten

_ALLOCATIONS = (
    aten.empty, aten.empty_like, aten.empty_strided, aten.empty_permuted, aten.new_empty, aten.new_empty_strided,
)  # fmt: skip
_MASKABLE = (aten.index, aten.index_put, aten.index_put_)  # a boolean index costs a search for its true elements
# Composite ops for which a GPU has one kernel; the meta device would take them apart.
_FUSED = frozenset([aten.scaled_dot_product_attention, aten.rms_norm])
# Of their first argument they read, or write, no more than they return or are given.
_GATHERS = (aten.embedding, aten.index, aten.index_select, aten.gather, aten.take)
_SCATTERS = (aten.index_put_, aten.index_copy_, aten.scatter_)
_OVERWRITES = (aten.copy_, aten.fill_, aten.zero_, *_SCATTERS)
# Kernels of a call with the fewest. Filters, the races of accept_reject and n-grams that must not repeat need more (see _kernels),
# and so does a product with few outputs and a long K on a large chip.
_KERNELS = {
    "append_kv": 1, "apply_logit_rules": 1, "compact_kv": 1, "ngram_propose": 1, "row_mean": 1, "skinny_linear": 1, "verify_attention": 2, "sample": 2,
    "accept_reject": 2, "accept_tree": 2, "rms_norm": 1, "gated_mlp_activation": 1, "gated_linear": 1, "rope_append": 1,
    "verify_head": 2, "sample_head": 2, "head_stats": 1, "accept_stats": 1,
}  # fmt: skip
_FROM_DATA = (torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor)
_INDEXING = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)


class HostSyncError(RuntimeError):
    """A step made the host wait for the device."""

    def __init__(self, op: object) -> None:
        super().__init__(
            f"{op} makes the host wait for the device: a step may not read a value (item, tolist, bool or int of a"
            " tensor), use a boolean mask as an index, or copy to or from the host"
        )


def tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors among (nested) arguments or results."""
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


def storage_id(x: torch.Tensor) -> int:
    """The same for all views of the same memory, as long as one of them lives."""
    return x.untyped_storage()._cdata


@dataclass
class Call:
    """A call of an op that has a kernel.

    Attributes:
        op: without its overload; as a string ``aten.mm``, for example.
        inputs: the tensors among the arguments. changed: those of them that it writes to, according to its schema.
        made: the tensors among the results; None where one is a view of an argument. Empty before it has run.
    """

    func: Any
    args: tuple
    kwargs: dict[str, Any]
    op: Any = field(init=False)
    inputs: list[torch.Tensor] = field(init=False)
    changed: list[torch.Tensor] = field(init=False)
    made: list[torch.Tensor | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.op = self.func.overloadpacket
        self.inputs = tensors((self.args, self.kwargs))
        schema = self.func._schema.arguments
        is_write = {x.name for x in schema if x.alias_info is not None and x.alias_info.is_write}
        self.changed = tensors([value for name, value in self.given.items() if name in is_write])

    @property
    def given(self) -> dict[str, Any]:
        """The arguments by name."""
        names = [argument.name for argument in self.func._schema.arguments]
        return {**dict(zip(names, self.args, strict=False)), **self.kwargs}

    @property
    def has_kernel(self) -> bool:
        """Whether it computes something: it is no view and no allocation."""
        makes = any(x is not None for x in self.made) and self.op not in _ALLOCATIONS
        return makes or (bool(self.changed) and torch.Tag.inplace_view not in self.func.tags)

    @property
    def needs_host(self) -> bool:
        """Whether the host must know the values of a tensor to give the result, or to know the result's shape."""
        if self.op in _MASKABLE:
            return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in self.args[1])
        return bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(self.func.tags))


class LeafOps(TorchDispatchMode):
    """Shows each call of an op that has a kernel, before and after it runs.

    Composite ops are taken apart, in inference mode too, where PyTorch hands them over whole. A custom op is one op:
    what its body calls is not seen.
    """

    fused: frozenset = frozenset()  # composite ops that are shown whole

    def before(self, call: Call) -> None: ...

    def after(self, call: Call) -> None: ...

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket not in self.fused:
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        call = Call(func, args, kwargs)
        self.before(call)
        result = func(*args, **kwargs)
        known = {storage_id(x) for x in call.inputs}
        call.made = [None if storage_id(x) in known else x for x in tensors(result)]
        self.after(call)
        return result


@dataclass
class Cost:
    """Kernels launched, and bytes read and written."""

    launches: int = 0
    bytes: int = 0


class Trace:
    """Counts inside a ``with`` block what is launched on a device other than the CPU; in inference mode.

    Views and allocations launch nothing. Every other op of PyTorch's counts as one kernel, our own as many as kernels/
    has. An op reads each of its inputs once and writes each of its outputs once; scratch memory inside an op is not
    counted. Of the paged cache it counts what the requests' tokens take.

    Args:
        context: tokens that each request has in the cache.
        strict: whether an upload raises.

    Attributes:
        by_op: launches and bytes by name, as in ``aten.mm`` or ``specdec.append_kv``.
        uploads: copies from the host. From memory that is not pinned they wait for the device.

    Raises:
        HostSyncError: inside the block, where a value is read or copied to the host; with ``strict`` also for uploads.
    """

    def __init__(self, *, context: int = 0, strict: bool = False) -> None:
        self.context = context
        self.strict = strict
        self.uploads = 0
        self.by_op: dict[str, Cost] = defaultdict(Cost)
        self._contexts = ExitStack()

    @property
    def launches(self) -> int:
        return sum(cost.launches for cost in self.by_op.values())

    @property
    def bytes(self) -> int:
        return sum(cost.bytes for cost in self.by_op.values())

    def __enter__(self) -> Trace:
        for context in (torch.inference_mode(), _Uploads(self), _Launches(self)):
            self._contexts.enter_context(context)
        return self

    def __exit__(self, *error: Any) -> None:
        self._contexts.__exit__(*error)

    def upload(self, op: object) -> None:
        """Note one by the op."""
        self.uploads += 1
        if self.strict:
            raise HostSyncError(op)


class _Uploads(TorchFunctionMode):
    """Sees the uploads that never become an op on the meta device: tensors from Python data, and lists as indices."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self._trace = trace

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _FROM_DATA:
            if _on_device(result) and not tensors(args[-1:]):
                self._trace.upload(f"torch.{func.__name__}")
        elif func in _INDEXING and _on_device(args[0]):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            for _ in (x for x in index if isinstance(x, list)):
                self._trace.upload("a list as an index")
        return result


class _Launches(LeafOps):
    fused = _FUSED

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self._trace = trace

    def before(self, call: Call) -> None:
        if any(map(_on_device, call.inputs)) and (call.needs_host or _copies_to_host(call)):
            raise HostSyncError(call.func)

    def after(self, call: Call) -> None:
        is_number = call.op is aten.scalar_tensor  # in an assignment: on a GPU it is an argument of the kernel
        touched = [x for x in (*call.made, *call.changed) if x is not None and _on_device(x)]
        if is_number or not call.has_kernel or not any(x.numel() for x in touched):
            return
        for x in call.inputs:
            if not _on_device(x) and (x.dim() or call.op in (aten._to_copy, aten.copy_)):
                self._trace.upload(call.func)  # other CPU scalars are arguments of the kernel
        cost = self._trace.by_op[str(call.op)]
        if call.func.namespace == "specdec":
            cost.launches += _kernels(call)
            cost.bytes += _own_bytes(call, self._trace.context)
        else:
            cost.launches += 1
            cost.bytes += _bytes(call)


def _on_device(x: torch.Tensor) -> bool:
    return x.device.type != "cpu"


def _copies_to_host(call: Call) -> bool:
    if call.op is aten._to_copy:
        return torch.device(call.kwargs.get("device") or call.args[0].device).type == "cpu"
    return call.op is aten.copy_ and not _on_device(call.args[0])


def _kernels(call: Call) -> int:
    """Launches of an op of ours, as in kernels/: rows, two to filter them, then a merge or a race and its end; rules, then repeats."""
    name, given = call.op.__name__, call.given
    method = given.get("method")
    races = int(name == "accept_reject" and method in ("rejection", "block", "typical"))
    if name == "accept_tree":
        races = 2 if method == "rejection" and given["node_draft_logits"] is not None else int(method == "typical")
    filters = (
        name in ("sample", "accept_reject", "accept_tree") and method != "greedy" and given["has_filters"] is not False
    )
    repeats = given.get("ngram") is not None
    return _KERNELS[name] + races + 2 * filters + repeats


def _bytes(call: Call) -> int:
    read, wrote = _by_place(call.inputs), _by_place([*call.made, *call.changed])
    if call.op in _OVERWRITES:
        del read[_place(call.changed[0])]
    if call.op in _SCATTERS:
        wrote = {_place(call.changed[0]): _scattered(call)}
    if call.op in _GATHERS:
        del read[_place(call.inputs[0])]
        read |= wrote
    return sum(read.values()) + sum(wrote.values())


def _scattered(call: Call) -> int:
    """Bytes that a scatter writes: the elements that its indices name, whatever is broadcast to them."""
    x, given = call.changed[0], call.given
    if call.op is aten.index_put_:
        indices = given["indices"]
        named = torch.broadcast_shapes(*(index.shape for index in indices if index is not None))
        beside = [size for d, size in enumerate(x.shape) if d >= len(indices) or indices[d] is None]
        count = math.prod(named) * math.prod(beside)
    else:
        count = given["index" if call.op is aten.scatter_ else "source"].numel()
    return count * x.element_size()


def _own_bytes(call: Call, context: int) -> int:
    """Of an op of ours; of the cache and its table, what B requests with ``context`` tokens each take."""
    name, given = call.op.__name__, call.given
    paged = ("k_cache", "v_cache", "block_table") if "k_cache" in given else ()
    beside = [value for key, value in given.items() if key not in paged]
    total = sum(_by_place([*tensors(beside), *call.made]).values())
    if not paged:
        return total
    cache, table = given["k_cache"], given["block_table"]
    page_size, heads, dim = cache.shape[1:]
    if name == "verify_attention":
        window = given["sliding_window"]
        tokens = given["q"].shape[1] + (context if window is None else min(context, window - 1))
    else:
        tokens = given["path" if name == "compact_kv" else "k"].shape[1]
    moves = 2 if name == "compact_kv" else 1  # it reads a row and writes it elsewhere
    rows = 2 * moves * tokens * heads * dim * cache.element_size()
    return int(total + len(table) * (rows + -(-tokens // page_size) * table.element_size()))


def _by_place(found: Iterable[torch.Tensor | None]) -> dict[tuple, int]:
    """Bytes by place in memory; those of an expanded tensor are those of the memory behind it."""
    return {_place(x): _elements(x) * x.element_size() for x in found if x is not None and _on_device(x)}


def _place(x: torch.Tensor) -> tuple:
    return storage_id(x), x.storage_offset(), x.shape, x.stride()


def _elements(x: torch.Tensor) -> int:
    return math.prod(size for size, stride in zip(x.shape, x.stride(), strict=True) if stride or not size)
