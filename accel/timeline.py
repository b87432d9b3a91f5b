"""Which prompt belongs to which chunk: reads timeline text, snaps times to chunks, and says what it did.

Pure Python. Encoding the texts is left to the node, looking prompts up chunk by chunk to the sampler.

The text, line by line::

    # a comment
    0:00 A red fox walks through snow.
    It looks around.                        (no time: goes on with the prompt above)
    0:05 cut The fox sleeps in its den.     (a new shot)
    0:10.5 switch The fox wakes up.         (another prompt inside the same shot)

A time is ``mm:ss``, ``mm:ss.f`` or ``h:mm:ss``, with two digits of seconds, so that "16:9" or "3 dogs" in a prompt is no time. `` || `` separates the prompts
of a batch. A change without a word is a cut: LongLive 2.0 was trained to change prompts at cuts.
"""

from __future__ import annotations

import html
import math
import re
import textwrap
import unicodedata
from dataclasses import dataclass

from .geometry import TEMPORAL_COMPRESSION, first_pixel_frame

# Upstream configs/inference.yaml, inference.scene_cut_prefix: text conditioning and the mark of a cut in one.
CUT_PREFIX = "The scene transitions. "
DEFAULT_KIND = "cut"
KINDS = ("cut", "switch")
# What times of a continued video count from: the first frame of the part to be generated, or the first frame of the whole video.
ORIGINS = ("part", "video")
BATCH_SEPARATOR = "||"

# Kinds of transition that people ask for in this place and that do not exist here.
_UNSUPPORTED_KINDS = ("fade", "dissolve", "crossfade", "wipe", "transition")
_TIME = r"\d{1,3}:\d{2}(?::\d{2})?(?:[.,]\d+)?"
_TIMED_LINE = re.compile(
    rf"^\s*(?:[-*]\s+)?(?P<open>\[)?\s*(?P<sign>[-\u2212])?(?P<time>{_TIME})(?P<rest>(?!:?\d)(?!\s*[ap]\.?m\b).*)$",
    re.IGNORECASE,
)
_RANGE = re.compile(r"^\s*(?:[-\u2013\u2014]|to\b)\s*\d{1,3}:\d{2}")
_AFTER_TIME = re.compile(r"^(?:\s*[:,\u2013\u2014-])?(?:\s+|$)")
_KIND = re.compile(r"^(?:\[(?P<bracketed>[^\]\s]*)\]|(?P<bare>[A-Za-z]+))(?P<mark>\s*[:,;.]|\s+[-\u2013\u2014](?=\s))?(?:\s+|$)")
_ALMOST_TIME = re.compile(r"^\s*\[?(?:\d+(?:[.,]\d+)?\s?s(?:ec|econds?)?\b|\d+:\d(?!\d))", re.IGNORECASE)


@dataclass(frozen=True)
class Event:
    """A change of prompt.

    ``start_seconds`` is as asked, not snapped. ``kind`` is "start" (the first prompt), "cut" (a new shot) or "switch" (another prompt inside the shot).
    ``prompts`` holds one prompt number per batch row; ``first_prompts`` those of the first chunk only, which differ at a cut by the transition prefix.
    """

    start_seconds: float
    kind: str
    prompts: tuple[int, ...]
    first_prompts: tuple[int, ...]


@dataclass(frozen=True)
class Timeline:
    """All events in order of time, and ``texts``: the distinct prompts, where a prompt's number is its index.

    ``origin`` says what the times of a continued video count from, see ORIGINS; in a new video both are the same. ``notes`` are sentences about what was
    changed while reading the text.
    """

    events: tuple[Event, ...]
    texts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    origin: str = "part"

    def __post_init__(self) -> None:
        if not self.events:
            raise ValueError("a timeline needs at least one prompt, got none")
        _check_origin(self.origin)

    @property
    def rows(self) -> int:
        """How many prompts run side by side: the batch."""
        return len(self.events[0].prompts)


@dataclass(frozen=True)
class ChunkPrompt:
    """The prompt numbers of one chunk, one per batch row, and whether a shot (``is_cut``) or only a prompt (``is_switch``) begins with it."""

    prompts: tuple[int, ...]
    is_cut: bool
    is_switch: bool


@dataclass(frozen=True)
class SnappedEvent:
    """An event and the chunk that it begins with. ``frame`` and ``seconds`` count from the first frame of the whole video."""

    event: Event
    chunk: int
    frame: int
    seconds: float


