"""The names under which a network's tensors are saved, against its state_dict."""

from collections import defaultdict

import timm
import torch
from torch import nn

from widemix.engine.layout import all_names


class Tied(nn.Module):
    """Two names of one parameter and of one buffer, and a buffer that is not saved."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("same", self.scale)
        self.register_buffer("cache", torch.ones(2), persistent=False)


def test_each_tensor_of_the_state_dict_is_named_once_with_all_its_names():
    for module in (Tied(), timm.create_model("resnet10t")):
        expected = defaultdict(list)
        for name, tensor in module.state_dict().items():
            expected[tensor.data_ptr()].append(name)
        found = all_names(module)
        assert sorted(map(sorted, found.values())) == sorted(map(sorted, expected.values()))
        assert all(first == names[0] for first, names in found.items())
