"""Coefficients: the JPEG's own bytes come back, by the compiled code and by Python, and what cannot stays a JPEG."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import widemix
from tests.data.crafted_jpegs import CHROMA, OTHERS, crafted
from tests.data.test_decode import KINDS, PACKED, SIZES, by_pillow, renumbered, scene, without_table
from tests.data_prep.conftest import contents, encode_bytes
from tests.data_prep.writing import put
from tests.shims import disk_of
from widemix.cli.commands import run_command
from widemix.cli.parser import make_parser
from widemix.data_prep.jpeg import pack, unpack
from widemix.data_prep.original_jpeg import count_bytes, restore
from widemix.data_prep.prep_dir import lock_folder
from widemix.data_prep.prepare import prepare
from widemix.data_prep.settings import PrepSettings
from widemix.data_prep.verify import verify
from widemix.errors import InputError
from widemix.formats import coefficients
from widemix.formats.beton import COEFFICIENTS, JPEG, open_beton
from widemix.formats.manifest import read_manifest

pytestmark = pytest.mark.usefixtures("small_pages")

REAL = Path(__file__).parents[3] / "shared/data/imagenet-sample"
SETTINGS = PrepSettings(encoding="coefficients", max_size=0)


def jpegs_of(kind: str) -> list[bytes]:
    sizes = [size for size in SIZES if min(size) > 4]  # libjpeg decodes smaller chroma
    return [KINDS[kind](scene(number, *size)) for number, size in enumerate(sizes)]


def waves():
    """Square waves of which a block holds one have coefficients of up to 10 bits, the most of baseline coding."""
    for height in range(1, 128, 3):
        wave = np.where(np.arange(64) // 4 % 2, 128 + height, 127 - height).astype(np.uint8)
        for pixels in (np.tile(wave, (64, 1)), np.tile(wave, (64, 1)).T):
            yield by_pillow(Image.fromarray(pixels), quality=100)


def headers():
    """Comments and profiles, fill bytes before markers, padding with zeros, bytes after the end marker."""
    exif = Image.Exif()
    exif[0x010E] = "a description"
    data = by_pillow(scene(1, 90, 70), quality=80, exif=exif, comment=b"a comment", icc_profile=bytes(700))
    start = data.index(b"\xff\xc0")
    return data, data + b"\0\0\r\n", data[:start] + b"\xff\xff" + data[start:]


def seldom():
    """Grey with factors, which mean nothing; any tables; an extended frame (T.81, B.2.2); a marker after each MCU."""
    for n in (1, 3):
        for table in (CHROMA, OTHERS):
            yield crafted((50, 41), *[(2, 2), (1, 1), (1, 1)][:n], dc=table)
    yield by_pillow(scene(2, 90, 70)).replace(b"\xff\xc0", b"\xff\xc1")
    yield by_pillow(scene(3, 200, 150), quality=90, restart_marker_blocks=1)
    yield from (renumbered(by_pillow(scene(k, 90, 70), subsampling=k)) for k in range(3))


def ends():
    """A last byte of ones alone, with the zero that follows each of these."""
    jpegs = [crafted((8 * count, 8), *[(1, 1)] * components) for count in range(1, 13) for components in (1, 3)]
    assert sum(jpeg.endswith(b"\xff\0\xff\xd9") for jpeg in jpegs) > 1
    return jpegs


def differing(*differences: int) -> bytes:
    """A grey JPEG whose blocks have only a DC, by their differences."""
    return crafted((8 * len(differences), 8), (1, 1), levels=np.cumsum(differences).tolist())


RESTORED = {kind: lambda kind=kind: jpegs_of(kind) for kind in PACKED}
RESTORED |= {make.__name__: make for make in (waves, headers, seldom, ends)}
RESTORED["largest"] = lambda: [crafted((30, 20), (1, 1), first=first) for first in (-1023, -1, 1, 512, 1023)]
RESTORED["largest DC"] = lambda: [differing(2047, -1), differing(-2047, -1), differing(-2047, 2)]


def assert_restored(data: bytes) -> bytes:
    packed, reason = pack(data)
    assert packed, reason
    assert unpack(packed) == data
    assert coefficients.restore(packed) == data  # which shares no code with the other
    assert coefficients.jpeg_size(packed) == len(data)
    return packed


@pytest.mark.parametrize("make", RESTORED.values(), ids=RESTORED)
def test_jpegs_are_restored_byte_for_byte(make):
    for data in make():
        assert_restored(data)


def test_without_compiled_code_they_are_restored_too(request):
    data = by_pillow(scene(0, 60, 40))
    packed = assert_restored(data)
    request.getfixturevalue("uncompiled")
    assert unpack(packed) == data


@pytest.mark.parametrize(
    ("factors", "mcus"), [([(1, 1)], 8), ([(2, 2)], 8), ([(1, 1)] * 3, 8), ([(2, 2), (1, 1), (1, 1)], 4)], ids=str
)
def test_a_segment_has_64_pixels_of_a_row(factors, mcus):
    packed, _ = pack(crafted((150, 20), *factors))
    rows = 2 if mcus == 4 else 3
    assert coefficients.HEAD.unpack_from(packed)[4:] == (mcus, 1, 3 * rows)


def test_bytes_may_be_filled_up_with_zeros():
    """As some encoders do, where libjpeg writes ones: the last bits of a scan say nothing."""
    found = 0
    for seed in range(20):
        data = by_pillow(scene(seed, 60, 60), quality=80)
        last = data[-3]
        for bits in range(1, 8):
            changed = data[:-3] + bytes([last >> bits << bits]) + data[-2:]
            packed, _ = pack(changed)
            assert not packed or unpack(packed) == coefficients.restore(packed) == changed
            found += bool(packed) and changed != data
    assert found >= 10


COLOURS, TABLE, RANGE = [(1, 1)] * 3, "without one of its Huffman tables", "of coefficients beyond baseline coding"
SCAN = (grey := crafted((30, 20), (1, 1))).index(b"\xff\xda") + 6


@pytest.mark.parametrize(
    ("jpegs", "reason"),
    [
        *((jpegs_of(kind), "libjpeg") for kind in ("4:4:0", "4:1:1", "RGB")),
        (jpegs_of("progressive"), "progressive"),
        ([by_pillow(scene(0, 60, 40).convert("CMYK"))], "colours"),
        # the standard's, which Python, reading containers where there is no compiled code, does not have
        ([without_table(by_pillow(scene(0, 60, 40)), table) for table in range(4)], TABLE),
        # of a number that there is not, of which libjpeg says so only where it begins to decode
        ([grey[:SCAN] + bytes([number]) + grey[SCAN + 1 :] for number in (0x50, 0x05, 0x44)], TABLE),
        ([crafted((30, 20), *COLOURS).replace(b"\xff\xc0", b"\xff\xc9")], "arithmetic coding"),
        ([crafted((30, 20), *COLOURS, apart=True)], "several scans"),
        ([crafted((30, 20), (1, 1), first=first) for first in (-1024, 1024, 2047)], RANGE),
        ([differing(2047, 1), differing(2047, 2), differing(-2047, -2), differing(-2047, -3)], RANGE),
    ],
)
def test_others_are_not_taken(jpegs, reason):
    for data in jpegs:
        packed, why = pack(data)
        assert packed == b""
        assert why == reason or (reason in ("libjpeg", "colours") and reason in why)


def test_damaged_jpegs_are_not_taken():
    data = by_pillow(scene(0, 120, 90), quality=90)
    numbers = np.random.RandomState(0)
    refused = 0
    for _ in range(200):
        changed = bytearray(data)
        changed[numbers.randint(len(data))] ^= 1 << numbers.randint(8)
        packed, _ = pack(bytes(changed))
        assert not packed or unpack(packed) == changed
        refused += not packed
    assert refused > 20
    for size in range(0, len(data), 37):
        assert pack(data[:size])[0] == b""


def test_damaged_coefficients_are_an_error_or_other_pixels():
    """Without checksums, which find all of it."""
    packed, _ = pack(by_pillow(scene(0, 50, 40), quality=90))
    numbers, damaged = np.random.RandomState(1), 0
    for _ in range(150):
        changed = bytearray(packed)
        changed[numbers.randint(len(packed))] ^= 1 << numbers.randint(8)
        for read in (unpack, coefficients.restore):
            try:
                read(bytes(changed))
            except ValueError:
                damaged += 1
    assert damaged > 20
    assert all(
        is_damaged(packed[:size]) for size in (*range(coefficients.HEAD.size + 1), *range(97, len(packed), 97))
    )


def is_damaged(container: bytes) -> bool:
    """Whether both readers say so."""
    found = []
    for read in (unpack, coefficients.restore):
        try:
            read(container)
            found.append(False)
        except ValueError as error:
            found.append("damaged" in str(error))
    assert found[0] == found[1]
    return found[0]


@pytest.mark.parametrize("data", [by_pillow(scene(0, 150, 40), quality=90), crafted((200, 10), (1, 1))], ids=len)
def test_parts_of_a_container_have_the_sizes_that_it_says(data):
    """Of each segment a byte more or less is an error, and so are another format's number and bytes after the end.

    Of the second image's segments all bits are needed.
    """
    packed, _ = pack(data)
    _, _, head, end, _, _, segments = coefficients.HEAD.unpack_from(packed)
    sizes = np.frombuffer(packed, "<u2", segments, coefficients.HEAD.size)
    assert segments > 3
    assert not is_damaged(packed)
    assert is_damaged(packed + b"\0")
    for at in range(8):  # also of the number of the JPEG's bytes
        assert is_damaged(packed[:at] + bytes([packed[at] ^ 1]) + packed[at + 1 :])
    start = coefficients.HEAD.size + 2 * segments
    for number in range(segments):
        stop = start + head + end + int(sizes[: number + 1].sum())
        for change in (-1, 1):
            changed = (sizes + change * (np.arange(segments) == number)).astype("<u2")
            data = packed[start:stop][: change if change < 0 else None] + bytes(max(change, 0)) + packed[stop:]
            assert is_damaged(packed[: coefficients.HEAD.size] + changed.tobytes() + data)


def test_numbers_of_a_container_that_fit_no_jpeg_are_damage():
    """Nothing, and the most there may be, of all that its head tells; a segment more, of no bytes."""
    packed, _ = pack(by_pillow(scene(0, 150, 40), quality=90))
    magic, jpeg, head, end, interval, ones, segments = coefficients.HEAD.unpack_from(packed)
    most = 2**32 - 1
    for numbers in (
        *((size, head, end, interval, ones, segments) for size in (0, most)),
        *((jpeg, size, end, interval, ones, segments) for size in (0, head - 1, head + 1, most)),
        *((jpeg, head, size, interval, ones, segments) for size in (0, most)),
        *((jpeg, head, end, mcus, ones, segments) for mcus in (0, 1, interval + 1, 2**16 - 1)),
        *((jpeg, head, end, interval, ones, count) for count in (0, segments - 1, segments + 1, most)),
    ):
        assert is_damaged(coefficients.HEAD.pack(magic, *numbers) + packed[coefficients.HEAD.size :]), numbers
    changed = coefficients.HEAD.pack(magic, jpeg, head, end, interval, ones, segments + 1)
    sizes = packed[coefficients.HEAD.size :][: 2 * segments]
    assert is_damaged(changed + sizes + b"\0\0" + packed[coefficients.HEAD.size + 2 * segments :])


def test_a_container_of_another_kind_of_jpeg_is_damage():
    """Progressive, of arithmetic codes, or of several scans, which would be that of one component."""
    packed, _ = pack(by_pillow(scene(0, 50, 40), quality=90))
    for kind in (0xC2, 0xC9):
        assert is_damaged(packed.replace(b"\xff\xc0\0", bytes([0xFF, kind, 0])))
    packed, _ = pack(crafted((30, 20), (1, 1)))
    at = packed.index(b"\xff\xc0")
    frame = packed[at : at + 9] + bytes([3, 1, 0x11, 0, 2, 0x11, 0, 3, 0x11, 0])
    longer = bytearray(packed[:at] + frame.replace(b"\xff\xc0\0\x0b", b"\xff\xc0\0\x11") + packed[at + 13 :])
    for place in (4, 8):  # the bytes of the JPEG, and of its head
        longer[place] += 6
    with pytest.raises(ValueError, match="its header is damaged"):
        unpack(bytes(longer))


@pytest.mark.parametrize("options", [{}, {"restart_markers": False}, {"encoding": "coefficients"}], ids=str)
def test_metadata_that_are_larger_than_a_page_are_dropped(tmp_path, options):
    """With coefficients too, which are then of a JPEG without them."""
    whole, note = KINDS["4:2:0"](scene(0, 150, 100)), b"\xff\xe2" + (65_000).to_bytes(2, "big") + bytes(64_998)
    encoded = encode_bytes(tmp_path, whole[:2] + 200 * note + whole[2:], **options)
    assert encoded.mode == (COEFFICIENTS if "encoding" in options else JPEG)
    assert encoded.rule == ("without its metadata, which are larger than a page" if options else "")
    jpeg = unpack(encoded.data) if "encoding" in options else encoded.data
    assert np.array_equal(Image.open(io.BytesIO(jpeg)), Image.open(io.BytesIO(whole)))


def test_a_grey_one_that_is_not_taken_becomes_rgb(tmp_path):
    data = by_pillow(scene(0, 90, 60).convert("L"), progressive=True)
    encoded = encode_bytes(tmp_path, data, encoding="coefficients")
    assert (encoded.mode, encoded.rule) == (COEFFICIENTS, "grey to RGB")
    assert Image.open(io.BytesIO(unpack(encoded.data))).mode == "RGB"


@pytest.fixture
def images(tmp_path) -> Path:
    """Two classes of every kind, of which some cannot be restored, and two that prep has to change."""
    folder = tmp_path / "images"
    for number, kind in enumerate(KINDS):
        for split in ("train", "val"):
            path = folder / split / f"class{number % 2}" / f"{kind.replace(':', '').replace(' ', '_')}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(KINDS[kind](scene(number, 100 + number, 80)))
    scene(50, 64, 48).save(folder / "train/class0/a.png")
    exif = Image.Exif()
    exif[0x0112] = 6
    scene(51, 64, 48).save(folder / "train/class1/turned.jpg", exif=exif)
    return folder


def test_prepared_files_are_restored(images, tmp_path, capsys):
    out, back = tmp_path / "out", tmp_path / "back"
    manifest = prepare("image-folder", images, out, SETTINGS, processes=1)
    kept = {entry["file"] for entry in manifest.exceptions if "kept as a JPEG" in entry["rule"]}
    assert {Path(name).stem for name in kept} == {"440", "411", "progressive", "RGB"}
    rules = {entry["rule"] for entry in manifest.exceptions if "progressive" in entry["file"]}
    assert rules == {"kept as a JPEG: progressive"}
    beton = open_beton(out / "train.beton")
    assert set(beton.mode.tolist()) == {JPEG, COEFFICIENTS}
    assert verify(out) == []
    assert restore(out, back) == {"train": (len(beton), 2), "val": (len(KINDS), 0)}
    for path in images.rglob("*.jpg"):
        same = (back / path.relative_to(images)).read_bytes() == path.read_bytes()
        assert same == (path.stem != "turned")
    with Image.open(back / "train/class0/a.png.jpg") as image:
        assert image.size == (64, 48)
    assert restore(out / "val.beton", back) == {"val": (len(KINDS), 0)}  # which are there already
    assert run_command(make_parser(), argv=["prep", "--restore", str(out), "--to", str(back)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{back}: {len(beton)} files of train; 2 are JPEGs that prep changed, not their sources",
        f"{back}: {len(KINDS)} files of val; byte for byte the sources",
    ]
    (back / "val/class0/420.jpg").write_bytes(b"another")
    with pytest.raises(InputError, match=r"420\.jpg: is there already, with other bytes; name another folder$"):
        restore(out, back)


def test_any_byte_that_differs_is_found(images, tmp_path):
    out = tmp_path / "out"
    prepare("image-folder", images, out, SETTINGS, processes=1)
    path, numbers = out / "val.beton", np.random.RandomState(0)
    beton = open_beton(path)
    written = np.memmap(path, np.uint8, "r+")
    for sample in range(len(beton)):
        at, bit = int(beton.offset[sample] + numbers.randint(beton.size[sample])), 1 << numbers.randint(8)
        written[at] ^= bit
        assert any(f"sample {sample} " in line for line in verify(out))
        back, message = tmp_path / f"back{sample}", f"^1 of {len(KINDS)} files .* sample {sample} .*from its checksum"
        with pytest.raises(InputError, match=message):
            restore(path, back)
        assert len(contents(back)) == len(KINDS) - 1  # all others are there
        assert contents(back).items() <= contents(images).items()
        written[at] ^= bit
    train = open_beton(out / "train.beton")
    np.memmap(train.path, np.uint8, "r+")[int(train.offset[0]) + 40] ^= 1
    with pytest.raises(InputError, match=rf"^1 of {len(train) + len(KINDS)} files cannot be restored"):
        restore(out, tmp_path / "both")
    assert len(contents(tmp_path / "both")) == len(train) + len(KINDS) - 1  # also of the split after that


def test_restored_files_stay_within_the_folder(tmp_path, monkeypatch):
    """Whatever the samples' names: absolute, with `..`, the same file twice, 255 bytes, a dot first.

    Two samples of one place are restored only if they are the same.
    """
    monkeypatch.chdir(tmp_path)
    long, jpegs = "n" * 251 + ".jpg", jpegs_of("4:2:0")
    names = ["in/a.jpg", "in/.a.jpg", f"in/{long}", "in/ü \\n\n.jpg"]
    (tmp_path / "in").mkdir()
    for name, data in zip(names, jpegs, strict=False):
        Path(name).write_bytes(data)
    paths = [*names, str(tmp_path / "in/a.jpg"), "../" + tmp_path.name + "/in/a.jpg", "in/../in/a.jpg"]
    widemix.prepare({"train": [(path, 0) for path in paths]}, tmp_path / "out", encoding="coefficients")
    before = contents(tmp_path / "in")
    assert restore(tmp_path / "out", tmp_path / "back") == {"train": (6, 0)}  # in/a.jpg is there twice
    expected = {name: Path(name).read_bytes() for name in names}
    copies = (f"{tmp_path}/in/a.jpg"[1:], f"{tmp_path.name}/in/a.jpg")
    assert contents(tmp_path / "back") == expected | dict.fromkeys(copies, jpegs[0])
    assert contents(tmp_path / "in") == before
    sources = tmp_path / "out/train.sources"
    for name in ("/", "..", "a\0b"):
        lines = sources.read_bytes().split(b"\n")
        sources.write_bytes(b"\n".join([lines[0][:9] + name.encode(), *lines[1:]]))
        with pytest.raises(InputError, match=r"train\.sources: is damaged; prepare the folder again$"):
            restore(tmp_path / "out", tmp_path / "other")
    for changed in (lines[1:-2], [*lines[1:-1], lines[1], lines[2]]):
        sources.write_bytes(b"\n".join([*changed, b""]))
        with pytest.raises(InputError, match=r"train\.sources: is of another file; prepare the folder again$"):
            restore(tmp_path / "out", tmp_path / "other")
    assert not (tmp_path / "other").exists()
    for folder, data in (("deep/a", jpegs[0]), ("a", jpegs[1])):
        put(tmp_path, {f"{folder}/b.jpg": data})
    monkeypatch.chdir(tmp_path / "deep")
    widemix.prepare([("a/b.jpg", 0), ("../a/b.jpg", 0)], tmp_path / "two", encoding="coefficients")
    with pytest.raises(InputError, match=r"train\.beton: two samples would be the file a/b\.jpg"):
        restore(tmp_path / "two", tmp_path / "other")


def test_a_full_disk_ends_a_restore(images, tmp_path):
    """It is no error of one file."""
    prepare("image-folder", images, tmp_path / "out", PrepSettings(splits="val"), processes=1)
    with disk_of(500), pytest.raises(OSError, match="File too large"):
        restore(tmp_path / "out", tmp_path / "back")
    assert not list((tmp_path / "back").glob("lock*"))


def test_changed_images_have_names_of_their_own(tmp_path):
    """a.png becomes a JPEG, next to one that is named a.png.jpg; a JPEG keeps its name, however it ends.

    A name that is too long is told, after all others.
    """
    folder, turned = tmp_path / "images/train/a", Image.Exif()
    folder.mkdir(parents=True)
    turned[0x0112] = 6
    for name in ("a.png", "apng"):
        scene(0, 30, 30).save(folder / name, "PNG")
    for name in ("t.jpg", "t.JPEG", "t.jpe", "t.JFIF"):
        (folder / name).write_bytes(by_pillow(scene(1, 30, 30), exif=turned))
    (folder / "a.png.jpg").write_bytes(by_pillow(scene(1, 30, 30)))
    prepare("image-folder", folder.parents[1], tmp_path / "out", SETTINGS, processes=1)
    assert restore(tmp_path / "out", tmp_path / "back") == {"train": (7, 6)}
    names = {"a.png.jpg", "a.png.jpg.jpg", "apng.jpg", "t.jpg", "t.JPEG", "t.jpe", "t.JFIF"}
    assert set(contents(tmp_path / "back")) == {f"train/a/{name}" for name in names}
    assert (tmp_path / "back/train/a/a.png.jpg").read_bytes() == (folder / "a.png.jpg").read_bytes()
    scene(2, 30, 30).save(folder / f"{'n' * 250}.png")
    prepare("image-folder", folder.parents[1], tmp_path / "out", SETTINGS, processes=1, force=True)
    words = r"^1 of 8 files cannot be restored; the first: .*png\.jpg: File name too long$"
    with pytest.raises(InputError, match=words):
        restore(tmp_path / "out", tmp_path / "back2")
    assert len(contents(tmp_path / "back2")) == 7


def test_an_image_listed_twice_is_restored_once(tmp_path):
    """A JPEG named .png is the bytes of its source, so it keeps that name; damage of JPEGs is told too."""
    first, second = jpegs_of("4:2:0")[:2]
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.png").write_bytes(first)
    (tmp_path / "in/b.jpg").write_bytes(second)
    (tmp_path / "in/list.csv").write_text("path,label\na.png,x\nb.jpg,x\na.png,x\n")
    out = tmp_path / "out"
    prepare("csv", tmp_path / "in/list.csv", out, PrepSettings(restart_markers=False), processes=1)
    (tmp_path / "link").symlink_to(out)
    link = tmp_path / "link"
    for prepared, to in ((out, out), (out, link / "back"), (link, out / "back"), (out / "train.beton", out / "back")):
        with pytest.raises(InputError, match="lies within the source"):
            restore(prepared, to)
    assert restore(out, tmp_path / "back") == {"train": (2, 0)}
    assert contents(tmp_path / "back") == {"a.png": first, "b.jpg": second}
    (tmp_path / "back/a.png").write_bytes(first[::-1])
    with pytest.raises(InputError, match=r"a\.png: is there already, with other bytes"):
        restore(out, tmp_path / "back")
    at = int(open_beton(out / "train.beton").stop[1]) - 9
    np.memmap(out / "train.beton", np.uint8, "r+")[at] ^= 1
    with pytest.raises(InputError, match=r"^1 of 2 files cannot be restored; .* sample 1 "):
        restore(out, tmp_path / "others")
    assert contents(tmp_path / "others") == {"a.png": first}


def test_the_tables_of_segments_are_no_part_of_restored_files(tmp_path):
    (tmp_path / "in/train/a").mkdir(parents=True)
    (tmp_path / "in/train/a/b.jpg").write_bytes(by_pillow(scene(0, 90, 40)))
    prepare("image-folder", tmp_path / "in", tmp_path / "out", PrepSettings(), processes=1)
    assert open_beton(tmp_path / "out/train.beton").segments_size[0] > 0
    assert restore(tmp_path / "out", tmp_path / "back") == {"train": (1, 1)}
    assert contents(tmp_path / "back")["train/a/b.jpg"].endswith(b"\xff\xd9")


def test_two_restores_at_once_are_refused(images, tmp_path, fast_clock):
    prepare("image-folder", images, tmp_path / "out", SETTINGS, processes=1)
    busy = "another process is writing to it; wait until it ends"
    with lock_folder(tmp_path / "back"), pytest.raises(InputError, match=busy):
        restore(tmp_path / "out", tmp_path / "back")


def test_larger_images_are_shrunk_first(tmp_path):
    data = by_pillow(scene(0, 333, 250), quality=90)
    encoded = encode_bytes(tmp_path, data, encoding="coefficients", max_size=200)
    assert (encoded.mode, encoded.width, encoded.height) == (COEFFICIENTS, 200, 150)
    plain = encode_bytes(tmp_path, data, restart_markers=False, max_size=200)
    assert unpack(encoded.data) == plain.data


def test_damaged_images_are_left_out_or_repaired_as_before(tmp_path):
    data = by_pillow(scene(0, 333, 250), quality=90)
    half = len(data) // 2
    for damaged in (data[:half] + b"\xff\xd9", data[:half] + b"\xff\xd3" + data[half:]):
        before, now = (
            encode_bytes(tmp_path, damaged, max_size=0, encoding=kind) for kind in ("jpeg", "coefficients")
        )
        assert now.rule == before.rule != ""
        if before.data:
            assert now.mode == COEFFICIENTS
            pixels = (Image.open(io.BytesIO(each)).convert("RGB") for each in (before.data, unpack(now.data)))
            assert np.array_equal(*map(np.asarray, pixels))


@pytest.mark.skipif(not REAL.is_dir(), reason="real ImageNet files are not in shared/")
def test_real_images_are_restored(tmp_path):
    """All of them, in at most 1.25 times the bytes."""
    packed = restored = 0
    for path in sorted(REAL.rglob("*.JPEG")):
        data = path.read_bytes()
        found, reason = pack(data)
        assert found or reason == "progressive"
        if found:
            assert unpack(found) == data
            packed, restored = packed + len(found), restored + len(data)
    assert restored > 12e6
    assert packed < 1.25 * restored


def test_bytes_of_coefficients_and_of_their_jpegs(images, tmp_path, limits):

    out = tmp_path / "out"
    prepare("image-folder", images, out, SETTINGS, processes=1)
    count, jpegs, stored, before = count_bytes(out / "val.beton")
    beton = open_beton(out / "val.beton")
    packed = np.flatnonzero(beton.mode == COEFFICIENTS)
    sizes = [len(unpack(beton.bytes[beton.offset[n] :][: beton.size[n]].tobytes())) for n in packed]
    assert (count, stored, before) == (len(sizes), beton.size[packed].sum(), sum(sizes))
    assert jpegs == len(KINDS) - count > 0
    limits({"widemix.data_prep.original_jpeg.SAMPLED": len(sizes) - 1})
    chosen = slice(None, None, 2)
    estimated = sum(sizes[chosen]) * stored / beton.size[packed][chosen].sum()
    assert count_bytes(out / "val.beton") == (count, jpegs, stored, round(estimated))
    prepare("image-folder", images, tmp_path / "raw", PrepSettings(raw=True, splits="val"), processes=1)
    assert count_bytes(tmp_path / "raw/val.beton") == (0, 0, 0, 0)
    assert read_manifest(out).settings["encoding"] == "coefficients"


@pytest.mark.long
def test_ffcv_refuses_the_file(images, tmp_path):
    reader = pytest.importorskip("ffcv.reader", reason="FFCV is not installed")
    prepare("image-folder", images, tmp_path / "out", SETTINGS, processes=1)
    with pytest.raises(ValueError, match="custom field image"):
        reader.Reader(str(tmp_path / "out/val.beton"))
