"""The Empty LongLive Latent node: a size and a length → zero latents that remember what was asked. The arithmetic is accel.geometry's."""

from __future__ import annotations

from dataclasses import dataclass

import comfy.model_management
import torch
from comfy_api.latest import io, ui

from ..accel import geometry
from ..accel.config import Recipe
from ..accel.geometry import WAN21_GRID, WAN22_GRID, PixelGrid
from ..accel.presets import LONGLIVE_1, LONGLIVE_2, RELEASES
from .choices import refuse_unknown, unknown_choice
from .node_text import show_text

# Layers and hidden size of the released models, for the estimate when no MODEL is connected (longlive configs of Wan2.2-TI2V-5B and Wan2.1-T2V-1.3B).
_LAYERS_DIM = {LONGLIVE_2.name: (30, 3072), LONGLIVE_1.name: (30, 1536)}
_GRIDS = {LONGLIVE_2.name: WAN22_GRID, LONGLIVE_1.name: WAN21_GRID}


@dataclass(frozen=True)
class LatentPlan:
    """What is made: the release's recipe, its grid, the size of the DiT, and a sentence on where these come from."""

    recipe: Recipe
    grid: PixelGrid
    layers: int
    dim: int
    source: str


def choose_plan(release: str, model=None) -> LatentPlan:
    """The plan for ``release``, where ``auto`` asks the connected MODEL, else takes LongLive 2.0 and says so.

    Raises ValueError for an unknown ``release``, and when the MODEL's latents are of another kind than it, or of neither.
    """
    refuse_unknown(("release", release, ("auto", *RELEASES)))
    if model is None:
        recipe = RELEASES.get(release, LONGLIVE_2)
        source = f"{release}, as set" if release in RELEASES else "LongLive 2.0, assumed: no model is connected"
        return LatentPlan(recipe, _GRIDS[recipe.name], *_LAYERS_DIM[recipe.name], source)
    channels = model.get_model_object("latent_format").latent_channels
    found = next((name for name, recipe in RELEASES.items() if _GRIDS[recipe.name].channels == channels), None)
    if found is None:
        raise ValueError(f"the connected model works on latents of {channels} channels; LongLive 2.0 (48) or 1.0 (16) would work")
    if release in RELEASES and release != found:
        raise ValueError(
            f"{release} was asked for, but the connected model works on {channels}-channel latents, as {found} does; set release to auto or {found}"
        )
    recipe = model.get_attachment("longlive_recipe")
    source = f"{found}, from the connected model" if recipe is not None else f"{found}, from the connected model's {channels} latent channels"
    network = model.get_model_object("diffusion_model")
    layers, dim = _LAYERS_DIM[RELEASES[found].name]
    return LatentPlan(recipe or RELEASES[found], _GRIDS[RELEASES[found].name], getattr(network, "num_layers", layers), getattr(network, "dim", dim), source)


def describe(plan: LatentPlan, width: int, height: int, asked: str, pixel_frames: int, fps: int, chunk_frames: int, batch: int) -> str:
    """What becomes of the size and length asked for, and what it costs, in a few lines."""
    size = plan.grid.latent_size(width, height)
    count = geometry.latent_frames_for(pixel_frames)
    chunks = geometry.chunks_for(count, chunk_frames)
    sampled = chunks * chunk_frames
    sampled_frames = geometry.pixel_frames_of(sampled)
    tokens = size.tokens_per_frame
    cache = geometry.kv_cache_bytes(plan.layers, plan.dim, plan.recipe.window_frames, tokens, batch=batch)
    lines = [
        plan.source,
        f"{asked} {_frames(pixel_frames)} at {fps} fps -> {count} latent frames -> {chunks} chunk{'s' * (chunks != 1)} "
        f"({sampled} latents, {sampled_frames} frames = {geometry.seconds(sampled_frames, fps):.2f} s)",
    ]
    if sampled_frames > pixel_frames:
        lines.append(f"chunks are whole, so more is sampled than asked; VAE Stream Decode keeps the first {_frames(pixel_frames)}")
    lines.append(
        f"{width}x{height}: {tokens} tokens a latent frame, {tokens * chunk_frames} a chunk; "
        f"the window of {plan.recipe.window_frames} latent frames holds {cache / 1e9:.2f} GB of keys and values in bfloat16"
    )
    native = (plan.grid.native_width, plan.grid.native_height)
    if (width, height) != native:
        lines.append(f"note: the released weights were trained at {native[0]}x{native[1]}; other sizes run, but were not trained")
    return "\n".join(lines)


