"""What the client of an object store is told: how long each request may take, and how often it is tried."""

from pathlib import Path
from typing import Any, cast

import pytest

from tiered_kv.values.errors import BackendUnavailableError, ConfigurationError

pytest.importorskip("obstore", reason="obstore is missing: pip install 'tiered-kv[s3]'")

from obstore.exceptions import GenericError, PermissionDeniedError

from tiered_kv_backends.s3 import S3Backend, collect_epochs
from tiered_kv_backends.s3.s3_client import S3Settings, make_store, translate, translate_opening

AZURE = {"account_name": "mine", "account_key": "a2V5"}


def made(*, is_probe: bool = False, **settings: object) -> Any:  # noqa: ANN401 - obstore has a class a medium
    """Return a client of a server that nobody asks."""
    given = {"url": "s3://bucket/prefix", "endpoint": "http://127.0.0.1:9", "timeout_s": 8, **settings}
    return cast("Any", make_store(S3Settings.model_validate(given), is_probe=is_probe))


def test_opening_and_requests_have_their_own_limits() -> None:
    """The one is over within ``connect_timeout_s``, tried once; a request has part of the time, and is repeated."""
    probe, store = made(is_probe=True, connect_timeout_s=1.5), made(connect_timeout_s=1.5)
    assert probe.client_options["timeout"] == probe.client_options["connect_timeout"] == "1s 500ms"
    assert probe.retry_config["max_retries"] == 0
    assert store.client_options["timeout"] == "2s 400ms"
    assert store.client_options["connect_timeout"] == "1s 500ms"
    assert store.retry_config["max_retries"] == 2
    assert store.retry_config["retry_timeout"].total_seconds() == pytest.approx(1.2)
    assert made(connect_timeout_s=5).client_options["connect_timeout"] == "2s 400ms"


def test_bodies_are_signed_where_it_is_asked_for() -> None:
    """By default they are not: records carry checksums of their own."""
    assert made().config["unsigned_payload"] == "true"
    assert made(sign_payload=True).config["unsigned_payload"] == "false"


@pytest.mark.parametrize(("endpoint", "is_allowed"), [("http://127.0.0.1:9", True), ("https://127.0.0.1:9", False)])
def test_nothing_goes_unencrypted_where_it_was_not_asked_for(endpoint: str, *, is_allowed: bool) -> None:
    """Only an endpoint that says http:// has its requests sent so, whatever a server redirects to."""
    assert made(endpoint=endpoint).client_options["allow_http"] == str(is_allowed).lower()


@pytest.mark.parametrize(
    ("url", "option"),
    [("s3://bucket", "endpoint"), ("gs://bucket", "google_base_url"), ("az://bucket", "AZURE_STORAGE_ENDPOINT")],
)
def test_an_endpoint_among_the_options_is_one_too(url: str, option: str) -> None:
    """Each store has its own name for it. One with http:// is asked so, is in messages, and goes before the other."""
    login = AZURE if url == "az://bucket" else {}
    at = {"endpoint": "https://elsewhere"} if url == "s3://bucket" else {}
    settings = S3Settings.of({"url": url, "options": {option: "http://127.0.0.1:9", **login}, **at})
    assert cast("Any", make_store(settings)).client_options["allow_http"] == "true"
    assert settings.place == f"{url} at http://127.0.0.1:9"
    with pytest.raises(ConfigurationError, match=r"options: must be http://host\[:port\] or https://"):
        S3Settings.of({"url": url, "options": {option: "127.0.0.1:9", **login}})


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("s3://bucket", "AWS_ENDPOINT_URL"),
        ("s3://bucket", "AWS_ENDPOINT_URL_S3"),
        ("gs://bucket", "GOOGLE_BASE_URL"),
        ("az://container", "AZURE_STORAGE_ENDPOINT"),
    ],
)
def test_an_endpoint_of_the_environment_is_one_too(monkeypatch: pytest.MonkeyPatch, url: str, name: str) -> None:
    """The client takes it, and would refuse to ask a server without TLS; of another store's it takes nothing."""
    monkeypatch.setenv(name, "http://127.0.0.1:9")
    settings = S3Settings.of({"url": url, "options": AZURE if url == "az://container" else {}})
    assert cast("Any", make_store(settings)).client_options["allow_http"] == "true"
    assert settings.place == f"{url} at http://127.0.0.1:9"
    another = "s3://bucket" if url.startswith("gs") else "gs://bucket"
    assert S3Settings(url=another).place == another


