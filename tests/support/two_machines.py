"""Two machines on one: network namespaces that a cable joins, or two loopback addresses.

A namespace has its own interfaces, ports and routes, so what one machine tells the other crosses
the cable or fails. Making one takes a privilege that containers often lack; the loopback addresses
127.0.0.2 and 127.0.0.3 stand in then. Both machines share the file system and the clock.
"""

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.support.runs import environment


@dataclass
class OneMachine:
    """One of the two machines."""

    address: str
    interface: str
    """Name of the network interface that has the address."""
    prefix: list[str]
    """Words before a command that is to run there."""
    started: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    def start(self, arguments: Sequence[str], log: Path) -> "subprocess.Popen[bytes]":
        """Start a command. log: where its output is appended."""
        with log.open("ab") as output:
            process = subprocess.Popen(
                [*self.prefix, *arguments],
                env={
                    **environment(),
                    "GLOO_SOCKET_IFNAME": self.interface,
                    "OMP_NUM_THREADS": "1",
                },
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        self.started.append(process)
        return process

    def kill(self) -> None:
        """Send SIGKILL to everything that was started there, as a machine that loses its power."""
        for process in self.started:
            kill_tree(process)
        self.started.clear()


def kill_tree(process: "subprocess.Popen[bytes]") -> None:
    """Send SIGKILL to a process and to all that it started, and wait for them.

    Some of those have process groups of their own.
    """
    with suppress(psutil.NoSuchProcess):
        parent = psutil.Process(process.pid)
        family = [parent, *parent.children(recursive=True)]
        for each in family:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        psutil.wait_procs(family[1:], timeout=30)
    process.wait(60)


@contextmanager
def two_machines() -> Iterator[tuple[OneMachine, OneMachine]]:
    """Make two machines, and kill what runs there afterwards."""
    names = [f"qarl-{os.getpid()}-{side}" for side in "ab"]
    cables = [f"q{os.getpid() % 10**7}{side}" for side in "ab"]
    machines = [
        OneMachine(f"10.77.0.{number}", cable, ["ip", "netns", "exec", name])
        for number, (name, cable) in enumerate(zip(names, cables, strict=True), start=1)
    ]
    try:
        if not _joined(machines, names):
            addresses = ("127.0.0.2", "127.0.0.3")
            machines = [OneMachine(address, "lo", []) for address in addresses]
        yield machines[0], machines[1]
    finally:
        for machine in machines:
            machine.kill()
        for name in names:
            _ip("netns", "del", name)


def _joined(machines: Sequence[OneMachine], names: Sequence[str]) -> bool:
    """Return whether the namespaces could be made and joined."""
    if not all(_ip("netns", "add", name) for name in names):
        return False
    first, second = (machine.interface for machine in machines)
    cable = ("add", first, "netns", names[0], "type", "veth", "peer", "name", second)
    if not _ip("link", *cable, "netns", names[1]):
        return False
    return all(
        _ip("-n", name, "addr", "add", f"{machine.address}/24", "dev", machine.interface)
        and _ip("-n", name, "link", "set", machine.interface, "up")
        and _ip("-n", name, "link", "set", "lo", "up")
        for machine, name in zip(machines, names, strict=True)
    )


def _ip(*arguments: str) -> bool:
    """Return whether `ip ARGUMENTS` succeeded; False if there is no such command."""
    try:
        return subprocess.run(["ip", *arguments], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False
