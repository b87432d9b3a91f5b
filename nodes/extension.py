"""Collects the nodes of this folder's modules for ComfyUI. Imports them all, so it is imported by the entry point alone."""

from comfy_api.latest import ComfyExtension, io

from . import accelerate, decode, latent, loader, prompts, sampler, state

NODES: list[type[io.ComfyNode]] = [*loader.NODES, *accelerate.NODES, *prompts.NODES, *latent.NODES, *sampler.NODES, *decode.NODES, *state.NODES]


class LongLiveExtension(ComfyExtension):
    """What ComfyUI asks for the list of nodes."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return NODES