@dataclass(frozen=True)
class Snapped:
    """A timeline laid on the chunks of one run: the events in effect, and sentences about events that were moved or left out."""

    events: tuple[SnappedEvent, ...]
    notes: tuple[str, ...]


def clean(text: str) -> str:
    """Prepare a prompt as upstream does before tokenising (wan/modules/tokenizers.py): entities, quotes, white space.

    Upstream calls ftfy, which is not among ComfyUI's packages; of what it does, straight quotes and NFC are kept, repairing garbled text is not.
    """
    text = html.unescape(html.unescape(text))
    text = unicodedata.normalize("NFC", text)
    text = re.sub("[\u02bc\u2018-\u201b]", "'", text)
    text = re.sub("[\u201c-\u201f]", '"', text)
    return " ".join(text.split())


def parse(text: str, batch: int | None = None, *, origin: str = "part") -> Timeline:
    """Read timeline text, see the module's docstring for its form.

    batch: rows of the batch if known; one prompt serves all rows, any other count must be equal to it.
    Raises ValueError, naming the line, for an empty text or prompt, a malformed or negative time, times that do not increase, an unknown kind and prompt
    lists of different lengths.
    """
    _check_origin(origin)
    blocks, notes = _split_blocks(text)
    previous: _Block | None = None
    for block in blocks:
        if previous is not None and block.seconds <= previous.seconds:
            raise ValueError(
                f"line {block.line}: {format_time(block.seconds)} does not come after {format_time(previous.seconds)} (line {previous.line}); "
                "times must increase from line to line"
            )
        previous = block
    prompts = [_split_batch(block) for block in blocks]
    rows = _batch_rows(blocks, prompts, batch)
    if len(prompts[0]) < rows:
        prompts = [row * rows for row in prompts]
    if blocks[0].seconds > 0:
        notes.append(f"the first prompt was asked at {format_time(blocks[0].seconds)}; it starts at 0:00, because nothing else is there before it")
        blocks[0].seconds = 0.0

    numbers: dict[str, int] = {}

    def number(prompt: str) -> int:
        return numbers.setdefault(prompt, len(numbers))

    events = []
    for index, (block, row) in enumerate(zip(blocks, prompts)):
        # A caption that already carries the prefix is upstream's way to write a cut; the later chunks of the shot go without it.
        bare = [prompt.removeprefix(CUT_PREFIX.strip()).strip() or prompt for prompt in row]
        kind = block.kind or ("start" if index == 0 else DEFAULT_KIND)
        if kind != "cut":
            ids = tuple(number(prompt) for prompt in row)
            events.append(Event(block.seconds, kind, ids, ids))
            continue
        ids = tuple(number(prompt) for prompt in bare)
        events.append(Event(block.seconds, kind, ids, tuple(number(CUT_PREFIX + prompt) for prompt in bare)))
    return Timeline(tuple(events), tuple(numbers), tuple(notes), origin)


def schedule(
    timeline: Timeline,
    num_chunks: int,
    chunk_frames: int,
    fps: float,
    temporal_compression: int = TEMPORAL_COMPRESSION,
    first_chunk: int = 0,
) -> tuple[ChunkPrompt, ...]:
    """One ChunkPrompt for each of the ``num_chunks`` chunks from ``first_chunk`` on.

    first_chunk: whole chunks of ``chunk_frames`` latent frames that the video already has. The first chunk of a video is never a cut; the first new chunk of a
    continued one is, when an event other than "start" falls on it. ``snap`` says what was moved.
    """
    snapped = snap(timeline, chunk_frames, fps, temporal_compression, first_chunk, num_chunks).events
    chunks = []
    current = 0
    for chunk in range(first_chunk, first_chunk + num_chunks):
        while current + 1 < len(snapped) and snapped[current + 1].chunk <= chunk:
            current += 1
        event = snapped[current].event
        begins = snapped[current].chunk == chunk and chunk > 0
        is_cut = begins and event.kind == "cut"
        chunks.append(ChunkPrompt(event.first_prompts if is_cut else event.prompts, is_cut, begins and event.kind == "switch"))
    return tuple(chunks)


