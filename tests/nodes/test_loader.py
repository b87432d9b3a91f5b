"""Load LongLive DiT in an in-process ComfyUI: the MODEL it gives, what core's own loaders make of its converted files, and what it refuses."""

import re
from pathlib import Path

import comfy.model_base
import comfy.model_management
import comfy.sample
import comfy.samplers
import folder_paths
import pytest
import torch
from longlive.accel.weight_file import WeightFileError
from longlive.nodes.loader import LoadLongLiveDiT, PromisedTensor, load_longlive
from longlive.tests.weight_files import (
    dit_state_dict,
    lora_factors,
    packed_container,
    peft_names,
    save_pt,
    save_safetensors,
    save_upstream,
)

import nodes

STATE = dit_state_dict()
FACTORS = lora_factors(STATE)


@pytest.fixture(autouse=True)
def _as_the_server_runs():
    with torch.inference_mode():
        yield


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Fresh models/diffusion_models and models/loras folders, known to core."""
    for kind in ("diffusion_models", "loras"):
        (tmp_path / kind).mkdir()
        monkeypatch.setitem(folder_paths.folder_names_and_paths, kind, ([str(tmp_path / kind)], folder_paths.supported_pt_extensions))
    folder_paths.filename_list_cache.clear()
    return tmp_path


def _execute(**inputs):
    output = LoadLongLiveDiT.execute(**inputs)
    return output.result[0], output.ui.as_dict()["text"][0]


def _weights(patcher):
    return {name: value.clone() for name, value in patcher.model.diffusion_model.state_dict().items()}


def _loaded_weights(patcher):
    """The weights as core runs them: on the device, its own LoRA patches applied."""
    comfy.model_management.load_models_gpu([patcher], force_patch_weights=True)
    try:
        return _weights(patcher)
    finally:
        patcher.detach()


def _latents(patcher, channels=48):
    """Two steps of core's own sampling path on the MODEL."""
    generator = torch.Generator().manual_seed(5)
    noise = torch.randn(1, channels, 2, 4, 4, generator=generator)
    context = torch.randn(1, 12, 4096, generator=generator)
    conditioning = [[context, {}]]
    return comfy.sample.sample(patcher, noise, 2, 1.0, "euler", "simple", conditioning, conditioning, torch.zeros_like(noise), disable_pbar=True, seed=3)


def _merged(scale=1.0):
    return {name: STATE[f"{name}.weight"].float() + scale * (up.float() @ down.float()) for name, (down, up) in FACTORS.items()}


