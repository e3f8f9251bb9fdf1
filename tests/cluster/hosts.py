"""Hosts of their own on one machine: network namespaces behind a switch, at a rate of one's choice.

A host is a network namespace and a mount namespace: it has one network card, and a ``/tmp`` that
nobody else sees; of what is there outside, only the code that is run is there, too. Cards are ends
of veth pairs whose other ends belong to a bridge, the switch, in a namespace of its own; a token
bucket at either end holds traffic to the rate of the bed, each way.
Nothing of it is visible outside. Whatever was started dies with the process that started it, also
when that is killed.
"""

import ctypes
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import dask
import psutil
from distributed import Client

TOOLS = ("ip", "nsenter", "setpriv", "tc", "unshare")
ROOT = Path(__file__).parents[2]
NETWORK = "10.77.0"
RECONNECT = 20.0
"""Seconds for which a client that has lost its scheduler tries to reach it again."""
CLONE_NEWNET = 0x40000000
_LAUNCHER = ThreadPoolExecutor(1, "launcher")


def refusal():
    """The reason why this machine makes no hosts; nothing where it does."""
    if os.geteuid() != 0:
        return "hosts are network namespaces, which only root may make"
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"hosts need the tools {', '.join(missing)} (packages iproute2 and util-linux)"
    try:
        with Bed() as bed:
            bed.add("one")
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or error
        return f"the kernel refuses network namespaces, bridges or token buckets: {said}".strip()
    return ""


def start(command, **options):
    """Start a process that dies with this one.

    The kernel kills it with the thread that it came from, so that is one that stays.
    """
    mortal = ["setpriv", "--pdeathsig", "KILL", *command]
    return _LAUNCHER.submit(subprocess.Popen, mortal, **options).result()


def environment():
    """Return variables with which a process finds this code and has Dask's settings of this one."""
    paths = os.pathsep.join([str(ROOT), *sys.path])
    settings = dask.config.serialize(dask.config.global_config)
    return {**os.environ, "PYTHONPATH": paths, "DASK_INTERNAL_INHERIT_CONFIG": settings}


OWN_TMP = """
set -e
made=$1
shift
mount -t tmpfs none "$made"
for folder; do
    mkdir -p "$made/${folder#/tmp/}"
    mount --bind "$folder" "$made/${folder#/tmp/}"
done
mount --move "$made" /tmp
ip link set lo up
echo ready
exec cat
"""
"""Makes a ``/tmp`` at the first argument, a folder, that has all the other arguments in it."""


def _code():
    """Return the folders within ``/tmp`` from which Python loads code, none within another."""
    wanted = {Path(own).resolve() for own in (ROOT, sys.prefix, sys.base_prefix, *sys.path) if own}
    inside = {own for own in wanted if own.is_relative_to("/tmp") and own.is_dir()}
    return sorted(str(own) for own in inside if not inside & set(own.parents))


class Namespace:
    """A network and a mount namespace, held by a process that ends when its input does."""

    def __init__(self):
        with TemporaryDirectory() as made:
            command = ["unshare", "--net", "--mount", "sh", "-c", OWN_TMP, "sh", made, *_code()]
            pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
            self._holder = start(command, text=True, **pipes)
            assert self._holder.stdout is not None
            ready = self._holder.stdout.readline().strip() == "ready"
        if not ready:
            _, said = self._holder.communicate(timeout=10)
            raise OSError(said.strip() or "unshare failed")
        self.pid = self._holder.pid
        self.enter = ["nsenter", f"--target={self.pid}", "--net", "--mount", "--"]

    def run(self, *command):
        """Run a command to its end; return what it prints."""
        options = {"capture_output": True, "text": True, "timeout": 60}
        return subprocess.run([*self.enter, *command], check=True, **options).stdout

    def close(self):
        self._holder.kill()
        self._holder.communicate()


class Host(Namespace):
    """A machine with one network card and an address; made by a `Bed`."""

    def __init__(self, bed, name, number):
        super().__init__()
        self.bed, self.name = bed, name
        self.address, self.port = f"{NETWORK}.{number}", f"port{number}"
        self.processes = []

    def python(self, *command):
        """Start an interpreter with the settings of Dask that hold here; it dies with this one.

        It writes to ``/tmp/log`` of the host.
        """
        script = [*self.enter, "sh", "-c", 'exec >>/tmp/log 2>&1; exec "$@"', "sh", sys.executable]
        process = start([*script, *command], env=environment(), stdin=subprocess.DEVNULL)
        self.processes.append(process)
        return process

    def log(self):
        """Return what the host's processes have said."""
        return self.run("sh", "-c", "cat /tmp/log 2>/dev/null || true")

    @contextmanager
    def inside(self):
        """Let this thread, and those that it starts, use the host's network card."""
        with Path("/proc/thread-self/ns/net").open() as before:
            with Path(f"/proc/{self.pid}/ns/net").open() as own:
                _set_network(own.fileno())
            try:
                yield
            finally:
                _set_network(before.fileno())

    def unplug(self):
        """Take the link to the switch down: what is sent is lost, and nobody is told."""
        self.bed.switch.run("ip", "link", "set", self.port, "down")

    def plug(self):
        """Take the link up again."""
        self.bed.switch.run("ip", "link", "set", self.port, "up")

    def sent(self):
        """Return the bytes that the network card has sent."""
        (card,) = json.loads(self.run("ip", "-json", "-stats", "link", "show", "eth0"))
        return int(card["stats64"]["tx"]["bytes"])

    def power_off(self):
        """Kill all processes."""
        for process in self.processes:
            if process.poll() is None:
                for own in (*psutil.Process(process.pid).children(recursive=True), process):
                    own.kill()
            process.wait()
        self.processes.clear()

    def close(self):
        self.power_off()
        super().close()


