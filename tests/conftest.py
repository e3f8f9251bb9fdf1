import os

from hypothesis import settings

# Derandomized in CI: a run there fails because of a change, never because of luck.
settings.register_profile("dev", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")
