"""Differences between equally good factorizations of documents and digits.

Factorizations with equally good fits can have different interpretations. The example prints and
draws the top words of topics in the particles with the largest weights of a posterior over
documents. It also computes the area under the ROC curve (AUC) with which the weights of every
particle distinguish each digit from the others, to find the best particle for each digit; a second
split of the images checks that this is not due to chance. These are figures 5, 6 and 8 of Masood
and Doshi-Velez, "A particle-based variational approach to Bayesian non-negative matrix
factorization".

    python examples/readings.py [--documents FILE.npz --topics 16] [--particles 25]

Without a file, the documents are the sections of the Python language reference; topics.py
describes the format of a file. Words are weighted by tf-idf: the count times log((1 + n)/(1 + m))
+ 1 for a word in m of n documents, with documents normalized to the same length, unless --counts
is passed. The digits are those of scikit-learn.
"""

import argparse
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray
from scipy import sparse
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import StratifiedKFold, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from topics import Documents, documents_of_file, documents_of_python

import daskfactor as dfac
from daskfactor.results.compare import component_variability, downstream, top_entries

N_PARTICLES = 3
"""Number of particles side by side."""
MAX_LINES = 4
"""Largest number of particles with a line over all digits."""
MIN_SHARE = 0.95
"""Smallest share of the particles with a topic that is compared."""


def weighted(documents: Documents) -> Any:
    """Words by documents, tf-idf, every document of length 1."""
    counts = documents.counts.astype(np.float64).tocsr()
    having = np.bincount(counts.indices, minlength=counts.shape[1])
    rarity = np.log((1 + counts.shape[0]) / (1 + having)) + 1
    table = counts @ sparse.diags_array(rarity)
    length = np.sqrt(table.multiply(table).sum(axis=1))
    return (sparse.diags_array(1 / length) @ table).T.tocsr().astype(np.float32)


def posterior(V: Any, components: int, settings: argparse.Namespace) -> xr.DataTree:
    """Particles from Q-Transform starts, with their components aligned by W."""
    trace = dfac.stein_posterior(
        V,
        dfac.SILFNMF(components),
        particles=settings.particles,
        pilot=settings.pilot,
        unstored="zero" if sparse.issparse(V) else None,
        random_seed=settings.seed,
        progressbar=False,
    )
    return dfac.align(trace, by="w")


def quality(trace: xr.DataTree) -> str:
    """How many particles carry the posterior, and how equal they are overall."""
    objective = trace["sample_stats"]["objective"].values
    weight = trace["sample_stats"]["weight"].values
    return (
        f"{weight.size} particles, {int((weight > 0).sum())} of them with weight; objectives "
        f"within {objective.max() / objective.min() - 1:.1%} of each other"
    )


def told_apart(trace: xr.DataTree) -> tuple[xr.Dataset, list[Any]]:
    """Return the spread of topics, and the two that vary most among reproducible ones."""
    spread = component_variability(trace)
    known = spread["share"] >= min(MIN_SHARE, float(np.sort(spread["share"])[-2]))
    angle = spread["angle_w"].where(known, -1.0)
    return spread, angle.sortby(angle, ascending=False)["component"].values[:2].tolist()


def tell_topics(trace: xr.DataTree, top: xr.Dataset, spread: xr.Dataset, chosen: list[Any]) -> None:
    """All topics with their spread, and the words of two of them."""
    print(quality(trace))
    print("topic  in share  angle to mean     most frequent top words")
    mass = top["weight"].stack(particle=("chain", "draw"))
    for one in spread["component"].values[np.argsort(-spread["intensity"].values)]:
        own = spread.sel(component=one)
        angle = f"{float(own['angle_w']):5.1f}° ± {float(own['angle_w_sd']):4.1f}°"
        print(
            f"{one:5}{float(own['share']):10.0%}   {angle}     "
            + " ".join(common_words(top.sel(component=one), 6))
        )
    heavy = mass.argsort()[::-1][:N_PARTICLES].values
    for one in chosen:
        print(f"\ntopic {one}, words of the {len(heavy)} particles with the largest weights")
        lists = top["label"].sel(component=one).stack(particle=("chain", "draw"))
        for at in heavy:
            words = lists.isel(particle=at).values.tolist()
            others = {
                str(word)
                for other in heavy
                if other != at
                for word in lists.isel(particle=other).values
            }
            alone = [word for word in words if word not in others]
            print(f"  {float(mass[at]):.3f}  {' '.join(words)}")
            print(f"         only here: {' '.join(alone) or 'none'}")


