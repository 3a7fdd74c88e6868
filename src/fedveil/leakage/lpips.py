"""LPIPS, the learned perceptual distance (Zhang et al., 2018): how different two pictures look to a trained network.

Both pictures go through an ImageNet network; at five depths their features, scaled to length one at every pixel, are
subtracted, squared, weighted per channel by the published heads (version 0.1), averaged over the pixels, and summed.

The weights are not part of fedveil. `load` reads them from the folder `weights/` under the data root and says how to
get what is missing: another network in its place would give other numbers under the same name.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal, get_args

import safetensors
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedveil.errors import FedveilError, unknown_name
from fedveil.tasks.fingerprint import fingerprint
from fedveil.tasks.sources import data_root
from fedveil.tensors import own_memory, read_safetensors

Net = Literal["vgg", "alex"]

# Of pixels in [-1, 1], from the authors' code.
SHIFT, SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)
TOGETHER = 2**18  # pixels in a batch: VGG-16 holds about a kilobyte per pixel
# Where an installed package keeps the heads. Both ship the same numbers.
PACKAGES = {"torchmetrics": "functional/image/lpips_models", "lpips": "weights/v0.1"}


@dataclass(frozen=True)
class Backbone:
    """What LPIPS needs to know of a network."""

    title: str
    torchvision: str  # its name there
    file: str  # the safetensors file of its features, under torchvision's names
    taps: tuple[int, ...]  # after which layers of `features` the pictures are compared
    smallest: int  # pixels that still reach the last of them


BACKBONES: dict[str, Backbone] = {
    "vgg": Backbone("VGG-16", "vgg16", "vgg16_imagenet_features.safetensors", (3, 8, 15, 22, 29), 16),
    "alex": Backbone("AlexNet", "alexnet", "alexnet_imagenet_features.safetensors", (1, 4, 7, 9, 11), 31),
}


def load(net: Net = "vgg", root: Path | None = None, *, enlarge: int = 64) -> Lpips:
    """The distance with the weights under the data root: `weights/` in `root`, FEDVEIL_DATA or ~/.cache/fedveil.

    net: VGG-16, as FedEM reports it, or AlexNet, which the authors of LPIPS advise for comparisons.
    enlarge: pictures whose shorter side has fewer pixels are enlarged to it, bilinearly. Many papers feed 32 pixels as
        they are (`enlarge=0`), where the last features of either network are a pixel or two.
    """
    if net not in get_args(Net):
        raise unknown_name("LPIPS network", net, get_args(Net))
    folder = data_root(root) / "weights"
    backbone = BACKBONES[net]
    path = folder / backbone.file
    if not path.is_file():
        raise FedveilError(
            f"lpips needs {backbone.title}'s ImageNet weights: no {backbone.file} in {folder}: point FEDVEIL_DATA to "
            "the folder that holds weights/, or make the file where torchvision is installed: "
            'python -c "import torchvision as t, safetensors.torch as s; '
            f"s.save_file(t.models.{backbone.torchvision}(weights='IMAGENET1K_V1').features"
            f".state_dict(prefix='features.'), '{path}')\""
        )
    stat = path.stat()
    model, heads = _network(net, folder, stat.st_mtime_ns, stat.st_size)
    return Lpips(net=net, model=model, heads=heads, enlarge=enlarge)


@lru_cache(maxsize=2)
def _network(net: Net, folder: Path, changed: int, size: int) -> tuple[Features, tuple[Tensor, ...]]:
    """The network and its heads, read once for as long as the file is the same."""
    backbone, path = BACKBONES[net], folder / BACKBONES[net].file
    with torch.device("meta"):  # no time for random weights, which the file's replace
        model = Features(convolutions(net), backbone.taps)
    model.to_empty(device="cpu")
    _fill(model, _read(path), path)
    return model.eval(), _heads(net, folder)


@dataclass(frozen=True, eq=False, repr=False)
class Lpips:
    """The distance itself: `distance(x, y)` of pixels in [0, 1], one value per pair. 0 for equal pictures."""

    net: Net
    model: Features
    heads: tuple[Tensor, ...]  # one weight per channel and depth
    enlarge: int = 64

    @property
    def content(self) -> str:
        """A hash of its weights and settings."""
        heads = [(f"head {depth}", head) for depth, head in enumerate(self.heads)]
        return f"{self!r} {fingerprint([*sorted(self.model.state_dict().items()), *heads])}"

    @torch.no_grad()
    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """LPIPS of pictures (N, C, H, W) in [0, 1], clamped to it; gray ones are taken as three equal channels.

        Computed in float32 on the CPU, where the published weights are; returned as float64 (N,).
        """
        if x.shape != y.shape or x.dim() != 4:
            raise ValueError(f"need two batches of the same shape (N, C, H, W): {tuple(x.shape)} and {tuple(y.shape)}")
        if x.shape[1] not in (1, 3):
            raise FedveilError(f"lpips takes pictures of 1 or 3 channels, got {x.shape[1]}")
        height, width = self._size(*x.shape[-2:])
        step = max(1, TOGETHER // (height * width))
        parts = [self._distance(*pair) for pair in zip(torch.split(x, step), torch.split(y, step), strict=True)]
        return torch.cat(parts) if len(x) else torch.zeros(0, dtype=torch.float64)

    def _size(self, height: int, width: int) -> tuple[int, int]:
        shorter, smallest = min(height, width), BACKBONES[self.net].smallest
        if shorter < self.enlarge:
            height, width = (round(side * self.enlarge / shorter) for side in (height, width))
        if min(height, width) < smallest:
            raise FedveilError(
                f"lpips with {BACKBONES[self.net].title} needs at least {smallest} pixels, got {height}×{width}: "
                "use enlarge=64"
            )
        return height, width

    def _distance(self, x: Tensor, y: Tensor) -> Tensor:
        total = torch.zeros(len(x), dtype=torch.float64)
        for one, other, head in zip(self.model(self._input(x)), self.model(self._input(y)), self.heads, strict=True):
            squared = (_unit(one) - _unit(other)).square()
            total += torch.einsum("nchw,c->nhw", squared, head).mean((1, 2)).double()
        return total

    def _input(self, pixels: Tensor) -> Tensor:
        images = pixels.detach().to("cpu", torch.float32).clamp(0, 1).expand(-1, 3, -1, -1) * 2 - 1
        size = self._size(*images.shape[-2:])
        if size != tuple(images.shape[-2:]):
            images = functional.interpolate(images, size, mode="bilinear", align_corners=False)
        return (images - torch.tensor(SHIFT).view(3, 1, 1)) / torch.tensor(SCALE).view(3, 1, 1)

    def __repr__(self) -> str:
        return f"Lpips(net={self.net!r}, enlarge={self.enlarge})"


class Features(nn.Module):
    """A network that gives its features at several depths. Its weights have torchvision's names."""

    def __init__(self, features: nn.Sequential, taps: tuple[int, ...]) -> None:
        super().__init__()
        self.features = features
        self.taps = taps
        self.requires_grad_(False)

    def forward(self, images: Tensor) -> list[Tensor]:
        found = []
        for number, layer in enumerate(self.features):
            images = layer(images)
            if number in self.taps:
                found.append(images)
        return found


