"""Drafting: tokens that are proposed for an output, so that one forward can decide on several of its steps.

Proposals are what followed the same tokens before (`NgramDrafter`), what the model's MTP layer predicts (`mtp.py`), or
what the model predicts with fewer layers (a policy, which the engine runs). The engine decides on each proposed token
as on any other, so none changes the output. The `Planner` knows the time of forwards and how often proposals come true.
It says how many tokens to propose: none where that would be slower. Knows no model and no backend.
"""

from __future__ import annotations

from bisect import bisect
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from ..errors import DRAFTERS, RequestError, number, one_of, whole_number
from ..policy import DepthPolicy

MAX_TOKENS, MIN_MATCH, MIN_PROBABILITY = 16, 4, 0.5
RECENT = 5  # timed forwards of a size that count; their median is taken
STALE = 2000  # forwards after which a size must be timed again
OPTIMISM = 0.5  # of the last known slope, beyond the largest size that was timed: weights are read once
PRIOR, PRIOR_WEIGHT = 0.6, 4.0  # the chance that a proposed token comes true before any did, and what that counts for
MEMORY = 32.0  # proposed tokens over which a record fades
PROBE_STEPS = 64  # between two looks at a policy that did not pay


@dataclass(frozen=True)
class Drafting:
    """How the tokens of an output are proposed.

    Args:
        kind: "ngram" proposes what followed the longest suffix of prompt and output that occurred before, "mtp" what
            the model's MTP layer predicts, "policy" what the model predicts under `policy`, "auto" the first of the
            three that there is and that has a proposal.
        max_tokens: most proposed tokens at a time, 1 to 64.
        min_match: the least length of such a suffix, in tokens, 1 to 1024.
        min_probability: predictions are proposed up to the first one with a lower probability, 0 to 1.
        policy: for "policy"; "auto" does without if it is None.
        max_width: most tokens in a forward that verifies; None for no limit. See `Engine.bitwise_width`.
        always: verify every proposal, even where that is slower: for tests and measurements.

    Raises:
        RequestError: a value out of its range, or kind "policy" without one.
    """

    kind: str = "auto"
    max_tokens: int = MAX_TOKENS
    min_match: int = MIN_MATCH
    min_probability: float = MIN_PROBABILITY
    policy: DepthPolicy | None = None
    max_width: int | None = None
    always: bool = False

    def __post_init__(self) -> None:
        one_of("draft", self.kind, DRAFTERS)
        whole_number("draft_max", self.max_tokens, 1, 64)
        whole_number("draft_min_match", self.min_match, 1, 1024)
        number("draft_p_min", self.min_probability, 0, 1)
        if self.kind == "policy" and self.policy is None:
            raise RequestError("there is no policy to draft with", "name one with --policy, or use draft ngram")


class Draft(NamedTuple):
    """Proposed tokens, and the length of the match that they come from."""

    token_ids: list[int]
    match: int


class Record:
    """How often proposed tokens came true; the past fades."""

    def __init__(self) -> None:
        self._right, self._total = 0.0, 0.0

    def note(self, is_right: bool) -> None:
        """Count one proposed token."""
        fade = 1 - 1 / MEMORY
        self._right, self._total = self._right * fade + is_right, self._total * fade + 1

    def chance(self, prior: float = PRIOR) -> float:
        """The chance that the next one comes true; `prior` is what is known without this record."""
        return (self._right + PRIOR_WEIGHT * prior) / (self._total + PRIOR_WEIGHT)


