"""Patterns of topic names: they match what Python's `re` matches, and no pattern takes long."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.service.kafka.groups.topic_pattern import PatternError, TopicPattern

ATOMS = st.sampled_from(
    ["a", "b", ".", "[ab]", "[^a]", "[a-c.]", "\\w", "\\W", "\\.", "-", "^", "$", "(?:)", "\\W", "[]a]"]
)
SIGNS = st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{0,}", "*?", "{,", "{a}"])


def combined(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Larger patterns from smaller ones."""
    return st.one_of(
        st.tuples(parts, parts).map("".join),
        st.tuples(parts, parts).map(lambda pair: f"({pair[0]}|{pair[1]})"),
        st.tuples(parts, SIGNS).map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
    )


@given(st.recursive(ATOMS, combined, max_leaves=8), st.lists(st.text("abc.-1_", max_size=7), min_size=1, max_size=5))
def test_it_matches_what_re_matches(pattern: str, names: list[str]) -> None:
    """As a whole, whatever the pattern."""
    compiled, ours = re.compile(pattern), TopicPattern(pattern)
    for name in (*names, *names):
        assert ours.matches(name) is (compiled.fullmatch(name) is not None)


@pytest.mark.parametrize(
    ("pattern", "matching", "other"),
    [
        ("(?i)Shop[.].*", "SHOP.Orders", "shop-orders"),
        ("\\Qshop.orders\\E.*", "shop.orders-2", "shopxorders"),
        ("(?P<name>shop)|(?<other>audit)", "audit", "audi"),
        ("\\Ashop\\z", "shop", "shops"),
        ("orders-[0-9]{2}", "orders-42", "orders-421"),
        ("a\\tb", "a\tb", "atb"),
    ],
)
def test_what_re2_has_and_patterns_of_topics_use(pattern: str, matching: str, other: str) -> None:
    """Quotes, names of groups, and a case that does not matter."""
    compiled = TopicPattern(pattern)
    assert (compiled.matches(matching), compiled.matches(other)) == (True, False)


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|a)*b", "((((a*)*)*)*)*b", ".*" * 100 + "x", "(?:a?){500}a{500}"])
def test_no_pattern_takes_long(pattern: str) -> None:
    """Each of them would keep `re` busy for longer than anybody waits."""
    assert TopicPattern(pattern).matches("a" * 249 + "!") is False


def test_a_pattern_that_costs_too_much_is_refused() -> None:
    """Many places at once, and new ones with every name: what it has cost counts over all names."""
    pattern = TopicPattern("(?:[ab]{1,300}|[bc]{1,300}){1,4}")
    names = (f"{number:b}".replace("0", "a").replace("1", "b") * 8 for number in range(10_000))
    with pytest.raises(PatternError, match="too long"):
        any(pattern.matches(name) is None for name in names)


@pytest.mark.parametrize(
    "pattern",
    [
        *("", "(", ")", "[", "[b-a]", "*", "a{2,1}", "a{2000}", "(?=a)", "(?<=a)", "\\1", "\\b", "[[:alpha:]]", "a\\"),
        *("(" * 60 + ")" * 60, "x" * 1001, "((a{1000}){1000}){1000}"),
    ],
)
def test_what_is_no_pattern_is_refused(pattern: str) -> None:
    """Also what RE2 does not have, and what is too large."""
    with pytest.raises(PatternError):
        TopicPattern(pattern)
