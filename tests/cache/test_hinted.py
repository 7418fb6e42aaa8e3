"""What KV hints ask of a cache's blocks, and how much of it is done."""

from tests.support import virtual
from tests.support.caches import keep, open_cache, until_idle
from tests.support.engine import PAYLOAD_BYTES, Engine, prompt, small_layout
from tiered_kv import TieredKV
from tiered_kv.cache.hinted import Favours, Hints
from tiered_kv.values.hints import HintAction


def test_a_tenant_has_its_share_and_all_have_theirs() -> None:
    """Of blocks, each counted once, until their time is up."""
    favours, blocks = Favours(4, 6), [bytes([at]) for at in range(8)]
    assert favours.take("a", blocks[:3], now_s=0, for_s=10) == 3
    assert favours.take("a", blocks, now_s=1, for_s=5) == 4  # three of them are the same, and for longer
    assert favours.take("b", blocks, now_s=2, for_s=10) == 2
    assert favours.take("c", blocks, now_s=2, for_s=10) == 0
    assert favours.take("c", blocks, now_s=7, for_s=10) == 1
    assert favours.take("c", blocks, now_s=13, for_s=10) == 4


def test_what_is_pinned_counts_for_all_of_its_time() -> None:
    """Though it is used: else a tenant pins its share again and again. It is right once."""
    favours, blocks = Favours(4, 100), [bytes([at]) for at in range(16)]
    assert favours.take("a", blocks[:4], now_s=0, for_s=60, stays=True) == 4
    for at in range(1, 4):
        favours.use("a", blocks, now_s=at)
        assert favours.take("a", blocks[4 * at :], now_s=at, for_s=60, stays=True) == 0
    num_taken = favours.take("a", blocks[4:], now_s=61, for_s=60)
    favours.use("a", blocks, now_s=62)
    assert favours.take("a", blocks[4:], now_s=63, for_s=60) >= num_taken > 0


def test_who_hints_wrongly_gets_less_and_who_is_right_again_gets_more() -> None:
    """By what became of blocks in their time; it is no matter of other tenants."""
    favours, at_s = Favours(64, 1_000), 0.0

    def hint(tenant: str, *, is_right: bool) -> int:
        nonlocal at_s
        blocks = [bytes([at]) for at in range(64)]
        num_taken = favours.take(tenant, blocks, now_s=at_s, for_s=5.0)
        at_s += 2.0
        if is_right:
            favours.use(tenant, blocks, now_s=at_s)
        at_s += 10.0
        return num_taken

    favours.use("somebody", [], now_s=at_s)
    assert [hint("wrong", is_right=False) for _ in range(9)][-1] <= 8
    assert [hint("right", is_right=True) for _ in range(9)][-1] >= 48
    taken = [hint("wrong", is_right=True) for _ in range(200)]
    assert taken[0] <= 8
    assert taken[-1] >= 48
    assert favours.take("another", [bytes([at]) for at in range(64)], now_s=at_s, for_s=5.0) == 64


def test_nobody_is_judged_where_nobody_says_what_is_asked_for() -> None:
    """Hints that come by HTTP alone are given the same share on and on."""
    favours, blocks = Favours(64, 1_000), [bytes([at]) for at in range(64)]
    taken = [favours.take("ann", blocks, now_s=12.0 * turn, for_s=5.0) for turn in range(9)]
    assert taken == [64] * 9


async def test_what_is_not_there_takes_no_ones_share() -> None:
    """Pins of it keep nothing, and count neither as kept nor as refused: the share is for what is there."""
    engine, counts = Engine(), list[tuple[int, int]]()
    async with open_cache({"medium": "cpu", "capacity": 32 * PAYLOAD_BYTES}, engine=engine) as kv:
        await keep(kv, engine, prompt(2))
        hints = hints_of(kv, counts)
        for seed, salt in ((0, "a"), (1, "a"), (2, "b"), (0, "c")):
            assert hints.begin([(HintAction("pin", for_s=60.0), prompt(4, seed=seed))], salt)
            await hints.settle()
        assert counts == [(2, 0), (0, 2), (0, 0), (2, 0)]
        await hints.aclose()


async def test_what_is_evicted_is_given_back() -> None:
    """Its room is free at once though it was pinned, and whoever has said so may keep others."""
    engine, counts = Engine(), list[tuple[int, int]]()
    pin, evict = HintAction("pin", for_s=60.0), HintAction("evict")
    async with open_cache({"medium": "cpu", "capacity": 32 * PAYLOAD_BYTES}, engine=engine) as kv:
        hints = hints_of(kv, counts)
        for seed in range(12):
            keys = prompt(4, seed=seed)
            await keep(kv, engine, keys)
            assert hints.begin([(pin, keys), (evict, keys)], "tenant")
            await hints.settle()
        assert counts == [(4, 0)] * 12
        assert (kv.stats()["cpu"].ready, kv.stats()["cpu"].doomed, kv.stats().pinned_bytes) == (0, 0, 0)
        await hints.aclose()


def hints_of(kv: TieredKV, counts: list[tuple[int, int]]) -> Hints:
    """Return what does hints of a cache as the page's server has it, and appends what is counted."""
    layout = small_layout()
    hints = Hints.of(kv, layout=layout, num_ranks=1, each=1 / 8, together=1 / 4, favoured=lambda *n: counts.append(n))
    assert hints is not None
    return hints


def test_shares_are_of_what_the_tier_holds_now() -> None:
    """One that was made smaller is not filled by a tenant that says what is to stay."""

    async def main() -> None:
        engine, counts, keys = Engine(), list[tuple[int, int]](), prompt(16)
        cpu = {"medium": "cpu", "capacity": 16 * PAYLOAD_BYTES, "max_capacity": 64 * PAYLOAD_BYTES}
        async with open_cache(cpu, engine=engine) as kv:
            await keep(kv, engine, keys)
            hints = hints_of(kv, counts)
            for num_blocks in (16, 64, 8):
                await kv.resize("cpu", num_blocks * PAYLOAD_BYTES)
                await virtual.advance(2.0)
                assert hints.begin([(HintAction("pin", for_s=1.0), keys)], "")
                await hints.settle()
            assert counts == [(2, 14), (8, 8), (1, 15)]
            await hints.aclose()
            await virtual.advance(2.0)
            await until_idle(kv)

    virtual.run(main)
