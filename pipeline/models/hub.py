"""The names that a user gives to networks, and networks shared on the Hugging Face Hub, or where HF_ENDPOINT says.

Nothing here imports torch or huggingface_hub, which take seconds, before they are needed.
"""

import re
from pathlib import Path

from widemix.errors import InputError, RunError
from widemix.models.timm_networks.names import check_name

FORMS = (
    "a run, a checkpoint, a folder of `widemix export`, a recipe or its name (its weights at the start), timm:NAME, "
    "or hf:OWNER/NAME"
)
WEIGHTS = "a weights file, timm:NAME or hf:OWNER/NAME is possible too"  # where a run or a checkpoint may be named
TIMM, HUB = "timm:", "hf:"


def timm_name(name: str) -> str | None:
    """The name by which timm loads `timm:NAME` or `hf:OWNER/NAME`; None for others. `InputError` for half a name."""
    if name.startswith(HUB):
        return "hf-hub:" + check_repository(name.removeprefix(HUB), name)
    if name == TIMM:
        raise InputError("timm:: should be timm:NAME, such as timm:mixer_b16_224")
    return name.removeprefix(TIMM) if name.startswith(TIMM) else None


def check_timm_name(name: str, given: str) -> None:
    """Raise `InputError`, which begins with `given`, where `name` is that of no network of timm: timm:NAME."""
    network = name.removeprefix(TIMM)
    if name.startswith(TIMM) and ":" not in network:  # timm knows hf-hub: and local-dir: too
        try:
            check_name(network, TIMM)
        except InputError as error:
            raise InputError(f"{given}: {error}") from None


def check_repository(repository: str, given: str) -> str:
    """A repository's name; `InputError`, which names what was given, unless it is OWNER/NAME."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+(@.+)?", repository):
        raise InputError(f"{given}: a repository of the Hub is named OWNER/NAME")
    return repository


def push(folder: Path, repository: str, private: bool = False) -> str:
    """Upload a folder of `widemix export` as one commit, and return the address of the repository, OWNER/NAME.

    The repository is created if there is none. The card's Python line loads it from there. `InputError` where the
    folder is no export, or the Hub refuses who asks; RunError where it cannot be reached.
    """
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

    missing = [name for name in ("config.json", "model.safetensors") if not (folder / name).is_file()]
    if missing:
        raise InputError(f"{folder}: has no {missing[0]}; give a folder that `widemix export` has written")
    check_repository(repository, repository)
    files = [CommitOperationAdd(path.name, path) for path in sorted(folder.iterdir()) if path.name != "README.md"]
    if (folder / "README.md").is_file():
        here, there = f"local-dir:{folder.resolve().name}", f"hf-hub:{repository}"
        card = (folder / "README.md").read_text().replace(here, there)
        files.append(CommitOperationAdd("README.md", card.encode()))
    api = HfApi()
    try:
        address = api.create_repo(repository, private=private, exist_ok=True)
        api.create_commit(repository, files, commit_message="Upload a network trained by widemix")
    except (HFValidationError, LocalTokenNotFoundError) as error:
        raise InputError(f"{repository}: {_first_line(error)}") from None
    except HfHubHTTPError as error:
        refused = error.response is not None and error.response.status_code in (401, 403, 404)
        cure = "; `hf auth login`, or HF_TOKEN, says who you are" if refused else ""
        raise (InputError if refused else RunError)(f"{repository}: {_first_line(error)}{cure}") from None
    except Exception as error:  # huggingface_hub raises errors of many kinds where there is no network
        raise RunError(f"{api.endpoint}: {_first_line(error)}") from None
    return str(address)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