def _frames(count: int) -> str:
    return f"{count} frame" if count == 1 else f"{count} frames"


class LongLiveEmptyLatent(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LongLiveEmptyLatent",
            display_name="Empty LongLive Latent",
            category="LongLive",
            description="Empty video latents for the Chunked Sampler, as long as asked in seconds or in frames. Never fewer frames than asked.",
            search_aliases=["empty video latent", "wan latent", "longlive length"],
            inputs=[
                io.Int.Input("width", default=1280, min=16, max=16384, step=16, tooltip="Width in pixels: a multiple of 32 for LongLive 2.0, of 16 for 1.0."),
                io.Int.Input("height", default=704, min=16, max=16384, step=16, tooltip="Height in pixels: a multiple of 32 for LongLive 2.0, of 16 for 1.0."),
                io.Float.Input(
                    "seconds",
                    default=5.0,
                    min=0.0,
                    max=86400.0,
                    step=0.1,
                    round=0.001,
                    tooltip="Length of the video in seconds; rounded up to whole frames. Not used when frames is above 0.",
                ),
                io.Int.Input(
                    "frames", default=0, min=0, max=2_000_000, tooltip="Length of the video in frames (pictures). 0: the length comes from seconds."
                ),
                io.Combo.Input(
                    "release",
                    options=["auto", *RELEASES],
                    default="auto",
                    tooltip="LongLive 2.0: 48 channels, size/16, 24 fps, chunk 8. LongLive 1.0: 16 channels, size/8, 16 fps, chunk 3. "
                    "auto: what the connected model is, else 2.0.",
                ),
                io.Int.Input("batch_size", default=1, min=1, max=64, tooltip="Videos made side by side; each can have its own prompt."),
                io.Int.Input("fps", default=0, min=0, max=240, advanced=True, tooltip="Frames per second; 0 takes the release's (24 or 16)."),
                io.Int.Input(
                    "chunk_frames",
                    default=0,
                    min=0,
                    max=1024,
                    advanced=True,
                    tooltip="Chunk in latent frames for the length shown here; 0 takes the release's (8 or 3). The Chunked Sampler uses its own.",
                ),
                io.Model.Input("model", optional=True, tooltip="Optional: the LongLive model, to take release, chunk and fps from."),
            ],
            outputs=[io.Latent.Output(tooltip="Zeros (batch, channels, latent frames, height, width), with the asked length in frames beside them.")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(
        cls,
        width: int,
        height: int,
        seconds: float = 5.0,
        frames: int = 0,
        release: str = "auto",
        batch_size: int = 1,
        fps: int = 0,
        chunk_frames: int = 0,
        model=None,
    ) -> io.NodeOutput:
        plan = choose_plan(release, model)
        rate = fps or plan.recipe.fps
        if frames == 0 and seconds <= 0:
            raise ValueError(f"the length is {seconds} s and {frames} frames: set seconds above 0, or frames to at least 1")
        pixel_frames = frames or geometry.pixel_frames_for_seconds(seconds, rate)
        asked = "asked" if frames else f"asked {seconds:g} s ="
        size = plan.grid.latent_size(width, height)
        count = geometry.latent_frames_for(pixel_frames)
        shown = describe(plan, width, height, asked, pixel_frames, rate, chunk_frames or plan.recipe.chunk_frames, batch_size)
        samples = torch.zeros((batch_size, size.channels, count, size.height, size.width), device=comfy.model_management.intermediate_device())
        latent = {"samples": samples, "longlive": {"asked_frames": count, "asked_pixel_frames": pixel_frames, "fps": rate}}
        show_text(cls, shown)
        return io.NodeOutput(latent, ui=ui.PreviewText(shown))

    @classmethod
    def validate_inputs(cls, release: str = "auto") -> bool | str:
        return unknown_choice(("release", release, ("auto", *RELEASES))) or True


NODES = [LongLiveEmptyLatent]
