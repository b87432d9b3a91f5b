"""Adapters under every trainer's names give the same weights; merged ones are found out; half and foreign ones are refused."""

import pytest
import torch
from longlive.accel.checkpoint import read_checkpoint
from longlive.accel.lora import core_lora_tensors, merge, probe_merge, read_adapter, refuse_double_merge
from longlive.accel.weight_file import WeightFileError
from longlive.tests.weight_files import dit_state_dict, lora_factors, packed_container, peft_names, save_pt, save_safetensors, save_upstream

STATE = dit_state_dict()
FACTORS = lora_factors(STATE)


@pytest.fixture
def checkpoint(tmp_path):
    return read_checkpoint(save_upstream(tmp_path / "base.pt", STATE))


def _merged(state, factors, scale=1.0):
    return {**state, **{f"{n}.weight": (state[f"{n}.weight"].float() + scale * (up.float() @ down.float())).bfloat16() for n, (down, up) in factors.items()}}


def _named(prefix, down, up, *, flat=False, alpha=None):
    named = {}
    for name, (a, b) in FACTORS.items():
        layer = prefix + (name.replace(".", "_") if flat else name)
        named |= {f"{layer}{down}": a, f"{layer}{up}": b}
        if alpha is not None:
            named[f"{layer}.alpha"] = torch.tensor(float(alpha))
    return named


NAMINGS = {
    "peft": _named("base_model.model.", ".lora_A.weight", ".lora_B.weight"),
    "peft, adapter named": _named("base_model.model.", ".lora_A.default.weight", ".lora_B.default.weight"),
    "peft inside the wrapper": _named("base_model.model.model.", ".lora_A.weight", ".lora_B.weight"),
    "fsdp": _named("base_model.model._fsdp_wrapped_module.", ".lora_A.weight", ".lora_B.weight"),
    "core": _named("diffusion_model.", ".lora_A.weight", ".lora_B.weight", alpha=8),
    "core checkpoint": _named("model.diffusion_model.", ".lora_A.weight", ".lora_B.weight"),
    "diffusers": _named("transformer.", ".lora_A.weight", ".lora_B.weight"),
    "diffusers, old": _named("transformer.", ".lora.down.weight", ".lora.up.weight"),
    "bare": _named("", ".lora_A.weight", ".lora_B.weight"),
    "bare factors": _named("", ".lora_A", ".lora_B"),
    "kohya": _named("lora_unet_", ".lora_down.weight", ".lora_up.weight", flat=True, alpha=8),
    "wan fun": _named("lora_unet__", ".lora_down.weight", ".lora_up.weight", flat=True, alpha=8),
    "onetrainer": _named("lora_transformer_", ".lora_down.weight", ".lora_up.weight", flat=True, alpha=8),
    "dotted kohya": _named("diffusion_model.", ".lora_down.weight", ".lora_up.weight", alpha=8),
}


@pytest.mark.parametrize("naming", NAMINGS)
def test_every_common_naming_maps(tmp_path, checkpoint, naming):
    tensors = NAMINGS[naming]
    nested, top, header = tmp_path / "nested.pt", tmp_path / "top.pt", tmp_path / "header.safetensors"
    for path in (save_pt(nested, {"generator_lora": tensors}), save_pt(top, tensors), save_safetensors(header, tensors)):
        adapter = read_adapter(path, checkpoint)
        assert adapter.unknown == () and adapter.matched == adapter.total == len(tensors)
        assert sorted(adapter.layers) == sorted(f"{name}.weight" for name in FACTORS)
        for name, (down, up) in FACTORS.items():
            layer = adapter.layers[f"{name}.weight"]
            assert layer.scale == 1 and torch.equal(layer.down, down) and torch.equal(layer.up, up)


def test_merge_sums_in_float32_and_rounds_once(tmp_path, checkpoint):
    adapter = read_adapter(save_pt(tmp_path / "lora.pt", NAMINGS["peft"]), checkpoint)
    for name, value in _merged(STATE, FACTORS).items():
        if name in adapter.layers:
            assert torch.equal(merge(checkpoint.tensor(name), adapter.layers[name], torch.bfloat16), value)


