"""Picture files (JPEG, PNG, WebP, BMP) as arrays of one size."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from fedveil.errors import FedveilError, one_line

FORMATS = ("JPEG", "PNG", "WEBP", "BMP")
SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp"})
LIMIT = 2**26  # pixels; a picture that unpacks to more is refused before it is unpacked
FILE_LIMIT = 2**28  # bytes
SMALL = 2**22  # pixels; smaller pictures may be blank, and their files tiny
DENSEST = 8 * 1032  # most pixels per byte of a larger file: one bit per pixel, at the best rate of deflate


def read_picture(path: Path, size: int, channels: int) -> NDArray[np.uint8]:
    """The middle of a picture, (channels, size, size): its short side resized to `size`, the long one cropped."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow only warns of large pictures; the limit below refuses them
            if path.stat().st_size > FILE_LIMIT:
                raise FedveilError(f"{path}: larger than {FILE_LIMIT:,} bytes: make the picture smaller")
            # From memory, because from a file Pillow reads as much at once as a number in it says.
            content = path.read_bytes()
            with Image.open(io.BytesIO(content), formats=FORMATS) as image:
                if image.width * image.height > LIMIT:
                    raise FedveilError(_too_large(path, f"{image.width} × {image.height}"))
                if image.width * image.height > max(SMALL, len(content) * DENSEST):
                    found = f"{image.width} × {image.height} pixels"
                    raise FedveilError(f"{path}: promises {found}, more than the file can hold; get it again")
                colors = image.convert("L" if channels == 1 else "RGB")
    except Image.DecompressionBombError:
        raise FedveilError(_too_large(path, "far more")) from None
    except UnidentifiedImageError:
        raise FedveilError(f"{path}: not a picture in one of the formats {', '.join(FORMATS)}") from None
    except FedveilError:
        raise
    except Exception as error:  # Pillow's decoders raise OSError, SyntaxError, ValueError and others on damaged files
        raise FedveilError(f"{path}: cannot read this picture: {one_line(error)}") from None
    pixels: NDArray[Any] = np.asarray(_middle(colors, size))
    return np.ascontiguousarray(pixels[None] if channels == 1 else pixels.transpose(2, 0, 1))


def _middle(image: Image.Image, size: int) -> Image.Image:
    """Crop the square in the middle and resize it in one step, since its edges may lie between pixels."""
    side = min(image.size)
    left, top = (image.width - side) / 2, (image.height - side) / 2
    box = (left, top, left + side, top + side)
    if image.size == (size, size):
        return image
    return image.resize((size, size), Image.Resampling.BILINEAR, box=box)


def _too_large(path: Path, found: str) -> str:
    return f"{path}: {found} pixels, more than the {LIMIT:,} allowed: make the picture smaller"
