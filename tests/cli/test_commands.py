"""The command line, as a shell would call it, on what real caches have stored."""

import asyncio
import errno
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import tiered_kv
from tests.support.caches import keep, open_cache
from tests.support.engine import BLOCK_SIZE, MODEL, PAYLOAD_BYTES, Engine, prompt
from tiered_kv import ConfigurationError, CPUTier, TieredKV, TieredKVSettings, hash_blocks
from tiered_kv.cli.app import app

CPU = CPUTier(capacity=16 * PAYLOAD_BYTES)
NUM_BLOCKS = 6


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [name for name in os.environ if name.startswith("TIERED_KV_")]:
        monkeypatch.delenv(variable)


def run(*arguments: str) -> Result:
    """Call the command line, in a thread: it has an event loop of its own."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(CliRunner().invoke, app, arguments).result()


def answer(*arguments: str, code: int = 0) -> Any:  # noqa: ANN401 - what JSON is
    """Call it with ``--json`` and return what it says."""
    result = run(*arguments, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


@pytest.fixture(params=["nvme", "shared_fs"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """Return a tier of a directory."""
    return {"medium": request.param, "path": str(tmp_path / "kv"), "capacity": "16MiB"}


@asynccontextmanager
async def filled(tier: Mapping[str, Any]) -> AsyncIterator[TieredKV]:
    """Store a prompt there."""
    engine = Engine()
    async with open_cache(CPU, tier, engine=engine) as kv:
        await keep(kv, engine, prompt(NUM_BLOCKS))
        yield kv


def break_one(path: Path) -> None:
    """Change one byte of the payload of one record."""
    file = next(each for each in sorted(path.rglob("*")) if each.is_file() and b"TIEREDKV" in each.read_bytes())
    data = bytearray(file.read_bytes())
    data[data.index(b"TIEREDKV") + 5000] ^= 1
    file.write_bytes(data)


async def test_inspect_counts_what_lies_there(tier: dict[str, Any]) -> None:
    """By model, epoch and tenant, of a path or a URL; while a cache has it open, too."""
    async with filled(tier):
        pass
    (shelf,) = answer("inspect", tier["path"])
    assert shelf["num_blocks"] == NUM_BLOCKS
    assert shelf["num_bytes"] >= NUM_BLOCKS * PAYLOAD_BYTES
    assert shelf["tenant"] == "none"
    assert len(shelf["model"]) == 64
    scheme = {"nvme": "file", "shared_fs": "shared-fs"}[tier["medium"]]
    url = f"{scheme}://{tier['path']}?capacity=16MiB"
    assert answer("inspect", url)[0]["num_blocks"] == NUM_BLOCKS
    assert f"{NUM_BLOCKS}" in run("inspect", tier["path"]).stdout


async def test_digests_lead_back_to_names(tier: dict[str, Any]) -> None:
    """Of the tenants and weights that are asked for, as inspect and a running cache show them."""
    engine = Engine()
    async with open_cache(CPU, tier, engine=engine) as kv:
        await keep(kv, engine, hash_blocks(range(BLOCK_SIZE), block_size=BLOCK_SIZE, salt="tenant-b"))
    (shelf,) = answer("inspect", tier["path"])
    found = answer("digest", "--salt", "tenant-a", "--salt", "tenant-b", "--weights", MODEL.weights)
    named = {each["digest"]: each["name"] for each in found}
    assert [name for digest, name in named.items() if digest.startswith(shelf["tenant"])] == ["tenant-b"]
    assert [name for digest, name in named.items() if digest.startswith(shelf["epoch"])] == [MODEL.weights]
    assert "say of what" in run("digest").stderr


def test_digests_are_as_a_tier_with_keys_hides_them(tmp_path: Path) -> None:
    """Where the tier is named: others are of use to nobody there."""
    file = tmp_path / "kv.toml"
    tier = f'[[tiers]]\nmedium = "shared_fs"\npath = "{tmp_path}/kv"\ncapacity = "1MiB"\n'
    file.write_text(f'{tier}encryption = {{ keys = ["{"ab" * 32}"] }}\n')
    plain, hidden = (answer("digest", *where, "--salt", "a") for where in ((), ("shared_fs", "--config", str(file))))
    assert plain[0]["digest"] != hidden[0]["digest"]


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_what_no_tier_has_used_is_not_looked_at(tmp_path: Path, command: str) -> None:
    """A wrong path is no empty tier: it says so, and exits 2."""
    (tmp_path / "notes.txt").write_text("of somebody else's")
    result = run(command, str(tmp_path))
    assert result.exit_code == 2
    assert "no nvme or shared_fs tier has used" in result.stderr


async def test_an_empty_tier_is_one(tier: dict[str, Any]) -> None:
    """Of which nothing is shown."""
    async with open_cache(CPU, tier):
        pass
    assert answer("inspect", tier["path"]) == []


def test_help_shows_every_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those in brackets, which are a file's tables and no markup."""
    monkeypatch.setenv("COLUMNS", "200")
    assert "[host] socket" in run("serve", "--help").output
    assert "[[media]]" in run("plan", "--help").output