@pytest.mark.parametrize(
    ("tensors", "notes"),
    [
        (_named("lora_unet_", ".lora_down.weight", ".lora_up.weight", flat=True, alpha=4), {}),
        (NAMINGS["bare"], {"lora_alpha": "4"}),
    ],
)
def test_alpha_comes_from_the_layer_or_the_header(tmp_path, checkpoint, tensors, notes):
    adapter = read_adapter(save_safetensors(tmp_path / "l.safetensors", tensors, notes), checkpoint)
    assert {layer.scale for layer in adapter.layers.values()} == {0.5} and adapter.ranks() == "rank 8, factor alpha/rank 0.5"
    name = "blocks.1.ffn.2.weight"
    assert torch.equal(merge(checkpoint.tensor(name), adapter.layers[name], torch.bfloat16), _merged(STATE, FACTORS, 0.5)[name])


@pytest.mark.parametrize("rank", [128, 256])
def test_the_released_ranks_have_the_factor_one(tmp_path, checkpoint, rank):
    adapter = read_adapter(save_pt(tmp_path / "lora.pt", {"generator_lora": peft_names(lora_factors(STATE, rank=rank))}), checkpoint)
    assert adapter.ranks() == f"rank {rank}, factor alpha/rank 1"


def test_unknown_names_are_counted_and_the_critic_is_left_alone(tmp_path, checkpoint):
    extra = {"base_model.model.blocks.0.self_attn.z.lora_A.weight": torch.zeros(8, 256), "lora_te_text_model_0.lora_down.weight": torch.zeros(8, 8)}
    content = {"generator_lora": NAMINGS["peft"] | extra, "critic_lora": NAMINGS["peft"]}
    adapter = read_adapter(save_pt(tmp_path / "lora.pt", content), checkpoint)
    assert (adapter.matched, adapter.total, sorted(adapter.unknown)) == (40, 42, sorted(extra))
    assert "critic" in adapter.remarks[0]


def test_an_adapter_of_another_width_is_refused(tmp_path, checkpoint):
    other = save_pt(tmp_path / "lora.pt", {"generator_lora": peft_names(lora_factors(dit_state_dict(dim=128, ffn=256)))})
    with pytest.raises(WeightFileError, match=r"changes a weight of 128 x 128, and the model's is 256 x 256 \(width 256\).*1536"):
        read_adapter(other, checkpoint)


def test_an_adapter_for_more_layers_is_refused(tmp_path, checkpoint):
    other = save_pt(tmp_path / "lora.pt", peft_names(lora_factors(dit_state_dict(layers=4))))
    with pytest.raises(WeightFileError, match="at least 4 layers, and base.pt has 2"):
        read_adapter(other, checkpoint)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({k: v for k, v in NAMINGS["peft"].items() if "blocks.0.ffn.0.lora_B" not in k}, r"incomplete: for blocks\.0\.ffn\.0\.weight only lora_A"),
        ({"some.layer.lora_A.weight": torch.zeros(8, 8), "some.layer.lora_B.weight": torch.zeros(8, 8)}, "none of its 2 names fits.*expected names such as"),
        ({**NAMINGS["peft"], "base_model.model.blocks.0.ffn.0.lora_magnitude_vector": torch.ones(512)}, "more than a plain LoRA"),
        ({"lora_unet_blocks_0_ffn_0.lokr_w1": torch.zeros(4, 4)}, "more than a plain LoRA"),
        ({"generator": {f"model.{k}": v for k, v in STATE.items()}}, "is a whole DiT; pick it as the DiT"),
        (STATE, "is a whole DiT; pick it as the DiT"),
        ({"encoder.conv1.weight": torch.zeros(2), "decoder.conv1.weight": torch.zeros(2)}, "is a VAE"),
        ({**NAMINGS["peft"], "base_model.model.blocks.0.ffn.0.lora_B.weight": torch.zeros(512, 4)}, "do not multiply"),
    ],
)
def test_what_is_no_usable_adapter_is_named(tmp_path, checkpoint, tensors, words):
    with pytest.raises(WeightFileError, match=words):
        read_adapter(save_pt(tmp_path / "x.pt", tensors), checkpoint)


