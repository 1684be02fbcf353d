"""A server for the tests of this folder, and a new bucket for each."""

import pytest

from tests.stores import bucket as buckets


@pytest.fixture(scope="session")
def port():
    with buckets.server() as port:
        yield port


@pytest.fixture
def proxy(port):
    """A proxy before the server, at first without trouble."""
    proxy = buckets.Proxy(port)
    yield proxy
    proxy.shutdown()
    proxy.server_close()


@pytest.fixture
def bucket(port, monkeypatch, tmp_path):
    """A new bucket, reached directly."""
    yield buckets.Bucket(port, monkeypatch, tmp_path / "scratch")
    buckets.forget()


@pytest.fixture
def google(port, monkeypatch, tmp_path):
    """A new bucket, reached in Google's protocol."""
    proxy = buckets.Google(port)
    yield buckets.Bucket(port, monkeypatch, tmp_path / "scratch", proxy)
    buckets.forget()
    proxy.shutdown()
    proxy.server_close()


@pytest.fixture
def behind(proxy, monkeypatch, tmp_path):
    """A new bucket, reached through the proxy."""
    yield buckets.Bucket(proxy.server_address[1], monkeypatch, tmp_path / "scratch")
    buckets.forget()
