import os
import pickle
import re
import textwrap
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ByteSize, ValidationError

from tiered_kv.settings.chain_settings import CPUTier, GPUTier, check_tiers, tier_from, tier_name
from tiered_kv.settings.registry import resolve
from tiered_kv.settings.settings import CacheLimits, TieredKVSettings
from tiered_kv.settings.tier_settings import HostSettings, TierSettings
from tiered_kv.values.errors import ConfigurationError
from tiered_kv_backends.memory import MemoryBackend
from tiered_kv_backends.redis.redis_backend import RedisBackend
from tiered_kv_backends.s3 import S3Settings

GIB = 1024**3
PASSWORD = "hunter2"  # noqa: S105 -- what must not be shown has to be something

FAKE = """
    from pydantic import SecretStr
    from tiered_kv_backends.memory import MemoryBackend
    from tiered_kv.settings.tier_settings import TierSettings

    class Server(MemoryBackend):
        class Settings(TierSettings):
            medium: str = "settings_fake:Server"
            url: SecretStr
            password: SecretStr = SecretStr("")
            retries: int = 3

    class Custom(MemoryBackend):
        class Settings(TierSettings):
            medium: str = "settings_fake:Custom"
            host: str
            @classmethod
            def from_url(cls, url):
                return {"host": url.partition("://")[2]}
"""


@pytest.fixture(autouse=True)
def no_settings_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a developer's environment says must not decide here."""
    for name in [name for name in os.environ if name.upper().startswith("TIERED_KV_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def fake_media(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install media of another author's, called ``server`` and ``custom``."""
    (tmp_path / "settings_fake.py").write_text(textwrap.dedent(FAKE))
    info = tmp_path / "settings_fake-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: settings-fake\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[tiered_kv.backends]\nserver = settings_fake:Server\ncustom = settings_fake:Custom\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))


def complaint(**arguments: Any) -> str:  # noqa: ANN401 -- wrong arguments are the point
    """Return what is said about settings that cannot work."""
    with pytest.raises(ConfigurationError) as caught:
        TieredKVSettings(**arguments)
    assert not isinstance(caught.value, ValidationError)
    return str(caught.value)


def test_the_default_is_a_modest_cpu_tier_and_no_disk() -> None:
    """Without any setting nothing is written anywhere but to 1 GiB of memory."""
    assert TieredKVSettings().tiers == (CPUTier(capacity=GIB),)


def test_a_tier_is_a_model_a_dict_or_a_url() -> None:
    """The three say the same thing."""
    model = CPUTier(capacity=2 * GIB, policy="arc", name="ram")
    as_dict = {"medium": "cpu", "capacity": "2GiB", "policy": "arc", "name": "ram"}
    for tier in (model, as_dict, "cpu://?capacity=2GiB&policy=arc&name=ram"):
        assert TieredKVSettings(tiers=[tier]).tiers == (model,)


def test_a_file_url_is_an_nvme_tier() -> None:
    """Its path is the URL's, unquoted, and query parameters are its fields."""
    tier = tier_from("file:///mnt/my%20kv?capacity=1TiB&timeout_s=3")
    assert (tier.medium, tier_name(tier)) == ("nvme", "nvme")
    found = tier.model_dump(include={"path", "capacity", "timeout_s"})
    assert found == {"path": Path("/mnt/my kv"), "capacity": 1024**4, "timeout_s": 3.0}


def test_a_medium_of_another_package_is_as_typed_as_ours(fake_media: None) -> None:
    """Its own model validates its tier, by its name, by its path, and from a URL."""
    by_name, by_path, by_url = TieredKVSettings(
        tiers=[
            {"medium": "server", "url": "server://host", "name": "a", "retries": "5"},
            {"medium": "settings_fake:Server", "url": "server://host"},
            "server://host/0?retries=7&name=c",
        ]
    ).tiers
    assert [type(tier).__qualname__ for tier in (by_name, by_path, by_url)] == ["Server.Settings"] * 3
    assert [tier.model_dump()["retries"] for tier in (by_name, by_path, by_url)] == [5, 3, 7]
    assert by_url.model_dump()["url"].get_secret_value() == "server://host/0"
    assert tier_name(by_path) == "Server"
    assert "tiers[0].retrys: there is no such setting: did you mean 'retries'?" in complaint(
        tiers=[{"medium": "server", "url": "", "retrys": 3}]
    )


def test_a_medium_may_read_its_urls_itself(fake_media: None) -> None:
    """``from_url`` of its model decides."""
    assert tier_from("custom://here").model_dump()["host"] == "here"


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("32GiB", 32 * GIB), ("1.5MiB", 1572864), ("2GB", 2 * 10**9), (4096, 4096), ("4096", 4096)]
)
def test_sizes_are_ints_or_text(text: str | int, num_bytes: int) -> None:
    """GiB is 2**30 bytes, GB is 10**9."""
    assert CPUTier(capacity=text).capacity == num_bytes


