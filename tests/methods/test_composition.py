"""Methods by name, and which of them compose."""

import functools
import math
from dataclasses import replace

import pytest
import torch
from pydantic import Field, model_validator

from feddg.errors import ExperimentError
from feddg.experiment import Experiment
from feddg.methods.base import Method, MethodSettings, methods, register, title_of
from feddg.methods.composition import HOOKS, build_method, compose, method_class
from feddg.settings import TrainSettings
from federations import federation, same

NAMES = tuple(methods())
ONE_CLASS = ("fpl", "l2d", "pardon", "selfreg", "vista")
OF_ONE_PASS = ("group_dro", "irm", "jigen", "sfa", "vrex")
WEIGH = ("copa", "csac", "feddg-ga", "group_dro", "local", "scaffold")
# Plain gradient descent: Adam would blow differences of rounding up.
TWO_ROUNDS = TrainSettings(rounds=2, batch_size=4, optimizer="sgd", lr=0.01)


@functools.cache
def weights(name, **settings):
    return federation(name, settings=settings, sizes=(7, 6), train=TWO_ROUNDS).run()


@pytest.mark.parametrize(
    "name",
    [
        "ccst+jigen",
        "ccst+rsc",
        "ccst+mixstyle",
        "ccst+elcfs",
        "pardon+mixstyle",
        "pardon+rsc",
        "jigen+pardon",
        "jigen+l2d",
        "randaug+pardon",
        "randaug+elcfs",
        "selfreg+sfa",
        "fedbn+ccst",
        "fedprox+jigen",
        "mixstyle+jigen+rsc",
    ],
)
def test_compositions_run_and_differ_from_each_of_their_parts(name):
    result = weights(name)
    assert all(t.isfinite().all() for t in result.values())
    for part in name.split("+"):
        assert not same(result, weights(part))


@pytest.mark.parametrize(
    ("name", "idle", "alone"),
    [
        ("ccst+mixstyle", {"mix_probability": 0.0}, "ccst"),
        ("mixstyle+ccst", {"mix_probability": 0.0}, "ccst"),
        ("ccst+rsc", {"muted_images": 0.0}, "ccst"),
        ("pardon+mixstyle", {"mix_probability": 0.0}, "pardon"),
        ("pardon+sfa", {"scale_noise": 0.0, "shift_noise": 0.0}, "pardon"),
        ("randaug+elcfs", {"operations": 0}, "elcfs"),
    ],
)
def test_a_part_that_does_nothing_leaves_the_other_as_it_is(name, idle, alone):
    composed, plain = weights(name, **idle), weights(alone)
    for entry, tensor in plain.items():
        torch.testing.assert_close(composed[entry], tensor, rtol=0, atol=1e-5)


def test_parts_that_exchange_something_before_training_both_do():
    small = federation("ccst+elcfs")
    small.server.setup()
    context = small.server.state.context.tensors
    assert context.keys() == {"styles", "owners", "amplitudes", "amplitude_owners"}
    alone = federation("ccst")
    alone.server.setup()
    assert torch.equal(context["styles"], alone.server.state.context.tensors["styles"])


def test_a_part_that_needs_a_setup_gets_it_beside_one_that_does_not():
    assert not build_method("pardon+sfa", {"contrastive": "ordinary"}).has_setup
    small = federation("pardon+elcfs", settings={"contrastive": "ordinary"})
    small.server.setup()
    assert small.server.state.context.tensors.keys() == {"amplitudes", "amplitude_owners"}


def test_a_composition_has_all_names_settings_presets_and_promises():
    composed = method_class("CCST + Feddg")
    assert composed.name == "ccst+elcfs"
    assert {"styles_per_image", "window"} <= composed.Settings.model_fields.keys()
    assert composed.presets["digits"]["method"] == {"window": 0.05}
    assert composed.presets["pacs"]["method"] == {"variant": "pardon"}
    assert {"statistics/styles", "statistics/amplitudes"} <= composed.sends.keys()
    assert "Chen" in composed.summary
    assert "Liu" in composed.summary


