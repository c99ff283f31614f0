"""Recipe files: what they say, what they refuse, and in which words."""

import json
import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from tests.clone import ROOT
from widemix.cli.parser import make_parser
from widemix.errors import InputError
from widemix.estimate.recipe_tables import shipped
from widemix.optim.section import OptimSection
from widemix.recipe import (
    SECTIONS,
    Recipe,
    check_world,
    differences,
    dump_recipe,
    flat_recipe,
    key_names,
    keys,
    load_recipe,
    recipe_hash,
    suggest,
)
from widemix.recipe.files import find_study
from widemix.recipe.yaml_text import dump_yaml, parse_yaml, yaml_text

SHIPPED = shipped(ROOT / "recipes")
DIGITS = ROOT / "recipes/digits/rp_mixer.yaml"


@pytest.fixture
def write(tmp_path):
    def write(text, name="recipe.yaml"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_shipped_recipe_is_valid_and_survives_a_round_trip(path, write):
    recipe = load_recipe(path)
    assert load_recipe(write(dump_recipe(recipe))) == recipe


def test_a_recipe_of_values_is_that_of_the_file():
    recipe = load_recipe(DIGITS)
    values = recipe.model_dump()
    assert Recipe(**values) == recipe
    assert Recipe(**{name: getattr(recipe, name) for name in Recipe.model_fields}) == recipe
    for build in (lambda: Recipe.model_validate(values | {"optim": 5}), lambda: OptimSection(lr=-1)):
        with pytest.raises(ValidationError):  # pydantic's own, as the class says
            build()


def test_no_key_takes_a_value_of_another_type():
    recipe, types = load_recipe(DIGITS), set()
    for section in (getattr(recipe, name) for name in SECTIONS):
        values = section.model_dump()
        for key, value in values.items():
            if isinstance(value, (int, float)):
                types.add(type(value))
                for other in (str(value), int(value)) if isinstance(value, bool) else (str(value),):
                    with pytest.raises(ValidationError, match=key):
                        type(section)(**values | {key: other})
    assert types == {bool, int, float}


def test_imagenet_recipes_say_what_the_paper_says():
    recipe = load_recipe(ROOT / "recipes/imagenet/mixer_b16.yaml")
    assert (recipe.optim.name, recipe.optim.lr, recipe.optim.weight_decay) == ("adamw", 1e-3, 0.05)
    assert (recipe.train.epochs, recipe.train.global_batch) == (300, 32 * 4 * 32)
    assert (recipe.schedule.warmup_epochs, recipe.schedule.warmup_lr, recipe.schedule.min_lr) == (5, 1e-6, 1e-5)
    augment = recipe.augment
    assert (augment.auto_augment, augment.re_prob, augment.smoothing) == ("rand-m9-mstd0.5-inc1", 0.25, 0.1)
    assert (augment.mixup, augment.cutmix, augment.mixup_switch_prob) == (0.8, 1.0, 0.5)
    check_world(recipe, 128)


def test_a_study_that_is_there_comes_before_shipped_ones(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_study("figure7.yaml").samefile(ROOT / "recipes/studies/figure7.yaml")
    Path("figure7.yaml").touch()
    assert find_study("figure7.yaml") == Path("figure7.yaml")


def test_a_folder_hides_no_shipped_recipe_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits/mixer").mkdir(parents=True)
    assert load_recipe("digits/mixer") == load_recipe(ROOT / "recipes/digits/mixer.yaml")


@pytest.mark.parametrize("name", ["digits/mixer", "digits/mixer.yaml", "recipes/digits/mixer.yaml"])
def test_a_recipe_anywhere_extends_a_shipped_one_by_its_name(tmp_path, name):
    own = tmp_path / "own.yaml"
    own.write_text(f"extends: {name}\ntrain: {{epochs: 3}}\n")
    shipped = load_recipe(ROOT / "recipes/digits/mixer.yaml", [("train.epochs", "3")])
    assert load_recipe(own) == shipped
    (tmp_path / "digits").mkdir()
    (tmp_path / "digits/mixer.yaml").write_text(
        f"extends: {ROOT}/recipes/digits/mixer.yaml\nmodel: {{channels: 24}}\n"
    )
    assert (load_recipe(own).model.channels == 24) == (
        name == "digits/mixer.yaml"
    )  # a file that is there comes first


def test_extends_merges_mappings_and_replaces_the_rest(write):
    write("augment: {scale: [0.5, 1.0], hflip: 0.0}\ntrain: {epochs: 3, global_batch: 8}", "base.yaml")
    path = write(
        "extends: base.yaml\naugment: {scale: [0.1, 0.2]}\ndata: {path: x, num_classes: 2, image_size: 8}\n"
        "model: {kind: s_mixer, patch_size: 2, channels: 4, depth: 1}\noptim: {lr: 1e-3}"
    )
    recipe = load_recipe(path)
    assert recipe.augment.scale == (0.1, 0.2)
    assert recipe.augment.hflip == 0.0
    assert recipe.optim.lr == 0.001  # YAML 1.1 alone would read a string


def test_extends_is_relative_to_the_file_that_says_it(write, tmp_path, monkeypatch):
    """Over two steps, of which each file has the keys that no later one has."""
    for name in ("a/b", "c"):
        (tmp_path / name).mkdir(parents=True)
    write(f"extends: {DIGITS}\ntrain: {{epochs: 5, seed: 5}}\noptim: {{lr: 0.5}}", "c/first.yaml")
    write("extends: ../../c/first.yaml\ntrain: {seed: 6}\nlog: {every: 6}", "a/b/second.yaml")
    path = write("extends: b/second.yaml\nlog: {every: 7}", "a/third.yaml")
    monkeypatch.chdir(tmp_path / "c")
    recipe = load_recipe(path)
    assert (recipe.train.epochs, recipe.train.seed, recipe.log.every, recipe.optim.lr) == (5, 6, 7, 0.5)


def test_a_section_that_is_none_takes_no_override(write):
    for text in ("3", "[epochs, 3]", ""):
        path = write(f"extends: {DIGITS}\ntrain: {text}\n")
        with pytest.raises(InputError, match=r"^train: must be a mapping$"):
            load_recipe(path, [("train.epochs", "3")])
    path = write(f"extends: {DIGITS}\n")
    assert load_recipe(path, [("faults.max_rollbacks", "5")]).faults.max_rollbacks == 5  # which the file has not


def test_a_circle_of_recipes_is_named(write, tmp_path, monkeypatch):
    write("extends: b.yaml", "a.yaml")
    write("extends: c.yaml", "b.yaml")
    write("extends: b.yaml", "c.yaml")
    with pytest.raises(InputError, match=rf"^{tmp_path}/b.yaml: extends itself through {tmp_path}/c.yaml$"):
        load_recipe(tmp_path / "a.yaml")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link.yaml").symlink_to("c.yaml")
    for name in ("a.yaml", "link.yaml"):  # by whatever path
        with pytest.raises(InputError, match="extends itself through"):
            load_recipe(name)


def test_a_missing_base_is_not_suggested_as_itself(write, tmp_path):
    path = write("extends: recipes.yaml")
    write("", ".recipes.yaml")  # hidden
    with pytest.raises(InputError, match=r"recipes\.yaml: no such recipe; give a file"):
        load_recipe(path)
    write("", "recipe_s.yaml")
    with pytest.raises(InputError, match=rf"did you mean {tmp_path}/recipe_s\.yaml\?"):
        load_recipe(path)


def test_another_kind_keeps_the_keys_it_has(write):
    base = write(f"extends: {ROOT}/recipes/mnist/dense.yaml\nmodel: {{width: 196}}", "base.yaml")
    of_file = load_recipe(write(f"extends: {base}\nmodel: {{kind: sw_mlp, patch_size: 2, depth: 2, density: 0.5}}"))
    assert (of_file.model.kind, of_file.model.width) == ("sw_mlp", 196)  # and matrices of the base, which it has not
    # Of the same family, whose keys all stay.
    changed = [("model.depth", "3"), ("model.kind", "mixer"), ("model.expansion", "2")]
    mixer = load_recipe("digits/rp_s_mixer", changed)
    assert (mixer.model.kind, mixer.model.depth, mixer.model.permutation) == ("mixer", 3, "random")
    same = write("extends: digits/rp_s_mixer\nmodel: {kind: mixer, depth: 3, expansion: 2}", "same.yaml")
    assert load_recipe(same) == mixer


WORDS = [
    *("O #2", "1e3", "null", "~", "yes", "0123", "1_000", "2020-01-01", "a: b", "[a", "{}", "&x", "*x"),
    *(" O ", "it's", "- a", "---", "a\tb", "'a' 'b'", '"a" # "b"', "%a", "@a", "`a", "a,b", "?", "|", ">", "!x"),
]


@pytest.mark.parametrize("text", WORDS)
@pytest.mark.parametrize("name", ["data.path", "data.train_split", "data.eval_split", "train.init_from"])
def test_an_override_of_a_path_is_no_yaml(name, text):
    """`--data.path 'O #2'` was the folder O."""
    found = flat_recipe(load_recipe(DIGITS, {"data.path": "d", name: text}.items()))[name]
    assert found == (None if text in ("null", "~") and name == "train.init_from" else text)


def test_quotes_around_a_path_are_no_part_of_it():
    for text, path in {"'it''s #2'": "it's #2", '"a\\tb"': "a\tb", "'''a'''": "'a'", '"null"': "null"}.items():
        assert load_recipe(DIGITS, [("data.path", text)]).data.path == path
    assert load_recipe(DIGITS, [("data.path", "d"), ("train.init_from", "'null'")]).train.init_from == "null"
    with pytest.raises(InputError, match=r"engine\.kind 'ddp # x': input should be"):
        load_recipe(DIGITS, [("engine.kind", "ddp # x")])


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        ("extends: ~/base.yaml", {"data.path": "~/d", "train.init_from": "~/a~"}),
        ("extends: ~/base.yaml", {"data.path": "'~/d'", "train.init_from": '"~/a~"'}),
        ("extends: digits/mixer\ndata: {path: ~/d}\ntrain: {init_from: ~/a~}", {}),
        ("extends: digits/mixer\ndata: {path: ~/d}", {"train.init_from": "~/a~"}),
    ],
)
def test_a_path_may_begin_with_the_users_home(text, overrides, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "base.yaml").write_text("extends: digits/mixer")
    (tmp_path / "recipe.yaml").write_text(text)
    recipe = load_recipe("~/recipe.yaml", overrides.items())
    assert (recipe.data.path, recipe.train.init_from) == (f"{tmp_path}/d", f"{tmp_path}/a~")


