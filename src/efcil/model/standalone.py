"""Name the classes of images with a model that `efcil export --to onnx` has written, without efcil.

    python THIS-FILE MODEL.onnx IMAGE ...

needs onnxruntime, NumPy and Pillow. An image becomes the same pixels as in efcil: large ones are shrunk by a whole
factor first (a JPEG while it is decoded), transparency is put on white, 16 bits become 8, the image is turned as its
EXIF orientation says, and its centred square is resized.
"""

from __future__ import annotations

import json
import sys

import numpy as np
from PIL import Image

#: What undoes an EXIF orientation from 2 to 8.
TURNS = ["FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM", "TRANSPOSE", "ROTATE_270", "TRANSVERSE", "ROTATE_90"]


def read(file: str, size: int) -> np.ndarray:
    """Return an image as the model takes it: uint8, size x size x 3."""
    with Image.open(file) as image:
        factor = next((each for each in (8, 4, 2) if min(image.size) >= each * 1.5 * size), 1)
        width, height = (side / factor for side in image.size)
        if image.format == "JPEG" and factor > 1:
            image.draft(None, (image.size[0] // factor, image.size[1] // factor))
            factor = 1
        image.load()
        orientation = image.getexif().get(0x0112, 1)
        pixels = in_colour(image).reduce(factor)
    if 2 <= orientation <= 8:
        pixels = pixels.transpose(Image.Transpose[TURNS[orientation - 2]])
        width, height = (height, width) if orientation >= 5 else (width, height)
    # The last column or row may show less than a whole pixel; turned, it may be the first one.
    left = pixels.size[0] - width if orientation in (2, 3, 6, 7) else 0.0
    top = pixels.size[1] - height if orientation in (3, 4, 7, 8) else 0.0
    side = min(width, height)
    left, top = left + (width - side) / 2, top + (height - side) / 2
    square = pixels.resize((size, size), Image.Resampling.BILINEAR, box=(left, top, left + side, top + side))
    return np.asarray(square)


def in_colour(image: Image.Image) -> Image.Image:
    """Return an image as RGB."""
    if image.mode == "F":
        raise ValueError("floating-point pixels have no known range; save the image with 8 bits per channel")
    if image.mode.startswith("I"):
        wide = np.clip(np.asarray(image).astype(np.int64), 0, 65535)
        image = Image.fromarray(((wide + 128) // 257).astype(np.uint8))
    if image.has_transparency_data:
        layers = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", layers.size, (255, 255, 255, 255)), layers)
    return image.convert("RGB")


def main() -> None:
    """Print the likeliest class of every image, and its probability."""
    import onnxruntime

    if len(sys.argv) < 3:
        sys.exit(f"Give a model and at least one image: python {sys.argv[0]} MODEL.onnx IMAGE ...")
    model, *files = sys.argv[1:]
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    about = json.loads(session.get_modelmeta().custom_metadata_map["efcil"])
    unread = 0
    for file in files:
        try:
            images = read(file, about["image_size"])[None]  # several may be stacked: N x size x size x 3
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            unread += 1
            print(f"{file} cannot be read as an image ({error}). Skipped.", file=sys.stderr)
            continue
        _, probabilities = session.run(["scores", "probabilities"], {"images": images})
        best = int(probabilities[0].argmax())
        print(f"{file}  {about['classes'][best]} {probabilities[0, best]:.3f}")
    sys.exit(1 if unread else 0)


if __name__ == "__main__":
    main()
