"""What a run puts up with before it goes back or gives up."""

from typing import Annotated

from pydantic import Field

from pipeline.section import Positive, Section, key


class FaultsSection(Section):
    """Steps that fail, and ranks that hang or die."""

    max_skipped_steps: Annotated[int, Field(ge=0)] = key(
        3, "steps in a row whose loss or gradient may not be finite: they change nothing; one more goes back"
    )
    max_rollbacks: Annotated[int, Field(ge=0)] = key(
        2, "times to go back to the last checkpoint and leave such steps' data out, over the whole run"
    )
    loss_spike_std: Annotated[float, Field(gt=0)] | None = key(
        6.0, "flag a step whose loss is so many standard deviations above the last 100 steps' mean; null is off"
    )
    hang_timeout_s: Positive = key(
        600, "seconds without a step or an evaluated batch after which stacks are written and the run ends"
    )
