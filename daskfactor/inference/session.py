"""Open what all verbs need: who listens, a seed, the data on their grid, an executor."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar, Unpack

import numpy as np

import daskfactor
from daskfactor.checks import refuse_unknown, warn
from daskfactor.coupled.source import join
from daskfactor.data.blocks import BlockedData
from daskfactor.data.grid import Bands, Grid, block_at
from daskfactor.data.loading import UNCERTAINTY
from daskfactor.data.opening import reopen
from daskfactor.data.sources import blocks_of
from daskfactor.data.weights import StoredWeights
from daskfactor.errors import (
    DaskfactorError,
    DataError,
    DataWarning,
    ModelError,
    StoreError,
    StoreFormatError,
)
from daskfactor.executors import (
    Choice,
    Executor,
    Trial,
    choose_executor,
    device_options,
    make_executor,
    on_device,
)
from daskfactor.executors.plan import Action, CycleOptions, Op
from daskfactor.inference.langevin import PSGLD
from daskfactor.inference.multiplicative import initial_state, mean_floor
from daskfactor.inference.program import Program, prepare_state
from daskfactor.machine import require_memory
from daskfactor.models.gamma_factors import Hyperparameters
from daskfactor.models.negative_binomial import NegativeBinomial
from daskfactor.options import OnDevice, OnSampled, split
from daskfactor.progress import OnEvent, RunEvent, progress_bar
from daskfactor.random import resolve_seed
from daskfactor.runs.files import damaged
from daskfactor.runs.trace import Run
from daskfactor.tensor.source import as_tensor, grid_of
from daskfactor.urls import Location, is_url

if TYPE_CHECKING:
    from daskfactor.executors.device import CUDA

TINY_STEP = 1e-9
"""Step of the block update that is timed: the state hardly moves."""
MANY_EMPTY = 1000
EMPTY_SHARE = 0.3
"""Rows or columns of zeros, and their share, from which on a run is told to leave them out."""

D = TypeVar("D")
Load = Callable[[ExitStack], tuple[D, str]]
"""Opens data, has them closed with the stack, and gives them with a few words on their size."""


@dataclass(frozen=True)
class Session(Generic[D]):
    """Data that are open and checked, a seed, who is told of progress, and an executor.

    Attributes
    ----------
    seed
        Root of all random numbers.
    on_event
        Takes a `RunEvent`, shows it and hands it to the caller's callback.
    data
        What the verb works on; closed with the session unless they are the caller's own.
    stack, choose, options
        What is closed with the session, and what its executor is made from.
    device
        The GPU to use; None: processors.
    """

    seed: int
    on_event: OnEvent
    data: D
    stack: ExitStack
    choose: Callable[[Any, D], Choice]
    options: OnDevice
    device: "CUDA | None"

    @property
    def on_device(self) -> bool:
        """True if a GPU is used."""
        return self.device is not None

    @cached_property
    def executor(self) -> Executor:
        """Make the executor asked for, or one that suits, closed with the session.

        It is made when it is first asked for, so that a verb can refuse what it has to
        refuse before a cluster is bothered.
        """
        requested, client = self.options.get("executor", "auto"), self.options.get("client")
        name, reason = requested, "as asked for"
        if self.device is not None:
            executor = on_device(self.device, requested, client)
            self.stack.callback(executor.close)
            return executor
        if isinstance(requested, str) and requested == "auto":
            name, reason = "threads", "no client was given"
            if client is not None:
                name, reason, short = self.choose(client, self.data)
                self.on_event(RunEvent("load", 1, 1, message=f"{name}: {short}"))
        executor = make_executor(name, client)
        if executor is not requested:
            executor.reason = reason
            self.stack.callback(executor.close)
        return executor


@contextmanager
def session_of(
    load: Load[D],
    choose: Callable[[Any, D], Choice],
    random_seed: int | None = None,
    **options: Unpack[OnDevice],
) -> Iterator[Session[D]]:
    """Open what a verb needs whose data are no matrix on a grid.

    ``choose`` says of a client and the data which executor suits.
    """
    seed, device = resolve_seed(random_seed), device_options(options.get("device"))
    with ExitStack() as stack:
        bar = progress_bar(options.get("progressbar", True), options.get("callback"))
        on_event = stack.enter_context(bar)
        on_event(RunEvent("load", 0, 1))
        data, size = load(stack)
        on_event(RunEvent("load", 1, 1, message=size))
        yield Session(seed, on_event, data, stack, choose, options, device)


def device_attrs(executor: Executor) -> dict[str, str]:
    """Name the GPU that does the work; nothing where processors do it."""
    device = getattr(executor, "device", None)
    return {} if device is None else {"device": device}


def blocks_for(model: Any, V: Any, **options: Any) -> BlockedData:
    """Put data on blocks as a model takes them: a matrix, several, or a tensor."""
    # What has covariates is predicted from these, if from nothing else.
    options = {"allow_empty": model.covariates != (None, None)} | options
    if model.joins:
        return join(V, model.relations, **options)
    if model.tensor:
        return as_tensor(V, names=model.factors, **options)
    usual = None if model.nonnegative else "missing"
    return blocks_of(V, usual=usual, components=component_count(model), **options)


def component_count(model: Any) -> int | None:
    """Return the number of components of a model; None if the data are to tell."""
    return None if model.n_components == "auto" else model.n_components


def session(
    V: Any,
    model: Any,
    *,
    reading: Mapping[str, Any] | None = None,
    check: Callable[[BlockedData], None] | None = None,
    weighed: bool = False,
    random_seed: int | None = None,
    **options: Unpack[OnSampled],
) -> AbstractContextManager[Session[BlockedData]]:
    """Open what a verb on a matrix needs: ``with session(V, model, ...) as run``.

    Parameters
    ----------
    V
        As for `as_blocks`.
    model
        What the data are checked against, and a block update is timed with.
    reading
        Options that `as_blocks` alone has, such as ``{"dtype": "float64"}``.
    check
        Refuses data; left out, whether the model can have produced them.
    weighed
        Whether the verb takes weights of cells into account.
    random_seed, options
        As the verbs have them.

    Raises
    ------
    DataError, ModelError, OptionError, GridError
        If data, model or options cannot be used.
    """
    running, data_options = split(options)

    def load(stack: ExitStack) -> tuple[BlockedData, str]:
        if isinstance(V, dict) and not model.joins:
            model.placed({})
        data = blocks_for(model, V, **(reading or {}), **data_options)
        if data is not V:
            stack.callback(data.close)
        if not weighed:
            data.refuse_weights("this")
        placed = model.placed(data.placed)
        (check or partial(check_data, placed.sized(data.shape, data.labels.keys)))(data)
        if check is None and not model.tensor:
            _warn_of_zeros(data)
        return data, " x ".join(str(side.size) for side in data.grid.sides)

    def choose(client: Any, data: BlockedData) -> Choice:
        sized = model.placed(data.placed).sized(data.shape)
        return choose_executor(client, data, sized.width, _block_trial(data, sized))

    return session_of(load, choose, random_seed, **running)


TWICE = ("draws", "tune", "chains", "thin", "keep", "keep_every", "dtype", "particles")
"""Options of a run that are attributes of its results, too."""


def description_of(run: Any) -> dict[str, Any]:
    """Read how a stored run was begun: its options, model, algorithm and source.

    Raises
    ------
    StoreFormatError
        If that is impossible, of a newer version, or not what attributes of the run say.
    """
    with version_errors(run):
        attrs, described = run.attrs, json.loads(run.attrs["run"])
        refuse_unknown("the stored run", described, ("options", "model", "sampler", "source"))
        options = described["options"]
        expected = {name: options[name] for name in TWICE if name in options}
        expected |= {name: json.dumps(described[name]) for name in ("model", "sampler")}
        expected |= {"random_seed": str(options["seed"])}
        if other := [name for name, value in expected.items() if attrs.get(name, value) != value]:
            raise damaged(run.path, f"it says two things of its {other[0]}")
        return dict(described)


def session_again(
    run: Any,
    V: Any,
    model: Any,
    memory_limit: int | str | None,
    random_seed: int | None = None,
    **options: Unpack[OnDevice],
) -> AbstractContextManager[Session[BlockedData]]:
    """Open what a stored run needs to go on, with the data that it began with.

    They are those given again, kept in the run, or read from where they were. ``run`` has the
    ``attrs``, ``path`` and ``tree()`` of a `RunStore`.

    Raises
    ------
    DataError
        If they must be given, or are not those the run began with.
    """
    if isinstance(V, dict) and len(V) == 1 and not model.joins:
        (V,) = V.values()  # a run of one matrix that was passed by name
    with version_errors(run):
        saved, described = json.loads(run.attrs["data"]), json.loads(run.attrs["run"])
        reading = _reading(saved) | {"dtype": described["options"]["dtype"]}
    weights = _weights_again(run, saved, described["source"], V)
    source = _source_again(run, described["source"], V)

    def check(data: BlockedData) -> None:
        if data.fingerprint != saved["fingerprint"]:
            raise DataError(
                f"the data are not those that the run at {run.path} began with: "
                f"got {data.fingerprint}, the run has {saved['fingerprint']}; pass the run's data"
            )

    reading |= {"memory_limit": memory_limit, **weights}
    if (getattr(source, "ndim", 2) > 2 and not model.tensor) or type(source).__name__ == "Dataset":
        reading |= {side: saved[side] for side in ("rows", "columns") if side in saved}
    keywords: dict[str, Any] = {"reading": reading, "check": check, "weighed": True, **options}
    return session(source, model, random_seed=random_seed, **keywords)


def _reading(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `as_blocks` by which data were read."""
    placed, unstored = saved.get("placed", {}), saved.get("unstored")
    names = ("allow_empty",) if placed else ("balance", "allow_empty")
    reading = {name: saved[name] for name in names if name in saved}
    if "offsets" in placed:
        return reading | {"blocks": grid_of(placed["offsets"]), "unstored": unstored}
    if placed:
        unstored = {relation["name"]: relation["unstored"] for relation in placed["relations"]}
    sides = (Bands(tuple(saved[f"{side}_offsets"])) for side in ("row", "column"))
    return reading | {"blocks": Grid(*sides), "unstored": unstored}


