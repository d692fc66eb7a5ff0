"""Class names of a program's own data sets."""

import copy

import numpy
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, Subset, random_split
from torchvision.datasets import ImageFolder

import feddg
from feddg.data.class_names import domains_of, joined, own_names, tables_of
from feddg.diagnostics import collected
from feddg.errors import ExperimentError

COLOURS = {"ant": (250, 20, 20), "bee": (20, 250, 20), "cow": (20, 20, 250), "dog": (200, 200, 20)}
SITES = {"a": ["ant", "bee", "dog"], "b": ["bee", "cow"], "whole": [*COLOURS]}
TEST = ["ant", "cow", "dog"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of images that torchvision numbers by the classes each of them has."""
    root, rng = tmp_path_factory.mktemp("folders"), numpy.random.default_rng(0)
    for site, classes in {**SITES, "test": TEST}.items():
        for name in classes:
            (root / site / name).mkdir(parents=True)
            for number in range(6):
                noise = rng.integers(-20, 20, (8, 8, 3)) + numpy.array(COLOURS[name])
                image = Image.fromarray(noise.clip(0, 255).astype(numpy.uint8))
                image.save(root / site / name / f"{number}.png")
    return root


def folder(folders, name, **options):
    return ImageFolder(folders / name, **options)


class Around(Dataset):
    """A data set around another one, which may change its labels."""

    def __init__(self, inside, change=lambda label: label):
        self.inside, self.change = inside, change

    def __len__(self):
        return len(self.inside)

    def __getitem__(self, index):
        image, label = self.inside[index]
        return image, self.change(label)


class Shuffled(Around):
    """A data set that has another one's images in an order of its own."""

    def __getitem__(self, index):
        return super().__getitem__(index * 5 % len(self))


class Masks(Dataset):
    """Images with masks, which no number tells apart."""

    def __init__(self):
        self.masks = torch.arange(48).reshape(12, 2, 2)

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.full((3, 8, 8), index / 12), self.masks[index]


def federation(clients, logits=4, **fields):
    torch.manual_seed(0)
    net = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, logits))
    fixed = {"lr": 1.0, "optimizer": "sgd", "batch_size": 4, "precision": "float32"}
    return feddg.Federation(clients, net, **fixed, **fields)


def test_two_classes_of_one_name_cannot_be_told_apart():
    with pytest.raises(ExperimentError, match="site calls two classes 'crane'"):
        joined([("site", {0: "crane", 1: "dog", 2: "crane"})], 3)
    for names in (["a", "b", "a", "c"], ["a", " ", "b", "c"]):
        with pytest.raises(ExperimentError, match="a class has no name, or two have the same"):
            federation([[(Image.new("RGB", (8, 8)), 0)]], class_names=names)


def half(data):
    return random_split(data, [0.5, 0.5], generator=torch.Generator().manual_seed(0))[0]


ARRANGED = {
    "as they are": lambda a, b: [a, b],
    "beside a whole one": lambda a, b: [a, b, ConcatDataset([a, b])],
    "parts": lambda a, b: [Subset(a, range(0, 18, 2)), half(b)],
    "put together": lambda a, b: [ConcatDataset([a, b])],
    "wrapped": lambda a, b: [Around(a), Subset(Around(Subset(b, range(12))), range(12))],
}


@pytest.mark.parametrize("arranged", ARRANGED.values(), ids=ARRANGED)
def test_sites_and_test_sets_that_lack_classes_are_joined_by_name(folders, arranged):
    clients = arranged(folder(folders, "a"), folder(folders, "b"))
    fed = federation(clients).fit(40)
    assert fed.class_names == tuple(COLOURS)
    test = folder(folders, "test")
    assert fed.evaluate(test).accuracy == 1.0
    found = fed.predict([image for image, _ in test]).argmax(1).tolist()
    assert [fed.class_names[n] for n in found] == [test.classes[n] for n in test.targets]


def test_one_order_is_the_federations_whoever_says_it(folders):
    sites = [folder(folders, "a"), folder(folders, "b")]
    names = ["dog", "cow", "bee", "ant"]
    fed = federation(sites, class_names=names)
    assert fed.clients[0].labels.unique(return_counts=True)[0].tolist() == [0, 2, 3]
    assert fed.fit(40).evaluate(folder(folders, "test")).accuracy == 1.0
    same = federation([folder(folders, "whole")] * 2)
    assert same.clients[0].labels.tolist() == folder(folders, "whole").targets
    more = federation(sites, logits=6)
    assert more.class_names == (*COLOURS, "unnamed 4", "unnamed 5")


