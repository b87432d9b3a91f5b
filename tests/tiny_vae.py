"""Small Wan 2.2 and 2.1 VAEs with seed-made weights; needs ComfyUI on sys.path, as tests/conftest.py and the benches put it."""

import torch
from torch import Tensor, nn

LEVELS = {"dim_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_scales": [], "temperal_downsample": [False, True, True]}


def seed_weights(model: nn.Module, seed: int = 0) -> nn.Module:
    """Random weights that keep activations near 1 through the whole decoder."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        scale = 0.1 if parameter.ndim == 1 else parameter[0].numel() ** -0.5
        parameter.data = torch.randn(parameter.shape, generator=generator) * scale
        if name.endswith("gamma"):
            parameter.data = 1 + 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def wan22(dim: int = 8, dec_dim: int = 16, z_dim: int = 48) -> nn.Module:
    """Core's Wan 2.2 VAE module at a small width (the released one: 160, 256, 48)."""
    from comfy.ldm.wan.vae2_2 import WanVAE

    return seed_weights(WanVAE(dim=dim, dec_dim=dec_dim, z_dim=z_dim, **LEVELS))


def wan21(dim: int = 16) -> nn.Module:
    """Core's Wan 2.1 VAE module at a small width (the released one: 96)."""
    from comfy.ldm.wan.vae import WanVAE

    return seed_weights(WanVAE(dim=dim, z_dim=16, **LEVELS))


def latents(channels: int, num_latents: int, height: int = 2, width: int = 3, batch: int = 1, seed: int = 1) -> Tensor:
    """(batch, channels, num_latents, height, width) from a local generator."""
    return torch.randn(batch, channels, num_latents, height, width, generator=torch.Generator().manual_seed(seed))
