"""How it went: of one request, and of a decoder as a whole. What is undefined is None, never a division by zero."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class GenerationStats:
    """Counts of one request. Drafts that were cut off or follow an end-of-sequence token are not counted.

    Attributes:
        prompt_tokens, new_tokens: lengths.
        target_passes: passes of the target that emitted tokens, the prompt's included.
        drafted, accepted: draft tokens that the target scored, and those that it kept.
        drafted_at, accepted_at: the same by place in the draft (index 0: first draft of a round).
        shared_tokens: tokens of the prompt whose keys another request had already computed.
        preemptions: how often it had to make room for older requests.
        seconds: from the start of the prompt's pass to the last token.
        phase_seconds: what the decoder spent meanwhile in ``prefill``, ``draft``, ``verify`` and ``accept``, neighbours' shares of
            common passes included. On a GPU only of rounds that were not replayed from a captured graph.
    """

    prompt_tokens: int = 0
    new_tokens: int = 0
    target_passes: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    shared_tokens: int = 0
    preemptions: int = 0
    seconds: float = 0.0
    phase_seconds: dict[str, float] = field(default_factory=dict)

    @property
    def acceptance_rate(self) -> float | None:
        """accepted / drafted; None when nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def acceptance_by_position(self) -> list[float]:
        """The share of drafts kept, by place in the draft."""
        return [kept / n for kept, n in zip(self.accepted_at, self.drafted_at, strict=True)]

    @property
    def tokens_per_target_pass(self) -> float | None:
        return self.new_tokens / self.target_passes if self.target_passes else None

    @property
    def tokens_per_second(self) -> float | None:
        """New tokens by wall clock, the prompt's pass included."""
        return self.new_tokens / self.seconds if self.seconds > 0 else None

    def count_round(self, emitted: int, drafted: int, accepted: int) -> None:
        self.new_tokens += emitted
        self.target_passes += 1
        self.drafted += drafted
        self.accepted += accepted
        while len(self.drafted_at) < drafted:
            self.drafted_at.append(0)
            self.accepted_at.append(0)
        for j in range(drafted):
            self.drafted_at[j] += 1
            self.accepted_at[j] += j < accepted


@dataclass
class DecoderStats(GenerationStats):
    """Sums over a decoder's requests, running ones included. ``seconds`` is the time spent in its steps; what ``phase_seconds``
    are missing of it is bookkeeping.

    Attributes:
        requests: that have ended, by finish reason.
        rounds: passes of draft, verify, accept over all requests at once.
        pages_in_use, graph_bytes: at present.
    """

    requests: dict[str, int] = field(default_factory=dict)
    rounds: int = 0
    pages_in_use: int = 0
    graph_bytes: int = 0

    def add(self, stats: GenerationStats) -> None:
        """Count a request in; its seconds overlap with others' and are not added."""
        self.prompt_tokens += stats.prompt_tokens
        self.new_tokens += stats.new_tokens
        self.target_passes += stats.target_passes
        self.drafted += stats.drafted
        self.accepted += stats.accepted
        self.shared_tokens += stats.shared_tokens
        self.preemptions += stats.preemptions
        for mine, theirs in ((self.drafted_at, stats.drafted_at), (self.accepted_at, stats.accepted_at)):
            mine += [0] * (len(theirs) - len(mine))
            for j, n in enumerate(theirs):
                mine[j] += n
