"""Where keys live: the settings of the ``redis`` medium, and the servers they lead to, found by redis-py.

How much redis-py may be told: it keeps whatever a server sends, until a reply is whole.
"""

import asyncio
import math
import socket
import ssl
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple, Self
from urllib.parse import unquote, urlencode, urlsplit, urlunsplit

from pydantic import Field, SecretStr, field_serializer, field_validator, model_validator
from redis.asyncio import Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.connection import Connection, DefaultParser, SSLConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as LostError
from redis.exceptions import RedisClusterException, RedisError, ResponseError

from tiered_kv.settings.tier_settings import StorageTierSettings, split_url
from tiered_kv.values.errors import ConfigurationError
from tiered_kv_backends.connecting import Address, connected
from tiered_kv_backends.paths import scrub
from tiered_kv_backends.redis.resp import Login, Pool, command

MOST_BYTES: Final = 16 << 20
"""Of one reply: a thousand nodes of a cluster say less of themselves."""


class BoundedParser(DefaultParser):  # type: ignore[valid-type,misc]  # a class all the same, of two that it may be
    """Reads replies by hiredis, which comes with the extra, and gives up a connection that says too much."""

    _num_read = 0

    async def read_response(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever redis-py gives and gets
        """Read one reply."""
        self._num_read = 0
        return await super().read_response(*args, **kwargs)

    async def read_from_socket(self) -> bool:
        """Receive what comes next."""
        data = await self._stream.read(self._read_size)
        self._num_read += len(data)
        if not data or self._num_read > MOST_BYTES:
            raise LostError(f"a reply of over {MOST_BYTES} bytes" if data else "the server closed the connection")
        self._reader.feed(data)
        return True


class BoundedConnection(Connection):
    """Reads bounded replies, and goes where `connected` leads: redis-py would look names up in the loop's threads."""

    _there: socket.socket

    def __init__(self, **options: Any) -> None:  # noqa: ANN401 - redis-py's
        super().__init__(**options | {"parser_class": BoundedParser})

    async def _connect(self) -> None:
        async with asyncio.timeout(self.socket_connect_timeout):
            self._there = await connected(Address(self.host, self.port))
            await super()._connect()  # type: ignore[no-untyped-call]  # redis-py's is not

    def _connection_arguments(self) -> dict[str, Any]:
        arguments = {**super()._connection_arguments(), "sock": self._there}
        host, _ = arguments.pop("host"), arguments.pop("port")
        return arguments | ({"server_hostname": host} if "ssl" in arguments else {})


class BoundedTLSConnection(BoundedConnection, SSLConnection):
    """A `BoundedConnection` by TLS."""


_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 3.0
"""For how long a node of a cluster that is away, or did not answer in time, is left alone."""
_TOPOLOGY_SHARE = 0.1
"""Of the time of a call, how long a node or a Sentinel may take to say who holds which keys. Then another is asked."""


MOVING: Final = {"MOVED", "ASK", "TRYAGAIN"}
"""What a node of a cluster answers whose slot is another's, or on its way."""
_MOST_NAMES_TRIED, _OF_ONE_SLOT = 1 << 19, 64
"""To have one of each of 16,384 slots, some 170,000 are needed; a prefix that puts all in one shows that sooner."""


class RedisSettings(StorageTierSettings):
    """``{"medium": "redis", "url": "rediss://cache.example:6379", "username": "kv", "password": "..."}``."""

    medium: str = "redis"
    url: SecretStr = Field(examples=["redis://127.0.0.1:6379"])
    """``redis[s]://[user[:password]@]host[:port][,host[:port]...][/database]``, with TLS if ``rediss``. Several hosts
    are nodes of one cluster, or Sentinels."""
    username: str | None = None
    """ACL user; goes before the URL's, as ``password`` does."""
    password: SecretStr | None = None
    cluster: bool = False
    """Whether the hosts are nodes of a cluster."""
    sentinel_master: str | None = None
    """Makes the hosts Sentinels, and names the master to ask them for."""
    sentinel_username: str | None = None
    sentinel_password: SecretStr | None = None
    ca_file: Path | None = None
    """PEM certificates to trust beside the system's."""
    cert_file: Path | None = None
    """Our own certificate, with or without its key, where servers want one."""
    key_file: Path | None = None
    check_hostname: bool = True
    prefix: str = Field(default="tiered_kv/", min_length=1)
    """Begins every key. An ACL user needs ``~tiered_kv/* +@read +@write``, and in a cluster
    ``+cluster|slots +command +asking``."""
    ttl_s: int | None = Field(default=24 * 3600, gt=0)
    """How long a record lives after it was last stored or loaded, so that those of old weights go by themselves. None,
    or ``"never"``: until the server evicts it."""
    connections: int = Field(default=8, ge=1, le=1024)
    """To each server at most, for bodies; and as many for questions."""
    connect_timeout_s: float = Field(default=5.0, gt=0, allow_inf_nan=False)

    @field_validator("ttl_s", mode="before")
    @classmethod
    def _never_is_none(cls, given: object) -> object:
        return None if given == "never" else given  # a URL and TOML have no None

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: SecretStr) -> SecretStr:
        _Target.of(url)
        return url

    @field_serializer("url", when_used="json")
    def _shown(self, url: SecretStr) -> str:
        """Show where it leads, for people; whoever logs in there, and how, is stars."""
        parts = split_url(url.get_secret_value())
        login, _, hosts = parts.netloc.rpartition("@")
        return urlunsplit(parts._replace(netloc=f"***@{hosts}" if login else hosts))

    @model_validator(mode="after")
    def _check_topology(self) -> Self:
        target = _Target.of(self.url)
        if self.cluster and self.sentinel_master is not None:
            raise ValueError("a cluster has no Sentinels: leave out cluster or sentinel_master")
        if self.cluster and target.database:
            raise ValueError("a cluster has no other database than 0")
        if len(target.hosts) > 1 and not self.cluster and self.sentinel_master is None:
            raise ValueError("several hosts are nodes of a cluster (cluster) or Sentinels (sentinel_master): say which")
        return self


