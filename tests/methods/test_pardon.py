"""PARDON: every step of Eq. 1 to 9 against an independent calculation, ablations and limits."""

import functools
from pathlib import Path

import numpy
import pytest
import torch

from feddg.data.augment import apply, draw
from feddg.data.data_set import find_augmentation
from feddg.errors import ExperimentError
from feddg.messages import Message
from feddg.methods.composition import build_method, method_class
from feddg.methods.pardon import (
    nearest_of_class,
    negatives,
    partners,
    regularizer,
    triplet,
)
from feddg.settings import TrainSettings
from feddg.styles.codec import adain, load_codec, transfer
from federations import federation, same
from scripts import load_script
from style_images import slow_finch

ABLATIONS = {
    "v1": {"local_clustering": False},
    "v2": {"server_clustering": False},
    "v3": {"contrastive": "none", "stylized_cross_entropy": True},
    "v4": {"contrastive": "ordinary"},
    "v5": {},
}
"""The rows of FISC's ablation table as settings; v5 is the full method."""


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def with_looks(*args, gains, **options):
    """A small federation whose images are darkened, one by one in turn."""
    small = federation(*args, **options)
    pixels = small.pixels._pixels
    small.pixels._pixels = (pixels * numpy.resize(gains, len(pixels))[:, None, None, None]).astype(
        numpy.uint8
    )
    return small


def unit(vector):
    return vector / numpy.linalg.norm(vector)


def test_the_triplet_loss_is_an_explicit_loop():
    """Two candidates of the other class are equal, so that only the draw's choice is free."""
    z, positives, stylized = drawn(3, 4), drawn(3, 4, seed=1) * 3, drawn(3, 4, seed=2)
    stylized[1] = stylized[0]
    labels = [1, 1, 0]
    negative_of = [2, 2, 0]
    losses = []
    for i in range(3):
        anchor, positive, negative = (
            unit(row.double().numpy()) for row in (z[i], positives[i], stylized[negative_of[i]])
        )
        near, far = numpy.linalg.norm(anchor - positive), numpy.linalg.norm(anchor - negative)
        losses.append(max(0, near - far + 0.3))
    assert min(losses) == 0 < max(losses)  # both sides of the hinge
    rng = torch.Generator().manual_seed(0)
    chosen = negatives(torch.tensor(labels), rng)
    result = triplet(z, positives, stylized, *chosen, 0.3).item()
    assert result == pytest.approx(numpy.mean(losses), rel=1e-5)


def test_negatives_are_drawn_evenly_from_the_other_classes_only():
    angles = torch.tensor([0.0, 0.5, 1.0, 1.5])
    points = torch.stack([angles.cos(), angles.sin()], 1)
    labels = torch.tensor([0, 0, 1, 2])
    rng = torch.Generator().manual_seed(0)
    anchored = torch.tensor([True, False, False, False])
    drawn = [negatives(labels, rng, anchored) for _ in range(400)]
    seen = [triplet(points, points, points, *chosen, 2.0).item() for chosen in drawn]
    chords = [2.0 - 2 * numpy.sin(angle / 2) for angle in (1.0, 1.5)]
    counts = [sum(value == pytest.approx(chord, abs=1e-4) for value in seen) for chord in chords]
    assert sum(counts) == 400
    assert 150 < counts[0] < 250


def test_anchors_without_a_negative_are_left_out_and_one_class_gives_zero():
    z = drawn(4, 3).requires_grad_()
    for labels, anchored in ((torch.zeros(4), None), (torch.arange(4), torch.zeros(4).bool())):
        loss = triplet(z, z * 2, z, *negatives(labels, torch.Generator(), anchored), 0.3)
        assert loss.item() == 0
        assert torch.autograd.grad(loss, z)[0].eq(0).all()


def test_equal_embeddings_have_a_finite_gradient():
    z = torch.ones(4, 3).requires_grad_()
    triplet(z, z, z, *negatives(torch.arange(4), torch.Generator()), 0.3).backward()
    assert z.grad.isfinite().all()


def test_both_forms_of_the_regularizer():
    z, stylized = drawn(5, 3), drawn(5, 3, seed=1)
    a, b = z.double().numpy(), stylized.double().numpy()
    mean = regularizer(z, stylized, "mean").item()
    assert mean == pytest.approx(numpy.mean(a**2 + b**2), rel=1e-6)
    assert regularizer(z, None, "mean").item() == pytest.approx(numpy.mean(a**2), rel=1e-6)
    for other in (stylized, None):
        total = regularizer(z, other, "sum").item()
        assert total == pytest.approx(numpy.mean(numpy.sum(a**2, axis=1)), rel=1e-6)


