"""Experiments: three spellings, presets, identity, errors."""

import enum
import hashlib
import json
import re

import pytest
import yaml
from pydantic import Field

from feddg.comparison.plan import setting_point
from feddg.data.data_set import DATA_SETS
from feddg.errors import ExperimentError
from feddg.experiment import (
    SCHEMA,
    Experiment,
    explain,
    load_experiment,
    load_stored,
)
from feddg.methods.base import METHODS, MethodSettings
from feddg.methods.baselines import FedAvg
from feddg.methods.composition import build_method
from feddg.privacy.defence import DEFENCES
from feddg.settings import ExperimentSettings, PrivacySettings, leaves, merge, without_effect


def test_shorthand_yaml_and_full_spelling_are_one_experiment(tmp_path):
    short = Experiment(data="digits", method="pardon", hold_out="sketch", seed=3)
    file = tmp_path / "e.yaml"
    file.write_text(
        "data: {source: digits}\nmethod: {name: fisc}\nhold_out: {test: [sketch]}\nseed: 3\n"
    )
    assert load_experiment(file).id == short.id
    assert Experiment(**yaml.safe_load(short.to_yaml())).id == short.id


def test_every_setting_counts_and_name_and_device_do_not():
    base = Experiment(data="digits", hold_out="sketch")
    same = Experiment(data="digits", hold_out="sketch", name="x", device="cpu")
    assert same.id == base.id
    for change in ({"seed": 1}, {"train": {"lr": 0.5}}, {"method": {"name": "pardon"}}):
        assert Experiment(**{"data": "digits", "hold_out": "sketch", **change}).id != base.id


def test_what_is_said_in_another_way_is_the_same_experiment(tmp_path):
    file = tmp_path / "a.yaml"
    file.write_text(
        "data: digits\nhold_out: {val: photo, test: ink}\n"
        "train: {augmentation: {crop_scale: [0.5, 1], flip: 0.5}}\n"
    )
    for said in ("sketch", ["sketch"], {"test": ["sketch"], "val": []}):
        assert load_experiment(file, {"hold_out": said}).hold_out.val == ()
    # An augmentation takes the other's place, and does not fill it up.
    said = {"train": {"augmentation": {"flip": 0.5}}}
    assert load_experiment(file, said).train.augmentation == {"flip": 0.5}
    # A data set's own preset, by its name.
    for source, preset in (("folder", "folder"), ("table", "folder"), ("pacs", "strong")):
        fields = {"data": source, "hold_out": "sketch", "model": {"weights": None}}
        assert Experiment(**fields, preset=preset).id == Experiment(**fields).id


def test_without_a_preset_pacs_is_trained_by_the_recipe_and_by_name_as_in_the_paper():
    recipe = Experiment(data="pacs", hold_out="sketch")
    assert recipe.preset == "strong"
    assert (recipe.train.optimizer, recipe.train.schedule, recipe.model.normalization) == (
        "sgd",
        "cosine",
        "frozen",
    )
    scratch = Experiment(data="pacs", hold_out="sketch", model={"weights": None})
    assert (scratch.train.optimizer, scratch.train.schedule, scratch.train.local_steps) == (
        "adam",
        "constant",
        None,
    )


def test_the_papers_protocol_is_the_preset_called_pacs():
    hold_out = {"val": "photo", "test": "sketch"}
    paper = Experiment(data="pacs", preset="pacs", method="pardon", hold_out=hold_out)
    assert (paper.clients.number, paper.clients.per_round, paper.clients.heterogeneity) == (
        100,
        20,
        0.1,
    )
    assert (paper.model.backbone, paper.model.embedding, paper.model.normalization) == (
        "resnet50",
        "linear",
        "frozen",
    )
    assert (paper.train.rounds, paper.train.local_epochs, paper.train.batch_size) == (50, 1, 32)
    assert (paper.train.optimizer, paper.train.lr, paper.data.image_size) == ("adam", 3e-5, 224)
    settings = paper.method.settings
    assert (settings["gamma1"], settings["gamma2"], settings["margin"]) == (0.75, 0.2, 0.3)
    home = Experiment(data={"source": "folder"}, preset="office_home", method="pardon")
    assert home.method.settings["gamma2"] == 0.1
    wild = Experiment(data={"source": "folder"}, preset="iwildcam", method="pardon")
    assert (wild.method.settings["margin"], wild.clients.number, wild.clients.per_round) == (
        1.0,
        243,
        24,
    )


