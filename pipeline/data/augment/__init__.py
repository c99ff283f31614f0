"""Augmentation of training pictures, between the crop and the model."""
