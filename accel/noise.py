"""Where a chunk's Gaussian noise comes from. Local generators only; the global random state is never touched.

Every source answers two questions: ``initial(chunk)`` -> ``(B, C, f, H, W)`` and ``fresh(chunk, step)`` -> the same shape (LongLive 1.0 puts fresh noise
back after each step but the last).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor


class NoiseSource(Protocol):
    def initial(self, chunk: int) -> Tensor: ...

    def fresh(self, chunk: int, step: int) -> Tensor: ...


def _seed(*parts: int) -> int:
    text = ",".join(str(part) for part in parts).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


@dataclass(frozen=True)
class ChunkNoise:
    """Noise drawn per chunk and batch row from ``seed``: chunk c is the same whatever the video's length, batch size or device.

    ``shape`` is one chunk, ``(B, C, f, H, W)``.
    """

    seed: int
    shape: tuple[int, int, int, int, int]

    def _draw(self, *key: int) -> Tensor:
        rows = []
        for row in range(self.shape[0]):
            generator = torch.Generator().manual_seed(_seed(self.seed, row, *key))
            rows.append(torch.randn(self.shape[1:], generator=generator))
        return torch.stack(rows)

    def initial(self, chunk: int) -> Tensor:
        return self._draw(chunk)

    def fresh(self, chunk: int, step: int) -> Tensor:
        return self._draw(chunk, step + 1)


@dataclass
class UpstreamNoise:
    """Upstream's order: one draw of ``(B, frames, C, H, W)`` for the whole video, sliced per chunk; 1.0's fresh noise follows from the same generator.

    Drawn on the CPU in float32; upstream draws on the GPU in BF16, so its pictures are not repeated, only its order. The draw depends on the video's length:
    ``num_chunks`` from ``first_chunk`` on, with ``steps`` denoising steps each. Everything is a function of these numbers; what was drawn last is kept.
    """

    seed: int
    shape: tuple[int, int, int, int, int]
    num_chunks: int
    first_chunk: int = 0
    steps: int = 4
    _generator: torch.Generator | None = field(default=None, repr=False)
    _noise: Tensor | None = field(default=None, repr=False)
    _fresh_drawn: int = 0

    def initial(self, chunk: int) -> Tensor:
        if self._noise is None:
            self._restart()
        frames = self.shape[2]
        start = (chunk - self.first_chunk) * frames
        return self._noise[:, start : start + frames].transpose(1, 2).contiguous()

    def fresh(self, chunk: int, step: int) -> Tensor:
        index = (chunk - self.first_chunk) * (self.steps - 1) + step
        if self._noise is None or self._fresh_drawn > index:
            self._restart()
        batch, channels, frames, height, width = self.shape
        while self._fresh_drawn <= index:  # a continued video leaves out what its earlier chunks took
            drawn = torch.randn((batch, frames, channels, height, width), generator=self._generator)
            self._fresh_drawn += 1
        return drawn.transpose(1, 2).contiguous()

    def _restart(self) -> None:
        batch, channels, frames, height, width = self.shape
        self._generator = torch.Generator().manual_seed(self.seed)
        self._noise = torch.randn((batch, frames * self.num_chunks, channels, height, width), generator=self._generator)
        self._fresh_drawn = 0


@dataclass(frozen=True)
class GivenNoise:
    """Noise given as tensors: ``noise`` ``(B, C, T, H, W)`` from frame ``first_frame`` on, ``renoise`` ``(chunks, steps, B, C, f, H, W)`` or None."""

    noise: Tensor
    chunk_frames: int
    first_chunk: int = 0
    renoise: Tensor | None = None
    single_first_frame: bool = False  # the first chunk has one latent frame

    def initial(self, chunk: int) -> Tensor:
        start = (chunk - self.first_chunk) * self.chunk_frames
        if self.single_first_frame and start > 0:
            start -= self.chunk_frames - 1
        return self.noise[:, :, start : start + self.chunk_frames]

    def fresh(self, chunk: int, step: int) -> Tensor:
        if self.renoise is None:
            raise ValueError("this noise source has no fresh noise; LongLive 1.0 needs one draw per step")
        return self.renoise[chunk - self.first_chunk, step]
