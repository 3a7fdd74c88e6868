"""Tensors go into files and come back: any layout, completely or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from fedveil.errors import FedveilError
from fedveil.tensors import read_safetensors, write_safetensors


def test_rows_of_one_tensor_strides_scalars_and_arrays_come_back(tmp_path: Path) -> None:
    stacked = torch.arange(12.0).reshape(3, 4)
    given = {
        "first": stacked[0],
        "rest": stacked[1:],
        "across": stacked.T,
        "scalar": torch.tensor(3),
        "half": torch.ones(3, dtype=torch.bfloat16, requires_grad=True),
        "array": np.arange(6, dtype=np.int64)[::2],
    }
    write_safetensors(tmp_path / "a.safetensors", given, {"key": "value"})
    metadata, found = read_safetensors(tmp_path / "a.safetensors")
    assert metadata == {"key": "value"}
    assert found.keys() == given.keys()
    for name, value in given.items():
        expected = torch.as_tensor(np.ascontiguousarray(value)) if isinstance(value, np.ndarray) else value.detach()
        assert found[name].dtype == expected.dtype
        assert torch.equal(found[name], expected)
        assert found[name].data_ptr() % 64 == 0
    assert os.listdir(tmp_path) == ["a.safetensors"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.safetensors"
    write_safetensors(path, {"x": torch.zeros(1)})
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(FedveilError, match="No space left on device"):
        write_safetensors(path, {"x": torch.ones(1)})
    assert torch.equal(read_safetensors(path)[1]["x"], torch.zeros(1))
    assert os.listdir(tmp_path) == ["a.safetensors"]


def test_metadata_can_refuse_a_file_before_its_tensors_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_safetensors(tmp_path / "a.safetensors", {"x": torch.zeros(1)}, {"format": "other"})

    def refuse(metadata: dict[str, str]) -> None:
        raise FedveilError(f"not a file of ours: {metadata['format']}")

    monkeypatch.setattr("fedveil.tensors.own_memory", lambda _: pytest.fail("a tensor was read"))
    with pytest.raises(FedveilError, match="not a file of ours: other"):
        read_safetensors(tmp_path / "a.safetensors", refuse)
