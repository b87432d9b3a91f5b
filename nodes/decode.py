"""The VAE Stream Decode node: LATENT + VAE → a video file and/or IMAGE, a few frames at a time. How frames are made is accel.stream_decode's, how they are
written is video_file's; here are the plan, core's model management and what happens when a run ends early.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import comfy.ldm.wan.vae
import comfy.ldm.wan.vae2_2
import comfy.model_management
import comfy.sd
import comfy.utils
import folder_paths
import torch
from comfy.cli_args import args
from comfy_api.latest import InputImpl, io, ui
from comfy_execution.graph_utils import ExecutionBlocker
from PIL import Image
from torch import Tensor

from ..accel import geometry, stream_decode
from ..accel.stream_decode import StreamOptions
from .choices import refuse_unknown, unknown_choice
from .node_text import show_text
from .video_file import Encoder, VideoWriter, pick_encoder

OUTPUTS = ("video", "images", "both")
SPEEDS = ("fast", "exact")
VAE_NAMES = {48: "the Wan 2.2 VAE (wan2.2_vae.safetensors or Wan2.2_VAE.pth)", 16: "the Wan 2.1 VAE (wan_2.1_vae.safetensors or Wan2.1_VAE.pth)"}
LATENT_NAMES = {48: "LongLive 2.0 and Wan 2.2 5B", 16: "LongLive 1.0 and Wan 2.1"}
RELEASE_FPS = {48: 24.0, 16: 16.0}
# Latents that are moved to the GPU at a time: a copy waits for the GPU, so one per latent would stall it.
BLOCK_LATENTS = 32
PREVIEW_SECONDS = 0.5
PREVIEW_SIZE = 512


@dataclass(frozen=True)
class DecodePlan:
    """Which latents are decoded and which of their frames are kept; frame and latent numbers count from 0 over the whole video."""

    first_frame: int
    end_frame: int
    start_latent: int
    end_latent: int
    fps: float
    options: StreamOptions | None  # None: this VAE cannot be streamed
    notes: tuple[str, ...]

    @property
    def num_frames(self) -> int:
        return self.end_frame - self.first_frame

    def report(self, encoder: Encoder | None, dtype: torch.dtype) -> dict:
        """What is known before the first frame, for the file's metadata."""
        return {
            "frames": self.num_frames,
            "first_frame": self.first_frame,
            "fps": self.fps,
            "streamed": self.options is not None,
            "bit_exact": self.options is None or self.options.is_exact,
            "vae_dtype": str(dtype).removeprefix("torch."),
            "encoder": None if encoder is None else encoder.reason,
            "notes": list(self.notes),
        }


def make_plan(samples: Tensor, note: dict, vae: comfy.sd.VAE, first_frame: int, fps: float, speed: str = "fast") -> DecodePlan:
    """Decide ranges, rate and arithmetic.

    samples: (B, C, T, H, W). note: the LATENT's "longlive" dict, may be empty. fps: 0 takes the LATENT's, else the release's.
    Raises ValueError, in a sentence, for latents that this VAE cannot decode and for a first frame past the end.
    """
    channels, num_latents = samples.shape[1], samples.shape[2]
    _check_channels(channels, vae.latent_channels)
    notes: list[str] = []
    options, reason = _stream_options(vae, speed)
    if options is None:
        notes.append(f"not streamed: {reason}; decoded in one go by vae.decode, so memory grows with the length")
    elif reason:
        notes.append(reason)

    asked = note.get("asked_frames") or num_latents
    end_latent = min(num_latents, asked)
    if end_latent < num_latents:
        notes.append(f"{num_latents - end_latent} of {num_latents} latents lie past the asked length and were not decoded")
    elif asked > num_latents:
        notes.append(f"{asked} latents were asked for and {num_latents} are there; all were decoded")
    end_frame = _num_frames(vae, end_latent)
    asked_pixels = note.get("asked_pixel_frames")
    if asked_pixels and asked_pixels < end_frame:
        notes.append(f"{end_frame - asked_pixels} frames past the asked {asked_pixels} were dropped")
        end_frame = asked_pixels
    if first_frame >= end_frame:
        raise ValueError(f"first frame {first_frame} was asked for, but the video has frames 0 to {end_frame - 1}; a smaller first frame would work")

    start = 0
    if first_frame and options is not None:
        wanted = geometry.latent_frames_for(first_frame + 1) - 1
        start = stream_decode.warmup_start(vae.first_stage_model, wanted)
        notes.append(f"decoding starts at latent {start}, {wanted - start} before the first one wanted, and drops their frames, so that the result is exact")
    elif first_frame:
        notes.append(f"all frames were decoded and the first {first_frame} dropped")
    if fps and fps < 0.001:
        raise ValueError(f"a frame rate of {fps:g} was asked for; 0.001 or more would work, and 0 takes the latents' own")
    rate = fps or note.get("fps") or RELEASE_FPS.get(channels, 24.0)
    return DecodePlan(first_frame, end_frame, start, end_latent, float(rate), options, tuple(notes))


