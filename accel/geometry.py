"""The only place where pixel frames, latent frames, chunks, tokens, pixels and bytes are turned into one another.

Glossary, used in the whole package:

- **frame**, pixel frame: one picture of the video. Frame numbers count from 0.
- **latent frame**: one step of T in latents (B, C, T, H, W). Wan's VAEs make latent frame 0 from one pixel frame and every later one from four, so F latent
  frames are 4F-3 pixel frames, and latent frame l > 0 begins at pixel frame 4l-3.
- **chunk**: the latent frames that are denoised together, 8 in LongLive 2.0 and 3 in 1.0. Chunk numbers count from 0; every chunk is whole.
- **token**: one 2x2 patch of one latent frame, so a latent frame of H x W has H*W/4 tokens and H and W must be even.
- **window**: the latent frames whose keys and values are held, sink and current chunk included. **sink**: those first frames of it that are never dropped.

Everything here is integer arithmetic on plain numbers; no tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

TEMPORAL_COMPRESSION = 4
PATCH = 2


@dataclass(frozen=True)
class LatentSize:
    """The size of one latent frame: channels and latent height and width."""

    channels: int
    height: int
    width: int

    @property
    def tokens_per_frame(self) -> int:
        return tokens_per_frame(self.height, self.width)


@dataclass(frozen=True)
class PixelGrid:
    """How a VAE divides a picture. ``spatial`` is pixels per latent step in height and width; the DiT's patches double it.

    ``native_width`` x ``native_height`` is the size in pixels that LongLive's weights for this VAE were trained at.
    """

    name: str
    channels: int
    spatial: int
    native_width: int
    native_height: int

    @property
    def multiple(self) -> int:
        """Width and height in pixels must be multiples of this."""
        return self.spatial * PATCH

    def latent_size(self, width: int, height: int) -> LatentSize:
        """The latent size of a picture of ``width`` x ``height`` pixels.

        Raises ValueError, with the nearest sizes that would work, when the picture is off the grid.
        """
        if width < 1 or height < 1 or width % self.multiple or height % self.multiple:
            near = [self._nearest(side) for side in (width, height)]
            raise ValueError(
                f"the size {width}x{height} pixels does not fit {self.name}: width and height must be multiples of {self.multiple}; "
                f"width {near[0]} and height {near[1]} would work"
            )
        return LatentSize(self.channels, height // self.spatial, width // self.spatial)

    def _nearest(self, side: int) -> str:
        low = side // self.multiple * self.multiple
        if low == side and side > 0:
            return str(side)
        return f"{low} or {low + self.multiple}" if low > 0 else str(self.multiple)


WAN22_GRID = PixelGrid("the Wan 2.2 VAE (LongLive 2.0)", channels=48, spatial=16, native_width=1280, native_height=704)
WAN21_GRID = PixelGrid("the Wan 2.1 VAE (LongLive 1.0)", channels=16, spatial=8, native_width=832, native_height=480)


def pixel_frames_of(latent_frames: int, temporal_compression: int = TEMPORAL_COMPRESSION) -> int:
    """Pixel frames in ``latent_frames`` latent frames: 4F-3, and 0 for none."""
    return temporal_compression * (latent_frames - 1) + 1 if latent_frames > 0 else 0


def latent_frames_for(pixel_frames: int, temporal_compression: int = TEMPORAL_COMPRESSION) -> int:
    """The fewest latent frames that hold at least ``pixel_frames`` pixel frames."""
    if pixel_frames < 1:
        return 0
    return -(-(pixel_frames - 1) // temporal_compression) + 1


def first_pixel_frame(latent_frame: int, temporal_compression: int = TEMPORAL_COMPRESSION) -> int:
    """The pixel frame at which latent frame ``latent_frame`` begins: 0, then 4l-3."""
    return pixel_frames_of(latent_frame, temporal_compression)


def chunks_for(latent_frames: int, chunk_frames: int) -> int:
    """The fewest whole chunks that hold ``latent_frames`` latent frames."""
    return -(-latent_frames // chunk_frames)


def pixel_frames_for_seconds(seconds: float, fps: float) -> int:
    """The fewest pixel frames that last at least ``seconds``; at least one.

    A thousandth of a frame is forgiven, so that 1.1 s at 30 fps is 33 frames although 1.1 * 30 is a little more than 33 in floating point.
    """
    return max(1, math.ceil(seconds * fps - 1e-3))


def seconds(pixel_frames: int, fps: float) -> float:
    """How long ``pixel_frames`` pixel frames last."""
    return pixel_frames / fps


def tokens_per_frame(latent_height: int, latent_width: int) -> int:
    """Tokens in one latent frame of ``latent_height`` x ``latent_width``; ValueError when a side is odd."""
    if latent_height < PATCH or latent_width < PATCH or latent_height % PATCH or latent_width % PATCH:
        raise ValueError(
            f"a latent frame of {latent_height}x{latent_width} (height x width) cannot be cut into 2x2 patches: both sides must be even and at least 2"
        )
    return (latent_height // PATCH) * (latent_width // PATCH)


def kv_cache_bytes(layers: int, dim: int, window_frames: int, frame_tokens: int, *, batch: int = 1, element_bytes: int = 2) -> int:
    """Bytes of the self-attention keys and values of one branch: K and V, (batch, window tokens, dim) each, for every layer.

    ``element_bytes`` 2 is bfloat16. A run with a negative prompt holds two branches.
    """
    return 2 * layers * batch * window_frames * frame_tokens * dim * element_bytes
