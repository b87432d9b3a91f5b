"""Every published form gives the same DiT under Wan's names; everything else is refused in words."""

import pytest
import torch
from longlive.accel.checkpoint import read_checkpoint
from longlive.accel.weight_file import WeightFileError
from longlive.tests.weight_files import block_linears, dit_state_dict, lora_factors, packed_container, peft_names, save_pt, save_safetensors, save_upstream

STATE = dit_state_dict()


def _assert_is(checkpoint, state):
    assert sorted(checkpoint.names) == sorted(state)
    for name, value in state.items():
        assert torch.equal(checkpoint.tensor(name), value), name
        assert checkpoint.spec(name) == (tuple(value.shape), value.dtype)


def _prefixed(prefix, state=None):
    return {f"{prefix}{name}": value for name, value in (state or STATE).items()}


@pytest.mark.parametrize(
    ("content", "container"),
    [
        ({"generator": _prefixed("model.")}, "generator"),
        ({"generator": _prefixed("model."), "critic": _prefixed("model."), "step": 7000}, "generator"),
        ({"generator_ema": _prefixed("model._fsdp_wrapped_module.")}, "generator_ema"),
        ({"model": _prefixed("model.")}, "model"),
        ({"state_dict": _prefixed("module.model.")}, "state_dict"),
        (_prefixed("model."), "state dict"),
        (_prefixed("_orig_mod."), "state dict"),
        (STATE, "state dict"),
        ({**_prefixed("model.diffusion_model."), "first_stage_model.decoder.conv1.weight": torch.zeros(2)}, "state dict"),
    ],
)
def test_reads_every_container(tmp_path, content, container):
    checkpoint = read_checkpoint(save_pt(tmp_path / "model.pt", content))
    assert checkpoint.container == container
    _assert_is(checkpoint, STATE)


@pytest.mark.parametrize("prefix", ["", "model.", "diffusion_model.", "model.diffusion_model.", "generator.model."])
def test_reads_safetensors_with_every_prefix(tmp_path, prefix):
    _assert_is(read_checkpoint(save_safetensors(tmp_path / "model.safetensors", _prefixed(prefix))), STATE)


def test_reads_names_with_wrappers_in_the_middle(tmp_path):
    state = {f"model.{name.replace('blocks.1.', 'blocks.1._fsdp_wrapped_module._checkpoint_wrapped_module.')}": value for name, value in STATE.items()}
    _assert_is(read_checkpoint(save_pt(tmp_path / "ema.pt", {"generator_ema": state})), STATE)


def test_the_averaged_weights_are_used_when_asked_for(tmp_path):
    averaged = dit_state_dict(seed=9)
    path = save_pt(tmp_path / "both.pt", {"generator": _prefixed("model."), "generator_ema": _prefixed("model._fsdp_wrapped_module.", averaged)})
    _assert_is(read_checkpoint(path), STATE)
    checkpoint = read_checkpoint(path, weights="generator_ema")
    _assert_is(checkpoint, averaged)
    assert "averaged" in checkpoint.remarks[0]
    with pytest.raises(WeightFileError, match="asked for generator_ema and holds generator"):
        read_checkpoint(save_upstream(tmp_path / "one.pt", STATE), weights="generator_ema")


@pytest.mark.parametrize("rule", ["mse", "static_6"])
def test_reads_packed_nvfp4_as_bfloat16(tmp_path, rule):
    checkpoint = read_checkpoint(save_pt(tmp_path / "model_4o6.pt", packed_container(STATE, rule)))
    linears = block_linears(STATE)
    assert len(checkpoint.packed) == len(linears) and sorted(checkpoint.names) == sorted(STATE)
    for name, value in STATE.items():
        found = checkpoint.tensor(name)
        assert found.dtype == torch.bfloat16 and found.shape == value.shape
        relative = ((found.float() - value.float()).norm() / value.float().norm()).item()
        assert (0.05 < relative < 0.12) if name.removesuffix(".weight") in linears else relative == 0
    assert checkpoint.is_merged and any(f"rule {rule}" in remark for remark in checkpoint.remarks)


