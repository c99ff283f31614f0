"""A family of somebody else's, outside the package; tests/end_to_end/test_extensions.py has it in every command."""

import subprocess
import sys
from typing import Literal

import pytest

from tests.clone import CLONE
from tests.end_to_end.extended import Pixels, PixelsSection
from widemix.errors import InputError
from widemix.models import families
from widemix.models.cost import model_cost
from widemix.models.families import KINDS, register
from widemix.models.mixer.section import MixerSection
from widemix.models.section import ModelSection


def test_what_a_section_lacks_is_one_line():
    class NoKind(ModelSection):
        def build(self, image_size, num_classes):
            return Pixels(image_size, 2, num_classes)

    class NoSpec(ModelSection):
        kind: Literal["no_spec"]

    class Taken(PixelsSection):
        kind: Literal["mixer"]

    class OfTimm(PixelsSection):
        kind: Literal["resnet18"]

    class Text(PixelsSection):
        takes = "text"

    before = dict(KINDS)
    for section, words in (
        (NoKind, r"NoKind: has no kind; declare `kind: Literal\[\.\.\.\]`"),
        (NoSpec, "NoSpec: must define build"),
        (Taken, "Taken: kind mixer is MixerSection's already"),
        (OfTimm, "kind resnet18: is the name of one of timm's networks"),
    ):
        with pytest.raises(InputError, match=words):
            register(section)
    assert before == KINDS
    with pytest.raises(InputError, match="does not say how many tokens it takes; define input_shape"):
        model_cost(Text(kind="pixels", width=2), 8, 3)


def test_a_network_that_cannot_be_counted_is_one_line():
    class Looks(Pixels):
        def forward(self, x):
            return super().forward(x) * x.max().item()

    class LooksSection(PixelsSection):
        def build(self, image_size, num_classes):
            return Looks(image_size, self.width, num_classes)

    with pytest.raises(InputError, match=r"counted on the meta device \(.*\); define layer_costs") as caught:
        model_cost(LooksSection(kind="pixels", width=2), 8, 3)
    assert "\n" not in str(caught.value)


def test_a_section_is_registered_once_and_told_of():
    seen = []
    families.WATCHERS.append(seen.append)
    try:
        assert register(MixerSection) is MixerSection  # again
    finally:
        families.WATCHERS.pop()
    assert seen == [MixerSection]
    assert [section.__name__ for section in families.sections()][:2] == ["MixerSection", "SwMlpSection"]


def test_every_family_loads_without_torch():
    code = (
        "import sys\nfrom widemix.models.families import sections, named_networks\n"
        "from widemix.recipe import keys, load_recipe\n"
        "load_recipe('digits/rp_mixer'), load_recipe('mnli/transformer'), keys()\n"
        "summaries = [section.summary(side) for section, side in named_networks().values()]\n"
        "print(len(summaries) > len(sections()), *(name in sys.modules for name in ('torch', 'timm', 'numpy')))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=CLONE, check=True)
    assert answer.stdout.split() == ["True", "False", "False", "False"]
