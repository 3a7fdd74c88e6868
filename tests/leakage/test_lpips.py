"""LPIPS against its published code: re-done here with weights drawn at random, and stored values of the real ones.

The stored values were computed once by the package `lpips` 0.1.4 itself on torchvision's AlexNet, filled with the same
weights file (small pictures enlarged beforehand); they agreed with ours to 1e-7.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from torch import Tensor
from torch.nn import functional

from fedveil.errors import FedveilError
from fedveil.leakage import lpips
from fedveil.leakage.lpips import Net, load

SHARED = Path(__file__).parents[2].parent / "shared" / "data"
# (output, input, kernel) of every convolution, its place among torchvision's features, and its stride and padding
LAYERS = {
    "alex": [
        *[(64, 3, 11, 0, 4, 2), (192, 64, 5, 3, 1, 2), (384, 192, 3, 6, 1, 1), (256, 384, 3, 8, 1, 1)],
        (256, 256, 3, 10, 1, 1),
    ],
    "vgg": [
        *[(64, 3, 3, 0, 1, 1), (64, 64, 3, 2, 1, 1), (128, 64, 3, 5, 1, 1), (128, 128, 3, 7, 1, 1)],
        *[(256, 128, 3, 10, 1, 1), (256, 256, 3, 12, 1, 1), (256, 256, 3, 14, 1, 1), (512, 256, 3, 17, 1, 1)],
        *[(512, 512, 3, place, 1, 1) for place in (19, 21, 24, 26, 28)],
    ],
}
POOLS = {"alex": {3: 3, 6: 3}, "vgg": {5: 2, 10: 2, 17: 2, 24: 2}}  # before the convolution at this place: its kernel
TAPS = {"alex": (0, 3, 6, 8, 10), "vgg": (2, 7, 14, 21, 28)}


def waves(count: int, channels: int, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Pairs of pictures that are the same everywhere."""
    row, column = torch.arange(height).view(1, 1, -1, 1) / height, torch.arange(width).view(1, 1, 1, -1) / width
    number = torch.arange(1, count * channels + 1).view(count, channels, 1, 1)
    x = 0.5 + 0.5 * torch.sin(6 * row * number + 9 * column)
    return x, (x + 0.3 * torch.cos(40 * row - 31 * column * number)).clamp(0, 1)