def test_ridge_goes_with_nothing_that_trains_otherwise(subtests):
    for other in [
        *("copa", "csac", "fedig", "fedig-a", "fedsr", "l2d", "local"),
        *("scaffold", "selfreg", "vista"),
        *("afl", "coral", "fish", "group_dro", "irm", "mixup", "mmd", "vrex"),
    ]:
        with subtests.test(other=other):
            for name in (f"ridge+{other}", f"{other}+ridge"):
                with pytest.raises(
                    ExperimentError, match="ridge adds up what a fixed network gives"
                ):
                    method_class(name)


@pytest.mark.parametrize("name", ["ridge+outlines", "outlines+ridge"])
def test_what_a_part_wants_of_training_is_not_for_a_method_of_one_round(name):
    train = Experiment(method=name, data={"source": "pacs"}, hold_out="sketch").train
    assert train.head == "random"
    assert train.trainable == "head"


def test_rules_between_the_settings_of_a_part_hold_in_a_composition():
    with pytest.raises(ExperimentError, match=r"ccst\+jigen: stylized: on_the_fly needs"):
        build_method("ccst+jigen", {"stylized": "on_the_fly"})
    assert build_method("ccst+jigen", {"variant": "pardon"}).settings.strength == 0.5
    with pytest.raises(ExperimentError, match="did you mean 'jigsaw_weight'"):
        build_method("ccst+jigen", {"jigsaw_weigth": 1})


class Calm(Method):
    """Its loss does not reach the next part's, though it asks for something else of it."""

    name = "calm"

    def loss(self, client, batch):
        """Of small embeddings."""
        embeddings = client.embeddings(batch)
        terms = super().head_loss(client, batch, embeddings)
        return terms | {"calm": 0.01 * embeddings.square().mean()}


def test_a_part_that_silences_another_through_a_different_hook_is_refused():
    with pytest.raises(ExperimentError, match="calm replaces 'loss', so randconv's would never"):
        compose((Calm, method_class("randconv")))


def test_impossible_names_are_refused_with_the_reason(subtests):
    for name, reason in [
        ("ccst+pardon", "each exchange styles and stylize images; choose one"),
        ("pardon+ccst", "each exchange styles and stylize images; choose one"),
        ("pardon+fisc", "a method cannot be combined with itself"),
        ("csac+pardon", "csac compares the features of the batch's own images, once per step"),
        ("mixstyle+ridge", "ridge adds up what a fixed network gives .* choose one"),
        ("ridge+fedgma", "sums count by their images"),
        ("csac+local", "local sends no weights"),
        *((f"afl+{other}", "afl decides at the server what each") for other in WEIGH),
        *((f"{other}+afl", "afl decides at the server what each") for other in WEIGH),
        ("fish+scaffold", "fish goes most of the way back"),
        ("scaffold+fish", "fish goes most of the way back"),
        ("feddg-ga+scaffold", "each decide what a client counts; choose one"),
        ("copa+feddg-ga", "weights follow the losses of the averaged classifier"),
        ("fedprox+copa", "fedprox holds a client to the mean classifier"),
        ("ridge+elcfs", "ridge adds up what a fixed network gives"),
        *((f"{other}+mixup", "mixup's images are of two classes") for other in ONE_CLASS),
        *((f"vista+{other}", "vista's loss is the mean over versions") for other in OF_ONE_PASS),
        ("fish+mmd", "fish steps on one domain at a time"),
        ("irm+vrex", "each replaces the mean over images by one of its own"),
        ("group_dro+irm", "each replaces the mean over images by one of its own"),
        ("csac+mixup", "csac compares the features of the batch's own images"),
        ("csac+outlines", "csac compares the features of the batch's own images"),
        ("fedavg+jigen", "every method contains fedavg; leave it out"),
        ("randconv+pardon", "randconv replaces 'loss', so pardon's would never run, nor"),
        ("ccst+jigsaw", "unknown method 'jigsaw'"),
        ("ccst+", "unknown method ''"),
        ("cst", "did you mean 'ccst'"),
    ]:
        with subtests.test(reason=reason), pytest.raises(ExperimentError, match=reason):
            method_class(name)


def test_what_a_mixture_of_two_classes_is_passed_on_to_comes_after_it():
    for other in ("copa", "fedsr", "fedig", "jigen"):
        assert method_class(f"{other}+mixup").name == f"mixup+{other}"


