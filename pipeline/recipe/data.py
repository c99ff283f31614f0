"""Which pictures, and how they reach the model."""

from typing import Annotated

from pydantic import Field

from pipeline.recipe.section import Positive, Section, Triple, key

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


class DataSection(Section):
    """Which prepared pictures, and how they reach the model."""

    path: str = key(..., "folder that `widemix prep` wrote (manifest.json and the .beton files)")
    train_split: str = key("train", "split to train on")
    eval_split: str = key("val", "split to evaluate on")
    num_classes: Positive = key(..., "classes that the head tells apart; no fewer than the manifest's")
    image_size: Positive = key(224, "side of the square picture the model sees, pixels")
    crop_pct: Annotated[float, Field(gt=0, le=1)] = key(
        0.875, "evaluation: side of the centre crop, as a share of the picture's shorter side"
    )
    mean: Triple = key(IMAGENET_MEAN, "subtracted per RGB channel, on a scale of 0 to 1")
    std: Triple = key(IMAGENET_STD, "divided by per RGB channel, on a scale of 0 to 1")
    workers: Annotated[int, Field(ge=0)] = key(
        0, "decoding threads per rank; 0 shares the allowed CPUs among the ranks of a node"
    )
    batches_ahead: Positive = key(3, "batches decoded ahead of the step, per rank")
