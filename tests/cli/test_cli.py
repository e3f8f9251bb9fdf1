import json
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import ClassVar
from unittest.mock import Mock

import numpy as np
import pytest
import typer
import xarray as xr
import zarr
from typer.testing import CliRunner

import daskfactor
from daskfactor import demos, errors
from daskfactor.cli import main, verb_options
from daskfactor.cli.options import Command
from daskfactor.errors import DataWarning, OptionError
from daskfactor.evidence import rank
from daskfactor.evidence.base import Evidence
from tests.cli.shell import answer, call, fails, plain, stand_in, succeed
from tests.fake_run import fake_run


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A path at which `open_run` finds the fake run."""
    path = tmp_path / "run.zarr"
    path.mkdir()

    stand_in(monkeypatch, "open_run", side_effect=lambda given: {str(path): fake_run()}[given])
    return path


@pytest.fixture
def matrix(tmp_path):
    path = tmp_path / "data.npy"
    np.save(path, np.ones((6, 5)))
    return path


@pytest.fixture
def sampled(monkeypatch):
    """A verb `sample` that gives the fake run."""
    return stand_in(monkeypatch, "sample", return_value=fake_run())


def of_fit(matrix, *more):
    """The words of a command."""
    return "fit", matrix, "--store", "run.zarr", "-k", 3, *more


COMMANDS = ("demo", "fit", "resume", "predict", "info", "plot", "convert")


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
    for command in COMMANDS:
        assert f" {command} " in done.stdout


def test_every_command_has_help_with_an_example_and_all_a_version():
    for command in COMMANDS:
        assert f"daskfactor {command} " in succeed(command, "--help")
    assert succeed("--version").split()[0] == "daskfactor"


def test_a_parameter_that_a_verb_gains_is_an_option_with_its_help(monkeypatch):
    source = verb_options.source_of("hold_out").replace(
        "random_seed: int | None = None", "random_seed: int | None = None, folds: float = 2.5"
    )
    source = source.replace(
        "    random_seed\n",
        "    folds\n        Repeats of ``share``, at least 2. Not shown.\n    random_seed\n",
    )
    monkeypatch.setattr(verb_options, "source_of", lambda verb: source)
    app = typer.Typer()
    called = Mock(return_value=({}, "done"))

    class Split(Command):
        verbs: ClassVar = {"hold_out": "folds random_seed"}

        def __call__(self):
            return called(self.arguments("hold_out"))

    app.command()(main.command(Split))
    verb_options.parameters_of.cache_clear()
    runner = CliRunner()
    told = plain(runner.invoke(app, ["--help"], env={"COLUMNS": "200"}).output)
    assert "--folds <float> Repeats of --share, at least 2." in told
    assert "Not shown" not in told
    assert "[default: 2.5]" in told
    assert runner.invoke(app, ["--folds", "3", "--seed", "1"]).output == "done\n"
    called.assert_called_once_with({"folds": 3.0, "random_seed": 1})


@pytest.mark.parametrize("command", ["fit", "estimate-cost"])
def test_a_number_or_a_word_has_no_minimum_in_the_help(command):
    told = CliRunner().invoke(main.app, [command, "--help"], env={"COLUMNS": "200"}).output
    (line,) = (line for line in told.splitlines() if "K|auto" in line)
    assert "x>=" not in line


def test_help_speaks_as_a_shell_does():
    for command in typer.main.get_command(main.app).commands.values():
        for parameter in command.params:
            told = parameter.help or ""
            assert told, (command.name, parameter.name)
            assert not re.search(r"\w=|``|:\w+:`|\bNone\b|\bTrue\b|`", told), (command.name, told)


OPTIONS = """
--beta 2 --dispersion 0.5 --draws 8 --tune 6 --chains 2 --thin 3 --sampler psgrrld --blocks 2
--seed 9 --dtype float64 --executor serial --keep moments --monitor missing --quiet
--init q-transform --starts 2 --device cuda
"""


def test_fit_hands_its_options_on(matrix, sampled):
    succeed(*of_fit(matrix, *OPTIONS.split()))
    (data, model, sampler), options = sampled.call_args
    assert (data.shape, data.grid.blocks, data.dtype) == ((6, 5), 2, np.float64)
    assert (model.n_components, model.beta, model.dispersion) == (3, 2.0, 0.5)
    assert type(sampler) is daskfactor.PSGRRLD
    told = {"draws": 8, "tune": 6, "chains": 2, "thin": 3, "random_seed": 9, "executor": "serial"}
    told |= {"keep": "moments", "monitor": "missing", "init": "q-transform", "starts": 2}
    told |= {"device": "cuda", "progressbar": False, "store": "run.zarr"}
    assert options == told | {"client": None, "overwrite": False}


def test_dispersions_of_counts(matrix, sampled):
    for text, dispersion in (("column", "column"), ("0.5", 0.5)):
        given = ("--dispersion", text, "--quiet")
        succeed(*of_fit(matrix, "--model", "negative-binomial", *given))
        assert sampled.call_args.args[1].dispersion == dispersion
        match = "belongs to --model tweedie or negative-binomial"
        fails(3, match, *of_fit(matrix, "--model", "gaussian", *given))


def test_fit_prints_one_json_object_or_a_table_that_tells_how_to_go_on(matrix, sampled):
    result = call(*of_fit(matrix, "--json"))
    summary = json.loads(result.stdout)
    assert (summary["store"], summary["draws_done"]) == ("run.zarr", 20)
    assert summary["model"]["n_components"] == 3
    assert result.stderr == ""
    assert "daskfactor resume run.zarr" in succeed(*of_fit(matrix))


CODES = dict.fromkeys((errors.DataError, errors.ModelError, OptionError), 3)
CODES |= dict.fromkeys((errors.StoreError, errors.StoreFormatError, FileExistsError), 4)
CODES |= {errors.DivergenceError: 5, errors.EngineError: 1, ZeroDivisionError: 1}


@pytest.mark.parametrize("kind", CODES)
def test_errors_are_one_sentence_and_an_exit_code(matrix, sampled, kind):
    words = (17, "two words", "run.zarr") if kind is FileExistsError else ("two words",)
    sampled.side_effect = kind(*words)
    assert fails(CODES[kind], "two words", *of_fit(matrix)).count("\n") == 1
    assert call(*of_fit(matrix)).stdout == ""
    fails(CODES[kind], "Traceback", *of_fit(matrix, "--debug"))


def test_ctrl_c_says_how_to_go_on(matrix, sampled, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    sampled.side_effect = KeyboardInterrupt()
    fails(130, "before anything was written", *of_fit(matrix))
    (tmp_path / "run.zarr").mkdir()
    fails(130, "to continue, run: daskfactor resume run.zarr", *of_fit(matrix))


def test_usage_errors_are_2_and_bad_values_3(matrix, tmp_path):
    for code, command in (
        (2, ("fit", matrix)),
        (2, of_fit(matrix, "--draws", 0)),
        (2, ("resume", "run.zarr", "--device", "tpu")),
        (2, ("paint",)),
        (3, of_fit(matrix, "--monitor", "all")),
        (3, of_fit(matrix, "--beta", 1.5)),
        (3, of_fit(tmp_path / "none.npy")),
    ):
        fails(code, "", *command)


def test_warnings_are_one_line_on_stderr(matrix, sampled):
    def sample(*arguments, **options):
        warnings.warn("zeros are taken as counts", DataWarning, stacklevel=1)
        return fake_run()

    sampled.side_effect = sample
    result = call(*of_fit(matrix, "--json"))
    assert result.stderr == "note: zeros are taken as counts\n"
    json.loads(result.stdout)


def test_resume_hands_its_options_on(matrix, monkeypatch):
    verb = stand_in(monkeypatch, "resume", return_value=fake_run())
    command = ("resume", "run.zarr", "--json")
    succeed(*command, "--draws", 5, "--data", matrix, "--device", "cuda")
    succeed(*command)
    usual = {"progressbar": True, "executor": "auto", "client": None}
    told = {"draws": 5, "V": str(matrix), "device": "cuda"}
    for done, own in zip(verb.call_args_list, (told, dict.fromkeys(told)), strict=True):
        assert done == (("run.zarr",), usual | own)


def test_info_tells_of_data_draws_and_health(store):
    summary = answer("info", store)
    assert (summary["data"]["n_observed"], summary["diverging"]) == (63, 1)
    assert (summary["draws_done"], summary["draws_kept"]) == (20, 20)
    assert abs(summary["lp_drift"]) < 2
    text = succeed("info", store)
    assert "75.0%" in text
    assert "1 divergences" in text


def test_info_tells_what_has_converged_when_asked(store):
    text = succeed("info", store, "--diagnose")
    assert "2 chains of 20 draws" in text
    assert "log density" in text
    summary = answer("info", store, "--diagnose")
    predictions, found = summary["lights"]["predictions"], summary["convergence"]
    assert predictions["status"] in ("amber", "red")
    assert "Draw about 100 more" in predictions["advice"]
    assert re.search(f"predictions +{predictions['status'].upper()}", succeed("info", store))
    assert found["functionals"]["lp"]["rhat"] > 0.9
    assert found["functionals"]["lp"]["share"] is None


def test_info_of_a_run_without_draws(store, monkeypatch):
    tree = fake_run(keep="moments").filter(lambda node: "stats" not in (node.name or ""))
    tree.attrs |= {"dispersion": None, "draws": 20}
    stand_in(monkeypatch, "open_run", return_value=tree)
    assert "no draws yet" in succeed("info", store)


def test_plot_writes_pictures_of_each_figure_by_its_name(store, tmp_path):
    picture = tmp_path / "run.png"
    made = answer("plot", store, "-o", picture, "--image-shape", "4x3", "-k", 2)
    assert made == {"picture": str(picture)}
    assert picture.read_bytes().startswith(b"\x89PNG")
    fails(3, "", "plot", store, "-o", picture, "--image-shape", "4")
    picture = tmp_path / "run.svg"
    succeed("plot", store, "--figure", "shares", "-o", picture)
    assert picture.read_text().startswith("<?xml")
    assert "top-entries" in succeed("plot", store, "--list")
    match = "no figure 'pie'; use one of components, curves"
    fails(3, match, "plot", store, "--figure", "pie", "-o", picture)
    made = answer("plot", store, "--figure", "all", "-k", 2, "-o", picture)
    assert str(tmp_path / "run-top-entries.svg") in made["pictures"]
    assert all(Path(name).is_file() for name in made["pictures"])
    assert set(made["left_out"]) == {"curves", "maps"}


def test_report_writes_a_page(store, tmp_path):
    page = tmp_path / "run.html"
    succeed("report", store, "-o", page, "--title", "Sites")
    assert "<h1>Sites</h1>" in page.read_text()
    fails(3, "", "report", store, "-o", tmp_path / "run.pdf")


def test_demo_prints_its_scores(tmp_path, monkeypatch):
    images = demos.load_digits()
    erased = np.zeros(images.truth.shape, dtype=bool)
    erased[::3] = True
    scores = [demos.Score("row mean", 0.2, 0.0), demos.Score("posterior mean", 0.1, 2.5)]
    evaluation = (images, erased, scores, 0.91, 0.9, images.truth, images.truth / 9)
    run = Mock(return_value=demos.Evaluation(*evaluation))
    monkeypatch.setattr(demos, "run", run)
    command = ["demo", "digits", "--missing", 0.5]
    command += ["--store", tmp_path / "d.zarr", "-o", tmp_path / "d.png"]
    table = succeed(*command)
    assert run.call_args.kwargs["missing"] == 0.5
    assert "0.1000" in table
    assert "91.0%" in table
    fails(4, "d.png exists already; give another name, or allow --overwrite", *command)
    result = answer(*command, "--overwrite")
    assert result["scores"][1] == {"method": "posterior mean", "error": 0.1, "seconds": 2.5}
    assert (tmp_path / "d.png").exists()


def test_demo_replaces_runs_alone_and_only_when_told_to(tmp_path):
    fails(4, "--overwrite", "demo", "digits", "--store", tmp_path)  # before it works
    target = tmp_path / "notes.zarr"
    zarr.create_group(target, attributes={"inference_library": "another"})
    fails(4, "", "demo", "digits", "--store", target, "--overwrite", "--tune", 1, "--draws", 1)
    assert zarr.open_group(target, mode="r").attrs["inference_library"] == "another"


def test_fit_replaces_a_run_when_told_to(matrix, tmp_path):
    store = tmp_path / "run.zarr"
    command = ("fit", matrix, "--store", store, "-k", 2, "--draws", 2, "--tune", 2, "--quiet")
    succeed(*command)
    assert "overwrite=True" not in fails(4, "--overwrite", *command)
    succeed(*command, "--overwrite", "--seed", 5)
    assert daskfactor.open_run(str(store)).attrs["random_seed"] == "5"


def test_errors_speak_of_options_as_the_shell_has_them(matrix, sampled):
    for sentence, told in (
        ("pass overwrite=True to replace it", "pass --overwrite to replace it"),
        ('say unstored="missing" or unstored="zero"', "say --unstored missing or --unstored zero"),
        ("with allow_empty=True", "with --allow-empty"),
        ("beta=1.5 is outside", "--beta 1.5 is outside"),
        ("nothing=True is an option of ours", "nothing=True is an option of ours"),
        ("pass it again: resume(path, V=...)", "again: daskfactor resume RUN --data FILE"),
        ("or continue it with daskfactor.resume", "or continue it with daskfactor resume"),
        ("pass the path given as store=", "pass the path given as --store"),
        ('or pass as_blocks(V, dtype="float64")', "or pass --dtype float64"),
        ("use PSGLD() or BlockHMC() here", "use --sampler psgld or --sampler blockhmc here"),
        ("pass Nobody() or str()", "pass Nobody() or str()"),
        ("with n_components=5 or a larger n_components.", "with -k 5 or a larger -k."),
        ('n_components="auto" does not go with it', "-k auto does not go with it"),
        ("compare with NegativeBinomialNMF", "compare with --model negative-binomial"),
        ("or pass dispersion=1.0 all the same", "or pass --dispersion 1.0 all the same"),
    ):
        sampled.side_effect = OptionError(sentence)
        fails(3, told, *of_fit(matrix))


def test_samplers_go_by_the_beginning_of_their_names(matrix, sampled):
    for name in ("psgld", "PSGLD", "langevin", "LangevinDynamics", "sgl", "gib"):
        succeed(*of_fit(matrix, "--sampler", name))
        assert type(sampled.call_args.args[2]).__name__.lower().startswith(name.lower())
    for name in ("nuts", "psg", ""):
        fails(2, "PSGLD", *of_fit(matrix, "--sampler", name))


def test_info_says_how_to_go_on(store, monkeypatch):
    for done, more in ((20, " --draws 500"), (7, "")):
        tree = fake_run(draws=done)
        tree.attrs["draws"] = 20
        stand_in(monkeypatch, "open_run", return_value=tree)
        found = answer("info", store)["resume"]
        assert found == f"daskfactor resume {store}{more}"
        assert ("to finish" in succeed("info", store)) == (done == 7)


def test_what_a_run_would_take(matrix):
    command = ["estimate-cost", matrix, "-k", 3, "--network"]
    options = ["--draws", 20, "--tune", 20, "--blocks", 2, "--workers", 2, "--threads", 1]
    found = answer(*command, "1 Gbit/s", *options)
    known = {"draws": 20, "tune": 20, "blocks": 2, "workers": 2, "lanes": 1, "store": True}
    known["network"] = 1.25e8
    cost = daskfactor.estimate_cost(np.ones((6, 5)), daskfactor.TweedieNMF(3), **known)
    assert (found["sent"], found["state"], found["store"]) == (cost.sent, cost.state, cost.store)
    assert found["sent"] > 0
    fails(3, "network is bytes a second", *command, "fast")


# -- select-rank -----------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch):
    def select_rank(V, model, ranks, method, held_out, **options):
        found = [Evidence(-abs(r - 2) * 5.0, 0.5, 0.1, xr.Dataset()) for r in ranks]
        fits = [rank.RankFit(own, 1.0, None) for own in found]
        return rank._table(list(ranks), fits, method or daskfactor.ThermodynamicIntegration())

    return stand_in(monkeypatch, "select_rank", side_effect=select_rank)


def test_select_rank_hands_its_options_on(asked, matrix, tmp_path):
    picture = tmp_path / "ranks.png"
    arguments = [matrix, "--ranks", "1:3", "--beta", "0.5", "--dispersion", "0.3", "--quiet"]
    arguments += ["--held-out", "0", "--temperatures", "6", "--seed", "4", "-o", str(picture)]
    assert "largest at rank 2" in succeed("select-rank", *arguments)
    (V, model, ranks, method, held_out), options = asked.call_args
    assert np.load(V).shape == (6, 5)
    assert (model.beta, model.dispersion, list(ranks)) == (0.5, 0.3, [1, 2, 3])
    assert (method.temperatures, held_out, options["random_seed"]) == (6, 0.0, 4)
    assert options["progressbar"] is False
    assert picture.exists()


def test_a_table_of_ranks_goes_into_a_report(asked, matrix, tmp_path, monkeypatch):
    table, page = tmp_path / "ranks.nc", tmp_path / "run.html"
    succeed("select-rank", matrix, "--ranks", "1:3", "-q", "-o", table)
    stand_in(monkeypatch, "open_run", return_value=fake_run())
    told = ["report", "run.zarr", "-o", page, "--evidence"]
    succeed(*told, table)
    assert "The evidence is largest for 2 components" in page.read_text()
    fails(3, "must be an .nc file that select-rank wrote", *told, matrix)


def test_the_best_rank_as_json_and_bad_ranks(asked, matrix):
    values = answer("select-rank", matrix, "--ranks", "2,4", "-q")
    assert (values["rank"], values["best"]) == ([2, 4], 2)
    for ranks in ("3:1", "a", "1:", "1,,2", "0:3", "0,2"):
        fails(3, "FIRST:LAST", "select-rank", matrix, "--ranks", ranks)


def test_ranks_of_an_allocation_model(asked, matrix):
    arguments = [matrix, "--ranks", "1:3", "--model", "allocation", "--concentration", "2", "-q"]
    succeed("select-rank", *arguments)
    _, model, ranks, method, held_out = asked.call_args.args
    assert model == daskfactor.AllocationModel.nmf(1, concentration=2.0)
    assert (list(ranks), held_out) == ([1, 2, 3], "auto")
    assert method == daskfactor.SequentialMonteCarlo()
    succeed("select-rank", *arguments, "--bound")
    assert asked.call_args.args[3] == daskfactor.VariationalBayes()


def test_options_of_the_other_model_are_refused(asked, matrix):
    for wrong in (
        ["--concentration", "2"],
        ["--bound"],
        ["--model", "allocation", "--beta", "1"],
        ["--model", "allocation", "--held-out", "0.1"],
    ):
        fails(3, "belongs to --model", "select-rank", matrix, "--ranks", "1", "-q", *wrong)
        assert not asked.called