class _Target(NamedTuple):
    """What a URL says."""

    hosts: list[tuple[str, int | None]]
    username: str | None
    password: SecretStr | None
    database: int
    is_tls: bool

    @classmethod
    def of(cls, url: SecretStr) -> "_Target":
        parts = split_url(url.get_secret_value())
        if parts.scheme not in {"redis", "rediss"}:
            raise ValueError("must be redis://host[:port][/database], or rediss:// for TLS")
        if (path := parts.path.strip("/")) and not path.isdigit():
            raise ValueError("must end with the number of a database, or after the host")
        credentials, _, hosts = parts.netloc.rpartition("@")
        username, _, password = map(unquote, credentials.partition(":"))
        try:
            each = [urlsplit(f"//{host}") for host in hosts.split(",")]
            named = [(host.hostname or "", host.port) for host in each]
        except ValueError:
            named = []
        if not named or not all(host for host, _ in named):
            raise ValueError("must name a host, host:port or [address]:port, or several of them, by commas")
        if parts.query or parts.fragment:  # where a part of a password may be, which messages would show
            raise ValueError("ends with the host or database: give other settings beside url; in a password ? is %3F")
        secret = SecretStr(password) if password else None
        return cls(named, username or None, secret, int(path or 0), parts.scheme == "rediss")