@contextmanager
def version_errors(run: Any) -> Iterator[None]:
    """Turn what a run was begun with, and this version cannot read, into one sentence."""
    try:
        yield
    except StoreError:
        raise
    except (DaskfactorError, AttributeError, KeyError, TypeError, ValueError) as error:
        version = run.attrs.get("inference_library_version", "an unknown version")
        raise StoreFormatError(
            f"the run at {run.path} was begun by daskfactor {version} with options or checkpoints "
            f"that this state of it ({daskfactor.__version__}) does not know ({error}); its draws "
            "can be read; finish it with the one that began it, or begin it anew"
        ) from error


def _source_again(run: Any, source: dict[str, Any], V: Any) -> Any:
    """Find the data: given again, kept in a stored run, or in the place they were read from."""
    stored = _stored_array(run, "V") if V is None else V
    if stored is None and source["location"] is None:
        names = {"coupled": "several matrices that are", "tensor": "a tensor that is"}
        kind = names.get(source["kind"], f"a {source['kind']} object that is")
        raise DataError(
            f"the run at {run.path} was made from {kind} not kept with it; pass the data again: "
            "resume(path, V=...)"
        )
    return reopen(source["location"] if stored is None else stored, source)


def _stored_array(run: Any, name: str) -> Any:
    """Read what a stored run keeps beside its results, the data or their weights, if it does."""
    array = Run(run.tree()).observed(name)
    # By threads of this process: a client that is about may have no workers left.
    return None if array is None else array.load(scheduler="threads")


