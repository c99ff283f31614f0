"""What a network costs, by formula: no tensor is made. Exact against counted modules and PyTorch's FLOP counter.

A network is a list of `Dense`: I_rows (x) W, the same layer on every row. FLOPs are two a multiply-add, of matrix
products alone (norms, activations and permutations are left out), as `torch.utils.flop_counter` counts them.
"""

from dataclasses import dataclass

from pipeline.recipe.model import ModelSection

FLOAT = 4  # bytes


@dataclass(frozen=True)
class Dense:
    """One dense layer applied to each of `rows` rows, and what it leaves in memory for the backward pass."""

    rows: int
    inputs: int
    outputs: int
    bias: bool = True
    mixes: bool = True  # counts among the connections: a mixing layer, not the stem, the skip or the head
    activated: bool = False  # an activation follows, which keeps this layer's output
    keeps_input: bool = True  # False where somebody else keeps the same tensor
    input_gradient: bool = True  # False for the first layer: nobody asks for the picture's gradient

    @property
    def parameters(self) -> int:
        return self.inputs * self.outputs + self.bias * self.outputs

    @property
    def connections(self) -> int:
        """Nonzero entries of I (x) W."""
        return self.rows * self.inputs * self.outputs

    @property
    def kept(self) -> int:
        """Floats saved for the backward pass: the input, and the output where an activation follows."""
        return self.rows * (self.keeps_input * self.inputs + self.activated * self.outputs)


@dataclass(frozen=True)
class ModelCost:
    """The cost of a network, per picture where that makes sense. Effective quantities are of the wide, sparse MLP."""

    parameters: int
    connections: int  # nonzero entries of all effective mixing matrices (stem, skip W and head left out)
    omega: float  # Omega, mean connections of a mixing layer (equation 14)
    gamma: float  # expansion that gives this Omega at this S and C: Omega / (m (S + C) / 2)
    width: int  # m = S*C, effective width of the features
    hidden_width: float  # gamma * m, effective width of the hidden features
    density: float  # p, nonzero share of the effective mixing matrices
    forward_flops: int  # a picture
    training_flops: int  # a picture, forward and backward
    activation_bytes: (
        int  # a picture, in fp32: what PyTorch keeps for the backward pass; GELU and LN keep their inputs
    )


def model_cost(section: ModelSection, image_size: int, num_classes: int) -> ModelCost:
    """The cost of `build_model(section, image_size, num_classes)` on 3-channel pictures, without building it."""
    layers = mixer_layers(section, image_size, num_classes)
    mixing = [layer for layer in layers if layer.mixes]
    connections = sum(layer.connections for layer in mixing)
    entries = sum(layer.rows**2 * layer.inputs * layer.outputs for layer in mixing)
    omega = connections / len(mixing)
    tokens, channels = section.tokens, section.channels
    gamma = 2 * omega / (tokens * channels * (tokens + channels))
    forward = sum(2 * layer.connections for layer in layers)
    backward = sum(2 * layer.connections * (1 + layer.input_gradient) for layer in layers)
    norm_rows, norm_parameters = _norms(section, image_size)
    kept = sum(layer.kept for layer in layers) + norm_rows * (channels + 2)  # input, mean, 1 / deviation
    return ModelCost(
        parameters=sum(layer.parameters for layer in layers) + norm_parameters,
        connections=connections,
        omega=omega,
        gamma=gamma,
        width=tokens * channels,
        hidden_width=gamma * tokens * channels,
        density=connections / entries,
        forward_flops=forward,
        training_flops=forward + backward,
        activation_bytes=FLOAT * kept,
    )


def mixer_layers(section: ModelSection, image_size: int, num_classes: int) -> list[Dense]:
    """Every dense layer of a Mixer, stem to head."""
    tokens, channels = section.tokens, section.channels
    own_tokens = (image_size // section.patch_size) ** 2
    token_hidden, channel_hidden = section.hidden_widths
    layers = [Dense(own_tokens, 3 * section.patch_size**2, channels, mixes=False, input_gradient=False)]
    if section.project_tokens:
        # Its input is kept already: by the norm before the token mixing, or by an unpermuted token mixing itself.
        permuted = section.permutation == "random" and section.permuted_mixings != "channel"
        permuted = permuted and (section.permuted_blocks is None or 0 in section.permuted_blocks)
        own_copy = section.norm == "none" and permuted
        layers.append(Dense(channels, own_tokens, tokens, bias=False, mixes=False, keeps_input=own_copy))
    for block in range(section.depth):
        layers += _mixing(channels, own_tokens if block == 0 else tokens, token_hidden, tokens)
        layers += _mixing(tokens, channels, channel_hidden, channels)
    return [*layers, Dense(1, channels, num_classes, mixes=False)]


def _mixing(rows: int, inputs: int, hidden: int | None, outputs: int) -> list[Dense]:
    if hidden is None:
        return [Dense(rows, inputs, outputs, activated=True)]
    return [Dense(rows, inputs, hidden, activated=True), Dense(rows, hidden, outputs)]


def _norms(section: ModelSection, image_size: int) -> tuple[int, int]:
    """Rows that LayerNorms see for a picture, and their parameters: two a block, one at the end, one in the skip."""
    if section.norm == "none":
        return 0, 0
    own_tokens = (image_size // section.patch_size) ** 2
    rows = own_tokens + 2 * section.depth * section.tokens + section.project_tokens * section.tokens
    count = 2 * section.depth + 1 + section.project_tokens
    return rows, 2 * section.channels * count
