"""A client on a host that shares nothing with its workers but an object store.

Run as a script by ``test_hosts.py``: ``far.py SCHEDULER DATA RUN EXECUTOR DRAW`` writes data,
samples, and kills its own process when the run reports that draw; with draw 0 it resumes the run
and prints what it has found.
"""

import os
import signal
import sys

from distributed import Client

import daskfactor as dfac
from daskfactor.inference import setting
from daskfactor.results import files
from daskfactor.results.repository import RepositoryPlace
from tests.cluster import dying


def main():
    scheduler, data, run, executor, last = sys.argv[1:]
    setting.LONGEST_SEGMENT = dying.LONGEST_SEGMENT
    RepositoryPlace.every, files.DEAREST = 1e-9, 1e9  # commit after each segment

    def die(event):
        if event.phase == "draw" and event.done >= int(last):
            os.kill(os.getpid(), signal.SIGKILL)

    with Client(scheduler) as client:
        options = {"client": client, "executor": executor}
        if not int(last):
            tree = dfac.resume(run, progressbar=False, **options)
            print(dying.digest(tree), flush=True)
            return
        dfac.convert(dying.data(), data, unstored="zero", blocks=3, progressbar=False)
        settings = {k: v for k, v in dying.SETTINGS.items() if k not in ("blocks", "unstored")}
        dfac.sample(
            data, dying.MODEL, dying.SAMPLER, store=run, callback=die, **options, **settings
        )


if __name__ == "__main__":
    main()