def test_packed_weights_of_an_unknown_rule_or_version_are_refused(tmp_path):
    content = packed_container(STATE)
    content["quantization"] = {"scale_rule": "newest"}
    with pytest.raises(WeightFileError, match="scale rule 'newest'.*known are mse"):
        read_checkpoint(save_pt(tmp_path / "a.pt", content))
    with pytest.raises(WeightFileError, match="version 2; version 1 is known"):
        read_checkpoint(save_pt(tmp_path / "b.pt", packed_container(STATE) | {"checkpoint_version": 2}))
    content = {key: value for key, value in packed_container(STATE).items() if key == "generator"}
    assert any("mse is assumed" in remark for remark in read_checkpoint(save_pt(tmp_path / "c.pt", content)).remarks)


def test_a_transformer_engine_checkpoint_is_refused(tmp_path):
    path = save_upstream(tmp_path / "te.pt", STATE, checkpoint_format="longlive_generator_te_nvfp4")
    with pytest.raises(WeightFileError, match="only TransformerEngine can read.*use model_te.pt"):
        read_checkpoint(path)


def test_names_outside_the_dit_are_counted(tmp_path):
    path = save_pt(tmp_path / "x.pt", {"model": {**_prefixed("model."), "model.blocks.0.extra.weight": torch.zeros(2), "scheduler.sigmas": torch.zeros(3)}})
    assert sorted(read_checkpoint(path).unexpected) == ["blocks.0.extra.weight", "scheduler.sigmas"]


def test_missing_tensors_are_refused_with_their_layers(tmp_path):
    partial = {name: value for name, value in dit_state_dict(layers=3).items() if not name.startswith("blocks.1.")}
    with pytest.raises(WeightFileError, match=r"27 of 96 tensors are missing, in the layers 1 \(the first is blocks\.1\."):
        read_checkpoint(save_upstream(tmp_path / "x.pt", partial))
    del (partial := dict(STATE))["head.head.bias"]
    with pytest.raises(WeightFileError, match=r"1 of 69 tensors are missing \(the first is head\.head\.bias"):
        read_checkpoint(save_upstream(tmp_path / "y.pt", partial))


def test_mixed_widths_are_refused(tmp_path):
    mixed = {**STATE, "blocks.1.ffn.0.weight": torch.zeros(768, 256, dtype=torch.bfloat16)}
    with pytest.raises(WeightFileError, match=r"blocks\.1\.ffn\.0\.weight has the shape \(768, 256\), .* ask for \(512, 256\)"):
        read_checkpoint(save_upstream(tmp_path / "x.pt", mixed))
    with pytest.raises(WeightFileError, match="stored as torch.int8"):
        read_checkpoint(save_upstream(tmp_path / "y.pt", {**STATE, "head.modulation": torch.zeros(1, 2, 256, dtype=torch.int8)}))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"generator_lora": peft_names(lora_factors(STATE))}, "holds a LoRA adapter.*as the adapter"),
        (peft_names(lora_factors(STATE)), "is a LoRA adapter; pick it as the adapter"),
        ({"encoder.conv1.weight": torch.zeros(2), "decoder.conv1.weight": torch.zeros(2), "conv2.weight": torch.zeros(2)}, "is a VAE"),
        ({"token_embedding.weight": torch.zeros(2), "blocks.0.attn.q.weight": torch.zeros(2)}, "is a text encoder"),
        ({"shared.weight": torch.zeros(2), "encoder.block.0.layer.0.SelfAttention.q.weight": torch.zeros(2)}, "is a text encoder"),
        ({"double_blocks.0.img_attn.qkv.weight": torch.zeros(2)}, "is a diffusion model of another architecture"),
        ({"epoch": 3, "loss": 0.5}, "no model this node knows"),
        ({**STATE, "img_emb.proj.0.bias": torch.zeros(2)}, "image-to-video Wan model"),
    ],
)
def test_what_is_no_dit_is_named(tmp_path, content, words):
    with pytest.raises(WeightFileError, match=words):
        read_checkpoint(save_pt(tmp_path / "x.pt", content))


def test_reading_stays_lazy(tmp_path):
    """A mapped tensor shows a later change of the file: nothing was copied when the checkpoint was opened."""
    path = save_safetensors(tmp_path / "model.safetensors", STATE)
    checkpoint = read_checkpoint(path)
    raw = bytearray(path.read_bytes())
    marker = STATE["head.head.weight"].view(torch.uint8).numpy().tobytes()
    at = raw.find(marker)
    with open(path, "r+b") as stream:
        stream.seek(at)
        stream.write(b"\x00" * len(marker))
    assert checkpoint.tensor("head.head.weight").count_nonzero() == 0
