"""The names that a user gives to networks. Nothing here imports torch, which takes seconds."""

import re

from widemix.errors import InputError

FORMS = (
    "a run, a checkpoint, a folder of `widemix export`, a recipe or its name (its weights at the start), timm:NAME, "
    "or hf:OWNER/NAME"
)
TIMM, HUB = "timm:", "hf:"


def timm_name(name: str) -> str | None:
    """The name by which timm loads `timm:NAME` or `hf:OWNER/NAME`; None for others. `InputError` for half a name."""
    if name.startswith(HUB):
        return "hf-hub:" + check_repository(name.removeprefix(HUB), name)
    if name == TIMM:
        raise InputError("timm:: should be timm:NAME, such as timm:mixer_b16_224")
    return name.removeprefix(TIMM) if name.startswith(TIMM) else None


def check_repository(repository: str, given: str) -> str:
    """A repository's name; `InputError`, which names what was given, unless it is OWNER/NAME."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+(@.+)?", repository):
        raise InputError(f"{given}: a repository of the Hub is named OWNER/NAME")
    return repository
