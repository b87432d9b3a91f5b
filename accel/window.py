"""Which latent frames are in the KV window, in which slot: integers only, no tensors.

Glossary
    slot      place for one latent frame's keys and values in the cache; frames never move between slots
    order     the window as upstream stores it, oldest first after the protected prefix; a list of slots
    sink      the first frames, kept for ever
    pin       the first chunk of the newest shot, kept once it has drifted next to the sink
    evict     forget the oldest unprotected frames to make room for a new chunk

Upstream (LongLive 2.0 ``CausalWanSelfAttention.forward``, 1.0 likewise) rolls the tensors; we keep the same decisions as an indirection table. Softmax
attention does not depend on the order of its keys, so only ``relative RoPE`` (positions by place in the window) ever looks at ``order``.

Two facts make a plain prefix view of the cache enough for attention: frames are dropped only right before at least as many are added, and new frames take
the lowest free slots; so the slots in use are always ``0 .. len(order) - 1``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

EMPTY = -1  # in place of a frame number: a slot of zeros that is attended all the same


@dataclass(frozen=True)
class Placement:
    """Where one forward's frames go and what it attends to.

    ``slots``: the slot of each new frame. ``first_written``: frames before this index keep the keys already stored in their slot (LongLive 1.0 never
    rewrites its sink). ``order``: every slot attended, in window order; ``frames``: the absolute latent frame in each slot of ``order``.
    """

    slots: tuple[int, ...]
    first_written: int
    order: tuple[int, ...]
    frames: tuple[int, ...]

    @property
    def filled(self) -> int:
        """Number of slots attended; they are slots ``0 .. filled - 1``."""
        return len(self.order)

    def runs(self) -> list[tuple[int, int, int]]:
        """Contiguous writes as ``(first new frame, first slot, length)``, leaving out the frames before ``first_written``."""
        runs: list[tuple[int, int, int]] = []
        for index in range(self.first_written, len(self.slots)):
            slot = self.slots[index]
            if runs and runs[-1][1] + runs[-1][2] == slot and runs[-1][0] + runs[-1][2] == index:
                runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + 1)
            else:
                runs.append((index, slot, 1))
        return runs


@dataclass
class Window:
    """The window of one video while it is being sampled. All numbers are latent frames.

    capacity: all frames held, the current chunk included. sink: first frames kept for ever. shot_pin: pin the first chunk of each shot (2.0's
    ``multi_shot_sink``). keeps_sink: never rewrite the sink's keys after their own chunk was first inserted (1.0). end: frames entered so far, counted on
    the video's own frame numbers.
    """

    capacity: int
    sink: int
    shot_pin: bool = False
    keeps_sink: bool = False
    order: list[int] = field(default_factory=list)
    frame_in: dict[int, int] = field(default_factory=dict)
    end: int = 0
    pin_start: int = -1
    pin_length: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.sink < self.capacity:
            raise ValueError(f"the sink ({self.sink} latent frames) must be smaller than the window ({self.capacity})")

    @property
    def global_sink(self) -> int:
        """Frames protected as upstream's ``global_sink_size``: the sink where shots are pinned, else none."""
        return self.sink if self.shot_pin else 0

    @property
    def protected(self) -> int:
        """Length of the prefix of ``order`` that eviction must keep."""
        if self.pin_start >= 0 and self.pin_length > 0:
            return self.global_sink + (self.pin_length if self.pin_start == self.global_sink else 0)
        return max(self.global_sink, self.sink)

    def enter(self, start: int, length: int, *, rewrite_sink: bool = False) -> Placement:
        """Place frames ``start .. start + length - 1``; evict when the window is full. Call it before each forward.

        New frames (past ``end``) are appended; frames that already are the newest ones get their own slots again. ``rewrite_sink`` lifts ``keeps_sink`` for
        this call (1.0's re-cache without a global sink). Raises ValueError when the chunk is larger than the window.
        """
        if length > self.capacity:
            raise ValueError(f"a chunk of {length} latent frames does not fit a window of {self.capacity}; use a window of at least {length}")
        new_end = start + length
        added = new_end - self.end
        filled = len(self.order)
        is_rewrite = new_end <= self.end and start > 0
        if added > 0:
            evicted = max(0, length + filled - self.capacity)
            if evicted:
                self._evict(evicted)
            # The last `length - added` frames in the window are written again together with the new ones.
            self._append(list(range(new_end - added, new_end)))
            self.end = new_end
        slots = tuple(self.order[len(self.order) - length :])
        for slot, frame in zip(slots, range(start, new_end), strict=True):
            self.frame_in[slot] = frame
        first_written = 0
        if self.keeps_sink and is_rewrite and not rewrite_sink:
            first_written = min(length, max(0, self.sink - (len(self.order) - length)))
        order = list(self.order)
        if self.keeps_sink:  # 1.0 attends its whole sink region from the first chunk on, zeros where nothing was written yet
            order += [slot for slot in range(self.sink) if slot not in self.frame_in]
        return Placement(slots, first_written, tuple(order), tuple(self.frame_in.get(slot, EMPTY) for slot in order))

    def pin(self, length: int) -> None:
        """Mark the newest chunk of ``length`` frames as the shot's anchor; it replaces an earlier pin."""
        self.pin_start = len(self.order) - length
        self.pin_length = min(self.sink, length)

    def forget_history(self, start: int) -> None:
        """Keep the global sink only, so that the chunk at ``start`` is cached again right behind it (2.0's ``shot_clean_recache``).

        A cut before the sink is full leaves the sink as it stands, like upstream: what the cut chunk's last denoising step wrote there stays, and slots that
        nothing was ever written to (frame ``EMPTY``) count as part of it.
        """
        for slot in self.order[self.global_sink :]:
            del self.frame_in[slot]
        del self.order[self.global_sink :]
        self._append([EMPTY] * (self.global_sink - len(self.order)))
        self.end = start
        self.pin_start, self.pin_length = -1, 0

    def append(self, frames: list[int]) -> Placement:
        """Add frames in window order without evicting: used to rebuild a window frame by frame. Raises ValueError when they do not fit."""
        if len(self.order) + len(frames) > self.capacity:
            raise ValueError(f"{len(frames)} more latent frames do not fit: {len(self.order)} of {self.capacity} are in use")
        self._append(frames)
        self.end = max(self.end, frames[-1] + 1)
        slots = tuple(self.order[len(self.order) - len(frames) :])
        return Placement(slots, 0, tuple(self.order), tuple(self.frame_in[slot] for slot in self.order))

    def frames(self) -> tuple[int, ...]:
        """Absolute latent frames now in the window, in window order."""
        return tuple(self.frame_in[slot] for slot in self.order)

    def copy(self) -> Window:
        """An independent window in the same state."""
        return Window(
            self.capacity, self.sink, self.shot_pin, self.keeps_sink, list(self.order), dict(self.frame_in), self.end, self.pin_start, self.pin_length
        )

    def _evict(self, count: int) -> None:
        keep = self.protected
        if self.pin_start >= keep:  # a floating pin follows its frames; one inside the protected prefix does not move
            self.pin_start -= count
        # Where the protected prefix leaves too little room, upstream overwrites its tail: hence the cut to the length that is left.
        left = (self.order[:keep] + self.order[keep + count :])[: len(self.order) - count]
        for slot in set(self.order) - set(left):
            del self.frame_in[slot]
        self.order = left

    def _append(self, frames: list[int]) -> None:
        used = set(self.order)
        free = (slot for slot in range(self.capacity) if slot not in used)
        for frame in frames:
            slot = next(free)
            self.order.append(slot)
            self.frame_in[slot] = frame
