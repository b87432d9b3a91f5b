"""A Wan model as small as core detects one: random weights, made from a seed, loaded by core's own code."""

import comfy.ldm.wan.model
import comfy.ops
import comfy.sd
import torch


def tiny_wan(channels: int = 48, layers: int = 2, dim: int = 256, seed: int = 0):
    """An ordinary core MODEL (ModelPatcher) in float32; 48 channels are detected as Wan 2.2, 16 as Wan 2.1."""
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
    state = {name: torch.randn(tensor.shape, generator=generator) * 0.05 for name, tensor in network.state_dict().items()}
    return comfy.sd.load_diffusion_model_state_dict(state, model_options={"dtype": torch.float32})