def test_a_cpu_tier_may_be_empty_and_a_gpu_tier_may_not() -> None:
    """Capacity 0 of the CPU tier means that blocks only pass through host memory."""
    assert TieredKVSettings(tiers=["cpu://?capacity=0", "memory://?capacity=1"]).tiers[0] == CPUTier(
        capacity=ByteSize(0)
    )
    assert TieredKVSettings(tiers=["cpu://?capacity=0&max_capacity=1GiB"]).tiers[0].medium == "cpu"
    assert "tiers[0].capacity: must be positive, got '0'" in complaint(tiers=["gpu://?capacity=0"])


@pytest.mark.parametrize(
    ("tiers", "said"),
    [
        ([], "tiers: a cache needs at least one tier"),
        ("cpu://?capacity=1GiB", "tiers: must be a list, e.g. ['cpu://?capacity=32GiB']"),
        ([7], "tiers[0]: a tier is a TierSettings, a dict with 'medium' or a URL, not int"),
        ([{"capacity": 1}], "tiers[0]: a tier needs its medium: write e.g. {'medium': 'cpu'"),
        (["/mnt/kv"], "'file:///mnt/kv?capacity=1TiB', not like '/mnt/kv'"),
        (["mine:Store"], "1TiB': for a class of yours write {'medium': 'package.module:Class'}"),
        (["file://mnt/kv?capacity=1TiB"], "tiers[0]: three slashes begin a path: write file:///mnt/kv"),
        (["file://kv?capacity=1TiB"], "file:///kv, or, of a relative one, a dict with 'path': 'kv'"),
        (["shared_fs:///mnt/kv?capacity=1TiB"], "tiers[0]: a URL's scheme has no underscores: write shared-fs://"),
        (["cpu://host?capacity=1GiB"], "tiers[0]: fields come after a '?' in a cpu URL: write cpu://?capacity=32GiB"),
        (["cpu://?capacity=1GiB&capacity=2GiB"], "tiers[0]: a cpu URL names 'capacity' twice"),
        (["cpu://?medium=gpu"], "tiers[0]: a cpu URL names its medium, which the scheme says"),
        (["file:///a?capacity=1GiB&path=/b"], "tiers[0]: a file URL names 'path', which its address says"),
        (["cpu://", "s3://b/p?url=s3://other/q"], "tiers[1]: a s3 URL names 'url', which its address says"),
        ([{"medium": "nvme", "path": "/a\0b", "capacity": 1}], "tiers[0].path: no file's name has a NUL in it, got"),
        ([{"medium": "nvme", "path": ["/a", "/\udcff"], "capacity": 1}], "tiers[0].path: is no UTF-8, got '/\\udcff'"),
        ([{"medium": "nvme", "path": ["/a", "~nobody-here/kv"]}], "tiers[0].path: begins with '~', and whose home"),
        ([{"medium": "shared_fs", "path": "/\udcff", "capacity": 1}], "tiers[0].path: is no UTF-8, got '/\\udcff'"),
        (["http://[::1"], "tiers[0]: this URL cannot be read: percent-encode"),
        (["disk:///mnt/kv"], "tiers[0]: no medium takes URLs of disk://: did you mean 'nvme'?"),
        ([{"medium": "SSD"}], "tiers[0]: no medium is called 'SSD': did you mean 'nvme'?"),
        ([{"medium": "CPU"}], "tiers[0]: no medium is called 'CPU': did you mean 'cpu'?"),
        ([CPUTier], "tiers[0]: a tier is made: write CPUTier(...), not the class alone"),
        (["cpu://?capacity=10%"], "tiers[0].capacity: '10%' is no size: write bytes as an int, or e.g. '32GiB'"),
        (["cpu://?capacity=1.5"], "tiers[0].capacity: '1.5' is no size"),
        ([{"medium": "cpu", "capacity": True}], "tiers[0].capacity: True is no size"),
        (["cpu://?capacity=1Gbit"], "tiers[0].capacity: '1Gbit' is in bits: write bytes, e.g. '32GiB'"),
        ([{"medium": "cpu", "capacity": "8 Gb"}], "tiers[0].capacity: '8 Gb' is in bits: write bytes, e.g. '32GiB'"),
        ([{"medium": "cpu", "capacity": "8Gib"}], "tiers[0].capacity: '8Gib' is in bits: write bytes, e.g. '32GiB'"),
        (["file://?capacity=1GiB"], "tiers[0].path: must not be empty: write '.' for the current directory"),
        (["file:///$HOME/kv?capacity=1GiB"], "tiers[0].path: variables of the environment are not filled in: write"),
        (["file://~nobody-here/kv?capacity=1GiB"], "tiers[0]: three slashes begin a path: write file:///~nobody-here"),
        ([{"medium": "nvme", "path": "~nobody-here/kv"}], "tiers[0].path: begins with '~', and whose home that is"),
        (["cup://?capacity=1GiB"], "tiers[0]: no medium takes URLs of cup://: did you mean 'cpu'?"),
        ([{"medium": "nvm"}], "tiers[0]: no medium is called 'nvm': did you mean 'nvme'? known are"),
        ([{"medium": "cpu", "capcity": 1}], "tiers[0].capcity: there is no such setting: did you mean 'capacity'?"),
        ([{"medium": "gpu"}], "tiers[0].capacity: must be given, e.g. '2GiB'"),
        ([{"medium": "s3"}], "tiers[0].url: must be given, e.g. 's3://bucket/prefix'"),
        (
            [{"medium": "nvme", "path": 7, "capacity": "1GiB", "pa[th": 1, "ca[p": 1}],
            "tiers[0].path: must be a path, in quotes\n  tiers[0].pa[th: there is no such setting: did you mean 'path'",
        ),
        (["file:///kv?capacity=1GiB&name=a#b"], "tiers[0]: what is behind the '#' of a tier's URL would be lost"),
        ([{"medium": "nvme", "path": "file:///kv", "capacity": 1}], "tiers[0].path: is a URL: write the path alone"),
        ([{"medium": "redis", "url": "redis://h?ttl_s=5"}], "tiers[0].url: ends with the host or database"),
        ([{"medium": "redis", "url": "redis://h", "ca_file": 7}], "tiers[0].ca_file: must be a path, in quotes"),
        (["cpu://?capacity=12parsecs"], "tiers[0].capacity: '12parsecs' is no size: write bytes as an int, or e.g."),
        ([{"medium": "cpu", "policy": int}], "tiers[0].policy: must be text: of a class write 'package.module:Class'"),
        (["cpu://?policy=lfu"], "tiers[0].policy: policy must be one of lru, arc"),
        (["file:///kv?capacity=1GiB&policy=lfu"], "tiers[0]: policy must be one of lru, arc"),
        (["file:///kv?capacity=1GiB&erase=zap"], "tiers[0].erase: must be true, false or 'punch', got 'zap'"),
        (["file:///kv?capacity=2GiB&max_capacity=1GiB"], "max_capacity (1.0 GiB) is below capacity (2.0 GiB)"),
        (["cpu://?policy=builtins:int"], "tiers[0].policy: 'builtins:int' is no subclass"),
        (["memory://?capacity=1MiB&timeout_s=0"], "tiers[0].timeout_s: must be positive, got '0'"),
        (["cpu://?timeout_s=1&admit_after=2"], "tiers[0]: timeout_s and admit_after: for storage tiers only"),
        (["cpu://", "gpu://?capacity=1"], "tiers: fastest first: at most one gpu, then at most one cpu, then storage;"),
        (["cpu://", "cpu://?name=b"], "at most one cpu, then storage; got cpu, cpu"),
        (["memory://?capacity=1", "cpu://"], "then storage; got memory, cpu"),
        (["memory://?capacity=1"] * 2, "tiers[1]: is called 'memory' like tiers[0]: give it a name of its own"),
        (["memory://?capacity=1", "memory://?capacity=1&name=memory"], "e.g. name='memory-2'"),
        (["cpu://?capacity=0"], "tiers: capacity=0 can keep nothing: give the cpu tier some, or add a storage tier"),
        (["cpu://?write=back"], "tiers[0]: tier 'cpu' is the first: it gets blocks at once"),
        (["file:///kv?capacity=1GiB&write=back"], "tiers[0]: tier 'nvme' has write='back', but there is no gpu or cpu"),
        (
            ["file:///kv?capacity=1GiB", "file:///kv?capacity=1GiB&name=b"],
            "tiers[1]: tier 'b' has the directory of tier 'nvme', or one in it: each needs its own",
        ),
        (
            ["file:///kv?capacity=1GiB", "file:///kv/more?capacity=1GiB&name=b"],
            "tiers[1]: tier 'b' has the directory of tier 'nvme', or one in it: each needs its own",
        ),
        (
            ["file:///kv/more?capacity=1GiB", "shared-fs:///kv?capacity=1GiB"],
            "tiers[1]: tier 'shared_fs' has the directory of tier 'nvme', or one in it: each needs its own",
        ),
        (
            ["file:///kv?capacity=1GiB", "shared-fs:///kv?capacity=1GiB"],
            "tiers[1]: tier 'shared_fs' has the directory of tier 'nvme', or one in it: each needs its own",
        ),
        (
            [{"medium": "nvme", "path": ["/kv/more", "/kv"], "capacity": "1GiB"}],
            "tiers[0]: path names a directory twice, or one in another: each needs its own",
        ),
        (
            [TierSettings(medium="cpu")],
            "tiers[0]: medium 'cpu' takes tiered_kv.CPUTier, not TierSettings",
        ),
    ],
)
def test_tiers_that_cannot_work_say_where_and_what_to_write(tiers: object, said: str) -> None:
    """One line: the place, what is wrong there, what to write instead."""
    assert said in complaint(tiers=tiers)