def test_pardons_copies_are_in_ridges_sums_or_refused():
    experiment = Experiment(method="ridge+pardon", data={"source": "pacs"}, hold_out="sketch")
    with pytest.raises(ExperimentError, match="stylized_cross_entropy: ridge adds up"):
        build_method("ridge+pardon", {}).check(experiment)
    build_method("ridge+pardon", {"stylized_cross_entropy": True}).check(experiment)


@pytest.mark.parametrize("name", ["mmd", "coral", "pardon", "fpl", "csac+fedprox", "fedavg"])
def test_embeddings_that_nobody_trains_are_said(name):
    chosen = {"data": {"source": "pacs"}, "hold_out": "sketch", "method": name}

    def said(**more):
        experiment = Experiment(**chosen, **more)
        method = build_method(name, {})
        return [found.code for found in method.diagnostics(experiment)]

    model = {"embedding": "none"}
    expected = name != "fedavg"
    assert ("fixed-embeddings" in said(train={"trainable": "head"}, model=model)) == expected
    assert "fixed-embeddings" not in said(train={"trainable": "all"}, model=model)
    embedding = {"embedding": "linear"}
    assert "fixed-embeddings" not in said(train={"trainable": "head"}, model=embedding)


class Twice(Method):
    """Passes a batch on, and then its images upside down."""

    name = "twice"

    def loss(self, client, batch):
        terms = super().loss(client, batch)
        other = super().loss(client, replace(batch, images=batch.images.flip(2)))
        return terms | {f"other_{name}": term for name, term in other.items()}


class Sees(Method):
    """Remembers the images that it is asked about."""

    name = "sees"

    def head_loss(self, client, batch, embeddings):
        client.scratch.setdefault("seen", []).append(batch.images)
        return super().head_loss(client, batch, embeddings)


def of_a_batch(method, change=lambda batch: batch, **settings):
    small = federation(method(**settings) if isinstance(method, type) else method, sizes=(8, 6))
    small.server.setup()
    client = small.client(context=small.server.state.context)
    small.method.begin(client)
    batch = client.batch(torch.arange(8), client.stream("augment"))
    return client, batch, small.method.loss(client, change(batch))


def test_a_changed_batch_is_muted_by_its_own_mask():
    settings = {"muting": "spatial", "muted_images": 1.0}
    parts = (method_class("rsc"), Twice)
    *_, both = of_a_batch(compose(parts), **settings)
    *_, alone = of_a_batch(parts[0], lambda b: replace(b, images=b.images.flip(2)), **settings)
    assert torch.equal(both["other_cross_entropy"], alone["cross_entropy"])


def test_copies_that_are_classified_come_with_their_images():
    method = compose((method_class("pardon"), Sees))
    client, batch, _ = of_a_batch(method, stylized_cross_entropy=True)
    first, second = client.scratch["seen"]
    assert first is batch.images
    assert not torch.equal(second, first)


class PlusSettings(MethodSettings):
    amount: float = Field(1.0, ge=0)

    @model_validator(mode="after")
    def _not_thirteen(self):
        if self.amount == 13:
            raise ValueError("amount: 13 brings bad luck")
        return self


class Plus(Method):
    """Chains: adds a term."""

    name = "plus"
    settings: PlusSettings

    def loss(self, client, batch):
        return super().loss(client, batch) | {"plus": torch.tensor(self.settings.amount)}


class Nested(Method):
    """Chains, from inside a nested function."""

    name = "nested"

    def loss(self, client, batch):
        def inner():
            return super(Nested, self).loss(client, batch)

        return inner()


class Alone(Method):
    """Replaces."""

    name = "alone"

    def loss(self, client, batch):
        return {"alone": torch.tensor(1.0)}


def other_loss(self, client, batch):
    return {}


class Elsewhere(Method):
    """Replaces another hook."""

    name = "elsewhere"

    def aggregate(self, state, updates):
        return state


