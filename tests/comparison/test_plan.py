"""Plans expand to the product of their axes; every experiment is what one would write by hand."""

import pytest
import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from feddg.api import compare
from feddg.comparison.plan import (
    PAPERS,
    Plan,
    combinations,
    distinct,
    expand_plan,
    load_plan,
    trials_of,
    with_values,
)
from feddg.data.data_set import find_augmentation, load_source
from feddg.errors import DataError, ExperimentError
from feddg.experiment import Experiment, expand
from feddg.settings import leaves, merge

BASE = {"data": "digits", "train": {"rounds": 2}}


def plan(**fields):
    return Plan(**({"base": BASE} | fields))


def test_a_cell_is_the_experiment_one_would_write_by_hand():
    cells = expand_plan(
        plan(
            methods=["fedavg", {"name": "pardon", "gamma1": 0.5, "label": "half"}],
            hold_out=[{"val": "ink", "test": "sketch"}],
            heterogeneity=[0.5],
            clients=[[12, 3]],
            seeds=[7],
        )
    )
    by_hand = Experiment(
        data="digits",
        train={"rounds": 2},
        hold_out={"val": "ink", "test": "sketch"},
        clients={"number": 12, "per_round": 3, "heterogeneity": 0.5},
        method={"name": "pardon", "gamma1": 0.5},
        seed=7,
    )
    assert [cell.method for cell in cells] == ["fedavg", "half"]
    assert cells[1].experiment.id == by_hand.id
    assert cells[1].held_out == "sketch"
    assert cells[1].conditions == {"heterogeneity": "0.5", "clients": "3 of 12"}


@settings(max_examples=25)
@given(
    methods=st.sets(st.sampled_from(["fedavg", "fedprox", "mixstyle"]), min_size=1),
    held=st.sampled_from(["lodo", "ltdo", "ltdo-all", ["ink"], ["ink", "chalk"]]),
    heterogeneity=st.sets(st.sampled_from([0.0, 0.1, 1.0])),
    clients=st.sets(st.sampled_from([3, 4, 5])),
    rates=st.sets(st.sampled_from([0.1, 0.2]), min_size=1),
    seeds=st.integers(1, 3),
)
def test_the_number_of_cells_is_the_product_of_the_axes(
    methods, held, heterogeneity, clients, rates, seeds
):
    cells = expand_plan(
        plan(
            methods=sorted(methods),
            hold_out=held,
            heterogeneity=sorted(heterogeneity),
            clients=sorted(clients),
            settings={"train.lr": sorted(rates)},
            seeds=seeds,
        )
    )
    scenarios = {"lodo": 4, "ltdo": 4, "ltdo-all": 12}.get(str(held), len(held))
    expected = len(methods) * scenarios * len(rates) * seeds
    expected *= max(1, len(heterogeneity)) * max(1, len(clients))
    assert len(cells) == expected
    assert len(distinct(cells)) == expected
    assert [cell.seed for cell in cells] == sorted(cell.seed for cell in cells)


def test_a_hyper_parameter_that_a_method_lacks_does_not_multiply_its_runs():
    cells = expand_plan(
        plan(hold_out=["ink"], methods=["fedavg", "pardon"], settings={"method.gamma1": [0.1, 1.0]})
    )
    assert [(c.method, c.conditions["gamma1"]) for c in cells] == [
        ("fedavg", "0.1"),
        ("pardon", "0.1"),
        ("fedavg", "1"),
        ("pardon", "1"),
    ]
    assert len(distinct(cells)) == 3


def test_overrides_win_over_everything():
    variant = {"name": "fedavg", "experiment": {"train": {"rounds": 9}}}
    (cell,) = expand_plan(
        plan(hold_out=["ink"], methods=[variant], settings={"train.lr": [0.5]}).fixed(
            {"train": {"rounds": 1, "lr": 0.25}, "data": {"image_size": 16}}
        )
    )
    assert (cell.experiment.train.rounds, cell.experiment.train.lr) == (1, 0.25)
    assert cell.experiment.data.image_size == 16


