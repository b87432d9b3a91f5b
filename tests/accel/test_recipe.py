"""Release and steps: from notes, then names, else assumed and said."""

import pytest
from longlive.accel.checkpoint import read_checkpoint
from longlive.accel.lora import read_adapter
from longlive.accel.recipe import choose_recipe
from longlive.accel.weight_file import WeightFileError
from longlive.tests.weight_files import dit_state_dict, lora_factors, peft_names, save_pt, save_safetensors, save_upstream

STATE = dit_state_dict()


@pytest.fixture
def checkpoint(tmp_path):
    return read_checkpoint(save_upstream(tmp_path / "model.pt", STATE))


@pytest.mark.parametrize(
    ("name", "steps", "words"),
    [
        ("LongLive-2.0-5B-NVFP4-S2/model_te.pt", 2, "folder name 'LongLive-2.0-5B-NVFP4-S2'"),
        ("LongLive-2.0-5B-NVFP4-S4/model_te.pt", 4, "folder name"),
        ("a/LongLive-S2/b/model.pt", 2, "folder name 'LongLive-S2'"),
        (r"LongLive-S2\model.pt", 2, "folder name 'LongLive-S2'"),
        ("LongLive-S4/longlive_s2.safetensors", 2, "file name 'longlive_s2'"),
        ("longlive2_2step.pt", 2, "file name"),
        ("longlive2-3-steps.pt", 3, "file name"),
        ("LongLive2-5B-stage1-bf16/model.pt", 50, "stage 1, which is not distilled"),
        ("model.pt", 4, "assumed"),
        ("ckpt_step_2000/model_001000steps.pt", 4, "assumed"),
        ("steps/is3/os2x/v2.pt", 4, "assumed"),
    ],
)
def test_steps_from_the_name(checkpoint, name, steps, words):
    recipe = choose_recipe(checkpoint, name=name)
    assert recipe.steps == steps and words in " ".join(recipe.notes)


def test_notes_count_before_names_and_the_user_before_both(tmp_path):
    checkpoint = read_checkpoint(save_upstream(tmp_path / "model.pt", STATE, sampling_steps=2))
    assert choose_recipe(checkpoint, name="LongLive-S4/model.pt").steps == 2
    recipe = choose_recipe(checkpoint, name="LongLive-S4/model.pt", steps=6)
    assert recipe.steps == 6 and "steps 6: set on the loader" in recipe.notes
    source = read_checkpoint(save_upstream(tmp_path / "x.pt", STATE, source_lora_ckpt="runs/dmd-S2/lora.pt"))
    recipe = choose_recipe(source, name="x.pt")
    assert recipe.steps == 2 and "source_lora_ckpt" in recipe.notes[1]
    header = read_checkpoint(save_safetensors(tmp_path / "x.safetensors", STATE, {"longlive_steps": "2"}))
    assert choose_recipe(header, name="x.safetensors").steps == 2


def test_an_adapter_s_word_counts_before_the_base_s(tmp_path, checkpoint):
    adapter = read_adapter(save_pt(tmp_path / "lora.pt", peft_names(lora_factors(STATE))), checkpoint)
    assert choose_recipe(checkpoint, adapter, name="stage1/model.pt", adapter_name="lora-S2.pt").steps == 2
    # The adapter is what distils the stage-1 base.
    assert choose_recipe(checkpoint, adapter, name="LongLive2-stage1/model.pt", adapter_name="lora.pt").steps == 4


def test_without_a_picked_name_the_next_folders_and_a_link_s_target_are_looked_at(tmp_path):
    real = save_upstream(tmp_path / "models--x--LongLive-S2" / "blobs" / "abc.pt", STATE)
    assert choose_recipe(read_checkpoint(real)).steps == 2
    link = tmp_path / "diffusion_models" / "model.pt"
    link.parent.mkdir()
    link.symlink_to(real)
    recipe = choose_recipe(read_checkpoint(link), name="model.pt")
    assert recipe.steps == 2 and "link target" in recipe.notes[1]


def test_release_by_channels(tmp_path, checkpoint):
    recipe = choose_recipe(checkpoint, name="m.pt")
    assert (recipe.name, recipe.solver, recipe.chunk_frames, recipe.shift) == ("longlive-2.0", "unipc", 8, 5.0)
    assert "plain Wan 2.2 5B has the same shapes" in recipe.notes[0]
    first = read_checkpoint(save_upstream(tmp_path / "one.pt", dit_state_dict(channels=16)))
    recipe = choose_recipe(first, name="m.pt")
    assert (recipe.name, recipe.solver, recipe.chunk_frames, recipe.fps) == ("longlive-1.0", "renoise", 3, 16)
    assert choose_recipe(checkpoint, release="plain Wan") is None
    with pytest.raises(WeightFileError, match=r"asked to be LongLive 1\.0.*48 latent channels.*LongLive 2\.0"):
        choose_recipe(checkpoint, release="LongLive 1.0")
    odd = read_checkpoint(save_upstream(tmp_path / "odd.pt", dit_state_dict(channels=32)))
    with pytest.raises(WeightFileError, match="takes 32 latent channels and gives 32"):
        choose_recipe(odd)
    with pytest.raises(ValueError, match="release must be one of"):
        choose_recipe(checkpoint, release="LongLive 3")