@dataclass
class Server:
    """One server that holds keys."""

    address: Address
    client: Redis
    """For what is asked of the server's whole, not of blocks."""
    bodies: Pool
    questions: Pool
    """Apart, so that no question waits for bodies."""
    _pause_s: float = 0.0
    _ask_at: float = 0.0

    def may_be_asked(self, now: float) -> bool:
        """Say whether to ask it; `ended` follows. One that was away is asked again after a pause, by one call."""
        if now < self._ask_at:
            return False
        if self._pause_s:
            self._ask_at = math.inf  # what that call waits for may take longer than any pause
        return True

    def ended(self, now: float) -> None:
        """Who asked has gone, and did not hear that it is well: another may ask after a pause."""
        if self._ask_at == math.inf:
            self._ask_at = now + self._pause_s

    def answered(self) -> None:
        """Take note that the server answers in time."""
        self._pause_s = self._ask_at = 0.0

    def was_away(self, now: float) -> None:
        """Nobody was there, or did not answer in time: leave it alone for a while."""
        self._pause_s = min(max(_FIRST_PAUSE_S, 2 * self._pause_s), _LONGEST_PAUSE_S)
        self._ask_at = now + self._pause_s

    async def count(self, commands: Sequence[bytes]) -> list[int | str]:
        """Ask in one round trip what a number answers; an error of the server is an answer too.

        Raises:
            OSError: The connection is lost.
        """
        async with self.questions.connection() as connection:
            return await connection.count(commands)

    def asking(self) -> "Server":
        """Return the server as it answers for keys of a slot that it is getting, and has not got whole."""
        return replace(self, bodies=self.bodies.asking(), questions=self.questions.asking())

    def drop_idle(self) -> None:
        """Close the connections that nobody uses: the next call makes a new one."""
        self.bodies.drop_idle()
        self.questions.drop_idle()

    async def aclose(self) -> None:
        """Close every connection to it; calls still under way end with an error."""
        self.bodies.close()
        self.questions.close()
        await _close(self.client)


