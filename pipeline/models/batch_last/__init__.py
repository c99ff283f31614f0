"""A second way to compute a Mixer's blocks: with the pictures of the batch next to each other in memory.

A row is then one feature of all B pictures. Any permutation of the m = S*C features moves whole rows, so that it
costs nothing beside the LayerNorm that writes the rows and the sum that reads them. Both mixings are one large
product, [D, d] with [d, n*B], without transposes. Features have the shape [B, S, C] between blocks as ever, with
other strides, and the weights are the same: `pipeline.engine.kernels` chooses the way by time. Numbers agree to float
rounding.
"""