@pytest.mark.parametrize("own", [{"flip": 0.5, "shift": 1}, "aerial"])
@pytest.mark.parametrize("said", ["none", {"vertical_flip": 0.5}])
def test_an_augmentation_that_is_said_wins_over_one_that_is_written(own, said):
    variant = {"name": "fedavg", "experiment": {"train": {"augmentation": own}}}
    tried = {"train.augmentation": [own, "microscope"]}
    for fields in ({"methods": [variant]}, {"methods": "fedavg", "settings": tried}):
        (cell,) = expand_plan(plan(hold_out=["ink"], **fields).fixed({"augmentation": said}))
        found = find_augmentation(cell.experiment.train.augmentation)
        assert (found.vertical_flip, found.quarter_turns) == (0 if said == "none" else 0.5, False)


def test_fields_that_are_said_win_over_tuning_and_seeds():
    tune = {"settings": {"train.lr": [0.1, 0.2], "rounds": [1, 2], "method.mu": [0, 1]}}
    whole = plan(hold_out=["ink"], methods=["fedprox"], seeds=3, tune=tune)
    fixed = whole.fixed({"lr": 0.5, "train": {"rounds": 4}, "seed": 42})
    assert {*fixed.tune.settings} == {"method.mu"}
    assert {(c.seed, c.experiment.train.lr) for c in expand_plan(fixed)} == {(42, 0.5)}
    both = merge(tree({"train.lr": 0.5, "train.rounds": 4}), {"method": {"mu": 2}})
    assert whole.fixed(both).tune is None
    assert whole.fixed({"batch_size": 8}).tune == whole.tune


def test_a_short_name_on_an_axis_keeps_the_fields_beside_it():
    base = BASE | {"clients": {"number": 6, "heterogeneity": 0.77}}
    cells = expand_plan(plan(base=base, methods="fedavg", settings={"clients": [3, 4]}))
    found = [(c.experiment.clients.number, c.experiment.clients.heterogeneity) for c in cells]
    assert found == [(3, 0.77), (4, 0.77)]


def test_an_empty_hold_out_is_the_value_in_base():
    (cell,) = expand_plan(plan(base=BASE | {"hold_out": "ink"}, methods="fedavg", hold_out=[]))
    assert cell.experiment.hold_out.test == ("ink",)


def test_columns_that_test_on_the_same_domain_name_the_validation_domain():
    cells = expand_plan(plan(hold_out="ltdo-all", methods=["fedavg"]))
    assert len({cell.held_out for cell in cells}) == 12
    assert "sketch (validated on ink)" in {cell.held_out for cell in cells}


def test_a_plan_survives_its_file(tmp_path):
    first = plan(hold_out="lodo", methods=["fedavg", {"name": "pardon", "gamma1": 2}], seeds=2)
    path = tmp_path / "mine.yaml"
    path.write_text(first.to_yaml())
    again = load_plan(path)
    assert [c.experiment.id for c in expand_plan(again)] == [
        c.experiment.id for c in expand_plan(first)
    ]
    path.write_text(yaml.safe_dump({"base": BASE}))
    assert load_plan(path).name == "mine"


def test_mistakes_are_named(subtests):
    for fields, text in [
        ({"method": ["fedavg"]}, "unknown field 'method' .did you mean 'methods'"),
        ({"methods": ["fedavg", "fedavg"]}, "label what is alike"),
        ({"methods": [{"name": "fedavg", "label": "two\nlines"}]}, "label.*one line"),
        ({"seeds": []}, "one or more"),
        ({"methods": ["fedavgg"], "hold_out": ["ink"]}, "did you mean 'fedavg'"),
        ({"settings": {"method.gama1": [1]}}, "did you mean 'gamma1'"),
        ({"hold_out": "todo"}, "hold_out"),
        ({"settings": {"train.rouns": [1]}, "hold_out": ["ink"]}, "did you mean 'rounds'"),
        ({"hold_out": "lodo", "base": {"data": {"source": "folder"}}}, "needs the folder"),
        ({"base": BASE | {"seed": 42}}, r"seed has no effect here; write seeds: \[42\]"),
        ({"settings": {"seed": [1, 2]}}, r"seed has no effect here; write seeds: \[1, 2\]"),
        ({"methods": [{"name": "fedavg", "experiment": {"seed": 1}}]}, r"write seeds: \[1\]"),
        (
            {"base": BASE | {"method": "ridge"}},
            r"method has no effect here; write methods: \[ridge",
        ),
        ({"hold_out": ["ink", None]}, "hold_out has an empty item; name a domain"),
        ({"hold_out": "lodo", "base": BASE | {"preset": 5}}, "unknown preset '5'"),
        ({"settings": {"train.lr": []}}, r"settings\.train\.lr: .*at least 1 item"),
        ({"settings": {"method": ["fedavg", "ridge"]}}, r"write methods: \[fedavg, ridge\]"),
        ({"settings": {"hold_out.test": [["ink"]]}}, "held out is a column"),
        ({"methods": [{"name": "fedavg", "experiment": {"hold_out": "ink"}}]}, "is a column"),
    ]:
        with subtests.test(text), pytest.raises((ExperimentError, DataError), match=text):
            expand_plan(plan(**fields))


