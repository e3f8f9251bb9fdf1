"""Find the notes of a piano piece, with error bars, by PSGLD and by Langevin dynamics.

Reads a recording (a wav file of a few seconds) or synthesizes some notes. Its magnitude spectrum,
frequency x time, is factorized under a Poisson likelihood with a free dispersion: a column of W is
the spectrum of a note or a chord, a row of H its loudness over time. Langevin dynamics (LD) uses
the complete spectrum for every step, PSGLD an eighth of it; both take the same number of steps
from the same start, as in Şimşekli et al. 2015, section 4.2.

    python examples/piano.py [piece.wav] [--components 8] [--draws 200] [--picture piano.png]

Prints time and log density of each run, the agreement of its dictionary with that of LD, and the
strongest partial of every component.

Entries of a spectrum differ by factors of a million, and so do the gradients of the parts;
therefore the default step of PSGLD is too long here, and PSGLD uses the decreasing step of the
paper. A third run from another start shows the agreement between two runs of the same sampler.
"""

import argparse

import numpy as np
import xarray as xr
from numpy.typing import NDArray
from scipy import signal
from scipy.io import wavfile

import daskfactor as dfac

BLOCKS = 8
BINS = 256
NAMES = ["C", "C#", "D", "D#", "E", "F", "F#", "G", "G#", "A", "A#", "B"]
Sound = tuple[int, NDArray[np.float64]]


def made_up(seconds: float, rate: int = 22_050, seed: int = 0) -> Sound:
    """Four notes, one after the other and then together: decaying harmonics and some hiss."""
    rng = np.random.default_rng(seed)
    sound = rng.normal(0, 2e-4, int(seconds * rate))
    starts = np.linspace(0, 0.75 * seconds, 6)[[0, 1, 2, 3, 4, 4, 5, 5]]
    pitches = (262, 330, 392, 523, 262, 392, 330, 523)
    for start, pitch in zip(starts, pitches, strict=True):
        t = np.arange(sound.size - int(start * rate)) / rate
        for k in range(1, 9):
            loudness = rng.uniform(0.5, 1.5) * 0.8**k * np.exp(-t * (0.5 + 0.4 * k))
            sound[-t.size :] += 0.2 * loudness * np.sin(2 * np.pi * k * pitch * t)
    return rate, sound


def read(path: str) -> Sound:
    """Read a wav file as one channel of about unit size."""
    rate, sound = wavfile.read(path)
    full = np.iinfo(sound.dtype).max if np.issubdtype(sound.dtype, np.integer) else 1
    return rate, sound.reshape(len(sound), -1).mean(axis=1) / full


