"""Hosts of their own on one machine: network namespaces, each with one cable to here."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pytest

from tests.support.network import network

WHY_NOT = "network namespaces cannot be made here: run as root, with iproute2, where they are permitted"


@dataclass(frozen=True)
class Host:
    """A namespace. ``gateway`` is this machine's address as that host sees it; there is no loopback in common."""

    name: str
    gateway: str

    @property
    def within(self) -> Sequence[str]:
        """What a command begins with that is to run there."""
        return "ip", "netns", "exec", self.name


@contextmanager
def hosts(num_hosts: int) -> Iterator[list[Host]]:
    """Yield so many hosts, each of which reaches this machine and not the others; or skip."""
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip(WHY_NOT)
    with network(changing=True), ExitStack() as stack:
        try:
            found = [_make(stack, number) for number in range(num_hosts)]
        except subprocess.CalledProcessError as error:
            pytest.skip(f"{WHY_NOT} ({error.stderr.decode().strip()})")
        yield found


def _make(stack: ExitStack, number: int) -> Host:
    name, here, there = f"tkv{os.getpid()}n{number}", f"tkv{os.getpid()}h{number}"[:15], "eth0"
    network = f"10.{200 + number}.{os.getpid() % 250}"
    _ip("netns", "add", name)
    stack.callback(_ip, "netns", "delete", name)  # its end of the cable goes with it, and so does ours
    _ip("link", "add", here, "type", "veth", "peer", "name", there, "netns", name)
    _ip("address", "add", f"{network}.1/24", "dev", here)
    _ip("link", "set", here, "up")
    _ip("-n", name, "address", "add", f"{network}.2/24", "dev", there)
    _ip("-n", name, "link", "set", there, "up")
    _ip("-n", name, "link", "set", "lo", "up")
    return Host(name, f"{network}.1")


def _ip(*words: str) -> None:
    subprocess.run((shutil.which("ip") or "ip", *words), check=True, capture_output=True)
