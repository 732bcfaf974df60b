"""Who goes first."""

from hypothesis import given
from hypothesis import strategies as st

from sglang_cake.read.share import PATIENCE, PATIENCE_S, Claimant, order


def names(*claimants: Claimant) -> str:
    return "".join(claimants[i].rid for i in order(claimants))


def test_others_go_before_what_is_being_loaded_and_short_loads_before_long_ones() -> None:
    long, short = Claimant("l", 9.0), Claimant("s", 1.0)
    new, newer = Claimant("a", None), Claimant("b", None)
    assert names(long, new, short, newer) == "absl"


def test_who_is_nearly_done_is_not_held_up() -> None:
    done = Claimant("d", None, nearly_done=True)
    assert names(Claimant("a", None), done, Claimant("s", 0.1)) == "das"


def test_who_has_waited_too_long_goes_first() -> None:
    limit_s = PATIENCE_S + PATIENCE * 3.0
    old = Claimant("o", 3.0, waited_s=limit_s + 1)
    older = Claimant("p", 3.0, waited_s=limit_s + 2)
    patient = Claimant("q", 3.0, waited_s=limit_s - 1)
    assert names(patient, Claimant("a", None), old, older) == "poaq"


claimants = st.builds(
    Claimant,
    rid=st.just("x"),
    remaining_s=st.none() | st.floats(0, 100),
    waited_s=st.floats(0, 1000),
    nearly_done=st.booleans(),
)


@given(st.lists(claimants, max_size=20))
def test_everybody_has_one_turn(all_of_them: list[Claimant]) -> None:
    assert sorted(order(all_of_them)) == list(range(len(all_of_them)))


@given(st.lists(claimants, min_size=1, max_size=20), st.floats(0, 100))
def test_nobody_starves(others: list[Claimant], remaining_s: float) -> None:
    """Past the stated bound, only those go first who have waited longer still."""
    waited_s = PATIENCE_S + PATIENCE * remaining_s + 1
    one = Claimant("me", remaining_s, waited_s)
    everybody = [*others, one]
    turns = order(everybody)
    before = [everybody[i] for i in turns[: turns.index(len(others))]]
    assert all(other.waited_s >= waited_s for other in before)