def snap(
    timeline: Timeline,
    chunk_frames: int,
    fps: float,
    temporal_compression: int = TEMPORAL_COMPRESSION,
    first_chunk: int = 0,
    num_chunks: int | None = None,
) -> Snapped:
    """Move every event to the nearest start of a chunk; of two equally near ones to the earlier.

    Two events never share a chunk: the later one takes the next chunk. What lies at or after the end of ``num_chunks`` chunks is left out (None: no end).
    Both are said in ``notes``.
    """
    if chunk_frames < 1 or fps <= 0 or first_chunk < 0 or (num_chunks is not None and num_chunks < 1):
        raise ValueError(
            f"chunks of {chunk_frames} latent frames at {fps} fps, {num_chunks} of them after {first_chunk}: all of these must be at least 1 "
            "(the number of earlier chunks at least 0)"
        )

    def start(chunk: int) -> int:
        return first_pixel_frame(chunk * chunk_frames, temporal_compression)

    is_relative = timeline.origin == "part"
    base_frame = start(first_chunk) if is_relative else 0
    end_chunk = math.inf if num_chunks is None else first_chunk + num_chunks
    events: list[SnappedEvent] = []
    notes: list[str] = []
    for event in timeline.events:
        asked_frame = base_frame + event.start_seconds * fps
        asked = f"the {event.kind} at {format_time(event.start_seconds)}"
        if num_chunks is not None and events and asked_frame >= start(end_chunk):
            end = format_time((start(end_chunk) - base_frame) / fps)
            notes.append(f"{asked} is left out: the video ends at {end}")
            continue
        before = int(asked_frame + temporal_compression - 1) // (temporal_compression * chunk_frames)
        nearest = min((before, before + 1), key=lambda chunk: abs(start(chunk) - asked_frame))
        lowest = events[-1].chunk + 1 if events else (first_chunk if is_relative else 0)
        # The last chunk is the nearest one that exists for what is asked in its second half.
        chunk = max(lowest, min(nearest, end_chunk - 1)) if events else lowest
        if chunk >= end_chunk and events:
            notes.append(f"{asked} is left out: the change before it already takes the last chunk; make the video one chunk longer or the change earlier")
            continue
        if events and chunk != min(nearest, end_chunk - 1):
            other = format_time(events[-1].event.start_seconds)
            notes.append(f"{asked} falls on the same chunk as the change at {other} and moves on to chunk {chunk}: a chunk has one prompt")
        frame = start(chunk)
        events.append(SnappedEvent(event, chunk, frame, frame / fps))
    first = events[0]
    if first.chunk == 0 and first.event.kind != "start":
        notes.append(f"the {first.event.kind} at 0:00 has no effect: the video begins there")
    return Snapped(tuple(events), tuple(notes))


def snapped_text(
    timeline: Timeline,
    chunk_frames: int,
    fps: float,
    temporal_compression: int = TEMPORAL_COMPRESSION,
    first_chunk: int = 0,
    num_chunks: int | None = None,
) -> str:
    """A plain table for people: a line per event with the time asked and the time, chunk and frame it gets, then the notes."""
    snapped = snap(timeline, chunk_frames, fps, temporal_compression, first_chunk, num_chunks)
    lines = []
    for item in snapped.events:
        where = f"chunk {item.chunk}, frame {item.frame}"
        prompt = textwrap.shorten(" || ".join(timeline.texts[number] for number in item.event.prompts), 60, placeholder=" ...")
        lines.append(f"{item.event.kind} asked {format_time(item.event.start_seconds)} -> {format_time(item.seconds)} ({where}): {prompt}")
    return "\n".join([*lines, *(f"note: {note}" for note in (*timeline.notes, *snapped.notes))])


def format_time(seconds: float) -> str:
    """Write seconds as m:ss, with up to two decimals, or h:mm:ss."""
    hundredths = round(seconds * 100)
    minutes, rest = divmod(hundredths, 6000)
    tail = f"{rest // 100:02d}" + (f".{rest % 100:02d}".rstrip("0") if rest % 100 else "")
    return f"{minutes // 60}:{minutes % 60:02d}:{tail}" if minutes >= 60 else f"{minutes}:{tail}"


@dataclass
class _Block:
    """A timed line and the untimed lines after it."""

    line: int
    seconds: float
    kind: str | None
    text: list[str]


def _check_origin(origin: str) -> None:
    if origin not in ORIGINS:
        raise ValueError(f"times can count from {' or '.join(repr(name) for name in ORIGINS)}, got {origin!r}")