def test_what_the_user_says_wins_over_presets_and_flags_over_the_file(tmp_path):
    file = tmp_path / "e.yaml"
    file.write_text("data: pacs\nmethod: {name: pardon, gamma1: 0.5}\ntrain: {lr: 0.1}\n")
    read = load_experiment(file, {"train": {"lr": 0.2}, "method": {"margin": 1.0}})
    assert read.train.lr == 0.2
    assert read.method.settings["gamma1"] == 0.5
    assert read.method.settings["margin"] == 1.0
    assert read.train.rounds == 20


def test_statistics_are_frozen_only_for_pretrained_weights():
    assert Experiment(data="digits").model.normalization == "train"
    assert Experiment(data="pacs").model.normalization == "frozen"
    assert Experiment(data="pacs", model={"weights": "none"}).model.normalization == "train"
    assert Experiment(data="pacs", model={"weights": "none"}).model.weights is None


def test_mistakes_name_the_field_and_the_nearest_known_one(subtests):
    for fields, words in [
        ({"method": "pardn"}, "did you mean 'pardon'"),
        ({"method": {"name": "pardon", "gama1": 1}}, "did you mean 'gamma1'"),
        ({"method": {"name": "pardon", "margin": -1}}, "margin: "),
        ({"method": {"name": "fedavg", "mu": 1}}, "there are: none"),
        ({"trian": {}}, "did you mean 'train'"),
        ({"train": {"round": 3}}, "did you mean 'rounds'"),
        ({"train": {"lr": 0}}, "train.lr"),
        ({"train": {"lr": float("nan")}}, "train.lr"),
        ({"clients": {"heterogeneity": 1.5}}, "clients.heterogeneity"),
        ({"preset": "pax"}, "unknown preset 'pax' (did you mean 'pacs'?)"),
        ({"train": {"augmentation": "pax"}}, "unknown augmentation 'pax' (did you mean 'pacs'?)"),
        ({"train": {"augmentation": 3}}, "train.augmentation"),
        ({"seed": "x"}, "seed"),
        ({"clients": {"number": 2, "per_round": 5}}, "at most 2"),
        ({"clients": {"per_round": 7}}, "there are 6 clients"),
    ]:
        with subtests.test(fields=fields, words=words):
            with pytest.raises(ExperimentError) as caught:
                Experiment(**{"data": "digits", **fields})
            assert words in str(caught.value)


def test_files_that_are_no_experiment(tmp_path):
    for content in ("a: [", "just words"):
        file = tmp_path / "bad.yaml"
        file.write_text(content)
        with pytest.raises(ExperimentError, match=r"bad\.yaml"):
            load_experiment(file)
    with pytest.raises(ExperimentError, match="does not exist"):
        load_experiment(tmp_path / "none.yaml")


def test_names_of_domains_may_be_numbers_and_are_never_lost():
    for said in (2019, [2019], {"test": 2019}, {"test": [2019], "val": None}, "2019"):
        assert Experiment(data="digits", hold_out=said).hold_out.test == ("2019",)
    assert Experiment(data="digits", hold_out=1.5).hold_out.test == ("1.5",)
    twice, once = (Experiment(data="digits", hold_out=said) for said in (["ink"] * 2, "ink"))
    assert (twice, twice.id, twice.label) == (once, once.id, once.label)
    for said in (False, {"test": False}, {"test": ["se", False]}):  # YAML's no
        with pytest.raises(ExperimentError, match=r"hold_out\.test"):
            Experiment(data="digits", hold_out=said)
    data = {"source": "digits", "leave_out": "ink", "subgroups": "sex"}
    assert (
        Experiment(data=data).data
        == Experiment(data=data | {"leave_out": ["ink"], "subgroups": ["sex"]}).data
    )


def test_a_field_of_which_nothing_is_said_is_as_if_it_were_not_there():
    empty = Experiment(data="digits", method={"name": "fedprox", "settings": None}, defences=None)
    assert empty == Experiment(data="digits", method="fedprox")


