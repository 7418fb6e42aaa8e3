"""What KV hints ask of a cache's blocks, and how much of it is done."""

from tiered_kv.cache.hinted import Favours


def test_a_tenant_has_its_share_and_all_have_theirs() -> None:
    """Of blocks, each counted once, until their time is up."""
    favours, blocks = Favours(4, 6), [bytes([at]) for at in range(8)]
    assert favours.take("a", blocks[:3], now_s=0, for_s=10) == 3
    assert favours.take("a", blocks, now_s=1, for_s=5) == 4  # three of them are the same, and for longer
    assert favours.take("b", blocks, now_s=2, for_s=10) == 2
    assert favours.take("c", blocks, now_s=2, for_s=10) == 0
    assert favours.take("c", blocks, now_s=7, for_s=10) == 1
    assert favours.take("c", blocks, now_s=13, for_s=10) == 4
