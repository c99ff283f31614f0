"""Exports on a Hugging Face Hub, by huggingface_hub itself and a server of this machine; and as ONNX."""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.models.hub_server import Hub, serve
from tests.models.test_export import MIXER, OUTER, SECTIONS, trained
from widemix.errors import InputError, RunError
from widemix.evaluation.networks import load_network
from widemix.models.export import export_model
from widemix.models.hub import push, timm_name
from widemix.models.program import PACKAGES, write_onnx
from widemix.models.registry import build_model
from widemix.models.timm_registry import load_pretrained
from widemix.training.finetune import load_init_weights

CARD = "# A network\n\nimport timm; timm.create_model('local-dir:exported', pretrained=True)\n"


@pytest.fixture
def hub(system, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    monkeypatch.setenv("HF_TOKEN", "hf_of_this_test")
    with serve() as hub:
        constants = {
            "ENDPOINT": hub.address,
            "HUGGINGFACE_CO_URL_TEMPLATE": hub.address + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_DISABLE_XET": True,  # a protocol of huggingface.co's own
            "HF_HUB_CACHE": str(tmp_path / "cache"),
        }
        system({f"huggingface_hub.constants.{name}": value for name, value in constants.items()})
        yield hub


def exported(tmp_path: Path) -> tuple[torch.nn.Module, Path]:
    model = trained(MIXER)
    export_model(model, MIXER, tmp_path / "exported", **OUTER, card=lambda program: CARD)
    return model, tmp_path / "exported"


@pytest.mark.filterwarnings("ignore")  # huggingface_hub's, about how it calls httpx
def test_what_is_pushed_is_loaded_from_the_hub(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, folder = exported(tmp_path)
    assert push(folder, "lab/mixer") == f"{hub.address}/lab/mixer"
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    card = files.pop("README.md").replace(b"local-dir:exported", b"hf-hub:lab/mixer")
    assert hub.files == {f"lab/mixer/{name}": data for name, data in {**files, "README.md": card}.items()}
    assert hub.created == [("mixer", False)]
    (folder / "README.md").unlink()
    push(folder, "lab/other", private=True)
    assert hub.created[1:] == [("other", True)]
    (folder / "config.json").write_bytes(files["config.json"] + b"\n")
    assert push(folder, "lab/mixer") == f"{hub.address}/lab/mixer"  # again
    assert hub.files["lab/mixer/config.json"] == files["config.json"] + b"\n"
    assert len(hub.created) == 2
    (folder / "README.md").write_text(CARD)
    monkeypatch.chdir(folder)
    push(Path(), "lab/here")
    assert hub.files["lab/here/README.md"].decode() == CARD.replace("local-dir:exported", "hf-hub:lab/here")
    network = load_network("hf:lab/mixer")
    x = torch.randn(2, 3, 16, 16)
    assert torch.equal(network.module(x), model(x))
    assert network.classes == ("ant", "bee", "cat")
    assert network.data.mean == (0.1, 0.2, 0.3)  # type: ignore[union-attr]
    fresh = build_model(MIXER, 16, 3).eval()
    assert load_init_weights(fresh, "hf:lab/mixer") == []
    assert torch.equal(fresh(x), model(x))


@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_shared_is_one_line(hub: Hub, tmp_path: Path, system) -> None:
    _, folder = exported(tmp_path)
    with pytest.raises(InputError, match="hf:lab/none: cannot be loaded"):
        load_network("hf:lab/none")
    for hub.refuse in (401, 403, 404):
        with pytest.raises(InputError, match=r"lab/mixer: .*`hf auth login`, or HF_TOKEN, says who you are"):
            push(folder, "lab/mixer")
    hub.refuse = 400
    with pytest.raises(RunError) as raised:
        push(folder, "lab/mixer")
    assert "who you are" not in str(raised.value)
    (tmp_path / "config.json").touch()
    with pytest.raises(InputError, match=r"has no model\.safetensors"):
        push(tmp_path, "lab/mixer")
    system({"huggingface_hub.constants.ENDPOINT": "http://127.0.0.1:9"})
    with pytest.raises(RunError, match=r"http://127\.0\.0\.1:9: "):
        push(folder, "lab/mixer")


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("timm:mixer_b16_224", "mixer_b16_224"),
        ("hf:lab/mixer-1.5_b", "hf-hub:lab/mixer-1.5_b"),
        ("hf:lab/mixer@v2/a", "hf-hub:lab/mixer@v2/a"),
        ("mixer_b16_224", None),
        ("runs/timm:one", None),
    ],
)
def test_names_of_timm_and_of_the_hub(name: str, known: str | None) -> None:
    assert timm_name(name) == known


def test_a_network_that_timm_does_not_know_is_one_line(system) -> None:
    with pytest.raises(InputError, match=r"^given: cannot be loaded \(.*\); did you mean timm:mixer_b16_224\?$"):
        load_pretrained("mixer_b16_242", "given")

    def fail(*_: object, **__: object) -> None:
        raise OSError(" \n")

    system({"timm.create_model": fail, "socket.getaddrinfo": lambda *_: [1]})
    with pytest.raises(InputError, match=r"^given: cannot be loaded \(OSError\)$"):
        load_pretrained("mixer_b16_224", "given")
    system({"socket.getaddrinfo": fail})
    with pytest.raises(
        InputError, match=r"^given: cannot be loaded \(\S+ can't be reached, and \S+ does not have it\); "
    ):
        load_pretrained("mixer_b16_224", "given")


needs_onnx = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, PACKAGES)), reason="pip install 'widemix[onnx]' brings what ONNX needs"
)


@needs_onnx
@pytest.mark.filterwarnings("ignore")  # of the exporter
def test_an_export_as_onnx_computes_the_modules_logits(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    model = trained(SECTIONS["rp"])
    export_model(model, SECTIONS["rp"], tmp_path / "exported", **OUTER, onnx=True)
    session = onnxruntime.InferenceSession(str(tmp_path / "exported/model.onnx"), providers=["CPUExecutionProvider"])
    images = torch.randn(7, 3, 16, 16)
    said = {name: json.loads(text) for name, text in session.get_modelmeta().custom_metadata_map.items()}
    assert said == {"label_names": ["ant", "bee", "cat"], "mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]}
    (logits,) = session.run(["logits"], {"images": images.numpy()})
    torch.testing.assert_close(torch.from_numpy(logits), model(images), rtol=1e-4, atol=1e-5)
    with pytest.raises(RuntimeError, match="onnxruntime's logits differ"):
        write_onnx(model, 16, tmp_path / "other.onnx", tolerance=0.0)
    write_onnx(trained(SECTIONS["sw_mlp"]), 16, tmp_path / "sparse.onnx")
