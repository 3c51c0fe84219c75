"""Train Medusa heads (Cai et al. 2024): one block each, before the target's own last product, which they borrow."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from specdec_triton.training.features import Example
from specdec_triton.training.student import Predictions, Student


class MedusaStudent(Student):
    """Head s is given what the target's head is given behind position i, and learns the target's distribution behind i + 1 + s.

    Args:
        heads: how many.
    """

    def __init__(self, model: Any, ids: torch.Tensor, heads: int) -> None:
        super().__init__(model, ids)
        width = self.taught_by.shape[1]
        self._blocks = [nn.Linear(width, width) for _ in range(heads)]
        self.module = nn.ModuleList(self._blocks).to(self.device)
        for block in self._blocks:
            nn.init.zeros_(block.weight)  # begin as the target's own head
            nn.init.zeros_(block.bias)

    def predict(self, example: Example, steps: int) -> Iterator[Predictions]:
        states = example.last.float()
        for step, block in zip(range(steps), self._blocks, strict=False):
            at = torch.arange(1 + step, len(states), device=self.device)
            if not len(at):
                return
            given = states[: len(at)]

            def logits(chosen: torch.Tensor, given: torch.Tensor = given, block: nn.Module = block) -> torch.Tensor:
                x = given[chosen]
                return (x + F.silu(block(x))) @ self.taught_by.T

            yield at, logits

    def save(self, folder: Path) -> None:
        """As the Medusa repository does, without lm_heads."""
        tensors = {}
        for i, block in enumerate(self._blocks):
            for name, x in block.named_parameters():
                tensors[f"{i}.0.linear.{name}"] = x.detach().to("cpu", torch.bfloat16).contiguous()
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / "model.safetensors")
        config = {"medusa_num_heads": len(self._blocks), "medusa_num_layers": 1}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
