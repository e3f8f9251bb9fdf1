import pickle
import subprocess
import sys

import pytest

import daskfactor as dfac

pytestmark = pytest.mark.libraries


def test_the_package_shows_its_public_names_and_nothing_else():
    names = dir(dfac)
    assert {"sample", "PSGLD", "TweedieNMF", "open_run", "plots"} <= set(names)
    assert not {"Any", "import_module", "TYPE_CHECKING", "lazy_loader"} & set(names)
    assert all(getattr(dfac, name) is not None for name in names)
    assert names == sorted(dfac.__all__)


def test_importing_the_package_loads_nothing_heavy():
    code = (
        "import sys, daskfactor\n"
        "heavy = {'numpy', 'numba', 'dask', 'distributed', 'xarray', 'zarr', 'scipy'}\n"
        "sys.exit(' '.join(sorted(heavy & set(sys.modules))) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_public_classes_can_be_pickled():
    model = dfac.TweedieNMF(3)
    assert pickle.loads(pickle.dumps(model)) == model
