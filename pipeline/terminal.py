"""Show text on a terminal or in a log: names of strangers' files, classes and keys may hold control characters."""

import builtins
import codecs
from typing import TextIO

ANY_TEXT = "widemix"  # a way to encode file names as they are on disk, and as \xe9 what an encoding lacks
_CONTROLS = {*range(32), *range(127, 160)} - {ord("\n"), ord("\t")}
_DIRECTIONS = {*range(0x202A, 0x202F), *range(0x2066, 0x206A)}  # which show the rest of a line backwards
_ESCAPED = {code: ascii(chr(code))[1:-1] for code in _CONTROLS | _DIRECTIONS}


def _encode_any(error: UnicodeError) -> tuple[str | bytes, int]:
    assert isinstance(error, UnicodeEncodeError)
    error.end = error.start + 1  # what follows may be of the other kind
    try:
        return codecs.lookup_error("surrogateescape")(error)
    except UnicodeEncodeError:
        return codecs.backslashreplace_errors(error)


codecs.register_error(ANY_TEXT, _encode_any)


def visible(text: str) -> str:
    r"""Return a text with its control characters as Python writes them, such as \x1b, but for ends of lines and tabs.

    A terminal obeys them: they overwrite what stands there, hide text, open links or change the clipboard.
    """
    known = text if text.isascii() else text.encode(errors=ANY_TEXT).decode(errors="surrogateescape")
    return known.translate(_ESCAPED)


def print(*values: object, sep: str = " ", end: str = "\n", file: TextIO | None = None, flush: bool = False) -> None:
    """Print as Python does, but show control characters; each of our modules that prints imports it.

    Streams stay as they are, since progress bars and the libraries that colour their lines write to these.
    """
    builtins.print(*(visible(str(value)) for value in values), sep=sep, end=end, file=file, flush=flush)
