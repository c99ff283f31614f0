"""Figures among the images of a run's TensorBoard."""

import io
from collections.abc import Mapping
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import numpy as np
from PIL import Image

from widemix.errors import InputError
from widemix.files import refuse_links
from widemix.lock import HeldFolder, hold
from widemix.run import checkpoint
from widemix.run.tensorboard import Board


def add_to_tensorboard(images: Mapping[str, bytes], run: Path) -> Path:
    """Add PNG files as `analysis/NAME` at a run's newest step; returns the folder of its event files.

    They replace those of the same name and step, but not while the run is trained: its own file is left alone.
    """
    try:
        step = checkpoint.find(run).position.step
    except InputError:  # it has no checkpoint yet
        step = 0
    tags = {
        f"analysis/{name}": np.asarray(Image.open(io.BytesIO(png)).convert("RGB")) for name, png in images.items()
    }
    refuse_links(run, HeldFolder.links)
    with ExitStack() as stack:
        dropped = None
        with suppress(InputError):
            stack.enter_context(hold(run, wait_s=0))
            dropped = lambda tag, at: tag in tags and at == step  # noqa: E731
        board = stack.enter_context(closing(Board(run, dropped)))
        for tag, pixels in tags.items():
            board.add_image(tag, pixels, step)
    return run
