"""Parametrises every test that takes ``run`` over all manifests."""

from runs import runs


def pytest_generate_tests(metafunc):
    if "run" in metafunc.fixturenames:
        metafunc.parametrize("run", list(runs()), ids=str)
