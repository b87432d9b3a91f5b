"""Puts the chunk loop behind core's guider and sampler: conditions, memory, progress and interrupts are the host's, the loop is ours.

``sample_video`` is what the Chunked Sampler node and ``tests/parity.py`` call. No model is subclassed or patched: a clone gets one keyed wrapper around its
forward, which steps aside whenever a call is not ours.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import comfy.model_management
import comfy.sampler_helpers
import comfy.samplers
import comfy.utils
import latent_preview
import psutil
import torch
from comfy.ldm.modules.attention import optimized_attention
from comfy.patcher_extension import WrappersMP
from torch import Tensor

from ..accel import timeline as timelines
from ..accel.config import Recipe
from ..accel.forward import TEXT_ROWS, ChunkCall, chunk_forward, why_not_wan
from ..accel.geometry import TEMPORAL_COMPRESSION, WAN21_GRID, WAN22_GRID, chunks_for, latent_frames_for, pixel_frames_of
from ..accel.kv_cache import CacheShape, KVCache
from ..accel.noise import ChunkNoise, NoiseSource, UpstreamNoise
from ..accel.presets import LONGLIVE_1, LONGLIVE_2
from ..accel.sampler import ChunkLoop, ChunkPlan, Clamp, LoopOptions, Video
from ..accel.state import LongLiveState, ModelSignature, snapshot
from ..accel.window import Window
from .prompts import prompt_entries

log = logging.getLogger(__name__)

WRAPPER_KEY = "longlive"
CALL_KEY = "longlive_call"
RECIPE_ATTACHMENT = "longlive_recipe"
ACCELERATOR_ATTACHMENT = "longlive_accelerator"
COND, UNCOND = 0, 1  # core's cond_or_uncond
PARK_MODES = ("light", "exact", "none")
# Model inputs that a KV-cached forward has no place for.
_UNSUPPORTED_INPUTS = ("clip_fea", "time_dim_concat", "reference_latent", "context_latents", "control")
_CFG_FUNCTIONS = ("sampler_cfg_function", "sampler_pre_cfg_function", "sampler_post_cfg_function")
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


@dataclass(frozen=True)
class SamplingResult:
    """latent: core LATENT dict of the whole video. state: to continue it, or None. report: JSON-able account of what ran."""

    latent: dict
    state: LongLiveState | None
    report: dict = field(default_factory=dict)


def recipe_of(model: comfy.model_patcher.ModelPatcher) -> Recipe:
    """The recipe attached by Load LongLive DiT, else a guess from the channels, said in its notes."""
    attached = model.get_attachment(RECIPE_ATTACHMENT)
    if attached is not None:
        return attached
    channels = model.get_model_object("latent_format").latent_channels
    guess = LONGLIVE_2 if channels == 48 else LONGLIVE_1
    return guess.with_notes(f"defaults of {guess.name}: guessed from {channels} latent channels, because no Load LongLive DiT node made this MODEL")


def sample_video(
    model: comfy.model_patcher.ModelPatcher,
    positive: list,
    negative: list | None,
    latent: dict,
    request: SamplingRequest,
    *,
    extend: dict | None = None,
    state: LongLiveState | None = None,
    noise: NoiseSource | None = None,
    plans: Sequence[ChunkPlan] | None = None,
) -> SamplingResult:
    """Sample ``latent``'s length chunk by chunk and return the whole video's latents.

    positive: core CONDITIONING, one entry or a Prompt Timeline. latent: core LATENT; its size and length, and a start image where its noise_mask is 0.
    extend: LATENT to continue by clean passes. state: to continue where it ended. noise and plans replace the seed's noise and the timeline (parity tests);
    a plan's prompt is then the index of its entry in ``positive``.
    Raises ValueError with what was asked, found and would work.
    """
    job = _Job.check(model, positive, negative, latent, request, extend, state, plans)
    if noise is None:
        noise = _noise(job, request)
    clone = model.clone()
    sampler = _ChunkSampler(job, noise)
    clone.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, WRAPPER_KEY, _forward_wrapper)
    clone.add_wrapper_with_key(WrappersMP.PREPARE_SAMPLING, WRAPPER_KEY, sampler.prepare_sampling)
    guider = comfy.samplers.CFGGuider(clone)
    conditions = {"positive": job.entries}
    if job.negative is not None:
        conditions["negative"] = job.negative
    guider.inner_set_conds(conditions)
    guider.set_cfg(request.cfg)
    callback = latent_preview.prepare_callback(clone, job.total_forwards)
    # The guider only ever sees one chunk, so memory is planned for one; the sampler brings the real noise.
    chunk = torch.zeros(job.chunk_shape)
    sigmas = torch.tensor(job.sigmas)
    outer = sys.exc_info()[1]
    try:
        samples = guider.sample(chunk, chunk, sampler, sigmas, callback=callback, disable_pbar=True, seed=request.seed)
    except BaseException as error:  # an interrupt is none of the others
        in_loop = bool(sampler.caches)
        sampler.release()
        _forget_frames(error, outer)
        if not isinstance(error, torch.OutOfMemoryError) or not in_loop:
            raise  # not about memory, or already in our words
        free = comfy.model_management.get_free_memory(clone.load_device)
        raise torch.OutOfMemoryError(
            f"memory ran out in chunk {sampler.video.next_chunk} of {job.num_chunks}: the KV cache holds {job.cache_bytes / 1e9:.2f} GB and "
            f"{free / 1e9:.2f} GB are free on {clone.load_device}; a smaller window or a smaller picture needs less ({error})"
        ) from error
    sampler.release()
    report = job.report(sampler, clone)
    result = dict(latent)
    result.pop("noise_mask", None)
    result.pop("batch_index", None)
    result["samples"] = samples.to(comfy.model_management.intermediate_device(), comfy.model_management.intermediate_dtype())
    _put_back(result["samples"], job, latent, extend)
    result["longlive"] = job.latent_note(latent, report)
    final = None
    if request.park != "none":
        final = snapshot(sampler.video, job.signature, request.recipe, request.options, request.seed, report, sampler.parked)
    return SamplingResult(result, final, report)


def _forget_frames(error: BaseException, outer: BaseException | None) -> None:
    """Empty the frames that ``error`` passed through: they hold views of the window, which would live as long as somebody keeps the error.

    outer: the exception that was being handled before, whose frames are not ours.
    """
    seen: set[int] = set()
    while error is not None and error is not outer and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _put_back(samples: Tensor, job: _Job, latent: dict, extend: dict | None) -> None:
    """Write what was given over its copy that went through the model's normalisation and back, so that it is the same to the last bit."""
    if job.given is not None:
        count = job.given.shape[2]
        samples[:, :, :count] = extend["samples"][:, :, :count]
    for chunk, clamp in job.clamps.items():
        start = chunk * clamp.mask.shape[2]
        given = latent["samples"][:, :, start : start + clamp.mask.shape[2]].to(samples)
        part = samples[:, :, start : start + given.shape[2]]
        part.copy_(torch.where(clamp.mask[:, :, : given.shape[2]].to(samples.device) == 0, given, part))


