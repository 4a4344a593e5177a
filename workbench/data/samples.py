"""A small image folder to decode: crops of the two photographs that scikit-learn ships. No torch.

For timing and testing the way from file to batch. Training and validation crops come from the same two photographs, so no
accuracy on them means anything.
"""

from pathlib import Path

import numpy as np
from PIL import Image

from workbench.data.sources import installed_datasets
from workbench.errors import Refused

PHOTOGRAPHS = ("china", "flower")
"""640 by 427 pixels each; their names are the classes."""


def write_samples(
    folder: Path, *, num_train: int = 64, num_val: int = 16, crop: tuple[int, int] = (320, 240), seed: int = 0
) -> Path:
    """Write JPEG crops to ``folder``/{train,val}/{china,flower}, half of each split from either photograph.

    Args:
        num_train, num_val: images in each split, at least one of each class.
        crop: width and height of an image, at most 640 by 427.

    Returns:
        ``folder``, which ``check_source`` and ``open_dataset`` take by its path.

    Raises:
        Refused: the folder holds something already; too few images; a crop larger than the photographs.
    """
    if folder.exists() and any(folder.iterdir()):
        raise Refused(f"folder {folder} is not empty", fix="name another")
    if min(num_train, num_val) < len(PHOTOGRAPHS):
        raise Refused("images of a split", min(num_train, num_val), allowed="2 or more, one of each class")
    generator = np.random.RandomState(seed)
    for name in PHOTOGRAPHS:
        with Image.open(installed_datasets() / "images" / f"{name}.jpg") as photograph:
            photograph.load()
        room = photograph.width - crop[0], photograph.height - crop[1]
        if min(crop) < 1 or min(room) < 0:
            raise Refused("crop", crop, allowed=f"1 by 1 to {photograph.width} by {photograph.height} pixels")
        for split, total in (("train", num_train), ("val", num_val)):
            target = folder / split / name
            target.mkdir(parents=True)
            for k in range(PHOTOGRAPHS.index(name), total, len(PHOTOGRAPHS)):
                left, top = (generator.randint(side + 1) for side in room)
                image = photograph.crop((left, top, left + crop[0], top + crop[1]))
                image.save(target / f"{k:05}.jpg", quality=90)
    return folder
