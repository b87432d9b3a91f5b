"""What weight_file.py opens, what it refuses and in which words, and that a written file is whole or absent."""

import os
import pickle
import shutil

import pytest
import torch
from longlive.accel.weight_file import WeightFileError, read_safetensors_metadata, read_weight_file, write_safetensors
from longlive.tests.weight_files import safetensors_bytes, save_pt, save_safetensors

TENSORS = {"a": torch.arange(24, dtype=torch.bfloat16).reshape(4, 6), "b": torch.arange(5, dtype=torch.float32), "c": torch.tensor([3], dtype=torch.uint8)}


class RunsCode:
    def __reduce__(self):
        return os.mkdir, ("ran-code",)


def test_reads_safetensors_and_both_pickle_forms(tmp_path):
    files = [
        save_safetensors(tmp_path / "x.safetensors", TENSORS, {"note": "1"}),
        save_safetensors(tmp_path / "x.sft", TENSORS),
        save_pt(tmp_path / "x.pt", TENSORS),
    ]
    torch.save(TENSORS, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    for path in [*files, tmp_path / "old.pth"]:
        content = read_weight_file(path).content
        assert list(content) == list(TENSORS) or set(content) == set(TENSORS)
        for name, value in TENSORS.items():
            assert content[name].dtype == value.dtype and torch.equal(content[name], value)
    assert read_weight_file(files[0]).metadata == {"note": "1"}


def test_reads_a_header_whose_length_leaves_tensors_unaligned(tmp_path):
    header = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    assert (8 + len(header)) % 4
    path = tmp_path / "odd.safetensors"
    path.write_bytes(safetensors_bytes(header, torch.tensor([1.5, -2.0]).numpy().tobytes()))
    assert read_weight_file(path).content["a"].tolist() == [1.5, -2.0]


def test_reads_a_pickle_with_a_zip64_end(tmp_path):
    # torch writes a zip64 record into every file; the check must not take it for damage, nor a longer one for whole.
    path = save_pt(tmp_path / "many.pt", {f"t{i}": torch.full((3,), float(i)) for i in range(300)})
    assert len(read_weight_file(path).content) == 300


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
@pytest.mark.parametrize("keep", [0.3, 0.9, 0.999])
def test_refuses_a_truncated_file(tmp_path, suffix, keep):
    path = _valid(tmp_path, suffix)
    os.truncate(path, int(path.stat().st_size * keep))
    with pytest.raises(WeightFileError, match=r"truncated|not a readable"):
        read_weight_file(path)


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
@pytest.mark.parametrize("extra", [1, 100, 200_000])
def test_refuses_trailing_bytes(tmp_path, suffix, extra):
    path = _valid(tmp_path, suffix)
    with open(path, "ab") as stream:
        stream.write(b"\x00" * extra)
    with pytest.raises(WeightFileError, match="after its|end of the archive is missing"):
        read_weight_file(path)


def test_refuses_a_pickle_that_lost_a_piece_in_the_middle(tmp_path):
    path = _valid(tmp_path, ".pt")
    whole = path.read_bytes()
    path.write_bytes(whole[:1000] + whole[1200:])
    with pytest.raises(WeightFileError, match="damaged"):
        read_weight_file(path)


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_refuses_what_is_no_weight_file(tmp_path, suffix):
    path = tmp_path / f"x{suffix}"
    cases = {
        b"": "empty",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 10000000000\n": "Git LFS pointer",
        b"<!DOCTYPE html><html><head><title>Sign in</title>": "web page",
        b"\n  <html>": "web page",
        b"Repository not found": "neither|not a safetensors",
    }
    for content, words in cases.items():
        path.write_bytes(content)
        with pytest.raises(WeightFileError, match=words):
            read_weight_file(path)
    with pytest.raises(WeightFileError, match="no file at"):
        read_weight_file(tmp_path / f"absent{suffix}")


def test_refuses_a_file_under_the_other_format_s_name_and_says_which_name_works(tmp_path):
    pickle_as_safetensors = _valid(tmp_path, ".pt").rename(tmp_path / "p.safetensors")
    with pytest.raises(WeightFileError, match=r"PyTorch pickle; give it the name p\.pt"):
        read_weight_file(pickle_as_safetensors)
    safetensors_as_pickle = _valid(tmp_path, ".safetensors").rename(tmp_path / "s.pt")
    with pytest.raises(WeightFileError, match=r"content is safetensors; give it the name s\.safetensors"):
        read_weight_file(safetensors_as_pickle)


@pytest.mark.parametrize("form", ["zip", "legacy", "bare"])
def test_refuses_a_pickle_that_carries_code_without_running_it(tmp_path, monkeypatch, form):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "evil.pt"
    if form == "bare":
        path.write_bytes(pickle.dumps({"generator": RunsCode()}))
    else:
        torch.save({"generator": RunsCode()}, path, _use_new_zipfile_serialization=form == "zip")
    with pytest.raises(WeightFileError, match=r"asks to run or build `\w+\.mkdir`.*nothing in it was run"):
        read_weight_file(path)
    assert not (tmp_path / "ran-code").exists()


def test_refuses_a_pickle_that_holds_no_dictionary(tmp_path):
    with pytest.raises(WeightFileError, match="holds a list"):
        read_weight_file(save_pt(tmp_path / "x.pt", [torch.zeros(2)]))


@pytest.mark.parametrize(
    "header",
    [
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
        b'{"a":{"dtype":"F9","shape":[2],"data_offsets":[0,8]}}',
        b'{"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}}',
        b'{"a":{"dtype":"F32","shape":[2]}}',
        b'{"a":[1]}',
        b"[]",
        b'{"a":',
    ],
)
def test_refuses_a_damaged_header(tmp_path, header):
    path = tmp_path / "x.safetensors"
    path.write_bytes(safetensors_bytes(header, b"\x00" * 8))
    with pytest.raises(WeightFileError, match="damaged|has the type"):
        read_weight_file(path)


def test_writes_what_the_safetensors_library_reads(tmp_path):
    from safetensors import safe_open

    path = tmp_path / "new" / "x.safetensors"
    write_safetensors(path, _specs(), TENSORS.items(), {"made": "here"})
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"made": "here"}
        for name, value in TENSORS.items():
            assert torch.equal(file.get_tensor(name), value)
    assert read_safetensors_metadata(path) == {"made": "here"}
    assert [entry.name for entry in path.parent.iterdir()] == ["x.safetensors"]


def test_a_write_that_fails_leaves_nothing(tmp_path):
    def stops():
        yield "a", TENSORS["a"]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_safetensors(tmp_path / "x.safetensors", _specs(), stops(), {})
    assert list(tmp_path.iterdir()) == []


def test_a_write_never_replaces_a_file(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"mine")
    with pytest.raises(WeightFileError, match="exists already"):
        write_safetensors(path, _specs(), TENSORS.items(), {})
    assert path.read_bytes() == b"mine"


def test_a_write_that_does_not_fit_is_refused_with_the_sizes(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(100, 90, 10))
    with pytest.raises(WeightFileError, match=r"needs \d+ bytes, and 10 bytes are free"):
        write_safetensors(tmp_path / "x.safetensors", _specs(), TENSORS.items(), {})
    assert list(tmp_path.iterdir()) == []


def _specs():
    return {name: (tuple(value.shape), value.dtype) for name, value in TENSORS.items()}


def _valid(folder, suffix):
    tensors = {"w": torch.randn(64, 64, generator=torch.Generator().manual_seed(0))}
    return save_pt(folder / "w.pt", tensors) if suffix == ".pt" else save_safetensors(folder / "w.safetensors", tensors)
