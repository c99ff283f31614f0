"""Any network of timm that takes img_size, by its name there."""
