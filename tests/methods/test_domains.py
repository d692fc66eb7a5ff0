"""Methods that compare a client's domains, against loops over the domains of a batch."""

import itertools
from dataclasses import dataclass, replace

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy
from torch.utils.data import ConcatDataset, Subset

import feddg
from discs import SEGMENT, Discs, SmallUNet
from feddg.clients.client import Examples
from feddg.diagnostics import collected
from feddg.errors import ClientError, ExperimentError
from feddg.experiment import Experiment
from feddg.messages import Message, Update
from feddg.methods.afl import IMAGES, WEIGHTS, on_simplex
from feddg.methods.base import Method, State
from feddg.methods.composition import build_method, compose, method_class
from feddg.methods.coral import distances
from feddg.methods.domains import WEIGHT, DomainMethod, spread
from feddg.methods.group_dro import OWN
from feddg.methods.mixup import partners_of
from feddg.methods.mmd import BANDWIDTHS, discrepancies
from feddg.models.backbones import build_network
from feddg.runs.prepare import in_process
from feddg.settings import TrainSettings
from feddg.testing import CHECKS, check_method
from feddg.testing.methods import (
    a_device_need_not_wait,
    a_recorded_step_does_the_same,
    odd_clients_train_too,
)
from federations import CLASSES, SmallFederation, colored_images, same

SGD = TrainSettings(rounds=2, batch_size=9, optimizer="sgd", lr=0.05, momentum=0.0)
SEVERAL = {
    "three domains": (4, 3, 2),
    "a domain of one image": (5, 1, 3),
    "a domain without images": (4, 0, 5),
    "one domain": (9,),
}
OTHER_LOSSES = [
    ("vrex", {"vrex_anneal": 0, "vrex_variance": "within"}),
    ("mmd", {"mmd_pairs": "repeated"}),
    ("coral", {"coral_form": "benchmark"}),
]
PENALISED = [
    ("irm", {"irm_anneal": 0}),
    ("irm", {"irm_weight": 0}),
    ("vrex", {"vrex_anneal": 0}),
    ("mmd", {"mmd_weight": 2.0}),
    ("coral", {}),
    *OTHER_LOSSES,
    ("group_dro", {"dro_step": 0.5}),
    ("mixup", {}),
]
RULES = [rule for rule in CHECKS if rule is not a_recorded_step_does_the_same]
OF_A_LOSS = [a_device_need_not_wait, odd_clients_train_too]
ALL = [*PENALISED, ("fish", {}), ("afl", {}), ("afl", {"afl_over": "domains"})]


@dataclass
class OfDomains(SmallFederation):
    """A small federation whose clients hold images of several domains, dealt out in turn."""

    parts: tuple[tuple[int, ...], ...] = ()

    def examples(self, client: int) -> Examples:
        """A client's images, with its domains mixed through each other."""
        domains = numpy.repeat(numpy.arange(len(self.parts[client])), self.parts[client])
        shuffled = numpy.random.default_rng(client).permutation(domains)
        own = super().examples(client)
        return replace(own, domains=torch.from_numpy(shuffled), cache_key=f"of-{client}")


def federation(method, settings=None, parts=((4, 3, 2), (3, 3), (4,)), train=SGD, **options):
    sizes = tuple(map(sum, parts))
    built = build_method(method, settings or {}) if isinstance(method, str) else method
    return OfDomains(built, sizes=sizes, train=train, parts=parts, freeze=True, **options)


def begun(method, settings, part, train=SGD):
    """A client at its first step, the whole of its images as a batch, and each domain's rows."""
    small = federation(method, settings, (part,), train)
    small.server.setup()
    sent = small.method.broadcast(small.server.state)
    client = small.client(extras=sent.extras, context=small.server.state.context)
    small.method.begin(client)
    batch = client.batch(torch.randperm(sum(part)), client.stream("augment"))
    domains = client.examples.domains[batch.positions]
    first = list(dict.fromkeys(client.examples.domains.tolist()))  # as they appear
    return small, client, batch, [torch.where(domains == g)[0] for g in first]


def image_losses(client, logits, labels):
    """By hand: class weights and label smoothing, image by image."""
    train, classes = client.worker.train, logits.shape[1]
    losses = []
    for row, label in zip(logits.log_softmax(1), labels):
        losses.append(
            -(1 - train.label_smoothing) * row[label] - train.label_smoothing / classes * row.sum()
        )
    counts = torch.bincount(client.examples.labels, minlength=classes)
    known = int((counts > 0).sum())
    weights = torch.ones(len(labels))
    if train.class_weights != "none":
        weights = torch.stack([counts.sum() / (known * counts[label]) for label in labels])
    return torch.stack(losses), weights


