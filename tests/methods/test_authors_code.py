"""What follows the authors' code by a setting, and what every method page says of differences."""

import copy
import math
from pathlib import Path

import pytest
import torch
import yaml

from feddg.experiment import Experiment
from feddg.methods import randconv
from feddg.methods.base import methods
from feddg.methods.composition import method_class
from feddg.methods.csac import mmd
from feddg.styles.codec import adain
from federations import SmallFederation, federation

METHODS_PAGES = Path(__file__).parents[2] / "docs" / "methods"
DIFFERENCES = yaml.safe_load((METHODS_PAGES / "differences.yaml").read_text("utf-8"))
OURS = [n for n, m in methods().items() if m.__module__.startswith("feddg.methods.")]


def one_batch(small):
    client = small.client()
    small.method.begin(client)
    return client, client.batch(torch.arange(8), client.stream("augment"))


def begun(name, **settings) -> tuple[SmallFederation, object, object]:
    small = federation(name, sizes=(8,), settings=settings, freeze=True)
    return small, *one_batch(small)


def test_rsc_mutes_the_map_of_the_training_pass_and_rounds_the_number_of_images() -> None:
    for share, muted in ((0.3, 2), (0.05, 0)):  # of 8 images 2.4 and 0.4, which ceil makes 3 and 1
        small = federation("rsc", sizes=(8,), settings={"muting": "spatial", "muted_images": share})
        client, batch = one_batch(small)
        probed, counts = [], []
        mask = small.method._mask

        def kept(client, batch, maps, head, mask=mask, probed=probed, counts=counts):
            probed.append(maps.detach().clone())
            found = mask(client, batch, maps, head)
            counts.append(int((found.flatten(1).min(1).values == 0).sum()))
            return found

        small.method._mask = kept
        trained = []
        stage = client.network.stages[-1]
        hook = stage.register_forward_hook(
            lambda module, x, y, trained=trained: trained.append((module.training, y.detach()))
        )
        small.method.loss(client, batch)
        hook.remove()
        assert len(probed) == 1
        assert counts[0] <= muted
        in_training = [y for training, y in trained if training]
        assert len(in_training) == 1
        assert torch.equal(probed[0], in_training[0])
        assert client.network.training


def test_l2d_judges_the_augmented_embedding_by_the_originals_gaussian() -> None:
    small, client, batch = begun("l2d", condition="original")
    features = []
    hook = small.network.featurizer.register_forward_hook(lambda _, x, y: features.append(y))
    terms = small.method.loss(client, batch)
    hook.remove()
    mean, spread = small.network.embedding.moments(features[0])
    rng = client.stream("l2d", 0)
    client.scratch["l2d"].draws(8, batch.images.shape[-1], rng, random_mixture=True)
    z = mean + 0.2 * (spread / 2).exp() * torch.randn(mean.shape, generator=rng)
    normal = (mean[:8] - z[8:]) ** 2 / spread[:8].exp() + spread[:8]
    torch.testing.assert_close(terms["likelihood"], normal.mean())


def test_fpl_averages_both_terms_over_the_whole_batch() -> None:
    found = {}
    for over in ("known", "batch"):
        small, client, batch = begun("fpl", contrast_over=over)
        width = small.network.features_dimension
        label = int(batch.labels[0])
        client.extras.tensors["fpl/prototypes"] = torch.stack(
            [torch.ones(width), torch.eye(width)[0]]
        )
        client.extras.tensors["fpl/classes"] = torch.tensor([label, 99])
        small.method.begin(client)
        found[over] = small.method.loss(client, batch)
    share = float((batch.labels == label).float().mean())
    assert 0 < share < 1
    for term in ("prototype_contrast", "prototype_distance"):
        torch.testing.assert_close(found["batch"][term], found["known"][term] * share)


def test_randconv_chains_its_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, convolved = {}, randconv.convolved
    for source in ("image", "last_version"):
        small, client, batch = begun("randconv", version_of=source)
        made: list[torch.Tensor] = []

        def kept(network, images, kernel, share, made=made):
            made += [images, convolved(network, images, kernel, share)]
            return made[-1]

        monkeypatch.setattr(randconv, "convolved", kept)
        small.method.loss(client, batch)
        seen[source] = made
    assert all(torch.equal(x, batch.images) for x in seen["image"][::2])
    chain = seen["last_version"]
    assert all(a is b for a, b in zip(chain[1:-1:2], chain[2::2], strict=True))


