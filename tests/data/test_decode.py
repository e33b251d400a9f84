from __future__ import annotations

import contextlib
import io
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from efcil.data import decode
from efcil.data.decode import Encoded, Fit, decode_image, decode_intact, decode_into, fit_image, short_side
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


def photograph(width: int, height: int) -> np.ndarray:
    """Return smooth shapes with fine detail, different in every corner."""
    draw = np.random.default_rng(3)
    coarse = Image.fromarray(draw.integers(0, 256, (6, 8, 3), dtype=np.uint8)).resize((width, height), Image.BICUBIC)
    return np.clip(np.asarray(coarse) + draw.normal(0, 6, (height, width, 3)), 0, 255).astype(np.uint8)


def differences(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    return abs(one.astype(int) - other.astype(int))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("size", [(400, 300), (307, 411), (1005, 203)])
def test_reduced_images_look_like_resized_ones(kind: str, size: tuple[int, int]) -> None:
    encoded = encode(Image.fromarray(photograph(*size)), kind)
    exact = decode_image(encoded, Fit(16, resize=True))
    found = differences(decode_image(encoded, Fit(16, resize=True, reduce=True)), exact)
    assert 0 < found.mean() < 1.5
    assert found.max() <= 12


def test_a_reduced_jpeg_is_decoded_small(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes, to_rgb = [], decode._to_rgb

    def watched(image: Image.Image) -> Image.Image:
        shapes.append(image.size)
        return to_rgb(image)

    monkeypatch.setattr(decode, "_to_rgb", watched)
    encoded = encode(Image.fromarray(photograph(1001, 757)), "JPEG")
    for size in (16, 62, 64, 63 * 4, 1000):
        decode_image(encoded, Fit(size, resize=True, reduce=True))
    decode_image(encoded, Fit(16, resize=True))
    # 757 / 8 is at least 1.5 * 62, but not 1.5 * 64.
    assert shapes == [(126, 95), (126, 95), (251, 190), (501, 379), (1001, 757), (1001, 757)]


def test_without_being_asked_nothing_is_reduced() -> None:
    pixels = photograph(400, 300)
    plain = Image.open(io.BytesIO(content_of(encode(Image.fromarray(pixels), "JPEG"))))
    expected = plain.resize((16, 16), Image.Resampling.BILINEAR, box=(50, 0, 350, 300))
    encoded = encode(Image.fromarray(pixels), "JPEG")
    assert np.array_equal(decode_image(encoded, Fit(16, resize=True)), np.asarray(expected))


def content_of(encoded: Encoded) -> bytes:
    assert isinstance(encoded.content, bytes)
    return encoded.content


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_reduced_images_are_turned_as_others_are(kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    encoded = encode(Image.fromarray(photograph(413, 301)), kind, exif=exif)
    exact = decode_image(encoded, Fit(16, resize=True, orient=True))
    found = differences(decode_image(encoded, Fit(16, resize=True, orient=True, reduce=True)), exact)
    assert found.max() <= 12
    still = decode_image(encoded, Fit(16, resize=True, reduce=True))
    if kind != "TIFF":  # whose decoder turns it in any case
        assert (differences(still, exact).max() > 40) == (orientation != 1)


@pytest.mark.parametrize(("mode", "colour"), [("L", 77), ("CMYK", (0, 200, 100, 30))])
def test_reduced_images_keep_their_colour_space(mode: str, colour: object) -> None:
    encoded = encode(Image.new(mode, (400, 300), colour), "JPEG", quality=95)
    exact = decode_image(encoded, Fit(16, resize=True))
    assert differences(decode_image(encoded, Fit(16, resize=True, reduce=True)), exact).max() <= 2


@pytest.mark.parametrize("orientation", range(1, 9))
def test_reduced_images_keep_their_place(orientation: int) -> None:
    # At an eighth, the last of 50 columns shows a single one of 393; taken for whole, it would move the ramp by 7.
    ramp, exif = np.add.outer(*[np.linspace(0, 127, 393)] * 2).round().astype(np.uint8), Image.Exif()
    exif[0x0112] = orientation
    for kind in ("JPEG", "PNG"):
        encoded = encode(Image.fromarray(ramp), kind, quality=95, exif=exif)
        exact = decode_image(encoded, Fit(25, resize=True, orient=True))
        found = differences(decode_image(encoded, Fit(25, resize=True, orient=True, reduce=True)), exact)
        assert found[1:-1, 1:-1].max() <= 1


def test_an_image_in_memory_gives_nearly_what_its_file_gives() -> None:
    image, fit = Image.fromarray(photograph(1000, 750)), Fit(32, resize=True, orient=True, reduce=True)
    from_memory = fit_image(image, fit)
    assert np.array_equal(decode_image(encode(image), fit), from_memory)
    assert differences(decode_image(encode(image, "JPEG", quality=95), fit), from_memory).max() <= 4


def test_truncated_images_are_refused_when_reduced() -> None:
    content = content_of(encode(Image.fromarray(photograph(400, 300)), "JPEG"))
    with pytest.raises(DataError, match=r"The test image cannot be decoded"):
        decode_image(Encoded(content[: len(content) // 2], "The test image"), Fit(16, resize=True, reduce=True))


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


def test_an_empty_file_is_called_empty(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").touch()
    for content in (b"", tmp_path / "a.jpg"):
        with pytest.raises(DataError, match=r"^The test image is empty\. Replace it"):
            decode_image(Encoded(content, "The test image"), Fit(8))


@pytest.mark.parametrize("content", [b"not an image", b"\x89PNG\r\n\x1a\n" + b"\0" * 40, b"%!PS-Adobe-3.0 EPSF-3.0\n"])
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


def test_broken_images_are_returned_with_their_places() -> None:
    encoded = [encode(Image.new("RGB", (2, 2), (index, 0, 0))) for index in range(20)]
    encoded[3], encoded[17] = Encoded(b"broken", "Image 3"), Encoded(b"", "Image 17")
    target = np.zeros((20, 2, 2, 3), np.uint8)
    broken = decode_intact(target, encoded, Fit(2), 3)
    assert [(each.index, each.where) for each in broken] == [(3, "Image 3"), (17, "Image 17")]
    assert "Image 3 cannot be decoded" in str(broken[0].error)
    assert [int(row[0, 0, 0]) for row in target] == [0 if index in (3, 17) else index for index in range(20)]


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"The test image does not exist\. Check the path\."):
        decode_image(Encoded(tmp_path / "none.png", "The test image"), Fit(8))


def assert_like_a_jpeg(content: bytes, pixels: np.ndarray, orientation: int) -> None:
    """Check that an image of another format looks like a JPEG file of the same pixels that is turned as it is."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    fit = Fit(16, resize=True, orient=True, reduce=True)
    expected = decode_image(encode(Image.fromarray(pixels), "JPEG", quality=95, exif=exif), fit)
    assert differences(decode_image(Encoded(content, "The test image"), fit), expected).max() <= 12


class TestHeif:
    """Photographs of telephones, where the extra is installed."""

    @staticmethod
    def heic(pixels: np.ndarray, orientation: int = 1, **extra: object) -> bytes:
        heif = pytest.importorskip("pillow_heif", reason='needs the extra: pip install "efcil[heic]"')
        exif, stream = Image.Exif(), io.BytesIO()
        exif[0x0112] = orientation
        heif.from_pillow(Image.fromarray(pixels)).save(stream, quality=95, exif=exif.tobytes(), **extra)
        return stream.getvalue()

    @pytest.mark.parametrize("orientation", [1, 3, 6, 8])
    def test_they_look_like_jpeg_files_turned_as_these_are(self, orientation: int) -> None:
        pixels = photograph(413, 301)
        assert_like_a_jpeg(self.heic(pixels, orientation), pixels, orientation)

    def test_any_suffix_will_do(self, tmp_path: Path) -> None:
        (tmp_path / "photo.jpg").write_bytes(self.heic(photograph(64, 48)))
        file = Encoded(tmp_path / "photo.jpg", "The test image")
        assert decode_image(file, Fit(16, resize=True)).shape == (16, 16, 3)
        assert short_side(file) == 48
        assert set(decode.HEIF_SUFFIXES) <= set(decode.SUFFIXES)

    def test_a_thumbnail_is_not_taken_for_the_image(self) -> None:
        content = self.heic(photograph(800, 600), thumbnails=[400])
        reduced = decode_image(Encoded(content, "The test image"), Fit(32, resize=True, reduce=True))
        alone = decode_image(
            Encoded(self.heic(photograph(800, 600)), "The test image"), Fit(32, resize=True, reduce=True)
        )
        assert np.array_equal(reduced, alone)

    def test_hostile_files_are_refused_by_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        content = self.heic(np.zeros((600, 600, 3), np.uint8))
        said = content.replace(struct.pack(">II", 600, 600), struct.pack(">II", 64, 64))
        assert said != content
        draw = np.random.default_rng(5)
        scrambled = bytearray(content)
        for place in draw.integers(12, len(content), 40):
            scrambled[place] = draw.integers(256)
        for hostile in (said, content[: len(content) // 2], content[:40], content[:12] + b"\xff" * 400):
            with pytest.raises(DataError, match="The test image"):
                decode_image(Encoded(hostile, "The test image"), Fit(64))
        with contextlib.suppress(DataError):  # by chance it may still be an image
            decode_image(Encoded(bytes(scrambled), "The test image"), Fit(16, resize=True))
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
        with pytest.raises(DataError, match=r"The test image is refused: .*decompression bomb"):
            decode_image(Encoded(content, "The test image"), Fit(16, resize=True))

    def test_without_the_extra_the_answer_says_what_to_install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(decode, "READS_HEIF", False)
        content = Encoded(b"\0\0\0\x18ftypheic" + b"\0" * 100, "The test image")
        for read in (lambda: decode_image(content, Fit(8)), lambda: short_side(content)):
            with pytest.raises(DataError, match=r'^The test image is a HEIF image.*pip install "efcil\[heic\]"'):
                read()


@pytest.mark.skipif(not decode.READS_AVIF, reason="this build of Pillow has no AVIF decoder")
class TestAvif:
    """Photographs of telephones and of web pages, where Pillow has a decoder for them."""

    @staticmethod
    def avif(pixels: np.ndarray, orientation: int = 1) -> bytes:
        exif, stream = Image.Exif(), io.BytesIO()
        exif[0x0112] = orientation
        Image.fromarray(pixels).save(stream, "AVIF", quality=95, exif=exif)
        return stream.getvalue()

    @pytest.mark.parametrize("orientation", [1, 3, 6, 8])
    def test_they_look_like_jpeg_files_turned_as_these_are(self, orientation: int) -> None:
        pixels = photograph(413, 301)
        assert_like_a_jpeg(self.avif(pixels, orientation), pixels, orientation)

    def test_they_are_found_by_suffix_and_known_by_content(self, tmp_path: Path) -> None:
        assert ".avif" in decode.SUFFIXES
        (tmp_path / "photo.jpg").write_bytes(self.avif(photograph(64, 48)))
        assert short_side(Encoded(tmp_path / "photo.jpg", "The test image")) == 48

    def test_hostile_files_are_refused_by_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        content = self.avif(np.zeros((600, 600, 3), np.uint8))
        for hostile in (content[: len(content) // 2], content[:40], content[:12] + b"\xff" * 400):
            with pytest.raises(DataError, match="The test image"):
                decode_image(Encoded(hostile, "The test image"), Fit(64))
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
        with pytest.raises(DataError, match=r"The test image is refused: .*decompression bomb"):
            decode_image(Encoded(content, "The test image"), Fit(16, resize=True))


def test_without_a_decoder_of_avif_the_answer_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "READS_AVIF", False)
    monkeypatch.setattr(decode, "FORMATS", tuple(each for each in decode.FORMATS if each != "AVIF"))
    content = Encoded(b"\0\0\0\x18ftypavif" + b"\0" * 100, "The test image")
    for read in (lambda: decode_image(content, Fit(8)), lambda: short_side(content)):
        with pytest.raises(DataError, match=r'^The test image is an AVIF image.*pip install "pillow>=11.3"'):
            read()
