"""How messages call an S3 store."""

import pytest

pytest.importorskip("obstore", reason="obstore is missing: pip install 'tiered-kv[s3]'")

from tiered_kv_backends.s3.s3_client import S3Settings


@pytest.mark.parametrize(
    ("endpoint", "place"),
    [(None, "s3://bucket/prefix"), ("http://10.0.0.1:9000", "s3://bucket/prefix at http://10.0.0.1:9000")],
)
def test_a_store_is_called_by_its_url_and_where_it_is(endpoint: str | None, place: str) -> None:
    """With an endpoint of one's own two stores may have buckets of the same name."""
    given = {"medium": "s3", "url": "s3://bucket/prefix", "endpoint": endpoint}
    assert S3Settings.model_validate(given).place == place
