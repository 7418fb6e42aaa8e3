"""The S3 medium on the stores of other clouds: Azure's by Azurite, Google's by a server of our own."""

from collections.abc import AsyncIterator, Iterator, Mapping

import pytest

pytest.importorskip("obstore", reason="obstore is missing: pip install 'tiered-kv[s3]'")

import obstore
from obstore.store import from_url

from cloud_servers import ACCOUNT_KEY, BUCKET, TOKEN, azurite, google_server
from tiered_kv.media.backend import Outcome
from tiered_kv.testing import GROUPS, BackendTests, make_block, open_backend
from tiered_kv.values.errors import ConfigurationError
from tiered_kv.values.keys import Namespace, epoch_digest, hash_blocks, salt_digest
from tiered_kv.values.specs import LoadStoreSpec, ObjectLoadStoreSpec
from tiered_kv_backends.s3 import S3Backend, collect_epochs

Options = Mapping[str, str]


@pytest.fixture
async def google() -> AsyncIterator[Options]:
    """The options of a tier that finds a server with a bucket."""
    async with google_server() as options:
        yield options


@pytest.fixture(scope="module")
def azure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Options]:
    """Likewise, Azurite."""
    with azurite(tmp_path_factory.mktemp("azurite")) as options:
        yield options


async def records_at(spec: LoadStoreSpec, options: Options) -> list[bytes]:
    """Read what a spec says with a client of our own."""
    assert isinstance(spec, ObjectLoadStoreSpec)
    assert spec.endpoint in options.values()
    store = from_url(spec.url, config=options, client_options={"allow_http": True})  # type: ignore[call-overload]  # its options are of the URL's scheme
    return [bytes(await obstore.get_range_async(store, name, start=at, length=n)) for name, at, n in spec.places()]


class TestOnGoogles(BackendTests):
    capacity_bytes = None  # the bucket's lifecycle rule is its limit
    survives_reopening = True

    @pytest.fixture
    async def backend(self, google: Options) -> AsyncIterator[S3Backend]:
        """One in an empty bucket."""
        self.options = google
        async with open_backend(S3Backend({"url": f"gs://{BUCKET}/kv", "options": google})) as backend:
            yield backend

    async def records_at(self, spec: LoadStoreSpec) -> list[bytes]:
        """Give its options."""
        return await records_at(spec, self.options)


class TestOnAzures(BackendTests):
    capacity_bytes = None  # the bucket's lifecycle rule is its limit
    survives_reopening = True

    @pytest.fixture
    async def backend(self, azure: Options, request: pytest.FixtureRequest) -> AsyncIterator[S3Backend]:
        """One with a prefix of its own."""
        self.options = azure
        url = f"az://{BUCKET}/{request.node.name}"
        async with open_backend(S3Backend({"url": url, "options": azure})) as backend:
            yield backend

    async def records_at(self, spec: LoadStoreSpec) -> list[bytes]:
        """Give its options."""
        return await records_at(spec, self.options)


@pytest.fixture(params=["google", "azure"])
def cloud(request: pytest.FixtureRequest) -> tuple[str, Options]:
    """Yield the scheme of a store and what finds it."""
    options: Options = request.getfixturevalue(request.param)
    return {"google": "gs", "azure": "az"}[request.param], options


async def test_packs_are_evicted_and_found_and_old_epochs_deleted(cloud: tuple[str, Options]) -> None:
    """What is absent, as single blocks of a pack are, hinders no deletion of the rest."""
    scheme, options = cloud
    settings = {"url": f"{scheme}://{BUCKET}/packs", "options": options}
    space = Namespace(GROUPS[0].fingerprint, epoch_digest("w"), salt_digest(b""))
    keys = space.keys(hash_blocks(range(35), block_size=1))
    blocks = [make_block(key.hash * (GROUPS[0].payload_bytes // 32), key) for key in keys]
    async with open_backend(S3Backend(settings)) as backend:
        assert await backend.write(keys, blocks) == [Outcome.STORED] * 35
    async with open_backend(S3Backend(settings)) as backend:
        assert await backend.lookup_prefix(keys) == 35
        assert await backend.delete(keys[:16])
        assert await backend.lookup(keys) == [Outcome.MISS] * 16 + [Outcome.HIT] * 19
    assert await collect_epochs(settings, keep_weights=["w"], idle_s=0) == 0
    assert await collect_epochs(settings, keep_weights=[], idle_s=0) >= 4


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"bearer_token": "hidden", "account_key": "aGlkZGVu"}, "refuses the credentials"),
        ({"url": "absent/kv"}, "there is no bucket of this name"),
    ],
)
async def test_what_cannot_work_is_said_at_open(
    cloud: tuple[str, Options], wrong: Mapping[str, str], said: str
) -> None:
    """By other clouds as by S3, and without secrets."""
    scheme, options = cloud
    changed = {**options, **{name: value for name, value in wrong.items() if name in options}}
    with pytest.raises(ConfigurationError, match=said) as caught:
        async with open_backend(S3Backend({"url": f"{scheme}://{wrong.get('url', BUCKET)}", "options": changed})):
            pass
    assert not any(secret in str(caught.value) for secret in ("hidden", "aGlkZGVu", TOKEN, ACCOUNT_KEY))
