"""What a sampling run is asked to do, checked before anything is loaded: model, latents, state, prompts, and what does not go together.

Everything that can be refused in words is refused here; ``sampling.py`` runs what is left.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import comfy.sampler_helpers
import psutil
import torch
from comfy.model_patcher import ModelPatcher
from torch import Tensor

from ..accel import timeline as timelines
from ..accel.config import Recipe
from ..accel.forward import TEXT_ROWS, why_not_wan
from ..accel.geometry import TEMPORAL_COMPRESSION, WAN21_GRID, WAN22_GRID, chunks_for, latent_frames_for, pixel_frames_of
from ..accel.kv_cache import CacheShape
from ..accel.presets import LONGLIVE_1, LONGLIVE_2
from ..accel.sampler import ChunkPlan, Clamp, LoopOptions, Video
from ..accel.solver import sigmas_of
from ..accel.state import LongLiveState, ModelSignature
from ..accel.window import Window
from .loader import RECIPE_ATTACHMENT
from .prompts import prompt_entries

COND, UNCOND = 0, 1  # core's cond_or_uncond
PARK_MODES = ("light", "exact", "none")
# Options of core CONDITIONING that act on a part of the picture or the steps, or feed such an input.
_UNSUPPORTED_OPTIONS = {
    "area": "an area of the picture",
    "mask": "a mask of the picture",
    "control": "a control net",
    "gligen": "GLIGEN boxes",
    "reference_latents": "reference latents",
    "clip_vision_output": "a CLIP vision image",
    "concat_latent_image": "an image for image-to-video models (a start image enters through the latent: Wan22ImageToVideoLatent)",
    "time_dim_concat": "latents to join in time",
    "context_latents": "context latents",
}


@dataclass(frozen=True)
class SamplingRequest:
    """What the user asked for, with every ``auto`` already resolved. ``kv_dtype`` None means the model's compute dtype."""

    recipe: Recipe
    options: LoopOptions = LoopOptions()
    cfg: float = 1.0
    seed: int = 0
    upstream_noise: bool = False
    kv_dtype: torch.dtype | None = None
    park: str = "light"


def recipe_of(model: ModelPatcher) -> Recipe:
    """The recipe attached by Load LongLive DiT, else a guess from the channels, said in its notes."""
    attached = model.get_attachment(RECIPE_ATTACHMENT)
    if attached is not None:
        return attached
    channels = model.get_model_object("latent_format").latent_channels
    guess = LONGLIVE_2 if channels == 48 else LONGLIVE_1
    return guess.with_notes(f"defaults of {guess.name}: guessed from {channels} latent channels, because no Load LongLive DiT node made this MODEL")


