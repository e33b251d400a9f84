from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from efcil.engine import checkpoint
from efcil.engine.checkpoint import CheckpointError


def tensors(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(4, 3, 3, 3, generator=generator).contiguous(memory_format=torch.channels_last)
    return {
        "weight": weight,
        "steps": torch.tensor(7),
        "empty": torch.zeros(0, 5),
        "half": torch.randn(3, generator=generator).bfloat16(),
        "view": weight[0],
    }


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )


def test_round_trip_of_tensors_and_facts(tmp_path: Path) -> None:
    facts = {"completed": 2, "matrix": [[50.0, float("nan")]], "sizes": (1, 2), "loss": 0.1 + 0.2}
    checkpoint.write(tmp_path / "model", tensors(), facts)
    read = checkpoint.read(tmp_path / "model")
    assert same(read.tensors, tensors())
    assert read.facts == {"completed": 2, "matrix": [[50.0, None]], "sizes": [1, 2], "loss": 0.1 + 0.2}


def test_only_the_newest_checkpoint_stays(tmp_path: Path) -> None:
    for seed in range(4):
        checkpoint.write(tmp_path, tensors(seed), {"seed": seed})
    assert len(list(tmp_path.iterdir())) == 2
    assert same(checkpoint.read(tmp_path).tensors, tensors(3))


@pytest.mark.parametrize("call", [1, 2])
@pytest.mark.parametrize("before", [True, False], ids=["before the rename", "after it"])
def test_a_crash_at_any_rename_leaves_one_complete_checkpoint(
    tmp_path: Path, crash_at_rename: Any, call: int, before: bool
) -> None:
    checkpoint.write(tmp_path, tensors(0), {"seed": 0})
    with crash_at_rename(call, before):
        checkpoint.write(tmp_path, tensors(1), {"seed": 1})
    found = checkpoint.read(tmp_path)
    expected = 1 if call == 2 and not before else 0
    assert found.facts["seed"] == expected
    assert same(found.tensors, tensors(expected))
    checkpoint.write(tmp_path, tensors(2), {"seed": 2})
    assert len(list(tmp_path.iterdir())) == 2, "what the crash left behind is cleaned up"


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.write(tmp_path, tensors(0), {"seed": 0})

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"cannot be written \(No space left on device\)") as error:
        checkpoint.write(tmp_path, tensors(1), {"seed": 1})
    monkeypatch.undo()
    assert str(tmp_path) in str(error.value)
    assert same(checkpoint.read(tmp_path).tensors, tensors(0))
    assert len(list(tmp_path.iterdir())) == 2


def test_damage_anywhere_is_noticed(tmp_path: Path) -> None:
    checkpoint.write(tmp_path, tensors(), {"completed": 2, "names": ["a", "b"]})
    places = random.Random(0)
    for file in sorted(tmp_path.iterdir()):
        content = file.read_bytes()
        for _ in range(60):
            position = places.randrange(len(content))
            damaged = bytearray(content)
            damaged[position] ^= 1 << places.randrange(8)
            file.write_bytes(bytes(damaged))
            try:
                found = checkpoint.read(tmp_path)
            except CheckpointError as error:
                assert str(tmp_path) in str(error)  # noqa: PT017 - the flip may also hit white space
            else:  # white space of the JSON text may change; what it says may not
                assert found.facts == {"completed": 2, "names": ["a", "b"]}
                assert same(found.tensors, tensors())
        for length in (0, 1, len(content) // 2, len(content) - 2):
            file.write_bytes(content[:length])
            with pytest.raises(CheckpointError):
                checkpoint.read(tmp_path)
        file.write_bytes(content)
    assert checkpoint.read(tmp_path).facts["completed"] == 2


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    checkpoint.write(tmp_path, tensors(), {})
    file = next(tmp_path.glob("*.safetensors"))
    file.unlink()
    with pytest.raises(CheckpointError, match=file.name):
        checkpoint.read(tmp_path)


def rewrite(folder: Path, **changes: object) -> None:
    described = json.loads((folder / "state.json").read_text())
    described.pop("checksum")
    for name, value in changes.items():
        described[name] = value
    described["checksum"] = checkpoint._checksum(described)
    (folder / "state.json").write_text(json.dumps(described))


def test_a_later_format_is_refused(tmp_path: Path) -> None:
    checkpoint.write(tmp_path, tensors(), {})
    rewrite(tmp_path, format=checkpoint.FORMAT + 1)
    with pytest.raises(CheckpointError, match="Use the version that wrote it"):
        checkpoint.read(tmp_path)


def test_a_name_that_leads_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    checkpoint.write(tmp_path / "model", tensors(), {})
    entry = json.loads((tmp_path / "model" / "state.json").read_text())["tensors"]
    (tmp_path / "model" / entry["file"]).rename(tmp_path / entry["file"])
    rewrite(tmp_path / "model", tensors=entry | {"file": f"../{entry['file']}"})
    with pytest.raises(CheckpointError, match="names a file that no checkpoint has"):
        checkpoint.read(tmp_path / "model")


def test_leftovers_of_a_killed_process_are_removed_if_asked_to(tmp_path: Path) -> None:
    checkpoint.write(tmp_path, tensors(), {})
    kept = set(tmp_path.iterdir())
    for name in ("state-0123456789abcdef.safetensors", ".state.json.tmp", ".state-0123456789abcdef.safetensors.tmp"):
        (tmp_path / name).write_text("")
    checkpoint.read(tmp_path)
    assert len(set(tmp_path.iterdir())) == 5
    assert same(checkpoint.read_and_tidy(tmp_path).tensors, tensors())
    assert set(tmp_path.iterdir()) == kept


def test_remove_and_exists(tmp_path: Path) -> None:
    assert not checkpoint.exists(tmp_path / "partial")
    checkpoint.remove(tmp_path / "partial")
    checkpoint.write(tmp_path / "partial", tensors(), {})
    assert checkpoint.exists(tmp_path / "partial")
    checkpoint.remove(tmp_path / "partial")
    assert not (tmp_path / "partial").exists()


def test_only_a_checkpoint_is_removed(tmp_path: Path) -> None:
    """A folder of images may have the same name."""
    checkpoint.write(tmp_path, tensors(), {})
    (tmp_path / "photo.png").write_text("mine")
    (tmp_path / "state-of-affairs.safetensors").write_text("mine")
    checkpoint.remove(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["photo.png", "state-of-affairs.safetensors"]


def test_a_tensor_file_is_the_one_that_safetensors_makes() -> None:
    from safetensors.torch import save

    generator = torch.Generator().manual_seed(0)
    types = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16)
    tensors = {f"of {dtype}": torch.randn(3, 4, generator=generator).to(dtype) for dtype in types}
    tensors |= {"naïve": torch.tensor(2.5), "empty": torch.zeros(0, 5, 0), "bool": torch.tensor([True, False])}
    tensors |= {"u8": torch.arange(3, dtype=torch.uint8), "i8": torch.arange(3, dtype=torch.int8)}
    turned = torch.randn(4, 6, generator=generator).T
    assert b"".join(checkpoint.tensor_file({**tensors, "turned": turned})) == save(
        {**tensors, "turned": turned.contiguous()}
    )