def drawn(net: Net, root: Path) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Random weights and heads, written as files."""
    random = torch.Generator().manual_seed(0)
    weights, heads = {}, {}
    for after, before, kernel, place, _, _ in LAYERS[net]:
        scale = (2 / (before * kernel**2)) ** 0.5
        weights[f"features.{place}.weight"] = scale * torch.randn(after, before, kernel, kernel, generator=random)
        weights[f"features.{place}.bias"] = 0.1 * torch.randn(after, generator=random)
        if place in TAPS[net]:
            heads[f"lin{len(heads)}.model.1.weight"] = torch.rand(1, after, 1, 1, generator=random)
    name = {"alex": "alexnet", "vgg": "vgg16"}[net]
    (root / "weights").mkdir(parents=True, exist_ok=True)
    extra = {"classifier.6.bias": torch.zeros(3)}  # a whole network's file will do as well
    safetensors.torch.save_file(weights | extra, root / "weights" / f"{name}_imagenet_features.safetensors")
    safetensors.torch.save_file(heads, root / "weights" / f"lpips_heads_{net}.safetensors")
    return weights, list(heads.values())


def features(net: Net, weights: dict[str, Tensor], pixels: Tensor) -> list[Tensor]:
    shift, scale = torch.tensor([-0.030, -0.088, -0.188]), torch.tensor([0.458, 0.448, 0.450])
    values = (2 * pixels - 1 - shift[:, None, None]) / scale[:, None, None]
    found = []
    for _, _, _, place, stride, padding in LAYERS[net]:
        if place in POOLS[net]:
            values = functional.max_pool2d(values, POOLS[net][place], stride=2)
        weight, bias = weights[f"features.{place}.weight"], weights[f"features.{place}.bias"]
        values = functional.conv2d(values, weight, bias, stride=stride, padding=padding).relu()
        if place in TAPS[net]:
            found.append(values / (values.norm(dim=1, keepdim=True) + 1e-10))
    return found


@pytest.mark.parametrize("net, shape", [("alex", (2, 3, 64, 80)), ("alex", (1, 3, 31, 31)), ("vgg", (2, 3, 32, 48))])
def test_equals_the_published_computation(net: Net, shape: tuple[int, int, int, int], tmp_path: Path) -> None:
    weights, heads = drawn(net, tmp_path)
    x, y = waves(*shape)
    pairs = zip(features(net, weights, x), features(net, weights, y), heads, strict=True)
    expected = sum(functional.conv2d((a - b) ** 2, head).mean((2, 3)).flatten() for a, b, head in pairs)
    found = load(net, tmp_path, enlarge=0)(x, y)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found.float(), expected, rtol=1e-4, atol=1e-6)


def test_small_pictures_are_enlarged_and_gray_ones_get_three_channels(tmp_path: Path) -> None:
    drawn("alex", tmp_path)
    x, y = waves(3, 1, 14, 28)
    large = [
        functional.interpolate(each, (64, 128), mode="bilinear", align_corners=False).repeat(1, 3, 1, 1)
        for each in (x, y)
    ]
    torch.testing.assert_close(load("alex", tmp_path)(x, y), load("alex", tmp_path, enlarge=0)(*large))
    with pytest.raises(FedveilError, match="needs at least 31 pixels, got 14×28: use enlarge=64"):
        load("alex", tmp_path, enlarge=0)(x, y)
    with pytest.raises(FedveilError, match="1 or 3 channels, got 2"):
        load("alex", tmp_path)(*waves(1, 2, 32, 32))


def test_large_batches_go_through_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn("alex", tmp_path)
    distance = load("alex", tmp_path)
    x, y = waves(5, 1, 64, 64)
    whole = distance(x, y)
    monkeypatch.setattr(lpips, "TOGETHER", 2 * 64 * 64)
    torch.testing.assert_close(distance(x, y), whole)
    assert distance(x[:0], y[:0]).shape == (0,)


def test_is_a_distance_of_pixels(tmp_path: Path) -> None:
    drawn("vgg", tmp_path)
    distance = load("vgg", tmp_path)
    x, y = waves(2, 3, 32, 32)
    assert distance(x, x).tolist() == [0, 0]
    torch.testing.assert_close(distance(x, y), distance(y, x))
    torch.testing.assert_close(distance(5 * x - 2, y), distance((5 * x - 2).clamp(0, 1), y))


def test_missing_files_are_named_with_the_way_to_get_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FedveilError, match=r"VGG-16.*no vgg16_imagenet_features.safetensors in .*FEDVEIL_DATA.*vgg16"):
        load("vgg", tmp_path)
    drawn("alex", tmp_path)
    (tmp_path / "weights" / "lpips_heads_alex.safetensors").unlink()
    monkeypatch.setattr(lpips, "PACKAGES", {"no_such_package": "weights"})
    with pytest.raises(FedveilError, match=r"no lpips_heads_alex.safetensors in .*pip install torchmetrics"):
        load("alex", tmp_path)
    with pytest.raises(FedveilError, match="unknown LPIPS network 'vgg19'"):
        load("vgg19", tmp_path)  # type: ignore[arg-type]


def test_wrong_files_are_refused(tmp_path: Path) -> None:
    weights, _ = drawn("alex", tmp_path)
    backbone = tmp_path / "weights" / "alexnet_imagenet_features.safetensors"
    heads = tmp_path / "weights" / "lpips_heads_alex.safetensors"
    safetensors.torch.save_file({"lin0.model.1.weight": torch.ones(1, 64, 1, 1)}, heads)
    with pytest.raises(FedveilError, match=r"lin1.model.1.weight should be \(1, 192, 1, 1\), is None"):
        load("alex", tmp_path)
    safetensors.torch.save_file(weights | {"features.3.bias": torch.zeros(5)}, backbone)
    with pytest.raises(FedveilError, match=r"features.3.bias should be \(192,\), is \(5,\)"):
        load("alex", tmp_path)
    backbone.write_bytes(b"not a safetensors file")
    with pytest.raises(FedveilError, match="cannot be read"):
        load("alex", tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("part", ["alexnet_imagenet_features", "lpips_heads_alex"])
def test_weights_that_are_no_numbers_are_refused(tmp_path: Path, part: str, value: float) -> None:
    drawn("alex", tmp_path)
    path = tmp_path / "weights" / f"{part}.safetensors"
    held = safetensors.torch.load_file(path)
    name = next(name for name in sorted(held) if not name.startswith("classifier"))
    held[name].view(-1)[0] = value
    safetensors.torch.save_file(held, path)
    with pytest.raises(FedveilError, match="should be finite"):
        load("alex", tmp_path)


class MakesFolder:
    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("kind", ["runs code", "damaged", "no tensors"])
def test_a_packages_file_runs_nothing_and_gets_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    drawn("alex", tmp_path)
    (tmp_path / "weights" / "lpips_heads_alex.safetensors").unlink()
    path, mark = tmp_path / "alex.pth", tmp_path / "ran"
    if kind == "damaged":
        path.write_bytes(b"PK\x03\x04damaged")
    else:
        torch.save({"lin0.model.1.weight": MakesFolder(mark) if kind == "runs code" else 1}, path)
    package = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: package)
    monkeypatch.setattr(lpips, "PACKAGES", {"package": "."})
    with pytest.raises(FedveilError, match="install its package again") as caught:
        load("alex", tmp_path)
    assert str(caught.value).isprintable()
    assert not mark.exists()


@pytest.fixture
def real() -> lpips.Lpips:
    """AlexNet with the published weights, or a skip."""
    try:
        return load("alex", SHARED)
    except FedveilError as error:
        pytest.skip(f"the real weights are not here: {error}")


def test_equals_the_lpips_package(real: lpips.Lpips) -> None:
    colored, gray, small = waves(2, 3, 64, 64), waves(2, 1, 28, 28), waves(2, 3, 32, 32)
    assert real(*colored).tolist() == pytest.approx([0.3677931, 0.2184148], abs=2e-6)
    assert real(*gray).tolist() == pytest.approx([0.6140461, 0.7054882], abs=2e-6)
    assert real(*small).tolist() == pytest.approx([0.2776062, 0.1090368], abs=2e-6)
    as_it_is = load("alex", SHARED, enlarge=0)
    assert as_it_is(*small).tolist() == pytest.approx([0.0468004, 0.0405189], abs=2e-6)
    assert as_it_is(*waves(1, 1, 96, 70)).tolist() == pytest.approx([0.7100487], abs=2e-6)


def test_grows_with_noise(real: lpips.Lpips) -> None:
    x, _ = waves(1, 3, 64, 64)
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    found = [real(x, x + scale * noise).item() for scale in (0.0, 0.02, 0.1, 0.5)]
    assert found[0] == 0
    assert found == sorted(found)
    assert found[3] > 10 * found[1] > 0