def mean(values, weights):
    return (values * weights).sum() / weights.sum()


def by_hand(name, settings, client, z, labels, rows):
    """The loss from its definition: loops over the domains in the batch."""
    network = client.network
    logits = network.classifier(z)
    losses, weights = image_losses(client, logits, labels)
    groups = [r for r in rows if len(r)]
    each = [mean(losses[r], weights[r]) for r in groups]
    over_domains = sum(each) / len(each)
    if name == "irm":
        penalties = []
        for r in groups:
            scale = torch.ones((), requires_grad=True)
            scaled, _ = image_losses(client, logits[r] * scale, labels[r])
            halves = [(scaled[half::2], weights[r][half::2]) for half in (0, 1)]
            slopes = [
                torch.autograd.grad(mean(*half), scale, create_graph=True)[0]
                if len(half[0])
                else torch.zeros(())
                for half in halves
            ]
            penalties.append(slopes[0] * slopes[1])
        weight = settings.get("irm_weight", 100)
        return over_domains + weight * sum(penalties) / len(penalties)
    if name == "vrex":
        if settings.get("vrex_variance") == "within":
            variances = [mean((losses[r] - m) ** 2, weights[r]) for r, m in zip(groups, each)]
        else:
            variances = [(m - over_domains) ** 2 for m in each]
        return over_domains + 10 * sum(variances) / len(variances)
    if name == "group_dro":
        q = torch.full((len(rows),), 1 / len(rows))
        step = settings["dro_step"]
        present = [place for place, r in enumerate(rows) if len(r)]
        for place, m in zip(present, each):
            q[place] = q[place] * torch.exp(step * m.detach())
        q = q / q.sum()
        return sum(q[place] * m for place, m in zip(present, each))
    penalties = []
    for one, other in itertools.combinations(groups, 2):
        a, b = z[one], z[other]
        if name == "mmd":

            def kernel(x, y):
                squares = ((x[:, None] - y[None, :]) ** 2).sum(2)
                return sum(torch.exp(-c * squares) for c in BANDWIDTHS).mean()

            penalties.append(kernel(a, a) + kernel(b, b) - 2 * kernel(a, b))
            continue
        d = z.shape[1]
        square = torch.zeros(())
        if min(len(a), len(b)) > 1:
            square = ((torch.cov(a.T) - torch.cov(b.T)) ** 2).sum()
        elif settings.get("coral_form") != "benchmark":
            continue
        if settings.get("coral_form") == "benchmark":
            penalties.append(((a.mean(0) - b.mean(0)) ** 2).mean() + square / d**2)
        else:
            penalties.append(square / (4 * d**2))
    plain = mean(losses, weights)
    if settings.get("mmd_pairs") == "repeated":
        total = torch.zeros(())
        for penalty in penalties:
            total = (total + penalty) / len(penalties)
        return plain + total
    weight = settings.get("mmd_weight", 1)
    return plain + (weight * sum(penalties) / len(penalties) if penalties else 0)


def test_loss_and_gradient_are_those_of_loops_over_the_domains(subtests):
    for (name, settings), part in itertools.product(
        [c for c in PENALISED if c[0] != "mixup"], SEVERAL
    ):
        with subtests.test(part=part, name=name, settings=settings):
            train = SGD.model_copy(update={"label_smoothing": 0.1, "class_weights": "balanced"})
            small, client, batch, rows = begun(name, settings, SEVERAL[part], train)
            z = torch.randn(len(batch), 128, generator=torch.Generator().manual_seed(3))
            z = (z / 8).requires_grad_()
            got = sum(small.method.head_loss(client, batch, z).values())
            if len(SEVERAL[part]) == 1:
                want = client.task_loss(client.network.classifier(z), batch.labels)
            else:
                want = by_hand(name, settings, client, z, batch.labels, rows)
            torch.testing.assert_close(got, want, rtol=2e-4, atol=1e-6)
            inputs = [z, *client.network.classifier.parameters()]
            for mine, its in zip(
                torch.autograd.grad(got, inputs), torch.autograd.grad(want, inputs)
            ):
                torch.testing.assert_close(mine, its, rtol=1e-3, atol=1e-6)