def test_help_imports_no_command() -> None:
    """It tells what each is for from its text: to import them all takes seconds."""
    program = "import sys; from tiered_kv.cli import main\ntry: main()\nfinally: print('torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", program, "--help"], capture_output=True, text=True, check=True).stdout
    assert "Watch a running cache." in shown
    assert shown.endswith("False\n")


def test_it_says_its_version() -> None:
    """As the package has it."""
    assert run("--version").output == f"tiered-kv {tiered_kv.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--nonsense",), "--nonsense"),
        (("nonsense",), "nonsense"),
        (("status", "--nonsense"), "--nonsense"),
        (("status", "--at"), "--at"),
        (("top", "--every", "a while"), "--every"),
        (("top", "--every", "0"), "0.2"),
        (("explain", "a", "b"), "(b)"),
        (("plan",), "TRACE"),
    ],
)
def test_a_call_that_cannot_be_is_said_in_one_line(arguments: tuple[str, ...], why: str) -> None:
    """As every other error is, so that a log or a probe that shows one line shows all; exit code 2."""
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("tiered-kv: ")
    assert why in result.stderr
    assert result.stderr.count("\n") == 1


def test_it_suggests_what_was_meant() -> None:
    """Where a command is nearly right."""
    result = run("doctr")
    assert result.exit_code == 2
    assert "Did you mean 'doctor'?" in result.output


def test_a_shell_completes_commands_and_options() -> None:
    """As Typer's script for it asks."""
    environment = {"_TIERED_KV_COMPLETE": "complete_bash", "COMP_CWORD": "1"}
    program = "from tiered_kv.cli import main; main()"
    asked = [sys.executable, "-c", program]
    for words, number, found in (("tiered-kv re", "1", "replay"), ("tiered-kv status --jso", "2", "--json")):
        said = subprocess.run(
            asked,
            env={**os.environ, **environment, "COMP_WORDS": words, "COMP_CWORD": number},
            capture_output=True,
            text=True,
            check=False,
        ).stdout
        assert said.split() == [found]


async def test_verify_finds_what_is_broken_and_fix_deletes_it(tier: dict[str, Any]) -> None:
    """Every byte is looked at. What was deleted is a miss to the next cache, and all else is there."""
    async with filled(tier):
        pass
    assert answer("verify", tier["path"])["num_good"] == NUM_BLOCKS
    break_one(Path(tier["path"]))
    report = answer("verify", tier["path"], code=1)
    assert (report["num_good"], len(report["broken"])) == (NUM_BLOCKS - 1, 1)
    assert "broken" in run("verify", tier["path"]).stdout
    assert answer("verify", tier["path"], "--fix")["num_fixed"] == 1
    assert answer("verify", tier["path"])["num_good"] == NUM_BLOCKS - 1
    async with open_cache(CPU, tier, engine=Engine()) as kv:
        found = [bool(each.in_tiers) for each in await kv.explain(prompt(NUM_BLOCKS), ask=True)]
        assert found.count(False) == 1


async def test_fix_leaves_an_open_nvme_tier_alone(tmp_path: Path) -> None:
    """A cache has its books of it: the command says so, and changes nothing."""
    tier = {"medium": "nvme", "path": str(tmp_path / "kv"), "capacity": "16MiB"}
    async with filled(tier):
        result = run("verify", tier["path"], "--fix")
        assert result.exit_code == 2
        assert "close that first" in result.stderr


