"""Train MLP-Mixers and their wide, sparse relatives: recipes, data, models, engines, the loop."""

from pipeline.timm_import import import_wandb_later

import_wandb_later()