def test_two_penalties_of_one_batch_both_count():
    terms = {}
    for name in ("mmd", "coral", "mmd+coral"):
        torch.manual_seed(1)
        small, client, batch, _ = begun(name, {}, (4, 3, 2))
        terms[name] = {n: float(t.detach()) for n, t in small.method.loss(client, batch).items()}
    assert terms["mmd+coral"] == terms["mmd"] | terms["coral"]
    assert {"discrepancy", "correlation"} <= terms["mmd+coral"].keys()


def test_a_domain_that_a_batch_lacks_does_not_count():
    """Nor does it in the batch of one domain that is left."""
    for name, settings in (c for c in PENALISED if c[0] != "mixup"):
        small, client, batch, rows = begun(name, settings, (4, 3, 2))
        z = torch.randn(len(batch), 128, generator=torch.Generator().manual_seed(3)) / 8
        for kept in ((0, 2), (1,)):
            chosen = torch.cat([rows[g] for g in kept]).sort().values
            part = batch.rows(chosen, chosen)
            of = [torch.where(torch.isin(chosen, r))[0] for r in rows]
            client.scratch[OWN] = torch.full((3,), 1 / 3)
            got = sum(small.method.head_loss(client, part, z[chosen]).values())
            want = by_hand(name, settings, client, z[chosen], part.labels, of)
            torch.testing.assert_close(got, want, rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize(("name", "settings"), [*PENALISED, ("fish", {}), ("afl", {"afl_step": 0})])
def test_clients_of_one_domain_train_as_in_fedavg(name, settings):
    parts = ((5,), (4,), (6,))
    plain = federation("fedavg", {}, parts)
    if name == "afl":  # whose clients count alike until a step
        plain.method.share = lambda state, update: float(torch.tensor(1 / 3))
    assert same(federation(name, settings, parts).run(), plain.run())


@pytest.mark.parametrize(("name", "settings"), ALL)
def test_workers_change_no_bit(name, settings):
    one, other = (federation(name, settings, at_once=count) for count in (1, 3))
    weights = one.run()
    assert same(weights, other.run())
    assert same(one.server.state.extras, other.server.state.extras)
    assert not [reply for reply in one.replies if not hasattr(reply, "terms")]
    assert not same(weights, federation("fedavg").run())


@pytest.mark.parametrize(
    ("name", "settings", "rules"),
    [
        ("afl", {"afl_over": "domains"}, RULES),
        *((name, settings, OF_A_LOSS) for name, settings in OTHER_LOSSES),
    ],
)
def test_their_other_forms_keep_the_rules_as_well(name, settings, rules):
    """All rules where other messages are sent, a loss's where the loss alone is another."""
    check_method(lambda: build_method(name, settings), rules)


def test_the_benchmarks_irm_is_plain_training_over_domains():
    """Its code has a weight of 0 on every step: the mean of the domains' losses is left."""

    class MeanOverDomains(DomainMethod):
        name = "plain"

        def head_loss(self, client, batch, embeddings):
            logits = client.network.classifier(embeddings)
            domains = client.examples.domains[batch.positions]
            losses = [
                cross_entropy(logits[domains == g], batch.labels[domains == g])
                for g in domains.unique()
            ]
            return {"cross_entropy": torch.stack(losses).mean()}

    parts = ((4, 3, 2), (3, 3), (4,))
    irm = federation("irm", {"irm_weight": 0}, parts).run()
    sizes = tuple(map(sum, parts))
    plain = OfDomains(MeanOverDomains(), sizes=sizes, train=SGD, parts=parts, freeze=True).run()
    for entry, tensor in plain.items():
        torch.testing.assert_close(irm[entry], tensor, rtol=0, atol=1e-6)


def test_penalties_wait_for_their_steps():
    weights = {}
    for steps, name in itertools.product((0, 3, 10), ("irm", "vrex")):
        small = federation(name, {f"{name}_anneal": steps}, ((5, 4),))
        for round, step in ((1, 0), (3, 0), (3, 1)):  # of one step each
            client = small.client(round=round)
            client.steps = step
            drawn = small.method.draws(client, torch.arange(9), client.examples.labels)
            weights[name, steps, round, step] = float(drawn[WEIGHT])
    full = {"irm": 100, "vrex": 10}
    for (name, steps, round, step), weight in weights.items():
        assert weight == (full[name] if round - 1 + step >= steps else 1)


class Added(Method):
    """Adds a term of the weights and one of the embeddings."""

    name = "added"

    def loss(self, client, batch):
        weight = client.network.classifier.weight
        return super().loss(client, batch) | {"of weights": weight.square().sum()}

    def head_loss(self, client, batch, embeddings):
        return super().head_loss(client, batch, embeddings) | {"of embeddings": embeddings.mean()}


def test_terms_of_another_part_count_once_before_or_behind(subtests):
    for (name, settings), first in itertools.product(ALL, (True, False)):
        with subtests.test(name=name, settings=settings, first=first):
            parts = [Added, method_class(name)]
            found = []
            for kind in (compose(tuple(parts if first else parts[::-1])), parts[1]):
                torch.manual_seed(1)
                small, client, batch, _ = begun(kind(**settings), {}, (4, 3, 2))
                terms = small.method.loss(client, batch)
                found.append({n: float(term.detach()) for n, term in terms.items()})
            both, alone = found
            weight = client.network.classifier.weight.detach()
            assert both.pop("of weights") == float(weight.square().sum())
            mean = float(client.network.features(batch.images).detach().mean())
            of_mixed = both.pop("of embeddings")
            assert of_mixed == mean or name == "mixup"
            assert both == alone


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("afl+irm", {"afl_over": "domains"}, "set method.afl_over to clients"),
        ("vrex+afl", {"afl_over": "domains"}, "set method.afl_over to clients"),
        ("vista+afl", {"afl_over": "domains"}, "set method.afl_over to clients"),
    ],
)
def test_parts_that_undo_each_other_under_some_settings_are_refused_under_these(
    name, settings, reason
):
    def checked(settings):
        experiment = Experiment(method={"name": name} | settings, hold_out="sketch")
        build_method(name, settings).check(experiment)

    checked({})
    with pytest.raises(ExperimentError, match=reason):
        checked(settings)


