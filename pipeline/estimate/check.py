"""The estimate against what is counted on fake ranks, or measured on this machine."""

from widemix.distributed.topology import read_topology
from widemix.errors import InputError
from widemix.estimate.hardware import Cluster
from widemix.estimate.measure import compare
from widemix.estimate.network import Pass, fake_pass
from widemix.estimate.rehearse import rehearse
from widemix.estimate.tables import Row, sample_of, size
from widemix.estimate.traffic import step_traffic
from widemix.models.cost import model_cost
from widemix.recipe import Recipe
from widemix.recipe.engine import EngineSection

MEASURED = 4  # samples, at least, of a pass with --measure
_MEASURED_FLOPS = 1e11  # of a small network as many samples as have these FLOPs: its operators' starts take longer


def rehearsed(recipe: Recipe, network: Pass, cluster: Cluster, memory: float) -> list[Row]:
    """A step on fake ranks, and how far the estimate is from what was counted."""
    counts = rehearse(recipe, cluster.gpus, cluster.local)
    rows = []
    for collective in step_traffic(recipe.engine, recipe.train, network, cluster):
        if counted := counts.bytes.get(collective.kind):
            error = f"the estimate is {collective.bytes / counted - 1:+.1%} off"
            note = f"a step, in {counts.calls[collective.kind]} calls; {error}"
            rows.append(Row(f"rehearsed {collective.kind}", counted, size(counted), note))
    if counts.peak:
        peak, origin = counts.peak, "counted"
    else:
        peak, origin = counts.kept + network.peak, "counted between steps, plus estimated activations"
    error = f"the estimate is {memory / peak - 1:+.1%} off"
    ranks = f"{cluster.gpus} ranks, of which this process was rank 0"
    rows += [
        Row("rehearsed memory", peak, size(peak), f"peak on a GPU, {origin}; {error}"),
        Row("rehearsal", counts.seconds, f"{counts.seconds:.1f} s", ranks),
    ]
    if peak > cluster.kind.memory:
        raise InputError(_out_of_memory(recipe, peak, cluster))
    return rows


def measured(recipe: Recipe) -> list[Row]:
    """A pass in DDP's precision, timed on this machine, and its roofline there."""
    ddp = recipe.model_copy(update={"engine": EngineSection()})
    cost = model_cost(recipe.model, recipe.data.image_size, recipe.data.num_classes)
    whole = recipe.train.global_batch // recipe.train.grad_accum_steps
    micro = min(max(MEASURED, int(_MEASURED_FLOPS / cost.training_flops)), whole)
    network = fake_pass(ddp, micro, read_topology().device)
    roofline, seconds, peak = compare(ddp, network, micro)
    error = f"its roofline is {1e3 * roofline:.0f} ms, {roofline / seconds:.0%} of it"
    rows = [
        Row(
            "measured pass",
            seconds,
            f"{1e3 * seconds:.0f} ms",
            f"{micro} {sample_of(recipe)}s on this machine; {error}",
        )
    ]
    if peak:
        error = f"the estimate is {network.peak / peak - 1:+.1%} off"
        rows.append(
            Row("measured activations", peak, size(peak), f"{micro} {sample_of(recipe)}s on this GPU; {error}")
        )
    return rows


def cures(recipe: Recipe, cluster: Cluster) -> str:
    """Return the keys that make a step take less memory: one GPU has nobody to share its state with."""
    train = recipe.train
    first = f"raise train.grad_accum_steps (now {train.grad_accum_steps}), set train.activation_checkpointing"
    return f"{first}{' or engine.kind fsdp' if cluster.gpus > 1 else ' or take more --gpus with engine.kind fsdp'}"


def _out_of_memory(recipe: Recipe, peak: float, cluster: Cluster) -> str:
    reason = f"a step needs {peak / 1e9:.1f} GB on each GPU, a {cluster.gpu} has {cluster.kind.memory / 1e9:g}"
    return f"{reason}; {cures(recipe, cluster)}"
