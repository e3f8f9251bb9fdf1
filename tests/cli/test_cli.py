import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zarr

import daskfactor
from daskfactor import demos
from daskfactor.errors import (
    DataError,
    DataWarning,
    DivergenceError,
    EngineError,
    ModelError,
    OptionError,
    StoreError,
    StoreFormatError,
)
from tests.cli.shell import call
from tests.fake_run import fake_run


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A path at which `open_run` finds the fake run."""
    path = tmp_path / "run.zarr"
    path.mkdir()

    def open_run(given):
        assert given == str(path)
        return fake_run()

    monkeypatch.setattr(daskfactor, "open_run", open_run, raising=False)
    return path


@pytest.fixture
def matrix(tmp_path):
    path = tmp_path / "data.npy"
    np.save(path, np.ones((6, 5)))
    return path


class Calls(list):
    """What a stand-in was called with; `raises` makes it fail."""

    raises: BaseException | None = None


@pytest.fixture
def sampled(monkeypatch):
    calls = Calls()

    def sample(V, model, sampler=None, **options):
        calls.append({"V": V, "model": model, "sampler": sampler, **options})
        if calls.raises is not None:
            raise calls.raises
        return fake_run()

    monkeypatch.setattr(daskfactor, "sample", sample, raising=False)
    return calls


def fit(matrix, *more):
    return call("fit", matrix, "--store", "run.zarr", "-k", 3, *more)


def test_help_is_fast_because_it_imports_nothing_heavy():
    code = (
        "import sys; from daskfactor.cli.main import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'numpy', 'numba', 'dask', 'distributed', 'xarray', 'zarr', 'scipy'}\n"
        "heavy.add('matplotlib')\n"
        "sys.exit(' '.join(sorted(heavy & set(sys.modules))) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for command in ("demo", "fit", "resume", "predict", "info", "plot", "convert"):
        assert f" {command} " in done.stdout


@pytest.mark.parametrize("command", ["demo", "fit", "resume", "predict", "info", "plot", "convert"])
def test_every_command_has_help_with_an_example(command):
    result = call(command, "--help")
    assert result.exit_code == 0
    assert f"daskfactor {command} " in result.stdout


def test_version():
    assert call("--version").stdout.split()[0] == "daskfactor"


def test_fit_hands_its_options_on(matrix, sampled):
    result = fit(
        matrix,
        "--beta",
        2,
        "--dispersion",
        0.5,
        "--draws",
        8,
        "--tune",
        6,
        "--chains",
        2,
        "--thin",
        3,
        "--sampler",
        "psgrrld",
        "--blocks",
        2,
        "--seed",
        9,
        "--dtype",
        "float64",
        "--executor",
        "serial",
        "--keep",
        "moments",
        "--monitor",
        "missing",
        "--quiet",
        "--init",
        "q-transform",
        "--starts",
        2,
        "--device",
        "cuda",
    )
    assert result.exit_code == 0, result.output
    (call,) = sampled
    data = call.pop("V")
    assert (data.shape, data.grid.blocks, data.dtype) == ((6, 5), 2, np.float64)
    model = call.pop("model")
    assert (model.n_components, model.beta, model.dispersion) == (3, 2.0, 0.5)
    assert type(call.pop("sampler")) is daskfactor.PSGRRLD
    assert call == {
        "draws": 8,
        "tune": 6,
        "chains": 2,
        "thin": 3,
        "random_seed": 9,
        "executor": "serial",
        "keep": "moments",
        "monitor": "missing",
        "progressbar": False,
        "store": "run.zarr",
        "client": None,
        "overwrite": False,
        "init": "q-transform",
        "starts": 2,
        "device": "cuda",
    }


@pytest.mark.parametrize(("text", "dispersion"), [("column", "column"), ("0.5", 0.5)])
def test_dispersions_of_counts(text, dispersion, matrix, sampled):
    model = ("--model", "negative-binomial")
    assert fit(matrix, *model, "--dispersion", text, "--quiet").exit_code == 0
    assert sampled[0]["model"].dispersion == dispersion
    refused = fit(matrix, "--model", "gaussian", "--dispersion", text)
    assert "belongs to --model tweedie or negative-binomial" in refused.stderr


def test_fit_prints_one_json_object_and_nothing_else(matrix, sampled):
    result = fit(matrix, "--json")
    summary = json.loads(result.stdout)
    assert summary["store"] == "run.zarr"
    assert summary["draws_done"] == 20
    assert summary["model"]["n_components"] == 3
    assert result.stderr == ""


def test_fit_table_tells_how_to_go_on(matrix, sampled):
    result = fit(matrix)
    assert result.exit_code == 0, result.output
    assert "daskfactor resume run.zarr" in result.stdout


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DataError("two words"), 3),
        (ModelError("two words"), 3),
        (OptionError("two words"), 3),
        (StoreError("two words"), 4),
        (StoreFormatError("two words"), 4),
        (FileExistsError(17, "two words", "run.zarr"), 4),
        (DivergenceError("two words"), 5),
        (EngineError("two words"), 1),
        (ZeroDivisionError("two words"), 1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_errors_are_one_sentence_and_an_exit_code(matrix, sampled, error, code):
    sampled.raises = error
    result = fit(matrix)
    assert result.exit_code == code
    assert result.stdout == ""
    assert "two words" in result.stderr
    assert result.stderr.count("\n") == 1
    assert "Traceback" in fit(matrix, "--debug").stderr


@pytest.mark.parametrize(
    ("begun", "advice"),
    [(True, "go on with: daskfactor resume run.zarr"), (False, "before anything was written")],
)
def test_ctrl_c_says_how_to_go_on(matrix, sampled, monkeypatch, tmp_path, begun, advice):
    monkeypatch.chdir(tmp_path)
    if begun:
        (tmp_path / "run.zarr").mkdir()
    sampled.raises = KeyboardInterrupt()
    result = fit(matrix)
    assert result.exit_code == 130
    assert advice in result.stderr


def test_usage_errors_are_2(matrix):
    assert call("fit", matrix).exit_code == 2
    assert fit(matrix, "--draws", 0).exit_code == 2
    assert fit(matrix, "--sampler", "nuts").exit_code == 2
    assert call("resume", "run.zarr", "--device", "tpu").exit_code == 2
    assert call("paint").exit_code == 2


def test_bad_values_are_3(matrix, tmp_path):
    assert fit(matrix, "--monitor", "all").exit_code == 3
    assert fit(matrix, "--beta", 1.5).exit_code == 3
    assert fit(tmp_path / "none.npy").exit_code == 3


def test_warnings_are_one_line_on_stderr(matrix, monkeypatch):
    def sample(*arguments, **options):
        import warnings

        warnings.warn("zeros are taken as counts", DataWarning, stacklevel=1)
        return fake_run()

    monkeypatch.setattr(daskfactor, "sample", sample, raising=False)
    result = fit(matrix, "--json")
    assert result.stderr == "note: zeros are taken as counts\n"
    json.loads(result.stdout)


def test_resume_hands_its_options_on(matrix, monkeypatch):
    calls = []

    def resume(store, **options):
        calls.append((store, options))
        return fake_run()

    monkeypatch.setattr(daskfactor, "resume", resume, raising=False)
    result = call(
        "resume", "run.zarr", "--draws", 5, "--data", matrix, "--device", "cuda", "--json"
    )
    assert result.exit_code == 0, result.output
    ((store, options),) = calls
    assert store == "run.zarr"
    assert options.pop("V") == str(matrix)
    told = {"draws": 5, "progressbar": True, "executor": "auto", "client": None}
    assert options == told | {"device": "cuda"}
    assert call("resume", "run.zarr", "--json").exit_code == 0
    assert calls[1][1] == told | {"device": None, "draws": None, "V": None}


def test_info_tells_of_data_draws_and_health(store):
    summary = json.loads(call("info", store, "--json").stdout)
    assert summary["data"]["n_observed"] == 63
    assert summary["diverging"] == 1
    assert (summary["draws_done"], summary["draws_kept"]) == (20, 20)
    assert abs(summary["lp_drift"]) < 2
    text = call("info", store).stdout
    assert "75.0%" in text
    assert "1 divergences" in text


def test_info_tells_what_has_converged_when_asked(store):
    text = call("info", store, "--diagnose").stdout
    assert "2 chains of 20 draws" in text
    assert "log density" in text
    summary = json.loads(call("info", store, "--diagnose", "--json").stdout)
    predictions, found = summary["lights"]["predictions"], summary["convergence"]
    assert predictions["status"] in ("amber", "red")
    assert "Draw about 100 more" in predictions["advice"]
    assert f"predictions   {predictions['status'].upper()}" in call("info", store).stdout
    assert found["functionals"]["lp"]["rhat"] > 0.9
    assert found["functionals"]["lp"]["share"] is None


def test_info_of_a_run_without_draws(store, monkeypatch):
    tree = fake_run(keep="moments").filter(lambda node: "stats" not in (node.name or ""))
    tree.attrs |= {"dispersion": None, "draws": 20}
    monkeypatch.setattr(daskfactor, "open_run", lambda path: tree, raising=False)
    result = call("info", store)
    assert result.exit_code == 0, result.output
    assert "no draws yet" in result.stdout


def test_plot_writes_a_picture(store, tmp_path):
    picture = tmp_path / "run.png"
    result = call("plot", store, "-o", picture, "--image-shape", "4x3", "-k", 2, "--json")
    assert json.loads(result.stdout) == {"picture": str(picture)}
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert call("plot", store, "-o", picture, "--image-shape", "4").exit_code == 3


def test_plot_offers_each_figure_by_its_name(store, tmp_path):
    picture = tmp_path / "run.svg"
    assert call("plot", store, "--figure", "shares", "-o", picture).exit_code == 0
    assert picture.read_text().startswith("<?xml")
    assert "top-entries" in call("plot", store, "--list").stdout
    result = call("plot", store, "--figure", "pie", "-o", picture)
    assert result.exit_code == 3
    assert "no figure 'pie'; figures are components, curves" in result.stderr
    result = call("plot", store, "--figure", "all", "-k", 2, "-o", picture, "--json")
    answer = json.loads(result.stdout)
    assert str(tmp_path / "run-top-entries.svg") in answer["pictures"]
    assert all(Path(name).is_file() for name in answer["pictures"])
    assert set(answer["left_out"]) == {"curves", "maps"}


def test_report_writes_a_page(store, tmp_path):
    page = tmp_path / "run.html"
    assert call("report", store, "-o", page, "--title", "Sites").exit_code == 0
    assert "<h1>Sites</h1>" in page.read_text()
    assert call("report", store, "-o", tmp_path / "run.pdf").exit_code == 3


def test_demo_refuses_a_store_that_exists_before_it_works(tmp_path):
    result = call("demo", "digits", "--store", tmp_path)
    assert result.exit_code == 4
    assert "--overwrite" in result.stderr


def test_demo_prints_its_scores(tmp_path, monkeypatch):
    images = demos.load_digits()
    erased = np.zeros(images.truth.shape, dtype=bool)
    erased[::3] = True

    def run(given, **options):
        assert options["missing"] == 0.5
        scores = [demos.Score("row mean", 0.2, 0.0), demos.Score("posterior mean", 0.1, 2.5)]
        return demos.Evaluation(given, erased, scores, 0.91, 0.9, images.truth, images.truth / 9)

    monkeypatch.setattr(demos, "run", run)
    place = ["--store", tmp_path / "d.zarr", "-o", tmp_path / "d.png"]
    table = call("demo", "digits", "--missing", 0.5, *place)
    assert table.exit_code == 0, table.output
    assert "0.1000" in table.stdout
    assert "91.0%" in table.stdout
    refused = call("demo", "digits", "--missing", 0.5, *place)
    assert refused.exit_code == 4
    assert "d.png exists already; give another name, or allow --overwrite" in refused.stderr
    again = ("--overwrite", "--json")
    result = json.loads(call("demo", "digits", "--missing", 0.5, *place, *again).stdout)
    assert result["scores"][1] == {"method": "posterior mean", "error": 0.1, "seconds": 2.5}
    assert (tmp_path / "d.png").exists()


def test_demo_replaces_nothing_but_runs(tmp_path):
    target = tmp_path / "notes.zarr"
    zarr.create_group(target, attributes={"inference_library": "another"})
    result = call("demo", "digits", "--store", target, "--overwrite", "--tune", 1, "--draws", 1)
    assert result.exit_code == 4, result.output
    assert zarr.open_group(target, mode="r").attrs["inference_library"] == "another"


def test_fit_replaces_a_run_when_told_to(matrix, tmp_path):
    store = tmp_path / "run.zarr"
    short = ("--store", store, "-k", 2, "--draws", 2, "--tune", 2, "--quiet")
    assert call("fit", matrix, *short).exit_code == 0
    refused = call("fit", matrix, *short)
    assert refused.exit_code == 4
    assert "--overwrite" in refused.stderr
    assert "overwrite=True" not in refused.stderr
    assert call("fit", matrix, *short, "--overwrite", "--seed", 5).exit_code == 0
    assert daskfactor.open_run(str(store)).attrs["random_seed"] == "5"


@pytest.mark.parametrize(
    ("sentence", "told"),
    [
        ("pass overwrite=True to replace it", "pass --overwrite to replace it"),
        ('say unstored="missing" or unstored="zero"', "say --unstored missing or --unstored zero"),
        ("with allow_empty=True", "with --allow-empty"),
        ("beta=1.5 is outside", "--beta 1.5 is outside"),
        ("nothing=True is an option of ours", "nothing=True is an option of ours"),
        ("pass it again: resume(path, V=...)", "again: daskfactor resume RUN --data FILE"),
        ("or use daskfactor.resume to go on", "or use daskfactor resume to go on"),
        ("pass the path given as store=", "pass the path given as --store"),
        ('or pass as_blocks(V, dtype="float64")', "or pass --dtype float64"),
        ("use PSGLD() or BlockHMC() here", "use --sampler psgld or --sampler blockhmc here"),
        ("pass Nobody() or str()", "pass Nobody() or str()"),
        ("with n_components=5 or a larger n_components.", "with -k 5 or a larger -k."),
        ('n_components="auto" does not go with it', "-k auto does not go with it"),
        ("compare with NegativeBinomialNMF", "compare with --model negative-binomial"),
        ("or pass dispersion=1.0 all the same", "or pass --dispersion 1.0 all the same"),
    ],
)
def test_errors_speak_of_options_as_the_shell_has_them(matrix, sampled, sentence, told):
    sampled.raises = OptionError(sentence)
    assert told in fit(matrix).stderr


@pytest.mark.parametrize("name", ["psgld", "PSGLD", "langevin", "LangevinDynamics", "sgl", "gib"])
def test_samplers_go_by_the_beginning_of_their_names(matrix, sampled, name):
    assert fit(matrix, "--sampler", name).exit_code == 0
    (call,) = sampled
    assert type(call["sampler"]).__name__.lower().startswith(name.lower())


@pytest.mark.parametrize("name", ["nuts", "psg", ""])
def test_samplers_that_nobody_could_mean_are_refused(matrix, name):
    result = fit(matrix, "--sampler", name)
    assert result.exit_code == 2
    assert "PSGLD" in result.stderr


@pytest.mark.parametrize(
    ("done", "advice"), [(20, "resume run.zarr --draws 500"), (7, "resume run.zarr")]
)
def test_info_says_how_to_go_on(store, monkeypatch, done, advice):
    tree = fake_run(draws=done)
    tree.attrs["draws"] = 20
    monkeypatch.setattr(daskfactor, "open_run", lambda path: tree, raising=False)
    found = json.loads(call("info", store, "--json").stdout)["resume"]
    assert found == f"daskfactor {advice.replace('run.zarr', str(store))}"
    assert ("to finish" in call("info", store).stdout) == (done == 7)


def test_what_a_run_would_take(matrix):
    options = ["--draws", 20, "--tune", 20, "--blocks", 2, "--workers", 2, "--threads", 1]
    given = [*options, "--network", "1 Gbit/s", "--json"]
    found = json.loads(call("estimate-cost", matrix, "-k", 3, *given).stdout)
    known = {"draws": 20, "tune": 20, "blocks": 2, "workers": 2, "lanes": 1, "store": True}
    cost = daskfactor.estimate_cost(
        np.ones((6, 5)), daskfactor.TweedieNMF(3), **known, network=1.25e8
    )
    assert (found["sent"], found["state"], found["store"]) == (cost.sent, cost.state, cost.store)
    assert found["sent"] > 0
    refused = call("estimate-cost", matrix, "-k", 3, "--network", "fast")
    assert refused.exit_code == 3
    assert "network is bytes a second" in refused.stderr