def test_a_merged_file_is_refused_by_its_note(tmp_path):
    adapter_file = save_pt(tmp_path / "lora.pt", NAMINGS["peft"])
    for notes in ({"checkpoint_format": "longlive_generator_merged_lora"}, {"merged_lora": True, "source_lora_ckpt": "ckpt/lora.pt"}):
        checkpoint = read_checkpoint(save_upstream(tmp_path / "m.pt", STATE, **notes))
        with pytest.raises(WeightFileError, match="says that a LoRA has been merged.*Set the adapter to none"):
            refuse_double_merge(checkpoint, read_adapter(adapter_file, checkpoint))


@pytest.mark.parametrize("strength", [0.02, 0.05, 0.3])
@pytest.mark.parametrize("form", ["plain", "packed"])
def test_a_merged_file_without_a_note_is_found_by_projection(tmp_path, strength, form):
    factors = lora_factors(STATE, strength=strength)
    merged = _merged(STATE, factors)
    content = {"generator": packed_container(merged)["generator"]} if form == "packed" else merged
    checkpoint = read_checkpoint(save_pt(tmp_path / "m.pt", content))
    adapter = read_adapter(save_pt(tmp_path / "lora.pt", peft_names(factors)), checkpoint)
    assert probe_merge(checkpoint, adapter).share == pytest.approx(1, abs=0.1)
    with pytest.raises(WeightFileError, match=r"already merged into m\.pt.*is there (0\.9|1\.0)\d times"):
        refuse_double_merge(checkpoint, adapter)


def test_an_adapter_that_is_not_merged_passes(tmp_path, checkpoint):
    adapter = read_adapter(save_pt(tmp_path / "lora.pt", NAMINGS["peft"]), checkpoint)
    assert abs(probe_merge(checkpoint, adapter).share) < 0.1
    assert "was not in the weights before" in refuse_double_merge(checkpoint, adapter)
    # Another adapter's change in the weights is not this one's.
    other = read_checkpoint(save_pt(tmp_path / "other.pt", _merged(STATE, lora_factors(STATE, seed=77))))
    assert "was not in the weights before" in refuse_double_merge(other, adapter)


def test_the_projection_agrees_with_the_full_product(checkpoint, tmp_path):
    adapter = read_adapter(save_pt(tmp_path / "lora.pt", NAMINGS["kohya"]), checkpoint)
    along = square = 0.0
    for name, layer in adapter.layers.items():
        along += (checkpoint.tensor(name).float() * layer.delta()).sum().item()
        square += layer.delta().square().sum().item()
    assert probe_merge(checkpoint, adapter, max_layers=100).share == pytest.approx(along / square, abs=1e-5)


def test_a_change_too_weak_to_be_found_is_said(tmp_path, checkpoint):
    adapter = read_adapter(save_pt(tmp_path / "lora.pt", peft_names(lora_factors(STATE, strength=1e-4))), checkpoint)
    assert "cannot be told" in refuse_double_merge(checkpoint, adapter)
    zero = {name: torch.zeros_like(value) if "lora_B" in name else value for name, value in NAMINGS["peft"].items()}
    assert "cannot be told" in refuse_double_merge(checkpoint, read_adapter(save_pt(tmp_path / "zero.pt", zero), checkpoint))


def test_core_names_carry_factors_and_alpha(tmp_path, checkpoint):
    adapter = read_adapter(save_safetensors(tmp_path / "l.safetensors", NAMINGS["bare"], {"lora_alpha": "4"}), checkpoint)
    tensors = core_lora_tensors(adapter)
    base = "diffusion_model.blocks.0.cross_attn.v"
    assert len(tensors) == 60 and tensors[f"{base}.alpha"] == 4
    assert torch.equal(tensors[f"{base}.lora_A.weight"], FACTORS["blocks.0.cross_attn.v"][0])
