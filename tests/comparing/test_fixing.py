"""Fields fixed in a plan: the plan that comes out says by itself what plan and fields said."""

from hypothesis import given, settings
from hypothesis import strategies as st

from feddg.comparing.cells import expand_plan
from feddg.comparing.plan import Plan, load_plan
from feddg.experiment import Experiment, expand
from feddg.settings import leaves, merge

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
    plan = Plan(
        base=merge({"data": {"source": "digits"}}, tree(base)),
        methods=[{"name": "fedprox", "mu": 2.0, "experiment": tree(own)}],
        hold_out=["ink"],
        heterogeneity=sorted(lambdas),
        clients=sorted(clients),
        settings={axis: [12, 14] if "size" in axis else [0.5, 0.6] for axis in sorted(axes)},
    )
    fixed = expand_plan(plan, tree(over))
    by_hand = {
        Experiment(**merge(cell.experiment.model_dump(mode="json"), expand(tree(over)))).id
        for cell in expand_plan(plan)
    }
    assert {cell.experiment.id for cell in fixed} == by_hand
    assert not {axis for cell in fixed for axis, _ in cell.conditions} & ({*over} - {"clients"})


def test_a_fixed_plan_needs_nothing_but_its_file(tmp_path):
    plan = Plan(base={"data": "digits"}, hold_out="lodo", clients=[[6, 2], 3])
    over = {"data": {"source": "digits"}, "clients": {"number": 4}, "train": {"rounds": 1}}
    file = tmp_path / "plan.yaml"
    file.write_text(plan.fixed(over).to_yaml())
    again = [cell.experiment.id for cell in expand_plan(load_plan(file))]
    assert again == [cell.experiment.id for cell in expand_plan(plan, over)]
    assert leaves(load_plan(file).base)["train.rounds"] == 1
    assert plan.fixed({}) == plan