@pytest.mark.parametrize(
    ("stdout", "code", "said"),
    [(">/dev/full", 2, "tiered-kv: stdout: No space left on device\n"), (">&-", 0, "")],
)
def test_an_answer_that_cannot_be_shown_is_said_in_one_line(stdout: str, code: int, said: str) -> None:
    """Where stdout takes nothing; one that is closed is not to be shown anything."""
    asked = ["sh", "-c", f'"$0" -m tiered_kv config --json {stdout}', sys.executable]
    result = subprocess.run(asked, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (code, said)


def test_a_stdin_that_is_closed_is_empty() -> None:
    """So that what is missing is said."""
    asked = ["sh", "-c", '"$0" -m tiered_kv explain - <&-', sys.executable]
    result = subprocess.run(asked, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith("tiered-kv: - is no JSON")


@pytest.mark.parametrize("where", ["/no/such/folder", "s3://bucket/prefix", "gpu://?capacity=1GiB"])
def test_errors_are_one_line_with_a_remedy(where: str) -> None:
    """No traceback, exit code 2."""
    result = run("inspect", where)
    assert result.exit_code == 2
    assert result.stderr.startswith("tiered-kv: ")
    assert result.stderr.count("\n") == 1


def test_config_says_where_each_setting_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a variable, the file or the default, and secrets are stars."""
    file = tmp_path / "kv.toml"
    tier = '[[tiers]]\nmedium = "redis"\nurl = "rediss://u:gehe%40im@host:7000/2"\n'
    file.write_text(f'codec = "fp8"\n{tier}[limits]\nwindow = "8MiB"\n')
    monkeypatch.setenv("TIERED_KV_LIMITS__LOAD_TIMEOUT_S", "7")
    keys = {each["key"]: each for each in answer("config", "--config", str(file))}
    assert keys["codec"] == {"key": "codec", "value": '"fp8"', "source": str(file)}
    assert keys["limits.window"]["source"] == str(file)
    assert keys["limits.load_timeout_s"]["value"] == "7.0"
    assert keys["limits.load_timeout_s"]["source"] == "TIERED_KV_LIMITS__LOAD_TIMEOUT_S"
    assert keys["limits.bounce"]["source"] == keys["metrics"]["source"] == "default"
    assert json.loads(keys["tiers[0]"]["value"]) == {"medium": "redis", "url": "rediss://***@host:7000/2"}
    assert "gehe" not in run("config", "--config", str(file)).stdout + json.dumps(keys)
    file.write_text('tiers = ["redis://host,[::1]:7001?cluster=true"]')
    shown = {each["key"]: each["value"] for each in answer("config", "--config", str(file))}
    assert json.loads(shown["tiers[0]"])["url"] == "redis://host,[::1]:7001"


def test_what_vllm_is_given_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tiers, limits and codec, which go before the environment; what is the connector's own is told."""
    file, limits = tmp_path / "kv.json", {"load_timeout_s": 5}
    extra = {"tiers": [f"file://{tmp_path}/kv-{{dp_rank}}?capacity=4MiB"], "limits": limits, "store_when": "evicted"}
    file.write_text(json.dumps({"kv_connector": "TieredKVConnector", "kv_connector_extra_config": extra}))
    monkeypatch.setenv("TIERED_KV_LIMITS__LOAD_TIMEOUT_S", "7")
    monkeypatch.setenv("TIERED_KV_LIMITS__WINDOW", "8MiB")
    keys = {each["key"]: each for each in answer("config", "--config", str(file))}
    assert json.loads(keys["tiers[0]"]["value"])["path"] == f"{tmp_path}/kv-0"
    assert keys["limits.load_timeout_s"] == {"key": "limits.load_timeout_s", "value": "5.0", "source": str(file)}
    assert keys["limits.window"]["source"] == "TIERED_KV_LIMITS__WINDOW"
    result = run("doctor", "--config", str(file))
    assert (result.exit_code, "nvme" in result.stdout) == (0, True), result.output
    assert "store_when: for the adapter alone to read" in result.stderr


def test_what_is_below_vllms_own_tier_is_read(tmp_path: Path) -> None:
    """Of vLLM's secondary tiers the one that is ours."""
    file, ours = tmp_path / "kv.json", {"type": "TieredKVTier", "tiers": [f"file://{tmp_path}/kv?capacity=4MiB"]}
    extra = {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [{"type": "fs"}, ours]}
    file.write_text(json.dumps({"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra}))
    keys = {each["key"]: each for each in answer("config", "--config", str(file))}
    assert json.loads(keys["tiers[0]"]["value"])["medium"] == "nvme"


def test_what_sglang_is_given_is_read(tmp_path: Path) -> None:
    """All settings in its key ``tiered_kv``, for the first rank; what is the adapter's own is told."""
    file = tmp_path / "kv.json"
    ours = {"tiers": [f"file://{tmp_path}/{{rank}}?capacity=4MiB"], "prefill_tokens_per_s": 900, "weights": "v1"}
    file.write_text(json.dumps({"backend_name": "tiered_kv", "interface_v1": 1, "tiered_kv": ours}))
    keys = {each["key"]: each for each in answer("config", "--config", str(file))}
    assert json.loads(keys["tiers[0]"]["value"])["path"] == f"{tmp_path}/0-0-0-0"
    assert (keys["prefill_tokens_per_s"]["value"], keys["prefill_tokens_per_s"]["source"]) == ("900.0", str(file))
    result = run("doctor", "--config", str(file))
    assert (result.exit_code, "weights: for the adapter alone to read" in result.stderr) == (0, True), result.output
    file.write_text(json.dumps({"backend_name": "tiered_kv", "interface_v1": 1, "tiered_kv": None}))
    assert {each["source"] for each in answer("config", "--config", str(file))} == {"default"}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"tiers": []}', 'JSON is read as an engine\'s adapter has it: {"kv_connector_extra_config"'),
        ('{"kv_connector_extra_config": 3}', "as an engine's adapter has it"),
        ('{"kv_connector_extra_config": {"secondary_tiers": [3]}}', "as an engine's adapter has it"),
        ('{"tiered_kv": 3}', '{"tiered_kv": {"tiers": [...]}} of SGLang'),
        ('{"tiered_kv": {"connect": "unix:///run/kv.sock"}}', "the file `serve` has"),
        ('{"tiered_kv": {"teirs": []}}', "teirs"),
        ("[", "as an engine's adapter has it"),
        ('{"kv_connector_extra_config": {"connect": "unix:///run/kv.sock"}}', "the file `serve` has"),
        ('{"kv_connector_extra_config": {"tiers": ["ssd://"]}}', "no medium takes URLs of ssd://: did you mean"),
    ],
)
def test_what_an_engine_would_refuse_is_refused(tmp_path: Path, text: str, why: str) -> None:
    """In one line; so is what another program is to be asked about."""
    file = tmp_path / "kv.json"
    file.write_text(text)
    result = run("doctor", "--config", str(file))
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert why in result.stderr


def test_config_reads_what_the_library_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that the environment leaves to its defaults, and a file in UTF-8, whatever the locale."""
    monkeypatch.setenv("TIERED_KV_LIMITS", "null")
    assert {each["source"] for each in answer("config") if each["key"] == "limits.promote"} == {"default"}
    file = tmp_path / "kv.toml"
    file.write_text("# für alle\nmetrics = true\n", encoding="utf-8")
    asked = [sys.executable, "-m", "tiered_kv", "config", "--config", str(file)]
    plain = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    assert "metrics" in subprocess.run(asked, env=plain, capture_output=True, text=True, check=True).stdout


def test_config_lists_every_key_and_the_schema() -> None:
    """One table of all keys, with defaults and variables; and what an editor checks a file by."""
    keys = {each["key"]: each for each in answer("config", "--keys")}
    assert keys["limits.promote"] == {
        "key": "limits.promote",
        "value": "true",
        "source": "TIERED_KV_LIMITS__PROMOTE",
    }
    assert {"nvme: path", "s3: url", "cpu: capacity"} <= keys.keys()
    schema = json.loads(run("config", "--schema").stdout)
    assert set(schema["settings"]["properties"]) == set(TieredKVSettings.model_fields)
    assert "capacity" in schema["tiers"]["nvme"]["properties"]
    assert "leave one out" in run("config", "--keys", "--schema").stderr


def test_wrong_settings_are_said_as_the_library_says_them(tmp_path: Path) -> None:
    """Exit code 2, and what to write, of all that is wrong in one line."""
    file = tmp_path / "kv.toml"
    file.write_text("[limits]\nwindw = 3\nload_timeout_s = inf\n")
    result = run("config", "--config", str(file))
    assert result.exit_code == 2
    assert "window" in result.stderr
    assert "; limits." in result.stderr
    assert result.stderr.count("\n") == 1


def test_each_directory_of_a_tier_is_looked_at(tmp_path: Path) -> None:
    """By `doctor` all of them; `inspect` and its like take one, and say so."""
    file = tmp_path / "kv.toml"
    file.write_text(f'[[tiers]]\nmedium = "nvme"\npath = ["{tmp_path}/a", "{tmp_path}/b"]\ncapacity = "1MiB"\n')
    found = {each["what"]: each for each in answer("doctor", "--config", str(file))}
    assert {f"nvme: {tmp_path}/a", f"nvme: {tmp_path}/b"} <= found.keys()
    refused = run("inspect", "nvme", "--config", str(file))
    assert refused.exit_code
    assert f"{tmp_path}/b" in refused.stderr.replace("\n", "")


def test_doctor_looks_at_what_a_server_would_need(tmp_path: Path) -> None:
    """Where ``[host]`` is given: whether one could listen there with these tiers. Clients find no trace of it."""
    file, cpu = tmp_path / "kv.toml", '[[tiers]]\nmedium = "cpu"\ncapacity = "1MiB"\n'

    def found(of_host: str, code: int = 0) -> dict[str, str]:
        file.write_text(f"{cpu}[host]\n{of_host}\n")
        what = f"server at {of_host.splitlines()[0].split(chr(34))[1]}"
        findings: list[dict[str, str]] = answer("doctor", "--config", str(file), code=code)
        return next(each for each in findings if each["what"] == what)

    well = f'socket = "{tmp_path}/kv.sock"'
    assert found(well)["state"] == "ok"
    assert not (tmp_path / "kv.sock").exists()
    assert "make it first" in found(f'socket = "{tmp_path}/none/kv.sock"', 1)["advice"]
    assert "no tier 'nvme'" in str(found(f'{well}\nfixed = {{ "llama" = {{ "nvme" = "1MiB" }} }}', 1))
    assert "no group 'nobody-has-this'" in str(found(f'{well}\ngroup = "nobody-has-this"', 1))
    (disk := tmp_path / "disk").mkdir(mode=0o700)
    cpu += f'[[tiers]]\nmedium = "nvme"\npath = "{disk}"\ncapacity = "1MiB"\n'
    assert found(well)["state"] == "ok"
    (disk / "holder").touch(0o600)
    assert f"{disk} has the blocks of a cache that is no server's" in found(well, 1)["found"]


def test_doctor_tries_each_tier(tmp_path: Path) -> None:
    """A shared tier is used, an owned one looked at; nothing is left behind, and what cannot work exits 1."""
    file = tmp_path / "kv.toml"
    tiers = [
        {"medium": "cpu", "capacity": "1MiB"},
        {"medium": "nvme", "path": str(tmp_path / "disk"), "capacity": "1MiB"},
        {"medium": "shared_fs", "path": str(tmp_path / "shared"), "capacity": "1MiB"},
    ]
    lines = ["[[tiers]]\n" + "".join(f'{key} = "{value}"\n' for key, value in tier.items()) for tier in tiers]
    file.write_text("".join(lines))
    found = {each["what"]: each for each in answer("doctor", "--config", str(file))}
    assert found["shared_fs"]["state"] == "ok"
    assert "a block was stored" in found["shared_fs"]["found"]
    assert found["nvme"]["state"] == "ok"
    assert not (tmp_path / "disk").exists()
    assert answer("inspect", str(tmp_path / "shared")) == []
    assert "host memory" in run("doctor", "--config", str(file)).stdout
    in_memory = "".join(lines).replace(str(tmp_path / "disk"), f"/dev/shm/{tmp_path.name}")  # noqa: S108 - never made
    file.write_text(in_memory)
    found = {each["what"]: each for each in answer("doctor", "--config", str(file))}
    assert found["nvme: medium"]["state"] == "slow"
    file.write_text("".join(lines).replace('"1MiB"', '"900PiB"'))
    found = {each["what"]: each for each in answer("doctor", "--config", str(file), code=1)}
    assert found["nvme"]["state"] == "bad"
    assert found["nvme"]["advice"]


def test_doctor_refuses_what_a_disk_tier_would(tmp_path: Path) -> None:
    """A file, a link that leads nowhere, a directory that others may write to, keys that cannot be read."""
    file, kv = tmp_path / "kv.toml", tmp_path / "kv"
    (tmp_path / "keys").write_text("a passphrase\n")

    def found(path: Path, more: str = "") -> tuple[str, str]:
        file.write_text(f'[[tiers]]\nmedium = "nvme"\npath = "{path}"\ncapacity = "1MiB"\n{more}\n')
        assert not opens(file)
        bad: list[dict[str, str]] = [
            each for each in answer("doctor", "--config", str(file), code=1) if each["state"] == "bad"
        ]
        return bad[0]["found"], bad[0]["advice"]

    assert found(file) == (f"{file} is no directory", "choose another path")
    assert found(file / "kv") == (f"{file} is no directory", "choose another path")
    kv.symlink_to("gone")
    away = (f"{kv} is a link that leads nowhere", "mount what it leads to, or choose another path")
    assert found(kv) == found(kv / "more") == away
    kv.unlink()
    kv.mkdir()
    kv.chmod(0o777)
    assert found(kv) == (f"{kv} has mode 0777: others may write to it", f"chmod go-w {kv}")
    kv.chmod(0o700)
    assert "random bytes" in found(kv, f'encryption = "{tmp_path}/keys"')[0]
    assert "cannot be read" in found(kv, f'encryption = "{tmp_path}/none"')[0]
    if os.geteuid() == 0:
        os.chown(kv, 12345, 12345)
        assert "belongs to user 12345" in found(kv)[0]


@pytest.mark.parametrize(("used", "asked"), [("kv", "kv/sub"), ("kv/sub", "kv")])
def test_doctor_refuses_a_directory_at_another_tier_s(tmp_path: Path, used: str, asked: str) -> None:
    """As opening does, without advice to delete what no tier has made; a server's is above those of its models."""
    file = tmp_path / "kv.toml"

    def settings_at(path: str) -> str:
        return f'[[tiers]]\nmedium = "nvme"\npath = "{tmp_path / path}"\ncapacity = "1MiB"\ndirect = "never"\n'

    file.write_text(settings_at(used))
    assert opens(file)
    file.write_text(settings_at(asked))
    assert not opens(file)
    before = sorted(tmp_path.rglob("*"))
    (bad,) = (each for each in answer("doctor", "--config", str(file), code=1) if each["state"] == "bad")
    assert bad["what"] == "nvme"
    assert f"{tmp_path / asked} is " in bad["found"]
    assert f" {tmp_path / used}, which is an NVMe tier's too" in bad["found"]
    assert "delete what it has made there and nothing else (holder, member, " in bad["advice"]
    assert sorted(tmp_path.rglob("*")) == before
    cpu, socket = '[[tiers]]\nmedium = "cpu"\ncapacity = "1MiB"\n', f'[host]\nsocket = "{tmp_path}/s"\n'
    file.write_text(f"{cpu}{settings_at('kv/sub/more')}{socket}")
    assert "nvme" in {each["what"] for each in answer("doctor", "--config", str(file)) if each["state"] == "ok"}


def test_doctor_refuses_a_directory_of_the_other_kind(tmp_path: Path) -> None:
    """That of a shared_fs tier, which keeps its mark in it."""
    file = tmp_path / "kv.toml"
    (tmp_path / "sweeper.lock").touch()
    file.write_text(f'[[tiers]]\nmedium = "nvme"\npath = "{tmp_path}"\ncapacity = "1MiB"\ndirect = "never"\n')
    assert not opens(file)
    (bad,) = (each for each in answer("doctor", "--config", str(file), code=1) if each["state"] == "bad")
    assert (bad["what"], bad["advice"]) == ("nvme", "each needs a directory of its own")


@pytest.mark.parametrize(("direct", "state"), [("always", "bad"), ("auto", "slow"), ("never", "ok")])
def test_doctor_refuses_a_disk_without_the_direct_io_that_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: str, state: str
) -> None:
    """A cache would not open on it; without it one is slow, unless nobody wants it."""
    file, open_file = tmp_path / "kv.toml", os.open

    def refuses(name: str, flags: int, *args: int, **kwargs: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return open_file(name, flags, *args, **kwargs)

    lines = 'medium = "nvme"', f'path = "{tmp_path}/kv"', 'capacity = "1MiB"', f'direct = "{direct}"'
    file.write_text("\n".join(["[[tiers]]", *lines]))
    monkeypatch.setattr(os, "open", refuses)
    found = {each["what"]: each for each in answer("doctor", "--config", str(file), code=state == "bad")}
    assert found["nvme: direct I/O"]["state"] == state
    assert opens(file) == (state != "bad")


def opens(file: Path) -> bool:
    """Say whether a cache of these settings does."""

    async def tried() -> bool:
        try:
            async with open_cache(*TieredKVSettings.from_toml(file).tiers, engine=Engine()):
                return True
        except ConfigurationError:
            return False

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, tried()).result()
