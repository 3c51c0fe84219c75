"""What a decoder warns of, each once: drafters that fail, or are hardly ever right, and the like."""

from __future__ import annotations

from specdec_triton._warn import warn

_MISFIT_DRAFTS, _MISFIT_RATE = 200, 0.02


class Notices:
    """Warnings of one decoder. They wait for :meth:`give`: where warnings are errors, a step must have ended."""

    def __init__(self) -> None:
        self._drafted = self._accepted = 0
        self._given: set[str] = set()
        self._due: list[tuple[str, type[Warning]]] = []

    def judged(self, drafted: int, accepted: int, by_model: bool) -> None:
        """Of drafts: a misloaded draft model costs time and shows nowhere else."""
        self._drafted += drafted
        self._accepted += accepted
        if self._drafted < _MISFIT_DRAFTS:
            return
        if self._accepted < _MISFIT_RATE * self._drafted:
            self._warn(
                "misfit",
                f"only {self._accepted} of the last {self._drafted} drafts were accepted: "
                + (
                    "does the draft model belong to the target?"
                    if by_model
                    else "this drafter does not suit these texts"
                ),
            )
        self._drafted = self._accepted = 0

    def grown(self, length: int, longest: int | None) -> None:
        """Of a text that goes on. longest: texts longer than this get no drafts; None: no limit."""
        if longest is not None and length >= longest:
            self._warn(
                "outgrown",
                f"a text has outgrown the draft model's context of {longest} tokens; it goes on without drafts",
            )

    def not_finite(self) -> None:
        self._warn("not finite", "the drafter's logits hold NaN or infinity; those drafts are dropped")

    def failed(self, error: BaseException) -> None:
        self._warn("failed", f"the drafter failed, and decoding goes on without it: {type(error).__name__}: {error}")

    def foreign(self) -> None:
        self._warn("foreign", "the drafter drafts ids outside the target's vocabulary; those drafts are dropped")

    def uncaptured(self, message: str) -> None:
        self._warn("uncaptured", message, RuntimeWarning)

    def inexact(self, error: Exception) -> None:
        self._warn("inexact", f"{error}; the text may differ from plain decoding at near-ties")

    def give(self) -> None:
        """Warn of what has come up."""
        while self._due:
            warn(*self._due.pop(0))

    def _warn(self, kind: str, message: str, category: type[Warning] = UserWarning) -> None:
        if kind not in self._given:
            self._given.add(kind)
            self._due.append((message, category))
