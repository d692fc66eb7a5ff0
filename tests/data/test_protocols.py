"""Protocols against the pairs that the papers print."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feddg.data.protocols import known_domains, scenarios
from feddg.errors import ExperimentError


def pairs(protocol, domains, preset=""):
    found = scenarios(protocol, domains, preset)
    return {(s["val"] + ("",))[0] + ">" + s["test"][0] for s in found}


def test_pardon_s_pairs_of_pacs_and_office_home():
    """Its Table I: validation A, P, C, S beside test P, S, A, C; C, A, R, P beside A, P, C, R."""
    assert pairs("ltdo", known_domains("pacs"), "pacs") == {
        "art_painting>photo",
        "photo>sketch",
        "cartoon>art_painting",
        "sketch>cartoon",
    }
    assert pairs("ltdo", known_domains("office_home"), "office_home") == {
        "Clipart>Art",
        "Art>Product",
        "Real_World>Clipart",
        "Product>Real_World",
    }


@given(st.lists(st.text(min_size=1, max_size=3), min_size=3, max_size=7, unique=True))
def test_every_domain_is_tested_once(domains):
    for protocol in ("lodo", "ltdo"):
        found = scenarios(protocol, domains)
        assert [s["test"] for s in found] == [(name,) for name in domains]
        assert all(not set(s["test"]) & set(s["val"]) for s in found)
    assert sorted(s["val"] for s in scenarios("ltdo", domains)) == sorted((d,) for d in domains)
    assert len(scenarios("ltdo-all", domains)) == len(domains) * (len(domains) - 1)


@pytest.mark.parametrize(
    ("protocol", "domains", "text"),
    [("loddo", ["a", "b"], "did you mean 'lodo'"), ("ltdo", ["a", "b"], "needs 3 domains")],
)
def test_mistakes_are_named(protocol, domains, text):
    with pytest.raises(ExperimentError, match=text):
        scenarios(protocol, domains)