def convolutions(net: Net) -> nn.Sequential:
    """The convolution layers of AlexNet or VGG-16 in torchvision's order, up to the last that LPIPS looks at."""
    if net == "alex":
        return nn.Sequential(
            nn.Conv2d(3, 64, 11, stride=4, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2),
            nn.Conv2d(64, 192, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2),
            nn.Conv2d(192, 384, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(384, 256, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(256, 256, 3, padding=1),
            nn.ReLU(),
        )
    layers: list[nn.Module] = []
    before = 3
    for stage, (after, count) in enumerate(((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))):
        layers += [nn.MaxPool2d(2)] if stage else []
        for _ in range(count):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU()]
            before = after
    return nn.Sequential(*layers)


def _unit(features: Tensor) -> Tensor:
    """Features of length one at every pixel; the small number is that of the authors' code."""
    return features / (features.square().sum(1, keepdim=True).sqrt() + 1e-10)


def _heads(net: Net, folder: Path) -> tuple[Tensor, ...]:
    """The published weight of each channel, from a file beside the network's or from an installed package."""
    own = folder / f"lpips_heads_{net}.safetensors"
    if own.is_file():
        path, found = own, _read(own)
    else:
        for package, place in PACKAGES.items():
            spec = importlib.util.find_spec(package)  # finds it without importing it
            paths = [Path(top) / place / f"{net}.pth" for top in (spec and spec.submodule_search_locations) or ()]
            if paths and paths[0].is_file():
                path, found = paths[0], _read_saved(paths[0])
                break
        else:
            raise FedveilError(
                f"lpips needs its linear heads: no {own.name} in {folder}: pip install torchmetrics, which ships them, "
                f"or save the `lpips` package's weights/v0.1/{net}.pth as that file"
            )
    channels = [layer.out_channels for layer in _tapped(net)]
    names = [f"lin{depth}.model.1.weight" for depth in range(len(channels))]
    for name, count in zip(names, channels, strict=True):
        shape = tuple(found[name].shape) if name in found else None
        if shape != (1, count, 1, 1):
            raise FedveilError(f"{path} does not hold LPIPS's heads: {name} should be (1, {count}, 1, 1), is {shape}")
        _check_finite(found[name], name, path)
    return tuple(found[name].flatten().float() for name in names)


def _tapped(net: Net) -> list[nn.Conv2d]:
    """The convolutions whose rectified outputs are compared."""
    with torch.device("meta"):
        layers = convolutions(net)
    return [layer for tap in BACKBONES[net].taps if isinstance(layer := layers[tap - 1], nn.Conv2d)]


def _fill(model: Features, found: Mapping[str, Tensor], path: Path) -> None:
    wanted = model.state_dict()
    for name, value in wanted.items():
        shape = tuple(found[name].shape) if name in found else None
        if shape != tuple(value.shape):
            raise FedveilError(f"{path} does not fit: {name} should be {tuple(value.shape)}, is {shape}")
        _check_finite(found[name], name, path)
    model.load_state_dict({name: found[name] for name in wanted})


def _check_finite(tensor: Tensor, name: str, path: Path) -> None:
    if not tensor.is_floating_point() or not bool(torch.isfinite(tensor.float()).all()):
        raise FedveilError(f"{path} is damaged: {name} should be finite floating numbers")


def _read_saved(path: Path) -> dict[str, Tensor]:
    """Tensors by name, as torch.save writes them; nothing else is read and nothing is run."""
    try:
        # From memory: a file is first tried as a tar archive, which torch unpacks elsewhere, and torch asks it for as
        # much at once as a number in it says.
        found = torch.load(io.BytesIO(path.read_bytes()), map_location="cpu", weights_only=True)
        if isinstance(found, dict) and all(isinstance(value, Tensor) for value in found.values()):
            return {name: own_memory(tensor) for name, tensor in found.items()}
    except Exception as error:  # a damaged pickle or zip can fail in any way
        raise FedveilError(f"{path} cannot be read ({type(error).__name__}): install its package again") from None
    raise FedveilError(f"{path} does not hold tensors by name: install its package again")


def _read(path: Path) -> dict[str, Tensor]:
    try:
        return read_safetensors(path)[1]
    except (OSError, safetensors.SafetensorError) as error:
        raise FedveilError(f"{path} cannot be read: {str(error).partition(chr(10))[0]}") from None
