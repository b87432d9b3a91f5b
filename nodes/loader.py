"""The Load LongLive DiT node: a file from core's folders → an ordinary core MODEL with its recipe attached.

Reading and merging is accel.checkpoint's and accel.lora's; here the tensors are put into core's model without holding two copies of them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import comfy.memory_management
import comfy.model_base
import comfy.model_management
import comfy.sd
import comfy.utils
import folder_paths
import torch
from comfy.model_patcher import ModelPatcher
from comfy_api.latest import io, ui

from ..accel import convert
from ..accel.checkpoint import WEIGHT_SETS, Checkpoint, read_checkpoint
from ..accel.config import Recipe
from ..accel.lora import AdaptedWeights, Adapter, read_adapter, refuse_double_merge
from ..accel.recipe import RELEASES, choose_recipe
from ..accel.weight_file import WeightFileError
from .choices import refuse_unknown, unknown_choice
from .node_text import show_text

RECIPE_ATTACHMENT = "longlive_recipe"
NO_ADAPTER = "none"
WEIGHT_DTYPES = {"auto": None, "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
SAVE_MODES = ("off", "DiT", "LoRA", "both", "merged DiT")
_SHOWN_NAMES = 4


@dataclass(frozen=True)
class LoadReport:
    """What a load found and did. Counts are tensors; dtypes are names such as "bfloat16"."""

    file: str
    container: str
    recipe: Recipe | None
    found: int
    expected: int
    unexpected: tuple[str, ...]
    layers: int
    width: int
    stored_dtype: str
    weight_dtype: str
    compute_dtype: str
    adapter: str | None = None
    adapter_found: int = 0
    adapter_total: int = 0
    adapter_layers: int = 0
    adapter_unknown: tuple[str, ...] = ()
    adapter_scale: str = ""
    saved: tuple[str, ...] = ()
    remarks: tuple[str, ...] = field(default_factory=tuple)
    seconds: float = 0.0

    def text(self) -> str:
        """Return the report in plain lines."""
        lines = [f"{self.file} ({self.container}): {self.found}/{self.expected} tensors, {self.layers} layers of width {self.width}"]
        if self.unexpected:
            lines.append(f"{len(self.unexpected)} further tensors not used: {_some(self.unexpected)}")
        if self.recipe is None:
            lines.append("plain Wan: no LongLive recipe attached, shift left as ComfyUI sets it")
        else:
            lines += self.recipe.notes
        if self.adapter is None:
            lines.append("adapter: none")
        else:
            lines.append(
                f"adapter {self.adapter}: {self.adapter_found}/{self.adapter_total} tensors matched, {self.adapter_layers} layers merged, {self.adapter_scale}"
            )
            if self.adapter_unknown:
                lines.append(f"{len(self.adapter_unknown)} unknown adapter tensors not used: {_some(self.adapter_unknown)}")
        lines.append(f"stored {self.stored_dtype}, weights {self.weight_dtype}, computing in {self.compute_dtype}")
        lines += self.remarks
        lines += self.saved
        lines.append(f"loaded in {self.seconds:.1f} s")
        return "\n".join(lines)


@dataclass(frozen=True)
class SaveRequest:
    """Where converted files go; None leaves one out. ``merge`` puts the adapter into the DiT file."""

    dit: Path | None = None
    lora: Path | None = None
    merge: bool = False


def load_longlive(
    path: str | os.PathLike,
    *,
    adapter: str | os.PathLike | None = None,
    weight_dtype: torch.dtype | None = None,
    release: str = "auto",
    steps: int = 0,
    weights: str = "auto",
    name: str | None = None,
    adapter_name: str | None = None,
    save: SaveRequest | None = None,
    disable_dynamic: bool = False,
) -> tuple[ModelPatcher, LoadReport]:
    """Load a DiT in any published form as a core MODEL; what the node calls, without its widgets.

    weight_dtype: None takes bfloat16 where the device computes in it, float32 on the CPU. steps: 0 finds them out. weights: which set of a training container.
    name, adapter_name: what was picked, sub-folders included, for finding the steps. Raises WeightFileError with what was asked, found and would work.
    """
    start = time.perf_counter()
    reader = _streaming_reader()
    checkpoint = read_checkpoint(path, weights=weights, safetensors_reader=reader)
    remarks = list(checkpoint.remarks)
    lora = _read_adapter(checkpoint, adapter, reader, remarks)
    recipe = choose_recipe(checkpoint, lora, release=release, steps=steps, name=name, adapter_name=adapter_name)
    source = AdaptedWeights(checkpoint, lora)
    saved = _save(save, source, recipe, _ticker(checkpoint)) if save else ()
    patcher = _build(source, weight_dtype, disable_dynamic, _ticker(checkpoint))
    patcher.cached_patcher_init = (_reload, (path, adapter, weight_dtype, release, steps, weights, name, adapter_name))
    if recipe is not None:
        _attach(patcher, recipe)
    return patcher, _report(checkpoint, lora, recipe, patcher, saved, remarks, time.perf_counter() - start)


def _reload(path, adapter, weight_dtype, release, steps, weights, name, adapter_name, disable_dynamic: bool = False) -> ModelPatcher:
    """Core's way to get a fresh copy (a second device, a non-dynamic one); saves nothing."""
    return load_longlive(
        path,
        adapter=adapter,
        weight_dtype=weight_dtype,
        release=release,
        steps=steps,
        weights=weights,
        name=name,
        adapter_name=adapter_name,
        disable_dynamic=disable_dynamic,
    )[0]