def test_the_nearest_of_a_class_by_hand():
    degrees = torch.tensor([0.0, 10.0, 30.0, 12.0, 200.0])
    radians = torch.deg2rad(degrees)
    lengths = torch.tensor([1.0, 9.0, 0.1, 2.0, 1.0])[:, None]
    z = lengths * torch.stack([radians.cos(), radians.sin()], 1)
    labels = torch.tensor([0, 0, 0, 1, 2])  # 12 degrees is nearest to 10, but of another class
    partner = partners(labels)
    assert partner.any(1).tolist() == [True, True, True, False, False]
    assert torch.equal(nearest_of_class(z, partner), z[[1, 0, 1, 3, 4]])


def clusters_of(vectors):
    """FINCH's partitions by dictionaries and loops, each a list of lists of rows."""
    levels = map(numpy.array, slow_finch([[*map(float, vector)] for vector in vectors]))
    return [[numpy.flatnonzero(level == c) for c in range(level.max() + 1)] for level in levels]


def places(images):
    """Each image's feature map as ``(C, h w)`` in double precision."""
    with torch.no_grad():
        maps = load_codec("compact").encode(images.float() / 255).double().numpy()
    return [m.reshape(len(m), -1) for m in maps]


def style_of(maps):
    values = numpy.concatenate(maps, axis=1)
    return numpy.stack([values.mean(1), numpy.sqrt(values.var(1) + 1e-5)])


@pytest.mark.parametrize("partition", ["coarsest", "finest"])
@pytest.mark.parametrize("combine", ["mean", "mixture"])
def test_a_clients_style_is_the_mean_over_the_clusters_of_its_images(partition, combine):
    settings = {"local_partition": partition, "combine": combine}
    gains = [0.05, 0.1, 0.15, 0.2, 0.4, 0.6, 0.8, 1.0]
    small = with_looks("pardon", settings=settings, sizes=(24, 4), gains=gains)
    maps = places(small.examples(0).images())
    levels = clusters_of([style_of([m]).ravel() for m in maps])
    assert len(levels) > 1
    clusters = [[maps[i] for i in c] for c in levels[0 if partition == "finest" else -1]]
    assert len(clusters) > 1
    expected = numpy.mean([style_of(cluster) for cluster in clusters], axis=0)
    if combine == "mixture":
        raw = [numpy.concatenate(cluster, axis=1) for cluster in clusters]
        mean, square = (numpy.mean([(r**p).mean(1) for r in raw], axis=0) for p in (1, 2))
        expected = numpy.stack([mean, numpy.sqrt(square - mean**2 + 1e-5)])
    style = small.method.client_statistics(small.client(0)).tensors["style"]
    numpy.testing.assert_allclose(style, expected, rtol=1e-4, atol=1e-5)


def test_without_local_clustering_it_is_the_pooled_style():
    small = federation("pardon", settings=ABLATIONS["v1"], sizes=(14, 4))
    style = small.method.client_statistics(small.client(0)).tensors["style"]
    expected = style_of(places(small.examples(0).images()))
    numpy.testing.assert_allclose(style, expected, rtol=1e-4, atol=1e-5)


def test_whole_maps_can_be_clustered_instead_of_styles():
    small = federation("pardon", settings={"local_features": "flatten"}, sizes=(14, 4))
    maps = places(small.examples(0).images())
    clusters = clusters_of([m.ravel() for m in maps])[-1]
    expected = numpy.mean([style_of([maps[i] for i in c]) for c in clusters], axis=0)
    style = small.method.client_statistics(small.client(0)).tensors["style"]
    numpy.testing.assert_allclose(style, expected, rtol=1e-4, atol=1e-5)


def nine_styles():
    """Four directions, two near each of two axes; styles of every length."""
    angles = numpy.array([0.02, 0.03, 0.2, 0.22, 1.5, 1.53, 1.51, 1.2, 1.25])
    lengths = numpy.array([1.0, 3, 2, 5, 1, 4, 2, 3, 7])
    base = lengths[:, None] * numpy.stack([numpy.cos(angles), numpy.sin(angles)], 1)
    return numpy.stack([base, base[:, ::-1]], 1)


def context(styles, **settings):
    method = build_method("pardon", settings)
    messages = [(id, Message({"style": torch.tensor(s).float()})) for id, s in enumerate(styles)]
    return method.aggregate_statistics(messages).tensors["style"]


