"""Every run that collects this folder says what has become of the rows."""

from seed_rows import seed_rows


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(str(seed_rows()))