@pytest.mark.parametrize(("name", "weight"), [("irm", 100), ("vrex", 10)])
@pytest.mark.parametrize("order", [1, -1])
def test_a_step_divides_the_gradients_of_all_terms_by_the_weight(name, weight, order):
    """So another part's term counts beside the penalty what it would without the division."""
    composed = compose((Added, method_class(name))[::order])
    small, client, batch, _ = begun(composed(**{f"{name}_anneal": 0}), {}, (4, 3, 2))
    parameters = list(client.network.parameters())
    client.optimizer = small.method.optimizer(client)
    before = [p.detach().clone() for p in parameters]
    total = sum(small.method.loss(client, batch).values())
    gradients = torch.autograd.grad(total, parameters)
    small.method.step(client, batch)
    for p, old, gradient in zip(parameters, before, gradients):
        torch.testing.assert_close(p.detach(), old - SGD.lr * gradient / weight)


def test_fish_goes_a_tenth_of_the_way_of_steps_on_one_domain_after_the_other():
    small, client, batch, rows = begun("fish", {}, (4, 3, 2))
    names = dict(client.network.named_parameters())
    start = {n: p.detach().clone() for n, p in names.items()}
    order = torch.randperm(3, generator=client.stream("fish", 0)).tolist()
    for g in order:
        logits = client.network(batch.images[rows[g]])
        gradients = torch.autograd.grad(
            cross_entropy(logits, batch.labels[rows[g]]), list(names.values())
        )
        with torch.no_grad():
            for parameter, gradient in zip(names.values(), gradients):
                parameter -= SGD.lr * gradient
    expected = {n: start[n] + 0.1 * (p.detach() - start[n]) for n, p in names.items()}
    with torch.no_grad():
        for name, parameter in names.items():
            parameter.copy_(start[name])
    small.method.draws(client, batch.positions, batch.labels_here)
    small.method.step(client, batch)
    assert client.steps == 3
    for name, parameter in names.items():
        torch.testing.assert_close(parameter.detach(), expected[name], rtol=1e-4, atol=1e-6)


def test_fish_steps_on_one_image_with_the_statistics_it_has():
    small = OfDomains(
        build_method("fish", {}), sizes=(5,), train=SGD, parts=((4, 1),), backbone="resnet18"
    )
    first = small.network.featurizer.model.bn1
    before = int(first.num_batches_tracked)
    client = small.client()
    small.run(1)
    assert all(isinstance(reply, Update) for reply in small.replies)
    steps = small.train.local_epochs * len([*client.batches()])
    assert int(small.server.state.weights["featurizer.model.bn1.num_batches_tracked"]) == (
        before + steps
    )


