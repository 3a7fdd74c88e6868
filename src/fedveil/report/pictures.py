"""Images as PNG inside the page: exact pixels, enlarged by the browser without smoothing."""

from __future__ import annotations

import base64
from io import BytesIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image

# Longer sides are averaged down: the page shows about 100 pixels, and noise does not compress.
LARGEST_SIDE = 128


def data_uri(picture: NDArray[np.float32]) -> str:
    """A picture (channels, h, w) in [0, 1] as a `data:` address.

    One channel is gray, three are red, green and blue; any other number is averaged to gray. NaN is drawn
    gray, as it is scored.
    """
    clean = np.clip(np.nan_to_num(picture.astype(np.float64), nan=0.5, posinf=1.0, neginf=0.0), 0.0, 1.0)
    levels = clean.transpose(1, 2, 0) if len(clean) == 3 else clean.mean(axis=0)
    image = Image.fromarray(np.round(levels * 255).astype(np.uint8))
    factor = -(-max(image.size) // LARGEST_SIDE)
    if factor > 1:
        image = image.reduce(factor)
    file = BytesIO()
    image.save(file, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode("ascii")


def remarks(pictures: NDArray[np.float32]) -> list[str]:
    """What a reader must know to read the pictures rightly."""
    channels, *sides = pictures.shape[1:]
    found = []
    if channels not in (1, 3):
        found.append(f"The images have {channels} channels; their mean is shown.")
    if max(sides) > LARGEST_SIDE:
        found.append(f"The images are {sides[1]} × {sides[0]} pixels and are shown reduced.")
    return found
