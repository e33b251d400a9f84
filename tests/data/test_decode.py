from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from efcil.data.decode import Encoded, Fit, decode_image, decode_into, short_side
from efcil.errors import DataError

PIXELS = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)


def encode(image: Image.Image, kind: str = "PNG", **extra: object) -> Encoded:
    stream = io.BytesIO()
    image.save(stream, kind, **extra)
    return Encoded(stream.getvalue(), "The test image")


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "PPM"])
def test_lossless_images_come_back_exactly(kind: str) -> None:
    assert np.array_equal(decode_image(encode(Image.fromarray(PIXELS), kind), Fit(8)), PIXELS)


def test_lossless_webp_comes_back_exactly() -> None:
    assert np.array_equal(decode_image(encode(Image.fromarray(PIXELS), "WEBP", lossless=True), Fit(8)), PIXELS)


def test_greyscale_is_repeated_over_the_channels() -> None:
    grey = PIXELS[..., 0]
    assert np.array_equal(decode_image(encode(Image.fromarray(grey)), Fit(8)), np.repeat(grey[..., None], 3, axis=2))


def test_black_and_white_bits_become_0_and_255() -> None:
    bits = PIXELS[..., 0] > 127
    assert np.array_equal(decode_image(encode(Image.fromarray(bits)), Fit(8))[..., 1], bits * 255)


def test_sixteen_bits_are_scaled_not_clipped() -> None:
    wide = np.array([[0, 257], [32896, 65535]], dtype=np.uint16)
    assert decode_image(encode(Image.fromarray(wide)), Fit(2))[..., 0].tolist() == [[0, 1], [128, 255]]
    assert decode_image(encode(Image.fromarray(wide), "TIFF"), Fit(2))[..., 2].tolist() == [[0, 1], [128, 255]]


def test_palette_colours_are_looked_up() -> None:
    image = Image.new("P", (4, 4), 1)
    image.putpalette([0, 0, 0, 10, 200, 30])
    assert decode_image(encode(image), Fit(4))[2, 3].tolist() == [10, 200, 30]


def test_transparency_is_composited_onto_white() -> None:
    image = Image.new("RGBA", (2, 2), (255, 0, 0, 255))
    image.putpixel((0, 0), (0, 0, 0, 0))
    image.putpixel((1, 0), (0, 0, 0, 51))
    decoded = decode_image(encode(image), Fit(2))
    assert decoded[0, 0].tolist() == [255, 255, 255]
    assert decoded[0, 1].tolist() == [204, 204, 204]
    assert decoded[1, 1].tolist() == [255, 0, 0]


def test_a_transparent_palette_colour_becomes_white() -> None:
    image = Image.new("P", (2, 2), 0)
    image.putpalette([10, 20, 30, 40, 50, 60])
    image.putpixel((1, 1), 1)
    decoded = decode_image(encode(image, transparency=0), Fit(2))
    assert decoded[0, 0].tolist() == [255, 255, 255]
    assert decoded[1, 1].tolist() == [40, 50, 60]


