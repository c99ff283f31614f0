"""Checksums for a folder that was prepared before samples had any: `widemix verify DIR --add-checksums`."""

from pathlib import Path

import numpy as np

from widemix.data_prep.verify import open_prepared, verify
from widemix.errors import InputError
from widemix.files import atomic_write
from widemix.formats.beton import RAW, Beton
from widemix.formats.blocks import hash_bytes
from widemix.formats.checksums import NUMBER, SUFFIX, compute_checksums, image_blocks
from widemix.formats.manifest import NAME, UNCHECKED, manifest_json, read_manifest


def add_checksums(folder: Path) -> list[str]:
    """Write the checksums of all samples, and a manifest with its own hash; returns what `verify` finds before that.

    Nothing is written if it finds damage. The blocks' hashes were computed while the folder was prepared, so that the
    samples are as true as they were then; nothing tells whether the class names are. A folder that has checksums is
    left as it is.
    """
    manifest = read_manifest(folder)
    lines = verify(folder)
    if lines or manifest.format != UNCHECKED:
        return lines
    files = {}
    for split in manifest.splits.values():
        beton = open_prepared(folder, manifest, split)
        bands = []
        checksums = np.empty(len(beton), NUMBER)
        with beton.path.open("rb") as file:
            for sample in range(len(beton)):
                start = int(beton.offset[sample])
                file.seek(start)
                data = file.read(int(beton.stop[sample]) - start)
                checksums[sample] = compute_checksums(beton, np.array([sample]), data, start)[0]
                if isinstance(beton, Beton) and beton.mode[sample] == RAW:
                    blocks = image_blocks(RAW, int(beton.width[sample]), data, b"")
                    bands.append(np.array(blocks, NUMBER).tobytes())
        files[Path(split.file).with_suffix(SUFFIX).name] = checksums.tobytes() + b"".join(bands)
    if verify(folder):
        raise InputError(f"{folder}: was damaged while it was read; run the same command again")
    for name, data in files.items():
        atomic_write(folder / name, data)
    hashes = manifest.files | {name: hash_bytes(data) for name, data in files.items()}
    atomic_write(folder / NAME, manifest_json(manifest.model_copy(update={"format": 3, "files": hashes})))
    return []
