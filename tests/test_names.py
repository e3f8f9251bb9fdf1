import pytest

import daskfactor as dfac

pytestmark = pytest.mark.libraries


def test_the_package_shows_its_public_names_and_nothing_else():
    names = dir(dfac)
    assert {"sample", "PSGLD", "TweedieNMF", "open_run", "plots"} <= set(names)
    assert not {"Any", "import_module", "TYPE_CHECKING", "lazy_loader"} & set(names)
    assert all(getattr(dfac, name) is not None for name in names)
    assert names == sorted(dfac.__all__)
