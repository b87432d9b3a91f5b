"""Save and load a LONGLIVE_STATE as one safetensors file in the output folder."""

from __future__ import annotations

from pathlib import Path

import folder_paths
import psutil
from comfy_api.latest import io, ui

from ..accel.state import LongLiveState, load_state, save_state
from .choices import refuse_unknown, unknown_choice
from .node_text import show_text
from .sampler import STATE_TYPE

FOLDER = "longlive_states"  # below ComfyUI's output folder
SUFFIX = ".safetensors"
CONTENT = ("as given", "light")


def state_folder() -> Path:
    """Where states are saved and looked for."""
    return Path(folder_paths.get_output_directory()) / FOLDER


def saved_states() -> list[str]:
    """Names of the saved states, newest first, as paths below ``state_folder``."""
    found = [path for path in state_folder().rglob(f"*{SUFFIX}") if path.is_file()] if state_folder().is_dir() else []
    return [path.relative_to(state_folder()).as_posix() for path in sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)]


def describe(state: LongLiveState) -> str:
    """What a state holds, in a few lines."""
    kind = "exact (keys and values included: continues bit-equal)" if state.is_exact else "light (keys and values are rebuilt: close to, not bit-equal)"
    size = state.signature
    return "\n".join(
        [
            f"{kind}, {state.num_bytes / 1e6:.1f} MB",
            f"{state.num_frames} latent frames in {len(state.chunk_lengths)} chunks, {state.shot + 1} shot(s), batch {size.batch}, "
            f"{size.channels} channels, {size.height}x{size.columns} latent rows x columns",
            f"{state.recipe.name}: chunk {state.recipe.chunk_frames}, window {state.recipe.window_frames}, sink {state.recipe.sink_frames}",
        ]
    )


class LongLiveSaveState(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LongLiveSaveState",
            display_name="Save LongLive State",
            category="LongLive",
            description=f"Saves a state to output/{FOLDER}, so that the video can be continued later, also after a restart.",
            search_aliases=["save longlive", "save video state"],
            is_output_node=True,
            inputs=[
                STATE_TYPE.Input("state", tooltip="The state from a Chunked Sampler. An exact one is large: about 10.4 GB for the 5B at 1280x704."),
                io.String.Input("name", default="video", tooltip="File name without ending; may hold sub-folders. A number is added, nothing is overwritten."),
                io.Combo.Input(
                    "content",
                    options=list(CONTENT),
                    default="as given",
                    tooltip="as given: everything that the state holds. light: leave keys and values out (a few MB).",
                ),
            ],
            outputs=[io.String.Output(display_name="file", tooltip="Name of the saved file, as Load LongLive State lists it.")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, state: LongLiveState, name: str = "video", content: str = "as given") -> io.NodeOutput:
        refuse_unknown(("content", content, CONTENT))
        state_folder().mkdir(parents=True, exist_ok=True)
        folder, filename, counter, _, _ = folder_paths.get_save_image_path(name.strip() or "video", str(state_folder()))
        path = Path(folder) / f"{filename}_{counter:05}_{SUFFIX}"
        while path.exists():
            counter += 1
            path = Path(folder) / f"{filename}_{counter:05}_{SUFFIX}"
        kept = state.light() if content == "light" else state
        save_state(kept, path)
        saved = path.relative_to(state_folder()).as_posix()
        text = f"saved {saved}\n{describe(kept)}"
        show_text(cls, text)
        return io.NodeOutput(saved, ui=ui.PreviewText(text))

    @classmethod
    def validate_inputs(cls, content: str = "as given") -> bool | str:
        return unknown_choice(("content", content, CONTENT)) or True


class LongLiveLoadState(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LongLiveLoadState",
            display_name="Load LongLive State",
            category="LongLive",
            description=f"Loads a state from output/{FOLDER} for the Chunked Sampler's state input.",
            search_aliases=["load longlive", "resume video"],
            inputs=[
                io.Combo.Input("file", options=saved_states() or ["(none saved yet)"], tooltip=f"A file in output/{FOLDER}, newest first."),
                io.String.Input(
                    "path", default="", optional=True, force_input=True, tooltip="Name from Save LongLive State; wins over the list when connected."
                ),
            ],
            outputs=[STATE_TYPE.Output(display_name="state", tooltip="Connect to the Chunked Sampler's state input.")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, file: str = "", path: str = "") -> io.NodeOutput:
        target = _resolve(path or file)
        free = psutil.virtual_memory().available
        if target.stat().st_size > free:
            raise ValueError(
                f"{target.name} holds {target.stat().st_size / 1e9:.1f} GB and {free / 1e9:.1f} GB of host memory are free; "
                "save the state as light, or free memory"
            )
        state = load_state(target)
        text = f"loaded {target.name}\n{describe(state)}"
        show_text(cls, text)
        return io.NodeOutput(state, ui=ui.PreviewText(text))

    @classmethod
    def fingerprint_inputs(cls, file: str = "", path: str = "") -> str:
        target = state_folder() / (path or file)
        return f"{target}:{target.stat().st_mtime_ns}" if target.is_file() else str(target)

    @classmethod
    def validate_inputs(cls, file: str = "") -> bool | str:
        # The file may be saved by a node of the same graph, so only a name that leaves the folder is refused here.
        return True if _is_inside(state_folder() / file) else f"{file!r} lies outside output/{FOLDER}; choose a file from the list"


def _is_inside(path: Path) -> bool:
    return path.resolve().is_relative_to(state_folder().resolve())


def _resolve(name: str) -> Path:
    path = state_folder() / name
    if not _is_inside(path):
        raise ValueError(f"{name!r} lies outside output/{FOLDER}; choose a file from the list")
    if not path.is_file():
        known = saved_states()
        found = f"there are: {', '.join(known[:8])}" if known else "none has been saved yet: run Save LongLive State first"
        raise ValueError(f"there is no saved state {name!r} in output/{FOLDER}; {found}")
    return path


NODES = [LongLiveSaveState, LongLiveLoadState]
