"""Stand-ins for the three big files of a workflow, with tiny weights made from a seed. Linked into custom_nodes by the tests and by `run.py demo` only."""


async def comfy_entrypoint():
    from .loaders import StandInExtension

    return StandInExtension()
