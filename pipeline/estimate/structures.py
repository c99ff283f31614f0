"""What `widemix cost` says of structured mixing matrices."""

from widemix.estimate.rows import Row
from widemix.models.section import ModelSection


def structure_rows(section: ModelSection) -> list[Row]:
    """A row for each structured matrix of an inner block: sharing, rank and cost beside a dense matrix of its sizes.

    The three are what Potapczynski et al. 2024 ("Searching for Efficient Linear Layers over a Continuous Space of
    Structured Matrices") find to decide how a structure scales.
    """
    rows = []
    for key, structure, inputs, outputs in section.structured_matrices():
        factors = structure.factors(inputs, outputs)
        weights = sum(factor.parameters for factor in factors)
        products = sum(factor.multiply_adds for factor in factors)
        rank, full = structure.full_rank(inputs, outputs), min(inputs, outputs)
        sized = f" of rank {structure.rank_for(inputs, outputs)}" if structure.kind in ("low_rank", "btt") else ""
        text = f"{structure.kind}{sized}, {inputs} to {outputs}"
        note = f"{weights:,} weights, each used {products / weights:.3g} times a row; rank {rank} of {full}; "
        note += f"{products / inputs:.3g} multiply-adds an input, {products / (inputs * outputs):.1%} of dense"
        rows.append(Row(key.replace("_", " "), products, text, note))
    return rows