@pytest.mark.parametrize("partition", ["finest", "coarsest"])
@pytest.mark.parametrize("median", ["average", "lower"])
def test_the_interpolation_style_is_the_median_of_the_group_means(partition, median):
    styles = nine_styles()
    levels = clusters_of([s.ravel() for s in styles])
    assert [len(level) for level in levels] == [4, 2]
    groups = levels[0 if partition == "finest" else -1]
    means = numpy.sort([numpy.mean([styles[i] for i in g], axis=0) for g in groups], axis=0)
    expected = numpy.median(means, axis=0)
    if median == "lower":
        expected = means[(len(means) - 1) // 2]
    style = context(styles, server_partition=partition, median=median)
    numpy.testing.assert_allclose(style, expected, rtol=1e-5)


def test_without_server_clustering_it_is_the_plain_mean():
    styles = nine_styles()
    numpy.testing.assert_allclose(
        context(styles, **ABLATIONS["v2"]), numpy.mean(styles, axis=0), rtol=1e-5
    )


def test_a_perturbed_style_is_shrunk_and_noisy():
    settings = {"noise_scale": 0.5, "noise_coefficient": 0.25}
    plain = federation("pardon")
    noisy = federation("pardon", settings=settings)
    styles = [
        small.method.client_statistics(small.client()).tensors["style"] for small in (plain, noisy)
    ]
    noise = styles[1][0] - 0.75 * styles[0][0]  # the means; deviations are kept positive
    assert noise.std().item() == pytest.approx(0.5, rel=0.3)
    assert (styles[1][1] > 0).all()


def begun(settings=None, id=0, **options):
    small = federation("pardon", settings=settings or {}, freeze=True, **options)
    small.server.setup()
    client = small.client(id, context=small.server.state.context)
    small.method.begin(client)
    count = len(client.examples)
    return small, client, client.batch(torch.arange(count), client.stream("augment"))


def test_the_loss_is_equation_nine_from_two_forward_passes():
    small, client, batch = begun()
    forwards = []
    hook = small.network.featurizer.register_forward_hook(lambda _, x, y: forwards.append(len(y)))
    terms = small.method.loss(client, batch)
    hook.remove()
    assert forwards == [7, 7]
    style = small.server.state.context.tensors["style"]
    stylized = transfer(load_codec("compact"), client.examples.images(), style, 0.5)
    z, z_stylized = (small.network.features(x) for x in (batch.images, stylized.float() / 255))
    rng = client.stream("negatives", 0)
    expected = {
        "cross_entropy": torch.nn.functional.cross_entropy(
            small.network.classifier(z), batch.labels
        ),
        "triplet": 0.75 * triplet(z, z_stylized, z_stylized, *negatives(batch.labels, rng), 0.3),
        "regularizer": 0.2 * (z.square() + z_stylized.square()).mean(),
    }
    assert terms.keys() == expected.keys()
    for name, term in expected.items():
        torch.testing.assert_close(terms[name], term)


def test_cached_and_on_the_fly_stylized_copies_agree_without_augmentation():
    cached, flying = (begun({"stylized": kind}) for kind in ("cached", "on_the_fly"))
    assert "stylized" in cached[2].views
    assert not flying[2].views
    pairs = [
        small.method.copies(client, batch, "stylized") for small, client, batch in (cached, flying)
    ]
    torch.testing.assert_close(*pairs, rtol=0, atol=0.51 / 255)  # cached ones are bytes
    terms = [small.method.loss(client, batch) for small, client, batch in (cached, flying)]
    for name, term in terms[0].items():
        torch.testing.assert_close(term, terms[1][name], rtol=1e-2, atol=1e-3)


def test_stylized_copies_are_augmented_as_their_originals():
    _, client, batch = begun({"strength": 0.0}, augmentation=find_augmentation("digits"))
    still = client.batch(torch.arange(7), client.stream("augment"))
    assert torch.equal(batch.views["stylized"], still.views["stylized"])
    small, other, _ = begun({"strength": 0.0})
    unmoved = client.views["stylized"].permute(0, 3, 1, 2).float() / 255
    moved = (batch.views["stylized"] - unmoved).abs().amax((1, 2, 3)) > 1e-6
    original = small.examples(0).images().float() / 255
    assert torch.equal(moved, (batch.images - original).abs().amax((1, 2, 3)) > 1e-6)
    assert other.views.keys() == {"stylized"}


TWO_ROUNDS = TrainSettings(rounds=2, batch_size=4)


@functools.cache
def ablated(version):
    sizes, gains = (7, 5, 6, 8, 5, 7), [0.1] * 12 + [0.3] * 14 + [0.6, 1.0] * 6
    small = with_looks(
        "pardon", settings=ABLATIONS[version], train=TWO_ROUNDS, sizes=sizes, gains=gains
    )
    return small, small.run()


def test_the_ablations_run_and_differ():
    results = {version: ablated(version)[1] for version in ABLATIONS}
    assert list(results) == ["v1", "v2", "v3", "v4", "v5"]
    for version, weights in results.items():
        assert all(t.isfinite().all() for t in weights.values()), version
        assert not any(
            same(weights, other) for name, other in results.items() if name != version
        ), version


def test_the_ablations_have_the_terms_that_they_name():
    for version, names in {
        "v3": {"cross_entropy", "stylized_cross_entropy", "regularizer"},
        "v4": {"cross_entropy", "triplet", "regularizer"},
        "v5": {"cross_entropy", "triplet", "regularizer"},
    }.items():
        small, _ = ablated(version)
        assert set(small.replies[0].terms) == names
        purposes = {row["purpose"] for row in small.ledger if row["kind"] == "message"}
        assert ("statistics" in purposes) == (version != "v4")


def test_one_style_and_the_weights_leave_each_client():
    small, _ = ablated("v5")
    layouts = {row["id"]: row["tensors"] for row in small.ledger if row["kind"] == "layout"}
    up = [row for row in small.ledger if row.get("direction") == "up" and row["round"] < 2]
    sent = {(row["purpose"], t["name"]) for row in up for t in layouts[row["layout"]]}
    updates = {("update", f"weights/{name}") for name in small.network.state_dict()}
    assert sent == {("statistics", "style")} | updates
    assert [row["bytes"] for row in up if row["purpose"] == "statistics"] == [
        2 * load_codec("compact").channels * 4
    ] * 6


def test_without_its_terms_it_is_fedavg_bit_for_bit():
    off = {"gamma2": 0.0, "contrastive": "none"}
    assert same(federation("pardon", settings=off).run(1), federation().run(1))


def test_its_other_name():
    assert method_class("fisc") is method_class("pardon")
    assert federation("fisc").method.name == "pardon"


def test_stylized_copies_are_kept_on_disk_and_found_again(tmp_path):
    weights = federation("pardon", cache=tmp_path, train=TWO_ROUNDS).run()
    assert same(weights, federation("pardon", train=TWO_ROUNDS).run())
    files = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert len(files) == 3
    assert same(federation("pardon", cache=tmp_path, train=TWO_ROUNDS).run(), weights)
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == files


@pytest.mark.parametrize("version", ["v3", "v4", "v5"])
def test_one_class_and_single_images_stay_finite(version):
    small = federation("pardon", settings=ABLATIONS[version], sizes=(4, 1, 2))
    small.labels[:] = 1
    weights = small.run()
    assert all(t.isfinite().all() for t in weights.values())
    assert not any(reply.__class__.__name__ == "Refusal" for reply in small.replies)
    assert small.replies[0].terms.get("triplet", 0.0) == 0


def test_a_federation_of_one_client_uses_its_own_style():
    small = federation("pardon", sizes=(6,))
    small.server.setup()
    described = small.method.client_statistics(small.client(0, round=0)).tensors["style"]
    torch.testing.assert_close(small.server.state.context.tensors["style"], described)
    assert all(t.isfinite().all() for t in small.run(1).values())


RELEASED_CODE = load_script(
    Path(__file__).parents[2] / "benchmarks" / "papers" / "released_copies.py"
)


def released_federation(name="pardon", settings=RELEASED_CODE.RELEASED, **options):
    """Five clients whose images are augmented as the released code's are."""
    augmentation = find_augmentation("pacs").model_copy(update={"hue": "hsv"})
    gains = [0.1] * 9 + [0.3] * 9 + [0.6, 1.0] * 11
    made = with_looks(
        name,
        settings=settings,
        sizes=(9, 9, 8, 8, 6),
        gains=gains,
        augmentation=augmentation,
        freeze=True,
        embedding="linear",
        **options,
    )
    made.server.setup()
    return made


def normalised(images):
    return (images - RELEASED_CODE.MEAN) / RELEASED_CODE.DEVIATION


def test_the_released_codes_styles_copies_loss_and_gradient_are_ours_by_settings():
    """Against the released pipeline in plain PyTorch, which shares the draws alone."""
    small = released_federation()
    encoder, decoder = RELEASED_CODE.halves({"codec": "compact", "encoder": None, "decoder": None})
    styles = []
    for id in range(5):
        client = small.client(id, round=0)
        images = client.examples.images()
        draws = draw(client.augmentation, len(images), 16, client.stream("augmented style"))
        styles.append(RELEASED_CODE.style_of(encoder, normalised(apply(images, draws))))
        own = small.method.client_statistics(client).tensors["style"]
        torch.testing.assert_close(own, styles[-1], rtol=1e-5, atol=1e-5)
    style = RELEASED_CODE.interpolated(torch.stack(styles))
    ours = small.server.state.context.tensors["style"]
    torch.testing.assert_close(ours, style, rtol=1e-5, atol=1e-5)
    assert ours.min() < 0  # of maps before their ReLU

    client = small.client(context=small.server.state.context)
    client.set_training()
    small.method.begin(client)
    batch = client.batch(torch.arange(9), client.stream("augment"))
    images, network = normalised(batch.images), client.network
    copies = RELEASED_CODE.copies_of(encoder, decoder, images, style)
    own = small.method.copies(client, batch, "stylized")
    torch.testing.assert_close(network.normalize(own), copies, rtol=1e-4, atol=1e-5)
    assert own.min() < 0 or own.max() > 1  # not clamped

    terms = small.method.loss(client, batch)
    other = (batch.labels[:, None] != batch.labels).float()
    drawn = torch.multinomial(other, 1, generator=client.stream("negatives", 0)).squeeze(1)
    expected = RELEASED_CODE.loss_of(
        lambda x: network.embedding(network.featurizer(x)),
        network.classifier,
        images,
        copies,
        batch.labels,
        drawn,
    )
    assert expected["triplet"] > 0
    parameters = [p for p in network.parameters() if p.requires_grad]
    for name, term in expected.items():
        torch.testing.assert_close(terms[name], term, rtol=1e-4, atol=1e-6)
        both = [
            torch.autograd.grad(one, parameters, retain_graph=True, allow_unused=True)
            for one in (terms[name], term)
        ]
        for mine, theirs in zip(*both, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)


def test_ccst_as_pardon_has_it_and_vista_draw_with_the_released_stylization():
    ccst = released_federation("ccst", {"variant": "pardon", "stylization": "released"})
    client = ccst.client(context=ccst.server.state.context)
    ccst.method.begin(client)
    batch = client.batch(torch.arange(9), client.stream("augment"))
    halves = RELEASED_CODE.halves({"codec": "compact", "encoder": None, "decoder": None})
    images, style = normalised(batch.images), client.scratch["ccst"]
    expected = RELEASED_CODE.copies_of(*halves, images, style)
    own = client.network.normalize(ccst.method.copies(client, batch, "ccst"))
    torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-5)

    vista = released_federation("vista", {"stylization": "released"})
    client = vista.client(0, round=0)
    colours = normalised(vista.method.style_images(client)).transpose(0, 1).flatten(1)
    pooled = vista.method.moments(client).pooled().styles()[0].float()
    torch.testing.assert_close(pooled[0], colours.mean(1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(pooled[1], colours.std(1), rtol=1e-3, atol=1e-5)


def test_triplets_need_a_margin():
    """PyTorch's loss takes none of 0: the first step would say so."""
    with pytest.raises(ExperimentError, match="margin"):
        build_method("pardon", {"margin": 0})


def test_bytes_cannot_keep_released_copies_and_the_settings_of_the_code_come_along():
    settings = build_method("pardon", {"stylization": "released"}).settings
    assert settings.style_layer == "conv4_1_pre"
    assert (settings.stylized, settings.content_variance) == ("on_the_fly", "n-1")
    own = build_method("pardon", {"stylization": "released", "style_layer": "output"}).settings
    assert own.style_layer == "output"
    with pytest.raises(ExperimentError, match="stylization: released needs stylized: on_the"):
        build_method("pardon", {"stylization": "released", "stylized": "cached"})
    with pytest.raises(ExperimentError, match="and so does stylization: released"):
        build_method("ccst", {"stylization": "released"})


def test_a_preview_in_the_released_stylization_is_an_image():
    small = released_federation()
    images = small.examples(0).images()
    shown = small.method.preview(images, small.server.state.context)
    style = small.server.state.context.tensors["style"]
    codec = small.method.codec()
    drawn = codec.decode(adain(codec.encode(images / 255), style, 0.5, correction=1), (16, 16))
    assert drawn.max() > 1 or drawn.min() < 0
    wanted = (drawn.clamp(0, 1) * 255).round()
    torch.testing.assert_close(shown.float(), wanted, rtol=0, atol=1.0)


def test_there_is_nothing_to_show_of_styles_that_nobody_sends():
    method = build_method("pardon+elcfs", {"contrastive": "ordinary"})
    context = Message({"elcfs/amplitudes": torch.zeros(1)})
    assert method.preview(torch.zeros(2, 3, 8, 8), context) is None