def test_mixup_mixes_images_of_two_domains_and_their_losses():
    small, client, batch, rows = begun("mixup", {"mixup_alpha": 1.0}, (4, 3, 2))
    drawn = small.method.drawn(client, batch)
    partners, share = drawn["mixup/partners"], float(drawn["mixup/share"])
    assert share == pytest.approx(client.numpy_stream("mixup", 0).beta(1, 1), rel=1e-6)
    domains = client.examples.domains[batch.positions]
    after = {int(g): set(domains[partners[r]].tolist()) for g, r in zip(domains.unique(), rows)}
    assert all(len(others) == 1 for others in after.values())
    assert sorted(other for others in after.values() for other in others) == [0, 1, 2]
    mixed = torch.stack(
        [share * image + (1 - share) * batch.images[p] for image, p in zip(batch.images, partners)]
    )
    logits = client.network(mixed)
    want = share * cross_entropy(logits, batch.labels)
    want = want + (1 - share) * cross_entropy(logits, batch.labels[partners])
    got = sum(small.method.loss(client, batch).values())
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    parameters = list(client.network.classifier.parameters())
    for mine, its in zip(*(torch.autograd.grad(t, parameters) for t in (got, want))):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-6)


def test_other_versions_of_images_are_mixed_as_these_are():
    seen = []

    class Looking(Method):
        name = "looking"

        def loss(self, client, batch):
            seen.append(batch)
            return super().loss(client, batch)

    composed = compose((method_class("mixup"), Looking))
    small, client, batch, _ = begun(composed(mixup_alpha=1.0), {}, (4, 3, 2))
    drawn = small.method.drawn(client, batch)
    small.method.loss(client, replace(batch, views={"other": 1 - batch.images}))
    (mixed,) = seen
    assert not torch.equal(mixed.images, batch.images)
    torch.testing.assert_close(mixed.views["other"], 1 - mixed.images)
    assert torch.equal(mixed.targets["mixup"], batch.labels[drawn["mixup/partners"]])
    assert torch.equal(mixed.labels, batch.labels)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=20))
def test_partners_are_of_the_next_domain_each_used_as_often_as_any(numbers):
    numbers = torch.tensor(numbers)
    partners = partners_of(numbers, torch.Generator().manual_seed(0))
    held = numbers.unique()
    if len(held) == 1:
        assert torch.equal(partners, torch.arange(len(numbers)))
        return
    following = {int(g): numbers[partners[numbers == g]].unique().tolist() for g in held}
    assert all(len(own) == 1 and own != [g] for g, own in following.items())
    for g in held:
        used = partners[numbers == g].bincount(minlength=len(numbers))
        mine = used[numbers == following[int(g)][0]]
        assert mine.max() - mine.min() <= 1


@given(st.lists(st.integers(1, 30), min_size=1, max_size=5), st.integers(2, 32))
def test_every_batch_holds_each_domain_by_its_share(sizes, batch_size):
    numbers = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    order = torch.randperm(len(numbers), generator=torch.Generator().manual_seed(1))
    arranged = spread(order, numbers)
    assert torch.equal(arranged.sort().values, torch.arange(len(numbers)))
    if len(sizes) == 1:
        assert torch.equal(arranged, order)
    for part in arranged.split(batch_size):
        counts = numbers[part].bincount(minlength=len(sizes))
        shares = len(part) * torch.tensor(sizes) / len(numbers)
        assert (counts - shares).abs().max() <= len(sizes) + 1


@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.integers(2, 3), st.integers(6, 16))
def test_images_of_a_domain_follow_one_another_where_that_is_asked_for(sizes, together, batch_size):
    numbers = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    order = torch.randperm(len(numbers), generator=torch.Generator().manual_seed(1))
    arranged = spread(order, numbers, together)
    assert torch.equal(arranged.sort().values, torch.arange(len(numbers)))
    for domain, size in enumerate(sizes):
        places = (numbers[arranged] == domain).nonzero().flatten()
        near = places.diff() < together * len(sizes)  # groups in one place mix
        assert near.sum() >= size // together * (together - 1)
    for part in arranged.split(batch_size):
        counts = numbers[part].bincount(minlength=len(sizes))
        shares = len(part) * torch.tensor(sizes) / len(numbers)
        assert (counts - shares).abs().max() <= 2 * together * (len(sizes) + 1)


def test_coral_compares_a_few_images_of_a_domain_among_many():
    images, labels = colored_images(40)
    data = Images(zip(torch.from_numpy(images).permute(0, 3, 1, 2), labels.tolist()))
    data.domains = ["a"] * 36 + ["b"] * 4
    network = build_network("cnn", CLASSES, weights=None, image_size=16)
    fed = feddg.Federation([data], network, "coral", precision="float32", batch_size=8)
    assert fed.fit(1).server.round().terms["correlation"] > 0


