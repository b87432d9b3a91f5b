"""The chunk loop: denoise a chunk against the window, commit it with a clean pass, pin it at a cut, go on.

Torch only. The network is reached through ``Network``; where noise, prompts and start images come from is the caller's business. Upstream:
``pipeline/causal_diffusion_inference.py`` (2.0) and ``pipeline/interactive_causal_inference.py`` (1.0).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from .config import Recipe
from .forward import ChunkCall, Memo
from .kv_cache import KVCache
from .noise import NoiseSource
from .solver import FlowUniPC, network_timestep, renoise, sigmas_of
from .window import EMPTY, Placement, Window


@dataclass(frozen=True)
class LoopOptions:
    """How the loop departs from the recipe's defaults. Upstream names in parentheses.

    clean_recache: forget all but the sink before a cut's clean pass (``shot_clean_recache``). relative_rope: positions by place in the window
    (``use_relative_rope``). time_scale: factor on time positions (``t_scale``). keep_sink: a re-cache leaves the sink's keys alone (``global_sink``, 1.0).
    single_first_frame: the first chunk is one latent frame (``independent_first_frame`` without an image; no released weights were trained for it, so no
    node offers it).
    """

    clean_recache: bool = False
    relative_rope: bool = False
    time_scale: float = 1.0
    keep_sink: bool = True
    single_first_frame: bool = False


@dataclass(frozen=True)
class ChunkPlan:
    """One chunk to make: ``prompt`` is an opaque name handed to the network; a cut starts a new shot, a switch changes the prompt inside one."""

    prompt: object
    is_cut: bool = False
    is_switch: bool = False


@dataclass(frozen=True)
class Clamp:
    """Part of a chunk that is given, not generated: ``latent`` (B, C, f, H, W) where ``mask`` (B, 1, f, H, W) is 0."""

    latent: Tensor
    mask: Tensor
    frame_noise: tuple[float, ...]  # mean of the mask per latent frame: the share of the timestep that the frame is told

    def apply(self, x: Tensor) -> Tensor:
        return self.latent * (1 - self.mask) + x * self.mask


class Network(Protocol):
    """The DiT behind whatever the host puts around it (guidance, patches, offload)."""

    def flow(self, x: Tensor, sigma: float, call: ChunkCall, prompt: object) -> Tensor:
        """The flow of ``x`` (B, C, f, H, W) at ``sigma``."""

    def commit(self, x: Tensor, call: ChunkCall, prompt: object) -> None:
        """Write the clean keys and values of ``x`` into the window."""


@dataclass
class Video:
    """A video being made: what is finished and what is in the window. ``latents`` are normalised, float32, one CPU tensor (B, C, f, H, W) per chunk."""

    window: Window
    latents: list[Tensor] = field(default_factory=list)
    offsets: list[float] = field(default_factory=list)  # shot offset of each latent frame's time position
    shot: int = 0
    next_chunk: int = 0

    @property
    def num_frames(self) -> int:
        return len(self.offsets)

    @property
    def starts(self) -> list[int]:
        """The first latent frame of each finished chunk, and of the one to come."""
        return list(accumulate((chunk.shape[2] for chunk in self.latents), initial=0))

    def frames(self, numbers: Sequence[int]) -> Tensor:
        """The latent frames with the given numbers, (B, C, len(numbers), H, W)."""
        starts = self.starts
        picked = []
        for number in numbers:
            index = bisect_right(starts, number) - 1
            picked.append(self.latents[index][:, :, number - starts[index]])
        return torch.stack(picked, dim=2)


class ChunkLoop:
    """Runs chunks of one video. Holds no tensors beyond the caches and memo that it is given."""

    def __init__(
        self,
        network: Network,
        recipe: Recipe,
        options: LoopOptions,
        video: Video,
        caches: dict[int, KVCache],
        device: torch.device,
        on_forward: Callable[[int, int, Tensor], None] | None = None,
    ) -> None:
        """``on_forward(chunk, step, x0)`` is called after each forward of a chunk; step == steps means its clean pass. Passes that rebuild are not told."""
        self.network, self.recipe, self.options, self.video = network, recipe, options, video
        self.caches, self.device, self.on_forward = caches, device, on_forward
        self.memo = Memo()
        self.sigmas = sigmas_of(recipe)

    def prefill(self, given: Tensor, plan: ChunkPlan) -> None:
        """Take ``given`` (B, C, T, H, W) as the video's first frames: one clean pass per chunk under ``plan.prompt``."""
        length = self.recipe.chunk_frames
        if given.shape[2] % length:
            raise ValueError(f"a video to extend must be whole chunks of {length} latent frames, got {given.shape[2]}")
        for x in given.split(length, dim=2):
            start = self.video.num_frames
            self.video.offsets += [0.0] * length
            self._commit(x.to(self.device), start, plan.prompt)
            self._tell(self.recipe.steps, x)
            self._finish(x)

    def run(self, plan: ChunkPlan, noise: NoiseSource, clamp: Clamp | None = None) -> Tensor:
        """Make the next chunk; returns its latents (B, C, f, H, W) on the loop's device."""
        video, recipe = self.video, self.recipe
        start = video.num_frames
        length = 1 if self.options.single_first_frame and start == 0 else recipe.chunk_frames
        if plan.is_cut:
            video.shot += 1
        elif plan.is_switch and recipe.recache_on_switch and start > 0:
            self.recache(plan.prompt)
        video.offsets += [video.shot * recipe.shot_rope_offset] * length
        x = noise.initial(video.next_chunk)[:, :, :length].to(self.device, torch.float32)
        x = self._denoise(x, start, plan.prompt, noise, clamp)
        pins = plan.is_cut and recipe.shot_pin and recipe.sink_frames > 0
        if pins and self.options.clean_recache:
            video.window.forget_history(start)
        self._commit(x, start, plan.prompt)
        self._tell(recipe.steps, x)
        if pins:
            video.window.pin(length)
        self._finish(x)
        return x

    def recache(self, prompt: object) -> None:
        """Rebuild the window's keys and values under a new prompt.

        1.0: one forward over the newest frames together (upstream ``_recache_after_switch``). 2.0 has none upstream; asked for, the chunks after the sink
        are committed again one after another.
        """
        window, video = self.video.window, self.video
        if self.recipe.solver == "renoise":
            count = min(window.capacity, video.num_frames)
            start = video.num_frames - count
            x = video.frames(range(start, start + count)).to(self.device)
            self._commit(x, start, prompt, rewrite_sink=not self.options.keep_sink)
        else:
            self.rebuild(prompt, keep=window.sink if self.options.keep_sink else 0)

    def rebuild(self, prompt: object, keep: int = 0) -> None:
        """Commit the window's frames again in window order, chunk by chunk, after its first ``keep`` frames."""
        window = self.video.window
        starts = set(self.video.starts)
        groups: list[list[int]] = []
        for frame in window.frames()[keep:]:
            if frame == EMPTY:
                continue
            if groups and frame == groups[-1][-1] + 1 and frame not in starts:
                groups[-1].append(frame)
            else:
                groups.append([frame])
        end = window.end
        for slot in window.order[keep:]:
            del window.frame_in[slot]
        del window.order[keep:]
        for group in groups:
            placement = window.append(group)
            self.network.commit(self.video.frames(group).to(self.device), self._call([0.0] * len(group), placement, group, commit=True), prompt)
        window.end = end

    def _denoise(self, x: Tensor, start: int, prompt: object, noise: NoiseSource, clamp: Clamp | None) -> Tensor:
        recipe, length = self.recipe, x.shape[2]
        solver = FlowUniPC(self.sigmas)
        frames = range(start, start + length)
        for step in range(recipe.steps):
            if clamp is not None:
                x = clamp.apply(x)
            sigma, after = self.sigmas[step], self.sigmas[step + 1]
            timestep = network_timestep(sigma, recipe.solver)
            timesteps = [timestep] * length if clamp is None else [timestep * share for share in clamp.frame_noise]
            call = self._call(timesteps, self.video.window.enter(start, length), frames, commit=False)
            flow = self.network.flow(x, sigma, call, prompt)
            x0 = x - sigma * flow
            self._tell(step, x0)
            if recipe.solver == "unipc":
                x = solver.step(x, flow)
            elif after > 0:
                x = renoise(x0, after, noise.fresh(self.video.next_chunk, step).to(self.device, torch.float32))
            else:
                x = x0
        return x if clamp is None else clamp.apply(x)

    def _commit(self, x: Tensor, start: int, prompt: object, *, rewrite_sink: bool = False) -> None:
        length = x.shape[2]
        placement = self.video.window.enter(start, length, rewrite_sink=rewrite_sink)
        self.network.commit(x, self._call([0.0] * length, placement, range(start, start + length), commit=True), prompt)

    def _tell(self, step: int, x0: Tensor) -> None:
        if self.on_forward is not None:
            self.on_forward(self.video.next_chunk, step, x0)

    def _finish(self, x: Tensor) -> None:
        self.video.latents.append(x.detach().to("cpu", torch.float32, copy=True))
        self.video.next_chunk += 1

    def _call(self, timesteps: list[float], placement: Placement, frames: Sequence[int], *, commit: bool) -> ChunkCall:
        scale, offsets = self.options.time_scale, self.video.offsets
        key_times = None
        if self.options.relative_rope:
            by_slot = {slot: place * scale for place, slot in enumerate(placement.order)}
            key_times = tuple(by_slot[slot] for slot in range(placement.filled))
            query_times = tuple((placement.filled - len(frames) + i) * scale for i in range(len(frames)))
        else:
            query_times = tuple((frame + offsets[frame]) * scale for frame in frames)
        return ChunkCall(
            timesteps=tuple(timesteps),
            placement=placement,
            query_times=query_times,
            key_times=key_times,
            commit=commit,
            caches=self.caches,
            memo=self.memo,
            chunk_frames=self.recipe.chunk_frames,
            sink_frames=self.recipe.sink_frames,
        )