def test_what_a_method_cannot_run_is_refused_before_the_first_run():
    frozen = {"data": "digits", "model": {"normalization": "frozen"}}
    with pytest.raises(ExperimentError, match=r"fedig-a.*set model\.normalization to train"):
        expand_plan(plan(base=frozen, methods=["fedavg", "fedig-a"], hold_out="lodo"))
    trained = {"name": "fedig-a", "experiment": {"model": {"normalization": "train"}}}
    cells = expand_plan(plan(base=frozen, methods=["fedavg", trained], hold_out="lodo"))
    assert {cell.experiment.model.normalization for cell in cells} == {"frozen", "train"}


def test_a_method_beside_the_methods_is_refused(tmp_path):
    with pytest.raises(ExperimentError, match=r"write methods: \[ridge\]"):
        compare(out=tmp_path / "out", method="ridge", data="digits", hold_out="ink")
    base = BASE | {"method": {"name": "fedprox", "mu": 2}}
    (cell,) = expand_plan(plan(base=base, methods="fedprox"))
    assert cell.experiment.method.settings["mu"] == 2


def test_a_missing_or_damaged_file_is_named(tmp_path):
    with pytest.raises(ExperimentError, match=r"none\.yaml does not exist"):
        load_plan(tmp_path / "none.yaml")
    for text in ("a: [", "- list"):
        (tmp_path / "bad.yaml").write_text(text)
        with pytest.raises(ExperimentError, match=r"bad\.yaml"):
            load_plan(tmp_path / "bad.yaml")


def test_a_papers_plan_is_named_without_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = load_plan("short/ccst_table1_pacs")
    assert plan.notes == load_plan(PAPERS / "short" / "ccst_table1_pacs.yaml").notes
    with pytest.raises(ExperimentError, match=r"did you mean 'pardon/table1_pacs'.*ccst/table1"):
        load_plan("pardon/table1_pac")
    (tmp_path / "pardon").mkdir()
    (tmp_path / "pardon" / "table1_pacs").write_text("title: my own\nmethods: [fedavg]")
    assert load_plan("pardon/table1_pacs").title == "my own"


def test_a_plan_file_over_another(tmp_path):
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "whole.yaml").write_text(
        "title: whole\nbase: {data: digits, train: {rounds: 9, lr: 0.1}}\n"
        "methods: [fedavg, pardon]\nhold_out: lodo\nnotes: {differences: [one], source: here}\n"
    )
    short = tmp_path / "short.yaml"
    short.write_text(
        "extends: papers/whole.yaml\nbase: {train: {rounds: 2}}\nmethods: [fedavg]\n"
        "notes: {differences: [two]}\n"
    )
    plan = load_plan(short)
    assert (plan.name, plan.title, plan.hold_out) == ("short", "whole", "lodo")
    assert plan.base["data"] == {"source": "digits"}
    assert plan.base["train"] == {"rounds": 2, "lr": 0.1}
    assert [variant.name for variant in plan.methods] == ["fedavg"]
    assert plan.notes == {"differences": ["one", "two"], "source": "here"}


