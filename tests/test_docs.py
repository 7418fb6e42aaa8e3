"""The documentation runs: every Python block, every `python` command with its output, every test that is named.

A block with a ``title`` is a file of the reader's; one without is run by the test, together with the others of its page
and with ``await`` allowed, in a scratch directory. Right behind it, a text block is what it prints. Of a console block
the lines behind ``$ python`` or ``$ tiered-kv`` are what that prints. In what is printed, ``...`` is
anything; the log is left out.
"""

import ast
import asyncio
import contextlib
import inspect
import io
import os
import re
import subprocess
import sys
import types
from collections import defaultdict
from dataclasses import fields
from fnmatch import fnmatch
from pathlib import Path

import pytest
from structlog.testing import capture_logs

import tiered_kv
from tests.support import programs
from tiered_kv import CacheLimits, ConfigurationError, StorageTierSettings, TieredKVSettings, TierStatistics
from tiered_kv.catalog.policies import make_policy
from tiered_kv.cli.configuring import all_keys
from tiered_kv.media.record import SEALED_VERSION
from tiered_kv.settings.tier_settings import OwnedTierSettings
from tiered_kv.values.events import Event
from tiered_kv.values.layout import FORMAT_VERSION

REPOSITORY = Path(__file__).parents[1]
DOCS = REPOSITORY / "docs"
PAGES = sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))
BLOCK = re.compile(
    r"^```(?P<language>python|console|toml)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<body>.*?)^```\n"
    r"(?:\n```text\n(?P<output>.*?)^```\n)?",
    re.MULTILINE | re.DOTALL,
)
STARTED_ANEW = ("how-to/custom-backend.md", "how-to/transformers.md")
"""Pages whose programs import much that no other does, or, as pytest, rewrite what they import."""
SNIPPET = re.compile(r"^--8<-- \"(?P<file>[^\"]+)\"\n", re.MULTILINE)
LOGGED = re.compile(r"\blog\(\s*\"\w+\",\s*\"([a-z_]+\.[a-z_]+)\"")
TEST = re.compile(r"`(?P<file>tests/[\w/]+\.py)(?:::(?P<name>\w+))?`")


def blocks_of(page: str) -> list[re.Match[str]]:
    """Return the code blocks of a page in order, those that are files of the repository included."""
    text = SNIPPET.sub(lambda match: (REPOSITORY / match["file"]).read_text(), (DOCS / page).read_text())
    return list(BLOCK.finditer(text))


def commands_of(console: str) -> list[tuple[list[str], str]]:
    """Return each command that starts Python or ours, as arguments of Python, and what it should print."""
    parts = re.split(r"^\$ ", console, flags=re.MULTILINE)[1:]
    lines = [part.partition("\n")[::2] for part in parts]
    commands = [(re.sub("^tiered-kv ", "python -m tiered_kv ", command), output) for command, output in lines]
    return [(command.split()[1:], output) for command, output in commands if command.startswith("python ")]


def assert_prints(printed: str, wanted: str) -> None:
    """Compare, with ``...`` for anything."""
    pattern = ".*".join(re.escape(part) for part in wanted.split("..."))
    assert re.fullmatch(pattern, printed, re.DOTALL), f"printed:\n{printed}\nwanted:\n{wanted}"


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if blocks_of(page)])
def test_what_a_page_shows_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Top to bottom, as a reader would go through it, and it prints what the page says it does."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for variable in [name for name in os.environ if name.startswith("TIERED_KV_")]:
        monkeypatch.delenv(variable)
    space: dict[str, object] = {"__name__": "docs"}
    for block in blocks_of(page):
        language, title, body = block["language"], block["title"], block["body"]
        if title:
            Path(title).write_text(body)
        elif language == "console":
            for arguments, output in commands_of(body):
                may_say_no = arguments[-2:] == ["||", "true"]
                words = arguments[:-2] if may_say_no else arguments
                ran = (_run_anew if page in STARTED_ANEW else programs.run)(*words)
                assert ran.returncode in {0, int(may_say_no)}, ran.stdout + ran.stderr
                assert_prints(ran.stdout, output)
        elif language == "python":
            printed = run(body, space, f"{page}, character {block.start()}")
            if block["output"] is not None:
                assert_prints(printed, block["output"])


def _run_anew(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)


