"""Joins the parts of a dataset that several machines prepared with `widemix prep ... --part 3/32`.

The result has the bytes of a preparation by one machine. Images are copied one by one, and compared with their
checksums: where one lies, and with which alignment, depends on the sizes of all before it.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from widemix.data_prep.encoding import encoding_for
from widemix.data_prep.extend import Prepared
from widemix.data_prep.prep_dir import check_outside, check_target, prep_dir, translate_errors
from widemix.data_prep.prepare import plan_of, select
from widemix.data_prep.settings import PrepSettings
from widemix.data_prep.sources import check_origin, read_source
from widemix.data_prep.write_dataset import Job, write_dataset
from widemix.errors import InputError
from widemix.formats.manifest import NAME, Manifest, read_manifest


@translate_errors()
def join(parts: Sequence[Path], to: Path, *, max_bad: float = 0.01, force: bool = False) -> Manifest:
    """Join all parts of a dataset in the folder `to`; returns its manifest.

    The source is listed, since it tells the order of the samples, but not read. Raises `InputError` for parts that
    are missing, of different preparations or damaged, and otherwise what `prepare` raises.
    """
    manifests = {part: read_manifest(part) for part in parts}
    settings = _settings(manifests)
    first = next(iter(manifests.values()))
    origin = check_origin(first.source, None if first.origin == first.source else Path(first.origin))
    check_outside(to, origin)
    if not (to / NAME).exists():
        check_target(to, force)
    elif not force:
        raise InputError(f"{to}: is already prepared; name another folder, or add --force to replace it")
    dataset = select(read_source(first.source, origin, settings), settings)
    encoding = encoding_for(dataset, origin, settings, processes=1)
    plan = plan_of(first.source, origin, settings, dataset, encoding)
    for part, manifest in manifests.items():
        if (manifest.versions, manifest.classes) != (plan["versions"], dataset.classes):
            raise InputError(f"{part}: was prepared with other package versions or classes than there are now")
    prepared = Prepared(manifests, all_parts=True)
    encoding = encoding._replace(records=partial(prepared.records, encoding=encoding))
    with prep_dir(to, plan, force):
        return write_dataset(Job(plan, to, settings, dataset, encoding, max_bad, force))


def _settings(manifests: dict[Path, Manifest]) -> PrepSettings:
    """The settings of the whole. Raises `InputError` unless the folders are all parts of one preparation."""
    found: dict[int, Path] = {}
    (first, manifest), *_ = manifests.items()
    count = 0
    for folder, other in manifests.items():
        same = [(part.source, part.origin, part.settings | {"part": ""}) for part in (manifest, other)]
        number, parts = PrepSettings(part=other.settings.get("part", "")).part_of
        if not other.settings.get("part"):
            raise InputError(f"{folder}: is no part; `widemix prep ... --part 1/32` prepares one")
        if same[0] != same[1] or parts != (count or parts):
            raise InputError(f"{folder}: is a part of another preparation than {first}")
        if number in found:
            raise InputError(f"{folder}: is the same part as {found[number]}")
        found[number], count = folder, parts
    missing = [str(number) for number in range(1, count + 1) if number not in found]
    if missing:
        more = f" and {len(missing) - 10} more" if len(missing) > 10 else ""
        words = ("part", "is") if len(missing) == 1 else ("parts", "are")
        raise InputError(f"{words[0]} {', '.join(missing[:10])}{more} of {count} {words[1]} missing")
    return PrepSettings(**manifest.settings | {"part": ""})