def test_overrides_are_yaml_and_win():
    overrides = [("train.epochs", "7"), ("optim.betas", "[0.8, 0.9]"), ("augment.auto_augment", "null")]
    recipe = load_recipe(DIGITS, overrides)
    assert (recipe.train.epochs, recipe.optim.betas, recipe.augment.auto_augment) == (7, (0.8, 0.9), None)
    assert load_recipe(DIGITS, iter([["train.epochs", "3"], *overrides])) == recipe  # the last one of a key


def test_a_recipe_is_frozen():
    recipe = load_recipe(DIGITS)
    for section, name, value in (
        (recipe, "train", recipe.train),
        (recipe.train, "epochs", 3),
        (recipe.model, "depth", 1),
    ):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(section, name, value)


def test_hash_and_differences_follow_the_values():
    one, other = load_recipe(DIGITS), load_recipe(DIGITS, [("optim.lr", "0.5"), ("log.every", "3")])
    assert differences(one, other) == ["optim.lr", "log.every"]
    shallow, with_plugin = load_recipe("mnist/dense"), one.model_copy(update={"plugins": ("json",)})
    names = differences(one, shallow)
    assert {"model.kind", "model.width", "model.patch_size"} <= {*names}  # those of either network
    assert sorted(names) == sorted(differences(shallow, one))
    assert differences(one, with_plugin) == ["plugins"]
    assert recipe_hash(one) != recipe_hash(with_plugin)
    assert flat_recipe(one) == flat_recipe(with_plugin)
    changed = {name for name, key in keys().items() if name in flat_recipe(one, exclude_defaults=True)}
    assert {"optim.lr", "model.kind", "train.epochs"} <= changed
    assert not {"train.seed", "log.images", "augment.cutmix"} & changed
    assert flat_recipe(one)["train.seed"] == 0
    assert recipe_hash(one) != recipe_hash(other)
    assert recipe_hash(one) == recipe_hash(load_recipe(DIGITS))
    orders = ("{patch_size: 4, embed_dim: 80}", "{embed_dim: 80, patch_size: 4}")
    vit, turned = (load_recipe("cifar10/vit", [("model.arguments", text)]) for text in orders)
    assert vit == turned
    assert recipe_hash(vit) == recipe_hash(turned)
    assert differences(vit, load_recipe("cifar10/vit", [("model.arguments", "{patch_size: 4}")])) == [
        "model.arguments"
    ]


