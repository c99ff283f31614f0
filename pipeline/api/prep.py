"""The command `widemix prep` as a function. Imports no torch, which takes seconds."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, SkipValidation

from widemix.arguments import FilePath, check_arguments, is_iterable
from widemix.data_prep.prepare import prepare as prepare_folder
from widemix.data_prep.settings import PrepSettings
from widemix.data_prep.sources.from_python import Pairs, collect
from widemix.errors import InputError, shown
from widemix.formats.manifest import Manifest
from widemix.section import Fraction


@check_arguments
def prepare(
    source: Annotated[str | Pairs | Mapping[str, Pairs], SkipValidation],
    to: FilePath,
    origin: FilePath | None = None,
    *,
    processes: Annotated[int, Field(ge=1, le=4096)] | None = None,
    force: bool = False,
    extend: bool = False,
    max_bad: Fraction = 0.01,
    **settings: Any,
) -> Manifest:
    """Prepare a dataset in the folder `to`, once, and return its manifest; as `widemix prep`.

    source: one that `widemix prep --help` lists, such as "imagenet" or "image-folder", read from the folder `origin`;
    or pairs (image, label) of train, or {split: pairs}, without `origin`. An image is a path, or the bytes of a file;
    a label is an integer from 0, or a class name; or a float or several numbers, the sample's targets, which
    `targets="age,height"` names.
    max_bad: fraction of a split's images that may be left out. extend: whether to take over what the source gained.
    settings: fields of `widemix.data_prep.settings.PrepSettings`, such as `max_size=512`;
    `shuffle` is on by default.
    """
    settings = {"shuffle": True} | settings
    options: dict[str, Any] = {"processes": processes, "force": force, "extend": extend, "max_bad": max_bad}
    chosen = PrepSettings(**settings)
    if isinstance(source, str):
        folder = None if origin is None else Path(origin)
        return prepare_folder(source, folder, Path(to), chosen, **options)
    if not is_iterable(source):
        raise InputError(
            f"source {shown(source)}: must be the name of one, or pairs (image, label), or {{split: pairs}}"
        )
    if origin is not None:
        raise InputError(f"origin {origin}: pairs are not read from a folder; leave it out")
    with collect(source if isinstance(source, Mapping) else {"train": source}, Path(to), chosen.targets) as dataset:
        return prepare_folder(dataset, None, Path(to), chosen, **options)