@pytest.mark.parametrize(
    "write",
    [
        lambda folder: save_upstream(folder / "x.pt", STATE),
        lambda folder: save_pt(folder / "x.pt", {"generator_ema": {f"model._fsdp_wrapped_module.{k}": v for k, v in STATE.items()}}),
        lambda folder: save_safetensors(folder / "x.safetensors", STATE),
        lambda folder: save_safetensors(folder / "x.safetensors", {f"model.diffusion_model.{k}": v for k, v in STATE.items()}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_weights_arrive_in_core_s_model(tmp_path, write, dtype):
    patcher, report = load_longlive(write(tmp_path), weight_dtype=dtype)
    assert type(patcher.model) is comfy.model_base.WAN22
    found = _weights(patcher)
    assert sorted(found) == sorted(STATE)
    for name, value in STATE.items():
        # Core keeps the patch embedding in float32 whatever the rest is in.
        wanted = torch.float32 if name.startswith("patch_embedding.") else dtype
        assert found[name].dtype == wanted and torch.equal(found[name], value.to(wanted)), name
    assert (report.found, report.expected, report.layers, report.width) == (69, 69, 2, 256)
    assert report.stored_dtype == "bfloat16" and report.weight_dtype == str(dtype).removeprefix("torch.")


def test_matching_weights_stay_mapped_and_others_do_not_depend_on_the_file(tmp_path):
    """A 10 GB file must not be in memory twice: where nothing changes, the model uses the file's own pages."""
    path = save_safetensors(tmp_path / "x.safetensors", STATE)
    mapped, _ = load_longlive(path, weight_dtype=torch.bfloat16)
    converted, _ = load_longlive(path, weight_dtype=torch.float32)
    marker = STATE["head.head.weight"].view(torch.uint8).numpy().tobytes()
    with open(path, "r+b") as stream:
        stream.seek(path.read_bytes().find(marker))
        stream.write(b"\x00" * len(marker))
    assert mapped.model.diffusion_model.head.head.weight.count_nonzero() == 0
    assert torch.equal(converted.model.diffusion_model.head.head.weight, STATE["head.head.weight"].float())


def test_the_host_s_streaming_path_gives_the_same_weights(tmp_path, monkeypatch):
    """With dynamic VRAM core reads the file itself and is given the tensors at once; only its own reader needs a GPU, so that is replaced here."""
    import comfy.memory_management
    import comfy.utils

    path = save_safetensors(tmp_path / "x.safetensors", {f"model.{name}": value for name, value in STATE.items()})
    asked = []
    original = comfy.utils.load_torch_file

    def reader(file, **options):
        asked.append(file)
        with monkeypatch.context() as off:
            off.setattr(comfy.memory_management, "aimdo_enabled", False)
            return original(file, **options)

    monkeypatch.setattr(comfy.utils, "load_torch_file", reader)
    lora = save_pt(tmp_path / "lora.pt", peft_names(FACTORS))
    plain, _ = load_longlive(path, adapter=lora, weight_dtype=torch.bfloat16)
    assert not asked
    monkeypatch.setattr(comfy.memory_management, "aimdo_enabled", True)
    dynamic, _ = load_longlive(path, adapter=lora, weight_dtype=torch.bfloat16)
    assert asked == [str(path)]
    monkeypatch.setattr(comfy.memory_management, "aimdo_enabled", False)
    first, second = _weights(plain), _weights(dynamic)
    assert all(torch.equal(first[name], second[name]) for name in STATE)


def test_longlive_1_is_wan_21(tmp_path):
    patcher, report = load_longlive(save_upstream(tmp_path / "longlive_base.pt", dit_state_dict(channels=16)))
    assert type(patcher.model) is comfy.model_base.WAN21
    assert patcher.get_attachment("longlive_recipe").name == "longlive-1.0" == report.recipe.name
    assert report.weight_dtype == report.compute_dtype == "float32"
    assert _latents(patcher, channels=16).isfinite().all()


def test_packed_nvfp4_loads_as_bfloat16(tmp_path):
    from longlive.accel.checkpoint import read_checkpoint

    path = save_pt(tmp_path / "LongLive-2.0-5B-NVFP4-S2" / "model_4o6.pt", packed_container(STATE))
    patcher, report = load_longlive(path, weight_dtype=torch.bfloat16)
    checkpoint = read_checkpoint(path)
    assert all(torch.equal(value, checkpoint.tensor(name)) for name, value in _weights(patcher).items())
    assert report.stored_dtype == "packed NVFP4" and report.recipe.steps == 2
    assert "20 packed NVFP4 weights (rule mse) are decoded to bfloat16" in report.text()
    assert _latents(patcher).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_adapter_is_merged_in_float32_once(tmp_path, dtype):
    path, lora = save_upstream(tmp_path / "base.pt", STATE), save_pt(tmp_path / "lora.pt", {"generator_lora": peft_names(FACTORS)})
    patcher, report = load_longlive(path, adapter=lora, weight_dtype=dtype)
    found = _weights(patcher)
    for name, value in _merged().items():
        assert torch.equal(found[f"{name}.weight"], value.to(dtype))
    assert torch.equal(found["head.head.weight"], STATE["head.head.weight"].to(dtype))
    assert (report.adapter_found, report.adapter_total, report.adapter_layers) == (40, 40, 20)
    assert "adapter lora.pt: 40/40 tensors matched, 20 layers merged, rank 8, factor alpha/rank 1" in report.text()


def test_an_adapter_on_packed_weights_works_and_says_what_upstream_does(tmp_path):
    content = packed_container(STATE)
    del content["merged_lora"]
    path, lora = save_pt(tmp_path / "model_4o6.pt", content), save_pt(tmp_path / "lora.pt", peft_names(FACTORS))
    base, _ = load_longlive(path, weight_dtype=torch.float32)
    patcher, report = load_longlive(path, adapter=lora, weight_dtype=torch.float32)
    name = "blocks.1.ffn.0"
    change = _weights(patcher)[f"{name}.weight"] - _weights(base)[f"{name}.weight"]
    assert torch.allclose(change, FACTORS[name][1].float() @ FACTORS[name][0].float(), atol=1e-6)
    assert "upstream leaves an adapter out" in report.text()


def test_unknown_tensors_are_counted_on_the_node(folders):
    save_pt(folders / "diffusion_models" / "x.pt", {"model": STATE | {"scheduler.sigmas": torch.zeros(3)}})
    save_pt(folders / "loras" / "l.pt", peft_names(FACTORS) | {"text_encoder.q.lora_A.weight": torch.zeros(8, 8)})
    _, text = _execute(dit_name="x.pt", adapter="l.pt")
    assert "1 further tensors not used: scheduler.sigmas" in text
    assert "40/41 tensors matched" in text and "1 unknown adapter tensors not used: text_encoder.q.lora_A.weight" in text


def test_a_merged_file_and_its_adapter_are_refused(folders):
    merged = STATE | {f"{name}.weight": value.bfloat16() for name, value in _merged().items()}
    save_pt(folders / "loras" / "lora.pt", peft_names(FACTORS))
    save_upstream(folders / "diffusion_models" / "noted.pt", merged, checkpoint_format="longlive_generator_merged_lora")
    save_upstream(folders / "diffusion_models" / "silent.pt", merged)
    with pytest.raises(WeightFileError, match="says that a LoRA has been merged"):
        _execute(dit_name="noted.pt", adapter="lora.pt")
    with pytest.raises(WeightFileError, match=r"already merged into silent\.pt"):
        _execute(dit_name="silent.pt", adapter="lora.pt")


def test_recipe_and_shift_travel_with_the_model(folders):
    save_upstream(folders / "diffusion_models" / "LongLive-S2" / "model_te.pt", STATE)
    patcher, text = _execute(dit_name=str(Path("LongLive-S2") / "model_te.pt"))
    recipe = patcher.clone().get_attachment("longlive_recipe")
    assert (recipe.name, recipe.steps, recipe.shift) == ("longlive-2.0", 2, 5.0)
    assert patcher.get_model_object("model_sampling").shift == 5.0
    assert patcher.model.model_sampling.shift == 8.0, "core's own model object must stay as it was"
    assert "steps 2: from the folder name 'LongLive-S2'" in text and "release LongLive 2.0" in text
    # A plain KSampler on the MODEL schedules with the shift: sigma(t) = 5 t / (1 + 4 t).
    sigmas = comfy.samplers.calculate_sigmas(patcher.get_model_object("model_sampling"), "simple", 4)
    assert sigmas[1].item() == pytest.approx(5 * 0.75 / (1 + 4 * 0.75), abs=1e-3)


def test_plain_wan_gets_no_recipe(folders):
    save_safetensors(folders / "diffusion_models" / "wan.safetensors", STATE)
    patcher, text = _execute(dit_name="wan.safetensors", release="plain Wan")
    assert patcher.get_attachment("longlive_recipe") is None
    assert patcher.get_model_object("model_sampling").shift == 8.0 and "plain Wan" in text


def test_steps_are_assumed_and_that_is_said(folders):
    save_upstream(folders / "diffusion_models" / "model.pt", STATE)
    patcher, text = _execute(dit_name="model.pt")
    assert patcher.get_attachment("longlive_recipe").steps == 4 and "steps 4: assumed" in text
    assert _execute(dit_name="model.pt", steps=3)[0].get_attachment("longlive_recipe").steps == 3


def test_an_assumption_does_not_become_a_fact_by_converting(folders):
    save_upstream(folders / "diffusion_models" / "model.pt", STATE)
    _execute(dit_name="model.pt", save_converted="DiT")
    assert "steps 4: assumed" in _execute(dit_name="model_core.safetensors")[1]


def test_core_can_make_a_fresh_copy(tmp_path):
    lora = save_pt(tmp_path / "lora.pt", peft_names(FACTORS))
    patcher, _ = load_longlive(save_upstream(tmp_path / "x.pt", STATE), adapter=lora, weight_dtype=torch.bfloat16)
    make, arguments = patcher.cached_patcher_init
    copy = make(*arguments, disable_dynamic=True)
    assert copy.model is not patcher.model
    first, second = _weights(patcher), _weights(copy)
    assert all(torch.equal(first[name], second[name]) for name in STATE)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_core_s_own_loaders_take_this_node_s_place_with_the_converted_files(folders, monkeypatch, dtype):
    save_upstream(folders / "diffusion_models" / "LongLive-S2" / "model_te.pt", STATE)
    save_pt(folders / "loras" / "lora.pt", {"generator_lora": peft_names(FACTORS), "critic_lora": peft_names(FACTORS)})
    picked = str(Path("LongLive-S2") / "model_te.pt")
    ours, text = _execute(dit_name=picked, adapter="lora.pt", weight_dtype=dtype, save_converted="both")
    dit, lora = str(Path("LongLive-S2") / "model_te_core.safetensors"), "lora_core.safetensors"
    assert "DiT saved for core's Load Diffusion Model" in text and "LoRA saved for core's LoraLoaderModelOnly" in text
    assert dit in folder_paths.get_filename_list("diffusion_models") and lora in folder_paths.get_filename_list("loras")

    if dtype == "bfloat16":
        # What core picks on a GPU; on a CPU it would take float32.
        monkeypatch.setattr(comfy.model_management, "unet_dtype", lambda **_: torch.bfloat16)
    (core,) = nodes.UNETLoader().load_unet(dit, "default")
    (core,) = nodes.LoraLoaderModelOnly().load_lora_model_only(core, lora, 1.0)
    assert type(core.model) is type(ours.model) and len(core.patches) == 20
    first, second = _loaded_weights(ours), _loaded_weights(core)
    for name in STATE:
        assert first[name].dtype == second[name].dtype
        assert torch.allclose(first[name].float(), second[name].float(), rtol=0, atol=1e-7 if dtype == "float32" else 1e-3), name
    from comfy_extras.nodes_model_advanced import ModelSamplingSD3

    (core,) = ModelSamplingSD3().patch(core, 5.0)
    a, b = _latents(ours), _latents(core)
    assert ((a - b).norm() / a.norm()).item() < (1e-5 if dtype == "float32" else 2e-2)

    # The converted files work here too, with the same steps; and are not converted a second time.
    again, text = _execute(dit_name=dit, adapter=lora, weight_dtype=dtype, save_converted="DiT")
    assert again.get_attachment("longlive_recipe").steps == 2 and "is a converted file already" in text
    third = _weights(again)
    assert all(torch.equal(value, third[name]) for name, value in _weights(ours).items())


def test_a_merged_conversion_needs_no_adapter_and_refuses_it(folders):
    save_upstream(folders / "diffusion_models" / "base.pt", STATE)
    save_pt(folders / "loras" / "lora.pt", peft_names(FACTORS))
    ours, _ = _execute(dit_name="base.pt", adapter="lora.pt", weight_dtype="bfloat16", save_converted="merged DiT")
    merged, _ = _execute(dit_name="base_lora_merged_core.safetensors", weight_dtype="bfloat16")
    second = _weights(merged)
    assert all(torch.equal(value, second[name]) for name, value in _weights(ours).items())
    with pytest.raises(WeightFileError, match="says that a LoRA has been merged"):
        _execute(dit_name="base_lora_merged_core.safetensors", adapter="lora.pt")


def test_converting_packed_weights_gives_bfloat16_that_core_loads(folders):
    save_pt(folders / "diffusion_models" / "model_4o6.pt", packed_container(STATE))
    ours, _ = _execute(dit_name="model_4o6.pt", save_converted="DiT")
    (core,) = nodes.UNETLoader().load_unet("model_4o6_core.safetensors", "default")
    first, second = _weights(ours), _weights(core)
    assert all(torch.equal(first[name], second[name]) for name in STATE)


def test_a_conversion_is_never_overwritten(folders):
    path = folders / "diffusion_models"
    save_upstream(path / "x.pt", STATE)
    _execute(dit_name="x.pt", save_converted="DiT")
    written = (path / "x_core.safetensors").stat().st_mtime_ns
    _, text = _execute(dit_name="x.pt", save_converted="DiT")
    assert "not saved again" in text and (path / "x_core.safetensors").stat().st_mtime_ns == written
    save_upstream(path / "x.pt", STATE, another="source")
    with pytest.raises(WeightFileError, match=r"there already and was made from x\.pt \(\d+ bytes\), not from.*not overwritten"):
        _execute(dit_name="x.pt", save_converted="DiT")
    (path / "x_core.safetensors").write_bytes(b"mine")
    with pytest.raises(WeightFileError, match="made from something else"):
        _execute(dit_name="x.pt", save_converted="DiT")
    assert (path / "x_core.safetensors").read_bytes() == b"mine"


def test_an_interrupted_conversion_leaves_nothing_and_the_next_run_works(folders):
    save_upstream(folders / "diffusion_models" / "x.pt", STATE)
    comfy.model_management.interrupt_current_processing()
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        _execute(dit_name="x.pt", save_converted="DiT")
    assert [entry.name for entry in (folders / "diffusion_models").iterdir()] == ["x.pt"]
    _execute(dit_name="x.pt", save_converted="DiT")
    assert (folders / "diffusion_models" / "x_core.safetensors").is_file()


@pytest.mark.parametrize("mode", ["LoRA", "both", "merged DiT"])
def test_saving_an_adapter_that_is_not_picked_is_refused(folders, mode):
    save_upstream(folders / "diffusion_models" / "x.pt", STATE)
    with pytest.raises(ValueError, match="no adapter is picked"):
        _execute(dit_name="x.pt", save_converted=mode)


def test_a_file_quantised_by_comfyui_goes_through_untouched_and_takes_no_merge(folders):
    state = dict(STATE)
    for name in ("blocks.0.ffn.0", "blocks.1.self_attn.q"):
        weight = state[f"{name}.weight"].float()
        scale = weight.abs().max() / 448
        state[f"{name}.weight"] = (weight / scale).to(torch.float8_e4m3fn)
        state[f"{name}.weight_scale"] = scale
        state[f"{name}.comfy_quant"] = torch.tensor(list(b'{"format": "float8_e4m3fn"}'), dtype=torch.uint8)
    save_safetensors(folders / "diffusion_models" / "fp8.safetensors", state)
    save_pt(folders / "loras" / "l.pt", peft_names(FACTORS))
    patcher, text = _execute(dit_name="fp8.safetensors")
    assert "69/69" in text and "quantised by ComfyUI's format" in text
    (core,) = nodes.UNETLoader().load_unet("fp8.safetensors", "default")
    shifted = core.clone()
    shifted.add_object_patch("model_sampling", patcher.get_model_object("model_sampling"))
    assert torch.equal(_latents(patcher), _latents(shifted))
    with pytest.raises(WeightFileError, match="nothing can be merged.*LoraLoaderModelOnly"):
        _execute(dit_name="fp8.safetensors", adapter="l.pt")
    with pytest.raises(ValueError, match="quantised in ComfyUI's own format, which its own loader reads"):
        _execute(dit_name="fp8.safetensors", save_converted="DiT")


def test_a_second_run_after_a_failed_load_works(folders):
    path = folders / "diffusion_models" / "x.safetensors"
    save_safetensors(path, STATE)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1000])
    with pytest.raises(WeightFileError, match="truncated"):
        _execute(dit_name="x.safetensors")
    before = LoadLongLiveDiT.fingerprint_inputs(dit_name="x.safetensors")
    path.write_bytes(whole)
    assert LoadLongLiveDiT.fingerprint_inputs(dit_name="x.safetensors") != before
    patcher, _ = _execute(dit_name="x.safetensors")
    assert torch.equal(_weights(patcher)["head.head.bias"], STATE["head.head.bias"].float())


@pytest.mark.parametrize(
    ("dit", "adapter", "words"),
    [
        ({"generator_lora": peft_names(FACTORS)}, None, "holds a LoRA adapter"),
        ({"encoder.conv1.weight": torch.zeros(2), "decoder.conv1.weight": torch.zeros(2)}, None, "is a VAE"),
        ({"token_embedding.weight": torch.zeros(2)}, None, "is a text encoder"),
        (STATE, peft_names(lora_factors(dit_state_dict(dim=128, ffn=256))), "width 256"),
        (STATE, peft_names(lora_factors(dit_state_dict(layers=3))), "at least 3 layers"),
        (STATE, STATE, "is a whole DiT"),
    ],
)
def test_the_wrong_file_is_named(folders, dit, adapter, words):
    save_pt(folders / "diffusion_models" / "x.pt", dit)
    if adapter is not None:
        save_pt(folders / "loras" / "l.pt", adapter)
    with pytest.raises(WeightFileError, match=words):
        _execute(dit_name="x.pt", adapter="l.pt" if adapter is not None else "none")


def test_an_adapter_of_width_1536_on_3072_is_refused(folders):
    """The released widths, without their bulk: a stored tensor of one value can have any shape."""

    def hollow(state):
        return {name: torch.zeros((), dtype=torch.bfloat16).expand(value) for name, value in state.items()}

    from longlive.accel.checkpoint import DitShape

    save_pt(folders / "diffusion_models" / "model_bf16.pt", hollow(DitShape(3072, 14336, 2, 48, 48).tensors()))
    factors = {name: value for name, value in DitShape(1536, 8960, 2, 16, 16).tensors().items() if re.search(r"blocks\..*(attn\.[qkvo]|ffn\.\d)\.weight", name)}
    lora = {}
    for name, (rows, columns) in factors.items():
        base = f"base_model.model.{name.removesuffix('.weight')}"
        lora |= hollow({f"{base}.lora_A.weight": (256, columns), f"{base}.lora_B.weight": (rows, 256)})
    save_pt(folders / "loras" / "lora.pt", lora)
    with pytest.raises(WeightFileError, match=r"lora\.pt does not fit model_bf16\.pt: .* 1536 x 1536, and the model's is 3072 x 3072 \(width 3072\)"):
        _execute(dit_name="model_bf16.pt", adapter="lora.pt")


def test_every_folder_file_is_listed_and_every_input_explained(folders):
    for name in ("a.pt", "b.safetensors", str(Path("sub") / "c.pth")):
        path = folders / "diffusion_models" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x")
    schema = LoadLongLiveDiT.define_schema()
    by_id = {item.id: item for item in schema.inputs}
    assert {"a.pt", "b.safetensors", str(Path("sub") / "c.pth")} <= set(by_id["dit_name"].options)
    assert all(item.tooltip for item in schema.inputs)
    assert [item.id for item in schema.inputs if not item.advanced] == ["dit_name", "adapter", "release", "steps"]


def test_a_promised_tensor_leaves_what_it_is_copied_into_and_refuses_the_rest():
    target = torch.arange(6.0).reshape(2, 3)
    promise = PromisedTensor((2, 3), torch.bfloat16)
    assert promise.shape == target.shape and promise.dtype == torch.bfloat16 and promise.nelement() == 6
    assert torch.equal(target.copy_(promise), torch.arange(6.0).reshape(2, 3))
    with pytest.raises(TypeError):
        promise + 1
    with pytest.raises(TypeError):
        target.add_(promise)


def test_a_model_loaded_outside_inference_mode_can_be_trained(tmp_path):
    path, lora = save_upstream(tmp_path / "x.pt", STATE), save_pt(tmp_path / "lora.pt", peft_names(FACTORS))
    with torch.inference_mode(False), torch.enable_grad():
        patcher, _ = load_longlive(path, adapter=lora, weight_dtype=torch.float32)
        layer = patcher.model.diffusion_model.blocks[1].ffn[0].requires_grad_(True)
        layer(torch.ones(1, 256)).square().sum().backward()
        assert layer.weight.grad.abs().sum() > 0
        with torch.no_grad():
            layer.weight.sub_(layer.weight.grad)
    assert torch.equal(load_longlive(path)[0].model.diffusion_model.head.head.bias, STATE["head.head.bias"].float()), "the file must not change"