class Servers:
    """The one server, the master that Sentinel names now, or the masters of a cluster and which key is whose."""

    def __init__(self, settings: RedisSettings) -> None:
        """Connect to nothing yet.

        Raises:
            ConfigurationError: A certificate's file cannot be read, or is none.
        """
        self._settings = settings
        self._target = _Target.of(settings.url)
        tls = _tls_context(settings) if self._target.is_tls else None
        username = settings.username or self._target.username
        self._login = Login(username, settings.password or self._target.password, self._target.database, tls)
        self._connection_class = BoundedConnection if tls is None else BoundedTLSConnection
        self._servers: dict[Address, Server] = {}
        self._refresh = asyncio.Lock()
        self._is_known = self._is_closed = False
        port = 6379 if settings.sentinel_master is None else 26379
        self._hosts = [Address(host, given or port) for host, given in self._target.hosts]
        self._cluster = self._make_cluster() if settings.cluster else None
        self._sentinel = self._make_sentinel() if settings.sentinel_master is not None else None

    def __str__(self) -> str:
        kind = "cluster" if self._cluster else "Sentinel" if self._sentinel else "server"
        return f"Redis {kind} at {', '.join(map(str, self._hosts))}"

    @property
    def url(self) -> str:
        """What leads here, as `RedisSettings` take it, without a login: not in it, nor in its query, is a secret."""
        scheme, master = "rediss" if self._target.is_tls else "redis", self._settings.sentinel_master
        fields = {"cluster": "true"} if self._settings.cluster else {"sentinel_master": master} if master else {}
        hosts = ",".join(map(str, self._hosts))
        return urlunsplit((scheme, hosts, f"/{self._target.database}", urlencode(fields), ""))

    async def holding(self, names: Sequence[bytes], which: Sequence[int]) -> list[tuple[Server, list[int]]]:
        """Group the names at positions ``which`` by the servers that hold them. A name that none holds is left out.

        While it is being found out anew who holds which keys, what was known before is said to all but those who doubt.

        Raises:
            OSError: The tier is closed.
            RedisError, RedisClusterException: Nobody who would know could be asked.
        """
        self._check_open()
        if not (self._is_known and self._servers):
            async with self._refresh:
                if not (self._is_known and self._servers):
                    await self._find_out()
        if self._cluster is None:
            return [(server, list(which)) for server in self._servers.values()]
        found: dict[Address, list[int]] = {}
        slots = self._cluster.nodes_manager.slots_cache
        for i in which:
            if nodes := slots.get(self._cluster.keyslot(names[i])):
                found.setdefault(Address(nodes[0].host, int(nodes[0].port)), []).append(i)
        return [(self._servers[address], positions) for address, positions in found.items()]

    def getting(self, answer: str, source: Server) -> Server | None:
        """Return the node that an ASK of ``source`` names: it is getting the slot.

        None but for a node of the cluster that is known already, by who holds which keys: whoever answers must not lead
        us, and our password, anywhere else. A node without slots is known once it holds one.
        """
        host, _, port = answer.partition("\n")[0].split(" ")[-1].rpartition(":")
        if self._cluster is None or not port.isdecimal():
            return None
        server = self._servers.get(Address(host.strip("[]") or source.address.host, int(port)))
        return None if server is None else server.asking()

    async def all(self) -> list[Server]:
        """Return every server that holds keys.

        Raises:
            RedisError, RedisClusterException: Nobody who would know could be asked.
        """
        async with self._refresh:
            await self._find_out()
        return list(self._servers.values())

    @property
    def holders(self) -> dict[int, Address]:
        """Which node of a cluster has each slot, as was said last."""
        slots = self._cluster.nodes_manager.slots_cache if self._cluster is not None else {}
        return {slot: Address(nodes[0].host, int(nodes[0].port)) for slot, nodes in slots.items() if nodes}

    async def are_moving(self, prefix: bytes) -> bool:
        """Say whether a slot in which keys with this prefix may be is not where it was said to be, or on its way.

        Each node is asked for a key of each of its slots that is nobody's: of what is on its way it names another node.

        Raises:
            OSError, RedisError: A node could not be asked, or did not answer in time.
        """
        names = await asyncio.to_thread(self._one_of_each_slot, prefix)
        for server, which in await self.holding(names, range(len(names))) if names else ():
            async with self.in_time():
                answers = await server.count([command(b"EXISTS", names[i]) for i in which])
            for answer in answers:
                if isinstance(answer, str):
                    if answer.partition(" ")[0] not in MOVING:
                        raise ResponseError(answer)
                    return True
        return False

    def _one_of_each_slot(self, prefix: bytes) -> list[bytes]:
        names: dict[int, bytes] = {}
        left, cluster = len(self.holders), self._cluster
        if cluster is None:
            return []
        for number in range(_MOST_NAMES_TRIED):
            name = b"%bslot/%d" % (prefix, number)
            names.setdefault(cluster.keyslot(name), name)
            if len(names) >= left or (len(names) == 1 and number == _OF_ONE_SLOT):
                break
        return list(names.values())

    def in_time(self) -> asyncio.Timeout:
        """Return the time limit of one question, for who asks so many that all of them together have none."""
        return asyncio.timeout(self._settings.timeout_s)

    def scrub(self, error: BaseException) -> None:
        """Take our passwords out of an error and its causes: servers may repeat them."""
        sentinel = self._settings.sentinel_password
        scrub(error, self._login.secrets() + ([sentinel.get_secret_value()] if sentinel else []))

    def doubt(self) -> None:
        """Find out anew, at the next question, who holds which keys."""
        self._is_known = False

    async def aclose(self) -> None:
        """Close every connection; calls still under way end with an error."""
        self._is_closed = True
        for server in self._servers.values():
            await server.aclose()
        self._servers.clear()
        if self._cluster is not None:
            await _close(self._cluster)
        for client in self._sentinel.sentinels if self._sentinel else ():
            await _close(client)

    async def _find_out(self) -> None:
        self._check_open()
        self._is_known = True  # at once: what is doubted from here on is found out anew
        try:
            cluster, current = await self._ask()
        except BaseException:  # cancelled, too
            self._is_known = False
            raise
        old, self._cluster = self._cluster, cluster  # with the servers in one step: others go on by them meanwhile
        gone = [self._servers.pop(address) for address in self._servers.keys() - current]
        if not self._is_closed:
            self._servers |= {address: self._make_server(address) for address in current - self._servers.keys()}
        left = [old] if old is not None and old is not cluster else []
        if self._is_closed and cluster is not None:  # meanwhile: nobody else knows of it
            left.append(cluster)
        async with AsyncExitStack() as closing:  # to the end, also if it is cancelled
            for client in left:
                closing.push_async_callback(_close, client)
            for server in gone:
                closing.push_async_callback(server.aclose)
        self._check_open()

    async def _ask(self) -> tuple[RedisCluster | None, set[Address]]:
        """Ask who holds keys now: the cluster as it is, if it is one, and the servers."""
        if self._cluster is not None:
            cluster = await self._renewed(self._cluster)
            return cluster, {Address(node.host, int(node.port)) for node in cluster.get_primaries()}
        if self._sentinel is not None:
            host, port = await self._sentinel.discover_master(self._settings.sentinel_master or "")
            return None, {Address(host, int(port))}
        return None, set(self._hosts)

    async def _renewed(self, cluster: RedisCluster) -> RedisCluster:
        """Ask the cluster who holds which keys. If nobody says so now, what was known before holds."""
        renewed = self._make_cluster()
        try:
            await renewed.initialize()
        except BaseException as error:  # cancelled, too: nobody else knows of it
            await _close(renewed)
            if self._servers and isinstance(error, OSError | RedisError | RedisClusterException):
                return cluster
            raise
        return renewed

    def _check_open(self) -> None:
        if self._is_closed:
            raise ConnectionAbortedError("the tier is closed")

    def _make_server(self, address: Address) -> Server:
        settings, login = self._settings, self._login
        options = self._options(login.username, login.password)
        client = Redis(host=address.host, port=address.port, db=login.database, **options)
        client.connection_pool.connection_class = self._connection_class
        bodies, questions = (Pool(address, login, settings.connections, settings.connect_timeout_s) for _ in range(2))
        return Server(address, client, bodies, questions)

    def _make_cluster(self) -> RedisCluster:
        options = self._options(self._login.username, self._login.password) | self._limits()
        nodes = [ClusterNode(*host) for host in {*self._hosts, *self._servers}]
        cluster = RedisCluster(startup_nodes=nodes, require_full_coverage=False, **options)
        cluster.connection_kwargs["connection_class"] = self._connection_class
        for node in cluster.nodes_manager.startup_nodes.values():
            node.connection_class = self._connection_class
        return cluster

    def _make_sentinel(self) -> Sentinel:
        options = self._options(self._settings.sentinel_username, self._settings.sentinel_password) | self._limits()
        sentinel = Sentinel(self._hosts, sentinel_kwargs=options)  # type: ignore[no-untyped-call]  # redis-py's is not
        for each in sentinel.sentinels:
            each.connection_pool.connection_class = self._connection_class
        return sentinel

    def _limits(self) -> dict[str, float]:
        """Return how long one of several that know who holds which keys is waited for."""
        limit_s = _TOPOLOGY_SHARE * self._settings.timeout_s
        return {"socket_timeout": limit_s, "socket_connect_timeout": min(limit_s, self._settings.connect_timeout_s)}

    def _options(self, username: str | None, password: SecretStr | None) -> dict[str, Any]:
        """Return what each of redis-py's clients is made with."""
        settings = self._settings
        options: dict[str, Any] = {
            "username": username,
            "password": password and password.get_secret_value(),
            "protocol": 2,
            "socket_timeout": settings.timeout_s,
            "socket_connect_timeout": settings.connect_timeout_s,
            "retry": Retry(NoBackoff(), 0),  # who asks again is decided in one place, `RedisBackend`
        }
        if self._login.tls is not None:
            files = {"ca_certs": settings.ca_file, "certfile": settings.cert_file, "keyfile": settings.key_file}
            options |= {f"ssl_{name}": str(file) for name, file in files.items() if file is not None}
            options |= {"ssl": True, "ssl_check_hostname": settings.check_hostname}
        return options


async def _close(client: Redis | RedisCluster) -> None:
    with suppress(OSError, RedisError):  # TLS to a server that stands still is not taken leave of in time
        await client.aclose()


def _tls_context(settings: RedisSettings) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context()
        if settings.ca_file is not None:
            context.load_verify_locations(settings.ca_file)  # beside the system's, as redis-py and the S3 client do
        if settings.cert_file is not None:
            context.load_cert_chain(settings.cert_file, settings.key_file)
    except OSError as error:  # of which ssl.SSLError is one
        files = ", ".join(str(file) for file in (settings.ca_file, settings.cert_file, settings.key_file) if file)
        raise ConfigurationError(f"the TLS certificates in {files} cannot be used: {error}") from error
    context.check_hostname = settings.check_hostname
    return context