@dataclass
class Job:
    """A checked request: everything the run needs, nothing that is still to be decided."""

    request: SamplingRequest
    state: LongLiveState | None
    given: Tensor | None
    clamps: dict[int, Clamp]
    plans: list[ChunkPlan]
    entries: list
    negative: list | None
    prompt_index: dict[object, int]
    chunk_shape: tuple[int, int, int, int, int]
    asked_frames: int
    asked_pixel_frames: int | None
    num_chunks: int
    first_chunk: int
    signature: ModelSignature
    cache_shape: CacheShape
    branches: tuple[int, ...]
    notes: list[str]

    @property
    def sigmas(self) -> tuple[float, ...]:
        return sigmas_of(self.request.recipe)

    @property
    def cache_bytes(self) -> int:
        return self.cache_shape.num_bytes * len(self.branches)

    @property
    def total_forwards(self) -> int:
        given = 0 if self.given is None else self.given.shape[2] // self.request.recipe.chunk_frames
        return given + self.num_chunks * (self.request.recipe.steps + 1)

    @classmethod
    def check(
        cls,
        model: ModelPatcher,
        positive: list,
        negative: list | None,
        latent: dict,
        request: SamplingRequest,
        extend: dict | None,
        state: LongLiveState | None,
        plans: Sequence[ChunkPlan] | None,
    ) -> Job:
        recipe, notes = request.recipe, []
        dit = model.model.diffusion_model
        reason = why_not_wan(dit)
        if reason is not None:
            raise ValueError(f"the Chunked Sampler runs Wan text-to-video models with LongLive weights, and this MODEL is not one: {reason}")
        copies, windows = model.get_additional_models_with_key("multigpu"), model.model_options.get("context_handler")
        for what, found in (("copies on several devices", copies), ("context windows", windows)):
            if found:
                raise ValueError(f"the MODEL carries {what}, which a KV cache cannot follow; remove that node before the Chunked Sampler")
        if request.cfg != 1.0 and negative is None:
            raise ValueError(f"CFG {request.cfg:g} needs a negative prompt and none is connected; connect one, or set CFG to 1 (LongLive's own value)")

        model_channels = model.get_model_object("latent_format").latent_channels
        samples = _video_tensor(latent["samples"], model_channels, "the latent")
        batch, channels, asked, height, width = samples.shape
        frame_tokens = _check_grid(height, width, channels)
        chunk_frames = recipe.chunk_frames
        note = latent.get("longlive") or {}
        signature = ModelSignature(channels, dit.dim, len(dit.blocks), batch, height, width, _fingerprint(dit), _patch_fingerprint(model))
        shift = getattr(model.get_model_object("model_sampling"), "shift", recipe.shift)
        if abs(shift - recipe.shift) > 1e-6:
            notes.append(f"shift {recipe.shift:g} is used; the MODEL's own sampling shift {shift:g}, which a KSampler would take, is not")

        given, first_chunk = None, 0
        if state is not None and extend is not None:
            raise ValueError("both a state and a latent to extend are connected; a state already holds its video, so disconnect one of them")
        if state is not None:
            _check_state(state, signature, request)
            first_chunk = len(state.chunk_lengths)
        if extend is not None:
            given = _video_tensor(extend["samples"], model_channels, "the latent to extend")
            if given.shape[0] != batch or given.shape[3:] != samples.shape[3:]:
                raise ValueError(
                    f"the latent to extend is batch {given.shape[0]}, {given.shape[3]}x{given.shape[4]} (rows x columns), the new part is batch {batch}, "
                    f"{height}x{width}; make the empty latent the same size"
                )
            whole = given.shape[2] // chunk_frames * chunk_frames
            if whole == 0:
                raise ValueError(f"the latent to extend has {given.shape[2]} latent frames; at least one whole chunk of {chunk_frames} is needed")
            if whole != given.shape[2]:
                notes.append(f"the latent to extend has {given.shape[2]} latent frames; the first {whole} (whole chunks of {chunk_frames}) are continued")
            given = model.model.process_latent_in(given[:, :, :whole].to(torch.float32))
            first_chunk = whole // chunk_frames

        if first_chunk:
            notes.append(
                f"the new part follows {pixel_frames_of(first_chunk * chunk_frames)} frames: whole chunks, also where fewer were asked for and decoded"
            )
        asked_pixels = note.get("asked_pixel_frames")
        if asked_pixels is not None and latent_frames_for(asked_pixels) != asked:
            asked_pixels = None  # another node has changed the latent's length since
        if asked_pixels is not None and first_chunk:
            # The new part's first latent frame is not the video's first, so it stands for four pixel frames instead of one.
            asked = -(-asked_pixels // TEMPORAL_COMPRESSION)
        num_chunks = chunks_for(asked, chunk_frames)
        if num_chunks * chunk_frames != asked:
            notes.append(
                f"asked for {asked} latent frames; chunks have {chunk_frames}, so {num_chunks * chunk_frames} are made and VAE Stream Decode drops the rest"
            )
        if request.options.clean_recache and not (recipe.shot_pin and recipe.sink_frames):
            notes.append("clean_recache has no effect: it needs shot pinning and a sink")
        if not (request.options.keep_sink or recipe.recache_on_switch):
            notes.append("recache_sink has no effect: recache_on_switch is off")
        if "easycache" in model.model_options.get("transformer_options", {}):
            notes.append("EasyCache on the MODEL skips denoising passes by its own rule; clean passes always run")

        mask = latent.get("noise_mask")
        clamps = {} if mask is None else _clamps(model, samples, mask, chunk_frames, num_chunks)
        if not clamps and torch.count_nonzero(samples) > 0:
            notes.append("only the size of the latent is used, not what is in it; a finished video to continue belongs into `extend`")
        if clamps and first_chunk:
            raise ValueError("a start image only fits the beginning of a video, and this run continues one; use an empty latent without a start image")
        if plans is None:
            fps = note.get("fps") or recipe.fps
            plans, entries, said = _plan_prompts(positive, batch, num_chunks, recipe.chunk_frames, fps, first_chunk)
            notes += said
            prompt_index = {name: index for index, name in enumerate(dict.fromkeys(plan.prompt for plan in plans))}
        else:
            entries = positive
            prompt_index = {index: index for index in range(len(entries))}

        uncond = request.cfg != 1.0 or (negative is not None and model.model_options.get("disable_cfg1_optimization", False))
        if uncond:
            if len(negative) != 1:
                raise ValueError(f"the negative CONDITIONING holds {len(negative)} prompts; a KV-cached video has one: connect one CLIP Text Encode node")
            _check_rows(negative[0][0].shape[0], batch)
            _check_conditioning("negative", negative)
            negative = _padded(negative, notes)
        else:
            if negative is not None:
                notes.append("the negative prompt is not used: CFG is 1")
            negative = None
        _check_conditioning("positive", entries)
        entries = _padded(entries, notes)

        dtype = request.kv_dtype or _compute_dtype(model)
        if state is not None and state.parked is not None:
            _check_parked(state, dtype)
        cache_shape = CacheShape(len(dit.blocks), batch, recipe.window_frames, frame_tokens, dit.dim, dtype)
        if request.park == "exact":
            _check_host_room(cache_shape.num_bytes * (2 if uncond else 1))
        return cls(
            request=request,
            state=state,
            given=given,
            clamps=clamps,
            plans=list(plans),
            entries=entries,
            negative=negative,
            prompt_index=prompt_index,
            chunk_shape=(batch, channels, chunk_frames, height, width),
            asked_frames=asked,
            asked_pixel_frames=asked_pixels,
            num_chunks=num_chunks,
            first_chunk=first_chunk,
            signature=signature,
            cache_shape=cache_shape,
            branches=(COND, UNCOND) if uncond else (COND,),
            notes=notes,
        )

    def new_video(self) -> Video:
        if self.state is not None:
            return self.state.to_video()
        recipe = self.request.recipe
        return Video(Window(recipe.window_frames, recipe.sink_frames, recipe.shot_pin, keeps_sink=recipe.solver == "renoise"))

    def report(self, said: list[str], attention: dict | None) -> dict:
        """JSON-able account of the run; ``said``: what the run itself had to say, ``attention``: the accelerator's report."""
        recipe = self.request.recipe
        return {
            "recipe": recipe.name,
            "chunk_frames": recipe.chunk_frames,
            "window_frames": recipe.window_frames,
            "sink_frames": recipe.sink_frames,
            "steps": recipe.steps,
            "shift": recipe.shift,
            "sigmas": [round(sigma, 6) for sigma in self.sigmas],
            "cfg": self.request.cfg,
            "seed": self.request.seed,
            "chunks": self.num_chunks,
            "first_chunk": self.first_chunk,
            "cuts": [self.first_chunk + i for i, plan in enumerate(self.plans) if plan.is_cut],
            "switches": [self.first_chunk + i for i, plan in enumerate(self.plans) if plan.is_switch],
            "kv_cache": {"dtype": str(self.cache_shape.dtype).removeprefix("torch."), "bytes": self.cache_bytes},
            "relative_rope": self.request.options.relative_rope,
            "clean_recache": self.request.options.clean_recache,
            "time_scale": self.request.options.time_scale,
            "notes": [*recipe.notes, *self.notes, *said],
            "attention": attention,
        }

    def latent_note(self, latent: dict, report: dict) -> dict:
        """What travels with the LATENT: the asked length of the whole video, old part included, and the report."""
        before = dict(latent.get("longlive") or {})
        old_frames = self.first_chunk * self.request.recipe.chunk_frames
        return {
            "asked_frames": old_frames + self.asked_frames,
            "asked_pixel_frames": None if self.asked_pixel_frames is None else pixel_frames_of(old_frames) + self.asked_pixel_frames,
            "fps": before.get("fps") or self.request.recipe.fps,
            "chunk_frames": self.request.recipe.chunk_frames,
            "recipe": self.request.recipe.name,
            "report": report,
        }


def _video_tensor(samples: Tensor, channels: int, what: str) -> Tensor:
    if samples.ndim != 5:
        raise ValueError(f"{what} has {samples.ndim} dimensions; a video latent has 5 (batch, channels, frames, rows, columns): use Empty LongLive Latent")
    if samples.shape[1] != channels:
        kinds = {16: "16 channels (Wan 2.1, LongLive 1.0)", 48: "48 channels (Wan 2.2, LongLive 2.0)"}
        raise ValueError(
            f"{what} has {kinds.get(samples.shape[1], f'{samples.shape[1]} channels')} and the model needs {kinds.get(channels, f'{channels} channels')}; "
            "set the release in Empty LongLive Latent to the model's"
        )
    if samples.shape[2] < 1:
        raise ValueError(f"{what} has 0 latent frames; at least 1 is needed")
    return samples


def _check_grid(height: int, width: int, channels: int) -> int:
    """Tokens per latent frame; raises ValueError, in pixels, when the size is off the grid."""
    grid = WAN22_GRID if channels == WAN22_GRID.channels else WAN21_GRID
    return grid.latent_size(width * grid.spatial, height * grid.spatial).tokens_per_frame


def _check_state(state: LongLiveState, signature: ModelSignature, request: SamplingRequest) -> None:
    mismatch = state.signature.mismatch(signature)
    if mismatch is not None:
        raise ValueError(f"{mismatch}; connect the model and an empty latent of the size that the state was made with")
    if state.signature.weights != signature.weights:
        raise ValueError("the state was made with another checkpoint of the same shape; load the checkpoint that made it, or start a new video")
    for name, label in (("chunk_frames", "chunk"), ("window_frames", "window"), ("sink_frames", "sink"), ("solver", "solver"), ("shot_pin", "shot pinning")):
        old, new = getattr(state.recipe, name), getattr(request.recipe, name)
        if old != new:
            raise ValueError(f"the state was made with {label} {old} and now {label} {new} is asked; set it back to {old}, or start a new video")
    positions = [
        (label, getattr(state.options, name), getattr(request.options, name))
        for name, label in (("relative_rope", "relative RoPE"), ("time_scale", "time scale"))
    ]
    if state.shot:  # before the first cut no frame carries an offset
        positions.append(("shot RoPE offset", state.recipe.shot_rope_offset, request.recipe.shot_rope_offset))
    for label, old, new in positions:
        if old != new:
            raise ValueError(f"the state was made with {label} {old} and now {label} {new} is asked, so its keys do not fit; set it back, or start a new video")


def _check_parked(state: LongLiveState, dtype: torch.dtype) -> None:
    found = next(iter(state.parked.values())).dtype
    if found != dtype:
        names = [str(value).removeprefix("torch.") for value in (found, dtype)]
        raise ValueError(
            f"the state's keys and values are {names[0]} and a KV cache of {names[1]} is asked, which could not continue bit-equal; "
            f"set kv_dtype to {names[0]}, or save the state as light"
        )


def _check_host_room(needed: int) -> None:
    free = psutil.virtual_memory().available
    if needed > free:
        raise ValueError(
            f"keeping an exact state needs {needed / 1e9:.1f} GB of host memory and {free / 1e9:.1f} GB are free; choose `light`, or a smaller window"
        )


def _fingerprint(dit: torch.nn.Module) -> str:
    """Names a checkpoint by its patch embedding, which no attention LoRA touches."""
    weight = dit.patch_embedding.weight.detach().to("cpu", torch.float32)
    return hashlib.blake2b(weight.contiguous().numpy().tobytes(), digest_size=8).hexdigest()


def _patch_fingerprint(model: ModelPatcher) -> str:
    """Names the LoRAs and other weight patches on a MODEL by their keys, strengths and first values; empty without any."""
    if not model.patches:
        return ""
    digest = hashlib.blake2b(digest_size=8)

    def add(value: object) -> None:
        if isinstance(value, Tensor):
            digest.update(f"{tuple(value.shape)}".encode() + value.flatten()[:8].to("cpu", torch.float32).numpy().tobytes())
        elif isinstance(value, list | tuple):
            for item in value:
                add(item)
        elif hasattr(value, "weights"):  # core's weight adapters
            add((type(value).__name__, value.weights))
        elif isinstance(value, str | int | float | bool):
            digest.update(repr(value).encode())

    for key in sorted(model.patches):
        add((key, model.patches[key]))
    return digest.hexdigest()


def _compute_dtype(model: ModelPatcher) -> torch.dtype:
    """What the model computes in, also where a node has set it on the patcher (core's ModelComputeDtype)."""
    return model.get_model_object("manual_cast_dtype") or model.model.get_dtype()


def _clamps(model: ModelPatcher, samples: Tensor, mask: Tensor, chunk_frames: int, num_chunks: int) -> dict[int, Clamp]:
    """Slice start image and mask per chunk; only chunks that hold given parts get an entry."""
    mask = comfy.sampler_helpers.prepare_mask(mask, samples.shape, "cpu")[:, :1].to(torch.float32)
    if bool((mask == 1).all()):
        return {}
    latent = model.model.process_latent_in(samples.to("cpu", torch.float32))
    pad = num_chunks * chunk_frames - samples.shape[2]
    mask = torch.nn.functional.pad(mask, (0, 0, 0, 0, 0, pad), value=1.0)
    latent = torch.nn.functional.pad(latent, (0, 0, 0, 0, 0, pad))
    device = model.load_device
    clamps = {}
    for chunk, (part, given) in enumerate(zip(mask.split(chunk_frames, dim=2), latent.split(chunk_frames, dim=2), strict=True)):
        if not bool((part == 1).all()):
            rows = part.mean(dim=(1, 3, 4))
            if not torch.equal(rows, rows[:1].expand_as(rows)):
                raise ValueError("the noise_mask must keep the same frames in every row of the batch, because a frame has one timestep; sample the rows alone")
            shares = tuple(rows[0].tolist())
            clamps[chunk] = Clamp(given.to(device), part.to(device), shares)
    return clamps


def _plan_prompts(positive: list, batch: int, num_chunks: int, chunk_frames: int, fps: float, first_chunk: int) -> tuple[list[ChunkPlan], list, list[str]]:
    """Turn CONDITIONING into one plan per chunk and one core condition per distinct set of prompts."""
    if not positive:
        raise ValueError("the positive CONDITIONING is empty; connect a CLIP Text Encode or a Prompt Timeline node")
    found = [entry for entry in positive if "longlive_timeline" in entry[1]]
    if not found:
        if len(positive) > 1:
            raise ValueError(
                f"the positive CONDITIONING holds {len(positive)} combined prompts; a KV-cached video has one prompt at a time: use a Prompt Timeline node"
            )
        _check_rows(positive[0][0].shape[0], batch)
        return [ChunkPlan(0)] * num_chunks, positive, []
    if len(found) != len(positive):
        raise ValueError("the positive CONDITIONING mixes a Prompt Timeline with other prompts; connect the Prompt Timeline alone")
    timeline: timelines.Timeline = found[0][1]["longlive_timeline"]
    if any(entry[1]["longlive_timeline"] != timeline for entry in found):
        raise ValueError("the positive CONDITIONING combines two Prompt Timelines; put all prompts into one")
    _check_rows(timeline.rows, batch)
    by_id = prompt_entries(found)
    chunks = timelines.schedule(timeline, num_chunks, chunk_frames, fps, first_chunk=first_chunk)
    snapped = timelines.snap(timeline, chunk_frames, fps, first_chunk=first_chunk, num_chunks=num_chunks)
    plans = [ChunkPlan(chunk.prompts, chunk.is_cut, chunk.is_switch) for chunk in chunks]
    entries = []
    for prompts in dict.fromkeys(plan.prompt for plan in plans):
        rows = [_text_rows(by_id[number][0]) for number in prompts]
        entries.append([torch.cat(rows) if len(rows) > 1 else rows[0], dict(by_id[prompts[0]][1])])
    return plans, entries, [*timeline.notes, *snapped.notes]


def _check_rows(rows: int, batch: int) -> None:
    if rows not in (1, batch):
        raise ValueError(f"there are {rows} prompts side by side and the latent's batch is {batch}; give one prompt, or one for each of the {batch} videos")


def _check_conditioning(which: str, entries: list) -> None:
    """Refuse what core would apply by leaving forwards out or cropping them: keys and values would be missing without a word."""
    for _, options in entries:
        found = [label for name, label in _UNSUPPORTED_OPTIONS.items() if options.get(name) is not None]
        if options.get("start_percent", 0.0) > 0.0 or options.get("end_percent", 1.0) < 1.0:
            found.append("a timestep range")
        if found:
            raise ValueError(
                f"the {which} CONDITIONING carries {' and '.join(found)}, which a KV-cached forward has no place for: "
                "a prompt holds for the whole picture and all steps of its chunks; remove that node"
            )


def _padded(entries: list, notes: list[str]) -> list:
    """Bring every prompt to the rows that the model reads; core would fill a shorter one up with repeats when it batches two."""
    longest = max(tensor.shape[1] for tensor, _ in entries)
    if longest > TEXT_ROWS:
        notes.append(f"a prompt has {longest} rows of text; the model reads the first {TEXT_ROWS}")
    return [[_text_rows(tensor), options] for tensor, options in entries]


def _text_rows(tensor: Tensor) -> Tensor:
    """Pad or cut a prompt's ``(1, rows, dim)`` to the 512 rows that the model reads, so that prompts of a batch can be joined."""
    tensor = tensor[:, :TEXT_ROWS]
    return torch.nn.functional.pad(tensor, (0, 0, 0, TEXT_ROWS - tensor.shape[1]))


def with_overrides(recipe: Recipe, **values: object) -> Recipe:
    """Return ``recipe`` with every value that is not None, and a note saying which widgets won over the model's own defaults."""
    set_values = {name: value for name, value in values.items() if value is not None}
    changed = [f"{name} {value} set on the Chunked Sampler (the model's own: {getattr(recipe, name)})" for name, value in set_values.items()]
    return replace(recipe, **set_values).with_notes(*changed)
