"""The training loop: AdamW over shards of examples, taken up again where it was stopped."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specdec_triton.training.agreement import Agreement, shares, tokens_per_pass
from specdec_triton.training.features import Features
from specdec_triton.training.student import Student


@dataclass(frozen=True)
class Schedule:
    """How long and how fast.

    Attributes:
        epochs: passes over all examples. batch: tokens learnt from between two updates. rate: the largest learning rate; it rises over the first
            ``warmup`` of all updates and falls to a tenth along a cosine.
        steps: of feeding on its own outputs; one alone for the first ``single`` of the training.
        held_out: the share of shards that is judged and not learnt from, at least one.
    """

    epochs: int = 2
    batch: int = 192
    rate: float = 8e-4
    warmup: float = 0.03
    steps: int = 3
    single: float = 2 / 3
    held_out: float = 0.04


class Trainer:
    """Args: state: the file that holds everything that is needed to go on."""

    def __init__(self, student: Student, features: Features, schedule: Schedule, state: Path) -> None:
        self._student = student
        self._features = features
        self._schedule = schedule
        self._state = state
        shards = features.shards
        apart = max(1, round(len(shards) * schedule.held_out)) if len(shards) > 1 else 0
        self.held_out, self._shards = shards[:apart], shards[apart:]
        self._parameters = list(student.trained().values())
        decayed = [p for p in self._parameters if p.dim() > 1]
        others = [p for p in self._parameters if p.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(groups, lr=schedule.rate, betas=(0.9, 0.95), fused=True)
        self._done = 0  # shards
        self.log: list[dict[str, Any]] = []
        if state.is_file():
            held = torch.load(state, weights_only=True, map_location=student.device)
            with torch.no_grad():
                for name, p in student.trained().items():
                    p.copy_(held["parameters"][name])
            self._optimizer.load_state_dict(held["optimizer"])
            self._done, self.log = held["done"], held["log"]

    @property
    def total(self) -> int:
        """Shards to go through in all."""
        return self._schedule.epochs * len(self._shards)

    @property
    def done(self) -> int:
        return self._done

    def run(
        self, *, until: float = math.inf, progress: Callable[[int, dict[str, Any]], None] = lambda done, facts: None
    ) -> bool:
        """Train until all is done or ``until`` (``time.monotonic``); whether it is."""
        while self._done < self.total and time.monotonic() < until:
            epoch, place = divmod(self._done, len(self._shards))
            order = random.Random(epoch).sample(self._shards, len(self._shards))
            facts = self._learn(order[place])
            self._done += 1
            if self._done == self.total or (place + 1) % max(1, len(self._shards) // 4) == 0:
                facts["held_out"] = self.judge()
            self.log.append(facts)
            self._save()
            progress(self._done, facts)
        return self._done >= self.total

    def _learn(self, shard: Path) -> dict[str, Any]:
        """A shard; the share of agreement at each step, of the training's own examples."""
        s, start = self._schedule, time.monotonic()
        self._student.module.train()
        examples = list(self._features.read([shard]))
        random.Random(self._done).shuffle(examples)
        steps = 1 if self._done < s.single * self.total else s.steps
        tally, loss, weight, total = [Agreement() for _ in range(steps)], 0.0, 0, 0
        for i, example in enumerate(examples):
            part, count, found = self._student.losses(example, steps)
            if part.requires_grad:
                part.backward()
            loss += float(part.detach())
            weight += count
            _add(tally, found)
            if weight >= s.batch or (i == len(examples) - 1 and weight > 0):
                self._update(weight, (self._done + i / len(examples)) / self.total)
                total, weight = total + weight, 0
        return {
            "shard": self._done, "steps": steps, "loss": loss / max(total, 1), "agreement": shares(tally),
            "seconds": time.monotonic() - start, "tokens": total,
        }  # fmt: skip

    def _update(self, tokens: int, part: float) -> None:
        s = self._schedule
        rate = (
            part / s.warmup if part < s.warmup else 0.55 + 0.45 * math.cos(math.pi * (part - s.warmup) / (1 - s.warmup))
        )
        for group in self._optimizer.param_groups:
            group["lr"] = s.rate * max(rate, 1e-3)
        for p in self._parameters:
            if p.grad is not None:
                p.grad /= tokens
        nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()

    @torch.no_grad()
    def judge(self, most: int = 128) -> dict[str, Any]:
        """How often head and target agree at each step, on held-out examples, and what that would bring."""
        self._student.module.eval()
        tally = [Agreement() for _ in range(self._schedule.steps)]
        for i, example in enumerate(self._features.read(self.held_out)):
            if i == most:
                break
            _add(tally, self._student.losses(example, self._schedule.steps)[2])
        return {"agreement": shares(tally), "tokens_per_pass": tokens_per_pass(tally)}

    def _save(self) -> None:
        held = {
            "parameters": {name: p.detach() for name, p in self._student.trained().items()},
            "optimizer": self._optimizer.state_dict(),
            "done": self._done,
            "log": self.log,
        }
        part = self._state.with_suffix(".part")
        torch.save(held, part)
        part.rename(self._state)


def _add(tally: Sequence[Agreement], found: Sequence[Agreement]) -> None:
    for sums, more in zip(tally, found, strict=False):
        sums.add(more)
