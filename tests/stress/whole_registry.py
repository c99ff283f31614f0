"""Compares weight decay with timm's for all of timm's registry that can be built without memory: half an hour."""

import sys
import warnings

import timm
import torch
from timm.optim import param_groups_weight_decay

import widemix  # noqa: F401  puts our names into timm's registry
from widemix.models.sw_mlp.sparse import SparseLinear
from widemix.optim.build import parameter_groups
from widemix.optim.section import OptimSection


def build(name: str) -> torch.nn.Module | None:
    """timm's network on the meta device; None where it can't be built there."""
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        try:
            return timm.create_model(name)
        except (RuntimeError, NotImplementedError):  # it reads values while it is built
            return None


def compare_with_timm(name: str) -> None:
    """AssertionError unless each parameter of the network has the decay that timm's train.py gives it."""
    model = build(name)
    if model is None:
        return
    spared = model.no_weight_decay() if hasattr(model, "no_weight_decay") else ()
    theirs = param_groups_weight_decay(model, 0.05, no_weight_decay_list=spared)
    names = {parameter: name for name, parameter in model.named_parameters()}
    expected = {names[p]: group["weight_decay"] for group in theirs for p in group["params"]}
    for prefix, part in model.named_modules():  # a matrix, which timm takes for a vector
        if isinstance(part, SparseLinear):
            expected[f"{prefix}.values"] = 0.05
    groups = parameter_groups(OptimSection(lr=0.1, weight_decay=0.05), model)
    found = {names[p]: group["weight_decay"] for group in groups for p in group["params"]}
    assert found == expected


if __name__ == "__main__":
    for number, each in enumerate(names := sys.argv[1:] or timm.list_models(), 1):
        print(f"{number} of {len(names)}: {each}", flush=True)
        compare_with_timm(each)
