"""Train MLP-Mixers and their wide, sparse relatives: recipes, data, models, engines, the loop."""

import gc

# Importing torch and numba makes some hundred thousand objects that stay. Walking the new ones at every 700, Python's
# default, takes a sixth of a start; and in training ranks would stop for it at different steps.
if gc.isenabled() and gc.get_threshold()[0] < 100_000:
    gc.set_threshold(100_000, *gc.get_threshold()[1:])
