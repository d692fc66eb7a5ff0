"""CCST: styles, the draw of Algorithm 1, the augmented set, PARDON's variant, and the limits."""

from collections import Counter

import numpy
import pytest
import torch

from codec_files import write_vgg19
from feddg.errors import ExperimentError
from feddg.experiment import Experiment
from feddg.methods.ccst import Versions, draw_styles
from feddg.methods.composition import build_method
from feddg.runs.prepare import in_process
from feddg.styles.codec import load_codec, transfer
from federations import federation, same


def set_up(settings=None, **options):
    small = federation("ccst", settings=settings or {}, **options)
    small.server.setup()
    return small, small.server.state.context.tensors


def begun(small, id=0, **state):
    client = small.client(id, context=small.server.state.context, **state)
    small.method.begin(client)
    return client


def originals(client_examples):
    return client_examples.images().permute(0, 2, 3, 1)


def test_the_overall_style_is_the_moments_of_all_places_of_all_images():
    small, bank = set_up()
    images = small.examples(1).images().float() / 255
    with torch.no_grad():
        maps = load_codec("compact").encode(images).double().numpy()
    places = numpy.concatenate([m.reshape(len(m), -1) for m in maps], axis=1)
    expected = numpy.stack([places.mean(1), numpy.sqrt(places.var(1) + 1e-5)])
    assert bank["owners"].tolist() == [0, 1, 2]
    numpy.testing.assert_allclose(bank["styles"][1], expected, rtol=1e-4, atol=1e-5)


def test_single_styles_are_those_of_one_image_in_thirty_two():
    small, bank = set_up({"share": "single"}, sizes=(33, 5, 32))
    assert bank["owners"].tolist() == [0, 0, 1, 2]
    codec = load_codec("compact")
    with torch.no_grad():
        maps = codec.encode(small.examples(1).images().float() / 255).double()
    styles = torch.stack([maps.mean((2, 3)), (maps.var((2, 3), correction=0) + 1e-5).sqrt()], 1)
    distance = (styles - bank["styles"][2]).abs().amax((1, 2))
    assert int((distance < 1e-4).sum()) == 1


def test_each_image_draws_distinct_clients_all_equally_often():
    owners = torch.arange(5)
    drawn = draw_styles(owners, 4000, 2, torch.Generator().manual_seed(0))
    assert drawn.shape == (2, 4000)
    assert (drawn[0] != drawn[1]).all()
    counts = torch.bincount(drawn.flatten(), minlength=5)
    assert ((counts - 1600).abs() < 150).all()  # 1600 +- 4.8 standard deviations


def test_with_as_many_draws_as_clients_each_occurs_exactly_once():
    for number in (5, 9):
        drawn = draw_styles(torch.tensor([3, 4, 6, 8, 9]), 50, number, torch.Generator())
        assert torch.equal(drawn.sort(0).values, torch.arange(5)[:, None].expand(5, 50))


def test_single_mode_draws_clients_first_and_then_one_of_their_styles():
    owners = torch.tensor([0, 0, 0, 0, 0, 0, 0, 0, 1, 2])
    drawn = draw_styles(owners, 3000, 1, torch.Generator().manual_seed(0))[0]
    counts = Counter(owners[drawn].tolist())
    assert all(850 < counts[id] < 1150 for id in range(3))  # not 8 : 1 : 1
    assert len(set(drawn.tolist())) == 10


def test_the_augmented_set_holds_every_original_once_when_k_is_n():
    small, bank = set_up()
    client = begun(small)
    examples, own = client.training, small.examples(0)
    assert len(examples) == 3 * 7
    images = originals(examples)
    assert torch.equal(examples.labels, own.labels.repeat(3))
    copies = [sum(torch.equal(image, x) for x in images) for image in originals(own)]
    assert copies == [1] * 7
    stylized = {
        id: transfer(load_codec("compact"), own.images(), bank["styles"][id], 1.0) for id in (1, 2)
    }
    for i in range(7):
        versions = [images[v * 7 + i] for v in range(3)]
        for foreign in stylized.values():
            expected = foreign[i].permute(1, 2, 0)
            closest = min(int((v.int() - expected.int()).abs().max()) for v in versions)
            assert closest <= 1  # batches of other sizes may round differently


def test_with_fewer_draws_originals_stay_with_their_probability():
    small, _ = set_up({"styles_per_image": 1}, sizes=(60, 4, 4))
    examples = begun(small).training
    assert len(examples) == 60
    kept = sum(torch.equal(a, b) for a, b in zip(originals(examples), originals(small.examples(0))))
    assert 8 < kept < 33  # 20 +- 3.4 standard deviations


def test_the_draw_lasts():
    small, _ = set_up()
    first = begun(small)
    later = small.client(context=small.server.state.context)
    later.round = 2
    small.method.begin(later)
    assert same({"": first.training.images()}, {"": later.training.images()})


def test_an_update_counts_originals_and_an_epoch_all_versions():
    small = federation("ccst")
    small.server.setup()
    record = small.server.round()
    assert record.examples == 18
    assert record.images == 3 * 18


def test_versions_gather_rows_of_any_version():
    views = [torch.randint(256, (4, 2, 2, 3), dtype=torch.uint8) for _ in range(3)]
    gathered = Versions(views).gather(torch.tensor([0, 5, 11]))
    expected = torch.stack([views[0][0], views[1][1], views[2][3]]).permute(0, 3, 1, 2)
    assert torch.equal(gathered, expected)


