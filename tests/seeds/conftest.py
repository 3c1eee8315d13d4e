"""Every run that collects this folder prints a summary of the seed behaviours it has tested."""

from seed_rows import HERE, outcomes_of, seed_rows

OUTCOMES = ('passed', 'failed', 'error', 'skipped', 'xfailed', 'xpassed')


def pytest_terminal_summary(terminalreporter):
    root = terminalreporter.config.rootpath
    reports = [
        (report.nodeid, outcome)
        for outcome in OUTCOMES
        for report in terminalreporter.stats.get(outcome, ())
        if (root / report.nodeid.partition('::')[0]).parent == HERE
    ]
    terminalreporter.write_line(str(outcomes_of(reports, seed_rows())))