def test_the_table_of_keys_has_their_values_and_defaults():
    table = keys()
    assert key_names() == [*table]
    assert (table["train.epochs"].values, table["train.epochs"].default) == ("int", ...)
    assert (table["train.seed"].default, table["train.ema_decay"].default) == (0, None)
    assert table["data.order"].values == "auto|random|paged"
    assert table["data.kind"].values == "images|text"  # of both kinds of data
    assert table["data.kind"].default is ...  # of which one has to say it
    kinds = table["model.kind"].values.split("|")
    assert {"mixer", "s_mixer", "shallow", "timm", "text_mixer"} <= {*kinds}
    assert len(kinds) == len({*kinds})


@pytest.mark.parametrize(
    ("name", "table", "words"),
    [
        ("train.epoch", None, "; did you mean train.epochs?"),
        ("xyzzy", [f"k{number}" for number in range(12)], "; `widemix train --help` lists them"),
        ("xyzzy", ["k0", "k1"], "; choose from k0, k1"),
    ],
)
def test_what_was_meant_is_suggested(name, table, words):
    assert suggest(name, table or key_names()) == words


@pytest.mark.parametrize(("world", "fits"), [(1, True), (2, True), (4, True), (3, False), (8, False)])
def test_the_batch_falls_into_whole_groups_on_every_rank(world, fits):
    with nullcontext() if fits else pytest.raises(ValueError, match="does not divide"):
        check_world(load_recipe(DIGITS), world)  # 64 images in groups of 16


