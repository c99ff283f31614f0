"""Hugging Face's Trainer with a vision transformer. A checkpoint resumes within an epoch, on the same images."""

import sys
from pathlib import Path

from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer, TrainerCallback, TrainingArguments, ViTConfig, ViTForImageClassification

import widemix


class Images(IterableDataset):
    """The loader's batches under the names of the model's arguments."""

    def __init__(self, loader: widemix.Loader):
        self.loader = loader

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        return ({"pixel_values": images, "labels": labels} for images, labels in self.loader)


class SetEpoch(TrainerCallback):
    def on_epoch_begin(self, arguments, state, control, train_dataloader=None, **others):
        train_dataloader.dataset.loader.set_epoch(int(state.epoch))


class ImagesTrainer(Trainer):
    def get_train_dataloader(self):
        return DataLoader(self.train_dataset, batch_size=None)  # they are batches already


if __name__ == "__main__":
    images = Images(widemix.Loader(sys.argv[1], "train", 128, auto_augment="rand-m9-mstd0.5-inc1", re_prob=0.25))
    model = ViTForImageClassification(ViTConfig(num_labels=1000))
    arguments = TrainingArguments("runs/vit", num_train_epochs=90, save_steps=1000)
    trainer = ImagesTrainer(model, arguments, train_dataset=images, callbacks=[SetEpoch()])
    trainer.train(resume_from_checkpoint=Path("runs/vit").exists())
