"""Read a published head: its configuration and its tensors, each of which must be used, present and of the right shape.

A head that is loaded in part drafts as before, and nearly nothing is accepted, without an error (faults.md I5 to I7, I9 to I16).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from specdec_triton.errors import ModelNotFoundError, UnsupportedModelError
from specdec_triton.models import shipped_head

_PATTERNS = ("*.safetensors", "*.bin", "*.pt")
_IGNORED = ("rotary_emb.inv_freq",)  # derived from the configuration


class Checkpoint:
    """A head's files.

    Args:
        source: a folder, or a hub id.

    Attributes:
        name: what it was asked for by. config: of ``config.json``; empty if there is none.

    Raises:
        ModelNotFoundError: there are no such files, or they cannot be read.
    """

    def __init__(self, source: str | os.PathLike[str]) -> None:
        self.name = str(source)
        folder = find(source)
        try:
            self.config: dict[str, Any] = _config(folder)
            self._tensors = _tensors(folder)
        except ModelNotFoundError:
            raise
        except Exception as error:  # a damaged file raises whatever its reader raises
            raise ModelNotFoundError(f"cannot read the head {self.name!r}: {' '.join(str(error).split())}") from error
        self._used: set[str] = set()

    @property
    def names(self) -> list[str]:
        return sorted(self._tensors)

    def strip(self, prefix: str) -> None:
        """Leave out a prefix of tensors' names, where it is there."""
        self._tensors = {name.removeprefix(prefix): x for name, x in self._tensors.items()}

    def rename(self, old: str, new: str) -> None:
        """Another name for the tensors that begin with ``old``."""
        self._tensors = {
            new + name.removeprefix(old) if name.startswith(old) else name: x for name, x in self._tensors.items()
        }

    def has(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor that must be there."""
        return tuple(self._get(name).shape)

    def take(self, name: str, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """A tensor that must be there, of that shape.

        Raises:
            UnsupportedModelError: it is not, or it holds NaN or infinity.
        """
        x = self._get(name)
        self._used.add(name)
        if shape is not None and tuple(x.shape) != shape:
            raise self.error(f"its tensor {name!r} has the shape {list(x.shape)}, expected {list(shape)}")
        if x.is_floating_point() and not bool(x.isfinite().all()):
            raise self.error(f"its tensor {name!r} holds NaN or infinity")
        return x

    def take_if(self, name: str, shape: tuple[int, ...]) -> torch.Tensor | None:
        """A tensor that may be missing."""
        return self.take(name, shape) if self.has(name) else None

    def finish(self) -> None:
        """Raises UnsupportedModelError if a tensor has not been used."""
        unused = sorted(
            name for name in self._tensors if name not in self._used and not any(part in name for part in _IGNORED)
        )
        if unused:
            raise self.error(f"{len(unused)} of its tensors are of no known use, {unused[0]!r} first")

    def number(self, name: str, default: int | None = None) -> int:
        """An integer of the configuration."""
        value = self.config.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(f"its config.json must have {name!r}, an integer above 0, got {value!r}")
        return value

    def error(self, reason: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"the head {self.name!r} cannot be used: {reason}")

    def _get(self, name: str) -> torch.Tensor:
        if name not in self._tensors:
            held = ", ".join(self.names[:6]) + (", ..." if len(self.names) > 6 else "")
            raise self.error(f"it lacks the tensor {name!r} (it has {held})")
        return self._tensors[name]


def find(source: str | os.PathLike[str]) -> Path:
    """The folder of a head's files; one from the hub is fetched, ``smollm2`` stands for the one that comes with this package.

    Raises:
        ModelNotFoundError: there is none, or it holds no tensors.
    """
    folder = _folder(str(source))
    if not any(next(folder.glob(pattern), None) for pattern in _PATTERNS):
        raise ModelNotFoundError(f"the folder {str(folder)!r} holds no tensors ({', '.join(_PATTERNS)})")
    return folder


def _folder(name: str) -> Path:
    if os.path.isdir(name):
        return Path(name)
    if (shipped := shipped_head(name)) is not None:
        return shipped
    if not name.strip() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelNotFoundError(f"there is no head {name!r}: no such folder")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", *_PATTERNS]))
    except Exception as error:
        raise ModelNotFoundError(
            f"there is no head {name!r}: it is no folder, and the hub did not give it ({' '.join(str(error).split())[:200]})"
        ) from error


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    return dict(json.loads(path.read_text())) if path.is_file() else {}


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Of all safetensors files, or else of what ``torch.save`` wrote, as weights alone: nothing in it is run."""
    tensors: dict[str, torch.Tensor] = {}
    if files := sorted(folder.glob("*.safetensors")):
        from safetensors.torch import load_file

        for file in files:
            tensors |= load_file(file)
        return tensors
    for file in sorted([*folder.glob("*.bin"), *folder.glob("*.pt")]):
        held = torch.load(file, map_location="cpu", weights_only=True)
        tensors |= {name: x for name, x in held.items() if isinstance(x, torch.Tensor)}
    return tensors
