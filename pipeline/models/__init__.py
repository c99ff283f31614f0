"""Model families, a folder each, and what they share.

A family is a `ModelSection` (its recipe keys, and everything the rest of the project asks of it), a network, where
there is a formula its cost, and its names in timm's registry. `families` lists them. Importing `families` or a
section does not import torch; `import widemix` puts the names into timm's registry.
"""