@pytest.mark.parametrize(
    ("extends", "fault"),
    [
        ("self.yaml", "which extends this file again"),
        ("nowhere.yaml", "nowhere.yaml"),
        ("[a]", "extends names a plan file"),
    ],
)
def test_what_a_plan_cannot_extend_is_said(tmp_path, extends, fault):
    file = tmp_path / "self.yaml"
    file.write_text(f"extends: {extends}\n")
    with pytest.raises(ExperimentError, match=fault) as caught:
        load_plan(file)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        (
            {"methods": [{"name": "fedavg", "experiment": {"train": {"lr": 0.5}}}]}
            | {"settings": {"lr": [0.1, 0.01]}},
            "train.lr is set both by settings lr and by fedavg",
        ),
        (
            {"methods": [{"name": "fedprox", "mu": 0.007}], "settings": {"method.mu": [0.1, 1]}},
            "method.settings.mu is set both by settings method.mu and by fedprox",
        ),
        (
            {"heterogeneity": [0, 1], "settings": {"clients.heterogeneity": [0.3]}},
            "clients.heterogeneity is set both by heterogeneity and by settings clients.heter",
        ),
        (
            {"settings": {"lr": [1], "train.lr": [0.3]}},
            "set both by settings lr and by settings train.l",
        ),
        (
            {"settings": {"train.lr": [1]}, "tune": {"settings": {"train.lr": [0.3, 0.4]}}},
            "train.lr is set both by settings train.lr and by tune",
        ),
        (
            {"clients": [5], "hold_out": None}
            | {"data": [{"name": "digits", "experiment": {"clients": {"number": 3}}}]},
            "clients.number is set both by clients and by data digits",
        ),
        ({"settings": {"train.rounds": [5]}, "budgets": [9]}, "both by budgets and by settings"),
        (
            {"methods": [{"name": "fedavg", "experiment": {"lr": 0.5}}], "hold_out": None}
            | {"data": ["emoji", {"name": "digits", "experiment": {"train": {"lr": 0.1}}}]},
            "train.lr is set both by data digits and by fedavg",
        ),
        (
            {"data": [{"name": "digits", "id_val": 0.1}], "hold_out": None}
            | {"tune": {"settings": {"data.id_val": [0.1, 0.2]}}},
            "data.id_val is set both by data digits and by tune",
        ),
        ({"settings": {"device": ["cpu", "cuda"]}}, "device is set in settings device, but runs"),
        (
            {"methods": [{"name": "fedavg", "experiment": {"name": "mine"}}]},
            "name is set in fedavg, but runs",
        ),
        (
            {"methods": [{"name": "fedavg", "experiment": {"method": "pardon"}}]},
            "fedavg names another method; add that one",
        ),
        ({"tune": {"settings": {"method": ["ridge"]}}}, "tune names another method; add"),
        (
            {"base": {"data": "digits", "evaluate": {"budgets": [5]}}, "budgets": [9]},
            "evaluate.budgets is set both by budgets and by base",
        ),
        (
            {"base": {"data": "digits", "hold_out": {"val": "sketch"}}},
            "in the plan and in its base",
        ),
        (
            {"settings": {"train.lr": [0.00123456, 0.001234561]}},
            "two columns are called 'ink, 0.00",
        ),
        ({"hold_out": [["ink", "chalk"], "ink+chalk"]}, r"two columns are called 'ink\+chalk'"),
        ({"hold_out": [{"test": {"of": "ink"}}]}, "hold_out: test: Input should be"),
    ],
)
def test_what_would_be_lost_or_look_alike_is_refused(fields, fault):
    plan = {"base": {"data": "digits"}, "methods": ["fedavg"], "hold_out": ["ink"]} | fields
    with pytest.raises(ExperimentError, match=fault):
        expand_plan(Plan(**plan))


def test_domains_that_are_left_out_are_left_out_of_trials_and_of_protocols():
    base = {"data": {"source": "digits", "leave_out": ["photo"]}}
    tune = {"settings": {"train.lr": [0.1]}}
    plan = Plan(base=base, methods=["fedavg"], hold_out="lodo", tune=tune)
    assert [cell.held_out for cell in expand_plan(plan)] == ["ink", "chalk", "sketch"]
    for trial in trials_of(plan):
        assert trial.experiment.data.leave_out == ("photo", trial.held_out)


def test_a_plan_does_not_take_the_name_of_the_one_it_extends(tmp_path):
    (tmp_path / "one.yaml").write_text("{name: first, base: {data: digits}, methods: [fedavg]}")
    (tmp_path / "two.yaml").write_text("{extends: one.yaml, seeds: 2}")
    assert [load_plan(tmp_path / f"{n}.yaml").name for n in ("one", "two")] == ["first", "two"]


# Fields fixed in a plan: the plan that comes out says by itself what plan and fields said.


FIELDS = {
    "train.lr": st.sampled_from([0.1, 0.2]),
    "train.batch_size": st.sampled_from([8, 9]),
    "clients.heterogeneity": st.sampled_from([0.3, 0.4]),
    "clients.number": st.sampled_from([5, 6]),
    "data.image_size": st.sampled_from([16, 24]),
    "method.mu": st.sampled_from([0.5, 0.6]),
}