def _num_frames(vae: comfy.sd.VAE, num_latents: int) -> int:
    """Pixel frames that core's VAE object makes of ``num_latents`` latent frames: 4F-3 for Wan."""
    ratio = vae.upscale_ratio[0] if isinstance(vae.upscale_ratio, tuple) else 1
    return ratio(num_latents) if callable(ratio) else ratio * num_latents


def _check_channels(channels: int, expected: int) -> None:
    if channels == expected:
        return
    found = f"{channels}-channel latents" + (f" ({LATENT_NAMES[channels]})" if channels in LATENT_NAMES else "")
    vae = f"a VAE for {expected} channels" + (f" ({LATENT_NAMES[expected]})" if expected in LATENT_NAMES else "")
    raise ValueError(f"these are {found}, and the VAE is {vae}; {VAE_NAMES.get(channels, f'a VAE for {channels} channels')} would work")


def _stream_options(vae: comfy.sd.VAE, speed: str) -> tuple[StreamOptions | None, str]:
    """How this VAE is streamed and a note on it, or None and why it cannot be."""
    model = vae.first_stage_model
    if not isinstance(model, comfy.ldm.wan.vae2_2.WanVAE | comfy.ldm.wan.vae.WanVAE):
        return None, f"{type(model).__name__} is neither the Wan 2.2 nor the Wan 2.1 VAE"
    colours = model.decoder.head[-1].out_channels
    if colours != (12 if isinstance(model, comfy.ldm.wan.vae2_2.WanVAE) else 3):
        return None, f"its decoder ends in {colours} channels"
    if reason := stream_decode.walk_reason(model):
        return StreamOptions(walk=False), f"the decoder's own forward is used, because {reason}"
    options = StreamOptions() if speed == "exact" else StreamOptions.for_device(vae.device, vae.vae_dtype)
    return options, "" if options.is_exact else "speed fast: channels-last layout and fused norm, equal to the plain decoder up to rounding"


@dataclass
class _Target:
    """Where frames and latents go."""

    folder: Path
    name: str
    counter: int
    subfolder: str

    @classmethod
    def choose(cls, prefix: str, width: int, height: int) -> _Target:
        folder, name, counter, subfolder, _ = folder_paths.get_save_image_path(prefix, folder_paths.get_output_directory(), width, height)
        return cls(Path(folder), name, counter, subfolder)

    def video(self, row: int) -> Path:
        return self.folder / f"{self.name}_{self.counter + row:05}_.mp4"

    @property
    def latent(self) -> Path:
        return self.folder / f"{self.name}_{self.counter:05}_.latent"


