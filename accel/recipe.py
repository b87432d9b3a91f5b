"""Chooses the recipe of a checkpoint: which release it is, how many steps it was distilled for, and why that is believed.

Neither can be read from the weights: a 2-step file has the shapes of a 4-step one, and LongLive has those of plain Wan. So the container's notes
are asked first, then file and folder names; what is assumed is said in ``Recipe.notes``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from .checkpoint import Checkpoint
from .config import Recipe
from .lora import Adapter
from .presets import LONGLIVE_1, LONGLIVE_2
from .weight_file import WeightFileError

RELEASES = ("auto", "LongLive 2.0", "LongLive 1.0", "plain Wan")

# "-S2", "_s4." (the released names) or "2step", "4-steps"; "stage1" names the undistilled autoregressive model.
_STEPS_IN_NAME = re.compile(r"(?<![a-z0-9])s([1248])(?![a-z0-9])|(?<![0-9])([1-9]|[1-4][0-9]|50)[-_ ]?steps?(?![a-z])", re.IGNORECASE)
_STAGE_1_IN_NAME = re.compile(r"stage[-_ ]?1(?!\d)", re.IGNORECASE)
_STEP_NOTES = ("longlive_steps", "sampling_steps", "denoising_steps", "num_inference_steps", "inference.sampling_steps", "inference_steps")
_UNDISTILLED_STEPS = 50  # upstream's default of inference.sampling_steps
_ASSUMED = "assumed, as neither the file's notes nor its name say anything (a 2-step file needs steps 2)"


def choose_recipe(
    checkpoint: Checkpoint,
    adapter: Adapter | None = None,
    *,
    release: str = "auto",
    steps: int = 0,
    name: str | None = None,
    adapter_name: str | None = None,
) -> Recipe | None:
    """Return the recipe of a checkpoint, None for ``release="plain Wan"``.

    ``steps`` 0 finds them out. ``name`` and ``adapter_name`` are what the user picked, sub-folders included; without them the path and its next
    four folders are looked at. Raises WeightFileError where the channels belong to no release, or to another than the one asked for.
    """
    if release not in RELEASES:
        raise ValueError(f"release must be one of {', '.join(RELEASES)}, got {release!r}")
    if steps < 0:
        raise ValueError(f"steps must be 0 (find out) or more, got {steps}")
    recipe, why = _release(checkpoint, release)
    if recipe is None:
        return None
    if steps:
        count, source = steps, "set on the loader"
    else:
        count, source = _find_steps(checkpoint, adapter, name, adapter_name)
    return replace(recipe, steps=count, notes=(why, f"steps {count}: {source}", f"shift {recipe.shift:g}: as both releases"))


def notes_for_file(recipe: Recipe) -> dict[str, str]:
    """What a converted file says about how it is sampled. Steps that were only assumed are left out: read again, they would look like knowledge."""
    notes = {"longlive_release": recipe.name}
    if f"steps {recipe.steps}: {_ASSUMED}" not in recipe.notes:
        notes["longlive_steps"] = str(recipe.steps)
    return notes


def _release(checkpoint: Checkpoint, asked: str) -> tuple[Recipe | None, str]:
    shape = checkpoint.shape
    by_channels = {(48, 48): (LONGLIVE_2, "LongLive 2.0", "Wan 2.2 5B"), (16, 16): (LONGLIVE_1, "LongLive 1.0", "Wan 2.1")}
    found = by_channels.get((shape.in_channels, shape.out_channels))
    if found is None:
        raise WeightFileError(
            f"{checkpoint.path.name} takes {shape.in_channels} latent channels and gives {shape.out_channels}; LongLive 2.0 has 48 and 48, "
            "LongLive 1.0 has 16 and 16. Use ComfyUI's Load Diffusion Model for other Wan models"
        )
    recipe, label, base = found
    if asked == "plain Wan":
        return None, ""
    if asked not in ("auto", label):
        raise WeightFileError(
            f"{checkpoint.path.name} was asked to be {asked}, and its {shape.in_channels} latent channels are those of {label}; set the release to auto"
        )
    return recipe, f"release {label}: from its {shape.in_channels} latent channels (plain {base} has the same shapes and cannot be told apart)"


def _find_steps(checkpoint: Checkpoint, adapter: Adapter | None, name: str | None, adapter_name: str | None) -> tuple[int, str]:
    # An adapter turns the base into something else, so what it says counts first.
    sources = ([(adapter.notes, adapter.path, adapter_name, "adapter's ")] if adapter else []) + [(checkpoint.notes, checkpoint.path, name, "")]
    for notes, _, _, whose in sources:
        found = _steps_in_notes(notes)
        if found:
            return found[0], f"from the {whose}container's note {found[1]}"
    for _, path, picked, whose in sources:
        for part, kind in _name_parts(path, picked):
            match = _STEPS_IN_NAME.search(part)
            if match:
                return int(match.group(1) or match.group(2)), f"from the {whose}{kind} name {part!r}"
            if not adapter and _STAGE_1_IN_NAME.search(part):
                return _UNDISTILLED_STEPS, f"the {kind} name {part!r} says stage 1, which is not distilled: it needs many steps and guidance"
    return 4, _ASSUMED


def _steps_in_notes(notes: Mapping[str, object]) -> tuple[int, str] | None:
    for key in _STEP_NOTES:
        value = str(notes.get(key, ""))
        if value.isdigit() and int(value) > 0:
            return int(value), f"{key} = {value}"
    for key, value in notes.items():
        # Provenance: the paths of what the file was made from.
        if isinstance(value, str) and (key.startswith(("source_", "longlive_source")) or key in ("model_name", "name")):
            match = _STEPS_IN_NAME.search(value)
            if match:
                return int(match.group(1) or match.group(2)), f"{key} = {value!r}"
    return None


def _name_parts(path: Path, picked: str | None) -> Iterable[tuple[str, str]]:
    """Yield file name, then folder names from the inside out, then those of a link's target (a download cache keeps the repository's name there)."""
    chosen = Path(picked.replace("\\", "/")) if picked else path
    yield chosen.stem, "file"
    for folder in list(chosen.parents)[: None if picked else 4]:
        if folder.name:
            yield folder.name, "folder"
    target = path.resolve()
    if target != path.absolute():
        for folder in list(target.parents)[:4]:
            yield folder.name, "link target's folder"
