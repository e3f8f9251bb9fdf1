"""A run that goes on until it is killed. Usage: python writer.py PATH"""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from daskfactor.results.store import RunStore
from tests.results.runs import factors


def state_of(draw: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(draw)
    return {"W": rng.random((50, 3)), "count": np.array(draw)}


def main(path: str) -> None:
    with RunStore.open(path) as store:
        draw = sum(store.committed.draws)
        if draw:
            arrays, meta = store.load_checkpoint()
            draw = meta["draws"]
            assert arrays["count"] == draw
        print("ready", flush=True)
        while True:
            if draw + 3 > store.draws:
                store.extend(np.arange(store.draws + 6))
            store.write_draws(0, draw, *factors(0, draw, 3))
            store.write_stats(0, draw, {"lp": np.arange(draw, draw + 3) + 0.5})
            draw += 3
            W, Ht = factors(1, draw, 1)
            store.write_moments(0, W_mean=W[0], W_var=W[0], Ht_mean=Ht[0], Ht_var=Ht[0], count=draw)
            store.checkpoint(state_of(draw), {"draws": draw})


if __name__ == "__main__":
    main(sys.argv[1])