def test_labels_are_file_names():
    label = Experiment(data="digits", hold_out="sketch", name="a/b c:d").label
    assert "/" not in label
    assert " " not in label
    assert label.endswith(Experiment(data="digits", hold_out="sketch").id)


def test_a_label_of_many_domains_is_still_a_file_name(tmp_path):
    held = [f"hospital-{number}" for number in range(60)]
    one = Experiment(data="digits", hold_out=held)
    (tmp_path / one.label).mkdir()
    assert one.label.startswith("fedavg-digits-hospital-0-hospital-1-")
    assert one.label.endswith(f"-{one.id}")


def test_a_presets_share_of_clients_gives_way_to_the_number_that_is_said():
    few = Experiment(data="office_home", clients=8)
    assert (few.clients.number, few.clients.per_round) == (8, None)
    assert Experiment(**few.model_dump(mode="json")) == few
    found = explain({"data": "office_home", "clients": 8})["clients.per_round"]
    assert "the 20 of preset office_home" in found.source


def test_passes_that_are_asked_for_are_taken_in_place_of_a_presets_steps():
    asked = {"data": "digits", "preset": "strong", "train": {"local_epochs": 3}}
    train = Experiment(**asked).train
    assert (train.local_epochs, train.local_steps, train.lr) == (3, None, 0.001)
    both = Experiment(**merge(asked, {"train": {"local_steps": 16}}))
    assert both.train.local_steps == 16
    assert explain(asked)["train.local_steps"].source == "local_epochs"
    assert Experiment(data="digits", preset="strong").train.local_steps == 16


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda fields: fields["train"].pop("lr"), r": it lacks train\.lr$"),
        (lambda fields: fields.pop("privacy"), r": it lacks privacy\.clipping, .*"),
        (lambda fields: fields["train"].update(speed=1), r": unknown field 'train\.speed'"),
        (
            lambda fields: fields["method"]["settings"].update(old=1),
            r": .*unknown field 'old'",
        ),
        (lambda fields: fields["clients"].update(per_round=50), r": .*use at most 6"),
    ],
)
def test_a_run_folders_experiment_of_another_version_is_refused_in_one_line(
    tmp_path, change, words
):
    file = tmp_path / "experiment.yaml"
    whole = Experiment(data="digits", method="pardon", defences="median")
    file.write_text(whole.to_yaml())
    assert load_stored(file) == whole
    fields = yaml.safe_load(whole.to_yaml())
    change(fields)
    file.write_text(yaml.safe_dump(fields))
    with pytest.raises(
        ExperimentError, match=re.escape(str(file)) + ".*version of feddg" + words
    ) as fault:
        load_stored(file)
    assert "\n" not in str(fault.value)


def test_another_method_over_a_file_drops_the_files_settings_and_says_so(tmp_path, caplog):
    file = tmp_path / "e.yaml"
    file.write_text("{data: digits, method: {name: pardon, gamma1: 0.5}}")
    changed = load_experiment(file, {"method": {"name": "fedprox", "mu": 2.0}})
    assert (changed.method.name, changed.method.settings["mu"]) == ("fedprox", 2.0)
    (said,) = caplog.messages
    assert "pardon" in said
    assert "gamma1" in said
    same = load_experiment(file, {"method": "FISC"})
    assert same.method.settings["gamma1"] == 0.5
    assert len(caplog.messages) == 1


def test_every_setting_is_explained_and_the_strongest_word_is_named():
    said = {"data": "pacs", "method": "fedsr", "train": {"lr": 0.5}}
    found = explain(said, {"seed": 4, "train": {"lr": 0.1}, "data": "digits"}, "mine.yaml")
    complete = Experiment(**{"seed": 4, **said})
    assert {path: origin.value for path, origin in found.items()} == leaves(
        complete.model_dump(mode="json")
    )
    sources = {path: origin.source for path, origin in found.items()}
    assert sources["train.lr"] == sources["data.source"] == "you said"
    assert sources["seed"] == "mine.yaml"
    assert sources["train.rounds"] == "preset strong"
    assert sources["model.normalization"] == "follows from model.weights"
    assert sources["server.attempts"] == "default"


