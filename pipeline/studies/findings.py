"""The findings that a page of results begins with."""

from collections.abc import Sequence

from widemix.markdown import escaped
from widemix.studies.claims import Verdict

MOST = 5
_AGAINST = 3  # of these at most, where there are others
_SEEDS = 5


def findings(found: Sequence[tuple[str, Verdict]]) -> str:
    """A numbered list of what was decided, the clearest statement of each figure: negative ones first, then others.

    The negative ones are those that are contradicted. What a margin alone decides is none. A paper's statements come
    before others, then those of five seeds and more, then the greatest difference (`Verdict.size`).

    found: figures and verdicts, in the order of the page.
    """
    first: dict[tuple[str, str], Verdict] = {}
    for figure, verdict in sorted(found, key=lambda one: _rank(one[1])):
        if verdict.word in ("supported", "contradicted") and not verdict.by_margin:
            first.setdefault((verdict.word, figure), verdict)
    lines = {key: f"{_words(verdict)} ({key[1]})" for key, verdict in first.items()}
    keys = list(lines)
    against = [lines[key] for key in keys if key[0] == "contradicted"]
    held = [lines[key] for key in keys if key[0] == "supported" and ("contradicted", key[1]) not in lines]
    chosen = against[: max(_AGAINST, MOST - len(held))]
    chosen = [*chosen, *held][:MOST]
    return "\n".join(f"{number}. {line}" for number, line in enumerate(chosen, start=1)) or (
        "None yet: no statement is decided."
    )


def _rank(verdict: Verdict) -> tuple[bool, bool, float]:
    few = verdict.estimate is None or verdict.estimate.count < _SEEDS
    return (verdict.claim.ours, few, -abs(verdict.size))


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
