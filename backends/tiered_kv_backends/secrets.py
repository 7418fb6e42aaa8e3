"""Taking secrets out of what servers say: some repeat in an error what they were sent."""

from collections.abc import Iterator, Sequence

_SHORTEST = 4
"""Of a secret, the shortest beginning that is taken out: servers cut long words."""


def scrubbed(text: str, secrets: Sequence[str]) -> str:
    """Return the text with every secret in it, or the longest beginning of one, replaced by ``***``."""
    for secret in secrets:
        for length in range(len(secret), min(_SHORTEST, len(secret)) - 1, -1):
            if length and secret[:length] in text:
                text = text.replace(secret[:length], "***")
                break
    return text


def scrub(error: BaseException, secrets: Sequence[str]) -> None:
    """Take the secrets out of an error and of all that it came from, as a traceback shows them."""
    for each in all_causes(error):
        each.args = tuple(scrubbed(part, secrets) if isinstance(part, str) else part for part in each.args)


def all_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, what it came from, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