def _split_blocks(text: str) -> tuple[list[_Block], list[str]]:
    blocks: list[_Block] = []
    notes: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.lstrip().startswith("#"):
            continue
        timed = _timed_line(line, number, notes)
        if timed is not None:
            blocks.append(timed)
            continue
        if not line.strip():
            continue
        almost = _ALMOST_TIME.match(line)
        if almost:
            notes.append(f"line {number} begins with {almost.group().strip()!r}, which is read as part of the prompt; a time looks like 0:05 or 1:02.5")
        if not blocks:
            blocks.append(_Block(number, 0.0, None, []))
        blocks[-1].text.append(line)
    if not blocks:
        raise ValueError("the timeline is empty: write a prompt, or lines like `0:05 cut A fox sleeps in its den.`")
    return blocks, notes


def _timed_line(line: str, number: int, notes: list[str]) -> _Block | None:
    match = _TIMED_LINE.match(line)
    if match is None:
        return None
    written, rest = match["time"], match["rest"]
    if match["open"]:
        if _RANGE.match(rest):
            raise ValueError(f"line {number}: {line.strip()[:40]!r} gives a range of times; write only the start, a prompt lasts until the next one")
        inside, closed, rest = rest.partition("]")
        if not closed or inside.strip():
            return None
        rest = rest if rest[:1] in ("", " ", "\t", ":", ",") else " " + rest
    if _RANGE.match(rest):
        raise ValueError(f"line {number}: {line.strip()[:40]!r} gives a range of times; write only the start, a prompt lasts until the next one")
    after = _AFTER_TIME.match(rest)
    if after is None:
        return None
    if match["sign"]:
        raise ValueError(f"line {number}: the time -{written} is before the video; the first time is 0:00")
    kind, prompt = _kind(rest[after.end() :], number, notes)
    return _Block(number, _seconds(written, number), kind, [prompt])


def _seconds(written: str, line: int) -> float:
    parts = written.replace(",", ".").split(":")
    values = [int(part) for part in parts[:-1]] + [float(parts[-1])]
    if any(value >= 60 for value in values[1:]):
        raise ValueError(f"line {line}: {written} has 60 or more where at most 59 can stand; write minutes:seconds as in 1:15 or hours as in 1:02:15")
    total = 0.0
    for value in values:
        total = total * 60 + value
    return total


def _kind(rest: str, line: int, notes: list[str]) -> tuple[str | None, str]:
    """Take ``cut`` or ``switch`` off the front. Lower and upper case are the word, "Cut" begins a sentence unless a mark follows: "Cut flowers in a vase"."""
    match = _KIND.match(rest)
    if match is None:
        return None, rest
    if match["bracketed"] is not None:
        if match["bracketed"].lower() in KINDS:
            return match["bracketed"].lower(), rest[match.end() :]
        raise ValueError(f"line {line}: [{match['bracketed']}] is not known after a time; [cut] or [switch] can stand there, or the prompt without brackets")
    word = match["bare"]
    if word.lower() in KINDS:
        if word.islower() or word.isupper() or match["mark"]:
            return word.lower(), rest[match.end() :]
        notes.append(f"line {line}: {word!r} is read as the first word of the prompt; write {word.lower()!r} if the kind of change is meant")
    elif word in _UNSUPPORTED_KINDS:
        raise ValueError(
            f"line {line}: {word!r} is not a kind of change here; cut and switch are. If it is the first word of the prompt, write it as {word.capitalize()!r}"
        )
    return None, rest


def _split_batch(block: _Block) -> list[str]:
    prompts = [clean(part) for part in " ".join(block.text).split(BATCH_SEPARATOR)]
    for index, prompt in enumerate(prompts):
        if not prompt:
            which = f"prompt {index + 1} of {len(prompts)}" if len(prompts) > 1 else "the prompt"
            where = f"line {block.line}: {which} at {format_time(block.seconds)}"
            raise ValueError(f"{where} is empty; write its text after the time or on the lines below")
    return prompts


def _batch_rows(blocks: list[_Block], prompts: list[list[str]], batch: int | None) -> int:
    counts = [len(row) for row in prompts]
    for block, count in zip(blocks, counts):
        if count != counts[0]:
            raise ValueError(
                f"line {block.line} has {_prompts(count)}, line {blocks[0].line} has {_prompts(counts[0])}; "
                f"every time needs the same number, separated by ' {BATCH_SEPARATOR} ' (repeat a prompt that stays)"
            )
    if batch is not None and counts[0] not in (1, batch):
        raise ValueError(f"the timeline has {_prompts(counts[0])} side by side, the batch has {batch} rows; write 1 prompt for all rows or {batch} prompts")
    return counts[0] if batch is None else batch


def _prompts(count: int) -> str:
    return f"{count} prompt" if count == 1 else f"{count} prompts"