def tree(flat):
    out = {}
    for path, value in flat.items():
        for part in reversed(path.split(".")):
            value = {part: value}
        out = merge(out, value)
    return out


some_fields = st.fixed_dictionaries({}, optional=FIELDS)


@settings(max_examples=60, deadline=None)
@given(
    over=some_fields,
    base=some_fields,
    own=st.fixed_dictionaries({}, optional={k: v for k, v in FIELDS.items() if k != "method.mu"}),
    axes=st.sets(st.sampled_from(["train.lr", "data.image_size"])),
    lambdas=st.sets(st.sampled_from([0.0, 0.5])),
    clients=st.sets(st.sampled_from([7, 8])),
)
def test_fixed_fields_win_everywhere_and_all_else_is_as_the_plan_says(
    over, base, own, axes, lambdas, clients
):
    dealt = {"clients.heterogeneity": lambdas, "clients.number": clients}
    assume(not own.keys() & {*axes, *(field for field in dealt if dealt[field])})
    plan = Plan(
        base=merge({"data": {"source": "digits"}}, tree(base)),
        methods=[{"name": "fedprox", "mu": 2.0, "experiment": tree(own)}],
        hold_out=["ink"],
        heterogeneity=sorted(lambdas),
        clients=sorted(clients),
        settings={axis: [12, 14] if "size" in axis else [0.5, 0.6] for axis in sorted(axes)},
    )
    fixed = expand_plan(plan.fixed(tree(over)))
    by_hand = {
        Experiment(**merge(cell.experiment.model_dump(mode="json"), expand(tree(over)))).id
        for cell in expand_plan(plan)
    }
    assert {cell.experiment.id for cell in fixed} == by_hand
    assert not {axis for cell in fixed for axis in cell.conditions} & ({*over} - {"clients"})


def test_a_fixed_plan_needs_nothing_but_its_file(tmp_path):
    plan = Plan(base={"data": "digits"}, hold_out="lodo", clients=[[6, 2], 3])
    over = {"data": {"source": "digits"}, "clients": {"number": 4}, "train": {"rounds": 1}}
    file = tmp_path / "plan.yaml"
    file.write_text(plan.fixed(over).to_yaml())
    again = [cell.experiment.id for cell in expand_plan(load_plan(file))]
    assert again == [cell.experiment.id for cell in expand_plan(plan.fixed(over))]
    assert leaves(load_plan(file).base)["train.rounds"] == 1
    assert plan.fixed({}) == plan


def test_a_methods_setting_in_the_base_is_for_the_methods_that_have_it():
    base = {"data": "digits", "method": {"gamma1": 0.25}}
    fields = {"base": base, "methods": ["fedavg", "pardon"], "hold_out": ["ink"]}
    plain, pardon = (cell.experiment for cell in expand_plan(load_plan(fields)))
    assert plain.id == Experiment(data="digits", method="fedavg", hold_out="ink").id
    assert pardon.method.settings["gamma1"] == 0.25
    own = [{"method": "pardon", "gamma1": 0.75}]
    (cell,) = expand_plan(load_plan(fields | {"methods": own}))
    assert cell.experiment.method.settings["gamma1"] == 0.75
    with pytest.raises(ExperimentError, match=r"setting 'gamma1'"):
        expand_plan(load_plan(fields | {"methods": ["fedavg"]}))


DIGITS = {"source": "digits", "id_val": 0, "id_test": 0}


def budgeted(train, **fields):
    base = {"data": DIGITS, "clients": {"number": 3}, "train": train}
    return plan(**{"base": base, "methods": ["fedavg"], "hold_out": ["sketch"]} | fields)


def test_budgets_become_rounds():
    """Three clients take four steps of 64 images: 768 a round."""
    methods = {"methods": ["fedavg", "ridge"]}
    asked = budgeted(
        {"local_steps": 4, "batch_size": 64}, budgets=["5k", 1000, "0.0016M"], **methods
    )
    assert asked.budgets == (1000, 1600, 5000) == load_plan(yaml.safe_load(asked.to_yaml())).budgets
    fedavg, of_one_round = expand_plan(asked)
    assert fedavg.experiment.train.rounds == 7  # six see 4608 images
    assert fedavg.experiment.evaluate.budgets == asked.budgets
    without = expand_plan(budgeted({"local_steps": 4, "batch_size": 64}, **methods))
    assert of_one_round.id == without[1].id
    assert without[0].budgets == () != of_one_round.budgets
    assert asked.fixed({"rounds": 3}).budgets == ()  # flags win
    tune = {"settings": {"train.batch_size": [32, 64]}}
    tuned = asked.fixed({"data": {"id_val": 0.1}}).model_dump() | {"tune": tune}
    trials = trials_of(Plan(**tuned))
    assert {(cell.method, cell.budgets) for cell in trials} == {("fedavg", ()), ("ridge", ())}
    tuned["tune"]["settings"] = {"train.lr": [0.1, 0.2]}
    assert {cell.method for cell in trials_of(Plan(**tuned))} == {"fedavg"}  # ridge takes no step


