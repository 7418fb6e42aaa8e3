"""How one tier is divided between models."""

from hypothesis import given
from hypothesis import strategies as st

from tiered_kv.host.lending import Claim, divided

MB = 1 << 20


@st.composite
def claims(draw: st.DrawFn) -> tuple[int, list[Claim]]:
    """Draw a tier and models of it: their rights fit, whatever they have."""
    capacity, left, made = 1000 * MB, 1000 * MB, []
    for _ in range(draw(st.integers(1, 6))):
        right = draw(st.integers(0, left))
        left -= right
        given_ = draw(st.integers(0, capacity))
        used = draw(st.integers(0, given_))
        weight = draw(st.sampled_from([0.5, 1.0, 3.0]))
        made.append(Claim(right, given_, used, weight, draw(st.booleans()), draw(st.booleans())))
    return capacity, made


@given(claims())
def test_nobody_who_stores_has_less_than_its_right_and_all_fit(drawn: tuple[int, list[Claim]]) -> None:
    """Whatever was lent: a model that is at work has its own, and an idle one what it uses, or cannot lend, of that."""
    capacity, made = drawn
    parts = divided(capacity, made)
    assert sum(parts) <= capacity
    for part, claim in zip(parts, made, strict=True):
        kept = min(claim.used if claim.lends else claim.given, claim.given, claim.right)
        assert part >= (kept if claim.is_idle else claim.right)


def test_what_is_idle_is_lent_by_weight_and_taken_back() -> None:
    """Two that are full have an idle one's rest; when it stores again all have their own."""
    idle = Claim(400, 400, 80, 2.0, is_idle=True)
    one, two = Claim(300, 300, 300, 1.0, is_idle=False), Claim(300, 300, 290, 2.0, is_idle=False)
    assert divided(1000, [idle, one, two]) == [100, 400, 500]
    back = Claim(400, 100, 100, 2.0, is_idle=False)
    lent = Claim(300, 400, 400, 1.0, is_idle=False), Claim(300, 500, 500, 2.0, is_idle=False)
    assert divided(1000, [back, *lent]) == [400, 300, 300]


def test_nothing_moves_while_nobody_wants_more() -> None:
    """A share with room in it is not changed, and what was borrowed is kept until somebody needs it."""
    made = [Claim(500, 100, 50, 1.0, is_idle=True), Claim(500, 900, 300, 1.0, is_idle=False)]
    assert divided(1000, made) == [100, 900]
