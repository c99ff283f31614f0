"""Where Pillow itself resizes, and it is older than 13, a line says that the pixels are its own."""

import pytest
from PIL import Image

from widemix.data_prep.image import encode
from widemix.data_prep.samples import FileSlice, Sample
from widemix.data_prep.settings import PrepSettings
from widemix.native import library
from widemix.native.build import BuildError
from widemix.pillow_support import older_pillow

OLD, NEW = "12.1.1", "13.0.0"


@pytest.mark.parametrize(
    ("version", "found"), [("11.0.0", "11.0.0"), (OLD, OLD), (NEW, None), ("13.1.0.dev0", None), ("14.0.0", None)]
)
def test_versions(version, found, system):
    system({"PIL.__version__": version})
    assert older_pillow() == found


@pytest.mark.parametrize("version", [OLD, NEW])
def test_images_that_prep_shrinks_by_pillow_have_a_rule(version, tmp_path, system):
    system({"PIL.__version__": version})
    Image.new("RGB", (60, 40)).save(tmp_path / "a.png")
    Image.new("RGB", (60, 40)).save(tmp_path / "a.jpg")
    rules = [
        encode(Sample(name, 0, FileSlice(str(tmp_path / name))), PrepSettings(max_size=size)).rule
        for name, size in (("a.png", 30), ("a.png", 60), ("a.jpg", 30))
    ]
    assert rules == [f"shrunk by Pillow {OLD}, not as Pillow 13 does" if version == OLD else "", "", ""]


@pytest.mark.parametrize(
    ("version", "pixels"),
    [(OLD, f"the pixels of Pillow {OLD}, which are not those of Pillow 13"), (NEW, "the same pixels")],
)
def test_so_does_the_note_that_there_is_no_compiled_code(version, pixels, monkeypatch, system, capsys):
    def fail():
        raise BuildError("no compiler")

    system({"PIL.__version__": version})
    monkeypatch.setattr(library, "open_library", fail)
    assert library.load.__wrapped__() is None
    assert capsys.readouterr().err == (
        f"note: without compiled code images load 4 times slower, with {pixels}: no compiler\n"
    )
