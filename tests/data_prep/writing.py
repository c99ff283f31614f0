"""Writes sources of every kind, by other libraries than those that we read them with, and lists what was read."""

import io
import json
import os
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Content = str | bytes | None | Callable[[bytes], bytes] | Mapping[str, Any]


class Link(str):
    """A link in a tar to another member: hard, or of the type `kind`."""

    kind = tarfile.LNKTYPE


class Symlink(Link):
    kind = tarfile.SYMTYPE


class Fifo(Link):
    kind = tarfile.FIFOTYPE


def put(folder: Path, files: Mapping[str, Content]) -> None:
    """Write files: text or bytes; a mapping is a tar of these; "-> TARGET" a link; a function changes what is there.

    None removes one. A name that ends in / is that of a folder, one that ends in | that of a FIFO.
    """
    for name, content in files.items():
        path = folder / name.rstrip("|")
        (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if name.endswith("|"):
            path.unlink(missing_ok=True)
            os.mkfifo(path)
        elif content is None:
            path.unlink()
        elif isinstance(content, str) and content.startswith("-> "):
            path.symlink_to(content[3:])
        elif callable(content):
            path.write_bytes(content(path.read_bytes()))
        elif not name.endswith("/"):
            path.write_bytes(tar(content) if isinstance(content, Mapping) else encoded(content))


def encoded(content: str | bytes) -> bytes:
    return content.encode() if isinstance(content, str) else content


def tar(members: Mapping[str, Any], compression: str = "", **options) -> bytes:
    """A tar of these files: text, bytes, another tar, or `Link`s."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=f"w:{compression}", **options) as file:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            if isinstance(content, Link):
                info.type, info.linkname = content.kind, str(content)
                file.addfile(info)
            else:
                data = tar(content) if isinstance(content, Mapping) else encoded(content)
                info.size = len(data)
                file.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def found(dataset, split: str) -> dict[str, tuple[str, bytes]]:
    """Class and content of each sample of a split, by name, in its order."""
    return {sample.name: (dataset.classes[sample.label], sample.image.read()) for sample in dataset.splits[split]}


# Sentence pairs, (gold label, first, second) each, in the forms in which people have them.


def jsonl(rows) -> str:
    keys = ("gold_label", "sentence1", "sentence2")
    return "".join(json.dumps({"pairID": "x", **dict(zip(keys, row, strict=True))}) + "\n" for row in rows)


def glue(rows) -> str:
    lines = ["index\tpromptID\tsentence1\tsentence2\tlabel1\tgold_label"]
    lines += [f"{i}\t7\t{first}\t{second}\tneutral\t{gold}" for i, (gold, first, second) in enumerate(rows)]
    return "\n".join(lines) + "\n"


def plain(rows) -> str:
    return "label\tsentence2\tsentence1\r\n" + "".join(f"{gold}\t{b}\t{a}\r\n" for gold, a, b in rows)