def common_words(top: xr.Dataset, count: int) -> list[str]:
    """Words in the order of their share of the particles, then of their mean."""
    best: dict[str, tuple[float, float]] = {}
    for label, share, mean in zip(
        *(top[name].values.ravel().tolist() for name in ("label", "share", "mean")), strict=True
    ):
        best[label] = (share, mean)
    return sorted(best, key=best.__getitem__, reverse=True)[:count]


def auc_of(digits: NDArray[np.integer], seed: int) -> Any:
    """Return a score of factors: AUC of every digit by its weights, in five-fold validation."""

    def auc(W: Any, H: Any) -> dict[str, float]:
        classifier = make_pipeline(StandardScaler(), LogisticRegression(max_iter=500))
        folds = StratifiedKFold(5, shuffle=True, random_state=seed)
        found = cross_val_predict(classifier, H.T, digits, cv=folds, method="predict_proba")
        return {str(k): roc_auc_score(digits == k, found[:, k]) for k in range(10)}

    return auc


def tell_digits(trace: xr.DataTree, scores: xr.Dataset, again: xr.Dataset) -> None:
    """AUC by digit, and whether what was best on one split is so on another."""
    print(quality(trace))
    first, second = (one["value"].values[0] for one in (scores, again))
    noise = np.sqrt(((first - second) ** 2).mean(axis=0) / 2)
    sd, best = scores["sd"].values, first.argmax(axis=0)
    print("                  AUC over particles        sd over   best       on another split")
    print("digit     mean       sd       min       max  splits   particle    best   mean")
    for k, name in enumerate(scores["score"].values):
        print(
            f"{name:>5}{scores['mean'].values[k]:9.4f}{sd[k]:9.4f}{first[:, k].min():10.4f}"
            f"{first[:, k].max():10.4f}{noise[k]:8.4f}{best[k]:8d}"
            f"{second[best[k], k]:11.4f}{second[:, k].mean():8.4f}"
        )
    kept = int((second[best, range(len(best))] > second.mean(axis=0)).sum())
    overall = first.mean(axis=1).argmax()
    rank = 1 + (first > first[overall]).sum(axis=0)
    winners = np.unique(best).size
    print(
        f"\n{winners} different particles are best for the {len(best)} digits; on the other split "
        f"the best is above the mean for {kept} digits. The spread over particles is more than "
        f"twice that over splits for {int((sd > 2 * noise).sum())} digits.\nParticle {overall}, "
        f"which is best on average, ranks between {rank.min()} and {rank.max()} of {len(first)} "
        "for single digits."
    )
    held = winners > 1 and kept >= 0.8 * len(best)
    print(
        'Claim "no single factorization is best for all purposes": '
        f"{'REPRODUCED' if held else 'NOT REPRODUCED'}"
    )


def draw_topics(figure: Any, top: xr.Dataset, chosen: list[Any]) -> None:
    """Draw the largest words of topics in the heaviest particles side by side.

    Orange words are in only one of the lists, light blue ones in some, blue ones in all.
    """
    from matplotlib.patches import Patch

    colors = {"in all lists": "#20639b", "in some lists": "#7fa6c9", "in one list": "#d1682b"}
    mass = top["weight"].values.ravel()
    heaviest = np.argsort(-mass, kind="stable")[:N_PARTICLES]
    lists = top[["label", "value"]].stack(particle=("chain", "draw"), create_index=False)
    lists = lists.isel(particle=heaviest).transpose("particle", "component", "rank")
    axes = figure.subplots(len(chosen), len(heaviest), squeeze=False)
    for line, topic in zip(axes, chosen, strict=True):
        words, sizes = (lists[name].sel(component=topic).values for name in ("label", "value"))
        sets = [set(row[size > 0]) for row, size in zip(words, sizes, strict=True)]
        for ax, particle, row, size in zip(line, heaviest, words, sizes, strict=True):
            at = np.arange(row.size)
            counts = [sum(word in one for one in sets) for word in row]
            names = [
                "in all lists" if n == len(sets) else "in one list" if n == 1 else "in some lists"
                for n in counts
            ]
            ax.barh(at, size / sizes.max(), height=0.72, color=[colors[name] for name in names])
            for y, word, length in zip(at, row, size / sizes.max(), strict=True):
                where = {"xytext": (3, 0), "textcoords": "offset points", "va": "center"}
                ax.annotate(str(word), (length, y), fontsize=8, **where)
            ax.set(ylim=(row.size - 0.4, -0.6), xlim=(0.0, 1.9), xticks=[], yticks=[])
            ax.spines[["top", "right", "bottom"]].set_visible(False)
            number = top["draw"].values[particle % top.sizes["draw"]]
            title = f"particle {number}, mass {mass[particle]:.3f}"
            ax.set_title(title, loc="left", fontsize=9)
        line[0].set_ylabel(f"topic {topic}", fontsize=10)
    handles = [Patch(color=color, label=text) for text, color in colors.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)