@pytest.mark.parametrize("settings", [{}, {"styles_per_image": 1}, {"variant": "pardon"}])
def test_a_client_that_is_alone_trains_as_fedavg(settings):
    alone = federation("ccst", settings=settings, sizes=(9,)).run(1)
    assert same(alone, federation(sizes=(9,)).run(1))


def test_pardons_variant_pairs_images_with_stylized_copies_in_one_lasting_foreign_style():
    small, bank = set_up({"variant": "pardon"})
    for id in range(3):
        client, again = begun(small, id), begun(small, id)
        style = client.scratch["ccst"]
        assert torch.equal(style, again.scratch["ccst"])
        assert int((bank["styles"] == style).all(2).all(1).nonzero()) != id
        stylized = transfer(load_codec("compact"), small.examples(id).images(), style, 0.5)
        assert torch.equal(client.views["ccst"], stylized.permute(0, 2, 3, 1))
    client = begun(small)
    client.worker.freeze = True
    client.set_training()
    batch = client.batch(torch.arange(7), client.stream("augment"))
    terms = small.method.loss(client, batch)
    for name, images in (("", batch.images), ("transferred_", batch.views["ccst"])):
        expected = torch.nn.functional.cross_entropy(small.network(images), batch.labels)
        torch.testing.assert_close(terms[f"{name}cross_entropy"], expected)


def test_cached_and_on_the_fly_stylized_copies_agree_without_augmentation():
    losses = []
    for stylized in ("cached", "on_the_fly"):
        small, _ = set_up({"variant": "pardon", "stylized": stylized}, freeze=True)
        client = begun(small)
        batch = client.batch(torch.arange(7), client.stream("augment"))
        assert ("ccst" in batch.views) == (stylized == "cached")
        losses.append(small.method.loss(client, batch)["transferred_cross_entropy"].item())
    assert losses[0] == pytest.approx(
        losses[1], rel=1e-2
    )  # cached stylized copies are rounded to bytes


def test_the_augmented_set_is_kept_on_disk_and_found_again(tmp_path):
    weights = federation("ccst").run()
    assert same(federation("ccst", cache=tmp_path).run(), weights)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert len(files) == 3 * 3  # clients by versions
    assert same(federation("ccst", cache=tmp_path).run(), weights)
    assert sorted(path.name for path in tmp_path.iterdir()) == files


def test_only_styles_and_weights_leave_the_client():
    small = federation("ccst")
    small.run(1)
    layouts = {row["id"]: row["tensors"] for row in small.ledger if row["kind"] == "layout"}
    up = [row for row in small.ledger if row.get("direction") == "up"]
    described = [layouts[row["layout"]] for row in up if row["purpose"] == "statistics"]
    assert [[(t["name"], t["shape"]) for t in d] for d in described] == [
        [("styles", (1, 2, load_codec("compact").channels))]
    ] * 3
    names = {t["name"] for row in up if row["purpose"] == "update" for t in layouts[row["layout"]]}
    assert names == {f"weights/{name}" for name in small.network.state_dict()}


def test_settings_that_contradict_each_other_and_pardons_strength():
    with pytest.raises(ExperimentError, match=r"ccst: stylized: .* variant"):
        build_method("ccst", {"stylized": "on_the_fly"})
    assert build_method("ccst", {}).settings.strength == 1
    assert build_method("ccst", {"variant": "pardon"}).settings.strength == 0.5
    assert build_method("ccst", {"variant": "pardon", "strength": 1}).settings.strength == 1
    with pytest.raises(ExperimentError, match="styles_per_image"):
        build_method("ccst", {"styles_per_image": 0})


def test_a_preview_shows_the_banks_styles_by_turns():
    small, bank = set_up()
    images = small.pixels.gather(torch.arange(4))
    shown = small.method.preview(images, small.server.state.context)
    expected = transfer(load_codec("compact"), images[3:], bank["styles"][0])
    assert int((shown[3].int() - expected[0].int()).abs().max()) <= 1
    assert small.method.preview(images, None) is None


@pytest.mark.parametrize("method", ["ccst", "pardon+mixstyle"])
def test_a_codec_that_sees_too_little_of_small_images_is_warned_about(tmp_path, method):
    files = write_vgg19(tmp_path, divisor=16)

    def said(size, **settings):
        data = {"source": "digits", "image_size": size}
        experiment = Experiment(data=data, method={"name": method, **settings}, hold_out="ink")
        chosen = build_method(experiment.method.name, experiment.method.settings)
        return list(chosen.diagnostics(experiment))

    (found,) = said(32, codec="vgg19", **files)
    assert "an image of 32 pixels as 4 x 4 places" in found.text
    assert "method.codec=colors" in found.advice
    assert said(64, codec="vgg19", **files) == []
    assert said(32, codec="compact") == said(8, codec="colors") == []
    assert said(32, codec="vgg19", strength=0.0, **files) == []


def test_what_a_method_warns_about_is_said_before_round_1(tmp_path, caplog):
    files = write_vgg19(tmp_path, divisor=16)
    experiment = Experiment(
        data={"source": "digits", "image_size": 16},
        method={"name": "ccst", "codec": "vgg19", **files},
        hold_out="ink",
        clients={"number": 2},
    )
    in_process(experiment, tmp_path / "cache", lambda what, done, total: None)
    assert "as 2 x 2 places" in caplog.text
