"""The suffix automaton of a growing text: what has followed each of its substrings, and how often.

A state stands for substrings that end at the same places. The link of a state leads to its longest suffix that ends at more places; so the
link of the whole text's state is the longest end of the text that has occurred before. Adding a token takes constant amortised time
(Blumer et al. 1985; "online" construction), and counting its occurrences a walk along the links, of a few states in most texts.
"""

from __future__ import annotations

from collections.abc import Iterable

ROOT = 0
_COUNTED = 32  # links that a new occurrence is counted along; a text of one token has as many links as tokens


class SuffixAutomaton:
    """Of one text, or of several that are kept apart.

    Attributes:
        last: the state of the whole text.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._count = [0]
        self.last = ROOT
        for token in tokens:
            self.add(token)

    def __len__(self) -> int:
        """Tokens of the text that grows."""
        return self._length[self.last]

    def start(self) -> None:
        """What comes now is another text: nothing leads from the last one to it."""
        self.last = ROOT

    def add(self, token: int) -> None:
        """The text grows by a token."""
        nexts, link, length = self._next, self._link, self._length
        last, known = self.last, nexts[self.last].get(token)
        if known is not None:  # after start(): the text begins as an earlier one did
            state = known if length[known] == length[last] + 1 else self._split(last, token, known)
        else:
            state = self._state({}, length[last] + 1)
            at = last
            while at >= 0 and token not in nexts[at]:
                nexts[at][token] = state
                at = link[at]
            if at >= 0:
                known = nexts[at][token]
                link[state] = known if length[known] == length[at] + 1 else self._split(at, token, known)
            else:
                link[state] = ROOT
        self.last = at = state
        for _ in range(_COUNTED):
            if at <= ROOT:
                break
            self._count[at] += 1
            at = link[at]

    def _state(self, nexts: dict[int, int], length: int) -> int:
        self._next.append(nexts)
        self._link.append(ROOT)
        self._length.append(length)
        self._count.append(0)
        return len(self._length) - 1

    def _split(self, at: int, token: int, known: int) -> int:
        """The state of the shorter substrings of ``known``, from now on apart from the longer ones, which end at fewer places."""
        nexts, link = self._next, self._link
        short = self._state(dict(nexts[known]), self._length[at] + 1)
        link[short], link[known] = link[known], short
        self._count[short] = self._count[known]
        while at >= 0 and nexts[at].get(token) == known:
            nexts[at][token] = short
            at = link[at]
        return short

    def repeated(self) -> tuple[int, int]:
        """The longest end of the text that has occurred before, as a state, and its length."""
        state = max(self._link[self.last], ROOT)
        return state, self._length[state]

    def follow(self, state: int, matched: int, token: int) -> tuple[int, int]:
        """For another text, whose longest end that occurs here is (state, matched): the same once it has grown by a token."""
        nexts = self._next
        while state > ROOT and token not in nexts[state]:
            state = self._link[state]
            matched = self._length[state]
        if token in nexts[state]:
            return nexts[state][token], matched + 1
        return ROOT, 0

    def likeliest(self, state: int) -> tuple[int, int, float] | None:
        """The token that followed most often, the state that it leads to, and its share of all that followed; None: nothing has.

        Of equal ones the one that came last to be known.
        """
        best, most, total = None, 0, 0
        for token, after in self._next[state].items():
            count = self._count[after]
            total += count
            if count >= most:
                best, most = (token, after), count
        if best is None or total == 0:
            return None
        return *best, most / total