@pytest.mark.parametrize("name", ["mmd", "coral"])
def test_distances_are_zero_between_equal_samples_and_never_below(name):
    rng = torch.Generator().manual_seed(2)
    points = torch.randn(6, 5, generator=rng)
    points = torch.cat([points, points, points[:1] + 3])
    member = torch.zeros(13, 3)
    member[:6, 0], member[6:12, 1], member[12, 2] = 1, 1, 1
    if name == "mmd":
        found = discrepancies(points, member)
        assert found[0, 2] > 0.1
    else:
        means, found = distances(points, member)
        assert means[0, 1] == 0
        assert means[0, 2] > 1
    assert found[0, 1].abs() < 1e-5
    assert found.min() > -1e-5


# Weights at the server


def test_the_projection_is_the_nearest_point_of_the_simplex():
    rng = numpy.random.default_rng(0)
    corners = rng.dirichlet([1, 1, 1], 20_000)
    for values in (torch.randn(3, generator=torch.Generator().manual_seed(s)) for s in range(9)):
        found = on_simplex(values.double()).numpy()
        assert found.sum() == pytest.approx(1)
        assert found.min() >= 0
        others = ((corners - values.numpy()) ** 2).sum(1).min()
        assert ((found - values.numpy()) ** 2).sum() <= others + 1e-9
    assert on_simplex(torch.tensor([0.2, 0.3, 0.5])).tolist() == pytest.approx([0.2, 0.3, 0.5])
    assert on_simplex(torch.tensor([9.0, 0.0])).tolist() == [1, 0]


def asked(answers):
    return lambda name, question: iter((id, Message(reply)) for id, reply in answers.items())


def test_two_rounds_of_clients_weights_by_hand():
    method = build_method("afl", {"afl_step": 0.1})
    state = State({"w": torch.zeros(1)}, {WEIGHTS: torch.full((3,), 1 / 3)})
    for losses, mean in (((1.0, 2.0, 3.0), 6.0), ((3.0, 0.0, 0.0), 6 / 3 + 0.1 * 6)):
        updates = [Update(id, 5, {"w": torch.tensor([3.0 * (id + 1)])}) for id in range(3)]
        state = method.aggregate(state.next(), iter(updates))
        reply = {
            id: {
                "losses": torch.tensor([loss]),
                "images": torch.tensor([5.0]),
                "domains": torch.tensor([2]),  # what a client says it is does not count
            }
            for id, loss in enumerate(losses)
        }
        before = state.extras[WEIGHTS]
        expected = float((before * torch.tensor([3.0, 6.0, 9.0])).sum())
        assert float(state.weights["w"]) == pytest.approx(expected, rel=1e-5)
        state = method.after_round(state, asked(reply))
        moved = before + 0.1 * torch.tensor(losses)
        moved = moved - (moved.sum() - 1) / 3  # nobody falls below 0
        assert state.extras[WEIGHTS].tolist() == pytest.approx(moved.tolist(), abs=1e-6)


def test_who_is_not_in_the_round_keeps_its_weight():
    method = build_method("afl", {"afl_step": 0.1})
    before = torch.tensor([0.1, 0.2, 0.3, 0.4])
    state = State({}, {WEIGHTS: before})
    losses = {1: 1.0, 3: 2.0}
    answers = {
        id: {n: torch.tensor([v]) for n, v in {"losses": loss, "images": 5.0, "domains": 0}.items()}
        for id, loss in losses.items()
    }
    after = method.after_round(state, asked(answers)).extras[WEIGHTS]
    # Of 0.6 they have a third and two thirds; the step moves them 0.05 from their mean.
    assert after.tolist() == pytest.approx([0.1, 0.6 * (1 / 3 - 0.05), 0.3, 0.6 * (2 / 3 + 0.05)])


