"""What a backend's settings may be: its model, a dict of fields, or a URL."""

from pathlib import Path
from typing import Any

import pytest

from tiered_kv.settings.chain_settings import tier_from
from tiered_kv.settings.registry import resolve
from tiered_kv.values.errors import ConfigurationError
from tiered_kv_backends.s3 import S3Backend

URLS = {
    "memory": "memory://?capacity=1GiB",
    "nvme": "nvme:///mnt/kv?capacity=1GiB",
    "shared_fs": "shared-fs:///mnt/kv?capacity=1GiB",
    "s3": "s3://bucket/prefix?connections=3",
    "redis": "redis://host:6379/1",
    "mooncake": "mooncake://10.0.0.1:50051",
}


def backend_of(medium: str) -> Any:  # noqa: ANN401 - called with what no type allows
    """Return the class; skips where Mooncake's client cannot be loaded, as without libibverbs."""
    if medium == "mooncake":
        pytest.importorskip("mooncake.store", exc_type=ImportError)
    return resolve(medium)


@pytest.mark.parametrize("medium", URLS)
def test_a_backend_takes_what_a_tier_may_be(medium: str, tmp_path: Path) -> None:
    """Whoever makes a backend, or deletes a tenant, writes settings as in a list of tiers."""
    make, url = backend_of(medium), URLS[medium]
    settings = tier_from(url)
    given = {name: getattr(settings, name) for name in settings.model_fields_set}
    for each in (settings, url, given, {**given, "medium": settings.medium}):
        assert make(each).settings == settings
    with pytest.raises(ConfigurationError, match="a dict of its fields or a URL, not a PosixPath"):
        make(tmp_path)
    with pytest.raises(ConfigurationError, match="these are settings of medium 'gpu', not of"):
        make({"medium": "gpu"})


@pytest.mark.parametrize("url", ["memory:///", "memory:///kv", "file:///mnt/kv", "az://container/kv"])
def test_a_url_is_taken_as_it_is(url: str) -> None:
    """Of any store that S3 settings may name, with a host or without: as in a dict, and with fields after it."""
    for given in (url, {"url": url}, f"{url}?connections=3"):
        assert S3Backend(given).settings.url == url


@pytest.mark.parametrize("url", ["mooncake://me:geheim@10.0.0.1:50051", "mooncake://10.0.0.1:50051?key=geheim"])
def test_a_secret_has_no_place_in_a_url_that_is_shown(url: str) -> None:
    """Mooncake's master knows no passwords: an address with one is refused, and not repeated."""
    with pytest.raises(ConfigurationError, match="write mooncake://host:port of the master") as caught:
        backend_of("mooncake")({"url": url})
    assert "geheim" not in str(caught.value)