def _read_adapter(checkpoint: Checkpoint, adapter: str | os.PathLike | None, reader: Callable | None, remarks: list[str]) -> Adapter | None:
    if adapter is None:
        return None
    if checkpoint.is_host_quantized:
        raise WeightFileError(
            f"{checkpoint.path.name} is quantised in ComfyUI's own format, into which nothing can be merged; set the adapter to none and put "
            "LoraLoaderModelOnly behind this node"
        )
    lora = read_adapter(adapter, checkpoint, safetensors_reader=reader)
    remarks += lora.remarks
    remarks.append(refuse_double_merge(checkpoint, lora))
    if checkpoint.packed:
        remarks.append("the adapter was merged into decoded NVFP4 weights; upstream leaves an adapter out with a notice when the weights are packed")
    return lora


def _streaming_reader() -> Callable | None:
    """With dynamic VRAM core reads safetensors in its own way, so that weights can go from the file to the GPU; elsewhere a plain mapping does."""
    if not comfy.memory_management.aimdo_enabled:
        return None
    return lambda path: comfy.utils.load_torch_file(path, return_metadata=True)


def _build(source: AdaptedWeights, weight_dtype: torch.dtype | None, disable_dynamic: bool, tick: Callable[[], None]) -> ModelPatcher:
    checkpoint = source.checkpoint
    if checkpoint.is_host_quantized:
        metadata = {key: value for key, value in checkpoint.notes.items() if isinstance(value, str)}
        options = {} if weight_dtype is None else {"dtype": weight_dtype}
        return _load_into_core(checkpoint, dict(checkpoint.plain), options, metadata, disable_dynamic)
    dtype = weight_dtype or _compute_dtype(checkpoint)
    if comfy.memory_management.aimdo_enabled:
        # Core puts these tensors into the model as they are, mapped ones included.
        state = {}
        for name in checkpoint.names:
            tick()
            state[name] = source.tensor(name)
        return _load_into_core(checkpoint, state, {"dtype": dtype}, None, disable_dynamic)
    # Core would copy every tensor, so that file and copy are in memory at once. It gets promises instead, and the weights are put in afterwards, mapped
    # from the file where they are in the right dtype already.
    promises = {name: PromisedTensor(*checkpoint.spec(name)) for name in checkpoint.names}
    patcher = _load_into_core(checkpoint, promises, {"dtype": dtype}, None, disable_dynamic)
    _fill(patcher.model.diffusion_model, source, tick)
    return patcher


