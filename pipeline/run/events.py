"""What metrics.jsonl tells of a run beside its numbers: failed steps, rollbacks, divergence."""

from contextlib import suppress
from typing import Any

from widemix.errors import InputError, shown
from widemix.run.patience import Gains


def describe_event(event: dict[str, Any]) -> str:
    """Return an event as a sentence; `InputError` if it is none of those that a run has."""
    match event:
        case {"event": "step_skipped", "step": step, "loss": loss, "grad_norm": norm}:
            return f"step {step} was skipped: its loss is {loss}, its gradient norm {norm}"
        case {"event": "loss_spike", "step": step, "loss": loss, "expected": mean}:
            return f"the loss of step {step} is {loss}, far above the mean of {mean} before it"
        case {"event": "save_failed", "step": step, "reason": reason}:
            return f"no checkpoint was saved at step {step}: {reason}"
        case {"event": "evaluation_failed", "step": step, **metrics}:
            bad = ", ".join(f"{name} {value}" for name, value in metrics.items() if name != "split")
            return f"the evaluation at step {step} failed: {bad}"
        case {
            "event": "rollback",
            "step": step,
            "from": last,
            "skipped_ranges": [int(first), int(end)],
            "reason": why,
        }:
            return f"rolled back from step {last} to step {step}, skipping data steps {first} to {end - 1}: {why}"
        case {"event": "ended_early", **fields}:
            with suppress(ValueError):
                gains = {name: value for name, value in fields.items() if name in Gains.model_fields}
                return f"the run {Gains.model_validate(gains).sentence()}"
        case {"event": "stopped", "step": step}:
            return f"the run was asked to stop, and ended after step {step}"
        case {"event": "diverged", "step": step, "reason": reason}:
            return f"the run diverged at step {step}: {reason}"
    raise InputError(f"no such event: {shown(event)}")