def test_a_trained_models_logits_keep_their_meaning_or_the_order_is_asked_for(folders):
    a, b, whole = (folder(folders, name) for name in SITES)
    model = federation([a, a], logits=6).fit(1).model  # ant, bee, dog
    for trained in (model, copy.deepcopy(model)):
        with pytest.raises(ExperimentError, match=r"logit 2 .* mean 'dog'.* mean 'cow'.*dog, unn"):
            feddg.Federation([a, b], trained)
    for clients, order in (([a], None), ([a, b], ["ant", "bee", "dog", "cow", "elk", "fly"])):
        fed = feddg.Federation(clients, model, class_names=order)
        assert fed.class_names[:3] == ("ant", "bee", "dog")
    assert feddg.Federation([[(Image.new("RGB", (8, 8)), 5)]], model).class_names[2] == "2"
    fresh = federation([whole], logits=6).fit(0).model.featurizer
    head = nn.Sequential(fresh, nn.Linear(3, 4))
    assert feddg.Federation([a, b], head).class_names == tuple(COLOURS)


def test_what_cannot_be_joined_is_refused_in_one_line(subtests, folders):
    for sites, fields, words in [
        (["a", "b"], {"logits": 3}, "name 4 classes .* gives 3 logits"),
        (["a", "b"], {"logits": 2, "class_names": ["ant", "bee"]}, "client 0, image 12 .* 'dog'"),
        (["a", "b", None], {}, "client 2 does not name its classes"),
        (["b", None], {}, "client 1 does not name its classes"),
    ]:
        with subtests.test(sites=sites, fields=fields, words=words):
            whole = [*zip(torch.rand(4, 3, 8, 8), range(4), strict=True)]
            clients = [whole if site is None else folder(folders, site) for site in sites]
            with pytest.raises(ExperimentError, match=words) as fault:
                federation(clients, **fields)
            assert "\n" not in str(fault.value)


def test_a_test_set_that_cannot_be_joined_is_refused(folders):
    nameless = list(Around(folder(folders, "whole")))
    test = folder(folders, "test")
    with pytest.raises(ExperimentError, match="no names to compare"):
        federation([nameless]).evaluate(test)
    with pytest.raises(ExperimentError, match=r"image 6 is of the class 'cow'.*ant, bee, dog"):
        federation([folder(folders, "a")]).evaluate(test)


def test_labels_that_were_changed_on_the_way_have_no_names(folders):
    a, names = folder(folders, "a"), [*COLOURS]

    def change(label):
        return names.index(a.classes[label])

    moved = folder(folders, "a", target_transform=change)
    for data in (Around(a, change), moved, Around(moved)):
        labels = numpy.array([label for _, label in data])
        assert set(tables_of(data, labels)) == {None}
        fed = federation([data], class_names=names)
        assert fed.clients[0].labels.tolist() == labels.tolist()


def test_names_are_found_where_data_sets_say_them():
    class Says:
        pass

    for attributes, names in (
        ({"classes": ["x", "y"]}, {0: "x", 1: "y"}),
        ({"class_to_idx": {"y": 1, "x": 0, "ecks": 0}}, {0: "x", 1: "y"}),
        ({"classes": [("x", "ecks"), ("y",)], "class_to_idx": {"x": 3}}, {3: "x"}),
        ({"classes": 2}, None),
        ({"classes": [0, 1]}, None),
        ({}, None),
    ):
        says = Says()
        vars(says).update(attributes)
        assert own_names(says) == names
    with pytest.raises(ExperimentError, match=r"b has a class 'Ant', and a 'ant'"):
        joined([("a", {0: "ant"}), ("b", {0: "Ant"})])
    assert joined([("a", {0: "c", 1: "C"}), ("b", {0: "C"})]) == ("c", "C")


def test_domains_inside_a_data_set_of_an_order_of_its_own_are_not_used_and_that_is_said(folders):
    plain, masks = folder(folders, "b"), Masks()
    changed = folder(folders, "b", target_transform=lambda label: 1 - label)
    names = plain.domains = changed.domains = masks.domains = ["x", "y", "z"] * 4

    def found(data):
        with collected() as said:
            targets = numpy.stack([data[index][1] for index in range(len(data))])
            domains = domains_of(data, targets, "site b")
        return domains, [str(one) for one in said]

    for data in (plain, Subset(changed, range(12)), Around(plain), Around(changed), Around(masks)):
        assert found(data) == (names, [])
    assert found(Subset(Around(plain), [1, 5, 3])) == (["y", "z", "x"], [])
    moved = Shuffled(plain)
    for data in (moved, Shuffled(masks), Around(plain, lambda label: 1 - label)):
        domains, (said,) = found(data)
        assert set(domains) == {None}
        assert "inside site b's names domains" in said
    moved.domains = names
    assert found(moved) == (names, [])
    fed = federation([Shuffled(plain), plain], logits=2)
    assert fed.clients[0].domains.tolist() == [0] * 12
    assert fed.domain_names == ("", "x", "y", "z")
