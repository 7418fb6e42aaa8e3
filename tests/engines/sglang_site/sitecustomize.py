"""Has every process of SGLang begin with the stub: its folder is put into ``PYTHONPATH`` for them."""

import sglang_stub  # noqa: F401 - what it does is done by importing it
