"""What a later run needs to continue a video: frozen, on the CPU, and saved as one safetensors file.

Exact mode parks the window's keys and values, so the continuation is bit-equal to an uninterrupted run. Light mode leaves them out; they are rebuilt by clean
passes, which is close but not bit-equal once chunks have left the window (the old chunks saw frames that are gone).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import torch
from torch import Tensor

from .config import Recipe
from .sampler import LoopOptions, Video
from .window import Window

FORMAT = "longlive-stream-state"
VERSION = 1


@dataclass(frozen=True)
class ModelSignature:
    """Which model and picture a state belongs to. ``weights`` names the checkpoint, ``patches`` the LoRAs on it; empty when the host could not tell."""

    channels: int
    width: int
    layers: int
    batch: int
    height: int  # latent rows
    columns: int  # latent columns
    weights: str = ""
    patches: str = ""

    def mismatch(self, other: ModelSignature) -> str | None:
        """None when a state with this signature can continue on ``other``, else a sentence saying what differs."""
        names = {
            "channels": "latent channels",
            "width": "model width",
            "layers": "layers",
            "batch": "batch size",
            "height": "latent rows",
            "columns": "latent columns",
        }
        pairs = [(label, getattr(self, name), getattr(other, name)) for name, label in names.items()]
        different = [f"{label} {old} in the state, {new} now" for label, old, new in pairs if old != new]
        return "the state belongs to another model or size: " + "; ".join(different) if different else None


@dataclass(frozen=True)
class LongLiveState:
    """A video that can go on. ``latents`` (B, C, T, H, W) float32, normalised; ``parked`` maps ``<branch>.keys.<layer>`` to tensors, or is None (light).

    Never changed in place: a run copies what it needs.
    """

    signature: ModelSignature
    recipe: Recipe
    options: LoopOptions
    latents: Tensor
    chunk_lengths: tuple[int, ...]
    offsets: tuple[float, ...]
    shot: int
    window: dict
    seed: int
    report: dict = field(default_factory=dict)
    parked: dict[str, Tensor] | None = None

    @property
    def is_exact(self) -> bool:
        return self.parked is not None

    @property
    def num_frames(self) -> int:
        """Latent frames made so far."""
        return self.latents.shape[2]

    @property
    def num_bytes(self) -> int:
        """Host memory held."""
        return sum(t.numel() * t.element_size() for t in (self.latents, *(self.parked or {}).values()))

    def light(self) -> LongLiveState:
        """The same state without keys and values."""
        return replace(self, parked=None)

    def to_video(self) -> Video:
        """A fresh, independent video to continue."""
        snapshot = dict(self.window)
        snapshot["order"] = list(snapshot["order"])
        snapshot["frame_in"] = {int(slot): frame for slot, frame in snapshot["frame_in"].items()}
        return Video(
            window=Window(**snapshot),
            latents=[chunk.clone() for chunk in self.latents.split(list(self.chunk_lengths), dim=2)],
            offsets=list(self.offsets),
            shot=self.shot,
            next_chunk=len(self.chunk_lengths),
        )


def snapshot(
    video: Video, signature: ModelSignature, recipe: Recipe, options: LoopOptions, seed: int, report: dict, parked: dict[str, Tensor] | None
) -> LongLiveState:
    """Freeze ``video`` as a state; ``parked`` are the window's keys and values, already on the CPU, or None for light mode."""
    return LongLiveState(
        signature=signature,
        recipe=recipe,
        options=options,
        latents=torch.cat(video.latents, dim=2),
        chunk_lengths=tuple(chunk.shape[2] for chunk in video.latents),
        offsets=tuple(video.offsets),
        shot=video.shot,
        window=asdict(video.window),
        seed=seed,
        report=report,
        parked=parked,
    )


def save_state(state: LongLiveState, path: Path) -> None:
    """Write ``state`` to one safetensors file; the file appears under its name only when it is complete."""
    from safetensors.torch import save_file

    tensors = {"latents": state.latents.contiguous()}
    tensors |= {f"kv.{name}": tensor.contiguous() for name, tensor in (state.parked or {}).items()}
    header = {f.name: getattr(state, f.name) for f in fields(state) if f.name not in ("latents", "parked")}
    header |= {name: asdict(getattr(state, name)) for name in ("signature", "recipe", "options")}
    part = path.with_name(path.name + ".part")
    try:
        save_file(tensors, part, metadata={"format": FORMAT, "version": str(VERSION), "state": json.dumps(header)})
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def load_state(path: Path) -> LongLiveState:
    """Read what ``save_state`` wrote. Raises ValueError, in words, for any other file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise ValueError(f"{path.name} is a safetensors file but not a saved LongLive state; choose a file written by Save LongLive State")
            if metadata.get("version") != str(VERSION):
                raise ValueError(f"{path.name} has state version {metadata.get('version')}, this package reads version {VERSION}; sample the video again")
            # Copies: a mapped file could not be replaced on Windows, and would change the state where it can.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path.name} cannot be read as a saved LongLive state ({error}); choose a file written by Save LongLive State") from error
    try:
        state = _from_header(json.loads(metadata["state"]), tensors)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path.name} is a saved LongLive state, but its description is damaged ({type(error).__name__}: {error}); "
            "choose another file written by Save LongLive State, or sample the video again"
        ) from error
    return state


def _from_header(header: dict, tensors: dict[str, Tensor]) -> LongLiveState:
    parked = {name[3:]: tensor for name, tensor in tensors.items() if name.startswith("kv.")}
    recipe = header["recipe"] | {"notes": tuple(header["recipe"]["notes"])}
    state = LongLiveState(
        signature=ModelSignature(**header["signature"]),
        recipe=Recipe(**recipe),
        options=LoopOptions(**header["options"]),
        latents=tensors["latents"],
        chunk_lengths=tuple(header["chunk_lengths"]),
        offsets=tuple(header["offsets"]),
        shot=header["shot"],
        window=header["window"],
        seed=header["seed"],
        report=header["report"],
        parked=parked or None,
    )
    if not sum(state.chunk_lengths) == len(state.offsets) == state.num_frames:
        raise ValueError(f"{sum(state.chunk_lengths)} latent frames are described and {state.num_frames} are there")
    branches = {name.partition(".")[0] for name in parked}
    expected = {f"{branch}.{kind}.{layer}" for branch in branches for kind in ("keys", "values") for layer in range(state.signature.layers)}
    if expected != set(parked):
        raise ValueError(f"{len(expected)} tensors of keys and values belong to it and {len(parked)} are there")
    state.to_video()
    return state
