"""Small image helpers for robots: resize with black bars, and float images to bytes."""

from __future__ import annotations

import numpy as np
from PIL import Image

from stretto_client.errors import FieldError


def convert_to_uint8(image: np.ndarray) -> np.ndarray:
    """Turn an image of floats in [0, 1] into bytes; bytes are returned as they are.

    Raises:
        FieldError: if the image is neither, or a float lies outside [0, 1].
    """
    if image.dtype == np.uint8:
        return image
    if image.dtype.kind != "f":
        raise FieldError("image", got=image.dtype, expected="uint8, or floats in [0, 1]")
    # Written so that NaN fails too.
    if image.size and not (image.min() >= 0 and image.max() <= 1):
        raise FieldError("image", got=f"floats from {image.min()} to {image.max()}", expected="floats in [0, 1]")
    return np.asarray(image * 255, dtype=np.uint8)


def resize_with_pad(images: np.ndarray, height: int, width: int, method: int = Image.Resampling.BILINEAR) -> np.ndarray:
    """Resize [..., h, w, c] uint8 images to fit, centred on black, with Pillow's antialiased filters.

    Raises:
        FieldError: if the images are not uint8 [..., h, w, 1, 3 or 4], or the size is not positive.
    """
    if height < 1 or width < 1:
        raise FieldError("size", got=(height, width), expected="1 or more each way")
    if images.dtype != np.uint8 or images.ndim < 3 or images.shape[-1] not in (1, 3, 4) or 0 in images.shape:
        raise FieldError("images", got=f"{images.dtype} {images.shape}", expected="uint8 [..., h, w, c], c 1, 3 or 4")
    h, w, c = images.shape[-3:]
    if (h, w) == (height, width):
        return images
    ratio = max(w / width, h / height)
    new_h, new_w = max(1, int(h / ratio)), max(1, int(w / ratio))
    top, left = (height - new_h) // 2, (width - new_w) // 2
    flat = images.reshape(-1, h, w, c)
    out = np.zeros((len(flat), height, width, c), np.uint8)
    for source, target in zip(flat, out, strict=True):
        picture = Image.fromarray(source[..., 0] if c == 1 else source).resize(
            (new_w, new_h), resample=Image.Resampling(method)
        )
        target[top : top + new_h, left : left + new_w] = np.asarray(picture).reshape(new_h, new_w, c)
    return out.reshape(*images.shape[:-3], height, width, c)