def test_cmyk_is_converted() -> None:
    decoded = decode_image(encode(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG", quality=95), Fit(8))
    assert decoded[4, 4, 0] > 245
    assert decoded[4, 4, 1:].max() < 10


def test_floating_point_images_are_refused() -> None:
    with pytest.raises(DataError, match=r"The test image has floating-point pixels"):
        decode_image(encode(Image.fromarray(np.ones((4, 4), np.float32)), "TIFF"), Fit(4))


def test_exif_orientation_is_honoured_only_when_asked() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be shown turned by a quarter, clockwise
    encoded = encode(Image.fromarray(PIXELS), exif=exif)
    assert np.array_equal(decode_image(encoded, Fit(8)), PIXELS)
    assert np.array_equal(decode_image(encoded, Fit(8, orient=True)), np.rot90(PIXELS, -1))


@pytest.mark.parametrize("turned", [False, True])
def test_resizing_is_that_of_the_short_side_followed_by_a_centre_crop(turned: bool) -> None:
    pixels = np.random.default_rng(2).integers(0, 256, (20, 60, 3), dtype=np.uint8)
    whole, box = (30, 10), (10, 0, 20, 10)
    if turned:
        pixels, whole, box = pixels.transpose(1, 0, 2).copy(), (10, 30), (0, 10, 10, 20)
    expected = Image.fromarray(pixels).resize(whole, Image.Resampling.BILINEAR).crop(box)
    decoded = decode_image(encode(Image.fromarray(pixels)), Fit(10, resize=True))
    assert decoded.shape == (10, 10, 3)
    assert abs(decoded.astype(int) - np.asarray(expected).astype(int)).max() <= 1


def test_shrinking_is_antialiased() -> None:
    stripes = np.zeros((64, 64, 3), np.uint8)
    stripes[:, ::2] = 255
    decoded = decode_image(encode(Image.fromarray(stripes)), Fit(8, resize=True))
    assert abs(decoded.astype(int) - 128).max() <= 12  # every eighth column alone would give 0 or 255


def test_small_images_are_enlarged() -> None:
    assert decode_image(encode(Image.new("RGB", (3, 5), (9, 8, 7))), Fit(16, resize=True))[15, 15].tolist() == [9, 8, 7]


def test_another_size_is_refused_by_name() -> None:
    with pytest.raises(DataError, match=r"The test image is 6 x 4 pixels, but 8 x 8 is expected"):
        decode_image(encode(Image.new("RGB", (6, 4))), Fit(8))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_truncated_images_are_refused_by_name(kind: str) -> None:
    noise = np.random.default_rng(1).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    content = encode(Image.fromarray(noise), kind).content
    assert isinstance(content, bytes)
    with pytest.raises(DataError, match=r"The test image cannot be decoded"):
        decode_image(Encoded(content[: len(content) // 2], "The test image"), Fit(64))


@pytest.mark.parametrize(
    "content", [b"", b"not an image", b"\x89PNG\r\n\x1a\n" + b"\0" * 40, b"%!PS-Adobe-3.0 EPSF-3.0\n"]
)
def test_what_is_no_image_is_refused_by_name(content: bytes) -> None:
    with pytest.raises(DataError, match=r"The test image cannot be decoded"):
        decode_image(Encoded(content, "The test image"), Fit(8))
    with pytest.raises(DataError, match=r"The test image cannot be read"):
        short_side(Encoded(content[:8], "The test image"))


def test_decompression_bombs_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 20)
    with pytest.raises(DataError, match=r"The test image is refused: .*decompression bomb"):
        decode_image(encode(Image.fromarray(PIXELS)), Fit(8))


def test_missing_files_are_named(tmp_path: Path) -> None:
    file = tmp_path / "gone.png"
    with pytest.raises(DataError, match=r"gone\.png"):
        decode_image(Encoded(file, str(file)), Fit(8))


def test_short_side(tmp_path: Path) -> None:
    Image.new("L", (30, 20)).save(tmp_path / "a.png")
    assert short_side(Encoded(tmp_path / "a.png", "a")) == 20


@pytest.mark.parametrize("workers", [None, 1, 3])
def test_many_images_keep_their_places(workers: int | None) -> None:
    encoded = [encode(Image.new("RGB", (2, 2), (i % 256, i // 256, 0))) for i in range(300)]
    target = np.zeros((300, 2, 2, 3), np.uint8)
    decode_into(target, encoded, Fit(2), workers)
    assert (target[:, 1, 1, 0] + 256 * target[:, 0, 1, 1].astype(int)).tolist() == list(range(300))


def test_of_several_broken_images_the_first_is_explained_and_all_are_named() -> None:
    good = encode(Image.new("RGB", (2, 2)))
    encoded = [good] * 600
    for index in (550, 140, 300):
        encoded[index] = Encoded(b"broken", f"Image {index}")
    with pytest.raises(
        DataError, match=r"^Image 140 cannot.* 3 images cannot be used: Image 140, Image 300, Image 550\.$"
    ):
        decode_into(np.empty((600, 2, 2, 3), np.uint8), encoded, Fit(2), 4)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"The test image does not exist\. Check the path\."):
        decode_image(Encoded(tmp_path / "none.png", "The test image"), Fit(8))
