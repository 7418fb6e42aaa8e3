"""What a package index shows of README.md: hatchling asks this when it builds.

An index has the text alone, and a link to a file beside it would lead to a page of the index that is not there.
"""

import re
from pathlib import Path
from typing import Any, Final

from hatchling.metadata.plugin.interface import MetadataHookInterface

_PICTURE: Final = re.compile(r"(?m)^!\[[^\]]*\]\((?!https?:)[^)]*\)\n\n")
_LINK: Final = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])+)\]\((?!https?:)[^)]*\)")


class PackageReadme(MetadataHookInterface):
    """Gives the package README.md without links and pictures that lead to files of the repository."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set ``readme``, which ``[project]`` calls dynamic."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": _LINK.sub(r"\1", _PICTURE.sub("", text))}
