"""Every lie of a site that only evaluates is refused by its name, and the run goes on."""

import json
import math

import pytest

pytest.importorskip("flwr", reason="Flower is an optional extra")

from hypothesis import given, settings
from hypothesis import strategies as some

from feddg.deploy.server_app import read_scores
from feddg.messages import Message

HELD = {"sketch": 6, "ink": 4}


def row(**change):
    honest = {
        "kind": "evaluation", "round": 1, "split": "test", "domain": "sketch",
        "accuracy": 0.5, "loss": 1.0, "examples": 6, "confusion": [[2, 1], [2, 1]],
    }  # fmt: skip
    return honest | change


def sent(*rows, **more):
    return Message({}, {"scores": json.dumps(list(rows)), **more})


LIES = {
    "a domain it does not hold": (row(domain="photo"), "6 images of 'photo', but registered"),
    "a domain with control characters": (row(domain="\x1b[31mred\nerror"), "registered"),
    "more images than it holds": (row(confusion=[[200, 1], [2, 1]]), "counted 204 images"),
    "fewer images than it holds": (row(confusion=[[1, 0], [0, 0]]), "counted 1 images"),
    "no images": (row(confusion=[[0, 0], [0, 0]]), "counted 0 images"),
    "negative counts": (row(confusion=[[8, -1], [-1, 0]]), "no numbers of images"),
    "counts beyond 64 bits": (row(confusion=[[10**30, 1], [2, 1]]), "no numbers of images"),
    "a table of other classes": (row(confusion=[[6]]), "not one of 2 classes"),
    "a ragged table": (row(confusion=[[3, 1], [2]]), "not one of 2 classes"),
    "no table": (row(confusion=None), "confusion"),
    "a table of text": (row(confusion=[["a", "b"], ["c", "d"]]), "valid integer"),
    "a table of fractions": (row(confusion=[[2.5, 0.5], [2, 1]]), "integer"),
    "a loss of text": (row(loss="low"), "loss"),
}


def test_a_lie_is_refused(subtests):
    for name in LIES:
        with subtests.test(name=name):
            lie, words = LIES[name]
            with pytest.raises(ValueError, match=words):
                read_scores(sent(lie), 2, HELD)


def test_a_judge_that_exchanges_classes_or_leaves_a_domain_out_is_refused():
    ink = row(domain="ink", examples=4, confusion=[[3, 1], [0, 0]])
    assert len(read_scores(sent(row(), ink), 2, HELD, [7, 3])) == 2
    exchanged = row(domain="ink", examples=4, confusion=[[0, 0], [3, 1]])
    for rows in ([row(), exchanged], [row()], []):
        with pytest.raises(ValueError, match="by class are not those it registered with"):
            read_scores(sent(*rows), 2, HELD, [7, 3])


def test_an_honest_judge_is_believed():
    (score,) = read_scores(sent(row()), 2, HELD)
    assert (score.domain, score.correct, score.examples, score.loss) == ("sketch", 3, 6, 1.0)


def test_other_messages_are_refused(subtests):
    for message in [
        sent(row(), row()),
        sent(row(), more=1),
        Message({}, {}),
        Message({}, {"scores": 5}),
        Message({}, {"scores": "[" * 5000}),
        Message({}, {"scores": "{}"}),
    ]:
        with subtests.test(message=message), pytest.raises(ValueError, match=r".+"):
            read_scores(message, 2, HELD)


@settings(max_examples=60)
@given(
    some.recursive(
        some.none() | some.booleans() | some.integers() | some.floats() | some.text(max_size=20),
        lambda inner: (
            some.lists(inner, max_size=3)
            | some.dictionaries(some.sampled_from([*row()]), inner, max_size=8)
        ),
        max_leaves=12,
    )
)
def test_whatever_a_judge_sends_is_refused_or_counts_what_it_holds(content):
    try:
        scores = read_scores(Message({}, {"scores": json.dumps(content)}), 2, HELD)
    except ValueError:
        return
    assert all(HELD[score.domain] == score.examples for score in scores)


@pytest.mark.parametrize("loss", [-1e308, -0.1, 1e7, 1e308])
def test_a_loss_that_no_site_can_have_is_not_known(loss):
    (score,) = read_scores(sent(row(loss=loss)), 2, HELD)
    assert math.isnan(score.loss)
    assert score.correct == 3
