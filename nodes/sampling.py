"""Puts the chunk loop behind core's guider and sampler: conditions, memory, progress and interrupts are the host's, the loop is ours.

``sample_video`` is what the Chunked Sampler node and ``tests/parity.py`` call. No model is subclassed or patched: a clone gets one keyed wrapper around its
forward, which steps aside whenever a call is not ours.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import comfy.model_management
import comfy.samplers
import latent_preview
import torch
from comfy.ldm.modules.attention import optimized_attention
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP
from torch import Tensor

from ..accel.forward import ChunkCall, chunk_forward
from ..accel.kv_cache import KVCache
from ..accel.noise import ChunkNoise, NoiseSource, UpstreamNoise
from ..accel.sampler import ChunkLoop, ChunkPlan, Video
from ..accel.state import LongLiveState, snapshot
from .accelerate import KEY as ACCELERATOR_ATTACHMENT
from .sampling_job import Job, SamplingRequest

WRAPPER_KEY = "longlive"
CALL_KEY = "longlive_call"
# Model inputs that a KV-cached forward has no place for.
_UNSUPPORTED_INPUTS = ("clip_fea", "time_dim_concat", "reference_latent", "context_latents", "control")
_CFG_FUNCTIONS = ("sampler_cfg_function", "sampler_pre_cfg_function", "sampler_post_cfg_function")


@dataclass(frozen=True)
class SamplingResult:
    """latent: core LATENT dict of the whole video. state: to continue it, or None. report: JSON-able account of what ran."""

    latent: dict
    state: LongLiveState | None
    report: dict = field(default_factory=dict)


def sample_video(
    model: ModelPatcher,
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
    job = Job.check(model, positive, negative, latent, request, extend, state, plans)
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
        if not (in_loop and isinstance(error, Exception) and comfy.model_management.is_oom(error)):
            raise  # not about memory, or already in our words
        free = comfy.model_management.get_free_memory(clone.load_device)
        raise torch.OutOfMemoryError(
            f"memory ran out in chunk {sampler.video.next_chunk} of {job.num_chunks}: the KV cache holds {job.cache_bytes / 1e9:.2f} GB and "
            f"{free / 1e9:.2f} GB are free on {clone.load_device}; a smaller window or a smaller picture needs less ({error})"
        ) from error
    sampler.release()
    accelerator = clone.get_attachment(ACCELERATOR_ATTACHMENT)
    report = job.report(sampler.notes, None if accelerator is None else accelerator.report())
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


def _put_back(samples: Tensor, job: Job, latent: dict, extend: dict | None) -> None:
    """Write what was given over its copy that went through the model's normalisation and back, so that it is the same to the last bit."""
    if job.given is not None:
        count = job.given.shape[2]
        samples[:, :, :count] = extend["samples"][:, :, :count]
    for chunk, clamp in job.clamps.items():
        start = chunk * clamp.mask.shape[2]
        given = latent["samples"][:, :, start : start + clamp.mask.shape[2]].to(samples)
        part = samples[:, :, start : start + given.shape[2]]
        part.copy_(torch.where(clamp.mask[:, :, : given.shape[2]].to(samples.device) == 0, given, part))


def _noise(job: Job, request: SamplingRequest) -> NoiseSource:
    if request.upstream_noise:
        # Upstream knows no states: a continued video is drawn as the whole it belongs to. An extended one starts at its own row 0.
        first = 0 if job.state is not None else job.first_chunk
        return UpstreamNoise(request.seed, job.chunk_shape, job.first_chunk - first + job.num_chunks, first, request.recipe.steps)
    return ChunkNoise(request.seed, job.chunk_shape)


class _ChunkSampler(comfy.samplers.Sampler):
    """Core sampler that runs the chunk loop; also the loop's ``Network``. Lives for one run."""

    def __init__(self, job: Job, noise: NoiseSource) -> None:
        self.job, self.noise = job, noise
        self.video: Video = job.new_video()
        self.caches: dict[int, KVCache] = {}
        self.parked: dict[str, Tensor] | None = None
        self.notes: list[str] = []
        self._wrap = self._entries = self._extra = None

    def prepare_sampling(self, executor: Callable, model: ModelPatcher, *args: object, **kwargs: object) -> object:
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
            if self.job.state.signature.patches == self.job.signature.patches:
                self.notes.append("continued from parked keys and values: bit-equal to an uninterrupted run")
            else:
                self.notes.append("continued from parked keys and values made under other LoRAs than those on the MODEL now: not bit-equal with either")
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


def _working_bytes(dit: torch.nn.Module, job: Job, dtype: torch.dtype) -> int:
    """Memory of one forward beside weights and cache: two feed-forward hidden states and fourteen states of the model's width.

    Measured on an H200 with the 5B at 1280x704 in bfloat16: 0.93 GB; this gives 1.01 GB (tests/bench/sampling.py prints the peak).
    """
    batch, _, frames, _, _ = job.chunk_shape
    tokens = batch * len(job.branches) * frames * job.cache_shape.frame_tokens
    hidden = dit.blocks[0].ffn[0].out_features
    return tokens * (2 * hidden + 14 * dit.dim) * dtype.itemsize