@pytest.mark.parametrize("medium", ["nvme", "shared_fs"])
def test_a_tilde_is_the_home_directory(medium: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every medium with a path, however that is given; no folder of that name is made."""
    monkeypatch.setenv("HOME", "/home/me")
    scheme = medium.replace("_", "-")
    for tier in (
        {"medium": medium, "path": "~/kv", "capacity": "1GiB"},
        {"medium": medium, "path": Path("~/kv"), "capacity": "1GiB"},
        f"{scheme}://~/kv?capacity=1GiB",
        f"{scheme}:///~/kv?capacity=1GiB",
    ):
        assert tier_from(tier).model_dump()["path"] == Path("/home/me/kv")


def test_settings_of_one_medium_are_made_of_what_says_them(fake_media: None) -> None:
    """Settings, a dict or a URL make the same; those of another medium, and what is none, are refused in words."""
    wanted = S3Settings(url="s3://bucket/prefix", connections=3)
    for given in (
        wanted,
        {"medium": "s3", "url": "s3://bucket/prefix", "connections": 3},
        "s3://bucket/prefix?connections=3",
    ):
        assert S3Settings.of(given) == wanted
    for wrong, said in (
        (7, "settings are S3Settings, a dict of its fields or a URL, not a int"),
        (TieredKVSettings(), "not a TieredKVSettings"),
        (CPUTier(), "not a CPUTier"),
        ({"medium": "redis", "url": "redis://h"}, "these are settings of medium 'redis', not of 's3'"),
        ({"url": "s3://b", "conections": 3}, "conections: there is no such setting: did you mean 'connections'?"),
        ("s3:/bucket", "a tier's URL looks like"),
    ):
        with pytest.raises(ConfigurationError) as caught:
            S3Settings.of(wrong)
        assert said in str(caught.value)


def test_all_settings_are_made_of_what_says_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings as they are, a dict of them, or, of nothing, the environment."""
    wanted = TieredKVSettings(tiers=["cpu://?capacity=2GiB"], limits={"window": "1MiB"})
    assert TieredKVSettings.of(wanted) is wanted
    assert TieredKVSettings.of({"tiers": ["cpu://?capacity=2GiB"], "limits": {"window": "1MiB"}}) == wanted
    monkeypatch.setenv("TIERED_KV_TIERS", '["cpu://?capacity=2GiB"]')
    monkeypatch.setenv("TIERED_KV_LIMITS__WINDOW", "1MiB")
    assert TieredKVSettings.of() == wanted
    with pytest.raises(ConfigurationError, match="not dict with keys that are no strings"):
        TieredKVSettings.of({1: 2})


@pytest.mark.parametrize(
    ("tiers", "said"),
    [
        ("cpu://", "tiers: must be a list, e.g. ['cpu://?capacity=32GiB'], not str"),
        ({"medium": "cpu"}, "tiers: must be a list, e.g. ['cpu://?capacity=32GiB'], not dict"),
        (TieredKVSettings(), "not TieredKVSettings"),
        (
            ["cpu://?capacity=x", MemoryBackend(MemoryBackend.Settings(capacity=ByteSize(1))), {"medium": "gpu"}],
            "tiers[0].capacity: 'x' is no size: write bytes as an int, or e.g. '32GiB'; tiers[2].capacity: must be giv",
        ),
    ],
)
def test_a_list_of_tiers_says_which_are_wrong(tiers: object, said: str) -> None:
    """As `TieredKVSettings` does: in a `ConfigurationError` by that name, and of all tiers at once."""
    with pytest.raises(ConfigurationError) as caught:
        check_tiers(tiers)
    assert type(caught.value) is ConfigurationError
    assert said in str(caught.value)


def test_chains_that_can_work() -> None:
    """Any part of the chain may be left out, and media may come twice under two names."""
    chains = (["gpu://?capacity=1"], ["memory://?capacity=1"], ["gpu://?capacity=1", "memory://?capacity=1"])
    twice = ["gpu://?capacity=1", "cpu://", "memory://?capacity=1", "memory://?capacity=1&name=far"]
    for chain in (*chains, twice):
        assert len(TieredKVSettings(tiers=chain).tiers) == len(chain)


def test_all_that_is_wrong_is_said_at_once() -> None:
    """Nobody has to run it three times to learn three things."""
    said = complaint(tiers=["cpu://?capacity=x", {"medium": "gpu"}], limits={"windw": 1, "reads_in_flight": 0})
    places = ("tiers[0].capacity:", "tiers[1].capacity:", "limits.windw:", "limits.reads_in_flight:")
    assert [place in said for place in places] == [True] * 4


@pytest.mark.parametrize(
    "field",
    ["load_timeout_s", "window", "bounce", "store_queue", "prefetch_quota", "close_timeout_s", "reads_in_flight"],
)
@pytest.mark.parametrize("value", [0, -1, "nan", None])
def test_limits_are_positive_numbers(field: str, value: object) -> None:
    """A limit of nothing, or of no number, would be a cache that waits for ever or never works."""
    assert f"limits.{field}: " in complaint(limits={field: value})


def test_the_bounce_ring_holds_a_window() -> None:
    """Else a block that passes through could never be moved; both numbers are named."""
    assert "limits: bounce (1.0 MiB) must hold at least one window (16.0 MiB)" in complaint(limits={"bounce": "1MiB"})


def test_unknown_settings_are_refused_with_the_closest_known() -> None:
    """At the top and in the limits, and at the top what belongs into the limits."""
    assert complaint(load_timeout_s=1).endswith("no such setting: did you mean 'limits.load_timeout_s'?")
    assert "tires: there is no such setting: did you mean 'tiers'?" in complaint(tires=[])
    assert "did you mean 'load_timeout_s'?" in complaint(limits={"load_timeout": 1})
    timeouts = "'close_timeout_s' or 'load_timeout_s' or 'open_timeout_s' or 'store_timeout_s'"
    assert f"did you mean {timeouts}?" in complaint(limits={"timeout": 1})


def test_records_of_redis_may_live_for_good_whoever_says_so() -> None:
    """In a URL and in TOML, which have no None, as in Python."""
    said: list[str | dict[str, object]] = [
        "redis://h?ttl_s=never",
        {"medium": "redis", "url": "redis://h", "ttl_s": "never"},
        {"medium": "redis", "url": "redis://h", "ttl_s": None},
    ]
    assert [dict(tier_from(each))["ttl_s"] for each in said] == [None] * 3
    assert "tiers[0].ttl_s: " in complaint(tiers=["redis://h?ttl_s=ever"])


def test_the_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiers as a JSON list, limits one by one."""
    monkeypatch.setenv("TIERED_KV_TIERS", '["gpu://?capacity=1GiB", {"medium": "cpu", "capacity": "2GiB"}]')
    monkeypatch.setenv("TIERED_KV_LIMITS__WINDOW", "8MiB")
    settings = TieredKVSettings()
    assert settings.tiers == (GPUTier(capacity=ByteSize(GIB)), CPUTier(capacity=ByteSize(2 * GIB)))
    assert settings.limits == CacheLimits(window=ByteSize(8 * 1024**2))


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("TIERED_KV_TIERS", "cpu://", "TIERED_KV_TIERS: write JSON, e.g. TIERED_KV_TIERS='["),
        ("TIERED_KV_METRICS_SALTS", "a,b", "TIERED_KV_METRICS_SALTS: write JSON, e.g. TIERED_KV_METRICS_SALTS='[\"ten"),
        ("TIERED_KV_HOST", "x", "TIERED_KV_HOST: write JSON, e.g. TIERED_KV_HOST='{"),
        ("TIERED_KV_TIERS", '["cpu://?capacity=x"]', "tiers[0].capacity (of TIERED_KV_TIERS): 'x' is no size"),
        ("TIERED_KV_LIMITS", '{"window": -1}', "limits.window (of TIERED_KV_LIMITS): must be positive, got -1"),
        ("TIERED_KV_LIMITS__WINDOW", "-1", "limits.window (of TIERED_KV_LIMITS__WINDOW): must be positive, got '-1'"),
        (
            "TIERED_KV_LIMITS__WINDO",
            "1",
            "limits.windo (of TIERED_KV_LIMITS__WINDO): there is no such setting: did you mean 'window'?",
        ),
        ("TIERED_KV_TIER", "[]", "TIERED_KV_TIER is not read: write TIERED_KV_TIERS"),
        ("TIERED_KV_LIMITS_WINDOW", "1", "TIERED_KV_LIMITS_WINDOW is not read: write TIERED_KV_LIMITS__WINDOW"),
        ("TIERED_KV_WINDOW", "1", "TIERED_KV_WINDOW is not read: write TIERED_KV_LIMITS__WINDOW"),
        ("TIERED_KV_LIMIT__WINDOW", "1", "TIERED_KV_LIMIT__WINDOW is not read: write TIERED_KV_LIMITS__WINDOW"),
        ("TIERED_KV_LIMIT_WINDOW", "1", "TIERED_KV_LIMIT_WINDOW is not read: write TIERED_KV_LIMITS__WINDOW"),
        ("TIERED_KV_LIMIT__WINDO", "1", "TIERED_KV_LIMIT__WINDO is not read: write TIERED_KV_LIMITS__WINDO"),
        ("TIERED_KV_METRICS__SALTS", "[]", "TIERED_KV_METRICS__SALTS is not read: write TIERED_KV_METRICS_SALTS"),
        ("TIERED_KV_CODEC__NAME", "fp8", "TIERED_KV_CODEC__NAME is not read: write TIERED_KV_CODEC"),
        ("TIERED_KV_CONFIG__PATH", "x", "TIERED_KV_CONFIG__PATH is not read: write TIERED_KV_CONFIG"),
        ("TIERED_KV_HSOT__SOCKET", "x", "TIERED_KV_HSOT__SOCKET is not read: write TIERED_KV_HOST__SOCKET"),
        ("TIEREDKV_TIERS", "[]", "TIEREDKV_TIERS is not read: write TIERED_KV_TIERS"),
        ("TIERED_KVTIERS", "[]", "TIERED_KVTIERS is not read: write TIERED_KV_TIERS"),
        ("tiered_kv_CONFG", "x", "is not read: write TIERED_KV_CONFIG"),
        ("TIERED_KV_CPU_CAPACITY", "2GiB", "is not read: tiers are given whole, e.g. TIERED_KV_TIERS='["),
        ("TIERED_KV_CONFG", "x", "TIERED_KV_CONFG is not read: write TIERED_KV_CONFIG"),
    ],
)
def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch, variable: str, value: str, said: str) -> None:
    """A misspelt one too, that would be silently without effect."""
    monkeypatch.setenv(variable, value)
    assert said in complaint()


def test_an_argument_is_not_called_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where both say something, the argument is what is read; of a table, key by key."""
    monkeypatch.setenv("TIERED_KV_LIMITS__WINDOW", "-1")
    monkeypatch.setenv("TIERED_KV_TIERS", "[]")
    assert "limits.window: must be positive, got -2" in complaint(limits={"window": -2})
    assert "limits.window (of TIERED_KV_LIMITS__WINDOW): must be" in complaint(limits={"promote": True})
    assert "tiers[0].capacity: 'x' is no size" in complaint(tiers=["cpu://?capacity=x"], limits={"window": "1MiB"})


def test_text_and_lists_are_asked_for_as_such() -> None:
    """Permissions that look like a number are text; only a list of tiers has a tier as its example."""
    assert "host.mode: must be text, in quotes" in complaint(host={"mode": 660})
    tier = {"medium": "nvme", "path": "/kv", "capacity": "1GiB", "encryption": {"keys": {"a": "b"}}}
    assert re.search(r"tiers\[0\]\.encryption\.keys: must be a list(?!,)", complaint(tiers=[tier]))


def test_a_directory_is_the_same_by_a_link(tmp_path: Path) -> None:
    """Two tiers that would write and delete in one directory are refused, whatever it is called."""
    (tmp_path / "kv").mkdir()
    (tmp_path / "link").symlink_to("kv")
    tiers = [f"file://{tmp_path}/kv?capacity=1GiB", f"shared-fs://{tmp_path}/link?capacity=1GiB"]
    assert "tiers[1]: tier 'shared_fs' has the directory of tier 'nvme'" in complaint(tiers=tiers)
    one = {"medium": "nvme", "path": [f"{tmp_path}/kv", f"{tmp_path}/link"], "capacity": "1GiB"}
    assert "tiers[0]: path names a directory twice" in complaint(tiers=[one])


def test_where_a_link_leads_is_for_the_tier_to_find_out(tmp_path: Path) -> None:
    """Settings that name one which leads to itself are settings: the tier says so when it opens, or is not required."""
    (tmp_path / "link").symlink_to("link")
    tiers = [f"file://{tmp_path}/link?capacity=1GiB", f"shared-fs://{tmp_path}/link/kv?capacity=1GiB&required=false"]
    assert "has the directory of tier 'nvme', or one in it" in complaint(tiers=tiers)
    assert len(TieredKVSettings(tiers=tiers[1:]).tiers) == 1


@pytest.mark.parametrize(
    "service", ["TIERED_KV", "TIEREDKV", *(f"TIERED_KV_{field.upper()}" for field in TieredKVSettings.model_fields)]
)
def test_variables_of_others_are_let_be(monkeypatch: pytest.MonkeyPatch, service: str) -> None:
    """Kubernetes sets these in every pod beside a service called tiered-kv, or tiered-kv-metrics."""
    for name in ("SERVICE_HOST", "PORT_80_TCP_ADDR"):
        monkeypatch.setenv(f"{service}_{name}", "10.0.0.1")
    for name in ("SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT_80_TCP_PORT"):
        monkeypatch.setenv(f"{service}_{name}", "80")
    for name in ("PORT", "PORT_80_TCP"):
        monkeypatch.setenv(f"{service}_{name}", "tcp://10.0.0.1:80")
    monkeypatch.setenv(f"{service}_PORT_80_TCP_PROTO", "tcp")
    assert TieredKVSettings() == TieredKVSettings(tiers=[CPUTier()])


def test_a_toml_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its path, or by the environment's; arguments go before the environment, that before the file."""
    path = tmp_path / "kv.toml"
    path.write_text('[[tiers]]\nmedium = "cpu"\ncapacity = "3GiB"\n[limits]\nwindow = "4MiB"\nload_timeout_s = 7\n')
    from_file = TieredKVSettings.from_toml(path)
    assert from_file.tiers == (CPUTier(capacity=ByteSize(3 * GIB)),)
    monkeypatch.setenv("TIERED_KV_CONFIG", str(path))
    assert TieredKVSettings() == from_file
    monkeypatch.setenv("TIERED_KV_LIMITS__WINDOW", "2MiB")
    settings = TieredKVSettings(tiers=["cpu://"])
    assert settings.tiers == (CPUTier(),)
    assert (settings.limits.window, settings.limits.load_timeout_s) == (2 * 1024**2, 7)
    for limits in ({"bounce": "64MiB"}, CacheLimits(bounce="64MiB")):
        merged = TieredKVSettings(limits=limits).limits
        assert merged == CacheLimits(bounce="64MiB", window="2MiB", load_timeout_s=7)
    host = HostSettings(mode="600")
    assert TieredKVSettings(host=host).host == host


def test_a_variable_of_too_many_levels_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """As any other that cannot be read."""
    monkeypatch.setenv("TIERED_KV_TIERS", "[" * 100_000)
    with pytest.raises(ConfigurationError, match="too many levels"):
        TieredKVSettings()


def test_a_named_file_takes_the_place_of_the_environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``from_toml`` reads one file, not two laid over each other."""
    for name, field in (("a", "window = 4096"), ("b", "load_timeout_s = 7")):
        (tmp_path / name).write_text(f"[limits]\n{field}\n")
    monkeypatch.setenv("TIERED_KV_CONFIG", str(tmp_path / "a"))
    assert TieredKVSettings.from_toml(tmp_path / "b").limits == CacheLimits(load_timeout_s=7)
    assert TieredKVSettings().limits == CacheLimits(window=ByteSize(4096))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[limits\n", "is no TOML: "),
        ("limits = " + "[" * 3000, "is no TOML: "),
        (
            '[tiers]\nmedium = "cpu"\n',
            "tiers: must be a list, e.g. ['cpu://?capacity=32GiB']; in TOML each tier is a [[tiers]]",
        ),
        ("[limits]\nwindw = 1\n", "limits.windw: there is no such setting: did you mean 'window'?"),
        ('[[tier]]\nmedium = "cpu"\n', "tier: there is no such setting: did you mean 'tiers'?"),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, text: str | None, said: str) -> None:
    """Whether it is absent, no TOML, or says what cannot work."""
    path = tmp_path / "kv.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        TieredKVSettings.from_toml(path)
    assert str(path) in str(caught.value)
    assert said in str(caught.value)


def test_no_secret_is_shown(fake_media: None) -> None:
    """Neither printed nor dumped nor in the traceback of an error, whatever is wrong with the tier."""
    good = {"medium": "server", "url": f"server://:{PASSWORD}@host", "password": PASSWORD}
    settings = TieredKVSettings(tiers=[good, f"server://:{PASSWORD}@host?name=b"])
    assert (
        PASSWORD not in f"{settings!r} {settings} {settings.tiers} {settings.model_dump()} {settings.model_dump_json()}"
    )
    wrong: list[Any] = [
        f"redis:/user:{PASSWORD}%40host:6379",
        f"s3:name:{PASSWORD}/bucket",
        PASSWORD,
        f"file:///kv?{PASSWORD}&{PASSWORD}",
        {**good, "retries": "x"},
        {**good, "passwrd": PASSWORD},
        {**good, "password": [PASSWORD]},
        {**good, "medium": "serve"},
        {"medium": "server", "password": PASSWORD},
        f"server://:{PASSWORD}@host?retrys=1",
        f"serve://:{PASSWORD}@host",
        f"cpu://:{PASSWORD}@host",
    ]
    for tier in wrong:
        with pytest.raises(ConfigurationError) as caught:
            TieredKVSettings(tiers=[tier])
        shown = "".join(traceback.format_exception(caught.value))
        assert PASSWORD not in str(caught.value)
        assert PASSWORD not in shown


@pytest.mark.parametrize("hosts", ["a,[::1]:7001", "[::1]:7000,b:7001", "a:1,[::1],[::2]:3"])
@pytest.mark.parametrize("login", ["", "kv:p%40ss@"])
def test_each_of_several_hosts_may_be_an_address_in_brackets(login: str, hosts: str) -> None:
    """Wherever it stands, whatever Python's own parser takes of a list of hosts."""
    tier = tier_from(f"redis://{login}{hosts}?cluster=true&prefix=mine/")
    assert isinstance(tier, RedisBackend.Settings)
    assert tier.url.get_secret_value() == f"redis://{login}{hosts}"
    assert tier.prefix == "mine/"


@pytest.mark.parametrize("url", ["redis://a,[::1", "redis://a,::1]", "redis://a,[b]"])
def test_brackets_of_no_address_are_refused(url: str) -> None:
    """Of every host in a list."""
    with pytest.raises(ConfigurationError):
        tier_from(f"{url}?cluster=true")


@pytest.mark.parametrize("url", ["kv:a?{}@host", "kv:a?{}=x@host", "kv:{}\u2100@host", "kv:{}]x@host", "kv:{}[x@host"])
@pytest.mark.parametrize("scheme", ["redis", "s3", "mooncake", "cpu"])
def test_no_part_of_a_password_is_shown_of_a_malformed_url(scheme: str, url: str) -> None:
    """A password whose special characters were not encoded parts its URL in the wrong places; none is repeated."""
    whole = f"{scheme}://{url.format(PASSWORD)}"
    for make in (
        lambda: tier_from(whole),
        lambda: TieredKVSettings(tiers=[whole]),
        lambda: TieredKVSettings(tiers=[{"medium": scheme, "url": whole.replace("?", "]")}]),
    ):
        with pytest.raises(ConfigurationError) as caught:
            make()
        assert PASSWORD not in "".join(traceback.format_exception(caught.value))


DIRECT: dict[str, tuple[Callable[[], object], str]] = {
    "a number of none": (lambda: CacheLimits(load_timeout_s=-1), "load_timeout_s: must be positive, got -1"),
    "no number": (lambda: CacheLimits(load_timeout_s="soon"), "load_timeout_s: Input should be a valid number, "),
    "an unknown limit": (
        lambda: CacheLimits.model_validate({"load_timeouts": 1}),
        "there is no such setting: did you mean 'load_t",
    ),
    "no table": (
        lambda: TieredKVSettings(limits=f"8GiB {PASSWORD}"),  # type: ignore[arg-type]  # as one may take them for one
        "limits: must be a table, in Python a dict, of settings",
    ),
    "no table of parts": (
        lambda: TieredKVSettings(host={"fixed": {"llama": "cpu=8GiB"}}),
        "host.fixed.llama: must be a table, in Python a dict",
    ),
    "more than all": (lambda: CacheLimits(low_water=2), "low_water: Input should be less than or equal to 1, got 2"),
    "a size below zero": (lambda: CPUTier(capacity=-1), "capacity: must be positive, got -1"),
    "a size of none": (lambda: GPUTier(capacity=0), "capacity: must be positive, got 0"),
    "a limit of another": (
        lambda: CacheLimits(bounce=1),
        "bounce (1 B) must hold at least one window (16.0 MiB)",
    ),
    "a misspelt key": (
        lambda: S3Settings(url="s3://b", secret_acces_key=PASSWORD),  # type: ignore[call-arg]
        "secret_acces_key: there is no such setting: did you mean 'secret_access_key'?",
    ),
    "a URL of another scheme": (
        lambda: RedisBackend.Settings(url=f"http://u:{PASSWORD}@h"),
        "url: must be redis://",
    ),
    "a misspelt password": (
        lambda: RedisBackend.Settings.model_validate({"url": "redis://h", "pasword": PASSWORD}),
        "pasword: there is no such setting: did you mean 'password'?",
    ),
    "an assignment": (
        lambda: setattr(S3Settings(url="s3://b"), "access_key_id", PASSWORD),
        "access_key_id: settings are frozen: make others",
    ),
    "a deletion": (
        lambda: delattr(S3Settings(url="s3://b", access_key_id=PASSWORD), "access_key_id"),
        "access_key_id: settings are frozen: make others",
    ),
    "an assignment to the whole": (
        lambda: setattr(TieredKVSettings(), "tiers", [f"redis://:{PASSWORD}@h"]),
        "tiers: settings are frozen: make others",
    ),
    "the whole as a dict": (
        lambda: TieredKVSettings.model_validate({"tiers": [f"redis://:{PASSWORD}@"]}),
        "tiers[0].url: must name a host",
    ),
    "a name that is none": (lambda: CacheLimits.model_validate({5: PASSWORD}), "the names of settings are strings"),
    "a name in a table that is none": (
        lambda: TieredKVSettings(limits={5: PASSWORD}),  # type: ignore[dict-item]  # as YAML has it
        "limits: the names of settings are strings",
    ),
    "a name below a tier that is none": (
        lambda: TieredKVSettings(tiers=[{"medium": "nvme", "path": "/x", "encryption": {5: PASSWORD}}]),
        "tiers[0].encryption: the names of settings are strings",
    ),
    "several": (lambda: CacheLimits(window=0, low_water=7), "window: must be positive, got 0; low_water: "),
}


@pytest.mark.parametrize("wrong", DIRECT)
def test_a_model_made_directly_says_the_same(wrong: str) -> None:
    """Each model refuses by itself what cannot work, in our words, and with no secret in the error or its causes."""
    make, said = DIRECT[wrong]
    with pytest.raises(ConfigurationError) as caught:
        make()
    assert said in str(caught.value)
    assert caught.value.__cause__ is caught.value.__context__ is None
    assert PASSWORD not in "".join(traceback.format_exception(caught.value))
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_model_of_another_author_says_the_same(fake_media: None) -> None:
    """It need only derive from `TierSettings`."""
    settings = resolve("server").Settings
    for wrong in ({"passwrd": PASSWORD}, {"password": [PASSWORD]}, {"retries": None}):
        with pytest.raises(ConfigurationError) as caught:
            settings(url=PASSWORD, **wrong)
        assert PASSWORD not in f"{caught.value!r}"


def test_settings_are_values() -> None:
    """They cannot be changed, cross processes, and can be made again from their dump."""
    settings = TieredKVSettings(tiers=["cpu://?capacity=2GiB", "memory://?capacity=1GiB"])
    with pytest.raises(ConfigurationError, match="frozen"):
        settings.limits = CacheLimits()  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(settings)) == settings
    assert TieredKVSettings(**settings.model_dump()) == settings
