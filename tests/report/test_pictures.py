"""Pictures in the report: small ones as exact thumbnails, large ones large, and no more than a page has room for."""

from __future__ import annotations

import base64
import re
from io import BytesIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fedveil.auditing.result import Images
from fedveil.report import render
from fedveil.report.pictures import LARGEST_SIDE, MOST_IMAGES, THUMBNAIL, are_large, most_images

from .report_samples import large


def decoded(uri: str) -> Image.Image:
    """A picture of the page."""
    return Image.open(BytesIO(base64.b64decode(uri.removeprefix("data:image/png;base64,"))))


@pytest.mark.parametrize("side, shown", [(28, 28), (96, 96), (97, 97), (224, 224), (256, 256), (300, 150), (512, 256)])
def test_large_pictures_are_shown_large_and_small_ones_as_thumbnails(side: int, shown: int) -> None:
    page = render(*large(side, count=3))
    pictures = re.findall(r'<img src="(data:[^"]+)"', page)
    assert {decoded(picture).size for picture in pictures} == {(shown, shown)}
    assert ('<table class="pictures large">' in page) == ('<figure class="four large">' in page) == (side > THUMBNAIL)
    assert ('<table class="pictures">' in page) == ('<figure class="four">' in page) == (side <= THUMBNAIL)
    reduced = f"The images are {side} × {side} pixels and are shown 2 times smaller."
    assert (reduced in page) == (side > LARGEST_SIDE)


def test_a_page_has_room_for_fewer_large_pictures_and_says_so() -> None:
    line = '<th scope="row"><div class="cell">'
    assert render(*large(224, count=20)).count(line) == MOST_IMAGES  # gray ones take a third of the room
    colors = {side: most_images((3, side, side), 5) for side in (28, 128, 224, 256, 1024)}
    assert colors == {28: 16, 128: 16, 224: 5, 256: 4, 1024: 4}
    assert most_images((3, 256, 256), 1000) == 2
    result, images = large(224, count=20)
    color = Images(images.originals.repeat(3, axis=1), images.labels)
    for key, pictures in images.reconstructions.items():
        color.reconstructions[key] = pictures.repeat(3, axis=1)
    page = render(result, color)
    assert "most leaked of 20 images, worst first" in page
    assert page.count(line) == most_images((3, 224, 224), 5)


@settings(max_examples=60, deadline=None)
@given(channels=st.integers(1, 6), height=st.integers(1, 2000), width=st.integers(1, 2000), columns=st.integers(2, 6))
def test_lines_of_pictures_fit_the_page(channels: int, height: int, width: int, columns: int) -> None:
    shape = (channels, height, width)
    factor = -(-max(height, width) // LARGEST_SIDE)
    size = (3 if channels == 3 else 1) * -(-height // factor) * -(-width // factor)
    most = most_images(shape, columns)
    assert 2 <= most <= MOST_IMAGES
    assert most * columns * size <= 4_500_000
    assert most == MOST_IMAGES or (most + 1) * columns * size > 4_500_000
    assert are_large(shape) == (max(height, width) > THUMBNAIL)