@pytest.mark.parametrize(
    ("field", "here", "there"),
    [
        ("data.root", "/data/pacs", "/elsewhere/PACS"),
        ("data.split_file", "/data/splits.csv", "/elsewhere/splits.csv"),
        ("model.weights", "resnet18.safetensors", "/elsewhere/w.pth"),
        ("method.decoder", "decoder.safetensors", "/elsewhere/d.safetensors"),
    ],
)
def test_the_portable_id_knows_that_a_file_is_named_and_not_where_it_lies(field, here, there):
    def one(value, **more):
        fixed = {
            "data": {"source": "folder", "root": "/data"},
            "method": {"name": "pardon", "settings": {"codec": "vgg19", "encoder": "e.pth"}},
            "model": {"weights": None},
        }
        _, change, _ = setting_point(field, value)
        return Experiment(**merge(fixed, change), **more)

    assert one(here).portable_id == one(there).portable_id
    assert one(here).id != one(there).id
    assert one(None).portable_id != one(here).portable_id
    assert one(here, seed=4).portable_id != one(here).portable_id


def test_torchvisions_weights_are_no_file_of_ones_own():
    ids = {
        Experiment(data="digits", model={"weights": weights}).portable_id
        for weights in (None, "imagenet", "mine.safetensors")
    }
    assert len(ids) == 3
    assert Experiment(data="digits").portable_id == Experiment(data="digits").id


def test_a_changed_default_raises_the_schema():
    """Ids know only what differs from its default, so they must know which defaults these are."""
    kinds = {
        "": {"": ExperimentSettings},
        "method": {name: method.Settings for name, method in METHODS.items()},
        "defence": {name: defence.Settings for name, defence in DEFENCES.items()},
        "data": {name: source.options for name, source in DATA_SETS.items() if source.options},
    }
    defaults = {
        f"{kind} {name}": settings.model_construct().model_dump(mode="json")
        for kind, named in kinds.items()
        for name, settings in named.items()
        if settings.__module__.startswith("feddg.")
    }
    text = json.dumps(defaults, sort_keys=True)
    digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    assert (SCHEMA, digest) == (1, "6227ab13dcde262c"), (
        "a default changed: raise SCHEMA and write down the new digest (the digest alone where "
        "fields were only added, or taken out, and experiments mean what they meant)"
    )


def test_an_id_depends_on_nothing_that_is_said_as_it_is_anyway():
    one = Experiment(data="digits", hold_out="sketch", method="pardon", defences="median")
    assert Experiment(**one.model_dump(mode="json")).id == one.id
    more = Experiment(
        data={"source": "digits", "id_val": 0.05},
        hold_out="sketch",
        method={"name": "pardon", "margin": 0.3},
        defences="median",
        privacy={},
    )
    assert more.id == one.id


def test_defaults_of_another_packages_settings_count(monkeypatch):
    """The schema's number says nothing of them: who changes their own gets a run of its own."""

    def chosen(default):
        fields = {"__annotations__": {"beta": float}, "beta": default, "__module__": "mine"}
        settings = type("MineSettings", (MethodSettings,), fields)
        method = type("Mine", (FedAvg,), {"name": "mine", "Settings": settings})
        monkeypatch.setitem(METHODS._found, "mine", method)
        return Experiment(data="digits", hold_out="sketch", method="mine")

    assert chosen(0.5).id == chosen(0.5).id != chosen(0.7).id


class Colour(enum.Enum):
    RED, BLUE = "red", "blue"


class OfAnyType(FedAvg):
    """A method of another package, whose settings are no plain numbers."""

    name = "of-any-type"

    class Settings(MethodSettings):
        """An alias, an enumeration, a set."""

        strength: float = Field(1.0, alias="lambda")
        colour: Colour = Colour.RED
        layers: frozenset[int] = frozenset()


def test_settings_of_any_type_are_told_apart_and_are_the_same_in_every_process(monkeypatch):
    monkeypatch.setitem(METHODS._found, OfAnyType.name, OfAnyType)

    def chosen(**settings):
        method = {"name": OfAnyType.name, "settings": settings}
        return Experiment(data="digits", hold_out="sketch", method=method)

    made = [chosen(), chosen(**{"lambda": 2}), chosen(colour="blue"), chosen(layers=[0, 8])]
    assert len({one.id for one in made}) == len({one.portable_id for one in made}) == 4
    for one in made:
        assert Experiment(**one.model_dump(mode="json")).id == one.id
    assert chosen(strength=2).id == made[1].id
    other = chosen(layers=[8, 0])  # the same set, in another order, as texts are in each process
    assert (other.id, other.portable_id) == (made[3].id, made[3].portable_id)


