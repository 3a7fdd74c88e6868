"""Images as PNG inside the page: exact pixels; small ones are enlarged by the browser without smoothing."""

from __future__ import annotations

import base64
import math
from io import BytesIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image

# Longer sides are averaged down: a column of the page has about 200 pixels, and noise does not compress.
LARGEST_SIDE = 256
THUMBNAIL = 96  # pixels of a small picture's side on the page; longer sides get all the room that a column has
MOST_IMAGES = 16  # that are shown, one line each
FEWEST_IMAGES = 2  # the same, however much room they take
MOST_BYTES = 4_500_000  # of uncompressed pixels in all lines; as text in a page they take a third more


def are_large(shape: tuple[int, ...]) -> bool:
    """Whether pictures of this shape (channels, h, w) lose by being shown as thumbnails."""
    return max(shape[1:]) > THUMBNAIL


def most_images(shape: tuple[int, ...], columns: int) -> int:
    """How many images of this shape (channels, h, w), of so many pictures each, a page has room for."""
    channels, *sides = shape
    factor = -(-max(sides) // LARGEST_SIDE)
    size = (3 if channels == 3 else 1) * math.prod(-(-side // factor) for side in sides)
    return max(FEWEST_IMAGES, min(MOST_IMAGES, MOST_BYTES // (size * columns)))


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
        factor = -(-max(sides) // LARGEST_SIDE)
        found.append(f"The images are {sides[1]} × {sides[0]} pixels and are shown {factor} times smaller.")
    return found