def test_a_secret_in_an_endpoint_of_the_environment_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the settings it is refused; what the client reads by itself it may make of it what it can."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://me:hidden@127.0.0.1:9")
    assert S3Settings(url="s3://bucket").place == "s3://bucket"
    assert S3Settings(url="s3://bucket", endpoint="http://127.0.0.1:9").place == "s3://bucket at http://127.0.0.1:9"


@pytest.mark.parametrize("url", ["s3://bucket", "gs://bucket", "az://bucket"])
def test_an_option_of_the_client_is_named(url: str) -> None:
    """It is not of the store: what the client makes of that is no error of Python's."""
    login = AZURE if url == "az://bucket" else {}
    with pytest.raises(ConfigurationError, match="those of its store, not of its HTTP client: proxy_url"):
        make_store(S3Settings.of({"url": url, "options": {"proxy_url": "http://p", **login}}))


def test_as_many_connections_are_kept_as_may_be_in_use() -> None:
    """In both directions."""
    assert made(connections=5).client_options["pool_max_idle_per_host"] == "10"


def test_an_option_goes_before_what_is_said_otherwise() -> None:
    """Options are obstore's own, for what this tier has no setting for."""
    assert made(options={"virtual_hosted_style_request": "true"}).config["virtual_hosted_style_request"] == "true"
    assert made().config["virtual_hosted_style_request"] == "false"


def test_what_is_not_said_is_as_documented() -> None:
    """Blocks are packed to 4 MiB, and an answer is believed for two seconds."""
    settings = S3Settings(url="s3://bucket")
    assert (settings.pack_bytes, settings.answer_ttl_s) == (4 << 20, 2.0)
    assert (settings.connections, settings.max_retries, settings.create_only) == (32, 2, False)


@pytest.mark.parametrize("endpoint", ["ftp://127.0.0.1", "http://", "127.0.0.1:9000", "https:///bucket"])
def test_an_endpoint_is_a_server_s_address(endpoint: str) -> None:
    """Anything else is refused before the client, whose panic is no error of Python's, is asked."""
    with pytest.raises(ConfigurationError, match="must be http"):
        S3Settings.of({"url": "s3://bucket", "endpoint": endpoint})


def test_a_folder_is_made(tmp_path: Path) -> None:
    """Where objects are files; a store of a process's own memory is private to it, and no other is."""
    make_store(S3Settings(url=f"file://{tmp_path}/a/b"))
    assert (tmp_path / "a" / "b").is_dir()
    assert S3Settings(url="memory:///").is_private is True
    assert S3Settings(url=f"file://{tmp_path}").is_private is False


@pytest.mark.parametrize(
    ("url", "login"),
    [
        ("s3://bucket/kv", "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or"),
        ("gs://bucket/kv", "set GOOGLE_APPLICATION_CREDENTIALS to the file of a service account, or"),
        ("abfss://container@account.dfs.core.windows.net/kv", "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_AC"),
    ],
)
def test_credentials_are_those_of_the_store(url: str, login: str) -> None:
    """Where none are found: what obstore would read of the environment for it."""
    none = GenericError("Error performing GET http://169.254.169.254/token: status code: 403 Forbidden")
    assert login in str(translate_opening(none, S3Settings(url=url)))


