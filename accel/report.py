"""What was asked, what happened and why, as data, JSON and text; every node reports through these classes."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Line:
    """One thing that was asked for: requested -> effective, with the reason in a sentence."""

    what: str
    requested: str
    effective: str
    why: str

    def __str__(self) -> str:
        return f"{self.what}: {self.requested} → {self.effective} ({self.why})"


@dataclass(frozen=True)
class Report:
    """A node's account of itself: lines, counts of what really ran, and notes."""

    title: str
    lines: tuple[Line, ...] = ()
    counts: Mapping[str, object] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict:
        """Only strings, numbers, lists and dicts, so that it goes into a LATENT, a state or a file's metadata."""
        return {
            "title": self.title,
            "lines": [vars(line) for line in self.lines],
            "counts": dict(self.counts),
            "notes": list(self.notes),
        }

    def text(self) -> str:
        """Plain text, a line each; counts that hold a dict are spread over one line."""
        counts = []
        for name, value in self.counts.items():
            if isinstance(value, Mapping):
                value = ", ".join(f"{key} {number}" for key, number in value.items()) or "none"
            counts.append(f"{name}: {value}")
        return "\n".join([*map(str, self.lines), *counts, *self.notes])


@dataclass(frozen=True)
class Call:
    """What is counted about one attention call."""

    kind: str  # "self" or "cross"
    is_tagged: bool  # made by our own forward, which says what it is
    shape: str | None  # None: the tensors could not be read
    is_cached: bool  # self-attention whose keys reach back beyond the queries (q != k)


class CallCounts:
    """Attention calls since clear(), by kind, implementation and shape. One dictionary update per call."""

    def __init__(self) -> None:
        self._calls: Counter[tuple[Call, str, str | None]] = Counter()

    def clear(self) -> None:
        self._calls.clear()

    def add(self, call: Call, implementation: str, passed_on: str | None = None) -> None:
        """passed_on: why the call went on to another implementation, None when it was computed here."""
        self._calls[call, implementation, passed_on] += 1

    @property
    def total(self) -> int:
        return self._calls.total()

    def implementations(self) -> dict[str, int]:
        """Who computed how many calls, most first."""
        found: Counter[str] = Counter()
        for (_, implementation, _), number in self._calls.items():
            found[implementation] += number
        return dict(found.most_common())

    def to_dict(self) -> dict:
        """JSON-able; the numbers under one heading add up to "calls" where the heading covers every call."""
        kinds: Counter[str] = Counter()
        passed_on: Counter[str] = Counter()
        shapes: Counter[str] = Counter()
        plain = cached = accelerated = 0
        for (call, _, reason), number in self._calls.items():
            kinds[call.kind] += number
            plain += 0 if call.is_tagged else number
            cached += number if call.is_cached else 0
            shapes[call.shape or "not plain tensors"] += number
            if reason is None:
                accelerated += number
            else:
                passed_on[reason] += number
        return {
            "calls": self.total,
            "accelerated": accelerated,
            "self": kinds["self"],
            "cross": kinds["cross"],
            "cached": cached,
            "plain": plain,
            "implementations": self.implementations(),
            "passed_on": dict(passed_on.most_common()),
            "shapes": dict(shapes.most_common()),
        }
