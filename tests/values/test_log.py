from tiered_kv.values.log import Seldom


def test_what_comes_with_every_call_is_told_once_a_minute() -> None:
    """At once, and then with how often it came and was not told of."""
    now_s = 1000.0
    seldom = Seldom(lambda: now_s)
    assert [seldom.due() for _ in range(100)] == [0] + [None] * 99
    now_s += 59.9
    assert seldom.due() is None
    now_s += 0.1
    assert [seldom.due() for _ in range(3)] == [100, None, None]
    now_s += 3600.0
    assert seldom.due() == 2
    now_s += 60.0
    assert seldom.due() == 0