class PromisedTensor(torch.Tensor):
    """A shape and a dtype without values. Copying it into a parameter leaves the parameter as it is, untouched memory; anything else is refused by torch."""

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], dtype: torch.dtype) -> PromisedTensor:
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), options=None):
        if function is torch.ops.aten.copy_.default and not isinstance(arguments[0], cls):
            return arguments[0]
        return NotImplemented


def _compute_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """What core computes in on this device, bfloat16 first (core itself would take float16 for Wan, which these weights were never run in)."""
    parameters = sum(torch.Size(checkpoint.spec(name)[0]).numel() for name in checkpoint.names)
    supported = [torch.bfloat16, torch.float16, torch.float32]
    return comfy.model_management.unet_dtype(model_params=parameters, supported_dtypes=supported, weight_dtype=torch.bfloat16)


def _load_into_core(checkpoint: Checkpoint, state: dict, options: dict, metadata: dict | None, disable_dynamic: bool) -> ModelPatcher:
    patcher = comfy.sd.load_diffusion_model_state_dict(state, model_options=options, metadata=metadata, disable_dynamic=disable_dynamic)
    if patcher is None or not isinstance(patcher.model, (comfy.model_base.WAN22, comfy.model_base.WAN21)):
        found = "nothing" if patcher is None else type(patcher.model).__name__
        raise WeightFileError(f"{checkpoint.path.name} has the tensors of a Wan DiT, but this ComfyUI made {found} of it; ComfyUI 0.30.0 reads it")
    return patcher


def _fill(dit: torch.nn.Module, source: AdaptedWeights, tick: Callable[[], None]) -> None:
    """Replace every parameter by the weight it stands for, one at a time."""
    for name in source.checkpoint.names:
        tick()
        parent, _, leaf = name.rpartition(".")
        module = dit.get_submodule(parent)
        parameter = module.get_parameter(leaf)
        weight = source.tensor(name, parameter.dtype).to(parameter.device)
        module.load_state_dict({leaf: weight}, strict=False, assign=True)


def _attach(patcher: ModelPatcher, recipe: Recipe) -> None:
    """Leave the recipe on the MODEL, and its shift where a plain KSampler finds it."""
    sampling = comfy.model_base.model_sampling(patcher.model.model_config, comfy.model_base.ModelType.FLOW)
    sampling.set_parameters(shift=recipe.shift, multiplier=1000)
    patcher.add_object_patch("model_sampling", sampling)
    patcher.set_attachments(RECIPE_ATTACHMENT, recipe)


def _save(save: SaveRequest, source: AdaptedWeights, recipe: Recipe | None, tick: Callable[[], None]) -> tuple[str, ...]:
    """Write what was asked for and return a sentence for each file."""
    checkpoint, adapter = source.checkpoint, source.adapter
    if save.lora is not None and adapter is None:
        raise ValueError("saving a converted LoRA was asked for and no adapter is picked; pick one, or save only the DiT")
    if save.merge and adapter is None:
        raise ValueError("saving a merged DiT was asked for and no adapter is picked; pick one, or save the DiT alone")
    if save.dit is not None and checkpoint.is_host_quantized:
        raise ValueError(f"{checkpoint.path.name} is quantised in ComfyUI's own format, which its own loader reads; turn saving off")
    said = []
    if save.dit is not None and not convert.needs_conversion(checkpoint) and not save.merge:
        said.append(f"DiT not saved: {checkpoint.path.name} is a converted file already")
    elif save.dit is not None:
        merged = adapter if save.merge else None
        if convert.is_there_already(save.dit, convert.source_note(checkpoint.path, merged.path if merged else None)):
            said.append(f"DiT not saved again: {save.dit} is there already")
        else:
            convert.save_dit(save.dit, AdaptedWeights(checkpoint, merged), recipe, tick)
            said.append(f"DiT saved for core's Load Diffusion Model: {save.dit}")
    if save.lora is not None:
        if convert.is_there_already(save.lora, convert.source_note(adapter.path)):
            said.append(f"LoRA not saved again: {save.lora} is there already")
        else:
            convert.save_lora(save.lora, adapter, recipe)
            said.append(f"LoRA saved for core's LoraLoaderModelOnly: {save.lora}")
    return tuple(said)


