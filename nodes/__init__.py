"""The ComfyUI side: everything that knows the host lives in this folder. This file only collects the nodes of its modules."""

from comfy_api.latest import ComfyExtension, io

from . import accelerate, latent, prompts, sampler, state

NODES: list[type[io.ComfyNode]] = [*accelerate.NODES, *prompts.NODES, *latent.NODES, *sampler.NODES, *state.NODES]


class LongLiveExtension(ComfyExtension):
    """What ComfyUI asks for the list of nodes."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return NODES