def draw_scores(figure: Any, scores: xr.Dataset) -> None:
    """Draw the scores of all particles by digit, and lines for particles that are best in most.

    A dot is a particle, whose area grows with its mass; a short bar is the mean.
    """
    digits = [str(name) for name in scores["score"].values]
    mass = scores["weight"].values.ravel()
    values = scores["value"].transpose("chain", "draw", "score").values.reshape(mass.size, -1)
    best = np.nanargmax(values, axis=0)
    ax, at = figure.subplots(), np.arange(len(digits))
    spread = 0.52 * ((np.arange(mass.size) * 0.618034) % 1.0) - 0.26
    for k in at:
        area = 6 + 34 * mass / mass.max()
        ax.scatter(k + spread, values[:, k], s=area, color="#b8c4d0", alpha=0.75, lw=0)
    ax.hlines(scores["mean"].values, at - 0.3, at + 0.3, color="#333333", lw=1.2, zorder=2)
    particles, wins = np.unique(best, return_counts=True)
    for number, particle in enumerate(particles[np.argsort(-wins, kind="stable")]):
        x, won, color = at + spread[particle], best == particle, f"C{number % 10}"
        if number < MAX_LINES:
            ax.plot(x, values[particle], ":o", color=color, lw=1.3, ms=4, mfc="white", zorder=3)
        label = f"{particle}: best in {', '.join(digits[k] for k in np.flatnonzero(won))}"
        ax.plot(x[won], values[particle, won], "o", color=color, ms=7, zorder=5, label=label)
    ax.set_xticks(at, digits)
    ax.set_xlabel("digit", fontsize=9)
    ax.set_ylabel("AUC", fontsize=9)
    ax.set_title("AUC of each digit for every particle (bar: mean)", loc="left", fontsize=9)
    ax.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", title="particle", frameon=False, fontsize=8)


def picture(path: str, top: xr.Dataset, chosen: list[Any], scores: xr.Dataset) -> None:
    """Words above, AUC below."""
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=(10.5, 9.6), layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=(1.35, 1))
    draw_topics(upper, top, chosen)
    upper.suptitle("The same topics in the three particles with the largest weights", fontsize=10)
    draw_scores(lower, scores)
    figure.savefig(path, dpi=120)
    print(f"\nwrote {path}")


def main() -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--documents", help="npz file of a matrix of counts and its words")
    parser.add_argument("--topics", type=int, default=8, help="number of topics")
    parser.add_argument("--counts", action="store_true", help="use plain counts of words")
    parser.add_argument(
        "--components", type=int, default=10, help="number of components of the digits"
    )
    parser.add_argument("--particles", type=int, default=25, help="number of particles")
    parser.add_argument(
        "--pilot", type=int, default=10, help="number of pilot runs, which set the threshold"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--picture", default="readings.png", help="image file to write")
    settings = parser.parse_args()

    if settings.documents:
        documents = documents_of_file(settings.documents)
    else:
        documents = documents_of_python()
    documents = documents._replace(counts=documents.counts[documents.counts.sum(axis=1) > 0])
    V = documents.counts.T.tocsr().astype(np.float32) if settings.counts else weighted(documents)
    print("{} documents, {} words".format(*documents.counts.shape))
    topics = posterior(V, settings.topics, settings)
    top = top_entries(topics, 15, labels=documents.words)
    spread, chosen = told_apart(topics)
    tell_topics(topics, top, spread, chosen)

    digits = load_digits()
    print(f"\n{len(digits.target)} images of digits")
    trace = posterior(digits.data.T.astype(np.float32), settings.components, settings)
    scores, again = (downstream(trace, auc_of(digits.target, seed)) for seed in (0, 1))
    tell_digits(trace, scores, again)
    picture(settings.picture, top, chosen, scores)


if __name__ == "__main__":
    main()
