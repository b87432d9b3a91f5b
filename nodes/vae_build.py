"""Makes core VAE objects from Wan-structured files of any width.

Core's VAE class reads the width of a Wan 2.1 file from its shapes but fixes Wan 2.2's at 160 and 256. ``WanVAE22`` fills that gap by subclassing; core's own
nodes (VAE Decode, VAE Decode Tiled, VAE Encode) take the result like any other VAE.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import comfy.ldm.wan.vae2_2
import comfy.model_management
import comfy.model_patcher
import comfy.sd
import comfy.utils
import torch
from torch import Tensor

# The Wan 2.2 VAE's decoder width, which core's memory estimate was tuned on.
_RELEASED_DEC_DIM = 256


@dataclass(frozen=True)
class Wan22Widths:
    """The shape of a Wan 2.2 VAE, read from its tensors. ``dim`` is None for a file with a decoder only."""

    z_dim: int
    dim: int | None
    dec_dim: int
    dim_mult: tuple[int, ...]
    num_res_blocks: int
    temporal_downsample: tuple[bool, ...]

    @classmethod
    def read(cls, state: dict[str, Tensor]) -> Wan22Widths:
        """Read the widths; ValueError naming the tensors that a Wan 2.2 VAE must have and this file has not."""
        needed = ["conv2.weight", "decoder.conv1.weight", "decoder.head.0.gamma", "decoder.upsamples.0.upsamples.0.residual.2.weight"]
        missing = [name for name in needed if name not in state]
        if missing:
            raise ValueError(
                f"this is no Wan 2.2 VAE: it has no {', '.join(missing)} among its {len(state)} tensors; "
                "Wan2.2_VAE.pth, wan2.2_vae.safetensors or a pruned VAE of the same structure would work"
            )
        levels = _count(state, "decoder.upsamples.{}.upsamples.0.residual.2.weight")
        # The top decoder level has no upsampler, so what is at its end is a residual block.
        blocks = _count(state, f"decoder.upsamples.{levels - 1}.upsamples.{{}}.residual.2.weight")
        widths = [state[f"decoder.upsamples.{i}.upsamples.0.residual.2.weight"].shape[0] for i in range(levels)]
        dec_dim = widths[-1]
        temporal = [f"decoder.upsamples.{i}.upsamples.{blocks}.time_conv.weight" in state for i in range(levels - 1)]
        if any(width % dec_dim for width in widths):
            raise ValueError(f"the decoder's widths {widths} are no multiples of {dec_dim}; a Wan 2.2 VAE has 4, 4, 2 and 1 times its last one")
        encoder = state.get("encoder.conv1.weight")
        return cls(
            z_dim=state["conv2.weight"].shape[0],
            dim=None if encoder is None else encoder.shape[0],
            dec_dim=dec_dim,
            dim_mult=tuple(width // dec_dim for width in reversed(widths)),
            num_res_blocks=blocks - 1,
            temporal_downsample=tuple(reversed(temporal)),
        )


class WanVAE22(comfy.sd.VAE):
    """A core VAE around core's Wan 2.2 module at the widths of the file."""

    def __init__(self, state: dict[str, Tensor], device: torch.device | None = None, dtype: torch.dtype | None = None) -> None:
        """``state``: a Wan 2.2 VAE's state dict; ``device`` and ``dtype`` default to core's choice. ValueError where tensors are missing or misshapen."""
        widths = Wan22Widths.read(state)
        # Sets every default of core's class and stops for want of weights, which it says in the log.
        super().__init__(sd={})
        self.widths = widths
        self.latent_dim = 3
        self.latent_channels = widths.z_dim
        self.upscale_ratio = (lambda frames: max(0, frames * 4 - 3), 16, 16)
        self.upscale_index_formula = (4, 16, 16)
        self.downscale_ratio = (lambda frames: max(0, (frames + 3) // 4), 16, 16)
        self.downscale_index_formula = (4, 16, 16)
        self.working_dtypes = [torch.bfloat16, torch.float16, torch.float32]
        size_of = comfy.model_management.dtype_size
        share = widths.dec_dim / _RELEASED_DEC_DIM
        self.memory_used_encode = lambda shape, dtype: int(3300 * share * shape[3] * shape[4] * size_of(dtype))
        self.memory_used_decode = lambda shape, dtype: int(8000 * share * shape[3] * shape[4] * (16 * 16) * size_of(dtype))

        model = comfy.ldm.wan.vae2_2.WanVAE(
            dim=widths.dim or 8,
            dec_dim=widths.dec_dim,
            z_dim=widths.z_dim,
            dim_mult=list(widths.dim_mult),
            num_res_blocks=widths.num_res_blocks,
            temperal_downsample=list(widths.temporal_downsample),
        ).eval()
        if widths.dim is None:
            del model.encoder, model.conv1
        _check_shapes(model, state)

        management = comfy.model_management
        self.first_stage_model = model
        self.device = device or management.vae_device()
        self.vae_dtype = dtype or management.vae_dtype(self.device, self.working_dtypes)
        self.output_device = management.intermediate_device()
        model.to(self.vae_dtype)
        management.archive_model_dtypes(model)
        self.patcher = comfy.model_patcher.CoreModelPatcher(model, load_device=self.device, offload_device=management.vae_offload_device())
        model.load_state_dict(state, strict=False, assign=self.patcher.is_dynamic())
        logging.info(
            "LongLive: Wan 2.2 VAE of widths %s (encoder) and %d (decoder), %d latent channels, on %s as %s",
            widths.dim or "none", widths.dec_dim, widths.z_dim, self.device, self.vae_dtype,
        )
        self.model_size()

    def encode(self, pixel_samples: Tensor) -> Tensor:
        """Core's encode; a file without an encoder says so."""
        self._require_encoder()
        return super().encode(pixel_samples)

    def encode_tiled(self, pixel_samples: Tensor, *args: int | None, **kwargs: int | None) -> Tensor:
        """Core's encode_tiled; a file without an encoder says so."""
        self._require_encoder()
        return super().encode_tiled(pixel_samples, *args, **kwargs)

    def _require_encoder(self) -> None:
        if self.widths.dim is None:
            raise ValueError("this VAE file holds a decoder only and cannot encode; the full Wan 2.2 VAE would work")


def build_vae(state: dict[str, Tensor], device: torch.device | None = None, dtype: torch.dtype | None = None) -> comfy.sd.VAE:
    """A core VAE from a state dict of Wan 2.2's structure at any width; any other structure goes to core's own class, which reads Wan 2.1's widths itself."""
    if "decoder.upsamples.0.upsamples.0.residual.2.weight" in state:
        return WanVAE22(state, device, dtype)
    vae = comfy.sd.VAE(sd=state, device=device, dtype=dtype)
    vae.throw_exception_if_invalid()
    return vae


def load_vae(path: str) -> comfy.sd.VAE:
    """``build_vae`` from a safetensors or (weights only) pickle file."""
    return build_vae(comfy.utils.load_torch_file(path, safe_load=True))


def _count(state: dict[str, Tensor], pattern: str) -> int:
    count = 0
    while pattern.format(count) in state:
        count += 1
    return count


def _check_shapes(model: torch.nn.Module, state: dict[str, Tensor]) -> None:
    """ValueError when the file does not fill the module, with the first few tensors that do not fit."""
    wrong = [
        f"{name} must be {tuple(value.shape)}, " + (f"got {tuple(state[name].shape)}" if name in state else "is missing")
        for name, value in model.state_dict().items()
        if name not in state or state[name].shape != value.shape
    ]
    if wrong:
        raise ValueError(f"{len(wrong)} tensors of this Wan 2.2 VAE do not fit its other ones: {'; '.join(wrong[:3])}. The file is damaged or of another model")
