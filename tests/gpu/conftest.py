"""What the gpu tests measured, shown after the run and recorded where that is asked for."""

import pytest

from tests.gpu import steps

MEASURED = "gpu"


@pytest.fixture
def report(request, record_property):
    """A function that takes each ``Rate`` or line that a test measured."""

    def take(measured):
        record_property(MEASURED, str(measured))
        if isinstance(measured, steps.Rate) and request.config.option.record:
            steps.record(measured)

    return take


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what was measured."""
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    lines = [
        value
        for report in reports
        if getattr(report, "when", None) == "call"
        for name, value in report.user_properties
        if name == MEASURED
    ]
    if lines:
        terminalreporter.write_sep("=", "measured")
        for line in lines:
            terminalreporter.write_line(line)