def _set_network(descriptor):
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns failed")


class Bed:
    """Hosts on one switch. ``rate`` is that of every link, each way, in the words of ``tc``."""

    def __init__(self, rate="10gbit"):
        self.rate = rate
        self.hosts = {}

    def __enter__(self):
        self.switch = Namespace()
        try:
            self.switch.run("ip", "link", "add", "switch", "type", "bridge")
            self.switch.run("ip", "link", "set", "switch", "up")
        except BaseException:
            self.switch.close()
            raise
        return self

    def __exit__(self, *_):
        for host in self.hosts.values():
            host.close()
        self.switch.close()

    def add(self, name):
        """Return a new host, plugged in."""
        host = Host(self, name, len(self.hosts) + 1)
        self.hosts[name] = host
        pair = ["type", "veth", "peer", "name", "eth0", "netns", str(host.pid)]
        self.switch.run("ip", "link", "add", host.port, *pair)
        self.switch.run("ip", "link", "set", host.port, "master", "switch", "up")
        host.run("ip", "address", "add", f"{host.address}/24", "dev", "eth0")
        host.run("ip", "link", "set", "eth0", "up")
        self._limit(host)
        return host

    def host(self, name):
        """Return the host of a name, which is made if it is not there."""
        return self.hosts.get(name) or self.add(name)

    def logs(self):
        """Return what the processes of all hosts have said."""
        return "\n".join(f"{name}: {host.log()}" for name, host in self.hosts.items())

    def set_rate(self, rate):
        """Change the rate of all links."""
        self.rate = rate
        for host in self.hosts.values():
            self._limit(host)

    def _limit(self, host):
        """Let a millisecond's traffic through at once: a kernel's clock ticks no oftener."""
        bits = float(self.rate.removesuffix("gbit")) * 1e9
        bucket = ["rate", self.rate, "burst", str(int(bits / 8000) + 2**16), "latency", "20ms"]
        for namespace, card in ((host, "eth0"), (self.switch, host.port)):
            namespace.run("tc", "qdisc", "replace", "dev", card, "root", "tbf", *bucket)


class HostedCluster:
    """A scheduler on one host, workers on others, and a client of it whose host is another.

    Hosts that are not there yet are made.
    """

    def __init__(self, bed):
        self.bed = bed
        self.workers = {}
        self._undo = ExitStack()

    def __enter__(self):
        with ExitStack() as undo:
            undo.callback(self._power_off)
            self.scheduler_host = self.bed.host("scheduler")
            self.address = f"tcp://{self.scheduler_host.address}:8786"
            self.scheduler = self.start_scheduler()
            self.client = undo.enter_context(self.connect())
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *error):
        self._undo.__exit__(*error)

    def start_scheduler(self):
        own = ["--host", self.address.removesuffix(":8786"), "--port", "8786", "--no-dashboard"]
        return self.scheduler_host.python("-m", "distributed.cli.dask_scheduler", *own)

    @contextmanager
    def connect(self):
        """A client on the client's host: its threads are made there, and their connections."""
        with self.bed.host("client").inside():
            client = Client(self.address, set_as_default=False, timeout=RECONNECT)
        try:
            yield client
        finally:
            client.close(timeout=5)

    def start_worker(self, name):
        """Start a worker on a host of that name, without waiting for it."""
        host = self.bed.host(name)
        where = [self.address, "--host", f"tcp://{host.address}"]
        options = ["--nthreads", "1", "--no-dashboard", "--memory-limit", "0"]
        options += ["--no-nanny", "--name", name, "--local-directory", "/tmp"]
        self.workers[name] = host.python("-m", "distributed.cli.dask_worker", *where, *options)
        return self.workers[name]

    def start_workers(self, count):
        """Start workers on as many hosts, and wait for them."""
        for number in range(count):
            self.start_worker(f"worker{number}")
        self.client.wait_for_workers(count, timeout=120)

    def _power_off(self):
        for host in self.bed.hosts.values():
            host.power_off()


def later(seconds, *what):
    """Do things from a thread, each some seconds after the last."""

    def go():
        for action in what:
            time.sleep(seconds)
            action()

    threading.Thread(target=go, daemon=True).start()
