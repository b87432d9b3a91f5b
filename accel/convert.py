"""Writes a DiT and an adapter under the names ComfyUI's own loaders know, so that these can take this package's loader's place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from .checkpoint import Checkpoint
from .config import Recipe
from .lora import AdaptedWeights, Adapter, core_lora_tensors
from .recipe import notes_for_file
from .weight_file import WeightFileError, read_safetensors_metadata, write_safetensors

Progress = Callable[[], None]


def converted_name(source: Path, adapter: Path | None = None) -> str:
    """The file name of a conversion: "model_te.pt" → "model_te_core.safetensors", with what was merged into it between."""
    merged = f"_{adapter.stem}_merged" if adapter else ""
    return f"{source.stem}{merged}_core.safetensors"


def source_note(source: Path, adapter: Path | None = None) -> str:
    """What a converted file says it was made from: names and sizes in bytes."""
    return " + ".join(f"{path.name} ({path.stat().st_size} bytes)" for path in (source, adapter) if path is not None)


def is_there_already(path: Path, source: str) -> bool:
    """Whether ``path`` is a conversion of the same source. Raises WeightFileError when it is another file, which is never replaced."""
    if not path.exists():
        return False
    try:
        found = read_safetensors_metadata(path).get("longlive_source")
    except WeightFileError:
        found = None
    if found != source:
        raise WeightFileError(
            f"{path} is there already and was made from {found or 'something else'}, not from {source}; it is not overwritten. "
            "Move or delete it, or turn saving off"
        )
    return True


def save_dit(path: Path, weights: AdaptedWeights, recipe: Recipe | None, progress: Progress = lambda: None) -> None:
    """Write the DiT, with the adapter merged where ``weights`` has one, in the dtype it is stored in (bfloat16 for packed weights)."""
    checkpoint, adapter = weights.checkpoint, weights.adapter
    metadata = {"format": "pt", "longlive_source": source_note(checkpoint.path, adapter.path if adapter else None)}
    if recipe is not None:
        metadata |= notes_for_file(recipe)
    if adapter is not None or checkpoint.is_merged:
        # Keeps the loader from merging the same adapter a second time.
        metadata |= {"checkpoint_format": "longlive_generator_merged_lora", "merged_lora": "True"}
    specs = {name: checkpoint.spec(name) for name in checkpoint.names}
    write_safetensors(path, specs, _with_progress(((name, weights.tensor(name)) for name in specs), progress), metadata)


def save_lora(path: Path, adapter: Adapter, recipe: Recipe | None, progress: Progress = lambda: None) -> None:
    """Write the matched layers of the adapter with their alphas."""
    metadata = {"format": "pt", "longlive_source": source_note(adapter.path)}
    if recipe is not None:
        metadata |= notes_for_file(recipe)
    tensors = core_lora_tensors(adapter)
    write_safetensors(path, _specs(tensors), _with_progress(iter(tensors.items()), progress), metadata)


def _specs(tensors: Mapping[str, Tensor]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {name: (tuple(value.shape), value.dtype) for name, value in tensors.items()}


def _with_progress(tensors: Iterator[tuple[str, Tensor]], progress: Progress) -> Iterator[tuple[str, Tensor]]:
    for item in tensors:
        progress()
        yield item


def needs_conversion(checkpoint: Checkpoint) -> bool:
    """False for a file this module wrote itself."""
    return "longlive_source" not in checkpoint.notes
