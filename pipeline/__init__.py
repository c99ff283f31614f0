"""Train MLP-Mixers and their wide, sparse relatives: recipes, data, models, engines, the loop."""
