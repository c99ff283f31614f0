"""What `import widemix` offers: loaders, training and evaluation as Python functions."""