def test_help_shows_the_values_of_a_key_and_no_annotations(capsys):
    listed = []
    for section in SECTIONS:
        with pytest.raises(SystemExit):
            make_parser().parse_args(["train", "--help", section])
        own = re.findall(r"^  --(\w+\.\w+) (.+)$", capsys.readouterr().out, re.MULTILINE)
        assert all(name.startswith(f"{section}.") for name, _ in own)
        listed += own
    assert dict(listed).keys() == keys().keys()
    shown = dict(listed)
    assert (shown["train.keep_best"], shown["train.loss"]) == ("str|null", "softmax|sigmoid|mse")
    assert (shown["train.epochs"], shown["train.ema_decay"], shown["optim.betas"]) == ("int", "float|null", "list")
    for name, values in listed:
        parts = values.split("|")
        assert len(set(parts)) == len(parts), f"{name} {values}"
        assert all(re.fullmatch(r"\w+", part) for part in parts), f"{name} {values}"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("0", 0), ("-3", -3), ("+3", 3), ("1_000", 1000), ("0x1F", 31), ("0b11", 3), ("1e", "1e"), ("08", "08")),
        *(("1e3", 1000.0), ("-1E-2", -0.01), (".5", 0.5), ("3.", 3.0), ("1.5e+2", 150.0), (".inf", float("inf"))),
        *(("1:30", "1:30"), ("2020-01-01", "2020-01-01"), ("-010", "-010"), ("~", None), ("true", True)),
        ("[1, 1e-3]", [1, 0.001]),
    ],
)  # fmt: skip
def test_a_number_is_one_of_yaml_1_2(text, value):
    found = parse_yaml(text)
    assert (found, type(found)) == (value, type(value))


def test_what_has_been_read_may_be_changed_and_read_again():
    parse_yaml("{a: [1, 2]}")["a"].append(3)
    assert parse_yaml("{a: [1, 2]}") == {"a": [1, 2]}


TEXTS = ["/data/set #2", "a: b", "123", "1e5", ".5e-3", "010", "20:30", "no", "null", "", " a", "[a", "'a'"]


PLAIN = ["/data/set", "rand-m9-mstd0.5-inc1", "20:30", "2020-01-01", "010", [0.9, 1e-5], None, True, 3, 1e-8]


@pytest.mark.parametrize("value", [*TEXTS, 1e-5, 1e22, 10, *PLAIN])
def test_a_value_is_written_as_it_is_read(value):
    """A run on the folder 1e5 could not be resumed, one on "set #2" read another. YAML 1.1, of other tools, too."""
    assert parse_yaml(yaml_text(value)) == value
    assert value not in PLAIN or yaml_text(value) == (value if isinstance(value, str) else json.dumps(value))
    text = dump_yaml({"data": {"path": value}})
    assert parse_yaml(text) == yaml.safe_load(text) == {"data": {"path": value}}


def test_what_a_run_keeps_is_in_its_order():
    text = dump_yaml({"train": {"seed": 1, "epochs": 2}, "data": [2, 1]})
    assert " ".join(text.split()) == "train: seed: 1 epochs: 2 data: - 2 - 1"
    assert [*parse_yaml(dump_recipe(load_recipe(DIGITS)))] == ["plugins", *SECTIONS]