def test_rounds_of_a_budget_are_by_what_clients_hold():
    table = load_source("digits")
    images = int((table.domains != table.domain_id("sketch")).sum())
    (cell,) = expand_plan(budgeted({"local_epochs": 2}, budgets=[4 * images + 1]))
    assert cell.experiment.train.rounds == 3
    # An epoch of CCST is over three versions of every image, or as many as there are clients.
    for change, rounds in (
        ({}, 1),
        ({"styles_per_image": 2}, 2),
        ({"variant": "pardon"}, 3),
        ({"styles_per_image": 9}, 1),
    ):
        ccst = {"name": "ccst", "settings": change}
        asked = budgeted({"local_epochs": 1}, methods=[ccst], budgets=[2 * images + 1])
        assert expand_plan(asked)[0].experiment.train.rounds == rounds
    # A client's second batch is what the first leaves of its images: two steps see all of them.
    train = {"local_steps": 2, "batch_size": images // 3 - 10}
    (cell,) = expand_plan(budgeted(train, budgets=[4 * images + 1]))
    assert cell.experiment.train.rounds == 5
    # Without the images, batches are taken as full.
    folder = {"data": {"source": "folder", "root": "/nowhere"}, "clients": {"number": 10}}
    base = folder | {"train": {"local_steps": 4, "batch_size": 16}}
    (cell,) = expand_plan(plan(base=base, methods="fedavg", hold_out=["ink"], budgets="5k"))
    assert cell.experiment.train.rounds == 8
    secret = {"privacy": {"noise_multiplier": 1.0, "clipping": "fixed", "sampling": "secret"}}
    for change, words in (
        ({"data": {"source": "folder", "root": "/nowhere"}}, "set train.local_steps"),
        (secret, "budgets: how many images a round sees cannot be known"),
    ):
        base = {"data": DIGITS, "clients": {"number": 3, "per_round": 2}, **change}
        with pytest.raises(ExperimentError, match=words):
            expand_plan(plan(base=base, methods=["fedavg"], hold_out=["ink"], budgets=1000))


@pytest.mark.parametrize("budget", ["15q", "k", 0, "-1k", 1.5, [None]])
def test_budgets_that_are_no_numbers_of_images_are_refused_by_field(budget):
    with pytest.raises(ExperimentError, match=r"^plan: budgets"):
        plan(budgets=budget)


SEVERAL = {
    "base": {"train": {"rounds": 2}, "model": {"backbone": "cnn", "weights": None}},
    "data": [
        "emoji",
        {"name": "digits", "hold_out": ["ink", "chalk"], "leave_out": ["sketch"]},
        {"name": "other ink", "source": "digits", "experiment": {"data": {"image_size": 20}}},
    ],
    "methods": ["fedavg", {"name": "fedprox", "mu": 0.5}],
    "seeds": 2,
}


def test_a_plan_over_data_sets_has_the_cells_of_a_plan_on_each():
    cells = expand_plan(Plan(**SEVERAL))
    digits = Plan(
        **SEVERAL
        | {"data": (), "hold_out": ["ink", "chalk"]}
        | {"base": SEVERAL["base"] | {"data": {"source": "digits", "leave_out": ["sketch"]}}}
    )
    ours = [cell for cell in cells if cell.conditions["data"] == "digits"]
    assert {cell.id for cell in ours} == {cell.id for cell in expand_plan(digits)}
    assert len(cells) == 2 * 2 * (4 + 2 + 4)
    assert [cell.seed for cell in cells] == sorted(cell.seed for cell in cells)
    columns = {cell.column for cell in cells}
    assert {"emoji, mono", "digits, ink", "other ink, ink"} <= columns
    assert len(columns) == 10
    assert load_plan(yaml.safe_load(Plan(**SEVERAL).to_yaml())) == Plan(**SEVERAL)


def test_what_is_said_on_the_command_line_holds_on_every_data_set():
    entries = ["emoji", {"name": "near", "source": "folder", "root": "near", "image_size": 40}]
    plan = Plan(data=entries, hold_out=["a"])
    first, second = plan.fixed({"data": {"root": "all", "image_size": 32}}).data
    base = plan.fixed({"data": {"root": "all", "image_size": 32}}).base
    assert first.experiment == {"data": {"source": "emoji"}}
    assert "root" not in base["data"]
    assert second.experiment["data"] == {"source": "folder", "root": "all/near"}
    assert base["data"] == {"image_size": 32}
    assert plan.fixed({"data": "digits"}).data == ()
    assert Plan(data="digits").base == {"data": {"source": "digits"}}
    assert not Plan(data="digits").data


def test_what_varies_on_several_data_sets_is_kept_where_nothing_is_said_of_it():
    axes = {"data.image_size": [16, 24], "train.lr": [0.1, 0.2]}
    plan = Plan(**SEVERAL | {"settings": axes, "tune": {"settings": {"data.id_val": [0.1, 0.2]}}})
    assert plan.fixed({}) == plan
    fixed = plan.fixed({"data": {"image_size": 32}})
    assert {*fixed.settings} == {"train.lr"}
    assert fixed.tune == plan.tune


def test_domains_are_held_out_as_they_are_said_to_be_on_every_data_set():
    def held_out(plan):
        return {cell.column for cell in expand_plan(plan)}

    data, ink = ["emoji", {"name": "digits", "hold_out": ["chalk"]}], {"hold_out": "mono"}
    base = SEVERAL["base"]
    each = {f"emoji, {style}" for style in ("noto", "blob", "emojitwo", "mono")}
    plan = Plan(base=base, data=data)
    assert held_out(plan) == {*each, "digits, chalk"}
    assert held_out(Plan(base=base | ink, data=data)) == {"emoji, mono", "digits, chalk"}
    own = [{"name": "emoji", "experiment": ink}, data[1]]
    assert held_out(Plan(base=base, data=own)) == {"emoji, mono", "digits, chalk"}
    assert {cell.experiment.hold_out.test for cell in expand_plan(plan.fixed(ink))} == {("mono",)}
    said = plan.saying({"hold_out": ["mono", 2019]})
    assert held_out(said) == {
        f"{name}, {d}" for name in ("emoji", "digits") for d in ("mono", 2019)
    }
    assert len(expand_plan(plan.fixed({"data": "emoji"}))) == 4 * len(plan.methods)


def test_the_folder_that_is_said_is_that_of_every_data_set_that_needs_one():
    needs, inside = {"name": "near", "source": "folder"}, {"name": "far", "root": "far"}
    plan = Plan(data=["emoji", needs, inside | {"source": "folder"}])
    roots = [e.experiment["data"].get("root") for e in plan.fixed({"data": {"root": "all"}}).data]
    assert roots == [None, "all", "all/far"]
    base = {"data": {"source": "pacs", "root": "here"}}
    plan = Plan(base=base, data=[{"name": "small", "image_size": 16}])
    (entry,) = plan.fixed({"data": {"root": "there"}}).data
    assert entry.experiment["data"] == {"root": "there", "image_size": 16}


def test_a_folder_that_is_called_like_a_data_set_stays_a_folder():
    entry = {"name": "pacs", "source": "folder", "root": "pacs"}
    plan = load_plan(yaml.safe_load(Plan(data=[entry], hold_out=["a"]).to_yaml()))
    assert plan.data[0].experiment == {"data": {"source": "folder", "root": "pacs"}}


def test_a_data_set_twice_needs_names():
    with pytest.raises(ExperimentError, match=r"plan: data.*name what is alike"):
        Plan(data=["emoji", "emoji"])


def test_values_are_tuned_on_each_data_set_alone():
    plan = Plan(**SEVERAL | {"tune": {"settings": {"train.lr": [0.1, 0.2]}}})
    trials = trials_of(plan)
    groups = combinations(trials)
    assert all(len({cell.column for cell in cells}) == 1 for cells in groups)
    best = [
        c[0] for c in groups if (c[0].tried[0][2] == "0.2") == (c[0].conditions["data"] == "emoji")
    ]
    rates = {
        (cell.conditions["data"], cell.experiment.train.lr)
        for cell in expand_plan(with_values(plan, best))
    }
    assert rates == {("emoji", 0.2), ("digits", 0.1), ("other ink", 0.1)}


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        (
            {"settings": {"train.lr": [1e-3, 1e-4]}, "tune": {"settings": {"train.lr": [0.1]}}},
            "train.lr is set both by settings train.lr and by tune",
        ),
        (
            {"settings": {"rounds": [5, 10]}, "tune": {"settings": {"train.lr": [0.1]}}}
            | {"methods": [{"name": "fedprox", "experiment": {"train": {"rounds": 20}}}]},
            "train.rounds is set both by settings rounds and by fedprox",
        ),
    ],
)
def test_trials_of_a_field_that_is_said_twice_are_refused(fields, fault):
    plan = Plan(base={"data": "digits"}, hold_out=["sketch"], **fields)
    with pytest.raises(ExperimentError, match=fault):
        trials_of(plan)


