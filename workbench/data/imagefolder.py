"""Image files decoded when they are read. One that cannot be decoded is refused by name, or skipped and counted on request."""

import struct
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from workbench.errors import Refused

CORRUPT = (OSError, SyntaxError, ValueError, EOFError, OverflowError, struct.error, Image.DecompressionBombError)
"""What Pillow raises for a file that is not the image it claims to be."""


class ImageFolderDataset(Dataset[tuple[Tensor, int]]):
    """Files with their labels, decoded on access, resized and centre-cropped to ``image_shape`` (C, H, W).

    Args:
        skip_corrupt: give the next file in place of one that cannot be decoded, and count it in ``skipped``. A loader adds
            up the counts of its worker processes.
    """

    def __init__(
        self, files: list[tuple[Path, int]], image_shape: tuple[int, int, int], *, skip_corrupt: bool = False
    ) -> None:
        self.files, self.image_shape, self.skip_corrupt = files, image_shape, skip_corrupt
        self.skipped = 0

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        start = range(len(self.files))[index]
        for step in range(len(self.files)):
            path, label = self.files[(start + step) % len(self.files)]
            try:
                return decode(path, self.image_shape), label
            except CORRUPT as error:
                # An error with a number comes from the system (no such file, disk gone), not from what the file holds.
                unreadable = isinstance(error, OSError) and error.errno is not None
                if unreadable or not self.skip_corrupt:
                    verb = "read" if unreadable else "decoded"
                    fix = "replace or remove it" + ("" if unreadable else ", or ask for skip_corrupt")
                    raise Refused(f"image {path} cannot be {verb} ({error})", fix=fix) from error
                self.skipped += 1
        raise Refused(f"none of the {len(self.files)} images can be decoded", fix="replace them")


def decode(path: Path, image_shape: tuple[int, int, int]) -> Tensor:
    """The image at ``path``: shorter side resized to the target, centre crop, float32 (C, H, W) in [0, 1]."""
    channels, height, width = image_shape
    with Image.open(path) as opened:
        # Lets a JPEG decode at a half, quarter or eighth of its size where that is still large enough.
        opened.draft(None, (width, height))
        image = opened.convert("L" if channels == 1 else "RGB")
    factor = max(height / image.height, width / image.width)
    size = max(round(image.width * factor), width), max(round(image.height * factor), height)
    image = image.resize(size, Image.Resampling.BILINEAR)
    left, top = (size[0] - width) // 2, (size[1] - height) // 2
    pixels = np.asarray(image.crop((left, top, left + width, top + height)), dtype=np.float32)
    return torch.from_numpy(pixels / 255).view(height, width, channels).permute(2, 0, 1).contiguous()
