"""Section `faults`: how many failed steps a run tolerates, and when it counts as hung."""

from typing import Annotated

from pydantic import Field

from widemix.section import PositiveAmount, Seconds, Section, key


class FaultsSection(Section):
    """Failed steps, loss spikes and hangs."""

    max_skipped_steps: Annotated[int, Field(ge=0, lt=2**63)] = key(
        3, "steps in a row whose loss or gradient may be non-finite: they change nothing; one more rolls back"
    )
    max_rollbacks: Annotated[int, Field(ge=0, lt=2**63)] = key(
        2, "rollbacks to the last checkpoint, which skip the data of the failed steps, over the whole run"
    )
    loss_spike_std: PositiveAmount | None = key(
        6.0, "warn of a step whose loss is this many standard deviations above the mean of the last 100; null is off"
    )
    hang_timeout_s: Seconds = key(
        600, "seconds without a finished step or evaluated batch after which the run writes its stacks and exits"
    )
