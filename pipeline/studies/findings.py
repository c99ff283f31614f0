"""The findings that a page of results begins with."""

from collections.abc import Sequence

from widemix.studies.claims import Verdict
from widemix.studies.page import escaped

MOST = 5
_AGAINST = 3  # of these at most, where there are others


def findings(found: Sequence[tuple[str, Verdict]]) -> str:
    """A numbered list of what was decided, the first statement of each figure: negative ones first, then others.

    The negative ones are those that are contradicted. A paper's statements come before others.

    found: figures and verdicts, in the order of the page.
    """
    first: dict[tuple[str, str], Verdict] = {}
    for figure, verdict in found:
        if verdict.word in ("supported", "contradicted"):
            first.setdefault((verdict.word, figure), verdict)
    lines = {key: f"{_words(verdict)} ({key[1]})" for key, verdict in first.items()}
    keys = sorted(lines, key=lambda key: first[key].claim.ours)
    against = [lines[key] for key in keys if key[0] == "contradicted"]
    held = [lines[key] for key in keys if key[0] == "supported" and ("contradicted", key[1]) not in lines]
    chosen = against[: max(_AGAINST, MOST - len(held))]
    chosen = [*chosen, *held][:MOST]
    return "\n".join(f"{number}. {line}" for number, line in enumerate(chosen, start=1)) or (
        "None yet: no statement is decided."
    )


def _words(verdict: Verdict) -> str:
    claim, estimate = verdict.claim, verdict.estimate
    assert estimate is not None
    panel = f"{claim.panel}: " if claim.panel else ""
    source = f" [{escaped(claim.source)}]" if claim.source else ""
    size = f"difference {estimate.mean:+.4g}"
    text = f"**{verdict.word}**: {escaped(panel + claim.text)}{source}: {size}"
    if estimate.exact:
        return f"{text}, exact"
    low, high = verdict.interval
    return f"{text}, 95 % interval {low:+.4g} to {high:+.4g}, p = {verdict.p:.2g}, n = {estimate.count}"
