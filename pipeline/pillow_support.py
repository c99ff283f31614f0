"""Which Pillow resizes images to the pixels that widemix promises: 13 or newer."""

import PIL


def older_pillow() -> str | None:
    """The version of a Pillow whose `resize` gives other pixels than Pillow 13's; else None.

    Decoding, drafts, colours, rotation and blur are the same from Pillow 11 on.
    """
    return PIL.__version__ if int(PIL.__version__.partition(".")[0]) < 13 else None