def _weights_again(
    run: Any, saved: dict[str, Any], source: dict[str, Any], V: Any
) -> dict[str, Any]:
    """Find the weights that cells had, as an argument of `as_blocks`; none if ``V`` has them."""
    weighting = saved.get("weighting")
    if weighting is None or getattr(V, "weighting", None) == weighting:
        return {}
    weights = _stored_array(run, "weights")
    if weights is not None:
        return {"weights": StoredWeights(weighting, weights.values)}
    if source.get("weights") is not None:
        path = source["weights"]
        return {weighting: V.sibling(path) if isinstance(V, Location) and is_url(path) else path}
    options = [f"blocks={len(saved['row_offsets']) - 1}"]
    options += [f'unstored="{saved["unstored"]}"'] if saved["unstored"] else []
    options += ["balance=True"] if saved["balance"] else []
    raise DataError(
        f"the run at {run.path} was made from data with {weighting} of cells, which it does not "
        "keep and which were read from no path; pass the data with them again: resume(path, "
        f"V=as_blocks(V, {', '.join(options)}, {weighting}=...))"
    )


def _warn_of_fractions(model: Any, data: BlockedData) -> None:
    """Say that a law of counts is given other values."""
    laws = "beta=0.5" if data.minimum <= 0 else "beta=0 or beta=0.5"
    where, advice = "the data hold", f"take TweedieNMF with {laws} for such values"
    if data.source.kind == "anndata":
        layer = data.source.layer
        where = f"{'X' if layer is None else f'the layer {layer!r}'} of the AnnData holds"
        others = [f'layer="{name}"' for name in ("counts", "raw") if name != layer]
        advice = f"pass the counts, for example {' or '.join(others)}"
    warn(
        f"{where} fractions, as normalised or logarithmic values are, and {model.likelihood} is a "
        f"law of counts; {advice}, or go on if these are values to be taken so",
        DataWarning,
    )


