"""The ComfyUI side: everything that knows the host lives in this folder. This file only collects the nodes of its modules."""

from comfy_api.latest import ComfyExtension, io

NODES: list[type[io.ComfyNode]] = []


class LongLiveExtension(ComfyExtension):
    """What ComfyUI asks for the list of nodes."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return NODES