def _noise(job: _Job, request: SamplingRequest) -> NoiseSource:
    if request.upstream_noise:
        # Upstream knows no states: a continued video is drawn as the whole it belongs to. An extended one starts at its own row 0.
        first = 0 if job.state is not None else job.first_chunk
        return UpstreamNoise(request.seed, job.chunk_shape, job.first_chunk - first + job.num_chunks, first, request.recipe.steps)
    return ChunkNoise(request.seed, job.chunk_shape)


@dataclass
class _Job:
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
        from ..accel.solver import renoise_sigmas, unipc_sigmas

        recipe = self.request.recipe
        return (unipc_sigmas if recipe.solver == "unipc" else renoise_sigmas)(recipe.steps, recipe.shift)

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
        model: comfy.model_patcher.ModelPatcher,
        positive: list,
        negative: list | None,
        latent: dict,
        request: SamplingRequest,
        extend: dict | None,
        state: LongLiveState | None,
        plans: Sequence[ChunkPlan] | None,
    ) -> _Job:
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
        samples = _video_tensor(latent["samples"], model_channels, "the latent", model)
        batch, channels, asked, height, width = samples.shape
        frame_tokens = _check_grid(height, width, channels)
        chunk_frames = recipe.chunk_frames
        note = latent.get("longlive") or {}
        signature = ModelSignature(channels, dit.dim, len(dit.blocks), batch, height, width, _fingerprint(dit))

        given, first_chunk = None, 0
        if state is not None and extend is not None:
            raise ValueError("both a state and a latent to extend are connected; a state already holds its video, so disconnect one of them")
        if state is not None:
            _check_state(state, signature, request)
            first_chunk = len(state.chunk_lengths)
        if extend is not None:
            given = _video_tensor(extend["samples"], model_channels, "the latent to extend", model)
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

        mask = latent.get("noise_mask")
        clamps = {} if mask is None else _clamps(model, samples, mask, chunk_frames, num_chunks, first_chunk)
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

    def report(self, sampler: _ChunkSampler, model: comfy.model_patcher.ModelPatcher) -> dict:
        recipe = self.request.recipe
        accelerator = model.get_attachment(ACCELERATOR_ATTACHMENT)
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
            "notes": [*recipe.notes, *self.notes, *sampler.notes],
            "attention": None if accelerator is None else accelerator.report(),
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