class SuffixIndex:
    """Finds the longest suffix of a growing text that occurred in it before; a token takes constant time on average.

    A suffix automaton: A. Blumer et al., Theoretical Computer Science 40 (1985), 31-55. State 0 is the empty text.
    """

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self._begin()

    def _begin(self) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._link, self._length, self._end = [-1], [0], [0]  # suffix link; longest text, where it first ended
        self._last, self._indexed = 0, 0

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add tokens at the end."""
        self.token_ids += token_ids
        if self._indexed < 0:  # an interrupt came while a token was added
            self._begin()
        while (index := self._indexed) < len(self.token_ids):
            self._indexed = -1
            self._add(self.token_ids[index])
            self._indexed = index + 1

    def match(self) -> tuple[int, int]:
        """The length of that suffix, and the index of the token that followed its first occurrence."""
        state = max(self._link[self._last], 0)
        return self._length[state], self._end[state]

    def _add(self, token_id: int) -> None:
        length = self._length[self._last] + 1
        state, shorter = self._new_state({}, length, length), self._last
        while shorter >= 0 and token_id not in self._next[shorter]:
            self._next[shorter][token_id] = state
            shorter = self._link[shorter]
        if shorter >= 0:
            self._link[state] = self._state_of(shorter, token_id)
        self._last = state

    def _state_of(self, shorter: int, token_id: int) -> int:
        """The state of the longest text of `shorter` with this token, made if it only has one with longer texts."""
        state, length = self._next[shorter][token_id], self._length[shorter] + 1
        if self._length[state] == length:
            return state
        own = self._new_state(dict(self._next[state]), length, self._end[state])
        self._link[own], self._link[state] = self._link[state], own
        while shorter >= 0 and self._next[shorter].get(token_id) == state:
            self._next[shorter][token_id] = own
            shorter = self._link[shorter]
        return own

    def _new_state(self, following: dict[int, int], length: int, end: int) -> int:
        self._next.append(following)
        self._link.append(0)
        self._length.append(length)
        self._end.append(end)
        return len(self._next) - 1


class NgramDrafter:
    """Proposes the tokens that followed the longest suffix of one sequence that occurred in it before."""

    def __init__(self, min_match: int) -> None:
        self._min_match, self._index = min_match, SuffixIndex()

    @property
    def num_tokens(self) -> int:
        """How many tokens of the sequence it knows."""
        return len(self._index.token_ids)

    def propose(self, new_ids: Sequence[int], most: int) -> Draft | None:
        """At most so many tokens, given those that have come since the last call; None without a match."""
        self._index.extend(new_ids)
        match, end = self._index.match()
        token_ids = self._index.token_ids[end : end + most]
        return Draft(token_ids, match) if match >= self._min_match and token_ids else None


class Planner:
    """How many proposed tokens to verify in the next forward: as many as give the most tokens a second."""

    def __init__(self) -> None:
        self._times: dict[int, deque[float]] = {}  # seconds of forwards by their size: their number of tokens
        self._timed_at: dict[int, int] = {}  # when a size was last timed, in forwards
        self._sizes: list[int] = []  # sorted
        self._seconds: dict[int, float] = {}  # the medians of `_times`
        self._num_forwards = 0
        self._records: dict[int, Record] = {}  # of all sequences, by the size of the match before a token
        self._draft_times: deque[float] = deque(maxlen=RECENT)  # seconds of forwards that propose
        self.draft_seconds = self.verify_seconds = 0.0  # of all forwards that proposed, and of those that verified
        self.num_verified, self.num_accepted = Counter[int](), Counter[int]()  # tokens by their place in a draft

    def note_forward(self, num_tokens: int, seconds: float, verifies: bool = False) -> None:
        """Count the time of a forward that only decodes; it verifies if some of its tokens are proposed ones."""
        self._num_forwards += 1
        self.verify_seconds += seconds * verifies
        times = self._times.setdefault(num_tokens, deque(maxlen=RECENT))
        times.append(seconds)
        self._seconds[num_tokens], self._timed_at[num_tokens] = median(times), self._num_forwards
        if len(self._sizes) < len(self._seconds) or self._num_forwards % RECENT == 0:
            stale = {size for size, when in self._timed_at.items() if self._num_forwards - when >= STALE}
            self._sizes = sorted(self._seconds.keys() - stale)  # first: an interrupt may come at any line
            for table in (self._times, self._seconds, self._timed_at):
                for size in stale:
                    table.pop(size, None)

    def note_draft(self, seconds: float) -> None:
        """Count the time of a forward that proposes a token for each of several sequences."""
        self._draft_times.append(seconds)
        self.draft_seconds += seconds

    def seconds(self, num_tokens: int) -> float | None:
        """The time of a forward: measured, or from the sizes beside it; None if it is too far from those measured."""
        sizes, times = self._sizes, self._seconds
        if num_tokens in times:
            return times[num_tokens]
        place = bisect(sizes, num_tokens)
        if not sizes or num_tokens > 2 * sizes[-1]:
            return None
        if place == 0:
            return times[sizes[0]]
        if place < len(sizes):
            lower, upper = sizes[place - 1 : place + 1]
            return times[lower] + (num_tokens - lower) / (upper - lower) * (times[upper] - times[lower])
        slope = 0.0  # with one size alone, so that the next one is tried
        if len(sizes) > 1:
            slope = max(0.0, (times[sizes[-1]] - times[sizes[-2]]) / (sizes[-1] - sizes[-2]))
        return times[sizes[-1]] + OPTIMISM * slope * (num_tokens - sizes[-1])

    def chance(self, match: int, own: Record) -> float:
        """The chance that a token comes true after a match of this length, in a sequence with its own record."""
        record = self._records.get(match.bit_length())
        return own.chance(PRIOR if record is None else record.chance())

    def note_token(self, match: int, own: Record, is_right: bool) -> None:
        """Count whether a token that was proposed after a match came true; it need not have been verified."""
        own.note(is_right)
        self._records.setdefault(match.bit_length(), Record()).note(is_right)

    def plan(self, drafts: Sequence[tuple[Draft, Record]], num_tokens: int) -> list[int]:
        """How many tokens of each draft to add to a forward that has `num_tokens` tokens without them."""
        counts = [0] * len(drafts)
        gains: list[tuple[float, int]] = []  # the chance that a token comes true, and of which draft it is
        for index, (draft, record) in enumerate(drafts):
            gain = 1.0
            for place in range(len(draft.token_ids)):
                gain *= self.chance(draft.match + place, record)
                gains.append((gain, index))
        gains.sort(key=lambda pair: -pair[0])  # stable, and within a draft they only fall
        chosen = _most_a_second(num_tokens, [gain for gain, _ in gains], lambda added: self.seconds(num_tokens + added))
        for _, index in gains[:chosen]:
            counts[index] += 1
        return counts

    def plan_predictions(self, record: Record, num_tokens: int, most: int, is_probe: bool) -> int:
        """How many tokens to predict for each of `num_tokens` sequences; one at a probe, if it may pay."""
        now, wider = self.seconds(num_tokens), self.seconds(2 * num_tokens)
        if now is None or wider is None:
            return 0
        draft = median(self._draft_times) if self._draft_times else 0.0
        if is_probe:
            return int(2 * now > draft + wider)

        def seconds(count: int) -> float | None:
            verified = self.seconds((1 + count) * num_tokens)
            return None if verified is None else count * draft + verified

        return _most_a_second(1, [record.chance() ** count for count in range(1, most + 1)], seconds)


def _most_a_second(certain: int, gains: Sequence[float], seconds: Callable[[int], float | None]) -> int:
    """How many tokens to add so that the most tokens a second are to be expected.

    Args:
        certain: tokens that come without any.
        gains: the chances that further ones come true, in the order in which they would be added.
        seconds: the time of a forward by how many are added; None if it is not known.
    """
    best, expected, chosen = 0.0, float(certain), 0
    for added, gain in enumerate([0.0, *gains]):
        expected += gain
        if (time := seconds(added)) is None:
            break
        if expected / time > best:
            best, chosen = expected / time, added
    return chosen
