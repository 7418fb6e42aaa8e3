import pytest


def test_a_file_s_tests_are_in_one_process(request: pytest.FixtureRequest) -> None:
    """Where several processes test, pytest-xdist keeps to the groups: else each starts every server for a few tests."""
    if not request.config.getoption("loadgroup", default=False):
        pytest.skip("one process tests: run make test")
    assert request.node.nodeid.endswith("@test_one_process")
