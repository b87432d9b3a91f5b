"""A Wan model as small as core detects one: random weights, made from a seed, loaded by core's own code."""

import comfy.ldm.wan.model
import comfy.ops
import comfy.sd
import torch


def tiny_wan(channels: int = 48, layers: int = 2, dim: int = 256, seed: int = 0, dtype: torch.dtype = torch.float32):
    """An ordinary core MODEL (ModelPatcher); 48 channels are detected as Wan 2.2, 16 as Wan 2.1."""
    return comfy.sd.load_diffusion_model_state_dict(tiny_weights(channels, layers, dim, seed), model_options={"dtype": dtype})


def tiny_weights(channels: int = 48, layers: int = 2, dim: int = 256, seed: int = 0) -> dict[str, torch.Tensor]:
    """The state dict of ``tiny_wan`` in float32."""
    generator = torch.Generator().manual_seed(seed)
    network = comfy.ldm.wan.model.WanModel(
        model_type="t2v",
        in_dim=channels,
        out_dim=channels,
        dim=dim,
        ffn_dim=dim * 2,
        num_heads=dim // 128,
        num_layers=layers,
        device="cpu",
        dtype=torch.float32,
        operations=comfy.ops.disable_weight_init,
    )
    return {name: torch.randn(tensor.shape, generator=generator) * 0.05 for name, tensor in network.state_dict().items()}


def lively_weights(channels: int = 48, layers: int = 2, dim: int = 128, seed: int = 0) -> dict[str, torch.Tensor]:
    """Weights at the scale of their inputs, so that text, positions and every frame of the window move the result by far more than rounding does."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, tensor in tiny_weights(channels, layers, dim).items():
        values = torch.randn(tensor.shape, generator=generator)
        if name.endswith(("norm_q.weight", "norm_k.weight")):
            values = 1.5 + 0.3 * values  # sharp attention
        elif name.endswith("norm3.weight"):
            values = 1 + 0.3 * values
        elif tensor.ndim > 1 and name.endswith("weight"):
            values = values / tensor[0].numel() ** 0.5
        else:
            values = 0.3 * values
        state[name] = values
    return state


def lively_wan(channels: int = 48, layers: int = 2, dim: int = 128, seed: int = 0, dtype: torch.dtype = torch.float32):
    """An ordinary core MODEL with ``lively_weights``."""
    return comfy.sd.load_diffusion_model_state_dict(lively_weights(channels, layers, dim, seed), model_options={"dtype": dtype})
