"""Augmentation of training images, between the crop and the model."""