def test_what_an_entry_fixes_is_not_tried_however_it_is_spelt():
    fixed = {"name": "fedprox", "mu": 0.5, "experiment": {"train": {"lr": 0.5}}}
    tune = {"settings": {"lr": [0.1, 0.2]}}
    plan = Plan(base={"data": "digits"}, hold_out=["ink"], methods=["fedavg", fixed], tune=tune)
    assert {cell.method for cell in trials_of(plan)} == {"fedavg"}


def test_domains_that_are_held_out_in_turn_are_those_of_the_options(tmp_path):
    lines = "file,label,site,domain\n" + "".join(
        f"{n}.png,{'xy'[n % 2]},{'abc'[n // 2]},one\n" for n in range(6)
    )
    for number in range(6):
        (tmp_path / f"{number}.png").touch()
    (tmp_path / "t.csv").write_text(lines)
    data = {"source": "table", "root": str(tmp_path / "t.csv"), "leave_out": ["c"]}
    data["options"] = {"path": "file", "domain": "site"}
    plan = Plan(base={"data": data}, hold_out="lodo", methods=["fedavg"])
    assert [cell.held_out for cell in expand_plan(plan)] == ["a", "b"]


@pytest.mark.parametrize(
    ("base", "tried", "field"),
    [
        (
            {"preset": "strong", "data": "digits"},
            {"train.local_epochs": [1, 2]},
            "train.local_steps",
        ),
        ({"data": "digits"}, {"privacy.epsilon": [1, 8]}, "privacy.clipping"),
        ({"data": "emoji"}, {"model.weights": ["none"]}, "model.backbone"),
    ],
)
def test_a_trial_is_the_tables_run_on_other_images(base, tried, field):
    """What presets make of a tried value is made of it in both."""
    held_out = ["sketch"] if base["data"] == "digits" else ["noto"]
    plan = Plan(base=base, hold_out=held_out, methods=["fedavg"], tune={"settings": tried})
    trials = trials_of(plan)
    assert len({cell.id for cell in trials}) == len(trials)
    for trial in trials:
        (cell,) = expand_plan(with_values(plan, [trial]))
        one, other = (leaves(c.experiment.model_dump(mode="json")) for c in (trial, cell))
        assert field in one
        unlike = {name for name in one if one[name] != other[name]}
        assert {name.partition(".")[0] for name in unlike} <= {"hold_out", "data"}


def test_trials_at_a_budget_see_as_many_images_as_the_table():
    base = {"data": "digits", "train": {"batch_size": 8}, "clients": {"per_round": 2}}
    tune = {"settings": {"train.local_steps": [4, 16]}}
    plan = Plan(base=base, hold_out=["ink"], methods=["fedavg"], budgets=[640], tune=tune)
    assert [cell.experiment.train.rounds for cell in trials_of(plan)] == [10, 3]


def test_a_plan_takes_the_name_that_is_set():
    plan = Plan(base={"data": "digits"}, hold_out=["ink"])
    assert plan.fixed({"name": "mine"}).name == "mine"
    assert plan.fixed({}).name == plan.name


def test_a_root_beside_a_plan_is_that_of_published_sets_too():
    fixed = Plan(data=["pacs", "emoji"]).fixed({"data": {"root": "/x"}})
    roots = [entry.experiment["data"].get("root") for entry in fixed.data]
    assert roots == ["/x", None]
