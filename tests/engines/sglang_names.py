"""Print what SGLang's tree names the pages of a prompt by, in hexadecimal: a JSON list of its token ids, by 64."""

import json
import sys
from array import array
from types import SimpleNamespace


def names(tokens: list[int]) -> list[str]:
    """Return the hash of each whole page."""
    from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: PLC0415 - after the stub
    from sglang.srt.mem_cache.utils import compute_node_hash_values  # noqa: PLC0415 - after the stub

    node = SimpleNamespace(parent=None, key=RadixKey(array("q", tokens)).page_aligned(64))
    return [str(each) for each in compute_node_hash_values(node, 64)]


if __name__ == "__main__":
    import sglang_stub  # noqa: F401 - what it does is done by importing it

    sys.stdout.write(f"{json.dumps(names(json.loads(sys.argv[1])))}\n")