class _ChunkSampler(comfy.samplers.Sampler):
    """Core sampler that runs the chunk loop; also the loop's ``Network``. Lives for one run."""

    def __init__(self, job: _Job, noise: NoiseSource) -> None:
        self.job, self.noise = job, noise
        self.video: Video = job.new_video()
        self.caches: dict[int, KVCache] = {}
        self.parked: dict[str, Tensor] | None = None
        self.notes: list[str] = []
        self._wrap = self._entries = self._extra = None

    def prepare_sampling(self, executor: Callable, model: comfy.model_patcher.ModelPatcher, *args: object, **kwargs: object) -> object:
        """Allocate the KV cache before the weights are placed, so that core plans with the memory that is really left."""
        device, shape = model.load_device, self.job.cache_shape
        cache = self.job.cache_bytes
        working = _working_bytes(model.model.diffusion_model, self.job, model.model.get_dtype_inference())
        comfy.model_management.free_memory(cache + working, device)
        free = model.get_free_memory(device)
        need = (
            f"the KV cache needs {cache / 1e9:.2f} GB ({shape.capacity_frames} latent frames x {shape.frame_tokens} tokens, {shape.layers} layers, "
            f"{str(shape.dtype).removeprefix('torch.')}, {len(self.job.branches)} branch(es)) and a forward about {working / 1e9:.2f} GB more"
        )
        advice = "a smaller window, a smaller picture, batch 1 or CFG 1 needs less"
        if cache + working > free:
            raise torch.OutOfMemoryError(f"{need}; {free / 1e9:.2f} GB are free on {device}, so {(cache + working - free) / 1e9:.2f} GB are missing: {advice}")
        try:
            for branch in self.job.branches:
                self.caches[branch] = KVCache(shape, device)
        except torch.OutOfMemoryError as error:
            self.caches.clear()
            raise torch.OutOfMemoryError(f"{need}; {free / 1e9:.2f} GB were free on {device} and the allocation failed: {advice}") from error
        return executor(model, *args, **kwargs)

    def release(self) -> None:
        """Let go of all cache memory, also after an interrupt or an error."""
        self.caches.clear()  # the chunk loop holds the same dict
        self._wrap = self._entries = self._extra = None

    @torch.no_grad()
    def sample(
        self,
        model_wrap: comfy.samplers.CFGGuider,
        sigmas: Tensor,
        extra_args: dict,
        callback: Callable | None,
        noise: Tensor,
        latent_image: Tensor | None = None,
        denoise_mask: Tensor | None = None,
        disable_pbar: bool = False,
    ) -> Tensor:
        job = self.job
        self._wrap, self._extra, self._entries = model_wrap, extra_args, model_wrap.conds
        done = 0

        def on_forward(chunk: int, step: int, x0: Tensor) -> None:
            nonlocal done
            if callback is not None:
                callback(done, x0[:, :, -1:], x0, job.total_forwards)
            done += 1
            comfy.model_management.throw_exception_if_processing_interrupted()

        loop = ChunkLoop(self, job.request.recipe, job.request.options, self.video, self.caches, noise.device, on_forward)
        first = job.plans[0]
        if job.state is not None:
            self._resume(loop, first)
        if job.given is not None:
            loop.prefill(job.given, first)
        for index, plan in enumerate(job.plans):
            loop.run(plan, self.noise, job.clamps.get(index))
        if job.request.park == "exact":
            self.parked = {f"{branch}.{name}": tensor for branch, cache in self.caches.items() for name, tensor in cache.parked().items()}
        return torch.cat(self.video.latents, dim=2)

    def _resume(self, loop: ChunkLoop, first: ChunkPlan) -> None:
        parked = self.job.state.parked
        if parked is not None and all(f"{branch}.keys.0" in parked for branch in self.caches):
            for branch, cache in self.caches.items():
                prefix = f"{branch}."
                cache.restore({name.removeprefix(prefix): tensor for name, tensor in parked.items() if name.startswith(prefix)})
            self.notes.append("continued from parked keys and values: bit-equal to an uninterrupted run")
            return
        why = "the state holds none" if parked is None else "the state was made without a negative branch"
        self.notes.append(f"keys and values rebuilt by clean passes under the new prompt ({why}): close to, but not bit-equal with, an uninterrupted run")
        loop.rebuild(first.prompt)

    def flow(self, x: Tensor, sigma: float, call: ChunkCall, prompt: object) -> Tensor:
        denoised = self._call_model(x, sigma, call, prompt)
        return (x - denoised) / sigma

    def commit(self, x: Tensor, call: ChunkCall, prompt: object) -> None:
        self._call_model(x, 0.0, call, prompt)

    def _call_model(self, x: Tensor, sigma: float, call: ChunkCall, prompt: object) -> Tensor:
        comfy.model_management.throw_exception_if_processing_interrupted()
        entry = self._entries["positive"][self.job.prompt_index[prompt]]
        self._wrap.conds = {**self._entries, "positive": [entry]}
        model_options = dict(self._extra["model_options"])
        if call.commit:
            # Nobody looks at the result, and what runs here may call the model again in a changed way: its keys and values must not stay.
            model_options = {name: value for name, value in model_options.items() if name not in _CFG_FUNCTIONS}
        model_options["transformer_options"] = {**model_options.get("transformer_options", {}), CALL_KEY: call}
        sigmas = torch.full((x.shape[0],), sigma, device=x.device, dtype=torch.float32)
        try:
            return self._wrap(x, sigmas, model_options=model_options, seed=self._extra.get("seed"))
        finally:
            self._wrap.conds = self._entries