def test_a_rounds_weights_of_domains_by_hand():
    method = build_method("afl", {"afl_over": "domains"})
    state = State({}, context=Message({IMAGES: torch.tensor([6.0, 0.0, 2.0])}))
    sent = method.broadcast(state).extras.tensors[WEIGHTS]
    torch.testing.assert_close(sent, torch.tensor([0.5, 0, 0.5]))
    answers = {
        0: {"domains": [0], "images": [4.0], "losses": [1.0]},
        1: {"domains": [0, 2], "images": [2.0, 2.0], "losses": [4.0, 3.0]},
        2: {"domains": [7], "images": [1.0], "losses": [9.0]},  # nobody had it before round 1
    }
    told = {id: {n: torch.tensor(v) for n, v in reply.items()} for id, reply in answers.items()}
    state = method.after_round(state, asked(told))
    expected = [0.5 - 0.05, 0.0, 0.5 + 0.05]  # losses 2 and 3, each .1 times
    assert state.extras[WEIGHTS].tolist() == pytest.approx(expected, abs=1e-6)
    again = method.broadcast(state).extras.tensors[WEIGHTS]
    assert again.tolist() == pytest.approx(expected, abs=1e-6)


def test_a_step_under_the_servers_weights_is_that_of_a_weighted_loss():
    small, client, batch, _ = begun("afl", {"afl_over": "domains"}, (4, 3, 2))
    shares = torch.tensor([0.2, 0.5, 0.3])
    client.extras.tensors[WEIGHTS] = shares[:2]
    with pytest.raises(ClientError, match=r"domain 2 \(counted from 0\).* there were 2 domains"):
        small.method.begin(client)
    client.extras.tensors[WEIGHTS] = shares
    small.method.begin(client)
    logits = client.network(batch.images)
    domains = client.examples.domains[batch.positions]
    losses = cross_entropy(logits, batch.labels, reduction="none")
    want = sum(shares[g] * loss for g, loss in zip(domains, losses))
    got = sum(small.method.loss(client, batch).values())
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("over", ["clients", "domains"])
def test_answers_are_the_losses_measured_separately(over):
    small = federation("afl", {"afl_over": over})
    small.run(1)
    before = torch.full((3,), 1 / 3)
    losses, held = torch.zeros(3), torch.zeros(3)
    small.network.eval()
    for id in range(3):
        examples = small.examples(id)
        with torch.no_grad():
            logits = small.model(examples.images().float() / 255)
        each = cross_entropy(logits, examples.labels, reduction="none")
        places = examples.domains if over == "domains" else torch.full_like(examples.domains, id)
        losses.index_add_(0, places, each)
        held.index_add_(0, places, torch.ones_like(each))
    expected = on_simplex(before + 0.1 * losses / held)
    torch.testing.assert_close(small.server.state.extras[WEIGHTS], expected, rtol=0, atol=1e-5)


def test_a_clients_weights_last_over_its_rounds():
    small = federation("group_dro", {"dro_step": 1.0}, ((5, 4), (4,)))
    small.run(1)
    first = small.transport.memories[0][OWN].clone()
    assert first.sum() == pytest.approx(1)
    assert first.tolist() != [0.5, 0.5]
    small.server.round()
    assert not torch.equal(small.transport.memories[0][OWN], first)
    assert OWN not in small.transport.memories.get(1, {})


def test_weights_move_once_a_step_however_often_a_batch_is_passed_on():
    still = {"scale_noise": 0.0, "shift_noise": 0.0}
    found = []
    for name, more in (("group_dro", {}), ("group_dro+sfa", still)):
        small = federation(name, {"dro_step": 1.0} | more, ((5, 4), (4,)))
        small.run(1)
        found.append(small.transport.memories[0][OWN])
    torch.testing.assert_close(*found, rtol=0, atol=1e-5)


# Where clients' domains come from


class Images(list):
    """A client's images, which may name their domains."""


def sites(*domains):
    found = []
    for id, names in enumerate(domains):
        images, labels = colored_images(6, seed=id)
        found.append(Images(zip(torch.from_numpy(images).permute(0, 3, 1, 2), labels.tolist())))
        if names is not None:
            found[-1].domains = names
    return found


def in_memory(method, *domains):
    network = build_network("cnn", CLASSES, weights=None, image_size=16)
    return feddg.Federation(sites(*domains), network, method, precision="float32")


def test_a_program_names_its_images_domains():
    fed = in_memory("irm", ["a", "b"] * 3, ["b", "c", "c"] * 2, None)
    assert [client.domains.tolist() for client in fed.clients] == [
        [0, 1] * 3,
        [1, 2, 2] * 2,
        [3] * 6,
    ]
    assert fed.domain_names == ("a", "b", "c", "")
    with pytest.raises(ExperimentError, match="client 1 names 2 domains for 6 images"):
        in_memory("irm", None, ["a", "b"])
    with pytest.raises(ExperimentError, match="client 0 names no list of domains for 6 images"):
        in_memory("irm", iter("ababab"))


