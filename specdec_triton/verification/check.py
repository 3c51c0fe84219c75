"""What a check found, and what all of them say together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

_TEXTS = {"greedy": "greedy", "seeds": "seeded", "distribution": "sampled"}


@dataclass(frozen=True)
class Check:
    """The outcome of one check.

    Attributes:
        name: ``module``, ``greedy``, ``bits``, ``seeds``, ``distribution``; or ``speed``, ``acceptance``, which only inform.
        passed: None: it does not apply here, could not be made, or only informs; the detail says so.
        detail: one line; of a failure, the first: which prompt (from 1), which token (from 1), what was expected.
        of: whose drafts, and judged by which method, if the check is about them.
        facts: the numbers behind the detail, for programs.
    """

    name: str
    passed: bool | None
    detail: str
    of: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return f"{self.name}, {self.of}" if self.of else self.name


def verdict(checks: Sequence[Check]) -> tuple[bool | None, str]:
    """Whether speculation is lossless here, as far as ``checks`` can tell (None: they tell nothing), and a sentence."""
    failed = [check.label for check in checks if check.passed is False]
    if failed:
        return False, f"NOT lossless: {_join(failed, '; ')} failed"
    shown: list[str] = []
    open_: list[str] = []
    for name, texts in _TEXTS.items():
        found = [check.passed for check in checks if check.name == name]
        (shown if any(found) else open_).append(texts)
    if not shown:
        return None, "nothing is shown: no check could judge a draft"
    missing = f"; {_join(open_)} text is not checked" if open_ else ""
    if any(check.facts.get("rounding") for check in checks):
        same = f"{_join(shown)} text is what the target alone writes, except at near-ties"
        return True, f"lossless up to rounding: {same}{missing}"
    return True, f"lossless: {_join(shown)} text is what the target alone writes{missing}"


def _join(names: Sequence[str], separator: str = ", ") -> str:
    return " and ".join(filter(None, (separator.join(names[:-1]), names[-1])))
