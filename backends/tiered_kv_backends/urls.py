"""Reading URLs that may hold passwords."""

from urllib.parse import SplitResult, urlsplit


def split_url(url: str) -> SplitResult:
    """Take a URL apart.

    Raises:
        ValueError: It is none; its text, which may hold a password, is not repeated.
    """
    try:
        return urlsplit(url)
    except ValueError:
        pass
    raise ValueError("is no URL: percent-encode what is special in a user's name or password")  # no cause: it shows it