def _ticker(checkpoint: Checkpoint) -> Callable[[], None]:
    """Return what is called once a tensor: it moves the node's progress bar and lets an interrupt through."""
    bar = comfy.utils.ProgressBar(len(checkpoint.names))

    def tick() -> None:
        comfy.model_management.throw_exception_if_processing_interrupted()
        bar.update(1)

    return tick


def _report(
    checkpoint: Checkpoint,
    adapter: Adapter | None,
    recipe: Recipe | None,
    patcher: ModelPatcher,
    saved: tuple[str, ...],
    remarks: list[str],
    seconds: float,
) -> LoadReport:
    expected = checkpoint.shape.tensors()
    weight = patcher.model.diffusion_model.blocks[0].self_attn.q.weight
    usual_layers = {3072: 30, 1536: 30}.get(checkpoint.shape.dim, checkpoint.shape.num_layers)
    if checkpoint.shape.num_layers != usual_layers:
        remarks.append(f"the file has {checkpoint.shape.num_layers} layers; the released model of this width has {usual_layers}")
    stored = "packed NVFP4" if checkpoint.packed else "quantised by ComfyUI's format" if checkpoint.is_host_quantized else _short(checkpoint.stored_dtype)
    return LoadReport(
        file=checkpoint.path.name,
        container=checkpoint.container,
        recipe=recipe,
        found=sum(name in expected for name in checkpoint.names),
        expected=len(expected),
        unexpected=checkpoint.unexpected,
        layers=checkpoint.shape.num_layers,
        width=checkpoint.shape.dim,
        stored_dtype=stored,
        weight_dtype=_short(weight.dtype),
        compute_dtype=_short(patcher.model.get_dtype_inference()),
        adapter=adapter.path.name if adapter else None,
        adapter_found=adapter.matched if adapter else 0,
        adapter_total=adapter.total if adapter else 0,
        adapter_layers=len(adapter.layers) if adapter else 0,
        adapter_unknown=adapter.unknown if adapter else (),
        adapter_scale=adapter.ranks() if adapter else "",
        saved=saved,
        remarks=tuple(remarks),
        seconds=seconds,
    )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _some(names: tuple[str, ...]) -> str:
    return ", ".join(names[:_SHOWN_NAMES]) + (", …" if len(names) > _SHOWN_NAMES else "")


