"""A second way to compute a Mixer's blocks: with the images of the batch next to each other in memory.

A row is then one feature of all B images. Any permutation of the m = S*C features moves whole rows, so that it costs
nothing beside the LayerNorm that writes the rows and the sum that reads them. On GPUs both mixings are one large
product, [D, d] with [d, n*B], without transposes, and the features have the shape [B, S, C] between blocks as ever,
with other strides. On CPUs compiled code computes the whole block, a few images at a time. The weights are the same:
`widemix.engine.memory_layout` chooses the layout by time. Numbers agree to float rounding.
"""