def run(source: str, space: dict[str, object], where: str) -> str:
    """Run a block in the names of those before it; return what it prints."""
    code = compile(source, where, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    with capture_logs(), contextlib.redirect_stdout(io.StringIO()) as printed:
        result = types.FunctionType(code, space)()
        if inspect.iscoroutine(result):
            asyncio.run(result)
    return printed.getvalue()


def test_every_test_that_is_named_exists() -> None:
    """A promise in the documentation points to the test that keeps it."""
    named = [match for page in PAGES for match in TEST.finditer((DOCS / page).read_text())]
    missing = [
        match[0]
        for match in named
        if not (file := REPOSITORY / match["file"]).exists()
        or (match["name"] and not re.search(rf"(def|class) {match['name']}\b", file.read_text()))
    ]
    assert named
    assert not missing


@pytest.mark.parametrize("page", PAGES)
def test_no_line_of_code_is_cut_off(page: str) -> None:
    """On a desk 120 characters of it are seen."""
    fences = re.findall(r"(?ms)^ *```\w.*?^ *```$", (DOCS / page).read_text())
    assert [line for fence in fences for line in fence.splitlines() if len(line) > 120] == []


def test_every_page_is_in_the_navigation() -> None:
    """Nothing is written that nobody finds."""
    navigation = (REPOSITORY / "mkdocs.yml").read_text()
    assert [page for page in PAGES if f" {page}\n" not in navigation] == []


def test_operators_find_every_event_and_number() -> None:
    """Each event, all else that is logged, and each field of a tier's statistics is explained."""
    page = (DOCS / "how-to" / "operate.md").read_text()
    sources = [path.read_text() for root in ("tiered_kv", "backends") for path in (REPOSITORY / root).rglob("*.py")]
    wanted = [event.name for event in Event.__subclasses__()] + [field.name for field in fields(TierStatistics)]
    wanted += [name for source in sources for name in LOGGED.findall(source)]
    assert "host.ready" in wanted
    assert [name for name in wanted if f"`{name}`" not in page] == []


def test_every_policy_is_explained() -> None:
    """In the guide, and where it is set: the names are those that a wrong one is answered with."""
    with pytest.raises(ConfigurationError) as refused:
        make_policy("no such policy", 1)
    names = str(refused.value).removeprefix("policy must be one of ").partition(", or a class")[0].split(", ")
    guide = (DOCS / "how-to" / "choose-a-policy.md").read_text()
    settings = Path(inspect.getfile(StorageTierSettings)).read_text()
    assert [name for name in names if f'| `"{name}"`' not in guide or f'``"{name}"``' not in settings] == []


def test_the_versions_of_records_are_the_codes() -> None:
    """The page on formats names those that are written."""
    assert f"| format version | {FORMAT_VERSION}; {SEALED_VERSION} if " in (DOCS / "format.md").read_text()


def test_the_table_of_settings_is_the_codes() -> None:
    """All keys of every medium, with their defaults: what `config --keys` says, those that tiers share said once."""
    pytest.importorskip("mooncake.store", exc_type=ImportError)  # it says them of media whose clients can be loaded
    of_tiers: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    rows = []
    for each in all_keys():
        medium, _, name = each.key.rpartition(": ")
        if medium:
            of_tiers[name, each.value].append(medium)
        else:
            rows.append(f"| `{each.key}` | `{each.value}` | |")
    everyone = max(of_tiers.values(), key=len)
    storage = [medium for medium in everyone if medium not in {"gpu", "cpu"}]
    for (name, value), media in of_tiers.items():
        whole = {len(everyone): "every tier", len(storage): "every storage tier"}
        of = whole.get(len(media), ", ".join(f"`{medium}`" for medium in media))
        rows.append(f"| `{name}` | `{value}` | {of} |")
    page = (DOCS / "reference" / "settings-table.md").read_text()
    wanted = page.partition("|---|---|---|\n")[0] + "|---|---|---|\n" + "\n".join(rows) + "\n"
    assert page == wanted, f"docs/reference/settings-table.md is to end with:\n{wanted}"


def test_every_limit_says_what_it_trades() -> None:
    """Whoever changes a limit can read what it costs."""
    page = (DOCS / "how-to" / "configure.md").read_text()
    assert [name for name in CacheLimits.model_fields if f"| `{name}` |" not in page] == []


def test_engines_start_without_a_tier_that_is_shared() -> None:
    """Whatever settings the guides to engines show: a server that is away must not keep an engine from starting."""
    pages = ["vllm", "prefill-decode", "sglang", "coming-from"]
    texts = [(DOCS / "how-to" / f"{page}.md").read_text() for page in pages]
    shown = [
        found for text in texts for found in re.findall(r"\"tiers\": (\[.*?\])\s|\btiers=(\[.*?\])", text, re.DOTALL)
    ]
    tiers = [TieredKVSettings(tiers=ast.literal_eval(one or other)).tiers for one, other in shown]
    shared = [
        tier
        for each in tiers
        for tier in each
        if isinstance(tier, StorageTierSettings) and not isinstance(tier, OwnedTierSettings)
    ]
    assert len(shared) >= 2
    assert [tier for tier in shared if tier.required] == []


_LMCACHE = """
audit_actual_remote_url blend_check_layers blend_recompute_ratios blend_special_str blocking_timeout_secs cache_policy
chunk_size controller_url cufile_buffer_size enable_blending enable_controller enable_lazy_memory_allocator
enable_nixl_storage enable_p2p enable_pd external_lookup_client extra_config gds_path histogram_bucket_time_to_store
internal_api_server_enabled internal_api_server_host internal_api_server_include_index_list
internal_api_server_port_start internal_api_server_socket_path_prefix lazy_memory_expand_trigger_ratio
lazy_memory_initial_ratio lazy_memory_safe_size lazy_memory_step_ratio lmcache_instance_id lmcache_worker_port local_cpu
local_disk max_local_cpu_size max_local_disk_size min_retrieve_tokens nixl_backend nixl_backends nixl_path
nixl_pool_size numa_mode p2p_host p2p_socket_recv_timeout_ms p2p_socket_send_timeout_ms pd_buffer_device pd_buffer_size
pd_peer_alloc_port pd_peer_host pd_peer_init_port pd_proxy_host pd_proxy_port pd_role peer_init_ports peer_lookup_ports
plugin_locations pre_caching_hash_algorithm priority_limit py_enable_gc remote_serde remote_url reserve_local_cpu_size
save_decode_cache save_unfull_chunk transfer_channel use_layerwise
"""  # as in its documentation, where the page of ours says
_VLLM_OFFLOADING = """
block_size blocks_per_chunk cache_policy_module_path cpu_bytes_to_use enable_kv_events eviction_policy io_threads
locality max_tracker_size n_read_threads n_write_threads offload_prompt_only prefix root_dir secondary_tiers
self_describing_kv_events store_config store_threshold
"""


def test_who_comes_from_other_caches_finds_every_setting() -> None:
    """Each setting of LMCache and of vLLM's offloading has a row, alone or by a pattern such as ``pd_*``."""
    page = re.sub(r"(?ms)^```.*?^```$", "", (DOCS / "how-to" / "coming-from.md").read_text())
    lmcache, _, rest = page.partition("## From vLLM's own offloading")
    vllm = rest.partition("## From HiCache")[0]
    for names, section in ((_LMCACHE, lmcache), (_VLLM_OFFLOADING, vllm)):
        code = [word for span in re.findall(r"`([^`]+)`", section) for word in re.findall(r"[\w*]+", span)]
        assert [name for name in names.split() if not any(fnmatch(name, each) for each in code)] == []


def test_the_readme_says_which_version_this_is() -> None:
    """And what state that is in: nobody takes it for more."""
    assert f"Version {tiered_kv.__version__}, not released yet, alpha." in (REPOSITORY / "README.md").read_text()
    assert "Development Status :: 3 - Alpha" in (REPOSITORY / "pyproject.toml").read_text()
    assert "## Unreleased" in (REPOSITORY / "CHANGELOG.md").read_text()


def test_the_readmes_figures_are_the_results() -> None:
    """Each row has one figure of ours and one beside it, says which is better, and by what both were measured."""
    text = (REPOSITORY / "README.md").read_text()
    results = (REPOSITORY / "benchmarks" / "RESULTS.md").read_text()
    section = text.partition("## What was measured\n")[2].partition("\n## ")[0]
    rows = [row.strip("| ").split(" | ") for row in section.splitlines() if row.startswith("| ")][1:]
    assert len(rows) > 10
    for _, ours, beside, verdict, command in rows:
        figures = [re.findall(r"(?<![\w.])\d[\d.,]*(?= |$)", each) for each in (ours, beside.partition(" vLLM")[0])]
        assert len(figures[0]) == 1
        assert len(figures[1]) <= 1
        assert verdict in {"better", "**worse**"}
        program = command.strip("`").split()[0]
        assert program == "make" or (REPOSITORY / program).exists()
        if program != "make":  # the demo prints its own
            found = [re.search(rf"(?<![\d.]){re.escape(each)}(?!\.?\d)", results) for each in figures[0] + figures[1]]
            assert all(found), (ours, beside)


@pytest.mark.parametrize("page", PAGES)
def test_powers_are_code(page: str) -> None:
    """Two bare ``2**30`` in a paragraph are bold text for Markdown, without their stars."""
    prose = re.sub(r"```.*?```|``.*?``|`[^`]*`", "", (DOCS / page).read_text(), flags=re.DOTALL)
    assert not re.findall(r".*\d\*\*\d.*", prose)