def _forward_wrapper(executor: Callable, x: Tensor, timestep: Tensor, context: Tensor, *args: object, **kwargs: object) -> Tensor:
    """``WanModel.forward`` with a window when the call is ours; everything else passes through untouched."""
    names = ("clip_fea", "time_dim_concat", "transformer_options")
    given = dict(zip(names, args)) | kwargs
    options = given.get("transformer_options", {})
    call: ChunkCall | None = options.get(CALL_KEY)
    if call is None:
        return executor(x, timestep, context, *args, **kwargs)
    for name in _UNSUPPORTED_INPUTS:
        if given.get(name) is not None:
            raise ValueError(f"the conditioning carries {name.replace('_', ' ')}, which LongLive's KV-cached forward has no place for; remove it")
    flow = chunk_forward(
        executor.class_obj,
        x,
        context,
        call,
        branches=tuple(options["cond_or_uncond"]),
        prompts=tuple(options["uuids"]),
        attention=optimized_attention,
        transformer_options=options,
    )
    return torch.zeros_like(x) if flow is None else flow


def _working_bytes(dit: torch.nn.Module, job: _Job, dtype: torch.dtype) -> int:
    """Memory of one forward beside weights and cache: two feed-forward hidden states and fourteen states of the model's width.

    Measured on an H200 with the 5B at 1280x704 in bfloat16: 0.93 GB; this gives 1.01 GB (tests/bench/sampling.py prints the peak).
    """
    batch, _, frames, _, _ = job.chunk_shape
    tokens = batch * len(job.branches) * frames * job.cache_shape.frame_tokens
    hidden = dit.blocks[0].ffn[0].out_features
    return tokens * (2 * hidden + 14 * dit.dim) * dtype.itemsize


def _video_tensor(samples: Tensor, channels: int, what: str, model: comfy.model_patcher.ModelPatcher) -> Tensor:
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
    for name, label in (("relative_rope", "relative RoPE"), ("time_scale", "time scale")):
        old, new = getattr(state.options, name), getattr(request.options, name)
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


def _compute_dtype(model: comfy.model_patcher.ModelPatcher) -> torch.dtype:
    """What the model computes in, also where a node has set it on the patcher (core's ModelComputeDtype)."""
    return model.get_model_object("manual_cast_dtype") or model.model.get_dtype()


def _clamps(model: comfy.model_patcher.ModelPatcher, samples: Tensor, mask: Tensor, chunk_frames: int, num_chunks: int, first_chunk: int) -> dict[int, Clamp]:
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
