"""A federation of objects that a program has."""

import copy
import json
import math
from threading import Thread

import numpy
import pytest
import scipy.stats
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import feddg
from feddg.data.decoding import decode_image
from feddg.diagnostics import collected
from feddg.errors import ExperimentError, RunError
from feddg.methods import FedAvg, Pardon
from feddg.methods.base import METHODS, MethodSettings
from feddg.models.backbones import build_network, own_state, split_network
from feddg.models.task import CLASSIFICATION
from feddg.simple import read_images
from federations import same

SMALL = {"image_size": 8, "clients": 3, "local_steps": 1, "batch_size": 8}


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path):
    """An empty folder, and a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDDG_CACHE", str(tmp_path / "cache"))


class Colours(Dataset):
    """PIL images whose brightest colour is their class."""

    def __init__(self, seed: int, count: int = 30) -> None:
        rng = numpy.random.default_rng(seed)
        self.labels = numpy.arange(count) % 3
        self.images = rng.integers(0, 100, (count, 12, 12, 3), numpy.uint8)
        self.images[numpy.arange(count), :, :, self.labels] += 120

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return Image.fromarray(self.images[index]), int(self.labels[index])


def own_network(last: nn.Module | None = None) -> nn.Module:
    torch.manual_seed(0)
    body = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()]
    return nn.Sequential(*body, nn.Linear(32, 3), *([] if last is None else [last]))


# Methods by name.


def test_every_method_is_had_by_the_name_of_its_class():
    for method in METHODS.values():
        assert getattr(feddg.methods, method.__name__) is method
    assert isinstance(FedAvg().settings, MethodSettings)
    assert feddg.methods.Pardon(gamma1=0.5).settings.gamma1 == 0.5
    with pytest.raises(ExperimentError, match="gamma9"):
        Pardon(gamma9=1)
    with pytest.raises(AttributeError, match="Nope"):
        feddg.methods.Nope


# A federation of one's own objects.


def test_own_data_sets_and_network_in_eight_lines(tmp_path):
    site_a, site_b, site_c, net = Colours(0), Colours(1), Colours(2), own_network()
    fed = feddg.Federation([site_a, site_b], net, feddg.methods.Pardon(gamma1=0.75), lr=0.01)
    fed.fit(rounds=12)
    score = fed.evaluate(site_c)
    shares = fed.predict([image for image, _ in site_c])
    file = fed.save(tmp_path / "model.pt2")

    assert score.accuracy > 0.9
    right = (shares.argmax(1).numpy() == site_c.labels).mean()
    assert right == score.accuracy
    pixels = torch.from_numpy(site_c.images).permute(0, 3, 1, 2)
    torch.testing.assert_close(torch.export.load(file).module()(pixels)[0], shares)
    assert list(tmp_path.iterdir()) == [file]  # no run folder, no cache


def test_its_onnx_file_labels_image_files(tmp_path):
    pytest.importorskip("onnxruntime")
    site = Colours(0)
    fed = feddg.Federation([site], own_network(), class_names=["red", "green", "blue"], lr=0.01)
    file = fed.fit(rounds=3).save(tmp_path / "model.onnx")
    site[0][0].save(tmp_path / "one.png")
    (answer,) = feddg.predict(file, tmp_path / "one.png")
    (shares,) = fed.predict([site[0][0]])
    assert answer.label == ["red", "green", "blue"][int(shares.argmax())]
    assert answer.confidence == pytest.approx(float(shares.max()), abs=1e-4)


def test_weights_alone_are_those_of_the_model_and_other_endings_are_refused(tmp_path):
    fed = feddg.Federation([Colours(0)], own_network())
    saved, mine = load_file(fed.save(tmp_path / "model.safetensors")), own_network()
    mine.load_state_dict(saved)
    assert same(saved, own_state(fed.model))
    trained = feddg.Federation([Colours(0)], mine).model
    assert same(dict(trained.state_dict()), dict(fed.model.state_dict()))
    with pytest.raises(RunError, match=r"\.onnx, \.pt2, \.safetensors"):
        fed.save(tmp_path / "model.pt")


def test_a_file_says_what_its_weights_take(tmp_path):
    def said(fed):
        with safe_open(fed.save(tmp_path / "w.safetensors"), framework="pt") as file:
            return json.loads(file.metadata()["feddg"])["input"]

    colours = [0.5, 0.4, 0.3], [0.2] * 3
    fed = feddg.Federation([Colours(0)], own_network(), normalize=colours)
    assert said(fed).endswith("12, 12), minus (0.5, 0.4, 0.3), divided by (0.2, 0.2, 0.2)")
    fed.class_names = ("a", "a", "b")
    with pytest.raises(RunError, match=r"w\.safetensors cannot be described: .*two have the same"):
        fed.save(tmp_path / "w.safetensors")


def test_it_goes_on_where_it_stopped_and_repeats_itself():
    def trained(*rounds: int) -> dict[str, Tensor]:
        fed = feddg.Federation([Colours(0), Colours(1)], own_network(), "scaffold", batch_size=8)
        for count in rounds:
            fed.fit(count)
        assert repr(fed) == "SCAFFOLD over 2 clients, 3 rounds done."
        return fed.weights

    assert same(trained(3), trained(1, 2))


class Looks(feddg.RoundHook):
    """Looks at a federation whenever it is called."""

    def __init__(self) -> None:
        self.losses = []

    def look(self, thing, _):
        self.fed.predict([Colours(2)[0][0]])
        self.losses.append(self.fed.evaluate(Colours(2)).loss)
        return thing

    broadcast = received = completed = look


@pytest.mark.parametrize("at_once", [1, 2])
@pytest.mark.parametrize("method", ["pardon", "scaffold"])
def test_a_look_during_a_round_shows_the_last_completed_one_and_changes_nothing(
    monkeypatch, at_once, method
):
    def made(*hooks):
        clients = [Colours(0), Colours(1), Colours(3)]
        return feddg.Federation(clients, own_network(), method, hooks=hooks, lr=0.01, batch_size=8)

    monkeypatch.setattr("feddg.federation.federation._clients_at_once", lambda *_: at_once)
    alone, looks = made(), Looks()
    first, second, third = (alone.fit(n).evaluate(Colours(2)).loss for n in (0, 1, 1))
    looks.fed = made(looks)
    assert same(looks.fed.fit(2).weights, alone.weights)
    assert looks.losses == [first] * 4 + [second] * 5 + [third]


def test_a_federation_may_be_looked_at_from_several_threads():
    def made(looks):
        clients = [Colours(0), Colours(1)]
        looks.fed = feddg.Federation(clients, own_network(), hooks=[looks], lr=0.01)
        return looks.fed

    alone, seen = Looks(), Looks()
    made(alone).fit(4)
    thread = Thread(target=made(seen).fit, args=(4,))
    thread.start()
    while thread.is_alive():
        seen.fed.evaluate(Colours(2))
    thread.join()
    assert seen.losses == alone.losses
    assert same(seen.fed.weights, alone.fed.weights)


def test_the_network_is_split_before_its_last_layer_and_its_weights_stay():
    images, net = torch.rand(2, 3, 12, 12), own_network().eval()
    expected = net(images)
    network = split_network(net, images)
    assert network.features_dimension == 32
    torch.testing.assert_close(network(images), expected)
    whole = split_network(own_network(nn.Softmax(1)), images)
    assert isinstance(whole.classifier, nn.Identity)
    import torchvision

    resnet = torchvision.models.resnet18(num_classes=3).eval()
    normal = ((0.5, 0.4, 0.3), (0.2, 0.2, 0.2))
    mean, deviation = (torch.tensor(values).view(3, 1, 1) for values in normal)
    expected = resnet((images - mean) / deviation)
    network = split_network(resnet, images, normalize=normal)
    torch.testing.assert_close(network.eval()(images), expected)
    assert len(network.stages) == 4


def test_clients_may_come_from_a_generator():
    fed = feddg.Federation((Colours(seed) for seed in range(2)), own_network(), batch_size=8)
    assert repr(fed.fit(1)) == "FedAvg over 2 clients, 1 round done."


def test_no_rounds_are_none_and_what_is_no_number_of_rounds_is_refused():
    fed = feddg.Federation([Colours(0)], own_network(), "elcfs", rounds=2, batch_size=8)
    assert fed.fit(0).server.state.round == 0
    assert fed.fit(1).fit(0).server.state.round == 1
    assert fed.fit().server.state.round == 3
    for wrong in (-1, 1.5, "3"):
        with pytest.raises(ExperimentError, match=f"rounds is {wrong!r}; it must be a whole"):
            fed.fit(wrong)


class ByHand(nn.Module):
    """Depthwise layers in a ``Sequential`` that is not called as one."""

    def __init__(self) -> None:
        super().__init__()
        depthwise = nn.Conv2d(6, 6, 3, padding=1, groups=6)
        self.block = nn.Sequential(nn.Conv2d(3, 6, 1), depthwise, nn.BatchNorm2d(6))
        self.fc = nn.Linear(6, 3)

    def forward(self, images: Tensor) -> Tensor:
        maps = self.block[0](images)
        maps = self.block[2](self.block[1](maps) + maps)
        return self.fc(maps.mean((2, 3)))


def test_layers_called_by_hand_are_normalised_once():
    torch.manual_seed(0)
    site, net = Colours(0), ByHand()
    fed = feddg.Federation([site], net, lr=0.01, precision="float32").fit(2)
    trained = {n.removeprefix("featurizer.model."): t for n, t in fed.weights.items()}
    trained |= {f"fc.{name}": fed.weights[f"classifier.{name}"] for name in ("weight", "bias")}
    net.load_state_dict({name: trained[name] for name in net.state_dict()})
    pixels = torch.from_numpy(site.images).permute(0, 3, 1, 2) / 255
    torch.testing.assert_close(fed.predict(site), net.eval()(pixels).softmax(1))


def test_a_method_of_one_round_has_one_whatever_is_said():
    images = torch.rand(12, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    sites = [TensorDataset(images, torch.arange(12) % 3)] * 2
    model = build_network("cnn", 3, weights=None)
    fed = feddg.Federation(sites, model, "ridge", rounds=5, local_steps=1)
    assert fed.fit().server.state.round == 1
    assert fed.settings.train.local_steps is None


def test_a_tensor_data_set_and_a_network_of_ours_will_do():
    labels = torch.arange(12) % 3
    images = torch.rand(12, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    sites = [TensorDataset(images, labels), TensorDataset((images * 255).byte(), labels)]
    fed = feddg.Federation(sites, build_network("cnn", 3, weights=None), "fedbn", local_steps=1)
    assert 0 <= fed.fit(1).evaluate(sites[0]).accuracy <= 1
    assert fed.predict(images).shape == (12, 3)


def test_a_network_of_ours_is_normalised_as_is_asked_for_on_a_copy():
    model, site = build_network("cnn", 3, weights=None), Colours(0)
    before, normal = model.mean, ((0.5, 0.4, 0.3), (0.2, 0.2, 0.2))
    fed = feddg.Federation([site], model, normalize=normal)
    assert (fed.network.mean, fed.network.std) == normal
    assert model.mean == before
    own = feddg.Federation([site], model)
    assert not torch.allclose(fed.predict(site), own.predict(site))


def test_automatic_normalisation_is_that_of_training():
    private = {"clipping": "fixed", "clipping_norm": 1.0}
    network = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    )
    given = {"clients": [Colours(0), Colours(1)], "model": network, "normalization": "auto"}
    assert not feddg.Federation(**given).worker.freeze
    with pytest.raises(ExperimentError, match=r"set model.normalization to frozen"):
        feddg.Federation(**given, privacy=private)


def test_rounds_whose_cost_is_not_known_are_not_gone_on_from():
    pytest.importorskip("dp_accounting", reason="differential privacy is an extra")
    private = {"clipping": "fixed", "clipping_norm": 1.0, "noise_multiplier": 1.0}

    def made():
        return feddg.Federation([Colours(0), Colours(1)], own_network(), privacy=private)

    first = made().fit(1)
    second = made().resume(first.server.state, {})
    with pytest.raises(ExperimentError, match="what earlier rounds have cost of privacy"):
        second.fit(1)
    assert first.fit(1).server.state.round == 2


def test_an_image_that_is_there_twice_is_refused_under_an_epsilon_for_one():
    pytest.importorskip("dp_accounting", reason="differential privacy is an extra")
    private = {"record_epsilon": 8.0}
    given = {"model": own_network(), "normalization": "frozen", "privacy": private}
    twice = [*Colours(0), Colours(0)[1]]
    with pytest.raises(ExperimentError, match=r"privacy\.record_epsilon protects one image, but"):
        feddg.Federation([twice, Colours(1)], **given)


def test_images_that_are_looked_at_need_no_labels_and_those_that_are_measured_do():
    fed, site = feddg.Federation([Colours(0)], own_network()), Colours(1)
    images = [image for image, _ in site]
    alike = [fed.predict(given) for given in (images, [(image,) for image in images], site)]
    assert all(torch.equal(each, alike[0]) for each in alike)
    with pytest.raises(ExperimentError, match="new, image 0 is no pair of image and label"):
        fed.evaluate(images, "new")


def test_an_interval_over_patients_is_that_of_their_sums():
    fed = feddg.Federation([Colours(0)], own_network(), lr=0.01).fit(1)
    patients = [f"P{n // 6}" for n in range(len(Colours(1)))]
    alone, grouped = fed.evaluate(Colours(1)), fed.evaluate(Colours(1), groups=patients)
    assert grouped.mean == alone.mean
    off = alone.values - alone.mean
    sums = numpy.array([off[numpy.array(patients) == name].sum() for name in sorted({*patients})])
    error = math.sqrt(len(sums) / (len(sums) - 1) * (sums**2).sum()) / len(off)
    half = scipy.stats.t.ppf(0.975, len(sums) - 1) * error
    assert grouped.interval == pytest.approx((alone.mean - half, alone.mean + half))
    with pytest.raises(ExperimentError, match="one for each"):
        fed.evaluate(Colours(1), groups=patients[:-1])


@pytest.mark.parametrize("patients", [["a", None, "b"], ["a", float("nan"), "b"], ["a", "", "b"]])
def test_an_image_of_no_patient_is_named(patients):
    fed = feddg.Federation([Colours(0)], own_network())
    pairs = [Colours(1)[number] for number in range(3)]
    with pytest.raises(ExperimentError, match="site, image 1 has the group"):
        fed.evaluate(pairs, "site", groups=patients)


def test_a_head_without_a_bias_is_not_solved_for():
    model = own_network()
    model[-1] = nn.Linear(32, 3, bias=False)
    fed = feddg.Federation([Colours(0)], model, train={"head": "ridge"})
    with pytest.raises(ExperimentError, match=r"train\.head: ridge also solves for a bias"):
        fed.fit(1)


def test_what_is_transparent_is_white_as_in_a_folder():
    colours = numpy.array([[[9, 9, 9, 255], [9, 9, 9, 0]]] * 2, numpy.uint8)
    images, _ = read_images([(Image.fromarray(colours), 0)], "site")
    assert images[0].tolist() == [[[9, 9, 9], [255, 255, 255]]] * 2


def deep_image(kind: str) -> Image.Image:
    """Returns an image of which Pillow keeps nothing when it makes it RGB."""
    return Image.fromarray(numpy.full((8, 8), 0.5 if kind == "float32" else 30000, kind))


def test_what_cannot_be_trained_is_refused_in_one_line(subtests):
    for change, reason in [
        ({"method": "pardon", "model": own_network(nn.Softmax(1))}, "PARDON .* last linear layer"),
        ({"clients": []}, "needs clients"),
        ({"clients": [TensorDataset(torch.rand(3, 3, 8, 8) - 9, torch.zeros(3))]}, "normalize="),
        ({"clients": [TensorDataset(torch.rand(3, 3, 8, 9), torch.zeros(3))]}, "image_size="),
        ({"clients": [TensorDataset(torch.rand(3, 3, 8, 8), torch.arange(3) + 1)]}, "label 3"),
        ({"clients": [[(deep_image("uint16"), 0)]]}, "client 0, image 0 has more than 8 bits"),
        ({"clients": [[(deep_image("float32"), 0)]]}, r"mode F\); give floats in \[0, 1\]"),
        ({"clients": [[torch.rand(3, 8, 8)]]}, "client 0, image 0 is no pair of image and label"),
        ({"clients": [[(torch.rand(3, 8, 8), 0, 0)]]}, "client 0, image 0 is no pair"),
        ({"clients": [DataLoader(Colours(0))]}, r"client 0 is a DataLoader: .* loader\.dataset"),
        ({"clients": {"oslo": Colours(0)}}, "client 0 is a str: give a data set or list"),
        ({"clients": [{"train": Colours(0)}]}, "client 0 is a dict: give a data set or list"),
        ({"class_names": ["a", "b"]}, "class_names has 2 names, but the model gives 3 logits"),
        ({"normalize": ((0.5,), (0.5,))}, "normalize is three means"),
        ({"normalize": ((0.5,) * 3, (0.0,) * 3)}, "normalize is .* deviations above 0"),
        ({"model": own_network().double()}, r"no weights in float32, .* model\.float\(\)"),
        (
            {
                "method": "ridge",
                "model": build_network("cnn", 3, weights=None, embedding="bottleneck"),
            },
            'embedding="none"',
        ),
        ({"rounds": 0}, "train.rounds"),
        ({"hold_out": "c"}, "hold_out"),
        ({"server": {"wise_ft": 0.5}}, "server.wise_ft mixes a run's last model with its first"),
        ({"learning_rate": 1}, r"'learning_rate' \(did you mean 'lr'\?\)"),
        ({"head": "ridge"}, r"'head' \(did you mean train={'head': ...}\?\)"),
        ({"shard": 2}, r"no field 'shard': its images"),
        ({"per_round": 4}, r"\(did you mean 'clients_per_round'\?\).*, clients_per_round, norm"),
        ({"method": "centralised"}, "no clients"),
        ({"method": "pardno"}, "did you mean 'pardon'"),
    ]:
        with subtests.test(change=change, reason=reason):
            given = {"clients": [Colours(0)], "model": own_network()}
            with pytest.raises(ExperimentError, match=reason) as refused:
                feddg.Federation(**given | change)
            assert "\n" not in str(refused.value)


def test_a_size_that_is_asked_for_is_that_of_all_images():
    wide = [(Image.new("RGB", (30, 24)), 0), (Image.new("RGB", (24, 24)), 1)]
    assert read_images(wide, "client 0", 24, CLASSIFICATION)[0].shape == (2, 24, 24, 3)
    for pairs in (wide, wide[::-1]):
        with pytest.raises(ExperimentError, match=r"has 24 x 30 pixels.* give image_size="):
            read_images(pairs, "client 0", None, CLASSIFICATION)


@pytest.mark.parametrize("shape", [(24, 30), (2, 24, 30), (24, 30, 2)])
def test_a_mask_is_not_left_behind_by_an_image_that_is_resized(shape):
    task = feddg.Task(nn.functional.mse_loss, lambda out, y: out)
    with pytest.raises(ExperimentError, match=r"24 x 30 pixels, as its target has.* resize both"):
        read_images([(Image.new("RGB", (30, 24)), torch.zeros(shape))], "client 0", 24, task)


def test_a_graph_of_classes_is_not_written_of_another_task(tmp_path):
    task = feddg.Task(nn.functional.mse_loss, lambda out, y: -(out - y).square().flatten(1).mean(1))
    sites = [[(torch.rand(3, 8, 8), torch.rand(2)) for _ in range(4)]]
    net = nn.Sequential(nn.Flatten(), nn.Linear(192, 2))
    fed = feddg.Federation(sites, net, task=task, batch_size=2).fit(1)
    for suffix in ("onnx", "pt2"):
        with pytest.raises(RunError, match="probabilities of classes"):
            fed.save(tmp_path / f"m.{suffix}")
    assert fed.save(tmp_path / "m.safetensors").is_file()
    for name, value in {
        "head": "ridge",
        "label_smoothing": 0.1,
        "class_weights": "balanced",
    }.items():
        with pytest.raises(ExperimentError, match=f"train.{name} is for one class per image"):
            feddg.Federation(sites, net, task=task, train={name: value})
    whole = nn.Sequential(nn.Conv2d(3, 2, 8), nn.Flatten())
    with pytest.raises(ExperimentError, match=r"does not end in nn\.Linear"):
        feddg.Federation(sites, whole, task=task, train={"trainable": "head"})


def test_stages_that_a_network_names_are_its_stages():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.down, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 3)
            self.stages = [self.down]

        def forward(self, images):
            return self.head(self.down(images).mean((2, 3)))

    network = split_network(Named(), torch.rand(2, 3, 8, 8))
    assert isinstance(network.classifier, nn.Linear)
    assert len(network.stages) == 1


class Named(list):
    """A data set that names its classes."""

    def __init__(self, pairs, classes):
        super().__init__(pairs)
        self.classes = classes


def test_numbers_without_names_are_refused_where_they_may_mean_another_order():
    one, other = ([(Image.new("RGB", (8, 8)), n % 2) for n in range(4)] for _ in range(2))
    sites = [Named(one, ["cat", "dog"]), Named(other, ["bird", "cat"])]
    fed = feddg.Federation(sites, own_network(), batch_size=2)
    assert fed.class_names == ("bird", "cat", "dog")
    with pytest.raises(ExperimentError, match="does not name its classes"):
        fed.evaluate(one)


def test_images_of_clients_are_of_one_size():
    sites = [[(Image.new("RGB", (side, side)), n % 2) for n in range(4)] for side in (8, 16)]
    with pytest.raises(
        ExperimentError, match="client 1 has images of 16 pixels, and client 0 of 8"
    ):
        feddg.Federation(sites, own_network())


def test_draws_that_the_seed_does_not_reach_are_told(caplog):
    class Loose(nn.Module):
        def __init__(self, inside):
            super().__init__()
            self.head, self.inside = nn.Linear(192, 2), inside

        def forward(self, images):
            flat = nn.functional.dropout(images.flatten(1), 0.5, self.training and self.inside)
            return self.head(flat)

    site = [(torch.rand(3, 8, 8), n % 2) for n in range(4)]
    for inside in (False, True):
        caplog.clear()
        feddg.Federation([site], Loose(inside))
        assert ("no two runs are alike" in caplog.text) == inside


def test_state_that_is_not_sent_is_told(caplog):
    class Centred(nn.Module):
        def __init__(self, persistent):
            super().__init__()
            self.head = nn.Linear(192, 2)
            self.register_buffer("center", torch.zeros(192), persistent=persistent)

        def forward(self, images):
            flat = images.flatten(1)
            if self.training:
                self.center.lerp_(flat.detach().mean(0), 0.1)
            return self.head(flat - self.center)

    site = [(torch.rand(3, 8, 8), n % 2) for n in range(4)]
    for persistent in (False, True):
        caplog.clear()
        feddg.Federation([site], Centred(persistent))
        assert ("center' of the network changes in training" in caplog.text) != persistent


@pytest.mark.parametrize("calls", [(8,), (6, 2), (1,) * 8])
def test_a_mean_of_the_last_rounds_holds_no_earlier_ones(calls):
    site = [(torch.rand(3, 8, 8), n % 2) for n in range(4)]
    server = {"averaging": "swa", "swa_fraction": 0.5}
    fed = feddg.Federation([site], nn.Sequential(nn.Flatten(), nn.Linear(192, 2)), server=server)
    for rounds in calls:
        fed.fit(rounds)
    held = int(fed.server.state.extras["averages/rounds/swa"])
    assert 1 <= held <= 4


@pytest.mark.parametrize(
    ("method", "fields", "said"),
    [
        ("fedavg", {"server": {"averaging": "swa"}}, "SWA begins as if round 2 were the last"),
        ("feddg-ga", {}, "FedDG-GA's steps shrink as if round 2 were the last, not 4"),
        (
            "feddg-ga+randconv",
            {"schedule": "cosine", "server": {"averaging": "swa"}},
            "The learning rate falls, SWA begins and FedDG-GA's steps shrink as if",
        ),
        ("fedavg", {"server": {"averaging": "ema"}}, None),
    ],
)
def test_what_depends_on_the_last_round_is_said_where_fit_is_called_in_parts(method, fields, said):
    def heard(*calls):
        sites = [[(torch.rand(3, 8, 8), n % 2) for n in range(4)] for _ in range(2)]
        net = nn.Sequential(nn.Flatten(), nn.Linear(192, 2))
        fed = feddg.Federation(sites, net, method, rounds=4, local_steps=1, **fields)
        with collected() as found:
            for rounds in calls:
                fed.fit(rounds)
        return [each.text for each in found if each.code == "schedule-of-this-call"]

    assert not heard(4)
    assert not heard(5)  # in one call
    texts = heard(2, 2)
    assert len(texts) == (said is not None)
    assert said is None or texts[0].startswith(said)


def test_a_client_of_one_image_is_looked_at_too():
    site = [(Image.new("RGB", (8, 8)), n % 2) for n in range(3)]
    norm = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(192), nn.Linear(192, 2))
    feddg.Federation([site[:1], site], norm)


def test_a_federation_that_was_shown_goes_on_from_a_checkpoint_all_the_same():
    def made():
        return feddg.Federation([Colours(0), Colours(1)], own_network(), method="scaffold")

    first = made().fit(1)
    state, memories = copy.deepcopy((first.server.state, first.transport.memories))
    shown = made()
    assert "0 rounds done" in repr(shown)
    shown.resume(state, memories).fit(1)
    first.fit(1)
    assert shown.server.state.round == 2
    for name, tensor in first.weights.items():
        assert torch.equal(tensor, shown.weights[name]), name


def test_images_are_read_as_a_models_file_does(tmp_path):
    pixels = numpy.random.default_rng(0).integers(0, 256, (20, 36, 3), numpy.uint8)
    image, upright = Image.fromarray(pixels), Image.Exif()
    upright[0x0112] = 6  # as a telephone held upright writes it
    files = [tmp_path / "wide.png", tmp_path / "turned.png"]
    image.save(files[0])
    image.save(files[1], exif=upright)
    found, _ = read_images([(Image.open(file), 0) for file in files], "site", 16)
    assert numpy.array_equal(found, [decode_image(file, 16) for file in files])


def test_an_experiment_of_a_run_is_run_as_it_was(tmp_path, caplog):
    data = {"source": "digits", "image_size": 8, "id_val": 0}
    train = {"rounds": 1, "local_steps": 1}
    few = {"clients": {"number": 2}, "method": "fedprox", "hold_out": "ink"}
    done = feddg.run(data=data, train=train, **few, out=tmp_path, report=False)
    again = feddg.run(done.experiment, seed=1, out=tmp_path, report=False)
    assert again.experiment.method.name == "fedprox"
    assert again.experiment.seed == 1
    assert "does nothing" not in caplog.text


def test_scores_of_numbers_are_those_of_what_predict_returns():
    """Where the device computes in bfloat16 by default, numbers would have eight bits left."""
    shade = torch.arange(64) / 255
    images = shade[:, None, None, None].expand(-1, 3, 8, 8).contiguous()
    days = TensorDataset(images, 900 + 600 * shade)
    network = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 1), nn.Flatten(0))
    with torch.no_grad():
        network[2].weight.fill_(200.0)
        network[2].bias.fill_(900.0)
    task = feddg.Task(nn.functional.mse_loss, lambda o, t: -(o - t).abs(), name="MAE")
    federation = feddg.Federation([days], network, task=task)
    assert federation.evaluate(days).mean == pytest.approx(0, abs=1e-3)
