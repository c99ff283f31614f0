"""Optimizers: the table behind `optim.name`, the recipe's section, parameter groups, and optimizers of our own."""
