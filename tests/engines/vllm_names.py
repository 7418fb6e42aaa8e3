"""Print what vLLM names the blocks of a request by, in hexadecimal: a JSON list of its token ids and its salt."""

import json
import sys

from vllm import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

hashing = get_hash_fn_by_name("sha256")
init_none_hash(hashing)
tokens, salt = json.loads(sys.argv[1])
request = Request(
    request_id="one",
    prompt_token_ids=tokens,
    sampling_params=SamplingParams(max_tokens=1),
    pooling_params=None,
    cache_salt=salt or None,
    block_hasher=get_request_block_hasher(16, hashing),
)
sys.stdout.write(f"{json.dumps([each.hex() for each in request.block_hashes])}\n")