def _warn_of_zeros(data: BlockedData) -> None:
    """Warn of many rows or columns without an entry, where unstored cells are observed zeros."""
    if not data.is_sparse or data.unstored != "zero" or not data.in_memory:
        return
    if max(data.shape) < MANY_EMPTY:
        return
    stored = np.zeros(data.shape[0], np.int64), np.zeros(data.shape[1], np.int64)
    for block in data.grid.all_blocks():
        view: Any = data.view(*block)
        rows, columns = data.grid.slices(block)
        stored[0][rows] += np.diff(view.indptr)
        stored[1][columns] += np.bincount(view.indices, minlength=view.n)
    for side, counts, axis in zip(("rows", "columns"), stored, (1, 0), strict=True):
        empty = int((counts == 0).sum())
        if empty >= MANY_EMPTY and empty >= EMPTY_SHARE * counts.size:
            mask = "np.diff(V.tocsr().indptr) > 0" if axis else ":, np.diff(V.tocsc().indptr) > 0"
            warn(
                f"{empty} of {counts.size} {side} hold nothing but zeros; they cost time and "
                f"say next to nothing of the components: leave them out, for example V[{mask}]",
                DataWarning,
            )


def check_data(model: Any, data: BlockedData) -> None:
    """Refuse values that the law cannot have produced, and what precision or memory cannot hold."""
    if data.weighting == UNCERTAINTY:
        model.with_uncertainty()
    model.check_values(data.minimum, data.maximum)
    # Under beta=1 any intensities go with a dispersion that is estimated, as in KL-NMF.
    poisson, annotated = model.likelihood.counts, data.source.kind == "anndata"
    strict = isinstance(model.likelihood, NegativeBinomial) or (
        poisson and getattr(model, "dispersion", None) == 1.0
    )
    if not data.is_integer and (strict or (poisson and annotated)):
        _warn_of_fractions(model, data)
    model.check_shape(data.shape)
    if model.tensor and data.unstored == "zero" and model.likelihood.visits_all(True):
        raise ModelError(
            f"zeros that a sparse tensor does not store add up in a closed form under beta=1 and "
            f'beta=2 only, got {model.likelihood}; pass unstored="missing" if they are not '
            "observed, or a dense array"
        )
    largest = max(abs(data.maximum), abs(data.minimum))
    powers = model.likelihood.steepest_power
    limit = float(np.finfo(data.dtype).max) ** (0.8 / powers)
    if largest > 0 and not 1 / limit < largest < limit:
        raise DataError(
            f"the data go up to {largest:.3g}, which {data.dtype} arithmetic with "
            f"{model.likelihood} cannot work with (between {1 / limit:.0e} and {limit:.0e}); "
            "rescale the data, for example divide them by their mean, or pass "
            'as_blocks(V, dtype="float64")'
        )
    size = sum(data.shape) * model.width * data.dtype.itemsize
    shape = " x ".join(map(str, data.shape))
    what = f"one W and one H of {shape} data with n_components={model.n_components} take"
    require_memory(size, what, "take fewer components")  # before anything is made of that size


def _block_trial(data: BlockedData, model: Any) -> Trial | None:
    """Make the update of the fullest block from a random start; None: only its size can tell."""
    if not model.nonnegative:
        return None
    state = initial_state(data, model.n_components, 0, 0)
    prepare_state(state)
    kernel = PSGLD(TINY_STEP, "identity").kernel(model)
    floor, hyper = mean_floor(data, model.likelihood), Hyperparameters(1.0, 1.0, 1.0)
    free = (None,) * len(data.grid.sides)
    program = Program(kernel, model.likelihood, floor, hyper, (0, 0), free, shrink=TINY_STEP)
    fullest = np.unravel_index(int(np.argmax(data.n_stored)), data.n_stored.shape)
    block = block_at(*(int(band) for band in fullest))
    op = Op(Action.UPDATE, block, 0, 0, 1.0, False, CycleOptions())
    return program, op, state, data