def spectrum(rate: int, sound: NDArray[np.float64]) -> xr.DataArray:
    """Magnitudes of windows of about 1/20 s, the lowest 256 frequencies, largest value 1."""
    window = 2 ** round(np.log2(rate / 20))
    hz, seconds, values = signal.stft(sound, rate, nperseg=window, noverlap=3 * window // 4)
    magnitude = np.abs(values[:BINS])
    return xr.DataArray(
        magnitude / magnitude.max(),
        dims=("frequency", "time"),
        coords={"frequency": hz[:BINS], "time": seconds},
    )


def run(
    V: xr.DataArray, model: dfac.TweedieNMF, sampler: object, steps: int, seed: int = 0
) -> xr.DataTree:
    """As many steps as asked, the first half of them to burn in; one draw every 8 steps."""
    cycle = BLOCKS if isinstance(sampler, dfac.PSGLD) else 1  # steps in a pass over the data
    return dfac.sample(
        V,
        model,
        sampler,
        draws=steps // (2 * BLOCKS),
        tune=steps // (2 * cycle),
        thin=BLOCKS // cycle,
        blocks=BLOCKS,
        random_seed=seed,
        keep="draws",
        progressbar=False,
    )


def pitch(hertz: float) -> str:
    """Return the nearest note of the keyboard; A4 has 440 Hz."""
    if hertz < 27:
        return "below the keyboard"
    note = round(12 * np.log2(hertz / 440)) + 57
    return f"{NAMES[note % 12]}{note // 12}"


def agreement(one: xr.DataTree, other: xr.DataTree) -> NDArray[np.float64]:
    """Cosines between the mean spectra of each component; one is aligned with the other."""
    a, b = (tree["posterior_moments/W_mean"].values[0] for tree in (one, other))
    return np.sum(a * b, axis=0) / np.linalg.norm(a, axis=0) / np.linalg.norm(b, axis=0)


def sparsity(trace: xr.DataTree) -> float:
    """Hoyer's measure of the mean spectra: 0 if all entries are equal, 1 if one is left."""
    W = trace["posterior_moments/W_mean"].values[0]
    root = np.sqrt(len(W))
    return float(np.mean((root - W.sum(axis=0) / np.linalg.norm(W, axis=0)) / (root - 1)))


def main() -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sound", nargs="?", help="wav file of a few seconds")
    parser.add_argument("--components", type=int, default=8, help="number of components")
    parser.add_argument(
        "--beta", type=float, default=1.0, help="power of the likelihood, 1 for Poisson"
    )
    parser.add_argument("--draws", type=int, default=200, help="number of draws, one every 8 steps")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of the synthetic piece")
    parser.add_argument("--picture", help="image file to write")
    arguments = parser.parse_args()

    V = spectrum(*(read(arguments.sound) if arguments.sound else made_up(arguments.seconds)))
    steps = 2 * BLOCKS * arguments.draws
    # The same dispersion for all, so that log densities refer to the same posterior.
    model = dfac.TweedieNMF(arguments.components, beta=arguments.beta)
    point = dfac.optimize(V, model, random_seed=0, progressbar=False)
    model = dfac.TweedieNMF(
        arguments.components, beta=arguments.beta, dispersion=point.attrs["dispersion"]
    )
    print(f"{V.sizes['frequency']} frequencies x {V.sizes['time']} times, {steps} steps per run")
    print(
        f"{'':20}{'seconds':>8}{'log density':>13}{'sparsity':>10}   cosine with LD (median, min)"
    )
    decreasing = dfac.PolynomialStep(0.1, 0.51)
    runs = {
        "LD": (dfac.LangevinDynamics(), 0),
        "PSGLD": (dfac.PSGLD(step=decreasing), 0),
        "PSGLD, other start": (dfac.PSGLD(step=decreasing), 1),
    }
    found: dict[str, xr.DataTree] = {}
    for name, (sampler, seed) in runs.items():
        trace = run(V, model, sampler, steps, seed)
        found[name] = dfac.align(trace, found.get("LD"))
        seconds, lp = trace.attrs["sampling_time"], trace["sample_stats/lp"].mean().item()
        cosine = agreement(found[name], found["LD"])
        line = f"{name:20}{seconds:8.1f}{lp:13.0f}{sparsity(found[name]):10.2f}"
        print(line + f"{np.median(cosine):9.3f}{cosine.min():7.3f}")
    W = found["LD"]["posterior_moments/W_mean"].isel(chain=0)
    peaks = W["frequency"].values[W.argmax("frequency").values]
    order = np.argsort(peaks)
    print("strongest partials:", ", ".join(f"{pitch(hz)} ({hz:.0f} Hz)" for hz in peaks[order]))
    if arguments.picture:
        draw(V, found, order, arguments.picture)


def draw(
    V: xr.DataArray, found: dict[str, xr.DataTree], order: NDArray[np.int64], path: str
) -> None:
    """Plot the spectrum above three dictionaries, lowest note first."""
    import matplotlib.pyplot as plt

    hz = V["frequency"].values
    highest = hz[np.searchsorted(np.cumsum(V.mean("time")) / V.mean("time").sum(), 0.98)]
    figure = plt.figure(figsize=(12, 3 + 0.9 * order.size), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=(3, 0.9 * order.size))
    axes = top.subplots()
    decibels = 20 * np.log10(np.maximum(V, 1e-4))
    image = axes.pcolormesh(V["time"], hz, decibels, cmap="magma", rasterized=True)
    axes.set(xlabel="seconds", ylabel="Hz", title="spectrum of the piece")
    top.colorbar(image, ax=axes, label="dB")
    bottom.suptitle("spectra of the components, with the note closest to the strongest partial")
    panels = bottom.subplots(order.size, 3, sharex=True, sharey="row", squeeze=False)
    for column, (name, trace) in zip(panels.T, list(found.items())[:3], strict=True):
        moments = trace["posterior_moments"].to_dataset().isel(chain=0)
        for axes, k in zip(column, order, strict=True):
            mean, sd = moments["W_mean"].values[:, k], np.sqrt(moments["W_var"].values[:, k])
            axes.fill_between(hz, np.maximum(mean - 2 * sd, 0), mean + 2 * sd, alpha=0.35)
            axes.plot(hz, mean, linewidth=0.8)
            label = pitch(hz[mean.argmax()])
            axes.text(0.98, 0.8, label, ha="right", va="top", transform=axes.transAxes)
            axes.set(yticks=[], xlim=(0, highest))
        column[0].set_title(f"{name}: mean ± 2 sd")
        column[-1].set_xlabel("Hz")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