@dataclass
class _Job:
    """One run of the node."""

    samples: Tensor
    vae: comfy.sd.VAE
    plan: DecodePlan
    target: _Target
    metadata: dict
    encoder: Encoder | None  # None: no video wanted
    wants_images: bool
    width: int
    height: int
    progress: _Progress
    images: Tensor | None = None  # (B * frames, H, W, 3)
    videos: list[Path] = field(default_factory=list)
    writer: VideoWriter | None = None

    def run(self) -> None:
        for row in range(self.samples.shape[0]):
            self._decode_row(row)

    def _decode_row(self, row: int) -> None:
        poll = comfy.model_management.throw_exception_if_processing_interrupted
        at = row * self.plan.num_frames
        for pixels in self._frames(row):
            # (f, H, W, 3), IMAGE's values, on the device that decodes.
            if self.encoder is not None and self.writer is None:
                self.height, self.width = pixels.shape[1:3]
                self.writer = VideoWriter(self.target.video(row), self.width, self.height, self.plan.fps, self.metadata, self.encoder)
            if self.wants_images:
                if self.images is None:
                    count = self.samples.shape[0] * self.plan.num_frames
                    self.images = torch.empty((count, *pixels.shape[1:]), dtype=pixels.dtype, device=self.vae.output_device)
                self.images[at : at + len(pixels)].copy_(pixels)
                # No preview where a video follows: the frontend's Nodes 2.0 would go on showing it in place of the video.
                if self.encoder is None:
                    self.progress.newest = self.images[at + len(pixels) - 1]
                at += len(pixels)
            if self.writer is not None:
                self.writer.push(*_to_host(_to_uint8(pixels)), poll)
        if self.writer is not None:
            self.videos.append(self.writer.finish(poll))
            self.writer = None

    def _frames(self, row: int) -> Iterator[Tensor]:
        """The wanted frames of one video, a step's at a time: (f, H, W, 3) in [0, 1]."""
        plan, vae = self.plan, self.vae
        if plan.options is None:
            self.progress.step(row * self.progress.row_steps)
            pixels = vae.decode(self.samples[row : row + 1, :, : plan.end_latent])
            pixels = pixels[0] if pixels.ndim == 5 else pixels
            yield pixels[plan.first_frame : plan.end_frame, :, :, :3]
            return
        decoder = stream_decode.stream_decoder(vae.first_stage_model, plan.options)
        frame = geometry.TEMPORAL_COMPRESSION * plan.start_latent

        def on_step(done: int) -> None:
            self.progress.step(row * self.progress.row_steps + done)

        for frames in self._steps(decoder, row, on_step):
            first, end = max(plan.first_frame - frame, 0), min(plan.end_frame - frame, frames.shape[2])
            frame += frames.shape[2]
            if first < end:
                # Core's own order: its output type first, then [-1, 1] to [0, 1].
                yield vae.process_output(frames[:, :, first:end].to(dtype=vae.vae_output_dtype(), copy=True))[0].movedim(0, -1)

    def _steps(self, decoder: stream_decode.StreamDecoder22 | stream_decode.StreamDecoder21, row: int, on_step) -> Iterator[Tensor]:
        z = self.samples[row : row + 1, :, self.plan.start_latent : self.plan.end_latent]
        for block in z.split(BLOCK_LATENTS, dim=2):
            yield from decoder.steps(block.to(device=self.vae.device, dtype=self.vae.vae_dtype), on_step)
        yield from decoder.final_steps(on_step)


def _to_uint8(pixels: Tensor) -> Tensor:
    """(f, H, W, 3) in [0, 1] to bytes, cut off and not rounded, exactly as core's Save Video does it."""
    return pixels.float().mul(255).clamp_(0, 255).to(torch.uint8).contiguous()


