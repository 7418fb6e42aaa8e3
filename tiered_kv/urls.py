"""Taking the URLs of tiers apart. They may hold passwords, so no error shows any of what may be one."""

from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from tiered_kv.errors import ConfigurationError


def split_url(url: str) -> SplitResult:
    """Take a URL apart.

    Raises:
        ConfigurationError: It is none.
    """
    try:
        return urlsplit(url)
    except ValueError:
        pass  # nothing is raised in here: its context would be an error that shows the URL
    raise ConfigurationError("this URL cannot be read: percent-encode what is special in a user's name or password")


def split_tier_url(url: str) -> tuple[SplitResult, list[tuple[str, str]]]:
    """Take a tier's URL apart, with the names and values of its query.

    Raises:
        ConfigurationError: It is none.
    """
    parts = split_url(url)
    if not parts.scheme or "://" not in url:
        raise ConfigurationError("a tier's URL looks like 'cpu://?capacity=32GiB' or 'file:///mnt/kv?capacity=1TiB'")
    return parts, parse_qsl(parts.query, keep_blank_values=True)


def path_of(parts: SplitResult) -> str:
    """Return the path that a URL names, of the home directory too: ``file://~/kv``.

    Raises:
        ConfigurationError: It names a host, or has lost a slash.
    """
    path = unquote(parts.path)
    if parts.netloc == "~":
        return "~" + path
    if parts.netloc:
        place = "/mnt/kv" if "@" in parts.netloc else f"/{parts.netloc}{parts.path}"
        raise ConfigurationError(f"three slashes begin a path: write {parts.scheme}://{place}")
    return path[1:] if path.startswith("/~/") else path
