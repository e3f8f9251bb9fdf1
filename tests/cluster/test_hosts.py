"""Ring and tasks between hosts of their own: any rate, any loss, the bits of one process.

Only root may make such hosts; elsewhere these tests are skipped. Those that wait for time-outs or
start many processes take minutes together, and are of the full tier.
"""

import os
import signal
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import dask
import pytest

from tests.cluster import dying
from tests.cluster.hosts import Bed, HostedCluster, later, refusal
from tests.cluster.programs import Slow, chain, oracle
from tests.cluster.support import SHORT, executing, named
from tests.executors.mixer import bits
from tests.tiers import tiered

pytestmark = pytest.mark.cluster

LONG = {"segments": 2, "cycles": 8}
"""A run of about two seconds on two workers, of operations that take time."""
SLOW = Slow(0.02)
CUT = {
    "distributed.comm.timeouts.tcp": "11s",  # the least that Dask takes
    "distributed.scheduler.worker-ttl": "12s",
}


@pytest.fixture(scope="module", autouse=True)
def _hosts():
    if reason := refusal():
        pytest.skip(reason)


@dataclass
class Rig:
    bed: Bed
    cluster: HostedCluster

    def check(self, name, program=None, strike=None, **run):
        """Compare a chain with the oracle's; ``strike`` is called before the last segment."""
        before = [lambda: None] * (run.get("segments", 3) - 1)
        before.append(strike or (lambda: None))
        with executing(self.cluster.client, name) as executor:
            assert bits(chain(executor, program, before=before, **run)) == bits(oracle(**run))
            return executor.report


@contextmanager
def rigged(settings=MappingProxyType({})):
    """Two workers."""
    settings = {**SHORT, **settings}
    with dask.config.set(settings), Bed() as bed, HostedCluster(bed) as cluster:
        cluster.start_workers(2)
        yield Rig(bed, cluster)


@pytest.fixture(scope="module")
def rig(_hosts):
    """Tests leave it as it was."""
    with rigged() as made:
        yield made


def test_hosts_share_no_folder(rig):
    rig.bed.hosts["worker0"].run("touch", "/tmp/here")
    found = rig.cluster.client.run(os.path.exists, "/tmp/here")
    assert sorted(found.values()) == [False, True]
    assert not Path("/tmp/here").exists()


@pytest.mark.parametrize("rate", tiered(["1gbit", "10gbit"], lambda rate: rate == "1gbit"))
@named
def test_the_oracles_bits_at_any_rate(name, rate, rig):
    rig.bed.set_rate(rate)
    before = rig.bed.hosts["worker0"].sent()
    assert rig.check(name, cycles=2, width=30).workers == 2
    assert rig.bed.hosts["worker0"].sent() > before


@pytest.mark.full
@named
def test_a_link_that_blinks_costs_nothing(name, rig):
    host = rig.bed.hosts["worker1"]
    strike = [host.unplug, host.plug]
    assert rig.check(name, SLOW, lambda: later(0.5, *strike), **LONG).lost_segments == 0


@pytest.mark.full
@named
def test_a_host_that_is_cut_off_for_long_is_done_without(name):
    with rigged(CUT) as rig:
        cluster, host = rig.cluster, rig.bed.hosts["worker1"]
        assert rig.check(name, SLOW, lambda: later(0.5, host.unplug), **LONG).lost_segments <= 2
        host.plug()
        cluster.workers["worker1"].wait(60)  # it has been given up, and knows
        cluster.start_worker("worker1")
        cluster.client.wait_for_workers(2, timeout=60)
        assert rig.check(name).workers == 2


@pytest.mark.full
@named
def test_a_client_that_is_cut_off_goes_on_when_it_is_back(name):
    """The scheduler forgets a client that is away, and all that it was to tell it."""
    with rigged(CUT) as rig:
        host = rig.bed.hosts["client"]

        def strike():
            host.unplug()
            later(14.0, host.plug)

        assert rig.check(name, SLOW, strike, **LONG).lost_segments >= 1
        assert rig.check(name, cycles=2).lost_segments == 0


@pytest.mark.full
@named
def test_nothing_is_shared_but_an_object_store(name, monkeypatch, tmp_path):
    """Data and run lie there; the client is killed and resumed on other workers by another one."""
    pytest.importorskip("moto.server", reason="an S3 server of its own needs moto[server]")
    pytest.importorskip("icechunk", reason="runs at URLs need the extra cloud")
    from tests.object_store import BUCKET, ObjectStore

    wanted = dying.sampled()
    urls = [f"s3://{BUCKET}/{name}/{what}" for what in ("v", "run")]

    def do(cluster, draw):
        command = dying.__file__, cluster.address, *urls, name, str(draw)
        client = cluster.bed.host("client").python(*command)
        assert client.wait(240) == (-signal.SIGKILL if draw else 0), cluster.bed.logs()
        return cluster.bed.host("client").log()

    with dask.config.set(SHORT), Bed() as bed:
        with bed.host("store").inside():
            store = ObjectStore(bed.host("store").address)
        for variable, value in store.environment.items():
            monkeypatch.setenv(variable, value)
        with HostedCluster(bed) as cluster:
            cluster.start_workers(2)
            do(cluster, 13)
        with HostedCluster(bed) as another:
            another.start_worker("worker2")
            assert do(another, 0).splitlines()[-1] == dying.digest(wanted)
        store.stop()


@pytest.mark.full
@named
def test_a_scheduler_that_is_started_again_goes_on(name):
    with rigged() as rig:

        def again():
            rig.bed.hosts["scheduler"].power_off()
            rig.cluster.start_scheduler()
            for number in range(2):
                rig.cluster.start_worker(f"worker{number}")

        assert rig.check(name, SLOW, lambda: later(0.5, again), **LONG).lost_segments >= 1