def _to_host(frames: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """Frames on the CPU, and the event after which they are there: a copy through pinned memory does not make the GPU wait."""
    if frames.device.type != "cuda":
        return frames.cpu(), None
    host = torch.empty(frames.shape, dtype=frames.dtype, pin_memory=True)
    host.copy_(frames, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return host, event


class _Progress:
    """Progress bar, preview of the newest frame and the check for an interrupt, before every decoder step."""

    def __init__(self, rows: int, row_steps: int, node_id: str | None) -> None:
        self.row_steps = row_steps
        self.newest: Tensor | None = None
        self._bar = comfy.utils.ProgressBar(rows * row_steps, node_id=node_id)
        self._shown_at = 0.0

    def step(self, done: int) -> None:
        comfy.model_management.throw_exception_if_processing_interrupted()
        preview = None
        if self.newest is not None and time.monotonic() - self._shown_at >= PREVIEW_SECONDS:
            self._shown_at = time.monotonic()
            preview = ("JPEG", _picture(self.newest), PREVIEW_SIZE)
        self._bar.update_absolute(done, preview=preview)

    def finish(self) -> None:
        preview = None if self.newest is None else ("JPEG", _picture(self.newest), PREVIEW_SIZE)
        self._bar.update_absolute(self._bar.total, preview=preview)


def _picture(frame: Tensor) -> Image.Image:
    """(H, W, 3), uint8 or in [0, 1], as a picture."""
    frame = torch.as_tensor(frame)
    return Image.fromarray((frame if frame.dtype == torch.uint8 else _to_uint8(frame)).cpu().numpy())


def save_latent(path: Path, samples: Tensor, metadata: dict) -> None:
    """Write a .latent file that core's Load Latent reads; our report is in its metadata under "longlive"."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {"latent_tensor": samples.cpu().contiguous(), "latent_format_version_0": torch.tensor([])}
    comfy.utils.save_torch_file(tensors, str(path), metadata={key: json.dumps(value) for key, value in metadata.items()} or None)


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e7 else f"{num_bytes / 1e6:.2f} MB"


def _check_images_fit(num_images: int, height: int, width: int, vae: comfy.sd.VAE) -> None:
    """ValueError before anything is decoded when the IMAGE cannot be held."""
    needed = num_images * height * width * 3 * vae.vae_output_dtype().itemsize
    free = comfy.model_management.get_free_memory(vae.output_device)
    if needed > free:
        raise ValueError(
            f"an IMAGE of {num_images} frames at {width}x{height} needs {_gb(needed)} of memory and {_gb(free)} are free. "
            "Output video does not keep frames in memory and would work; so would fewer frames"
        )


def _memory_needed(samples: Tensor, vae: comfy.sd.VAE) -> int:
    """Bytes beside the weights for one video, with a tenth on top for what the estimate leaves out."""
    history, working = stream_decode.decode_memory(vae.first_stage_model, 1, samples.shape[3], samples.shape[4], vae.vae_dtype)
    return int(1.1 * (history + working))


def _out_of_memory_text(job: _Job, needed: int | None, free: int) -> str:
    text = f"out of memory while decoding {job.width}x{job.height} with {job.vae.vae_dtype} on {job.vae.device}: "
    if needed is None:
        return text + f"{_gb(free)} were free, and this VAE decodes the whole video at once. VAE Decode (Tiled), or a Wan VAE, which is streamed, would work"
    weights = job.vae.model_size()
    text += f"about {_gb(needed)} are needed beside {_gb(weights)} of weights, whatever the length, and {_gb(free)} were free. "
    smaller = (free / needed) ** 0.5 if free < needed else 0.75
    sides = " x ".join(str(max(32, int(side * smaller) // 32 * 32)) for side in (job.width, job.height))
    return text + f"A video of about {sides} pixels would fit; so might VAE Decode (Tiled), or freeing the other models first"


class LongLiveStreamDecode(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LongLiveStreamDecode",
            display_name="VAE Stream Decode",
            category="LongLive",
            description="Decodes video latents one after the other straight into an mp4 in the output folder. Memory does not grow with the length, and "
            "the frames are those of one decode of everything (see speed for what that means on a GPU). No audio.",
            search_aliases=["vae decode", "streaming decode", "long video decode", "save video"],
            inputs=[
                io.Latent.Input("samples", tooltip="Latents of a video; those past the asked length are left out. One file per video of a batch."),
                io.Vae.Input("vae", tooltip="The Wan 2.2 VAE for 48-channel latents (LongLive 2.0), Wan 2.1 for 16 (1.0). Any other VAE decodes all at once."),
                io.Combo.Input(
                    "output",
                    options=list(OUTPUTS),
                    default="video",
                    tooltip="video: an mp4, and the VIDEO output (of a batch: its first). images: the IMAGE output, held in memory "
                    "(1280x704: 10.8 MB a frame). What hangs on the other output does not run.",
                ),
                io.String.Input(
                    "filename_prefix",
                    default="video/LongLive",
                    tooltip="Folder and name below ComfyUI's output folder; a number is added. %width% and the like work.",
                ),
                io.Float.Input(
                    "fps",
                    default=0.0,
                    min=0.0,
                    max=240.0,
                    step=1.0,
                    round=0.001,
                    tooltip="Frames per second of the video; 0 takes the latents' own (24 for LongLive 2.0, 16 for 1.0).",
                ),
                io.Int.Input(
                    "first_frame",
                    default=0,
                    min=0,
                    max=8_000_000,
                    tooltip="First frame wanted, counted from 0: the frames an earlier file already has. Decoding starts 40 latents earlier, "
                    "so the new part equals that of one long decode.",
                ),
                io.Int.Input(
                    "crf",
                    default=18,
                    min=0,
                    max=51,
                    advanced=True,
                    tooltip="Quality of the video without unit: 0 is lossless and large, 18 hardly differs from the frames, 51 is worst. libx264 only.",
                ),
                io.Combo.Input(
                    "speed",
                    options=list(SPEEDS),
                    default="fast",
                    advanced=True,
                    tooltip="Arithmetic on a GPU. fast: another memory layout and a fused norm, equal to core's decoder up to rounding. "
                    "exact: core's own arithmetic bit for bit, about a quarter slower. On a CPU both are exact.",
                ),
            ],
            outputs=[
                io.Video.Output("video", tooltip="The finished mp4; Save Video copies it without encoding again. Of a batch: the first video."),
                io.Image.Output("images", tooltip="All frames (frames, height, width, 3); of a batch one video after the other."),
            ],
            hidden=[io.Hidden.prompt, io.Hidden.extra_pnginfo, io.Hidden.unique_id],
            is_output_node=True,
        )

    @classmethod
    def execute(
        cls,
        samples: dict,
        vae: comfy.sd.VAE,
        output: str = "video",
        filename_prefix: str = "video/LongLive",
        fps: float = 0.0,
        first_frame: int = 0,
        crf: int = 18,
        speed: str = "fast",
    ) -> io.NodeOutput:
        refuse_unknown(("output", output, OUTPUTS), ("speed", speed, SPEEDS))
        vae.throw_exception_if_invalid()
        note = dict(samples.get("longlive") or {})
        latents = _video_latents(samples["samples"])
        plan = make_plan(latents, note, vae, first_frame, fps, speed)
        encoder = pick_encoder(crf=crf) if output != "images" else None
        scale = vae.spacial_compression_decode()
        width, height = latents.shape[4] * scale, latents.shape[3] * scale
        if output != "video":
            _check_images_fit(latents.shape[0] * plan.num_frames, height, width, vae)

        target = _Target.choose(filename_prefix, width, height)
        # Outside a graph (a script, a test) there are no hidden inputs.
        prompt, workflow, node_id = (getattr(cls.hidden, name, None) for name in ("prompt", "extra_pnginfo", "unique_id"))
        metadata = _metadata(prompt, workflow, {**note, "decode": plan.report(encoder, vae.vae_dtype)})
        save_latent(target.latent, latents, metadata)
        progress = _Progress(latents.shape[0], plan.end_latent - plan.start_latent, node_id)
        job = _Job(latents, vae, plan, target, metadata, encoder, output != "video", width, height, progress)
        started = time.monotonic()
        _run_and_explain(job)
        target.latent.unlink()
        progress.finish()

        text = describe(job, time.monotonic() - started)
        show_text(cls, text)
        video = InputImpl.VideoFromFile(str(job.videos[0])) if job.videos else ExecutionBlocker(None)
        shown = ui.PreviewText(text)
        if job.videos:
            shown = ui.PreviewVideo([ui.SavedResult(path.name, target.subfolder, io.FolderType.output) for path in job.videos])
        return io.NodeOutput(video, ExecutionBlocker(None) if job.images is None else job.images, ui=shown)

    @classmethod
    def validate_inputs(cls, output: str = "video", speed: str = "fast") -> bool | str:
        return unknown_choice(("output", output, OUTPUTS), ("speed", speed, SPEEDS)) or True


def _video_latents(samples: Tensor) -> Tensor:
    """(B, C, T, H, W); a single picture's (B, C, H, W) becomes T = 1."""
    if getattr(samples, "is_nested", False) or samples.ndim not in (4, 5):
        found = "latents of several parts (video and audio)" if getattr(samples, "is_nested", False) else f"latents of shape {tuple(samples.shape)}"
        raise ValueError(f"{found} cannot be decoded here; video latents of (batch, channels, frames, height, width) would work")
    if 0 in samples.shape:
        raise ValueError(f"these latents are empty: {tuple(samples.shape)} (batch, channels, frames, height, width)")
    return samples if samples.ndim == 5 else samples.unsqueeze(2)


def _metadata(prompt: dict | None, extra_pnginfo: dict | None, longlive: dict) -> dict:
    """What goes into the file: the workflow as core's Save Video writes it, and our report. Nothing with --disable-metadata."""
    if args.disable_metadata:
        return {}
    metadata = dict(extra_pnginfo or {})
    if prompt is not None:
        metadata["prompt"] = prompt
    metadata["longlive"] = longlive
    return metadata


def _run_and_explain(job: _Job) -> None:
    """Run the job under core's model management; whatever ends it early, the latents stay and the message says where."""
    management = comfy.model_management
    needed = None if job.plan.options is None else _memory_needed(job.samples, job.vae)
    out_of_memory = False
    free = management.get_free_memory(job.vae.device)
    try:
        with management.cuda_device_context(job.vae.device):
            if needed is not None:
                management.load_models_gpu([job.vae.patcher], memory_required=needed, force_full_load=job.vae.disable_offload)
            free = management.get_free_memory(job.vae.device)
            job.run()
    except Exception as error:
        kept = _keep(job)
        if not management.is_oom(error):
            raise RuntimeError(f"{error}. {kept}") from error
        # The exception holds the tensors of the frames it went through; the message is raised once it is gone.
        out_of_memory = True
    except BaseException:
        # An interrupt: core ends the prompt without a message, so the log has it.
        logging.warning("LongLive: decoding was interrupted. %s", _keep(job))
        raise
    if out_of_memory:
        management.soft_empty_cache()
        raise RuntimeError(f"{_out_of_memory_text(job, needed, free)}. {kept}")


def _keep(job: _Job) -> str:
    """End the file in work and say what is left on disk."""
    part = job.writer.abort() if job.writer is not None else None
    text = f"The latents are kept in {job.target.latent}: move the file to ComfyUI's input folder and open it with Load Latent to decode again"
    if job.videos:
        text += f"; finished videos: {', '.join(str(path) for path in job.videos)}"
    return text + (f"; the {job.writer.frames_written} frames encoded so far are in {part}" if part else "")


def describe(job: _Job, elapsed: float) -> str:
    """What was done, in a few lines."""
    plan, rows = job.plan, job.samples.shape[0]
    latents = rows * (plan.end_latent - plan.start_latent)
    frames = f"{plan.num_frames} frames" + (f" from frame {plan.first_frame}" if plan.first_frame else "") + (f", {rows} videos" if rows > 1 else "")
    lines = [f"{frames} at {job.width}x{job.height}, {latents} latents in {elapsed:.1f} s ({1000 * elapsed / latents:.0f} ms a latent)"]
    if job.encoder is not None:
        lines.append(f"{plan.fps:g} fps, {plan.num_frames / plan.fps:.2f} s; encoder {job.encoder.reason}")
        lines += [f"{os.path.join(job.target.subfolder, path.name)}: {_gb(path.stat().st_size)}" for path in job.videos]
    if plan.options is not None:
        history, _ = stream_decode.decode_memory(job.vae.first_stage_model, 1, job.samples.shape[3], job.samples.shape[4], job.vae.vae_dtype)
        exact = "bit-identical to one decode" if plan.options.is_exact else "equal to one decode up to rounding"
        lines.append(f"streamed, {exact}; {_gb(history)} of remembered frames in {str(job.vae.vae_dtype).removeprefix('torch.')}")
    return "\n".join([*lines, *(f"note: {note}" for note in plan.notes)])


NODES = [LongLiveStreamDecode]
