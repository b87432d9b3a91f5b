"""The Prompt Timeline node: timeline text → CONDITIONING with an entry per distinct prompt. Reading and snapping are accel.timeline's."""

from __future__ import annotations

from comfy_api.latest import io, ui

from ..accel.forward import TEXT_ROWS
from ..accel.presets import LONGLIVE_1, RELEASES
from ..accel.timeline import Timeline, parse, snapped_text
from .choices import refuse_unknown, unknown_choice
from .node_text import show_text

# The DiT reads this many rows of text (LongLive wan_5b/modules/model.py, text_len).
ORIGINS = {"the new part": "part", "the whole video": "video"}
# Core's samplers mix all entries of a CONDITIONING. This range is empty, as core's ConditioningSetTimestepRange 1.0-1.0 would write it, so that a KSampler
# uses the first prompt alone. The Chunked Sampler takes the mark off the entries it uses, see prompt_entries.
INACTIVE_IN_KSAMPLER = {"start_percent": 1.0}
EXAMPLE = """0:00 A red fox walks through a snowy forest at dawn, the camera follows it from the side.
0:05 cut The fox sleeps curled up in its den, soft light falls in from the entrance."""


def prompt_entries(conditioning: list) -> dict[int, list]:
    """The entries of a Prompt Timeline's CONDITIONING by prompt number, made active again; entries of other nodes are not in it."""
    entries = {}
    for tensor, options in conditioning:
        if "longlive_id" in options:
            entries[options["longlive_id"]] = [tensor, {key: value for key, value in options.items() if key not in INACTIVE_IN_KSAMPLER}]
    return entries


def encode_timeline(clip, timeline: Timeline, *, prompt_weights: bool = False) -> tuple[list, list[str]]:
    """Encode every distinct prompt once.

    Returns CONDITIONING in order of the prompts' numbers, and a sentence for each prompt that is longer than the model reads.
    prompt_weights: read (text:1.2) as a weight, as core's CLIPTextEncode does; off, parentheses are plain text.
    """
    conditioning, notes = [], []
    for number, text in enumerate(timeline.texts):
        tokens = clip.tokenize(text) if prompt_weights else clip.tokenize(text, disable_weights=True)
        length = _token_count(tokens)
        if length > TEXT_ROWS:
            notes.append(f"{text[:40]!r}... has {length} tokens; LongLive reads the first {TEXT_ROWS}")
        encoded = clip.encode_from_tokens_scheduled(tokens)
        if len(encoded) != 1:
            raise ValueError(
                f"this CLIP gives {len(encoded)} encodings of one prompt, because hooks change it over the sampling steps; "
                "a prompt timeline needs one: connect the CLIP without scheduled hooks"
            )
        tensor, options = encoded[0]
        extra = {"longlive_id": number, "longlive_timeline": timeline} | (INACTIVE_IN_KSAMPLER if number else {})
        conditioning.append([tensor, {**options, **extra}])
    return conditioning, notes


def _token_count(tokens: object) -> int:
    """The longest row of tokens; core pads rows to 512, so only a longer one says something. 0 for a form that core does not use."""
    rows = [row for batch in tokens.values() for row in batch] if isinstance(tokens, dict) else []
    return max((len(row) for row in rows), default=0)


class LongLivePromptTimeline(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LongLivePromptTimeline",
            display_name="Prompt Timeline",
            category="LongLive",
            description="Prompts over time for the Chunked Sampler. One line per change: `mm:ss cut prompt` or `mm:ss switch prompt`.",
            search_aliases=["prompt schedule", "prompt travel", "longlive prompt"],
            inputs=[
                io.Clip.Input("clip", tooltip="The text encoder: umT5-XXL, from core's CLIPLoader with type wan."),
                io.String.Input(
                    "text",
                    multiline=True,
                    default=EXAMPLE,
                    placeholder="0:00 first prompt\n0:05 cut a new shot\n0:10 switch another prompt inside the shot",
                    tooltip="A line is `mm:ss[.f] [cut|switch] prompt`; times in minutes and seconds. Without cut or switch it is a cut. Lines without a time "
                    "go on with the prompt above, # starts a comment, ` || ` separates the prompts of a batch. Text without any time is one prompt.",
                ),
                io.Combo.Input(
                    "model",
                    options=list(RELEASES),
                    default="LongLive 2.0",
                    tooltip="For the times shown on this node only: 2.0 has chunks of 8 latent frames at 24 fps, 1.0 has chunks of 3 at 16 fps. "
                    "The Chunked Sampler snaps with its own chunk.",
                ),
                io.Combo.Input(
                    "times_count_from",
                    options=list(ORIGINS),
                    default="the new part",
                    advanced=True,
                    tooltip="When a video is continued from a state or a latent: whether 0:00 is the first frame of the new part or of the whole video. "
                    "A new video is the same either way.",
                ),
                io.Boolean.Input(
                    "prompt_weights",
                    default=False,
                    advanced=True,
                    tooltip="On: (text:1.2) weights words, as in core's CLIP Text Encode. Off: parentheses are plain text, as LongLive was trained.",
                ),
                io.Int.Input(
                    "chunk_frames",
                    default=0,
                    min=0,
                    max=1024,
                    advanced=True,
                    tooltip="Chunk in latent frames for the times shown here; 0 takes the model's (8 or 3).",
                ),
                io.Int.Input(
                    "fps",
                    default=0,
                    min=0,
                    max=240,
                    advanced=True,
                    tooltip="Frames per second for the times shown here; 0 takes the model's (24 or 16).",
                ),
            ],
            outputs=[io.Conditioning.Output(tooltip="One entry per distinct prompt, with its timing. A plain KSampler uses the first prompt only.")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(
        cls, clip, text: str, model: str, times_count_from: str = "the new part", prompt_weights: bool = False, chunk_frames: int = 0, fps: int = 0
    ) -> io.NodeOutput:
        if clip is None:
            raise ValueError("no text encoder is connected, or the file it was loaded from holds none; load umT5-XXL with CLIPLoader, type wan")
        refuse_unknown(("model", model, RELEASES), ("times_count_from", times_count_from, ORIGINS))
        recipe = RELEASES[model]
        timeline = parse(text, origin=ORIGINS[times_count_from])
        conditioning, notes = encode_timeline(clip, timeline, prompt_weights=prompt_weights)
        if recipe is LONGLIVE_1 and any(event.kind == "cut" for event in timeline.events):
            notes.append("LongLive 1.0 was not trained on cuts; write switch after the time to change the prompt inside the shot")
        chunk, rate = chunk_frames or recipe.chunk_frames, fps or recipe.fps
        shown = "\n".join(
            [
                f"{model}: chunks of {chunk} latent frames at {rate} fps",
                snapped_text(timeline, chunk, rate),
                *(f"note: {note}" for note in notes),
            ]
        )
        show_text(cls, shown)
        return io.NodeOutput(conditioning, ui=ui.PreviewText(shown))

    @classmethod
    def validate_inputs(cls, model: str = "LongLive 2.0", times_count_from: str = "the new part") -> bool | str:
        return unknown_choice(("model", model, RELEASES), ("times_count_from", times_count_from, ORIGINS)) or True


NODES = [LongLivePromptTimeline]