def test_a_part_whose_hook_does_not_call_super_goes_behind_the_others():
    for last in (Alone, Elsewhere):
        composed = compose((Plus, Nested, last))
        assert composed.__mro__[1:4] == (Plus, Nested, last)
    terms = compose((Plus, Nested, Alone))().loss(None, None)
    assert {name: float(term) for name, term in terms.items()} == {"alone": 1.0, "plus": 1.0}
    assert compose((Alone, Plus)).name == "plus+alone"
    assert compose((Alone, Nested, Plus)).name == "nested+plus+alone"
    assert compose((Plus, Nested)).name == "plus+nested"
    with pytest.raises(ExperimentError, match="alone replaces 'loss'"):
        compose((Alone, Plus, type("Too", (Method,), {"name": "alone too", "loss": other_loss})))
    assert issubclass(compose((Alone, Elsewhere)), Elsewhere)


def test_two_parts_may_share_a_replacement():
    class One(Alone):
        name = "one"

    class Two(Alone):
        name = "two"

    assert compose((One, Two))().loss(None, None) == {"alone": torch.tensor(1.0)}
    with pytest.raises(ExperimentError, match="one already contains alone"):
        compose((One, Alone))


def test_parts_with_a_setting_of_the_same_name_are_refused():
    class Other(Method):
        name = "other"
        settings: PlusSettings

    with pytest.raises(ExperimentError, match=r"plus and other .*'amount'"):
        compose((Plus, Other))


@pytest.mark.usefixtures("fresh")
def test_a_rule_about_several_settings_speaks_for_itself():
    register(Plus)
    with pytest.raises(ExperimentError, match="method plus: amount: 13 brings bad luck"):
        build_method("plus", {"amount": 13})
    with pytest.raises(ExperimentError, match="method plus: amount"):
        build_method("plus", {"amount": -math.inf})


def test_every_hook_of_the_base_is_known_and_every_method_chains_what_it_can():
    assert {
        "network",
        "client_statistics",
        "aggregate_statistics",
        "loss",
        "head_loss",
        "step",
        "aggregate",
    } <= set(HOOKS)
    for name, method in methods().items():
        for hook in ("network", "check", "begin", "report", "broadcast", "initial_extras"):
            if getattr(method, hook) is not getattr(Method, hook):
                code = getattr(method, hook).__code__
                assert "super" in code.co_names, f"{name}.{hook} silences the methods behind it"


def test_a_second_method_of_the_same_name_is_refused():
    with pytest.raises(ExperimentError, match="two methods are called 'ccst'"):
        register(type("Ccst2", (Method,), {"name": "ccst"}))


def test_a_composition_joins_the_titles_of_its_parts():
    assert method_class("pardon").title == title_of("pardon") == "PARDON"
    assert method_class("mixstyle+feddg").title == "MixStyle + ELCFS (FedDG)"
    assert title_of("mixstyle+elcfs") == "MixStyle + ELCFS (FedDG)"
    assert title_of("FedDG_GA + mine") == "FedDG-GA + mine"
    assert title_of("mine + yours") == "mine + yours"
    assert Plus.title == "Plus"


def test_a_method_without_a_name_is_refused():
    class Nameless(Method):
        pass

    with pytest.raises(ExperimentError, match="Nameless has no name"):
        register(Nameless)


def test_settings_are_the_annotated_class_and_are_inherited():
    class Heir(Plus):
        name = "heir"

    class Own(Plus):
        name = "own"
        settings: MethodSettings

    assert Plus.Settings is Heir.Settings is PlusSettings
    assert Own.Settings is MethodSettings
    assert Heir(PlusSettings(amount=2)).settings.amount == 2


def test_only_methods_that_have_something_to_show_show_it():
    shown = {name: build_method(name, {}) for name in NAMES}
    composed = build_method("jigen+pardon", {})
    assert type(composed).preview is type(shown["pardon"]).preview
    own = {n for n, method in shown.items() if type(method).preview is not Method.preview}
    assert own == {"ccst", "pardon"}


def test_a_method_of_ones_own_may_have_capitals_in_its_name(fresh):
    @register
    class Mine(Method):
        name = "MyOwn"

    assert method_class("MyOwn") is Mine
    assert method_class("MixStyle + MyOwn").name == "mixstyle+MyOwn"
    assert Experiment(data="digits", method=Mine).method.name == "MyOwn"
