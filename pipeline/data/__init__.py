"""Batches for training and evaluation: order, decoding, augmentation, mixup, tokens."""