@pytest.mark.parametrize(
    ("said", "why", "advice"),
    [
        ("InvalidMessage(\n InvalidContentType,\n)", "the server speaks no TLS", "use http://"),
        ("InvalidCertificate(\n ExpiredContext {\n", "its certificate has expired", "renew it"),
        ("InvalidCertificate(\n NotValidYetContext {\n", "its certificate is not valid yet", "look at the clocks"),
        ("InvalidCertificate(\n NotValidForNameContext {\n", "its certificate is for other hosts", "name one of those"),
        ("InvalidCertificate(\n UnknownIssuer,\n)", "of an unknown authority", "give that authority's as ca_file"),
        (
            "InvalidCertificate(\n Other(\n OtherError(\n CaUsedAsEndEntity,\n",
            "is an authority's own",
            "have that sign",
        ),
        (
            "InvalidCertificate(\n Revoked,\n)",
            "its certificate is not accepted: Revoked",
            "give the server another one",
        ),
    ],
)
def test_why_a_handshake_fails_is_said_with_what_helps(said: str, why: str, advice: str) -> None:
    """What helps where a server has no TLS is wrong where its certificate has expired. A call says why, too."""
    error = GenericError(f"Generic S3 error: Error performing GET\n\nDebug source:\nerror: {said}")
    settings = S3Settings(url="s3://bucket", endpoint="https://127.0.0.1:9")
    opening = translate_opening(error, settings)
    assert isinstance(opening, ConfigurationError)
    assert f"{why}): {advice}" in str(opening)
    assert str(translate(error, "read", settings)).endswith(why)


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        ("status code: 403 Forbidden: <Code>RequestTimeTooSkewed</Code>", "look at the clock of this machine"),
        ("status code: 400 Bad Request: <Code>ExpiredToken</Code>", "give a new session_token"),
        ("status code: 400 Bad Request: <Code>InvalidToken</Code>", "check session_token"),
        ("status code: 400 Bad Request: <Code>AuthorizationHeaderMalformed</Code>", "give the bucket's own region"),
        (
            "Received redirect without LOCATION, this normally indicates an incorrectly configured region",
            "give the bucket's own region",
        ),
    ],
)
def test_keys_that_are_not_taken_for_another_reason_come_with_what_helps(said: str, advice: str) -> None:
    """They never will be: a store that says so is not away, and to look at the keys is of no use."""
    opening = translate_opening(GenericError(f"Generic S3 error: {said}"), S3Settings(url="s3://bucket"))
    assert isinstance(opening, ConfigurationError)
    assert str(opening).startswith("s3://bucket refuses the credentials (")
    assert str(opening).endswith(f"): {advice}")


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("s3://bucket", "(s3:ListBucket)"),
        ("gs://bucket", "(storage.objects.list)"),
        ("az://container", "the role Storage Blob Data Contributor"),
    ],
)
def test_the_right_that_may_be_missing_is_that_of_the_store(url: str, advice: str) -> None:
    """Each has names of its own for it."""
    opening = translate_opening(PermissionDeniedError("status code: 403 Forbidden"), S3Settings(url=url))
    assert advice in str(opening)


def test_the_reason_is_said_however_long_an_object_s_name_is() -> None:
    """Where a store sends us to another region, nothing else says so; the same failure always has the same words."""
    hint = "Received redirect without LOCATION, this normally indicates an incorrectly configured region"
    asked = f"Generic S3 error: Error performing HEAD http://h/b/{'k' * 400}"
    times = "358.34µs", "1.2ms", "118.61ms, after 2 retries, max_retries: 2, retry_timeout: 1.5s "
    errors = [GenericError(f"{asked} in {took} - {hint}\n\nDebug source:") for took in times]
    said = {str(translate(error, "ask", S3Settings(url="s3://bucket"))) for error in errors}
    assert said == {f"ask of s3://bucket: Generic S3 error: {hint}"}


def test_an_account_that_azure_needs_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the variable that names it, or by obstore's own option."""
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(ConfigurationError, match="Account must be specified: set AZURE_STORAGE_ACCOUNT_NAME and "):
        make_store(S3Settings(url="az://container/kv"))
    settings = {"url": "az://container/kv", "options": AZURE}
    assert getattr(make_store(S3Settings.of(settings)), "prefix", None) == "kv"


@pytest.mark.parametrize("url", ["gs://bucket/kv", "az://container/kv"])
def test_what_another_store_would_not_read_is_refused(url: str) -> None:
    """Else the client would go to another place, or ask for credentials that have been given."""
    given = {"url": url, "endpoint": "https://store.example", "access_key_id": "id"}
    with pytest.raises(ConfigurationError, match=r"endpoint, access_key_id: for s3:// alone, .* has options"):
        S3Settings.of(given)


async def test_jobs_say_that_a_store_does_not_answer() -> None:
    """In the cache's own words, as a cache would be told."""
    settings = {"url": "s3://bucket", "endpoint": "http://127.0.0.1:9", "max_retries": 0, "timeout_s": 8}
    keys = {"access_key_id": "id", "secret_access_key": "secret"}
    with pytest.raises(BackendUnavailableError, match=r"list blocks of s3://bucket at http://127.0.0.1:9: "):
        await collect_epochs(settings | keys, keep_weights=[], idle_s=0)
    with pytest.raises(BackendUnavailableError, match="delete a tenant"):
        await S3Backend.delete_tenant(settings | keys, "ann")