class LoadLongLiveDiT(io.ComfyNode):
    """Widgets → load_longlive → MODEL and a report on the node."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LongLiveLoadDiT",
            display_name="Load LongLive DiT",
            category="LongLive",
            description=(
                "Loads a LongLive diffusion model in any form it was published in (.pt containers, packed NVFP4, safetensors), merges its LoRA "
                "adapter if it has one, and remembers how the model wants to be sampled."
            ),
            search_aliases=["longlive", "load diffusion model", "unet loader", "checkpoint", "lora"],
            inputs=[
                io.Combo.Input(
                    "dit_name",
                    options=folder_paths.get_filename_list("diffusion_models"),
                    tooltip="The DiT's file, from ComfyUI's models/diffusion_models folder and its sub-folders (.pt or .safetensors).",
                ),
                io.Combo.Input(
                    "adapter",
                    options=[NO_ADAPTER, *folder_paths.get_filename_list("loras")],
                    default=NO_ADAPTER,
                    tooltip="LoRA file from models/loras that is merged into the DiT once, at full strength (LongLive 1.0's lora.pt, for example). none: no "
                    "adapter. An adapter that is in the weights already is refused.",
                ),
                io.Combo.Input(
                    "release",
                    options=list(RELEASES),
                    default="auto",
                    tooltip="Whose sampling defaults the MODEL carries. auto: LongLive 2.0 for 48 latent channels, 1.0 for 16; plain Wan has the same "
                    "shapes and cannot be told apart, so choose plain Wan for it.",
                ),
                io.Int.Input(
                    "steps",
                    default=0,
                    min=0,
                    max=100,
                    tooltip="Denoising steps per chunk that the model was distilled for. 0: from the file's notes, else its file or folder name "
                    "(S2, 4step), else 4.",
                ),
                io.Combo.Input(
                    "weight_dtype",
                    options=list(WEIGHT_DTYPES),
                    default="auto",
                    advanced=True,
                    tooltip="Number format of the weights in memory. auto: the one computed in: bfloat16 on a GPU that has it, float32 on the CPU.",
                ),
                io.Combo.Input(
                    "container_weights",
                    options=list(WEIGHT_SETS),
                    default="auto",
                    advanced=True,
                    tooltip="Which set of a training container is read. auto: generator, else generator_ema (the averaged one), as upstream does.",
                ),
                io.Combo.Input(
                    "save_converted",
                    options=list(SAVE_MODES),
                    default="off",
                    advanced=True,
                    tooltip="Also writes files that ComfyUI's own loaders read, once, beside the originals: the DiT without the adapter, the LoRA, "
                    "both, or the DiT with the adapter merged. A 5B DiT takes 10 GB of disk. Existing files are never replaced.",
                ),
            ],
            outputs=[io.Model.Output(tooltip="An ordinary MODEL. LoRA, attention and sampling nodes of ComfyUI work on it; its recipe travels along.")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def fingerprint_inputs(cls, dit_name: str, adapter: str = NO_ADAPTER, **_: object) -> list:
        """A file replaced under its name is loaded again."""
        paths = [folder_paths.get_full_path("diffusion_models", dit_name), adapter != NO_ADAPTER and folder_paths.get_full_path("loras", adapter)]
        return [(path, os.stat(path).st_mtime_ns, os.stat(path).st_size) for path in paths if path]

    @classmethod
    def execute(
        cls,
        dit_name: str,
        adapter: str = NO_ADAPTER,
        release: str = "auto",
        steps: int = 0,
        weight_dtype: str = "auto",
        container_weights: str = "auto",
        save_converted: str = "off",
    ) -> io.NodeOutput:
        refuse_unknown(*_choices(release, weight_dtype, container_weights, save_converted))
        path = folder_paths.get_full_path_or_raise("diffusion_models", dit_name)
        lora = None if adapter == NO_ADAPTER else folder_paths.get_full_path_or_raise("loras", adapter)
        patcher, report = load_longlive(
            path,
            adapter=lora,
            weight_dtype=WEIGHT_DTYPES[weight_dtype],
            release=release,
            steps=steps,
            weights=container_weights,
            name=dit_name,
            adapter_name=None if lora is None else adapter,
            save=_save_request(save_converted, Path(path), None if lora is None else Path(lora)),
        )
        show_text(cls, report.text())
        return io.NodeOutput(patcher, ui=ui.PreviewText(report.text()))

    @classmethod
    def validate_inputs(cls, release: str = "auto", weight_dtype: str = "auto", container_weights: str = "auto", save_converted: str = "off") -> bool | str:
        return unknown_choice(*_choices(release, weight_dtype, container_weights, save_converted)) or True


def _choices(release: str, weight_dtype: str, container_weights: str, save_converted: str) -> tuple:
    return (
        ("release", release, RELEASES),
        ("weight_dtype", weight_dtype, WEIGHT_DTYPES),
        ("container_weights", container_weights, WEIGHT_SETS),
        ("save_converted", save_converted, SAVE_MODES),
    )


def _save_request(mode: str, dit: Path, lora: Path | None) -> SaveRequest | None:
    """Put converted files beside their originals, where core's loaders list them."""
    if mode == "off":
        return None
    if lora is None and mode != "DiT":
        raise ValueError(f"save_converted is {mode!r} and no adapter is picked; pick one, or save the DiT alone")
    return SaveRequest(
        dit=None if mode == "LoRA" else dit.with_name(convert.converted_name(dit, lora if mode == "merged DiT" else None)),
        lora=lora.with_name(convert.converted_name(lora)) if mode in ("LoRA", "both") else None,
        merge=mode == "merged DiT",
    )


NODES = [LoadLongLiveDiT]