def test_domains_are_found_in_data_sets_inside_and_alike_in_lists_arrays_and_tensors():
    some, others, unnamed = sites(torch.tensor([0, 1] * 3), numpy.array([1, 2] * 3), None)
    more, whole = Subset(others, [5, 0]), sites(["0", "1"])[0]  # a benchmark's own list of names
    more.domains = [7, 7]
    clients = [ConcatDataset([Subset(some, [1, 2]), unnamed, Subset(others, [1])]), more]
    network = build_network("cnn", CLASSES, weights=None, image_size=16)
    fed = feddg.Federation([*clients, Subset(whole, [0, 1])], network, "irm", precision="float32")
    numbers = [client.domains.tolist() for client in fed.clients]
    assert numbers == [[0, 1, *[2] * 6, 3], [4, 4], [5, 5]]
    assert fed.domain_names == ("1", "0", "", "2", "7", "")


def test_that_there_is_nothing_to_compare_is_said_once(subtests):
    for method, domains, severity in [
        ("irm", (None, None), "warning"),
        ("irm", (["a", "b"] * 3, None), "note"),
        ("irm", (["a", "b"] * 3, ["a", "b"] * 3), None),
        ("fedprox+coral", (None, None), "warning"),
        ("fedavg", (None, None), None),
        ("afl", (None, None), None),
    ]:
        with subtests.test(method=method, domains=domains, severity=severity):
            with collected() as said:
                in_memory(method, *domains).fit(2)
            mine = [one.severity for one in said if one.code == "one-domain-clients"]
            assert mine == ([severity] if severity else [])


def test_so_is_a_weight_that_a_program_never_reaches(subtests):
    several = ["a", "b"] * 3
    for domains, rounds, said in [
        ((several, several), 2, 1),
        ((several, None), 2, 1),
        ((None, None), 2, 0),
        ((several, several), 101, 0),
    ]:
        with subtests.test(domains=domains, rounds=rounds), collected() as found:
            fed = in_memory("irm", *domains)
            fed.server.run = list  # what is said before the rounds
            fed.fit(rounds)
            assert [one.code for one in found].count("annealing-never-ends") == said


def test_so_does_an_experiment_by_how_domains_are_dealt_out(subtests, tmp_path_factory):
    for partition, severities in [("domain", ["warning"]), ("iid", []), ("heterogeneous", [])]:
        with subtests.test(partition=partition, severities=severities):
            tmp_path = tmp_path_factory.mktemp("case")
            experiment = Experiment(
                method="irm",
                data={"source": "digits", "image_size": 8},
                hold_out="sketch",
                clients={"number": 6, "partition": partition},
                model={"backbone": "cnn", "weights": None},
            )
            with collected() as said:
                in_process(experiment, tmp_path)
            assert [one.severity for one in said if one.code == "one-domain-clients"] == severities


def test_a_weight_that_no_client_reaches_is_said(subtests, tmp_path_factory):
    for fields, said in [
        ({"name": "irm"}, ["No client takes more than 6 steps, and IRM's weight counts after 100"]),
        ({"name": "vrex"}, ["V-REx's weight counts after 100 (method.vrex_anneal)"]),
        ({"name": "irm", "irm_anneal": 2}, []),
        ({"name": "irm", "irm_weight": 1.0}, []),
    ]:
        with subtests.test(**fields):
            experiment = Experiment(
                method=fields,
                data={"source": "digits", "image_size": 8},
                hold_out="sketch",
                clients={"number": 6, "partition": "iid"},
                train={"rounds": 3, "local_steps": 2},
                model={"backbone": "cnn", "weights": None},
            )
            with collected() as heard:
                in_process(experiment, tmp_path_factory.mktemp("case"))
            mine = [one.text for one in heard if one.code == "annealing-never-ends"]
            assert len(mine) == len(said)
            assert all(part in text for part, text in zip(said, mine))


@pytest.mark.parametrize("method", ["fish", "mixup"])
def test_masks_are_trained_over_domains_too(method):
    trained = []
    for name in ("fedavg", method):
        data = [Discs(seed) for seed in (0, 1)]
        for site in data:
            site.domains = ["a", "b"] * 6
        fed = feddg.Federation(
            data, SmallUNet(), name, task=SEGMENT, lr=0.01, batch_size=6, averaging="none"
        )
        trained.append(fed.fit(1).server.state.weights)
    assert all(tensor.isfinite().all() for tensor in trained[1].values())
    assert not same(*trained)
