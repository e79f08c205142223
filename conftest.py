"""``pytest --slow``: the long property, parity and fuzz runs, which a plain ``pytest`` leaves out."""

import pytest
from hypothesis import HealthCheck, settings

QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
settings.register_profile("ci", max_examples=50, deadline=None, suppress_health_check=QUIET)
settings.register_profile("slow", max_examples=2000, deadline=None, suppress_health_check=QUIET)


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow, with the long Hypothesis profile")


def pytest_configure(config):
    settings.load_profile("slow" if config.getoption("--slow") else "ci")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--slow"):
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="long run; pytest --slow runs it"))
