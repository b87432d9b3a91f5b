"""LongLive Stream: long streaming video with LongLive 1.0 and 2.0 inside ComfyUI."""

# pytest imports this file by itself, outside any package; ComfyUI always gives it one.
if __package__:
    from .nodes.host import require_comfyui

    require_comfyui()
    WEB_DIRECTORY = "./nodes/web"


async def comfy_entrypoint():
    """Called by ComfyUI once the package is imported; the nodes are imported only now."""
    from .nodes.extension import LongLiveExtension

    return LongLiveExtension()