def test_csac_adds_kernels_and_layers_up_and_may_keep_its_first_model() -> None:
    # What the authors' code gives above its value for a sample and itself.
    rng = torch.Generator().manual_seed(0)
    one = torch.randn(32, 128, generator=rng)
    for shift, above in ((0.0, 0.2190), (0.3, 0.2841), (1.0, 0.9026)):
        other = torch.randn(32, 128, generator=rng) + shift
        found = mmd(one, other, summed=True) - mmd(one, one, summed=True)
        assert float(found) == pytest.approx(above, abs=6e-5)
    points = torch.cat([one, other]).double()
    squares = [[float((a - b).square().sum()) for b in points] for a in points]
    width = sum(map(sum, squares)) / 64**2
    kernel = [
        [sum(math.exp(-s / (2 * width * 3.0**k)) for k in range(-3, 2)) for s in row]
        for row in squares
    ]
    pairs = [(a, b) for a in range(32) for b in range(32)]
    within = sum(kernel[a][b] + kernel[a + 32][b + 32] for a, b in pairs if a != b) / (32 * 31)
    across = sum(kernel[a][b + 32] for a, b in pairs) / 32**2
    expected = within - 2 * across + 2 / 31
    assert float(mmd(one, other, summed=True)) == pytest.approx(expected, rel=1e-4)

    kept = {}
    for private in ("last", "first"):
        small = federation("csac", settings={"private": private})
        small.run(1)
        first = copy.deepcopy(small.transport.memories[0])
        small.server.round()
        now = small.transport.memories[0]
        kept[private] = all(torch.equal(now[name], first[name]) for name in first)
    assert kept == {"last": False, "first": True}

    mean, total = (
        federation("csac", sizes=(6, 6), settings={"layers": layers}, seed=3)
        for layers in ("mean", "sum")
    )
    for small in (mean, total):
        small.run(2)
    number = len(mean.network.stages)
    ratio = total.replies[-1].terms["layer_alignment"] / mean.replies[-1].terms["layer_alignment"]
    assert number > 1
    assert ratio > 0.5 * number


def test_the_contents_variance_may_divide_by_one_less() -> None:
    features, style = torch.randn(2, 3, 2, 4).double(), torch.rand(2, 3).double() + 0.5
    variance, mean = features.var((2, 3), correction=1), features.mean((2, 3))
    scale = style[1] / (variance + 1e-5).sqrt()
    expected = (features - mean[..., None, None]) * scale[..., None, None]
    expected = expected + style[0][None, :, None, None]
    torch.testing.assert_close(adain(features, style, correction=1), expected)
    assert torch.isfinite(adain(torch.rand(1, 3, 1, 1), style.float(), correction=1)).all()


def test_a_settings_default_may_be_said_and_makes_no_other_experiment() -> None:
    for name in ("l2d", "fpl", "randconv", "csac", "pardon", "ccst", "l2d+randaug"):
        known = method_class(name).Settings
        plain = Experiment(data="digits", method=name, hold_out="sketch")
        for field, default in known():
            said = {"name": name, field: default}
            assert Experiment(data="digits", method=said, hold_out="sketch").id == plain.id
    changed = Experiment(data="digits", method={"name": "fpl", "contrast_over": "batch"})
    assert changed.id != Experiment(data="digits", method="fpl").id


def test_every_method_of_a_paper_says_where_it_differs(subtests: pytest.Subtests) -> None:
    for name in OURS:
        with subtests.test(name=name):
            found = DIFFERENCES[name]
            assert found["code"], "whose code, or that there is none"
            page = (METHODS_PAGES / f"{name}.md").read_text()
            ours, published = (
                found["code"].startswith("none: "),
                not found["code"].startswith("none"),
            )
            assert ("## Where it differs from the authors' code" in page) == (not ours)
            none_known = published and not found.get("differences")
            assert ("No difference is known." in page) == none_known
            for difference in found.get("differences", ()):
                assert all(difference[key] for key in ("theirs", "ours", "why"))
                if "setting" in difference:
                    fields = dict(part.split("=", 1) for part in difference["setting"].split(" "))
                    said = {}
                    for path, value in fields.items():
                        part, _, field = path.partition(".")
                        said.setdefault(part, {})[field] = value
                    said["method"] = {"name": name} | dict(said.get("method", {}))
                    Experiment(
                        data="digits", **said
                    )  # every setting named is one, with a valid value