def test_what_differs_from_its_default_makes_another_experiment(subtests):
    for change in [
        {"train": {"schedule": "cosine"}},
        {"train": {"schedule_steps": [0.25]}},
        {"train": {"label_smoothing": 0.1}},
        {"train": {"head_rounds": 1}},
        {"server": {"averaging": "swa"}},
        {"server": {"wise_ft": 0.5}},
        {"server": {"wise_ft": "auto"}},
        {"evaluate": {"averages": "never"}},
    ]:
        with subtests.test(change=change):
            chosen = Experiment(data="digits", hold_out="sketch", **change)
            assert chosen.id != Experiment(data="digits", hold_out="sketch").id
            assert Experiment(**chosen.model_dump(mode="json")).id == chosen.id


def test_fields_in_a_mapping_are_told_from_an_experiment():
    with pytest.raises(ExperimentError, match=r"feddg\.run\(\*\*fields\); this is a dict"):
        load_experiment({"data": "digits"})


def test_no_preset_is_the_data_sets_own_in_every_respect():
    scratch = {"data": {"source": "folder"}, "model": {"weights": None}}
    assert Experiment(**scratch, preset="none").train == Experiment(**scratch).train
    assert Experiment(**scratch, preset="none").model == Experiment(**scratch).model


def test_an_epsilon_that_is_none_asks_for_nothing():
    assert PrivacySettings(epsilon="none") == PrivacySettings()
    assert Experiment(data="emoji", privacy={"record_epsilon": "none"}).train.head == "ridge"
    assert Experiment(data="emoji", privacy={"epsilon": 8}).train.head == "random"
    styles = Experiment(data="emoji", method="pardon", privacy={"style_epsilon": 8})
    assert styles.train.head == "random"


def test_weights_are_found_from_wherever_a_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Experiment(model={"weights": "w.pth"}).model.weights == str(tmp_path / "w.pth")
    settings = {"codec": "vgg19", "encoder": "e.pth", "decoder": "d.pth"}
    chosen = Experiment(method={"name": "pardon", "settings": settings})
    method = build_method("pardon", chosen.method.settings)
    assert method.settings.encoder == tmp_path / "e.pth"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"clients": {"partition": "domain", "heterogeneity": 0.7}}, "clients.heterogeneity"),
        ({"train": {"local_epochs": 5, "local_steps": 4}}, "train.local_epochs"),
        ({"train": {"decay": "weights"}}, "train.decay"),
        ({"train": {"optimizer": "sgd", "keep_optimizer": True}}, "train.keep_optimizer"),
        ({"train": {"schedule_by": "step"}}, "train.schedule_by"),
    ],
)
def test_a_field_that_does_nothing_says_so(fields, field):
    chosen = Experiment(data="digits", **fields)
    (text,) = without_effect(chosen, chosen.given)
    assert text.startswith(f"{field} is ")
    more = {"heterogeneity": 0.7, "quantity_alpha": 0.5}
    mixed = Experiment(clients={"partition": "heterogeneous+quantity", **more})
    assert not [t for t in without_effect(mixed, mixed.given) if "heterogeneity" in t]


def test_one_round_is_one_whatever_is_said_for_methods_beside_it():
    train = {"rounds": 20, "warmup_rounds": 2, "head_rounds": 1, "head": "ridge"}
    found = Experiment(data="digits", method="ridge", train=train).train
    assert (found.rounds, found.warmup_rounds, found.head_rounds, found.head) == (1, 0, 0, "random")


def test_another_device_is_the_same_experiment_with_the_same_words():
    chosen = Experiment(data="digits", train={"lr": 0.5})
    assert chosen.model_copy(update={"device": "cpu"}).given == chosen.given | {"device": "cpu"}
    assert chosen.model_copy(update={"seed": 1}).given["train"]["rounds"]
