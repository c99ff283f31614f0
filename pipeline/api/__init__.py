"""Loaders, training and evaluation as Python functions, which `import widemix` offers."""
