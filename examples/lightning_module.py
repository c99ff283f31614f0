"""Lightning: a DataModule whose checkpoints hold the loader's position, so that a run resumes within an epoch."""

import sys
from pathlib import Path

import lightning
import torch
from torch import nn
from torchvision.models import resnet18

import widemix


class Images(lightning.LightningDataModule):
    def __init__(self, folder: Path, batch_size: int = 128, image_size: int = 224):
        super().__init__()
        self.keys = {"path": folder, "batch_size": batch_size, "image_size": image_size}

    def train_dataloader(self):
        return widemix.Loader(split="train", auto_augment="rand-m9-mstd0.5-inc1", re_prob=0.25, **self.keys)


class Classifier(lightning.LightningModule):
    def __init__(self, classes: int):
        super().__init__()
        self.network = resnet18(num_classes=classes)

    def training_step(self, batch, number):
        images, labels = batch
        return nn.functional.cross_entropy(self.network(images), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


if __name__ == "__main__":
    lightning.Trainer(max_epochs=90).fit(Classifier(1000), Images(Path(sys.argv[1])), ckpt_path="last")
